//! Sparse decode: which neurons of a layer run for a token, and how their weights get into memory.
//!
//! One visit of a layer, paper sections 3.2.1 and 3.2.2, with the low-bit base as the judge of what runs:
//!
//! 1. the base estimates every neuron from the true FFN input, and scores it;
//! 2. the best blocks are chosen, best first; those that are not in the cache are asked for in that order;
//! 3. while reads are on their way, what is there runs, and the low-bit copies of all neurons that were not chosen
//!    stand in for them;
//! 4. blocks run in the order in which they arrive: the sum does not care (permutation-invariant execution).
//!
//! With `canonical` they run in the order of the file instead, a chunk after another, each when all of it is there: a
//! token is then the same whatever the timing, and where all neurons run it is the dense engine's, bit for bit.
//! Memory for blocks is a number of slots that the plan has counted; which blocks stay in them is the cache's business.
//! Nothing here allocates after `new`.

use crate::checker::Checker;
use crate::error::EngineError;
use crate::memory::{MIN_SLOTS, MemoryPlan, SparseNeeds};
use crate::stats::Stats;
use crate::stream::Stream;
use ls_bundle::Bundle;
use ls_bundle::base::BaseTables;
use ls_bundle::extent::Extent;
use ls_bundle::ids::{BlockId, LayerId};
use ls_bundle::model::{FfnExtent, WeightMap};
use ls_bundle::tables::TableKind;
use ls_cache::{Admission, Blocks, EvictionPolicy, Loading, Request, Sharing, SlotId, WeightCache};
use ls_compute::{BaseNeurons, ComputeBackend, NeuronBlocks};
use ls_hash::Selection;
use ls_sync::Slot;

/// Blocks that one call computes at most.
const BATCH: usize = 64;
/// Heap bytes of a block's entries in the books of cache and policy, at most, and of a neuron's in those of a visit.
const BLOCK_BOOKS: u64 = 64;
const NEURON_BOOKS: u64 = 48;
/// What loading a table may take beyond its bytes: a window's two ends, and a page.
const TABLE_SLACK_BYTES: u64 = 3 * 4096;

/// A layer's base, resident.
#[derive(Debug)]
pub(crate) struct LayerBase {
    /// The records, in file order.
    pub(crate) records: Slot,
    /// Where they start.
    pub(crate) skip: usize,
    /// What goes with them.
    pub(crate) tables: BaseTables,
}

impl LayerBase {
    /// As a backend takes them.
    fn view(&self) -> (BaseNeurons<'_>, ls_compute::BaseTables<'_>) {
        let BaseTables { cols, codebooks, offset, slope, .. } = &self.tables;
        let [gate, up, down] = *codebooks;
        let gate_and_up = [gate, up].map(|book| book.expect("checked when it was opened"));
        let layout = self.tables.layout().expect("checked when it was opened");
        let len = layout.bytes() * self.tables.neurons() as usize;
        let records = &self.records.bytes()[self.skip..][..len];
        let neurons = BaseNeurons::new(records, *cols, gate_and_up, down);
        let tables = ls_compute::BaseTables {
            offset,
            slope,
            down_error: &self.tables.down_error,
            gate_error: &self.tables.gate_error,
            up_error: &self.tables.up_error,
            constant: &self.tables.constant,
        };
        (neurons, tables)
    }
}

/// How neurons are chosen and computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SparseOptions {
    /// Share of each layer's neurons that run exactly, 0 to 1; rounded up to whole blocks.
    pub exact_share: f32,
    /// Whether blocks run in the order of the file.
    pub canonical: bool,
}

/// Most slots that are kept free for blocks on their way.
const MAX_PASSING: u32 = 256;

/// A chosen block that is in memory.
#[derive(Clone, Copy, Debug)]
struct Ready {
    block: u32,
    slot: SlotId,
}

/// What a visit works with besides the FFN itself.
pub(crate) struct Visit<'a> {
    pub(crate) layer: LayerId,
    pub(crate) backend: &'a mut dyn ComputeBackend,
    pub(crate) stream: &'a mut Stream,
    pub(crate) checker: &'a mut Checker,
    pub(crate) stats: &'a mut Stats,
}

/// See the module's documentation.
pub(crate) struct SparseFfn {
    options: SparseOptions,
    ffn: Vec<FfnExtent>,
    /// One a layer; none if every neuron is to run.
    base: Vec<LayerBase>,
    cache: WeightCache,
    /// Slots that no block stays in.
    passing: usize,
    /// By slot: its memory; None while it is being read.
    memory: Vec<Option<Slot>>,
    /// By slot: the right to fill it, while it is being read.
    loading: Vec<Option<Loading>>,
    selection: Selection,
    /// Scores of the layer's blocks, as integers of the same order.
    keys: Vec<i32>,
    /// Chosen blocks in the order in which they are wanted.
    order: Vec<u32>,
    /// A bit for each chosen neuron.
    chosen: Vec<u64>,
    /// Chosen blocks that have no slot yet, the next one last.
    missing: Vec<u32>,
    ready: Vec<Ready>,
}

impl std::fmt::Debug for SparseFfn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SparseFfn").field("options", &self.options).finish_non_exhaustive()
    }
}

impl SparseFfn {
    /// Slots for blocks as planned, and their books.
    pub(crate) fn open(
        map: &WeightMap,
        plan: &MemoryPlan,
        options: SparseOptions,
        policy: Box<dyn EvictionPolicy>,
        base: Vec<LayerBase>,
    ) -> Result<SparseFfn, EngineError> {
        let ffn: Vec<FfnExtent> = map.layers.iter().map(|layer| layer.ffn).collect();
        let mut room = Slot::allocate(plan.slots as usize * plan.slot_bytes as usize)
            .map_err(EngineError::memory)?;
        let mut memory = Vec::with_capacity(plan.slots as usize);
        for _ in 0..plan.slots {
            let rest = room.split_off(plan.slot_bytes as usize);
            memory.push(std::mem::replace(&mut room, rest));
        }
        // Slots that do not stay are for blocks on their way.
        let passing = (plan.slots / 8).clamp(MIN_SLOTS, MAX_PASSING).min(plan.slots);
        let (stay, layers) = (plan.slots - passing, ffn.len() as u32);
        let kept = (0..layers).map(|layer| stay / layers + u32::from(layer < stay % layers));
        let ranges = ffn.iter().map(|ffn| ffn.first_block.0..ffn.first_block.0 + ffn.blocks());
        let cache = WeightCache::new(
            Blocks::new(ranges.collect()),
            plan.slots,
            Sharing::PerLayer(kept.collect()),
            Admission::Compete,
            policy,
        );
        let blocks = ffn.iter().map(FfnExtent::blocks).max().unwrap_or(0) as usize;
        let neurons = ffn.iter().map(|ffn| ffn.neurons).max().unwrap_or(0) as usize;
        let slots = memory.len();
        Ok(SparseFfn {
            options,
            passing: passing as usize,
            ffn,
            base,
            cache,
            memory: memory.into_iter().map(Some).collect(),
            loading: (0..slots).map(|_| None).collect(),
            selection: Selection::with_capacity(ls_hash::Kernels::detect(), blocks),
            keys: vec![0; blocks],
            order: Vec::with_capacity(blocks),
            chosen: vec![0; neurons.div_ceil(64)],
            missing: Vec::with_capacity(blocks),
            ready: Vec::with_capacity(blocks.max(slots)),
        })
    }

    /// Heap bytes of the books, but for those of slots: what a plan has to count.
    #[must_use]
    pub(crate) fn book_bytes(ffn: &[FfnExtent]) -> u64 {
        let blocks: u64 = ffn.iter().map(|ffn| u64::from(ffn.blocks())).sum();
        let widest = ffn.iter().map(|ffn| u64::from(ffn.neurons)).max().unwrap_or(0);
        blocks * BLOCK_BOOKS + widest * NEURON_BOOKS
    }

    /// The cache's books.
    pub(crate) fn cache(&self) -> &WeightCache {
        &self.cache
    }

    /// Runs a layer's FFN for one token; the backend has its input.
    pub(crate) fn run(&mut self, visit: &mut Visit<'_>) -> Result<(), EngineError> {
        let blocks = self.ffn[visit.layer.index()].blocks() as usize;
        self.choose(visit);
        let order = std::mem::take(&mut self.order);
        if order.len() < blocks {
            let (neurons, tables) = self.base[visit.layer.index()].view();
            visit.backend.stand_in(visit.layer, &neurons, &tables, &self.chosen);
        }
        self.cache.begin(visit.layer);
        // A chunk's blocks are all pinned before the first of them runs: there must be slots for them.
        let chunk = if self.options.canonical { self.passing } else { blocks };
        let ran = order.chunks(chunk).try_for_each(|chunk| self.chunk(chunk, visit));
        self.order = order;
        if ran.is_err() {
            self.give_up(visit);
        }
        self.cache.settle();
        ran
    }

    /// Chooses the blocks that run: `order` and `chosen`.
    fn choose(&mut self, visit: &mut Visit<'_>) {
        let ffn = &self.ffn[visit.layer.index()];
        let blocks = ffn.blocks() as usize;
        // A share like 0.2 is a little more than a fifth: that shall not cost a block.
        let count = (f64::from(self.options.exact_share) * blocks as f64 - 1e-3).ceil() as usize;
        self.order.clear();
        if count >= blocks {
            self.order.extend(0..blocks as u32);
            return;
        }
        let (neurons, tables) = self.base[visit.layer.index()].view();
        visit.backend.estimate(visit.layer, &neurons, &tables);
        let keys = &mut self.keys[..blocks];
        let of_block = visit.backend.scores().chunks(ffn.block_neurons as usize);
        for (key, scores) in keys.iter_mut().zip(of_block) {
            // Bits of floats that are not negative are in the order of the floats.
            *key = scores.iter().map(|score| score * score).sum::<f32>().max(0.0).to_bits() as i32;
        }
        self.order.extend_from_slice(self.selection.best(keys, count));
        if self.options.canonical {
            self.order.sort_unstable();
        }
        self.chosen.fill(0);
        for &block in &self.order {
            let first = block * ffn.block_neurons;
            for neuron in first..(first + ffn.block_neurons).min(ffn.neurons) {
                self.chosen[neuron as usize / 64] |= 1 << (neuron % 64);
            }
        }
    }

    /// Gets blocks into memory and runs them.
    fn chunk(&mut self, chunk: &[u32], visit: &mut Visit<'_>) -> Result<(), EngineError> {
        let first = self.ffn[visit.layer.index()].first_block.0;
        self.ready.clear();
        self.missing.clear();
        for &block in chunk {
            match self.cache.request(BlockId(first + block)) {
                Request::Hit(slot) => self.ready.push(Ready { block, slot }),
                Request::Coming(_) => unreachable!("nothing is read ahead of its request"),
                Request::Miss => self.missing.push(block),
            }
        }
        self.missing.reverse();
        let mut left = chunk.len();
        while left > 0 {
            self.submit(visit);
            if self.options.canonical {
                if self.ready.len() == chunk.len() {
                    self.ready.sort_unstable_by_key(|ready| ready.block);
                    left -= self.compute(visit);
                }
            } else {
                left -= self.compute(visit);
                self.submit(visit);
            }
            if left > 0 {
                let went_on = visit.stream.wait_block(visit.stats)?;
                assert!(went_on, "a block that is waited for is being read, or the disk is busy");
                self.take(visit)?;
            }
        }
        Ok(())
    }

    /// Starts reads for missing blocks, the best first, as far as there are slots and the disk takes them.
    fn submit(&mut self, visit: &mut Visit<'_>) {
        let ffn = &self.ffn[visit.layer.index()];
        while let Some(&block) = self.missing.last() {
            let (id, extent) = ffn.block(block);
            let Some(loading) = self.cache.reserve(id) else { return };
            let slot = loading.slot();
            let memory = self.memory[slot.0 as usize].take().expect("a free slot has its memory");
            match visit.stream.submit_block(extent, slot.0, memory) {
                Ok(()) => self.loading[slot.0 as usize] = Some(loading),
                Err(memory) => {
                    self.memory[slot.0 as usize] = Some(memory);
                    self.cache.abandon(loading);
                    return;
                }
            }
            self.missing.pop();
        }
    }

    /// Takes the blocks that have arrived.
    fn take(&mut self, visit: &mut Visit<'_>) -> Result<(), EngineError> {
        let ffn = &self.ffn[visit.layer.index()];
        while let Some(arrived) = visit.stream.take_block() {
            let slot = arrived.number as usize;
            let loading = self.loading[slot].take().expect("the slot was being filled");
            let memory = self.memory[slot].insert(arrived.memory);
            let block = loading.block().0 - ffn.first_block.0;
            let (id, extent) = ffn.block(block);
            let bytes = &memory.bytes()[visit.stream.skip(extent)..][..extent.len as usize];
            let checked = match arrived.result {
                Ok(()) => visit.checker.block(id, bytes),
                Err(error) => Err(EngineError::io(error)),
            };
            if let Err(error) = checked {
                self.cache.abandon(loading);
                return Err(error);
            }
            let slot = self.cache.publish(loading);
            self.ready.push(Ready { block, slot });
        }
        Ok(())
    }

    /// Runs all that is ready, and says how many blocks that were.
    fn compute(&mut self, visit: &mut Visit<'_>) -> usize {
        let ffn = &self.ffn[visit.layer.index()];
        for batch in self.ready.chunks(BATCH) {
            let neurons = |ready: &Ready| {
                let (_, extent) = ffn.block(ready.block);
                let memory = self.memory[ready.slot.0 as usize].as_ref();
                let bytes = memory.expect("a resident block has its memory").bytes();
                NeuronBlocks::new(ffn, ready.block, 1, &bytes[visit.stream.skip(extent)..])
            };
            let mut blocks = [neurons(&batch[0]); BATCH];
            for (block, ready) in blocks.iter_mut().zip(batch) {
                *block = neurons(ready);
            }
            visit.backend.mlp_blocks(visit.layer, &blocks[..batch.len()]);
        }
        let ran = self.ready.len();
        for ready in self.ready.drain(..) {
            self.cache.unpin(ready.slot);
        }
        ran
    }

    /// After an error: waits for what is being read, and unpins everything.
    fn give_up(&mut self, visit: &mut Visit<'_>) {
        self.missing.clear();
        loop {
            while let Some(arrived) = visit.stream.take_block() {
                let slot = arrived.number as usize;
                self.memory[slot] = Some(arrived.memory);
                self.cache.abandon(self.loading[slot].take().expect("the slot was being filled"));
            }
            if visit.stream.blocks_in_flight() == 0 {
                break;
            }
            // The first error is the one that is told; each call takes one read at least.
            let _ = visit.stream.wait_block(visit.stats);
        }
        for ready in self.ready.drain(..) {
            self.cache.unpin(ready.slot);
        }
    }
}

/// What sparse decode of a bundle needs in memory besides slots.
///
/// # Errors
/// If the bundle has no base, and not every neuron is to run.
pub fn needs(bundle: &Bundle, options: SparseOptions) -> Result<SparseNeeds, EngineError> {
    let config = bundle.model();
    let ffn: Vec<FfnExtent> = bundle.weights().layers.iter().map(|layer| layer.ffn).collect();
    let seen_bytes = u64::from(bundle.block_count().div_ceil(64)) * 8;
    let book_bytes = SparseFfn::book_bytes(&ffn) + seen_bytes;
    let mut table_bytes = 0;
    if options.exact_share < 1.0 {
        let scores = BaseTables::bytes(config.ffn_hidden, config.hidden);
        for layer in config.layer_ids() {
            let base = bundle.tables().find(layer, TableKind::Base);
            let base = base.ok_or_else(EngineError::no_base)?;
            // Read through aligned windows, into whole pages.
            table_bytes += base.extent().len + TABLE_SLACK_BYTES + scores;
        }
    }
    Ok(SparseNeeds { table_bytes, book_bytes })
}

/// Loads the base of every layer, unless all neurons are to run anyway.
pub(crate) fn load_base(
    bundle: &Bundle,
    options: SparseOptions,
    stream: &mut Stream,
    checker: &Checker,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<LayerBase>, EngineError> {
    let config = bundle.model();
    if options.exact_share >= 1.0 {
        return Ok(Vec::new());
    }
    let find = |layer| bundle.tables().find(layer, TableKind::Base).copied();
    let extents: Vec<_> = config
        .layer_ids()
        .map(|layer| find(layer).ok_or_else(EngineError::no_base))
        .collect::<Result<_, _>>()?;
    let places: Vec<Extent> = extents.iter().map(|table| table.extent()).collect();
    let loaded = stream.load(&places, progress)?;
    let mut base = Vec::with_capacity(loaded.len());
    for ((table, (records, skip)), layer) in extents.iter().zip(loaded).zip(config.layer_ids()) {
        checker.resident(table.extent(), &records.bytes()[skip..])?;
        let scores =
            bundle.read_table(layer, TableKind::BaseScores).map_err(EngineError::bundle)?;
        let scores = scores.ok_or_else(EngineError::no_base)?;
        let tables = BaseTables::from_bytes(&scores, config.ffn_hidden, config.hidden);
        let tables = tables.map_err(|problem| EngineError::bad_base(layer, problem))?;
        let layout = tables.layout().expect("checked above");
        let wanted = layout.bytes() as u64 * u64::from(config.ffn_hidden);
        if table.len != wanted || tables.codebooks[..2].contains(&None) {
            let problem = format!("{} bytes of records, {wanted} are wanted", table.len);
            return Err(EngineError::bad_base(layer, problem));
        }
        base.push(LayerBase { records, skip, tables });
    }
    Ok(base)
}
