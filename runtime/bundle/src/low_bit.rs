//! Low-bit rows: how the resident copy of an FFN (the *base*) is stored, and the plain arithmetic on it.
//!
//! A row of `cols` weights, a multiple of [`GROUP`], is stored as the codes of all groups and then one half-precision
//! scale a group. A weight is `scale * codebook[code] / 127`; a matrix has one [`Codebook`] of 2^b signed bytes.
//! A group's codes take 8 b bytes:
//!
//! ```text
//! b = 1   bit j of a little-endian u64 is weight j
//! b = 2   byte j holds weights j, j + 16, j + 32, j + 48 in bits 0-1, 2-3, 4-5, 6-7
//! b = 3   the two low bits of every code as for b = 2 (16 bytes), then the high bits as for b = 1 (8 bytes)
//! b = 4   byte j holds weight j in the low nibble and j + 32 in the high one
//! ```
//!
//! So 3 bits take 26 bytes for 64 weights, 20.3 % of half precision. A neuron's *record* is its gate row, its up row
//! and its down column side by side, each with bits of its own ([`RecordLayout`]). That is how `ls-prep` keeps them; a
//! bundle has the same codes and scales in [`tiles`](crate::tiles).

use half::f16;
use serde::{Deserialize, Serialize};

/// Weights that share a scale.
pub const GROUP: usize = 64;
/// What a codebook's bytes are divided by.
pub const UNIT: f32 = 127.0;
const SCALE_BYTES: usize = 2;

/// Bits of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Bits {
    /// 2 values.
    One = 1,
    /// 4 values.
    Two = 2,
    /// 8 values.
    Three = 3,
    /// 16 values.
    Four = 4,
}

impl Bits {
    /// That many bits, if a code can have them.
    #[must_use]
    pub fn new(bits: u32) -> Option<Bits> {
        [Bits::One, Bits::Two, Bits::Three, Bits::Four].into_iter().find(|b| b.count() == bits)
    }

    /// How many.
    #[must_use]
    pub fn count(self) -> u32 {
        self as u32
    }

    /// Values that a code can stand for.
    #[must_use]
    pub fn values(self) -> usize {
        1 << self.count()
    }

    /// Bytes of a row of `cols` weights, codes and scales.
    #[must_use]
    pub fn row_bytes(self, cols: u32) -> usize {
        cols as usize / GROUP * (self.code_bytes() + SCALE_BYTES)
    }

    /// Bytes of a group's codes.
    fn code_bytes(self) -> usize {
        GROUP / 8 * self.count() as usize
    }
}

/// What the codes of a matrix stand for, in units of 1/127 of the scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Codebook {
    bits: Bits,
    values: [i8; 16],
}

impl Codebook {
    /// The codebook of `values`: 2, 4, 8 or 16 of them.
    #[must_use]
    pub fn new(values: &[i8]) -> Option<Codebook> {
        let bits = Bits::new(values.len().checked_ilog2()?)?;
        let mut all = [0; 16];
        all.get_mut(..values.len())?.copy_from_slice(values);
        (bits.values() == values.len()).then_some(Codebook { bits, values: all })
    }

    /// Bits of a code.
    #[must_use]
    pub fn bits(&self) -> Bits {
        self.bits
    }

    /// The values, by code.
    #[must_use]
    pub fn values(&self) -> &[i8] {
        &self.values[..self.bits.values()]
    }
}

/// A hidden width that cannot be cut into groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rows of {cols} weights: a low-bit row is a multiple of {GROUP}")]
pub struct UnevenWidth {
    /// Weights of a row.
    pub cols: u32,
}

/// The parts of a neuron's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordLayout {
    cols: u32,
    bits: [Option<Bits>; 3],
}

impl RecordLayout {
    /// Records of neurons with rows of `cols` weights; `bits` of gate, up and down, where they are there.
    pub fn new(cols: u32, bits: [Option<Bits>; 3]) -> Result<RecordLayout, UnevenWidth> {
        let even = cols > 0 && cols.is_multiple_of(GROUP as u32);
        if even { Ok(RecordLayout { cols, bits }) } else { Err(UnevenWidth { cols }) }
    }

    /// Weights of each row.
    #[must_use]
    pub fn cols(&self) -> u32 {
        self.cols
    }

    /// Bits of gate, up and down.
    #[must_use]
    pub fn bits(&self) -> [Option<Bits>; 3] {
        self.bits
    }

    /// Bytes of a record.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.part_bytes().iter().sum()
    }

    /// Gate, up and down of a record; what is not there is empty.
    #[must_use]
    pub fn split<'a>(&self, record: &'a [u8]) -> [&'a [u8]; 3] {
        assert_eq!(record.len(), self.bytes());
        let [gate, up, _] = self.part_bytes();
        let (gate, rest) = record.split_at(gate);
        let (up, down) = rest.split_at(up);
        [gate, up, down]
    }

    fn part_bytes(&self) -> [usize; 3] {
        self.bits.map(|bits| bits.map_or(0, |bits| bits.row_bytes(self.cols)))
    }
}

/// A magnitude stored as a byte: `largest` for 255, a sixteenth of an octave less for each code below, 0 for code 0.
#[must_use]
pub fn magnitude(code: u8, largest: f32) -> f32 {
    if code == 0 { 0.0 } else { largest * ((f32::from(code) - 255.0) / 16.0).exp2() }
}

/// Writes a row of `codes` with the scales of its groups into `into`, which has exactly [`Bits::row_bytes`] bytes.
pub fn pack_row(bits: Bits, codes: &[u8], scales: &[f16], into: &mut [u8]) {
    assert_eq!(codes.len(), GROUP * scales.len(), "one scale a group");
    assert!(codes.iter().all(|&code| usize::from(code) < bits.values()), "codes of {bits:?}");
    let (groups, rest) = codes.as_chunks::<GROUP>();
    assert!(rest.is_empty() && into.len() == groups.len() * (bits.code_bytes() + SCALE_BYTES));
    let (packed, tail) = into.split_at_mut(groups.len() * bits.code_bytes());
    for (codes, bytes) in groups.iter().zip(packed.chunks_exact_mut(bits.code_bytes())) {
        pack_group(bits, codes, bytes);
    }
    for (scale, bytes) in scales.iter().zip(tail.as_chunks_mut().0) {
        *bytes = scale.to_le_bytes();
    }
}

fn pack_group(bits: Bits, codes: &[u8; GROUP], into: &mut [u8]) {
    let plane = |bit: u32| -> u64 {
        codes.iter().enumerate().map(|(j, &code)| u64::from(code >> bit & 1) << j).sum()
    };
    let pairs = |into: &mut [u8]| {
        for (j, byte) in into.iter_mut().enumerate() {
            *byte = (0..4).map(|k| (codes[j + 16 * k] & 3) << (2 * k)).sum();
        }
    };
    match bits {
        Bits::One => into.copy_from_slice(&plane(0).to_le_bytes()),
        Bits::Two => pairs(into),
        Bits::Three => {
            pairs(&mut into[..16]);
            into[16..].copy_from_slice(&plane(2).to_le_bytes());
        }
        Bits::Four => {
            for (j, byte) in into.iter_mut().enumerate() {
                *byte = codes[j] | codes[j + 32] << 4;
            }
        }
    }
}

/// The codes of one group, read back.
fn unpack_group(bits: Bits, bytes: &[u8]) -> [u8; GROUP] {
    let plane = |bytes: &[u8], j: usize| bytes[j / 8] >> (j % 8) & 1;
    let pair = |j: usize| bytes[j % 16] >> (2 * (j / 16)) & 3;
    std::array::from_fn(|j| match bits {
        Bits::One => plane(bytes, j),
        Bits::Two => pair(j),
        Bits::Three => pair(j) | plane(&bytes[16..], j) << 2,
        Bits::Four => bytes[j % 32] >> (4 * (j / 32)) & 15,
    })
}

/// A packed row and what its codes stand for.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    codebook: &'a Codebook,
    codes: &'a [u8],
    scales: &'a [u8],
}

impl<'a> Row<'a> {
    /// The row in `bytes`, a whole number of groups.
    #[must_use]
    pub fn new(codebook: &'a Codebook, bytes: &'a [u8]) -> Row<'a> {
        let code_bytes = codebook.bits.code_bytes();
        let groups = bytes.len() / (code_bytes + SCALE_BYTES);
        assert_eq!(bytes.len(), groups * (code_bytes + SCALE_BYTES), "a whole number of groups");
        let (codes, scales) = bytes.split_at(groups * code_bytes);
        Row { codebook, codes, scales }
    }

    /// What its codes stand for.
    #[must_use]
    pub fn codebook(&self) -> &'a Codebook {
        self.codebook
    }

    /// Weights of the row.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.scales.len() / SCALE_BYTES * GROUP
    }

    /// Each group's scale and codes.
    pub fn groups(&self) -> impl Iterator<Item = (f16, [u8; GROUP])> + use<'a> {
        let bits = self.codebook.bits;
        let scales = self.scales.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes));
        let codes = self.codes.chunks_exact(bits.code_bytes());
        scales.zip(codes.map(move |bytes| unpack_group(bits, bytes)))
    }

    /// The weights.
    pub fn decode(&self, into: &mut [f32]) {
        into.fill(0.0);
        self.add_scaled(1.0, into);
    }

    /// The inner product with `x`, as long as the row: each group's sum of `codebook * x` in order, times its scale.
    #[must_use]
    pub fn dot(&self, x: &[f32]) -> f32 {
        assert_eq!(x.len(), self.cols());
        let group = |((scale, codes), x): ((f16, [u8; GROUP]), &[f32; GROUP])| {
            let sum: f32 = codes.iter().zip(x).map(|(&code, x)| self.value(code) * x).sum();
            scale.to_f32() / UNIT * sum
        };
        self.groups().zip(x.as_chunks().0).map(group).sum()
    }

    /// Adds `factor` times the row to `y`, as long as the row.
    pub fn add_scaled(&self, factor: f32, y: &mut [f32]) {
        assert_eq!(y.len(), self.cols());
        for ((scale, codes), y) in self.groups().zip(y.as_chunks_mut::<GROUP>().0) {
            let factor = factor * (scale.to_f32() / UNIT);
            for (y, code) in y.iter_mut().zip(codes) {
                *y += factor * self.value(code);
            }
        }
    }

    fn value(&self, code: u8) -> f32 {
        f32::from(self.codebook.values[usize::from(code)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bits, codes and scales of a row of up to four groups.
    fn rows() -> impl Strategy<Value = (Bits, Vec<u8>, Vec<f16>)> {
        let of = |(bits, groups): (u32, usize)| {
            let codes = prop::collection::vec(0..1u8 << bits, groups * GROUP);
            let scale = (-2f32..2.0).prop_map(f16::from_f32);
            let scales = prop::collection::vec(scale, groups);
            (Just(Bits::new(bits).unwrap()), codes, scales)
        };
        (1u32..=4, 1usize..=4).prop_flat_map(of)
    }

    fn packed(bits: Bits, codes: &[u8], scales: &[f16]) -> Vec<u8> {
        let mut bytes = vec![0xAA; bits.row_bytes(codes.len() as u32)];
        pack_row(bits, codes, scales, &mut bytes);
        bytes
    }

    /// Any codebook of distinct values.
    fn codebook(bits: Bits) -> Codebook {
        let values: Vec<i8> =
            (0..bits.values() as i16).map(|code| (16 * code - 127) as i8).collect();
        Codebook::new(&values).unwrap()
    }

    proptest! {
        #[test]
        fn codes_and_scales_come_back((bits, codes, scales) in rows()) {
            let (bytes, codebook) = (packed(bits, &codes, &scales), codebook(bits));
            let row = Row::new(&codebook, &bytes);
            prop_assert_eq!(row.cols(), codes.len());
            let (found_scales, groups): (Vec<f16>, Vec<[u8; GROUP]>) = row.groups().unzip();
            prop_assert_eq!(found_scales, scales);
            prop_assert_eq!(groups.concat(), codes);
        }

        #[test]
        fn arithmetic_follows_the_definition((bits, codes, scales) in rows(), seed in 0u32..1000) {
            let (bytes, codebook) = (packed(bits, &codes, &scales), codebook(bits));
            let row = Row::new(&codebook, &bytes);
            let weight = |j: usize| {
                let value = codebook.values()[usize::from(codes[j])];
                scales[j / GROUP].to_f64() * f64::from(value) / 127.0
            };
            let x: Vec<f32> =
                (0..codes.len() as u32).map(|j| ((j * 31 + seed) % 97) as f32 / 48.0 - 1.0).collect();
            let mut weights = vec![f32::NAN; codes.len()];
            row.decode(&mut weights);
            let mut added = x.clone();
            row.add_scaled(-0.5, &mut added);
            let mut sum = 0.0;
            for j in 0..codes.len() {
                prop_assert!((f64::from(weights[j]) - weight(j)).abs() < 1e-6);
                prop_assert!((f64::from(added[j]) - (f64::from(x[j]) - 0.5 * weight(j))).abs() < 1e-6);
                sum += weight(j) * f64::from(x[j]);
            }
            prop_assert!((f64::from(row.dot(&x)) - sum).abs() < 1e-3, "{} {}", row.dot(&x), sum);
        }
    }

    #[test]
    fn bits_lie_where_the_format_says() {
        let mut codes = [0; GROUP];
        (codes[0], codes[9], codes[63]) = (1, 1, 1);
        let one = packed(Bits::One, &codes, &[f16::ONE]);
        assert_eq!(one, [1, 2, 0, 0, 0, 0, 0, 0x80, 0x00, 0x3c]);
        let mut codes = [0; GROUP];
        (codes[3], codes[19], codes[35], codes[51]) = (1, 2, 3, 2);
        let two = packed(Bits::Two, &codes, &[f16::ONE]);
        assert_eq!((two[3], two[4], two.len()), (0b10_11_10_01, 0, 18));
        (codes[3], codes[51]) = (5, 6);
        let three = packed(Bits::Three, &codes, &[f16::ONE]);
        assert_eq!(
            (three[3], three[16], three[22], three.len()),
            (0b10_11_10_01, 1 << 3, 1 << 3, 26)
        );
        let mut codes = [0; GROUP];
        (codes[5], codes[37]) = (9, 14);
        assert_eq!(packed(Bits::Four, &codes, &[f16::ONE])[5], 0xe9);
    }

    #[test]
    fn a_record_is_cut_into_its_rows() {
        let layout = RecordLayout::new(128, [Bits::new(2), Bits::new(3), None]).unwrap();
        let record: Vec<u8> = (0..layout.bytes() as u8).collect();
        let [gate, up, down] = layout.split(&record);
        assert_eq!((gate.len(), up.len(), down.len()), (36, 52, 0));
        assert_eq!((gate[0], up[0]), (0, 36));
        assert_eq!(RecordLayout::new(100, [None; 3]), Err(UnevenWidth { cols: 100 }));
        assert!(UnevenWidth { cols: 100 }.to_string().contains("100"));
    }

    #[test]
    fn a_codebook_has_a_power_of_two_values() {
        assert_eq!(Codebook::new(&[-127, -40, 40, 127]).unwrap().bits(), Bits::Two);
        for len in [0, 1, 3, 5, 17, 32] {
            assert!(Codebook::new(&vec![0; len]).is_none(), "{len}");
        }
    }
}
