//! Decode's FFN on blocks that come and go in the engine's slots: [`Staged`].
//!
//! The slots are pinned, and the kernel reads them in place while the engine reads others from the disk. Where the device
//! has memory of its own, a block crosses the bus once: the kernel leaves it in the slot's counterpart there, and it is read
//! from there for as long as the slot holds it. What stays in the device's memory is so decided by the engine's cache.

use crate::CudaError;
use crate::blocks::Entry;
use crate::device::{Device, Memory};
use crate::error::Kind;
use crate::launch::Loads;
use crate::stages::{Keeping, StagedMlp, StagedOptions, Vectors};
use crate::weights::Pinned;
use ls_bundle::ids::LayerId;
use ls_bundle::model::FfnExtent;
use ls_compute::{MlpShape, NeuronBlocks};

/// After how long the kernel pauses if no block comes.
const PATIENCE_MS: u64 = 300;
/// Nothing's number.
const NOTHING: u64 = u64::MAX;

/// The engine's slots as the device sees them.
#[derive(Debug)]
struct Slots {
    /// Where they are for the host.
    start: usize,
    bytes: usize,
    slot_bytes: usize,
    pinned: Pinned,
    /// Their counterparts, if the device has memory of its own and room.
    copies: Option<Memory>,
    /// By slot: layer and first neuron of the block in its counterpart.
    held: Vec<u64>,
}

impl Slots {
    fn new(
        device: &Device,
        slots: &[u8],
        slot_bytes: usize,
        in_place: bool,
    ) -> Result<Slots, Kind> {
        let copies = if in_place { None } else { device.memory(slots.len()).ok() };
        let count = if copies.is_some() { slots.len() / slot_bytes } else { 0 };
        Ok(Slots {
            start: slots.as_ptr().addr(),
            bytes: slots.len(),
            slot_bytes,
            pinned: Pinned::new(device, slots)?,
            copies,
            held: vec![NOTHING; count],
        })
    }

    /// What the kernel is to leave in device memory.
    fn keeping(&self) -> Keeping {
        self.copies.as_ref().map_or_else(Keeping::default, |copies| Keeping {
            from: self.pinned.address(),
            bytes: self.bytes as u64,
            to: copies.address(),
        })
    }

    /// Where the kernel finds a block; None if it is in no slot.
    fn find(&mut self, layer: LayerId, block: &NeuronBlocks<'_>) -> Option<Entry> {
        let at = block.bytes.as_ptr().addr().checked_sub(self.start)?;
        if at + block.bytes.len() > self.bytes || !at.is_multiple_of(64) {
            return None;
        }
        let Some(copies) = &self.copies else {
            return Some(Entry::new(self.pinned.address() + at as u64, block.neurons, false));
        };
        let number = u64::from(layer.0) << 32 | u64::from(block.first_neuron);
        let held = &mut self.held[at / self.slot_bytes];
        if *held == number {
            return Some(Entry::new(copies.address() + at as u64, block.neurons, false));
        }
        // The kernel leaves it there.
        *held = number;
        Some(Entry::new(self.pinned.address() + at as u64, block.neurons, true))
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Staged {
    mlp: StagedMlp,
    shape: MlpShape,
    slots: Slots,
    /// Blocks on their way to a stage.
    entries: Vec<Entry>,
}

impl Staged {
    pub(crate) fn new(
        device: &Device,
        (slots, slot_bytes): (&[u8], usize),
        ffn: &FfnExtent,
        loads: Loads,
        in_place: bool,
    ) -> Result<Staged, CudaError> {
        let shape = MlpShape::of(ffn);
        let multiprocessors = device.info().multiprocessors;
        let patience_ms = PATIENCE_MS;
        let options = StagedOptions { multiprocessors, loads, patience_ms, overlapping: false };
        let mut mlp = StagedMlp::new(device, shape, options)?;
        let slots = Slots::new(device, slots, slot_bytes, in_place)?;
        mlp.keep(slots.keeping());
        Ok(Staged { mlp, shape, slots, entries: Vec::with_capacity(ffn.blocks() as usize) })
    }

    /// Bytes of device memory for blocks.
    pub(crate) fn copied_bytes(&self) -> u64 {
        self.slots.copies.as_ref().map_or(0, |copies| copies.bytes() as u64)
    }

    pub(crate) fn is_open(&self) -> bool {
        self.mlp.is_open()
    }

    /// Lists the blocks of the next stage; false if some are in no slot or of another shape.
    pub(crate) fn list(&mut self, layer: LayerId, blocks: &[NeuronBlocks<'_>]) -> bool {
        self.entries.clear();
        let all = blocks.iter().all(|block| {
            let NeuronBlocks { dtype, hidden, block_neurons, .. } = *block;
            let block_stride = block.block_stride as u32;
            let fits = MlpShape { dtype, hidden, block_neurons, block_stride } == self.shape;
            let single = block.neurons <= block_neurons;
            let entry = if fits && single { self.slots.find(layer, block) } else { None };
            entry.map(|entry| self.entries.push(entry)).is_some()
        });
        if !all {
            // The kernel will not leave those where they are said to be.
            self.slots.held.fill(NOTHING);
        }
        all
    }

    /// Starts the kernel: what it adds up is added to `vectors.sum`.
    pub(crate) fn open(&mut self, vectors: Vectors) -> Result<(), Kind> {
        self.mlp.open_at(vectors)
    }

    /// Posts the listed blocks.
    pub(crate) fn feed(&mut self) -> Result<(), CudaError> {
        self.mlp.feed(&self.entries)
    }

    /// The sum so far; hidden.
    pub(crate) fn sum(&self, out: &mut [f32]) -> Result<(), CudaError> {
        self.mlp.partial(self.mlp.last_stage(), out)
    }

    /// Lets the kernel end.
    pub(crate) fn close(&mut self) -> Result<(), CudaError> {
        self.mlp.close()
    }

    /// Blocks that the kernel may still read.
    pub(crate) fn running(&self) -> usize {
        self.mlp.running()
    }

    pub(crate) fn wait_blocks(&self) -> Result<(), CudaError> {
        self.mlp.wait_blocks()
    }
}
