//! The FFN kernel's parameters and shape: the host's side of `cu/mlp.cu`.

use crate::device::{Device, Function, Grid, args};
use crate::error::Kind;
use ls_bundle::model::DType;

/// Stages that host and device may be apart.
pub(crate) const STAGE_RING: u32 = 64;
/// Most neurons of a block: an entry of the list has six bits for them.
pub(crate) const MAX_BLOCK_NEURONS: u32 = 64;
/// Entries of a thread block that are posted and not done.
pub(crate) const LIST_RING: u32 = 1024;
/// An entry's bits from here on are its lap of that ring + 1, modulo LAPS.
pub(crate) const LAP_SHIFT: u32 = 57;
pub(crate) const LAPS: u32 = 128;
/// An entry's bit that says that its block is in host memory.
pub(crate) const FAR_SHIFT: u32 = 56;
/// Widest model: two octets a thread of 512.
pub(crate) const MAX_HIDDEN: u32 = 8192;
const WARP: u32 = 32;
const MAX_CONSUMERS: u32 = 16;
/// Groups of consumers that take turns, where two have room.
const GROUPS: u32 = 2;
/// Octets of a row that a thread has.
const MAX_OCTETS: u32 = 2;
/// Producer and signaler.
const PLAIN_WARPS: u32 = 2;
/// Warps that copy sums.
const COPY_WARPS: u32 = 4;
/// Those, the forwarder, and those that copy.
const STAGED_WARPS: u32 = PLAIN_WARPS + 1 + COPY_WARPS;
/// Shared memory before the ring's data.
const DATA_AT: u32 = 4096;
const MAX_BUFFERS: u32 = 8;
const MAX_SLOT_ENTRIES: u32 = 16;
/// Bytes of a ring's buffer, but for blocks that are larger.
const BUFFER_BYTES: u32 = 48 << 10;

/// How a kernel gets at weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loads {
    /// Threads read them where they are.
    Plain,
    /// cp.async into shared memory; compute capability 8.0.
    Async,
    /// The copy engine of the multiprocessor, cp.async.bulk; 9.0.
    Bulk,
}

impl Loads {
    /// The fastest way of a device.
    #[must_use]
    pub fn best(capability: (u32, u32)) -> Loads {
        match capability.0 {
            ..=7 => Loads::Plain,
            8 => Loads::Async,
            _ => Loads::Bulk,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Loads::Plain => "plain",
            Loads::Async => "async",
            Loads::Bulk => "bulk",
        }
    }
}

pub(crate) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "f16",
        DType::Q8_0 => "q8_0",
        DType::Q4_0 => "q4_0",
    }
}

/// `Mlp` of `cu/mlp.cu`, field by field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MlpArgs {
    pub(crate) h: u64,
    pub(crate) lanes: u64,
    pub(crate) sum: u64,
    pub(crate) next_sum: u64,
    pub(crate) list: u64,
    pub(crate) base: u64,
    pub(crate) stride: u32,
    pub(crate) block_neurons: u32,
    pub(crate) last: u32,
    pub(crate) last_neurons: u32,
    pub(crate) first: u32,
    pub(crate) end: u32,
    pub(crate) lane_shift: u32,
    pub(crate) hidden: u32,
    pub(crate) groups: u32,
    pub(crate) buffers: u32,
    pub(crate) buffer_bytes: u32,
    pub(crate) posted: u64,
    pub(crate) posted_list: u64,
    pub(crate) session: u64,
    pub(crate) report: u64,
    pub(crate) partials: u64,
    pub(crate) first_stage: u32,
    pub(crate) stages: u32,
    pub(crate) launch: u32,
    pub(crate) silent_last: u32,
    pub(crate) known_stages: u32,
    pub(crate) spin_ns: u64,
    pub(crate) far_from: u64,
    pub(crate) far_bytes: u64,
    pub(crate) keep_at: u64,
}

/// The kernel for one shape of neurons, and how it is launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MlpKernel {
    function: Function,
    blocks: u32,
    groups: u32,
    /// Warps of a group.
    consumers: u32,
    buffers: u32,
    buffer_bytes: u32,
    shared_bytes: u32,
    /// Whether launches overlap, instead of being checked to fit.
    overlaps: bool,
}

impl MlpKernel {
    /// For neurons of rows of `hidden` weights in blocks of `stride` bytes, on `blocks` multiprocessors.
    pub(crate) fn new(
        device: &Device,
        dtype: DType,
        hidden: u32,
        (block_neurons, stride): (u32, u32),
        blocks: u32,
        loads: Loads,
    ) -> Result<MlpKernel, Kind> {
        check_shape(hidden, block_neurons)?;
        let octets = hidden / 8;
        let group_threads = MAX_CONSUMERS / GROUPS * WARP;
        let groups = if octets <= MAX_OCTETS * group_threads { GROUPS } else { 1 };
        let of_thread = if octets <= group_threads { 1 } else { MAX_OCTETS };
        let consumers = octets.div_ceil(WARP * of_thread);
        let data_at = DATA_AT + (hidden * 4).next_multiple_of(128);
        let room = device.info().shared_bytes - data_at;
        let in_slot = (BUFFER_BYTES / stride).clamp(1, MAX_SLOT_ENTRIES);
        let buffers = (room / (in_slot * stride)).min(MAX_BUFFERS);
        let (loads, in_slot, buffers) = match loads {
            // A ring of less than two buffers would not overlap anything.
            Loads::Async | Loads::Bulk if buffers >= 2 => (loads, in_slot, buffers),
            _ => (Loads::Plain, (8 / block_neurons).max(1), MAX_BUFFERS),
        };
        let buffer_bytes = in_slot * stride;
        let ring = if loads == Loads::Plain { 0 } else { buffers * buffer_bytes };
        let shared_bytes = data_at + ring;
        let name = format!("mlp_{}_{}_{of_thread}", loads.name(), dtype_name(dtype));
        let function = device.function("mlp", &name, shared_bytes)?;
        Ok(MlpKernel {
            function,
            blocks,
            groups,
            consumers,
            buffers,
            buffer_bytes,
            shared_bytes,
            overlaps: false,
        })
    }

    /// Lets launches with stages begin before the one before has ended; without the driver's check that all blocks run at
    /// once.
    pub(crate) fn overlap(&mut self) {
        self.overlaps = true;
    }

    /// Sums that it keeps apart.
    pub(crate) fn lanes(&self) -> u32 {
        self.blocks * self.groups
    }

    /// Starts the kernel.
    ///
    /// # Safety
    /// All addresses in `args` are the device's, of as much memory as the kernel uses, until it ends.
    pub(crate) unsafe fn launch(&self, device: &Device, mut args: MlpArgs) -> Result<(), Kind> {
        (args.groups, args.buffers, args.buffer_bytes) =
            (self.groups, self.buffers, self.buffer_bytes);
        let staged = args.posted != 0;
        let warps = self.groups * self.consumers + if staged { STAGED_WARPS } else { PLAIN_WARPS };
        let grid = Grid {
            shared_bytes: self.shared_bytes,
            // Stages wait for all blocks: one that does not fit would never come.
            together: staged && !self.overlaps,
            overlaps: staged && self.overlaps,
            ..Grid::new(self.blocks, warps * WARP)
        };
        // SAFETY: the kernel's only parameter; the caller's guarantee.
        unsafe { device.launch(self.function, grid, args!(args)) }
    }
}

/// What the kernel can do.
pub(crate) fn check_shape(hidden: u32, block_neurons: u32) -> Result<(), Kind> {
    if !hidden.is_multiple_of(8) || hidden > MAX_HIDDEN {
        let wanted = format!("a multiple of 8 up to {MAX_HIDDEN} is wanted");
        return Err(Kind::Unsupported(format!("a hidden width of {hidden}; {wanted}")));
    }
    if block_neurons > MAX_BLOCK_NEURONS {
        let most = format!("{MAX_BLOCK_NEURONS} are the most");
        return Err(Kind::Unsupported(format!("blocks of {block_neurons} neurons; {most}")));
    }
    Ok(())
}
