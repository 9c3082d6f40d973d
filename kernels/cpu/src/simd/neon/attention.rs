//! Decode's attention: the query heads that share a key head go over its cache together, so that each key and value is
//! converted once.

use super::{HALVES, LANES, half_at, load_halves, sum_lanes};
use crate::simd::quantise::GROUP;
use crate::simd::{KvOps, scalar};
use std::arch::aarch64::*;

pub(super) const KV_F16: KvOps =
    KvOps { store: scalar::store_f16, scores: scores::<F16>, weigh: weigh::<F16> };
pub(super) const KV_Q8_0: KvOps =
    KvOps { store: scalar::store_q8_0, scores: scores::<Q8_0>, weigh: weigh::<Q8_0> };

/// Query heads at a time: with four keys 12 sums, with four pieces of a value 24, which registers hold.
const HEADS: usize = 3;
/// Keys at a time, pieces of a value at a time.
const WIDTH: usize = 4;
/// Elements that are read at once.
const PIECE: usize = HALVES;

/// How rows of a cache are read. Elements GROUP * i .. GROUP * (i + 1) may share a scale.
trait Stored {
    /// Whether a row is made of whole groups.
    const GROUPED: bool;

    /// Bytes of a row.
    fn row_bytes(head_dim: usize) -> usize;

    /// The scale of the group that begins with element `first`.
    ///
    /// # Safety
    /// `row` holds a row, `first` is below its length; the CPU has NEON.
    unsafe fn scale(row: *const u8, head_dim: usize, first: usize) -> f32;

    /// PIECE elements from `first` on.
    ///
    /// # Safety
    /// `row` holds a row of at least first + PIECE elements; the CPU has NEON.
    unsafe fn piece(row: *const u8, first: usize, scale: f32) -> [float32x4_t; 2];
}

enum F16 {}
enum Q8_0 {}

impl Stored for F16 {
    const GROUPED: bool = false;

    fn row_bytes(head_dim: usize) -> usize {
        2 * head_dim
    }

    #[inline(always)]
    unsafe fn scale(_row: *const u8, _head_dim: usize, _first: usize) -> f32 {
        1.0
    }

    #[inline(always)]
    unsafe fn piece(row: *const u8, first: usize, _scale: f32) -> [float32x4_t; 2] {
        // SAFETY: the caller's guarantee.
        unsafe { load_halves(row.add(2 * first)) }
    }
}

impl Stored for Q8_0 {
    const GROUPED: bool = true;

    fn row_bytes(head_dim: usize) -> usize {
        head_dim + head_dim / GROUP * 2
    }

    #[inline(always)]
    unsafe fn scale(row: *const u8, head_dim: usize, first: usize) -> f32 {
        // SAFETY: the caller's guarantee; scales follow head_dim quants.
        unsafe {
            let half = row.add(head_dim + first / GROUP * 2).cast::<[u8; 2]>();
            half_at(&*half, 0)
        }
    }

    #[inline(always)]
    unsafe fn piece(row: *const u8, first: usize, scale: f32) -> [float32x4_t; 2] {
        // SAFETY: the caller's guarantee.
        unsafe {
            let quants = vmovl_s8(vld1_s8(row.add(first).cast()));
            let quants = [vmovl_s16(vget_low_s16(quants)), vmovl_high_s16(quants)];
            quants.map(|quants| vmulq_n_f32(vcvtq_f32_s32(quants), scale))
        }
    }
}

/// Number of `rows`.
fn row_count<S: Stored>(rows: &[u8], head_dim: usize) -> usize {
    assert!(!S::GROUPED || head_dim.is_multiple_of(GROUP), "rows of {head_dim} are not groups");
    rows.len() / S::row_bytes(head_dim)
}

fn scores<S: Stored>(keys: &[u8], queries: &[f32], head_dim: usize, out: &mut [f32]) {
    let count = row_count::<S>(keys, head_dim);
    assert_eq!(out.len() * head_dim, count * queries.len(), "a score for each query and key");
    let queries = queries.chunks(HEADS * head_dim);
    for (queries, out) in queries.zip(out.chunks_mut((HEADS * count).max(1))) {
        // SAFETY: the CPU has NEON, see `available`; lengths have been checked.
        unsafe {
            match queries.len() / head_dim {
                1 => scores_of::<S, 1>(keys, queries, head_dim, out),
                2 => scores_of::<S, 2>(keys, queries, head_dim, out),
                _ => scores_of::<S, HEADS>(keys, queries, head_dim, out),
            }
        }
    }
}

#[target_feature(enable = "neon")]
fn scores_of<S: Stored, const G: usize>(
    keys: &[u8],
    queries: &[f32],
    head_dim: usize,
    out: &mut [f32],
) {
    let row_bytes = S::row_bytes(head_dim);
    let count = keys.len() / row_bytes;
    let whole = count / WIDTH * WIDTH;
    for first in (0..whole).step_by(WIDTH) {
        let (keys, out) = (&keys[first * row_bytes..], &mut out[first..]);
        scores_tile::<S, G, WIDTH>(keys, queries, head_dim, out, count);
    }
    for first in whole..count {
        let (keys, out) = (&keys[first * row_bytes..], &mut out[first..]);
        scores_tile::<S, G, 1>(keys, queries, head_dim, out, count);
    }
}

/// The first K keys: `out[g * stride + i] = queries[g] . keys[i]`. Each has one sum of four lanes.
#[inline]
#[target_feature(enable = "neon")]
fn scores_tile<S: Stored, const G: usize, const K: usize>(
    keys: &[u8],
    queries: &[f32],
    head_dim: usize,
    out: &mut [f32],
    stride: usize,
) {
    let row_bytes = S::row_bytes(head_dim);
    let (keys, queries) = (&keys[..K * row_bytes], &queries[..G * head_dim]);
    let whole = head_dim / PIECE * PIECE;
    let mut sums = [[vdupq_n_f32(0.0); K]; G];
    for group in (0..whole).step_by(GROUP) {
        // SAFETY: there are K keys, and group < head_dim.
        let scales: [f32; K] = std::array::from_fn(|i| unsafe {
            S::scale(keys.as_ptr().add(i * row_bytes), head_dim, group)
        });
        for d in (group..whole.min(group + GROUP)).step_by(PIECE) {
            // SAFETY: there are K keys, and d + PIECE <= head_dim.
            let key: [[float32x4_t; 2]; K] = std::array::from_fn(|i| unsafe {
                S::piece(keys.as_ptr().add(i * row_bytes), d, scales[i])
            });
            for (g, sums) in sums.iter_mut().enumerate() {
                // SAFETY: d + 2 * LANES <= head_dim, and there are G queries.
                let [low, high] = unsafe {
                    let query = queries.as_ptr().add(g * head_dim + d);
                    [vld1q_f32(query), vld1q_f32(query.add(LANES))]
                };
                for (sum, key) in sums.iter_mut().zip(key) {
                    *sum = vfmaq_f32(vfmaq_f32(*sum, low, key[0]), high, key[1]);
                }
            }
        }
    }
    for (g, sums) in sums.into_iter().enumerate() {
        for (i, sum) in sums.into_iter().enumerate() {
            let mut sum = sum_lanes(sum);
            // Only f16 rows have a rest.
            for d in whole..head_dim {
                sum = queries[g * head_dim + d].mul_add(half_at(keys, i * head_dim + d), sum);
            }
            out[g * stride + i] = sum;
        }
    }
}

fn weigh<S: Stored>(values: &[u8], shares: &[f32], head_dim: usize, out: &mut [f32]) {
    let count = row_count::<S>(values, head_dim);
    assert_eq!(out.len() * count, shares.len() * head_dim, "a share for each query and value");
    if count == 0 {
        out.fill(0.0);
        return;
    }
    let shares = shares.chunks(HEADS * count);
    for (shares, out) in shares.zip(out.chunks_mut(HEADS * head_dim)) {
        // SAFETY: the CPU has NEON, see `available`; lengths have been checked.
        unsafe {
            match out.len() / head_dim {
                1 => weigh_of::<S, 1>(values, shares, head_dim, out),
                2 => weigh_of::<S, 2>(values, shares, head_dim, out),
                _ => weigh_of::<S, HEADS>(values, shares, head_dim, out),
            }
        }
    }
}

#[target_feature(enable = "neon")]
fn weigh_of<S: Stored, const G: usize>(
    values: &[u8],
    shares: &[f32],
    head_dim: usize,
    out: &mut [f32],
) {
    let mut d = 0;
    while d + WIDTH * PIECE <= head_dim {
        weigh_columns::<S, G, WIDTH>(values, shares, head_dim, out, d);
        d += WIDTH * PIECE;
    }
    while d + PIECE <= head_dim {
        weigh_columns::<S, G, 1>(values, shares, head_dim, out, d);
        d += PIECE;
    }
    let count = values.len() / S::row_bytes(head_dim);
    for (out, shares) in out.chunks_exact_mut(head_dim).zip(shares.chunks_exact(count)) {
        // Only f16 rows have a rest.
        for (d, out) in out.iter_mut().enumerate().skip(d) {
            *out = 0.0;
            for (i, share) in shares.iter().enumerate() {
                *out = share.mul_add(half_at(values, i * head_dim + d), *out);
            }
        }
    }
}

/// W pieces of the results from dimension d on, all of one group.
#[inline]
#[target_feature(enable = "neon")]
fn weigh_columns<S: Stored, const G: usize, const W: usize>(
    values: &[u8],
    shares: &[f32],
    head_dim: usize,
    out: &mut [f32],
    d: usize,
) {
    const { assert!(GROUP.is_multiple_of(W * PIECE), "a group is cut evenly") };
    let row_bytes = S::row_bytes(head_dim);
    let count = values.len() / row_bytes;
    let (shares, out) = (&shares[..G * count], &mut out[..G * head_dim]);
    assert!(d + W * PIECE <= head_dim, "columns end behind the row");
    let mut sums = [[[vdupq_n_f32(0.0); 2]; W]; G];
    for (i, row) in values.chunks_exact(row_bytes).enumerate() {
        // SAFETY: d < head_dim.
        let scale = unsafe { S::scale(row.as_ptr(), head_dim, d) };
        for w in 0..W {
            // SAFETY: d + W * PIECE <= head_dim.
            let value = unsafe { S::piece(row.as_ptr(), d + w * PIECE, scale) };
            for (g, sums) in sums.iter_mut().enumerate() {
                // SAFETY: there are G * count shares.
                let share = unsafe { vld1q_dup_f32(shares.as_ptr().add(g * count + i)) };
                for (sum, value) in sums[w].iter_mut().zip(value) {
                    *sum = vfmaq_f32(*sum, share, value);
                }
            }
        }
    }
    for (g, sums) in sums.into_iter().enumerate() {
        for (i, sum) in sums.into_iter().flatten().enumerate() {
            // SAFETY: there are G rows of head_dim results, and d + W * PIECE <= head_dim.
            unsafe { vst1q_f32(out.as_mut_ptr().add(g * head_dim + d + i * LANES), sum) };
        }
    }
}
