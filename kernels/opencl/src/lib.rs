//! The OpenCL backend, and the FFN in stages that the host feeds while it runs.
//!
//! Builds and starts without OpenCL: the loader's library is looked for when a [`Device`] is opened, and the driver compiles
//! the kernels (`cl/`) then. They are plain OpenCL C 1.2 but for the one with flags, so that phones' drivers take them.
//!
//! - [`OpenClBackend`] is a [`ComputeBackend`](ls_compute::ComputeBackend): activations and KV cache in device memory. Weights
//!   that are [kept](ls_compute::ComputeBackend::keep) are used in place where device and host have the same memory, else a
//!   copy of them; others are copied when a call brings them.
//! - [`StagedMlp`] is one layer's FFN in stages (section 3.2.1): the host posts blocks as they arrive, the device tells which
//!   stages are done. The engine does not use it yet.
//!
//! **Canonical order.** Results depend neither on how weights are cut into calls nor on the other tokens of a pass, nor on
//! the device, but for the precision of its `exp` and whether it fuses multiplications with additions. Stages are summed by
//! work-group, so their last bits depend on how many there are.
//!
//! Where it ran: `RESULTS.md`.

mod attention;
mod backend;
mod buffers;
mod dense;
mod device;
mod error;
mod ffn;
mod programs;
mod stages;
mod weights;

pub use backend::{OpenClBackend, OpenClOptions};
pub use device::{Device, DeviceInfo, Sharing, Wanted};
pub use error::OpenClError;
pub use ls_compute::MlpShape;
pub use stages::{Block, Coordination, MAX_STAGES, StagedMlp, StagedOptions};
