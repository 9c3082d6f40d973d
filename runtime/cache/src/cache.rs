//! [`WeightCache`]: which slot holds which block, who uses it, and when it goes.
//!
//! A slot is Free → Loading → Resident → Free. A block is in at most one slot. Slots are memory for blocks that stay and
//! for those on their way: a read needs a slot whether its block will stay or not, and only what `Sharing` says is
//! *kept* from one visit to the next. A layer's visit:
//!
//! 1. [`WeightCache::begin`];
//! 2. [`WeightCache::request`] for every block wanted: it is there (and pinned now), on its way, or missing;
//! 3. missing ones: [`WeightCache::reserve`], read, [`WeightCache::publish`] (or [`WeightCache::abandon`]);
//! 4. [`WeightCache::unpin`] as each has been used;
//! 5. [`WeightCache::settle`]: the policy's weakest blocks go until no more stay than may.
//!
//! As the blocks of step 3 compete in step 5 like all others, what stays is the best of all that was there, in whatever
//! order requests came. Only unpinned blocks go.

use crate::blocks::Blocks;
use crate::policy::EvictionPolicy;
use ls_bundle::ids::{BlockId, LayerId};
use std::ops::{AddAssign, Sub};

const NONE: u32 = u32::MAX;

/// A place for one block, 0 first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

/// Who may keep how many blocks between visits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// So many in each layer, evicted by itself.
    PerLayer(Vec<u32>),
    /// So many in all layers together.
    Global(u32),
}

/// When room is made for a block that was missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// After the visit, and the block itself may be what goes.
    Compete,
    /// Before it is read, so that it outlives the weakest of the others whatever it is worth.
    Always,
}

/// What a request meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// The block is there, and pinned once more.
    Hit(SlotId),
    /// It is being read, and will be pinned once more.
    Coming(SlotId),
    /// It is not there.
    Miss,
}

/// The right and duty to fill a slot: ends in [`WeightCache::publish`] or [`WeightCache::abandon`].
#[derive(Debug)]
#[must_use = "the slot stays taken until this is published or abandoned"]
pub struct Loading {
    slot: SlotId,
    block: BlockId,
}

impl Loading {
    /// Where the block goes.
    #[must_use]
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// The block.
    #[must_use]
    pub fn block(&self) -> BlockId {
        self.block
    }
}

/// What happened to requests: `demand_hits + prefetch_hits + misses` of them were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Found because an earlier request had brought them, or a dense pass had left them.
    pub demand_hits: u64,
    /// Found, or on their way, because a prefetch had asked for them since they were last used.
    pub prefetch_hits: u64,
    /// Not found.
    pub misses: u64,
    /// Prefetched blocks that went without having been requested.
    pub prefetched_in_vain: u64,
}

impl Counts {
    /// Requests made.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.demand_hits + self.prefetch_hits + self.misses
    }

    /// Demand hits over requests; 0 without requests.
    #[must_use]
    pub fn demand_hit_ratio(&self) -> f64 {
        self.demand_hits as f64 / self.requests().max(1) as f64
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.demand_hits += other.demand_hits;
        self.prefetch_hits += other.prefetch_hits;
        self.misses += other.misses;
        self.prefetched_in_vain += other.prefetched_in_vain;
    }
}

impl Sub for Counts {
    type Output = Counts;
    fn sub(self, before: Counts) -> Counts {
        Counts {
            demand_hits: self.demand_hits - before.demand_hits,
            prefetch_hits: self.prefetch_hits - before.prefetch_hits,
            misses: self.misses - before.misses,
            prefetched_in_vain: self.prefetched_in_vain - before.prefetched_in_vain,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Loading,
    Resident,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: State,
    /// Brought by a prefetch and not requested yet.
    prefetched: bool,
    layer: LayerId,
    pins: u32,
    block: BlockId,
}

/// The bookkeeping of a cache. Says nothing of where slots lie.
#[derive(Debug)]
pub struct WeightCache {
    blocks: Blocks,
    policy: Box<dyn EvictionPolicy>,
    sharing: Sharing,
    admission: Admission,
    /// By block: its slot, or [`NONE`].
    slot_of: Vec<u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// By layer: slots that are not free.
    held: Vec<u32>,
    visited: LayerId,
    counts: Vec<Counts>,
}

impl WeightCache {
    /// An empty cache. The last allocation.
    ///
    /// # Panics
    /// If `sharing` keeps more than there are slots, or is for another number of layers.
    #[must_use]
    pub fn new(
        blocks: Blocks,
        slots: u32,
        sharing: Sharing,
        admission: Admission,
        policy: Box<dyn EvictionPolicy>,
    ) -> WeightCache {
        let kept = match &sharing {
            Sharing::PerLayer(kept) => {
                assert_eq!(
                    kept.len(),
                    blocks.layers(),
                    "a number of blocks to keep for each layer"
                );
                kept.iter().map(|&kept| u64::from(kept)).sum()
            }
            Sharing::Global(kept) => u64::from(*kept),
        };
        assert!(kept <= u64::from(slots), "{kept} blocks stay in {slots} slots");
        let (layer, block) = (LayerId(0), BlockId(0));
        let slot = Slot { state: State::Free, prefetched: false, layer, pins: 0, block };
        WeightCache {
            slot_of: vec![NONE; blocks.len()],
            slots: vec![slot; slots as usize],
            free: (0..slots).rev().collect(),
            held: vec![0; blocks.layers()],
            visited: layer,
            counts: vec![Counts::default(); blocks.layers()],
            blocks,
            policy,
            sharing,
            admission,
        }
    }

    /// The blocks that there are.
    #[must_use]
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Where a block is, if it is resident. Changes and counts nothing.
    #[must_use]
    pub fn find(&self, block: BlockId) -> Option<SlotId> {
        let slot = self.slot_of[self.blocks.index(block)];
        (slot != NONE && self.slots[slot as usize].state == State::Resident).then_some(SlotId(slot))
    }

    /// Whether a block is there or on its way. Changes and counts nothing.
    #[must_use]
    pub fn holds(&self, block: BlockId) -> bool {
        self.slot_of[self.blocks.index(block)] != NONE
    }

    /// Whether every block is there or on its way.
    #[must_use]
    pub fn holds_all(&self) -> bool {
        self.slots.len() - self.free.len() == self.blocks.count() as usize
    }

    /// Slots that hold a block of a layer or wait for one.
    #[must_use]
    pub fn held(&self, layer: LayerId) -> u32 {
        self.held[layer.index()]
    }

    /// Slots that hold nothing.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// What happened to a layer's requests.
    #[must_use]
    pub fn counts(&self, layer: LayerId) -> Counts {
        self.counts[layer.index()]
    }

    /// A layer is visited: requests that follow are for its blocks.
    pub fn begin(&mut self, layer: LayerId) {
        self.visited = layer;
        self.policy.visit(layer);
    }

    /// Asks for a block of the layer that is visited. To be done once a visit.
    pub fn request(&mut self, block: BlockId) -> Request {
        debug_assert!(
            self.blocks.of(self.visited).contains(&block.0),
            "block {block} is elsewhere"
        );
        self.policy.requested(block);
        let slot = self.slot_of[self.blocks.index(block)];
        let counts = &mut self.counts[self.visited.index()];
        if slot == NONE {
            counts.misses += 1;
            return Request::Miss;
        }
        let held = &mut self.slots[slot as usize];
        if std::mem::take(&mut held.prefetched) {
            counts.prefetch_hits += 1;
        } else {
            counts.demand_hits += 1;
        }
        let resident = held.state == State::Resident;
        self.pin(SlotId(slot));
        if resident { Request::Hit(SlotId(slot)) } else { Request::Coming(SlotId(slot)) }
    }

    /// A slot for a block that was requested and is missing, pinned once. `None` if none is free and all are pinned:
    /// try again when one has been unpinned.
    ///
    /// # Panics
    /// If the block is there or on its way.
    pub fn reserve(&mut self, block: BlockId) -> Option<Loading> {
        self.take(block, self.visited, false)
    }

    /// The same for a block that has not been requested, of any layer. Keep the pin until its layer's requests have
    /// been made, as the policy may think little of it.
    pub fn reserve_ahead(&mut self, block: BlockId) -> Option<Loading> {
        self.take(block, self.blocks.layer_of(block), true)
    }

    /// Offers a block that is not there and that nobody has requested, and whose bytes are at hand: its slot if the policy thinks
    /// enough of it to let it stay. The slot is to be filled before anything is requested.
    ///
    /// # Panics
    /// If the block is there or on its way.
    pub fn offer(&mut self, block: BlockId) -> Option<SlotId> {
        let layer = self.blocks.layer_of(block);
        let loading = self.take(block, layer, false)?;
        let slot = self.publish(loading);
        self.unpin(slot);
        self.trim(layer);
        self.find(block)
    }

    fn take(&mut self, block: BlockId, layer: LayerId, prefetched: bool) -> Option<Loading> {
        let index = self.blocks.index(block);
        assert_eq!(self.slot_of[index], NONE, "block {block} has a slot");
        let scope = self.scope(layer);
        if self.free.is_empty() || (self.admission == Admission::Always && self.excess(layer) >= 0)
        {
            self.evict_weakest(scope);
        }
        let slot = self.free.pop()?;
        self.slots[slot as usize] =
            Slot { state: State::Loading, prefetched, layer, pins: 1, block };
        self.slot_of[index] = slot;
        self.held[layer.index()] += 1;
        Some(Loading { slot: SlotId(slot), block })
    }

    /// The slot has been filled; one pin stays.
    pub fn publish(&mut self, loading: Loading) -> SlotId {
        let slot = &mut self.slots[loading.slot.0 as usize];
        assert!(slot.state == State::Loading && slot.block == loading.block, "a slot being filled");
        slot.state = State::Resident;
        loading.slot
    }

    /// The slot will not be filled. Who waits for the block must ask again.
    pub fn abandon(&mut self, loading: Loading) {
        let slot = &mut self.slots[loading.slot.0 as usize];
        assert!(slot.state == State::Loading && slot.block == loading.block, "a slot being filled");
        // It never was there.
        slot.prefetched = false;
        self.release(loading.slot.0);
    }

    /// One user more.
    pub fn pin(&mut self, slot: SlotId) {
        let held = &mut self.slots[slot.0 as usize];
        debug_assert_ne!(held.state, State::Free, "a slot in use");
        held.pins += 1;
        if held.pins == 1 {
            self.policy.leave(held.layer, held.block);
        }
    }

    /// One user fewer. Without users the block may go.
    pub fn unpin(&mut self, slot: SlotId) {
        let held = &mut self.slots[slot.0 as usize];
        assert!(held.state == State::Resident && held.pins > 0, "a pinned slot");
        held.pins -= 1;
        if held.pins > 0 {
            return;
        }
        let Slot { layer, block, .. } = *held;
        if self.policy.admit(block) {
            self.policy.enter(layer, block);
        } else {
            self.release(slot.0);
        }
    }

    /// Ends a visit: unpinned blocks go, weakest first, until no more stay than may. Blocks still pinned stay, and are
    /// counted at the next visit's end.
    pub fn settle(&mut self) {
        self.trim(self.visited);
    }

    /// The same for a layer that is not visited: after blocks of it that came late were unpinned.
    pub fn trim(&mut self, layer: LayerId) {
        let scope = self.scope(layer);
        while self.excess(layer) > 0 && self.evict_weakest(scope) {}
    }

    /// Where room for a layer's block is made.
    fn scope(&self, layer: LayerId) -> Option<LayerId> {
        matches!(self.sharing, Sharing::PerLayer(_)).then_some(layer)
    }

    /// Blocks held beyond those that may stay.
    fn excess(&self, layer: LayerId) -> i64 {
        let (held, kept) = match &self.sharing {
            Sharing::PerLayer(kept) => (self.held[layer.index()], kept[layer.index()]),
            Sharing::Global(kept) => ((self.slots.len() - self.free.len()) as u32, *kept),
        };
        i64::from(held) - i64::from(kept)
    }

    fn evict_weakest(&mut self, scope: Option<LayerId>) -> bool {
        let Some((layer, block)) = self.policy.weakest(scope) else { return false };
        let slot = self.slot_of[self.blocks.index(block)];
        let held = &self.slots[slot as usize];
        assert!(held.state == State::Resident && held.pins == 0, "the policy chose a pinned block");
        self.policy.leave(layer, block);
        self.release(slot);
        true
    }

    fn release(&mut self, slot: u32) {
        let held = &mut self.slots[slot as usize];
        if held.prefetched {
            self.counts[held.layer.index()].prefetched_in_vain += 1;
        }
        self.held[held.layer.index()] -= 1;
        self.slot_of[self.blocks.index(held.block)] = NONE;
        held.state = State::Free;
        held.pins = 0;
        self.free.push(slot);
    }
}
