//! Improves a rounded matrix a weight at a time: coordinate descent on d^T H d.
//!
//! Error feedback ([`crate::gptq`]) rounds each input once, knowing only the errors before it. Afterwards each code
//! (and each scale) can be chosen anew with all others as they are: with g = H d, d = w - q, the best value of weight j
//! is q_j + g_j / H_jj. No step makes the error larger. Inputs are visited in order, a few times over.

use crate::gptq::{AT_ONCE, Gram, Grid, LANES, Lanes, Quantised, subtract_product};
use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, get_global_parallelism};
use half::f16;
use rayon::prelude::*;
use std::ops::Range;

/// A damped Hessian, whole.
#[derive(Debug)]
pub struct Hessian {
    width: usize,
    values: Vec<f32>,
}

impl Hessian {
    /// `gram` with `damping` of its mean added to the diagonal.
    #[must_use]
    pub fn new(gram: &Gram, damping: f64) -> Hessian {
        let width = gram.width();
        let damp = (damping * gram.mean_diagonal()) as f32;
        let mut values = vec![0f32; width * width];
        values.par_chunks_exact_mut(width).enumerate().for_each(|(i, row)| {
            row.iter_mut().enumerate().for_each(|(j, h)| *h = gram.at(i, j));
            row[i] += damp;
        });
        Hessian { width, values }
    }

    fn row(&self, i: usize) -> &[f32] {
        &self.values[i * self.width..][..self.width]
    }

    fn as_mat(&self) -> MatRef<'_, f32> {
        MatRef::from_row_major_slice(&self.values, self.width, self.width)
    }
}

/// One bunch of problems in work.
struct Bunch<'a> {
    hessian: &'a Hessian,
    grid: &'a Grid,
    /// What the codes stand for; inputs.
    rounded: Vec<Lanes>,
    /// H (w - rounded); inputs.
    gradient: Vec<Lanes>,
    /// Inputs in work. The gradient of the others does not know yet what has become of these.
    open: Range<usize>,
    /// How far each input in work has moved.
    moved: Vec<Lanes>,
}

impl<'a> Bunch<'a> {
    fn new(
        hessian: &'a Hessian,
        grid: &'a Grid,
        rounded: Vec<Lanes>,
        gradient: Vec<Lanes>,
    ) -> Bunch<'a> {
        Bunch { hessian, grid, rounded, gradient, open: 0..0, moved: Vec::new() }
    }

    /// Lets `work` give the inputs `open` other values, and then tells all other inputs, in one product.
    fn with_open(&mut self, open: Range<usize>, work: impl FnOnce(&mut Self)) {
        self.moved.clear();
        self.moved.resize(open.len(), [0f32; LANES]);
        self.open = open.clone();
        work(self);
        let (before, rest) = self.gradient.split_at_mut(open.start);
        let behind = &mut rest[open.len()..];
        for (first, rows) in [(0, before), (open.end, behind)] {
            let hessian = self.hessian.as_mat();
            let part = hessian.submatrix(first, open.start, rows.len(), open.len());
            subtract_product(rows, part, &self.moved);
        }
    }

    /// The value that would be best for an input, all others as they are.
    fn wanted(&self, input: usize) -> Lanes {
        let inverse = 1.0 / self.hessian.row(input)[input];
        let (rounded, gradient) = (&self.rounded[input], &self.gradient[input]);
        std::array::from_fn(|lane| rounded[lane] + gradient[lane] * inverse)
    }

    /// Gives an input in work other values.
    fn set(&mut self, input: usize, values: Lanes) {
        let old = std::mem::replace(&mut self.rounded[input], values);
        let step: Lanes = std::array::from_fn(|lane| values[lane] - old[lane]);
        if step.iter().all(|&step| step == 0.0) {
            return;
        }
        let open = self.open.clone();
        let moved = &mut self.moved[input - open.start];
        moved.iter_mut().zip(&step).for_each(|(moved, step)| *moved += step);
        let row = &self.hessian.row(input)[open.clone()];
        for (gradient, &h) in self.gradient[open].iter_mut().zip(row) {
            for lane in 0..LANES {
                gradient[lane] -= h * step[lane];
            }
        }
    }

    /// The best scales for a group of inputs whose codes stand for `levels`.
    fn scales(&self, first: usize, levels: &[Lanes], current: &Lanes) -> Lanes {
        let (mut slope, mut curve) = ([0f32; LANES], [0f32; LANES]);
        for (k, level) in levels.iter().enumerate() {
            let row = &self.hessian.row(first + k)[first..];
            let mut product = [0f32; LANES];
            for (&h, other) in row.iter().zip(levels) {
                for lane in 0..LANES {
                    product[lane] += h * other[lane];
                }
            }
            for lane in 0..LANES {
                slope[lane] += level[lane] * self.gradient[first + k][lane];
                curve[lane] += level[lane] * product[lane];
            }
        }
        std::array::from_fn(|lane| {
            if curve[lane] > 0.0 {
                current[lane] + slope[lane] / curve[lane]
            } else {
                current[lane]
            }
        })
    }
}

/// Improves `found`, whose rows run along the inputs of `weights` (rows x inputs).
pub fn along_inputs(
    weights: &[f32],
    hessian: &Hessian,
    grid: &Grid,
    found: &mut Quantised,
    sweeps: u32,
) {
    let inputs = hessian.width;
    let rows = weights.len() / inputs;
    let rounded = found.decode(grid);
    let gradient = {
        let difference: Vec<f32> = weights.iter().zip(&rounded).map(|(w, q)| w - q).collect();
        let difference = MatRef::from_row_major_slice(&difference, rows, inputs);
        let mut out = vec![0f32; rows * inputs];
        let into = MatMut::from_row_major_slice_mut(&mut out, rows, inputs);
        matmul(into, Accum::Replace, difference, hessian.as_mat(), 1.0, get_global_parallelism());
        out
    };
    let groups = inputs / grid.group;
    let bunches = found.codes.par_chunks_mut(LANES * inputs);
    let bunches = bunches.zip(found.scales.par_chunks_mut(LANES * groups));
    let values = rounded.par_chunks(LANES * inputs).zip(gradient.par_chunks(LANES * inputs));
    bunches.zip(values).for_each(|((codes, scales), (rounded, gradient))| {
        let turned = |values: &[f32]| {
            let mut out = vec![[0f32; LANES]; inputs];
            for (lane, row) in values.chunks_exact(inputs).enumerate() {
                out.iter_mut().zip(row).for_each(|(out, &x)| out[lane] = x);
            }
            out
        };
        let mut bunch = Bunch::new(hessian, grid, turned(rounded), turned(gradient));
        for _ in 0..sweeps {
            for group in 0..groups {
                let open = group * grid.group..(group + 1) * grid.group;
                bunch.with_open(open, |bunch| bunch.sweep_group(group, codes, scales));
            }
        }
    });
}

impl Bunch<'_> {
    /// Chooses the scales and then the codes of a group of inputs anew; `codes` and `scales` are rows of all lanes.
    fn sweep_group(&mut self, group: usize, codes: &mut [u8], scales: &mut [f16]) {
        let (size, inputs) = (self.grid.group, self.hessian.width);
        let (lanes, first) = (codes.len() / inputs, group * size);
        let place = |lane: usize| lane * (inputs / size) + group;
        let mut levels = vec![[0f32; LANES]; size];
        let mut current = [0f32; LANES];
        for lane in 0..lanes {
            current[lane] = scales[place(lane)].to_f32();
            for (k, level) in levels.iter_mut().enumerate() {
                level[lane] = self.grid.levels.value(codes[lane * inputs + first + k]);
            }
        }
        let wanted = self.scales(first, &levels, &current);
        for lane in 0..lanes {
            let scale = f16::from_f32(wanted[lane]);
            // A group of zeros stays one; its codes stand for nothing.
            if current[lane] != 0.0 && scale.is_finite() && scale != f16::ZERO {
                scales[place(lane)] = scale;
                current[lane] = scale.to_f32();
            }
        }
        for (k, level) in levels.iter().enumerate() {
            self.set(first + k, std::array::from_fn(|lane| current[lane] * level[lane]));
        }
        for k in 0..size {
            let wanted = self.wanted(first + k);
            let mut values = self.rounded[first + k];
            for lane in 0..lanes {
                if current[lane] != 0.0 {
                    let code = self.grid.levels.nearest(wanted[lane] / current[lane]);
                    codes[lane * inputs + first + k] = code;
                    values[lane] = current[lane] * self.grid.levels.value(code);
                }
            }
            self.set(first + k, values);
        }
    }
}

/// Improves `found`, which has one row an input of `weights` (inputs x outputs).
pub fn across_inputs(
    weights: &[f32],
    hessian: &Hessian,
    grid: &Grid,
    found: &mut Quantised,
    sweeps: u32,
) {
    let inputs = hessian.width;
    let outputs = weights.len() / inputs;
    let rounded = found.decode(grid);
    let mut gradient = vec![0f32; weights.len()];
    {
        let difference: Vec<f32> = weights.iter().zip(&rounded).map(|(w, q)| w - q).collect();
        let difference = MatRef::from_row_major_slice(&difference, inputs, outputs);
        let into = MatMut::from_row_major_slice_mut(&mut gradient, inputs, outputs);
        matmul(into, Accum::Replace, hessian.as_mat(), difference, 1.0, get_global_parallelism());
    }
    let bunches: Vec<_> = (0..outputs)
        .into_par_iter()
        .step_by(LANES)
        .map(|first| {
            let lanes = LANES.min(outputs - first);
            let cut = |values: &[f32]| {
                let mut out = vec![[0f32; LANES]; inputs];
                for (out, row) in out.iter_mut().zip(values.chunks_exact(outputs)) {
                    out[..lanes].copy_from_slice(&row[first..][..lanes]);
                }
                out
            };
            let mut bunch = Bunch::new(hessian, grid, cut(&rounded), cut(&gradient));
            let mut changed = Vec::new();
            for _ in 0..sweeps {
                for start in (0..inputs).step_by(AT_ONCE) {
                    let open = start..(start + AT_ONCE).min(inputs);
                    bunch.with_open(open.clone(), |bunch| {
                        for input in open {
                            bunch.sweep_input(input, lanes, |start, codes, scale| {
                                changed.push((input * outputs + first + start, codes, scale));
                            });
                        }
                    });
                }
            }
            changed
        })
        .collect();
    for (place, codes, scale) in bunches.into_iter().flatten() {
        found.codes[place..][..codes.len()].copy_from_slice(&codes);
        found.scales[place / grid.group] = scale;
    }
}

impl Bunch<'_> {
    /// Chooses scales and codes of an input's groups anew; `put` gets those that are better than what was there.
    fn sweep_input(
        &mut self,
        input: usize,
        lanes: usize,
        mut put: impl FnMut(usize, Vec<u8>, f16),
    ) {
        let even = [1f32; LANES];
        let wanted = self.wanted(input);
        let mut values = self.rounded[input];
        let levels = &self.grid.levels;
        for start in (0..lanes).step_by(self.grid.group) {
            let place = start..start + self.grid.group;
            let wanted = &wanted[place.clone()];
            let scale = levels.fit_scale(wanted, &even[place.clone()]);
            if scale == f16::ZERO {
                continue;
            }
            let codes: Vec<u8> =
                wanted.iter().map(|x| levels.nearest(x / scale.to_f32())).collect();
            let new: Vec<f32> = codes.iter().map(|&c| scale.to_f32() * levels.value(c)).collect();
            let error = |values: &[f32]| -> f32 {
                values.iter().zip(wanted).map(|(q, x)| (q - x) * (q - x)).sum()
            };
            if error(&new) < error(&values[place.clone()]) {
                values[place].copy_from_slice(&new);
                put(start, codes, scale);
            }
        }
        self.set(input, values);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gptq::tests::{INPUTS, gram, loss, numbers};
    use crate::gptq::{self, Feedback};
    use crate::lloyd::fit_codebook;
    use ls_bundle::low_bit::Bits;

    #[test]
    fn each_sweep_leaves_less_along_and_across() {
        let gram = gram();
        let (feedback, hessian) =
            (Feedback::new(&gram, 0.01, false).unwrap(), Hessian::new(&gram, 0.01));
        let (along, across) = (numbers(70 * INPUTS, 5), numbers(INPUTS * 64, 6));
        let grid = Grid::low_bit(&fit_codebook(Bits::Two, &along, 64));
        let mut rows = gptq::along_inputs(&along, &feedback, &grid);
        let mut columns = gptq::across_inputs(&across, &feedback, &grid);
        let losses = |rows: &Quantised, columns: &Quantised| {
            let (rows, columns) = (rows.decode(&grid), columns.decode(&grid));
            let row = |i: usize, o: usize| f64::from(along[o * INPUTS + i] - rows[o * INPUTS + i]);
            let column = |i: usize, o: usize| f64::from(across[i * 64 + o] - columns[i * 64 + o]);
            [loss(&gram, 0.01, row, 70), loss(&gram, 0.01, column, 64)]
        };
        let mut before = losses(&rows, &columns);
        let start = before;
        for sweep in 0..3 {
            along_inputs(&along, &hessian, &grid, &mut rows, 1);
            across_inputs(&across, &hessian, &grid, &mut columns, 1);
            let after = losses(&rows, &columns);
            assert!(after[0] < before[0] && after[1] < before[1], "{sweep}: {after:?} {before:?}");
            before = after;
        }
        assert!(before[0] < 0.9 * start[0] && before[1] < 0.9 * start[1], "{before:?} {start:?}");
    }
}
