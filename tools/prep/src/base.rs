//! [`LayerBase`]: what a layer's resident low-bit copy tells of its neurons, and what it adds in their stead.
//!
//! From the copy's gate and up come g~, u~ and h~ = SiLU(g~) u~ of every neuron. *Selected* neurons run exactly. Any
//! other adds h~ d~, d~ its low-bit down column, whose scales also hold how far h~ is to be trusted. One constant a
//! layer makes up for what is missing on average.
//!
//! Neurons are selected by the error that leaving them to the copy is expected to make:
//!
//! ```text
//! (h~ |d - d~|)^2 + (SiLU'(g~) u~ |d| s_g)^2 + (SiLU(g~) |d| s_u)^2
//! ```
//!
//! s_g and s_u are the spreads of the copy's errors in g and u. Without a copy of down, d~ is zero and the copy is a
//! *sketch*: the same formula is then the expected square of what is lost.
//!
//! Either a fixed count of neurons runs for every token and layer, or all whose expected error is more than a
//! *threshold*, relative to the mean square of the residual. One threshold for all layers gives more neurons to the
//! tokens and layers that need them; it is found by the [`Histogram`]s of what calibration tokens show.

use crate::error::{PrepError, Result};
use crate::matmul::{add_product, times_transposed};
use crate::model::forward::activation;
use candle_core::{Device, Tensor};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// A layer's base, decoded.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerBase {
    /// Neurons x hidden.
    pub gate: Vec<f32>,
    /// Neurons x hidden.
    pub up: Vec<f32>,
    /// Columns; neurons x hidden. `None` for a sketch.
    pub down: Option<Vec<f32>>,
    /// What each neuron's errors weigh.
    pub doubt: Doubt,
    /// Added to every output; hidden.
    pub constant: Vec<f32>,
}

/// The factors of a neuron's expected error; neurons each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Doubt {
    /// |d - d~|.
    pub down: Vec<f32>,
    /// |d| s_g.
    pub gate: Vec<f32>,
    /// |d| s_u.
    pub up: Vec<f32>,
}

impl Doubt {
    /// The square of each neuron's expected error for one token's g~ and u~.
    pub fn squared(&self, gate: &[f32], up: &[f32], into: &mut [f32]) {
        for (neuron, into) in into.iter_mut().enumerate() {
            let (g, u) = (gate[neuron], up[neuron]);
            let sigmoid = 1.0 / (1.0 + (-g).exp());
            let silu = g * sigmoid;
            let slope = sigmoid * (1.0 + g * (1.0 - sigmoid));
            let by_down = silu * u * self.down[neuron];
            let by_gate = slope * u * self.gate[neuron];
            let by_up = silu * self.up[neuron];
            *into = by_down * by_down + by_gate * by_gate + by_up * by_up;
        }
    }

    /// [`Doubt::squared`] of many tokens; tokens x neurons.
    #[must_use]
    pub fn of_rows(&self, gate: &[f32], up: &[f32]) -> Vec<f32> {
        let neurons = self.down.len();
        let mut scores = vec![0f32; gate.len()];
        let rows = gate.par_chunks_exact(neurons).zip(up.par_chunks_exact(neurons));
        scores
            .par_chunks_exact_mut(neurons)
            .zip(rows)
            .for_each(|(scores, (gate, up))| self.squared(gate, up, scores));
        scores
    }
}

/// Mean square of each row.
#[must_use]
pub fn mean_squares(rows: &[f32], width: usize) -> Vec<f32> {
    let mean = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>() / width as f32;
    rows.par_chunks_exact(width).map(mean).collect()
}

/// Divides each row (tokens x neurons) by its token's number.
pub fn relate(scores: &mut [f32], numbers: &[f32]) {
    if numbers.is_empty() {
        return;
    }
    let neurons = scores.len() / numbers.len();
    scores.par_chunks_exact_mut(neurons).zip(numbers).for_each(|(row, number)| {
        let inverse = 1.0 / number.max(f32::MIN_POSITIVE);
        row.iter_mut().for_each(|x| *x *= inverse);
    });
}

/// How many scores are how large: quarter octaves from 2^-48 up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram(Vec<u64>);

impl Histogram {
    const BINS: usize = 256;
    const STEPS: f32 = 4.0;
    const FLOOR: f32 = -48.0;

    /// Of `scores`; those outside its range count at its ends.
    #[must_use]
    pub fn of(scores: &[f32]) -> Histogram {
        let mut counts = vec![0; Self::BINS];
        for score in scores {
            // Zero gives minus infinity, which the cast saturates to 0.
            let bin = ((score.log2() - Self::FLOOR) * Self::STEPS) as usize;
            counts[bin.min(Self::BINS - 1)] += 1;
        }
        Histogram(counts)
    }

    /// The threshold that a `share` of all scores is above.
    #[must_use]
    pub fn threshold<'a>(all: impl IntoIterator<Item = &'a Histogram>, share: f64) -> f32 {
        let mut counts = vec![0u64; Self::BINS];
        for Histogram(of) in all {
            counts.iter_mut().zip(of).for_each(|(sum, count)| *sum += count);
        }
        let wanted = share * counts.iter().sum::<u64>() as f64;
        let mut above = 0.0;
        for (bin, &count) in counts.iter().enumerate().rev() {
            let count = count as f64;
            if count > 0.0 && above + count >= wanted {
                let into = ((above + count - wanted) / count) as f32;
                return (Self::FLOOR + (bin as f32 + into) / Self::STEPS).exp2();
            }
            above += count;
        }
        0.0
    }
}

/// Marks the largest of each row of `scores` (tokens x neurons), as many as `count` says for the row; of equals those
/// of lower number.
#[must_use]
pub fn largest(scores: &[f32], neurons: usize, count: impl Fn(usize) -> usize + Sync) -> Vec<bool> {
    let mut chosen = vec![false; scores.len()];
    let rows = chosen.par_chunks_exact_mut(neurons).zip(scores.par_chunks_exact(neurons));
    rows.enumerate().for_each(|(row, (chosen, scores))| {
        let count = count(row).min(neurons);
        if count == 0 {
            return;
        }
        let mut order: Vec<u32> = (0..neurons as u32).collect();
        let (at, by) = (count - 1, |&a: &u32, &b: &u32| {
            scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b))
        });
        order.select_nth_unstable_by(at, by);
        order[..=at].iter().for_each(|&neuron| chosen[neuron as usize] = true);
    });
    chosen
}

/// The values where `chosen` is `wanted`, zero elsewhere.
#[must_use]
pub fn masked(values: &[f32], chosen: &[bool], wanted: bool) -> Vec<f32> {
    values.iter().zip(chosen).map(|(&x, &is)| if is == wanted { x } else { 0.0 }).collect()
}

impl LayerBase {
    /// Number of neurons.
    #[must_use]
    pub fn neurons(&self) -> usize {
        self.doubt.down.len()
    }

    /// g~ and u~ for the FFN inputs `h` (tokens x hidden); tokens x neurons each.
    #[must_use]
    pub fn gate_up(&self, h: &[f32]) -> [Vec<f32>; 2] {
        let hidden = self.constant.len();
        [times_transposed(h, &self.gate, hidden), times_transposed(h, &self.up, hidden)]
    }

    /// h~ of the unselected neurons, zero where `chosen`.
    #[must_use]
    pub fn stand_ins(&self, gate: &[f32], up: &[f32], chosen: &[bool]) -> Vec<f32> {
        let mut out = vec![0f32; gate.len()];
        out.par_iter_mut().enumerate().with_min_len(1 << 12).for_each(|(place, out)| {
            if !chosen[place] {
                *out = activation(gate[place], up[place]);
            }
        });
        out
    }

    /// Adds to `sum` (tokens x hidden) what the copy adds for the unselected neurons, and the constant. A sketch adds
    /// nothing.
    pub fn add(&self, gate: &[f32], up: &[f32], chosen: &[bool], sum: &mut [f32]) {
        let Some(down) = &self.down else { return };
        add_product(&self.stand_ins(gate, up, chosen), down, self.neurons(), sum);
        for row in sum.chunks_exact_mut(self.constant.len()) {
            row.iter_mut().zip(&self.constant).for_each(|(x, m)| *x += m);
        }
    }
}

/// A [`LayerBase`] as tensors, for a device that is not the processor.
#[derive(Clone, Debug)]
pub struct BaseTensors {
    /// Hidden x neurons each.
    gate_up: [Tensor; 2],
    /// Neurons x hidden.
    down: Option<Tensor>,
    /// Of [`Doubt`]: down, gate, up.
    doubt: [Tensor; 3],
    constant: Tensor,
}

impl LayerBase {
    /// The same on `device`.
    pub fn on(&self, device: &Device) -> Result<BaseTensors> {
        let (neurons, hidden) = (self.neurons(), self.constant.len());
        let matrix = |values: &[f32]| Tensor::from_slice(values, (neurons, hidden), device);
        let vector = |values: &[f32]| Tensor::from_slice(values, values.len(), device);
        let make = || {
            let Doubt { down, gate, up } = &self.doubt;
            Ok(BaseTensors {
                gate_up: [matrix(&self.gate)?.t()?, matrix(&self.up)?.t()?],
                down: self.down.as_deref().map(matrix).transpose()?,
                doubt: [vector(down)?, vector(gate)?, vector(up)?],
                constant: vector(&self.constant)?,
            })
        };
        make().map_err(|problem: candle_core::Error| PrepError::corrupt("a base", problem))
    }
}

impl BaseTensors {
    /// [`LayerBase::gate_up`].
    pub fn gate_up(&self, h: &Tensor) -> candle_core::Result<[Tensor; 2]> {
        let [gate, up] = &self.gate_up;
        Ok([h.matmul(gate)?, h.matmul(up)?])
    }

    /// [`Doubt::of_rows`].
    pub fn scores(&self, gate: &Tensor, up: &Tensor) -> candle_core::Result<Tensor> {
        let [of_down, of_gate, of_up] = &self.doubt;
        let sigmoid = candle_nn::ops::sigmoid(gate)?;
        let silu = (gate * &sigmoid)?;
        let slope = (((gate - &silu)? + 1.0)? * &sigmoid)?;
        let by_down = (&silu * up)?.broadcast_mul(of_down)?;
        let by_gate = (slope * up)?.broadcast_mul(of_gate)?;
        let by_up = silu.broadcast_mul(of_up)?;
        (by_down.sqr()? + by_gate.sqr()?)? + by_up.sqr()?
    }

    /// `sum` and what [`LayerBase::add`] adds to it; `mask` is 1 for neurons that run exactly, else 0.
    pub fn add(
        &self,
        gate: &Tensor,
        up: &Tensor,
        mask: &Tensor,
        sum: &Tensor,
    ) -> candle_core::Result<Tensor> {
        let Some(down) = &self.down else { return Ok(sum.clone()) };
        let stand_ins = ((gate.silu()? * up)? * mask.affine(-1.0, 1.0)?)?;
        (stand_ins.matmul(down)? + sum)?.broadcast_add(&self.constant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> LayerBase {
        let doubt = Doubt { down: vec![0.1, 0.2], gate: vec![0.3, 0.0], up: vec![0.0, 0.5] };
        LayerBase {
            gate: vec![1.0, 0.0, 0.0, 1.0],
            up: vec![0.0, 1.0, 1.0, 0.0],
            down: Some(vec![1.0, 2.0, 3.0, 4.0]),
            doubt,
            constant: vec![10.0, 20.0],
        }
    }

    #[test]
    fn unselected_neurons_are_stood_in_for() {
        let base = base();
        let h = [1.0, 2.0];
        let [gate, up] = base.gate_up(&h);
        assert_eq!((&gate, &up), (&vec![1.0, 2.0], &vec![2.0, 1.0]));
        let mut sum = vec![0.0; 2];
        base.add(&gate, &up, &[true, false], &mut sum);
        let h1 = 2.0 / (1.0 + (-2f32).exp());
        assert!(
            (sum[0] - (10.0 + 3.0 * h1)).abs() < 1e-5 && (sum[1] - (20.0 + 4.0 * h1)).abs() < 1e-5
        );
        let mut nothing = vec![0.0; 2];
        LayerBase { down: None, ..base }.add(&gate, &up, &[true, false], &mut nothing);
        assert_eq!(nothing, [0.0; 2]);
    }

    #[test]
    fn tensors_say_what_loops_say() {
        let (base, device) = (base(), Device::Cpu);
        let h = [1.0, 2.0, -0.5, 0.25, 3.0, -1.0];
        let chosen = [true, false, false, false, true, true];
        let [gate, up] = base.gate_up(&h);
        let mut sum = vec![0.5; 6];
        base.add(&gate, &up, &chosen, &mut sum);
        let rows = |values: &[f32]| Tensor::from_slice(values, (3, 2), &device).unwrap();
        let on = base.on(&device).unwrap();
        let [g, u] = on.gate_up(&rows(&h)).unwrap();
        let mask = rows(&chosen.map(|is| f32::from(u8::from(is))));
        let added = on.add(&g, &u, &mask, &rows(&[0.5; 6])).unwrap();
        let scores = on.scores(&g, &u).unwrap();
        let same = |tensor: &Tensor, wanted: &[f32]| {
            let found: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
            let close = |(x, y): (&f32, &f32)| (x - y).abs() < 1e-5 * (1.0 + y.abs());
            assert!(found.iter().zip(wanted).all(close), "{found:?} {wanted:?}");
        };
        same(&added, &sum);
        same(&scores, &base.doubt.of_rows(&gate, &up));
        let sketch = LayerBase { down: None, ..base }.on(&device).unwrap();
        same(&sketch.add(&g, &u, &mask, &added).unwrap(), &sum);
    }

    #[test]
    fn the_expected_error_is_that_of_small_errors() {
        let doubt = base().doubt;
        let (gate, up) = ([0.7f32, -1.1], [1.3f32, 0.4]);
        let mut found = [0.0; 2];
        doubt.squared(&gate, &up, &mut found);
        for neuron in 0..2 {
            // The derivative by differences.
            let by_gate = (activation(gate[neuron] + 1e-3, up[neuron])
                - activation(gate[neuron] - 1e-3, up[neuron]))
                / 2e-3;
            let by_up = activation(gate[neuron], 1.0);
            let wanted = (activation(gate[neuron], up[neuron]) * doubt.down[neuron]).powi(2)
                + (by_gate * doubt.gate[neuron]).powi(2)
                + (by_up * doubt.up[neuron]).powi(2);
            assert!((found[neuron] / wanted - 1.0).abs() < 1e-2, "{} {wanted}", found[neuron]);
        }
    }

    #[test]
    fn a_threshold_leaves_the_share_above_it() {
        let scores: Vec<f32> = (0..10_000).map(|i| (-(i as f32) / 500.0).exp2()).collect();
        let (low, high) = scores.split_at(3000);
        let histograms = [Histogram::of(low), Histogram::of(high)];
        for share in [0.01, 0.1, 0.5, 0.9] {
            let threshold = Histogram::threshold(&histograms, share);
            let above = scores.iter().filter(|&&score| score > threshold).count() as f64;
            assert!((above / 10_000.0 - share).abs() < 0.002, "{share}: {above}");
        }
        assert_eq!(Histogram::threshold(&[Histogram::of(&[0.0; 4])], 0.5).log2().round(), -48.0);
        let mut scores = vec![8.0, 4.0, 9.0, 3.0];
        relate(&mut scores, &mean_squares(&[2.0, 2.0, 3.0, 3.0], 2));
        assert_eq!(scores, [2.0, 1.0, 1.0, 1.0 / 3.0]);
    }

    #[test]
    fn the_largest_are_chosen_and_of_equals_the_first() {
        let chosen = largest(&[1.0, 3.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0], 4, |_| 2);
        assert_eq!(chosen, [false, true, true, false, true, true, false, false]);
        assert_eq!(largest(&[1.0, 2.0, 3.0, 4.0], 2, |row| row), [false, false, false, true]);
        assert_eq!(masked(&[5.0, 6.0], &[true, false], false), [0.0, 6.0]);
    }
}
