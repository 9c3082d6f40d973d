//! [`Lru`]: the block whose last use is longest ago goes.

use super::EvictionPolicy;
use super::recency::Recency;
use crate::blocks::Blocks;
use ls_bundle::ids::{BlockId, LayerId};

/// Least recently used, in visits of a block's own layer. Of the blocks used in one visit the first that was unpinned
/// counts as the oldest.
#[derive(Debug)]
pub struct Lru(Recency);

impl Lru {
    /// For these blocks.
    #[must_use]
    pub fn new(blocks: &Blocks) -> Lru {
        Lru(Recency::new(blocks))
    }
}

impl EvictionPolicy for Lru {
    fn visit(&mut self, layer: LayerId) {
        self.0.visit(layer);
    }

    fn requested(&mut self, _: BlockId) {}

    fn enter(&mut self, layer: LayerId, block: BlockId) {
        self.0.push(layer, block);
    }

    fn leave(&mut self, layer: LayerId, block: BlockId) {
        self.0.remove(layer, block);
    }

    fn weakest(&self, scope: Option<LayerId>) -> Option<(LayerId, BlockId)> {
        self.0.oldest(scope)
    }
}
