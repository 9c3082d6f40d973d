//! [`StageFlags`]: the coordination primitive of the paper's section 3.2.1 and Algorithm 1.
//!
//! Four flags for each row (a layer) and group of blocks. "GPU" stands for whoever computes, threads of the processor too:
//!
//! | flag | written by | an epoch in it says |
//! |---|---|---|
//! | `io_rd` | control | the group's selection is decided: read it |
//! | `io_wr` | readers | the group's blocks have arrived |
//! | `gpu_rd` | control | the group's weights are in memory, pinned: compute |
//! | `gpu_wr` | who computes | the group's partial result is written |
//!
//! A flag has one writer. It holds the number of the pass for which it was last true, and that only grows: nothing is
//! reset between tokens, so no reset can be missed, and a late look sees the past at worst. Publishing releases and
//! observing acquires: who observes an epoch sees all that its writer wrote before. Each flag has a cache line of its own.
//!
//! No wait without a way out: every one ends with the bank's [`Stop`] at the latest. Nothing here allocates after `new`.
//! It leaves out which thread is whose, and memory that a device maps: a bank is plain memory of the process.

use super::backoff::Backoff;
use super::parking::Parking;
use super::primitive::{AtomicU32, OBSERVE, PUBLISH};
use super::stop::{Stop, Stopped};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Which of a group's flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagKind {
    /// The group may be computed.
    GpuRd,
    /// The group was computed.
    GpuWr,
    /// The group shall be read.
    IoRd,
    /// The group was read.
    IoWr,
}

const KINDS: usize = 4;

/// The number of a pass, 1 first; 0 stands for none yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u32);

/// The place of a group's flags in a bank, from [`StageFlags::at`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagIndex(usize);

/// On a cache line of its own, and on a pair of them where a processor fetches pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Line(AtomicU32);

/// A bank of flags. See the module's documentation.
#[derive(Debug)]
pub struct StageFlags {
    lines: Box<[Line]>,
    rows: u16,
    groups: u16,
    parking: Parking,
    stop: Arc<Stop>,
}

impl StageFlags {
    /// Flags of `groups` groups in each of `rows` rows. A row a layer is what the paper has; two rows in turns are enough
    /// where epochs count layers, as no more than two layers are ever under way.
    #[must_use]
    pub fn new(rows: u16, groups: u16, stop: Arc<Stop>) -> StageFlags {
        let count = KINDS * usize::from(rows) * usize::from(groups);
        let lines = (0..count).map(|_| Line(AtomicU32::new(0))).collect();
        StageFlags { lines, rows, groups, parking: Parking::new(), stop }
    }

    /// Heap bytes of such a bank.
    #[must_use]
    pub const fn heap_bytes(rows: u16, groups: u16) -> usize {
        KINDS * rows as usize * groups as usize * size_of::<Line>()
    }

    /// Where the flags of a group are.
    ///
    /// # Panics
    /// If there is no such row or group.
    #[must_use]
    pub fn at(&self, row: u16, group: u16) -> FlagIndex {
        let (rows, groups) = (self.rows, self.groups);
        assert!(row < rows && group < groups, "flag {row}.{group} of {rows} rows of {groups}");
        FlagIndex(usize::from(row) * usize::from(groups) + usize::from(group))
    }

    fn flag(&self, kind: FlagKind, at: FlagIndex) -> &AtomicU32 {
        &self.lines[at.0 * KINDS + kind as usize].0
    }

    /// Says that `kind` is true for the pass `epoch`, and wakes who sleeps. Only the flag's writer may.
    ///
    /// # Panics
    /// If the flag is beyond `epoch`: it has a second writer, or passes run backwards.
    pub fn publish(&self, kind: FlagKind, at: FlagIndex, epoch: Epoch) {
        let flag = self.flag(kind, at);
        // Relaxed: the writer sees its own stores.
        let before = flag.load(Ordering::Relaxed);
        assert!(before <= epoch.0, "{kind:?} goes back from {before} to {}", epoch.0);
        flag.store(epoch.0, PUBLISH);
        self.parking.wake_all();
    }

    /// The last pass for which `kind` is known to be true. Never waits.
    #[must_use]
    pub fn observe(&self, kind: FlagKind, at: FlagIndex) -> Epoch {
        Epoch(self.flag(kind, at).load(OBSERVE))
    }

    /// Waits until `kind` is true for the pass `epoch`.
    ///
    /// # Errors
    /// If the bank was stopped, and the flag is not there.
    pub fn wait(
        &self,
        kind: FlagKind,
        at: FlagIndex,
        epoch: Epoch,
        backoff: &mut Backoff,
    ) -> Result<(), Stopped> {
        self.wait_until(backoff, |flags| flags.observe(kind, at) >= epoch)
    }

    /// Waits until `ready`, which observes flags of this bank and nothing else: whoever answers to many groups at once
    /// (several `gpu_wr` to one `io_rd`) looks at all of them.
    ///
    /// # Errors
    /// If the bank was stopped, and it is not ready.
    pub fn wait_until(
        &self,
        backoff: &mut Backoff,
        mut ready: impl FnMut(&StageFlags) -> bool,
    ) -> Result<(), Stopped> {
        backoff.reset();
        loop {
            if ready(self) {
                return Ok(());
            }
            if self.stop.is_raised() {
                return Err(Stopped);
            }
            if !backoff.spin() {
                break;
            }
        }
        let mut is_ready = false;
        self.parking.sleep_until(|| {
            is_ready = ready(self);
            is_ready || self.stop.is_raised()
        });
        if is_ready { Ok(()) } else { Err(Stopped) }
    }

    /// Raises the bank's stop, and wakes who sleeps.
    pub fn stop(&self) {
        self.stop.raise();
        self.parking.wake_all();
    }
}
