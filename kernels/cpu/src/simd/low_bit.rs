//! Rows of a low-bit base, `ls_bundle::low_bit`: what kernels for them have in common.

use super::{Activations, Rows};
use ls_bundle::low_bit::Codebook;

/// Weights that share a scale.
pub(crate) use ls_bundle::low_bit::GROUP;

/// A group's product with a row is first summed in this many parts of four neighbours each.
pub(crate) const PARTS: usize = GROUP / 4;

/// Groups whose scales kernels take together.
pub(crate) const BLOCK: usize = 8;

/// Bytes of a group's codes.
pub(crate) const fn group_bytes(bits: usize) -> usize {
    GROUP / 8 * bits
}

/// Bytes of a row: codes, then scales.
pub(crate) const fn row_bytes(bits: usize, groups: usize) -> usize {
    groups * (group_bytes(bits) + 2)
}

/// Functions on low-bit rows of one codebook, each of whole groups of [`GROUP`] weights, unaligned. They give the
/// same bits on every instruction set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LowBitOps {
    /// `out[r] = rows[r] . x` for any number of rows of `x.floats.len()` weights, with the quantised activations. `ahead`: as
    /// for [`RowOps::dot`](super::RowOps).
    pub(crate) dot:
        fn(rows: Rows<'_>, codebook: &Codebook, x: Activations<'_>, out: &mut [f32], ahead: usize),
    /// `acc += weights[r] * rows[r]` for any number of rows of `acc.len()` weights, row after row, where weight k adds to
    /// `acc[spread(k)]`.
    pub(crate) axpy:
        fn(rows: Rows<'_>, codebook: &Codebook, weights: &[f32], acc: &mut [f32], ahead: usize),
}

/// Where [`LowBitOps::axpy`] sums weight `k`: fours of neighbours come apart, so that a vector of 32-bit numbers, each
/// holding the codes of four neighbours, is 16 sums.
pub(crate) const fn spread(k: usize) -> usize {
    k / GROUP * GROUP + k % 4 * PARTS + k % GROUP / 4
}

/// Rows that kernels are made for; callers come with so many where they can.
pub(crate) const ROWS: usize = 4;

/// One instruction set's kernels, for rows of BITS bits.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) trait RowKernels {
    /// See [`LowBitOps::dot`].
    ///
    /// # Safety
    /// The CPU has what the implementation says.
    unsafe fn dot<const BITS: usize, const R: usize>(
        rows: [&[u8]; R],
        codebook: &Codebook,
        x: Activations<'_>,
        out: &mut [f32; R],
        ahead: usize,
    );

    /// See [`LowBitOps::axpy`].
    ///
    /// # Safety
    /// The CPU has what the implementation says.
    unsafe fn axpy<const BITS: usize, const R: usize>(
        rows: [&[u8]; R],
        codebook: &Codebook,
        weights: &[f32; R],
        acc: &mut [f32],
        ahead: usize,
    );
}

/// The functions of K. A table with them is reachable only where the CPU has what they need.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) const fn low_bit_ops<K: RowKernels>() -> LowBitOps {
    use ls_bundle::low_bit::Bits;
    LowBitOps {
        dot: |rows, codebook, x, out, ahead| match codebook.bits() {
            Bits::One => dot::<K, 1>(rows, codebook, x, out, ahead),
            Bits::Two => dot::<K, 2>(rows, codebook, x, out, ahead),
            Bits::Three => dot::<K, 3>(rows, codebook, x, out, ahead),
            Bits::Four => dot::<K, 4>(rows, codebook, x, out, ahead),
        },
        axpy: |rows, codebook, weights, acc, ahead| match codebook.bits() {
            Bits::One => axpy::<K, 1>(rows, codebook, weights, acc, ahead),
            Bits::Two => axpy::<K, 2>(rows, codebook, weights, acc, ahead),
            Bits::Three => axpy::<K, 3>(rows, codebook, weights, acc, ahead),
            Bits::Four => axpy::<K, 4>(rows, codebook, weights, acc, ahead),
        },
    }
}

/// Rows by ROWS, the last ones by themselves.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn dot<K: RowKernels, const BITS: usize>(
    rows: &[&[u8]],
    codebook: &Codebook,
    x: Activations<'_>,
    out: &mut [f32],
    ahead: usize,
) {
    let (many, few) = rows.as_chunks::<ROWS>();
    let (many_out, few_out) = out[..rows.len()].as_chunks_mut::<ROWS>();
    for (rows, out) in many.iter().zip(many_out) {
        // SAFETY: the CPU has what is needed, see `low_bit_ops`.
        unsafe { K::dot::<BITS, ROWS>(*rows, codebook, x, out, ahead) };
    }
    for (row, out) in few.iter().zip(few_out) {
        // SAFETY: as above.
        unsafe { K::dot::<BITS, 1>([row], codebook, x, std::array::from_mut(out), ahead) };
    }
}

/// Rows by ROWS, the last ones by themselves.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn axpy<K: RowKernels, const BITS: usize>(
    rows: &[&[u8]],
    codebook: &Codebook,
    weights: &[f32],
    acc: &mut [f32],
    ahead: usize,
) {
    let (many, few) = rows.as_chunks::<ROWS>();
    let (many_weights, few_weights) = weights[..rows.len()].as_chunks::<ROWS>();
    for (rows, weights) in many.iter().zip(many_weights) {
        // SAFETY: the CPU has what is needed, see `low_bit_ops`.
        unsafe { K::axpy::<BITS, ROWS>(*rows, codebook, weights, acc, ahead) };
    }
    for (row, weight) in few.iter().zip(few_weights) {
        // SAFETY: as above.
        unsafe { K::axpy::<BITS, 1>([row], codebook, &[*weight], acc, ahead) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreading_moves_each_weight_inside_its_group() {
        let mut places: Vec<usize> = (GROUP..2 * GROUP).map(spread).collect();
        assert_eq!(places[..6], [64, 80, 96, 112, 65, 81]);
        places.sort_unstable();
        assert!(places.into_iter().eq(GROUP..2 * GROUP));
    }
}
