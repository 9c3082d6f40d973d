//! Low-bit tiles, 16 outputs and four inputs in a vector.

use crate::simd::QuantBlock;
use crate::simd::avx2;
use crate::simd::low_bit::{
    BLOCK_TILES, HALF_UNITS, HALVES, LowBitOps, TILE, TileKernels, UNIT_INPUTS, code_bytes, dot,
    padded, tile_bytes, unit_bytes,
};
use ls_bundle::low_bit::Codebook;
use std::arch::x86_64::*;

pub(super) const LOW_BIT: LowBitOps = LowBitOps {
    by_output: dot::<Avx512, true>,
    by_input: dot::<Avx512, false>,
    fold: avx2::LOW_BIT.fold,
};

/// The CPU needs AVX-512 F, BW, VL and VNNI, and what AVX2's kernels need.
enum Avx512 {}

impl TileKernels for Avx512 {
    unsafe fn dot<const BITS: usize, const BY_OUTPUT: bool>(
        tiles: &[u8],
        codebook: &Codebook,
        x: &[QuantBlock],
        sums: &mut [f32; TILE],
    ) {
        // SAFETY: the caller's guarantee.
        unsafe { dot_tiles::<BITS, BY_OUTPUT>(tiles, codebook, x, sums) }
    }
}

/// Vectors that hold a number for each output.
const VECTORS: usize = TILE / LANES;
/// f32 of a vector.
const LANES: usize = 16;

/// Vector `k` of eight that are packed together.
///
/// # Safety
/// `packed` are BITS vectors, and the CPU has AVX-512 BW.
#[inline(always)]
unsafe fn codes<const BITS: usize>(packed: *const u8, k: usize) -> __m512i {
    // SAFETY: the caller's guarantee.
    unsafe {
        let codes = match (BITS, k) {
            // Where the last argument has ones the third bits, else the first two.
            (3, 6 | 7) => _mm512_ternarylogic_epi32::<0b1101_1000>(
                shifted(packed, k - 6, 6),
                shifted(packed, 2, k - 2),
                _mm512_set1_epi8(4),
            ),
            (3, _) => shifted(packed, k / 2, 3 * (k % 2)),
            _ => shifted(packed, k / (8 / BITS), BITS * (k % (8 / BITS))),
        };
        // What comes from a byte's neighbour goes.
        _mm512_and_si512(codes, _mm512_set1_epi8((1 << BITS) - 1))
    }
}

/// Packed vector `index`, bits moved down `by` places.
///
/// # Safety
/// `packed` are so many vectors, and the CPU has AVX-512 BW.
#[inline(always)]
unsafe fn shifted(packed: *const u8, index: usize, by: usize) -> __m512i {
    // SAFETY: the caller's guarantee.
    unsafe {
        let vector = _mm512_loadu_si512(packed.add(64 * index).cast());
        _mm512_srl_epi16(vector, _mm_cvtsi32_si128(by as i32))
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn dot_tiles<const BITS: usize, const BY_OUTPUT: bool>(
    tiles: &[u8],
    codebook: &Codebook,
    x: &[QuantBlock],
    sums: &mut [f32; TILE],
) {
    // VNNI multiplies unsigned with signed bytes: values plus 128.
    let table = padded(codebook).map(|value| value.cast_unsigned() ^ 0x80);
    // SAFETY: 16 bytes.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
    // SAFETY: TILE numbers.
    let mut totals: [__m512; VECTORS] =
        std::array::from_fn(|v| unsafe { _mm512_loadu_ps(sums.as_ptr().add(LANES * v)) });
    for (t, tile) in tiles.chunks_exact(tile_bytes(BITS)).enumerate() {
        let (block, first) = (&x[t / BLOCK_TILES], t % BLOCK_TILES * HALVES);
        let mut halves = [[_mm512_setzero_ps(); VECTORS]; HALVES];
        for (half, parts) in halves.iter_mut().enumerate() {
            let (quants, sums) = (&block.quants[first + half], &block.sums[first + half]);
            let mut acc = [_mm512_set1_epi32(-128 * sums.iter().sum::<i32>()); VECTORS];
            for unit in 0..HALF_UNITS {
                // SAFETY: units of this tile; eight activations of this half.
                unsafe {
                    let packed = tile.as_ptr().add((half * HALF_UNITS + unit) * unit_bytes(BITS));
                    let quads = quants.as_ptr().add(unit * UNIT_INPUTS).cast::<i32>();
                    eight_times!(K => {
                        let x = _mm512_set1_epi32(quads.add(K / VECTORS).read_unaligned());
                        let weights = _mm512_shuffle_epi8(table, codes::<BITS>(packed, K));
                        let acc = &mut acc[K % VECTORS];
                        *acc = _mm512_dpbusd_epi32(*acc, weights, x);
                    });
                }
            }
            *parts = acc.map(|acc| _mm512_cvtepi32_ps(acc));
        }
        let [low, high] = [0, 1].map(|half| _mm512_set1_ps(block.scales[first + half]));
        for (v, total) in totals.iter_mut().enumerate() {
            *total = if BY_OUTPUT {
                let both = _mm512_fmadd_ps(halves[1][v], high, _mm512_mul_ps(halves[0][v], low));
                let scales = tile[code_bytes(BITS) + 2 * LANES * v..].as_ptr();
                // SAFETY: LANES halves.
                let scales = _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(scales.cast()) });
                _mm512_fmadd_ps(both, scales, *total)
            } else {
                _mm512_fmadd_ps(halves[1][v], high, _mm512_fmadd_ps(halves[0][v], low, *total))
            };
        }
    }
    for (v, total) in totals.into_iter().enumerate() {
        // SAFETY: TILE numbers.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr().add(LANES * v), total) };
    }
}
