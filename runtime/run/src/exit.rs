//! Exit codes: one a kind of failure, so that scripts need not read messages. The same numbers in `ls-prep`.

use crate::cmd::eval::data::{Class, DataError};
use ls_bundle::ErrorClass;
use ls_engine::{EngineError, EngineErrorKind};

/// How the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Anything that is none of the below; should not happen.
    Failure = 1,
    /// The command line, or a request that cannot be met (clap uses the same number).
    Usage = 2,
    /// A file's content is wrong.
    Corrupt = 3,
    /// A file ends early, or one is missing.
    Incomplete = 4,
    /// A file is fine but asks for what this version does not do, or is no bundle at all.
    Unsupported = 5,
    /// The memory budget is below the minimum.
    Budget = 6,
    /// Reading, writing or mapping memory failed.
    Io = 7,
}

/// A command line that parses but asks for something impossible.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

impl Exit {
    /// The code for an error of a command.
    #[must_use]
    pub fn of(error: &anyhow::Error) -> Exit {
        for cause in error.chain() {
            if let Some(error) = cause.downcast_ref::<ls_bundle::BundleError>() {
                return match error.class() {
                    ErrorClass::Foreign | ErrorClass::Unsupported => Exit::Unsupported,
                    ErrorClass::Incomplete => Exit::Incomplete,
                    ErrorClass::Corrupt | ErrorClass::Invalid => Exit::Corrupt,
                    ErrorClass::Io => Exit::Io,
                };
            }
            if let Some(error) = cause.downcast_ref::<EngineError>() {
                return match error.kind() {
                    EngineErrorKind::Io | EngineErrorKind::Memory => Exit::Io,
                    EngineErrorKind::Budget => Exit::Budget,
                    EngineErrorKind::Request => Exit::Usage,
                    EngineErrorKind::Corrupt => Exit::Corrupt,
                };
            }
            if let Some(error) = cause.downcast_ref::<ls_control::ControlError>() {
                return match error.class() {
                    ls_control::ErrorClass::Unsupported => Exit::Unsupported,
                    ls_control::ErrorClass::Incomplete => Exit::Incomplete,
                    ls_control::ErrorClass::Corrupt => Exit::Corrupt,
                    ls_control::ErrorClass::Io => Exit::Io,
                };
            }
            if let Some(error) = cause.downcast_ref::<ls_cpu::CpuError>() {
                return if error.is_unsupported() { Exit::Unsupported } else { Exit::Io };
            }
            if let Some(error) = cause.downcast_ref::<ls_cuda::CudaError>() {
                let asked_too_much = error.is_unsupported() || error.is_absent();
                return if asked_too_much { Exit::Unsupported } else { Exit::Io };
            }
            if let Some(error) = cause.downcast_ref::<DataError>() {
                return match error.class() {
                    Class::Corrupt => Exit::Corrupt,
                    Class::Incomplete => Exit::Incomplete,
                    Class::Foreign => Exit::Unsupported,
                };
            }
            if let Some(error) = cause.downcast_ref::<ls_opencl::OpenClError>() {
                let asked_too_much = error.is_unsupported() || error.is_absent();
                return if asked_too_much { Exit::Unsupported } else { Exit::Io };
            }
            if cause.is::<UsageError>() {
                return Exit::Usage;
            }
            if cause.is::<ls_io::IoError>() || cause.is::<std::io::Error>() {
                return Exit::Io;
            }
        }
        Exit::Failure
    }
}
