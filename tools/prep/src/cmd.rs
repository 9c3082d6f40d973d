//! The commands, each in a file with its arguments.

pub(crate) mod all;
pub(crate) mod base;
pub(crate) mod compare;
pub(crate) mod datasets;
pub(crate) mod guard;
pub(crate) mod lut;
pub(crate) mod paper;
pub(crate) mod predictor;
pub(crate) mod report;
pub(crate) mod reuse;
pub(crate) mod stages;
pub(crate) mod synth;

use ls_prep::error::{PrepError, Result};
use serde_json::Value;
use std::io::Write;
use std::path::Path;

/// Prints to stdout.
pub(crate) fn print(text: impl std::fmt::Display) -> Result<()> {
    let written = writeln!(std::io::stdout(), "{text}");
    written.map_err(|source| PrepError::io(Path::new("standard output"), source))
}

/// The fields of `above` beside those of `object`.
pub(crate) fn extend(object: &mut Value, above: Value) {
    if let (Value::Object(object), Value::Object(above)) = (object, above) {
        object.extend(above);
    }
}
