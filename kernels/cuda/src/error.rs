//! Why there is no CUDA, or why it failed.

use cudarc::driver::sys::CUresult;

/// There is no usable device, or it refused something.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct CudaError(#[from] Kind);

impl CudaError {
    /// Whether this machine just has no CUDA device: a caller that may choose goes on with another backend.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self.0, Kind::NoDriver | Kind::NoDevice(_))
    }

    /// Whether the model or the options ask for what this backend does not do.
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
    #[error("no CUDA: the driver's library (libcuda.so) is not installed")]
    NoDriver,
    #[error("no CUDA device: {0}")]
    NoDevice(String),
    #[error("CUDA: {call} failed: {reason}")]
    Call { call: &'static str, reason: String },
    #[error("unsupported by the CUDA backend: {0}")]
    Unsupported(String),
    #[error(
        "kernels for compute capability {major}.{minor} are not built in and cannot be compiled: {reason}"
    )]
    NoKernels { major: u32, minor: u32, reason: String },
    #[error("kernel {name} does not compile:\n{log}")]
    Compile { name: &'static str, log: String },
    #[error("NVRTC: {0}")]
    Nvrtc(String),
    #[error("a kernel gave up after waiting {waited_ms} ms for stage {stage}")]
    TimedOut { stage: u32, waited_ms: u64 },
    #[error("the CUDA backend needs at least one {0}")]
    Zero(&'static str),
    #[error("vectors do not fit the model: {0}")]
    Vectors(String),
}

/// The result of a driver's call as ours.
pub(crate) fn check(result: CUresult, call: &'static str) -> Result<(), Kind> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Kind::Call { call, reason: reason(result) })
}

/// What the driver says about a code.
pub(crate) fn reason(result: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded, as it gave this result; it writes a pointer to a static string, or null.
    let told = unsafe { cudarc::driver::sys::cuGetErrorString(result, &mut text) };
    if told != CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("{result:?}");
    }
    // SAFETY: a static string of the driver's, ended by zero.
    let text = unsafe { std::ffi::CStr::from_ptr(text) };
    format!("{} ({result:?})", text.to_string_lossy())
}
