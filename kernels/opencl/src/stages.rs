//! [`StagedMlp`]: one layer's FFN in stages (section 3.2.1, Algorithm 1), fed by the host while it runs.
//!
//! The host [posts](StagedMlp::post) stages: lists of blocks that are in memory now. The device computes what is posted
//! and tells, in order, which stages are done and what the FFN's sum is then. Neither side waits for the other: the host
//! may post some stages ahead, and the device may tell of several at once.
//!
//! Two ways, chosen when it is made ([`Coordination`]): where device and host share memory finely, with atomics, one
//! kernel stays on the device and waits for the host's flags (`cl/stages.cl`); everywhere else each stage is kernels of
//! its own, and events tell of their ends.
//!
//! Of Algorithm 1's flags GpuRd is the counter of posted stages and GpuWr a counter for each work-group; IoRd and IoWr are
//! between the host's threads (`ls-sync`'s `StageFlags`) and nothing that a device sees. All are numbers that only grow, so
//! that nothing has to be reset. Every work-group polls the host's flag itself, as Algorithm 1 says: fine where memory is
//! the same; on a card behind a bus one should poll for all, as ls-cuda does.

mod events;
mod flags;

use crate::OpenClError;
use crate::device::{Device, Sharing};
use crate::error::Kind;
use ls_compute::MlpShape;
use std::time::{Duration, Instant};

/// Stages that host and device may be apart; `STAGE_RING` of `cl/stages.cl`.
const STAGE_RING: u32 = 16;
/// Most stages of a launch.
pub const MAX_STAGES: u32 = STAGE_RING / 2;
/// Most neurons of a block: an entry of the list has six bits for them.
const MAX_BLOCK_NEURONS: u32 = 64;

/// How the kernel runs.
#[derive(Clone, Copy, Debug)]
pub struct StagedOptions {
    /// Blocks that there is room for.
    pub blocks: u32,
    /// Work-groups that stay on the device; at most its compute units, as one that does not fit would never come.
    pub work_groups: u32,
    /// After how long a wait is given up by the host, milliseconds.
    pub patience_ms: u64,
    /// After how many looks at the flags a wait is given up by the device, should the host never do.
    pub most_spins: u32,
    /// How host and device tell each other; None: by flags where the device can.
    pub coordination: Option<Coordination>,
}

impl StagedOptions {
    /// All compute units of `device`, room for `blocks` blocks.
    #[must_use]
    pub fn new(device: &Device, blocks: u32) -> StagedOptions {
        let work_groups = device.info().compute_units;
        let (patience_ms, most_spins) = (2000, 1 << 28);
        StagedOptions { blocks, work_groups, patience_ms, most_spins, coordination: None }
    }
}

/// How host and device tell each other what is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coordination {
    /// One kernel that waits for flags.
    Flags,
    /// Kernels for each stage, and events.
    Events,
}

/// A block of neurons that is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its number, as given to [`StagedMlp::write_block`].
    pub index: u32,
    /// Its neurons, at least 1.
    pub neurons: u32,
}

/// One layer's FFN in stages. See the module's documentation.
#[derive(Debug)]
pub struct StagedMlp {
    way: Way,
    shape: MlpShape,
    blocks: u32,
    patience: Duration,
    launched_stages: u32,
    posted_stages: u32,
}

#[derive(Debug)]
enum Way {
    Flags(Box<flags::Flags>),
    Events(Box<events::Events>),
}

/// Calls the same function of either way.
macro_rules! either {
    ($self:expr, $way:ident => $call:expr) => {
        match &mut $self.way {
            Way::Flags($way) => $call,
            Way::Events($way) => $call,
        }
    };
}

impl StagedMlp {
    /// Allocates everything.
    ///
    /// # Errors
    /// If the device has no room, or cannot do what the options ask for.
    pub fn new(
        device: &Device,
        shape: MlpShape,
        options: StagedOptions,
    ) -> Result<StagedMlp, OpenClError> {
        check_shape(&shape, &options)?;
        let can = device.info().sharing == Sharing::Atomics;
        let default = if can { Coordination::Flags } else { Coordination::Events };
        let way = match options.coordination.unwrap_or(default) {
            Coordination::Flags if !can => {
                let text = "flags while a kernel runs: this device shares no memory with atomics";
                return Err(Kind::Unsupported(text.into()).into());
            }
            Coordination::Flags => Way::Flags(flags::Flags::new(device, shape, &options)?.into()),
            Coordination::Events => {
                Way::Events(events::Events::new(device, shape, options.blocks)?.into())
            }
        };
        let patience = Duration::from_millis(options.patience_ms);
        let blocks = options.blocks;
        Ok(StagedMlp { way, shape, blocks, patience, launched_stages: 0, posted_stages: 0 })
    }

    /// How host and device tell each other.
    #[must_use]
    pub fn coordination(&self) -> Coordination {
        match self.way {
            Way::Flags(_) => Coordination::Flags,
            Way::Events(_) => Coordination::Events,
        }
    }

    /// Sets the FFN's input; hidden. No launch may be running.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn set_input(&mut self, h: &[f32]) -> Result<(), OpenClError> {
        assert_eq!(h.len(), self.shape.hidden as usize, "width of the input");
        Ok(either!(self, way => way.set_input(h))?)
    }

    /// Puts the neurons of a block where the device finds them; a stage that has the block is posted later.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn write_block(&mut self, index: u32, bytes: &[u8]) -> Result<(), OpenClError> {
        assert!(index < self.blocks, "block {index} of {}", self.blocks);
        let stride = self.shape.block_stride as usize;
        assert!(bytes.len() <= stride, "{} bytes of a block of {stride}", bytes.len());
        Ok(either!(self, way => way.write_block(index as usize * stride, bytes))?)
    }

    /// Starts a sum of the next `stages` stages (at most [`MAX_STAGES`]), which are posted from now on. All earlier ones
    /// have been posted.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn launch(&mut self, stages: u32) -> Result<(), OpenClError> {
        assert!((1..=MAX_STAGES).contains(&stages), "{stages} stages");
        let open = self.launched_stages.wrapping_sub(self.posted_stages);
        assert_eq!(open, 0, "{open} stages of the last launch are not posted");
        either!(self, way => way.launch(self.launched_stages, stages))?;
        self.launched_stages = self.launched_stages.wrapping_add(stages);
        Ok(())
    }

    /// Says that the next stage's blocks are in memory. Waits only if the device is too far behind.
    ///
    /// # Errors
    /// [`OpenClError::is_timeout`] if that takes too long.
    pub fn post(&mut self, blocks: &[Block]) -> Result<(), OpenClError> {
        assert_ne!(self.posted_stages, self.launched_stages, "no launch waits for a stage");
        for block in blocks {
            let whole = (1..=self.shape.block_neurons).contains(&block.neurons);
            assert!(block.index < self.blocks && whole, "{block:?}");
        }
        let stage = self.posted_stages;
        // The rings have room when the device is near enough.
        while !either!(self, way => way.has_room(stage, blocks.len())) {
            let next = self.done().wrapping_add(1);
            self.wait_done(next)?;
        }
        either!(self, way => way.post(stage, blocks))?;
        self.posted_stages = stage.wrapping_add(1);
        Ok(())
    }

    /// Stages that are done, over all launches.
    pub fn done(&mut self) -> u32 {
        either!(self, way => way.done())
    }

    /// Waits until `stages` stages, over all launches, are done.
    ///
    /// # Errors
    /// [`OpenClError::is_timeout`] if that takes too long, or if the device gave up; it starts anew then.
    pub fn wait_done(&mut self, stages: u32) -> Result<(), OpenClError> {
        let mut patience = Patience::new(self.patience);
        while (self.done().wrapping_sub(stages) as i32) < 0 {
            if either!(self, way => way.is_over()) || !patience.wait() {
                // What has ended in the meantime counts.
                if (self.done().wrapping_sub(stages) as i32) >= 0 {
                    return Ok(());
                }
                return Err(self.give_up().into());
            }
        }
        Ok(())
    }

    /// The FFN's sum up to stage `stage` (of all launches), which is done and one of the last few, to `out`; hidden.
    pub fn partial(&mut self, stage: u32, out: &mut [f32]) {
        assert_eq!(out.len(), self.shape.hidden as usize, "width of the sum");
        let behind = self.done().wrapping_sub(stage) as i32;
        assert!((1..=STAGE_RING as i32).contains(&behind), "stage {stage}: {behind} behind");
        either!(self, way => way.partial(stage, out));
    }

    /// Waits for the end of all launches.
    ///
    /// # Errors
    /// [`OpenClError::is_timeout`] if one waits for a stage that does not come; the session starts anew then.
    pub fn finish(&mut self) -> Result<(), OpenClError> {
        let mut patience = Patience::new(self.patience);
        while !either!(self, way => way.is_over()) && patience.wait() {}
        if self.done() == self.launched_stages {
            return Ok(either!(self, way => way.finish())?);
        }
        Err(self.give_up().into())
    }

    /// Stops whatever runs, and starts anew.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn abort(&mut self) -> Result<(), OpenClError> {
        either!(self, way => way.abort())?;
        (self.launched_stages, self.posted_stages) = (0, 0);
        Ok(())
    }

    fn give_up(&mut self) -> Kind {
        let stage = self.done();
        match self.abort() {
            Ok(()) => Kind::TimedOut { stage },
            Err(OpenClError(kind)) => kind,
        }
    }
}

fn check_shape(shape: &MlpShape, options: &StagedOptions) -> Result<(), Kind> {
    let MlpShape { dtype, hidden, block_neurons, block_stride } = *shape;
    let unsupported = |text: String| Err(Kind::Unsupported(text));
    if !hidden.is_multiple_of(8) || hidden == 0 {
        return unsupported(format!("a hidden width of {hidden}; a multiple of 8 is wanted"));
    }
    if !(1..=MAX_BLOCK_NEURONS).contains(&block_neurons) {
        return unsupported(format!("blocks of {block_neurons} neurons; 1 to {MAX_BLOCK_NEURONS}"));
    }
    let block_bytes = u64::from(block_neurons) * 3 * dtype.row_bytes(hidden);
    if !block_stride.is_multiple_of(64) || u64::from(block_stride) < block_bytes {
        return unsupported(format!("blocks of {block_bytes} bytes, {block_stride} apart"));
    }
    if options.blocks == 0 || options.blocks >= 1 << 26 {
        return unsupported(format!("room for {} blocks", options.blocks));
    }
    Ok(())
}

/// A bounded wait. Time in which this process does not run does not count.
struct Patience {
    left: Duration,
    last: Instant,
}

/// Two looks further apart than this were not two looks in a row.
const LONGEST_GAP: Duration = Duration::from_millis(20);

impl Patience {
    fn new(left: Duration) -> Patience {
        Patience { left, last: Instant::now() }
    }

    /// False: give up.
    fn wait(&mut self) -> bool {
        std::thread::yield_now();
        let now = Instant::now();
        self.left = self.left.saturating_sub((now - self.last).min(LONGEST_GAP));
        self.last = now;
        !self.left.is_zero()
    }
}
