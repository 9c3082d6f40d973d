//! Blocks of neurons where the FFN's kernel finds them.

use crate::CudaError;
use crate::device::{Device, Mapped, Memory};
use crate::launch::FAR_SHIFT;
use ls_compute::MlpShape;

/// A block of neurons in memory that the device can address: its address, its number of neurons - 1, and whether it is in
/// host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(u64);

impl Entry {
    pub(crate) const NONE: Entry = Entry(0);
    const FAR: u64 = 1 << FAR_SHIFT;

    /// A block of so many neurons, in device memory or in host memory; both as the device addresses them, multiples of 64.
    pub(crate) fn new(address: u64, neurons: u32, is_far: bool) -> Entry {
        debug_assert!(address.is_multiple_of(64) && (1..=64).contains(&neurons), "a block");
        Entry(address | if is_far { Entry::FAR } else { 0 } | u64::from(neurons - 1))
    }

    /// Whether it is in host memory.
    pub(crate) fn is_far(self) -> bool {
        self.0 & Entry::FAR != 0
    }

    /// As the device's list has it.
    pub(crate) fn word(self) -> u64 {
        self.0
    }

    /// Where it is.
    pub(crate) fn address(self) -> u64 {
        self.0 & !(Entry::FAR | 63)
    }

    /// Neurons.
    pub(crate) fn neurons(self) -> usize {
        (self.0 & 63) as usize + 1
    }
}

/// Blocks side by side, in device memory or in pinned host memory that the kernel reads in place.
#[derive(Debug)]
pub struct Blocks {
    memory: Place,
    stride: u32,
    block_neurons: u32,
}

#[derive(Debug)]
enum Place {
    Device(Memory),
    Host(Mapped),
}

impl Blocks {
    /// Room for `count` blocks in device memory.
    pub fn on_device(device: &Device, shape: &MlpShape, count: u32) -> Result<Blocks, CudaError> {
        let memory = device.memory(count as usize * shape.block_stride as usize)?;
        Ok(Blocks::new(Place::Device(memory), shape))
    }

    /// Room for `count` blocks in pinned host memory.
    pub fn on_host(device: &Device, shape: &MlpShape, count: u32) -> Result<Blocks, CudaError> {
        let memory = device.mapped(count as usize * shape.block_stride as usize)?;
        Ok(Blocks::new(Place::Host(memory), shape))
    }

    fn new(memory: Place, shape: &MlpShape) -> Blocks {
        Blocks { memory, stride: shape.block_stride, block_neurons: shape.block_neurons }
    }

    /// Fills all blocks from the first on. No kernel may be reading them.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), CudaError> {
        match &mut self.memory {
            Place::Device(memory) => memory.write(0, bytes)?,
            Place::Host(memory) => {
                // SAFETY: the caller's guarantee; a kernel that reads meanwhile computes nonsense, no more.
                let all = unsafe { memory.bytes_mut() };
                all[..bytes.len()].copy_from_slice(bytes);
            }
        }
        Ok(())
    }

    /// Copies all blocks from others in device memory.
    pub fn copy_from(&mut self, other: &Blocks) -> Result<(), CudaError> {
        match (&self.memory, &other.memory) {
            (Place::Device(to), Place::Device(from)) => Ok(to.copy_from(0, from, from.bytes())?),
            _ => panic!("both in device memory"),
        }
    }

    /// Block `index`, with all of its neurons.
    #[must_use]
    pub fn entry(&self, index: u32) -> Entry {
        let (base, far) = match &self.memory {
            Place::Device(memory) => (memory.address(), 0),
            Place::Host(memory) => (memory.address(), Entry::FAR),
        };
        let address = base + u64::from(index) * u64::from(self.stride);
        debug_assert!(address.is_multiple_of(64));
        Entry(address | far | u64::from(self.block_neurons - 1))
    }
}
