//! Low-bit tiles, eight outputs and four inputs in a vector.

use super::{LANES, load, store};
use crate::simd::QuantBlock;
use crate::simd::low_bit::{
    BLOCK_TILES, HALF_UNITS, HALVES, LowBitOps, TILE, TileKernels, UNIT_INPUTS, code_bytes, dot,
    padded, tile_bytes, unit_bytes,
};
use ls_bundle::low_bit::Codebook;
use std::arch::x86_64::*;

pub(in crate::simd) const LOW_BIT: LowBitOps = LowBitOps {
    by_output: dot::<Avx2, true>,
    by_input: dot::<Avx2, false>,
    fold: |scales, x, out| {
        // SAFETY: the CPU has the features, see `available`.
        unsafe { fold(scales, x, out) }
    },
};

/// The CPU needs AVX2, FMA and F16C.
enum Avx2 {}

impl TileKernels for Avx2 {
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

/// Half of vector `k` of eight that are packed together; `packed` is the same half of the first of these.
///
/// # Safety
/// `packed` are such halves of BITS vectors, and the CPU has AVX2.
#[inline(always)]
unsafe fn codes<const BITS: usize>(packed: *const u8, k: usize) -> __m256i {
    // SAFETY: the caller's guarantee.
    unsafe {
        match (BITS, k) {
            (3, 6 | 7) => {
                _mm256_or_si256(shifted(packed, k - 6, 6, 0b011), shifted(packed, 2, k - 2, 0b100))
            }
            (3, _) => shifted(packed, k / 2, 3 * (k % 2), 0b111),
            _ => {
                let (per, mask) = (8 / BITS, (1 << BITS) - 1);
                shifted(packed, k / per, BITS * (k % per), mask)
            }
        }
    }
}

/// That half of packed vector `index`, bits moved down `by` places; only those of `mask` stay.
///
/// # Safety
/// `packed` are so many halves, and the CPU has AVX2.
#[inline(always)]
unsafe fn shifted(packed: *const u8, index: usize, by: usize, mask: i8) -> __m256i {
    // SAFETY: the caller's guarantee.
    unsafe {
        let vector = _mm256_loadu_si256(packed.add(64 * index).cast());
        let moved = _mm256_srl_epi16(vector, _mm_cvtsi32_si128(by as i32));
        _mm256_and_si256(moved, _mm256_set1_epi8(mask))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn dot_tiles<const BITS: usize, const BY_OUTPUT: bool>(
    tiles: &[u8],
    codebook: &Codebook,
    x: &[QuantBlock],
    sums: &mut [f32; TILE],
) {
    // SAFETY: 16 bytes.
    let table = unsafe { _mm_loadu_si128(padded(codebook).as_ptr().cast()) };
    let table = _mm256_broadcastsi128_si256(table);
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    for (t, tile) in tiles.chunks_exact(tile_bytes(BITS)).enumerate() {
        let (block, first) = (&x[t / BLOCK_TILES], t % BLOCK_TILES * HALVES);
        let mut halves = [[_mm256_setzero_ps(); VECTORS]; HALVES];
        for (half, parts) in halves.iter_mut().enumerate() {
            let quants = &block.quants[first + half];
            // Vectors of codes are twice as wide: their first halves, then the second ones, or there are not
            // enough registers.
            for side in [0, 1] {
                let mut acc = [_mm256_setzero_si256(); VECTORS / 2];
                for unit in 0..HALF_UNITS {
                    // SAFETY: units of this tile; eight activations of this half.
                    unsafe {
                        let at = (half * HALF_UNITS + unit) * unit_bytes(BITS);
                        let packed = tile.as_ptr().add(at);
                        let packed = packed.add(32 * side);
                        let quads = quants.as_ptr().add(unit * UNIT_INPUTS).cast::<i32>();
                        eight_times!(K => {
                            let x = quads.add(K / (VECTORS / 2)).read_unaligned();
                            let weights = _mm256_shuffle_epi8(table, codes::<BITS>(packed, K));
                            // Of the two factors one must be unsigned: |w| * (x with w's sign). 2 * 128 * 127
                            // fits 16 bits.
                            let pairs = _mm256_maddubs_epi16(
                                _mm256_abs_epi8(weights),
                                _mm256_sign_epi8(_mm256_set1_epi32(x), weights),
                            );
                            let products = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                            let acc = &mut acc[K % (VECTORS / 2)];
                            *acc = _mm256_add_epi32(*acc, products);
                        });
                    }
                }
                for (v, acc) in acc.into_iter().enumerate() {
                    parts[2 * v + side] = _mm256_cvtepi32_ps(acc);
                }
            }
        }
        let [low, high] = [0, 1].map(|half| _mm256_set1_ps(block.scales[first + half]));
        for (v, sums) in sums.iter_mut().enumerate() {
            let sum = load(sums);
            *sums = store(if BY_OUTPUT {
                let both = _mm256_fmadd_ps(halves[1][v], high, _mm256_mul_ps(halves[0][v], low));
                let scales = tile[code_bytes(BITS) + 2 * LANES * v..].as_ptr();
                // SAFETY: LANES halves.
                let scales = _mm256_cvtph_ps(unsafe { _mm_loadu_si128(scales.cast()) });
                _mm256_fmadd_ps(both, scales, sum)
            } else {
                _mm256_fmadd_ps(halves[1][v], high, _mm256_fmadd_ps(halves[0][v], low, sum))
            });
        }
    }
}

#[target_feature(enable = "avx2,f16c")]
fn fold(scales: &[u8], x: &[f32], out: &mut [f32]) {
    let x = x.as_chunks::<LANES>().0.iter().zip(out.as_chunks_mut::<LANES>().0);
    for ((x, out), scales) in x.zip(scales.chunks_exact(2 * LANES)) {
        // SAFETY: LANES halves.
        let scales = _mm256_cvtph_ps(unsafe { _mm_loadu_si128(scales.as_ptr().cast()) });
        *out = store(_mm256_mul_ps(load(x), scales));
    }
}
