//! [`BaseTables`]: what goes with the low-bit records of a layer's neurons (the *base*).
//!
//! The base estimates every neuron's activation a~ = SiLU(g~) u~ from its low-bit gate and up rows. A neuron that does
//! not run exactly is replaced by `(offset + slope * a~) * d~`, d~ its low-bit down column, and the layer's `constant` is
//! added once. How much that is expected to be wrong is the neuron's score:
//!
//! ```text
//! sqrt((a~ * down_error)^2 + (SiLU'(g~) u~ * gate_error)^2 + (SiLU(g~) * up_error)^2)
//! ```
//!
//! The low-bit rows and columns are the [`tiles`](crate::tiles) of gate, up and down, one matrix behind the other.
//!
//! The tables as bytes, little endian: `LSBT`, u32 version 2, u32 cols, u32 neurons; for gate, up and down u8 bits (0: not there)
//! and 16 signed bytes of codebook, zeros behind its values; five f32 arrays of an entry a neuron (offset, slope,
//! down_error, gate_error, up_error); `constant`, f32 \[cols\].

use crate::low_bit::{Codebook, GROUP};
use crate::tiles::matrix_bytes;

const MAGIC: &[u8; 4] = b"LSBT";
/// 1 had rows where 2 has tiles.
const VERSION: u32 = 2;
const FRONT_BYTES: usize = 16;
const CODEBOOK_BYTES: usize = 17;
const FIELDS: usize = 5;

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq)]
pub struct BaseTables {
    /// Weights of a row: the width of the residual stream.
    pub cols: u32,
    /// Codebooks of gate, up and down. Gate and up score; without down nothing stands in.
    pub codebooks: [Option<Codebook>; 3],
    /// What an unselected neuron contributes on average beside its slope; an entry a neuron.
    pub offset: Vec<f32>,
    /// How much of its estimate it contributes.
    pub slope: Vec<f32>,
    /// |d - d~|: what an exact activation loses in the low-bit down column.
    pub down_error: Vec<f32>,
    /// |d| times the deviation of g~ from g.
    pub gate_error: Vec<f32>,
    /// |d| times the deviation of u~ from u.
    pub up_error: Vec<f32>,
    /// Added to the layer's output whenever something stands in; an entry a column.
    pub constant: Vec<f32>,
}

/// Bytes that are no tables.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tables of a base: {0}")]
pub struct BadTables(String);

impl BaseTables {
    /// Number of neurons.
    #[must_use]
    pub fn neurons(&self) -> u32 {
        self.slope.len() as u32
    }

    /// Bytes of the tiles of gate, up and down that go with them.
    #[must_use]
    pub fn tile_bytes(&self) -> [usize; 3] {
        let bytes = |book: Codebook| matrix_bytes(book.bits(), self.neurons(), self.cols);
        self.codebooks.map(|book| book.map_or(0, bytes))
    }

    /// Bytes of tables for so many neurons with rows of `cols` weights.
    #[must_use]
    pub fn bytes(neurons: u32, cols: u32) -> u64 {
        let floats = FIELDS as u64 * u64::from(neurons) + u64::from(cols);
        (FRONT_BYTES + 3 * CODEBOOK_BYTES) as u64 + 4 * floats
    }

    fn fields(&self) -> [(&'static str, &[f32]); FIELDS + 1] {
        [
            ("offset", &self.offset),
            ("slope", &self.slope),
            ("down_error", &self.down_error),
            ("gate_error", &self.gate_error),
            ("up_error", &self.up_error),
            ("constant", &self.constant),
        ]
    }

    /// Writes them.
    ///
    /// # Panics
    /// If arrays have not an entry a neuron, or a column.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(BaseTables::bytes(self.neurons(), self.cols) as usize);
        bytes.extend_from_slice(MAGIC);
        for number in [VERSION, self.cols, self.neurons()] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for book in &self.codebooks {
            let values = book.as_ref().map_or(&[][..], |book| book.values());
            bytes.push(book.map_or(0, |book| book.bits().count() as u8));
            let padded = values.iter().copied().chain(std::iter::repeat(0)).take(16);
            bytes.extend(padded.map(i8::cast_unsigned));
        }
        for (name, field) in self.fields() {
            let wanted = if name == "constant" { self.cols } else { self.neurons() };
            assert_eq!(field.len(), wanted as usize, "entries of {name}");
            bytes.extend(field.iter().flat_map(|value| value.to_le_bytes()));
        }
        bytes
    }

    /// Reads them.
    ///
    /// # Errors
    /// If the bytes are not what [`BaseTables::to_bytes`] writes for `neurons` neurons of `cols` weights a row.
    pub fn from_bytes(bytes: &[u8], neurons: u32, cols: u32) -> Result<BaseTables, BadTables> {
        let bad = |problem: String| Err(BadTables(problem));
        let wanted = BaseTables::bytes(neurons, cols);
        if bytes.len() as u64 != wanted {
            return bad(format!("{} bytes, {wanted} are wanted", bytes.len()));
        }
        let (front, rest) = bytes.split_at(FRONT_BYTES);
        let number =
            |at: usize| u32::from_le_bytes(*front[at..].first_chunk().expect("within the front"));
        if &front[..4] != MAGIC || number(4) != VERSION {
            return bad(
                "they do not start as tables of version 2: pack the bundle again with this ls-prep"
                    .to_owned(),
            );
        }
        if (number(8), number(12)) != (cols, neurons) {
            let found = (number(12), number(8));
            return bad(format!("of {} x {} weights, not {neurons} x {cols}", found.0, found.1));
        }
        let (books, rest) = rest.split_at(3 * CODEBOOK_BYTES);
        let mut codebooks = [None; 3];
        for (book, bytes) in codebooks.iter_mut().zip(books.chunks_exact(CODEBOOK_BYTES)) {
            *book = codebook(bytes)?;
        }
        let mut floats = rest.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        let mut next = |len: u32| -> Vec<f32> { floats.by_ref().take(len as usize).collect() };
        let tables = BaseTables {
            cols,
            codebooks,
            offset: next(neurons),
            slope: next(neurons),
            down_error: next(neurons),
            gate_error: next(neurons),
            up_error: next(neurons),
            constant: next(cols),
        };
        for (name, field) in tables.fields() {
            if let Some(index) = field.iter().position(|value| !value.is_finite()) {
                return bad(format!("{name} {index} is {}", field[index]));
            }
        }
        if cols == 0 || !cols.is_multiple_of(GROUP as u32) {
            return bad(format!("rows of {cols} weights, no multiple of {GROUP}"));
        }
        Ok(tables)
    }
}

fn codebook(bytes: &[u8]) -> Result<Option<Codebook>, BadTables> {
    let (bits, values) = (bytes[0], &bytes[1..]);
    let used = if (1..=4).contains(&bits) { 1 << bits } else { 0 };
    if (bits > 4) || values[used..].iter().any(|&value| value != 0) {
        return Err(BadTables(format!("a codebook of {bits} bits")));
    }
    let values: Vec<i8> = values[..used].iter().map(|value| value.cast_signed()).collect();
    Ok(Codebook::new(&values))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables() -> BaseTables {
        let field = |start: u32| (start..start + 3).map(|x| x as f32).collect();
        BaseTables {
            cols: 64,
            codebooks: [Codebook::new(&[-9, 3, 4, 5]), Codebook::new(&[-1, 1]), None],
            offset: field(0),
            slope: field(10),
            down_error: field(20),
            gate_error: field(30),
            up_error: field(40),
            constant: (0..64).map(|x| x as f32 / 8.0).collect(),
        }
    }

    #[test]
    fn tables_come_back() {
        let bytes = tables().to_bytes();
        assert_eq!(BaseTables::from_bytes(&bytes, 3, 64), Ok(tables()));
        // A tile each of 64 x 64 codes and 64 scales.
        assert_eq!(tables().tile_bytes(), [1024 + 128, 512 + 128, 0]);
    }

    #[test]
    fn what_is_no_table_is_an_error() {
        let bytes = tables().to_bytes();
        let check = |wanted: &str, at: usize, with: &[u8]| {
            let mut bytes = bytes.clone();
            bytes[at..at + with.len()].copy_from_slice(with);
            let error = BaseTables::from_bytes(&bytes, 3, 64).unwrap_err().to_string();
            assert!(error.contains(wanted), "no {wanted:?} in {error}");
        };
        check("version 2", 0, b"X");
        check("version 2", 4, &[1]);
        check("of 3 x 65", 8, &[65]);
        check("of 4 x 64", 12, &[4]);
        check("codebook of 5 bits", 16, &[5]);
        check("codebook of 2 bits", 16 + 6, &[1]);
        check("offset 1 is NaN", 16 + 51 + 4, &f32::NAN.to_le_bytes());
        check("constant 63 is inf", bytes.len() - 4, &f32::INFINITY.to_le_bytes());
        for len in [0, 1, bytes.len() - 1] {
            assert!(BaseTables::from_bytes(&bytes[..len], 3, 64).is_err());
        }
        assert!(BaseTables::from_bytes(&bytes, 2, 64).is_err());
    }
}
