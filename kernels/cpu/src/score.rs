//! Log-likelihoods of given tokens without ever holding all logits: for each scored token the largest logit so far
//! and the sum of exponentials, over chunks of the head's rows.

use crate::backend::CpuBackend;
use crate::prefill::{multiply, pack};
use crate::simd::PANEL;
use ls_compute::MatrixRows;

/// Rows of a chunk; parts of the head are cut at multiples of this.
pub(crate) const SCORE_ROWS: usize = 64;
/// Scored tokens whose logits an item holds.
pub(crate) const SCORE_TOKENS: usize = 256;
/// Chunks of a parallel region.
pub(crate) const SCORE_WAVE: usize = 32;

impl CpuBackend {
    /// Nothing summed yet.
    pub(crate) fn begin_scores(&mut self, count: usize) {
        self.buffers.sums[..count].fill([f64::NEG_INFINITY, 0.0]);
        self.buffers.target_logits[..count].fill(f32::NAN);
    }

    /// Rows of the head times the rows of h of all scored tokens. Behind the last row the scores are ready.
    pub(crate) fn head_scores(&mut self, rows: &MatrixRows<'_>, count: usize) {
        let first_row = rows.first_row as usize;
        let end = first_row + rows.rows as usize;
        let aligned = |row: usize| row.is_multiple_of(SCORE_ROWS);
        assert!(aligned(first_row) && (aligned(end) || end == self.shape.vocab), "cut of the head");
        let wave_rows = SCORE_WAVE * SCORE_ROWS;
        for first in (0..rows.rows as usize).step_by(wave_rows) {
            self.score_wave(rows, first, wave_rows.min(rows.rows as usize - first), count);
        }
        if end == self.shape.vocab {
            let buffers = &mut self.buffers;
            let sums = buffers.sums.iter().zip(&*buffers.target_logits);
            for (nll, ([max, sum], &logit)) in buffers.nll[..count].iter_mut().zip(sums) {
                *nll = (max + sum.ln() - f64::from(logit)) as f32;
            }
        }
    }

    /// Rows `first .. first + len` of `rows`: item = chunk; then the chunks' sums are added in order.
    fn score_wave(&mut self, rows: &MatrixRows<'_>, first: usize, len: usize, count: usize) {
        let (hidden, ops, scratch_len) = (self.shape.hidden, self.ops, self.scratch);
        let buffers = &mut self.buffers;
        let (h, targets) = (&buffers.h[..count * hidden], &buffers.targets[..count]);
        let (chunk_sums, scratch) = (buffers.chunk_sums.shared(), buffers.scratch.shared());
        let target_logits = buffers.target_logits.shared();
        let chunks = len.div_ceil(SCORE_ROWS);
        self.pool.run(chunks, &|thread, chunk| {
            // SAFETY: a thread has scratch of its own.
            let scratch = unsafe { scratch.slice(thread * scratch_len, scratch_len) };
            let (panel, logits) = scratch.split_at_mut(PANEL * hidden);
            let begin = first + chunk * SCORE_ROWS;
            let end = (begin + SCORE_ROWS).min(first + len);
            for block in (0..count).step_by(SCORE_TOKENS) {
                let tokens = SCORE_TOKENS.min(count - block);
                let logits = &mut logits[..tokens * SCORE_ROWS];
                for panel_first in (begin..end).step_by(PANEL) {
                    let n = PANEL.min(end - panel_first);
                    pack(ops, rows, panel_first, n, panel);
                    let a = (h[block * hidden..].as_ptr(), hidden);
                    let c = (logits[panel_first - begin..].as_mut_ptr(), SCORE_ROWS, n);
                    // SAFETY: h holds the rows of `tokens` tokens from `block`; logits are this thread's.
                    unsafe { multiply(ops, tokens, a, panel, c, false) };
                }
                for (token, logits) in logits.chunks_exact_mut(SCORE_ROWS).enumerate() {
                    let token = block + token;
                    let logits = &mut logits[..end - begin];
                    let target = (targets[token] as usize)
                        .checked_sub(rows.first_row as usize + begin)
                        .and_then(|index| logits.get(index));
                    if let Some(&logit) = target {
                        // SAFETY: a token's target is in one chunk only.
                        unsafe { target_logits.slice(token, 1)[0] = logit };
                    }
                    let max = (ops.max)(logits);
                    let sum = (ops.exp_sum)(logits, max);
                    // SAFETY: an item has one chunk.
                    unsafe { chunk_sums.slice(token * SCORE_WAVE + chunk, 1)[0] = [max, sum] };
                }
            }
        });
        let chunk_sums = buffers.chunk_sums.chunks_exact(SCORE_WAVE);
        for (total, chunk_sums) in buffers.sums[..count].iter_mut().zip(chunk_sums) {
            for &[max, sum] in &chunk_sums[..chunks] {
                *total = add_exponentials(*total, [f64::from(max), f64::from(sum)]);
            }
        }
    }
}

/// Adds two sums of exponentials, each given as (m, s) for s * e^m.
fn add_exponentials(a: [f64; 2], b: [f64; 2]) -> [f64; 2] {
    let (high, low) = if a[0] >= b[0] { (a, b) } else { (b, a) };
    [high[0], high[1] + low[1] * (low[0] - high[0]).exp()]
}
