//! [`Ruler`]: measures candidates by the masked forward, and keeps what it has measured in a journal beside the stage's.

use super::paired::Text;
use super::search::{Candidate, Measure, Sample};
use super::{Arm, GuardStage};
use crate::artifact::{Description, RecordId};
use crate::error::{PrepError, Result};
use crate::journal::Journal;
use crate::progress::Progress;
use crate::recipe::Format;
use crate::sparse::{Demand, Dense, Policy, WithBase, likelihoods_in};
use ls_bundle::model::DType;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Shares of exact neurons at which a profile counts what would be read.
const SHARES: [f64; 8] = [0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0];
/// The share at which the neurons run that a profile is taken of.
const PROFILED: f64 = 0.2;

/// What the arms of a base and a block size read at any share, about: by the scores of a little text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Profile(Vec<Reads>);

/// Of one arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Reads {
    arm: Arm,
    /// Blocks that are read for a token at each of [`SHARES`].
    blocks: Vec<f64>,
}

impl Profile {
    /// Blocks that an arm reads for a token at a share: linear between those counted.
    pub(super) fn blocks(&self, arm: Arm, share: f64) -> f64 {
        let Some(reads) = self.0.iter().find(|reads| reads.arm == arm) else { return 0.0 };
        let mut before = (0.0, 0.0);
        for after in SHARES.into_iter().zip(reads.blocks.iter().copied()) {
            if share <= after.0 {
                let part = (share - before.0) / (after.0 - before.0);
                return before.1 + part * (after.1 - before.1);
            }
            before = after;
        }
        before.1
    }
}

/// A line of the journal.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    arm: Arm,
    step: u32,
    level: u32,
    sample: Sample,
    /// If one was taken on the way.
    profile: Option<Profile>,
}

fn parse(text: &[u8]) -> Result<Entry> {
    serde_json::from_slice(text).map_err(fault)
}

fn fault(problem: impl std::fmt::Display) -> PrepError {
    PrepError::corrupt("a measurement of 66-guard", problem)
}

/// See the module's documentation.
pub(super) struct Ruler<'a> {
    stage: &'a GuardStage<'a>,
    arms: &'a [Arm],
    text: &'a Text,
    journal: Journal,
    /// What the journal holds.
    done: HashMap<(Candidate, u32), (Sample, Option<Profile>)>,
    progress: &'a mut dyn Progress,
}

impl<'a> Ruler<'a> {
    /// For the `arms` of `stage`; goes on with what lies beside `whole`, the stage's own journal.
    pub(super) fn new(
        stage: &'a GuardStage<'a>,
        arms: &'a [Arm],
        text: &'a Text,
        whole: &Journal,
        progress: &'a mut dyn Progress,
    ) -> Result<Ruler<'a>> {
        let mut path = whole.scratch("measured").into_os_string();
        path.push(".bin");
        // How many there will be is not known: it is never finished, but cleared away with the stage's scratch.
        let description = Description { records: 0, ..whole.description().clone() };
        let journal = Journal::open(path.as_ref(), description)?;
        let mut done = HashMap::new();
        for part in 0..journal.len() as u32 {
            let entry = parse(&journal.read(RecordId::new(0, part))?)?;
            let track = arms.iter().position(|arm| *arm == entry.arm);
            let track = track.ok_or_else(|| fault("no arm of this search"))?;
            done.insert(((track, entry.step), entry.level), (entry.sample, entry.profile));
        }
        Ok(Ruler { stage, arms, text, journal, done, progress })
    }

    /// What is measured at first of a base and a block size: the profile of all their arms, on the way to a first look
    /// at one of these, `track`. Returns it and the candidate.
    pub(super) fn profile(&mut self, track: usize) -> Result<(Profile, Candidate)> {
        let (steps, own) = (self.stage.steps(), self.arms[track]);
        let is_beside = |arm: &&Arm| arm.bits == own.bits && arm.block_neurons == own.block_neurons;
        let beside: Vec<Arm> = self.arms.iter().filter(is_beside).copied().collect();
        let candidate = (track, (PROFILED * f64::from(steps)).round().max(1.0) as u32);
        self.take(candidate, 0, &beside)?;
        let (_, profile) = &self.done[&(candidate, 0)];
        Ok((profile.clone().ok_or_else(|| fault("it has no profile"))?, candidate))
    }

    /// Measures, unless it is done.
    fn take(&mut self, candidate: Candidate, level: u32, beside: &[Arm]) -> Result<()> {
        if self.done.contains_key(&(candidate, level)) {
            return Ok(());
        }
        let (arm, step) = (self.arms[candidate.0], candidate.1);
        let (sample, profile) = match arm.bits {
            None => (self.dense(arm, level)?, None),
            Some(_) => self.masked(arm, step, level, beside)?,
        };
        let entry = Entry { arm, step, level, sample, profile };
        let text = serde_json::to_vec(&entry).expect("plain data");
        self.journal.append(RecordId::new(0, self.journal.len() as u32), &text)?;
        // As it would be read again: numbers may lose their last bit on the way through text.
        let Entry { sample, profile, .. } = parse(&text)?;
        self.done.insert((candidate, level), (sample, profile));
        Ok(())
    }

    /// The tokens that a level adds.
    fn tokens(&self, level: u32) -> Vec<u32> {
        let window = self.stage.params.window as usize;
        let of = |&index: &usize| &self.stage.tokens[index * window..][..window];
        self.text.added(level).iter().flat_map(of).copied().collect()
    }

    /// All neurons run; what the budget has no room for is read.
    fn dense(&mut self, arm: Arm, level: u32) -> Result<Sample> {
        let tokens = self.tokens(level);
        let mut policy = Dense::default();
        let (model, window) = (&self.stage.source.model, self.stage.params.window);
        let dtype = rounded_to(arm.format);
        let nll = likelihoods_in(model, dtype, &tokens, window, &mut policy, self.progress)?;
        let blocks = u64::from(self.stage.extent(arm).blocks());
        let layers = u64::from(model.config.layers);
        let requests = layers * blocks * tokens.len() as u64;
        let misses = requests as f64 * (1.0 - self.stage.kept_of_all(arm));
        let (sums, misses) = (self.text.sums(&nll), misses.round() as u64);
        Ok(Sample { sums, exact_neurons: policy.exact_neurons(), requests, misses })
    }

    /// A share of the neurons runs beside a base; the profile is of `beside`, if that is any.
    fn masked(
        &mut self,
        arm: Arm,
        step: u32,
        level: u32,
        beside: &[Arm],
    ) -> Result<(Sample, Option<Profile>)> {
        let (stage, tokens) = (self.stage, self.tokens(level));
        let base = stage.base(arm);
        let mut counted = Vec::new();
        for &arm in beside {
            for share in SHARES {
                let selection = stage.selection(arm, share)?;
                counted.push((selection, Demand::new(stage.kept(arm))));
            }
        }
        let selection = stage.selection(arm, stage.share(step))?;
        let policy = WithBase::new(base, selection).counting(Demand::new(stage.kept(arm)));
        let mut policy = policy.also_counting(counted);
        if let Some(placement) = stage.placement(arm) {
            policy = policy.in_blocks(placement);
        }
        let (model, window) = (&stage.source.model, stage.params.window);
        let dtype = rounded_to(arm.format);
        let nll = likelihoods_in(model, dtype, &tokens, window, &mut policy, self.progress)?;
        let counts = policy.demand().expect("it was given").counts();
        let sample = Sample {
            sums: self.text.sums(&nll),
            exact_neurons: policy.exact_neurons(),
            requests: counts.requests(),
            misses: counts.misses,
        };
        let read = |demand: &Demand| demand.counts().misses as f64 / tokens.len() as f64;
        let reads = beside.iter().zip(policy.also_counted().chunks(SHARES.len()));
        let reads = reads.map(|(&arm, of)| Reads {
            arm,
            blocks: of.iter().map(|(_, demand)| read(demand)).collect(),
        });
        let profile = (!beside.is_empty()).then(|| Profile(reads.collect()));
        Ok((sample, profile))
    }
}

/// What the forward rounds to. What a source in half precision loses in half precision is nothing that could be
/// measured.
fn rounded_to(format: Format) -> Option<DType> {
    Some(DType::from(format)).filter(|&dtype| dtype != DType::F16)
}

impl Measure for Ruler<'_> {
    fn measure(&mut self, candidate: Candidate, level: u32) -> Result<Sample> {
        self.take(candidate, level, &[])?;
        Ok(self.done[&(candidate, level)].0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_linear_between_what_was_counted() {
        let arm =
            Arm { bits: Some([3; 3]), format: Format::Q8_0, block_neurons: 2, threshold: false };
        let blocks = SHARES.iter().map(|share| 100.0 * share * share).collect();
        let profile = Profile(vec![Reads { arm, blocks }]);
        assert_eq!(profile.blocks(arm, 0.0), 0.0);
        assert_eq!(profile.blocks(arm, 0.0125), 100.0 * 0.025 * 0.025 / 2.0);
        assert_eq!(profile.blocks(arm, 0.2), 100.0 * 0.2 * 0.2);
        assert!((profile.blocks(arm, 0.4) - (9.0 + 25.0) / 2.0).abs() < 1e-9);
        assert_eq!(profile.blocks(arm, 1.0), 100.0);
        assert_eq!(profile.blocks(Arm { block_neurons: 1, ..arm }, 0.5), 0.0);
    }
}
