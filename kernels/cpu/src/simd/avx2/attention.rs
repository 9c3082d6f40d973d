//! Decode's attention: the query heads that share a key head go over its f16 cache together, so that each key and
//! value is converted once.

use super::{LANES, half_at, sum_lanes};
use std::arch::x86_64::*;

/// Query heads at a time: with four keys (or four vectors of a value) 12 sums, which registers hold.
const HEADS: usize = 3;
/// Keys at a time, vectors of a value at a time.
const WIDTH: usize = 4;

pub(super) fn scores(keys: &[u8], queries: &[f32], head_dim: usize, out: &mut [f32]) {
    let count = keys.len() / (2 * head_dim);
    assert_eq!(out.len() * head_dim, count * queries.len(), "a score for each query and key");
    let queries = queries.chunks(HEADS * head_dim);
    for (queries, out) in queries.zip(out.chunks_mut(HEADS * count)) {
        // SAFETY: the CPU has the features, see `available`; lengths are checked inside.
        unsafe {
            match queries.len() / head_dim {
                1 => scores_of::<1>(keys, queries, head_dim, out),
                2 => scores_of::<2>(keys, queries, head_dim, out),
                _ => scores_of::<HEADS>(keys, queries, head_dim, out),
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn scores_of<const G: usize>(keys: &[u8], queries: &[f32], head_dim: usize, out: &mut [f32]) {
    let count = keys.len() / (2 * head_dim);
    let whole = count / WIDTH * WIDTH;
    for first in (0..whole).step_by(WIDTH) {
        scores_tile::<G, WIDTH>(
            &keys[2 * first * head_dim..],
            queries,
            head_dim,
            &mut out[first..],
            count,
        );
    }
    for first in whole..count {
        scores_tile::<G, 1>(
            &keys[2 * first * head_dim..],
            queries,
            head_dim,
            &mut out[first..],
            count,
        );
    }
}

/// The first K keys: `out[g * stride + i] = queries[g] . keys[i]`. Each has one sum of eight lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scores_tile<const G: usize, const K: usize>(
    keys: &[u8],
    queries: &[f32],
    head_dim: usize,
    out: &mut [f32],
    stride: usize,
) {
    let (keys, queries) = (&keys[..2 * K * head_dim], &queries[..G * head_dim]);
    let whole = head_dim / LANES * LANES;
    let mut sums = [[_mm256_setzero_ps(); K]; G];
    for d in (0..whole).step_by(LANES) {
        let mut key = [_mm256_setzero_ps(); K];
        for (i, key) in key.iter_mut().enumerate() {
            // SAFETY: d + LANES <= head_dim, and there are K keys.
            *key = unsafe {
                let halves = keys.as_ptr().add(2 * (i * head_dim + d));
                _mm256_cvtph_ps(_mm_loadu_si128(halves.cast()))
            };
        }
        for (g, sums) in sums.iter_mut().enumerate() {
            // SAFETY: d + LANES <= head_dim, and there are G queries.
            let query = unsafe { _mm256_loadu_ps(queries.as_ptr().add(g * head_dim + d)) };
            for (sum, key) in sums.iter_mut().zip(key) {
                *sum = _mm256_fmadd_ps(query, key, *sum);
            }
        }
    }
    for (g, sums) in sums.into_iter().enumerate() {
        for (i, sum) in sums.into_iter().enumerate() {
            let mut sum = sum_lanes(sum);
            for d in whole..head_dim {
                sum = queries[g * head_dim + d].mul_add(half_at(keys, i * head_dim + d), sum);
            }
            out[g * stride + i] = sum;
        }
    }
}

pub(super) fn weigh(values: &[u8], shares: &[f32], head_dim: usize, out: &mut [f32]) {
    let count = values.len() / (2 * head_dim);
    assert_eq!(out.len() * count, shares.len() * head_dim, "a share for each query and value");
    if count == 0 {
        out.fill(0.0);
        return;
    }
    let shares = shares.chunks(HEADS * count);
    for (shares, out) in shares.zip(out.chunks_mut(HEADS * head_dim)) {
        // SAFETY: the CPU has the features, see `available`; lengths are checked inside.
        unsafe {
            match out.len() / head_dim {
                1 => weigh_of::<1>(values, shares, head_dim, out),
                2 => weigh_of::<2>(values, shares, head_dim, out),
                _ => weigh_of::<HEADS>(values, shares, head_dim, out),
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn weigh_of<const G: usize>(values: &[u8], shares: &[f32], head_dim: usize, out: &mut [f32]) {
    let mut d = 0;
    while d + WIDTH * LANES <= head_dim {
        weigh_columns::<G, WIDTH>(values, shares, head_dim, out, d);
        d += WIDTH * LANES;
    }
    while d + LANES <= head_dim {
        weigh_columns::<G, 1>(values, shares, head_dim, out, d);
        d += LANES;
    }
    let count = values.len() / (2 * head_dim);
    for (out, shares) in out.chunks_exact_mut(head_dim).zip(shares.chunks_exact(count)) {
        for (d, out) in out.iter_mut().enumerate().skip(d) {
            *out = 0.0;
            for (i, share) in shares.iter().enumerate() {
                *out = share.mul_add(half_at(values, i * head_dim + d), *out);
            }
        }
    }
}

/// W vectors of the results, from dimension d.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn weigh_columns<const G: usize, const W: usize>(
    values: &[u8],
    shares: &[f32],
    head_dim: usize,
    out: &mut [f32],
    d: usize,
) {
    let count = values.len() / (2 * head_dim);
    let (shares, out) = (&shares[..G * count], &mut out[..G * head_dim]);
    assert!(d + W * LANES <= head_dim, "columns end behind the row");
    let mut sums = [[_mm256_setzero_ps(); W]; G];
    for i in 0..count {
        for w in 0..W {
            // SAFETY: i < count, and d + W * LANES <= head_dim.
            let value = unsafe {
                let halves = values.as_ptr().add(2 * (i * head_dim + d + w * LANES));
                _mm256_cvtph_ps(_mm_loadu_si128(halves.cast()))
            };
            for (g, sums) in sums.iter_mut().enumerate() {
                // SAFETY: there are G * count shares.
                let share = unsafe { _mm256_broadcast_ss(shares.get_unchecked(g * count + i)) };
                sums[w] = _mm256_fmadd_ps(share, value, sums[w]);
            }
        }
    }
    for (g, sums) in sums.into_iter().enumerate() {
        for (w, sum) in sums.into_iter().enumerate() {
            // SAFETY: there are G rows of head_dim results.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(g * head_dim + d + w * LANES), sum) };
        }
    }
}
