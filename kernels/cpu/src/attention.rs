//! Attention and the KV cache.
//!
//! The cache holds keys (rotated) and values as rows of f16 or Q8_0, position after position for each layer and key head. Decode cuts
//! the positions into chunks of [`KEY_CHUNK`] that threads attend to by themselves, and merges them in order. Prefill
//! goes over blocks of [`KEY_BLOCK`] positions with a running maximum and sum for each query.

use crate::backend::{CpuBackend, ITEM_TOKENS};
use crate::buffer::{Buffer, SharedMut, buffer_bytes};
use crate::simd::{Ops, PANEL, RowOps, Tile};
use ls_bundle::ids::LayerId;
use ls_compute::{KvDType, Shape};
use ls_sync::{AllocateError, Slot};
use std::ops::Range;

/// Keys of an item of decode.
pub(crate) const KEY_CHUNK: usize = 128;
/// Keys of a step of prefill.
const KEY_BLOCK: usize = 64;
/// Rows (query heads times tokens) that a prefill item aims at.
const ITEM_QUERIES: usize = 96;

/// Keys and values of all layers.
#[derive(Debug)]
pub(crate) struct Cache {
    data: Buffer<u8>,
    map: CacheMap,
    dtype: KvDType,
}

/// Where a row of the cache lies: layer x (keys, values) x kv_heads x context.
#[derive(Clone, Copy, Debug)]
struct CacheMap {
    context: usize,
    kv_heads: usize,
    row_bytes: usize,
}

/// Which half of a layer's cache.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Key = 0,
    Value = 1,
}

impl Cache {
    pub(crate) fn allocate(
        shape: &Shape,
        context: usize,
        dtype: KvDType,
    ) -> Result<Cache, AllocateError> {
        let row_bytes = dtype.dtype().row_bytes(shape.head_dim as u32) as usize;
        let count = 2 * shape.layers * shape.kv_heads * context * row_bytes;
        let mut slot = Slot::allocate(buffer_bytes::<u8>(count))?;
        let data = Buffer::take(&mut slot, count);
        Ok(Cache { data, map: CacheMap { context, kv_heads: shape.kv_heads, row_bytes }, dtype })
    }

    /// All keys, or values, of a head in a layer; one a position of context.
    fn head(&self, layer: LayerId, kind: Kind, head: usize) -> HeadRows<'_> {
        let CacheMap { context, row_bytes, .. } = self.map;
        let bytes = &self.data[self.map.row(layer, kind, head, 0)..][..context * row_bytes];
        HeadRows { bytes, row_bytes }
    }
}

impl CacheMap {
    /// First byte of a row.
    fn row(&self, layer: LayerId, kind: Kind, head: usize, position: usize) -> usize {
        let matrices = 2 * layer.index() + kind as usize;
        ((matrices * self.kv_heads + head) * self.context + position) * self.row_bytes
    }
}

/// Keys or values of one head.
#[derive(Clone, Copy, Debug)]
struct HeadRows<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
}

impl<'a> HeadRows<'a> {
    /// The row of a position.
    fn at(&self, position: usize) -> &'a [u8] {
        &self.bytes[position * self.row_bytes..][..self.row_bytes]
    }

    /// The rows of some positions.
    fn range(&self, positions: Range<usize>) -> &'a [u8] {
        &self.bytes[positions.start * self.row_bytes..positions.end * self.row_bytes]
    }

    /// Rows of N positions at most, and how many there are.
    fn batch<const N: usize>(&self, first: usize, end: usize) -> ([&'a [u8]; N], usize) {
        let count = N.min(end.saturating_sub(first));
        let mut rows = [&[][..]; N];
        for (i, row) in rows[..count].iter_mut().enumerate() {
            *row = self.at(first + i);
        }
        (rows, count)
    }
}

/// Tokens of a prefill item.
fn query_tile(shape: &Shape) -> usize {
    (ITEM_QUERIES / shape.group()).max(6) / 6 * 6
}

/// Floats of scratch that a prefill item needs; see [`TileWork`].
pub(crate) fn scratch(shape: &Shape) -> usize {
    let (tile, wide) = (query_tile(shape), shape.head_dim.next_multiple_of(PANEL));
    let queries = tile * shape.group();
    KEY_BLOCK * shape.head_dim + KEY_BLOCK * wide + tile * KEY_BLOCK + queries * wide + 2 * queries
}

impl CpuBackend {
    /// Biases, head norms and rotation of q and k; k and v go to the cache. q is also divided by sqrt(head_dim).
    pub(crate) fn rotate_and_append(&mut self, layer: LayerId) {
        let shape = self.shape;
        let (ops, epsilon, pass, map) = (self.ops, self.norm_epsilon, self.pass, self.cache.map);
        let vectors = &self.vectors.layers[layer.index()];
        let buffers = &mut self.buffers;
        let (q, k, v) = (buffers.q.shared(), buffers.k.shared(), buffers.v.shared());
        let turns = &*buffers.turns;
        let (cache, store) = (self.cache.data.shared(), ops.kv(self.cache.dtype).store);
        let scale = 1.0 / (shape.head_dim as f32).sqrt();
        self.pool.run((pass.tokens as usize).div_ceil(ITEM_TOKENS), &|_, item| {
            let begin = item * ITEM_TOKENS;
            for token in begin..(begin + ITEM_TOKENS).min(pass.tokens as usize) {
                // SAFETY: items have disjoint tokens, tokens have disjoint rows.
                let (q, k, v) = unsafe {
                    (
                        q.slice(token * shape.query_width, shape.query_width),
                        k.slice(token * shape.kv_width, shape.kv_width),
                        v.slice(token * shape.kv_width, shape.kv_width),
                    )
                };
                for (values, bias) in
                    [(&mut *q, &vectors.q_bias), (k, &vectors.k_bias), (v, &vectors.v_bias)]
                {
                    values.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
                }
                let turns = &turns[token * shape.head_dim..][..shape.head_dim];
                finish_heads(ops, q, &vectors.q_norm, epsilon, turns);
                finish_heads(ops, k, &vectors.k_norm, epsilon, turns);
                q.iter_mut().for_each(|q| *q *= scale);
                let position = pass.first_position as usize + token;
                for (kind, values) in [(Kind::Key, &*k), (Kind::Value, &*v)] {
                    for (head, values) in values.chunks_exact(shape.head_dim).enumerate() {
                        let start = map.row(layer, kind, head, position);
                        // SAFETY: tokens have disjoint positions.
                        store(values, unsafe { cache.slice(start, map.row_bytes) });
                    }
                }
            }
        });
    }

    /// Attention of one token: item = key head and chunk of keys; then the chunks are merged.
    pub(crate) fn attend_one(&mut self, layer: LayerId) {
        let shape = self.shape;
        let (ops, scratch_len) = (self.ops, self.scratch);
        let visible = visible(&shape, self.pass.first_position as usize);
        let chunks = visible.start / KEY_CHUNK..visible.end.div_ceil(KEY_CHUNK);
        let group = shape.group();
        let group_width = group * shape.head_dim;
        let partial_len = group * (shape.head_dim + 2);
        let buffers = &mut self.buffers;
        let (partials, scratch) = (buffers.partials.shared(), buffers.scratch.shared());
        let q = &buffers.q[..shape.query_width];
        let (cache, kv) = (&self.cache, self.ops.kv(self.cache.dtype));
        self.pool.run(shape.kv_heads * chunks.len(), &|thread, item| {
            let (kv_head, chunk) = (item / chunks.len(), item % chunks.len());
            let first = (chunks.start + chunk) * KEY_CHUNK;
            let seen = first.max(visible.start)..(first + KEY_CHUNK).min(visible.end);
            let keys = cache.head(layer, Kind::Key, kv_head);
            let values = cache.head(layer, Kind::Value, kv_head);
            // SAFETY: a thread has scratch of its own, an item partials of its own.
            let (scores, partial) = unsafe {
                (
                    scratch.slice(thread * scratch_len, group * seen.len()),
                    partials.slice(item * partial_len, partial_len),
                )
            };
            let queries = &q[kv_head * group_width..][..group_width];
            (kv.scores)(keys.range(seen.clone()), queries, shape.head_dim, scores);
            let (totals, sums) = partial.split_at_mut(2 * group);
            for (total, scores) in
                totals.chunks_exact_mut(2).zip(scores.chunks_exact_mut(seen.len()))
            {
                total[0] = (ops.max)(scores);
                total[1] = (ops.exp_sum)(scores, total[0]);
            }
            (kv.weigh)(values.range(seen), scores, shape.head_dim, sums);
        });
        for (head, out) in buffers.q.chunks_exact_mut(shape.head_dim).take(shape.heads).enumerate()
        {
            let first = head / group * chunks.len() * partial_len;
            let partials = buffers.partials[first..].chunks_exact(partial_len).take(chunks.len());
            merge(partials, (head % group, group), out);
        }
    }

    /// Attention of all tokens of the pass: item = key head and tile of tokens; results replace the queries.
    pub(crate) fn attend_many(&mut self, layer: LayerId) {
        let shape = self.shape;
        let (ops, scratch_len, pass) = (self.ops, self.scratch, self.pass);
        let tile = query_tile(&shape);
        let tiles = (pass.tokens as usize).div_ceil(tile);
        let buffers = &mut self.buffers;
        let (q, scratch) = (buffers.q.shared(), buffers.scratch.shared());
        let cache = &self.cache;
        self.pool.run(shape.kv_heads * tiles, &|thread, item| {
            let kv_head = item % shape.kv_heads;
            // The last tile has the most keys, so it comes first.
            let first = (tiles - 1 - item / shape.kv_heads) * tile;
            let tokens = first..(first + tile).min(pass.tokens as usize);
            // SAFETY: a thread has scratch of its own.
            let scratch = unsafe { scratch.slice(thread * scratch_len, scratch_len) };
            let work = TileWork {
                ops,
                shape: &shape,
                keys: cache.head(layer, Kind::Key, kv_head),
                values: cache.head(layer, Kind::Value, kv_head),
                rows: ops.rows(cache.dtype.dtype()),
                q,
                kv_head,
                first_position: pass.first_position as usize,
                cached: (pass.first_position + pass.tokens) as usize,
                tokens,
            };
            // SAFETY: an item has its tokens and its heads of q.
            unsafe { work.run(scratch) };
        });
    }
}

/// Positions that a token sees.
fn visible(shape: &Shape, position: usize) -> Range<usize> {
    (position + 1).saturating_sub(shape.window)..position + 1
}

/// Norm (if there is a gain) and rotation of every head.
fn finish_heads(ops: &Ops, heads: &mut [f32], gain: &[f32], epsilon: f32, turns: &[f32]) {
    let (cosines, sines) = turns.split_at(turns.len() / 2);
    for head in heads.chunks_exact_mut(turns.len()) {
        if !gain.is_empty() {
            let scale = (ops.inverse_rms)(head, epsilon);
            head.iter_mut().zip(gain).for_each(|(x, gain)| *x = *x * scale * gain);
        }
        let (first, second) = head.split_at_mut(cosines.len());
        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// Adds the chunks of a head (its number in its group, the group's size), in order. A chunk is maximum and sum of
/// each head, then the weighted values of each head.
fn merge<'a>(
    partials: impl Iterator<Item = &'a [f32]> + Clone,
    (head, group): (usize, usize),
    out: &mut [f32],
) {
    let max = partials.clone().map(|partial| partial[2 * head]).fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    let first = 2 * group + head * out.len();
    out.fill(0.0);
    for partial in partials {
        let share = (partial[2 * head] - max).exp();
        sum += share * partial[2 * head + 1];
        out.iter_mut().zip(&partial[first..]).for_each(|(out, &v)| *out += share * v);
    }
    out.iter_mut().for_each(|out| *out /= sum);
}

/// One item of prefill: some tokens, the query heads of one key head.
struct TileWork<'a> {
    ops: &'a Ops,
    shape: &'a Shape,
    keys: HeadRows<'a>,
    values: HeadRows<'a>,
    /// How these are read.
    rows: &'a RowOps,
    q: SharedMut<'a, f32>,
    kv_head: usize,
    /// Position of the pass's first token.
    first_position: usize,
    /// Number of positions in the cache.
    cached: usize,
    /// Indices in the pass.
    tokens: Range<usize>,
}

/// A query's running state: the largest score so far, and the sum of exponentials relative to it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Running {
    max: f32,
    sum: f32,
}

impl TileWork<'_> {
    /// Goes over the blocks of keys that any token of the tile sees.
    ///
    /// # Safety
    /// Nobody else accesses these tokens' rows of these heads in q.
    unsafe fn run(&self, scratch: &mut [f32]) {
        let (head_dim, group) = (self.shape.head_dim, self.shape.group());
        let wide = head_dim.next_multiple_of(PANEL);
        let tokens = self.tokens.len();
        let (keys, rest) = scratch.split_at_mut(KEY_BLOCK * head_dim);
        let (values, rest) = rest.split_at_mut(KEY_BLOCK * wide);
        let (scores, rest) = rest.split_at_mut(query_tile(self.shape) * KEY_BLOCK);
        let (sums, rest) = rest.split_at_mut(group * tokens * wide);
        let running = bytemuck::cast_slice_mut::<f32, Running>(&mut rest[..2 * group * tokens]);
        let scores = &mut scores[..tokens * KEY_BLOCK];
        sums.fill(0.0);
        running.fill(Running { max: f32::NEG_INFINITY, sum: 0.0 });
        let first_seen = visible(self.shape, self.first_position + self.tokens.start).start;
        let end = self.first_position + self.tokens.end;
        for block in (first_seen / KEY_BLOCK * KEY_BLOCK..end).step_by(KEY_BLOCK) {
            self.unpack(block, keys, values);
            let heads = sums.chunks_exact_mut(tokens * wide).zip(running.chunks_exact_mut(tokens));
            for (head, (sums, running)) in heads.enumerate() {
                // SAFETY: the caller's guarantee.
                unsafe { self.scores(head, keys, scores) };
                self.shares(block, scores, running, sums);
                self.weigh(values, scores, sums);
            }
        }
        for head in 0..group {
            for (i, token) in self.tokens.clone().enumerate() {
                // SAFETY: the caller's guarantee.
                let out = unsafe { self.q.slice(self.query(head, token), head_dim) };
                let row = head * tokens + i;
                let scale = 1.0 / running[row].sum;
                let sums = &sums[row * wide..][..head_dim];
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum * scale);
            }
        }
    }

    /// Index in q of a head (of the group) of a token.
    fn query(&self, head: usize, token: usize) -> usize {
        let head = self.kv_head * self.shape.group() + head;
        token * self.shape.query_width + head * self.shape.head_dim
    }

    /// Keys of a block as panels, values as rows; zeros behind the last cached position.
    fn unpack(&self, block: usize, keys: &mut [f32], values: &mut [f32]) {
        let head_dim = self.shape.head_dim;
        for (i, panel) in keys.chunks_exact_mut(PANEL * head_dim).enumerate() {
            let (batch, count) = self.keys.batch::<PANEL>(block + i * PANEL, self.cached);
            (self.rows.pack_rows)(&batch[..count], head_dim, panel);
        }
        let wide = head_dim.next_multiple_of(PANEL);
        for (i, value) in values.chunks_exact_mut(wide).enumerate() {
            if block + i < self.cached {
                (self.rows.unpack)(self.values.at(block + i), head_dim, 0, &mut value[..head_dim]);
            } else {
                value[..head_dim].fill(0.0);
            }
        }
    }

    /// scores = q . keys; tokens x KEY_BLOCK.
    ///
    /// # Safety
    /// Nobody else writes to these tokens' rows of this head in q.
    unsafe fn scores(&self, head: usize, keys: &[f32], scores: &mut [f32]) {
        let head_dim = self.shape.head_dim;
        for (i, panel) in keys.chunks_exact(PANEL * head_dim).enumerate() {
            let tile = Tile {
                m: self.tokens.len(),
                n: PANEL,
                k: head_dim,
                a: self.q.at(self.query(head, self.tokens.start)),
                a_stride: self.shape.query_width,
                b: panel.as_ptr(),
                b_stride: PANEL,
                c: scores[i * PANEL..].as_mut_ptr(),
                c_stride: KEY_BLOCK,
                accumulate: false,
            };
            // SAFETY: q has these tokens' rows; scores are this thread's.
            unsafe { (self.ops.gemm)(&tile) };
        }
    }

    /// Turns scores into exponentials, zero where a token does not see a key, and scales what has been summed to the
    /// new maximum.
    fn shares(&self, block: usize, scores: &mut [f32], running: &mut [Running], sums: &mut [f32]) {
        let wide = self.shape.head_dim.next_multiple_of(PANEL);
        let rows = scores.chunks_exact_mut(KEY_BLOCK).zip(sums.chunks_exact_mut(wide));
        for ((token, running), (scores, sums)) in self.tokens.clone().zip(running).zip(rows) {
            let seen = visible(self.shape, self.first_position + token);
            let in_block = |position: usize| position.clamp(block, block + KEY_BLOCK) - block;
            let (begin, end) = (in_block(seen.start), in_block(seen.end));
            if begin == end {
                scores.fill(0.0);
                continue;
            }
            scores[..begin].fill(f32::NEG_INFINITY);
            scores[end..].fill(f32::NEG_INFINITY);
            let max = running.max.max((self.ops.max)(scores));
            let kept = (running.max - max).exp();
            running.sum = running.sum * kept + (self.ops.exp_sum)(scores, max);
            running.max = max;
            if kept != 1.0 {
                sums.iter_mut().for_each(|sum| *sum *= kept);
            }
        }
    }

    /// sums += scores . values.
    fn weigh(&self, values: &[f32], scores: &[f32], sums: &mut [f32]) {
        let head_dim = self.shape.head_dim;
        let wide = head_dim.next_multiple_of(PANEL);
        for column in (0..head_dim).step_by(PANEL) {
            let tile = Tile {
                m: self.tokens.len(),
                n: PANEL.min(head_dim - column),
                k: KEY_BLOCK,
                a: scores.as_ptr(),
                a_stride: KEY_BLOCK,
                b: values[column..].as_ptr(),
                b_stride: wide,
                c: sums[column..].as_mut_ptr(),
                c_stride: wide,
                accumulate: true,
            };
            // SAFETY: scores have a row for each token, values KEY_BLOCK rows; sums are this thread's.
            unsafe { (self.ops.gemm)(&tile) };
        }
    }
}
