//! AVX2 with FMA and F16C: eight f32 at a time.
//!
//! Safe functions of the table call functions with `target_feature`; the table is only reachable through
//! [`available`], which has asked the CPU.

mod attention;
mod low_bit;
mod quantised;
pub(super) use attention::KV_Q8_0_AVX512;
pub(super) use low_bit::LOW_BIT;
pub(super) use quantised::{GroupDot, Q4_0, Q8_0, Quants, dot_groups, nibbles, weighted_scales};

use super::{Activations, Ops, PANEL, RowOps, Tile, scalar};
use std::arch::x86_64::*;

pub(super) const OPS: Ops = Ops {
    name: "avx2",
    f16: RowOps { dot: dot_f16, axpy: axpy_f16, pack_rows: pack_rows_f16, unpack: unpack_f16 },
    q8_0: quantised::Q8_0_ROWS,
    q4_0: quantised::Q4_0_ROWS,
    low_bit: LOW_BIT,
    quantise: quantised::quantise,
    gemm,
    kv_f16: attention::KV_F16,
    kv_q8_0: attention::KV_Q8_0,
    inverse_rms,
    swiglu,
    exp_sum,
    max,
};

/// The table, if this CPU has what it needs.
pub(super) fn available() -> Option<&'static Ops> {
    static TABLE: Ops = OPS;
    let has = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    has.then_some(&TABLE)
}

/// f32 of a vector.
const LANES: usize = 8;
fn dot_f16(rows: &[&[u8]], x: Activations<'_>, out: &mut [f32], ahead: usize) {
    by_row_count!(dot_rows, rows, x.floats, out, ahead);
}

fn axpy_f16(rows: &[&[u8]], weights: &[f32], acc: &mut [f32], ahead: usize) {
    by_row_count!(axpy_rows, rows, weights, acc, ahead);
}

/// Asks for the cache line of `address`, which may be any. Into the second-level cache: the first has too few miss
/// buffers to keep memory busy, which halves the speed of one thread.
#[inline(always)]
fn prefetch(address: *const u8) {
    // SAFETY: a prefetch reads nothing that a program can see, and never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
}

/// Asks for the cache lines `offset` bytes behind the starts of some rows.
#[inline(always)]
pub(super) fn prefetch_rows<const R: usize>(rows: [&[u8]; R], offset: usize) {
    for row in rows {
        prefetch(row.as_ptr().wrapping_add(offset));
    }
}

/// Element k of a row goes to lane k % 8 of sum k / 8 % 2; the rest of a row is padded with zeros.
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_rows<const R: usize>(rows: [&&[u8]; R], x: &[f32], out: &mut [f32], ahead: usize) {
    const STEP: usize = 2 * LANES;
    let whole = x.len() / STEP * STEP;
    let rows = rows.map(|row| &row[..2 * x.len()]);
    let out = &mut out[..R];
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for k in (0..whole).step_by(STEP) {
        // Every other step: a line holds two steps of a row.
        if k % (2 * STEP) == 0 {
            prefetch_rows(rows, 2 * k + ahead);
        }
        // SAFETY: k + STEP <= x.len(), and each row holds 2 * x.len() bytes.
        unsafe {
            let x0 = _mm256_loadu_ps(x.as_ptr().add(k));
            let x1 = _mm256_loadu_ps(x.as_ptr().add(k + LANES));
            for r in 0..R {
                let row = rows[r].as_ptr().add(2 * k);
                let w0 = _mm256_cvtph_ps(_mm_loadu_si128(row.cast()));
                let w1 = _mm256_cvtph_ps(_mm_loadu_si128(row.add(2 * LANES).cast()));
                sums[r][0] = _mm256_fmadd_ps(w0, x0, sums[r][0]);
                sums[r][1] = _mm256_fmadd_ps(w1, x1, sums[r][1]);
            }
        }
    }
    if whole < x.len() {
        let mut x_tail = [0f32; STEP];
        x_tail[..x.len() - whole].copy_from_slice(&x[whole..]);
        for r in 0..R {
            let mut row_tail = [0u8; 2 * STEP];
            row_tail[..2 * (x.len() - whole)].copy_from_slice(&rows[r][2 * whole..]);
            for (half, sum) in sums[r].iter_mut().enumerate() {
                // SAFETY: both arrays hold STEP elements.
                unsafe {
                    let x = _mm256_loadu_ps(x_tail.as_ptr().add(half * LANES));
                    let bytes = row_tail.as_ptr().add(2 * half * LANES);
                    let w = _mm256_cvtph_ps(_mm_loadu_si128(bytes.cast()));
                    *sum = _mm256_fmadd_ps(w, x, *sum);
                }
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        *out = sum_lanes(_mm256_add_ps(sums[0], sums[1]));
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn axpy_rows<const R: usize>(rows: [&&[u8]; R], weights: &[f32], acc: &mut [f32], ahead: usize) {
    let rows = rows.map(|row| &row[..2 * acc.len()]);
    let weights = &weights[..R];
    let whole = acc.len() / LANES * LANES;
    for k in (0..whole).step_by(LANES) {
        if k % (4 * LANES) == 0 {
            prefetch_rows(rows, 2 * k + ahead);
        }
        // SAFETY: k + LANES <= acc.len(), and each row holds 2 * acc.len() bytes.
        unsafe {
            let mut sum = _mm256_loadu_ps(acc.as_ptr().add(k));
            for r in 0..R {
                let row = _mm256_cvtph_ps(_mm_loadu_si128(rows[r].as_ptr().add(2 * k).cast()));
                sum = _mm256_fmadd_ps(_mm256_set1_ps(weights[r]), row, sum);
            }
            _mm256_storeu_ps(acc.as_mut_ptr().add(k), sum);
        }
    }
    for (k, acc) in acc.iter_mut().enumerate().skip(whole) {
        for r in 0..R {
            *acc = weights[r].mul_add(half_at(rows[r], k), *acc);
        }
    }
}

/// The half-precision number `index` of `bytes`.
#[inline]
#[target_feature(enable = "f16c")]
fn half_at(bytes: &[u8], index: usize) -> f32 {
    let bits = u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]);
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
}

fn pack_rows_f16(rows: &[&[u8]], cols: usize, panel: &mut [f32]) {
    match rows.try_into() {
        // SAFETY: the CPU has the features, see `available`; lengths are checked inside.
        Ok(rows) => unsafe { pack_panel(rows, cols, panel) },
        Err(_) => (scalar::OPS.f16.pack_rows)(rows, cols, panel),
    }
}

#[target_feature(enable = "avx2,f16c")]
fn pack_panel(rows: &[&[u8]; PANEL], cols: usize, panel: &mut [f32]) {
    let rows = rows.map(|row| &row[..2 * cols]);
    let panel = &mut panel[..cols * PANEL];
    let whole = cols / LANES * LANES;
    for k in (0..whole).step_by(LANES) {
        for half in 0..2 {
            let mut block = [_mm256_setzero_ps(); LANES];
            for (r, block) in block.iter_mut().enumerate() {
                // SAFETY: k + LANES <= cols, and each row holds 2 * cols bytes.
                *block = unsafe {
                    let bytes = rows[half * LANES + r].as_ptr().add(2 * k);
                    _mm256_cvtph_ps(_mm_loadu_si128(bytes.cast()))
                };
            }
            for (i, column) in transpose(block).into_iter().enumerate() {
                // SAFETY: (k + i) * PANEL + half * LANES + LANES <= cols * PANEL.
                unsafe {
                    let out = panel.as_mut_ptr().add((k + i) * PANEL + half * LANES);
                    _mm256_storeu_ps(out, column);
                }
            }
        }
    }
    for k in whole..cols {
        for r in 0..PANEL {
            panel[k * PANEL + r] = half_at(rows[r], k);
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn transpose(rows: [__m256; 8]) -> [__m256; 8] {
    let [a, b, c, d, e, f, g, h] = rows;
    let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    let (ef_low, ef_high) = (_mm256_unpacklo_ps(e, f), _mm256_unpackhi_ps(e, f));
    let (gh_low, gh_high) = (_mm256_unpacklo_ps(g, h), _mm256_unpackhi_ps(g, h));
    // Columns 0..4 of rows a-d and e-h; columns 4..8 are in the upper halves.
    let upper = [
        _mm256_shuffle_ps::<0x44>(ab_low, cd_low),
        _mm256_shuffle_ps::<0xee>(ab_low, cd_low),
        _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
        _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
    ];
    let lower = [
        _mm256_shuffle_ps::<0x44>(ef_low, gh_low),
        _mm256_shuffle_ps::<0xee>(ef_low, gh_low),
        _mm256_shuffle_ps::<0x44>(ef_high, gh_high),
        _mm256_shuffle_ps::<0xee>(ef_high, gh_high),
    ];
    [
        _mm256_permute2f128_ps::<0x20>(upper[0], lower[0]),
        _mm256_permute2f128_ps::<0x20>(upper[1], lower[1]),
        _mm256_permute2f128_ps::<0x20>(upper[2], lower[2]),
        _mm256_permute2f128_ps::<0x20>(upper[3], lower[3]),
        _mm256_permute2f128_ps::<0x31>(upper[0], lower[0]),
        _mm256_permute2f128_ps::<0x31>(upper[1], lower[1]),
        _mm256_permute2f128_ps::<0x31>(upper[2], lower[2]),
        _mm256_permute2f128_ps::<0x31>(upper[3], lower[3]),
    ]
}

fn unpack_f16(row: &[u8], _cols: usize, first: usize, out: &mut [f32]) {
    // SAFETY: the CPU has the features, see `available`; lengths are checked inside.
    unsafe { unpack_halves(&row[2 * first..], out) }
}

#[target_feature(enable = "avx2,f16c")]
fn unpack_halves(row: &[u8], out: &mut [f32]) {
    let row = &row[..2 * out.len()];
    let whole = out.len() / LANES * LANES;
    for k in (0..whole).step_by(LANES) {
        // SAFETY: k + LANES <= out.len(), and the row holds 2 * out.len() bytes.
        unsafe {
            let weights = _mm256_cvtph_ps(_mm_loadu_si128(row.as_ptr().add(2 * k).cast()));
            _mm256_storeu_ps(out.as_mut_ptr().add(k), weights);
        }
    }
    for (k, out) in out.iter_mut().enumerate().skip(whole) {
        *out = half_at(row, k);
    }
}

/// Rows of a that the inner kernel computes at once: 2 * 6 sums, 2 vectors of b and one of a fill 15 registers.
const TILE_ROWS: usize = 6;

/// # Safety
/// See [`Ops::gemm`].
unsafe fn gemm(tile: &Tile) {
    let mut first = 0;
    while first < tile.m {
        let rows = TILE_ROWS.min(tile.m - first);
        // SAFETY: the caller's guarantee for rows first .. first + rows; the CPU has the features, see `available`.
        unsafe {
            match rows {
                1 => gemm_rows::<1>(tile, first),
                2 => gemm_rows::<2>(tile, first),
                3 => gemm_rows::<3>(tile, first),
                4 => gemm_rows::<4>(tile, first),
                5 => gemm_rows::<5>(tile, first),
                _ => gemm_rows::<TILE_ROWS>(tile, first),
            }
        }
        first += rows;
    }
}

/// Rows `first .. first + R` of the tile.
///
/// # Safety
/// See [`Ops::gemm`].
#[target_feature(enable = "avx2,fma")]
unsafe fn gemm_rows<const R: usize>(tile: &Tile, first: usize) {
    // A narrow c is computed in a wide copy.
    let mut wide = [[0f32; PANEL]; R];
    let narrow = tile.n < PANEL;
    // SAFETY: row `first` of a and c exists.
    let (a, c) = unsafe { (tile.a.add(first * tile.a_stride), tile.c.add(first * tile.c_stride)) };
    if narrow && tile.accumulate {
        for (r, wide) in wide.iter_mut().enumerate() {
            // SAFETY: n elements of row first + r of c, which nobody else touches.
            unsafe { wide.as_mut_ptr().copy_from(c.add(r * tile.c_stride), tile.n) };
        }
    }
    let (out, stride) = if narrow { (wide.as_mut_ptr().cast(), PANEL) } else { (c, tile.c_stride) };
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    if tile.accumulate {
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: PANEL elements of row r of the output are readable: n == PANEL, or they are `wide`'s.
            unsafe {
                sums[0] = _mm256_loadu_ps(out.add(r * stride));
                sums[1] = _mm256_loadu_ps(out.add(r * stride + LANES));
            }
        }
    }
    let mut b = tile.b;
    for p in 0..tile.k {
        // SAFETY: p < k: PANEL elements at row p of b and element p of R rows of a are readable. The pointer that b
        // ends with is not used.
        unsafe {
            let (b0, b1) = (_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(LANES)));
            for (r, sums) in sums.iter_mut().enumerate() {
                let a = _mm256_broadcast_ss(&*a.add(r * tile.a_stride + p));
                sums[0] = _mm256_fmadd_ps(a, b0, sums[0]);
                sums[1] = _mm256_fmadd_ps(a, b1, sums[1]);
            }
        }
        b = b.wrapping_add(tile.b_stride);
    }
    for (r, sums) in sums.iter().enumerate() {
        // SAFETY: as for the loads above.
        unsafe {
            _mm256_storeu_ps(out.add(r * stride), sums[0]);
            _mm256_storeu_ps(out.add(r * stride + LANES), sums[1]);
        }
    }
    if narrow {
        for (r, wide) in wide.iter().enumerate() {
            // SAFETY: n elements of row first + r of c, which nobody else touches.
            unsafe { c.add(r * tile.c_stride).copy_from(wide.as_ptr(), tile.n) };
        }
    }
}

/// The sum of the lanes, halves first.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn sum_lanes(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

fn inverse_rms(x: &[f32], epsilon: f32) -> f32 {
    // SAFETY: the CPU has the features, see `available`.
    unsafe { inverse_rms_avx2(x, epsilon) }
}

/// Squares are summed in f64: residuals have few, very large elements.
#[target_feature(enable = "avx2,fma")]
fn inverse_rms_avx2(x: &[f32], epsilon: f32) -> f32 {
    let mut sums = [_mm256_setzero_pd(); 2];
    let (vectors, tail) = x.as_chunks::<LANES>();
    for x in vectors {
        let x = load(x);
        let low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
        let high = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(x));
        sums[0] = _mm256_fmadd_pd(low, low, sums[0]);
        sums[1] = _mm256_fmadd_pd(high, high, sums[1]);
    }
    let sum = _mm256_add_pd(sums[0], sums[1]);
    let sum = _mm_add_pd(_mm256_castpd256_pd128(sum), _mm256_extractf128_pd::<1>(sum));
    let tail: f64 = tail.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let squares = _mm_cvtsd_f64(sum) + _mm_cvtsd_f64(_mm_unpackhi_pd(sum, sum)) + tail;
    (1.0 / (squares / x.len() as f64 + f64::from(epsilon)).sqrt()) as f32
}

fn swiglu(gate: &mut [f32], up: &[f32]) {
    // SAFETY: the CPU has the features, see `available`; lengths are checked inside.
    unsafe { swiglu_avx2(gate, up) }
}

#[target_feature(enable = "avx2,fma")]
fn swiglu_avx2(gate: &mut [f32], up: &[f32]) {
    let up = &up[..gate.len()];
    let silu = |gate: __m256, up: __m256| {
        let minus = _mm256_sub_ps(_mm256_setzero_ps(), gate);
        let one_more = _mm256_add_ps(_mm256_set1_ps(1.0), exp(minus));
        _mm256_mul_ps(_mm256_div_ps(gate, one_more), up)
    };
    let (gates, gate_tail) = gate.as_chunks_mut::<LANES>();
    let (ups, up_tail) = up.as_chunks::<LANES>();
    for (gate, up) in gates.iter_mut().zip(ups) {
        *gate = store(silu(load(gate), load(up)));
    }
    let rest = gate_tail.len();
    let (mut gate, mut up) = ([0.0; LANES], [0.0; LANES]);
    gate[..rest].copy_from_slice(gate_tail);
    up[..rest].copy_from_slice(up_tail);
    gate_tail.copy_from_slice(&store(silu(load(&gate), load(&up)))[..rest]);
}

fn exp_sum(x: &mut [f32], max: f32) -> f32 {
    // SAFETY: the CPU has the features, see `available`.
    unsafe { exp_sum_avx2(x, max) }
}

#[target_feature(enable = "avx2,fma")]
fn exp_sum_avx2(x: &mut [f32], max: f32) -> f32 {
    let max = _mm256_set1_ps(max);
    let mut sum = _mm256_setzero_ps();
    let (vectors, tail) = x.as_chunks_mut::<LANES>();
    for x in vectors {
        let shares = exp(_mm256_sub_ps(load(x), max));
        sum = _mm256_add_ps(sum, shares);
        *x = store(shares);
    }
    if !tail.is_empty() {
        // Padded with what exp makes zero of.
        let mut padded = [f32::NEG_INFINITY; LANES];
        padded[..tail.len()].copy_from_slice(tail);
        let shares = exp(_mm256_sub_ps(load(&padded), max));
        sum = _mm256_add_ps(sum, shares);
        tail.copy_from_slice(&store(shares)[..tail.len()]);
    }
    sum_lanes(sum)
}

fn max(x: &[f32]) -> f32 {
    // SAFETY: the CPU has the features, see `available`.
    unsafe { max_avx2(x) }
}

#[target_feature(enable = "avx2")]
fn max_avx2(x: &[f32]) -> f32 {
    let (vectors, tail) = x.as_chunks::<LANES>();
    let mut largest = _mm256_set1_ps(f32::NEG_INFINITY);
    for x in vectors {
        largest = _mm256_max_ps(largest, load(x));
    }
    let largest = store(largest).into_iter().fold(f32::NEG_INFINITY, f32::max);
    tail.iter().copied().fold(largest, f32::max)
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(x: &[f32; LANES]) -> __m256 {
    // SAFETY: LANES elements, any alignment.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(v: __m256) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    // SAFETY: LANES elements, any alignment.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), v) };
    out
}

/// e^x within 2 units of the last place; zero below the normal numbers, infinity above the largest; NaN stays.
///
/// e^x = 2^n * e^r with n = round(x / ln 2), |r| <= ln 2 / 2; e^r by its Taylor series, whose eighth term is below
/// half a unit.
#[target_feature(enable = "avx2,fma")]
fn exp(x: __m256) -> __m256 {
    const LOWEST: f32 = -87.33;
    const HIGHEST: f32 = 88.72;
    // ln 2 in two parts, so that n * LN2_HIGH is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // The second operand comes out where one is NaN.
    let clamped = _mm256_max_ps(_mm256_set1_ps(LOWEST), _mm256_min_ps(_mm256_set1_ps(HIGHEST), x));
    let n = _mm256_mul_ps(clamped, _mm256_set1_ps(std::f32::consts::LOG2_E));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(n);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2_HIGH), clamped);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2_LOW), r);
    let mut sum = _mm256_set1_ps(1.0 / 5040.0);
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(coefficient));
    }
    // 2^n in two factors: n may be 128, which has no exponent of its own.
    let n = _mm256_cvtps_epi32(n);
    let half = _mm256_srai_epi32::<1>(n);
    let power = |n: __m256i| {
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))))
    };
    let sum = _mm256_mul_ps(_mm256_mul_ps(sum, power(half)), power(_mm256_sub_epi32(n, half)));
    let too_low = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(LOWEST));
    let too_high = _mm256_cmp_ps::<_CMP_GT_OQ>(x, _mm256_set1_ps(HIGHEST));
    let sum = _mm256_blendv_ps(sum, _mm256_set1_ps(f32::INFINITY), too_high);
    _mm256_andnot_ps(too_low, sum)
}
