//! Launches that stay open until the host closes them: how the engine runs a layer.

use super::{CLOSING_AT, RESET_ENTRIES, STAGE_RING, STATUS_AT, STATUS_PAUSED, StagedMlp};
use crate::CudaError;
use crate::blocks::Entry;
use crate::error::Kind;
use crate::launch::MlpArgs;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

/// Of the end of a stage: it is the launch's last one.
const LAST: u32 = 1 << 31;
/// Stages of an open launch, at most.
const OPEN_STAGES: u32 = 1 << 20;
/// Stages are numbered anew before their numbers could pass 32 bits.
const RESET_STAGES: u32 = 1 << 30;

/// Where a launch finds its input and adds its sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vectors {
    /// Normed residual; hidden.
    pub(crate) h: u64,
    /// hidden.
    pub(crate) sum: u64,
}

/// Pinned host memory whose blocks are left in device memory as they are used.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Keeping {
    /// As the device addresses it.
    pub(crate) from: u64,
    /// Bytes; 0: none are left.
    pub(crate) bytes: u64,
    /// Its counterpart.
    pub(crate) to: u64,
}

impl StagedMlp {
    /// Starts the kernel for stages to come, until [`close`](Self::close); their sum begins at zero.
    pub fn open(&mut self) -> Result<(), CudaError> {
        self.total.fill_zero(0, self.total.bytes())?;
        let vectors = Vectors { h: self.input.address(), sum: self.total.address() };
        Ok(self.open_at(vectors)?)
    }

    /// The same with somebody else's vectors: the sum is added to.
    pub(crate) fn open_at(&mut self, vectors: Vectors) -> Result<(), Kind> {
        assert!(self.open.is_none(), "one launch at a time");
        assert_eq!(self.posted_stages, self.launched_stages, "stages of earlier launches");
        if self.announced_entries > RESET_ENTRIES || self.posted_stages > RESET_STAGES {
            self.device.wait()?;
            self.reset()?;
        }
        self.start(vectors)
    }

    fn start(&mut self, vectors: Vectors) -> Result<(), Kind> {
        let Vectors { h, sum } = vectors;
        let stages = OPEN_STAGES;
        let args = MlpArgs { h, sum, next_sum: 0, stages, ..self.staged_args() };
        // SAFETY: as in `launch`; the vectors are `hidden` wide, and used in the order of the stream.
        unsafe { self.kernel.launch(&self.device, args)? };
        self.launches = self.launches.wrapping_add(1);
        self.open = Some(vectors);
        Ok(())
    }

    /// Posts a stage of an open launch: these blocks are in memory, and stay until [`running`](Self::running) says that they
    /// have been read.
    pub fn feed(&mut self, entries: &[Entry]) -> Result<(), CudaError> {
        Ok(self.feed_stage(entries, false)?)
    }

    /// Ends an open launch: the sum is whole when what has been posted is done.
    pub fn close(&mut self) -> Result<(), CudaError> {
        self.feed_stage(&[], true)?;
        self.open = None;
        self.launched_stages = self.posted_stages;
        Ok(())
    }

    fn feed_stage(&mut self, entries: &[Entry], last: bool) -> Result<(), Kind> {
        let vectors = self.open.expect("an open launch");
        loop {
            let count = self.announce_all(entries)?;
            self.post_stage(count, entries.len(), if last { LAST } else { 0 })?;
            if !self.has_paused()? {
                return Ok(());
            }
            // All that was posted before is done, and this stage is not known to the device.
            self.device.wait()?;
            self.reset()?;
            if last && entries.is_empty() {
                return Ok(());
            }
            self.start(vectors)?;
        }
    }

    /// Whether the open launch has ended without the stage that was just posted. Either side says something before it looks:
    /// one of the two notices.
    fn has_paused(&self) -> Result<bool, Kind> {
        // Pairs with the forwarder's fence.
        fence(Ordering::SeqCst);
        let launch = self.launches.wrapping_sub(1);
        let mut started = None;
        while self.word(CLOSING_AT).load(Ordering::Acquire) == self.launches {
            let status = self.word(STATUS_AT).load(Ordering::Acquire);
            if status == launch.wrapping_mul(4) + STATUS_PAUSED {
                return Ok(true);
            }
            if started.get_or_insert_with(Instant::now).elapsed() > 3 * self.patience {
                return Err(self.timed_out());
            }
            std::hint::spin_loop();
        }
        Ok(false)
    }

    /// Blocks that were given, and that the device may still read.
    #[must_use]
    pub fn running(&self) -> usize {
        let done = self.done();
        if done == 0 {
            return self.blocks as usize;
        }
        let before = self.block_ends[(done.wrapping_sub(1) % STAGE_RING) as usize];
        (self.blocks - before) as usize
    }

    /// Waits until [`running`](Self::running) is 0.
    pub fn wait_blocks(&self) -> Result<(), CudaError> {
        self.wait_done(self.posted_stages)
    }

    /// Whether a launch is open.
    pub(crate) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// The last posted stage, of all launches.
    pub(crate) fn last_stage(&self) -> u32 {
        self.posted_stages.wrapping_sub(1)
    }

    /// What open launches have added up; hidden. All of them are closed.
    pub fn total(&self, out: &mut [f32]) -> Result<(), CudaError> {
        self.device.wait()?;
        Ok(self.total.read(0, bytemuck::cast_slice_mut(out))?)
    }

    /// Leaves blocks in device memory from the next launch on.
    pub(crate) fn keep(&mut self, keeping: Keeping) {
        self.keeping = keeping;
    }
}
