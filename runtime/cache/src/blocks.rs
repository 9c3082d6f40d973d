//! [`Blocks`]: which blocks there are, and of which layer each is.

use ls_bundle::ids::{BlockId, LayerId};
use std::ops::Range;

/// The streamed blocks of each layer: ascending ranges of ids that do not overlap.
///
/// Tables with an entry a block are indexed by [`Blocks::index`]; ids between the ranges (tiles of dense matrices) leave
/// unused entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks {
    layers: Vec<Range<u32>>,
}

impl Blocks {
    /// Most layers.
    pub const MAX_LAYERS: usize = 1 << 12;

    /// Blocks of these ranges.
    ///
    /// # Panics
    /// If there is no layer, a range is empty, or they do not ascend.
    #[must_use]
    pub fn new(layers: Vec<Range<u32>>) -> Blocks {
        let blocks = Blocks { layers };
        assert!(blocks.are_sound(), "ranges of blocks ascend and are not empty");
        blocks
    }

    /// `layers` layers of `blocks` blocks each.
    #[must_use]
    pub fn even(layers: u16, blocks: u32) -> Blocks {
        Blocks::new((0..u32::from(layers)).map(|n| n * blocks..(n + 1) * blocks).collect())
    }

    pub(crate) fn checked(layers: Vec<Range<u32>>) -> Option<Blocks> {
        let blocks = Blocks { layers };
        blocks.are_sound().then_some(blocks)
    }

    fn are_sound(&self) -> bool {
        (1..=Blocks::MAX_LAYERS).contains(&self.layers.len())
            && self.layers.iter().all(|range| range.start < range.end)
            && self.layers.windows(2).all(|pair| pair[0].end <= pair[1].start)
    }

    /// Number of layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The ids of a layer's blocks.
    #[must_use]
    pub fn of(&self, layer: LayerId) -> Range<u32> {
        self.layers[layer.index()].clone()
    }

    /// All layers' ids.
    #[must_use]
    pub fn ranges(&self) -> &[Range<u32>] {
        &self.layers
    }

    /// The layer of a block.
    ///
    /// # Panics
    /// If the block is of no layer.
    #[must_use]
    pub fn layer_of(&self, block: BlockId) -> LayerId {
        let layer = self.layers.partition_point(|range| range.end <= block.0);
        assert!(self.layers[layer].contains(&block.0), "block {block} is of no layer");
        LayerId(layer as u16)
    }

    /// Entries that a table with one entry a block needs.
    #[must_use]
    pub fn len(&self) -> usize {
        (self.layers[self.layers.len() - 1].end - self.layers[0].start) as usize
    }

    /// False: there is at least one block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Number of blocks.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.layers.iter().map(|range| range.end - range.start).sum()
    }

    /// The entry of a block in a table.
    #[must_use]
    pub fn index(&self, block: BlockId) -> usize {
        (block.0 - self.layers[0].start) as usize
    }
}
