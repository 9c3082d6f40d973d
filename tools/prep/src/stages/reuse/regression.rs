//! The paper's regression of reuse distances (sections 3.3.1 to 3.3.3): stacked hashing from inter-arrival times to a
//! quantised number of visits, trained with binary cross-entropy on the code's bits.
//!
//! What an index means is the mean distance of the samples that are hashed to it, and not the bin that its bits
//! spell: distances are a few visits, so most of the 2^tau bins are of equal numbers, and when the next request comes
//! is so uncertain that bits which are each the likelier one spell a distance that is not likely at all. On layer 12 of
//! SmolLM2-135M with 12.5/25/50 % of the neurons kept, LRU hits .195/.376/.623, this table .215/.381/.628, and with the
//! bins' medians instead .190/.330/.584.
//!
//! With the history alone, gaps are rounded to a few intervals first, so that the trained stack becomes a table of all
//! histories ([`GapTable`]), exactly. The `extended` one sees age, frequency and moving average beside unrounded gaps
//! and is asked at every visit: a figure to compare with, too slow to run.

use super::judge::Rank;
use super::requests::ONE;
use crate::error::{PrepError, Result};
use crate::recipe;
use crate::train::{Features, IndexStack, Options, Statistics, regression};
use ls_bundle::ids::BlockId;
use ls_cache::AccessTrace;
use ls_cache::policy::{DISTANCE_UNITS, GapTable};
use ls_hash::{HashStack, Kernels, Scaling, Scratch};

/// Share that a visit adds to the moving average which the extended regression sees.
const AVERAGE_RATE: f32 = 0.02;
/// Gaps of a block that has not been requested so often yet.
const LONG_AGO: u32 = 1 << 10;

/// A block's last inter-arrival times, newest first, and what else an extended prediction sees.
#[derive(Clone, Debug)]
struct Watched {
    gaps: Vec<u32>,
    last: u32,
    average: f32,
}

/// All blocks of a layer at some visit.
#[derive(Debug)]
struct Watch {
    blocks: Vec<Watched>,
    frequencies: Vec<f32>,
    now: u32,
}

impl Watch {
    fn new(history: u32, frequencies: &[f32]) -> Watch {
        let gaps = vec![LONG_AGO; history as usize];
        let block = |&average: &f32| Watched { gaps: gaps.clone(), last: 0, average };
        let blocks = frequencies.iter().map(block).collect();
        Watch { blocks, frequencies: frequencies.to_vec(), now: 0 }
    }

    fn visit(&mut self, trace: &AccessTrace, token: usize) {
        self.now += 1;
        self.blocks.iter_mut().for_each(|block| block.average *= 1.0 - AVERAGE_RATE);
        for block in trace.set(token, ONE) {
            let block = &mut self.blocks[block.index()];
            block.gaps.rotate_right(1);
            block.gaps[0] = self.now - block.last;
            block.last = self.now;
            block.average += AVERAGE_RATE;
        }
    }

    /// What the extended regression sees of a block.
    fn feature(&self, number: usize, into: &mut Vec<f32>) {
        let block = &self.blocks[number];
        into.clear();
        into.extend(block.gaps.iter().map(|&gap| (gap as f32).log2()));
        into.push(((self.now - block.last + 1) as f32).log2());
        into.extend([self.frequencies[number], block.average].map(|share| (share + 1e-3).log2()));
    }
}

/// Visits from a token's to the next that requests the block; none if no other does.
fn distance(trace: &AccessTrace, token: usize, number: usize) -> Option<f32> {
    let block = BlockId(number as u32);
    let mut later = token + 1..trace.tokens();
    later.find(|&later| trace.contains(later, ONE, block)).map(|later| (later - token) as f32)
}

fn options(recipe: &recipe::Reuse) -> Options {
    Options {
        epochs: recipe.epochs,
        batch: recipe.batch,
        learning_rate: recipe.learning_rate,
        temperature: recipe.temperature,
    }
}

/// Imagined samples of each index that are like all.
const PRIOR_SAMPLES: f32 = 8.0;

/// A trained stack, and what its indices mean.
#[derive(Debug)]
struct Trained {
    stack: HashStack,
    scratch: Scratch,
    /// By index: the mean distance of its samples.
    means: Vec<f32>,
}

impl Trained {
    fn train(
        rows: &[Vec<f32>],
        labels: &[f32],
        recipe: &recipe::Reuse,
        seed: u64,
    ) -> Result<Trained> {
        let mut statistics = Statistics::new(Scaling::Fixed, rows.first().map_or(1, Vec::len));
        rows.iter().for_each(|row| statistics.add(row));
        let mut features = Features::new(statistics.input());
        rows.iter().for_each(|row| features.push([&row[..]]));
        let shape = IndexStack {
            layers: recipe.layers as usize,
            tau: recipe.tau as usize,
            width: recipe.width as usize,
        };
        let clip = recipe.clip as f32;
        let tables = regression(shape, &features, labels, clip, &options(recipe), seed)?;
        let stack = HashStack::new(tables, Kernels::detect()).map_err(PrepError::unsupported)?;
        let mut scratch = Scratch::default();
        scratch.grow_for(&stack);
        let all = labels.iter().sum::<f32>() / labels.len().max(1) as f32;
        let mut sums = vec![(PRIOR_SAMPLES * all, PRIOR_SAMPLES); 1 << recipe.tau];
        for (row, label) in rows.iter().zip(labels) {
            let (sum, count) = &mut sums[stack.value(row, &mut scratch).0];
            (*sum, *count) = (*sum + label, *count + 1.0);
        }
        let means = sums.into_iter().map(|(sum, count)| sum / count).collect();
        Ok(Trained { stack, scratch, means })
    }

    /// The expected distance.
    fn distance(&mut self, feature: &[f32]) -> f32 {
        self.means[self.stack.value(feature, &mut self.scratch).0]
    }
}

/// The table of the regression on histories of gaps.
pub(super) fn gaps(trace: &AccessTrace, recipe: &recipe::Reuse, seed: u64) -> Result<GapTable> {
    let (history, intervals) = (recipe.history, recipe.gap_intervals);
    let mut all: Vec<u32> = Vec::new();
    let mut events: Vec<(Vec<u32>, usize, usize)> = Vec::new();
    let requests: usize = (0..trace.tokens()).map(|token| trace.set_len(token, ONE)).sum();
    let every = requests.div_ceil(recipe.samples as usize).max(1);
    let mut watch = Watch::new(history, &vec![0.0; trace.blocks().len()]);
    let mut seen = 0usize;
    for token in 0..trace.tokens() {
        watch.visit(trace, token);
        for block in trace.set(token, ONE) {
            seen += 1;
            if seen.is_multiple_of(every) {
                let gaps = watch.blocks[block.index()].gaps.clone();
                all.push(gaps[0]);
                events.push((gaps, token, block.index()));
            }
        }
    }
    all.sort_unstable();
    let at = |share: f64| all.get((share * all.len() as f64) as usize).map_or(1, |&gap| gap as u16);
    let part = 1.0 / f64::from(intervals);
    let mut thresholds: Vec<u16> = Vec::new();
    for interval in 1..intervals {
        // Gaps of one visit are so many that equal shares alone would leave intervals empty.
        let above = thresholds.last().map_or(2, |&last| last + 1);
        thresholds.push(at(f64::from(interval) * part).max(above));
    }
    let mut table = GapTable { thresholds, history, distances: Vec::new() };
    let stands_for = stands_for(&table, &all);
    let feature = |intervals: &mut dyn Iterator<Item = u32>| -> Vec<f32> {
        intervals.map(|interval| stands_for[interval as usize].log2()).collect()
    };
    let (mut rows, mut labels) = (Vec::new(), Vec::new());
    for (gaps, token, number) in &events {
        if let Some(distance) = distance(trace, *token, *number) {
            rows.push(feature(&mut gaps.iter().map(|&gap| table.interval(gap))));
            labels.push(distance);
        }
    }
    let mut trained = Trained::train(&rows, &labels, recipe, seed)?;
    let bits = table.bits();
    table.distances = (0..1u32 << (bits * history))
        .map(|code| {
            let mut intervals = (0..history).map(|n| (code >> (bits * n)) & (intervals - 1));
            let distance = trained.distance(&feature(&mut intervals));
            let units = distance * DISTANCE_UNITS as f32;
            units.round().clamp(1.0, f32::from(u16::MAX)) as u16
        })
        .collect();
    Ok(table)
}

/// The median gap of each interval. `all` gaps are sorted.
fn stands_for(table: &GapTable, all: &[u32]) -> Vec<f32> {
    let edges = table.thresholds.iter().map(|&edge| u32::from(edge));
    let starts = std::iter::once(1).chain(edges.clone());
    starts
        .zip(edges.chain([LONG_AGO]))
        .map(|(start, end)| {
            let first = all.partition_point(|&gap| gap < start);
            let last = all.partition_point(|&gap| gap < end);
            if first < last { all[(first + last) / 2] as f32 } else { start as f32 }
        })
        .collect()
}

/// The extended regression, and what it has seen of the trace that is replayed.
#[derive(Debug)]
pub(super) struct Extended {
    trained: Trained,
    watch: Watch,
    feature: Vec<f32>,
}

impl Extended {
    /// Learns from a trace in which the blocks were requested `frequencies` times.
    pub(super) fn learn(
        trace: &AccessTrace,
        frequencies: &[u32],
        recipe: &recipe::Reuse,
        seed: u64,
    ) -> Result<Extended> {
        let tokens = trace.tokens().max(1) as f32;
        let frequencies: Vec<f32> = frequencies.iter().map(|&n| n as f32 / tokens).collect();
        let count = frequencies.len();
        let every = (trace.tokens() * count).div_ceil(recipe.samples as usize).max(1) | 1;
        let mut watch = Watch::new(recipe.history, &frequencies);
        let (mut rows, mut labels, mut feature) = (Vec::new(), Vec::new(), Vec::new());
        for token in 0..trace.tokens() {
            watch.visit(trace, token);
            let first = (token * count).next_multiple_of(every) - token * count;
            for number in (first..count).step_by(every) {
                if let Some(distance) = distance(trace, token, number) {
                    watch.feature(number, &mut feature);
                    rows.push(feature.clone());
                    labels.push(distance);
                }
            }
        }
        let trained = Trained::train(&rows, &labels, recipe, seed)?;
        let watch = Watch::new(recipe.history, &frequencies);
        Ok(Extended { trained, watch, feature })
    }
}

impl Rank for Extended {
    fn rank(&mut self, trace: &AccessTrace, token: usize, worths: &mut [f32]) {
        self.watch.visit(trace, token);
        for (number, worth) in worths.iter_mut().enumerate() {
            self.watch.feature(number, &mut self.feature);
            *worth = -self.trained.distance(&self.feature);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Recipe;
    use ls_cache::Blocks;
    use rand::{Rng, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    #[test]
    fn a_history_means_the_distance_that_is_expected_of_it() {
        // Requests without memory: nothing is likely, but the mean is known. Of 40 blocks half come often.
        let often = |block: u32| if block < 20 { 0.5 } else { 0.08 };
        let mut draw = Xoshiro256PlusPlus::seed_from_u64(7);
        let mut trace = AccessTrace::with_capacity(Blocks::even(1, 40), 1500);
        for _ in 0..1500 {
            let set: Vec<u32> = (0..40).filter(|&n| draw.random::<f64>() < often(n)).collect();
            trace.push(set.into_iter().map(BlockId));
        }
        let mut recipe = Recipe::load("tiny").unwrap().reuse;
        (recipe.samples, recipe.epochs) = (4096, 6);
        let table = gaps(&trace, &recipe, 3).unwrap();
        let distance = |gap: u32| {
            let history = (0..recipe.history).fold(0, |history, _| table.push(history, gap));
            f64::from(table.distances[usize::from(history)]) / f64::from(DISTANCE_UNITS)
        };
        let (short, long) = (distance(1), distance(60));
        assert!((short - 2.0).abs() < 1.0 && (long - 12.5).abs() < 5.0, "{short} {long}");
    }
}
