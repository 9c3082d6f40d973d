//! Low-bit rows, 16 weights at a time.

use super::quantised::{Dotprod, Multiply, Widening};
use super::{LANES, load, load_halves, prefetch_rows, store, sum_lanes};
use crate::simd::Activations;
use crate::simd::low_bit::{
    BLOCK, GROUP, LowBitOps, RowKernels, group_bytes, low_bit_ops, row_bytes,
};
use crate::simd::quantise::{BLOCK_GROUPS, block_count};
use ls_bundle::low_bit::{Codebook, UNIT};
use std::arch::aarch64::*;

pub(super) const WIDENING: LowBitOps = low_bit_ops::<Widening>();
pub(super) const DOTPROD: LowBitOps = low_bit_ops::<Dotprod>();

/// Weights of a vector.
const QUARTER: usize = GROUP / 4;

impl RowKernels for Widening {
    unsafe fn dot<const BITS: usize, const R: usize>(
        rows: [&[u8]; R],
        codebook: &Codebook,
        x: Activations<'_>,
        out: &mut [f32; R],
        ahead: usize,
    ) {
        // SAFETY: the caller's guarantee.
        unsafe { dot_widening::<BITS, R>(rows, codebook, x, out, ahead) }
    }

    unsafe fn axpy<const BITS: usize, const R: usize>(
        rows: [&[u8]; R],
        codebook: &Codebook,
        weights: &[f32; R],
        acc: &mut [f32],
        ahead: usize,
    ) {
        // SAFETY: the caller's guarantee.
        unsafe { axpy_rows::<BITS, R>(rows, codebook, weights, acc, ahead) }
    }
}

impl RowKernels for Dotprod {
    unsafe fn dot<const BITS: usize, const R: usize>(
        rows: [&[u8]; R],
        codebook: &Codebook,
        x: Activations<'_>,
        out: &mut [f32; R],
        ahead: usize,
    ) {
        // SAFETY: the caller's guarantee.
        unsafe { dot_dotprod::<BITS, R>(rows, codebook, x, out, ahead) }
    }

    unsafe fn axpy<const BITS: usize, const R: usize>(
        rows: [&[u8]; R],
        codebook: &Codebook,
        weights: &[f32; R],
        acc: &mut [f32],
        ahead: usize,
    ) {
        // SAFETY: the caller's guarantee.
        unsafe { axpy_rows::<BITS, R>(rows, codebook, weights, acc, ahead) }
    }
}

#[target_feature(enable = "neon")]
fn dot_widening<const BITS: usize, const R: usize>(
    rows: [&[u8]; R],
    codebook: &Codebook,
    x: Activations<'_>,
    out: &mut [f32; R],
    ahead: usize,
) {
    // SAFETY: the CPU has NEON, see `available`.
    unsafe { dot_rows::<Widening, BITS, R>(rows, codebook, x, out, ahead) }
}

#[target_feature(enable = "neon,dotprod")]
fn dot_dotprod<const BITS: usize, const R: usize>(
    rows: [&[u8]; R],
    codebook: &Codebook,
    x: Activations<'_>,
    out: &mut [f32; R],
    ahead: usize,
) {
    // SAFETY: the CPU has the extension, see `dotprod`.
    unsafe { dot_rows::<Dotprod, BITS, R>(rows, codebook, x, out, ahead) }
}

/// The values of a group's weights in order.
///
/// # Safety
/// `group` holds 8 * BITS bytes, and the CPU has NEON.
#[inline(always)]
unsafe fn values<const BITS: usize>(group: *const u8, table: int8x16_t) -> [int8x16_t; 4] {
    // SAFETY: the caller's guarantee.
    unsafe {
        let codes = match BITS {
            1 => plane(group).map(|bits| vandq_u8(bits, vdupq_n_u8(1))),
            2 => pairs(group),
            3 => {
                let (low, high) = (pairs(group), plane(group.add(16)));
                let four = vdupq_n_u8(4);
                std::array::from_fn(|i| vorrq_u8(low[i], vandq_u8(high[i], four)))
            }
            _ => {
                let bytes = [vld1q_u8(group), vld1q_u8(group.add(16))];
                let low = bytes.map(|bytes| vandq_u8(bytes, vdupq_n_u8(15)));
                let high = bytes.map(|bytes| vshrq_n_u8::<4>(bytes));
                [low[0], low[1], high[0], high[1]]
            }
        };
        codes.map(|codes| vqtbl1q_s8(table, codes))
    }
}

/// 64 times two bits.
///
/// # Safety
/// `bytes` are 16, and the CPU has NEON.
#[inline(always)]
unsafe fn pairs(bytes: *const u8) -> [uint8x16_t; 4] {
    // SAFETY: the caller's guarantee.
    unsafe {
        let bytes = vld1q_u8(bytes);
        let three = vdupq_n_u8(3);
        [
            vandq_u8(bytes, three),
            vandq_u8(vshrq_n_u8::<2>(bytes), three),
            vandq_u8(vshrq_n_u8::<4>(bytes), three),
            vshrq_n_u8::<6>(bytes),
        ]
    }
}

/// 64 times one bit: all bits of a byte are it.
///
/// # Safety
/// `bytes` are 8, and the CPU has NEON.
#[inline(always)]
unsafe fn plane(bytes: *const u8) -> [uint8x16_t; 4] {
    const BIT: [u8; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
    // SAFETY: the caller's guarantee; BIT has 8 bytes.
    unsafe {
        let bit = vld1_u8(BIT.as_ptr());
        let bit = vcombine_u8(bit, bit);
        std::array::from_fn(|i| {
            let low = vld1_dup_u8(bytes.add(2 * i));
            let high = vld1_dup_u8(bytes.add(2 * i + 1));
            vtstq_u8(vcombine_u8(low, high), bit)
        })
    }
}

/// The values of a codebook, zeros behind them.
#[inline]
#[target_feature(enable = "neon")]
fn table(codebook: &Codebook) -> int8x16_t {
    let mut values = [0i8; 16];
    values[..codebook.values().len()].copy_from_slice(codebook.values());
    // SAFETY: 16 bytes.
    unsafe { vld1q_s8(values.as_ptr()) }
}

/// The scales of groups `first .. first + count` of a row, zeros behind them; count is 1 to BLOCK.
#[inline]
#[target_feature(enable = "neon")]
fn scales<const BITS: usize>(
    row: &[u8],
    (groups, first, count): (usize, usize, usize),
) -> [f32; BLOCK] {
    let scales = &row[groups * group_bytes(BITS) + 2 * first..][..2 * count];
    let mut all = [0; 2 * BLOCK];
    let halves = scales.first_chunk().unwrap_or_else(|| {
        all[..scales.len()].copy_from_slice(scales);
        &all
    });
    // SAFETY: 16 bytes.
    let vectors = unsafe { load_halves(halves.as_ptr()) };
    let mut out = [0.0; BLOCK];
    for (out, vector) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(vectors) {
        *out = store(vector);
    }
    out
}

/// Asks for what lies `ahead` bytes behind a block of groups, codes and scales.
#[inline(always)]
fn prefetch_block<const BITS: usize, const R: usize>(
    rows: [&[u8]; R],
    groups: usize,
    first: usize,
    ahead: usize,
) {
    // BLOCK groups are BITS lines.
    for line in 0..BITS {
        prefetch_rows(rows, first * group_bytes(BITS) + 64 * line + ahead);
    }
    if first.is_multiple_of(4 * BLOCK) {
        prefetch_rows(rows, groups * group_bytes(BITS) + 2 * first + ahead);
    }
}

/// # Safety
/// The CPU has NEON and what M needs. For speed the caller has these features enabled.
#[inline(always)]
unsafe fn dot_rows<M: Multiply, const BITS: usize, const R: usize>(
    rows: [&[u8]; R],
    codebook: &Codebook,
    x: Activations<'_>,
    out: &mut [f32; R],
    ahead: usize,
) {
    let groups = x.floats.len() / GROUP;
    let rows = rows.map(|row| &row[..row_bytes(BITS, groups)]);
    let blocks = &x.quants[..block_count(x.floats.len())];
    // SAFETY: the CPU has the features. Group first + g is one of the rows'; a group of activations is 32 bytes.
    unsafe {
        let table = table(codebook);
        let mut sums = [[vdupq_n_f32(0.0); 4]; R];
        for first in (0..groups).step_by(BLOCK) {
            let count = BLOCK.min(groups - first);
            prefetch_block::<BITS, R>(rows, groups, first, ahead);
            let factors = rows.map(|row| scales::<BITS>(row, (groups, first, count)));
            for g in 0..count {
                let at = 2 * (first + g);
                let (block, at) = (&blocks[at / BLOCK_GROUPS], at % BLOCK_GROUPS);
                let quants = block.quants[at..at + 2].as_ptr().cast::<i8>();
                let quants = [0, 1, 2, 3].map(|i| vld1q_s8(quants.add(i * QUARTER)));
                let scales = [block.scales[at], block.scales[at + 1]];
                for r in 0..R {
                    let group = rows[r].as_ptr().add((first + g) * group_bytes(BITS));
                    let values = values::<BITS>(group, table);
                    let factors = scales.map(|scale| factors[r][g] * scale);
                    for i in [0, 1, 2, 3] {
                        let parts = vcvtq_f32_s32(M::parts(values[i], quants[i]));
                        sums[r][i] = vfmaq_n_f32(sums[r][i], parts, factors[i / 2]);
                    }
                }
            }
        }
        for (out, [a, b, c, d]) in out.iter_mut().zip(sums) {
            *out = sum_lanes(vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d))) / UNIT;
        }
    }
}

#[target_feature(enable = "neon")]
fn axpy_rows<const BITS: usize, const R: usize>(
    rows: [&[u8]; R],
    codebook: &Codebook,
    weights: &[f32; R],
    acc: &mut [f32],
    ahead: usize,
) {
    let groups = acc.len() / GROUP;
    let rows = rows.map(|row| &row[..row_bytes(BITS, groups)]);
    let weights = weights.map(|weight| weight / UNIT);
    let table = table(codebook);
    for first in (0..groups).step_by(BLOCK) {
        let count = BLOCK.min(groups - first);
        prefetch_block::<BITS, R>(rows, groups, first, ahead);
        let mut factors = rows.map(|row| scales::<BITS>(row, (groups, first, count)));
        for (factors, weight) in factors.iter_mut().zip(weights) {
            factors.iter_mut().for_each(|scale| *scale *= weight);
        }
        for g in 0..count {
            // Vector 4 i + quarter holds weights 16 quarter + 4 n + i.
            let (sums, _) = acc[(first + g) * GROUP..][..GROUP].as_chunks_mut::<LANES>();
            let mut vectors: [float32x4_t; GROUP / LANES] = std::array::from_fn(|i| load(&sums[i]));
            for r in 0..R {
                let group = rows[r][(first + g) * group_bytes(BITS)..].as_ptr();
                // SAFETY: group first + g is one of the rows'; the CPU has NEON.
                let values = unsafe { values::<BITS>(group, table) };
                for (quarter, values) in values.into_iter().enumerate() {
                    let values = vreinterpretq_s32_s8(values);
                    let floats = [
                        vshlq_n_s32::<24>(values),
                        vshlq_n_s32::<16>(values),
                        vshlq_n_s32::<8>(values),
                        values,
                    ]
                    .map(|values| vcvtq_f32_s32(vshrq_n_s32::<24>(values)));
                    for (i, floats) in floats.into_iter().enumerate() {
                        let vector = &mut vectors[4 * i + quarter];
                        *vector = vfmaq_n_f32(*vector, floats, factors[r][g]);
                    }
                }
            }
            for (sums, vector) in sums.iter_mut().zip(vectors) {
                *sums = store(vector);
            }
        }
    }
}
