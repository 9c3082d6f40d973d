//! The parts of a hashing layer: y = T\[φ_τ(sign(x W))\] (Eq. 10, 11). Hyperplanes hash the feature in the first layer,
//! binary ones the code in those behind it; a table turns each index into a row of bits.
//!
//! sign(0) is +1 throughout.

use crate::bits::{self, WORD_BITS, words};
use crate::error::{self, HashError};
use crate::limits::{MAX_BIAS, MAX_CODE_BITS, MAX_TAU};
use crate::simd::Ops;

/// The sign of an f32 projection may differ from exact arithmetic's, or another implementation's, only where the size of
/// the sum is under this share of the sum of its terms' sizes. (At least 8 sums run in parallel, and the longest
/// feature has 2^16 dimensions: 2^13 roundings of 2^-24 each.)
pub const F32_SIGN_MARGIN: f64 = 5e-4;

/// Bits of an integer hyperplane's weights. Fewer bits are fewer bytes and less time; only signs of sums matter, so a
/// plane needs no scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneBits {
    /// -127 to 127, a byte each.
    Eight,
    /// -8 to 7, stored as 0 to 15. Of 64 weights, byte i holds number i in its lower half and number 32 + i above.
    Four,
    /// -3, -1, 1 or 3, stored as 0 to 3. Of 128 weights, byte i holds numbers i, 32 + i, 64 + i, 96 + i from its lowest
    /// bits up.
    Two,
}

impl PlaneBits {
    /// Weights in a byte.
    const fn per_byte(self) -> usize {
        match self {
            PlaneBits::Eight => 1,
            PlaneBits::Four => 2,
            PlaneBits::Two => 4,
        }
    }

    /// Weights that a row is filled up to a multiple of: 32 bytes.
    const fn step(self) -> usize {
        32 * self.per_byte()
    }

    /// Bytes of a row of `dims` weights, filled up.
    pub(crate) const fn row_bytes(self, dims: usize) -> usize {
        dims.next_multiple_of(self.step()) / self.per_byte()
    }

    /// The largest weight.
    const fn max(self) -> i32 {
        match self {
            PlaneBits::Eight => 127,
            PlaneBits::Four => 7,
            PlaneBits::Two => 3,
        }
    }

    /// `weight` as it is stored: the nearest that there is.
    fn store(self, weight: f32) -> u8 {
        match self {
            PlaneBits::Eight => weight.round().clamp(-127.0, 127.0) as i8 as u8,
            PlaneBits::Four => (weight.round().clamp(-8.0, 7.0) + 8.0) as u8,
            PlaneBits::Two => ((weight + 3.0) / 2.0).round().clamp(0.0, 3.0) as u8,
        }
    }

    /// What a stored weight means.
    const fn meaning(self, stored: u8) -> i32 {
        match self {
            PlaneBits::Eight => stored as i8 as i32,
            PlaneBits::Four => stored as i32 - 8,
            PlaneBits::Two => 2 * stored as i32 - 3,
        }
    }
}

/// f32 weights that a row of [`PlaneWeights::F32`] is filled up to a multiple of.
pub(crate) const F32_STEP: usize = 8;

/// A layer's hyperplanes, one row a bit of the hash.
#[derive(Clone, Debug, PartialEq)]
pub enum PlaneWeights {
    /// Rows filled up with zeros to a multiple of 8 weights; for comparisons with training.
    F32 {
        /// Row after row.
        weights: Vec<f32>,
        /// Added to each row's sum.
        bias: Vec<f32>,
    },
    /// Rows filled up to 32 bytes; what fills them up multiplies zeros.
    Int {
        /// How weights are stored.
        bits: PlaneBits,
        /// Row after row.
        weights: Vec<u8>,
        /// Added to each row's sum; at most 2^30 in size.
        bias: Vec<i32>,
    },
}

/// W of the first layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Planes {
    /// Numbers of the feature.
    pub dims: usize,
    /// The rows.
    pub weights: PlaneWeights,
}

impl Planes {
    /// From `rows`, one of `dims` weights for each bias.
    ///
    /// # Panics
    /// If `rows` is not that long.
    #[must_use]
    pub fn from_f32(dims: usize, rows: &[f32], bias: &[f32]) -> Planes {
        assert_eq!(rows.len(), dims * bias.len(), "weights of all planes");
        let stride = dims.next_multiple_of(F32_STEP);
        let mut weights = vec![0.0; stride * bias.len()];
        for (to, from) in weights.chunks_exact_mut(stride).zip(rows.chunks_exact(dims)) {
            to[..dims].copy_from_slice(from);
        }
        Planes { dims, weights: PlaneWeights::F32 { weights, bias: bias.to_vec() } }
    }

    /// From weights that are (close to) numbers that `bits` can hold, as training with rounded weights ends with: each
    /// becomes the nearest. `bias` is in units of weight times rounded feature.
    ///
    /// # Panics
    /// If `rows` is not `dims` weights for each bias.
    #[must_use]
    pub fn from_rounded(dims: usize, rows: &[f32], bias: &[f32], bits: PlaneBits) -> Planes {
        assert_eq!(rows.len(), dims * bias.len(), "weights of all planes");
        let stride = bits.row_bytes(dims);
        let field = 8 / bits.per_byte();
        let mut weights = vec![0u8; stride * bias.len()];
        for (to, from) in weights.chunks_exact_mut(stride).zip(rows.chunks_exact(dims)) {
            for (dim, &weight) in from.iter().enumerate() {
                let (byte, part) = place(bits, dim);
                to[byte] |= bits.store(weight) << (part * field);
            }
        }
        let limit = MAX_BIAS as f32;
        let bias = bias.iter().map(|b| b.round().clamp(-limit, limit) as i32).collect();
        Planes { dims, weights: PlaneWeights::Int { bits, weights, bias } }
    }

    /// Rounds f32 planes to integers, each with the scale of the least squared error among some below the largest that
    /// clips nothing. `bias` is in units of weight times rounded feature, before scaling.
    ///
    /// # Panics
    /// If `rows` is not `dims` weights for each bias.
    #[must_use]
    pub fn quantize(dims: usize, rows: &[f32], bias: &[f32], bits: PlaneBits) -> Planes {
        assert_eq!(rows.len(), dims * bias.len(), "weights of all planes");
        let mut scaled = rows.to_vec();
        let mut scaled_bias = bias.to_vec();
        for (row, bias) in scaled.chunks_exact_mut(dims).zip(&mut scaled_bias) {
            let scale = best_scale(row, bits);
            row.iter_mut().for_each(|w| *w *= scale);
            *bias *= scale;
        }
        Planes::from_rounded(dims, &scaled, &scaled_bias, bits)
    }

    /// Rows.
    #[must_use]
    pub fn count(&self) -> usize {
        match &self.weights {
            PlaneWeights::F32 { bias, .. } => bias.len(),
            PlaneWeights::Int { bias, .. } => bias.len(),
        }
    }

    /// Weight `dim` of row `plane`.
    #[must_use]
    pub fn weight(&self, plane: usize, dim: usize) -> f32 {
        match &self.weights {
            PlaneWeights::F32 { weights, .. } => weights[plane * self.input_len() + dim],
            PlaneWeights::Int { bits, weights, .. } => {
                let row = &weights[plane * bits.row_bytes(self.dims)..];
                let (byte, part) = place(*bits, dim);
                let field = 8 / bits.per_byte();
                bits.meaning(row[byte] >> (part * field) & (0xff >> (8 - field))) as f32
            }
        }
    }

    /// Numbers of a feature filled up with zeros.
    pub(crate) fn input_len(&self) -> usize {
        match &self.weights {
            PlaneWeights::F32 { .. } => self.dims.next_multiple_of(F32_STEP),
            PlaneWeights::Int { bits, .. } => self.dims.next_multiple_of(bits.step()),
        }
    }

    /// Bytes that stay in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.weights {
            PlaneWeights::F32 { weights, bias } => 4 * (weights.len() + bias.len()),
            PlaneWeights::Int { weights, bias, .. } => weights.len() + 4 * bias.len(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), HashError> {
        let wanted = self.count() * self.input_len();
        match &self.weights {
            PlaneWeights::F32 { weights, bias } => {
                error::same("weights of the planes", weights.len(), wanted)?;
                error::finite("weights of the planes", weights)?;
                error::finite("biases of the planes", bias)
            }
            PlaneWeights::Int { bits, weights, bias } => {
                error::same("bytes of the planes", weights.len(), wanted / bits.per_byte())?;
                if let Some(b) = bias.iter().find(|b| b.unsigned_abs() > MAX_BIAS as u32) {
                    return Err(HashError::invalid("bias of a plane", b, "at most 2^30"));
                }
                // -128 has no negative: the fast product of signed bytes would be wrong.
                if *bits == PlaneBits::Eight && weights.contains(&0x80) {
                    return Err(HashError::invalid("weight of a plane", -128, "-127 to 127"));
                }
                Ok(())
            }
        }
    }

    /// `sums` = rows * q + bias. `q`: the rounded feature and zeros, [`Planes::input_len`] long.
    pub(crate) fn project(ops: &Ops, int: IntPlanes<'_>, q: &[i8], sums: &mut [i32]) {
        match int.bits {
            PlaneBits::Eight => (ops.dot_i8)(int.weights, q, sums),
            PlaneBits::Four => (ops.dot_i4)(int.weights, q, sums),
            PlaneBits::Two => (ops.dot_i2)(int.weights, q, sums),
        }
        for (sum, bias) in sums.iter_mut().zip(int.bias) {
            *sum += bias;
        }
    }
}

/// [`PlaneWeights::Int`], borrowed.
pub(crate) struct IntPlanes<'a> {
    pub(crate) bits: PlaneBits,
    pub(crate) weights: &'a [u8],
    pub(crate) bias: &'a [i32],
}

/// Byte of a row and part of that byte that hold weight `dim`.
const fn place(bits: PlaneBits, dim: usize) -> (usize, usize) {
    let (chunk, within) = (dim / bits.step(), dim % bits.step());
    (chunk * 32 + within % 32, within / 32)
}

/// The factor with which a row is rounded at the least squared error relative to its size.
fn best_scale(row: &[f32], bits: PlaneBits) -> f32 {
    let largest = row.iter().fold(0.0f32, |m, w| m.max(w.abs()));
    if largest == 0.0 || !largest.is_finite() {
        return 1.0;
    }
    let error_of = |scale: f32| -> f64 {
        let one = |w: &f32| {
            let rounded = bits.meaning(bits.store(w * scale)) as f32 / scale;
            f64::from(rounded - w).powi(2)
        };
        row.iter().map(one).sum()
    };
    let full = bits.max() as f32 / largest;
    let tries = (0..24).map(|i| full * (1.0 + i as f32 * 0.125));
    // Eight bits lose nothing worth a search.
    let tries = tries.take(if bits == PlaneBits::Eight { 1 } else { 24 });
    tries.min_by(|a, b| error_of(*a).total_cmp(&error_of(*b))).unwrap_or(full)
}

/// W of a layer behind the first: rows of signs, one a bit of the hash.
#[derive(Clone, Debug, PartialEq)]
pub struct BinaryHash {
    /// Signs of a row: bits of the code it reads.
    pub inputs: usize,
    /// Row after row, each filled up with clear bits to whole words.
    pub rows: Vec<u64>,
    /// Added to each row's dot product. The paper has none: zeros.
    pub bias: Vec<i16>,
}

impl BinaryHash {
    /// Rows.
    #[must_use]
    pub fn count(&self) -> usize {
        self.bias.len()
    }

    pub(crate) fn check(&self) -> Result<(), HashError> {
        let stride = words(self.inputs);
        error::same("words of a binary hash", self.rows.len(), self.count() * stride)?;
        let behind = self.inputs % WORD_BITS;
        let stray = |row: &[u64]| behind != 0 && row[stride - 1] >> behind != 0;
        if self.rows.chunks_exact(stride.max(1)).any(stray) {
            return Err(HashError::invalid("bits behind a binary row", "ones", "zeros"));
        }
        Ok(())
    }

    /// sign(x W), Eq. 11: row j's bit in bit j of `hash`.
    pub(crate) fn apply(&self, ops: &Ops, code: &[u64], distances: &mut [u32], hash: &mut [u64]) {
        let distances = &mut distances[..self.count()];
        (ops.distances)(&self.rows, &code[..words(self.inputs)], distances);
        let inputs = self.inputs as i32;
        let dots = distances.iter().map(|&d| inputs - 2 * d as i32);
        bits::pack(dots.zip(&self.bias).map(|(dot, &bias)| dot + i32::from(bias) >= 0), hash);
    }
}

/// T of Eq. 10, one for each of the parallel stacks: 2^τ rows of signs.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Signs of a row (d): a multiple of 8.
    pub width: usize,
    /// Stack after stack, row after row, a sign a bit, the first in the lowest bit of the first byte.
    pub rows: Vec<u8>,
}

impl Table {
    pub(crate) fn check(&self, stacks: usize, tau: usize) -> Result<(), HashError> {
        error::within("signs of a table's row", self.width, 8, MAX_CODE_BITS / stacks)?;
        error::within("bits of an index into a table", tau, 1, MAX_TAU)?;
        if !self.width.is_multiple_of(8) {
            return Err(HashError::invalid(
                "signs of a table's row",
                self.width,
                "a multiple of 8",
            ));
        }
        error::same("bytes of a table", self.rows.len(), (stacks << tau) * self.width / 8)
    }

    /// The rows at the indices that `hash` spells, τ bits a stack, one behind the other in `code`.
    pub(crate) fn look_up(&self, stacks: usize, tau: usize, hash: &[u64], code: &mut [u64]) {
        let bytes = self.width / 8;
        let row_of = |stack: usize| {
            let row = (stack << tau) + bits::index(hash, stack * tau, tau);
            &self.rows[row * bytes..][..bytes]
        };
        if bytes.is_multiple_of(8) {
            for (stack, code) in code.chunks_exact_mut(bytes / 8).enumerate() {
                for (word, &row) in code.iter_mut().zip(row_of(stack).as_chunks::<8>().0) {
                    *word = u64::from_le_bytes(row);
                }
            }
            return;
        }
        code.fill(0);
        for stack in 0..stacks {
            for (at, &byte) in (stack * bytes..).zip(row_of(stack)) {
                code[at / 8] |= u64::from(byte) << (at % 8 * 8);
            }
        }
    }
}
