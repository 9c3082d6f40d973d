//! [`Flow`]: blocks on their way into memory, and which of those in memory stay.
//!
//! Two lists say what is to be read: what the visited layer *wants*, in its order, and what the next layer is
//! *expected* to want, which is replaced at every prediction. Wanted blocks go first; expected ones are read only while
//! the disk has nothing else to do. A read takes a slot of memory along and brings it back; the cache says which blocks
//! keep their slots between visits. A block that was read ahead keeps its slot until its layer has been asked for. Wanted
//! blocks that lie near each other are read as one where the disk makes small reads dear ([`Merge`]).
//!
//! A wanted block that fails its check is read once more, as a bit may be flipped on its way. One that fails again, or that
//! cannot be read, is an error. What was only expected is forgotten instead, and read again should it be wanted.

mod group;

use crate::checker::Checker;
use crate::demand::Demand;
use crate::error::EngineError;
use crate::memory::{MemoryPlan, Merge};
use crate::program::blocks_of;
use crate::stats::{LayerStats, Stats};
use crate::stream::{Stream, allocate, split};
use crate::system::{Admit, Columns, ComputeOrder, Share};
use crate::timeline::{Span, Timeline};
use group::Group;
use ls_bundle::extent::Extent;
use ls_bundle::ids::{BlockId, LayerId};
use ls_bundle::model::{FfnExtent, WeightMap};
use ls_cache::{Admission, EvictionPolicy, Loading, Request, Sharing, SlotId, WeightCache};
use ls_compute::{ComputeBackend, NeuronBlocks};
use ls_control::Frequencies;
use ls_sync::Slot;
use std::collections::VecDeque;

/// Most expected blocks that are read at the same time: wanted ones, which may come any moment, wait behind them.
const MAX_AHEAD_READS: u32 = 24;
/// Parts of what is wanted that come in order of priority.
const STAGES: usize = 4;
/// Blocks that run together where slots are few: each call that computes costs a little.
const FEW: usize = 8;

/// A wanted block that is in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ready {
    /// Number in its layer.
    pub(crate) block: u32,
    pub(crate) slot: SlotId,
}

/// Why a slot is pinned besides being wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ahead {
    No,
    /// Read ahead; its layer has not been asked for yet.
    Early,
    /// Read ahead, and still being read now that its layer has been asked for.
    Late,
}

/// What reads go through.
pub(crate) struct Disk<'a> {
    pub(crate) stream: &'a mut Stream,
    pub(crate) checker: &'a mut Checker,
    pub(crate) stats: &'a mut Stats,
    pub(crate) timeline: &'a mut Timeline,
}

/// See the module's documentation.
pub(crate) struct Flow {
    ffn: Vec<FfnExtent>,
    cache: WeightCache,
    /// By slot: its memory; None while it is being read.
    memory: Vec<Option<Slot>>,
    /// By slot: the right to fill it, while it is being read.
    loading: Vec<Option<Loading>>,
    ahead: Vec<Ahead>,
    /// Slots of blocks that were read ahead for a layer that has not been asked for.
    early: Vec<SlotId>,
    /// Expected blocks that are being read.
    ahead_reads: u32,
    /// Slots for blocks on their way.
    passing: u32,
    visited: LayerId,
    demand: Demand,
    /// Wanted blocks, the next one last; one that was read with a neighbour is still in the list.
    wanted: Vec<u32>,
    /// Whether one of them found no slot.
    cramped: bool,
    merge: Option<Merge>,
    /// Reads of several blocks, and their buffers; None while they are being read.
    groups: Vec<Group>,
    buffers: Vec<Option<Slot>>,
    /// Blocks that are read with others and have not arrived; at most so many.
    grouped: usize,
    max_grouped: usize,
    /// Expected blocks of `expected_of` that may have none, the next one last; so many of them may be read at a time.
    expected: Vec<u32>,
    expected_of: LayerId,
    segment: u32,
    /// Wanted blocks that are there and have not been taken; the first `usable` of them may run.
    ready: Vec<Ready>,
    usable: usize,
    /// Slots of blocks that have been taken, oldest first, and that the backend may still read.
    running: VecDeque<SlotId>,
    /// Whether the backend reads slots in place.
    lent: bool,
    layers: Vec<LayerStats>,
}

/// The cache's books: which slots stay, and whose.
fn books(
    map: &WeightMap,
    plan: &MemoryPlan,
    columns: &Columns,
    policy: Box<dyn EvictionPolicy>,
) -> WeightCache {
    let layers = map.layers.len() as u32;
    // Slots that do not stay are for blocks on their way; none are where every block has its own.
    let (stay, all_stay) = (plan.slots - plan.passing, plan.passing == 0);
    let kept = map.layers.iter().zip(0..).map(|(extents, layer)| match all_stay {
        true => extents.ffn.blocks(),
        false => stay / layers + u32::from(layer < stay % layers),
    });
    let sharing = match columns.sharing {
        Share::Layer => Sharing::PerLayer(kept.collect()),
        Share::Global => Sharing::Global(stay),
    };
    let admission = match columns.admission {
        Admit::Compete => Admission::Compete,
        Admit::Always => Admission::Always,
    };
    WeightCache::new(blocks_of(map), plan.slots, sharing, admission, policy)
}

impl Flow {
    /// Slots for blocks as planned, and their books.
    pub(crate) fn open(
        map: &WeightMap,
        plan: &MemoryPlan,
        columns: &Columns,
        policy: Box<dyn EvictionPolicy>,
        backend: &mut dyn ComputeBackend,
    ) -> Result<Flow, EngineError> {
        let ffn: Vec<FfnExtent> = map.layers.iter().map(|layer| layer.ffn).collect();
        let room = allocate(plan.slot_bytes as usize * plan.slots as usize)?;
        let lend = |ffn| backend.lend(room.bytes(), plan.slot_bytes as usize, ffn);
        let lent = ffn.first().is_some_and(lend);
        let memory = split(room, plan.slot_bytes, plan.slots);
        let cache = books(map, plan, columns, policy);
        // All are for blocks on their way where every block has its own.
        let passing = if plan.passing == 0 { plan.slots } else { plan.passing };
        let most = ffn.iter().map(FfnExtent::blocks).max().unwrap_or(0) as usize;
        let slots = memory.len();
        let buffers = match plan.merge {
            Some(Merge { buffer_bytes, buffers, .. }) => {
                let room = allocate(buffer_bytes as usize * buffers as usize)?;
                split(room, buffer_bytes, buffers)
            }
            None => Vec::new(),
        };
        // Blocks that run in order must not wait for one that finds all slots taken by later ones.
        let max_grouped = match columns.compute_order {
            ComputeOrder::Arrival => slots,
            ComputeOrder::Loaded => passing as usize / 4,
        };
        Ok(Flow {
            demand: Demand::new(most as u32),
            cramped: false,
            merge: plan.merge,
            groups: buffers.iter().map(|_| Group::empty()).collect(),
            buffers,
            grouped: 0,
            max_grouped,
            cache,
            memory,
            loading: (0..slots).map(|_| None).collect(),
            ahead: vec![Ahead::No; slots],
            early: Vec::with_capacity(slots),
            ahead_reads: 0,
            passing,
            visited: LayerId(0),
            // Each may be read twice.
            wanted: Vec::with_capacity(2 * most),
            expected: Vec::with_capacity(most),
            expected_of: LayerId(0),
            segment: MAX_AHEAD_READS,
            ready: Vec::with_capacity(most.max(slots)),
            usable: 0,
            running: VecDeque::with_capacity(slots),
            lent,
            layers: vec![LayerStats::default(); ffn.len()],
            ffn,
        })
    }

    /// A layer's FFN.
    pub(crate) fn ffn(&self, layer: LayerId) -> &FfnExtent {
        &self.ffn[layer.index()]
    }

    /// The cache's books.
    pub(crate) fn cache(&self) -> &WeightCache {
        &self.cache
    }

    /// Whether the backend reads slots in place.
    pub(crate) fn is_lent(&self) -> bool {
        self.lent
    }

    /// What happened in each layer.
    pub(crate) fn layers(&self) -> &[LayerStats] {
        &self.layers
    }

    /// The same, to be added to.
    pub(crate) fn layer_stats(&mut self, layer: LayerId) -> &mut LayerStats {
        &mut self.layers[layer.index()]
    }

    /// Whether a block is in memory or on its way.
    pub(crate) fn holds(&self, layer: LayerId, block: u32) -> bool {
        self.cache.holds(BlockId(self.ffn(layer).first_block.0 + block))
    }

    /// Whether a block is in memory.
    pub(crate) fn has(&self, layer: LayerId, block: u32) -> bool {
        self.cache.find(BlockId(self.ffn(layer).first_block.0 + block)).is_some()
    }

    /// What the visit asked for, and how far that has come.
    pub(crate) fn demand(&mut self) -> &mut Demand {
        &mut self.demand
    }

    /// Blocks from `first` on that a dense pass brings by: those that the policy thinks most of are left in slots.
    pub(crate) fn leave(
        &mut self,
        stream: &Stream,
        layer: LayerId,
        first: u32,
        blocks: &NeuronBlocks<'_>,
    ) {
        for (block, bytes) in (first..).zip(blocks.bytes.chunks_exact(blocks.block_stride)) {
            let (id, extent) = self.ffn(layer).block(block);
            if self.cache.holds(id) {
                continue;
            }
            let Some(slot) = self.cache.offer(id) else { continue };
            let memory = self.memory[slot.0 as usize].as_mut();
            let memory = memory.expect("nothing is read between a prompt and the first token");
            memory.bytes_mut()[stream.skip(extent)..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    /// A layer asks for blocks, in this order. What is there is ready.
    pub(crate) fn ask(&mut self, layer: LayerId, blocks: &[u32]) {
        assert!(self.ready.is_empty() && self.wanted.is_empty(), "the visit before has ended");
        self.visited = layer;
        self.cache.begin(layer);
        self.demand.begin();
        let first = self.ffn(layer).first_block.0;
        for &block in blocks {
            self.demand.ask(block);
            match self.cache.request(BlockId(first + block)) {
                Request::Hit(slot) => self.ready.push(Ready { block, slot }),
                // Its read ahead is not over: it becomes ready when it arrives.
                Request::Coming(_) => self.demand.is_coming(),
                Request::Miss => {
                    self.demand.miss(block);
                    self.wanted.push(block);
                }
            }
        }
        self.usable = self.ready.len();
        // Where small reads are dear so is jumping about: each stage is read in the order of the file; all of a layer is, if
        // most of it is to be read.
        if self.merge.is_some() {
            let most = 2 * self.wanted.len() > self.ffn(layer).blocks() as usize;
            let stage = self.wanted.len().div_ceil(if most { 1 } else { STAGES }).max(1);
            self.wanted.chunks_mut(stage).for_each(<[u32]>::sort_unstable);
        }
        self.wanted.reverse();
        // What was read ahead has been asked for now, or was read in vain.
        if self.expected_of == layer {
            self.expected.clear();
        }
        for slot in self.early.drain(..) {
            let ahead = &mut self.ahead[slot.0 as usize];
            if self.loading[slot.0 as usize].is_some() {
                *ahead = Ahead::Late;
            } else {
                *ahead = Ahead::No;
                self.cache.unpin(slot);
            }
        }
    }

    /// A layer is expected to want these blocks, best first, as far as they are not there. They are read in segments: the
    /// more of them, the more of it can still be changed, and the less the disk has to do at a time.
    pub(crate) fn expect(&mut self, layer: LayerId, blocks: &[u32], io: Frequencies) {
        self.expected_of = layer;
        self.expected.clear();
        let first = self.ffn[layer.index()].first_block.0;
        let cache = &self.cache;
        let missing = blocks.iter().rev().filter(|&&b| !cache.holds(BlockId(first + b)));
        self.expected.extend(missing);
        let points: u32 = io.iter().map(|&frequency| u32::from(frequency)).sum();
        self.segment = (self.expected.len() as u32).div_ceil(points).max(1);
    }

    /// Whether any block is still expected and neither there nor being read.
    pub(crate) fn expects(&self) -> bool {
        !self.expected.is_empty()
    }

    /// Whether all wanted blocks are there or being read, so that the disk has room for expected ones.
    pub(crate) fn has_time(&self) -> bool {
        self.wanted.is_empty()
    }

    /// Takes what has arrived and starts reads as far as there are slots and the disk takes them. Never blocks.
    pub(crate) fn pump(&mut self, disk: &mut Disk<'_>) -> Result<(), EngineError> {
        disk.stream.pump()?;
        self.take(disk)?;
        self.submit(disk);
        Ok(())
    }

    /// Whether so few blocks that may run are enough: others that are wanted find no slot until these have run.
    pub(crate) fn must_run(&self, count: usize) -> bool {
        count > 0 && self.demand.due() == 0 || count >= FEW && self.cramped
    }

    /// Waits until `count` wanted blocks may run, or so few that they must, or until the backend is what is waited for.
    pub(crate) fn wait(&mut self, disk: &mut Disk<'_>, count: usize) -> Result<(), EngineError> {
        let since = std::time::Instant::now();
        loop {
            let went_on = disk.stream.wait_block(disk.stats)?;
            assert!(went_on, "a block that is waited for is being read, or the disk is busy");
            self.take(disk)?;
            self.submit(disk);
            let enough = self.usable >= count || self.must_run(self.usable);
            if enough || self.demand.due() == 0 || self.waits_for_backend() {
                break;
            }
        }
        self.layers[self.visited.index()].stalled += since.elapsed();
        disk.timeline.end(Some(since), Span::Wait, Some(self.visited), self.usable);
        Ok(())
    }

    /// Blocks that may run.
    pub(crate) fn ready(&self) -> &[Ready] {
        &self.ready[..self.usable]
    }

    /// Puts ready blocks in the order of `place`.
    pub(crate) fn sort_ready(&mut self, place: impl Fn(u32) -> u32) {
        self.ready[..self.usable].sort_unstable_by_key(|ready| place(ready.block));
    }

    /// Puts the ready blocks of each segment, of which the ends are given, in the order of their memory: jumping about in
    /// gigabytes is slower.
    pub(crate) fn line_up(&mut self, segments: impl IntoIterator<Item = u64>) {
        let mut rest = &mut self.ready[..self.usable];
        let mut begin = 0;
        for end in segments {
            let count = rest.len().min((end - begin) as usize);
            let (segment, others) = rest.split_at_mut(count);
            segment.sort_unstable_by_key(|ready| ready.slot);
            (rest, begin) = (others, end);
        }
    }

    /// The first `count` ready blocks have been given to the backend.
    pub(crate) fn ran(&mut self, count: usize) {
        self.running.extend(self.ready.drain(..count).map(|ready| ready.slot));
        self.usable -= count;
        self.demand.ran(count);
    }

    /// The backend may still read the last `running` blocks that it was given: the slots of all others are free to go.
    pub(crate) fn release(&mut self, running: usize) {
        while self.running.len() > running {
            let slot = self.running.pop_front().expect("it is longer than `running`");
            self.cache.unpin(slot);
        }
    }

    /// Whether a wanted block waits for a slot that the backend may still read.
    pub(crate) fn waits_for_backend(&self) -> bool {
        self.cramped && !self.running.is_empty()
    }

    /// A resident block's bytes.
    pub(crate) fn bytes(&self, stream: &Stream, ready: &Ready) -> &[u8] {
        let (_, extent) = self.ffn(self.visited).block(ready.block);
        let memory = self.memory[ready.slot.0 as usize].as_ref();
        let memory = memory.expect("a resident block has its memory");
        &memory.bytes()[stream.skip(extent)..]
    }

    /// The visit is over: what may not stay goes.
    pub(crate) fn settle(&mut self) {
        self.cache.settle();
    }

    fn submit(&mut self, disk: &mut Disk<'_>) {
        self.submit_wanted(disk.stream);
        if self.wanted.is_empty() {
            self.submit_expected(disk.stream);
        }
        disk.stream.flush_blocks();
        let wanted = disk.stream.blocks_in_flight().saturating_sub(self.ahead_reads);
        disk.timeline.reads(wanted, self.ahead_reads);
        if self.demand.opens() || self.cramped {
            self.usable = self.ready.len();
        }
    }

    fn submit_wanted(&mut self, stream: &mut Stream) {
        self.cramped = false;
        while let Some(&block) = self.wanted.last() {
            if !self.demand.is_missing(block) {
                self.wanted.pop();
                continue;
            }
            let (id, extent) = self.ffn(self.visited).block(block);
            let Some(loading) = self.cache.reserve(id) else {
                self.cramped = true;
                return;
            };
            let started = match self.neighbours(block) {
                Some((index, first, last)) => {
                    self.start_group(index, block, loading, first..=last, stream)
                }
                None if self.start(loading, extent, stream) => {
                    self.demand.found(block);
                    Some(extent.len)
                }
                None => None,
            };
            let Some(bytes) = started else { return };
            let stats = &mut self.layers[self.visited.index()];
            stats.wanted_bytes += bytes;
            stats.wanted_reads += 1;
            self.wanted.pop();
        }
    }

    fn submit_expected(&mut self, stream: &mut Stream) {
        while let Some(&block) = self.expected.last() {
            let (id, extent) = self.ffn(self.expected_of).block(block);
            if self.cache.holds(id) {
                self.expected.pop();
                continue;
            }
            // Some slots stay for what will be wanted: blocks that run in order must not wait for each other.
            let passing = self.passing;
            if self.ahead_reads >= MAX_AHEAD_READS.min(passing / 2).min(self.segment)
                || self.early.len() as u32 >= passing / 4 * 3
            {
                return;
            }
            let Some(loading) = self.cache.reserve_ahead(id) else { return };
            let slot = loading.slot();
            if !self.start(loading, extent, stream) {
                return;
            }
            self.ahead[slot.0 as usize] = Ahead::Early;
            self.early.push(slot);
            self.ahead_reads += 1;
            self.layers[self.expected_of.index()].expected_bytes += extent.len;
            self.expected.pop();
        }
    }

    /// Starts a read into a reserved slot; false if the disk takes no more.
    fn start(&mut self, loading: Loading, extent: Extent, stream: &mut Stream) -> bool {
        let slot = loading.slot().0 as usize;
        let memory = self.memory[slot].take().expect("a free slot has its memory");
        match stream.submit_block(extent, slot as u32, memory) {
            Ok(()) => self.loading[slot] = Some(loading),
            Err(memory) => {
                self.memory[slot] = Some(memory);
                self.cache.abandon(loading);
            }
        }
        self.loading[slot].is_some()
    }

    /// Takes the blocks that have arrived.
    fn take(&mut self, disk: &mut Disk<'_>) -> Result<(), EngineError> {
        while let Some(arrived) = disk.stream.take_block() {
            let slot = arrived.number as usize;
            if slot >= self.memory.len() {
                self.take_group(arrived, disk)?;
                continue;
            }
            let loading = self.loading[slot].take().expect("the slot was being filled");
            let memory = self.memory[slot].insert(arrived.memory);
            let layer = self.cache.blocks().layer_of(loading.block());
            let block = loading.block().0 - self.ffn[layer.index()].first_block.0;
            let (id, extent) = self.ffn[layer.index()].block(block);
            let bytes = &memory.bytes()[disk.stream.skip(extent)..][..extent.len as usize];
            let is_read = arrived.result.is_ok();
            let checked = match arrived.result {
                Ok(()) => disk.checker.block(id, bytes),
                Err(error) => Err(EngineError::io(error)),
            };
            let ahead = std::mem::replace(&mut self.ahead[slot], Ahead::No);
            self.ahead_reads -= u32::from(ahead != Ahead::No);
            let asked = ahead == Ahead::No
                || (ahead == Ahead::Late && layer == self.visited && self.demand.has_asked(block));
            if let Err(error) = checked {
                self.cache.abandon(loading);
                self.early.retain(|early| early.0 as usize != slot);
                if asked && !(is_read && self.may_try_again(block)) {
                    return Err(error);
                }
                continue;
            }
            let slot = self.cache.publish(loading);
            match ahead {
                Ahead::Early => self.ahead[slot.0 as usize] = Ahead::Early,
                Ahead::Late => {
                    self.cache.unpin(slot);
                    self.cache.trim(layer);
                }
                Ahead::No => {}
            }
            if asked {
                self.ready.push(Ready { block, slot });
                self.demand.arrive();
            }
        }
        Ok(())
    }

    /// After an error: waits for what is being read, and unpins everything.
    pub(crate) fn give_up(&mut self, disk: &mut Disk<'_>) {
        self.wanted.clear();
        self.expected.clear();
        loop {
            while let Some(arrived) = disk.stream.take_block() {
                let slot = arrived.number as usize;
                if let Some(index) = slot.checked_sub(self.memory.len()) {
                    for (_, loading) in self.groups[index].blocks.drain(..) {
                        self.cache.abandon(loading);
                    }
                    self.buffers[index] = Some(arrived.memory);
                    continue;
                }
                self.memory[slot] = Some(arrived.memory);
                self.ahead[slot] = Ahead::No;
                self.early.retain(|early| early.0 as usize != slot);
                self.cache.abandon(self.loading[slot].take().expect("the slot was being filled"));
            }
            if disk.stream.blocks_in_flight() == 0 {
                break;
            }
            // The first error is the one that is told; each call takes one read at least.
            let _ = disk.stream.wait_block(disk.stats);
        }
        self.ahead_reads = 0;
        self.grouped = 0;
        for slot in self.early.drain(..) {
            self.ahead[slot.0 as usize] = Ahead::No;
            self.cache.unpin(slot);
        }
        self.demand.begin();
        self.usable = self.ready.len();
        self.ran(self.usable);
        self.release(0);
    }
}
