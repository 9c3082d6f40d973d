//! [`HashError`]: what is wrong with the tables of a stack.

use std::fmt;

/// A sort of failure, for exit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// Not tables of a hash stack, or of a version this program does not know.
    Unsupported,
    /// Tables that end early, go on too long or contradict themselves.
    Invalid,
}

/// Tables cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct HashError(Box<Kind>);

#[derive(Debug, thiserror::Error)]
enum Kind {
    #[error("not tables of a hash stack that this version can read: {0}")]
    Unsupported(String),
    #[error("unusable tables of a hash stack: {what}: {found} found, {wanted} wanted")]
    Invalid { what: &'static str, found: String, wanted: String },
}

impl HashError {
    pub(crate) fn unsupported(found: String) -> HashError {
        HashError(Box::new(Kind::Unsupported(found)))
    }

    pub(crate) fn invalid(
        what: &'static str,
        found: impl fmt::Display,
        wanted: impl fmt::Display,
    ) -> HashError {
        let (found, wanted) = (found.to_string(), wanted.to_string());
        HashError(Box::new(Kind::Invalid { what, found, wanted }))
    }

    /// The sort of failure.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match *self.0 {
            Kind::Unsupported(_) => ErrorClass::Unsupported,
            Kind::Invalid { .. } => ErrorClass::Invalid,
        }
    }
}

/// An error unless `found` is `wanted`.
pub(crate) fn same(what: &'static str, found: usize, wanted: usize) -> Result<(), HashError> {
    if found == wanted { Ok(()) } else { Err(HashError::invalid(what, found, wanted)) }
}

/// An error unless `low <= found <= high`.
pub(crate) fn within(
    what: &'static str,
    found: usize,
    low: usize,
    high: usize,
) -> Result<(), HashError> {
    if (low..=high).contains(&found) {
        Ok(())
    } else {
        Err(HashError::invalid(what, found, format!("{low} to {high}")))
    }
}

/// An error unless all numbers are finite.
pub(crate) fn finite(what: &'static str, numbers: &[f32]) -> Result<(), HashError> {
    match numbers.iter().find(|n| !n.is_finite()) {
        Some(n) => Err(HashError::invalid(what, n, "finite numbers")),
        None => Ok(()),
    }
}
