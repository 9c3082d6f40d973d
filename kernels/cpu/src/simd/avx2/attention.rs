//! Decode's attention: the query heads that share a key head go over its cache together, so that each key and value is
//! converted once.

use super::{LANES, half_at, sum_lanes};
use crate::simd::quantise::GROUP;
use crate::simd::{KvOps, scalar};
use std::arch::x86_64::*;

/// Query heads at a time.
const HEADS: usize = 3;
/// Vectors of a group.
const VECTORS: usize = GROUP / LANES;

/// The functions for a cache of `$stored`, compiled for `$features`. `$width`: keys, and vectors of a value, at a time,
/// so many that registers hold HEADS times as many sums and what is multiplied.
macro_rules! kv_ops {
    ($stored:ty, $store:path, $features:literal, $width:literal) => {{
        fn scores(keys: &[u8], queries: &[f32], head_dim: usize, out: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn of<const G: usize>(keys: &[u8], queries: &[f32], head_dim: usize, out: &mut [f32]) {
                // SAFETY: the features are enabled; arguments have been checked.
                unsafe { scores_of::<$stored, G, $width>(keys, queries, head_dim, out) }
            }
            let count = check_rows::<$stored>(keys, head_dim);
            assert_eq!(
                out.len() * head_dim,
                count * queries.len(),
                "a score for each query and key"
            );
            let queries = queries.chunks(HEADS * head_dim);
            for (queries, out) in queries.zip(out.chunks_mut((HEADS * count).max(1))) {
                // SAFETY: the table is reachable only where the CPU has the features.
                unsafe {
                    match queries.len() / head_dim {
                        1 => of::<1>(keys, queries, head_dim, out),
                        2 => of::<2>(keys, queries, head_dim, out),
                        _ => of::<HEADS>(keys, queries, head_dim, out),
                    }
                }
            }
        }

        fn weigh(values: &[u8], shares: &[f32], head_dim: usize, out: &mut [f32]) {
            #[target_feature(enable = $features)]
            fn of<const G: usize>(values: &[u8], shares: &[f32], head_dim: usize, out: &mut [f32]) {
                // SAFETY: the features are enabled; arguments have been checked.
                unsafe { weigh_of::<$stored, G, $width>(values, shares, head_dim, out) }
            }
            let count = check_rows::<$stored>(values, head_dim);
            assert_eq!(
                out.len() * count,
                shares.len() * head_dim,
                "a share for each query and value"
            );
            if count == 0 {
                out.fill(0.0);
                return;
            }
            let shares = shares.chunks(HEADS * count);
            for (shares, out) in shares.zip(out.chunks_mut(HEADS * head_dim)) {
                // SAFETY: the table is reachable only where the CPU has the features.
                unsafe {
                    match out.len() / head_dim {
                        1 => of::<1>(values, shares, head_dim, out),
                        2 => of::<2>(values, shares, head_dim, out),
                        _ => of::<HEADS>(values, shares, head_dim, out),
                    }
                }
            }
        }

        KvOps { store: $store, scores, weigh }
    }};
}

pub(super) const KV_F16: KvOps = kv_ops!(F16, scalar::store_f16, "avx2,fma,f16c", 4);
/// The scales need registers too: fewer sums than for f16.
pub(super) const KV_Q8_0: KvOps = kv_ops!(Q8_0, scalar::store_q8_0, "avx2,fma,f16c", 2);
/// With AVX-512 there are twice as many registers.
pub(in crate::simd) const KV_Q8_0_AVX512: KvOps =
    kv_ops!(Q8_0, scalar::store_q8_0, "avx2,fma,f16c,avx512f,avx512vl", 4);

/// How rows of a cache are read. Elements GROUP * i .. GROUP * (i + 1) may share a scale.
trait Stored {
    /// Whether a row is made of whole groups.
    const GROUPED: bool;
    /// What the elements of a group need to become numbers.
    type Scale: Copy;
    /// To begin with.
    const NO_SCALE: Self::Scale;

    /// Bytes of a row.
    fn row_bytes(head_dim: usize) -> usize;

    /// The scale of the group that begins with element `first`.
    ///
    /// # Safety
    /// `row` holds a row, `first` is below its length; the CPU has AVX2 and F16C.
    unsafe fn scale(row: *const u8, head_dim: usize, first: usize) -> Self::Scale;

    /// LANES elements from `first` on.
    ///
    /// # Safety
    /// `row` holds a row of at least first + LANES elements; the CPU has AVX2 and F16C.
    unsafe fn vector(row: *const u8, first: usize, scale: Self::Scale) -> __m256;
}

enum F16 {}
enum Q8_0 {}

impl Stored for F16 {
    const GROUPED: bool = false;
    type Scale = ();
    const NO_SCALE: () = ();

    fn row_bytes(head_dim: usize) -> usize {
        2 * head_dim
    }

    #[inline(always)]
    unsafe fn scale(_row: *const u8, _head_dim: usize, _first: usize) {}

    #[inline(always)]
    unsafe fn vector(row: *const u8, first: usize, (): ()) -> __m256 {
        // SAFETY: the caller's guarantee.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(row.add(2 * first).cast())) }
    }
}

impl Stored for Q8_0 {
    const GROUPED: bool = true;
    type Scale = __m256;
    // SAFETY: any bits are eight floats.
    const NO_SCALE: __m256 = unsafe { std::mem::zeroed() };

    fn row_bytes(head_dim: usize) -> usize {
        head_dim + head_dim / GROUP * 2
    }

    #[inline(always)]
    unsafe fn scale(row: *const u8, head_dim: usize, first: usize) -> __m256 {
        // SAFETY: the caller's guarantee; scales follow head_dim quants.
        unsafe {
            let half = row.add(head_dim + first / GROUP * 2).cast::<i16>().read_unaligned();
            _mm256_cvtph_ps(_mm_set1_epi16(half))
        }
    }

    #[inline(always)]
    unsafe fn vector(row: *const u8, first: usize, scale: __m256) -> __m256 {
        // SAFETY: the caller's guarantee.
        unsafe {
            let quants = _mm256_cvtepi8_epi32(_mm_loadl_epi64(row.add(first).cast()));
            _mm256_mul_ps(_mm256_cvtepi32_ps(quants), scale)
        }
    }
}

/// What this module's functions need of their arguments. Returns the number of rows.
fn check_rows<S: Stored>(rows: &[u8], head_dim: usize) -> usize {
    assert!(!S::GROUPED || head_dim.is_multiple_of(GROUP), "rows of {head_dim} are not groups");
    rows.len() / S::row_bytes(head_dim)
}

/// # Safety
/// The CPU has AVX2, FMA and F16C; rows are as [`check_rows`] says.
#[inline(always)]
unsafe fn scores_of<S: Stored, const G: usize, const K: usize>(
    keys: &[u8],
    queries: &[f32],
    head_dim: usize,
    out: &mut [f32],
) {
    let row_bytes = S::row_bytes(head_dim);
    let count = keys.len() / row_bytes;
    let whole = count / K * K;
    for first in (0..whole).step_by(K) {
        let (keys, out) = (&keys[first * row_bytes..], &mut out[first..]);
        // SAFETY: the caller's guarantee.
        unsafe { scores_tile::<S, G, K>(keys, queries, head_dim, out, count) };
    }
    for first in whole..count {
        let (keys, out) = (&keys[first * row_bytes..], &mut out[first..]);
        // SAFETY: the caller's guarantee.
        unsafe { scores_tile::<S, G, 1>(keys, queries, head_dim, out, count) };
    }
}

/// The first K keys: `out[g * stride + i] = queries[g] . keys[i]`. Each has one sum of eight lanes.
///
/// # Safety
/// As for [`scores_of`].
#[inline(always)]
unsafe fn scores_tile<S: Stored, const G: usize, const K: usize>(
    keys: &[u8],
    queries: &[f32],
    head_dim: usize,
    out: &mut [f32],
    stride: usize,
) {
    let row_bytes = S::row_bytes(head_dim);
    let (keys, queries) = (&keys[..K * row_bytes], &queries[..G * head_dim]);
    let whole = head_dim / LANES * LANES;
    // SAFETY: the CPU has the features; d + LANES <= head_dim, and there are K keys and G queries.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); K]; G];
        for group in (0..whole).step_by(GROUP) {
            let mut scales = [S::NO_SCALE; K];
            for (i, scale) in scales.iter_mut().enumerate() {
                *scale = S::scale(keys.as_ptr().add(i * row_bytes), head_dim, group);
            }
            for d in (group..whole.min(group + GROUP)).step_by(LANES) {
                let mut key = [_mm256_setzero_ps(); K];
                for (i, key) in key.iter_mut().enumerate() {
                    *key = S::vector(keys.as_ptr().add(i * row_bytes), d, scales[i]);
                }
                for (g, sums) in sums.iter_mut().enumerate() {
                    let query = _mm256_loadu_ps(queries.as_ptr().add(g * head_dim + d));
                    for (sum, key) in sums.iter_mut().zip(key) {
                        *sum = _mm256_fmadd_ps(query, key, *sum);
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
}

/// # Safety
/// The CPU has AVX2, FMA and F16C; rows are as [`check_rows`] says.
#[inline(always)]
unsafe fn weigh_of<S: Stored, const G: usize, const W: usize>(
    values: &[u8],
    shares: &[f32],
    head_dim: usize,
    out: &mut [f32],
) {
    const { assert!(VECTORS.is_multiple_of(W), "a group is cut evenly") };
    let mut d = 0;
    while d + W * LANES <= head_dim {
        // SAFETY: the caller's guarantee.
        unsafe { weigh_columns::<S, G, W>(values, shares, head_dim, out, d) };
        d += W * LANES;
    }
    while d + LANES <= head_dim {
        // SAFETY: the caller's guarantee.
        unsafe { weigh_columns::<S, G, 1>(values, shares, head_dim, out, d) };
        d += LANES;
    }
    let count = values.len() / S::row_bytes(head_dim);
    for (out, shares) in out.chunks_exact_mut(head_dim).zip(shares.chunks_exact(count)) {
        // Only f16 rows have a rest.
        for (d, out) in out.iter_mut().enumerate().skip(d) {
            *out = 0.0;
            for (i, share) in shares.iter().enumerate() {
                // SAFETY: the CPU has the feature.
                *out = share.mul_add(unsafe { half_at(values, i * head_dim + d) }, *out);
            }
        }
    }
}

/// W vectors of the results from dimension d on, all of one group.
///
/// # Safety
/// As for [`weigh_of`].
#[inline(always)]
unsafe fn weigh_columns<S: Stored, const G: usize, const W: usize>(
    values: &[u8],
    shares: &[f32],
    head_dim: usize,
    out: &mut [f32],
    d: usize,
) {
    let row_bytes = S::row_bytes(head_dim);
    let count = values.len() / row_bytes;
    let (shares, out) = (&shares[..G * count], &mut out[..G * head_dim]);
    assert!(d + W * LANES <= head_dim, "columns end behind the row");
    // SAFETY: the CPU has the features; i < count, and d + W * LANES <= head_dim; there are G rows of shares and results.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); W]; G];
        for i in 0..count {
            let row = values.as_ptr().add(i * row_bytes);
            let scale = S::scale(row, head_dim, d);
            for w in 0..W {
                let value = S::vector(row, d + w * LANES, scale);
                for (g, sums) in sums.iter_mut().enumerate() {
                    let share = _mm256_broadcast_ss(shares.get_unchecked(g * count + i));
                    sums[w] = _mm256_fmadd_ps(share, value, sums[w]);
                }
            }
        }
        for (g, sums) in sums.into_iter().enumerate() {
            for (w, sum) in sums.into_iter().enumerate() {
                _mm256_storeu_ps(out.as_mut_ptr().add(g * head_dim + d + w * LANES), sum);
            }
        }
    }
}
