//! Checksums: XXH3-64 without seed. They find accidents, not forgers: what a file says is checked for sense too.

use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// The checksum of `bytes`.
#[must_use]
pub fn of(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// The checksum of bytes that come in pieces.
pub struct Running(Xxh3Default);

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Running").finish()
    }
}

impl Default for Running {
    fn default() -> Running {
        Running::new()
    }
}

impl Running {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Running {
        Running(Xxh3Default::new())
    }

    /// The next piece.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all so far.
    #[must_use]
    pub fn finish(&self) -> u64 {
        self.0.digest()
    }
}
