//! [`BundleError`]: what is wrong with a bundle, where, and what to do about it.
//!
//! The kind is private so that it can grow; callers decide by [`BundleError::class`].

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// What is wrong, in one sentence that names the field. The place around it is added by whoever knows it.
pub(crate) type Flaw = String;

/// A sort of failure, for exit codes and for deciding whether another try can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// Not a bundle at all.
    Foreign,
    /// The beginning of a bundle: the file is shorter than its header says.
    Incomplete,
    /// A bundle that was damaged, or that contradicts itself.
    Corrupt,
    /// A bundle that this version cannot read.
    Unsupported,
    /// The operating system refused.
    Io,
    /// What should be written would not be a valid bundle.
    Invalid,
}

/// A bundle could not be opened, verified or written.
pub struct BundleError {
    inner: Box<Inner>,
}

struct Inner {
    path: Option<PathBuf>,
    kind: Kind,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Kind {
    #[error("not a LeanStream bundle: {found}; make one with `ls-prep import`")]
    Foreign { found: String },
    #[error(
        "incomplete bundle: {found_bytes} bytes are there, {wanted_bytes} are wanted; copy or convert it again"
    )]
    Incomplete { found_bytes: u64, wanted_bytes: u64 },
    #[error("corrupt bundle: {at}: {flaw}; copy or convert it again")]
    Corrupt { at: String, flaw: Flaw },
    #[error("unsupported bundle: {at}: {found}; use a newer version of this program")]
    Unsupported { at: String, found: String },
    #[error("cannot {action}: {source}")]
    Io { action: String, source: io::Error },
    #[error("cannot make a bundle of this: {at}: {flaw}")]
    Invalid { at: String, flaw: Flaw },
}

impl Kind {
    pub(crate) fn corrupt(at: impl fmt::Display, flaw: impl Into<Flaw>) -> Kind {
        Kind::Corrupt { at: at.to_string(), flaw: flaw.into() }
    }

    pub(crate) fn invalid(at: impl fmt::Display, flaw: impl Into<Flaw>) -> Kind {
        Kind::Invalid { at: at.to_string(), flaw: flaw.into() }
    }

    pub(crate) fn io(action: impl Into<String>, source: io::Error) -> Kind {
        Kind::Io { action: action.into(), source }
    }

    /// Names the file.
    pub(crate) fn of(self, path: &Path) -> BundleError {
        BundleError { inner: Box::new(Inner { path: Some(path.to_path_buf()), kind: self }) }
    }
}

impl From<Kind> for BundleError {
    fn from(kind: Kind) -> BundleError {
        BundleError { inner: Box::new(Inner { path: None, kind }) }
    }
}

impl BundleError {
    /// The sort of failure.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self.inner.kind {
            Kind::Foreign { .. } => ErrorClass::Foreign,
            Kind::Incomplete { .. } => ErrorClass::Incomplete,
            Kind::Corrupt { .. } => ErrorClass::Corrupt,
            Kind::Unsupported { .. } => ErrorClass::Unsupported,
            Kind::Io { .. } => ErrorClass::Io,
            Kind::Invalid { .. } => ErrorClass::Invalid,
        }
    }
}

impl fmt::Display for BundleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.inner.path {
            write!(f, "{}: ", path.display())?;
        }
        self.inner.kind.fmt(f)
    }
}

impl fmt::Debug for BundleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BundleError({:?}: {self})", self.class())
    }
}

impl std::error::Error for BundleError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.inner.kind.source()
    }
}
