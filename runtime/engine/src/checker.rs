//! [`Checker`]: holds what was read against the checksums of its blocks, so that a damaged block never becomes a token.
//!
//! Left out: single rows of an embedding that is streamed. A row is no block; where the head is tied, the pass that
//! reads a row also walks over the tile it is in.

use crate::error::EngineError;
use ls_bundle::Bundle;
use ls_bundle::extent::Extent;
use ls_bundle::ids::BlockId;
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
    /// Blocks of each piece.
    pieces: Vec<Range<u32>>,
    /// Pieces that need no check: all, or those seen already.
    seen: Vec<bool>,
    /// The piece that was checked last; its other steps follow at once.
    last: Option<u32>,
}

impl Checker {
    /// A checker for the pieces of a program.
    pub(crate) fn new(bundle: Arc<Bundle>, verify: Verify, pieces: &[Extent]) -> Checker {
        let ranges = blocks_of(&bundle, pieces);
        Checker {
            bundle,
            verify,
            seen: vec![verify == Verify::Never; pieces.len()],
            pieces: ranges,
            last: None,
        }
    }

    /// Checks what stays resident, once: `bytes` start where `extent` does.
    pub(crate) fn resident(&self, extent: Extent, bytes: &[u8]) -> Result<(), EngineError> {
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
        if self.seen[index] || self.last == Some(piece) {
            return Ok(());
        }
        self.blocks(self.pieces[index].clone(), bytes)?;
        self.seen[index] = self.verify == Verify::First;
        self.last = Some(piece);
        Ok(())
    }

    /// A new pass begins: the piece that was last may come again, anew.
    pub(crate) fn begin(&mut self) {
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
