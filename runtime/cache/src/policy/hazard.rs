//! [`Hazard`]: the block least likely to be requested soon, given its past, goes. A table learned from traces says how
//! likely that is.

use super::EvictionPolicy;
use super::ranks::Ranks;
use crate::blocks::Blocks;
use ls_bundle::ids::{BlockId, LayerId};

/// Steps in which a mean is looked at: its upper ten bits.
pub const MEAN_STEPS: u16 = 1 << 10;
const STEP_BITS: u32 = 6;

/// Worths of one layer's blocks by what happened to them: which of the last visits requested them, and a fast and a
/// slow mean of requests. The first are the inter-arrival times of late and the age, exactly; the means are what is
/// further back and the frequency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HazardTable {
    /// Visits that are remembered one by one, at most 8.
    pub recent: u32,
    /// A visit's share of the fast and of the slow mean, out of 65536.
    pub rates: [u16; 2],
    /// A mean is on level i if exactly i of these are <= it, in [`MEAN_STEPS`]. Ascending; at most 63 each.
    pub thresholds: [Vec<u16>; 2],
    /// By the last visits (the newest in the lowest bit), the fast mean's level and the slow mean's: larger is better,
    /// and comparable among layers.
    pub worths: Vec<u16>,
    /// Both means at the beginning, out of 65535; one a block.
    pub initial: Vec<u16>,
}

impl HazardTable {
    /// Levels of the fast and of the slow mean.
    #[must_use]
    pub fn levels(&self) -> [usize; 2] {
        [self.thresholds[0].len() + 1, self.thresholds[1].len() + 1]
    }

    /// Whether its parts fit together.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let [fast, slow] = self.levels();
        let ascending = |thresholds: &Vec<u16>| {
            thresholds.len() < 64
                && thresholds.is_sorted()
                && thresholds.last().is_none_or(|&last| last < MEAN_STEPS)
        };
        self.recent <= 8
            && self.thresholds.iter().all(ascending)
            && self.worths.len() == (fast * slow) << self.recent
    }

    /// The entry of `worths` for a past.
    #[must_use]
    pub fn entry(&self, recent: u8, means: [u16; 2]) -> usize {
        let level = |which: usize| {
            let step = means[which] >> STEP_BITS;
            self.thresholds[which].partition_point(|&threshold| threshold <= step)
        };
        let [fast, slow] = self.levels();
        (usize::from(recent) * fast + level(0)) * slow + level(1)
    }
}

/// What happened to a layer's blocks, in columns: a visit changes every block, so this is a few vector operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pasts {
    recent: Vec<u8>,
    means: [Vec<u16>; 2],
    mask: u8,
    rates: [u16; 2],
}

impl Pasts {
    /// Nothing requested yet; `initial` is both means of each block.
    #[must_use]
    pub fn new(recent: u32, rates: [u16; 2], initial: &[u16]) -> Pasts {
        let mask = ((1u32 << recent) - 1) as u8;
        let means = [initial.to_vec(), initial.to_vec()];
        Pasts { recent: vec![0; initial.len()], means, mask, rates }
    }

    /// One visit more, in which nothing has been requested yet.
    pub fn visit(&mut self) {
        self.recent.iter_mut().for_each(|recent| *recent = *recent << 1 & self.mask);
        for (means, rate) in self.means.iter_mut().zip(self.rates) {
            let lost = |mean: u16| ((u32::from(mean) * u32::from(rate)) >> 16) as u16;
            means.iter_mut().for_each(|mean| *mean -= lost(*mean));
        }
    }

    /// A block, by its number in the layer, is requested in this visit.
    pub fn requested(&mut self, number: usize) {
        self.recent[number] |= 1 & self.mask;
        for (means, rate) in self.means.iter_mut().zip(self.rates) {
            means[number] = means[number].saturating_add(rate);
        }
    }

    /// What is remembered of a block: the last visits, the fast and the slow mean.
    #[must_use]
    pub fn of(&self, number: usize) -> (u8, [u16; 2]) {
        (self.recent[number], [self.means[0][number], self.means[1][number]])
    }
}

/// One layer's table and pasts.
#[derive(Debug)]
struct Layer {
    pasts: Pasts,
    worths: Vec<u16>,
    /// By step of a mean: its level's share of the entry's number.
    shares: [Vec<u16>; 2],
    recent_share: usize,
}

impl Layer {
    fn worth(&self, number: usize) -> u32 {
        let (recent, means) = self.pasts.of(number);
        let share =
            |which: usize| usize::from(self.shares[which][usize::from(means[which] >> STEP_BITS)]);
        u32::from(self.worths[usize::from(recent) * self.recent_share + share(0) + share(1)])
    }
}

/// Worths change with every visit of a layer, so its candidates are ranked anew then: some nanoseconds a candidate.
#[derive(Debug)]
pub struct Hazard {
    ranks: Ranks,
    layers: Vec<Layer>,
    visited: LayerId,
}

impl Hazard {
    /// For these blocks, with a table a layer.
    ///
    /// # Panics
    /// If a table is not sound, or not of as many blocks.
    #[must_use]
    pub fn new(blocks: &Blocks, tables: &[HazardTable]) -> Hazard {
        assert_eq!(tables.len(), blocks.layers(), "a table for each layer");
        let layer = |(table, range): (&HazardTable, &std::ops::Range<u32>)| {
            assert!(table.is_sound(), "a table of worths");
            assert_eq!(table.initial.len(), range.len(), "blocks of the table");
            let slow = table.levels()[1];
            let shares = |which: usize, each: usize| {
                let level = |step: u16| table.thresholds[which].partition_point(|&t| t <= step);
                (0..MEAN_STEPS).map(|step| (level(step) * each) as u16).collect()
            };
            Layer {
                pasts: Pasts::new(table.recent, table.rates, &table.initial),
                worths: table.worths.clone(),
                shares: [shares(0, slow), shares(1, 1)],
                recent_share: table.levels()[0] * slow,
            }
        };
        let layers = tables.iter().zip(blocks.ranges()).map(layer).collect();
        Hazard { ranks: Ranks::new(blocks), layers, visited: LayerId(0) }
    }

    fn number(&self, layer: LayerId, block: BlockId) -> usize {
        (block.0 - self.ranks.blocks().of(layer).start) as usize
    }
}

impl EvictionPolicy for Hazard {
    fn visit(&mut self, layer: LayerId) {
        self.visited = layer;
        let first = self.ranks.blocks().index(BlockId(self.ranks.blocks().of(layer).start));
        let of = &mut self.layers[layer.index()];
        of.pasts.visit();
        self.ranks.rekey(layer, |at| of.worth(at - first));
    }

    fn requested(&mut self, block: BlockId) {
        let number = self.number(self.visited, block);
        self.layers[self.visited.index()].pasts.requested(number);
    }

    fn enter(&mut self, layer: LayerId, block: BlockId) {
        let worth = self.layers[layer.index()].worth(self.number(layer, block));
        self.ranks.insert(layer, block, worth);
    }

    fn leave(&mut self, layer: LayerId, block: BlockId) {
        self.ranks.remove(layer, block);
    }

    fn weakest(&self, scope: Option<LayerId>) -> Option<(LayerId, BlockId)> {
        self.ranks.weakest(scope)
    }
}
