//! [`Moments`]: what least squares needs to know of a matrix's inputs and of what its outputs lack.
//!
//! Chunks of tokens go into two halves by turns. How far a correction is drawn towards zero is what makes one half's
//! fit best for the other, so that little text, or errors that inputs say nothing about, cannot spoil a matrix.

use crate::error::{PrepError, Result};
use crate::gptq::Gram;
use faer::linalg::matmul::matmul;
use faer::linalg::solvers::Solve;
use faer::{Accum, Mat, MatMut, MatRef, Side, get_global_parallelism};

/// Added to the diagonal, as shares of its mean.
const RIDGES: [f64; 5] = [0.01, 0.05, 0.25, 1.25, 6.25];

/// Sums over tokens of b b^T and b e^T, b an input and e what is missing of the output.
pub(super) struct Moments {
    halves: [Half; 2],
    chunks: usize,
}

struct Half {
    gram: Gram,
    /// Inputs x outputs.
    cross: Vec<f32>,
}

impl Moments {
    pub(super) fn new(inputs: usize, outputs: usize) -> Moments {
        let half = || Half { gram: Gram::new(inputs), cross: vec![0.0; inputs * outputs] };
        Moments { halves: [half(), half()], chunks: 0 }
    }

    /// Adds a chunk of tokens; each is divided by its size, if there are any.
    pub(super) fn add(
        &mut self,
        mut input: Vec<f32>,
        mut missing: Vec<f32>,
        sizes: Option<&[f32]>,
    ) {
        let half = &mut self.halves[self.chunks % 2];
        self.chunks += 1;
        let inputs = half.gram.width();
        let (tokens, outputs) = (input.len() / inputs, half.cross.len() / inputs);
        if let Some(sizes) = sizes {
            for (rows, width) in [(&mut input, inputs), (&mut missing, outputs)] {
                for (row, size) in rows.chunks_exact_mut(width).zip(sizes) {
                    let inverse = 1.0 / size.max(f32::MIN_POSITIVE);
                    row.iter_mut().for_each(|x| *x *= inverse);
                }
            }
        }
        let input = MatRef::from_row_major_slice(&input, tokens, inputs);
        let missing = MatRef::from_row_major_slice(&missing, tokens, outputs);
        half.gram.add(input);
        let into = MatMut::from_row_major_slice_mut(&mut half.cross, inputs, outputs);
        matmul(into, Accum::Add, input.transpose(), missing, 1.0, get_global_parallelism());
    }

    /// Of all tokens.
    pub(super) fn gram(&self) -> Gram {
        let mut gram = self.halves[0].gram.clone();
        gram.merge(&self.halves[1].gram);
        gram
    }

    /// The matrix C (inputs x outputs) for which C^T b is nearest to what is missing, as far as it can be told.
    pub(super) fn correction(&self) -> Result<Vec<f32>> {
        let [first, second] = &self.halves;
        let (inputs, outputs) = (first.gram.width(), first.cross.len() / first.gram.width());
        let mut best = (None, 0.0);
        if self.chunks > 1 {
            for ridge in RIDGES {
                let gain = second.gain(&first.solve(ridge)?);
                if gain > best.1 {
                    best = (Some(ridge), gain);
                }
            }
        }
        let Some(ridge) = best.0 else { return Ok(vec![0.0; inputs * outputs]) };
        let cross = first.cross.iter().zip(&second.cross).map(|(x, y)| x + y).collect();
        let found = Half { gram: self.gram(), cross }.solve(ridge)?;
        let value = |index: usize| found[(index / outputs, index % outputs)] as f32;
        Ok((0..inputs * outputs).map(value).collect())
    }
}

impl Half {
    fn hessian(&self, ridge: f64) -> Mat<f64> {
        let inputs = self.gram.width();
        let mut hessian = Mat::from_fn(inputs, inputs, |i, j| f64::from(self.gram.at(i, j)));
        let added = ridge * self.gram.mean_diagonal();
        (0..inputs).for_each(|i| hessian[(i, i)] += added);
        hessian
    }

    fn cross(&self) -> Mat<f64> {
        let inputs = self.gram.width();
        let outputs = self.cross.len() / inputs;
        Mat::from_fn(inputs, outputs, |i, j| f64::from(self.cross[i * outputs + j]))
    }

    /// The best C for these tokens; inputs x outputs.
    fn solve(&self, ridge: f64) -> Result<Mat<f64>> {
        let factor = self.hessian(ridge).llt(Side::Lower).map_err(|_| {
            PrepError::unsupported("the calibration text shows too little to round by; give more")
        })?;
        Ok(factor.solve(&self.cross()))
    }

    /// By how much `found` lessens the squares of what these tokens miss.
    fn gain(&self, found: &Mat<f64>) -> f64 {
        let mut left = self.cross();
        let hessian = self.hessian(0.0);
        let parallel = get_global_parallelism();
        // 2 <C, X> - <C, H C> = <C, 2 X - H C>.
        matmul(left.as_mut(), Accum::Add, &hessian, found, -0.5, parallel);
        (0..found.ncols())
            .map(|j| (0..found.nrows()).map(|i| 2.0 * found[(i, j)] * left[(i, j)]).sum::<f64>())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gptq::tests::numbers;

    #[test]
    fn what_is_missing_is_found_whatever_sizes_tokens_have() {
        let (inputs, outputs, tokens) = (8, 3, 50);
        let (b, map) = (numbers(tokens * inputs, 1), numbers(inputs * outputs, 2));
        let mut missing = vec![0f32; tokens * outputs];
        crate::matmul::add_product(&b, &map, inputs, &mut missing);
        let sizes: Vec<f32> = (0..tokens).map(|token| 1.0 + (token % 5) as f32 / 4.0).collect();
        for sizes in [None, Some(&sizes[..])] {
            let mut moments = Moments::new(inputs, outputs);
            for part in 0..2 {
                let at = part * tokens / 2..(part + 1) * tokens / 2;
                let rows = |x: &[f32], width: usize| x[at.start * width..at.end * width].to_vec();
                let sizes = sizes.map(|sizes| &sizes[at.clone()]);
                moments.add(rows(&b, inputs), rows(&missing, outputs), sizes);
            }
            let found = moments.correction().unwrap();
            // Drawn a little towards zero.
            let off: f32 = found.iter().zip(&map).map(|(x, y)| (x - y).powi(2)).sum();
            let all: f32 = map.iter().map(|y| y * y).sum();
            assert!(off < 0.05 * all, "{off} of {all}: {found:?} {map:?}");
        }
    }

    #[test]
    fn errors_that_inputs_do_not_tell_are_left_alone() {
        let (inputs, outputs, tokens) = (32, 4, 48);
        let mut moments = Moments::new(inputs, outputs);
        for chunk in 0..4 {
            let seed = 10 * chunk;
            moments.add(numbers(tokens * inputs, seed), numbers(tokens * outputs, seed + 1), None);
        }
        let squares = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>();
        let all = Half { gram: moments.gram(), cross: moments.halves[0].cross.clone() };
        let eager = all.solve(0.01).unwrap();
        let eager: f64 =
            (0..inputs).map(|i| (0..outputs).map(|j| eager[(i, j)].powi(2)).sum::<f64>()).sum();
        let found = f64::from(squares(&moments.correction().unwrap()));
        assert!(found < 0.2 * eager, "{found} of {eager}");
    }
}
