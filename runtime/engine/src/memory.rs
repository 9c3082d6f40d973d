//! [`MemoryPlan`]: every byte of the budget is accounted for before the first of them is allocated.
//!
//! Costs in order: what the process holds anyway (code, tokenizer, stacks), KV cache, activations, I/O buffers; what
//! is left holds weights, dense tensors first, then FFN blocks, the same share of every layer so that each layer
//! leaves the disk the same time. Whatever does not fit is streamed in every pass. A sparse engine needs its tables
//! before anything else, and what is left after the dense tensors becomes slots for blocks that come and go.

use crate::program::{self, Section};
use ls_bundle::extent::BLOCK_ALIGNMENT;
use ls_bundle::ids::ByteCount;
use ls_bundle::model::{ModelConfig, WeightMap};
use ls_io::Alignment;
use ls_sync::page_bytes;

/// Tokens of a pass that every plan can afford; fewer only for a shorter prompt.
const MIN_PASS_TOKENS: u32 = 16;
/// A default context is lowered to fit, but not below this.
const MIN_CONTEXT: u32 = 128;
/// Longest default context, and longest pass.
pub const DEFAULT_CONTEXT: u32 = 2048;
/// Embedding rows read at the same time.
pub const ROW_BUFFERS: u32 = 8;
/// Reads in flight of the smallest plan: one being computed with, one on its way.
const MIN_DEPTH: u32 = 2;

/// How much memory may be used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// A cap on resident bytes of the whole process, page cache on its behalf included.
    Total(ByteCount),
    /// The paper's notion: this share of the weights stays resident; all else comes on top. With all of them a sparse engine
    /// has a slot for every block.
    WeightCache(f64),
}

/// What a plan is made for.
#[derive(Clone, Debug)]
pub struct PlanRequest {
    /// The limit.
    pub budget: Budget,
    /// Held by the process before and beside the engine: code, tokenizer, stacks. Measured by the caller.
    pub fixed: ByteCount,
    /// Context in tokens; None: the model's, at most [`DEFAULT_CONTEXT`], lowered to what the budget allows.
    pub context: Option<u32>,
    /// Longest prompt that is known to come; a pass is not made longer than this.
    pub prompt_tokens: u32,
    /// Direct-I/O alignment of the store.
    pub alignment: Alignment,
    /// Size of a streaming read where memory allows.
    pub request_bytes: u64,
    /// Streaming reads in flight where memory allows.
    pub depth: u32,
    /// What sparse decode needs; None: all is dense.
    pub sparse: Option<SparseNeeds>,
    /// What a read costs beside its bytes, as bytes of a large one; 0: nothing is read together.
    pub read_cost_bytes: u64,
}

/// Wanted blocks that lie near each other are read as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merge {
    /// What a read costs beside its bytes, as bytes of a large one.
    pub read_cost_bytes: u64,
    /// Longest read.
    pub span_bytes: u64,
    /// Bytes of a buffer for one.
    pub buffer_bytes: u64,
    /// Buffers.
    pub buffers: u32,
}

impl Merge {
    /// Most buffers that a plan has: nobody looks after the disk while attention runs or a batch of blocks, which takes
    /// milliseconds. With 24 the disk stood still meanwhile.
    const MAX_BUFFERS: u64 = 128;
    /// Most blocks of a read.
    pub const MAX_BLOCKS: usize = 16;

    /// Bytes of all buffers.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.buffer_bytes * u64::from(self.buffers)
    }

    /// What a read of `len` bytes costs.
    #[must_use]
    pub fn cost(&self, len: u64) -> u64 {
        len + self.read_cost_bytes
    }
}

/// What sparse decode needs besides slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseNeeds {
    /// Tables that stay in memory: predictors, the base, what is known of neurons.
    pub table_bytes: u64,
    /// The books of cache and selection.
    pub book_bytes: u64,
    /// Blocks of the widest layer that a token runs.
    pub visit_blocks: u32,
}

/// Longest read of several blocks, in read costs: what yet larger ones would save hardly counts.
const MERGE_SPAN: u64 = 8;

/// Slots that the smallest sparse plan has: a batch being computed with, another on its way.
pub const MIN_SLOTS: u32 = 16;

/// Most slots that are kept free for blocks on their way, if a visit has fewer.
const MAX_PASSING: u32 = 512;
/// Of room that could hold weights, this part may go to slots that a visit's blocks pass through: with fewer, reads wait
/// for computation.
const PASSING_PART: u64 = 32;

/// Heap bytes of a slot's entries in the books, at most.
const SLOT_BOOKS: u64 = 160;

/// Bytes that a backend needs for a context and a pass length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackendBytes {
    /// The KV cache.
    pub kv_cache: ByteCount,
    /// Everything else.
    pub activations: ByteCount,
}

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryPlan {
    /// The limit on resident bytes.
    pub budget: ByteCount,
    /// Code, tokenizer, stacks.
    pub fixed: ByteCount,
    /// KV cache, all of it.
    pub kv_cache: ByteCount,
    /// The backend's buffers and the sampler's.
    pub activations: ByteCount,
    /// Buffers of streaming reads and of embedding rows.
    pub io_buffers: ByteCount,
    /// Resident dense tensors, embedding included.
    pub resident_dense: ByteCount,
    /// Resident FFN blocks; slots for them, if decode is sparse.
    pub resident_ffn: ByteCount,
    /// Tables of sparse decode and its books.
    pub tables: ByteCount,
    /// Slots for single blocks; 0 if decode is dense.
    pub slots: u32,
    /// Those of them that no block stays in: for blocks on their way.
    pub passing: u32,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// How blocks are read together, if they are.
    pub merge: Option<Merge>,
    /// All weights of the file.
    pub weights: ByteCount,
    /// Context in tokens.
    pub context: u32,
    /// What the context was lowered from, if it was.
    pub context_lowered_from: Option<u32>,
    /// Longest pass in tokens.
    pub pass_tokens: u32,
    /// Size of a streaming read; 0 when nothing is streamed.
    pub request_bytes: u64,
    /// Streaming buffers; 0 when nothing is streamed.
    pub depth: u32,
    /// The file's sections with their cuts.
    pub sections: Vec<Section>,
}

/// The budget is below what any plan needs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a budget of {budget} is too small: {need} needs at least {minimum} ({} bytes) here", minimum.0)]
pub struct BudgetTooSmall {
    /// What was allowed.
    pub budget: ByteCount,
    /// The smallest budget that works.
    pub minimum: ByteCount,
    /// For what.
    pub need: Need,
}

/// What needs more memory than the budget has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Need {
    /// Running the model, everything streamed.
    #[error("this model with a context of {0} tokens")]
    Context(u32),
    /// The prompt's way to token ids.
    #[error("loading this model's tokenizer")]
    Tokenizer,
}

/// Weights by what they are, in bytes.
#[derive(Clone, Copy, Debug)]
struct Weights {
    /// Attention matrices and the head: read in every pass.
    dense: u64,
    /// FFN blocks: read in every pass of a dense system.
    ffn: u64,
    /// An untied embedding: one row a token.
    rows_only: u64,
    /// The largest tile or block.
    unit: u64,
}

impl Weights {
    fn of(map: &WeightMap) -> Weights {
        let mut w = Weights { dense: 0, ffn: 0, rows_only: 0, unit: 0 };
        let head = map.head.as_ref().unwrap_or(&map.embedding);
        for layer in &map.layers {
            for m in [&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.o_proj] {
                w.dense += m.extent().len;
                w.unit = w.unit.max(m.tile(0).1.len);
            }
            w.ffn += layer.ffn.extent().len;
            w.unit = w.unit.max(layer.ffn.block_stride());
        }
        w.dense += head.extent().len;
        w.unit = w.unit.max(head.tile(0).1.len);
        if map.head.is_some() {
            w.rows_only = map.embedding.extent().len;
        }
        w
    }

    fn total(&self) -> u64 {
        self.dense + self.ffn + self.rows_only
    }
}

/// What a sampler allocates for a vocabulary: candidates and their order.
#[must_use]
pub fn sampler_bytes(vocab_size: u32) -> u64 {
    8 * u64::from(vocab_size)
}

impl MemoryPlan {
    /// Plans `request` for a model. `backend_bytes(context, pass_tokens)` says what the backend needs.
    pub fn fit(
        request: &PlanRequest,
        config: &ModelConfig,
        map: &WeightMap,
        backend_bytes: &dyn Fn(u32, u32) -> BackendBytes,
    ) -> Result<MemoryPlan, BudgetTooSmall> {
        let planner = Planner { request, config, map, backend_bytes, weights: Weights::of(map) };
        planner.fit()
    }

    /// The smallest budget that `request` works with: everything streamed, through the smallest buffers.
    pub fn minimum(
        request: &PlanRequest,
        config: &ModelConfig,
        map: &WeightMap,
        backend_bytes: &dyn Fn(u32, u32) -> BackendBytes,
    ) -> ByteCount {
        let planner = Planner { request, config, map, backend_bytes, weights: Weights::of(map) };
        planner.minimum(planner.floor())
    }

    /// Bytes planned, all together.
    #[must_use]
    pub fn planned(&self) -> ByteCount {
        self.fixed
            + self.kv_cache
            + self.activations
            + self.io_buffers
            + self.tables
            + self.resident()
    }

    /// Resident weights.
    #[must_use]
    pub fn resident(&self) -> ByteCount {
        self.resident_dense + self.resident_ffn
    }

    /// Weights that each pass streams.
    #[must_use]
    pub fn streamed(&self, map: &WeightMap) -> ByteCount {
        let walked = if map.head.is_some() { self.sections.len() - 1 } else { self.sections.len() };
        self.sections[..walked].iter().map(|s| ByteCount(s.streamed_bytes())).sum()
    }
}

struct Planner<'a> {
    request: &'a PlanRequest,
    config: &'a ModelConfig,
    map: &'a WeightMap,
    backend_bytes: &'a dyn Fn(u32, u32) -> BackendBytes,
    weights: Weights,
}

impl Planner<'_> {
    fn fit(&self) -> Result<MemoryPlan, BudgetTooSmall> {
        let most = self.config.context_length.min(DEFAULT_CONTEXT);
        let wanted = self.request.context.unwrap_or(most);
        let floor = self.floor();
        let budget = match self.request.budget {
            Budget::Total(bytes) => bytes,
            Budget::WeightCache(share) => self.with_weight_cache(wanted, share),
        };
        let mut context = wanted;
        while self.minimum(context) > budget {
            if context <= floor {
                let minimum = self.minimum(floor);
                return Err(BudgetTooSmall { budget, minimum, need: Need::Context(floor) });
            }
            context = (context - context / 8).max(floor);
        }
        let mut plan = self.with_context(budget, context);
        plan.context_lowered_from = (context < wanted).then_some(wanted);
        Ok(plan)
    }

    /// The smallest context that may be planned.
    fn floor(&self) -> u32 {
        self.request.context.unwrap_or(MIN_CONTEXT.min(self.config.context_length))
    }

    fn minimum(&self, context: u32) -> ByteCount {
        let pass = MIN_PASS_TOKENS.min(self.wanted_pass(context));
        self.overhead(context, pass, self.min_ring()) + ByteCount(self.min_slots())
    }

    /// Bytes of the smallest number of slots.
    fn min_slots(&self) -> u64 {
        if self.request.sparse.is_some() { self.slots(MIN_SLOTS) } else { 0 }
    }

    /// Bytes of slots for all blocks of a visit, where they are a small part of `room`.
    fn passing_slots(&self, room: u64) -> u64 {
        let Some(needs) = self.request.sparse else { return 0 };
        self.slots(needs.visit_blocks).min(room / PASSING_PART).max(self.min_slots())
    }

    /// Bytes of so many slots and their books.
    fn slots(&self, count: u32) -> u64 {
        u64::from(count) * (self.slot_bytes() + SLOT_BOOKS)
    }

    /// All streamed blocks.
    fn blocks(&self) -> u32 {
        self.map.layers.iter().map(|layer| layer.ffn.blocks()).sum()
    }

    /// Bytes of a slot: the longest window of a block.
    fn slot_bytes(&self) -> u64 {
        let unit = u64::from(self.request.alignment.offset).max(BLOCK_ALIGNMENT);
        let block = self.map.layers.iter().map(|layer| layer.ffn.block_stride()).max().unwrap_or(0);
        // A block starts at a multiple of BLOCK_ALIGNMENT, wherever that is in a unit.
        (block + unit - BLOCK_ALIGNMENT)
            .next_multiple_of(unit)
            .next_multiple_of(u64::from(self.request.alignment.memory).max(1))
    }

    /// The total that keeps `share` of the weights resident beside comfortable buffers.
    fn with_weight_cache(&self, context: u32, share: f64) -> ByteCount {
        let resident = (self.weights.total() as f64 * share.clamp(0.0, 1.0)) as u64;
        let streams = resident < self.weights.total() || self.request.sparse.is_some();
        let ring = if streams { self.full_ring() } else { 0 };
        let resident = if self.request.sparse.is_some() && share >= 1.0 {
            ByteCount(self.everything_in_slots())
        } else {
            // Tables hold weights too: they count as part of the share.
            ByteCount(resident).saturating_sub(self.tables()).max(ByteCount(self.min_slots()))
        };
        self.overhead(context, self.wanted_pass(context), ring) + resident
    }

    /// Room in which all dense tensors are resident and every block has a slot.
    fn everything_in_slots(&self) -> u64 {
        let needed = self.weights.total() - self.weights.ffn + self.slots(self.blocks());
        // Merged reads take more of a larger room: more than of the one that results.
        let merge = self.merge(2 * needed);
        needed + merge.map_or(0, |merge| merge.bytes())
    }

    fn with_context(&self, budget: ByteCount, context: u32) -> MemoryPlan {
        // A long pass saves walks over the streamed weights; it may take a quarter of what could hold weights.
        let mut pass_tokens = self.wanted_pass(context);
        let base = self.overhead(context, 0, 0);
        let spare =
            |pass: u32, ring: u64| budget.saturating_sub(self.overhead(context, pass, ring)).0;
        let everything = self.weights.total();
        while matches!(self.request.budget, Budget::Total(_))
            && pass_tokens > MIN_PASS_TOKENS
            && spare(pass_tokens, 0) < everything
            && self.activations(context, pass_tokens) > budget.saturating_sub(base).0 / 4
        {
            pass_tokens = (pass_tokens / 2).max(MIN_PASS_TOKENS);
        }
        let backend = (self.backend_bytes)(context, pass_tokens);
        let sampler = ByteCount(sampler_bytes(self.config.vocab_size));
        let mut plan = MemoryPlan {
            budget,
            fixed: self.request.fixed,
            kv_cache: backend.kv_cache,
            activations: backend.activations + sampler,
            io_buffers: ByteCount::ZERO,
            resident_dense: ByteCount::ZERO,
            resident_ffn: ByteCount::ZERO,
            tables: self.tables(),
            slots: 0,
            passing: 0,
            slot_bytes: 0,
            merge: None,
            weights: ByteCount(everything),
            context,
            context_lowered_from: None,
            pass_tokens,
            request_bytes: 0,
            depth: 0,
            sections: program::sections(self.map),
        };
        let mut room = spare(pass_tokens, 0);
        // The prompt streams the FFNs of a sparse engine whatever room there is.
        if room < everything || self.request.sparse.is_some() {
            let ring = match self.request.budget {
                Budget::Total(_) => {
                    let most = room.saturating_sub(self.min_slots() + self.row_buffers());
                    (room / 8).min(most).clamp(self.min_ring(), self.full_ring())
                }
                Budget::WeightCache(_) => self.full_ring(),
            };
            (plan.request_bytes, plan.depth) = self.shape_ring(ring);
            plan.io_buffers = ByteCount(ring + self.row_buffers());
            room = room.saturating_sub(ring + self.row_buffers());
        }
        if let Some(merge) = self.merge(room) {
            plan.merge = Some(merge);
            plan.io_buffers += ByteCount(merge.bytes());
            room -= merge.bytes();
        }
        self.place(&mut plan, room);
        plan
    }

    /// Cuts every section so that at most `room` bytes are resident.
    fn place(&self, plan: &mut MemoryPlan, room: u64) {
        let w = self.weights;
        let share =
            |part: u64, of: u64| if of == 0 { 1.0 } else { (part as f64 / of as f64).min(1.0) };
        let sparse = self.request.sparse.is_some();
        let dense_share = share(room.saturating_sub(self.passing_slots(room)), w.dense);
        let ffn_share = if sparse { 0.0 } else { share(room.saturating_sub(w.dense), w.ffn) };
        let rows_share = share(room.saturating_sub(w.dense + w.ffn), w.rows_only);
        let of =
            |share: f64, len: u64| if share >= 1.0 { len } else { (share * len as f64) as u64 };
        let head = self.map.layers.len();
        for index in 0..plan.sections.len() {
            let section = plan.sections[index];
            let whole = section.end - section.start;
            let (dense, ffn) = match self.map.layers.get(index) {
                Some(layer) => (whole - layer.ffn.extent().len, layer.ffn.extent().len),
                None => (whole, 0),
            };
            let bytes = match self.map.layers.get(index) {
                Some(_) if dense_share < 1.0 => of(dense_share, dense),
                Some(_) => dense + of(ffn_share, ffn),
                None if index == head => of(dense_share, whole),
                None => of(rows_share, whole),
            };
            let cut = program::cut_at(self.map, index, bytes);
            plan.sections[index].cut = cut;
            let resident = cut - section.start;
            plan.resident_dense += ByteCount(resident.min(dense));
            plan.resident_ffn += ByteCount(resident.saturating_sub(dense));
        }
        if sparse {
            let left = room.saturating_sub(plan.resident_dense.0);
            let blocks = self.blocks();
            plan.slot_bytes = self.slot_bytes();
            // More than all blocks would never be filled.
            plan.slots = (left / self.slots(1)).min(u64::from(blocks)) as u32;
            plan.resident_ffn = ByteCount(self.slots(plan.slots));
            let visit = self.request.sparse.map_or(0, |needs| needs.visit_blocks);
            let passing = (plan.slots / 8).clamp(MIN_SLOTS, MAX_PASSING);
            // Where every block has a slot none has to make room.
            plan.passing = match plan.slots {
                slots if slots == blocks => 0,
                slots => passing.max(visit.min(slots / 4 * 3)).min(slots),
            };
        }
    }

    /// Tables and books of sparse decode.
    fn tables(&self) -> ByteCount {
        ByteCount(self.request.sparse.map_or(0, |needs| needs.table_bytes + needs.book_bytes))
    }

    fn wanted_pass(&self, context: u32) -> u32 {
        self.request.prompt_tokens.clamp(1, context).min(DEFAULT_CONTEXT)
    }

    fn activations(&self, context: u32, pass_tokens: u32) -> u64 {
        (self.backend_bytes)(context, pass_tokens.max(1)).activations.0
    }

    /// All but weights. Resident prefixes are read through aligned windows: that slack counts here.
    fn overhead(&self, context: u32, pass_tokens: u32, ring: u64) -> ByteCount {
        let backend = (self.backend_bytes)(context, pass_tokens.max(1));
        let sections = self.map.layers.len() as u64 + 2;
        let slack =
            sections * (2 * u64::from(self.request.alignment.offset).max(1) + page_bytes() as u64);
        let rows = if ring > 0 { self.row_buffers() } else { 0 };
        let sampler = sampler_bytes(self.config.vocab_size);
        self.request.fixed
            + backend.kv_cache
            + backend.activations
            + self.tables()
            + ByteCount(slack + rows + ring + sampler)
    }

    /// The window of a read of `len` bytes, rounded to pages.
    fn buffer(&self, len: u64) -> u64 {
        (len + 2 * u64::from(self.request.alignment.offset)).next_multiple_of(page_bytes() as u64)
    }

    fn row_buffers(&self) -> u64 {
        u64::from(ROW_BUFFERS) * self.buffer(self.map.embedding.row_bytes())
    }

    /// Reads of two blocks at least, where reading them one by one would cost more; in a small part of `room`, so that the
    /// smallest plans do without.
    fn merge(&self, room: u64) -> Option<Merge> {
        let block = self.map.layers.iter().map(|layer| layer.ffn.block_stride()).max().unwrap_or(0);
        let read_cost_bytes = self.request.read_cost_bytes;
        if self.request.sparse.is_none() || read_cost_bytes <= block / 2 {
            return None;
        }
        let room_bytes = room.saturating_sub(self.min_slots()) / 8;
        // Rather shorter reads than one at a time.
        let span_bytes = (MERGE_SPAN * read_cost_bytes).min(room_bytes / 4).max(2 * block);
        let buffer_bytes = self.buffer(span_bytes);
        let buffers = (room_bytes / buffer_bytes).min(Merge::MAX_BUFFERS) as u32;
        (buffers > 0).then_some(Merge { read_cost_bytes, span_bytes, buffer_bytes, buffers })
    }

    /// Bytes of one streaming buffer for reads of about `request` bytes: a piece may exceed that by one unit.
    fn slot(&self, request: u64) -> u64 {
        self.buffer(request + self.weights.unit)
    }

    fn min_ring(&self) -> u64 {
        u64::from(MIN_DEPTH) * self.slot(self.weights.unit)
    }

    fn full_ring(&self) -> u64 {
        let request = self.request.request_bytes.max(self.weights.unit);
        (u64::from(self.request.depth.max(MIN_DEPTH)) * self.slot(request)).max(self.min_ring())
    }

    /// Reads as large as allows at least four in flight, then as many as fit.
    fn shape_ring(&self, ring: u64) -> (u64, u32) {
        let unit = self.weights.unit;
        let overhead = self.slot(unit) - unit;
        let request =
            (ring / 4).saturating_sub(overhead).clamp(unit, self.request.request_bytes.max(unit));
        let depth = (ring / self.slot(request))
            .clamp(u64::from(MIN_DEPTH), u64::from(self.request.depth.max(MIN_DEPTH)));
        (request, depth as u32)
    }
}
