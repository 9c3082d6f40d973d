//! The ring of blocks that later stages will have, and which thread block gets which of them.

use super::StagedMlp;
use crate::blocks::Entry;
use crate::device::{Device, Mapped};
use crate::error::Kind;
use crate::launch::{LAP_SHIFT, LAPS, LIST_RING};

/// Of so many thread blocks at most one only has blocks from host memory: they arrive late, and would keep others waiting.
const FAR_SHARE: u32 = 4;
/// Blocks from host memory of such a thread block, which asks for one after the other, unless that would make too many of
/// them.
const FAR_ROWS: u32 = 5;
/// So many thread blocks at least, as one alone does not fill the bus.
const FAR_LEAST: u32 = 4;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct List {
    ring: Mapped,
    /// Thread blocks.
    blocks: u32,
}

impl List {
    pub(super) fn new(device: &Device, blocks: u32) -> Result<List, Kind> {
        Ok(List { ring: device.mapped((blocks * LIST_RING) as usize * 8)?, blocks })
    }

    /// Where the device reads it.
    pub(super) fn address(&self) -> u64 {
        self.ring.address()
    }

    /// As new; nothing may be running.
    pub(super) fn reset(&mut self) {
        // SAFETY: no kernel is running.
        unsafe { self.ring.bytes_mut() }.fill(0);
    }

    /// Writes entries from number `first` on, where there is room. Each place is written once: the device may be looking
    /// already.
    fn write(&self, first: u32, entries: impl Iterator<Item = Entry>) {
        let list = self.ring.host().cast::<u64>();
        let (mut block, mut row) = (first % self.blocks, first / self.blocks);
        for entry in entries {
            // A thread block's entries lie side by side, so that no two read the same line.
            let at = block * LIST_RING + row % LIST_RING;
            let lap = u64::from((row / LIST_RING + 1) % LAPS);
            let word = entry.word() | lap << LAP_SHIFT;
            // SAFETY: within the list; the device reads whole words.
            unsafe { list.add(at as usize).write_volatile(word) };
            block += 1;
            if block == self.blocks {
                (block, row) = (0, row + 1);
            }
        }
    }

    /// Of all thread blocks, how many have `far` blocks from host memory: few, so that little waits at the bus.
    fn far_blocks(&self, far: u32) -> u32 {
        let wanted = far.div_ceil(FAR_ROWS).max(FAR_LEAST);
        wanted.min(self.blocks / FAR_SHARE).min(far)
    }
}

impl StagedMlp {
    /// Writes the next entries, some order of `entries` and places without one. Returns how many.
    pub(super) fn announce_all(&mut self, entries: &[Entry]) -> Result<u32, Kind> {
        let count = u32::try_from(entries.len()).expect("a layer's blocks");
        let blocks = self.list.blocks;
        let far = entries.iter().filter(|entry| entry.is_far()).count() as u32;
        if far == 0 || blocks < FAR_SHARE {
            self.make_room(count)?;
            self.list.write(self.announced_entries, entries.iter().copied());
            self.announced_entries += count;
            return Ok(count);
        }
        // The first ones: where launches overlap, they begin to read while the launch before still computes.
        let far_blocks = self.list.far_blocks(far);
        // Rows of a place for each thread block; both kinds are dealt row by row.
        let rows = far.div_ceil(far_blocks).max((count - far).div_ceil(blocks - far_blocks));
        let start = self.announced_entries.next_multiple_of(blocks);
        let end = start + rows * blocks;
        let places = end - self.announced_entries;
        self.make_room(places)?;
        let mut far = entries.iter().filter(|entry| entry.is_far());
        let mut near = entries.iter().filter(|entry| !entry.is_far());
        let padding = start - self.announced_entries;
        let dealt = (0..rows * blocks).map(|place| {
            let next = if place % blocks < far_blocks { far.next() } else { near.next() };
            *next.unwrap_or(&Entry::NONE)
        });
        self.list.write(self.announced_entries, (0..padding).map(|_| Entry::NONE).chain(dealt));
        self.announced_entries = end;
        Ok(places)
    }

    /// Waits until the device has read what lies where `count` more entries go.
    fn make_room(&mut self, count: u32) -> Result<(), Kind> {
        let most = self.list.blocks * LIST_RING;
        assert!(count <= most, "{count} entries");
        self.wait_for(|this| {
            let done = this.end_of(this.done().wrapping_sub(1));
            this.announced_entries.wrapping_sub(done) + count <= most
        })
    }
}
