//! Which blocks each token requests, replayed from recorded activations.

use crate::error::Result;
use crate::stages::activations::{Activations, Chunk, Params};
use ls_bundle::ids::{BlockId, LayerId};
use ls_cache::{AccessTrace, Blocks};

/// The only layer of a trace of one layer.
pub(super) const ONE: LayerId = LayerId(0);

/// One layer's requests: of the windows that teach, and of those that are replayed.
#[derive(Debug)]
pub(super) struct Requests {
    pub(super) taught: AccessTrace,
    pub(super) replayed: AccessTrace,
}

impl Requests {
    /// Of each token the blocks of its `active` strongest neurons; `order` is the neuron at each place of the layer,
    /// cut into blocks of `block_neurons`. Of every `holdout_every` windows the last one is replayed.
    pub(super) fn read(
        activations: &Activations,
        layer: u32,
        order: &[u32],
        block_neurons: u32,
        active: usize,
        holdout_every: u32,
    ) -> Result<Requests> {
        let params = activations.params();
        let count = params.neurons.div_ceil(block_neurons);
        let mut block_of = vec![BlockId(0); order.len()];
        for (&neuron, place) in order.iter().zip(0u32..) {
            block_of[neuron as usize] = BlockId(place / block_neurons);
        }
        let windows = params.tokens / u64::from(params.window);
        let replayed_tokens = windows / u64::from(holdout_every) * u64::from(params.window);
        let blocks = Blocks::even(1, count);
        let room = |tokens: u64| AccessTrace::with_capacity(blocks.clone(), tokens as usize);
        let (mut taught, mut replayed) =
            (room(params.tokens - replayed_tokens), room(replayed_tokens));
        for chunk in activations.layer(layer) {
            let chunk = chunk?;
            for token in 0..chunk.tokens() {
                let held_out = held_out(params, &chunk, token, holdout_every);
                let trace = if held_out { &mut replayed } else { &mut taught };
                let codes: Vec<u16> = chunk.codes(token).iter().map(|&code| code.into()).collect();
                trace.push(strongest(&codes, active).map(|neuron| block_of[neuron]));
            }
        }
        Ok(Requests { taught, replayed })
    }

    /// How often each block is requested in the windows that teach.
    pub(super) fn frequencies(&self) -> Vec<u32> {
        let mut counts = vec![0; self.taught.blocks().len()];
        for token in 0..self.taught.tokens() {
            self.taught.set(token, ONE).for_each(|block| counts[block.index()] += 1);
        }
        counts
    }
}

/// Whether a token is in a window that is replayed: of every `holdout_every` windows the last.
pub(super) fn held_out(params: &Params, chunk: &Chunk, token: usize, holdout_every: u32) -> bool {
    let window = (chunk.first_token + token as u64) / u64::from(params.window);
    (window + 1).is_multiple_of(u64::from(holdout_every))
}

/// The `count` places with the largest codes; of equal ones the first.
pub(super) fn strongest(codes: &[u16], count: usize) -> impl Iterator<Item = usize> + use<'_> {
    let mut held = vec![0usize; usize::from(codes.iter().copied().max().unwrap_or(0)) + 1];
    codes.iter().for_each(|&code| held[usize::from(code)] += 1);
    let (mut above, mut least) = (0, held.len() - 1);
    while least > 0 && above + held[least] < count {
        above += held[least];
        least -= 1;
    }
    let mut ties = count.saturating_sub(above);
    codes.iter().enumerate().filter_map(move |(place, &code)| {
        let code = usize::from(code);
        let tie = code == least && ties > 0;
        ties -= usize::from(tie);
        (code > least || tie).then_some(place)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_strongest_are_as_many_as_asked() {
        let of = |count| strongest(&[3, 9, 3, 0, 9, 3], count).collect::<Vec<_>>();
        assert_eq!(of(1), [1]);
        assert_eq!(of(2), [1, 4]);
        assert_eq!(of(4), [0, 1, 2, 4]);
        assert_eq!(of(6), [0, 1, 2, 3, 4, 5]);
    }
}
