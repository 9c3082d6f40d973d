//! [`Recency`]: candidates in the order in which they entered, a linked list for each layer.

use crate::blocks::Blocks;
use ls_bundle::ids::{BlockId, LayerId};

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Links {
    before: u32,
    after: u32,
    /// Visits of the layer when it entered.
    entered: u32,
}

/// Candidates of all layers, oldest first. Everything is O(1) but the oldest of all layers: O(layers).
#[derive(Debug)]
pub(super) struct Recency {
    blocks: Blocks,
    links: Vec<Links>,
    /// By layer: the oldest and the newest candidate's entry.
    ends: Vec<(u32, u32)>,
    visits: Vec<u32>,
}

impl Recency {
    pub(super) fn new(blocks: &Blocks) -> Recency {
        Recency {
            links: vec![Links { before: NONE, after: NONE, entered: 0 }; blocks.len()],
            ends: vec![(NONE, NONE); blocks.layers()],
            visits: vec![0; blocks.layers()],
            blocks: blocks.clone(),
        }
    }

    pub(super) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    pub(super) fn visit(&mut self, layer: LayerId) {
        self.visits[layer.index()] += 1;
    }

    pub(super) fn push(&mut self, layer: LayerId, block: BlockId) {
        let at = self.blocks.index(block) as u32;
        let (oldest, newest) = &mut self.ends[layer.index()];
        let entered = self.visits[layer.index()];
        self.links[at as usize] = Links { before: *newest, after: NONE, entered };
        match *newest {
            NONE => *oldest = at,
            newest => self.links[newest as usize].after = at,
        }
        *newest = at;
    }

    pub(super) fn remove(&mut self, layer: LayerId, block: BlockId) {
        let Links { before, after, .. } = self.links[self.blocks.index(block)];
        let (oldest, newest) = &mut self.ends[layer.index()];
        match before {
            NONE => *oldest = after,
            before => self.links[before as usize].after = after,
        }
        match after {
            NONE => *newest = before,
            after => self.links[after as usize].before = before,
        }
    }

    /// The candidate that entered first: of a layer, or that most visits ago of all.
    pub(super) fn oldest(&self, scope: Option<LayerId>) -> Option<(LayerId, BlockId)> {
        let oldest_of = |layer: usize| (self.ends[layer].0 != NONE).then_some(self.ends[layer].0);
        let age = |layer: usize, at: u32| self.visits[layer] - self.links[at as usize].entered;
        let (layer, at) = match scope {
            Some(layer) => (layer.index(), oldest_of(layer.index())?),
            None => (0..self.ends.len())
                .rev()
                .filter_map(|layer| Some((layer, oldest_of(layer)?)))
                .max_by_key(|&(layer, at)| age(layer, at))?,
        };
        Some((LayerId(layer as u16), BlockId(self.blocks.of(LayerId(0)).start + at)))
    }
}
