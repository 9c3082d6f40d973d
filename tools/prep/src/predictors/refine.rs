//! Refinement in another order: what a predictor sees after j of K stages if neurons run in file order instead of by
//! priority. Partial residuals by priority are recorded; these are computed again, for the staged tokens.

use super::{Grouping, Scorer, widen};
use crate::error::{PrepError, Result};
use crate::metrics::{Figures, Meter, Oracle, order_of};
use crate::model::forward::Forward;
use crate::stages::activations::Activations;

/// Figures after 0 to all stages of the FFN before `layer`, whose neurons run in the file's order. Of the staged tokens
/// of the windows for which `held_out` is true, at most `most_tokens`. Past activity is not known: scorers forget before
/// every token.
///
/// # Errors
/// If `layer` is 0, layers are not recorded, or no token is measured.
pub fn measure_file_order(
    forward: &Forward<'_>,
    activations: &Activations,
    layer: u32,
    grouping: &Grouping,
    held_out: impl Fn(u64) -> bool,
    most_tokens: usize,
    scorer: &mut impl Scorer,
) -> Result<Vec<Figures>> {
    let params = activations.params();
    let Some(before) = layer.checked_sub(1) else {
        return Err(PrepError::usage("layer 0 has no FFN before it"));
    };
    let number = u16::try_from(before).map_err(PrepError::unsupported)?;
    let weights = forward.layer(number)?;
    let (stages, neurons) = (params.stages as usize, params.neurons as usize);
    let stage_neurons = neurons.div_ceil(stages);
    let mut meters = vec![Meter::default(); stages + 1];
    let (mut importance, mut scores) = (vec![0.0; grouping.blocks()], vec![0.0; grouping.blocks()]);
    let (mut residual, mut measured) = (Vec::new(), 0);
    for chunk in 0..params.chunks() {
        let (own, earlier) = (activations.chunk(layer, chunk)?, activations.chunk(before, chunk)?);
        for token in own.staged_tokens() {
            let window = (own.first_token + token as u64) / u64::from(params.window);
            if measured == most_tokens || !held_out(window) {
                continue;
            }
            measured += 1;
            grouping.importance(own.codes(token), &mut importance);
            let oracle = Oracle::new(&importance);
            widen(earlier.input(token), &mut residual);
            let active = weights.activations(weights.ffn_input(&residual))?;
            for (stage, meter) in meters.iter_mut().enumerate() {
                let mut partial = active.clone();
                partial[(stage * stage_neurons).min(neurons)..].fill(0.0);
                let output = weights.ffn_output(partial)?;
                let seen: Vec<f32> = residual.iter().zip(output).map(|(x, y)| x + y).collect();
                scorer.restart();
                scorer.scores(&seen, &mut scores);
                meter.add(&oracle, &order_of(&scores));
            }
        }
    }
    if measured == 0 {
        return Err(PrepError::usage("no staged tokens to measure refinement on"));
    }
    Ok(meters.iter().map(Meter::figures).collect())
}
