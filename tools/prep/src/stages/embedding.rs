//! `30-embedding`: a vector for each neuron, near those of the neurons that it acts together with (paper, section
//! 3.2.2).
//!
//! The paper's objective is a skip-gram with negative sampling: a neuron n, one that is active with it (n+), one that is
//! not (n-), and the loss -log σ(z_n · z_n+) - log σ(-z_n · z_n-), minimised over the vectors z. Sampled pairs say little
//! each: six million of them left the vectors looking random. But how often each pair would be drawn is known, it has
//! been counted, so the loss here is the expected one, over all pairs at once (see `skip_gram.rs`).
//!
//! A layer's unit has two records: 0 is JSON ([`Fit`]), 1 the vectors, neurons x dimensions f32. Memory: the counts of
//! all pairs, 4 bytes each (822 MB at 14336 neurons), the layer's activity as bits, and a strip of scores.

mod skip_gram;

use crate::artifact::{Artifact, Input, RecordId};
use crate::error::Result;
use crate::journal::Journal;
use crate::key::Key;
use crate::progress::{Phase, Progress};
use crate::recipe::Recipe;
use crate::stage::{Stage, each_layer};
use crate::stages::activations::Activations;
use crate::stages::coactivity::Split;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The largest score that is believed, e^12 times chance: beyond it, neurons act in too few tokens to tell.
const MAX_SCORE: f32 = 12.0;

/// The stage.
#[derive(Debug)]
pub struct EmbeddingStage<'a> {
    activations: &'a Activations,
    params: Params,
}

/// What the vectors depend on besides the activations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Neurons of a layer.
    pub neurons: u32,
    /// Length of a vector.
    pub dimensions: u32,
    /// Passes over all neurons.
    pub epochs: u32,
    /// Step of AdamW at the beginning; it falls to zero along half a cosine.
    pub learning_rate: f64,
    /// Negative pairs for each positive one.
    pub negatives: f64,
    /// Share of the neurons that counts as active in a token.
    pub active_share: f64,
    /// Of so many tokens the last one is left to measure what becomes of the vectors.
    pub holdout_every: u32,
    /// Of the first vectors.
    pub seed: u64,
}

/// How the fit of a layer went: expected loss of a drawn pair and its negatives, in nats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// During the first pass.
    pub first_loss: f64,
    /// During the last pass.
    pub last_loss: f64,
}

/// A layer's vectors.
#[derive(Clone, Debug, PartialEq)]
pub struct Vectors {
    /// Length of each.
    pub dimensions: usize,
    /// Negative pairs for each positive one in the fit.
    pub negatives: f32,
    /// Neurons x dimensions.
    pub values: Vec<f32>,
}

impl Vectors {
    /// The vector of a neuron.
    #[must_use]
    pub fn row(&self, neuron: usize) -> &[f32] {
        &self.values[neuron * self.dimensions..][..self.dimensions]
    }

    /// How much more often a and b act together than if they knew nothing of each other: k e^(z_a · z_b).
    #[must_use]
    pub fn lift(&self, a: usize, b: usize) -> f32 {
        let score: f32 = self.row(a).iter().zip(self.row(b)).map(|(a, b)| a * b).sum();
        self.negatives * score.min(MAX_SCORE).exp()
    }
}

impl<'a> EmbeddingStage<'a> {
    /// Vectors after `activations`, as `recipe` says.
    #[must_use]
    pub fn new(activations: &'a Activations, recipe: &Recipe) -> Self {
        let (placement, embedding) = (&recipe.placement, &recipe.embedding);
        let params = Params {
            neurons: activations.params().neurons,
            dimensions: embedding.dimensions,
            epochs: embedding.epochs,
            learning_rate: embedding.learning_rate,
            negatives: embedding.negatives,
            active_share: placement.active_share,
            holdout_every: placement.holdout_every,
            seed: recipe.stage_seed(Self::NAME),
        };
        EmbeddingStage { activations, params }
    }
}

impl Stage for EmbeddingStage<'_> {
    const NAME: &'static str = "30-embedding";
    const SCHEMA: u32 = 1;
    type Params = Params;

    fn params(&self) -> Params {
        self.params.clone()
    }

    fn inputs(&self) -> Vec<Input> {
        vec![self.activations.artifact().input()]
    }

    fn units(&self) -> u32 {
        self.activations.params().layers
    }

    fn records(&self, layers: Range<u32>) -> u64 {
        2 * layers.len() as u64
    }

    fn run(&self, journal: &mut Journal, progress: &mut dyn Progress) -> Result<()> {
        let Params { neurons, dimensions, active_share, holdout_every, .. } = self.params;
        let neurons = u64::from(neurons);
        // Counts of all pairs, and the vectors with what the optimiser keeps of each.
        let layer_bytes =
            4 * neurons * (neurons + 8 * u64::from(dimensions)) + Split::bytes(self.activations);
        each_layer(journal, progress, Phase::Embedding, 2, layer_bytes, |layer| {
            let split = Split::read(self.activations, layer, active_share, holdout_every)?;
            let (fit, vectors) = skip_gram::fit(&split.taught, &self.params, layer)?;
            let fit = serde_json::to_vec(&fit).expect("plain data");
            Ok(vec![fit, vectors.values.iter().flat_map(|value| value.to_le_bytes()).collect()])
        })
    }
}

/// The vectors of a finished stage.
#[derive(Debug)]
pub struct Embedding {
    artifact: Artifact,
    params: Params,
}

impl Embedding {
    /// Takes the artifact of [`EmbeddingStage`], whole or a share of layers.
    pub fn new(artifact: Artifact) -> Result<Embedding> {
        artifact.check_stage(EmbeddingStage::NAME)?;
        let params: Params = artifact.params()?;
        Ok(Embedding { artifact, params })
    }

    /// The file.
    #[must_use]
    pub fn artifact(&self) -> &Artifact {
        &self.artifact
    }

    /// Its name.
    #[must_use]
    pub fn key(&self) -> Key {
        self.artifact.key()
    }

    /// How the fit of a layer went.
    pub fn fit(&self, layer: u32) -> Result<Fit> {
        let text = self.artifact.read(RecordId::new(layer, 0))?;
        serde_json::from_slice(&text).map_err(|problem| self.artifact.fault(problem))
    }

    /// Reads a layer's vectors.
    pub fn layer(&self, layer: u32) -> Result<Vectors> {
        let bytes = self.artifact.read(RecordId::new(layer, 1))?;
        let values: Vec<f32> =
            bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let dimensions = self.params.dimensions as usize;
        let wanted = self.params.neurons as usize * dimensions;
        if values.len() != wanted || values.iter().any(|value| !value.is_finite()) {
            let found = values.len();
            let problem = format!("layer {layer}: wanted {wanted} finite numbers, found {found}");
            return Err(self.artifact.fault(problem));
        }
        Ok(Vectors { dimensions, negatives: self.params.negatives as f32, values })
    }
}
