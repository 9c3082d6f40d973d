//! [`Checker`]: holds what was read against the checksums of its blocks, so that a damaged block never becomes a token.
//!
//! A bit may be flipped on its way from the disk: whoever reads asks again with a second reading of what fails.
//!
//! A row of an embedding that is streamed is no block, so the whole tile that it is in is read to check it. Where the head
//! is tied a first check needs none of that: the pass that makes a token walks over all tiles.

use crate::bits::Bits;
use crate::error::EngineError;
use crate::stream::Stream;
use ls_bundle::Bundle;
use ls_bundle::extent::Extent;
use ls_bundle::ids::BlockId;
use ls_bundle::model::{MatrixExtent, WeightMap};
use ls_sync::Slot;
use std::ops::Range;
use std::sync::Arc;

/// When blocks are checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Never: for measuring what checking costs.
    Never,
    /// When a block is read for the first time.
    #[default]
    First,
    /// Whenever a block is read.
    Always,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Checker {
    bundle: Arc<Bundle>,
    verify: Verify,
    /// For each walk: the blocks of its pieces, and which of these need no check (all, or those seen already).
    walks: Vec<(Vec<Range<u32>>, Vec<bool>)>,
    walk: usize,
    /// The piece that was checked last; its other steps follow at once.
    last: Option<u32>,
    /// The embedding's tiles, if rows are not checked otherwise, and a bit for each that was.
    tiles: Option<MatrixExtent>,
    tiles_seen: Bits,
    /// A bit for each block that was read by itself and needs no check any more; empty without such reads.
    blocks_seen: Bits,
}

impl Checker {
    /// A checker for the pieces of some walks.
    pub(crate) fn new(bundle: Arc<Bundle>, verify: Verify, walks: &[&[Extent]]) -> Checker {
        let of = |pieces: &&[Extent]| {
            (blocks_of(&bundle, pieces), vec![verify == Verify::Never; pieces.len()])
        };
        let WeightMap { embedding, head, .. } = bundle.weights();
        let by_tiles = match verify {
            Verify::Never => false,
            Verify::First => head.is_some(),
            Verify::Always => true,
        };
        Checker {
            tiles: by_tiles.then_some(*embedding),
            tiles_seen: Bits::new(embedding.tiles()),
            walks: walks.iter().map(of).collect(),
            walk: 0,
            bundle,
            verify,
            last: None,
            blocks_seen: Bits::default(),
        }
    }

    /// Reads what stays resident and checks it, once.
    pub(crate) fn load(
        &self,
        stream: &mut Stream,
        extents: &[Extent],
        progress: &mut dyn FnMut(u64),
    ) -> Result<Vec<(Slot, usize)>, EngineError> {
        let loaded = stream.load(extents, progress).map_err(|error| self.naming(error))?;
        let checked = extents.iter().zip(loaded).map(|(&extent, (slot, skip))| {
            if self.resident(extent, &slot.bytes()[skip..]).is_ok() {
                return Ok((slot, skip));
            }
            // A bit may have been flipped on its way.
            let slot = stream.load_again(extent, slot).map_err(|error| self.naming(error))?;
            self.resident(extent, &slot.bytes()[skip..])?;
            Ok((slot, skip))
        });
        checked.collect()
    }

    /// Checks what stays resident: `bytes` start where `extent` does.
    fn resident(&self, extent: Extent, bytes: &[u8]) -> Result<(), EngineError> {
        if self.verify == Verify::Never {
            return Ok(());
        }
        let [blocks] = &blocks_of(&self.bundle, &[extent])[..] else {
            unreachable!("one extent, one range")
        };
        self.blocks(blocks.clone(), bytes)
    }

    /// Checks a piece that has arrived, if it is its turn.
    pub(crate) fn piece(&mut self, piece: u32, bytes: &[u8]) -> Result<(), EngineError> {
        let index = piece as usize;
        let (blocks, seen) = &self.walks[self.walk];
        if seen[index] || self.last == Some(piece) {
            return Ok(());
        }
        self.blocks(blocks[index].clone(), bytes)?;
        self.walks[self.walk].1[index] = self.verify == Verify::First;
        self.last = Some(piece);
        Ok(())
    }

    /// The number of the embedding's tile that must be read to check a row, if one must.
    pub(crate) fn tile_to_check(&self, row: u32) -> Option<u32> {
        let tile = row / self.tiles?.tile_rows;
        (!self.tiles_seen.has(tile)).then_some(tile)
    }

    /// Reads a tile of the embedding row by row, hands the `wanted` one to `use_row`, and checks the whole.
    pub(crate) fn row(
        &self,
        stream: &mut Stream,
        tile: u32,
        wanted: u32,
        use_row: &mut dyn FnMut(&[u8]),
    ) -> Result<(), EngineError> {
        let matrix = &self.bundle.weights().embedding;
        let (id, extent) = matrix.tile(tile);
        let row_bytes = matrix.row_bytes();
        let rows = matrix.tile_rows.min(matrix.rows - tile * matrix.tile_rows);
        // Behind the last row there may be padding.
        let padding = extent.len - u64::from(rows) * row_bytes;
        let part = |index: usize| {
            let offset = extent.offset + index as u64 * row_bytes;
            let len = if index == rows as usize { padding } else { row_bytes };
            Extent { offset, len }
        };
        let mut check = self.bundle.check_in_pieces(id).map_err(EngineError::bundle)?;
        stream.rows(rows as usize + usize::from(padding > 0), &part, &mut |index, bytes| {
            check.add(&bytes[..part(index).len as usize]);
            if index == wanted as usize {
                use_row(bytes);
            }
        })?;
        check.finish().map_err(EngineError::bundle)
    }

    /// A tile of the embedding was checked.
    pub(crate) fn passed_tile(&mut self, tile: u32) {
        if self.verify == Verify::First {
            self.tiles_seen.set(tile);
        }
    }

    /// Names blocks in the error of a read.
    pub(crate) fn naming(&self, error: EngineError) -> EngineError {
        error.naming(&self.bundle)
    }

    /// Makes room for [`Checker::block`].
    pub(crate) fn expect_blocks(&mut self) {
        self.blocks_seen = Bits::new(self.bundle.block_count());
    }

    /// Checks a block that was read by itself, if it is its turn.
    pub(crate) fn block(&mut self, id: BlockId, bytes: &[u8]) -> Result<(), EngineError> {
        if self.verify == Verify::Never || self.blocks_seen.has(id.0) {
            return Ok(());
        }
        self.bundle.verify_block(id, bytes).map_err(EngineError::bundle)?;
        if self.verify == Verify::First {
            self.blocks_seen.set(id.0);
        }
        Ok(())
    }

    /// A new pass begins, of this walk: the piece that was last may come again, anew.
    pub(crate) fn begin(&mut self, walk: usize) {
        self.walk = walk;
        self.last = None;
    }

    fn blocks(&self, blocks: Range<u32>, mut bytes: &[u8]) -> Result<(), EngineError> {
        for id in blocks.map(BlockId) {
            let block = self.bundle.block(id).expect("ranges hold blocks of this bundle");
            let (block_bytes, rest) = bytes.split_at(block.extent.len as usize);
            self.bundle.verify_block(id, block_bytes).map_err(EngineError::bundle)?;
            bytes = rest;
        }
        Ok(())
    }
}

/// The blocks that make up each of `extents`, which ascend and are cut at blocks.
fn blocks_of(bundle: &Bundle, extents: &[Extent]) -> Vec<Range<u32>> {
    let mut blocks = bundle.blocks().peekable();
    let ranges = extents.iter().map(|extent| {
        while blocks.next_if(|block| block.extent.offset < extent.offset).is_some() {}
        let first = blocks.peek().map_or(0, |block| block.id.0);
        let mut end = first;
        while blocks.next_if(|block| block.extent.offset < extent.end()).is_some() {
            end += 1;
        }
        first..end
    });
    ranges.collect()
}
