//! [`Nothing`]: no block stays.

use super::EvictionPolicy;
use ls_bundle::ids::{BlockId, LayerId};

/// A cache that is none: a block goes as soon as nobody uses it.
#[derive(Debug)]
pub struct Nothing;

impl EvictionPolicy for Nothing {
    fn visit(&mut self, _: LayerId) {}

    fn requested(&mut self, _: BlockId) {}

    fn admit(&mut self, _: BlockId) -> bool {
        false
    }

    fn enter(&mut self, _: LayerId, block: BlockId) {
        unreachable!("block {block} entered without having been admitted");
    }

    fn leave(&mut self, _: LayerId, _: BlockId) {}

    fn weakest(&self, _: Option<LayerId>) -> Option<(LayerId, BlockId)> {
        None
    }
}
