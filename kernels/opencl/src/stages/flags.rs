//! One kernel that stays on the device and waits for the host's flags: the host's side of `cl/stages.cl`.

use super::{Block, STAGE_RING, StagedOptions};
use crate::device::{Arg, Device, Memory, SharedMemory};
use crate::error::{Kind, failed};
use crate::programs;
use ls_compute::MlpShape;
use opencl3::event::{CL_COMPLETE, Event};
use opencl3::kernel::Kernel;
use std::sync::atomic::{AtomicU32, Ordering};

/// Entries that are posted and not done; `LIST_RING` of `cl/stages.cl`.
const LIST_RING: u32 = 16384;
/// Words of a line that nobody else touches.
const LINE: usize = 32;
/// Flags, in words.
const POSTED: usize = 0;
const ABORT: usize = LINE;
const DONE: usize = 2 * LINE;

/// `Launch` of `cl/stages.cl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
struct LaunchArgs {
    stride: u32,
    block_neurons: u32,
    hidden: u32,
    first_stage: u32,
    stages: u32,
    first_entry: u32,
    most_spins: u32,
}

#[derive(Debug)]
pub(super) struct Flags {
    /// The last launch.
    running: Option<Event>,
    kernel: Kernel,
    shape: MlpShape,
    groups: u32,
    most_spins: u32,
    blocks: SharedMemory,
    /// Entry n is word n % LIST_RING: a block's number, and in six bits its neurons - 1.
    list: SharedMemory,
    /// Of stage s, word s % STAGE_RING: the number of the entry behind it.
    ends: SharedMemory,
    flags: SharedMemory,
    input: SharedMemory,
    lanes: Memory,
    /// STAGE_RING x work-groups x hidden.
    partials: SharedMemory,
    posted_entries: u32,
    /// As `ends`, for the host alone.
    ended: [u32; STAGE_RING as usize],
    device: Device,
}

impl Flags {
    pub(super) fn new(
        device: &Device,
        shape: MlpShape,
        options: &StagedOptions,
    ) -> Result<Flags, Kind> {
        let groups = options.work_groups.clamp(1, device.info().compute_units);
        let (context, cl_device) = device.cl();
        let program = programs::stages(context, cl_device, shape.dtype)?;
        let vector = 4 * shape.hidden as usize;
        Ok(Flags {
            running: None,
            kernel: Kernel::create(&program, "run_stages").map_err(failed("run_stages"))?,
            shape,
            groups,
            most_spins: options.most_spins,
            blocks: device.shared(options.blocks as usize * shape.block_stride as usize)?,
            list: device.shared(4 * LIST_RING as usize)?,
            ends: device.shared(4 * STAGE_RING as usize)?,
            flags: device.shared(4 * (DONE + LINE * groups as usize))?,
            input: device.shared(vector)?,
            lanes: device.memory(groups as usize * vector)?,
            partials: device.shared((STAGE_RING * groups) as usize * vector)?,
            posted_entries: 0,
            ended: [0; STAGE_RING as usize],
            device: device.clone(),
        })
    }

    /// A word that host and device use as an atomic only.
    fn flag(&self, word: usize) -> &AtomicU32 {
        // SAFETY: within the flags, aligned, and nobody makes a reference to it but this.
        unsafe { AtomicU32::from_ptr(self.flags.host().cast::<u32>().add(word)) }
    }

    pub(super) fn set_input(&mut self, h: &[f32]) -> Result<(), Kind> {
        self.device.wait()?;
        // SAFETY: the queue is idle.
        let input = unsafe { self.input.bytes_mut() };
        input[..4 * h.len()].copy_from_slice(bytemuck::cast_slice(h));
        Ok(())
    }

    pub(super) fn write_block(&mut self, at: usize, bytes: &[u8]) -> Result<(), Kind> {
        // SAFETY: within the blocks, as the caller has checked. No kernel reads a block that is not posted; one that is
        // written behind its stage's back would give a wrong sum, no more.
        unsafe {
            let to = self.blocks.host().add(at);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        Ok(())
    }

    pub(super) fn launch(&mut self, first_stage: u32, stages: u32) -> Result<(), Kind> {
        let MlpShape { hidden, block_neurons, block_stride, .. } = self.shape;
        let launch = LaunchArgs {
            stride: block_stride,
            block_neurons,
            hidden,
            first_stage,
            stages,
            first_entry: self.posted_entries,
            most_spins: self.most_spins,
        };
        let args = [
            Arg::At(self.blocks.mem()),
            Arg::At(self.list.mem()),
            Arg::At(self.ends.mem()),
            Arg::At(self.flags.mem()),
            Arg::At(self.input.mem()),
            Arg::Memory(&self.lanes),
            Arg::At(self.partials.mem()),
            Arg::Bytes(bytemuck::bytes_of(&launch)),
        ];
        let groups = [self.groups as usize, 1, 1];
        // SAFETY: all memory is this session's, as large as the kernel expects, and shared where both sides use it; there
        // are no more work-groups than compute units.
        let event = unsafe { self.device.launch(&self.kernel, groups, &args)? };
        self.running = Some(event);
        self.device.flush()
    }

    pub(super) fn has_room(&mut self, stage: u32, count: usize) -> bool {
        assert!(count <= LIST_RING as usize, "{count} blocks of a stage");
        let done = self.done();
        if stage.wrapping_sub(done) >= STAGE_RING - 1 {
            return false;
        }
        // A stage's list may be written over when the stage is done.
        let free_from = if stage == done { self.posted_entries } else { self.end_before(done) };
        self.posted_entries.wrapping_sub(free_from) + count as u32 <= LIST_RING
    }

    /// Number of the entry at which stage `stage` begins.
    fn end_before(&self, stage: u32) -> u32 {
        self.ended[(stage.wrapping_sub(1) % STAGE_RING) as usize]
    }

    pub(super) fn post(&mut self, stage: u32, blocks: &[Block]) -> Result<(), Kind> {
        let list = self.list.host().cast::<u32>();
        for (n, block) in (0..).zip(blocks) {
            let at = self.posted_entries.wrapping_add(n) % LIST_RING;
            // SAFETY: within the list; no kernel reads there, as there is room.
            unsafe { list.add(at as usize).write(block.index << 6 | (block.neurons - 1)) };
        }
        self.posted_entries = self.posted_entries.wrapping_add(blocks.len() as u32);
        let at = (stage % STAGE_RING) as usize;
        self.ended[at] = self.posted_entries;
        // SAFETY: within the ends; the stage that was there is done.
        unsafe { self.ends.host().cast::<u32>().add(at).write(self.posted_entries) };
        // Pairs with the kernel's acquire: who sees the stage sees its end, its entries and their weights.
        self.flag(POSTED).store(stage.wrapping_add(1), Ordering::Release);
        Ok(())
    }

    /// The stages that all work-groups have done.
    pub(super) fn done(&mut self) -> u32 {
        // Acquire pairs with the kernel's release: who sees the counter sees the sums.
        let counts = (0..self.groups as usize)
            .map(|group| self.flag(DONE + group * LINE).load(Ordering::Acquire));
        // They are less than a ring apart.
        counts.reduce(|a, b| if (a.wrapping_sub(b) as i32) < 0 { a } else { b }).unwrap_or(0)
    }

    pub(super) fn partial(&mut self, stage: u32, out: &mut [f32]) {
        let hidden = out.len();
        let first = (stage % STAGE_RING) as usize * self.groups as usize * hidden;
        out.fill(0.0);
        for group in 0..self.groups as usize {
            for (i, out) in out.iter_mut().enumerate() {
                let at = first + group * hidden + i;
                // SAFETY: within the partial sums. All work-groups have done the stage, and write there again for one that
                // is a ring further on, which is posted when this is no longer asked for.
                *out += unsafe { self.partials.host().cast::<f32>().add(at).read_volatile() };
            }
        }
    }

    /// Whether no kernel runs.
    pub(super) fn is_over(&mut self) -> bool {
        let Some(event) = &self.running else { return true };
        // A negative status is an error's.
        event.command_execution_status().is_ok_and(|status| status.0 <= CL_COMPLETE)
    }

    pub(super) fn finish(&mut self) -> Result<(), Kind> {
        self.device.wait()
    }

    /// Ends what runs; as new after that.
    pub(super) fn abort(&mut self) -> Result<(), Kind> {
        self.flag(ABORT).store(1, Ordering::Release);
        self.device.wait()?;
        self.running = None;
        for word in
            [POSTED, ABORT].into_iter().chain((0..self.groups as usize).map(|g| DONE + g * LINE))
        {
            self.flag(word).store(0, Ordering::Relaxed);
        }
        (self.posted_entries, self.ended) = (0, [0; STAGE_RING as usize]);
        Ok(())
    }
}

impl Drop for Flags {
    fn drop(&mut self) {
        // No kernel may wait for a host that has gone.
        let _ = self.abort();
    }
}
