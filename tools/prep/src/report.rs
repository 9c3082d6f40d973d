//! [`Report`]: what is known of a bundle's preparation, gathered from the artifacts that it was made of and from those
//! of the same activations beside them.

use crate::artifact::Artifact;
use crate::error::{PrepError, Result};
use crate::key::Key;
use crate::predictors::{Measured, PackedScorer, Scorer};
use crate::stage::{Stage, Store};
use crate::stages::activations::ActivationsStage;
use crate::stages::base::{Base, BaseStage};
use crate::stages::guard::{Guard, GuardStage};
use crate::stages::mlp::{self, MlpStage};
use crate::stages::placement::{LayerPlacement, Placement, PlacementStage};
use crate::stages::predictor::{
    COMPARED_SHAPE, LayerPredictor, Params, PredictorStage, Predictors, blank_at,
};
use crate::stages::reuse::{LayerReuse, Reuse, ReuseStage};
use crate::stages::sparsity::{Price, SparsityStage, prices};
use ls_bundle::Bundle;
use ls_hash::StackTables;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// Predictions timed for a row.
const TIMED: u32 = 200;

/// Figures of a predictor, means over layers, on windows that it did not learn from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Which.
    pub name: String,
    /// Neurons of the blocks that it scores.
    pub block: u32,
    /// Share of the oracle's importance that a fetch of 20 % captures (see [`crate::metrics`]).
    pub imp20: f64,
    /// Share of the strongest 10 % that is among the best 10 %.
    pub top10: f64,
    /// Fetched beyond 20 % to capture 95 % of the oracle's importance, over 20 %.
    pub red95: f64,
    /// The same as `imp20`, asked with the residual that enters the FFN before.
    pub imp20_stale: f64,
    /// Bytes that stay in memory, a layer of hidden 4096 and 14336 neurons.
    pub bytes_per_layer: u64,
    /// Of a prediction on one thread for a layer of that size, median; where it was timed.
    pub microseconds: Option<f64>,
    /// `imp20` of each layer.
    pub imp20_by_layer: Vec<f64>,
}

/// See the module's documentation.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The model's name.
    pub model: String,
    /// Keys of what was packed.
    pub made_of: BTreeMap<String, Key>,
    /// The predictors that were measured.
    pub predictors: Vec<Row>,
    /// Orders of neurons, by layer.
    pub placement: Vec<LayerPlacement>,
    /// Hit ratios, by layer.
    pub reuse: Vec<LayerReuse>,
    /// Bytes that the base keeps resident, as a share of the FFNs in half precision.
    pub base_resident_share: Option<f64>,
    /// The guard's settings and what they were chosen from, of the bundle's search or of all.
    pub guard: Vec<Guard>,
    /// The price list; of several texts or recipes all rows.
    pub prices: Vec<Price>,
}

impl Report {
    /// Gathers what there is of `bundle` inside `artifacts`.
    ///
    /// # Errors
    /// If it is no bundle of `ls-prep all`, or an artifact is broken.
    pub fn of(bundle: &Path, artifacts: &Path) -> Result<Report> {
        let bundle = Bundle::open(bundle)?;
        let model = bundle.model().name.clone();
        let made_of = made_of(&bundle.identity().recipe)?;
        let store = Store::of_model(artifacts, &model);
        let found = Found { store: &store, made_of: &made_of };
        let mut report = Report {
            predictors: Vec::new(),
            placement: Vec::new(),
            reuse: Vec::new(),
            base_resident_share: None,
            guard: Vec::new(),
            prices: Vec::new(),
            model,
            made_of: made_of.clone(),
        };
        for artifact in found.of_stage(PredictorStage::NAME)? {
            let predictors = Predictors::read(&artifact)?;
            report.predictors.extend(hash_rows(&artifact, &predictors)?);
        }
        for artifact in found.of_stage(MlpStage::NAME)? {
            report.predictors.extend(mlp_rows(&mlp::read(&artifact)?));
        }
        if let Some(artifact) = found.packed(PlacementStage::NAME)? {
            report.placement = Placement::read(&artifact)?.layers;
        }
        for artifact in found.of_stage(ReuseStage::NAME)? {
            report.reuse.extend(Reuse::read(&artifact)?.layers);
        }
        if let Some(artifact) = found.packed(BaseStage::NAME)? {
            report.base_resident_share = Some(Base::new(artifact)?.resident_share());
        }
        let guards = match found.packed(GuardStage::NAME)? {
            Some(packed) => vec![packed],
            None => found.of_stage(GuardStage::NAME)?,
        };
        report.guard = guards.iter().map(Guard::read).collect::<Result<_>>()?;
        for artifact in found.of_stage(SparsityStage::NAME)? {
            report.prices.extend(prices(&artifact)?);
        }
        Ok(report)
    }
}

/// The keys at the end of a bundle's recipe.
fn made_of(recipe: &str) -> Result<BTreeMap<String, Key>> {
    let table: toml::Table =
        recipe.parse().map_err(|problem| PrepError::corrupt("the bundle's recipe", problem))?;
    let Some(toml::Value::Table(keys)) = table.get("made_of") else {
        return Err(PrepError::unsupported("a bundle that `ls-prep all` did not make"));
    };
    let key = |(name, value): (&String, &toml::Value)| {
        Ok((name.clone(), Key::parse(value.as_str().unwrap_or_default())?))
    };
    keys.iter().map(key).collect()
}

/// Where artifacts are looked for.
struct Found<'a> {
    store: &'a Store,
    made_of: &'a BTreeMap<String, Key>,
}

impl Found<'_> {
    /// The artifact of a stage that was packed, if it is still there.
    fn packed(&self, stage: &str) -> Result<Option<Artifact>> {
        let Some(key) = self.made_of.get(stage) else { return Ok(None) };
        let path = self.store.folder().join(stage).join(format!("{key}.bin"));
        if path.exists() { Artifact::open(&path).map(Some) } else { Ok(None) }
    }

    /// All complete artifacts of a stage that come from the activations that the packed predictors come from, shares of
    /// layers too; by name. Of a stage without activations (prices) all.
    fn of_stage(&self, stage: &str) -> Result<Vec<Artifact>> {
        let recorded = |artifact: &Artifact| {
            let inputs = &artifact.description().inputs;
            inputs.iter().find(|input| input.name == ActivationsStage::NAME).map(|input| input.key)
        };
        let packed = self.packed(PredictorStage::NAME)?;
        let wanted = packed.as_ref().and_then(recorded);
        let folder = self.store.folder().join(stage);
        let Ok(names) = std::fs::read_dir(&folder) else { return Ok(Vec::new()) };
        let mut paths: Vec<_> = names.flatten().map(|entry| entry.path()).collect();
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "bin"));
        paths.sort();
        let artifacts =
            paths.iter().map(|path| Artifact::open(path)).collect::<Result<Vec<_>>>()?;
        let related = |artifact: &Artifact| {
            recorded(artifact).is_none_or(|key| wanted.is_none_or(|wanted| key == wanted))
        };
        Ok(artifacts.into_iter().filter(related).collect())
    }
}

/// The stack, and what costs nothing beside it.
fn hash_rows(artifact: &Artifact, predictors: &Predictors) -> Result<Vec<Row>> {
    let layers = &predictors.layers;
    let Some(first) = layers.first() else { return Ok(Vec::new()) };
    let stack = first.stack()?;
    let tables = stack.tables.len();
    let name = if tables > 0 { "literal stack" } else { "our stack" };
    let params: Params = artifact.params()?;
    let [hidden, neurons] = COMPARED_SHAPE;
    let blocks = neurons.div_ceil(first.measured.hash.block as usize);
    let microseconds = Some(microseconds(blank_at(&params.recipe, hidden, blocks)?)?);
    let bytes = first.compared_bytes;
    type Part = fn(&LayerPredictor) -> &Measured;
    let parts: [(&str, u64, Option<f64>, Part); 3] = [
        (name, bytes, microseconds, |layer| &layer.measured.hash),
        ("frequency prior", 0, None, |layer| &layer.measured.frequency),
        ("EMA", 0, None, |layer| &layer.measured.ema),
    ];
    let row = |(name, bytes, microseconds, part): (&str, u64, Option<f64>, Part)| {
        row(name, bytes, microseconds, &layers.iter().map(part).collect::<Vec<_>>())
    };
    Ok(parts.into_iter().map(row).collect())
}

fn mlp_rows(layers: &[Vec<mlp::Baseline>]) -> Vec<Row> {
    let of = |name: &str| {
        let found: Vec<_> = layers.iter().flatten().filter(|b| b.name == name).collect();
        let first = found.first()?;
        let measured: Vec<_> = found.iter().map(|baseline| &baseline.measured).collect();
        let title = format!("MLP {name} r={}", first.hidden);
        Some(row(&title, first.compared_bytes, None, &measured))
    };
    mlp::NAMES.iter().filter_map(|name| of(name)).collect()
}

fn row(name: &str, bytes: u64, microseconds: Option<f64>, layers: &[&Measured]) -> Row {
    let mean = |of: fn(&Measured) -> f64| {
        layers.iter().map(|layer| of(layer)).sum::<f64>() / layers.len() as f64
    };
    Row {
        name: name.to_owned(),
        block: layers[0].block,
        imp20: mean(|layer| layer.full.imp20),
        top10: mean(|layer| layer.full.top10),
        red95: mean(|layer| layer.full.red95),
        imp20_stale: mean(|layer| layer.stale.imp20),
        bytes_per_layer: bytes,
        microseconds,
        imp20_by_layer: layers.iter().map(|layer| layer.full.imp20).collect(),
    }
}

/// Median time of a prediction.
fn microseconds(stack: StackTables) -> Result<f64> {
    let residual: Vec<f32> =
        (0..stack.input.dims()).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
    let mut scorer = PackedScorer::new(stack)?;
    let mut scores = vec![0.0; scorer.blocks()];
    let mut times: Vec<f64> = (0..TIMED)
        .map(|_| {
            let start = Instant::now();
            scorer.scores(&residual, &mut scores);
            1e6 * start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
