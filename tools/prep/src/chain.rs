//! [`Chain`]: the stages of one preparation in order, each knowing the ones before it.

use crate::artifact::Artifact;
use crate::error::Result;
use crate::import::{self, TOOL, source_name};
use crate::key::Key;
use crate::pack::{self, Learned, Table};
use crate::progress::Progress;
use crate::recipe::Recipe;
use crate::rounding;
use crate::stage::{Outcome, Stage, State};
use crate::stages;
use crate::stages::activations::{Activations, ActivationsStage};
use crate::stages::base::{Base, BaseStage};
use crate::stages::embedding::{Embedding, EmbeddingStage};
use crate::stages::guard::{Choice, GuardStage};
use crate::stages::mlp::MlpStage;
use crate::stages::placement::{Placement, PlacementStage};
use crate::stages::predictor::{PredictorStage, Predictors};
use crate::stages::projection::ProjectionStage;
use crate::stages::prompts::{Prompts, Windows};
use crate::stages::reuse::{Reuse, ReuseStage};
use crate::stages::source::{self, Source};
use ls_bundle::Bundle;
use ls_bundle::base::BaseTables;
use ls_bundle::identity::Identity;
use ls_bundle::ids::{LayerId, NeuronId};
use ls_bundle::model::WeightTypes;
use ls_bundle::tables::{Settings, TableKind};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// A model, a recipe and calibration text: what everything else follows from.
#[derive(Debug)]
pub struct Chain {
    /// The model and its artifacts.
    pub source: Source,
    /// The hyper-parameters.
    pub recipe: Recipe,
    texts: Vec<PathBuf>,
}

/// Raised when the same artifacts are packed otherwise.
const PACK_SCHEMA: u32 = 2;

/// A bundle that was packed.
#[derive(Clone, Copy, Debug)]
pub struct PackedBundle {
    /// What it was made of.
    pub key: Key,
    /// Whether it was made.
    pub outcome: Outcome,
    /// Its length.
    pub bytes: u64,
}

/// What goes into a bundle besides the model.
#[derive(Clone, Copy, Debug)]
pub struct Made<'a> {
    /// The order of the neurons.
    pub placement: &'a Placement,
    /// Predictors of the placement's blocks.
    pub predictors: Option<&'a Predictors>,
    /// The low-bit base.
    pub base: Option<&'a Base>,
    /// Tables of reuse, and the key of their artifact.
    pub reuse: Option<(Key, &'a Reuse)>,
    /// Two-layer baselines of the placement's blocks.
    pub mlp: Option<&'a Artifact>,
    /// What the guard found, and the key of its artifact.
    pub settings: Option<(Key, Settings)>,
}

impl<'a> Made<'a> {
    /// As tables of a bundle, in their order there.
    fn tables(&self) -> Result<Vec<Table<'a>>> {
        let mut tables = Vec::new();
        for (number, placed) in (0u16..).zip(&self.placement.layers) {
            let layer = LayerId(number);
            if let Some(predictors) = self.predictors {
                let content = &predictors.layers[usize::from(number)].tables;
                let len = content.len() as u64;
                let content = Box::new(move || Ok(content.clone()));
                tables.push(Table { layer, kind: TableKind::Predictor, len, content });
            }
            if let Some(base) = self.base {
                let order = &placed.order;
                let len = base.tile_bytes() as u64;
                let content = Box::new(move || base.tiles_in(number.into(), order));
                tables.push(Table { layer, kind: TableKind::Base, len, content });
                let len = BaseTables::bytes(order.len() as u32, base.layout().cols());
                let content =
                    Box::new(move || Ok(base.tables_in(number.into(), order)?.to_bytes()));
                tables.push(Table { layer, kind: TableKind::BaseScores, len, content });
            }
            if let Some((_, reuse)) = self.reuse {
                let content = &reuse.layers[usize::from(number)].table;
                let len = content.len() as u64;
                let content = Box::new(move || Ok(content.clone()));
                tables.push(Table { layer, kind: TableKind::Reuse, len, content });
            }
            if let Some(mlp) = self.mlp {
                let content = stages::mlp::packed(mlp, number.into())?;
                let len = content.len() as u64;
                let content = Box::new(move || Ok(content.clone()));
                tables.push(Table { layer, kind: TableKind::Mlp, len, content });
            }
        }
        Ok(tables)
    }
}

/// How far one stage has come.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Link {
    /// Number and name of the stage.
    pub stage: &'static str,
    /// Its key, where the stages before it tell.
    pub key: Option<Key>,
    /// How far it is.
    #[serde(flatten)]
    pub state: State,
}

impl Chain {
    /// Number and name of the last stage.
    pub const PACK: &str = "90-pack";

    /// Opens the model at `model`; artifacts lie inside `artifacts`.
    pub fn open(
        model: &Path,
        artifacts: &Path,
        recipe: Recipe,
        texts: Vec<PathBuf>,
        progress: &mut dyn Progress,
    ) -> Result<Chain> {
        Ok(Chain { source: Source::open(model, artifacts, progress)?, recipe, texts })
    }

    /// `15-prompts`.
    pub fn prompts(&self) -> Result<Prompts<'_>> {
        Prompts::new(&self.source, &self.texts, &self.recipe)
    }

    /// The calibration windows, made if they are not there, and their artifact's key.
    pub fn windows(&self, progress: &mut dyn Progress) -> Result<(Windows, Key)> {
        let (artifact, _) = self.source.store.run(&self.prompts()?, None, progress)?;
        Ok((Windows::read(&artifact, self.source.model.config.vocab_size)?, artifact.key()))
    }

    /// `20-activations` of these windows.
    #[must_use]
    pub fn activations<'a>(&'a self, windows: &'a Windows, prompts: Key) -> ActivationsStage<'a> {
        ActivationsStage::new(&self.source, windows, prompts, &self.recipe)
    }

    /// The recorded activations, which the stage named `by` needs.
    pub fn recorded(&self, by: &str, progress: &mut dyn Progress) -> Result<Activations> {
        let (windows, prompts) = self.windows(progress)?;
        let stage = self.activations(&windows, prompts);
        Activations::new(self.source.store.need(&stage, by)?)
    }

    /// The placement after these activations, which the stage named `by` needs.
    pub fn placed(&self, activations: &Activations, by: &str) -> Result<Placement> {
        let store = &self.source.store;
        let embedding = Embedding::new(store.need(&self.embedding(activations), by)?)?;
        Placement::read(&store.need(&self.placement(activations, &embedding), by)?)
    }

    /// `30-embedding` after these activations.
    #[must_use]
    pub fn embedding<'a>(&self, activations: &'a Activations) -> EmbeddingStage<'a> {
        EmbeddingStage::new(activations, &self.recipe)
    }

    /// `40-placement` after these activations and vectors.
    #[must_use]
    pub fn placement<'a>(
        &self,
        activations: &'a Activations,
        embedding: &'a Embedding,
    ) -> PlacementStage<'a> {
        let architecture = self.source.model.config.architecture;
        PlacementStage::new(activations, embedding, architecture, &self.recipe)
    }

    /// The same in blocks of another size than the recipe's.
    #[must_use]
    pub fn placement_in<'a>(
        &self,
        activations: &'a Activations,
        embedding: &'a Embedding,
        block_neurons: u32,
    ) -> PlacementStage<'a> {
        let mut recipe = self.recipe.clone();
        recipe.placement.block_neurons = Some(block_neurons);
        let architecture = self.source.model.config.architecture;
        PlacementStage::new(activations, embedding, architecture, &recipe)
    }

    /// Fails if a bundle of this name would replace the model.
    pub fn refuse_to_replace(&self, out: &Path) -> Result<()> {
        import::refuse_to_replace(&self.source.model, out)
    }

    /// Packs the model and what was learned into the bundle `out`, unless it is there already.
    pub fn pack(
        &self,
        out: &Path,
        made: &Made<'_>,
        progress: &mut dyn Progress,
    ) -> Result<PackedBundle> {
        let Made { placement, predictors, base, reuse, mlp, settings } = *made;
        let pack = &self.recipe.pack;
        let types = WeightTypes {
            attention: pack.dtype.into(),
            ffn: pack.ffn_dtype.into(),
            embedding: pack.embedding_dtype.into(),
        };
        let mut made_of =
            vec![(source::NAME, self.source.key), (PlacementStage::NAME, placement.key)];
        made_of.extend(predictors.map(|found| (PredictorStage::NAME, found.key)));
        made_of.extend(base.map(|base| (BaseStage::NAME, base.key())));
        made_of.extend(reuse.map(|(key, _)| (ReuseStage::NAME, key)));
        made_of.extend(mlp.map(|mlp| (MlpStage::NAME, mlp.key())));
        made_of.extend(settings.map(|(key, _)| (GuardStage::NAME, key)));
        let calibration = match rounding::wanted(types) && pack.rounding_tokens > 0 {
            true => Some(self.windows(progress)?),
            false => None,
        };
        made_of.extend(calibration.as_ref().map(|(_, key)| (Prompts::NAME, *key)));
        let recipe =
            made_of.iter().fold(self.recipe.to_toml() + "\n[made_of]\n", |text, (name, key)| {
                text + &format!("{name:?} = \"{key}\"\n")
            });
        let key = Key::derive(Self::PACK, PACK_SCHEMA, &recipe.as_str().into(), &[]);
        let identity = Identity {
            tool: TOOL.to_owned(),
            source: source_name(&self.source.path),
            source_hash: self.source.hash.to_string(),
            seed: self.recipe.seed,
            recipe,
        };
        // A bundle has its name only if it is complete: what it says of itself is enough.
        if let Ok(there) = Bundle::open(out)
            && *there.identity() == identity
        {
            return Ok(PackedBundle { key, outcome: Outcome::Kept, bytes: there.total_len() });
        }
        let order = placement.layers.iter().flat_map(|layer| &layer.order);
        let neurons = order.map(|&neuron| NeuronId(neuron)).collect();
        let model = &self.source.model;
        let placed = ls_bundle::placement::Placement::new(model.config.ffn_hidden, neurons);
        let settings = settings.map(|(_, settings)| settings);
        let calibration = calibration.map(|(windows, _)| windows.some(pack.rounding_tokens));
        let learned = Learned {
            placement: Some(placed),
            calibration: calibration.as_ref(),
            tables: made.tables()?,
            settings,
        };
        let packed =
            pack::write(out, model, identity, types, placement.block_neurons, &learned, progress)?;
        Ok(PackedBundle { key, outcome: Outcome::Made, bytes: packed.bundle_bytes })
    }

    /// `60-predictor` after these activations: of single neurons, or of a placement's blocks; the paper's `literal`
    /// stack, or ours.
    #[must_use]
    pub fn predictor<'a>(
        &self,
        activations: &'a Activations,
        placement: Option<&'a Placement>,
        literal: bool,
    ) -> PredictorStage<'a> {
        let recipe = if literal { &self.recipe.literal } else { &self.recipe.predictor };
        let seed = self.recipe.stage_seed(PredictorStage::NAME);
        PredictorStage::new(activations, placement, recipe, seed)
    }

    /// `62-mlp` after these activations.
    #[must_use]
    pub fn mlp<'a>(
        &self,
        activations: &'a Activations,
        placement: Option<&'a Placement>,
    ) -> MlpStage<'a> {
        MlpStage::new(activations, placement, &self.recipe)
    }

    /// `63-base` after these activations.
    pub fn base<'a>(&'a self, activations: &'a Activations) -> Result<BaseStage<'a>> {
        BaseStage::new(&self.source, activations, &self.recipe)
    }

    /// `63-base` after these activations, with other bits than the recipe's.
    pub fn base_of<'a>(
        &'a self,
        activations: &'a Activations,
        bits: [u32; 3],
        exact_shares: &[f64],
    ) -> Result<BaseStage<'a>> {
        BaseStage::with(&self.source, activations, &self.recipe, bits, exact_shares.to_vec())
    }

    /// Takes over what the guard has chosen: the base's bits, the blocks and the format of what is streamed.
    pub fn follow(&mut self, choice: &Choice) {
        let Recipe { base, placement, pack, .. } = &mut self.recipe;
        if let Some(bits) = choice.arm.bits {
            (base.gate_bits, base.up_bits, base.down_bits) = bits.into();
            placement.block_neurons = Some(choice.arm.block_neurons);
        }
        pack.ffn_dtype = choice.arm.format;
    }

    /// `50-projection` of these activations.
    #[must_use]
    pub fn projection<'a>(&self, activations: &'a Activations) -> ProjectionStage<'a> {
        ProjectionStage::new(activations, &self.recipe)
    }

    /// `61-reuse` of this placement's blocks.
    #[must_use]
    pub fn reuse<'a>(
        &self,
        activations: &'a Activations,
        placement: &'a Placement,
    ) -> ReuseStage<'a> {
        ReuseStage::new(activations, placement, &self.recipe)
    }

    /// All stages in order. Makes nothing.
    pub fn links(&self) -> Result<Vec<Link>> {
        let store = &self.source.store;
        let bytes = |path: &PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
        let bytes = self.source.model.files.iter().map(bytes).sum();
        let state = State::Done { bytes };
        let mut links = vec![Link { stage: source::NAME, key: Some(self.source.key), state }];

        let prompts = if self.texts.is_empty() { None } else { Some(self.prompts()?) };
        links.push(self.link(prompts.as_ref())?);
        let vocab_size = self.source.model.config.vocab_size;
        let windows = match &prompts {
            Some(stage) => store.find(stage).ok().flatten().and_then(|artifact| {
                Windows::read(&artifact, vocab_size).ok().map(|w| (w, artifact.key()))
            }),
            None => None,
        };
        let stage = windows.as_ref().map(|(windows, key)| self.activations(windows, *key));
        links.push(self.link(stage.as_ref())?);
        let activations = self.made(stage.as_ref()).map(Activations::new).transpose()?;
        let activations = activations.as_ref();

        let stage = activations.map(|activations| self.embedding(activations));
        links.push(self.link(stage.as_ref())?);
        let embedding = self.made(stage.as_ref()).map(Embedding::new).transpose()?;
        let stage = activations.zip(embedding.as_ref()).map(|(a, e)| self.placement(a, e));
        links.push(self.link(stage.as_ref())?);
        let placement = self.made(stage.as_ref());
        let placement = placement.as_ref().map(Placement::read).transpose()?;

        let stage = activations.map(|activations| self.projection(activations));
        links.push(self.link(stage.as_ref())?);
        let placed = activations.zip(placement.as_ref());
        let stage = placed.map(|(a, placement)| self.predictor(a, Some(placement), false));
        links.push(self.link(stage.as_ref())?);
        let stage = placed.map(|(a, placement)| self.reuse(a, placement));
        links.push(self.link(stage.as_ref())?);
        let stage = activations.map(|activations| self.mlp(activations, None));
        links.push(self.link(stage.as_ref())?);
        // A model whose rows have no low-bit form has no base.
        let stage = activations.and_then(|activations| self.base(activations).ok());
        links.push(self.link(stage.as_ref())?);
        Ok(links)
    }

    /// What is there of a stage, if its artifact can be read.
    fn made<S: Stage>(&self, stage: Option<&S>) -> Option<Artifact> {
        stage.and_then(|stage| self.source.store.find(stage).ok().flatten())
    }

    /// How far a stage has come; `None` if its key hangs on one that is not there.
    fn link<S: Stage>(&self, stage: Option<&S>) -> Result<Link> {
        let store = &self.source.store;
        let (key, state) = match stage {
            Some(stage) => (Some(stage.key()), store.state(stage)?),
            None => (None, store.state_without_key(S::NAME)?),
        };
        Ok(Link { stage: S::NAME, key, state })
    }
}
