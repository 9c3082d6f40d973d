//! [`Coactivity`]: which of a layer's neurons are active in which tokens, and so how often any two act together.
//!
//! A neuron is *active* in a token if it is among the token's strongest. Its tokens are a set of bits, so how often two
//! act together is one `and` and a count of bits; 14336 neurons over 120k tokens take 215 MB. Every so many tokens one
//! is *held out*: it measures what the others have taught.

use crate::error::Result;
use crate::stages::activations::Activations;
use ls_hash::Kernels;

/// The tokens of each neuron of a layer.
#[derive(Debug)]
pub(crate) struct Coactivity {
    tokens: usize,
    words: usize,
    /// Neurons x words: bit t mod 64 of word t / 64 says whether the neuron is active in token t.
    bits: Vec<u64>,
}

/// A layer's coactivity in the tokens that teach and in those that measure.
#[derive(Debug)]
pub(crate) struct Split {
    /// To learn from.
    pub(crate) taught: Coactivity,
    /// To measure on.
    pub(crate) held_out: Coactivity,
}

impl Split {
    /// Reads a layer. The `share` strongest neurons of a token are active; of `holdout_every` tokens the last is held
    /// out.
    pub(crate) fn read(
        activations: &Activations,
        layer: u32,
        share: f64,
        holdout_every: u32,
    ) -> Result<Split> {
        let params = activations.params();
        let active = (f64::from(params.neurons) * share).round().max(1.0) as usize;
        let tokens = usize::try_from(params.tokens).expect("tokens fit in memory");
        let held = tokens / holdout_every as usize;
        let mut taught = Coactivity::new(params.neurons, tokens - held);
        let mut held_out = Coactivity::new(params.neurons, held);
        for chunk in activations.layer(layer) {
            let chunk = chunk?;
            for token in 0..chunk.tokens() {
                let number = chunk.first_token + token as u64 + 1;
                let measures = number.is_multiple_of(u64::from(holdout_every));
                let into = if measures { &mut held_out } else { &mut taught };
                into.push(chunk.codes(token), active);
            }
        }
        Ok(Split { taught, held_out })
    }

    /// Memory that a layer takes.
    pub(crate) fn bytes(activations: &Activations) -> u64 {
        let params = activations.params();
        params.tokens * u64::from(params.neurons) / 8
    }
}

impl Coactivity {
    /// Of no token yet, with room for `tokens`.
    pub(crate) fn new(neurons: u32, tokens: usize) -> Coactivity {
        let words = tokens.div_ceil(64);
        Coactivity { tokens: 0, words, bits: vec![0; neurons as usize * words] }
    }

    /// Adds a token whose neurons have these codes; the `active` largest count, the first of equals.
    pub(crate) fn push(&mut self, codes: &[u8], active: usize) {
        assert!(self.tokens < 64 * self.words, "no room for another token");
        let mut keys: Vec<u32> = codes
            .iter()
            .zip(0..)
            .map(|(&code, neuron)| u32::from(255 - code) << 24 | neuron)
            .collect();
        if active < keys.len() {
            keys.select_nth_unstable(active);
        }
        for key in keys.iter().take(active) {
            let neuron = (key & 0x00ff_ffff) as usize;
            self.bits[neuron * self.words + self.tokens / 64] |= 1 << (self.tokens % 64);
        }
        self.tokens += 1;
    }

    /// Tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Neurons.
    pub(crate) fn neurons(&self) -> usize {
        self.bits.len() / self.words.max(1)
    }

    /// The tokens of all neurons, one after another.
    pub(crate) fn rows(&self) -> &[u64] {
        &self.bits
    }

    /// The tokens of a neuron.
    pub(crate) fn row(&self, neuron: usize) -> &[u64] {
        &self.bits[neuron * self.words..][..self.words]
    }

    /// Neurons read in vain over active ones, if neurons lie in this order and any active one brings its block of
    /// `block` neurons.
    pub(crate) fn redundancy(&self, order: &[u32], block: usize) -> f64 {
        let (mut read, mut active) = (0, 0);
        let mut tokens = vec![0u64; self.words];
        for neurons in order.chunks(block) {
            tokens.fill(0);
            for &neuron in neurons {
                let row = self.row(neuron as usize);
                tokens.iter_mut().zip(row).for_each(|(all, word)| *all |= word);
                active += u64::from(count(row));
            }
            read += neurons.len() as u64 * u64::from(count(&tokens));
        }
        read as f64 / active.max(1) as f64 - 1.0
    }
}

/// Rows that are held against all others together, so that those come out of memory once for all of them.
pub(crate) const STRIP: usize = 64;

/// In how many tokens each of a strip of `rows`, from `first` on, is active together with each of all rows, which have
/// `counts` tokens. `out` is rows of the strip x all rows.
pub(crate) fn together_in_strip(rows: &[u64], counts: &[u32], first: usize, out: &mut [u32]) {
    let (all, kernels) = (counts.len(), Kernels::detect());
    let words = rows.len() / all;
    let row = |number: usize| &rows[number * words..][..words];
    for tile in (0..all).step_by(STRIP) {
        let size = STRIP.min(all - tile);
        let others = &rows[tile * words..][..size * words];
        for (number, out) in (first..).zip(out.chunks_exact_mut(all)) {
            let out = &mut out[tile..][..size];
            kernels.distances(others, row(number), out);
            for (out, count) in out.iter_mut().zip(&counts[tile..]) {
                *out = (counts[number] + count - *out) / 2;
            }
        }
    }
}

/// Number of bits that are set.
pub(crate) fn count(bits: &[u64]) -> u32 {
    bits.iter().map(|word| word.count_ones()).sum()
}

/// Number of bits that are set in both.
pub(crate) fn together(a: &[u64], b: &[u64]) -> u32 {
    a.iter().zip(b).map(|(a, b)| (a & b).count_ones()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redundancy_counts_what_is_read_in_vain() {
        let sets: [&[u32]; 3] = [&[0, 1], &[0, 2], &[4, 3]];
        let mut found = Coactivity::new(5, 3);
        for set in sets {
            let codes: Vec<u8> = (0..5).map(|n| if set.contains(&n) { 200 } else { 3 }).collect();
            found.push(&codes, 2);
        }
        let order = [0, 1, 2, 3, 4];
        // Blocks {0 1} {2 3} {4}: 2, 4 and 3 neurons are read for 2 each.
        assert_eq!(found.redundancy(&order, 2), 9.0 / 6.0 - 1.0);
        assert_eq!(found.redundancy(&order, 1), 0.0);
        assert_eq!(found.redundancy(&[0, 1, 4, 3, 2], 2), 7.0 / 6.0 - 1.0);
        assert_eq!(found.redundancy(&order, 5), 15.0 / 6.0 - 1.0);
    }

    #[test]
    fn of_equal_codes_the_first_neuron_counts() {
        let mut found = Coactivity::new(3, 65);
        (0..65).for_each(|_| found.push(&[7, 9, 7], 2));
        assert_eq!((0..3).map(|n| count(found.row(n))).collect::<Vec<_>>(), [65, 65, 0]);
        assert_eq!(together(found.row(0), found.row(1)), 65);
        let mut strip = [0; 6];
        together_in_strip(found.rows(), &[65, 65, 0], 1, &mut strip);
        assert_eq!(strip, [65, 65, 0, 0, 0, 0]);
    }

    #[test]
    fn a_strip_counts_what_each_pair_counts() {
        let mut found = Coactivity::new(150, 200);
        for token in 0..200usize {
            let codes: Vec<u8> = (0..150).map(|n| ((n * 7 + token * token) % 251) as u8).collect();
            found.push(&codes, 40);
        }
        let counts: Vec<u32> = (0..150).map(|n| count(found.row(n))).collect();
        for first in [0, STRIP, 2 * STRIP] {
            let mut strip = vec![0; STRIP.min(150 - first) * 150];
            together_in_strip(found.rows(), &counts, first, &mut strip);
            for (place, &found_together) in strip.iter().enumerate() {
                let (a, b) = (first + place / 150, place % 150);
                assert_eq!(found_together, together(found.row(a), found.row(b)), "{a} {b}");
            }
        }
    }
}
