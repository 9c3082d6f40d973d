//! Tiles of a low-bit base, `ls_bundle::tiles`: what kernels for them have in common.

use super::QuantBlock;
use super::quantise;
use ls_bundle::low_bit::Codebook;

/// Outputs and inputs of a tile.
pub(crate) use ls_bundle::tiles::TILE;
use ls_bundle::tiles::{SCALES_BYTES, VECTOR_BYTES};

/// Halves of a tile whose activations share a scale.
pub(crate) const HALVES: usize = TILE / quantise::GROUP;
/// Tiles whose activations are a block.
pub(crate) const BLOCK_TILES: usize = quantise::BLOCK_GROUPS / HALVES;
/// Pairs of quads in a half.
pub(crate) const HALF_UNITS: usize = quantise::GROUP / UNIT_INPUTS;
/// Inputs of a pair of quads: what eight vectors of codes, packed into BITS vectors, meet.
pub(crate) const UNIT_INPUTS: usize = 8;

/// Bytes of a tile.
pub(crate) const fn tile_bytes(bits: usize) -> usize {
    code_bytes(bits) + SCALES_BYTES
}

/// Bytes of a tile's codes.
pub(crate) const fn code_bytes(bits: usize) -> usize {
    TILE / UNIT_INPUTS * unit_bytes(bits)
}

/// Bytes of a pair of quads.
pub(crate) const fn unit_bytes(bits: usize) -> usize {
    bits * VECTOR_BYTES
}

/// A product with a part of a row of tiles: to the 64 outputs' sums it adds, in units of a codebook's values.
type Dot = fn(tiles: &[u8], codebook: &Codebook, x: &[QuantBlock], sums: &mut [f32; TILE]);

/// Functions on tiles of one codebook. They give the same bits on every instruction set. Nothing is asked for ahead: tiles
/// come in order, and what processors fetch by themselves measured better.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LowBitOps {
    /// Scales are the outputs'. A half of a tile is summed as integers p; `sums = (p_0 x_0 + p_1 x_1) scale + sums`, with the
    /// activations' scales x, tile after tile.
    pub(crate) by_output: Dot,
    /// Scales are the inputs', and x has them already: `sums = p x + sums`, half after half.
    pub(crate) by_input: Dot,
    /// `out[i] = x[i] * scales[i]`, these in half precision; whole tiles.
    pub(crate) fold: fn(scales: &[u8], x: &[f32], out: &mut [f32]),
}

/// Does something with $k = 0 to 7, known when it is compiled: shifts are then constants.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! eight_times {
    ($k:ident => $body:block) => {
        eight_times!(@each $k $body 0 1 2 3 4 5 6 7)
    };
    (@each $k:ident $body:block $($number:literal)+) => {
        $({
            const $k: usize = $number;
            $body
        })+
    };
}

/// One instruction set's kernels.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) trait TileKernels {
    /// [`LowBitOps::by_output`] or [`LowBitOps::by_input`].
    ///
    /// # Safety
    /// The CPU has what the implementation says; tiles are whole, and x covers them.
    unsafe fn dot<const BITS: usize, const BY_OUTPUT: bool>(
        tiles: &[u8],
        codebook: &Codebook,
        x: &[QuantBlock],
        sums: &mut [f32; TILE],
    );
}

/// A product of K. A table with it is reachable only where the CPU has what it needs.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) fn dot<K: TileKernels, const BY_OUTPUT: bool>(
    tiles: &[u8],
    codebook: &Codebook,
    x: &[QuantBlock],
    sums: &mut [f32; TILE],
) {
    use ls_bundle::low_bit::Bits;
    count(codebook, tiles, x);
    // SAFETY: the CPU has what is needed, and the lengths have been checked.
    unsafe {
        match codebook.bits() {
            Bits::One => K::dot::<1, BY_OUTPUT>(tiles, codebook, x, sums),
            Bits::Two => K::dot::<2, BY_OUTPUT>(tiles, codebook, x, sums),
            Bits::Three => K::dot::<3, BY_OUTPUT>(tiles, codebook, x, sums),
            Bits::Four => K::dot::<4, BY_OUTPUT>(tiles, codebook, x, sums),
        }
    }
}

/// Number of tiles. Panics unless they are whole and `x` covers them.
pub(crate) fn count(codebook: &Codebook, tiles: &[u8], x: &[QuantBlock]) -> usize {
    let len = tile_bytes(codebook.bits().count() as usize);
    let count = tiles.len() / len;
    assert!(count * len == tiles.len() && count <= BLOCK_TILES * x.len(), "whole tiles");
    count
}

/// The values of a codebook, zeros behind them.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) fn padded(codebook: &Codebook) -> [i8; 16] {
    let mut values = [0; 16];
    values[..codebook.values().len()].copy_from_slice(codebook.values());
    values
}
