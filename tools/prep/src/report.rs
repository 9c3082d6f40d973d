//! [`Report`]: what is known of a bundle's preparation, gathered from the artifacts that it was made of and from those
//! of the same activations beside them.

use crate::artifact::Artifact;
use crate::error::{PrepError, Result};
use crate::key::Key;
use crate::predictors::Measured;
use crate::stage::{Stage, Store};
use crate::stages::activations::ActivationsStage;
use crate::stages::base::{Base, BaseStage};
use crate::stages::comparison::{ComparisonStage, Kind, Summary, summaries};
use crate::stages::guard::{Guard, GuardStage};
use crate::stages::mlp::{self, MlpStage};
use crate::stages::placement::{LayerPlacement, Placement, PlacementStage};
use crate::stages::predictor::{LayerPredictor, Params, PredictorStage, Predictors};
use crate::stages::reuse::{LayerReuse, Reuse, ReuseStage};
use crate::stages::sparsity::{Price, SparsityStage, prices};
use ls_bundle::Bundle;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

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
    /// Of a prediction on one thread for a layer of that size, median; null where it is not run here.
    pub microseconds: Option<f64>,
    /// The layers that it was measured in.
    pub layers: Vec<u32>,
    /// `imp20` of each.
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
        report.predictors = found.compared()?;
        if report.predictors.is_empty() {
            for artifact in found.of_stage(PredictorStage::NAME)? {
                let predictors = Predictors::read(&artifact)?;
                report.predictors.extend(hash_rows(&artifact, &predictors)?);
            }
            for artifact in found.of_stage(MlpStage::NAME)? {
                report.predictors.extend(mlp_rows(&mlp::read(&artifact)?)?);
            }
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

    /// The rows of the comparison of most layers, whole or in shares; none if there is no comparison.
    fn compared(&self) -> Result<Vec<Row>> {
        let mut by_key: BTreeMap<Key, Vec<Artifact>> = BTreeMap::new();
        for artifact in self.of_stage(ComparisonStage::NAME)? {
            by_key.entry(artifact.key()).or_default().push(artifact);
        }
        let layers = |shares: &Vec<Artifact>| {
            shares.iter().map(|share| share.description().units_held().len()).max()
        };
        let Some(shares) = by_key.into_values().max_by_key(layers) else { return Ok(Vec::new()) };
        summaries(&shares)?.iter().map(Row::of).collect()
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
    let Some(first) = predictors.layers.first() else { return Ok(Vec::new()) };
    let name = if first.stack()?.tables.is_empty() { "our stack" } else { "literal stack" };
    let params: Params = artifact.params()?;
    type Part = fn(&LayerPredictor) -> &Measured;
    let parts: [(&str, Kind, Part); 3] = [
        (name, Kind::Stack(Box::new(params.recipe)), |layer| &layer.measured.hash),
        ("frequency prior", Kind::Frequency, |layer| &layer.measured.frequency),
        ("EMA", Kind::Average, |layer| &layer.measured.ema),
    ];
    let row = |(name, kind, part): (&str, Kind, Part)| {
        let measured = predictors.layers.iter().map(|layer| part(layer).clone());
        let layers = (predictors.first_layer..).zip(measured).collect();
        Row::of(&Summary { name: name.to_owned(), kind, layers })
    };
    parts.into_iter().map(row).collect()
}

fn mlp_rows(layers: &[Vec<mlp::Baseline>]) -> Result<Vec<Row>> {
    let of = |name: &str| {
        let all = || (0u32..).zip(layers).flat_map(|(n, layer)| layer.iter().map(move |b| (n, b)));
        let found: Vec<_> = all().filter(|(_, baseline)| baseline.name == name).collect();
        let hidden = found.first()?.1.hidden;
        let kind = Kind::Mlp { hidden, signs: name == "binary" };
        let layers = found.into_iter().map(|(n, baseline)| (n, baseline.measured.clone()));
        let name = format!("MLP {name} r={hidden}");
        Some(Row::of(&Summary { name, kind, layers: layers.collect() }))
    };
    mlp::NAMES.iter().filter_map(|name| of(name)).collect()
}

impl Row {
    /// The means of a predictor's figures, its bytes and its time.
    pub fn of(summary: &Summary) -> Result<Row> {
        let Summary { name, kind, layers } = summary;
        let mean = |of: fn(&Measured) -> f64| {
            layers.iter().map(|(_, layer)| of(layer)).sum::<f64>() / layers.len() as f64
        };
        let block = layers[0].1.block;
        Ok(Row {
            name: name.clone(),
            block,
            imp20: mean(|layer| layer.full.imp20),
            top10: mean(|layer| layer.full.top10),
            red95: mean(|layer| layer.full.red95),
            imp20_stale: mean(|layer| layer.stale.imp20),
            bytes_per_layer: kind.bytes(block)?,
            microseconds: kind.microseconds(block)?,
            layers: layers.iter().map(|(layer, _)| *layer).collect(),
            imp20_by_layer: layers.iter().map(|(_, layer)| layer.full.imp20).collect(),
        })
    }
}

/// Rows for people.
#[must_use]
pub fn table(rows: &[Row]) -> Vec<String> {
    let head = "predictor            block  imp20  top10  red95  stale  bytes a layer (7B)   us (7B)  layers";
    let line = |row: &Row| {
        let time = row.microseconds.map_or("-".to_owned(), |us| format!("{us:.1}"));
        let Row { name, block, imp20, top10, red95, imp20_stale, bytes_per_layer, layers, .. } =
            row;
        let stale = imp20_stale;
        let measured = layers.len();
        format!(
            "{name:<20} {block:>5}  {imp20:.3}  {top10:.3}  {red95:.3}  {stale:.3} {bytes_per_layer:>19} \
             {time:>9}  {measured:>6}"
        )
    };
    std::iter::once(head.to_owned()).chain(rows.iter().map(line)).collect()
}
