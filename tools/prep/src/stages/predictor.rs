//! `60-predictor`: one stack of learnable hashes a layer (paper section 3.3) that tells which blocks of neurons a token
//! will use, trained on the recorded activations.
//!
//! The layer's predictor is asked while the FFN before it still works: with the residual entering that one (stale),
//! with the residual after j of its stages, and at last with the layer's own input. One set of tables serves all of
//! these; it is trained on the recipe's mixture. The score may use free signals of past activity (`ls_hash::Signals`).
//!
//! The paper's stack (one stack, 5 layers, tau 8, d 256) can tell apart 2^8 inputs. What measured better is one layer of
//! hyperplanes whose code the head reads without a table, as signs or as levels; both are recipes of this one stage.
//!
//! A layer's unit has three records: 0 is JSON ([`LayerPredictor`]: figures on held-out windows, sizes), 1 the tables in
//! the wire form of `ls-hash`, 2 what is known of blocks without looking: mean shares of importance and frequencies
//! of activity, f32 \[blocks\] each.

pub(crate) mod samples;

use crate::artifact::{Artifact, Input, RecordId};
use crate::error::{PrepError, Result};
use crate::journal::Journal;
use crate::key::Key;
use crate::predictors::{Ema, Frequency, Grouping, Measured, PackedScorer, measure};
use crate::progress::{Phase, Progress};
use crate::recipe;
use crate::stage::{Stage, each_layer};
use crate::stages::activations::Activations;
use crate::stages::placement::{Placement, PlacementStage};
use crate::train::{BlockTargets, HeadShape, Memory, Model, Options, Shape, fault, fit};
use ls_hash::{PlaneBits, StackTables};
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use samples::{Context, LayerSamples, Sampling, held_out};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Hidden size and neurons of the shape that sizes are compared at.
pub const COMPARED_SHAPE: [usize; 2] = [4096, 14336];

/// The stage.
#[derive(Debug)]
pub struct PredictorStage<'a> {
    activations: &'a Activations,
    placement: Option<&'a Placement>,
    params: Params,
}

/// What tables depend on besides their inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Params {
    /// The recipe's section.
    pub recipe: recipe::Predictor,
    /// Of every layer's randomness, which adds its number.
    pub seed: u64,
}

/// What is known of a layer's predictor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerPredictor {
    /// On held-out windows.
    pub measured: Rows,
    /// What moving averages of activity keep of themselves at a token.
    pub moving_average: f64,
    /// Bytes of the tables, and of the memory of past activity.
    pub bytes: u64,
    /// The same at [`COMPARED_SHAPE`], with as many neurons a block.
    pub compared_bytes: u64,
    /// Mean loss of each pass over the samples.
    pub losses: Vec<f64>,
    /// Weights of the fast mean, the slow mean and the last token.
    pub weights: Option<[f32; 3]>,
    /// The tables, as stored.
    #[serde(skip)]
    pub tables: Vec<u8>,
    /// Mean share of each block in a token's importance.
    #[serde(skip)]
    pub shares: Vec<f32>,
    /// How often each block is active.
    #[serde(skip)]
    pub frequency: Vec<f32>,
}

/// Figures of a predictor and of what costs nothing, on the same tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rows {
    /// The tables.
    pub hash: Measured,
    /// Mean importance as the score.
    pub frequency: Measured,
    /// A moving average of past activity and the frequency of activity.
    pub ema: Measured,
}

impl<'a> PredictorStage<'a> {
    /// Predictors after `activations`, as `recipe` says, which is a section of a recipe with this `seed`. With
    /// `placement` they score its blocks, without it single neurons.
    #[must_use]
    pub fn new(
        activations: &'a Activations,
        placement: Option<&'a Placement>,
        recipe: &recipe::Predictor,
        seed: u64,
    ) -> Self {
        PredictorStage { activations, placement, params: Params { recipe: recipe.clone(), seed } }
    }

    /// Whether a window, counted from 0, is measured on instead of learned from.
    #[must_use]
    pub fn holds_out(&self, window: u64) -> bool {
        held_out(window, self.params.recipe.holdout_every)
    }

    fn layer(&self, layer: u32) -> Result<LayerPredictor> {
        let recipe = &self.params.recipe;
        let grouping = grouping(self.activations, self.placement, layer)?;
        let keeps = [recipe.moving_average, recipe.slow_average];
        let sampling = Sampling {
            context: Context::Mixture(&recipe.mixture),
            holdout_every: recipe.holdout_every,
            active_share: recipe.target_share,
            keeps,
        };
        let mut samples = LayerSamples::read(self.activations, layer, &grouping, sampling)?;
        let past = recipe.free_signals.then(|| std::mem::take(&mut samples.past));
        let codes = std::mem::take(&mut samples.codes);
        let targets =
            BlockTargets::new(samples.blocks, codes, past, recipe.target_share, recipe.loss)
                .map_err(fault)?;
        let shape = shape(recipe, samples.features.dims(), samples.blocks)?;
        let mut draw =
            Xoshiro256PlusPlus::seed_from_u64(self.params.seed.wrapping_add(layer.into()));
        let model = Model::new(shape, &targets.prior(), &mut draw).map_err(fault)?;
        let options = Options {
            epochs: recipe.epochs,
            batch: recipe.batch,
            learning_rate: recipe.learning_rate,
            temperature: recipe.temperature,
        };
        let losses =
            fit(&model, &samples.features, &targets, &options, &mut draw).map_err(fault)?;
        let rates = keeps.map(|keep| 1.0 - keep);
        let memory = Memory { rates, initial: samples.frequency.clone() };
        let memory = recipe.free_signals.then_some(&memory);
        let tables = model.pack_blocks(&samples.features, &targets, memory)?;
        let blocks = COMPARED_SHAPE[1].div_ceil(grouping.block_neurons as usize);
        let mut found = LayerPredictor {
            measured: Rows::default(),
            moving_average: recipe.moving_average,
            bytes: resident_bytes(&tables),
            compared_bytes: bytes_at(recipe, COMPARED_SHAPE[0], blocks)?,
            losses,
            weights: targets.weights().map_err(fault)?,
            tables: tables.to_bytes().map_err(PrepError::unsupported)?,
            shares: targets.shares(),
            frequency: samples.frequency,
        };
        let held_out = |window| self.holds_out(window);
        found.measured = found.measure(self.activations, layer, &grouping, held_out)?;
        Ok(found)
    }
}

/// The blocks of a layer.
pub fn grouping(
    activations: &Activations,
    placement: Option<&Placement>,
    layer: u32,
) -> Result<Grouping> {
    let Some(placement) = placement else {
        return Ok(Grouping::single(activations.params().neurons));
    };
    let Some(found) = placement.layers.get(layer as usize) else {
        let problem = format!("the placement has no layer {layer}");
        return Err(PrepError::incomplete("40-placement", problem));
    };
    Ok(Grouping { block_neurons: placement.block_neurons, order: found.order.clone() })
}

fn shape(recipe: &recipe::Predictor, dims: usize, blocks: usize) -> Result<Shape> {
    let plane_bits = match recipe.plane_bits {
        2 => PlaneBits::Two,
        4 => PlaneBits::Four,
        _ => PlaneBits::Eight,
    };
    let head = HeadShape::Blocks { blocks, levels: recipe.levels };
    let (layers, stacks, tau, width) = (
        recipe.layers as usize,
        recipe.stacks as usize,
        recipe.tau as usize,
        recipe.width as usize,
    );
    let shape = Shape { dims, layers, stacks, tau, width, plane_bits, head };
    shape.check().map_err(|problem| PrepError::usage(format!("[predictor]: {problem}")))?;
    Ok(shape)
}

/// Bytes that stay in memory for a layer: tables, and the memory of past activity.
fn resident_bytes(tables: &StackTables) -> u64 {
    let ls_hash::Head::Blocks(head) = &tables.head else { return tables.bytes() as u64 };
    // Two means and an offset of 16 bits, and a byte for the last token.
    let memory = if head.signals.is_some() { 7 * head.blocks() } else { 2 * head.blocks() };
    (tables.bytes() + memory) as u64
}

/// Resident bytes that a recipe's tables would have for features of `dims` numbers and so many blocks.
pub fn bytes_at(recipe: &recipe::Predictor, dims: usize, blocks: usize) -> Result<u64> {
    Ok(resident_bytes(&blank_at(recipe, dims, blocks)?))
}

/// Tables of that shape that have learned nothing.
pub fn blank_at(recipe: &recipe::Predictor, dims: usize, blocks: usize) -> Result<StackTables> {
    Ok(shape(recipe, dims, blocks)?.blank(recipe.free_signals))
}

impl Stage for PredictorStage<'_> {
    const NAME: &'static str = "60-predictor";
    const SCHEMA: u32 = 2;
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
        3 * layers.len() as u64
    }

    fn run(&self, journal: &mut Journal, progress: &mut dyn Progress) -> Result<()> {
        let grouping = grouping(self.activations, self.placement, 0)?;
        let layer_bytes =
            LayerSamples::bytes(self.activations, &grouping, self.params.recipe.batch);
        each_layer(journal, progress, Phase::Predictor, 3, layer_bytes, |layer| {
            let found = self.layer(layer)?;
            let text = serde_json::to_vec(&found).expect("plain data");
            let known = found.shares.iter().chain(&found.frequency);
            let known = known.flat_map(|x| x.to_le_bytes()).collect();
            Ok(vec![text, found.tables, known])
        })
    }
}

/// What predictors are learned from.
pub(crate) fn inputs(activations: &Activations, placement: Option<&Placement>) -> Vec<Input> {
    let mut inputs = vec![activations.artifact().input()];
    if let Some(placement) = placement {
        inputs.push(Input { name: PlacementStage::NAME.to_owned(), key: placement.key });
    }
    inputs
}

/// The predictors of a finished stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Predictors {
    /// Key of the artifact.
    pub key: Key,
    /// The first layer held.
    pub first_layer: u32,
    /// The layers that the artifact holds, in order.
    pub layers: Vec<LayerPredictor>,
}

impl Predictors {
    /// Reads the artifact of [`PredictorStage`], whole or a share of layers.
    pub fn read(artifact: &Artifact) -> Result<Predictors> {
        let description = artifact.description();
        artifact.check_stage(PredictorStage::NAME)?;
        let layer = |layer| {
            let text = artifact.read(RecordId::new(layer, 0))?;
            let mut found: LayerPredictor =
                serde_json::from_slice(&text).map_err(|problem| artifact.fault(problem))?;
            found.tables = artifact.read(RecordId::new(layer, 1))?;
            let fault = |problem| artifact.fault(format!("layer {layer}: {problem}"));
            let stack = found.stack().map_err(|problem| fault(problem.to_string()))?;
            let ls_hash::Head::Blocks(head) = stack.head else {
                return Err(fault("no scores of blocks".to_owned()));
            };
            let known = artifact.read(RecordId::new(layer, 2))?;
            let mut known: Vec<f32> =
                known.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            if known.len() != 2 * head.blocks() {
                return Err(fault(format!("{} numbers of {} blocks", known.len(), head.blocks())));
            }
            found.frequency = known.split_off(head.blocks());
            found.shares = known;
            Ok(found)
        };
        Ok(Predictors {
            key: artifact.key(),
            first_layer: description.range.0,
            layers: description.units_held().map(layer).collect::<Result<_>>()?,
        })
    }
}

impl LayerPredictor {
    /// The tables, parsed.
    pub fn stack(&self) -> Result<StackTables> {
        StackTables::from_bytes(&self.tables).map_err(PrepError::unsupported)
    }

    /// Measures the tables, and what costs nothing, on windows of `activations`: those that it learned from or others.
    pub fn measure(
        &self,
        activations: &Activations,
        layer: u32,
        grouping: &Grouping,
        held_out: impl Fn(u64) -> bool + Copy,
    ) -> Result<Rows> {
        let packed = PackedScorer::new(self.stack()?)?;
        let frequency = Frequency { shares: self.shares.clone() };
        let ema = Ema::new(self.frequency.clone(), self.moving_average as f32);
        Ok(Rows {
            hash: measure(activations, layer, grouping, held_out, || packed.clone())?,
            frequency: measure(activations, layer, grouping, held_out, || frequency.clone())?,
            ema: measure(activations, layer, grouping, held_out, || ema.clone())?,
        })
    }
}
