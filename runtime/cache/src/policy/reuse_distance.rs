//! [`ReuseDistance`]: the block whose last use and predicted next use lie furthest apart goes (section 3.3.3 of the paper).

use super::EvictionPolicy;
use super::ranks::Ranks;
use crate::blocks::Blocks;
use ls_bundle::ids::{BlockId, LayerId};

/// Parts of a visit in which distances are given.
pub const DISTANCE_UNITS: u32 = 16;
/// More than any distance.
const BEFORE_ALL: u32 = 1 << 16;

/// Predicted reuse distances of every history of quantised inter-arrival times, for one layer's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GapTable {
    /// A gap is in interval i if exactly i of these are <= it. Ascending; a power of two less one.
    pub thresholds: Vec<u16>,
    /// Gaps of a history, 1 or more.
    pub history: u32,
    /// By history, newest gap in the lowest bits: visits from the last request to the next, in [`DISTANCE_UNITS`].
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

    /// The history after one gap more.
    #[must_use]
    pub fn push(&self, history: u16, gap: u32) -> u16 {
        let (bits, mask) = (self.bits(), self.distances.len() - 1);
        ((u32::from(history) << bits | self.interval(gap)) & mask as u32) as u16
    }
}

/// A prediction is made when a block is requested. What goes is the block with the largest sum of predicted distance and
/// age: the paper's prediction says how long a block may be idle before it is a loss, and a block that is overdue only
/// gets worse. (Ranked by the predicted next use alone, blocks that never come stay: the same predictions then hit no
/// more than LRU.) As all ages grow alike, a block's rank changes when it is requested and at no other time.
#[derive(Debug)]
pub struct ReuseDistance {
    ranks: Ranks,
    /// By layer.
    tables: Vec<GapTable>,
    histories: Vec<u16>,
    /// By block: the visit of its last request.
    last: Vec<u32>,
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
        let mut histories = vec![0; blocks.len()];
        for (table, range) in tables.iter().zip(blocks.ranges()) {
            assert!(table.is_sound(), "a table of gaps");
            let longest = (table.distances.len() - 1) as u16;
            let first = blocks.index(BlockId(range.start));
            histories[first..first + range.len()].fill(longest);
        }
        ReuseDistance {
            ranks: Ranks::new(blocks),
            histories,
            last: vec![0; blocks.len()],
            visits: vec![0; blocks.layers()],
            visited: LayerId(0),
            tables,
        }
    }
}

impl EvictionPolicy for ReuseDistance {
    fn visit(&mut self, layer: LayerId) {
        self.visited = layer;
        self.visits[layer.index()] += 1;
    }

    fn requested(&mut self, block: BlockId) {
        let at = self.ranks.blocks().index(block);
        let now = self.visits[self.visited.index()];
        let table = &self.tables[self.visited.index()];
        self.histories[at] = table.push(self.histories[at], now - self.last[at]);
        self.last[at] = now;
    }

    fn enter(&mut self, layer: LayerId, block: BlockId) {
        let at = self.ranks.blocks().index(block);
        let table = &self.tables[layer.index()];
        let distance = u32::from(table.distances[usize::from(self.histories[at])]);
        let last = self.last[at].saturating_mul(DISTANCE_UNITS);
        self.ranks.insert(layer, block, last.saturating_add(BEFORE_ALL) - distance);
    }

    fn leave(&mut self, layer: LayerId, block: BlockId) {
        self.ranks.remove(layer, block);
    }

    fn weakest(&self, scope: Option<LayerId>) -> Option<(LayerId, BlockId)> {
        self.ranks.weakest(scope)
    }
}
