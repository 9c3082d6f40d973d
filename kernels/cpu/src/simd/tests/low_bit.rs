//! Low-bit tiles: against arithmetic on what the format's definition reads in them, and the bits of scalar kernels.

use super::{Draw, assert_sum, bits, meaning, product, quantised};
use crate::simd::low_bit::{BLOCK_TILES, TILE};
use crate::simd::{Ops, scalar};
use half::f16;
use ls_bundle::low_bit::{Bits, Codebook, UNIT};
use ls_bundle::tiles::{code, code_bytes, tile_bytes};

/// Numbers of tiles around those whose activations are a block.
const TILES: [usize; 7] = [1, 2, 3, 4, 5, 8, 9];

/// A row of tiles at an odd address.
struct Row {
    codebook: Codebook,
    bytes: Vec<u8>,
}

impl Row {
    fn draw(draw: &mut Draw, bits: u32, tiles: usize) -> Row {
        let mut values: Vec<i8> = (0..1 << bits).map(|_| draw.0.bits() as i8).collect();
        (values[0], values[1]) = (-128, 127);
        let codebook = Codebook::new(&values).unwrap();
        let bits = codebook.bits();
        let mut bytes = vec![0xff];
        for _ in 0..tiles {
            // Any byte is codes.
            bytes.extend((0..code_bytes(bits)).map(|_| draw.0.bits() as u8));
            // A scale that is nothing, a subnormal one, the largest one; else ordinary ones.
            let mut scale = || match draw.0.below(20) {
                0 => f16::ZERO,
                1 => f16::MIN_POSITIVE_SUBNORMAL,
                2 => f16::MAX,
                _ => f16::from_f32(draw.0.unit()),
            };
            bytes.extend((0..TILE).flat_map(|_| scale().to_le_bytes()));
        }
        // Exactly as long as needed: what reads further is seen by a checking allocator.
        bytes.shrink_to_fit();
        Row { codebook, bytes }
    }

    fn tiles(&self) -> &[u8] {
        &self.bytes[1..]
    }

    fn tile(&self, tile: usize) -> &[u8] {
        let len = tile_bytes(self.codebook.bits());
        &self.tiles()[tile * len..][..len]
    }

    /// A weight, in units of its scale.
    fn value(&self, output: usize, input: usize) -> f32 {
        let (tile, input) = (self.tile(input / TILE), input % TILE);
        let code = code(self.codebook.bits(), tile, output, input);
        f32::from(self.codebook.values()[usize::from(code)])
    }

    fn scale(&self, tile: usize, index: usize) -> f32 {
        let scales = &self.tile(tile)[code_bytes(self.codebook.bits())..];
        f16::from_le_bytes([scales[2 * index], scales[2 * index + 1]]).to_f32()
    }
}

fn cases() -> impl Iterator<Item = (u32, usize)> {
    TILES.into_iter().flat_map(|tiles| [1, 2, 3, 4].map(|bits| (bits, tiles)))
}

pub(super) fn low_bit_tiles_are_multiplied(ops: &Ops, draw: &mut Draw) {
    for (width, tiles) in cases() {
        let row = Row::draw(draw, width, tiles);
        let floats = draw.floats(tiles * TILE);
        let quants = quantised(ops, &floats);
        let factors = meaning(&quants, floats.len());
        let start: [f32; TILE] = draw.floats(TILE).try_into().unwrap();
        for by_output in [true, false] {
            let run = |ops: &Ops| {
                let dot = if by_output { ops.low_bit.by_output } else { ops.low_bit.by_input };
                let mut sums = start;
                dot(row.tiles(), &row.codebook, &quants, &mut sums);
                sums
            };
            let sums = run(ops);
            for (output, &sum) in sums.iter().enumerate() {
                let term = |(input, x): (usize, _)| {
                    let scale = if by_output { row.scale(input / TILE, output) } else { 1.0 };
                    product(&(row.value(output, input) * scale), x)
                };
                let terms = factors.iter().enumerate().map(term);
                assert_sum(sum, terms.chain([f64::from(start[output])]));
            }
            let plain = run(&scalar::OPS);
            assert_eq!(bits(&plain), bits(&sums), "not what scalar kernels give, {width} bits");
            // Block after block gives the same.
            let dot = if by_output { ops.low_bit.by_output } else { ops.low_bit.by_input };
            let mut parts = start;
            let len = BLOCK_TILES * tile_bytes(row.codebook.bits());
            for (tiles, x) in row.tiles().chunks(len).zip(&quants) {
                dot(tiles, &row.codebook, std::slice::from_ref(x), &mut parts);
            }
            assert_eq!(bits(&parts), bits(&sums), "parts of a row, {width} bits");
        }
    }
}

pub(super) fn low_bit_scales_are_folded(ops: &Ops, draw: &mut Draw) {
    let row = Row::draw(draw, 1, 1);
    let scales = &row.tile(0)[code_bytes(Bits::One)..];
    let x = draw.floats(TILE);
    let (mut folded, mut plain) = ([f32::NAN; TILE], [f32::NAN; TILE]);
    (ops.low_bit.fold)(scales, &x, &mut folded);
    (scalar::OPS.low_bit.fold)(scales, &x, &mut plain);
    assert_eq!(bits(&plain), bits(&folded));
    for (i, folded) in folded.into_iter().enumerate() {
        assert_eq!(folded.to_bits(), (x[i] * row.scale(0, i)).to_bits());
    }
    assert!(row.codebook.values().iter().all(|&value| f32::from(value).abs() <= UNIT + 1.0));
}
