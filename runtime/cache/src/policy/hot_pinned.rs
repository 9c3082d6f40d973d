//! [`HotPinned`]: the hottest blocks stay, the rest is least recently used. After PowerInfer-2.

use super::EvictionPolicy;
use super::recency::Recency;
use crate::blocks::Blocks;
use ls_bundle::ids::{BlockId, LayerId};

/// Blocks that were requested often beforehand stay once they are there; others are [`Lru`](super::Lru). A hot block
/// goes only when no other is left, which does not happen while more may be kept than are hot.
#[derive(Debug)]
pub struct HotPinned {
    /// By block: a bit.
    hot: Vec<u64>,
    hot_ones: Recency,
    others: Recency,
}

impl HotPinned {
    /// Calls hot, in each layer, the `hot[layer]` blocks that `frequencies` says were requested most often. It has one
    /// number a block, see [`Blocks::index`].
    ///
    /// # Panics
    /// If either has another length.
    #[must_use]
    pub fn new(blocks: &Blocks, frequencies: &[u32], hot: &[u32]) -> HotPinned {
        assert_eq!(frequencies.len(), blocks.len(), "a frequency for each block");
        assert_eq!(hot.len(), blocks.layers(), "a number of hot blocks for each layer");
        let mut bits = vec![0; blocks.len().div_ceil(64)];
        for (range, &count) in blocks.ranges().iter().zip(hot) {
            let mut order: Vec<usize> = range.clone().map(|id| blocks.index(BlockId(id))).collect();
            order.sort_by_key(|&at| std::cmp::Reverse(frequencies[at]));
            for &at in order.iter().take(count as usize) {
                bits[at / 64] |= 1u64 << (at % 64);
            }
        }
        HotPinned { hot: bits, hot_ones: Recency::new(blocks), others: Recency::new(blocks) }
    }

    fn list(&mut self, block: BlockId) -> &mut Recency {
        let at = self.others.blocks().index(block);
        if self.hot[at / 64] >> (at % 64) & 1 == 1 { &mut self.hot_ones } else { &mut self.others }
    }
}

impl EvictionPolicy for HotPinned {
    fn visit(&mut self, layer: LayerId) {
        self.hot_ones.visit(layer);
        self.others.visit(layer);
    }

    fn requested(&mut self, _: BlockId) {}

    fn enter(&mut self, layer: LayerId, block: BlockId) {
        self.list(block).push(layer, block);
    }

    fn leave(&mut self, layer: LayerId, block: BlockId) {
        self.list(block).remove(layer, block);
    }

    fn weakest(&self, scope: Option<LayerId>) -> Option<(LayerId, BlockId)> {
        self.others.oldest(scope).or_else(|| self.hot_ones.oldest(scope))
    }
}
