//! The search: what reads least within each of some limits, with few measurements, most of them of a little text.
//!
//! A *track* is a way to run but for its share of exact neurons, which goes in steps. What it reads at a step is known
//! about before anything is measured there ([`Track::bytes`]), so a candidate is only ever measured if it would read
//! less than the best that is known to keep the limit. Of these the search takes, again and again, the track that is
//! expected to need least, at the step from which it is expected to keep the limit, and looks at as much text as it takes
//! to be sure ([`Verdict`]): most candidates are far off and are told apart by the first few thousand tokens. What is
//! chosen has been measured on all of the text.
//!
//! It relies on this, within noise:
//!
//! - More exact neurons read more. If they keep a limit, more of them do, so what breaks it rules out fewer, also on
//!   tracks that are coarser in base, format or blocks and finer in none.
//! - But where a number format alone breaks the limit, with nothing stood in for, more neurons in it may do harm, and what
//!   breaks the limit rules out only up to a tenth of the neurons fewer.

use super::paired::{Estimate, Text, Verdict};
use crate::error::Result;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

/// A track that nothing is known of is first measured at a tenth of all steps.
const FIRST: f64 = 10.0;
/// How far down a broken step rules out others where the format alone breaks the limit, as a part of all steps.
const REACH: u32 = 10;
/// The excess falls about so many times e-fold from no exact neuron to all, and within these bounds.
const FALL: f64 = 4.5;
const FALLS: (f64, f64) = (1.0, 20.0);
/// Excesses below this are noise.
const FLOOR: f64 = 1e-4;
/// Every so many-th step of a track is in the middle of what is open, whatever is expected.
const MIDDLE: u32 = 3;

/// What a part of the text has shown of a candidate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Sample {
    /// Sums of negative log-likelihoods over pieces.
    pub(super) sums: Vec<f64>,
    /// Neurons that ran exactly, over tokens and layers.
    pub(super) exact_neurons: u64,
    /// Blocks that were asked for.
    pub(super) requests: u64,
    /// Those of them that would have been read.
    pub(super) misses: u64,
}

impl Sample {
    /// Adds what another part has shown.
    fn extend(&mut self, more: Sample) {
        self.sums.extend(more.sums);
        self.exact_neurons += more.exact_neurons;
        self.requests += more.requests;
        self.misses += more.misses;
    }
}

/// A way to run but for its share.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Track {
    /// Steps that it can run at; one if nothing stands in for what does not run.
    pub(super) steps: std::ops::RangeInclusive<u32>,
    /// About what a token reads at each of these steps.
    pub(super) bytes: Vec<f64>,
    /// Bytes of a block.
    pub(super) block_bytes: f64,
    /// Tracks that are nowhere worse at the same step.
    pub(super) finer: Vec<usize>,
    /// Tracks that differ in the format only.
    pub(super) kin: Vec<usize>,
    /// The track whose every neuron runs in this format.
    pub(super) whole: usize,
}

impl Track {
    fn expected(&self, step: u32) -> f64 {
        self.bytes[(step - self.steps.start()) as usize]
    }

    fn last(&self) -> u32 {
        *self.steps.end()
    }
}

/// A track at a step.
pub(super) type Candidate = (usize, u32);

/// Measures the part of the text that a level adds.
pub(super) trait Measure {
    /// What it shows of a candidate.
    fn measure(&mut self, candidate: Candidate, level: u32) -> Result<Sample>;
}

/// The search and all that it knows. Track 0 is what excesses are taken against, at its last step.
pub(super) struct Search<'a> {
    tracks: &'a [Track],
    text: &'a Text,
    sigmas: f64,
    /// What was measured, up to which level.
    known: BTreeMap<Candidate, (u32, Sample)>,
    /// How often a track was asked for a limit, by the limit's bits.
    asked: HashMap<(usize, u64), u32>,
}

impl<'a> Search<'a> {
    /// Of `tracks` on `text`, sure of what it says by `sigmas` errors.
    pub(super) fn new(tracks: &'a [Track], text: &'a Text, sigmas: f64) -> Search<'a> {
        Search { tracks, text, sigmas, known: BTreeMap::new(), asked: HashMap::new() }
    }

    /// All that was measured: up to which level, and what it showed.
    pub(super) fn known(&self) -> impl Iterator<Item = (Candidate, u32, &Sample)> {
        self.known.iter().map(|(&candidate, (level, sample))| (candidate, *level, sample))
    }

    /// Measures a candidate up to a level.
    pub(super) fn look(
        &mut self,
        candidate: Candidate,
        level: u32,
        by: &mut dyn Measure,
    ) -> Result<()> {
        let from = self.known.get(&candidate).map_or(0, |(level, _)| level + 1);
        for level in from..=level {
            let more = by.measure(candidate, level)?;
            let entry = self.known.entry(candidate);
            let known = entry.and_modify(|(at, sample)| {
                *at = level;
                sample.extend(more.clone());
            });
            known.or_insert((level, more));
        }
        Ok(())
    }

    /// What is known of a candidate's excess. The reference must be known as far.
    pub(super) fn estimate(&self, candidate: Candidate) -> Option<Estimate> {
        let (level, own) = self.known.get(&candidate)?;
        if candidate == self.reference() {
            let part = self.text.part(*level);
            return Some(Estimate { excess: 0.0, error: 0.0, part });
        }
        let (_, dense) = self.known.get(&self.reference())?;
        Some(self.text.compare(&own.sums, dense.sums.get(..own.sums.len())?, *level))
    }

    fn reference(&self) -> Candidate {
        (0, self.tracks[0].last())
    }

    /// Finds what reads least within `limit` on the excess, of the tracks that are `allowed`.
    pub(super) fn settle(
        &mut self,
        limit: f64,
        allowed: &dyn Fn(usize) -> bool,
        by: &mut dyn Measure,
    ) -> Result<Option<Candidate>> {
        let last = self.text.levels() - 1;
        loop {
            let best = self.best(limit, allowed);
            let bound = best.map_or(f64::INFINITY, |best| self.bytes(best));
            if let Some((track, step)) = self.next(limit, bound, allowed) {
                *self.asked.entry((track, limit.to_bits())).or_default() += 1;
                self.decide((track, step), limit, by)?;
                continue;
            }
            match best {
                Some(best) if self.known[&best].0 < last => {
                    self.look(self.reference(), last, by)?;
                    self.look(best, last, by)?;
                }
                best => return Ok(best),
            }
        }
    }

    /// Looks at more and more text until it is sure.
    fn decide(&mut self, candidate: Candidate, limit: f64, by: &mut dyn Measure) -> Result<()> {
        for level in 0..self.text.levels() {
            self.look(self.reference(), level, by)?;
            self.look(candidate, level, by)?;
            if self.verdict(candidate, limit) != Verdict::Open {
                break;
            }
        }
        Ok(())
    }

    fn verdict(&self, candidate: Candidate, limit: f64) -> Verdict {
        let found = self.estimate(candidate);
        found.map_or(Verdict::Open, |found| found.verdict(limit, self.sigmas))
    }

    /// Steps of a track that were measured, with what is known of them.
    fn points(&self, track: usize) -> impl DoubleEndedIterator<Item = (u32, Estimate)> {
        let all = self.known.range((track, 0)..=(track, u32::MAX));
        all.filter_map(move |(&candidate, _)| Some((candidate.1, self.estimate(candidate)?)))
    }

    /// Those for which the verdict is this.
    fn with(&self, track: usize, limit: f64, verdict: Verdict) -> impl Iterator<Item = u32> {
        let points = self.points(track);
        points.filter(move |(_, found)| found.verdict(limit, self.sigmas) == verdict).map(|p| p.0)
    }

    /// What reads least of what is known to keep a limit.
    fn best(&self, limit: f64, allowed: &dyn Fn(usize) -> bool) -> Option<Candidate> {
        let tracks = (0..self.tracks.len()).filter(|&track| allowed(track));
        let kept = tracks.flat_map(|track| {
            self.with(track, limit, Verdict::Kept).map(move |step| (track, step))
        });
        kept.min_by(|&a, &b| self.bytes(a).total_cmp(&self.bytes(b)))
    }

    /// What a token reads: as measured, or as expected and corrected by what was measured nearest.
    pub(super) fn bytes(&self, candidate: Candidate) -> f64 {
        let (number, step) = candidate;
        let track = &self.tracks[number];
        let measured = |(level, sample): &(u32, Sample)| {
            sample.misses as f64 * track.block_bytes / self.text.tokens(*level) as f64
        };
        if let Some(known) = self.known.get(&candidate) {
            return measured(known);
        }
        let near = self.known.range((number, 0)..=(number, u32::MAX));
        let near = near.min_by_key(|((_, at), _)| at.abs_diff(step));
        let correction = near.map_or(1.0, |(&(_, at), known)| {
            let (found, expected) = (measured(known), track.expected(at));
            if expected > 0.0 && found > 0.0 { found / expected } else { 1.0 }
        });
        track.expected(step) * correction
    }

    /// Whether a track's number format alone breaks a limit.
    fn is_costly(&self, track: usize, limit: f64) -> bool {
        self.rounding(track) > limit
    }

    /// The excess of running every neuron in a track's format.
    fn rounding(&self, track: usize) -> f64 {
        let whole = self.tracks[track].whole;
        let found = self.estimate((whole, self.tracks[whole].last()));
        found.map_or(0.0, |found| found.excess.max(0.0))
    }

    /// Steps of a track that would read less than `bound` and may keep the limit.
    fn open(&self, track: usize, limit: f64, bound: f64) -> Vec<u32> {
        let first_kept = self.with(track, limit, Verdict::Kept).min().unwrap_or(u32::MAX);
        let reach = |of: usize| {
            if self.is_costly(of, limit) { self.tracks[of].last() / REACH } else { u32::MAX }
        };
        let finer = self.tracks[track].finer.iter().copied().chain([track]);
        let ruled_out: Vec<(u32, u32)> = finer
            .flat_map(|of| {
                let (broken, reach) = (self.with(of, limit, Verdict::Broken), reach(of));
                broken.map(move |step| (step.saturating_sub(reach), step))
            })
            .collect();
        let is_open = |step: &u32| {
            *step < first_kept
                && !ruled_out.iter().any(|(low, high)| (low..=high).contains(&step))
                && self.bytes((track, *step)) < bound
        };
        self.tracks[track].steps.clone().filter(is_open).collect()
    }

    /// The candidate to measure next, if any is left.
    fn next(&self, limit: f64, bound: f64, allowed: &dyn Fn(usize) -> bool) -> Option<Candidate> {
        let mut first: Option<(f64, Candidate)> = None;
        for track in (0..self.tracks.len()).filter(|&track| allowed(track)) {
            let open = self.open(track, limit, bound);
            let Some(&last) = open.last() else { continue };
            let expected = self.expected(track, limit);
            let wanted = (expected.ceil() as u32).min(self.tracks[track].last());
            // The others leave a costly one less to look for.
            let bytes = if expected.is_finite() && !self.is_costly(track, limit) {
                self.bytes((track, wanted.max(*self.tracks[track].steps.start())))
            } else {
                f64::INFINITY
            };
            let asked = self.asked.get(&(track, limit.to_bits())).copied().unwrap_or(0);
            let step = if asked % MIDDLE == MIDDLE - 1 {
                open[open.len() / 2]
            } else {
                open.iter().copied().find(|&step| step >= wanted).unwrap_or(last)
            };
            if first.is_none_or(|(least, _)| bytes < least) {
                first = Some((bytes, (track, step)));
            }
        }
        first.map(|(_, candidate)| candidate)
    }

    /// The step, and part of one, from which a track is expected to keep a limit: the excess is taken to fall like a
    /// power of e.
    fn expected(&self, track: usize, limit: f64) -> f64 {
        let (level, steps) = (limit.max(FLOOR).ln(), f64::from(self.tracks[track].last()));
        let height =
            |(step, found): (u32, Estimate)| (f64::from(step), found.excess.max(FLOOR).ln());
        let points: Vec<(f64, f64)> = self.points(track).map(height).collect();
        let low = points.iter().rev().find(|(_, height)| *height > level);
        let high =
            points.iter().find(|(at, height)| *height <= level && low.is_none_or(|l| l.0 < *at));
        if let (Some(low), Some(high)) = (low, high) {
            return low.0 + (low.1 - level) / (low.1 - high.1) * (high.0 - low.0);
        }
        if let Some(&(at, height)) = low.or(high) {
            return at + (height - level) / self.fall(track);
        }
        let known = |&kin: &usize| self.points(kin).next().is_some();
        if let Some(kin) = self.tracks[track].kin.iter().copied().find(known) {
            let dearer = (self.rounding(track) - self.rounding(kin)).max(0.0);
            return if dearer < limit { self.expected(kin, limit - dearer) } else { f64::INFINITY };
        }
        if self.is_costly(track, limit) { f64::INFINITY } else { steps / FIRST }
    }

    /// By how much the logarithm of a track's excess falls with a step: from its ends, or its kin's.
    fn fall(&self, track: usize) -> f64 {
        let steps = f64::from(self.tracks[track].last());
        let of = |track: usize| {
            let (first, last) = (self.points(track).next()?, self.points(track).next_back()?);
            let height = |found: Estimate| found.excess.max(FLOOR).ln();
            let apart = f64::from(last.0.checked_sub(first.0).filter(|&apart| apart > 0)?);
            Some((height(first.1) - height(last.1)) / apart)
        };
        let kin = self.tracks[track].kin.iter().copied();
        let fall = [track].into_iter().chain(kin).find_map(of).unwrap_or(FALL / steps);
        fall.clamp(FALLS.0 / steps, FALLS.1 / steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::PrepError;
    use rand::{Rng, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    const STEPS: u32 = 80;
    const LIMITS: [f64; 3] = [0.10, 0.05, 0.01];
    /// Excess of a format with every neuron in it, and bytes of its neurons.
    const FORMATS: [(f64, f64); 3] = [(0.0, 2.0), (0.003, 1.06), (0.12, 0.56)];
    /// Excess with no exact neuron, and share of the blocks that stay in memory, for one of every two bytes.
    const BASES: [(f64, f64); 2] = [(0.15, 0.045), (0.2, 0.108)];

    /// A model made up: what each candidate is off, and how that scatters over the text.
    struct World {
        tracks: Vec<Track>,
        text: Text,
        /// Common to all candidates: what hurts one hurts all there.
        scatter: Vec<f64>,
        /// Of each candidate by itself.
        own_scatter: f64,
        /// Candidates and levels asked for, and tokens of those.
        asked: Vec<(Candidate, u32)>,
        tokens: u64,
        /// Fails when so many were asked for.
        patience: usize,
    }

    impl World {
        fn new(seed: u64, own_scatter: f64) -> World {
            let text = Text::new(64, 513, 4 * 513);
            let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
            let scatter = (0..64 * 8).map(|_| 3.0 * (random.random::<f64>() - 0.5)).collect();
            let mut tracks = Vec::new();
            for (whole, (_, bytes)) in FORMATS.into_iter().enumerate() {
                let (steps, bytes) = (STEPS..=STEPS, vec![1000.0 * (bytes - 0.5)]);
                let (finer, kin) = (Vec::new(), Vec::new());
                tracks.push(Track { steps, bytes, block_bytes: 1.0, finer, kin, whole });
            }
            for (base, (_, room)) in BASES.into_iter().enumerate() {
                for (whole, (_, size)) in FORMATS.into_iter().enumerate() {
                    let read = |step| {
                        let share = f64::from(step) / f64::from(STEPS);
                        1000.0 * size * share * (1.0 - (2.0 * room / size).min(1.0))
                    };
                    let at = |base, format| FORMATS.len() * (1 + base) + format;
                    let is_finer = |&(b, f): &(usize, usize)| {
                        b <= base && f <= whole && (b, f) != (base, whole)
                    };
                    let pairs =
                        (0..BASES.len()).flat_map(|b| (0..FORMATS.len()).map(move |f| (b, f)));
                    let finer = pairs.filter(is_finer).map(|(b, f)| at(b, f)).collect();
                    let kin = (0..FORMATS.len()).filter(|&f| f != whole).map(|f| at(base, f));
                    tracks.push(Track {
                        steps: 0..=STEPS,
                        bytes: (0..=STEPS).map(read).collect(),
                        block_bytes: 1.0,
                        finer,
                        kin: kin.collect(),
                        whole,
                    });
                }
            }
            let (asked, tokens, patience) = (Vec::new(), 0, usize::MAX);
            World { tracks, text, scatter, own_scatter, asked, tokens, patience }
        }

        fn excess(&self, (track, step): Candidate) -> f64 {
            let share = f64::from(step) / f64::from(STEPS);
            let (rounding, _) = FORMATS[self.tracks[track].whole];
            match track.checked_sub(FORMATS.len()) {
                None => rounding,
                Some(place) => {
                    let (height, _) = BASES[place / FORMATS.len()];
                    height * (-4.5 * share).exp() + rounding * (1.0 - (-8.0 * share).exp())
                }
            }
        }

        /// How much more than dense each piece is, a token.
        fn off(&self, candidate: Candidate) -> Vec<f64> {
            let seed = u64::from(candidate.1) << 32 | candidate.0 as u64;
            let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
            let excess = self.excess(candidate);
            let own = if candidate.0 == 0 { 0.0 } else { self.own_scatter };
            let off = |&s: &f64| excess * (1.0 + s) + own * (random.random::<f64>() - 0.5);
            self.scatter.iter().map(off).collect()
        }

        /// The excess over the whole text.
        fn measured(&self, candidate: Candidate) -> f64 {
            self.off(candidate).iter().sum::<f64>() / self.scatter.len() as f64
        }

        /// What reads least of all candidates within each limit, every one measured on everything.
        fn by_brute_force(&self) -> [Candidate; 3] {
            let steps = |(number, track): (usize, &Track)| {
                track.steps.clone().map(move |step| (number, step))
            };
            let all = self.tracks.iter().enumerate().flat_map(steps);
            let all: Vec<(Candidate, f64)> =
                all.map(|found| (found, self.measured(found))).collect();
            LIMITS.map(|limit| {
                let kept = all.iter().filter(|(_, excess)| *excess <= limit).map(|found| found.0);
                kept.min_by(|&a, &b| self.bytes(a).total_cmp(&self.bytes(b))).unwrap()
            })
        }

        fn bytes(&self, (track, step): Candidate) -> f64 {
            self.tracks[track].expected(step)
        }

        /// What the search finds for each limit.
        fn search(&mut self, sigmas: f64) -> Result<Vec<Candidate>> {
            let (tracks, text) = (self.tracks.clone(), self.text.clone());
            let mut search = Search::new(&tracks, &text, sigmas);
            for whole in 0..FORMATS.len() {
                search.look((whole, STEPS), 0, self)?;
            }
            let settle = |limit| Ok(search.settle(limit, &|_| true, self)?.unwrap());
            LIMITS.into_iter().map(settle).collect()
        }
    }

    impl Measure for World {
        fn measure(&mut self, candidate: Candidate, level: u32) -> Result<Sample> {
            if self.asked.len() == self.patience {
                return Err(PrepError::usage("out of patience"));
            }
            assert!(!self.asked.contains(&(candidate, level)), "asked twice: {candidate:?}");
            self.asked.push((candidate, level));
            let tokens = self.text.tokens(level)
                - level.checked_sub(1).map_or(0, |before| self.text.tokens(before));
            self.tokens += tokens;
            let misses = self.tracks[candidate.0].expected(candidate.1) * tokens as f64;
            let (off, misses) = (self.off(candidate), misses.round() as u64);
            let pieces = self.text.added(level).iter().flat_map(|at| 8 * at..8 * (at + 1));
            let sums = pieces.map(|piece| 64.0 * (3.0 + off[piece])).collect();
            Ok(Sample { sums, exact_neurons: 0, requests: misses, misses })
        }
    }

    #[test]
    fn it_finds_what_brute_force_finds_with_a_few_measurements() {
        let (mut most, mut all) = (0.0f64, 0.0);
        for seed in 0..20 {
            let mut world = World::new(seed, 0.0);
            let found = world.search(3.0).unwrap();
            assert_eq!(found, world.by_brute_force(), "{seed}");
            let reads = world.tokens as f64 / (64.0 * 513.0);
            (most, all) = (most.max(reads), all + reads);
        }
        // Brute force reads the text 489 times.
        let mean = all / 20.0;
        assert!(mean < 12.0 && most < 25.0, "the text was read {mean} times, or {most}");
    }

    #[test]
    fn candidates_that_scatter_by_themselves_cost_a_step_or_two_at_most() {
        let mut off_without_care = 0;
        for seed in 0..20 {
            // An own error of 0.001 over all of the text: what a step changes at a hundredth.
            let mut world = World::new(seed, 0.08);
            let (found, wanted) = (world.search(3.0).unwrap(), world.by_brute_force());
            for ((&found, wanted), limit) in found.iter().zip(wanted).zip(LIMITS) {
                assert!(world.measured(found) <= limit, "{found:?} is not within {limit}");
                let (own, least) = (world.bytes(found), world.bytes(wanted));
                assert!(own <= 1.1 * least, "{seed}: {found:?}, not {wanted:?}");
            }
            let hasty = World::new(seed, 0.08).search(0.0).unwrap();
            off_without_care += hasty.iter().zip(&found).filter(|(a, b)| a != b).count();
        }
        assert!(off_without_care > 5, "{off_without_care}: the errors matter nowhere");
    }

    #[test]
    fn where_nothing_is_within_the_limit_the_reference_is_the_answer() {
        let mut world = World::new(1, 0.0);
        let (tracks, text) = (world.tracks.clone(), world.text.clone());
        let mut search = Search::new(&tracks, &text, 3.0);
        search.look((0, STEPS), 0, &mut world).unwrap();
        assert_eq!(search.settle(0.0, &|_| true, &mut world).unwrap(), Some((0, STEPS)));
        let base_only = |track: usize| track >= FORMATS.len();
        assert_eq!(search.settle(0.0, &base_only, &mut world).unwrap(), None);
        // As much as any base alone is off: nothing has to be read.
        assert_eq!(search.settle(2.0, &base_only, &mut world).unwrap().unwrap().1, 0);
    }
}
