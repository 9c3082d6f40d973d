//! NEON: four f32 at a time; and the dot-product extension (Armv8.2) for quantised and low-bit rows.
//!
//! Safe functions of the tables call functions with `target_feature`; a table is only reachable through [`available`]
//! or [`dotprod`], which have asked the CPU. Halves become floats with the base instructions: no other extension is
//! needed, and half-precision arithmetic would lose digits.

mod attention;
mod low_bit;
mod math;
mod quantised;

use super::{Activations, Ops, PANEL, RowOps, Tile, scalar};
use quantised::{Dotprod, Widening};
use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

const OPS: Ops = Ops {
    name: "neon",
    f16: RowOps { dot: dot_f16, axpy: axpy_f16, pack_rows: pack_rows_f16, unpack: unpack_f16 },
    q8_0: quantised::q8_0::<Widening>(),
    q4_0: quantised::q4_0::<Widening>(),
    low_bit: low_bit::WIDENING,
    quantise: quantised::quantise,
    gemm,
    kv_f16: attention::KV_F16,
    kv_q8_0: attention::KV_Q8_0,
    inverse_rms: math::inverse_rms,
    swiglu: math::swiglu,
    exp_sum: math::exp_sum,
    max: math::max,
};

/// The table, if this CPU has what it needs.
pub(super) fn available() -> Option<&'static Ops> {
    static TABLE: Ops = OPS;
    is_aarch64_feature_detected!("neon").then_some(&TABLE)
}

/// The table with the dot-product extension, if this CPU has it.
pub(super) fn dotprod() -> Option<&'static Ops> {
    static TABLE: Ops = Ops {
        name: "dotprod",
        q8_0: quantised::q8_0::<Dotprod>(),
        q4_0: quantised::q4_0::<Dotprod>(),
        low_bit: low_bit::DOTPROD,
        ..OPS
    };
    (available().is_some() && is_aarch64_feature_detected!("dotprod")).then_some(&TABLE)
}

/// f32 of a vector.
const LANES: usize = 4;
/// Halves that one load brings.
const HALVES: usize = 2 * LANES;

fn dot_f16(rows: &[&[u8]], x: Activations<'_>, out: &mut [f32], ahead: usize) {
    by_row_count!(dot_rows, rows, x.floats, out, ahead);
}

fn axpy_f16(rows: &[&[u8]], weights: &[f32], acc: &mut [f32], ahead: usize) {
    by_row_count!(axpy_rows, rows, weights, acc, ahead);
}

/// Asks for the cache lines `offset` bytes behind the starts of some rows, into the second-level cache.
#[inline(always)]
fn prefetch_rows<const R: usize>(rows: [&[u8]; R], offset: usize) {
    for row in rows {
        let address = row.as_ptr().wrapping_add(offset);
        // SAFETY: a prefetch reads nothing that a program can see, and never faults, whatever the address.
        unsafe {
            asm!("prfm pldl2keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
        }
    }
}

/// Eight half-precision numbers.
///
/// # Safety
/// `bytes` are 16.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load_halves(bytes: *const u8) -> [float32x4_t; 2] {
    // SAFETY: 16 bytes, any alignment.
    let halves = vreinterpretq_f16_u8(unsafe { vld1q_u8(bytes) });
    [vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)]
}

/// The half-precision number `index` of `bytes`.
#[inline]
#[target_feature(enable = "neon")]
fn half_at(bytes: &[u8], index: usize) -> f32 {
    let bits = u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]);
    vgetq_lane_f32::<0>(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))))
}

#[inline]
#[target_feature(enable = "neon")]
fn load(x: &[f32; LANES]) -> float32x4_t {
    // SAFETY: LANES elements, any alignment.
    unsafe { vld1q_f32(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(v: float32x4_t) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    // SAFETY: LANES elements, any alignment.
    unsafe { vst1q_f32(out.as_mut_ptr(), v) };
    out
}

/// The sum of the lanes, halves first.
#[inline]
#[target_feature(enable = "neon")]
fn sum_lanes(v: float32x4_t) -> f32 {
    vpadds_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v)))
}

/// Element k of a row goes to lane k % 4 of sum k / 4 % 4; the rest of a row is padded with zeros.
#[target_feature(enable = "neon")]
fn dot_rows<const R: usize>(rows: [&&[u8]; R], x: &[f32], out: &mut [f32], ahead: usize) {
    const STEP: usize = 4 * LANES;
    let rows = rows.map(|row| &row[..2 * x.len()]);
    let out = &mut out[..R];
    let mut sums = [[vdupq_n_f32(0.0); 4]; R];
    let (steps, x_tail) = x.as_chunks::<STEP>();
    for (k, x) in (0..).step_by(STEP).zip(steps) {
        // Every other step: a line holds two steps of a row.
        if k % (2 * STEP) == 0 {
            prefetch_rows(rows, 2 * k + ahead);
        }
        for r in 0..R {
            // SAFETY: k + STEP <= x.len(), and each row holds 2 * x.len() bytes.
            unsafe { add_products(rows[r].as_ptr().add(2 * k), x, &mut sums[r]) };
        }
    }
    if !x_tail.is_empty() {
        let mut x = [0f32; STEP];
        x[..x_tail.len()].copy_from_slice(x_tail);
        for r in 0..R {
            let mut row = [0u8; 2 * STEP];
            row[..2 * x_tail.len()].copy_from_slice(&rows[r][2 * steps.len() * STEP..]);
            // SAFETY: a step.
            unsafe { add_products(row.as_ptr(), &x, &mut sums[r]) };
        }
    }
    for (out, [a, b, c, d]) in out.iter_mut().zip(sums) {
        *out = sum_lanes(vaddq_f32(vaddq_f32(a, b), vaddq_f32(c, d)));
    }
}

/// # Safety
/// `row` holds 16 halves.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn add_products(row: *const u8, x: &[f32; 4 * LANES], sums: &mut [float32x4_t; 4]) {
    let x = x.as_chunks::<LANES>().0;
    // SAFETY: two times eight halves.
    let ([a, b], [c, d]) = unsafe { (load_halves(row), load_halves(row.add(2 * HALVES))) };
    for ((sum, w), x) in sums.iter_mut().zip([a, b, c, d]).zip(x) {
        *sum = vfmaq_f32(*sum, w, load(x));
    }
}

#[target_feature(enable = "neon")]
fn axpy_rows<const R: usize>(rows: [&&[u8]; R], weights: &[f32], acc: &mut [f32], ahead: usize) {
    let rows = rows.map(|row| &row[..2 * acc.len()]);
    let weights = &weights[..R];
    let (vectors, tail) = acc.as_chunks_mut::<HALVES>();
    let whole = vectors.len() * HALVES;
    for (k, acc) in (0..).step_by(HALVES).zip(vectors) {
        if k % (4 * HALVES) == 0 {
            prefetch_rows(rows, 2 * k + ahead);
        }
        let (acc, _) = acc.as_chunks_mut::<LANES>();
        let mut sums = [load(&acc[0]), load(&acc[1])];
        for r in 0..R {
            // SAFETY: k + HALVES <= acc.len(), and each row holds 2 * acc.len() bytes.
            let row = unsafe { load_halves(rows[r].as_ptr().add(2 * k)) };
            for (sum, row) in sums.iter_mut().zip(row) {
                *sum = vfmaq_n_f32(*sum, row, weights[r]);
            }
        }
        (acc[0], acc[1]) = (store(sums[0]), store(sums[1]));
    }
    for (k, acc) in (whole..).zip(tail) {
        for r in 0..R {
            *acc = weights[r].mul_add(half_at(rows[r], k), *acc);
        }
    }
}

fn pack_rows_f16(rows: &[&[u8]], cols: usize, panel: &mut [f32]) {
    match rows.try_into() {
        // SAFETY: the CPU has NEON, see `available`; lengths are checked inside.
        Ok(rows) => unsafe { pack_panel(rows, cols, panel) },
        Err(_) => (scalar::OPS.f16.pack_rows)(rows, cols, panel),
    }
}

#[target_feature(enable = "neon")]
fn pack_panel(rows: &[&[u8]; PANEL], cols: usize, panel: &mut [f32]) {
    let rows = rows.map(|row| &row[..2 * cols]);
    let panel = &mut panel[..cols * PANEL];
    let whole = cols / HALVES * HALVES;
    for k in (0..whole).step_by(HALVES) {
        for (quarter, rows) in rows.as_chunks::<LANES>().0.iter().enumerate() {
            // SAFETY: k + HALVES <= cols, and each row holds 2 * cols bytes.
            let block = rows.map(|row| unsafe { load_halves(row.as_ptr().add(2 * k)) });
            for half in 0..2 {
                let columns = transpose(block.map(|row| row[half]));
                put_columns(columns, panel, k + half * LANES, quarter);
            }
        }
    }
    for k in whole..cols {
        for r in 0..PANEL {
            panel[k * PANEL + r] = half_at(rows[r], k);
        }
    }
}

/// Weights `k ..` of four rows, those at `quarter` of the panel.
#[inline]
#[target_feature(enable = "neon")]
fn put_columns(columns: [float32x4_t; LANES], panel: &mut [f32], k: usize, quarter: usize) {
    for (i, column) in columns.into_iter().enumerate() {
        panel[(k + i) * PANEL + quarter * LANES..][..LANES].copy_from_slice(&store(column));
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn transpose([a, b, c, d]: [float32x4_t; LANES]) -> [float32x4_t; LANES] {
    let pairs = |even, odd| {
        let (even, odd) = (vreinterpretq_f64_f32(even), vreinterpretq_f64_f32(odd));
        let join = |v| vreinterpretq_f32_f64(v);
        (join(vtrn1q_f64(even, odd)), join(vtrn2q_f64(even, odd)))
    };
    let (first, third) = pairs(vtrn1q_f32(a, b), vtrn1q_f32(c, d));
    let (second, fourth) = pairs(vtrn2q_f32(a, b), vtrn2q_f32(c, d));
    [first, second, third, fourth]
}

fn unpack_f16(row: &[u8], _cols: usize, first: usize, out: &mut [f32]) {
    // SAFETY: the CPU has NEON, see `available`; lengths are checked inside.
    unsafe { unpack_halves(&row[2 * first..], out) }
}

#[target_feature(enable = "neon")]
fn unpack_halves(row: &[u8], out: &mut [f32]) {
    let row = &row[..2 * out.len()];
    let (vectors, tail) = out.as_chunks_mut::<HALVES>();
    let (halves, halves_tail) = row.as_chunks::<{ 2 * HALVES }>();
    for (out, halves) in vectors.iter_mut().zip(halves) {
        // SAFETY: the chunk is 16 bytes.
        let [low, high] = unsafe { load_halves(halves.as_ptr()) };
        let (out, _) = out.as_chunks_mut::<LANES>();
        (out[0], out[1]) = (store(low), store(high));
    }
    for (k, out) in tail.iter_mut().enumerate() {
        *out = half_at(halves_tail, k);
    }
}

/// Rows of a that the inner kernel computes at once: 4 * 6 sums, 4 vectors of b and one of a fill 29 of 32 registers.
const TILE_ROWS: usize = 6;
/// Vectors of a row of c.
const WIDE: usize = PANEL / LANES;

/// # Safety
/// See [`Ops::gemm`].
unsafe fn gemm(tile: &Tile) {
    let mut first = 0;
    while first < tile.m {
        let rows = TILE_ROWS.min(tile.m - first);
        // SAFETY: the caller's guarantee for rows first .. first + rows; the CPU has NEON, see `available`.
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
#[target_feature(enable = "neon")]
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
    let mut sums = [[vdupq_n_f32(0.0); WIDE]; R];
    if tile.accumulate {
        for (r, sums) in sums.iter_mut().enumerate() {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: PANEL elements of row r of the output are readable: n == PANEL, or they are `wide`'s.
                *sum = unsafe { vld1q_f32(out.add(r * stride + i * LANES)) };
            }
        }
    }
    let mut b = tile.b;
    for p in 0..tile.k {
        let mut row = [vdupq_n_f32(0.0); WIDE];
        for (i, row) in row.iter_mut().enumerate() {
            // SAFETY: p < k: PANEL elements at row p of b are readable.
            *row = unsafe { vld1q_f32(b.add(i * LANES)) };
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: p < k: element p of R rows of a is readable.
            let a = unsafe { vld1q_dup_f32(a.add(r * tile.a_stride + p)) };
            for (sum, b) in sums.iter_mut().zip(row) {
                *sum = vfmaq_f32(*sum, a, b);
            }
        }
        // What b ends with is not used.
        b = b.wrapping_add(tile.b_stride);
    }
    for (r, sums) in sums.iter().enumerate() {
        for (i, &sum) in sums.iter().enumerate() {
            // SAFETY: as for the loads above; nobody else touches them.
            unsafe { vst1q_f32(out.add(r * stride + i * LANES), sum) };
        }
    }
    if narrow {
        for (r, wide) in wide.iter().enumerate() {
            // SAFETY: n elements of row first + r of c, which nobody else touches.
            unsafe { c.add(r * tile.c_stride).copy_from(wide.as_ptr(), tile.n) };
        }
    }
}
