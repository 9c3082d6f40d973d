//! Products with dense matrices, and the head.

use crate::backend::{OpenClBackend, To, done};
use crate::buffers::SCORE_ROWS;
use crate::device::{Arg, Memory, Place};
use crate::programs::SIZE;
use crate::weights::STAGING_BYTES;
use ls_compute::MatrixRows;

/// Rows and tokens of a tile; `TILE` of `cl/model.cl`.
pub(crate) const TILE: u32 = 32;
/// Rows of a work-group of one token; `ROWS` of `cl/model.cl`.
pub(crate) const GROUP_ROWS: u32 = 8;
/// Rows of a part of the head end at multiples of this.
const HEAD_CHUNK: u32 = SIZE as u32;
/// Bytes that one launch may have copied.
pub(crate) const LAUNCH_BYTES: usize = STAGING_BYTES / 2;

/// `Rows` of `cl/common.cl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct RowsArgs {
    pub(crate) base: u64,
    pub(crate) block_stride: u64,
    pub(crate) block: u32,
    pub(crate) stride: u32,
    pub(crate) count: u32,
    pub(crate) cols: u32,
}

impl OpenClBackend {
    /// Calls `run` with rows of a matrix that are on the device: all at once if they are kept, else some at a time, but
    /// never more than `most`, a multiple of 64 unless they are all.
    fn rows(
        &mut self,
        rows: &MatrixRows<'_>,
        most: u32,
        mut run: impl FnMut(&mut OpenClBackend, Place, RowsArgs, u32),
    ) {
        let row_bytes = rows.dtype.row_bytes(rows.cols);
        let room = if self.weights.find(rows.bytes).is_some() {
            u32::MAX
        } else {
            (LAUNCH_BYTES as u64 / row_bytes) as u32
        };
        let step = room.min(most);
        let step = if step >= rows.rows { rows.rows } else { step / HEAD_CHUNK * HEAD_CHUNK };
        assert!(step > 0, "64 rows of {row_bytes} bytes fit a copy");
        for first in (0..rows.rows).step_by(step as usize) {
            let count = step.min(rows.rows - first);
            let (from, len) = (u64::from(first) * row_bytes, u64::from(count) * row_bytes);
            let place = done(self.weights.place(&rows.bytes[from as usize..][..len as usize]));
            let args = RowsArgs {
                base: place.at,
                block_stride: row_bytes,
                block: 1,
                stride: 0,
                count,
                cols: rows.cols,
            };
            run(self, place, args, rows.first_row + first);
        }
    }

    fn target(&self, to: To) -> &Memory {
        let b = &self.buffers;
        match to {
            To::Q => &b.q,
            To::K => &b.k,
            To::V => &b.v,
            To::X => &b.x,
            To::Logits => &b.logits,
        }
    }

    /// What is multiplied: the output projection has the attention's result, all others the normed residual.
    fn source(&self, to: To) -> &Memory {
        if to == To::X { &self.buffers.q } else { &self.buffers.h }
    }

    /// Products of one token, or added to what is there.
    pub(crate) fn matvec(&mut self, rows: &MatrixRows<'_>, to: To, add: bool) {
        let dtype = rows.dtype;
        self.rows(rows, u32::MAX, |this, place, rows, first| {
            let args = [
                Arg::At(place.mem),
                Arg::Bytes(bytemuck::bytes_of(&rows)),
                Arg::Memory(this.source(to)),
                Arg::Memory(this.target(to)),
                Arg::U32(first),
                Arg::U32(u32::from(add)),
            ];
            let groups = [rows.count.div_ceil(GROUP_ROWS) as usize, 1, 1];
            // SAFETY: the source has `cols` numbers, the target one for each row of the matrix.
            unsafe { this.launch(&this.kernels.of(dtype).matvec, groups, &args) };
        });
    }

    /// The same for all tokens; the target has `width` numbers a token.
    pub(crate) fn multiply(&mut self, rows: &MatrixRows<'_>, to: To, width: usize, add: bool) {
        let (dtype, tokens) = (rows.dtype, self.pass.tokens);
        self.rows(rows, u32::MAX, |this, place, rows, first| {
            let target = (this.target(to), first, width as u32);
            this.multiply_rows(dtype, place, rows, this.source(to), tokens, target, add);
        });
    }

    #[expect(clippy::too_many_arguments, reason = "a kernel's parameters")]
    fn multiply_rows(
        &self,
        dtype: ls_bundle::model::DType,
        place: Place,
        rows: RowsArgs,
        from: &Memory,
        tokens: u32,
        (to, first, width): (&Memory, u32, u32),
        add: bool,
    ) {
        let args = [
            Arg::At(place.mem),
            Arg::Bytes(bytemuck::bytes_of(&rows)),
            Arg::Memory(from),
            Arg::U32(tokens),
            Arg::Memory(to),
            Arg::U32(first),
            Arg::U32(width),
            Arg::U32(u32::from(add)),
        ];
        let groups = [rows.count.div_ceil(TILE) as usize, tokens.div_ceil(TILE) as usize, 1];
        // SAFETY: the source has `cols` numbers a token, the target `width`.
        unsafe { self.launch(&self.kernels.of(dtype).multiply, groups, &args) };
    }

    /// Logits of the last token, whose row of h is the first. Behind the last row they are with the host.
    pub(crate) fn head_logits(&mut self, rows: &MatrixRows<'_>) {
        self.matvec(rows, To::Logits, false);
        if (rows.first_row + rows.rows) as usize == self.shape.vocab {
            let to = bytemuck::cast_slice_mut(&mut self.host.logits);
            done(self.buffers.logits.read(0, to));
        }
    }

    /// Rows of the head times h of all scored tokens. Behind the last row the scores are with the host.
    pub(crate) fn head_scores(&mut self, rows: &MatrixRows<'_>, count: u32) {
        let (dtype, end, vocab) = (rows.dtype, rows.first_row + rows.rows, self.shape.vocab as u32);
        let aligned = |row: u32| row.is_multiple_of(HEAD_CHUNK);
        assert!(aligned(rows.first_row) && (aligned(end) || end == vocab), "cut of the head");
        if count == 0 {
            return;
        }
        let width = SCORE_ROWS.min(self.shape.vocab) as u32;
        self.rows(rows, SCORE_ROWS as u32, |this, place, rows, first| {
            let b = &this.buffers;
            let target = (&b.score_logits, 0, width);
            this.multiply_rows(dtype, place, rows, &b.h, count, target, false);
            let args = [
                Arg::Memory(&b.score_logits),
                Arg::U32(width),
                Arg::U32(rows.count),
                Arg::U32(first),
                Arg::Memory(&b.targets),
                Arg::Memory(&b.totals),
                Arg::Memory(&b.target_logits),
                Arg::U32(u32::from(first == 0)),
                Arg::U32(u32::from(first + rows.count == vocab)),
                Arg::Memory(&b.nll),
            ];
            // SAFETY: `width` logits for each scored token; of all else one.
            unsafe { this.launch(&this.kernels.score, [count as usize, 1, 1], &args) };
        });
        if end == vocab {
            let to = bytemuck::cast_slice_mut(&mut self.host.nll[..count as usize]);
            done(self.buffers.nll.read(0, to));
        }
    }
}
