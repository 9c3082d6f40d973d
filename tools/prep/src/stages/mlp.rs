//! `62-mlp`: two-layer baselines that the hashing predictor is compared with, trained properly on the same samples with
//! the same loss, and stored as they would run.
//!
//! | name | hidden | weights | learns from, asked with |
//! |---|---|---|---|
//! | `full` | 128 | int8 | the layer's own input (the paper's DNN_F) |
//! | `stale` | 128 | int8 | the residual entering the FFN before (DNN_S) |
//! | `wide-full`, `wide-stale` | 1024 | int8 | the same, in the layers that the recipe names |
//! | `tiny` | as many bytes as the hash | int8 | the mixture |
//! | `binary` | recipe's | signs, and signs between the layers (BNN) | the mixture |
//!
//! A layer's unit has record 0, JSON ([`Baseline`] each), and one record for each name, in this order: the tables in
//! the form of [`MlpTables`], empty where the recipe has none.

use crate::artifact::{Artifact, Input, RecordId};
use crate::error::Result;
use crate::journal::Journal;
use crate::predictors::{Grouping, Measured, MlpScorer, measure, read_mlp};
use crate::progress::{Phase, Progress};
use crate::recipe;
use crate::stage::{Stage, each_layer};
use crate::stages::activations::Activations;
use crate::stages::placement::Placement;
use crate::stages::predictor::samples::{Context, LayerSamples, Sampling, held_out};
use crate::stages::predictor::{COMPARED_SHAPE, grouping, inputs};
use crate::train::mlp::Mlp;
use crate::train::{BlockTargets, Options, fault};
use ls_hash::MlpTables;
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The baselines' names, in the order of their records.
pub const NAMES: [&str; 6] = ["full", "stale", "wide-full", "wide-stale", "tiny", "binary"];

/// The stage.
#[derive(Debug)]
pub struct MlpStage<'a> {
    activations: &'a Activations,
    placement: Option<&'a Placement>,
    params: Params,
}

/// What the baselines depend on besides their inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Params {
    /// The recipe's section.
    pub recipe: recipe::Mlp,
    /// Mixture, loss, target and held-out windows are the hashing predictor's.
    pub mixture: Vec<u32>,
    /// As there.
    pub loss: crate::train::Loss,
    /// As there.
    pub target_share: f64,
    /// As there.
    pub holdout_every: u32,
    /// Of every layer's randomness.
    pub seed: u64,
}

/// One baseline in one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// Which; of [`NAMES`].
    pub name: String,
    /// Hidden units.
    pub hidden: u32,
    /// On held-out windows.
    pub measured: Measured,
    /// Bytes that stay in memory.
    pub bytes: u64,
    /// The same at [`COMPARED_SHAPE`].
    pub compared_bytes: u64,
    /// Mean loss of each pass over the samples.
    pub losses: Vec<f64>,
}

impl<'a> MlpStage<'a> {
    /// Baselines after `activations` as `recipe` and its `predictor` section say. With `placement` they score its
    /// blocks.
    #[must_use]
    pub fn new(
        activations: &'a Activations,
        placement: Option<&'a Placement>,
        recipe: &recipe::Recipe,
    ) -> Self {
        let predictor = &recipe.predictor;
        let params = Params {
            recipe: recipe.mlp.clone(),
            mixture: predictor.mixture.clone(),
            loss: predictor.loss,
            target_share: predictor.target_share,
            holdout_every: predictor.holdout_every,
            seed: recipe.stage_seed(Self::NAME),
        };
        MlpStage { activations, placement, params }
    }

    /// Hidden units and whether weights are signs, if the layer has the baseline.
    fn sizes(&self, name: &str, layer: u32) -> Option<(u32, bool)> {
        let recipe = &self.params.recipe;
        if !recipe.names.iter().any(|wanted| wanted == name) {
            return None;
        }
        match name {
            "full" | "stale" => Some((recipe.hidden, false)),
            "tiny" => Some((recipe.tiny_hidden, false)),
            "binary" => Some((recipe.binary_hidden, true)),
            _ => recipe.wide_layers.contains(&layer).then_some((recipe.wide_hidden, false)),
        }
    }

    fn layer(&self, layer: u32) -> Result<Vec<Vec<u8>>> {
        let grouping = grouping(self.activations, self.placement, layer)?;
        let mut baselines = Vec::new();
        let mut records = vec![Vec::new(); NAMES.len()];
        let contexts = [
            (Context::Full, ["full", "wide-full"]),
            (Context::Stale, ["stale", "wide-stale"]),
            (Context::Mixture(&self.params.mixture), ["tiny", "binary"]),
        ];
        for (context, names) in contexts {
            let sampling = Sampling {
                context,
                holdout_every: self.params.holdout_every,
                active_share: self.params.target_share,
                keeps: [0.0; 2],
            };
            if names.iter().all(|name| self.sizes(name, layer).is_none()) {
                continue;
            }
            let samples = LayerSamples::read(self.activations, layer, &grouping, sampling)?;
            for name in names {
                let Some(sizes) = self.sizes(name, layer) else { continue };
                let (baseline, tables) = self.train(layer, &grouping, &samples, name, sizes)?;
                let place = NAMES.iter().position(|known| *known == name).expect("a known name");
                records[place] = tables.to_bytes();
                baselines.push(baseline);
            }
        }
        records.insert(0, serde_json::to_vec(&baselines).expect("plain data"));
        Ok(records)
    }

    fn train(
        &self,
        layer: u32,
        grouping: &Grouping,
        samples: &LayerSamples,
        name: &str,
        (hidden, signs): (u32, bool),
    ) -> Result<(Baseline, MlpTables)> {
        let Params { recipe, target_share, loss, holdout_every, seed, .. } = &self.params;
        let codes = samples.codes.clone();
        let targets =
            BlockTargets::new(samples.blocks, codes, None, *target_share, *loss).map_err(fault)?;
        let mut draw = Xoshiro256PlusPlus::seed_from_u64(seed.wrapping_add(layer.into()));
        let (dims, prior) = (samples.features.dims(), targets.prior());
        let model = Mlp::new(dims, hidden as usize, signs, &prior, &mut draw).map_err(fault)?;
        let learning_rate = if signs { recipe.binary_learning_rate } else { recipe.learning_rate };
        let options = Options {
            epochs: recipe.epochs,
            batch: recipe.batch,
            learning_rate,
            temperature: [1.0; 2],
        };
        let losses = model.fit(&samples.features, &targets, &options, &mut draw).map_err(fault)?;
        let tables = model.pack(&samples.features).map_err(fault)?;
        let scorer = MlpScorer::new(tables.clone());
        let held_out = |window| held_out(window, *holdout_every);
        let make = || scorer.clone();
        let measured = measure(self.activations, layer, grouping, held_out, make)?;
        let blocks = COMPARED_SHAPE[1].div_ceil(grouping.block_neurons as usize);
        let baseline = Baseline {
            name: name.to_owned(),
            hidden,
            measured,
            bytes: tables.bytes(),
            compared_bytes: tables.bytes_at(COMPARED_SHAPE[0], blocks),
            losses,
        };
        Ok((baseline, tables))
    }
}

impl Stage for MlpStage<'_> {
    const NAME: &'static str = "62-mlp";
    const SCHEMA: u32 = 1;
    const IN_TENSORS: bool = true;
    type Params = Params;

    fn params(&self) -> Params {
        self.params.clone()
    }

    fn inputs(&self) -> Vec<Input> {
        inputs(self.activations, self.placement)
    }

    fn units(&self) -> u32 {
        self.activations.params().layers
    }

    fn records(&self, layers: Range<u32>) -> u64 {
        (1 + NAMES.len() as u64) * layers.len() as u64
    }

    fn run(&self, journal: &mut Journal, progress: &mut dyn Progress) -> Result<()> {
        let parts = 1 + NAMES.len() as u32;
        let grouping = grouping(self.activations, self.placement, 0)?;
        let layer_bytes =
            LayerSamples::bytes(self.activations, &grouping, self.params.recipe.batch);
        each_layer(journal, progress, Phase::Mlp, parts, layer_bytes, |layer| self.layer(layer))
    }
}

/// Reads the baselines of each layer that an artifact of [`MlpStage`] holds.
pub fn read(artifact: &Artifact) -> Result<Vec<Vec<Baseline>>> {
    artifact.check_stage(MlpStage::NAME)?;
    let layer = |layer| {
        let text = artifact.read(RecordId::new(layer, 0))?;
        serde_json::from_slice(&text).map_err(|problem| artifact.fault(problem))
    };
    artifact.description().units_held().map(layer).collect()
}

/// Reads the tables of the baseline `name` of a layer, if the artifact has it.
pub fn tables(artifact: &Artifact, layer: u32, name: &str) -> Result<Option<MlpTables>> {
    let Some(place) = NAMES.iter().position(|known| *known == name) else { return Ok(None) };
    let bytes = artifact.read(RecordId::new(layer, 1 + place as u32))?;
    if bytes.is_empty() { Ok(None) } else { read_mlp(&bytes).map(Some) }
}

/// Bytes of the tables that a bundle holds of a layer: of the wide baseline, where there is one.
pub fn packed(artifact: &Artifact, layer: u32) -> Result<Vec<u8>> {
    for name in ["wide-stale", "stale"] {
        if let Some(tables) = tables(artifact, layer, name)? {
            return Ok(tables.to_bytes());
        }
    }
    Err(artifact.fault(format!("layer {layer} has no baseline that knows the layer before only")))
}

/// Measures the baselines of a layer on windows of `activations`, others than they learned from: name and figures.
pub fn measure_on(
    artifact: &Artifact,
    activations: &Activations,
    layer: u32,
    grouping: &Grouping,
) -> Result<Vec<(String, Measured)>> {
    let mut rows = Vec::new();
    for name in NAMES {
        let Some(tables) = tables(artifact, layer, name)? else { continue };
        let scorer = MlpScorer::new(tables);
        let found = measure(activations, layer, grouping, |_| true, || scorer.clone())?;
        rows.push((name.to_owned(), found));
    }
    Ok(rows)
}
