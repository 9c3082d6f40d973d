//! One token's FFN beside a low-bit base: estimates of all activations, stand-ins for the neurons that do not run.

use crate::backend::CpuBackend;
use crate::simd::low_bit::{BLOCK_TILES, TILE};
use crate::simd::{Ops, QuantBlock, block_count};
use bytemuck::Zeroable;
use ls_bundle::low_bit::UNIT;
use ls_bundle::tiles::{Tiles, code_bytes, tile_bytes};
use ls_compute::{BaseNeurons, BaseTables, is_chosen};
use std::ops::Range;

impl CpuBackend {
    /// Every neuron's estimated activation and score.
    pub(crate) fn estimate_one(&mut self, base: &BaseNeurons<'_>, tables: &BaseTables<'_>) {
        let (ops, buffers) = (self.ops, &mut self.buffers);
        let h = &buffers.h[..self.shape.hidden];
        (ops.quantise)(h, &mut buffers.quants);
        let h = &buffers.quants[..block_count(self.shape.hidden)];
        let (estimates, scores) = (buffers.estimates.shared(), buffers.scores.shared());
        let [gate, up] = base.gate_and_up();
        self.pool.run(base.neurons().div_ceil(TILE), &|_, item| {
            let product = |tiles: &Tiles<'_>| {
                let mut sums = [0.0; TILE];
                let (tiles, codebook) = (tiles.row(item), tiles.codebook());
                (ops.low_bit.by_output)(tiles, codebook, h, &mut sums);
                sums.map(|sum| sum / UNIT)
            };
            let (gate, up) = (product(gate), product(up));
            let first = item * TILE;
            let count = TILE.min(base.neurons() - first);
            // SAFETY: items have disjoint neurons.
            let (estimates, scores) =
                unsafe { (estimates.slice(first, count), scores.slice(first, count)) };
            let (gate, up) = (&gate[..count], &up[..count]);
            rate(ops.swiglu, gate, up, tables, first..first + count, estimates, scores);
        });
    }

    /// `stand_ins`: the constant, and what the base has for the neurons that are not chosen. Item = tile of outputs.
    pub(crate) fn stand_in_one(
        &mut self,
        base: &BaseNeurons<'_>,
        tables: &BaseTables<'_>,
        chosen: &[u64],
    ) {
        let (ops, buffers) = (self.ops, &mut self.buffers);
        let neurons = base.neurons();
        // The last tile of neurons may be filled up.
        let (factors, filled) =
            buffers.factors[..neurons.next_multiple_of(TILE)].split_at_mut(neurons);
        for (neuron, factor) in factors.iter_mut().enumerate() {
            let factor_of =
                || tables.offset[neuron] + tables.slope[neuron] * buffers.estimates[neuron];
            *factor = if is_chosen(chosen, neuron) { 0.0 } else { factor_of() };
        }
        filled.fill(0.0);
        let factors = &buffers.factors[..neurons.next_multiple_of(TILE)];
        let sums = buffers.stand_ins.shared();
        self.pool.run(self.shape.hidden / TILE, &|_, item| {
            // SAFETY: items have disjoint outputs.
            let sums = unsafe { sums.slice(item * TILE, TILE) };
            sums.copy_from_slice(&tables.constant[item * TILE..][..TILE]);
            if let Some(down) = base.down() {
                let mut products = [0.0; TILE];
                add_inputs(ops, down, item, factors, &mut products);
                sums.iter_mut().zip(products).for_each(|(sum, product)| *sum += product / UNIT);
            }
        });
    }

    /// x += the sum of stand-ins.
    pub(crate) fn add_stand_ins(&mut self) {
        for k in 0..self.shape.hidden {
            self.buffers.x[k] += self.buffers.stand_ins[k];
        }
    }
}

/// Adds the products of a row of tiles, whose scales are the inputs'.
fn add_inputs(ops: &Ops, tiles: &Tiles<'_>, row: usize, x: &[f32], sums: &mut [f32; TILE]) {
    let bits = tiles.codebook().bits();
    let mut folded = [0f32; BLOCK_TILES * TILE];
    let mut quants = [QuantBlock::zeroed()];
    let some = tiles.row(row).chunks(BLOCK_TILES * tile_bytes(bits));
    for (tiles_of, x) in some.zip(x.chunks(BLOCK_TILES * TILE)) {
        let folded = &mut folded[..x.len()];
        let each = tiles_of.chunks_exact(tile_bytes(bits)).zip(x.chunks_exact(TILE));
        for ((tile, x), folded) in each.zip(folded.chunks_exact_mut(TILE)) {
            (ops.low_bit.fold)(&tile[code_bytes(bits)..], x, folded);
        }
        (ops.quantise)(folded, &mut quants);
        (ops.low_bit.by_input)(tiles_of, tiles.codebook(), &quants, sums);
    }
}

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
    swiglu(scores, &[1.0; TILE][..gate.len()]);
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
