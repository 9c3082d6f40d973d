//! Low-bit matrices as a bundle holds them: [`Tiles`] of 64 outputs x 64 inputs, so that a product runs through memory
//! once, in order, with outputs side by side in a vector.
//!
//! The outputs come in rows of tiles, 64 each, and a row of tiles goes through all inputs. A tile is its codes and then
//! 64 half-precision scales: one an output where the product sums over the hidden width (gate, up), one an input where
//! it sums over neurons (down). Either way a scale belongs to 64 weights of one neuron, as in a [`Row`].
//!
//! Codes: an input *quad* is four neighbouring inputs, a *vector* 16 outputs' codes for a quad, byte 4 o + j that of
//! output o and input j. Quad q has vectors 4 q to 4 q + 3, for outputs 0-15, 16-31, 32-47, 48-63. Eight vectors (two
//! quads) are packed byte by byte into b vectors:
//!
//! ```text
//! b = 1   vector k in bit k
//! b = 2   vectors 0-3 in bits 0-1, 2-3, 4-5, 6-7 of the first, 4-7 in those of the second
//! b = 3   vectors 0 and 1 in bits 0-2 and 3-5 of the first, 2 and 3 in those of the second, 4 and 5 in those of the
//!         third; of vector 6 the low two bits in bits 6-7 of the first and the high one in bit 6 of the third; of
//!         vector 7 the low two in bits 6-7 of the second and the high one in bit 7 of the third
//! b = 4   vectors 2 k and 2 k + 1 in the low and high nibbles of number k
//! ```
//!
//! Where neurons are no multiple of 64 the last tiles are filled up with codes and scales of zero.
//!
//! What is here is the definition. Fast kernels are tested against it.

use crate::low_bit::{Bits, Codebook, GROUP, Row, UNIT};
use half::f16;

/// Outputs and inputs of a tile.
pub const TILE: usize = GROUP;
/// Vectors that are packed together.
pub const PACKED_VECTORS: usize = 8;
/// Bytes of a vector.
pub const VECTOR_BYTES: usize = 64;
/// Bytes of a tile's scales.
pub const SCALES_BYTES: usize = 2 * TILE;

const VECTORS: usize = TILE * TILE / VECTOR_BYTES;

/// What a product with a matrix sums over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// An output a neuron: gate and up.
    Hidden,
    /// An input a neuron: down.
    Neurons,
}

/// Bytes of a tile's codes.
#[must_use]
pub const fn code_bytes(bits: Bits) -> usize {
    TILE * TILE / 8 * bits as usize
}

/// Bytes of a tile.
#[must_use]
pub const fn tile_bytes(bits: Bits) -> usize {
    code_bytes(bits) + SCALES_BYTES
}

/// Bytes of a matrix between `neurons` and `hidden`, a multiple of 64.
#[must_use]
pub fn matrix_bytes(bits: Bits, neurons: u32, hidden: u32) -> usize {
    (neurons as usize).div_ceil(TILE) * (hidden as usize / TILE) * tile_bytes(bits)
}

/// A matrix of tiles.
#[derive(Clone, Copy, Debug)]
pub struct Tiles<'a> {
    codebook: Codebook,
    over: Over,
    neurons: u32,
    hidden: u32,
    bytes: &'a [u8],
}

impl<'a> Tiles<'a> {
    /// The matrix in `bytes`.
    ///
    /// # Panics
    /// Unless there are [`matrix_bytes`] of them.
    #[must_use]
    pub fn new(
        codebook: Codebook,
        over: Over,
        (neurons, hidden): (u32, u32),
        bytes: &'a [u8],
    ) -> Tiles<'a> {
        assert!(hidden.is_multiple_of(TILE as u32), "a width of whole tiles");
        assert_eq!(bytes.len(), matrix_bytes(codebook.bits(), neurons, hidden), "bytes of tiles");
        Tiles { codebook, over, neurons, hidden, bytes }
    }

    /// What the codes stand for.
    #[must_use]
    pub fn codebook(&self) -> &Codebook {
        &self.codebook
    }

    /// All bytes.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Tiles of a row of tiles.
    #[must_use]
    pub fn row_tiles(&self) -> usize {
        self.inputs().div_ceil(TILE)
    }

    /// The tiles of outputs `64 row .. 64 row + 64`, one behind the other.
    #[must_use]
    pub fn row(&self, row: usize) -> &'a [u8] {
        let len = self.row_tiles() * tile_bytes(self.codebook.bits());
        &self.bytes[row * len..][..len]
    }

    fn inputs(&self) -> usize {
        match self.over {
            Over::Hidden => self.hidden as usize,
            Over::Neurons => self.neurons as usize,
        }
    }

    /// A neuron's weights.
    pub fn decode(&self, neuron: usize, weights: &mut [f32]) {
        assert_eq!(weights.len(), self.hidden as usize, "a weight a column");
        let (values, tile_bytes) = (self.codebook.values(), tile_bytes(self.codebook.bits()));
        for (group, weights) in weights.chunks_exact_mut(TILE).enumerate() {
            let (row, column) = match self.over {
                Over::Hidden => (neuron / TILE, group),
                Over::Neurons => (group, neuron / TILE),
            };
            let tile = &self.row(row)[column * tile_bytes..][..tile_bytes];
            let scales = &tile[code_bytes(self.codebook.bits())..];
            let own = neuron % TILE;
            let scale = f16::from_le_bytes([scales[2 * own], scales[2 * own + 1]]).to_f32();
            for (k, weight) in weights.iter_mut().enumerate() {
                let (output, input) = match self.over {
                    Over::Hidden => (own, k),
                    Over::Neurons => (k, own),
                };
                let code = code(self.codebook.bits(), tile, output, input);
                *weight = scale / UNIT * f32::from(values[usize::from(code)]);
            }
        }
    }
}

/// Makes tiles of the rows of all neurons, which have one codebook and one width.
///
/// # Panics
/// Unless `into` has [`matrix_bytes`].
pub fn pack<'a>(over: Over, rows: &[Row<'a>], into: &mut [u8]) {
    let Some(first) = rows.first() else { return };
    let (bits, hidden) = (first.codebook().bits(), first.cols());
    assert_eq!(into.len(), matrix_bytes(bits, rows.len() as u32, hidden as u32), "bytes of tiles");
    into.fill(0);
    let (groups, tile_bytes) = (hidden / TILE, tile_bytes(bits));
    let neuron_tiles = rows.len().div_ceil(TILE);
    for (neuron, row) in rows.iter().enumerate() {
        let (outer, own) = (neuron / TILE, neuron % TILE);
        for (group, (scale, codes)) in row.groups().enumerate() {
            let tile = match over {
                Over::Hidden => outer * groups + group,
                Over::Neurons => group * neuron_tiles + outer,
            };
            let tile = &mut into[tile * tile_bytes..][..tile_bytes];
            tile[code_bytes(bits) + 2 * own..][..2].copy_from_slice(&scale.to_le_bytes());
            for (k, code) in codes.into_iter().enumerate() {
                let (output, input) = match over {
                    Over::Hidden => (own, k),
                    Over::Neurons => (k, own),
                };
                for (at, bits) in places(bits, code, output, input) {
                    tile[at] |= bits;
                }
            }
        }
    }
}

/// Number of the vector that holds a code, and its byte there.
fn place(output: usize, input: usize) -> (usize, usize) {
    (4 * (input / 4) + output / 16, 4 * (output % 16) + input % 4)
}

/// Bytes of a tile and the bits in them that a code sets; two at most.
fn places(bits: Bits, code: u8, output: usize, input: usize) -> [(usize, u8); 2] {
    let (vector, byte) = place(output, input);
    debug_assert!(vector < VECTORS);
    let (unit, vector) = (vector / PACKED_VECTORS, vector % PACKED_VECTORS);
    let start = unit * bits as usize * VECTOR_BYTES + byte;
    let at = |packed: usize| start + packed * VECTOR_BYTES;
    match (bits, vector) {
        (Bits::Three, 6 | 7) => [(at(vector - 6), (code & 3) << 6), (at(2), (code >> 2) << vector)],
        (Bits::Three, _) => [(at(vector / 2), code << (3 * (vector % 2))), (at(0), 0)],
        _ => {
            let (width, per) = (bits as usize, 8 / bits as usize);
            [(at(vector / per), code << (width * (vector % per))), (at(0), 0)]
        }
    }
}

/// The code of an output and an input of a tile, of which `tile` holds the codes at least.
#[must_use]
pub fn code(bits: Bits, tile: &[u8], output: usize, input: usize) -> u8 {
    let (vector, byte) = place(output, input);
    let (unit, vector) = (vector / PACKED_VECTORS, vector % PACKED_VECTORS);
    let start = unit * bits as usize * VECTOR_BYTES + byte;
    let packed = |index: usize| tile[start + index * VECTOR_BYTES];
    match (bits, vector) {
        (Bits::Three, 6 | 7) => packed(vector - 6) >> 6 | (packed(2) >> vector & 1) << 2,
        (Bits::Three, _) => packed(vector / 2) >> (3 * (vector % 2)) & 7,
        _ => {
            let (width, per) = (bits as usize, 8 / bits as usize);
            packed(vector / per) >> (width * (vector % per)) & (bits.values() - 1) as u8
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::low_bit::pack_row;
    use proptest::prelude::*;

    /// Packed rows of some neurons and their codebook.
    fn rows(bits: Bits, neurons: usize, hidden: usize, seed: u32) -> (Codebook, Vec<Vec<u8>>) {
        let values: Vec<i8> =
            (0..bits.values() as i16).map(|code| (16 * code - 120) as i8).collect();
        let mut state = seed;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 16
        };
        let row = |_| {
            let codes: Vec<u8> = (0..hidden).map(|_| next() as u8 % bits.values() as u8).collect();
            let scales: Vec<f16> =
                (0..hidden / GROUP).map(|_| f16::from_f32(next() as f32 / 999.0)).collect();
            let mut bytes = vec![0; bits.row_bytes(hidden as u32)];
            pack_row(bits, &codes, &scales, &mut bytes);
            bytes
        };
        (Codebook::new(&values).unwrap(), (0..neurons).map(row).collect())
    }

    proptest! {
        #[test]
        fn neurons_come_back(bits in 1u32..=4, neurons in 1usize..150, groups in 1usize..4, seed: u32) {
            let bits = Bits::new(bits).unwrap();
            let hidden = groups * TILE;
            let (codebook, packed) = rows(bits, neurons, hidden, seed);
            let rows: Vec<Row<'_>> = packed.iter().map(|row| Row::new(&codebook, row)).collect();
            for over in [Over::Hidden, Over::Neurons] {
                let mut bytes = vec![0xAA; matrix_bytes(bits, neurons as u32, hidden as u32)];
                pack(over, &rows, &mut bytes);
                let tiles = Tiles::new(codebook, over, (neurons as u32, hidden as u32), &bytes);
                let (mut found, mut wanted) = (vec![f32::NAN; hidden], vec![f32::NAN; hidden]);
                for (neuron, row) in rows.iter().enumerate() {
                    tiles.decode(neuron, &mut found);
                    row.decode(&mut wanted);
                    prop_assert_eq!(&found, &wanted, "neuron {} over {:?}", neuron, over);
                }
            }
        }
    }

    #[test]
    fn codes_lie_where_the_format_says() {
        let set = |bits: u32, code, output, input| {
            let mut tile = vec![0; tile_bytes(Bits::new(bits).unwrap())];
            for (at, mask) in places(Bits::new(bits).unwrap(), code, output, input) {
                tile[at] |= mask;
            }
            let used = tile.iter().enumerate().filter(|(_, byte)| **byte != 0);
            used.map(|(at, byte)| (at, *byte)).collect::<Vec<_>>()
        };
        // Output 17 and input 6: quad 1, vector 5, byte 6 of a vector.
        assert_eq!(set(1, 1, 17, 6), [(6, 1 << 5)]);
        assert_eq!(set(2, 3, 17, 6), [(64 + 6, 3 << 2)]);
        assert_eq!(set(3, 5, 17, 6), [(128 + 6, 5 << 3)]);
        assert_eq!(set(4, 9, 17, 6), [(128 + 6, 9 << 4)]);
        // Outputs 33 and 63, inputs 7 and 15: vectors 6 and 15.
        assert_eq!(set(3, 7, 33, 7), [(7, 3 << 6), (128 + 7, 1 << 6)]);
        assert_eq!(set(3, 6, 63, 15), [(192 + 64 + 63, 2 << 6), (192 + 128 + 63, 1 << 7)]);
        // Quads come two by two.
        assert_eq!(set(1, 1, 0, 8), [(64, 1)]);
    }
}
