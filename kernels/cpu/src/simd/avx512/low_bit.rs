//! Low-bit rows, a group of 64 weights in a vector.

use crate::simd::avx2::{prefetch_block, sum_lanes};
use crate::simd::low_bit::{
    BLOCK, GROUP, LowBitOps, RowKernels, group_bytes, low_bit_ops, row_bytes,
};
use crate::simd::quantise::block_count;
use crate::simd::{Activations, QuantBlock};
use ls_bundle::low_bit::{Codebook, UNIT};
use std::arch::x86_64::*;

pub(super) const LOW_BIT: LowBitOps = low_bit_ops::<Avx512>();

/// The CPU needs AVX-512 F, BW, VL and VNNI, and what AVX2's kernels need.
enum Avx512 {}

impl RowKernels for Avx512 {
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

/// f32 of a vector.
const LANES: usize = 16;

/// The codes of a group in order, a byte each.
///
/// # Safety
/// `group` holds 8 * BITS bytes, and the CPU has AVX-512 BW.
#[inline(always)]
unsafe fn codes<const BITS: usize>(group: *const u8) -> __m512i {
    // SAFETY: the caller's guarantee.
    unsafe {
        match BITS {
            1 => _mm512_maskz_set1_epi8(group.cast::<u64>().read_unaligned(), 1),
            2 => pairs(group),
            3 => {
                let high = group.add(16).cast::<u64>().read_unaligned();
                let low = pairs(group);
                _mm512_mask_add_epi8(low, high, low, _mm512_set1_epi8(4))
            }
            _ => {
                let bytes = _mm256_loadu_si256(group.cast());
                let low = _mm512_castsi256_si512(bytes);
                let both = _mm512_inserti64x4::<1>(low, _mm256_srli_epi16::<4>(bytes));
                _mm512_and_si512(both, _mm512_set1_epi8(15))
            }
        }
    }
}

/// 64 times two bits.
///
/// # Safety
/// `bytes` are 16, and the CPU has AVX-512 BW.
#[inline(always)]
unsafe fn pairs(bytes: *const u8) -> __m512i {
    // SAFETY: the caller's guarantee.
    unsafe {
        let bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(bytes.cast()));
        let shifts = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
        // What comes from a byte's neighbour is masked off.
        _mm512_and_si512(_mm512_srlv_epi32(bytes, shifts), _mm512_set1_epi8(3))
    }
}

/// The scales of R rows' groups `first .. first + count`, zeros behind them; count is at most BLOCK.
#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
fn scales<const BITS: usize, const R: usize>(
    rows: [&[u8]; R],
    (groups, first, count): (usize, usize, usize),
) -> [__m256; R] {
    let mask = ((1u16 << count) - 1) as __mmask8;
    rows.map(|row| {
        let scales = &row[groups * group_bytes(BITS) + 2 * first..][..2 * count];
        // SAFETY: `count` halves; those behind are not loaded.
        _mm256_cvtph_ps(unsafe { _mm_maskz_loadu_epi16(mask, scales.as_ptr().cast()) })
    })
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
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
    // VNNI multiplies unsigned with signed bytes: values plus 128.
    let table = padded(codebook).map(|value| value ^ 0x80);
    // SAFETY: 16 bytes.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
    let mut sums = [_mm512_setzero_ps(); R];
    for first in (0..groups).step_by(BLOCK) {
        let count = BLOCK.min(groups - first);
        prefetch_block::<BITS, R>(rows, groups, first, ahead);
        let mut factors = [[0f32; BLOCK]; R];
        let scales = scales::<BITS, R>(rows, (groups, first, count));
        for (factors, scales) in factors.iter_mut().zip(scales) {
            // SAFETY: BLOCK numbers.
            unsafe { _mm256_storeu_ps(factors.as_mut_ptr(), scales) };
        }
        for g in 0..count {
            let x = &blocks[(first + g) / GROUPS];
            let (quants, offset, scale) = activations(x, (first + g) % GROUPS);
            for r in 0..R {
                // SAFETY: group first + g is one of the rows'.
                let codes =
                    unsafe { codes::<BITS>(rows[r].as_ptr().add((first + g) * group_bytes(BITS))) };
                let weights = _mm512_shuffle_epi8(table, codes);
                let parts = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(offset, weights, quants));
                let factor = _mm512_mul_ps(_mm512_set1_ps(factors[r][g]), scale);
                sums[r] = _mm512_fmadd_ps(parts, factor, sums[r]);
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        let high = _mm512_castps512_ps256(_mm512_shuffle_f32x4::<0b11_10_11_10>(sums, sums));
        *out = sum_lanes(_mm256_add_ps(_mm512_castps512_ps256(sums), high)) / UNIT;
    }
}

/// Groups of weights that meet a block of activations.
const GROUPS: usize = size_of::<[[i8; 32]; 8]>() / GROUP;

/// What group `g` of a block's weights meets: activations, what their products with 128 are too large by, negative,
/// and their scales.
#[inline]
#[target_feature(enable = "avx512f")]
fn activations(block: &QuantBlock, g: usize) -> (__m512i, __m512i, __m512) {
    let [low, high] = [block.scales[2 * g], block.scales[2 * g + 1]].map(|s| _mm512_set1_ps(s));
    let (quants, sums) = (&block.quants[2 * g..][..2], &block.sums[2 * g..][..2]);
    // SAFETY: two groups of 32 bytes, and of 8 numbers.
    let (quants, sums) = unsafe {
        (_mm512_loadu_si512(quants.as_ptr().cast()), _mm512_loadu_si512(sums.as_ptr().cast()))
    };
    let offset = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32::<7>(sums));
    (quants, offset, _mm512_mask_blend_ps(0xff00, low, high))
}

/// The values of a codebook, zeros behind them.
fn padded(codebook: &Codebook) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (byte, value) in bytes.iter_mut().zip(codebook.values()) {
        *byte = value.cast_unsigned();
    }
    bytes
}

/// The values of a codebook as the high halves of f32: they have eight binary digits at most.
#[inline]
#[target_feature(enable = "avx512f")]
fn bf16_table(codebook: &Codebook) -> __m512i {
    let values = padded(codebook).map(|value| f32::from(value.cast_signed()).to_bits() >> 16);
    let mut table = [0u16; 32];
    for (half, value) in table.iter_mut().zip(values) {
        *half = value as u16;
    }
    // SAFETY: 32 halves.
    unsafe { _mm512_loadu_si512(table.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
fn axpy_rows<const BITS: usize, const R: usize>(
    rows: [&[u8]; R],
    codebook: &Codebook,
    weights: &[f32; R],
    acc: &mut [f32],
    ahead: usize,
) {
    let groups = acc.len() / GROUP;
    let rows = rows.map(|row| &row[..row_bytes(BITS, groups)]);
    let table = bf16_table(codebook);
    for first in (0..groups).step_by(BLOCK) {
        let count = BLOCK.min(groups - first);
        prefetch_block::<BITS, R>(rows, groups, first, ahead);
        let mut factors = [[0f32; BLOCK]; R];
        let scales = scales::<BITS, R>(rows, (groups, first, count));
        for r in 0..R {
            let factor = _mm256_mul_ps(_mm256_set1_ps(weights[r] / UNIT), scales[r]);
            // SAFETY: BLOCK numbers.
            unsafe { _mm256_storeu_ps(factors[r].as_mut_ptr(), factor) };
        }
        for g in 0..count {
            let acc = acc[(first + g) * GROUP..][..GROUP].as_mut_ptr();
            // SAFETY: group first + g is one of the rows' and of acc's.
            unsafe {
                let mut sums: [__m512; GROUP / LANES] =
                    std::array::from_fn(|i| _mm512_loadu_ps(acc.add(i * LANES)));
                for r in 0..R {
                    let codes =
                        codes::<BITS>(rows[r].as_ptr().add((first + g) * group_bytes(BITS)));
                    let factor = _mm512_set1_ps(factors[r][g]);
                    // The permutation looks at the low five bits of a word only: codes of a word's low byte.
                    let even = _mm512_permutexvar_epi16(codes, table);
                    let odd = _mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(codes), table);
                    let high = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
                    let values = [
                        _mm512_slli_epi32::<16>(even),
                        _mm512_slli_epi32::<16>(odd),
                        _mm512_and_si512(even, high),
                        _mm512_and_si512(odd, high),
                    ];
                    for (sum, values) in sums.iter_mut().zip(values) {
                        *sum = _mm512_fmadd_ps(_mm512_castsi512_ps(values), factor, *sum);
                    }
                }
                for (i, sum) in sums.into_iter().enumerate() {
                    _mm512_storeu_ps(acc.add(i * LANES), sum);
                }
            }
        }
    }
}
