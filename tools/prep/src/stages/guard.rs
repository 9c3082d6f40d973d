//! `66-guard`: with which base, in which number format, in which blocks and at which share of exact neurons a model
//! reads least for a token while its perplexity stays within some share of the dense model's.
//!
//! What is read is counted, not assumed: each layer keeps in memory, beside its base, as many blocks as the budget has
//! room for, and what its cache misses is read ([`Demand`]). The budget is a share of the FFNs' bytes in half
//! precision; attention, embedding and head are as they are and count on neither side. Streaming the dense FFNs past
//! the same budget, in each format, is what the answers are measured against, and may be the answer.
//!
//! Unit 0 is dense, a record a format; the units behind it are the recipe's bases, a record an *arm*: format, block
//! size, and whether one count or one threshold for all layers selects. A record is JSON ([`Searched`]). Units know nothing
//! of each other, so that several machines can share them; arms of a unit are ended early where an earlier one is
//! better. Thresholds are measured only: a bundle cannot ask for one.

mod search;

pub use search::Point;

use crate::artifact::{Artifact, Input, RecordId};
use crate::base::Histogram;
use crate::error::Result;
use crate::journal::Journal;
use crate::progress::Progress;
use crate::recipe::{self, Format, Recipe};
use crate::sparse::{Demand, Dense, Policy, Selection, WithBase, likelihoods_in, perplexity};
use crate::stage::Stage;
use crate::stages::base::{Base, BaseStage};
use crate::stages::placement::{Placement, PlacementStage};
use crate::stages::source::Source;
use ls_bundle::ids::BlockId;
use ls_bundle::model::{DType, FfnExtent};
use ls_bundle::tables::Settings;
use search::{Goal, cheapest, search};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A way to run that is searched for its share of exact neurons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arm {
    /// Of the base's gate, up and down; without a base all neurons run.
    pub bits: Option<[u32; 3]>,
    /// Of what is streamed.
    pub format: Format,
    /// Neurons of a block.
    pub block_neurons: u32,
    /// Whether one threshold for all layers selects, and not a count.
    pub threshold: bool,
}

impl std::fmt::Display for Arm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.bits {
            Some([gate, up, down]) => write!(f, "base {gate}/{up}/{down}")?,
            None => write!(f, "dense")?,
        }
        let by = if self.threshold { ", threshold" } else { "" };
        write!(f, ", {}, blocks of {}{by}", self.format.name(), self.block_neurons)
    }
}

/// An arm and what was found along it, by steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Searched {
    /// Which.
    #[serde(flatten)]
    pub arm: Arm,
    /// Bytes that the base keeps resident, as a share of the FFNs in half precision.
    pub base_share: f64,
    /// None if the base alone is more than the budget.
    pub points: Vec<Point>,
}

/// What the search depends on besides the model, the bases and the placements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Params {
    /// The recipe's section, with the tolerances in descending order, that of `quality` among them.
    pub recipe: recipe::Guard,
    /// Tokens of a window.
    pub window: u32,
    /// Held-out tokens, whole windows.
    pub tokens: u64,
    /// Of these tokens.
    pub tokens_hash: String,
}

/// The stage.
#[derive(Debug)]
pub struct GuardStage<'a> {
    source: &'a Source,
    bases: &'a [Base],
    placements: &'a [Placement],
    tokens: Vec<u32>,
    params: Params,
}

impl<'a> GuardStage<'a> {
    /// A search over `bases`, those of the recipe in its order, and `placements`, of every block size but 1, on
    /// held-out `tokens`, whole windows of `window`.
    #[must_use]
    pub fn new(
        source: &'a Source,
        bases: &'a [Base],
        placements: &'a [Placement],
        tokens: Vec<u32>,
        window: u32,
        recipe: &Recipe,
    ) -> GuardStage<'a> {
        let mut recipe = recipe.guard.clone();
        recipe.tolerances.push(recipe.quality);
        recipe.tolerances.sort_by(|a, b| b.total_cmp(a));
        recipe.tolerances.dedup();
        // Which of them is asked for changes nothing here.
        recipe.quality = recipe.tolerances[0];
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let tokens_hash = blake3::hash(&bytes).to_string();
        let params = Params { recipe, window, tokens: tokens.len() as u64, tokens_hash };
        GuardStage { source, bases, placements, tokens, params }
    }

    /// Floating-point operations of one measurement, about.
    #[must_use]
    pub fn operations(&self) -> f64 {
        let config = &self.source.model.config;
        let (hidden, neurons) = (u64::from(config.hidden), u64::from(config.ffn_hidden));
        let attention = hidden * 2 * u64::from(config.query_width() + config.kv_width());
        // Exact neurons and their copies: all products are computed, then masked.
        let layer = attention + 6 * hidden * neurons;
        let weights = u64::from(config.layers) * layer + hidden * u64::from(config.vocab_size);
        2.0 * (weights * self.params.tokens) as f64
    }

    /// Measurements that some units take, about: for each tolerance four along the first arm of a base and one or two
    /// along each other.
    #[must_use]
    pub fn measurements(&self, units: Range<u32>) -> u64 {
        let (of, goals) = (|unit| self.arms_of(unit).len(), self.params.recipe.tolerances.len());
        let count = |unit| if unit == 0 { of(0) } else { goals * (5 + 3 * of(unit)) / 2 };
        units.map(count).sum::<usize>() as u64
    }

    /// Arms of few bytes a neuron first: they leave the others little to look for.
    fn arms_of(&self, unit: u32) -> Vec<Arm> {
        let recipe = &self.params.recipe;
        let Some(base) = unit.checked_sub(1) else {
            let others = recipe.formats.iter().filter(|&&format| format != Format::F16);
            let formats = std::iter::once(&Format::F16).chain(others);
            let arm = |&format| Arm { bits: None, format, block_neurons: 1, threshold: false };
            return formats.map(arm).collect();
        };
        let bits = Some(self.bases[base as usize].params().bits);
        let by: &[bool] = if recipe.thresholds { &[false, true] } else { &[false] };
        let mut arms = Vec::new();
        for &threshold in by {
            for &block_neurons in &recipe.block_neurons {
                let arm = |&format| Arm { bits, format, block_neurons, threshold };
                let mut of_size: Vec<Arm> = recipe.formats.iter().map(arm).collect();
                of_size.sort_by_key(|&arm| self.neuron_bytes(arm) as u64);
                arms.extend(of_size);
            }
        }
        arms
    }

    /// Bytes of a layer's FFN in half precision.
    fn layer_bytes(&self) -> f64 {
        self.extent(Format::F16, 1).neurons as f64
            * 6.0
            * f64::from(self.source.model.config.hidden)
    }

    fn extent(&self, format: Format, block_neurons: u32) -> FfnExtent {
        let config = &self.source.model.config;
        let (neurons, hidden) = (config.ffn_hidden, config.hidden);
        let (dtype, first_block) = (format.into(), BlockId(0));
        FfnExtent { offset: 0, neurons, hidden, dtype, block_neurons, first_block }
    }

    /// The perplexity under a policy.
    fn measure(
        &self,
        format: Format,
        policy: &mut dyn Policy,
        progress: &mut dyn Progress,
    ) -> Result<f64> {
        // What a source in half precision loses in half precision is nothing that could be measured.
        let dtype = Some(DType::from(format)).filter(|&dtype| dtype != DType::F16);
        let (model, window) = (&self.source.model, self.params.window);
        let nll = likelihoods_in(model, dtype, &self.tokens, window, policy, progress)?;
        Ok(perplexity(&nll))
    }

    /// All neurons run; what the budget has no room for is read.
    fn dense(&self, arm: Arm, progress: &mut dyn Progress) -> Result<Searched> {
        let extent = self.extent(arm.format, arm.block_neurons);
        let layer_bytes = (u64::from(extent.blocks()) * extent.block_stride()) as f64;
        let hit_ratio = (self.params.recipe.resident * self.layer_bytes() / layer_bytes).min(1.0);
        let layers = f64::from(self.source.model.config.layers);
        let point = Point {
            step: self.steps(),
            exact_share: 1.0,
            perplexity: self.measure(arm.format, &mut Dense::default(), progress)?,
            hit_ratio,
            bytes: (layers * layer_bytes * (1.0 - hit_ratio)).round() as u64,
        };
        Ok(Searched { arm, base_share: 0.0, points: vec![point] })
    }

    /// Searches an arm of `base`; `done` are arms before it.
    fn arm(
        &self,
        arm: Arm,
        base: &Base,
        dense: f64,
        done: &[Searched],
        progress: &mut dyn Progress,
    ) -> Result<Searched> {
        let base_share = base.bundle_bytes() as f64 / self.layer_bytes();
        let room = self.params.recipe.resident - base_share;
        if room < 0.0 {
            return Ok(Searched { arm, base_share, points: Vec::new() });
        }
        let extent = self.extent(arm.format, arm.block_neurons);
        let kept = (room * self.layer_bytes() / extent.block_stride() as f64) as u32;
        let goal = |tolerance: &f64| {
            let limit = dense * (1.0 + tolerance);
            let best = best(done, limit);
            let bytes = |(arm, _): &(Arm, Point)| self.neuron_bytes(*arm);
            let ratio = best.as_ref().map(|best| bytes(best) / self.neuron_bytes(arm));
            let near = best.zip(ratio).map(|((_, p), ratio)| (f64::from(p.step) * ratio) as u32);
            Goal { limit, known_bytes: best.map(|(_, point)| point.bytes), near }
        };
        let goals: Vec<Goal> = self.params.recipe.tolerances.iter().map(goal).collect();
        let points = search(&goals, self.steps(), |step| {
            self.point(arm, base, kept.min(extent.blocks()), step, progress)
        })?;
        Ok(Searched { arm, base_share, points })
    }

    /// Measures an arm at one share.
    fn point(
        &self,
        arm: Arm,
        base: &Base,
        kept: u32,
        step: u32,
        progress: &mut dyn Progress,
    ) -> Result<Point> {
        let share = f64::from(step) / f64::from(self.steps());
        let selection = if arm.threshold && step > 0 && step < self.steps() {
            Selection::Above(threshold(base, share)?)
        } else {
            Selection::Share(share)
        };
        let mut policy = WithBase::new(base, selection).counting(Demand::new(kept));
        if arm.block_neurons > 1 {
            let mut placements = self.placements.iter();
            let placed = placements.find(|placed| placed.block_neurons == arm.block_neurons);
            policy = policy.in_blocks(placed.expect("a placement of every block size"));
        }
        let perplexity = self.measure(arm.format, &mut policy, progress)?;
        let config = &self.source.model.config;
        let neurons = u64::from(config.layers) * u64::from(config.ffn_hidden) * self.params.tokens;
        let counts = policy.demand().expect("it was given").counts();
        let stride = self.extent(arm.format, arm.block_neurons).block_stride();
        Ok(Point {
            step,
            exact_share: policy.exact_neurons() as f64 / neurons as f64,
            perplexity,
            hit_ratio: counts.demand_hit_ratio(),
            bytes: counts.misses * stride / self.params.tokens,
        })
    }

    /// Bytes that are read for a neuron.
    fn neuron_bytes(&self, arm: Arm) -> f64 {
        let extent = self.extent(arm.format, arm.block_neurons);
        extent.block_stride() as f64 / f64::from(arm.block_neurons)
    }

    fn steps(&self) -> u32 {
        (1.0 / self.params.recipe.step).round() as u32
    }

    /// The dense model's perplexity: that of the journal's first record if it is there.
    fn dense_perplexity(&self, journal: &Journal, progress: &mut dyn Progress) -> Result<f64> {
        let (first, arm) = (RecordId::new(0, 0), self.arms_of(0)[0]);
        if arm.format == Format::F16 && journal.contains(first) {
            return Ok(read(&journal.read(first)?)?.points[0].perplexity);
        }
        self.measure(Format::F16, &mut Dense::default(), progress)
    }
}

/// The bound on expected errors that a share of a base's neurons is above.
fn threshold(base: &Base, share: f64) -> Result<f32> {
    let layers = base.artifact().description().units;
    let infos = (0..layers).map(|layer| base.info(layer)).collect::<Result<Vec<_>>>()?;
    Ok(Histogram::threshold(infos.iter().map(|info| &info.doubts), share))
}

fn read(text: &[u8]) -> Result<Searched> {
    serde_json::from_slice(text)
        .map_err(|problem| crate::error::PrepError::corrupt("a record of 66-guard", problem))
}

impl Stage for GuardStage<'_> {
    const NAME: &'static str = "66-guard";
    const SCHEMA: u32 = 1;
    const IN_TENSORS: bool = true;
    type Params = Params;

    fn params(&self) -> Params {
        self.params.clone()
    }

    fn inputs(&self) -> Vec<Input> {
        let input = |name: &str, key| Input { name: name.to_owned(), key };
        let bases = self.bases.iter().map(|base| input(BaseStage::NAME, base.key()));
        let placements = self.placements.iter().map(|p| input(PlacementStage::NAME, p.key));
        std::iter::once(self.source.input()).chain(bases).chain(placements).collect()
    }

    fn units(&self) -> u32 {
        1 + self.bases.len() as u32
    }

    fn records(&self, units: Range<u32>) -> u64 {
        units.map(|unit| self.arms_of(unit).len() as u64).sum()
    }

    fn run(&self, journal: &mut Journal, progress: &mut dyn Progress) -> Result<()> {
        let mut dense = None;
        for unit in journal.description().units_held() {
            let mut done = Vec::new();
            for (arm, part) in self.arms_of(unit).into_iter().zip(0u32..) {
                let id = RecordId::new(unit, part);
                if !journal.contains(id) {
                    let searched = match unit.checked_sub(1) {
                        None => self.dense(arm, progress)?,
                        Some(base) => {
                            let dense = match dense {
                                Some(found) => found,
                                None => *dense.insert(self.dense_perplexity(journal, progress)?),
                            };
                            self.arm(arm, &self.bases[base as usize], dense, &done, progress)?
                        }
                    };
                    journal.append(id, &serde_json::to_vec(&searched).expect("plain data"))?;
                }
                done.push(read(&journal.read(id)?)?);
            }
        }
        Ok(())
    }
}

/// What reads least within a tolerance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// How much more than the dense perplexity was allowed, as a share of it.
    pub tolerance: f64,
    /// How to run.
    #[serde(flatten)]
    pub arm: Arm,
    /// Bytes that the base keeps resident, as a share of the FFNs in half precision.
    pub base_share: f64,
    /// At which share.
    #[serde(flatten)]
    pub point: Point,
}

/// The results of a finished stage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Guard {
    /// Share of the FFNs' bytes in half precision that stay in memory.
    pub resident: f64,
    /// A step of the points, as a share of the neurons.
    pub step: f64,
    /// Held-out tokens.
    pub tokens: u64,
    /// The dense model's perplexity on them.
    pub dense_perplexity: Option<f64>,
    /// The choice for each tolerance that can be kept, the largest first.
    pub choices: Vec<Choice>,
    /// The same where a threshold may select.
    pub with_thresholds: Vec<Choice>,
    /// All arms.
    pub arms: Vec<Searched>,
}

impl Guard {
    /// Reads an artifact of [`GuardStage`], whole or a share of units.
    pub fn read(artifact: &Artifact) -> Result<Guard> {
        artifact.check_stage(GuardStage::NAME)?;
        let Params { recipe, tokens, .. } = artifact.params()?;
        let arms =
            artifact.ids().map(|id| read(&artifact.read(id)?)).collect::<Result<Vec<_>>>()?;
        let exact = |s: &&Searched| s.arm.bits.is_none() && s.arm.format == Format::F16;
        let dense_perplexity = arms.iter().find(exact).map(|s| s.points[0].perplexity);
        let choices = |thresholds: bool| -> Vec<Choice> {
            let dense = dense_perplexity.unwrap_or(0.0);
            let of = |&tolerance: &f64| choose(&arms, dense, tolerance, thresholds);
            recipe.tolerances.iter().filter_map(of).collect()
        };
        let (plain, with_thresholds) = (choices(false), choices(true));
        let recipe::Guard { resident, step, .. } = recipe;
        Ok(Guard {
            resident,
            step,
            tokens,
            dense_perplexity,
            choices: plain,
            with_thresholds,
            arms,
        })
    }

    /// The choice for a tolerance.
    #[must_use]
    pub fn choice(&self, tolerance: f64) -> Option<&Choice> {
        self.choices.iter().find(|choice| choice.tolerance == tolerance)
    }

    /// How a bundle asks to be run so.
    #[must_use]
    pub fn settings(&self, choice: &Choice) -> Settings {
        Settings {
            exact_share: (f64::from(choice.point.step) * self.step).min(1.0) as f32,
            perplexity: choice.point.perplexity as f32,
            dense_perplexity: self.dense_perplexity.unwrap_or(0.0) as f32,
            eval_tokens: self.tokens,
        }
    }
}

/// The arm and the point that read least within a limit.
fn best(arms: &[Searched], limit: f64) -> Option<(Arm, Point)> {
    let of = |searched: &Searched| Some((searched.arm, *cheapest(&searched.points, limit)?));
    arms.iter().filter_map(of).min_by_key(|(_, point)| point.bytes)
}

fn choose(arms: &[Searched], dense: f64, tolerance: f64, thresholds: bool) -> Option<Choice> {
    let allowed = arms.iter().filter(|searched| thresholds || !searched.arm.threshold);
    let limit = dense * (1.0 + tolerance);
    let of = |searched: &Searched| {
        let point = *cheapest(&searched.points, limit)?;
        let Searched { arm, base_share, .. } = *searched;
        Some(Choice { tolerance, arm, base_share, point })
    };
    allowed.filter_map(of).min_by_key(|choice| choice.point.bytes)
}
