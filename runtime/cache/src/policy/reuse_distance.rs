//! [`ReuseDistance`]: the block whose predicted next use is furthest away goes (section 3.3.3 of the paper).

use super::EvictionPolicy;
use super::ranks::Ranks;
use crate::blocks::Blocks;
use ls_bundle::ids::{BlockId, LayerId};

/// Predicted reuse distances of every history of quantised inter-arrival times, for one layer's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GapTable {
    /// A gap is in interval i if exactly i of these are <= it. Ascending; a power of two less one.
    pub thresholds: Vec<u16>,
    /// Gaps of a history, 1 or more.
    pub history: u32,
    /// By history, newest gap in the lowest bits: visits until the next request.
    pub distances: Vec<u16>,
}

impl GapTable {
    /// Bits of a gap's interval.
    #[must_use]
    pub fn bits(&self) -> u32 {
        (self.thresholds.len() + 1).trailing_zeros()
    }

    /// Whether its parts fit together.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let bits = self.bits();
        (self.thresholds.len() + 1).is_power_of_two()
            && (1..=16).contains(&(bits * self.history))
            && self.thresholds.is_sorted()
            && self.distances.len() == 1 << (bits * self.history)
    }

    /// The interval of a gap.
    #[must_use]
    pub fn interval(&self, gap: u32) -> u32 {
        self.thresholds.partition_point(|&threshold| u32::from(threshold) <= gap) as u32
    }

    /// The history of the longest gaps, and its distance.
    fn longest(&self) -> (u16, u16) {
        let last = self.distances.len() - 1;
        (last as u16, self.distances[last])
    }

    /// The history after one gap more.
    #[must_use]
    pub fn push(&self, history: u16, gap: u32) -> u16 {
        let (bits, mask) = (self.bits(), self.distances.len() - 1);
        ((u32::from(history) << bits | self.interval(gap)) & mask as u32) as u16
    }
}

/// A prediction is made when a block is requested. A block that is not requested when it was expected is as far from
/// its next use as it is late: what has been late for long was mispredicted, or is not needed any more.
#[derive(Debug)]
pub struct ReuseDistance {
    ranks: Ranks,
    /// By layer.
    tables: Vec<GapTable>,
    histories: Vec<u16>,
    /// By block: the visit of its last request.
    last: Vec<u32>,
    /// By block: the visit of its predicted next request.
    due: Vec<u32>,
    visits: Vec<u32>,
    visited: LayerId,
}

impl ReuseDistance {
    /// For these blocks, with a table a layer. None was requested yet: as if all had been, just before, after the
    /// longest gaps.
    ///
    /// # Panics
    /// If a table is not sound.
    #[must_use]
    pub fn new(blocks: &Blocks, tables: Vec<GapTable>) -> ReuseDistance {
        assert_eq!(tables.len(), blocks.layers(), "a table for each layer");
        let (mut histories, mut due) = (vec![0; blocks.len()], vec![0; blocks.len()]);
        for (table, range) in tables.iter().zip(blocks.ranges()) {
            assert!(table.is_sound(), "a table of gaps");
            let (longest, distance) = table.longest();
            let first = blocks.index(BlockId(range.start));
            histories[first..first + range.len()].fill(longest);
            due[first..first + range.len()].fill(u32::from(distance));
        }
        ReuseDistance {
            ranks: Ranks::new(blocks),
            histories,
            last: vec![0; blocks.len()],
            due,
            visits: vec![0; blocks.layers()],
            visited: LayerId(0),
            tables,
        }
    }
}

/// Near is large.
fn key(due: u32, now: u32) -> u32 {
    u32::MAX - due.abs_diff(now)
}

impl EvictionPolicy for ReuseDistance {
    fn visit(&mut self, layer: LayerId) {
        self.visited = layer;
        self.visits[layer.index()] += 1;
        let (now, due) = (self.visits[layer.index()], &self.due);
        self.ranks.rekey(layer, |at| key(due[at], now));
    }

    fn requested(&mut self, block: BlockId) {
        let at = self.ranks.blocks().index(block);
        let now = self.visits[self.visited.index()];
        let table = &self.tables[self.visited.index()];
        self.histories[at] = table.push(self.histories[at], now - self.last[at]);
        self.last[at] = now;
        self.due[at] = now + u32::from(table.distances[usize::from(self.histories[at])]);
    }

    fn enter(&mut self, layer: LayerId, block: BlockId) {
        let at = self.ranks.blocks().index(block);
        let now = self.visits[layer.index()];
        self.ranks.insert(layer, block, key(self.due[at], now));
    }

    fn leave(&mut self, layer: LayerId, block: BlockId) {
        self.ranks.remove(layer, block);
    }

    fn weakest(&self, scope: Option<LayerId>) -> Option<(LayerId, BlockId)> {
        self.ranks.weakest(scope)
    }
}
