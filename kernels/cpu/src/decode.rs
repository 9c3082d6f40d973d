//! One token: every weight is read once, so the kernels only have to keep up with memory.

use crate::backend::{CpuBackend, matrix_row, neuron_rows};
use crate::memory::LANES;
use crate::simd::{Activations, Ops, QuantBlock};
use ls_bundle::model::DType;
use ls_compute::{MatrixRows, NeuronBlocks, Projection, ProjectionPart};

/// Rows of an item of a dense product.
const ITEM_ROWS: usize = 32;
/// Rows of an item of the head.
const HEAD_ITEM_ROWS: usize = 128;
/// How far ahead of the rows in use others are fetched, at least: a microsecond's work of a fast kernel.
const AHEAD_BYTES: usize = 8 << 10;
/// Rows (neurons) that a kernel takes at a time.
const BATCH: usize = 4;

impl CpuBackend {
    /// Rows of q, k, v, or of o, times the token's activations.
    pub(crate) fn project_one(&mut self, parts: &[ProjectionPart<'_>]) {
        let shape = self.shape;
        let (ops, buffers) = (self.ops, &mut self.buffers);
        let output = parts.iter().any(|part| part.projection == Projection::Output);
        let (x, k, v) = (buffers.x.shared(), buffers.k.shared(), buffers.v.shared());
        // o reads what q, k and v's products write to q.
        let (input, q) = if output {
            (&buffers.q[..shape.query_width], None)
        } else {
            (&buffers.h[..shape.hidden], Some(buffers.q.shared()))
        };
        let dtypes = parts.iter().map(|part| part.rows.dtype);
        let input = prepare(ops, dtypes, input, &mut buffers.quants);
        let items = parts.iter().map(|part| (part.rows.rows as usize).div_ceil(ITEM_ROWS)).sum();
        self.pool.run(items, &|_, item| {
            let (part, first) = find_part(parts, item, ITEM_ROWS);
            let count = ITEM_ROWS.min(part.rows.rows as usize - first);
            let row = part.rows.first_row as usize + first;
            let mut sums = [0f32; ITEM_ROWS];
            let sums = &mut sums[..count];
            dot_rows(ops, &part.rows, first, input, sums);
            let target = match part.projection {
                Projection::Query => q.expect("q, k, v and o parts do not mix"),
                Projection::Key => k,
                Projection::Value => v,
                Projection::Output => x,
            };
            // SAFETY: parts and items have disjoint rows, and what is read is not among the targets.
            let target = unsafe { target.slice(row, count) };
            if part.projection == Projection::Output {
                target.iter_mut().zip(sums).for_each(|(x, sum)| *x += *sum);
            } else {
                target.copy_from_slice(sums);
            }
        });
    }

    /// Neurons: item = accumulator. Neuron i adds to accumulator i / 4 % 16, so its place is the same however the
    /// layer is cut.
    pub(crate) fn mlp_one(&mut self, blocks: &NeuronBlocks<'_>) {
        let hidden = self.shape.hidden;
        let (ops, buffers) = (self.ops, &mut self.buffers);
        let h = prepare(ops, [blocks.dtype], &buffers.h[..hidden], &mut buffers.quants);
        let lanes = buffers.lanes.shared();
        let next_batch = next_batch_bytes(blocks);
        let first = blocks.first_neuron as usize;
        let end = first + blocks.neurons as usize;
        self.pool.run(LANES, &|_, lane| {
            // SAFETY: an item has an accumulator of its own.
            let acc = unsafe { lanes.slice(lane * hidden, hidden) };
            // The lane's first batch that the part has neurons of.
            let first_batch = first / BATCH + (lane + LANES - first / BATCH % LANES) % LANES;
            for batch in (first_batch..end.div_ceil(BATCH)).step_by(LANES) {
                let begin = (batch * BATCH).max(first);
                let count = (batch * BATCH + BATCH).min(end) - begin;
                let is_last = batch + LANES >= end.div_ceil(BATCH);
                let ahead = if is_last { 0 } else { next_batch };
                add_neurons(ops, blocks, begin - first, count, h, acc, ahead);
            }
        });
    }

    /// x += accumulators, the first first.
    pub(crate) fn add_lanes(&mut self) {
        let hidden = self.shape.hidden;
        let (sum, lanes) = self.buffers.lanes.split_at_mut(hidden);
        for lane in lanes.chunks_exact(hidden) {
            sum.iter_mut().zip(lane).for_each(|(sum, lane)| *sum += lane);
        }
        self.buffers.x[..hidden].iter_mut().zip(sum).for_each(|(x, sum)| *x += *sum);
    }

    /// Rows of the head times the first row of h.
    pub(crate) fn head_one(&mut self, rows: &MatrixRows<'_>) {
        let (ops, buffers) = (self.ops, &mut self.buffers);
        let h = &buffers.h[..self.shape.hidden];
        let h = prepare(ops, [rows.dtype], h, &mut buffers.quants);
        let logits = buffers.logits.shared();
        let count = rows.rows as usize;
        self.pool.run(count.div_ceil(HEAD_ITEM_ROWS), &|_, item| {
            let first = item * HEAD_ITEM_ROWS;
            let len = HEAD_ITEM_ROWS.min(count - first);
            // SAFETY: items have disjoint rows.
            let logits = unsafe { logits.slice(rows.first_row as usize + first, len) };
            dot_rows(ops, rows, first, h, logits);
        });
    }
}

/// x for products with weights of these formats: quantised too where one of them is.
fn prepare<'a>(
    ops: &Ops,
    dtypes: impl IntoIterator<Item = DType>,
    x: &'a [f32],
    quants: &'a mut [QuantBlock],
) -> Activations<'a> {
    if dtypes.into_iter().any(|dtype| dtype != DType::F16) {
        (ops.quantise)(x, quants);
    }
    Activations { floats: x, quants }
}

/// The part that item `item` belongs to, and the first row in it, if each part is cut into items of `item_rows`.
pub(crate) fn find_part<'p, 'a>(
    parts: &'p [ProjectionPart<'a>],
    mut item: usize,
    item_rows: usize,
) -> (&'p ProjectionPart<'a>, usize) {
    for part in parts {
        let items = (part.rows.rows as usize).div_ceil(item_rows);
        if item < items {
            return (part, item * item_rows);
        }
        item -= items;
    }
    unreachable!("there are as many items as the parts have")
}

/// `out[i] = row (first + i) . x`.
fn dot_rows(ops: &Ops, rows: &MatrixRows<'_>, first: usize, x: Activations<'_>, out: &mut [f32]) {
    let dot = ops.rows(rows.dtype).dot;
    let batch_bytes = BATCH * rows.dtype.row_bytes(rows.cols) as usize;
    let ahead = batch_bytes * AHEAD_BYTES.div_ceil(batch_bytes);
    assert_eq!(rows.cols as usize, x.floats.len(), "width of a matrix");
    for (batch, out) in out.chunks_mut(BATCH).enumerate() {
        let first = first + batch * BATCH;
        let mut batch = [&[][..]; BATCH];
        for (i, row) in batch[..out.len()].iter_mut().enumerate() {
            *row = matrix_row(rows, first + i);
        }
        dot(&batch[..out.len()], x, out, ahead);
    }
}

/// Distance between batches of a lane, or about that where they are not at the same place of a block.
fn next_batch_bytes(blocks: &NeuronBlocks<'_>) -> usize {
    BATCH * LANES * blocks.block_stride / blocks.block_neurons as usize
}

/// acc += the contributions of up to [`BATCH`] neurons, Eq. 1, one after another.
fn add_neurons(
    ops: &Ops,
    blocks: &NeuronBlocks<'_>,
    first: usize,
    count: usize,
    h: Activations<'_>,
    acc: &mut [f32],
    ahead: usize,
) {
    let rows = ops.rows(blocks.dtype);
    let (mut gates, mut ups, mut downs) = ([&[][..]; BATCH], [&[][..]; BATCH], [&[][..]; BATCH]);
    for i in 0..count {
        [gates[i], ups[i], downs[i]] = neuron_rows(blocks, first + i);
    }
    let (mut gate, mut up) = ([0f32; BATCH], [0f32; BATCH]);
    (rows.dot)(&gates[..count], h, &mut gate, ahead);
    (rows.dot)(&ups[..count], h, &mut up, ahead);
    (ops.swiglu)(&mut gate[..count], &up[..count]);
    (rows.axpy)(&downs[..count], &gate[..count], acc, ahead);
}
