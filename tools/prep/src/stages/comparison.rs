//! `64-comparison`: all predictors of a layer, asked the same questions on the same tokens in one run ([`measure`]).
//!
//! Measured are windows that none of them has learned from: those that are held out of the calibration text, or all of
//! another text whose activations were recorded. A layer's unit is one JSON record, a [`Compared`] each.

use crate::artifact::{Artifact, Input, RecordId};
use crate::error::{PrepError, Result};
use crate::journal::Journal;
use crate::model::Model;
use crate::predictors::{
    Ema, Foresight, Frequency, Measured, MlpScorer, PackedScorer, Scorer, SketchScorer, measure,
};
use crate::progress::{Phase, Progress};
use crate::recipe;
use crate::stage::{Stage, each_layer};
use crate::stages::activations::Activations;
use crate::stages::base::{Base, BaseStage};
use crate::stages::mlp::{self, MlpStage};
use crate::stages::placement::Placement;
use crate::stages::predictor::samples::held_out;
use crate::stages::predictor::{
    COMPARED_SHAPE, Params as PredictorParams, PredictorStage, Predictors, bytes_at, grouping,
};
use crate::stages::source::Source;
use crate::timing;
use ls_bundle::low_bit::{Bits, RecordLayout};
use ls_bundle::model::Vectors;
use ls_hash::MlpTables;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A kind of predictor, as far as its size and time depend on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Mean importance.
    Frequency,
    /// A moving average of past activity, and the frequency of activity.
    Average,
    /// A stack of learnable hashes.
    Stack(Box<recipe::Predictor>),
    /// Two layers of 8-bit weights, or of signs.
    Mlp {
        /// Hidden units.
        hidden: u32,
        /// Whether weights are signs.
        signs: bool,
    },
    /// Low-bit gate and up.
    Sketch([u32; 2]),
    /// What is about to happen.
    Oracle,
}

/// A predictor's figures in one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// For people.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Its figures.
    pub measured: Measured,
}

/// A predictor in all layers measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// For people.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Layers and figures.
    pub layers: Vec<(u32, Measured)>,
}

/// What is compared; what is not there has no rows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Candidates<'a> {
    /// Our stacks, of single neurons.
    pub single: Option<&'a Stacks<'a>>,
    /// Of a placement's blocks.
    pub placed: Option<&'a Stacks<'a>>,
    /// The paper's, of single neurons.
    pub literal: Option<&'a Stacks<'a>>,
    /// Two-layer baselines, of single neurons.
    pub mlp: Option<&'a Artifact>,
    /// Bases whose gate and up are asked.
    pub sketches: &'a [Base],
}

/// Stacks of some layers.
#[derive(Debug)]
pub struct Stacks<'a> {
    found: Predictors,
    params: PredictorParams,
    placement: Option<&'a Placement>,
}

impl<'a> Stacks<'a> {
    /// Takes an artifact of [`PredictorStage`], of single neurons or of the blocks of `placement`.
    pub fn read(artifact: &Artifact, placement: Option<&'a Placement>) -> Result<Stacks<'a>> {
        let (found, params) = (Predictors::read(artifact)?, artifact.params()?);
        Ok(Stacks { found, params, placement })
    }
}

/// What the figures depend on besides their inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Params {
    /// Of so many windows the last one is measured: 1 for a text that nothing was learned from.
    pub holdout_every: u32,
}

/// The stage.
#[derive(Debug)]
pub struct ComparisonStage<'a> {
    source: &'a Source,
    activations: &'a Activations,
    candidates: Candidates<'a>,
    vectors: Vectors,
    params: Params,
}

impl<'a> ComparisonStage<'a> {
    /// Compares `candidates` on the windows of `activations` that are held out as `params` say.
    pub fn new(
        source: &'a Source,
        activations: &'a Activations,
        candidates: Candidates<'a>,
        params: Params,
    ) -> Result<ComparisonStage<'a>> {
        let vectors = Model::vectors(&source.model)?;
        Ok(ComparisonStage { source, activations, candidates, vectors, params })
    }

    fn layer(&self, layer: u32) -> Result<Vec<Compared>> {
        let mut rows = Vec::new();
        let Candidates { single, placed, literal, mlp, sketches } = self.candidates;
        if let Some(stacks) = single {
            let known = self.of_layer(stacks, layer)?;
            let shares = known.shares.clone();
            let frequency = known.frequency.clone();
            let average = Ema::new(frequency, known.moving_average as f32);
            rows.push(self.row(layer, "frequency prior", Kind::Frequency, Frequency { shares })?);
            rows.push(self.row(layer, "EMA", Kind::Average, average)?);
        }
        let stacks = [("literal stack", literal), ("our stack", single), ("our stack", placed)];
        for (name, stacks) in stacks {
            let Some(stacks) = stacks else { continue };
            let scorer = PackedScorer::new(self.of_layer(stacks, layer)?.stack()?)?;
            let kind = Kind::Stack(Box::new(stacks.params.recipe.clone()));
            rows.push(self.measured(layer, name, kind, stacks.placement, scorer)?);
        }
        if let Some(artifact) = mlp {
            for (name, found) in
                mlp::NAMES.iter().map(|name| (name, mlp::tables(artifact, layer, name)))
            {
                let Some(tables) = found? else { continue };
                let (hidden, signs) = (tables.first_biases.len() as u32, tables.is_signs());
                let title = if signs {
                    format!("BNN r={hidden}")
                } else {
                    format!("MLP {name} r={hidden}")
                };
                let kind = Kind::Mlp { hidden, signs };
                rows.push(self.row(layer, &title, kind, MlpScorer::new(tables))?);
            }
        }
        for base in sketches {
            let [gate, up, _] = base.params().bits;
            let norms = &self.vectors.layers[layer as usize].mlp_norm;
            let epsilon = self.source.model.config.norm_epsilon;
            let scorer = SketchScorer::new(base.layer(layer)?, norms, epsilon);
            let name = format!("sketch {gate}/{up} bits");
            rows.push(self.row(layer, &name, Kind::Sketch([gate, up]), scorer)?);
        }
        rows.push(self.row(layer, "oracle", Kind::Oracle, Foresight::default())?);
        Ok(rows)
    }

    fn of_layer<'s>(
        &self,
        stacks: &'s Stacks<'_>,
        layer: u32,
    ) -> Result<&'s crate::stages::predictor::LayerPredictor> {
        let place = layer.checked_sub(stacks.found.first_layer);
        place.and_then(|place| stacks.found.layers.get(place as usize)).ok_or_else(|| {
            PrepError::incomplete(PredictorStage::NAME, format!("no stack of layer {layer}"))
        })
    }

    fn row(
        &self,
        layer: u32,
        name: &str,
        kind: Kind,
        scorer: impl Scorer + Clone + Sync,
    ) -> Result<Compared> {
        self.measured(layer, name, kind, None, scorer)
    }

    fn measured(
        &self,
        layer: u32,
        name: &str,
        kind: Kind,
        placement: Option<&Placement>,
        scorer: impl Scorer + Clone + Sync,
    ) -> Result<Compared> {
        let blocks = grouping(self.activations, placement, layer)?;
        let held_out = |window| held_out(window, self.params.holdout_every);
        let measured = measure(self.activations, layer, &blocks, held_out, || scorer.clone())?;
        Ok(Compared { name: name.to_owned(), kind, measured })
    }
}

impl Stage for ComparisonStage<'_> {
    const NAME: &'static str = "64-comparison";
    const SCHEMA: u32 = 1;
    type Params = Params;

    fn params(&self) -> Params {
        self.params
    }

    fn inputs(&self) -> Vec<Input> {
        let Candidates { single, placed, literal, mlp, sketches } = self.candidates;
        let input = |name: &str, key| Input { name: name.to_owned(), key };
        let stacks = [("single", single), ("placed", placed), ("literal", literal)];
        let stacks =
            stacks.into_iter().filter_map(|(name, stacks)| Some((name, stacks?.found.key)));
        std::iter::once(input("measured on", self.activations.artifact().key()))
            .chain(
                stacks.map(|(name, key)| input(&format!("{} {name}", PredictorStage::NAME), key)),
            )
            .chain(mlp.map(|artifact| input(MlpStage::NAME, artifact.key())))
            .chain(sketches.iter().map(|base| input(BaseStage::NAME, base.key())))
            .collect()
    }

    fn units(&self) -> u32 {
        self.activations.params().layers
    }

    fn records(&self, layers: Range<u32>) -> u64 {
        layers.len() as u64
    }

    fn run(&self, journal: &mut Journal, progress: &mut dyn Progress) -> Result<()> {
        each_layer(journal, progress, Phase::Comparison, 1, u64::MAX, |layer| {
            let rows = self.layer(layer)?;
            Ok(vec![serde_json::to_vec(&rows).expect("plain data")])
        })
    }
}

/// The rows of artifacts of [`ComparisonStage`], which hold layers of one comparison.
pub fn summaries(artifacts: &[Artifact]) -> Result<Vec<Summary>> {
    let mut all: Vec<Summary> = Vec::new();
    for artifact in artifacts {
        artifact.check_stage(ComparisonStage::NAME)?;
        for id in artifact.ids() {
            let rows: Vec<Compared> =
                serde_json::from_slice(&artifact.read(RecordId::new(id.unit, 0))?)
                    .map_err(|problem| artifact.fault(problem))?;
            for Compared { name, kind, measured } in rows {
                let same = |s: &Summary| s.name == name && s.layers[0].1.block == measured.block;
                let place = all.iter().position(same);
                let layer = (id.unit, measured);
                match place {
                    Some(place) => all[place].layers.push(layer),
                    None => all.push(Summary { name, kind, layers: vec![layer] }),
                }
            }
        }
    }
    all.iter_mut().for_each(|summary| summary.layers.sort_by_key(|(layer, _)| *layer));
    Ok(all)
}

impl Kind {
    /// Bytes that stay in memory for a layer at [`COMPARED_SHAPE`]; means and frequencies as 16 bits.
    pub fn bytes(&self, block_neurons: u32) -> Result<u64> {
        let [hidden, neurons] = COMPARED_SHAPE;
        let blocks = neurons.div_ceil(block_neurons as usize);
        Ok(match self {
            Kind::Frequency => 2 * blocks as u64,
            Kind::Average => 4 * blocks as u64,
            Kind::Stack(recipe) => bytes_at(recipe, hidden, blocks)?,
            Kind::Mlp { hidden: units, signs } => {
                MlpTables::bytes_of(hidden, *units as usize, blocks, *signs)
            }
            Kind::Sketch([gate, up]) => {
                let bits = [Bits::new(*gate), Bits::new(*up), None];
                let layout =
                    RecordLayout::new(hidden as u32, bits).map_err(PrepError::unsupported)?;
                // Three bytes of doubt a neuron.
                (neurons * (layout.bytes() + 3)) as u64
            }
            Kind::Oracle => 0,
        })
    }

    /// Microseconds of a prediction there, on one thread; nothing where no form to run exists here.
    pub fn microseconds(&self, block_neurons: u32) -> Result<Option<f64>> {
        Ok(match self {
            Kind::Frequency => Some(timing::frequency_us()),
            Kind::Average => Some(timing::average_us()),
            Kind::Stack(recipe) => Some(timing::stack_us(recipe, block_neurons)?),
            Kind::Mlp { signs: true, .. } | Kind::Oracle => None,
            Kind::Mlp { hidden, .. } => Some(timing::mlp_us(*hidden as usize, block_neurons)),
            Kind::Sketch(bits) => timing::sketch_us(*bits)?,
        })
    }
}
