//! Low-bit tiles.

use super::half_at;
use crate::simd::QuantBlock;
use crate::simd::low_bit::{BLOCK_TILES, HALVES, LowBitOps, TILE, count, tile_bytes};
use crate::simd::quantise::GROUP;
use ls_bundle::low_bit::Codebook;
use ls_bundle::tiles::{code, code_bytes};

pub(super) const LOW_BIT: LowBitOps =
    LowBitOps { by_output: dot::<true>, by_input: dot::<false>, fold };

fn dot<const BY_OUTPUT: bool>(
    tiles: &[u8],
    codebook: &Codebook,
    x: &[QuantBlock],
    sums: &mut [f32; TILE],
) {
    count(codebook, tiles, x);
    let bits = codebook.bits();
    for (t, tile) in tiles.chunks_exact(tile_bytes(bits.count() as usize)).enumerate() {
        let (block, first) = (&x[t / BLOCK_TILES], t % BLOCK_TILES * HALVES);
        let scales = &tile[code_bytes(bits)..];
        for (output, sum) in sums.iter_mut().enumerate() {
            let part = |half: usize| {
                let inputs = (half * GROUP..).zip(&block.quants[first + half]);
                let product = |(input, x): (usize, &i8)| {
                    let value = codebook.values()[usize::from(code(bits, tile, output, input))];
                    i32::from(value) * i32::from(*x)
                };
                inputs.map(product).sum::<i32>() as f32
            };
            let [low, high] = [block.scales[first], block.scales[first + 1]];
            *sum = if BY_OUTPUT {
                let both = part(1).mul_add(high, part(0) * low);
                both.mul_add(half_at(scales, output), *sum)
            } else {
                part(1).mul_add(high, part(0).mul_add(low, *sum))
            };
        }
    }
}

fn fold(scales: &[u8], x: &[f32], out: &mut [f32]) {
    for (i, (x, out)) in x.iter().zip(out).enumerate() {
        *out = x * half_at(scales, i);
    }
}
