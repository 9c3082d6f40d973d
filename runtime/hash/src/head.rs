//! [`Head`]: what a stack's output means.

use crate::error::{self, HashError};
use crate::limits::{MAX_BLOCKS, MAX_SHIFT};
use crate::quantiles::Quantiles;
use crate::signals::SignalTables;

/// Blocks whose codes are interleaved: the bytes of a vector.
pub(crate) const GROUP: usize = 32;

/// Largest size of an element of a code of levels.
pub const MAX_LEVEL: i8 = 7;

/// What a stack's output means.
#[derive(Clone, Debug, PartialEq)]
pub enum Head {
    /// Nothing more: its bits are the result.
    Code,
    /// A class for each index of the last layer, which has no table. One stack.
    Class(Vec<u32>),
    /// A bin for each index of the last layer, which has no table. One stack.
    Value(Quantiles),
    /// A score for each block of neurons.
    Blocks(BlockHead),
}

impl Head {
    pub(crate) fn check(&self, code_bits: usize, index: Option<usize>) -> Result<(), HashError> {
        let bins = |what| {
            index
                .map(|tau| 1usize << tau)
                .ok_or_else(|| HashError::invalid(what, "a code", "one index: no table behind it"))
        };
        match self {
            Head::Code => Ok(()),
            Head::Class(labels) => {
                error::same("labels", labels.len(), bins("input of classification")?)
            }
            Head::Value(quantiles) => quantiles.check(bins("input of regression")?),
            Head::Blocks(head) => head.check(code_bits),
        }
    }
}

/// What the blocks' signs are multiplied with.
#[derive(Clone, Debug, PartialEq)]
pub enum BlockCode {
    /// The code's signs: XNOR and count.
    Signs,
    /// The sizes of the first layer's sums as well: element j is round(sum_j * gain_j), ties to even, within -7 to 7.
    /// Needs integer planes and no tables. One gain a bit.
    Levels(Vec<f32>),
}

/// Scores blocks: score = scale * dot(code, block's signs) + (offset << shift), in integers.
///
/// The offset is the block's bias, or what [`crate::Signals`] has made of it. Between layers and with thresholds
/// trained in f32 compare score * unit.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockHead {
    /// Signs a block has: bits of the code.
    pub bits: usize,
    /// What they are multiplied with.
    pub code: BlockCode,
    /// The blocks' signs, 32 blocks at a time: byte k of all 32, then byte k + 1. Blocks that fill up the last group
    /// may hold anything.
    pub signs: Vec<u8>,
    /// One a block.
    pub scales: Vec<i16>,
    /// One a block: it holds the frequency prior as well.
    pub biases: Vec<i16>,
    /// Left shift of biases: at most 8.
    pub shift: u32,
    /// What a score of 1 is in the units of training. Positive.
    pub unit: f32,
    /// Use of past activity, if any.
    pub signals: Option<SignalTables>,
}

impl BlockHead {
    /// Interleaves blocks' codes: `codes` is one code of `bits` signs (see [`crate::bits`]) after the other.
    ///
    /// # Panics
    /// If `codes` is not a whole number of codes.
    #[must_use]
    pub fn interleave(codes: &[u64], bits: usize) -> Vec<u8> {
        let (words, bytes) = (crate::bits::words(bits), bits.div_ceil(8));
        assert!(codes.len().is_multiple_of(words), "whole codes");
        let blocks = codes.len() / words;
        let mut signs = vec![0; blocks.div_ceil(GROUP) * GROUP * bytes];
        for (block, code) in codes.chunks_exact(words).enumerate() {
            let group = &mut signs[block / GROUP * GROUP * bytes..];
            for k in 0..bytes {
                group[k * GROUP + block % GROUP] = crate::bits::byte(code, k);
            }
        }
        signs
    }

    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.scales.len()
    }

    /// Sign `i` of block `block`, +1 or -1.
    #[must_use]
    pub fn sign(&self, block: usize, i: usize) -> i32 {
        let group = &self.signs[block / GROUP * GROUP * self.bits.div_ceil(8)..];
        i32::from(group[i / 8 * GROUP + block % GROUP] >> (i % 8) & 1) * 2 - 1
    }

    /// Bytes that stay in memory, without the state of [`crate::Signals`].
    #[must_use]
    pub fn bytes(&self) -> usize {
        let gains = if let BlockCode::Levels(gains) = &self.code { 4 * gains.len() } else { 0 };
        let initial = self.signals.as_ref().map_or(0, |s| s.initial.len());
        self.signs.len() + 2 * (self.scales.len() + self.biases.len()) + gains + initial
    }

    fn check(&self, code_bits: usize) -> Result<(), HashError> {
        error::same("signs of a block", self.bits, code_bits)?;
        error::within("blocks", self.blocks(), 1, MAX_BLOCKS)?;
        error::same("biases of blocks", self.biases.len(), self.blocks())?;
        let groups = self.blocks().div_ceil(GROUP);
        let wanted = groups * GROUP * self.bits.div_ceil(8);
        error::same("bytes of the blocks' signs", self.signs.len(), wanted)?;
        error::within("shift of biases", self.shift as usize, 0, MAX_SHIFT as usize)?;
        if !(self.unit.is_finite() && self.unit > 0.0) {
            return Err(HashError::invalid("unit of scores", self.unit, "a positive number"));
        }
        if let BlockCode::Levels(gains) = &self.code {
            error::same("gains of levels", gains.len(), self.bits)?;
            error::finite("gains of levels", gains)?;
        }
        match &self.signals {
            Some(signals) => signals.check(self.blocks()),
            None => Ok(()),
        }
    }
}
