//! Why there is no OpenCL, or why it failed.

use opencl3::error_codes::{
    CL_DEVICE_NOT_FOUND, CL_PLATFORM_NOT_FOUND_KHR, ClError, DLOPEN_RUNTIME_LOAD_FAILED,
};

/// There is no usable device, or it refused something.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct OpenClError(#[from] pub(crate) Kind);

impl OpenClError {
    /// Whether this machine just has no such OpenCL device: a caller that may choose goes on with another backend.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self.0, Kind::NoLibrary | Kind::NoPlatform | Kind::NoDevice(_))
    }

    /// Whether the model, the options or the kernels ask for what the device or this backend does not do.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        matches!(self.0, Kind::Unsupported(_))
    }

    /// Whether a kernel gave up waiting for the host.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self.0, Kind::TimedOut { .. })
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Kind {
    #[error("no OpenCL: the loader's library (libOpenCL.so.1) is not installed")]
    NoLibrary,
    #[error("no OpenCL: the loader is installed, but no driver (no ICD in /etc/OpenCL/vendors)")]
    NoPlatform,
    #[error("no OpenCL device: {0}")]
    NoDevice(String),
    #[error("OpenCL: {call} failed: {reason}")]
    Call { call: &'static str, reason: String },
    #[error("unsupported by the OpenCL backend: {0}")]
    Unsupported(String),
    #[error("the kernels of {program} do not compile:\n{log}")]
    Compile { program: String, log: String },
    #[error("a kernel gave up after waiting for stage {stage}")]
    TimedOut { stage: u32 },
    #[error("the OpenCL backend needs at least one {0}")]
    Zero(&'static str),
    #[error("vectors do not fit the model: {0}")]
    Vectors(String),
}

/// A call's error as ours.
pub(crate) fn failed(call: &'static str) -> impl FnOnce(ClError) -> Kind {
    move |error| match error.0 {
        DLOPEN_RUNTIME_LOAD_FAILED => Kind::NoLibrary,
        CL_PLATFORM_NOT_FOUND_KHR => Kind::NoPlatform,
        CL_DEVICE_NOT_FOUND => Kind::NoDevice("the driver has none".into()),
        code => Kind::Call { call, reason: format!("{error} ({code})") },
    }
}
