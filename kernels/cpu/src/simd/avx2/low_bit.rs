//! Low-bit rows, a group of 64 weights in two vectors.

use super::{LANES, load, prefetch_rows, store, sum_lanes};
use crate::simd::Activations;
use crate::simd::low_bit::{
    BLOCK, GROUP, LowBitOps, RowKernels, group_bytes, low_bit_ops, row_bytes,
};
use crate::simd::quantise::{BLOCK_GROUPS, block_count};
use ls_bundle::low_bit::{Codebook, UNIT};
use std::arch::x86_64::*;

pub(super) const LOW_BIT: LowBitOps = low_bit_ops::<Avx2>();

/// The CPU needs AVX2, FMA and F16C.
enum Avx2 {}

impl RowKernels for Avx2 {
    unsafe fn dot<const BITS: usize, const R: usize>(
        rows: [&[u8]; R],
        codebook: &Codebook,
        x: Activations<'_>,
        out: &mut [f32; R],
        ahead: usize,
    ) {
        // SAFETY: the caller's guarantee.
        unsafe { dot_rows::<BITS, R>(rows, codebook, x, out, ahead) }
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

/// The codes of half a group in order, a byte each.
///
/// # Safety
/// `group` holds 8 * BITS bytes, and the CPU has AVX2.
#[inline(always)]
unsafe fn codes<const BITS: usize>(group: *const u8, half: usize) -> __m256i {
    // SAFETY: the caller's guarantee; half is 0 or 1.
    unsafe {
        match BITS {
            1 => _mm256_and_si256(plane(group, half), _mm256_set1_epi8(1)),
            2 => pairs(group, half),
            3 => {
                let high = _mm256_and_si256(plane(group.add(16), half), _mm256_set1_epi8(4));
                _mm256_or_si256(pairs(group, half), high)
            }
            _ => {
                let bytes = _mm256_loadu_si256(group.cast());
                let nibbles = if half == 0 { bytes } else { _mm256_srli_epi16::<4>(bytes) };
                _mm256_and_si256(nibbles, _mm256_set1_epi8(15))
            }
        }
    }
}

/// 32 times two bits.
///
/// # Safety
/// `bytes` are 16, and the CPU has AVX2.
#[inline(always)]
unsafe fn pairs(bytes: *const u8, half: usize) -> __m256i {
    // SAFETY: the caller's guarantee.
    unsafe {
        let bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.cast()));
        let shifts = if half == 0 {
            _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2)
        } else {
            _mm256_setr_epi32(4, 4, 4, 4, 6, 6, 6, 6)
        };
        // What comes from a byte's neighbour is masked off.
        _mm256_and_si256(_mm256_srlv_epi32(bytes, shifts), _mm256_set1_epi8(3))
    }
}

/// 32 times one bit: all bits of a byte are it.
///
/// # Safety
/// `bytes` are 8, and the CPU has AVX2.
#[inline(always)]
unsafe fn plane(bytes: *const u8, half: usize) -> __m256i {
    // SAFETY: the caller's guarantee.
    unsafe {
        let bits = _mm256_set1_epi32(bytes.add(4 * half).cast::<i32>().read_unaligned());
        let spread = _mm256_setr_epi64x(
            0,
            0x0101_0101_0101_0101,
            0x0202_0202_0202_0202,
            0x0303_0303_0303_0303,
        );
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
        let own = _mm256_and_si256(_mm256_shuffle_epi8(bits, spread), bit);
        _mm256_cmpeq_epi8(own, bit)
    }
}

/// The scales of groups `first .. first + count` of a row, zeros behind them; count is 1 to BLOCK.
#[inline]
#[target_feature(enable = "avx2,f16c")]
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
    store(_mm256_cvtph_ps(unsafe { _mm_loadu_si128(halves.as_ptr().cast()) }))
}

/// The values of a codebook, zeros behind them, in both halves.
#[inline]
#[target_feature(enable = "avx2")]
fn table(codebook: &Codebook) -> __m256i {
    let mut values = [0i8; 16];
    values[..codebook.values().len()].copy_from_slice(codebook.values());
    // SAFETY: 16 bytes.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(values.as_ptr().cast()) })
}

/// Asks for what lies `ahead` bytes behind a block of groups, codes and scales.
#[inline(always)]
pub(in crate::simd) fn prefetch_block<const BITS: usize, const R: usize>(
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

#[target_feature(enable = "avx2,fma,f16c")]
fn dot_rows<const BITS: usize, const R: usize>(
    rows: [&[u8]; R],
    codebook: &Codebook,
    x: Activations<'_>,
    out: &mut [f32; R],
    ahead: usize,
) {
    let groups = x.floats.len() / GROUP;
    let rows = rows.map(|row| &row[..row_bytes(BITS, groups)]);
    let blocks = &x.quants[..block_count(x.floats.len())];
    let table = table(codebook);
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for first in (0..groups).step_by(BLOCK) {
        let count = BLOCK.min(groups - first);
        prefetch_block::<BITS, R>(rows, groups, first, ahead);
        let factors = rows.map(|row| scales::<BITS>(row, (groups, first, count)));
        for g in 0..count {
            for half in [0, 1] {
                let at = 2 * (first + g) + half;
                let (block, at) = (&blocks[at / BLOCK_GROUPS], at % BLOCK_GROUPS);
                // SAFETY: 32 bytes.
                let x = unsafe { _mm256_loadu_si256(block.quants[at].as_ptr().cast()) };
                for r in 0..R {
                    let group = rows[r][(first + g) * group_bytes(BITS)..].as_ptr();
                    // SAFETY: group first + g is one of the rows'.
                    let codes = unsafe { codes::<BITS>(group, half) };
                    let weights = _mm256_shuffle_epi8(table, codes);
                    // Of the two factors one must be unsigned: |w| * (x with w's sign). 2 * 128 * 127 fits 16 bits.
                    let pairs = _mm256_maddubs_epi16(
                        _mm256_abs_epi8(weights),
                        _mm256_sign_epi8(x, weights),
                    );
                    let parts = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                    let factor = _mm256_set1_ps(factors[r][g] * block.scales[at]);
                    sums[r][half] =
                        _mm256_fmadd_ps(_mm256_cvtepi32_ps(parts), factor, sums[r][half]);
                }
            }
        }
    }
    for (out, [low, high]) in out.iter_mut().zip(sums) {
        *out = sum_lanes(_mm256_add_ps(low, high)) / UNIT;
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
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
    // The low eight values as floats.
    let floats = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm256_castsi256_si128(table)));
    for first in (0..groups).step_by(BLOCK) {
        let count = BLOCK.min(groups - first);
        prefetch_block::<BITS, R>(rows, groups, first, ahead);
        let mut factors = rows.map(|row| scales::<BITS>(row, (groups, first, count)));
        for (factors, weight) in factors.iter_mut().zip(weights) {
            factors.iter_mut().for_each(|scale| *scale *= weight);
        }
        for g in 0..count {
            let (sums, _) = acc[(first + g) * GROUP..][..GROUP].as_chunks_mut::<LANES>();
            for half in [0, 1] {
                // Vector 2 i + half holds weights 32 half + 4 n + i.
                let mut vectors: [__m256; 4] = std::array::from_fn(|i| load(&sums[2 * i + half]));
                for r in 0..R {
                    let group = rows[r][(first + g) * group_bytes(BITS)..].as_ptr();
                    // SAFETY: group first + g is one of the rows'.
                    let codes = unsafe { codes::<BITS>(group, half) };
                    let values = if BITS < 4 {
                        // The permutation looks at the low three bits of an index only.
                        [
                            codes,
                            _mm256_srli_epi32::<8>(codes),
                            _mm256_srli_epi32::<16>(codes),
                            _mm256_srli_epi32::<24>(codes),
                        ]
                        .map(|codes| _mm256_permutevar8x32_ps(floats, codes))
                    } else {
                        let values = _mm256_shuffle_epi8(table, codes);
                        [
                            _mm256_slli_epi32::<24>(values),
                            _mm256_slli_epi32::<16>(values),
                            _mm256_slli_epi32::<8>(values),
                            values,
                        ]
                        .map(|values| _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(values)))
                    };
                    let factor = _mm256_set1_ps(factors[r][g]);
                    for (vector, values) in vectors.iter_mut().zip(values) {
                        *vector = _mm256_fmadd_ps(values, factor, *vector);
                    }
                }
                for (i, vector) in vectors.into_iter().enumerate() {
                    sums[2 * i + half] = store(vector);
                }
            }
        }
    }
}
