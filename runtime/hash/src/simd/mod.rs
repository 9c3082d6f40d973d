//! The arithmetic leaves, once per instruction set.
//!
//! [`Ops`] is a table of functions on slices; [`Kernels::detect`] picks one table when a stack is made. `scalar` is the
//! definition: all others give the same bits, also in f32, where the order of sums is part of the definition.

pub(crate) mod scalar;

#[cfg(target_arch = "x86_64")]
mod avx2;

#[cfg(test)]
mod tests;

use crate::signals::{SignalTables, Signals};

/// A feature to round. See [`crate::Input`]. All slices, and the result, are of one length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounding<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) scale: f32,
    pub(crate) center: &'a [f32],
    pub(crate) gain: &'a [f32],
}

/// What all blocks' scores are made of. See [`crate::BlockHead`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scoring<'a> {
    /// Signs of a block.
    pub(crate) bits: usize,
    /// Whole groups of interleaved blocks.
    pub(crate) signs: &'a [u8],
    /// One a block.
    pub(crate) scales: &'a [i16],
    /// One a block.
    pub(crate) offsets: &'a [i16],
    /// Of offsets, to the left.
    pub(crate) shift: u32,
}

/// Why no sum overflows: [`crate::limits`].
#[derive(Debug)]
pub(crate) struct Ops {
    /// For people.
    pub(crate) name: &'static str,
    /// Sum of squares: element i goes to sum i % 8; sums j and j + 4 are added, then j and j + 2, then the last two.
    pub(crate) sum_squares: fn(x: &[f32]) -> f32,
    /// The rounded feature, as [`crate::Input`] defines it.
    pub(crate) round: fn(feature: Rounding<'_>, out: &mut [i8]),
    /// `out[r] = row r . x` for rows of 8-bit weights; x is a multiple of 32 long.
    pub(crate) dot_i8: fn(rows: &[u8], x: &[i8], out: &mut [i32]),
    /// The same of 4-bit weights; a multiple of 64.
    pub(crate) dot_i4: fn(rows: &[u8], x: &[i8], out: &mut [i32]),
    /// The same of 2-bit weights; a multiple of 128.
    pub(crate) dot_i2: fn(rows: &[u8], x: &[i8], out: &mut [i32]),
    /// The same of f32 weights, summed as by `sum_squares`; a multiple of 8.
    pub(crate) dot_f32: fn(rows: &[f32], x: &[f32], out: &mut [f32]),
    /// In how many bits each row differs from the code.
    pub(crate) distances: fn(rows: &[u64], code: &[u64], out: &mut [u32]),
    /// Scores of `out.len()` blocks whose signs meet the code's signs.
    pub(crate) score_signs: fn(scoring: Scoring<'_>, code: &[u64], out: &mut [i32]),
    /// Scores of `out.len()` blocks whose signs meet levels, one a sign, within -7 to 7.
    pub(crate) score_levels: fn(scoring: Scoring<'_>, levels: &[i8], out: &mut [i32]),
    /// Ages both means by a step of the given rates and makes the offsets anew.
    pub(crate) remember: fn(&SignalTables, fast: u16, slow: u16, biases: &[i16], &mut Signals),
    /// Smallest and largest; 0 and 0 of nothing.
    pub(crate) range: fn(x: &[i32]) -> (i32, i32),
    /// Bit i % 64 of word i / 64 of `out`: whether `x[i] >= least`. Other bits are clear.
    pub(crate) at_least: fn(x: &[i32], least: i32, out: &mut [u64]),
}

/// A choice of instruction set.
#[derive(Clone, Copy, Debug)]
pub struct Kernels(pub(crate) &'static Ops);

impl Kernels {
    /// The fastest that this CPU runs.
    #[must_use]
    pub fn detect() -> Kernels {
        #[cfg(target_arch = "x86_64")]
        if let Some(ops) = avx2::available() {
            return Kernels(ops);
        }
        Kernels::scalar()
    }

    /// Plain Rust, for any CPU.
    #[must_use]
    pub fn scalar() -> Kernels {
        Kernels(&scalar::OPS)
    }

    /// In how many bits each of `rows` differs from `code`; a row is as long as the code.
    pub fn distances(self, rows: &[u64], code: &[u64], out: &mut [u32]) {
        assert_eq!(rows.len(), code.len() * out.len(), "a distance a row");
        (self.0.distances)(rows, code, out);
    }

    /// Name of the instruction set.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name
    }
}
