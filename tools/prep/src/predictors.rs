//! Predictors as they run, and [`measure`]: all are asked the same questions on the same tokens.
//!
//! A [`Scorer`] is one layer's predictor with its memory of past activity. For every held-out token it is asked as the
//! engine would ask it: at first with the residual that enters the FFN before (stale), then after each stage of that
//! FFN, then with the layer's own input; then it is told what has been active (teacher-forced: the token's true 20 %).
//! What is held out are whole windows, so memory grows as it does in a running model.

mod free;
mod hash;
mod mlp;
mod refine;
mod sketch;

pub use free::{Ema, Foresight, Frequency};
pub use hash::PackedScorer;
pub use mlp::{MlpScorer, read as read_mlp};
pub use refine::{Refinement, refinement};
pub use sketch::SketchScorer;

use crate::error::{PrepError, Result};
use crate::metrics::{Figures, Meter, Oracle, order_of};
use crate::stages::activations::{Activations, Chunk, decode_magnitude, encode_magnitude};
use half::f16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// One layer's predictor.
pub trait Scorer: Send {
    /// Whether scores depend on the residual.
    const LOOKS: bool = true;
    /// A new text begins: forgets past activity.
    fn restart(&mut self) {}
    /// What the blocks are about to do, for the oracle; others must not look.
    fn foresee(&mut self, importance: &[f32]) {
        let _ = importance;
    }
    /// Scores of all blocks for a residual, larger for likelier.
    fn scores(&mut self, residual: &[f32], scores: &mut [f32]);
    /// The token is done; these blocks were active.
    fn remember(&mut self, active: &[u32]) {
        let _ = active;
    }
}

/// How neurons are grouped into blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Grouping {
    /// Neurons of a block; the last may have fewer.
    pub block_neurons: u32,
    /// Neuron at each place; blocks are of neighbours.
    pub order: Vec<u32>,
}

impl Grouping {
    /// Every neuron by itself.
    #[must_use]
    pub fn single(neurons: u32) -> Grouping {
        Grouping { block_neurons: 1, order: (0..neurons).collect() }
    }

    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.order.len().div_ceil(self.block_neurons as usize)
    }

    /// Importances of a token's blocks, relative to its strongest neuron.
    pub fn importance(&self, codes: &[u8], into: &mut [f32]) {
        for (into, block) in into.iter_mut().zip(self.order.chunks(self.block_neurons as usize)) {
            *into = block.iter().map(|&neuron| decode_magnitude(codes[neuron as usize])).sum();
        }
    }

    /// The same, encoded relative to the strongest block.
    pub fn encode(&self, codes: &[u8], importance: &mut [f32], into: &mut Vec<u8>) {
        if self.block_neurons == 1 {
            into.extend(self.order.iter().map(|&neuron| codes[neuron as usize]));
            return;
        }
        self.importance(codes, importance);
        let largest = importance.iter().fold(f32::MIN_POSITIVE, |m, &x| m.max(x));
        into.extend(importance.iter().map(|&x| encode_magnitude(x / largest)));
    }
}

/// Figures of one predictor in one layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Neurons of a block.
    pub block: u32,
    /// With the residual that enters the FFN before.
    pub stale: Figures,
    /// After 0 to all stages of that FFN; of the staged tokens alone, so the first differs from `stale`.
    pub steps: Vec<Figures>,
    /// With the layer's own input.
    pub full: Figures,
}

/// A layer's chunk, and that of the layer before, if there is one.
pub(crate) type ChunkPair = (Chunk, Option<Chunk>);

/// The residuals of two layers that a layer's predictor may see. Layer 0 has its own alone.
pub(crate) struct Pair<'a> {
    activations: &'a Activations,
    before: Option<&'a Activations>,
    layer: u32,
}

impl<'a> Pair<'a> {
    /// Of `layer`; both layers must be recorded.
    pub(crate) fn new(activations: &'a Activations, layer: u32) -> Pair<'a> {
        Pair { activations, before: (layer > 0).then_some(activations), layer }
    }

    /// The layer's chunk and the one of the layer before.
    pub(crate) fn chunk(&self, chunk: u32) -> Result<ChunkPair> {
        let before = self.before.map(|before| before.chunk(self.layer - 1, chunk)).transpose()?;
        Ok((self.activations.chunk(self.layer, chunk)?, before))
    }
}

/// Reads an f16 residual.
pub(crate) fn widen(residual: &[f16], into: &mut Vec<f32>) {
    into.resize(residual.len(), 0.0);
    residual.convert_to_f32_slice(into);
}

#[derive(Clone, Default)]
struct Meters {
    stale: Meter,
    steps: Vec<Meter>,
    full: Meter,
}

/// Asks a new scorer of `make` for each window of `layer` for which `held_out` (told its number) is true.
///
/// # Errors
/// If the layers are not recorded or no window is held out.
pub fn measure<S: Scorer>(
    activations: &Activations,
    layer: u32,
    grouping: &Grouping,
    held_out: impl Fn(u64) -> bool,
    make: impl Fn() -> S + Sync,
) -> Result<Measured> {
    let params = activations.params();
    let per_chunk = u64::from(params.chunk_tokens / params.window);
    let pair = Pair::new(activations, layer);
    let mut all =
        Meters { steps: vec![Meter::default(); params.stages as usize + 1], ..Meters::default() };
    for chunk in 0..params.chunks() {
        let windows = params.tokens_of(chunk) / u64::from(params.window);
        let first = u64::from(chunk) * per_chunk;
        let windows: Vec<u64> = (0..windows).filter(|window| held_out(first + window)).collect();
        if windows.is_empty() {
            continue;
        }
        let chunks = pair.chunk(chunk)?;
        let found: Vec<Meters> = windows
            .par_iter()
            .map(|&window| {
                let tokens = (window * u64::from(params.window)) as usize..;
                let tokens = tokens.take(params.window as usize);
                measure_window(&chunks, params.stages, tokens, grouping, &mut make())
            })
            .collect();
        for found in found {
            all.stale.join(&found.stale);
            all.full.join(&found.full);
            all.steps.iter_mut().zip(&found.steps).for_each(|(step, found)| step.join(found));
        }
    }
    if !S::LOOKS {
        all.stale = all.full.clone();
    }
    let measured = Measured {
        block: grouping.block_neurons,
        stale: all.stale.figures(),
        steps: all.steps.iter().map(Meter::figures).collect(),
        full: all.full.figures(),
    };
    if measured.full.tokens == 0 {
        return Err(PrepError::usage("no tokens to measure predictors on"));
    }
    Ok(measured)
}

fn measure_window<S: Scorer>(
    (own, before): &ChunkPair,
    stages: u32,
    tokens: impl Iterator<Item = usize>,
    grouping: &Grouping,
    scorer: &mut S,
) -> Meters {
    let blocks = grouping.blocks();
    let mut meters =
        Meters { steps: vec![Meter::default(); stages as usize + 1], ..Meters::default() };
    let (mut importance, mut scores) = (vec![0.0; blocks], vec![0.0; blocks]);
    let mut residual = Vec::new();
    let staged: Vec<usize> = own.staged_tokens().collect();
    scorer.restart();
    for token in tokens {
        grouping.importance(own.codes(token), &mut importance);
        let oracle = Oracle::new(&importance);
        scorer.foresee(&importance);
        let mut ask = |from: &[f16], meter: &mut Meter| {
            widen(from, &mut residual);
            scorer.scores(&residual, &mut scores);
            meter.add(&oracle, &order_of(&scores));
        };
        ask(own.input(token), &mut meters.full);
        if let (Some(before), true) = (before, S::LOOKS) {
            ask(before.input(token), &mut meters.stale);
            if let Ok(index) = staged.binary_search(&token) {
                ask(before.input(token), &mut meters.steps[0]);
                for stage in 1..=stages {
                    ask(before.staged(index, stage), &mut meters.steps[stage as usize]);
                }
            }
        }
        scorer.remember(oracle.active());
    }
    meters
}
