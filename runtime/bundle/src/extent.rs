//! Where weights lie: byte ranges of tiles, rows and blocks. Pure arithmetic on the types of [`crate::model`].

use crate::ids::BlockId;
use crate::model::{FfnExtent, MatrixExtent};

/// Every tile and block starts at a multiple of this, so that vector loads are aligned in a page-aligned buffer.
pub const BLOCK_ALIGNMENT: u64 = 64;

/// `len` rounded up to [`BLOCK_ALIGNMENT`].
#[must_use]
pub const fn align_up(len: u64) -> u64 {
    len.next_multiple_of(BLOCK_ALIGNMENT)
}

/// A range of bytes of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Extent {
    /// First byte behind the range.
    #[must_use]
    pub fn end(self) -> u64 {
        self.offset + self.len
    }
}

impl MatrixExtent {
    /// Bytes of one row. Rows follow each other without gaps: `tile_rows * row_bytes` is a multiple of 64
    /// (checked when a bundle is opened), so only the end of the matrix is padded.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        self.dtype.row_bytes(self.cols)
    }

    /// The whole matrix, padding included.
    #[must_use]
    pub fn extent(&self) -> Extent {
        Extent { offset: self.offset, len: align_up(u64::from(self.rows) * self.row_bytes()) }
    }

    /// Rows `first .. first + count`, without padding.
    #[must_use]
    pub fn rows_extent(&self, first: u32, count: u32) -> Extent {
        let row = self.row_bytes();
        Extent { offset: self.offset + u64::from(first) * row, len: u64::from(count) * row }
    }

    /// Number of tiles.
    #[must_use]
    pub fn tiles(&self) -> u32 {
        self.rows.div_ceil(self.tile_rows)
    }

    /// Tile `index` with its checksum's id; padding included.
    #[must_use]
    pub fn tile(&self, index: u32) -> (BlockId, Extent) {
        let first = index * self.tile_rows;
        let rows = self.tile_rows.min(self.rows - first);
        let plain = self.rows_extent(first, rows);
        (
            BlockId(self.first_block.0 + index),
            Extent { offset: plain.offset, len: align_up(plain.len) },
        )
    }
}

impl FfnExtent {
    /// Bytes of one neuron: its gate row, up row and down column.
    #[must_use]
    pub fn neuron_bytes(&self) -> u64 {
        3 * self.dtype.row_bytes(self.hidden)
    }

    /// Distance from one block to the next.
    #[must_use]
    pub fn block_stride(&self) -> u64 {
        align_up(u64::from(self.block_neurons) * self.neuron_bytes())
    }

    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.neurons.div_ceil(self.block_neurons)
    }

    /// Block `index` with its checksum's id; padding included. All blocks take a full stride, the last too.
    #[must_use]
    pub fn block(&self, index: u32) -> (BlockId, Extent) {
        let stride = self.block_stride();
        (
            BlockId(self.first_block.0 + index),
            Extent { offset: self.offset + u64::from(index) * stride, len: stride },
        )
    }

    /// The whole layer, padding included.
    #[must_use]
    pub fn extent(&self) -> Extent {
        Extent { offset: self.offset, len: u64::from(self.blocks()) * self.block_stride() }
    }
}
