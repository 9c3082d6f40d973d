//! [`PrepError`]: what can go wrong between a model's files and a bundle.

use crate::exit::Exit;
use ls_bundle::{BundleError, ErrorClass};
use ls_control::ControlError;
use std::fmt::Display;
use std::io;
use std::path::Path;

/// Result with this crate's error.
pub type Result<T> = std::result::Result<T, PrepError>;

/// Why a model could not be imported. The text names the file, the place in it, what was found and what was wanted.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct PrepError(Box<Kind>);

#[derive(Debug, thiserror::Error)]
enum Kind {
    #[error("usage: {0}")]
    Usage(String),
    #[error("corrupt: {place}: {problem}")]
    Corrupt { place: String, problem: String },
    #[error("incomplete: {place}: {problem}")]
    Incomplete { place: String, problem: String },
    #[error("unsupported: {0}")]
    Unsupported(String),
    #[error("{place}: {source}")]
    Io { place: String, source: io::Error },
    #[error(transparent)]
    Bundle(BundleError),
    #[error(transparent)]
    Control(ControlError),
}

impl PrepError {
    /// The command line makes no sense.
    pub fn usage(problem: impl Display) -> Self {
        PrepError(Box::new(Kind::Usage(problem.to_string())))
    }

    /// `place` breaks the rules of its format.
    pub fn corrupt(place: impl Display, problem: impl Display) -> Self {
        let (place, problem) = (place.to_string(), problem.to_string());
        PrepError(Box::new(Kind::Corrupt { place, problem }))
    }

    /// Part of `place` is missing.
    pub fn incomplete(place: impl Display, problem: impl Display) -> Self {
        let (place, problem) = (place.to_string(), problem.to_string());
        PrepError(Box::new(Kind::Incomplete { place, problem }))
    }

    /// Valid, but beyond what this version does.
    pub fn unsupported(what: impl Display) -> Self {
        PrepError(Box::new(Kind::Unsupported(what.to_string())))
    }

    /// The operating system refused something about `path`.
    pub fn io(path: &Path, source: io::Error) -> Self {
        PrepError(Box::new(Kind::Io { place: path.display().to_string(), source }))
    }

    /// The exit code that says what kind of error this is.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match &*self.0 {
            Kind::Usage(_) => Exit::Usage,
            Kind::Corrupt { .. } => Exit::Corrupt,
            Kind::Incomplete { .. } => Exit::Incomplete,
            Kind::Unsupported(_) => Exit::Unsupported,
            Kind::Io { .. } => Exit::Io,
            Kind::Bundle(error) => match error.class() {
                ErrorClass::Io => Exit::Io,
                ErrorClass::Invalid | ErrorClass::Unsupported => Exit::Unsupported,
                ErrorClass::Foreign | ErrorClass::Corrupt => Exit::Corrupt,
                ErrorClass::Incomplete => Exit::Incomplete,
            },
            Kind::Control(error) => match error.class() {
                ls_control::ErrorClass::Io => Exit::Io,
                ls_control::ErrorClass::Unsupported => Exit::Unsupported,
                ls_control::ErrorClass::Corrupt => Exit::Corrupt,
                ls_control::ErrorClass::Incomplete => Exit::Incomplete,
            },
        }
    }
}

/// What a bundle cannot hold is unsupported: the model itself may be sound.
impl From<BundleError> for PrepError {
    fn from(error: BundleError) -> Self {
        PrepError(Box::new(Kind::Bundle(error)))
    }
}

impl From<ControlError> for PrepError {
    fn from(error: ControlError) -> Self {
        PrepError(Box::new(Kind::Control(error)))
    }
}
