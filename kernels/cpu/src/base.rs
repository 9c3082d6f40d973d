//! One token's FFN beside a low-bit base: estimates of all activations, stand-ins for the neurons that do not run.

use crate::backend::CpuBackend;
use crate::memory::LANES;
use crate::simd::Activations;
use crate::simd::low_bit::{ROWS, spread};
use ls_compute::{BaseNeurons, BaseTables, is_chosen};
use std::ops::Range;

/// Neurons of an item of estimates.
const ITEM_NEURONS: usize = 64;

impl CpuBackend {
    /// Panics unless `base` and `tables` fit the model, and the pass is decode.
    pub(crate) fn check_base(&self, base: &BaseNeurons<'_>, tables: &BaseTables<'_>) {
        assert!(self.pass.decode, "a base is for decode");
        assert_eq!(base.hidden() as usize, self.shape.hidden, "width of the base");
        assert!(base.neurons() <= self.shape.ffn, "neurons of the base");
        tables.check(base);
    }

    /// Every neuron's estimated activation and score.
    pub(crate) fn estimate_one(&mut self, base: &BaseNeurons<'_>, tables: &BaseTables<'_>) {
        let (ops, buffers) = (self.ops, &mut self.buffers);
        let h = &buffers.h[..self.shape.hidden];
        (ops.quantise)(h, &mut buffers.quants);
        let h = Activations { floats: h, quants: &buffers.quants };
        let (estimates, scores) = (buffers.estimates.shared(), buffers.scores.shared());
        let [gate_codebook, up_codebook] = base.gate_and_up();
        let ahead = AHEAD_BATCHES * ROWS * base.record_bytes();
        self.pool.run(base.neurons().div_ceil(ITEM_NEURONS), &|_, item| {
            let first = item * ITEM_NEURONS;
            let count = ITEM_NEURONS.min(base.neurons() - first);
            let (mut gate, mut up) = ([0f32; ITEM_NEURONS], [0f32; ITEM_NEURONS]);
            let (gate, up) = (&mut gate[..count], &mut up[..count]);
            let batches = gate.chunks_mut(ROWS).zip(up.chunks_mut(ROWS));
            for ((gate, up), first) in batches.zip((first..).step_by(ROWS)) {
                let (mut gates, mut ups) = ([&[][..]; ROWS], [&[][..]; ROWS]);
                let count = gate.len();
                for i in 0..count {
                    [gates[i], ups[i], _] = base.neuron(first + i);
                }
                (ops.low_bit.dot)(&gates[..count], &gate_codebook, h, gate, ahead);
                (ops.low_bit.dot)(&ups[..count], &up_codebook, h, up, ahead);
            }
            // SAFETY: items have disjoint neurons.
            let (estimates, scores) =
                unsafe { (estimates.slice(first, count), scores.slice(first, count)) };
            rate(ops.swiglu, gate, up, tables, first..first + count, estimates, scores);
        });
    }

    /// Neurons: item = accumulator. Neuron i adds to accumulator i / 4 % 16, ascending.
    pub(crate) fn stand_in_one(
        &mut self,
        base: &BaseNeurons<'_>,
        tables: &BaseTables<'_>,
        chosen: &[u64],
    ) {
        let hidden = self.shape.hidden;
        let (ops, buffers) = (self.ops, &mut self.buffers);
        let estimates = &buffers.estimates[..base.neurons()];
        let sums = buffers.stand_ins.shared();
        let ahead = AHEAD_BATCHES * LANES * ROWS * base.record_bytes();
        self.pool.run(LANES, &|_, lane| {
            // SAFETY: an item has an accumulator of its own.
            let acc = unsafe { sums.slice(lane * hidden, hidden) };
            acc.fill(0.0);
            if lane == 0 {
                for (k, constant) in tables.constant.iter().enumerate() {
                    acc[spread(k)] = *constant;
                }
            }
            let Some(codebook) = base.down() else { return };
            let mut neurons = (lane * ROWS..base.neurons())
                .step_by(LANES * ROWS)
                .flat_map(|first| first..(first + ROWS).min(base.neurons()))
                .filter(|&neuron| !is_chosen(chosen, neuron));
            loop {
                let (mut downs, mut factors, mut count) = ([&[][..]; ROWS], [0f32; ROWS], 0);
                for neuron in neurons.by_ref().take(ROWS) {
                    downs[count] = base.neuron(neuron)[2];
                    factors[count] =
                        tables.offset[neuron] + tables.slope[neuron] * estimates[neuron];
                    count += 1;
                }
                if count == 0 {
                    break;
                }
                (ops.low_bit.axpy)(&downs[..count], &codebook, &factors[..count], acc, ahead);
            }
        });
        // The first accumulator becomes their sum, the first first.
        let (sum, lanes) = buffers.stand_ins.split_at_mut(hidden);
        for lane in lanes.chunks_exact(hidden) {
            sum.iter_mut().zip(lane).for_each(|(sum, lane)| *sum += lane);
        }
    }

    /// x += the sum of stand-ins.
    pub(crate) fn add_stand_ins(&mut self) {
        for k in 0..self.shape.hidden {
            self.buffers.x[k] += self.buffers.stand_ins[spread(k)];
        }
    }
}

/// Batches that are fetched before they are needed.
const AHEAD_BATCHES: usize = 1;

/// Estimated activations and their expected errors, from the products of gate and up; `neurons` are these.
fn rate(
    swiglu: fn(&mut [f32], &[f32]),
    gate: &[f32],
    up: &[f32],
    tables: &BaseTables<'_>,
    neurons: Range<usize>,
    estimates: &mut [f32],
    scores: &mut [f32],
) {
    // SiLU(gate) first.
    scores.copy_from_slice(gate);
    swiglu(scores, &[1.0; ITEM_NEURONS][..gate.len()]);
    let down_error = &tables.down_error[neurons.clone()];
    let gate_error = &tables.gate_error[neurons.clone()];
    let up_error = &tables.up_error[neurons];
    for i in 0..gate.len() {
        let (gate, up, silu) = (gate[i], up[i], scores[i]);
        let sigmoid = if gate == 0.0 { 0.5 } else { silu / gate };
        let slope = sigmoid + silu * (1.0 - sigmoid);
        let estimate = silu * up;
        let [down, gate, up] =
            [estimate * down_error[i], slope * up * gate_error[i], silu * up_error[i]];
        estimates[i] = estimate;
        scores[i] = (down * down + gate * gate + up * up).sqrt();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Kernels;

    #[test]
    fn estimates_and_scores_of_extreme_gates() {
        let gates = [0.0, -0.0, 1e-30, 80.0, -80.0, 200.0, -200.0, 1.25];
        let numbers = [1.0; 8];
        let [down_error, gate_error, up_error] = [&numbers[..]; 3];
        let (offset, slope, constant) = (&[][..], &[][..], &[][..]);
        let tables = BaseTables { offset, slope, down_error, gate_error, up_error, constant };
        for kernels in Kernels::available() {
            let (mut estimates, mut scores) = ([0f32; 8], [0f32; 8]);
            let up = [3.0; 8];
            rate(kernels.0.swiglu, &gates, &up, &tables, 0..8, &mut estimates, &mut scores);
            for (i, gate) in gates.map(f64::from).into_iter().enumerate() {
                let sigmoid = 1.0 / (1.0 + (-gate).exp());
                let (silu, slope) = (gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid)));
                let score = (10.0 * silu * silu + 9.0 * slope * slope).sqrt();
                let near = |got: f32, want: f64| {
                    (f64::from(got) - want).abs() <= 1e-5 * want.abs() + 1e-30
                };
                assert!(near(estimates[i], 3.0 * silu), "estimate of {gate}: {}", estimates[i]);
                assert!(near(scores[i], score), "score of {gate}: {}", scores[i]);
            }
        }
    }
}
