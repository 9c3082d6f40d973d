//! [`ControlError`]: what is wrong with the bytes of a table or a profile.

use std::fmt;

/// A sort of failure, for exit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// Not such a file, or of a version this program does not know.
    Unsupported,
    /// The beginning of one.
    Incomplete,
    /// One that was damaged, or that contradicts itself.
    Corrupt,
}

/// Bytes are not what they should be.
#[derive(Debug, thiserror::Error)]
#[error("unusable {of}: {what}: {found} found, {wanted} wanted")]
pub struct ControlError {
    class: ErrorClass,
    of: &'static str,
    what: &'static str,
    found: String,
    wanted: String,
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
        ControlError { class, of, what, found, wanted }
    }

    /// The sort of failure.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        self.class
    }
}
