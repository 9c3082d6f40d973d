//! [`Lfu`]: the block that was requested least often goes.

use super::EvictionPolicy;
use super::ranks::Ranks;
use crate::blocks::Blocks;
use ls_bundle::ids::{BlockId, LayerId};

/// Least frequently used, counting all requests since the start, those for missing blocks too.
#[derive(Debug)]
pub struct Lfu {
    ranks: Ranks,
    requests: Vec<u32>,
}

impl Lfu {
    /// For these blocks, none requested yet.
    #[must_use]
    pub fn new(blocks: &Blocks) -> Lfu {
        Lfu { ranks: Ranks::new(blocks), requests: vec![0; blocks.len()] }
    }
}

impl EvictionPolicy for Lfu {
    fn visit(&mut self, _: LayerId) {}

    fn requested(&mut self, block: BlockId) {
        let requests = &mut self.requests[self.ranks.blocks().index(block)];
        *requests = requests.saturating_add(1);
    }

    fn enter(&mut self, layer: LayerId, block: BlockId) {
        let requests = self.requests[self.ranks.blocks().index(block)];
        self.ranks.insert(layer, block, requests);
    }

    fn leave(&mut self, layer: LayerId, block: BlockId) {
        self.ranks.remove(layer, block);
    }

    fn weakest(&self, scope: Option<LayerId>) -> Option<(LayerId, BlockId)> {
        self.ranks.weakest(scope)
    }
}
