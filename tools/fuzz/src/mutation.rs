//! Hostile bytes from good ones: the damage that parsers are known to fall for.

use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::ops::Range;

/// Inputs do not grow beyond so many bytes.
pub const MAX_BYTES: usize = 256 << 10;
/// Most changes of one input.
const MAX_CHANGES: u32 = 6;
/// Longest range that is moved, copied or taken away.
const MAX_RANGE: usize = 512;
/// Most copies of a range: deep nesting is made of them.
const MAX_COPIES: usize = 4096;

/// What is known about the bytes of a target.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shape<'a> {
    /// Words of its language, for texts.
    pub words: &'a [&'a str],
    /// Its parts; changes stay in one of them. None: all of it is one part.
    pub parts: &'a [Range<usize>],
    /// Most changes keep the length, as one that does not would be found at once.
    pub rigid: bool,
}

/// Makes damage from a seed.
#[derive(Debug)]
pub struct Mutator(Xoshiro256PlusPlus);

impl Mutator {
    /// The mutator of input `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Mutator {
        Mutator(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    /// A random number below `end`, or 0.
    pub fn below(&mut self, end: usize) -> usize {
        if end == 0 { 0 } else { self.0.random_range(0..end) }
    }

    fn chance(&mut self, one_in: u32) -> bool {
        self.0.random_range(0..one_in) == 0
    }

    /// One of `corpus` with some changes.
    pub fn input<'s>(&mut self, corpus: &[Vec<u8>], shape: impl Fn(usize) -> Shape<'s>) -> Vec<u8> {
        let index = self.below(corpus.len());
        let mut bytes = corpus[index].clone();
        let shape = shape(index);
        // Few changes get furthest.
        let mut changes = 1;
        while changes < MAX_CHANGES && self.chance(2) {
            changes += 1;
        }
        for _ in 0..changes {
            let other = self.below(corpus.len());
            self.change(&mut bytes, &corpus[other], &shape);
        }
        bytes.truncate(MAX_BYTES);
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>, other: &[u8], shape: &Shape<'_>) {
        let part = match shape.parts {
            [] => 0..bytes.len(),
            parts => parts[self.below(parts.len())].clone(),
        };
        let part = part.start.min(bytes.len())..part.end.min(bytes.len());
        if part.is_empty() {
            return bytes.push(self.0.random());
        }
        let resizes = if shape.rigid { self.chance(16) } else { self.chance(2) };
        match (shape.words.is_empty(), resizes) {
            (true, false) => self.overwrite(bytes, part, other),
            (false, false) => self.reword(bytes, part, shape.words),
            (true, true) => self.resize(bytes, part, other),
            (false, true) if self.chance(2) => {
                let word = shape.words[self.below(shape.words.len())];
                let at = part.start + self.below(part.len());
                bytes.splice(at..at, word.bytes());
            }
            (false, true) => self.resize(bytes, part, other),
        }
    }

    /// A change that keeps the length.
    fn overwrite(&mut self, bytes: &mut [u8], part: Range<usize>, other: &[u8]) {
        let at = part.start + self.below(part.len());
        match self.below(8) {
            0 => bytes[at] ^= 1 << self.below(8),
            1 => bytes[at] = [0, 1, 0x7F, 0x80, 0xFF, self.0.random()][self.below(6)],
            2 => {
                let (from, to) = (self.range(&part), self.range(&part));
                let len = from.len().min(to.len());
                let copy = bytes[from][..len].to_vec();
                bytes[to.start..][..len].copy_from_slice(&copy);
            }
            3 if !other.is_empty() => {
                let from = self.range(&(0..other.len()));
                let len = from.len().min(part.end - at);
                bytes[at..at + len].copy_from_slice(&other[from][..len]);
            }
            _ => self.integer(bytes, &part),
        }
    }

    /// Overwrites what may be a little-endian integer by one that is known to hurt.
    fn integer(&mut self, bytes: &mut [u8], part: &Range<usize>) {
        let width = [1, 2, 4, 8][self.below(4)];
        if part.len() < width {
            return;
        }
        let aligned = !self.chance(4);
        // Small numbers in wide fields are counts, lengths and offsets: a few tries to find one.
        let mut at = part.start;
        for _ in 0..8 {
            at = part.start + self.below(part.len() - width + 1);
            if aligned {
                at = (at / width * width).max(part.start);
            }
            let field = &bytes[at..at + width];
            if field.iter().any(|&byte| byte != 0)
                && field[width.div_ceil(2)..] == [0; 8][..width / 2]
            {
                break;
            }
        }
        let mut old = [0; 8];
        old[..width].copy_from_slice(&bytes[at..at + width]);
        let new = self.hurtful(u64::from_le_bytes(old), bytes.len() as u64, 8 * width as u32);
        bytes[at..at + width].copy_from_slice(&new.to_le_bytes()[..width]);
    }

    fn hurtful(&mut self, old: u64, len: u64, bits: u32) -> u64 {
        let power = 1u64 << self.below(bits as usize);
        let most = u64::MAX >> (64 - bits);
        let small = self.0.random_range(0..17);
        let choices = [
            0,
            1,
            most,
            most / 2,
            most / 2 + 1,
            most - small,
            power,
            power - 1,
            len,
            len.wrapping_sub(small),
            old.wrapping_add(1),
            old.wrapping_sub(1),
            old.wrapping_mul(2),
            old / 2,
            old.wrapping_add(small << 2),
            old ^ power,
            self.0.random(),
            f32::NAN.to_bits().into(),
            f32::INFINITY.to_bits().into(),
            f64::NAN.to_bits(),
        ];
        choices[self.below(choices.len())]
    }

    /// A change of the length.
    fn resize(&mut self, bytes: &mut Vec<u8>, part: Range<usize>, other: &[u8]) {
        let at = part.start + self.below(part.len() + 1);
        match self.below(8) {
            0 => bytes.truncate(at),
            1 | 2 => drop(bytes.drain(self.range(&part))),
            3 => {
                let copy = bytes[self.range(&part)].to_vec();
                bytes.splice(at..at, copy);
            }
            4 if !other.is_empty() => {
                let from = self.range(&(0..other.len()));
                bytes.splice(at..at, other[from].iter().copied());
            }
            5 => {
                let (byte, count) = (self.0.random(), self.below(MAX_RANGE));
                bytes.splice(at..at, std::iter::repeat_n(byte, count));
            }
            6 if self.chance(8) => {
                let from = self.range(&part);
                let copy = bytes[from.start..from.end.min(from.start + 8)].to_vec();
                let copies = self.below(MAX_COPIES);
                bytes.splice(at..at, copy.repeat(copies));
            }
            _ => {
                let insert: Vec<u8> = (0..1 + self.below(16)).map(|_| self.0.random()).collect();
                bytes.splice(at..at, insert);
            }
        }
    }

    /// A change of a text: a word or a number instead of another, or two places swapped.
    fn reword(&mut self, bytes: &mut Vec<u8>, part: Range<usize>, words: &[&str]) {
        let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-+".contains(byte);
        let at = part.start + self.below(part.len());
        let Some(start) = bytes[at..part.end].iter().position(is_word).map(|skip| at + skip) else {
            return bytes[at] = self.0.random();
        };
        let len = bytes[start..part.end].iter().position(|byte| !is_word(byte));
        let end = len.map_or(part.end, |len| start + len);
        let numeric =
            bytes[start..end].iter().all(|byte| byte.is_ascii_digit() || b".-e+".contains(byte));
        let new = match self.below(8) {
            0..4 if numeric => self.number(),
            4 => bytes[self.range(&part)].to_vec(),
            5 => {
                bytes[at] ^= 1 << self.below(8);
                return;
            }
            _ => words[self.below(words.len())].as_bytes().to_vec(),
        };
        bytes.splice(start..end, new);
    }

    fn number(&mut self) -> Vec<u8> {
        let bits = [8, 16, 32, 64][self.below(4)];
        let (old, len) = (self.0.random_range(0..300), self.0.random_range(0..4096));
        let number = self.hurtful(old, len, bits);
        match self.below(8) {
            0 => format!("-{number}"),
            1 => format!("{number}.5"),
            2 => format!("{number}e{}", self.below(400)),
            3 => format!("1e-{}", self.below(400)),
            _ => number.to_string(),
        }
        .into_bytes()
    }

    /// A range within `part`, mostly short.
    fn range(&mut self, part: &Range<usize>) -> Range<usize> {
        let start = part.start + self.below(part.len());
        let most = (part.end - start).min([4, 16, 64, MAX_RANGE][self.below(4)]);
        start..start + 1 + self.below(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_is_known_by_its_number_and_most_differ() {
        let corpus = vec![(0..=255).collect::<Vec<u8>>(), b"{\"a\": [1, 2, 300]}".to_vec()];
        let shapes = [Shape::default(), Shape { words: &["null", "[["], ..Shape::default() }];
        let input = |seed| Mutator::new(seed).input(&corpus, |index| shapes[index]);
        let inputs: std::collections::BTreeSet<Vec<u8>> = (0..1000).map(input).collect();
        // Small changes of short inputs meet each other.
        assert!(inputs.len() > 900, "{}", inputs.len());
        assert!((0..100).all(|seed| input(seed) == input(seed)));
    }

    #[test]
    fn rigid_shapes_mostly_keep_their_length_and_parts_their_bounds() {
        let corpus = vec![vec![7; 1000]];
        let shape = Shape { rigid: true, parts: &[100..150, 150..200], ..Shape::default() };
        let inputs = (0..500).map(|seed| Mutator::new(seed).input(&corpus, |_| shape));
        let (kept, resized): (Vec<_>, Vec<_>) = inputs.partition(|input| input.len() == 1000);
        assert!(kept.len() > 350 && !resized.is_empty(), "{} kept", kept.len());
        let outside =
            |input: &Vec<u8>| input[..100].iter().chain(&input[200..]).any(|&byte| byte != 7);
        assert!(!kept.iter().any(outside));
    }
}
