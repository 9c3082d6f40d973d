//! Where tensors live: on the processor, unless the process has been told otherwise ([`choose`]).
//!
//! One device serves the whole process, as one pool of threads does. It computes the products of the dense and the
//! masked forward and the steps of training; rounding, clusters and counts stay on the processor. Sums in another order
//! differ in their last bits, so stages whose results depend on it say so in their keys
//! ([`crate::stage::Stage::IN_TENSORS`]), and a preparation begun on one device does not go on on another.

use crate::error::{PrepError, Result};
use candle_core::Device;
use std::sync::OnceLock;

static CURRENT: OnceLock<Device> = OnceLock::new();

/// What to compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The processor.
    Cpu,
    /// The first NVIDIA card.
    Cuda,
    /// A card if there is one.
    Auto,
}

/// Sets the device of this process, before any tensor is made.
pub fn choose(choice: Choice) -> Result<()> {
    let device = match choice {
        Choice::Cpu => Device::Cpu,
        Choice::Cuda => Device::new_cuda(0)
            .map_err(|problem| PrepError::unsupported(format!("--device cuda: {problem}")))?,
        Choice::Auto => Device::new_cuda(0).unwrap_or(Device::Cpu),
    };
    CURRENT.set(device).map_err(|_| PrepError::usage("a process has one device".to_owned()))
}

/// The device of this process.
#[must_use]
pub fn current() -> &'static Device {
    CURRENT.get().unwrap_or(&Device::Cpu)
}

/// What distinguishes results of this device from the processor's in a key; nothing for the processor itself.
#[must_use]
pub fn mark() -> Option<&'static str> {
    (!current().is_cpu()).then_some("cuda")
}
