//! Kernels for each stage, and events that tell of their ends: for devices that share no memory while a kernel runs.

use super::{Block, STAGE_RING};
use crate::buffers::FFN_LANES;
use crate::dense::{GROUP_ROWS, RowsArgs};
use crate::device::{Arg, Device, Memory};
use crate::error::Kind;
use crate::programs::SIZE;
use ls_compute::MlpShape;
use opencl3::event::{CL_COMPLETE, Event};
use opencl3::kernel::Kernel;

/// Most neurons of a stage.
const MAX_NEURONS: usize = 65536;

/// What one stage of the ring has on the host.
#[derive(Debug)]
struct Stage {
    /// Bytes from the first block to each neuron.
    list: Vec<u64>,
    /// FFN_LANES x hidden.
    sums: Vec<f32>,
    /// When the sums are there.
    ended: Option<Event>,
}

#[derive(Debug)]
pub(super) struct Events {
    shape: MlpShape,
    activate: Kernel,
    combine: Kernel,
    blocks: Memory,
    list: Memory,
    input: Memory,
    activations: Memory,
    sums: Memory,
    ring: Vec<Stage>,
    /// Stages that were seen to be done, and that are posted.
    done: u32,
    posted: u32,
    /// Neurons of this launch so far.
    neurons: u32,
    device: Device,
}

impl Events {
    pub(super) fn new(device: &Device, shape: MlpShape, blocks: u32) -> Result<Events, Kind> {
        let vector = 4 * shape.hidden as usize;
        let stage = || Stage {
            list: Vec::new(),
            sums: vec![0.0; FFN_LANES * shape.hidden as usize],
            ended: None,
        };
        Ok(Events {
            shape,
            activate: device.kernel_of(shape.dtype, "activate")?,
            combine: device.kernel_of(shape.dtype, "combine")?,
            blocks: device.memory(blocks as usize * shape.block_stride as usize)?,
            list: device.memory(8 * MAX_NEURONS)?,
            input: device.memory(vector)?,
            activations: device.memory(4 * MAX_NEURONS)?,
            sums: device.memory(FFN_LANES * vector)?,
            ring: (0..STAGE_RING).map(|_| stage()).collect(),
            done: 0,
            posted: 0,
            neurons: 0,
            device: device.clone(),
        })
    }

    pub(super) fn set_input(&mut self, h: &[f32]) -> Result<(), Kind> {
        self.input.write(0, bytemuck::cast_slice(h))
    }

    pub(super) fn write_block(&mut self, at: usize, bytes: &[u8]) -> Result<(), Kind> {
        self.blocks.write(at, bytes)
    }

    pub(super) fn launch(&mut self, _first_stage: u32, _stages: u32) -> Result<(), Kind> {
        self.neurons = 0;
        self.sums.fill_zero()
    }

    pub(super) fn has_room(&mut self, stage: u32, _count: usize) -> bool {
        stage.wrapping_sub(self.done()) < STAGE_RING - 1
    }

    pub(super) fn post(&mut self, stage: u32, blocks: &[Block]) -> Result<(), Kind> {
        let MlpShape { dtype, hidden, block_stride, .. } = self.shape;
        let neuron_bytes = 3 * dtype.row_bytes(hidden);
        let slot = &mut self.ring[(stage % STAGE_RING) as usize];
        slot.list.clear();
        for block in blocks {
            let first = u64::from(block.index) * u64::from(block_stride);
            slot.list.extend((0..u64::from(block.neurons)).map(|n| first + n * neuron_bytes));
        }
        let count = slot.list.len();
        assert!(count <= MAX_NEURONS, "{count} neurons of a stage");
        if count > 0 {
            // SAFETY: the list stays as it is until the stage has ended, a ring later at the earliest.
            unsafe { self.list.write_later(0, bytemuck::cast_slice(&slot.list)) }?;
            let rows =
                RowsArgs { block: 1, count: count as u32, cols: hidden, ..RowsArgs::default() };
            let start = [
                Arg::Memory(&self.blocks),
                Arg::Memory(&self.blocks),
                Arg::Memory(&self.list),
                Arg::U32(1),
                Arg::U32(0),
                Arg::Bytes(bytemuck::bytes_of(&rows)),
            ];
            let [a, b, c, d, e, f] = start;
            let groups = [count.div_ceil(GROUP_ROWS as usize), 1, 1];
            let (input, activations) = (Arg::Memory(&self.input), Arg::Memory(&self.activations));
            let args = [a, b, c, d, e, f, input, activations];
            // SAFETY: `count` neurons of the blocks, an input as wide as their rows.
            unsafe { self.device.launch(&self.activate, groups, &args)? };
            let groups = [(hidden as usize / 8).div_ceil(SIZE), FFN_LANES, 1];
            let first = Arg::U32(self.neurons);
            let args = [a, b, c, d, e, f, activations, first, Arg::Memory(&self.sums)];
            // SAFETY: as above, and FFN_LANES sums.
            unsafe { self.device.launch(&self.combine, groups, &args)? };
            self.neurons += count as u32;
        }
        let to = bytemuck::cast_slice_mut(&mut slot.sums);
        // SAFETY: nobody looks at the sums before the stage has ended.
        slot.ended = Some(unsafe { self.sums.read_later(0, to) }?);
        self.posted = stage.wrapping_add(1);
        self.device.flush()
    }

    pub(super) fn done(&mut self) -> u32 {
        while self.done != self.posted {
            let slot = &self.ring[(self.done % STAGE_RING) as usize];
            let ended = slot.ended.as_ref().is_none_or(|event| {
                event.command_execution_status().is_ok_and(|status| status.0 == CL_COMPLETE)
            });
            if !ended {
                break;
            }
            self.done = self.done.wrapping_add(1);
        }
        self.done
    }

    pub(super) fn partial(&mut self, stage: u32, out: &mut [f32]) {
        let slot = &self.ring[(stage % STAGE_RING) as usize];
        out.fill(0.0);
        for lane in slot.sums.chunks_exact(out.len()) {
            out.iter_mut().zip(lane).for_each(|(out, &sum)| *out += sum);
        }
    }

    /// Whether all that was posted has ended. Nothing waits on the device here.
    pub(super) fn is_over(&mut self) -> bool {
        self.done() == self.posted
    }

    pub(super) fn finish(&mut self) -> Result<(), Kind> {
        self.device.wait()
    }

    /// As new.
    pub(super) fn abort(&mut self) -> Result<(), Kind> {
        self.device.wait()?;
        (self.done, self.posted, self.neurons) = (0, 0, 0);
        self.ring.iter_mut().for_each(|stage| stage.ended = None);
        Ok(())
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // The queue may still copy from and to what goes now.
        let _ = self.device.wait();
    }
}
