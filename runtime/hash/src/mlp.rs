//! [`Mlp`]: the two-layer networks that other systems predict with, in integers; [`MlpTables`] is what training produces
//! and a file holds.
//!
//! DejaVu's predictor: h = ReLU(A q + a), scores = B h + b, with q the rounded feature of `ls-hash`'s input, A and B in
//! 8 bits with a scale a row, and h rounded to 8 bits by its token's largest element. Binarised (BNN): A and B are
//! signs, and so is h.
//!
//! ```text
//! "LSML", version 1            u32
//! dims, hidden, blocks         u32 each
//! weights (8: int8; 1: signs)  u32
//! centers, gains               f32 [dims] each
//! A, B                         row after row; i8, or signs in rows filled up to whole bytes, the first lowest
//! scales and biases of A       f32 [hidden] each (signs: biases alone)
//! scales and biases of B       f32 [blocks] each
//! ```

use crate::error::{self, HashError};
use crate::input::{Input, Scaling};
use crate::limits::{MAX_BLOCKS, MAX_DIMS};
use crate::simd::Kernels;

const MAGIC: &[u8; 4] = b"LSML";
const VERSION: u32 = 1;
/// Units of the layer between.
const MAX_HIDDEN: usize = 1 << 14;
/// Rows are filled up to whole steps of the kernel.
const STEP: usize = 32;

/// Weights of both layers.
#[derive(Clone, Debug, PartialEq)]
pub enum MlpWeights {
    /// -127 to 127.
    Int8 {
        /// hidden x dims.
        first: Vec<i8>,
        /// What a row's sums are multiplied with; hidden.
        first_scales: Vec<f32>,
        /// blocks x hidden.
        second: Vec<i8>,
    },
    /// -1 and 1, a byte each; a bit each when stored.
    Signs {
        /// hidden x dims.
        first: Vec<i8>,
        /// blocks x hidden.
        second: Vec<i8>,
    },
}

/// A two-layer predictor.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpTables {
    /// From residual to rounded feature; scaling is by the root mean square.
    pub input: Input,
    /// A and B.
    pub weights: MlpWeights,
    /// a: added to A q; hidden.
    pub first_biases: Vec<f32>,
    /// What a row's products are multiplied with; blocks.
    pub scales: Vec<f32>,
    /// b: added to scores; blocks.
    pub biases: Vec<f32>,
}

impl MlpTables {
    /// Rounds rows of f32 weights to 8 bits, each with its scale.
    #[must_use]
    pub fn round_rows(weights: &[f32], cols: usize) -> (Vec<i8>, Vec<f32>) {
        let (mut rounded, mut scales) = (Vec::with_capacity(weights.len()), Vec::new());
        for row in weights.chunks_exact(cols) {
            let scale = row.iter().fold(f32::MIN_POSITIVE, |m, w| m.max(w.abs())) / 127.0;
            rounded.extend(row.iter().map(|w| (w / scale).round() as i8));
            scales.push(scale);
        }
        (rounded, scales)
    }

    /// Whether weights are signs.
    #[must_use]
    pub fn is_signs(&self) -> bool {
        matches!(self.weights, MlpWeights::Signs { .. })
    }

    /// Bytes that stay in memory at some shape.
    #[must_use]
    pub fn bytes_at(&self, dims: usize, blocks: usize) -> u64 {
        MlpTables::bytes_of(dims, self.hidden(), blocks, self.is_signs())
    }

    /// The same of tables with so many hidden units, of signs or of bytes.
    #[must_use]
    pub fn bytes_of(dims: usize, hidden: usize, blocks: usize, signs: bool) -> u64 {
        let weights = if signs {
            hidden * dims.div_ceil(8) + blocks * hidden.div_ceil(8)
        } else {
            hidden * dims + blocks * hidden + 4 * hidden
        };
        (8 * dims + weights + 4 * hidden + 8 * blocks) as u64
    }

    /// The same at its own shape.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes_at(self.input.dims(), self.biases.len())
    }

    /// As stored.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let (dims, hidden) = (self.input.dims(), self.first_biases.len());
        let mut bytes = MAGIC.to_vec();
        let kind = if self.is_signs() { 1 } else { 8 };
        for size in [VERSION, dims as u32, hidden as u32, self.biases.len() as u32, kind] {
            bytes.extend(size.to_le_bytes());
        }
        let mut floats: Vec<&[f32]> = Vec::new();
        let mut weights = Vec::new();
        match &self.weights {
            MlpWeights::Int8 { first, first_scales, second } => {
                weights.extend(first.iter().chain(second).map(|&w| w as u8));
                floats.push(first_scales);
            }
            MlpWeights::Signs { first, second } => {
                for (rows, cols) in [(first, dims), (second, hidden)] {
                    for byte in rows.chunks_exact(cols).flat_map(|row| row.chunks(8)) {
                        let bit = |byte, &sign: &i8| byte << 1 | u8::from(sign > 0);
                        weights.push(byte.iter().rev().fold(0u8, bit));
                    }
                }
            }
        }
        let put = |bytes: &mut Vec<u8>, values: &[f32]| {
            bytes.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        };
        put(&mut bytes, &self.input.center);
        put(&mut bytes, &self.input.gain);
        bytes.extend(weights);
        floats.extend([&self.first_biases[..], &self.scales, &self.biases]);
        floats.into_iter().for_each(|values| put(&mut bytes, values));
        bytes
    }

    /// Reads what [`MlpTables::to_bytes`] wrote.
    ///
    /// # Errors
    /// If the bytes are anything else.
    pub fn from_bytes(bytes: &[u8]) -> Result<MlpTables, HashError> {
        let tables = Reader(bytes).tables();
        let known = "tables of this version";
        tables.ok_or_else(|| HashError::invalid("two-layer network", bytes.len(), known))
    }

    fn hidden(&self) -> usize {
        self.first_biases.len()
    }
}

/// What has not been read yet.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn size(&mut self, most: usize) -> Option<usize> {
        let size = u32::from_le_bytes(self.take(4)?.try_into().ok()?) as usize;
        (1..=most).contains(&size).then_some(size)
    }

    fn floats(&mut self, len: usize) -> Option<Vec<f32>> {
        let values = self.take(4 * len)?.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
        let values: Vec<f32> = values.collect();
        values.iter().all(|x| x.is_finite()).then_some(values)
    }

    fn signs(&mut self, rows: usize, cols: usize) -> Option<Vec<i8>> {
        let packed = self.take(rows * cols.div_ceil(8))?;
        let sign =
            |row: &'a [u8], col: usize| if row[col / 8] >> (col % 8) & 1 == 1 { 1 } else { -1 };
        let rows = packed.chunks_exact(cols.div_ceil(8));
        Some(rows.flat_map(|row| (0..cols).map(move |col| sign(row, col))).collect())
    }

    fn int8(&mut self, len: usize) -> Option<Vec<i8>> {
        let weights: Vec<i8> = self.take(len)?.iter().map(|w| w.cast_signed()).collect();
        // The kernels take sizes of weights, and -128 has none.
        (!weights.contains(&i8::MIN)).then_some(weights)
    }

    fn tables(&mut self) -> Option<MlpTables> {
        if self.take(4)? != MAGIC || self.size(MAX_DIMS)? != VERSION as usize {
            return None;
        }
        let (dims, hidden) = (self.size(MAX_DIMS)?, self.size(MAX_HIDDEN)?);
        let (blocks, kind) = (self.size(MAX_BLOCKS)?, self.size(8)?);
        let (center, gain) = (self.floats(dims)?, self.floats(dims)?);
        let input = Input { scaling: Scaling::Rms, center, gain };
        let weights = match kind {
            8 => {
                let (first, second) = (self.int8(hidden * dims)?, self.int8(blocks * hidden)?);
                MlpWeights::Int8 { first, second, first_scales: self.floats(hidden)? }
            }
            1 => {
                let (first, second) = (self.signs(hidden, dims)?, self.signs(blocks, hidden)?);
                MlpWeights::Signs { first, second }
            }
            _ => return None,
        };
        let (first_biases, scales) = (self.floats(hidden)?, self.floats(blocks)?);
        let tables =
            MlpTables { input, weights, first_biases, scales, biases: self.floats(blocks)? };
        self.0.is_empty().then_some(tables)
    }
}

/// A network that is asked.
#[derive(Clone, Debug)]
pub struct Mlp {
    tables: MlpTables,
    /// A and B in bytes, rows filled up to whole steps.
    first: Vec<u8>,
    second: Vec<u8>,
    kernels: Kernels,
}

/// Where networks work. One serves all it was grown for.
#[derive(Clone, Debug, Default)]
pub struct MlpScratch {
    rounded: Vec<i8>,
    sums: Vec<i32>,
    floats: Vec<f32>,
    hidden: Vec<i8>,
}

impl MlpScratch {
    /// Grows to what `mlp` needs. The only place that allocates.
    pub fn grow_for(&mut self, mlp: &Mlp) {
        let (dims, hidden) = (mlp.tables.input.dims(), mlp.tables.hidden());
        let grow = |len: usize, wanted: usize| len.max(wanted.next_multiple_of(STEP));
        self.rounded.resize(grow(self.rounded.len(), dims), 0);
        self.hidden.resize(grow(self.hidden.len(), hidden), 0);
        self.floats.resize(self.hidden.len(), 0.0);
        self.sums.resize(self.sums.len().max(hidden).max(mlp.blocks()), 0);
    }
}

/// Rows of `cols` weights as bytes, zeros behind each.
fn padded(weights: &[i8], cols: usize) -> Vec<u8> {
    let step = cols.next_multiple_of(STEP);
    let mut bytes = Vec::with_capacity(weights.len() / cols * step);
    for row in weights.chunks_exact(cols) {
        bytes.extend(row.iter().map(|weight| weight.cast_unsigned()));
        bytes.resize(bytes.len().next_multiple_of(step), 0);
    }
    bytes
}

impl Mlp {
    /// Checks that the tables' sizes fit each other.
    ///
    /// # Errors
    /// If they do not.
    pub fn new(mut tables: MlpTables, kernels: Kernels) -> Result<Mlp, HashError> {
        tables.input.check()?;
        let (dims, hidden, blocks) = (tables.input.dims(), tables.hidden(), tables.biases.len());
        let (a, b) = match &mut tables.weights {
            MlpWeights::Int8 { first, second, first_scales } => {
                error::same("scales of the first layer", first_scales.len(), hidden)?;
                (std::mem::take(first), std::mem::take(second))
            }
            MlpWeights::Signs { first, second } => (std::mem::take(first), std::mem::take(second)),
        };
        error::same("weights of the first layer", a.len(), hidden * dims)?;
        error::same("weights of the second layer", b.len(), blocks * hidden)?;
        error::same("scales of the second layer", tables.scales.len(), blocks)?;
        Ok(Mlp { first: padded(&a, dims), second: padded(&b, hidden), tables, kernels })
    }

    /// Blocks that are scored.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.tables.biases.len()
    }

    /// Scores of all blocks for a residual.
    ///
    /// # Panics
    /// If sizes do not fit, or `scratch` did not grow for this network.
    pub fn scores(&self, feature: &[f32], scratch: &mut MlpScratch, out: &mut [f32]) {
        let MlpTables { input, weights, first_biases, scales, biases } = &self.tables;
        let (ops, dims, units) = (self.kernels.0, input.dims(), first_biases.len());
        assert_eq!(feature.len(), dims, "numbers of the feature");
        assert_eq!(out.len(), biases.len(), "scores of all blocks");
        let rounded = &mut scratch.rounded[..dims.next_multiple_of(STEP)];
        input.round(ops, feature, rounded);
        rounded[dims..].fill(0);
        let hidden = &mut scratch.hidden[..units.next_multiple_of(STEP)];
        hidden[units..].fill(0);
        let sums = &mut scratch.sums[..units];
        (ops.dot_i8)(&self.first, rounded, sums);
        let unit = match weights {
            MlpWeights::Int8 { first_scales, .. } => {
                let floats = &mut scratch.floats[..units];
                let rows = sums.iter().zip(first_scales).zip(first_biases);
                for (h, ((sum, scale), bias)) in floats.iter_mut().zip(rows) {
                    *h = (*sum as f32 * scale + bias).max(0.0);
                }
                let unit = floats.iter().fold(f32::MIN_POSITIVE, |m, &h| m.max(h)) / 127.0;
                hidden.iter_mut().zip(floats).for_each(|(to, h)| *to = (*h / unit).round() as i8);
                unit
            }
            MlpWeights::Signs { .. } => {
                for (to, (sum, bias)) in hidden.iter_mut().zip(sums.iter().zip(first_biases)) {
                    *to = if *sum as f32 + bias >= 0.0 { 1 } else { -1 };
                }
                1.0
            }
        };
        let sums = &mut scratch.sums[..biases.len()];
        (ops.dot_i8)(&self.second, hidden, sums);
        for ((score, sum), (scale, bias)) in out.iter_mut().zip(sums).zip(scales.iter().zip(biases))
        {
            *score = *sum as f32 * unit * scale + bias;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(tables: MlpTables, x: &[f32], scores: &mut [f32]) {
        let mlp = Mlp::new(tables, Kernels::detect()).unwrap();
        let mut scratch = MlpScratch::default();
        scratch.grow_for(&mlp);
        mlp.scores(x, &mut scratch, scores);
    }

    fn tables(signs: bool) -> MlpTables {
        let input =
            Input { scaling: Scaling::Rms, center: vec![0.0, 0.1, 0.0], gain: vec![40.0; 3] };
        let weights = if signs {
            let (first, second) = (vec![1, -1, 1, -1, -1, -1], vec![1, 1, -1, 1, 1, -1, -1, -1]);
            MlpWeights::Signs { first, second }
        } else {
            let (first, first_scales) =
                MlpTables::round_rows(&[1.0, -0.5, 0.25, -1.0, 0.0, 2.0], 3);
            let second = vec![127, 0, 0, 127, 64, -64, -127, -127];
            MlpWeights::Int8 { first, first_scales, second }
        };
        MlpTables {
            input,
            weights,
            first_biases: vec![5.0, -5.0],
            scales: vec![0.1, 0.2, 0.3, 0.4],
            biases: vec![0.0, 1.0, 2.0, 3.0],
        }
    }

    #[test]
    fn tables_read_back_and_broken_ones_do_not() {
        for signs in [false, true] {
            let tables = tables(signs);
            let bytes = tables.to_bytes();
            assert_eq!(MlpTables::from_bytes(&bytes).unwrap(), tables);
            for len in 0..bytes.len() {
                assert!(MlpTables::from_bytes(&bytes[..len]).is_err(), "{len}");
            }
            assert!(MlpTables::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
        }
    }

    #[test]
    fn scores_are_those_of_two_layers() {
        let x = [1.0f32, 2.0, -2.0];
        let q: Vec<f32> = [1.0f32, 2.0, -2.0]
            .iter()
            .zip([0.0, 0.1, 0.0])
            .map(|(x, c)| ((x / 3f32.sqrt() - c) * 40.0).round())
            .collect();
        let mut scores = vec![0.0; 4];
        ask(tables(false), &x, &mut scores);
        let h =
            [q[0] - 0.5 * q[1] + 0.25 * q[2] + 5.0, -q[0] + 2.0 * q[2] - 5.0].map(|h| h.max(0.0));
        let wanted = [
            127.0 * h[0] * 0.1,
            127.0 * h[1] * 0.2 + 1.0,
            64.0 * (h[0] - h[1]) * 0.3 + 2.0,
            -127.0 * (h[0] + h[1]) * 0.4 + 3.0,
        ];
        for (found, wanted) in scores.iter().zip(wanted) {
            assert!((found - wanted).abs() <= 0.02 * wanted.abs() + 0.02, "{found} {wanted}");
        }
        ask(tables(true), &x, &mut scores);
        let sums = [q[0] - q[1] + q[2] + 5.0, -q[0] - q[1] - q[2] - 5.0];
        let h = sums.map(|sum| if sum >= 0.0 { 1.0 } else { -1.0 });
        let wanted = [
            (h[0] + h[1]) * 0.1,
            (-h[0] + h[1]) * 0.2 + 1.0,
            (h[0] - h[1]) * 0.3 + 2.0,
            (-h[0] - h[1]) * 0.4 + 3.0,
        ];
        assert_eq!(scores, wanted);
    }
}
