//! Checksums: XXH3-64 without seed. They find accidents, not forgers: what a file says is checked for sense too.

use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// The checksum of `bytes`.
#[must_use]
pub fn of(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// The checksum of bytes that come in pieces.
pub(crate) struct Running(Xxh3Default);

impl Running {
    pub(crate) fn new() -> Running {
        Running(Xxh3Default::new())
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(&self) -> u64 {
        self.0.digest()
    }
}
