//! Identifiers and sizes. An index, a count and a size are different types, so that a layer is never used as a
//! block and a byte count is never used as either.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($repr:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub $repr);

        impl $name {
            /// The id as an index into a slice.
            #[must_use]
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(/** A transformer layer, 0 first. */ LayerId(u16));
id!(/** A neuron of one FFN: a row of gate and up, a column of down. */ NeuronId(u32));
id!(/** A unit with a checksum of its own: a tile of a dense matrix or a block of neurons. Numbered in file order. */ BlockId(u32));
id!(/** An entry of the vocabulary. */ TokenId(u32));

/// A number of bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct ByteCount(pub u64);

impl ByteCount {
    /// Nothing.
    pub const ZERO: ByteCount = ByteCount(0);

    /// Bytes in `mib` mebibytes.
    #[must_use]
    pub const fn mib(mib: u64) -> ByteCount {
        ByteCount(mib << 20)
    }

    /// `self - other`, or zero.
    #[must_use]
    pub fn saturating_sub(self, other: ByteCount) -> ByteCount {
        ByteCount(self.0.saturating_sub(other.0))
    }
}

impl std::ops::Add for ByteCount {
    type Output = ByteCount;
    fn add(self, other: ByteCount) -> ByteCount {
        ByteCount(self.0 + other.0)
    }
}

impl std::ops::AddAssign for ByteCount {
    fn add_assign(&mut self, other: ByteCount) {
        self.0 += other.0;
    }
}

impl std::iter::Sum for ByteCount {
    fn sum<I: Iterator<Item = ByteCount>>(parts: I) -> ByteCount {
        parts.fold(ByteCount::ZERO, |a, b| a + b)
    }
}

/// Prints mebibytes with one decimal, the unit in which people set budgets.
impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} MiB", self.0 as f64 / f64::from(1u32 << 20))
    }
}
