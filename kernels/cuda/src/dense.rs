//! Products with dense matrices, and the head.

use crate::backend::{CudaBackend, done};
use crate::buffers::SCORE_ROWS;
use crate::device::{Grid, Mapped, Memory, args};
use crate::error::check;
use crate::weights::STAGING_BYTES;
use cudarc::driver::sys;
use ls_compute::MatrixRows;

/// Rows and tokens of a tile; `TILE` of `cu/model.cu`.
pub(crate) const TILE: u32 = 64;
/// Rows of a thread block of `matvec`.
const BLOCK_ROWS: u32 = 16;
/// Rows of a part of the head end at multiples of this.
const HEAD_CHUNK: u32 = 64;

/// `Rows` of `cu/model.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowsArgs {
    pub(crate) base: u64,
    pub(crate) block: u32,
    pub(crate) stride: u32,
    pub(crate) block_stride: u64,
    pub(crate) count: u32,
    pub(crate) cols: u32,
}

impl CudaBackend {
    /// Calls `run` with rows of a matrix that are on the device: all at once if they are kept, else some at a time, but
    /// never more than `most`, a multiple of 64 unless they are all.
    fn rows(
        &mut self,
        rows: &MatrixRows<'_>,
        most: u32,
        mut run: impl FnMut(&mut CudaBackend, RowsArgs, u32),
    ) {
        let row_bytes = rows.dtype.row_bytes(rows.cols);
        let room = if self.weights.find(rows.bytes).is_some() {
            u32::MAX
        } else {
            (STAGING_BYTES as u64 / row_bytes) as u32
        };
        let step = room.min(most);
        let step = if step >= rows.rows { rows.rows } else { step / HEAD_CHUNK * HEAD_CHUNK };
        assert!(step > 0, "64 rows of {row_bytes} bytes fit a copy");
        for first in (0..rows.rows).step_by(step as usize) {
            let count = step.min(rows.rows - first);
            let (from, len) = (u64::from(first) * row_bytes, u64::from(count) * row_bytes);
            let base = done(self.weights.place(&rows.bytes[from as usize..][..len as usize]));
            let (block_stride, cols) = (row_bytes, rows.cols);
            let args = RowsArgs { base, block: 1, stride: 0, block_stride, count, cols };
            run(self, args, rows.first_row + first);
        }
    }

    /// y[first_row ..] = rows . v of one token, or added to it.
    pub(crate) fn matvec(&mut self, rows: &MatrixRows<'_>, v: u64, y: u64, add: bool) {
        let matvec = self.functions.of(rows.dtype).matvec;
        let add = u32::from(add);
        self.rows(rows, u32::MAX, |this, rows, first| {
            let y = y + 4 * u64::from(first);
            let grid = Grid {
                shared_bytes: 4 * rows.cols,
                ..Grid::new(rows.count.div_ceil(BLOCK_ROWS), 256)
            };
            // SAFETY: v has `cols` numbers, y one for each row of the matrix.
            unsafe { this.launch(matvec, grid, args!(rows, v, y, add)) };
        });
    }

    /// The same for all tokens; y has `width` numbers a token.
    pub(crate) fn multiply(
        &mut self,
        rows: &MatrixRows<'_>,
        v: u64,
        tokens: u32,
        (y, width): (u64, usize),
        add: bool,
    ) {
        let multiply = self.functions.of(rows.dtype).multiply;
        let (add, width) = (u32::from(add), width as u32);
        self.rows(rows, u32::MAX, |this, rows, first| {
            let y = y + 4 * u64::from(first);
            let blocks = [rows.count.div_ceil(TILE), tokens.div_ceil(TILE), 1];
            let grid = Grid { blocks, ..Grid::new(1, 256) };
            // SAFETY: v has `cols` numbers a token, y `width`.
            unsafe { this.launch(multiply, grid, args!(rows, v, tokens, y, width, add)) };
        });
    }

    /// Logits of the last token, whose row of h is the first.
    pub(crate) fn head_logits(&mut self, rows: &MatrixRows<'_>) {
        let (h, logits) = (self.buffers.h.address(), self.buffers.logits.address());
        self.matvec(rows, h, logits, false);
        if (rows.first_row + rows.rows) as usize == self.shape.vocab {
            let bytes = 4 * self.shape.vocab;
            self.bring(&self.buffers.logits, &self.buffers.host_logits, bytes);
        }
    }

    /// Rows of the head times h of all scored tokens. Behind the last row the scores are ready.
    pub(crate) fn head_scores(&mut self, rows: &MatrixRows<'_>, count: u32) {
        let end = rows.first_row + rows.rows;
        let vocab = self.shape.vocab as u32;
        let aligned = |row: u32| row.is_multiple_of(HEAD_CHUNK);
        assert!(aligned(rows.first_row) && (aligned(end) || end == vocab), "cut of the head");
        let functions = (self.functions.of(rows.dtype).multiply, self.functions.score);
        let width = SCORE_ROWS.min(self.shape.vocab) as u32;
        let b = &self.buffers;
        let (h, logits, targets) = (b.h.address(), b.score_logits.address(), b.targets.address());
        let (sums, of_targets, nll) =
            (b.sums.address(), b.target_logits.address(), b.nll.address());
        self.rows(rows, SCORE_ROWS as u32, |this, rows, first| {
            let (multiply, score) = functions;
            let blocks = [rows.count.div_ceil(TILE), count.div_ceil(TILE), 1];
            let grid = Grid { blocks, ..Grid::new(1, 256) };
            let (starts, ends) = (u32::from(first == 0), u32::from(first + rows.count == vocab));
            // SAFETY: h has a row for each scored token, `logits` `width` numbers; the others one.
            unsafe {
                this.launch(multiply, grid, args!(rows, h, count, logits, width, 0u32));
                let args = args!(
                    logits, width, rows.count, first, targets, sums, of_targets, starts, ends, nll
                );
                this.launch(score, Grid::new(count, 64), args);
            }
        });
        if end == vocab {
            self.bring(&self.buffers.nll, &self.buffers.host_nll, 4 * count as usize);
        }
    }

    /// Queues a copy of results to the host.
    pub(crate) fn bring(&self, from: &Memory, to: &Mapped, bytes: usize) {
        assert!(bytes <= from.bytes(), "copy of {bytes} bytes");
        // SAFETY: `to` is as large as `from`, pinned, and read after the stream was waited for.
        done(unsafe {
            let (to, stream) = (to.host().cast(), self.device.stream());
            check(sys::cuMemcpyDtoHAsync_v2(to, from.address(), bytes, stream), "copy")
        });
    }
}
