//! Products of row-major matrices of f32, spread over the processors.

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, get_global_parallelism};

/// `x` (rows x inner) times the transpose of `weights` (outputs x inner); rows x outputs.
#[must_use]
pub fn times_transposed(x: &[f32], weights: &[f32], inner: usize) -> Vec<f32> {
    let (rows, outputs) = (x.len() / inner, weights.len() / inner);
    let mut out = vec![0f32; rows * outputs];
    let weights = MatRef::from_row_major_slice(weights, outputs, inner);
    let into = MatMut::from_row_major_slice_mut(&mut out, rows, outputs);
    let x = MatRef::from_row_major_slice(x, rows, inner);
    matmul(into, Accum::Replace, x, weights.transpose(), 1.0, get_global_parallelism());
    out
}

/// Adds `x` (rows x inner) times `weights` (inner x outputs) to `sum`; rows x outputs.
pub fn add_product(x: &[f32], weights: &[f32], inner: usize, sum: &mut [f32]) {
    let (rows, outputs) = (x.len() / inner, weights.len() / inner);
    let weights = MatRef::from_row_major_slice(weights, inner, outputs);
    let into = MatMut::from_row_major_slice_mut(sum, rows, outputs);
    let x = MatRef::from_row_major_slice(x, rows, inner);
    matmul(into, Accum::Add, x, weights, 1.0, get_global_parallelism());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_row_major() {
        let (x, weights) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, -1.0, 2.0, 1.0, 0.5]);
        assert_eq!(times_transposed(&x, &weights, 3), [-2.0, 5.5, -2.0, 16.0]);
        let mut sum = vec![10.0; 4];
        add_product(&x, &weights, 3, &mut sum);
        // weights as 3 x 2: rows (1, 0), (-1, 2), (1, 0.5).
        assert_eq!(sum, [12.0, 15.5, 15.0, 23.0]);
    }
}
