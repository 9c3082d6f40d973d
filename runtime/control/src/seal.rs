//! How this crate's files are written: little endian, no padding, in the order of the fields.
//!
//! | what | as |
//! |---|---|
//! | magic | 4 bytes |
//! | version | u32 |
//! | bytes of the content | u64 |
//! | content | |
//! | XXH3-64 of all before | u64 |
//!
//! Magic, version, length and checksum are looked at before the content is, and memory is taken only for bytes that are
//! there.

use crate::error::{ControlError, ErrorClass};
use crate::plan::CoordinationPlan;
use ls_bundle::checksum;

const HEAD_BYTES: usize = 16;
const SUM_BYTES: usize = 8;

/// What a file is, for its head and for messages.
pub(crate) struct Form {
    pub(crate) name: &'static str,
    pub(crate) magic: &'static [u8; 4],
    pub(crate) version: u32,
}

impl Form {
    /// A file being written.
    pub(crate) fn writer(&self) -> Writer {
        let mut bytes = self.magic.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        Writer(bytes)
    }

    /// The content of a file.
    pub(crate) fn reader<'a>(&'static self, bytes: &'a [u8]) -> Result<Reader<'a>, ControlError> {
        let wrong = |class, what, found: String, wanted: String| {
            Err(ControlError::new(class, self.name, what, found, wanted))
        };
        let (incomplete, corrupt) = (ErrorClass::Incomplete, ErrorClass::Corrupt);
        let magic = &bytes[..bytes.len().min(4)];
        if magic != &self.magic[..magic.len()] {
            let (found, wanted) = (magic.escape_ascii(), self.magic.escape_ascii());
            let unsupported = ErrorClass::Unsupported;
            return wrong(unsupported, "magic", found.to_string(), wanted.to_string());
        }
        let there = bytes.len() as u64;
        if bytes.len() < HEAD_BYTES + SUM_BYTES {
            return wrong(incomplete, "bytes", there.to_string(), "a head".to_owned());
        }
        let version = u32::from_le_bytes(bytes[4..8].try_into().expect("4 bytes"));
        if version != self.version {
            let (found, wanted) = (version.to_string(), self.version.to_string());
            return wrong(ErrorClass::Unsupported, "version", found, wanted);
        }
        let len = u64::from_le_bytes(bytes[8..16].try_into().expect("8 bytes"));
        let wanted = len.saturating_add((HEAD_BYTES + SUM_BYTES) as u64);
        if there != wanted {
            let class = if there < wanted { incomplete } else { corrupt };
            return wrong(class, "bytes", there.to_string(), wanted.to_string());
        }
        let (sealed, sum) = bytes.split_at(bytes.len() - SUM_BYTES);
        let found = checksum::of(sealed);
        let wanted = u64::from_le_bytes(sum.try_into().expect("8 bytes"));
        if found != wanted {
            return wrong(corrupt, "checksum", format!("{found:016x}"), format!("{wanted:016x}"));
        }
        Ok(Reader { rest: &sealed[HEAD_BYTES..], name: self.name })
    }
}

/// Writes numbers one behind the other.
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn u16(&mut self, number: u16) {
        self.0.extend(number.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, number: u32) {
        self.0.extend(number.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, number: u64) {
        self.0.extend(number.to_le_bytes());
    }

    pub(crate) fn f32(&mut self, number: f32) {
        self.0.extend(number.to_le_bytes());
    }

    /// A count that was checked to be below its limit.
    pub(crate) fn count(&mut self, count: usize) {
        self.u32(u32::try_from(count).expect("counts were checked"));
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.count(text.len());
        self.0.extend(text.as_bytes());
    }

    pub(crate) fn plan(&mut self, plan: &CoordinationPlan) {
        self.0.extend(plan.compute);
        self.0.extend(plan.io);
    }

    /// The finished file.
    pub(crate) fn seal(mut self) -> Vec<u8> {
        let len = (self.0.len() - HEAD_BYTES) as u64;
        self.0[8..16].copy_from_slice(&len.to_le_bytes());
        let sum = checksum::of(&self.0);
        self.u64(sum);
        self.0
    }
}

/// What has not been read yet.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    name: &'static str,
}

impl<'a> Reader<'a> {
    /// The content contradicts itself.
    pub(crate) fn wrong(
        &self,
        what: &'static str,
        found: impl std::fmt::Display,
        wanted: impl std::fmt::Display,
    ) -> ControlError {
        ControlError::new(ErrorClass::Corrupt, self.name, what, found, wanted)
    }

    fn bytes(&mut self, len: usize) -> Result<&'a [u8], ControlError> {
        let (taken, rest) = self
            .rest
            .split_at_checked(len)
            .ok_or_else(|| self.wrong("bytes left", self.rest.len(), len))?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ControlError> {
        Ok(self.bytes(N)?.try_into().expect("N bytes were taken"))
    }

    pub(crate) fn u16(&mut self) -> Result<u16, ControlError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, ControlError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, ControlError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A number that is finite and not negative, as all that is measured is.
    pub(crate) fn measured(&mut self, what: &'static str) -> Result<f32, ControlError> {
        let number = f32::from_le_bytes(self.array()?);
        if number.is_finite() && number >= 0.0 {
            Ok(number)
        } else {
            Err(self.wrong(what, number, "a finite number of 0 or more"))
        }
    }

    /// A count within `low` to `high`, of items of at least `item_bytes` bytes each, which are there.
    pub(crate) fn count(
        &mut self,
        what: &'static str,
        low: usize,
        high: usize,
        item_bytes: usize,
    ) -> Result<usize, ControlError> {
        let count = self.u32()? as usize;
        if !(low..=high).contains(&count) {
            return Err(self.wrong(what, count, format!("{low} to {high}")));
        }
        if count * item_bytes > self.rest.len() {
            return Err(self.wrong("bytes left", self.rest.len(), count * item_bytes));
        }
        Ok(count)
    }

    pub(crate) fn text(&mut self, what: &'static str, high: usize) -> Result<String, ControlError> {
        let len = self.count(what, 0, high, 1)?;
        let bytes = self.bytes(len)?;
        String::from_utf8(bytes.to_vec()).map_err(|error| self.wrong("text", error, "UTF-8"))
    }

    pub(crate) fn plan(&mut self) -> Result<CoordinationPlan, ControlError> {
        let plan = CoordinationPlan { compute: self.array()?, io: self.array()? };
        if plan.is_sound() {
            Ok(plan)
        } else {
            Err(self.wrong("plan", format!("{plan:?}"), "frequencies of 1, 2, 4 or 8"))
        }
    }

    /// Nothing is left.
    pub(crate) fn end(&self) -> Result<(), ControlError> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(self.wrong("bytes behind the end", self.rest.len(), 0))
        }
    }
}
