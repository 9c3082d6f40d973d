//! Low-bit tiles, four outputs and four inputs in a vector.

use super::quantised::{Dotprod, Multiply, Widening};
use super::{LANES, load, load_halves, store};
use crate::simd::QuantBlock;
use crate::simd::low_bit::{
    BLOCK_TILES, HALF_UNITS, HALVES, LowBitOps, TILE, TileKernels, UNIT_INPUTS, code_bytes, dot,
    padded, tile_bytes, unit_bytes,
};
use ls_bundle::low_bit::Codebook;
use std::arch::aarch64::*;

pub(super) const WIDENING: LowBitOps = ops::<Widening>();
pub(super) const DOTPROD: LowBitOps = ops::<Dotprod>();

const fn ops<K: TileKernels>() -> LowBitOps {
    LowBitOps {
        by_output: dot::<K, true>,
        by_input: dot::<K, false>,
        fold: |scales, x, out| {
            // SAFETY: the CPU has NEON, see `available`.
            unsafe { fold(scales, x, out) }
        },
    }
}

impl TileKernels for Widening {
    unsafe fn dot<const BITS: usize, const BY_OUTPUT: bool>(
        tiles: &[u8],
        codebook: &Codebook,
        x: &[QuantBlock],
        sums: &mut [f32; TILE],
    ) {
        // SAFETY: the caller's guarantee.
        unsafe { dot_widening::<BITS, BY_OUTPUT>(tiles, codebook, x, sums) }
    }
}

impl TileKernels for Dotprod {
    unsafe fn dot<const BITS: usize, const BY_OUTPUT: bool>(
        tiles: &[u8],
        codebook: &Codebook,
        x: &[QuantBlock],
        sums: &mut [f32; TILE],
    ) {
        // SAFETY: the caller's guarantee.
        unsafe { dot_dotprod::<BITS, BY_OUTPUT>(tiles, codebook, x, sums) }
    }
}

#[target_feature(enable = "neon")]
fn dot_widening<const BITS: usize, const BY_OUTPUT: bool>(
    tiles: &[u8],
    codebook: &Codebook,
    x: &[QuantBlock],
    sums: &mut [f32; TILE],
) {
    // SAFETY: the CPU has NEON, see `available`.
    unsafe { dot_tiles::<Widening, BITS, BY_OUTPUT>(tiles, codebook, x, sums) }
}

#[target_feature(enable = "neon,dotprod")]
fn dot_dotprod<const BITS: usize, const BY_OUTPUT: bool>(
    tiles: &[u8],
    codebook: &Codebook,
    x: &[QuantBlock],
    sums: &mut [f32; TILE],
) {
    // SAFETY: the CPU has the extension, see `dotprod`.
    unsafe { dot_tiles::<Dotprod, BITS, BY_OUTPUT>(tiles, codebook, x, sums) }
}

/// Vectors that hold a number for each output.
const VECTORS: usize = TILE / LANES;
/// Vectors of codes, for 16 outputs each.
const CODE_VECTORS: usize = 4;
/// Registers of one of these.
const QUARTERS: usize = 4;

/// A quarter of vector `k` of eight that are packed together; `packed` is the same quarter of the first of these.
///
/// # Safety
/// `packed` are such quarters of BITS vectors, and the CPU has NEON.
#[inline(always)]
unsafe fn codes<const BITS: usize>(packed: *const u8, k: usize) -> uint8x16_t {
    // SAFETY: the caller's guarantee.
    unsafe {
        match (BITS, k) {
            (3, 6 | 7) => {
                vorrq_u8(shifted(packed, k - 6, 6, 0b011), shifted(packed, 2, k - 2, 0b100))
            }
            (3, _) => shifted(packed, k / 2, 3 * (k % 2), 0b111),
            _ => {
                let (per, mask) = (8 / BITS, (1 << BITS) - 1);
                shifted(packed, k / per, BITS * (k % per), mask)
            }
        }
    }
}

/// That quarter of packed vector `index`, bits moved down `by` places; only those of `mask` stay.
///
/// # Safety
/// `packed` are so many quarters, and the CPU has NEON.
#[inline(always)]
unsafe fn shifted(packed: *const u8, index: usize, by: usize, mask: u8) -> uint8x16_t {
    // SAFETY: the caller's guarantee.
    unsafe {
        let vector = vld1q_u8(packed.add(64 * index));
        vandq_u8(vshlq_u8(vector, vdupq_n_s8(-(by as i8))), vdupq_n_u8(mask))
    }
}

/// # Safety
/// The CPU has NEON and what M needs; tiles are whole, and x covers them. For speed the caller has these features
/// enabled.
#[inline(always)]
unsafe fn dot_tiles<M: Multiply, const BITS: usize, const BY_OUTPUT: bool>(
    tiles: &[u8],
    codebook: &Codebook,
    x: &[QuantBlock],
    sums: &mut [f32; TILE],
) {
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    // SAFETY: the CPU has the features. Units are of their tile, four activations of their half; eight halves are
    // scales of a tile.
    unsafe {
        let table = vld1q_s8(padded(codebook).as_ptr());
        for (t, tile) in tiles.chunks_exact(tile_bytes(BITS)).enumerate() {
            let (block, first) = (&x[t / BLOCK_TILES], t % BLOCK_TILES * HALVES);
            let mut halves = [[vdupq_n_f32(0.0); VECTORS]; HALVES];
            for (half, parts) in halves.iter_mut().enumerate() {
                let quants = &block.quants[first + half];
                let mut acc = [vdupq_n_s32(0); VECTORS];
                for unit in 0..HALF_UNITS {
                    let at = (half * HALF_UNITS + unit) * unit_bytes(BITS);
                    let packed = tile.as_ptr().add(at);
                    let quads = quants.as_ptr().add(unit * UNIT_INPUTS).cast::<i32>();
                    eight_times!(K => {
                        let x = vdupq_n_s32(quads.add(K / CODE_VECTORS).read_unaligned());
                        let x = vreinterpretq_s8_s32(x);
                        for quarter in 0..QUARTERS {
                            let codes = codes::<BITS>(packed.add(16 * quarter), K);
                            let weights = vqtbl1q_s8(table, codes);
                            let acc = &mut acc[K % CODE_VECTORS * QUARTERS + quarter];
                            *acc = vaddq_s32(*acc, M::parts(weights, x));
                        }
                    });
                }
                for (part, acc) in parts.iter_mut().zip(acc) {
                    *part = vcvtq_f32_s32(acc);
                }
            }
            let [low, high] = [block.scales[first], block.scales[first + 1]];
            let mut scales = [vdupq_n_f32(1.0); VECTORS];
            if BY_OUTPUT {
                let halves = tile[code_bytes(BITS)..].as_ptr();
                for (i, pair) in scales.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    *pair = load_halves(halves.add(16 * i));
                }
            }
            for (v, sums) in sums.iter_mut().enumerate() {
                let sum = load(sums);
                *sums = store(if BY_OUTPUT {
                    let both = vfmaq_n_f32(vmulq_n_f32(halves[0][v], low), halves[1][v], high);
                    vfmaq_f32(sum, both, scales[v])
                } else {
                    vfmaq_n_f32(vfmaq_n_f32(sum, halves[0][v], low), halves[1][v], high)
                });
            }
        }
    }
}

#[target_feature(enable = "neon")]
fn fold(scales: &[u8], x: &[f32], out: &mut [f32]) {
    let x = x.as_chunks::<{ 2 * LANES }>().0.iter().zip(out.as_chunks_mut::<{ 2 * LANES }>().0);
    for ((x, out), scales) in x.zip(scales.chunks_exact(4 * LANES)) {
        // SAFETY: eight halves.
        let scales = unsafe { load_halves(scales.as_ptr()) };
        let x = x.as_chunks::<LANES>().0.iter().zip(out.as_chunks_mut::<LANES>().0);
        for ((x, out), scales) in x.zip(scales) {
            *out = store(vmulq_f32(load(x), scales));
        }
    }
}
