//! [`ReuseTable`]: what was learned of a layer's reuse, and its form as bytes. Little-endian, no padding:
//!
//! | what | as |
//! |---|---|
//! | magic, version | `LSRU`, u32 |
//! | kind (0 gaps, 1 hazard) | u32 |
//! | of gaps: history, thresholds | u32 each |
//! | … thresholds, distances | u16 each; distances by the number of histories |
//! | of hazard: visits remembered, two rates | u32; u16 each |
//! | … levels of the two means, blocks | u32 each |
//! | … thresholds, worths, initial means | u16 each |
//!
//! Sizes are checked before anything is computed from them. There is no checksum: the file around it has one.

use crate::error::ReuseError;
use crate::policy::{GapTable, HazardTable};

const MAGIC: &[u8; 4] = b"LSRU";
const VERSION: u32 = 1;
/// Blocks of a layer.
const MAX_BLOCKS: usize = 1 << 20;

/// What a policy knows of a layer beforehand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReuseTable {
    /// For [`ReuseDistance`](crate::policy::ReuseDistance).
    Gaps(GapTable),
    /// For [`Hazard`](crate::policy::Hazard).
    Hazard(HazardTable),
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], ReuseError> {
        let (taken, rest) = self
            .0
            .split_first_chunk::<N>()
            .ok_or_else(|| ReuseError::new("bytes left", self.0.len(), N))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn size(&mut self, what: &'static str, low: usize, high: usize) -> Result<usize, ReuseError> {
        let size = u32::from_le_bytes(self.take()?) as usize;
        if (low..=high).contains(&size) {
            Ok(size)
        } else {
            Err(ReuseError::new(what, size, format!("{low} to {high}")))
        }
    }

    fn numbers(&mut self, count: usize) -> Result<Vec<u16>, ReuseError> {
        let (taken, rest) = self
            .0
            .split_at_checked(2 * count)
            .ok_or_else(|| ReuseError::new("bytes left", self.0.len(), 2 * count))?;
        self.0 = rest;
        Ok(taken.as_chunks().0.iter().map(|number| u16::from_le_bytes(*number)).collect())
    }
}

impl ReuseTable {
    /// The table as bytes.
    ///
    /// # Panics
    /// If it is not sound.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let mut sizes = vec![VERSION];
        let mut numbers: Vec<&[u16]> = Vec::new();
        match self {
            ReuseTable::Gaps(table) => {
                assert!(table.is_sound(), "a table of gaps");
                sizes.extend([0, table.history, table.thresholds.len() as u32]);
                numbers.extend([&table.thresholds[..], &table.distances]);
            }
            ReuseTable::Hazard(table) => {
                assert!(table.is_sound(), "a table of worths");
                let [fast, slow] = table.levels().map(|levels| levels as u32);
                let rates = u32::from(table.rates[0]) | u32::from(table.rates[1]) << 16;
                sizes.extend([1, table.recent, rates, fast, slow, table.initial.len() as u32]);
                let [fast, slow] = &table.thresholds;
                numbers.extend([&fast[..], slow, &table.worths, &table.initial]);
            }
        }
        bytes.extend(sizes.iter().flat_map(|size| size.to_le_bytes()));
        bytes.extend(numbers.iter().flat_map(|list| list.iter().flat_map(|n| n.to_le_bytes())));
        bytes
    }

    /// Reads what [`ReuseTable::to_bytes`] gives.
    ///
    /// # Errors
    /// If the bytes are anything else. No memory is taken for more than is there.
    pub fn from_bytes(bytes: &[u8]) -> Result<ReuseTable, ReuseError> {
        let mut reader = Reader(bytes);
        let magic = reader.take::<4>()?;
        if magic != *MAGIC {
            return Err(ReuseError::new("magic", magic.escape_ascii(), "LSRU"));
        }
        let version = VERSION as usize;
        reader.size("version", version, version)?;
        let table = match reader.size("kind", 0, 1)? {
            0 => ReuseTable::Gaps(reader.gaps()?),
            _ => ReuseTable::Hazard(reader.hazard()?),
        };
        if !reader.0.is_empty() {
            return Err(ReuseError::new("bytes behind the table", reader.0.len(), 0));
        }
        Ok(table)
    }
}

impl Reader<'_> {
    fn gaps(&mut self) -> Result<GapTable, ReuseError> {
        let history = self.size("gaps of a history", 1, 16)?;
        let count = self.size("thresholds of gaps", 1, (1 << 16) - 1)?;
        let bits = (count + 1).trailing_zeros() as usize * history;
        if !(count + 1).is_power_of_two() || bits > 16 {
            return Err(ReuseError::new("thresholds of gaps", count, "2^n - 1, n gaps in 16 bits"));
        }
        let thresholds = self.numbers(count)?;
        let distances = self.numbers(1 << bits)?;
        let table = GapTable { thresholds, history: history as u32, distances };
        if table.is_sound() { Ok(table) } else { Err(unordered()) }
    }

    fn hazard(&mut self) -> Result<HazardTable, ReuseError> {
        let recent = self.size("visits remembered", 0, 8)?;
        let rates = u32::from_le_bytes(self.take()?);
        let fast = self.size("levels of the fast mean", 1, 64)?;
        let slow = self.size("levels of the slow mean", 1, 64)?;
        let blocks = self.size("blocks", 1, MAX_BLOCKS)?;
        let table = HazardTable {
            recent: recent as u32,
            rates: [rates as u16, (rates >> 16) as u16],
            thresholds: [self.numbers(fast - 1)?, self.numbers(slow - 1)?],
            worths: self.numbers((fast * slow) << recent)?,
            initial: self.numbers(blocks)?,
        };
        if table.is_sound() { Ok(table) } else { Err(unordered()) }
    }
}

fn unordered() -> ReuseError {
    ReuseError::new("thresholds", "unordered or too large numbers", "ascending ones")
}
