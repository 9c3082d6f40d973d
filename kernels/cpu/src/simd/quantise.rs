//! Activations as signed bytes, for products with quantised weights.

/// Weights or activations that share a scale.
pub(crate) const GROUP: usize = ls_bundle::model::QUANT_GROUP as usize;
/// Groups of a [`QuantBlock`].
pub(crate) const BLOCK_GROUPS: usize = 8;
/// A group's product with a row is first summed in this many parts of four neighbours each.
pub(crate) const PARTS: usize = 8;

/// 256 activations, x = scale * quant; zeros behind the last one.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct QuantBlock {
    /// -127 ..= 127.
    pub(crate) quants: [[i8; GROUP]; BLOCK_GROUPS],
    /// `sums[g][j]` is the sum of `quants[g][4 * j .. 4 * j + 4]`, for weights that are stored with an offset.
    pub(crate) sums: [[i32; PARTS]; BLOCK_GROUPS],
    /// One a group.
    pub(crate) scales: [f32; BLOCK_GROUPS],
}

/// Number of blocks for `len` activations.
pub(crate) const fn block_count(len: usize) -> usize {
    len.div_ceil(GROUP * BLOCK_GROUPS)
}

/// What rows of weights are multiplied with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Activations<'a> {
    /// As they are, for f16 weights.
    pub(crate) floats: &'a [f32],
    /// The same quantised, for quantised weights; may be empty where there are none of these.
    pub(crate) quants: &'a [QuantBlock],
}

/// Scale of a group and its inverse, given the bits of its largest absolute value.
///
/// An infinite or undefined activation makes the scale NaN, and so every product with it. Groups of next to nothing
/// become zero: the inverse of their scale might be infinite.
pub(crate) fn group_scale(largest_bits: u32) -> (f32, f32) {
    const QUANT_MAX: f32 = 127.0;
    const SMALLEST: f32 = 1e-30;
    let largest = f32::from_bits(largest_bits);
    if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest < SMALLEST {
        (0.0, 0.0)
    } else {
        (largest / QUANT_MAX, QUANT_MAX / largest)
    }
}
