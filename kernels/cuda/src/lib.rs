//! The CUDA backend, and the FFN as a kernel that the host feeds while it runs.
//!
//! Builds and starts without CUDA: the driver's library is looked for when a [`Device`] is opened. Machine code for compute
//! capability 7.2, 8.7 and 9.0 is built in; for other devices NVRTC compiles the kernels (`cu/`) once.
//!
//! - [`CudaBackend`] is a [`ComputeBackend`](ls_compute::ComputeBackend): activations and KV cache in device memory. Weights
//!   that are [kept](ls_compute::ComputeBackend::keep) have a copy there; others are copied when a call brings them.
//! - [`StagedMlp`] is one layer's FFN in stages (section 3.2.1): the host posts blocks as they arrive, the kernel tells which
//!   stages are done, and nobody launches anything in between. Decode runs so on slots that the engine has
//!   [lent](ls_compute::ComputeBackend::lend), unless it must be canonical: one kernel a layer, which reads blocks where the
//!   disk has put them and, on a card with its own memory, leaves them there for the next token.
//! - [`mod@bench`] measures what that costs, beside device synchronisation, events and graphs.
//!
//! **Canonical order.** The backend's results do not depend on how weights are cut into calls nor on the other tokens of a
//! pass. They do depend on the device: the FFN of one token has two sums on each multiprocessor. Stages add with atomics:
//! their last bits differ from run to run.
//!
//! What ran on a device, and what was only compiled: `RESULTS.md`.

mod attention;
mod backend;
pub mod bench;
mod blocks;
mod buffers;
mod built;
mod dense;
mod device;
mod error;
mod ffn;
mod kernels;
mod launch;
mod nvrtc;
mod slots;
mod stages;
mod weights;

pub use backend::{CudaBackend, CudaOptions};
pub use blocks::{Blocks, Entry};
pub use built::{BUILT, BUILT_FROM};
pub use device::{Device, DeviceInfo};
pub use error::CudaError;
pub use kernels::{KernelSource, compile, module_names, text_hash};
pub use launch::Loads;
pub use ls_compute::MlpShape;
pub use nvrtc::Nvrtc;
pub use stages::{MAX_STAGES, StagedMlp, StagedOptions};
