//! Products of row-major matrices of f32, spread over the processors. They are faer's: OpenBLAS is faster (a base's took
//! 35 s instead of 54), but the last bits of a row then depend on how many rows and threads there are, and artifacts
//! made on several machines would not be those of one.

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, get_global_parallelism};
use std::ops::Range;

/// `x` (rows x inner) times the transpose of `weights` (outputs x inner); rows x outputs.
#[must_use]
pub fn times_transposed(x: &[f32], weights: &[f32], inner: usize) -> Vec<f32> {
    let mut out = vec![0f32; x.len() / inner * (weights.len() / inner)];
    multiply(view(x, inner), view(weights, inner).transpose(), Accum::Replace, &mut out);
    out
}

/// Adds `x` (rows x inner) times `weights` (inner x outputs) to `sum`; rows x outputs.
pub fn add_product(x: &[f32], weights: &[f32], inner: usize, sum: &mut [f32]) {
    multiply(view(x, inner), view(weights, weights.len() / inner), Accum::Add, sum);
}

/// Adds the transpose of columns `which` of `a` times the same columns of `b` (both rows x `cols`) to `sum`, a square.
pub fn add_squares(a: &[f32], b: &[f32], cols: usize, which: Range<usize>, sum: &mut [f32]) {
    let columns = |values| view(values, cols).subcols(which.start, which.len());
    multiply(columns(a).transpose(), columns(b), Accum::Add, sum);
}

fn view(values: &[f32], cols: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(values, values.len() / cols, cols)
}

fn multiply(a: MatRef<'_, f32>, b: MatRef<'_, f32>, accum: Accum, into: &mut [f32]) {
    let into = MatMut::from_row_major_slice_mut(into, a.nrows(), b.ncols());
    matmul(into, accum, a, b, 1.0, get_global_parallelism());
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

    #[test]
    fn columns_are_cut_out_of_both() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [9.0, 1.0, 2.0, 9.0, 3.0, -1.0]);
        let mut sum = vec![100.0; 4];
        add_squares(&a, &b, 3, 1..3, &mut sum);
        // (2 3; 5 6) transposed times (1 2; 3 -1).
        assert_eq!(sum, [117.0, 99.0, 121.0, 100.0]);
    }

    #[test]
    fn large_products_are_those_of_sums() {
        // So large that no library takes a shortcut for small ones.
        let number = |i: usize| ((i * 37 + i / 11) % 23) as f32 - 11.0;
        let (rows, inner, outputs) = (45, 67, 83);
        let x: Vec<f32> = (0..rows * inner).map(number).collect();
        let weights: Vec<f32> = (0..outputs * inner).map(|i| number(i + 5)).collect();
        for (place, found) in times_transposed(&x, &weights, inner).into_iter().enumerate() {
            let (x, w) = (&x[place / outputs * inner..], &weights[place % outputs * inner..]);
            let sum: f32 = x[..inner].iter().zip(&w[..inner]).map(|(x, w)| x * w).sum();
            assert_eq!(found, sum, "{place}");
        }
    }
}
