//! One token: every weight is read once, so the kernels only have to keep up with memory.

use crate::backend::{CpuBackend, matrix_row};
use crate::buffer::SharedMut;
use crate::memory::LANES;
use crate::simd::{Activations, Ops, QuantBlock, RowOps};
use ls_bundle::model::DType;
use ls_compute::{MatrixRows, NeuronBlocks, Projection, ProjectionPart, row_norm};

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
    pub(crate) fn mlp_one(&mut self, parts: &[NeuronBlocks<'_>]) {
        let Some(dtype) = parts.first().map(|part| part.dtype) else { return };
        let hidden = self.shape.hidden;
        for part in parts {
            assert_eq!(part.hidden as usize, hidden, "width of a neuron");
            assert_eq!(part.dtype, dtype, "neurons of a call are of one format");
        }
        let (ops, buffers) = (self.ops, &mut self.buffers);
        let h = prepare(ops, [dtype], &buffers.h[..hidden], &mut buffers.quants);
        let lanes = buffers.lanes.shared();
        self.pool.run(LANES, &|_, lane| {
            // SAFETY: an item has an accumulator of its own.
            let acc = unsafe { lanes.slice(lane * hidden, hidden) };
            let mut neurons = parts.iter().flat_map(|part| lane_neurons(part, lane));
            let mut batch = Batch::take(&mut neurons);
            while batch.len > 0 {
                let next = Batch::take(&mut neurons);
                add_neurons(ops.rows(dtype), ops.swiglu, &batch, h, acc, batch.distance(&next));
                batch = next;
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

    /// x + accumulators + stand-ins: in the order in which they are added at last, so that the last feature is the
    /// residual bit for bit.
    pub(crate) fn feature_one(&self, out: &mut [f32]) {
        let hidden = self.shape.hidden;
        let mut lanes = self.buffers.lanes.chunks_exact(hidden);
        out.copy_from_slice(lanes.next().expect("there are accumulators"));
        for lane in lanes {
            out.iter_mut().zip(lane).for_each(|(sum, lane)| *sum += lane);
        }
        out.iter_mut().zip(&self.buffers.x[..hidden]).for_each(|(sum, x)| *sum += *x);
        if self.ffn.stand_ins {
            for (k, x) in out.iter_mut().enumerate() {
                *x += self.buffers.stand_ins[k];
            }
        }
    }

    /// |SiLU(gate . h) * (up . h)| * ||down|| of every neuron. For measuring: it does not hurry.
    pub(crate) fn importance_one(&mut self, part: &NeuronBlocks<'_>, out: &mut [f32]) {
        let hidden = self.shape.hidden;
        assert_eq!(part.hidden as usize, hidden, "width of a neuron");
        assert_eq!(out.len(), part.neurons as usize, "a number for each neuron");
        let (ops, buffers) = (self.ops, &mut self.buffers);
        let h = prepare(ops, [part.dtype], &buffers.h[..hidden], &mut buffers.quants);
        let rows = ops.rows(part.dtype);
        let out = SharedMut::new(out);
        self.pool.run((part.neurons as usize).div_ceil(ITEM_ROWS), &|_, item| {
            let first = item * ITEM_ROWS;
            let count = ITEM_ROWS.min(part.neurons as usize - first);
            // SAFETY: items have disjoint neurons.
            let out = unsafe { out.slice(first, count) };
            for (neuron, out) in (first..).zip(out) {
                let [gate, up, down] = thirds(part.neuron(neuron as u32));
                let (mut a, mut b) = ([0f32; 1], [0f32; 1]);
                (rows.dot)(&[gate], h, &mut a, 0);
                (rows.dot)(&[up], h, &mut b, 0);
                (ops.swiglu)(&mut a, &b);
                *out = a[0].abs() * row_norm(part.dtype, hidden, down);
            }
        });
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

/// The neurons of `part` that add to accumulator `lane`, ascending.
fn lane_neurons<'a>(part: &NeuronBlocks<'a>, lane: usize) -> impl Iterator<Item = &'a [u8]> {
    let first = part.first_neuron as usize;
    let end = first + part.neurons as usize;
    let first_batch = first / BATCH + (lane + LANES - first / BATCH % LANES) % LANES;
    let part = *part;
    (first_batch..end.div_ceil(BATCH))
        .step_by(LANES)
        .flat_map(move |batch| (batch * BATCH).max(first)..(batch * BATCH + BATCH).min(end))
        .map(move |neuron| part.neuron((neuron - first) as u32))
}

/// Up to [`BATCH`] neurons.
struct Batch<'a> {
    neurons: [&'a [u8]; BATCH],
    len: usize,
}

impl<'a> Batch<'a> {
    fn take(neurons: &mut impl Iterator<Item = &'a [u8]>) -> Batch<'a> {
        let mut batch = Batch { neurons: [&[]; BATCH], len: 0 };
        for (place, neuron) in batch.neurons.iter_mut().zip(neurons) {
            *place = neuron;
            batch.len += 1;
        }
        batch
    }

    /// How far behind this batch another one lies: a hint.
    fn distance(&self, other: &Batch<'_>) -> usize {
        let start = |batch: &Batch<'_>| batch.neurons[0].as_ptr().addr();
        if other.len == 0 { 0 } else { start(other).wrapping_sub(start(self)) }
    }
}

/// Gate row, up row and down column of a neuron.
fn thirds(neuron: &[u8]) -> [&[u8]; 3] {
    let len = neuron.len() / 3;
    [0, 1, 2].map(|part| &neuron[part * len..][..len])
}

/// acc += the contributions of a batch, Eq. 1, one neuron after another.
fn add_neurons(
    rows: &RowOps,
    swiglu: fn(&mut [f32], &[f32]),
    batch: &Batch<'_>,
    h: Activations<'_>,
    acc: &mut [f32],
    ahead: usize,
) {
    let count = batch.len;
    let [gates, ups, downs] =
        [0, 1, 2].map(|part| batch.neurons.map(|neuron| thirds(neuron)[part]));
    let (mut gate, mut up) = ([0f32; BATCH], [0f32; BATCH]);
    (rows.dot)(&gates[..count], h, &mut gate, ahead);
    (rows.dot)(&ups[..count], h, &mut up, ahead);
    swiglu(&mut gate[..count], &up[..count]);
    (rows.axpy)(&downs[..count], &gate[..count], acc, ahead);
}
