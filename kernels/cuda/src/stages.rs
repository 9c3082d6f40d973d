//! [`StagedMlp`]: one layer's FFN as one kernel that the host feeds while it runs (section 3.2.1, Algorithm 1).
//!
//! The host [posts](StagedMlp::post) stages: lists of blocks that are in memory now. The kernel computes what is posted and
//! raises a counter, in order, when a stage is done; its sums follow to host memory. Neither side waits for the other:
//! the host may post any number of stages ahead, and the kernel may tell of several at once.
//!
//! A launch is for a number of stages ([`launch`](StagedMlp::launch)), or [open](StagedMlp::open) until the host
//! [closes](StagedMlp::close) it, as the engine does: how many stages a layer has depends on how its blocks arrive. A kernel
//! that is open and waits too long pauses, so that no wait is endless; the next stage starts it again.
//!
//! Differences from Algorithm 1, each measured: thread blocks do not poll the host's flags themselves, one forwards them
//! (concurrent reads of one host line serialise); flags are numbers that only grow, so that nothing has to be reset; every
//! wait is bounded.

mod list;
mod open;

pub(crate) use open::{Keeping, Vectors};

use crate::CudaError;
use crate::blocks::Entry;
use crate::device::{Device, Mapped, Memory};
use crate::error::Kind;
use crate::launch::{LIST_RING, Loads, MlpArgs, MlpKernel, STAGE_RING};
use list::List;
use ls_compute::MlpShape;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Most stages of a launch.
pub const MAX_STAGES: u32 = STAGE_RING / 2;
/// Bytes of `Session` of `cu/mlp.cu`, at least.
const SESSION_BYTES: usize = 12 * STAGE_RING as usize + 16;
/// Numbers of entries are started anew before they could pass 32 bits.
const RESET_ENTRIES: u32 = 1 << 30;
/// Entries of a list on the device, for comparisons.
const DEVICE_LIST: usize = 1 << 16;
/// Offsets in `Report`.
const STATUS_AT: usize = 128;
const CLOSING_AT: usize = 256;
const REPORT_BYTES: usize = 384;
const STATUS_TIMED_OUT: u32 = 2;
const STATUS_PAUSED: u32 = 3;

/// How the kernel runs.
#[derive(Clone, Copy, Debug)]
pub struct StagedOptions {
    /// Multiprocessors; at most the device's.
    pub multiprocessors: u32,
    /// How it reads weights.
    pub loads: Loads,
    /// After how long a wait is given up, milliseconds.
    pub patience_ms: u64,
    /// Whether a launch may begin while the one before ends (from 9.0 on), which saves a few microseconds. Else the driver
    /// checks at each launch that all thread blocks run at once; with it nothing else may run on the device at that time.
    pub overlapping: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct StagedMlp {
    device: Device,
    kernel: MlpKernel,
    shape: MlpShape,
    patience: Duration,
    session: Memory,
    input: Memory,
    /// Of this launch and of the next, by turns.
    sums: [Memory; 2],
    device_list: Memory,
    list: List,
    posted: Mapped,
    report: Mapped,
    partials: Mapped,
    launches: u32,
    /// Stages of all launches so far.
    launched_stages: u32,
    posted_stages: u32,
    posted_entries: u32,
    announced_entries: u32,
    /// Stages whose launches have ended.
    finished_stages: u32,
    /// Number of the entry behind each of the last stages.
    ends: [u32; STAGE_RING as usize],
    /// Blocks given so far, and behind each of the last stages.
    blocks: u64,
    block_ends: [u64; STAGE_RING as usize],
    /// While a launch is open.
    open: Option<Vectors>,
    /// The sum of open launches that have no other place; hidden.
    total: Memory,
    /// What is left in device memory.
    keeping: Keeping,
}

impl StagedMlp {
    /// Bytes that [`new`](Self::new) allocates on the device, and pinned on the host.
    pub(crate) fn memory(hidden: usize, multiprocessors: usize) -> (usize, usize) {
        let (ring, list) = (STAGE_RING as usize, LIST_RING as usize);
        let device = SESSION_BYTES + 4 * 4 * hidden + 8 * DEVICE_LIST;
        let host = 8 * multiprocessors * list + 8 * ring + REPORT_BYTES + 8 * ring * hidden;
        (device, host)
    }

    /// Allocates everything.
    pub fn new(
        device: &Device,
        shape: MlpShape,
        options: StagedOptions,
    ) -> Result<StagedMlp, CudaError> {
        let blocks = options.multiprocessors.clamp(1, device.info().multiprocessors);
        let block = (shape.block_neurons, shape.block_stride);
        let mut kernel =
            MlpKernel::new(device, shape.dtype, shape.hidden, block, blocks, options.loads)?;
        if options.overlapping {
            kernel.overlap();
        }
        let vector = shape.hidden as usize * 4;
        Ok(StagedMlp {
            kernel,
            shape,
            patience: Duration::from_millis(options.patience_ms),
            session: device.memory(SESSION_BYTES)?,
            input: device.memory(vector)?,
            sums: [device.memory(vector)?, device.memory(vector)?],
            device_list: device.memory(DEVICE_LIST * 8)?,
            list: List::new(device, blocks)?,
            posted: device.mapped(8 * STAGE_RING as usize)?,
            report: device.mapped(REPORT_BYTES)?,
            partials: device.mapped(STAGE_RING as usize * 2 * vector)?,
            launches: 0,
            launched_stages: 0,
            posted_stages: 0,
            posted_entries: 0,
            announced_entries: 0,
            finished_stages: 0,
            ends: [0; STAGE_RING as usize],
            blocks: 0,
            block_ends: [0; STAGE_RING as usize],
            open: None,
            total: device.memory(vector)?,
            keeping: Keeping::default(),
            device: device.clone(),
        })
    }

    /// Sets the FFN's input; hidden.
    pub fn set_input(&mut self, h: &[f32]) -> Result<(), CudaError> {
        assert_eq!(h.len(), self.shape.hidden as usize, "width of the input");
        Ok(self.input.write(0, bytemuck::cast_slice(h))?)
    }

    /// Starts the kernel for the next `stages` stages (at most [`MAX_STAGES`]), posted or not; those of earlier launches are
    /// posted. With `silent_last` the last stage's sums stay on the device.
    pub fn launch(&mut self, stages: u32, silent_last: bool) -> Result<(), CudaError> {
        assert!((1..=MAX_STAGES).contains(&stages), "{stages} stages");
        assert!(self.open.is_none(), "an open launch is closed first");
        let ahead = self.posted_stages.wrapping_sub(self.launched_stages) as i32;
        assert!(ahead >= 0, "earlier launches wait for {} stages", -ahead);
        if ahead == 0 && self.announced_entries > RESET_ENTRIES {
            self.finish()?;
            self.reset()?;
        }
        // One stage that is posted needs no forwarding.
        let known = u32::from(stages == 1 && ahead > 0);
        let args = MlpArgs {
            end: self.end_of(self.launched_stages),
            known_stages: known,
            stages,
            silent_last: u32::from(silent_last),
            ..self.staged_args()
        };
        // SAFETY: all memory is this session's, as large as the kernel expects; the stream runs one kernel at a time.
        unsafe { self.kernel.launch(&self.device, args)? };
        self.launches = self.launches.wrapping_add(1);
        self.launched_stages = self.launched_stages.wrapping_add(stages);
        Ok(())
    }

    /// The parameters of launches with stages, but for those that say which.
    fn staged_args(&self) -> MlpArgs {
        MlpArgs {
            first: self.end_of(self.launched_stages.wrapping_sub(1)),
            posted: self.posted.address(),
            posted_list: self.list.address(),
            session: self.session.address(),
            report: self.report.address(),
            partials: self.partials.address(),
            first_stage: self.launched_stages,
            ..self.args()
        }
    }

    /// The parameters that all launches share; the sums are those of the next launch.
    fn args(&self) -> MlpArgs {
        let turn = (self.launches % 2) as usize;
        MlpArgs {
            h: self.input.address(),
            sum: self.sums[turn].address(),
            next_sum: self.sums[1 - turn].address(),
            stride: self.shape.block_stride,
            block_neurons: self.shape.block_neurons,
            hidden: self.shape.hidden,
            launch: self.launches,
            spin_ns: self.patience.as_nanos() as u64,
            far_from: self.keeping.from,
            far_bytes: self.keeping.bytes,
            keep_at: self.keeping.to,
            ..MlpArgs::default()
        }
    }

    /// Says that the blocks of the next stage are in memory: those announced for it, then `entries`. Waits only if the
    /// device is too far behind.
    pub fn post(&mut self, entries: &[Entry]) -> Result<(), CudaError> {
        self.announce(entries)?;
        let count = self.announced_entries.wrapping_sub(self.posted_entries);
        Ok(self.post_stage(count, entries.len(), 0)?)
    }

    /// Lists blocks that later stages will have, in order; how many places they take. The device reads the list ahead, not
    /// the blocks.
    pub fn announce(&mut self, entries: &[Entry]) -> Result<u32, CudaError> {
        Ok(self.announce_all(entries)?)
    }

    /// Says that the next `count` announced blocks, the next stage, are in memory.
    pub fn post_announced(&mut self, count: u32) -> Result<(), CudaError> {
        Ok(self.post_stage(count, count as usize, 0)?)
    }

    /// A stage of so many places of the list, which have so many blocks; `mark` is 0 or [`LAST`].
    fn post_stage(&mut self, count: u32, blocks: usize, mark: u32) -> Result<(), Kind> {
        let open = self.announced_entries.wrapping_sub(self.posted_entries);
        assert!(count <= open, "{count} blocks of {open} announced");
        let stage = self.posted_stages;
        self.wait_for(|this| stage.wrapping_sub(this.done()) < STAGE_RING - 1)?;
        self.posted_entries += count;
        self.ends[(stage % STAGE_RING) as usize] = self.posted_entries;
        self.blocks += blocks as u64;
        self.block_ends[(stage % STAGE_RING) as usize] = self.blocks;
        let word = u64::from(stage.wrapping_add(1)) << 32 | u64::from(self.posted_entries | mark);
        // SAFETY: a word of mapped memory, aligned, that both sides use as an atomic only.
        let flag = unsafe {
            let words = self.posted.host().cast::<u64>();
            AtomicU64::from_ptr(words.add((stage % STAGE_RING) as usize))
        };
        // Pairs with the forwarder's ld.acquire.sys: whoever sees the stage sees its list and its weights.
        flag.store(word, Ordering::Release);
        self.posted_stages = stage.wrapping_add(1);
        Ok(())
    }

    /// Waits until the rings have room.
    fn wait_for(&mut self, has_room: impl Fn(&Self) -> bool) -> Result<(), Kind> {
        while !has_room(self) {
            if self.posted_stages == self.launched_stages && self.open.is_none() {
                // All that runs has what it waits for.
                self.end()?;
            } else {
                self.wait(self.done().wrapping_add(1))?;
            }
        }
        Ok(())
    }

    /// Number of the entry behind a stage of the last STAGE_RING - 1.
    fn end_of(&self, stage: u32) -> u32 {
        self.ends[(stage % STAGE_RING) as usize]
    }

    /// A word of the device's report.
    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: a word of mapped memory that lives as long as self, aligned, and used as an atomic only while kernels run.
        unsafe { AtomicU32::from_ptr(self.report.host().add(at).cast()) }
    }

    /// Stages that are done, over all launches.
    #[must_use]
    pub fn done(&self) -> u32 {
        // It orders nothing else: sums say themselves which stage they are of.
        let told = self.word(0).load(Ordering::Acquire);
        // The end of a launch tells of a silent last stage.
        if (told.wrapping_sub(self.finished_stages) as i32) < 0 {
            self.finished_stages
        } else {
            told
        }
    }

    /// Waits until `stages` stages, over all launches, are done.
    pub fn wait_done(&self, stages: u32) -> Result<(), CudaError> {
        Ok(self.wait(stages)?)
    }

    fn wait(&self, stages: u32) -> Result<(), Kind> {
        let mut started = None;
        let mut spins = 0u32;
        while (self.done().wrapping_sub(stages) as i32) < 0 {
            spins += 1;
            std::hint::spin_loop();
            if spins.is_multiple_of(1024) {
                // The kernel gives up first, and ends.
                if started.get_or_insert_with(Instant::now).elapsed() > 3 * self.patience {
                    return Err(self.timed_out());
                }
            }
        }
        Ok(())
    }

    /// The FFN's sum, at least up to stage `stage` (of all launches), to `out`; hidden. The stage is done or will be, and is no
    /// silent one.
    pub fn partial(&self, stage: u32, out: &mut [f32]) -> Result<(), CudaError> {
        let hidden = self.shape.hidden as usize;
        assert_eq!(out.len(), hidden, "width of the sum");
        let wanted = stage.wrapping_add(1);
        let started = Instant::now();
        loop {
            // Several stages may be sent as the last of them.
            let told = self.done();
            let sent = if (told.wrapping_sub(wanted) as i32) > 0 { told } else { wanted };
            let at = (sent.wrapping_sub(1) % STAGE_RING) as usize * hidden;
            let whole = out.iter_mut().enumerate().all(|(i, out)| {
                // SAFETY: a word of mapped memory, aligned, that both sides use as an atomic only.
                let word =
                    unsafe { AtomicU64::from_ptr(self.partials.host().cast::<u64>().add(at + i)) };
                let value = word.load(Ordering::Relaxed);
                *out = f32::from_bits(value as u32);
                // Each number says which stage it is of.
                (value >> 32) as u32 == sent
            });
            if whole {
                return Ok(());
            }
            if started.elapsed() > 3 * self.patience {
                return Err(self.timed_out().into());
            }
            std::hint::spin_loop();
        }
    }

    /// Waits for the end of all launches; an error if one gave up. After that the session starts anew.
    pub fn finish(&mut self) -> Result<(), CudaError> {
        assert!(self.open.is_none(), "an open launch is closed first");
        Ok(self.end()?)
    }

    fn end(&mut self) -> Result<(), Kind> {
        self.device.wait()?;
        let status = self.word(STATUS_AT).load(Ordering::Acquire) % 4;
        if self.launches == 0 || !matches!(status, STATUS_TIMED_OUT | STATUS_PAUSED) {
            self.finished_stages = self.launched_stages;
            return Ok(());
        }
        let error = self.timed_out();
        self.reset()?;
        Err(error)
    }

    /// The FFN's sum of the last launch; hidden.
    pub fn output(&self, out: &mut [f32]) -> Result<(), CudaError> {
        let turn = (self.launches.wrapping_sub(1) % 2) as usize;
        Ok(self.sums[turn].read(0, bytemuck::cast_slice_mut(out))?)
    }

    /// Runs entries `first .. end` of a list that [`write_list`](Self::write_list) put on the device, without any flags,
    /// adding to the sums; for comparison. The first part of a layer's `starts` it.
    pub fn run_part(&mut self, first: u32, end: u32, starts: bool) -> Result<(), CudaError> {
        if starts {
            self.launches += 1;
        }
        let turn = (self.launches.wrapping_sub(1) % 2) as usize;
        let args = MlpArgs {
            sum: self.sums[turn].address(),
            next_sum: if starts { self.sums[1 - turn].address() } else { 0 },
            list: self.device_list.address(),
            first,
            end,
            ..self.args()
        };
        // SAFETY: as in `launch`.
        unsafe { self.kernel.launch(&self.device, args)? };
        Ok(())
    }

    /// Puts a list on the device, for `run_part`. No launch may be running.
    pub fn write_list(&mut self, entries: &[Entry]) -> Result<(), CudaError> {
        let words: Vec<u64> = entries.iter().map(|entry| entry.word()).collect();
        Ok(self.device_list.write(0, bytemuck::cast_slice(&words))?)
    }

    fn timed_out(&self) -> Kind {
        Kind::TimedOut { stage: self.done(), waited_ms: self.patience.as_millis() as u64 }
    }

    /// As new; nothing may be running.
    fn reset(&mut self) -> Result<(), Kind> {
        self.session.fill_zero(0, self.session.bytes())?;
        for sum in &self.sums {
            sum.fill_zero(0, sum.bytes())?;
        }
        self.device.wait()?;
        self.list.reset();
        for memory in [&mut self.posted, &mut self.report] {
            // SAFETY: no kernel is running.
            unsafe { memory.bytes_mut() }.fill(0);
        }
        (self.launches, self.launched_stages) = (0, 0);
        (self.posted_stages, self.posted_entries, self.announced_entries) = (0, 0, 0);
        self.finished_stages = 0;
        self.ends.fill(0);
        self.blocks = 0;
        self.block_ends.fill(0);
        Ok(())
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}
