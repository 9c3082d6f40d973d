//! [`Model::pack_blocks`] and [`Model::pack_index`]: from a trained model to the tables that `ls-hash` runs.

use super::features::Features;
use super::loss::BlockTargets;
use super::stack::{HeadShape, Model, Shape};
use crate::error::{PrepError, Result};
use crate::train::fault;
use candle_core::Tensor;
use ls_hash::{
    BinaryHash, BlockCode, BlockHead, Head, Input, Planes, Quantiles, Scaling, SignalTables,
    StackTables, Table, bits,
};

/// The largest factor of a score: 11 bits, which leave room for sums.
const LARGEST_SCALE: f32 = 1023.0;
/// Largest bias, before what past activity adds.
const LARGEST_BIAS: f32 = 16000.0;

/// How past activity enters a head of blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// A step's share of the fast mean and of the slow one.
    pub rates: [f64; 2],
    /// Mean activity of each block, 0 to 1.
    pub initial: Vec<f32>,
}

/// Behind which the last layer's index is read.
#[derive(Clone, Debug, PartialEq)]
pub enum Meaning {
    /// The class of each index.
    Classes(Vec<u32>),
    /// What the index's bin means.
    Bins(Quantiles),
}

fn floats(tensor: &Tensor) -> candle_core::Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

/// Rows of signs, each packed into whole words.
fn packed_rows(signs: &Tensor) -> candle_core::Result<Vec<u64>> {
    let (rows, inputs) = signs.dims2()?;
    let words = bits::words(inputs);
    let mut packed = vec![0; rows * words];
    for (row, signs) in packed.chunks_exact_mut(words).zip(signs.to_vec2::<f32>()?) {
        bits::pack(signs.into_iter().map(|sign| sign >= 0.0), row);
    }
    Ok(packed)
}

impl Model {
    /// The tables of a model that scores blocks. `targets` hold the trained weights of past activity, which `memory`
    /// tells the rest of.
    ///
    /// # Panics
    /// If the model does not score blocks.
    pub fn pack_blocks(
        &self,
        features: &Features,
        targets: &BlockTargets,
        memory: Option<&Memory>,
    ) -> Result<StackTables> {
        let head = self.block_head(targets, memory).map_err(fault)?;
        self.pack(features, Head::Blocks(head)).map_err(fault)
    }

    /// The tables of a model whose last index is the result.
    ///
    /// # Panics
    /// If the model scores blocks.
    pub fn pack_index(&self, features: &Features, meaning: Meaning) -> Result<StackTables> {
        assert_eq!(self.shape.head, HeadShape::Index, "a model whose last index is the result");
        let head = match meaning {
            Meaning::Classes(labels) => Head::Class(labels),
            Meaning::Bins(quantiles) => Head::Value(quantiles),
        };
        self.pack(features, head).map_err(fault)
    }

    fn pack(&self, features: &Features, head: Head) -> candle_core::Result<StackTables> {
        let shape = &self.shape;
        let (weights, bias) = (floats(&self.plane_weights()?)?, floats(&self.plane_biases()?)?);
        let hash = |signs: Tensor| {
            let inputs = shape.stacks * shape.width;
            candle_core::Result::Ok(BinaryHash {
                inputs,
                rows: packed_rows(&signs)?,
                bias: vec![0; shape.rows()],
            })
        };
        let table = |signs: Tensor| {
            // Whole bytes a row: eight signs, the first in the lowest bit.
            let byte = |signs: &[f32]| {
                signs.iter().rev().fold(0u8, |byte, &sign| byte << 1 | u8::from(sign >= 0.0))
            };
            let rows = floats(&signs)?.chunks_exact(8).map(byte).collect();
            candle_core::Result::Ok(Table { width: shape.width, rows })
        };
        Ok(StackTables {
            input: features.input().clone(),
            stacks: shape.stacks,
            tau: shape.tau,
            planes: Planes::from_rounded(shape.dims, &weights, &bias, shape.plane_bits),
            hashes: self.hash_signs()?.into_iter().map(hash).collect::<candle_core::Result<_>>()?,
            tables: self
                .table_signs()?
                .into_iter()
                .map(table)
                .collect::<candle_core::Result<_>>()?,
            head,
        })
    }

    fn block_head(
        &self,
        targets: &BlockTargets,
        memory: Option<&Memory>,
    ) -> candle_core::Result<BlockHead> {
        let head = self.head.as_ref().expect("a model that scores blocks");
        let (signs, scales, biases) = self.block_parts(head)?;
        let weights = if memory.is_some() { targets.weights()? } else { None };
        // A bias for all blocks changes no order; without it the others are smaller.
        let mean = biases.iter().sum::<f32>() / biases.len() as f32;
        let biases: Vec<f32> = biases.into_iter().map(|bias| bias - mean).collect();
        let largest = |values: &[f32]| values.iter().fold(1e-20f32, |m, x| m.max(x.abs()));
        let unit = largest(&scales) / LARGEST_SCALE;
        let most = largest(&biases).max(largest(&weights.unwrap_or_default())) / unit;
        let shift = (most / LARGEST_BIAS).max(1.0).log2().ceil() as u32;
        // With extreme biases the unit grows instead: factors lose precision, biases are never cut.
        let over = shift.saturating_sub(ls_hash::limits::MAX_SHIFT);
        let (unit, shift) = (unit * (over as f32).exp2(), shift - over);
        let integer = |x: f32, unit: f32| (x / unit).round() as i16;
        let step = unit * (shift as f32).exp2();
        let signals = weights.zip(memory).map(|([fast, slow, previous], memory)| SignalTables {
            fast_rate: rate(memory.rates[0]),
            slow_rate: rate(memory.rates[1]),
            fast_weight: integer(fast, step),
            slow_weight: integer(slow, step),
            previous_weight: integer(previous, step),
            initial: memory.initial.iter().map(|&mean| (mean * 255.0).round() as u8).collect(),
        });
        let bits = self.shape.code_bits();
        Ok(BlockHead {
            bits,
            code: match self.level_gains()? {
                Some(gains) => BlockCode::Levels(floats(&gains)?),
                None => BlockCode::Signs,
            },
            signs: BlockHead::interleave(&packed_rows(&signs)?, bits),
            scales: scales.iter().map(|&scale| integer(scale, unit)).collect(),
            biases: biases.iter().map(|&bias| integer(bias, step)).collect(),
            shift,
            unit,
            signals,
        })
    }
}

impl Shape {
    /// Tables of this shape that hold nothing: their sizes are what training's would be.
    #[must_use]
    pub fn blank(&self, signals: bool) -> StackTables {
        let (rows, between, code) = (self.rows(), self.stacks * self.width, self.code_bits());
        let head = match self.head {
            HeadShape::Index => Head::Class(vec![0; 1 << self.tau]),
            HeadShape::Blocks { blocks, levels } => Head::Blocks(BlockHead {
                bits: code,
                code: if levels { BlockCode::Levels(vec![0.0; code]) } else { BlockCode::Signs },
                signs: BlockHead::interleave(&vec![0; blocks * bits::words(code)], code),
                scales: vec![0; blocks],
                biases: vec![0; blocks],
                shift: 0,
                unit: 1.0,
                signals: signals.then(|| SignalTables {
                    fast_rate: 0,
                    slow_rate: 0,
                    fast_weight: 0,
                    slow_weight: 0,
                    previous_weight: 0,
                    initial: vec![0; blocks],
                }),
            }),
        };
        let table = || Table {
            width: self.width,
            rows: vec![0; (self.stacks << self.tau) * self.width / 8],
        };
        let hash = || BinaryHash {
            inputs: between,
            rows: vec![0; rows * bits::words(between)],
            bias: vec![0; rows],
        };
        let zeros = vec![0.0; self.dims];
        StackTables {
            input: Input { scaling: Scaling::Rms, center: zeros.clone(), gain: zeros },
            stacks: self.stacks,
            tau: self.tau,
            planes: Planes::from_rounded(
                self.dims,
                &vec![0.0; rows * self.dims],
                &vec![0.0; rows],
                self.plane_bits,
            ),
            hashes: (1..self.layers).map(|_| hash()).collect(),
            tables: (0..self.tables()).map(|_| table()).collect(),
            head,
        }
    }
}

/// A share of a step out of 65536.
fn rate(share: f64) -> u16 {
    (share * 65536.0).round().clamp(0.0, 65535.0) as u16
}

/// The class that most samples of each index have, where `indices` are those that the model gives `classes`' samples;
/// the index itself, within the number of classes, where there are none.
pub fn majority(tau: usize, indices: &[usize], classes: &[u32]) -> Result<Vec<u32>> {
    let count = classes.iter().max().map_or(1, |&most| most as usize + 1);
    if count > 1 << tau {
        return Err(PrepError::unsupported(format!(
            "{count} classes; {tau} bits spell {}",
            1 << tau
        )));
    }
    let mut votes = vec![0u32; count << tau];
    for (&index, &class) in indices.iter().zip(classes) {
        votes[index * count + class as usize] += 1;
    }
    let best = |(index, votes): (usize, &[u32])| {
        let most = votes.iter().max().copied().unwrap_or(0);
        if most == 0 {
            return (index % count) as u32;
        }
        votes.iter().position(|&held| held == most).expect("one holds the most") as u32
    };
    Ok(votes.chunks_exact(count).enumerate().map(best).collect())
}
