//! [`MlpTables`]: two-layer baselines as a device would run them, in integers.
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

use super::Scorer;
use crate::error::{PrepError, Result};
use ls_hash::{Input, Kernels, Scaling};
use std::sync::Arc;

const MAGIC: &[u8; 4] = b"LSML";
const VERSION: u32 = 1;
/// No dimension is larger.
const MAX_SIZE: u32 = 1 << 20;

/// Weights of both layers.
#[derive(Clone, Debug, PartialEq)]
pub enum Weights {
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
    pub weights: Weights,
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

    /// Bytes that stay in memory at some shape.
    #[must_use]
    pub fn bytes_at(&self, dims: usize, blocks: usize) -> u64 {
        let hidden = self.first_biases.len();
        let weights = match &self.weights {
            Weights::Int8 { .. } => hidden * dims + blocks * hidden + 4 * hidden,
            Weights::Signs { .. } => hidden * dims.div_ceil(8) + blocks * hidden.div_ceil(8),
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
        let kind = if matches!(self.weights, Weights::Int8 { .. }) { 8 } else { 1 };
        for size in [VERSION, dims as u32, hidden as u32, self.biases.len() as u32, kind] {
            bytes.extend(size.to_le_bytes());
        }
        let mut floats: Vec<&[f32]> = Vec::new();
        let mut weights = Vec::new();
        match &self.weights {
            Weights::Int8 { first, first_scales, second } => {
                weights.extend(first.iter().chain(second).map(|&w| w as u8));
                floats.push(first_scales);
            }
            Weights::Signs { first, second } => {
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
    pub fn from_bytes(bytes: &[u8]) -> Result<MlpTables> {
        Reader(bytes).tables().ok_or_else(|| {
            let problem = format!("{} bytes are no tables of this version", bytes.len());
            PrepError::corrupt("two-layer predictor", problem)
        })
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

    fn size(&mut self) -> Option<usize> {
        let size = u32::from_le_bytes(self.take(4)?.try_into().ok()?);
        (1..=MAX_SIZE).contains(&size).then_some(size as usize)
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
        Some(self.take(len)?.iter().map(|&w| w as i8).collect())
    }

    fn tables(&mut self) -> Option<MlpTables> {
        if self.take(4)? != MAGIC || self.size()? != VERSION as usize {
            return None;
        }
        let (dims, hidden, blocks, kind) = (self.size()?, self.size()?, self.size()?, self.size()?);
        let (center, gain) = (self.floats(dims)?, self.floats(dims)?);
        let input = Input { scaling: Scaling::Rms, center, gain };
        let weights = match kind {
            8 => {
                let (first, second) = (self.int8(hidden * dims)?, self.int8(blocks * hidden)?);
                Weights::Int8 { first, second, first_scales: self.floats(hidden)? }
            }
            1 => {
                let (first, second) = (self.signs(hidden, dims)?, self.signs(blocks, hidden)?);
                Weights::Signs { first, second }
            }
            _ => return None,
        };
        let (first_biases, scales) = (self.floats(hidden)?, self.floats(blocks)?);
        let tables =
            MlpTables { input, weights, first_biases, scales, biases: self.floats(blocks)? };
        self.0.is_empty().then_some(tables)
    }
}

/// A two-layer predictor that is asked.
#[derive(Clone, Debug)]
pub struct MlpScorer {
    tables: Arc<MlpTables>,
    kernels: Kernels,
    rounded: Vec<i8>,
    hidden: Vec<i8>,
}

impl MlpScorer {
    /// Of tables.
    #[must_use]
    pub fn new(tables: MlpTables) -> MlpScorer {
        let rounded = vec![0; tables.input.dims()];
        let hidden = vec![0; tables.first_biases.len()];
        MlpScorer { tables: Arc::new(tables), kernels: Kernels::detect(), rounded, hidden }
    }
}

fn dot(a: &[i8], b: &[i8]) -> i32 {
    a.iter().zip(b).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum()
}

impl Scorer for MlpScorer {
    fn scores(&mut self, residual: &[f32], scores: &mut [f32]) {
        let MlpTables { input, weights, first_biases, scales, biases } = &*self.tables;
        input.rounded(self.kernels, residual, &mut self.rounded);
        let (dims, q) = (input.dims(), &self.rounded);
        let (second, unit) = match weights {
            Weights::Int8 { first, first_scales, second } => {
                let rows = first.chunks_exact(dims).zip(first_scales).zip(first_biases);
                let hidden =
                    rows.map(|((row, scale), a)| (dot(row, q) as f32 * scale + a).max(0.0));
                let hidden: Vec<f32> = hidden.collect();
                let unit = hidden.iter().fold(f32::MIN_POSITIVE, |m, &h| m.max(h)) / 127.0;
                let round = |(to, h): (&mut i8, f32)| *to = (h / unit).round() as i8;
                self.hidden.iter_mut().zip(hidden).for_each(round);
                (second, unit)
            }
            Weights::Signs { first, second } => {
                let sums = first.chunks_exact(dims).map(|row| dot(row, q) as f32).zip(first_biases);
                let sign = |(to, (sum, a)): (&mut i8, (f32, &f32))| {
                    *to = if sum + a >= 0.0 { 1 } else { -1 };
                };
                self.hidden.iter_mut().zip(sums).for_each(sign);
                (second, 1.0)
            }
        };
        let rows = second.chunks_exact(self.hidden.len()).zip(scales).zip(biases);
        for (score, ((row, scale), bias)) in scores.iter_mut().zip(rows) {
            *score = dot(row, &self.hidden) as f32 * unit * scale + bias;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables(signs: bool) -> MlpTables {
        let input =
            Input { scaling: Scaling::Rms, center: vec![0.0, 0.1, 0.0], gain: vec![40.0; 3] };
        let weights = if signs {
            let (first, second) = (vec![1, -1, 1, -1, -1, -1], vec![1, 1, -1, 1, 1, -1, -1, -1]);
            Weights::Signs { first, second }
        } else {
            let (first, first_scales) =
                MlpTables::round_rows(&[1.0, -0.5, 0.25, -1.0, 0.0, 2.0], 3);
            let second = vec![127, 0, 0, 127, 64, -64, -127, -127];
            Weights::Int8 { first, first_scales, second }
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
        MlpScorer::new(tables(false)).scores(&x, &mut scores);
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
        MlpScorer::new(tables(true)).scores(&x, &mut scores);
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
