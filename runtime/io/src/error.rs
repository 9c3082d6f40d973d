//! [`IoError`]: what was being done, where, and what the operating system said.

use std::io;
use std::path::Path;
use std::sync::Arc;

use ls_sync::AllocateError;

/// A read, or the opening of a store, failed. The text names the file and the range.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct IoError(#[from] Kind);

#[derive(Debug, thiserror::Error)]
pub(crate) enum Kind {
    #[error("{}: cannot open for reading: {source}", path.display())]
    Open { path: Arc<Path>, source: io::Error },
    #[error("{}: cannot read {len} bytes at offset {offset}: {source}", path.display())]
    Read { path: Arc<Path>, offset: u64, len: usize, source: io::Error },
    #[error(
        "{}: file is shorter than {wanted} bytes (reading {len} bytes at offset {offset}): was it replaced or truncated?",
        path.display()
    )]
    Truncated { path: Arc<Path>, offset: u64, len: usize, wanted: u64 },
    #[error("{}: io_uring failed: {source}", path.display())]
    Ring { path: Arc<Path>, source: io::Error },
    #[error("cannot start a reading thread: {0}")]
    Thread(io::Error),
    #[error(transparent)]
    Memory(AllocateError),
    #[error("{path}: cannot read {name} {source}")]
    Proc { path: &'static str, name: &'static str, source: io::Error },
    #[error("{}: {len} bytes are too few to measure a disk with", path.display())]
    TooSmallToProbe { path: Arc<Path>, len: u64 },
}

impl IoError {
    /// What the operating system said, where it was asked.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match &self.0 {
            Kind::Open { source, .. }
            | Kind::Read { source, .. }
            | Kind::Ring { source, .. }
            | Kind::Proc { source, .. }
            | Kind::Thread(source) => source.raw_os_error(),
            Kind::Memory(e) => e.source.raw_os_error(),
            Kind::Truncated { .. } | Kind::TooSmallToProbe { .. } => None,
        }
    }

    /// What was being read: first byte in the file and length; None if it was no read.
    #[must_use]
    pub fn range(&self) -> Option<(u64, usize)> {
        match self.0 {
            Kind::Read { offset, len, .. } | Kind::Truncated { offset, len, .. } => {
                Some((offset, len))
            }
            _ => None,
        }
    }

    /// Whether the file ended before the read did.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        matches!(self.0, Kind::Truncated { .. })
    }
}

impl From<AllocateError> for IoError {
    fn from(e: AllocateError) -> IoError {
        Kind::Memory(e).into()
    }
}
