//! [`ControlError`]: what is wrong with a table or a profile.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A sort of failure, for exit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// Not such a file, or of a version this program does not know.
    Unsupported,
    /// The beginning of one.
    Incomplete,
    /// One that was damaged, or that contradicts itself.
    Corrupt,
    /// The operating system refused.
    Io,
}

/// A table or profile cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ControlError(Box<Kind>);

#[derive(Debug, thiserror::Error)]
enum Kind {
    #[error("unusable {of}: {what}: {found} found, {wanted} wanted")]
    Content {
        class: ErrorClass,
        of: &'static str,
        what: &'static str,
        found: String,
        wanted: String,
    },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: ControlError },
}

impl ControlError {
    pub(crate) fn new(
        class: ErrorClass,
        of: &'static str,
        what: &'static str,
        found: impl fmt::Display,
        wanted: impl fmt::Display,
    ) -> ControlError {
        let (found, wanted) = (found.to_string(), wanted.to_string());
        ControlError(Box::new(Kind::Content { class, of, what, found, wanted }))
    }

    pub(crate) fn io(path: &Path, source: io::Error) -> ControlError {
        ControlError(Box::new(Kind::Io { path: path.to_owned(), source }))
    }

    /// Names the file.
    pub(crate) fn in_file(self, path: &Path) -> ControlError {
        ControlError(Box::new(Kind::File { path: path.to_owned(), source: self }))
    }

    /// The sort of failure.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match &*self.0 {
            Kind::Content { class, .. } => *class,
            Kind::Io { .. } => ErrorClass::Io,
            Kind::File { source, .. } => source.class(),
        }
    }
}
