//! [`refinement`]: what a predictor gains from the stages of the FFN before, if neurons run by priority and if they run
//! in file order. Partial residuals by priority are recorded; those in file order are computed again. Both are asked on
//! the same staged tokens, without past activity.

use super::{Grouping, Scorer, widen};
use crate::error::{PrepError, Result};
use crate::metrics::{Figures, Meter, Oracle, order_of};
use crate::model::forward::Forward;
use crate::stages::activations::Activations;
use serde::{Deserialize, Serialize};

/// Figures after 0 to all stages of the FFN before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Refinement {
    /// The strongest neurons first.
    pub priority: Vec<Figures>,
    /// In the file's order.
    pub file: Vec<Figures>,
}

/// Asks a predictor of `layer` after each stage, of staged tokens of the windows for which `held_out` is true, at most
/// `most_tokens`.
///
/// # Errors
/// If `layer` is 0, layers are not recorded, or no token is measured.
pub fn refinement(
    forward: &Forward<'_>,
    activations: &Activations,
    layer: u32,
    grouping: &Grouping,
    held_out: impl Fn(u64) -> bool,
    most_tokens: usize,
    scorer: &mut impl Scorer,
) -> Result<Refinement> {
    let params = activations.params();
    let Some(before) = layer.checked_sub(1) else {
        return Err(PrepError::usage("layer 0 has no FFN before it"));
    };
    let number = u16::try_from(before).map_err(PrepError::unsupported)?;
    let weights = forward.layer(number)?;
    let (stages, neurons) = (params.stages as usize, params.neurons as usize);
    let stage_neurons = neurons.div_ceil(stages);
    let mut meters = [vec![Meter::default(); stages + 1], vec![Meter::default(); stages + 1]];
    let (mut importance, mut scores) = (vec![0.0; grouping.blocks()], vec![0.0; grouping.blocks()]);
    let (mut residual, mut seen, mut measured) = (Vec::new(), Vec::new(), 0);
    for chunk in 0..params.chunks() {
        let (own, earlier) = (activations.chunk(layer, chunk)?, activations.chunk(before, chunk)?);
        for (index, token) in own.staged_tokens().enumerate() {
            let window = (own.first_token + token as u64) / u64::from(params.window);
            if measured == most_tokens || !held_out(window) {
                continue;
            }
            measured += 1;
            grouping.importance(own.codes(token), &mut importance);
            let oracle = Oracle::new(&importance);
            widen(earlier.input(token), &mut residual);
            let mut ask = |seen: &[f32], meter: &mut Meter| {
                scorer.restart();
                scorer.scores(seen, &mut scores);
                meter.add(&oracle, &order_of(&scores));
            };
            let active = weights.activations(weights.ffn_input(&residual))?;
            let [priority, file] = &mut meters;
            for (stage, (priority, file)) in priority.iter_mut().zip(file).enumerate() {
                let mut partial = active.clone();
                partial[(stage * stage_neurons).min(neurons)..].fill(0.0);
                let output = weights.ffn_output(partial)?;
                seen.clear();
                seen.extend(residual.iter().zip(output).map(|(x, y)| x + y));
                ask(&seen, file);
                if stage > 0 {
                    widen(earlier.staged(index, stage as u32), &mut seen);
                }
                ask(&seen, priority);
            }
        }
    }
    if measured == 0 {
        return Err(PrepError::usage("no staged tokens to measure refinement on"));
    }
    let [priority, file] = meters.map(|meters| meters.iter().map(Meter::figures).collect());
    Ok(Refinement { priority, file })
}
