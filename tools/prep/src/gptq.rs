//! Rounding a matrix so that its *products* stay close: error feedback with a calibration Hessian (GPTQ).
//!
//! For inputs x the error of W x is d^T H d a row, d the rounding errors and H = sum of x x^T. Inputs are rounded one
//! after another, and each one's error is made up for by those that come later: with H^-1 = U^T U, U upper triangular,
//! an error d_j moves every later weight k by -(d_j / U_jj) U_jk, and the sum of all (d_j / U_jj)^2 is the error.
//!
//! It works with any [`Grid`]: a codebook of a low-bit matrix or the uniform grid of a bundle's number format. A
//! *group* shares a scale and lies along the stored row. Stored rows run along the inputs for gate, up and attention
//! ([`along_inputs`]), across them for down, whose columns are stored ([`across_inputs`]).

use crate::error::{PrepError, Result};
use crate::lloyd::Levels;
use faer::linalg::matmul::matmul;
use faer::linalg::matmul::triangular::{self, BlockStructure};
use faer::linalg::triangular_inverse::invert_lower_triangular;
use faer::{Accum, Mat, MatMut, MatRef, Par, Side, get_global_parallelism};
use half::f16;
use ls_bundle::low_bit;
use ls_bundle::model::QUANT_GROUP;
use rayon::prelude::*;

/// Independent problems solved side by side: rows along the inputs, or outputs across them.
pub(crate) const LANES: usize = 64;
/// Values of such problems side by side.
pub(crate) type Lanes = [f32; LANES];
/// Inputs after which all others hear what those have changed: a product of matrices, where one after another would go
/// through memory for each.
pub(crate) const AT_ONCE: usize = 64;

/// What rows are rounded to.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    /// Values, in units of the scale.
    pub levels: Levels,
    /// Weights that share a scale; divides 64.
    pub group: usize,
}

impl Grid {
    /// The grid of a low-bit matrix.
    #[must_use]
    pub fn low_bit(codebook: &low_bit::Codebook) -> Grid {
        Grid { levels: Levels::of(codebook), group: low_bit::GROUP }
    }

    /// The bundle's q8_0: code c stands for c - 127.
    #[must_use]
    pub fn q8_0() -> Grid {
        Grid { levels: Levels::integers(-127..=127, false), group: QUANT_GROUP as usize }
    }

    /// The bundle's q4_0: code c stands for c - 8.
    #[must_use]
    pub fn q4_0() -> Grid {
        Grid { levels: Levels::integers(-8..=7, true), group: QUANT_GROUP as usize }
    }
}

/// Sum of x x^T over inputs x; only the lower triangle is kept.
#[derive(Clone, Debug)]
pub struct Gram {
    width: usize,
    sum: Vec<f32>,
}

impl Gram {
    /// Of inputs of `width` values.
    #[must_use]
    pub fn new(width: usize) -> Gram {
        Gram { width, sum: vec![0.0; width * width] }
    }

    /// Values of an input.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Adds the rows of `x`, a matrix of any strides.
    pub fn add(&mut self, x: MatRef<'_, f32>) {
        assert_eq!(x.ncols(), self.width);
        triangular::matmul(
            MatMut::from_row_major_slice_mut(&mut self.sum, self.width, self.width),
            BlockStructure::TriangularLower,
            Accum::Add,
            x.transpose(),
            BlockStructure::Rectangular,
            x,
            BlockStructure::Rectangular,
            1.0,
            get_global_parallelism(),
        );
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &Gram) {
        assert_eq!(self.width, other.width);
        self.sum.iter_mut().zip(&other.sum).for_each(|(sum, x)| *sum += x);
    }

    /// Element i, j.
    #[must_use]
    pub fn at(&self, i: usize, j: usize) -> f32 {
        self.sum[i.max(j) * self.width + i.min(j)]
    }

    /// The diagonal.
    #[must_use]
    pub fn diagonal(&self) -> Vec<f32> {
        (0..self.width).map(|i| self.at(i, i)).collect()
    }

    /// Mean of the diagonal; 1 where nothing was added.
    #[must_use]
    pub fn mean_diagonal(&self) -> f64 {
        let sum: f64 = self.diagonal().iter().map(|&x| f64::from(x)).sum();
        if sum > 0.0 { sum / self.width as f64 } else { 1.0 }
    }
}

/// How errors are handed on.
#[derive(Clone, Debug)]
pub struct Feedback {
    /// Which input is rounded at each step.
    order: Vec<u32>,
    /// U, row after row, whole: width x width.
    upper: Vec<f32>,
}

impl Feedback {
    /// Of the Hessian `gram`, to whose diagonal `damping` of its mean is added. Inputs are rounded in their order, or
    /// those that matter most first.
    pub fn new(gram: &Gram, damping: f64, important_first: bool) -> Result<Feedback> {
        let width = gram.width;
        let mut order: Vec<u32> = (0..width as u32).collect();
        if important_first {
            let diagonal = gram.diagonal();
            order.sort_by(|&a, &b| diagonal[b as usize].total_cmp(&diagonal[a as usize]));
        }
        let damp = damping * gram.mean_diagonal();
        // Back to front: the lower factor L of this is, turned around again, an upper R with H = R R^T; U = R^-1.
        let turned = |i: usize| order[width - 1 - i] as usize;
        let hessian = Mat::from_fn(width, width, |i, j| {
            let added = if i == j { damp } else { 0.0 };
            f64::from(gram.at(turned(i), turned(j))) + added
        });
        let factor = hessian.llt(Side::Lower).map_err(|_| {
            PrepError::unsupported(
                "the calibration Hessian is not positive definite; raise base.damping",
            )
        })?;
        let mut inverse = Mat::<f64>::zeros(width, width);
        invert_lower_triangular(inverse.as_mut(), factor.L(), get_global_parallelism());
        let mut upper = vec![0f32; width * width];
        upper.par_chunks_exact_mut(width).enumerate().for_each(|(i, row)| {
            for (j, u) in row.iter_mut().enumerate().skip(i) {
                *u = inverse[(width - 1 - i, width - 1 - j)] as f32;
            }
        });
        Ok(Feedback { order, upper })
    }

    fn width(&self) -> usize {
        self.order.len()
    }

    fn as_mat(&self) -> MatRef<'_, f32> {
        MatRef::from_row_major_slice(&self.upper, self.width(), self.width())
    }

    /// U_jk for k from `step` = j on.
    fn row(&self, step: usize) -> &[f32] {
        &self.upper[step * self.width()..][step..self.width()]
    }

    /// What an error of the weight at `step` costs when later ones make up for it: 1 / U_jj^2.
    fn cost(&self, step: usize) -> f32 {
        let pivot = self.row(step)[0];
        1.0 / (pivot * pivot)
    }
}

/// A rounded matrix: stored rows of codes and scales.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantised {
    /// Weights of a stored row.
    pub cols: usize,
    /// Weights that share a scale.
    pub group: usize,
    /// Row after row.
    pub codes: Vec<u8>,
    /// Row after row.
    pub scales: Vec<f16>,
}

impl Quantised {
    fn new(rows: usize, cols: usize, group: usize) -> Quantised {
        assert!(
            cols.is_multiple_of(group)
                && LANES.is_multiple_of(group)
                && AT_ONCE.is_multiple_of(group)
        );
        let weights = rows * cols;
        Quantised { cols, group, codes: vec![0; weights], scales: vec![f16::ZERO; weights / group] }
    }

    /// Codes and scales of a stored row.
    #[must_use]
    pub fn row(&self, row: usize) -> (&[u8], &[f16]) {
        let groups = self.cols / self.group;
        (&self.codes[row * self.cols..][..self.cols], &self.scales[row * groups..][..groups])
    }

    /// The weights, row after row.
    #[must_use]
    pub fn decode(&self, grid: &Grid) -> Vec<f32> {
        let groups = self.codes.chunks_exact(self.group).zip(&self.scales);
        let value = |(codes, scale): (&[u8], &f16)| {
            let scale = scale.to_f32();
            codes.iter().map(|&code| scale * grid.levels.value(code)).collect::<Vec<f32>>()
        };
        groups.flat_map(value).collect()
    }
}

/// Rounds `weights` (rows x inputs), stored as rows. The feedback rounds inputs in their order.
#[must_use]
pub fn along_inputs(weights: &[f32], feedback: &Feedback, grid: &Grid) -> Quantised {
    let inputs = feedback.width();
    assert!(feedback.order.is_sorted(), "groups follow the order of the inputs");
    let rows = weights.len() / inputs;
    let mut out = Quantised::new(rows, inputs, grid.group);
    let costs: Vec<f32> = (0..inputs).map(|step| feedback.cost(step)).collect();
    let groups = inputs / grid.group;
    let rows_out = out.codes.par_chunks_mut(LANES * inputs);
    let rows_out = rows_out.zip(out.scales.par_chunks_mut(LANES * groups));
    rows_out.zip(weights.par_chunks(LANES * inputs)).for_each(|((codes, scales), weights)| {
        let lanes = weights.len() / inputs;
        let mut w = vec![[0f32; LANES]; inputs];
        for (lane, row) in weights.chunks_exact(inputs).enumerate() {
            w.iter_mut().zip(row).for_each(|(w, &x)| w[lane] = x);
        }
        let mut current = [0f32; LANES];
        solve(&mut w, feedback, |step, rest, rounded| {
            if step.is_multiple_of(grid.group) {
                let cost = &costs[step..][..grid.group];
                for (lane, current) in current[..lanes].iter_mut().enumerate() {
                    let group: Vec<f32> = rest[..grid.group].iter().map(|w| w[lane]).collect();
                    let scale = grid.levels.fit_scale(&group, cost);
                    scales[lane * groups + step / grid.group] = scale;
                    *current = scale.to_f32();
                }
            }
            for lane in 0..lanes {
                let code = round(&grid.levels, rest[0][lane], current[lane], &mut rounded[lane]);
                codes[lane * inputs + step] = code;
            }
        });
    });
    out
}

/// Rounds `weights` (inputs x outputs), stored as one row an input.
#[must_use]
pub fn across_inputs(weights: &[f32], feedback: &Feedback, grid: &Grid) -> Quantised {
    let inputs = feedback.width();
    let outputs = weights.len() / inputs;
    let even = vec![1f32; grid.group];
    let lanes_of = |first: usize| LANES.min(outputs - first);
    let bunches: Vec<_> = (0..outputs)
        .into_par_iter()
        .step_by(LANES)
        .map(|first| {
            let lanes = lanes_of(first);
            let mut w = vec![[0f32; LANES]; inputs];
            for (w, &input) in w.iter_mut().zip(&feedback.order) {
                let row = &weights[input as usize * outputs + first..][..lanes];
                w[..lanes].copy_from_slice(row);
            }
            let mut found = Quantised::new(inputs, lanes, grid.group);
            solve(&mut w, feedback, |step, rest, rounded| {
                for start in (0..lanes).step_by(grid.group) {
                    let place = start..start + grid.group;
                    let scale = grid.levels.fit_scale(&rest[0][place.clone()], &even);
                    found.scales[(step * lanes + start) / grid.group] = scale;
                    for lane in place {
                        let rounded = &mut rounded[lane];
                        found.codes[step * lanes + lane] =
                            round(&grid.levels, rest[0][lane], scale.to_f32(), rounded);
                    }
                }
            });
            found
        })
        .collect();
    let mut out = Quantised::new(inputs, outputs, grid.group);
    for (bunch, first) in bunches.iter().zip((0..outputs).step_by(LANES)) {
        for (step, &input) in feedback.order.iter().enumerate() {
            let (codes, scales) = bunch.row(step);
            let place = input as usize * outputs + first;
            out.codes[place..][..codes.len()].copy_from_slice(codes);
            out.scales[place / grid.group..][..scales.len()].copy_from_slice(scales);
        }
    }
    out
}

/// The code of `x`; what it stands for goes into `rounded`.
fn round(levels: &Levels, x: f32, scale: f32, rounded: &mut f32) -> u8 {
    let code = levels.nearest(if scale == 0.0 { 0.0 } else { x / scale });
    *rounded = scale * levels.value(code);
    code
}

/// Goes through the steps: `round` is given the step and the weights that are left of the [`AT_ONCE`] that it is
/// among, the first of which it rounds. Weights behind those hear of their errors together, in one product.
fn solve(w: &mut [Lanes], feedback: &Feedback, mut round: impl FnMut(usize, &[Lanes], &mut Lanes)) {
    let steps = w.len();
    for first in (0..steps).step_by(AT_ONCE) {
        let end = (first + AT_ONCE).min(steps);
        let mut errors = vec![[0f32; LANES]; end - first];
        for (step, error) in (first..end).zip(&mut errors) {
            let mut rounded = [0f32; LANES];
            round(step, &w[step..end], &mut rounded);
            let upper = feedback.row(step);
            let (this, later) = w[step..end].split_first_mut().expect("steps are left");
            let inverse = 1.0 / upper[0];
            *error = std::array::from_fn(|lane| (this[lane] - rounded[lane]) * inverse);
            for (w, &u) in later.iter_mut().zip(&upper[1..]) {
                for lane in 0..LANES {
                    w[lane] -= u * error[lane];
                }
            }
        }
        let upper = feedback.as_mat().submatrix(first, end, end - first, steps - end);
        subtract_product(&mut w[end..], upper.transpose(), &errors);
    }
}

/// Subtracts `matrix` (rows x factors) times `factors` from `rows`, on this thread alone.
pub(crate) fn subtract_product(rows: &mut [Lanes], matrix: MatRef<'_, f32>, factors: &[Lanes]) {
    let count = rows.len();
    let into = MatMut::from_row_major_slice_mut(rows.as_flattened_mut(), count, LANES);
    let factors = MatRef::from_row_major_slice(factors.as_flattened(), factors.len(), LANES);
    matmul(into, Accum::Add, matrix, factors, -1.0, Par::Seq);
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::lloyd::fit_codebook;
    use ls_bundle::low_bit::Bits;
    use rand::{Rng, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    pub(crate) const INPUTS: usize = 128;

    pub(crate) fn numbers(count: usize, seed: u64) -> Vec<f32> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        (0..count).map(|_| random.random::<f32>() + random.random::<f32>() - 1.0).collect()
    }

    /// Inputs that go together: each is mostly what a few hidden causes make it.
    pub(crate) fn gram() -> Gram {
        let (causes, mix) = (numbers(400 * 12, 1), numbers(12 * INPUTS, 2));
        let mut x = numbers(400 * INPUTS, 3);
        for (row, cause) in x.chunks_exact_mut(INPUTS).zip(causes.chunks_exact(12)) {
            for (mix, cause) in mix.chunks_exact(INPUTS).zip(cause) {
                row.iter_mut().zip(mix).for_each(|(x, mix)| *x += 2.0 * cause * mix);
            }
        }
        let mut gram = Gram::new(INPUTS);
        for part in x.chunks(100 * INPUTS) {
            gram.add(MatRef::from_row_major_slice(part, 100, INPUTS));
        }
        gram
    }

    /// Sum of d^T H d over the columns d of an inputs x outputs difference, H damped.
    pub(crate) fn loss(
        gram: &Gram,
        damping: f64,
        difference: impl Fn(usize, usize) -> f64,
        outputs: usize,
    ) -> f64 {
        let damp = damping * gram.mean_diagonal();
        let mut sum = 0.0;
        for output in 0..outputs {
            for i in 0..INPUTS {
                let h = |j| f64::from(gram.at(i, j)) + if i == j { damp } else { 0.0 };
                let product: f64 = (0..INPUTS).map(|j| h(j) * difference(j, output)).sum();
                sum += difference(i, output) * product;
            }
        }
        sum
    }

    fn alone() -> Gram {
        let mut gram = Gram::new(INPUTS);
        (0..INPUTS).for_each(|i| gram.sum[i * INPUTS + i] = 1.0);
        gram
    }

    #[test]
    fn inputs_that_have_nothing_in_common_are_rounded_to_nearest() {
        let weights = numbers(70 * INPUTS, 4);
        let grid = Grid::q4_0();
        let feedback = Feedback::new(&alone(), 0.0, false).unwrap();
        let found = along_inputs(&weights, &feedback, &grid);
        for (row, weights) in weights.chunks_exact(INPUTS).enumerate() {
            let (codes, scales) = found.row(row);
            for (j, &x) in weights.iter().enumerate() {
                let group = &weights[j / 32 * 32..][..32];
                let scale = grid.levels.fit_scale(group, &[1.0; 32]);
                assert_eq!(scales[j / 32], scale);
                assert_eq!(codes[j], grid.levels.nearest(x / scale.to_f32()), "{row} {j}");
            }
        }
    }

    #[test]
    fn feedback_halves_the_error_of_products_along_and_across() {
        let gram = gram();
        let (along, across) = (numbers(96 * INPUTS, 5), numbers(INPUTS * 64, 6));
        let codebook = fit_codebook(Bits::Two, &along, 64);
        let grid = Grid::low_bit(&codebook);
        let of = |gram_of_feedback: &Gram, first| {
            let feedback = Feedback::new(gram_of_feedback, 0.01, false).unwrap();
            let rows = along_inputs(&along, &feedback, &grid).decode(&grid);
            let along = loss(
                &gram,
                0.0,
                |i, o| f64::from(along[o * INPUTS + i] - rows[o * INPUTS + i]),
                96,
            );
            let feedback = Feedback::new(gram_of_feedback, 0.01, first).unwrap();
            let columns = across_inputs(&across, &feedback, &grid).decode(&grid);
            let across =
                loss(&gram, 0.0, |i, o| f64::from(across[i * 64 + o] - columns[i * 64 + o]), 64);
            (along, across)
        };
        let (plain, fed, ordered) = (of(&alone(), false), of(&gram, false), of(&gram, true));
        assert!(fed.0 < 0.5 * plain.0, "{fed:?} {plain:?}");
        assert!(
            fed.1 < 0.5 * plain.1 && ordered.1 < 0.5 * plain.1,
            "{fed:?} {ordered:?} {plain:?}"
        );
    }

    #[test]
    fn the_factor_belongs_to_the_hessian() {
        let gram = gram();
        let feedback = Feedback::new(&gram, 0.05, true).unwrap();
        let diagonal = gram.diagonal();
        let place = |step: usize| feedback.order[step] as usize;
        assert!((1..INPUTS).all(|step| diagonal[place(step - 1)] >= diagonal[place(step)]));
        // U H U^T is the unit matrix.
        let damp = 0.05 * gram.mean_diagonal();
        let h = |i: usize, j: usize| {
            f64::from(gram.at(place(i), place(j))) + if i == j { damp } else { 0.0 }
        };
        let u = |i: usize, j: usize| if j < i { 0.0 } else { f64::from(feedback.row(i)[j - i]) };
        for i in (0..INPUTS).step_by(17) {
            let product: Vec<f64> =
                (0..INPUTS).map(|k| (i..INPUTS).map(|j| u(i, j) * h(j, k)).sum()).collect();
            for j in (0..INPUTS).step_by(13) {
                let found: f64 = (j..INPUTS).map(|k| product[k] * u(j, k)).sum();
                let wanted = f64::from(u8::from(i == j));
                assert!((found - wanted).abs() < 1e-3, "{i} {j}: {found}");
            }
        }
    }
}
