//! An FFN of which some neurons run exactly, the others by their low-bit stand-ins.

use super::{LayerWeights, dot};
use crate::base::{BaseNeurons, BaseTables};
use ls_bundle::tiles::Tiles;

/// A neuron of the base: weights, and what was learned about it.
#[derive(Clone, Debug)]
struct Neuron {
    gate: Vec<f32>,
    up: Vec<f32>,
    /// Empty in a sketch.
    down: Vec<f32>,
    offset: f64,
    slope: f64,
    down_error: f64,
    gate_error: f64,
    up_error: f64,
}

/// A layer's base in plain numbers.
#[derive(Clone, Debug)]
pub struct ReferenceBase {
    neurons: Vec<Neuron>,
    constant: Vec<f32>,
}

impl ReferenceBase {
    /// Decodes all of `base`.
    #[must_use]
    pub fn read(base: &BaseNeurons<'_>, tables: &BaseTables<'_>) -> ReferenceBase {
        tables.check(base);
        let [gate, up] = base.gate_and_up();
        let neuron = |index: usize| {
            let weights = |tiles: &Tiles<'_>| {
                let mut weights = vec![0.0; base.hidden() as usize];
                tiles.decode(index, &mut weights);
                weights
            };
            Neuron {
                gate: weights(gate),
                up: weights(up),
                down: base.down().map_or_else(Vec::new, weights),
                offset: f64::from(tables.offset[index]),
                slope: f64::from(tables.slope[index]),
                down_error: f64::from(tables.down_error[index]),
                gate_error: f64::from(tables.gate_error[index]),
                up_error: f64::from(tables.up_error[index]),
            }
        };
        let neurons = (0..base.neurons()).map(neuron).collect();
        ReferenceBase { neurons, constant: tables.constant.to_vec() }
    }

    /// What `estimate` of a backend is to find: every neuron's activation and score.
    #[must_use]
    pub fn estimate(&self, h: &[f32]) -> Vec<(f64, f64)> {
        let of = |neuron: &Neuron| {
            let (gate, up) = (dot(&neuron.gate, h), dot(&neuron.up, h));
            let sigmoid = 1.0 / (1.0 + (-gate).exp());
            let silu = gate * sigmoid;
            let slope = sigmoid * (1.0 + gate * (1.0 - sigmoid));
            let activation = silu * up;
            let errors = [
                activation * neuron.down_error,
                slope * up * neuron.gate_error,
                silu * neuron.up_error,
            ];
            (activation, errors.iter().map(|error| error * error).sum::<f64>().sqrt())
        };
        self.neurons.iter().map(of).collect()
    }

    /// The FFN: neurons that `chosen` accepts run exactly, with `weights`; hidden.
    #[must_use]
    pub fn ffn(
        &self,
        weights: &LayerWeights,
        h: &[f32],
        chosen: impl Fn(usize) -> bool,
    ) -> Vec<f64> {
        let mut sum = weights.ffn(h, &chosen);
        if (0..self.neurons.len()).all(&chosen) {
            return sum;
        }
        sum.iter_mut().zip(&self.constant).for_each(|(s, &m)| *s += f64::from(m));
        let estimates = self.estimate(h);
        for (index, (neuron, (activation, _))) in self.neurons.iter().zip(estimates).enumerate() {
            if !chosen(index) {
                let factor = neuron.offset + neuron.slope * activation;
                let down = sum.iter_mut().zip(&neuron.down);
                down.for_each(|(s, &d)| *s += factor * f64::from(d));
            }
        }
        sum
    }
}
