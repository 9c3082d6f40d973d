//! [`TraceError`]: what is wrong with a trace.

use std::fmt;

/// Bytes are not a trace.
#[derive(Debug, thiserror::Error)]
#[error("unusable access trace: {what}: {found} found, {wanted} wanted")]
pub struct TraceError {
    what: &'static str,
    found: String,
    wanted: String,
}

impl TraceError {
    pub(crate) fn new(
        what: &'static str,
        found: impl fmt::Display,
        wanted: impl fmt::Display,
    ) -> TraceError {
        TraceError { what, found: found.to_string(), wanted: wanted.to_string() }
    }
}
