//! [`Learned`]: neurons ranked by a trained predictor, as the paper selects them.
//!
//! It is asked with the residual that enters the layer's own FFN, the best it can ever see. What it remembers of past
//! tokens is what it chose for them, as an engine that runs its choice knows no more.

use crate::base::largest;
use crate::error::Result;
use crate::metrics::FETCH_SHARE;
use crate::predictors::{MlpScorer, PackedScorer, Scorer as Predictor};
use crate::sparse::{FfnAt, Scorer};
use crate::stages::mlp;
use crate::stages::predictor::Predictors;
use rayon::prelude::*;

/// One layer's predictor.
#[derive(Clone)]
enum One {
    Hash(Box<PackedScorer>),
    Mlp(MlpScorer),
}

impl One {
    /// Scores of a window's tokens; tokens x neurons.
    fn window(&mut self, residuals: &[f32], hidden: usize, scores: &mut [f32]) {
        let neurons = scores.len() * hidden / residuals.len();
        if let One::Hash(stack) = self {
            stack.restart();
        }
        let count = (FETCH_SHARE * neurons as f64).round() as usize;
        let rows = residuals.chunks_exact(hidden).zip(scores.chunks_exact_mut(neurons));
        for (residual, scores) in rows {
            match self {
                One::Mlp(mlp) => mlp.scores(residual, scores),
                One::Hash(stack) => {
                    stack.scores(residual, scores);
                    let chosen = largest(scores, neurons, |_| count);
                    let active = (0u32..).zip(&chosen).filter(|(_, chosen)| **chosen);
                    let active: Vec<u32> = active.map(|(neuron, _)| neuron).collect();
                    stack.remember(&active);
                }
            }
        }
    }
}

/// See the module's documentation.
pub(super) struct Learned<'a> {
    from: From<'a>,
    window: usize,
    layer: Option<(u16, One)>,
}

/// Where predictors come from.
#[derive(Clone, Copy)]
pub(super) enum From<'a> {
    /// `60-predictor`, of single neurons.
    Hash(&'a Predictors),
    /// `62-mlp`, the baseline of this name.
    Mlp(&'a crate::artifact::Artifact, &'static str),
}

impl<'a> Learned<'a> {
    pub(super) fn new(from: From<'a>, window: u32) -> Learned<'a> {
        Learned { from, window: window as usize, layer: None }
    }
}

impl Scorer for Learned<'_> {
    fn scores(&mut self, at: &FfnAt<'_>) -> Result<Vec<f32>> {
        if self.layer.as_ref().is_none_or(|(layer, _)| *layer != at.layer) {
            let one = match self.from {
                From::Hash(found) => {
                    let tables = found.layers[usize::from(at.layer)].stack()?;
                    One::Hash(Box::new(PackedScorer::new(tables)?))
                }
                From::Mlp(artifact, name) => {
                    let tables = mlp::tables(artifact, at.layer.into(), name)?;
                    One::Mlp(MlpScorer::new(tables.expect("every layer has this baseline")))
                }
            };
            self.layer = Some((at.layer, one));
        }
        let (_, one) = self.layer.as_ref().expect("it was just set");
        let (hidden, neurons) = (at.weights.hidden(), at.weights.ffn_hidden());
        let tokens = at.residual.len() / hidden;
        let mut scores = vec![0f32; tokens * neurons];
        at.residual
            .par_chunks(self.window * hidden)
            .zip(scores.par_chunks_mut(self.window * neurons))
            .for_each(|(residuals, scores)| one.clone().window(residuals, hidden, scores));
        Ok(scores)
    }
}
