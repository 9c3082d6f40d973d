//! Sparse decode: the FFN of one layer for one token, as the paper's section 3 has it.
//!
//! A visit of layer n:
//!
//! 1. *Select* (3.2.2): the blocks that run, best first. With a base they are chosen from the true FFN input, which the
//!    base sees all neurons of; without one they are what was predicted while layer n - 1 worked, frozen when its last
//!    stage ended.
//! 2. *Ask*: blocks that are not in memory are read in the order of their priority (`flow`). How many bytes that is (R_n)
//!    decides the layer's plan (3.2.3). Without a base both are done as soon as the choice is frozen, so that attention
//!    runs while the disk reads. With one its copies of all other neurons stand in for the blocks meanwhile.
//! 3. *Compute* in the plan's segments: blocks run as they arrive, a segment of them at a time (Eq. 1). The sum does not
//!    care about the order.
//! 4. *Refine*: after each segment, if the disk has time, the partial result (Eq. 2) is asked what layer n + 1 will want,
//!    and that is read ahead, also in segments, until layer n + 1 asks for its blocks itself.
//!
//! Attention of layer n + 1 runs between its 1 or 2 and its 3, with reads going on: the paper's Interval II. Which of these
//! things are done, and by whom, is a row of [`Columns`]. With [`Columns::canonical`] blocks run in the order of the file: a
//! token is then the same whatever the timing, and where all neurons run it is the dense engine's, bit for bit. Nothing
//! here allocates after `open`.

mod load;
mod trial;

pub use load::needs;
pub(crate) use load::{Policies, load};

use crate::error::EngineError;
use crate::flow::{Disk, Flow};
use crate::memory::MemoryPlan;
use crate::predictor::{Predictor, float_key};
use crate::recording::Recording;
use crate::stats::{Audit, LayerStats};
use crate::stream::Stream;
use crate::system::{Cadence, Columns, ComputeOrder, LoadOrder, Prefetch, Refiner};
use crate::timeline::Span;
use load::LayerBase;
use ls_bundle::ids::{ByteCount, LayerId};
use ls_bundle::model::WeightMap;
use ls_cache::WeightCache;
use ls_compute::{ComputeBackend, NeuronBlocks};
use ls_control::profile::Visit as VisitRecord;
use ls_control::{Controller, CoordinationPlan, Segments};
use ls_hash::Selection;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trial::Trial;

/// Blocks that one call computes at most: between calls the disk is looked after.
const BATCH: usize = 256;

/// What a visit works with besides the FFN itself.
pub(crate) struct Visit<'a> {
    pub(crate) layer: LayerId,
    pub(crate) controller: &'a dyn Controller,
    pub(crate) backend: &'a mut dyn ComputeBackend,
    pub(crate) disk: Disk<'a>,
}

/// See the module's documentation.
pub(crate) struct SparseFfn {
    columns: Columns,
    flow: Flow,
    /// One a layer, if there is a base and not every neuron is to run.
    base: Vec<LayerBase>,
    predictor: Option<Box<dyn Predictor>>,
    prefetch: Trial,
    /// Whether blocks are read ahead for the present token.
    reads_ahead: bool,
    selection: Selection,
    /// The keys of the layer's blocks that the base gives.
    rated: Vec<i32>,
    /// The keys that were predicted last, and for which layer.
    predicted: Vec<i32>,
    predicted_for: Option<LayerId>,
    /// What predictions see; hidden.
    feature: Vec<f32>,
    /// The layer whose blocks have been asked for before it is visited.
    asked: Option<LayerId>,
    /// Blocks that run, in the order in which they are wanted.
    order: Vec<u32>,
    /// A bit for each neuron of theirs.
    chosen: Vec<u64>,
    /// By block: where it stands in `order`, if blocks run in that order.
    places: Vec<u32>,
    /// What a dense run of the same tokens wanted, if that is known: choices are held against it.
    truth: Option<Arc<Recording>>,
    /// Tokens begun.
    tokens: usize,
    /// Whether a dense pass has gone by, which leaves blocks in slots.
    is_warm: bool,
    /// The present layer's.
    plan: CoordinationPlan,
    /// What visits took, as far as there is room.
    visits: Vec<VisitRecord>,
    /// Whether the last of them does not know R_{n+1} yet.
    open: bool,
    /// When the present layer was asked for, if what becomes of it is kept.
    since: Option<Instant>,
}

impl std::fmt::Debug for SparseFfn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SparseFfn").field("columns", &self.columns).finish_non_exhaustive()
    }
}

impl SparseFfn {
    /// Slots for blocks as planned, and their books.
    pub(crate) fn open(
        map: &WeightMap,
        plan: &MemoryPlan,
        columns: Columns,
        policies: Policies,
        truth: Option<Arc<Recording>>,
        backend: &mut dyn ComputeBackend,
    ) -> Result<SparseFfn, EngineError> {
        let ffn = map.layers.iter().map(|layer| layer.ffn);
        let blocks = ffn.clone().map(|ffn| ffn.blocks()).max().unwrap_or(0) as usize;
        let neurons = ffn.clone().map(|ffn| ffn.neurons).max().unwrap_or(0) as usize;
        let hidden = ffn.map(|ffn| ffn.hidden).max().unwrap_or(0) as usize;
        let Policies { base, predictor, eviction } = policies;
        Ok(SparseFfn {
            flow: Flow::open(map, plan, &columns, eviction, backend)?,
            base,
            prefetch: Trial::default(),
            reads_ahead: false,
            predictor,
            selection: Selection::with_capacity(ls_hash::Kernels::detect(), blocks),
            rated: vec![0; blocks],
            predicted: vec![0; blocks],
            predicted_for: None,
            feature: vec![0.0; hidden],
            asked: None,
            order: Vec::with_capacity(blocks),
            chosen: vec![0; neurons.div_ceil(64)],
            places: vec![0; blocks],
            truth,
            tokens: 0,
            is_warm: false,
            plan: CoordinationPlan::ONE_SHOT,
            visits: Vec::new(),
            open: false,
            since: None,
            columns,
        })
    }

    /// The cache's books.
    pub(crate) fn cache(&self) -> &WeightCache {
        self.flow.cache()
    }

    /// Whether the backend reads slots in place.
    pub(crate) fn is_lent(&self) -> bool {
        self.flow.is_lent()
    }

    /// What happened in each layer.
    pub(crate) fn layers(&self) -> &[LayerStats] {
        self.flow.layers()
    }

    /// Tokens for which blocks were read ahead, and all tokens.
    pub(crate) fn prefetched_tokens(&self) -> (u64, u64) {
        self.prefetch.tokens()
    }

    /// C^G of each layer: bytes of weights that a token computes.
    pub(crate) fn work_bytes(&self) -> impl Iterator<Item = u64> {
        let layers = 0..self.flow.layers().len();
        layers.map(|layer| {
            let ffn = self.flow.ffn(LayerId(layer as u16));
            self.columns.count(ffn.blocks() as usize) as u64 * ffn.block_stride()
        })
    }

    /// Room for `count` visits more to be told of. Allocates.
    pub(crate) fn keep_visits(&mut self, count: usize) {
        self.visits.reserve_exact(count);
        self.flow.demand().watch();
    }

    /// Those that were kept.
    pub(crate) fn visits(&mut self) -> &mut Vec<VisitRecord> {
        &mut self.visits
    }

    /// A token begins.
    pub(crate) fn begin(&mut self) {
        self.is_warm = true;
        self.predicted_for = None;
        self.tokens += 1;
        if let Some(predictor) = &mut self.predictor {
            predictor.token();
        }
        let predicts = self.predictor.is_some() && !self.columns.runs_all();
        self.reads_ahead = predicts
            && !self.flow.cache().holds_all()
            && match self.columns.prefetch {
                Prefetch::Off => self.prefetch.fixed(false),
                Prefetch::On => self.prefetch.fixed(true),
                Prefetch::Auto => self.prefetch.next(Instant::now()),
            };
    }

    /// A dense pass brings blocks by. The first one before any token is decoded leaves some of them: later ones would push out
    /// what decode has shown to be worth more.
    pub(crate) fn leave(
        &mut self,
        stream: &Stream,
        layer: LayerId,
        first: u32,
        blocks: &NeuronBlocks<'_>,
    ) {
        if !self.is_warm {
            self.flow.leave(stream, layer, first, blocks);
        }
    }

    /// A dense pass has gone by.
    pub(crate) fn warmed(&mut self) {
        self.is_warm = true;
    }

    /// Between steps: keeps the disk busy.
    pub(crate) fn pump(&mut self, disk: &mut Disk<'_>) -> Result<(), EngineError> {
        self.flow.pump(disk)
    }

    /// Runs a layer's FFN for one token; the backend has its input.
    pub(crate) fn run(&mut self, visit: &mut Visit<'_>) -> Result<(), EngineError> {
        let layer = visit.layer;
        let blocks = self.flow.ffn(layer).blocks() as usize;
        if self.asked.take() != Some(layer) {
            self.ask(visit, layer);
            self.flow.pump(&mut visit.disk)?;
        }
        if self.order.len() < blocks && !self.base.is_empty() {
            let (neurons, tables) = self.base[layer.index()].view();
            let since = visit.disk.timeline.begin();
            visit.backend.stand_in(layer, &neurons, &tables, &self.chosen);
            visit.disk.timeline.end(since, Span::StandIn, Some(layer), 0);
        }
        if self.columns.cadence == Cadence::Layer {
            self.predict_next(visit);
        }
        self.compute(visit)?;
        self.conclude(layer);
        if let Some(predictor) = &mut self.predictor {
            predictor.wanted(layer, &self.order);
        }
        self.flow.settle();
        let next = LayerId(layer.0 + 1);
        if self.is_frozen(next) {
            self.ask(visit, next);
            self.asked = Some(next);
        }
        Ok(())
    }

    /// Whether it is known what a layer will run before its input is.
    fn is_frozen(&self, layer: LayerId) -> bool {
        let is_predicted =
            self.columns.refiner == Refiner::None && self.predicted_for == Some(layer);
        layer.index() < self.flow.layers().len() && (is_predicted || self.columns.runs_all())
    }

    /// Chooses the blocks of a layer that run, and asks for them.
    fn ask(&mut self, visit: &mut Visit<'_>, layer: LayerId) {
        let since = visit.disk.timeline.begin();
        self.select(visit, layer);
        visit.disk.timeline.end(since, Span::Select, Some(layer), self.order.len());
        self.audit(layer);
        self.flow.ask(layer, &self.order);
        self.decide(visit.controller, layer);
    }

    /// After an error: nothing is on its way or in use any more.
    pub(crate) fn give_up(&mut self, disk: &mut Disk<'_>) {
        if std::mem::take(&mut self.open) {
            self.visits.pop();
        }
        self.asked = None;
        self.flow.give_up(disk);
        self.flow.settle();
    }

    /// Chooses a layer's blocks that run: `order` and `chosen`.
    fn select(&mut self, visit: &mut Visit<'_>, layer: LayerId) {
        let ffn = *self.flow.ffn(layer);
        let blocks = ffn.blocks() as usize;
        let count = self.columns.count(blocks);
        self.order.clear();
        if count >= blocks {
            self.order.extend(0..blocks as u32);
        } else {
            let keys = match self.columns.refiner {
                Refiner::Base => {
                    self.rate(visit);
                    &self.rated
                }
                Refiner::None => {
                    if self.predicted_for != Some(layer) {
                        // Nothing lies before the first layer: its own input is asked.
                        self.predict(visit, layer);
                    }
                    &self.predicted
                }
            };
            self.order.extend_from_slice(self.selection.best(&keys[..blocks], count));
            if self.columns.load_order == LoadOrder::Address {
                self.order.sort_unstable();
            }
        }
        self.chosen.fill(0);
        for &block in &self.order {
            let first = block * ffn.block_neurons;
            for neuron in first..(first + ffn.block_neurons).min(ffn.neurons) {
                self.chosen[neuron as usize / 64] |= 1 << (neuron % 64);
            }
        }
        if self.columns.compute_order == ComputeOrder::Loaded {
            for (place, &block) in (0..).zip(&self.order) {
                self.places[block as usize] = place;
            }
        }
    }

    /// Holds the choice against the truth.
    fn audit(&mut self, layer: LayerId) {
        let Some(truth) = &self.truth else { return };
        let token = self.tokens - 1;
        let ffn = *self.flow.ffn(layer);
        let mut audit = Audit::default();
        for (block, importance) in
            truth.wanted(token, layer).iter().zip(truth.importance(token, layer))
        {
            let neuron = (block * ffn.block_neurons) as usize;
            let chosen = self.chosen[neuron / 64] >> (neuron % 64) & 1 == 1;
            audit.wanted += 1;
            audit.importance += f64::from(*importance);
            audit.found += u64::from(chosen);
            audit.found_importance += if chosen { f64::from(*importance) } else { 0.0 };
        }
        self.flow.layer_stats(layer).audit += audit;
    }

    /// Keys from the base: the squared errors that going on without a block would make.
    fn rate(&mut self, visit: &mut Visit<'_>) {
        let layer = visit.layer;
        let ffn = self.flow.ffn(layer);
        let (neurons, tables) = self.base[layer.index()].view();
        visit.backend.estimate(layer, &neurons, &tables);
        let of_block = visit.backend.scores().chunks(ffn.block_neurons as usize);
        // Squares count twice the octaves.
        let favour = (2.0 * self.columns.cache_bias).exp2();
        for ((block, key), scores) in (0..).zip(&mut self.rated).zip(of_block) {
            let squares = scores.iter().map(|score| score * score).sum::<f32>();
            let favoured = favour > 1.0 && self.flow.holds(layer, block);
            *key = float_key(if favoured { squares * favour } else { squares });
        }
    }

    /// The plan of a layer, by what is still to be loaded.
    fn decide(&mut self, controller: &dyn Controller, layer: LayerId) {
        let absent = self.flow.demand().absent();
        let remaining_bytes = self.bytes(layer, absent);
        self.plan = controller.plan(layer, ByteCount(remaining_bytes));
        self.flow.demand().cut(self.plan.io);
        if let Some(last) = self.visits.last_mut().filter(|_| std::mem::take(&mut self.open)) {
            last.next_remaining_bytes = remaining_bytes;
        }
        self.since = None;
        if self.visits.len() == self.visits.capacity() {
            return;
        }
        self.since = Some(Instant::now());
        self.open = true;
        self.visits.push(VisitRecord {
            layer,
            plan: self.plan,
            remaining_bytes,
            first_us: 0.0,
            second_us: 0.0,
            left_bytes: 0,
            next_remaining_bytes: 0,
        });
    }

    /// The layer has run: what it took.
    fn conclude(&mut self, layer: LayerId) {
        let Some((since, now)) = self.since.take().map(|since| (since, Instant::now())) else {
            return;
        };
        let total = self.order.len();
        let (loaded, ran) = self.flow.demand().loaded().unwrap_or((since, 0));
        let left_bytes = self.bytes(layer, total - ran);
        let us = |from: Instant, to: Instant| to.duration_since(from).as_secs_f32() * 1e6;
        let record = self.visits.last_mut().expect("it was begun when its plan was made");
        record.first_us = us(since, loaded);
        record.second_us = us(loaded, now);
        record.left_bytes = left_bytes;
    }

    /// Bytes of blocks of a layer.
    fn bytes(&self, layer: LayerId, blocks: usize) -> u64 {
        blocks as u64 * self.flow.ffn(layer).block_stride()
    }

    /// Runs all chosen blocks, segment by segment.
    fn compute(&mut self, visit: &mut Visit<'_>) -> Result<(), EngineError> {
        let total = self.order.len();
        let staged = self.columns.cadence == Cadence::Stage;
        let mut looks = staged && self.reads_ahead;
        let mut ran = 0;
        if self.columns.compute_order == ComputeOrder::Arrival {
            // A partial result that is looked at shall be of the most important neurons.
            if looks {
                self.flow.line_up(Segments::new(self.plan.compute, total as u64));
            } else {
                self.flow.line_up([total as u64]);
            }
        }
        for end in Segments::new(self.plan.compute, total as u64) {
            let end = end as usize;
            while ran < end {
                self.flow.release(visit.backend.running());
                self.flow.pump(&mut visit.disk)?;
                let (ready, rest) = (self.runnable(ran), end - ran);
                if ready >= rest.min(BATCH) || self.flow.must_run(ready) {
                    let count = ready.min(rest).min(BATCH);
                    self.batch(visit, count);
                    ran += count;
                } else if self.flow.waits_for_backend() {
                    visit.backend.wait_blocks();
                } else {
                    self.flow.wait(&mut visit.disk, rest.min(BATCH))?;
                }
            }
            if end < total && looks && self.flow.has_time() {
                self.predict_next(visit);
                // If all that was named is there, naming it again would change nothing.
                looks = self.flow.expects();
            }
        }
        // Where nobody refines the selection it is this prediction, and asked for at once; else it may be read ahead.
        if staged && self.columns.refiner == Refiner::None {
            self.foresee(visit);
        } else if looks && self.flow.has_time() {
            self.predict_next(visit);
        }
        visit.backend.wait_blocks();
        self.flow.release(0);
        Ok(())
    }

    /// See [`crate::Engine::time_blocks`].
    pub(crate) fn time_blocks(
        &mut self,
        visit: &mut Visit<'_>,
        most: usize,
        segments: usize,
    ) -> (usize, Duration) {
        let layer = visit.layer;
        let held = (0..self.flow.ffn(layer).blocks()).filter(|&block| self.flow.has(layer, block));
        self.order.clear();
        self.order.extend(held.take(most));
        self.flow.ask(layer, &self.order);
        let (count, since) = (self.order.len(), Instant::now());
        let mut ran = 0;
        for end in (1..=segments).map(|segment| count * segment / segments) {
            while ran < end {
                let batch = (end - ran).min(BATCH);
                self.batch(visit, batch);
                ran += batch;
            }
        }
        visit.backend.wait_blocks();
        let took = since.elapsed();
        self.flow.release(0);
        self.flow.settle();
        (count, took)
    }

    /// How many of the blocks that are ready may run now, if `ran` have.
    fn runnable(&mut self, ran: usize) -> usize {
        match self.columns.compute_order {
            ComputeOrder::Arrival => self.flow.ready().len(),
            ComputeOrder::Loaded => {
                let places = &self.places;
                self.flow.sort_ready(|block| places[block as usize]);
                let in_turn = self.flow.ready().iter().zip(ran as u32..);
                in_turn.take_while(|(ready, turn)| places[ready.block as usize] == *turn).count()
            }
        }
    }

    /// Runs the first `count` ready blocks.
    fn batch(&mut self, visit: &mut Visit<'_>, count: usize) {
        let ffn = self.flow.ffn(visit.layer);
        let batch = &self.flow.ready()[..count];
        let neurons = |ready| {
            let bytes = self.flow.bytes(visit.disk.stream, ready);
            NeuronBlocks::new(ffn, ready.block, 1, bytes)
        };
        let mut blocks = [neurons(&batch[0]); BATCH];
        for (block, ready) in blocks.iter_mut().zip(batch) {
            *block = neurons(ready);
        }
        let since = visit.disk.timeline.begin();
        visit.backend.mlp_blocks(visit.layer, &blocks[..count]);
        visit.disk.timeline.end(since, Span::Compute, Some(visit.layer), count);
        self.flow.ran(count);
    }

    /// Predicts what the layer behind the visited one will want, if anybody wants to know; which layer that is.
    fn foresee(&mut self, visit: &mut Visit<'_>) -> Option<LayerId> {
        let next = LayerId(visit.layer.0 + 1);
        let selects = self.columns.refiner == Refiner::None;
        let behind_the_last = next.index() >= self.flow.layers().len();
        if behind_the_last || self.columns.runs_all() || !(selects || self.reads_ahead) {
            return None;
        }
        self.predict(visit, next);
        Some(next)
    }

    /// The same, and has it read ahead.
    fn predict_next(&mut self, visit: &mut Visit<'_>) {
        if let Some(next) = self.foresee(visit).filter(|_| self.reads_ahead) {
            let blocks = self.flow.ffn(next).blocks() as usize;
            let count = self.columns.count(blocks);
            let best = self.selection.best(&self.predicted[..blocks], count);
            self.flow.expect(next, best, self.plan.io);
        }
    }

    /// `predicted` for a layer, from the present residual.
    fn predict(&mut self, visit: &mut Visit<'_>, target: LayerId) {
        let since = Instant::now();
        let blocks = self.flow.ffn(target).blocks() as usize;
        let predictor = self.predictor.as_mut().expect("a system that chooses has a predictor");
        visit.backend.feature(&mut self.feature);
        predictor.predict(target, &self.feature, &mut self.predicted[..blocks]);
        self.predicted_for = Some(target);
        visit.disk.timeline.end(Some(since), Span::Predict, Some(target), 0);
        let stats = self.flow.layer_stats(target);
        stats.predictions += 1;
        stats.predicting += since.elapsed();
    }
}
