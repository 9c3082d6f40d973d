//! Many tokens: 16 rows of weights are unpacked into a panel that stays in cache while all tokens are multiplied with
//! it. Work is split over weights, so that short prompts use all threads too.

use crate::backend::{CpuBackend, matrix_row, neuron_rows};
use crate::buffer::SharedMut;
use crate::decode::find_part;
use crate::simd::{Ops, PANEL, Tile};
use ls_compute::{MatrixRows, NeuronBlocks, Projection, ProjectionPart};

/// Neurons whose activations are held at a time.
pub(crate) const ACTIVATION_NEURONS: usize = 256;
/// Tokens whose activations are held at a time: with the neurons above 512 KiB, which a second-level cache holds.
pub(crate) const TOKEN_BLOCK: usize = 512;
/// Columns of an item of the down product: a cache line of f16, a group of the quantised types.
pub(crate) const DOWN_COLUMNS: usize = 32;
/// Length of the products between which sums are put down, so that the part of a panel in use stays in the first
/// cache.
const INNER: usize = 256;

impl CpuBackend {
    /// Rows of q, k, v, or of o, times the activations of all tokens.
    pub(crate) fn project_many(&mut self, parts: &[ProjectionPart<'_>]) {
        let shape = self.shape;
        let (ops, tokens, scratch_len) = (self.ops, self.pass.tokens as usize, self.scratch);
        let buffers = &mut self.buffers;
        let (x, q) = (buffers.x.shared(), buffers.q.shared());
        let (k, v, scratch) = (buffers.k.shared(), buffers.v.shared(), buffers.scratch.shared());
        let h = &*buffers.h;
        let items = parts.iter().map(|part| (part.rows.rows as usize).div_ceil(PANEL)).sum();
        self.pool.run(items, &|thread, item| {
            let (part, first) = find_part(parts, item, PANEL);
            let output = part.projection == Projection::Output;
            let (input, width) = if output {
                (q.at(0).cast_const(), shape.query_width)
            } else {
                (h.as_ptr(), shape.hidden)
            };
            let (target, stride) = match part.projection {
                Projection::Query => (q, shape.query_width),
                Projection::Key => (k, shape.kv_width),
                Projection::Value => (v, shape.kv_width),
                Projection::Output => (x, shape.hidden),
            };
            assert_eq!(part.rows.cols as usize, width, "width of a matrix");
            let n = PANEL.min(part.rows.rows as usize - first);
            // SAFETY: a thread has scratch of its own.
            let panel = unsafe { scratch.slice(thread * scratch_len, PANEL * width) };
            pack(ops, &part.rows, first, n, panel);
            let column = part.rows.first_row as usize + first;
            assert!(column + n <= stride, "rows end behind the matrix");
            let c = target.at(column);
            // SAFETY: input holds `tokens` rows of `width`, target `tokens` rows of `stride`; items have disjoint
            // columns of the target, and nobody writes to the input: parts of q, k, v and of o do not mix.
            unsafe {
                multiply(ops, tokens, (input, width), panel, (c, stride, n), output);
            }
        });
    }

    /// Rows of the head times the first row of h.
    pub(crate) fn head_last(&mut self, rows: &MatrixRows<'_>) {
        let (hidden, ops, scratch_len) = (self.shape.hidden, self.ops, self.scratch);
        let buffers = &mut self.buffers;
        let h = &buffers.h[..hidden];
        let (logits, scratch) = (buffers.logits.shared(), buffers.scratch.shared());
        let count = rows.rows as usize;
        self.pool.run(count.div_ceil(PANEL), &|thread, item| {
            let first = item * PANEL;
            let n = PANEL.min(count - first);
            // SAFETY: a thread has scratch of its own; items have disjoint rows.
            let (panel, logits) = unsafe {
                (
                    scratch.slice(thread * scratch_len, PANEL * hidden),
                    logits.slice(rows.first_row as usize + first, n),
                )
            };
            pack(ops, rows, first, n, panel);
            // SAFETY: h holds a row, logits n elements that are this item's.
            unsafe {
                multiply(ops, 1, (h.as_ptr(), hidden), panel, (logits.as_mut_ptr(), n, n), false)
            };
        });
    }

    /// Neurons for all tokens: gate and up of some neurons into the activations, then these times down into x.
    pub(crate) fn mlp_many(&mut self, blocks: &NeuronBlocks<'_>) {
        let tokens = self.pass.tokens as usize;
        for first_token in (0..tokens).step_by(TOKEN_BLOCK) {
            let count = TOKEN_BLOCK.min(tokens - first_token);
            for first in (0..blocks.neurons as usize).step_by(ACTIVATION_NEURONS) {
                let neurons = ACTIVATION_NEURONS.min(blocks.neurons as usize - first);
                let part = Part { blocks, first, neurons, first_token, tokens: count };
                self.activate(&part);
                self.add_down(&part);
            }
        }
    }

    /// activations = SiLU(gate . h) * (up . h).
    fn activate(&mut self, part: &Part<'_>) {
        let (hidden, ops, scratch_len) = (self.shape.hidden, self.ops, self.scratch);
        let buffers = &mut self.buffers;
        let h = &buffers.h[part.first_token * hidden..][..part.tokens * hidden];
        let (activations, scratch) = (buffers.activations.shared(), buffers.scratch.shared());
        let rows_ops = ops.rows(part.blocks.dtype);
        self.pool.run(part.neurons.div_ceil(PANEL), &|thread, item| {
            let n = PANEL.min(part.neurons - item * PANEL);
            let (mut gates, mut ups) = ([&[][..]; PANEL], [&[][..]; PANEL]);
            for i in 0..n {
                [gates[i], ups[i], _] = neuron_rows(part.blocks, part.first + item * PANEL + i);
            }
            // SAFETY: a thread has scratch of its own.
            let scratch = unsafe { scratch.slice(thread * scratch_len, scratch_len) };
            let (panel, up) = scratch.split_at_mut(PANEL * hidden);
            let up = &mut up[..part.tokens * PANEL];
            let gate = activations.at(item * PANEL);
            let input = (h.as_ptr(), hidden);
            (rows_ops.pack_rows)(&gates[..n], hidden, panel);
            // SAFETY: h holds `tokens` rows, activations `tokens` rows of ACTIVATION_NEURONS; items have disjoint
            // columns.
            unsafe {
                multiply(ops, part.tokens, input, panel, (gate, ACTIVATION_NEURONS, n), false)
            };
            (rows_ops.pack_rows)(&ups[..n], hidden, panel);
            // SAFETY: as above; up is this thread's.
            unsafe { multiply(ops, part.tokens, input, panel, (up.as_mut_ptr(), PANEL, n), false) };
            for (token, up) in up.chunks_exact(PANEL).enumerate() {
                // SAFETY: items have disjoint columns.
                let gate =
                    unsafe { activations.slice(token * ACTIVATION_NEURONS + item * PANEL, n) };
                (ops.swiglu)(gate, &up[..n]);
            }
        });
    }

    /// x += activations times down, neuron after neuron.
    fn add_down(&mut self, part: &Part<'_>) {
        let (hidden, ops, scratch_len) = (self.shape.hidden, self.ops, self.scratch);
        let buffers = &mut self.buffers;
        let x = SharedMut::new(&mut buffers.x[part.first_token * hidden..][..part.tokens * hidden]);
        let scratch = buffers.scratch.shared();
        let activations = &*buffers.activations;
        let unpack = ops.rows(part.blocks.dtype).unpack;
        self.pool.run(hidden.div_ceil(DOWN_COLUMNS), &|thread, item| {
            let first = item * DOWN_COLUMNS;
            let columns = DOWN_COLUMNS.min(hidden - first);
            // SAFETY: a thread has scratch of its own.
            let strip = unsafe { scratch.slice(thread * scratch_len, DOWN_COLUMNS * part.neurons) };
            for (i, strip) in strip.chunks_exact_mut(DOWN_COLUMNS).enumerate() {
                let [_, _, down] = neuron_rows(part.blocks, part.first + i);
                unpack(down, hidden, first, &mut strip[..columns]);
            }
            for column in (0..columns).step_by(PANEL) {
                let tile = Tile {
                    m: part.tokens,
                    n: PANEL.min(columns - column),
                    k: part.neurons,
                    a: activations.as_ptr(),
                    a_stride: ACTIVATION_NEURONS,
                    b: strip[column..].as_ptr(),
                    b_stride: DOWN_COLUMNS,
                    c: x.at(first + column),
                    c_stride: hidden,
                    accumulate: true,
                };
                // SAFETY: activations hold `tokens` rows, the strip `neurons` rows; items have disjoint columns of x.
                unsafe { (ops.gemm)(&tile) };
            }
        });
    }
}

/// Some neurons, some tokens.
struct Part<'a> {
    blocks: &'a NeuronBlocks<'a>,
    /// First neuron, counted from the first of the blocks.
    first: usize,
    neurons: usize,
    first_token: usize,
    tokens: usize,
}

/// Packs rows `first .. first + n`.
pub(crate) fn pack(ops: &Ops, rows: &MatrixRows<'_>, first: usize, n: usize, panel: &mut [f32]) {
    let mut packed = [&[][..]; PANEL];
    for (i, row) in packed[..n].iter_mut().enumerate() {
        *row = matrix_row(rows, first + i);
    }
    (ops.rows(rows.dtype).pack_rows)(&packed[..n], rows.cols as usize, panel);
}

/// c (+)= a times a panel of packed rows. `a` is (pointer, stride), as long as the panel; `c` is (pointer, stride,
/// columns).
///
/// # Safety
/// `a` has `tokens` readable rows of the panel's length, `c` has `tokens` rows of `columns` that nobody else touches.
pub(crate) unsafe fn multiply(
    ops: &Ops,
    tokens: usize,
    (a, a_stride): (*const f32, usize),
    panel: &[f32],
    (c, c_stride, columns): (*mut f32, usize, usize),
    accumulate: bool,
) {
    for (inner, panel) in panel.chunks(INNER * PANEL).enumerate() {
        let tile = Tile {
            m: tokens,
            n: columns,
            k: panel.len() / PANEL,
            a: a.wrapping_add(inner * INNER),
            a_stride,
            b: panel.as_ptr(),
            b_stride: PANEL,
            c,
            c_stride,
            accumulate: accumulate || inner > 0,
        };
        // SAFETY: the caller's guarantee, for INNER columns of a.
        unsafe { (ops.gemm)(&tile) };
    }
}
