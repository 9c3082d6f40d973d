//! Rows of a low-bit base, `ls_bundle::low_bit`: what kernels for them have in common.

use super::{Activations, Rows};
use ls_bundle::low_bit::Codebook;

/// Weights that share a scale.
pub(crate) use ls_bundle::low_bit::GROUP;

/// A group's product with a row is first summed in this many parts of four neighbours each.
pub(crate) const PARTS: usize = GROUP / 4;

/// Functions on low-bit rows of one codebook, each of whole groups of [`GROUP`] weights, unaligned. They give the
/// same bits on every instruction set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LowBitOps {
    /// `out[r] = rows[r] . x` for 1 to 4 rows of `x.floats.len()` weights, with the quantised activations. `ahead`: as
    /// for [`RowOps::dot`](super::RowOps).
    pub(crate) dot:
        fn(rows: Rows<'_>, codebook: &Codebook, x: Activations<'_>, out: &mut [f32], ahead: usize),
    /// `acc += weights[r] * rows[r]` for 1 to 4 rows of `acc.len()` weights, row after row, where weight k adds to
    /// `acc[spread(k)]`.
    pub(crate) axpy:
        fn(rows: Rows<'_>, codebook: &Codebook, weights: &[f32], acc: &mut [f32], ahead: usize),
}

/// Where [`LowBitOps::axpy`] sums weight `k`: fours of neighbours come apart, so that a vector of 32-bit numbers, each
/// holding the codes of four neighbours, is 16 sums.
pub(crate) const fn spread(k: usize) -> usize {
    k / GROUP * GROUP + k % 4 * PARTS + k % GROUP / 4
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
/// Calls `$kernel::<..types, bits, _>` with 1 to 4 rows.
#[expect(unused_macros, reason = "the next change uses it")]
macro_rules! by_bits {
    ($kernel:ident $(::<$type:ty>)?, $rows:expr, $codebook:expr, $($argument:expr),*) => {
        match $codebook.bits() {
            Bits::One => by_row_count!($kernel::<$($type,)? 1, _>, $rows, $codebook, $($argument),*),
            Bits::Two => by_row_count!($kernel::<$($type,)? 2, _>, $rows, $codebook, $($argument),*),
            Bits::Three => by_row_count!($kernel::<$($type,)? 3, _>, $rows, $codebook, $($argument),*),
            Bits::Four => by_row_count!($kernel::<$($type,)? 4, _>, $rows, $codebook, $($argument),*),
        }
    };
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
