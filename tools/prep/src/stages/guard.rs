//! `66-guard`: with which base, in which number format, in which blocks and at which share of exact neurons a model
//! reads least for a token while its perplexity stays within some share of the dense model's.
//!
//! What is read is counted, not assumed: each layer keeps in memory, beside its base, as many blocks as the budget has
//! room for, and what its cache misses is read ([`Demand`](crate::sparse::Demand)). The budget is a share of the FFNs'
//! bytes in half precision; attention, embedding and head are as they are and count on neither side. Streaming the dense
//! FFNs past the same budget, in each format, is what the answers are measured against, and may be the answer.
//!
//! An *arm* is base, format, block size, and whether one count or one threshold for all layers selects; with a share it
//! is a candidate. Candidates are measured by a masked forward, on as much of the held-out text as it takes to be sure
//! (`paired`), those that promise most first (`search`); the answers on all of it. The artifact is one record of JSON.
//! Measurements are kept as they are made, so a search that was ended goes on. Each depends on the ones before it: one
//! machine does it all. Thresholds are measured only: a bundle cannot ask for one.

mod found;
mod measure;
mod paired;
mod search;

pub use found::{Choice, Guard, Point, Searched};

use crate::artifact::{Input, RecordId};
use crate::base::Histogram;
use crate::error::Result;
use crate::journal::Journal;
use crate::progress::Progress;
use crate::recipe::{self, Format, Recipe};
use crate::sparse::Selection;
use crate::stage::Stage;
use crate::stages::base::{Base, BaseStage};
use crate::stages::placement::{Placement, PlacementStage};
use crate::stages::source::Source;
use found::{Record, limit};
use ls_bundle::ids::BlockId;
use ls_bundle::model::FfnExtent;
use measure::{Profile, Ruler};
use paired::Text;
use search::{Sample, Search, Track};
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

impl Arm {
    /// Whether another arm is nowhere worse at the same share.
    fn is_coarser_than(&self, other: &Arm) -> bool {
        let (Some(own), Some(others)) = (self.bits, other.bits) else { return false };
        let bits = own.iter().zip(&others).all(|(own, other)| own <= other);
        let format = fineness(self.format) <= fineness(other.format);
        let blocks = self.block_neurons.is_multiple_of(other.block_neurons);
        let selects = self.threshold == other.threshold;
        self != other && bits && format && blocks && selects
    }

    /// Whether both select the same blocks beside the same base.
    fn is_kin_of(&self, other: &Arm) -> bool {
        self != other && Arm { format: other.format, ..*self } == *other
    }
}

fn fineness(format: Format) -> u32 {
    match format {
        Format::F16 => 16,
        Format::Q8_0 => 8,
        Format::Q4_0 => 4,
    }
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

    /// Floating-point operations of the search, about: all of the text three times a tolerance, its beginning twice an
    /// arm.
    #[must_use]
    pub fn operations(&self) -> f64 {
        let config = &self.source.model.config;
        let (hidden, neurons) = (u64::from(config.hidden), u64::from(config.ffn_hidden));
        let attention = hidden * 2 * u64::from(config.query_width() + config.kv_width());
        // Exact neurons and their copies: all products are computed, then masked.
        let layer = attention + 6 * hidden * neurons;
        let weights = u64::from(config.layers) * layer + hidden * u64::from(config.vocab_size);
        let recipe = &self.params.recipe;
        let (arms, goals) = (self.arms().len() as u64, recipe.tolerances.len() as u64);
        let first = recipe.first_tokens.min(self.params.tokens);
        2.0 * (weights * (3 * goals * self.params.tokens + 2 * arms * first)) as f64
    }

    /// All ways to run: dense ones first, of these half precision.
    fn arms(&self) -> Vec<Arm> {
        let recipe = &self.params.recipe;
        let others = recipe.formats.iter().filter(|&&format| format != Format::F16);
        let formats = std::iter::once(&Format::F16).chain(others);
        let dense = |&format| Arm { bits: None, format, block_neurons: 1, threshold: false };
        let mut arms: Vec<Arm> = formats.map(dense).collect();
        for base in self.bases {
            let bits = Some(base.params().bits);
            for &block_neurons in &recipe.block_neurons {
                for &threshold in self.selectors() {
                    let arm = |&format| Arm { bits, format, block_neurons, threshold };
                    arms.extend(recipe.formats.iter().map(arm));
                }
            }
        }
        arms
    }

    /// Whether a threshold selects: what is searched.
    fn selectors(&self) -> &'static [bool] {
        if self.params.recipe.thresholds { &[false, true] } else { &[false] }
    }

    fn steps(&self) -> u32 {
        (1.0 / self.params.recipe.step).round() as u32
    }

    fn share(&self, step: u32) -> f64 {
        f64::from(step) / f64::from(self.steps())
    }

    /// Bytes of a layer's FFN in half precision.
    fn layer_bytes(&self) -> f64 {
        let config = &self.source.model.config;
        6.0 * f64::from(config.ffn_hidden) * f64::from(config.hidden)
    }

    /// The base of an arm that has one.
    fn base(&self, arm: Arm) -> &'a Base {
        let base = self.bases.iter().find(|base| Some(base.params().bits) == arm.bits);
        base.expect("arms are made of the bases")
    }

    /// The order that an arm's blocks are cut from.
    fn placement(&self, arm: Arm) -> Option<&'a Placement> {
        let mut placements = self.placements.iter();
        let placed = placements.find(|placed| placed.block_neurons == arm.block_neurons);
        (arm.block_neurons > 1).then(|| placed.expect("a placement of every block size"))
    }

    /// Bytes that an arm's base keeps, as a share of the FFNs in half precision.
    fn base_share(&self, arm: Arm) -> f64 {
        let bytes = |_| self.base(arm).bundle_bytes() as f64 / self.layer_bytes();
        arm.bits.map_or(0.0, bytes)
    }

    fn has_room(&self, arm: Arm) -> bool {
        self.base_share(arm) <= self.params.recipe.resident
    }

    fn extent(&self, arm: Arm) -> FfnExtent {
        let config = &self.source.model.config;
        let (neurons, hidden) = (config.ffn_hidden, config.hidden);
        let (dtype, first_block) = (arm.format.into(), BlockId(0));
        let block_neurons = arm.block_neurons;
        FfnExtent { offset: 0, neurons, hidden, dtype, block_neurons, first_block }
    }

    /// Blocks of an arm that a layer has room for beside the base.
    fn kept(&self, arm: Arm) -> u32 {
        let extent = self.extent(arm);
        let room = (self.params.recipe.resident - self.base_share(arm)) * self.layer_bytes();
        ((room / extent.block_stride() as f64) as u32).min(extent.blocks())
    }

    /// The share of all blocks of a dense arm that there is room for.
    fn kept_of_all(&self, arm: Arm) -> f64 {
        let extent = self.extent(arm);
        let all = u64::from(extent.blocks()) * extent.block_stride();
        (self.params.recipe.resident * self.layer_bytes() / all as f64).min(1.0)
    }

    /// What an arm selects at a share.
    fn selection(&self, arm: Arm, share: f64) -> Result<Selection> {
        if !arm.threshold || share <= 0.0 || share >= 1.0 {
            return Ok(Selection::Share(share));
        }
        let base = self.base(arm);
        let layers = base.artifact().description().units;
        let infos = (0..layers).map(|layer| base.info(layer)).collect::<Result<Vec<_>>>()?;
        let doubts = infos.iter().map(|info| &info.doubts);
        Ok(Selection::Above(Histogram::threshold(doubts, share)))
    }

    /// The arm `number` of `arms` for the search.
    fn track(&self, arms: &[Arm], number: usize, profiles: &[Profile]) -> Track {
        let arm = arms[number];
        let (steps, extent) = (self.steps(), self.extent(arm));
        let block_bytes = extent.block_stride() as f64;
        let those = |is: &dyn Fn(&Arm) -> bool| -> Vec<usize> {
            arms.iter().zip(0..).filter(|(arm, _)| is(arm)).map(|(_, number)| number).collect()
        };
        let whole = those(&|other| other.bits.is_none() && other.format == arm.format)[0];
        if arm.bits.is_none() {
            let layers = f64::from(self.source.model.config.layers);
            let read = f64::from(extent.blocks()) * (1.0 - self.kept_of_all(arm));
            let (steps, bytes) = (steps..=steps, vec![layers * read * block_bytes]);
            return Track { steps, bytes, block_bytes, finer: vec![], kin: vec![], whole };
        }
        let blocks = |share| profiles.iter().map(|found| found.blocks(arm, share)).sum::<f64>();
        Track {
            steps: 0..=steps,
            bytes: (0..=steps).map(|step| block_bytes * blocks(self.share(step))).collect(),
            block_bytes,
            finer: those(&|other| arm.is_coarser_than(other)),
            kin: those(&|other| arm.is_kin_of(other)),
            whole,
        }
    }

    /// Searches for all tolerances; `journal` is the stage's own.
    fn search(&self, journal: &Journal, progress: &mut dyn Progress) -> Result<Record> {
        let recipe = &self.params.recipe;
        let windows = self.tokens.len() / self.params.window as usize;
        let text = Text::new(windows, self.params.window as usize, recipe.first_tokens);
        let (arms, left_out): (Vec<Arm>, Vec<Arm>) =
            self.arms().into_iter().partition(|&arm| self.has_room(arm));
        let mut ruler = Ruler::new(self, &arms, &text, journal, progress)?;
        let is_first = |number: &usize| {
            let of = |arm: &Arm| (arm.bits, arm.block_neurons);
            let before = arms[..*number].iter().any(|arm| of(arm) == of(&arms[*number]));
            arms[*number].bits.is_some() && !before
        };
        let (mut profiles, mut looked_at) = (Vec::new(), Vec::new());
        for number in (0..arms.len()).filter(is_first) {
            let (profile, candidate) = ruler.profile(number)?;
            profiles.push(profile);
            looked_at.push(candidate);
        }
        let tracks: Vec<Track> =
            (0..arms.len()).map(|number| self.track(&arms, number, &profiles)).collect();
        let mut search = Search::new(&tracks, &text, recipe.sigmas);
        let dense = (0..arms.len()).filter(|&number| arms[number].bits.is_none());
        for candidate in dense.map(|number| (number, self.steps())).chain(looked_at) {
            search.look(candidate, 0, &mut ruler)?;
        }
        for &thresholds in self.selectors() {
            for &tolerance in &recipe.tolerances {
                let is_allowed = |number: usize| thresholds || !arms[number].threshold;
                search.settle(limit(tolerance), &is_allowed, &mut ruler)?;
            }
        }
        search.look((0, self.steps()), text.levels() - 1, &mut ruler)?;
        Ok(self.record(&search, &text, &arms, &left_out))
    }

    /// What a search has measured.
    fn record(&self, search: &Search<'_>, text: &Text, arms: &[Arm], left_out: &[Arm]) -> Record {
        let nothing = |&arm: &Arm| {
            let (base_share, points) = (self.base_share(arm), Vec::new());
            Searched { arm, base_share, points }
        };
        let mut record = Record {
            dense_perplexity: 0.0,
            measurements: 0,
            measured_tokens: 0,
            arms: arms.iter().chain(left_out).map(nothing).collect(),
        };
        let reference = (0, self.steps());
        let dense = search.known().find(|(candidate, ..)| *candidate == reference);
        let (_, _, dense) = dense.expect("it was looked at");
        record.dense_perplexity = text.perplexity(&dense.sums);
        for (candidate, level, sample) in search.known() {
            let tokens = text.tokens(level);
            record.measurements += 1;
            record.measured_tokens += tokens;
            let found = search.estimate(candidate).expect("dense is known of all text");
            let point = Point {
                step: candidate.1,
                exact_share: self.exact_share(sample, tokens),
                tokens,
                excess: found.excess,
                error: Some(found.error).filter(|error| error.is_finite()),
                perplexity: record.dense_perplexity * found.excess.exp(),
                hit_ratio: 1.0 - sample.misses as f64 / sample.requests.max(1) as f64,
                bytes: search.bytes(candidate).round() as u64,
            };
            record.arms[candidate.0].points.push(point);
        }
        record
    }

    fn exact_share(&self, sample: &Sample, tokens: u64) -> f64 {
        let config = &self.source.model.config;
        let neurons = u64::from(config.layers) * u64::from(config.ffn_hidden) * tokens;
        sample.exact_neurons as f64 / neurons as f64
    }
}

impl Stage for GuardStage<'_> {
    const NAME: &'static str = "66-guard";
    const SCHEMA: u32 = 2;
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

    fn records(&self, units: Range<u32>) -> u64 {
        units.len() as u64
    }

    fn run(&self, journal: &mut Journal, progress: &mut dyn Progress) -> Result<()> {
        let id = RecordId::new(0, 0);
        if !journal.contains(id) {
            let record = self.search(journal, progress)?;
            journal.append(id, &serde_json::to_vec(&record).expect("plain data"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arms_are_coarser_in_some_way_and_finer_in_none() {
        let arm = |bits, format, block_neurons| Arm {
            bits: Some(bits),
            format,
            block_neurons,
            threshold: false,
        };
        let own = arm([3, 3, 2], Format::Q8_0, 2);
        assert!(own.is_coarser_than(&arm([3, 3, 3], Format::Q8_0, 2)));
        assert!(own.is_coarser_than(&arm([3, 3, 2], Format::F16, 1)));
        assert!(!own.is_coarser_than(&own));
        assert!(!own.is_coarser_than(&arm([2, 2, 3], Format::F16, 1)));
        assert!(!own.is_coarser_than(&arm([3, 3, 3], Format::Q4_0, 2)));
        assert!(!arm([2; 3], Format::F16, 3).is_coarser_than(&arm([2; 3], Format::F16, 2)));
        assert!(!own.is_coarser_than(&Arm { threshold: true, ..arm([4; 3], Format::F16, 1) }));
        let dense = Arm { bits: None, ..own };
        assert!(!own.is_coarser_than(&dense) && !dense.is_coarser_than(&own));
        assert!(own.is_kin_of(&arm([3, 3, 2], Format::Q4_0, 2)) && !own.is_kin_of(&own));
        assert!(!own.is_kin_of(&arm([3, 3, 3], Format::Q4_0, 2)));
    }
}
