//! [`Engine`]: executes the program of a bundle on a backend while the stream reads ahead.
//!
//! A prompt runs densely: every neuron of every layer, in file order. So does decode, unless the engine was opened with
//! [`SparseOptions`]: then each FFN runs the neurons that matter for the token ([`crate::sparse`]).

mod told;

use crate::checker::{Checker, Verify};
use crate::error::{EngineError, EngineErrorKind};
use crate::flow::Disk;
use crate::memory::{MemoryPlan, ROW_BUFFERS};
use crate::program::{self, MAX_PARTS, Program, Source, Step, Walk};
use crate::recording::{Recorder, Recording};
use crate::sparse::{self, SparseFfn, Visit};
use crate::stats::Stats;
use crate::stream::Stream;
use crate::system::Columns;
use crate::timeline::{Span, Timeline};
use ls_bundle::Bundle;
use ls_bundle::extent::Extent;
use ls_bundle::ids::LayerId;
use ls_bundle::model::{MatrixExtent, WeightMap};
use ls_compute::{ComputeBackend, MatrixRows, NeuronBlocks, Outputs, Pass, ProjectionPart};
use ls_control::{Controller, Fixed};
use ls_io::BlockStore;
use ls_sync::Slot;
use std::sync::Arc;
use std::time::Instant;

/// The resident prefix of a section.
#[derive(Debug)]
struct Resident {
    slot: Slot,
    /// Where the section starts in the slot.
    skip: usize,
    /// Bytes from there.
    len: u64,
}

impl Resident {
    fn bytes(&self) -> &[u8] {
        &self.slot.bytes()[self.skip..]
    }
}

/// How an engine runs.
#[derive(Debug)]
pub struct EngineOptions {
    /// When blocks are checked.
    pub verify: Verify,
    /// How decode treats FFNs; None: all is dense.
    pub sparse: Option<SparseOptions>,
}

/// How decode treats FFNs, if not densely.
#[derive(Clone, Debug)]
pub struct SparseOptions {
    /// Who decides what.
    pub columns: Columns,
    /// What a dense run of the same tokens wanted: for choices that know the future, and to hold all others against.
    pub recording: Option<Arc<Recording>>,
}

impl From<Verify> for EngineOptions {
    /// Dense.
    fn from(verify: Verify) -> EngineOptions {
        EngineOptions { verify, sparse: None }
    }
}

/// Lists of pieces of the stream.
const DENSE_WALK: usize = 0;
const SPARSE_WALK: usize = 1;

/// See the module's documentation.
pub struct Engine {
    /// Before the memory that it was lent, as it may have pinned it: fields are dropped in this order.
    backend: Box<dyn ComputeBackend>,
    map: WeightMap,
    /// The dense walk.
    program: Program,
    /// The walk of sparse decode, and what runs its FFNs.
    sparse: Option<(Program, SparseFfn)>,
    /// Who plans these; always there but while decoding.
    controller: Option<Box<dyn Controller>>,
    stream: Stream,
    checker: Checker,
    resident: Vec<Option<Resident>>,
    context: u32,
    pass_tokens: u32,
    position: u32,
    stats: Stats,
    recorder: Option<Recorder>,
    timeline: Timeline,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("position", &self.position)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Loads what the plan keeps resident; `progress` hears of loaded bytes. The last allocation happens here.
    pub fn open(
        bundle: &Arc<Bundle>,
        plan: &MemoryPlan,
        options: EngineOptions,
        store: Box<dyn BlockStore>,
        mut backend: Box<dyn ComputeBackend>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Engine, EngineError> {
        let started = Instant::now();
        let map = bundle.weights().clone();
        let EngineOptions { verify, sparse } = options;
        let walk = |walk| Program::new(&map, plan.sections.clone(), plan.request_bytes, walk);
        let program = walk(Walk::Dense);
        let sparse_program = sparse.is_some().then(|| walk(Walk::Sparse));
        let embedding = program.sections.last().expect("a file has an embedding");
        let row_buffers = if embedding.cut < embedding.end { ROW_BUFFERS } else { 0 };
        let row_bytes = map.embedding.row_bytes();
        let mut lists = vec![&program.pieces[..]];
        lists.extend(sparse_program.as_ref().map(|program| &program.pieces[..]));
        let mut stream = Stream::new(store, &lists, plan.depth, row_bytes, row_buffers)?;
        let kept: Vec<Extent> =
            program.sections.iter().map(|s| s.resident()).filter(|e| e.len > 0).collect();
        let mut checker = Checker::new(Arc::clone(bundle), verify, &lists);
        let loaded = checker.load(&mut stream, &kept, progress)?;
        for (&extent, (slot, skip)) in kept.iter().zip(&loaded) {
            backend.keep(&slot.bytes()[*skip..][..extent.len as usize]);
        }
        let controller = sparse.as_ref().map_or(Fixed::DEFAULT, |s| s.columns.controller());
        let sparse = match sparse.zip(sparse_program) {
            None => None,
            Some((SparseOptions { columns, recording }, program)) => {
                checker.expect_blocks();
                let (truth, stream) = (recording.as_ref(), &mut stream);
                let policies =
                    sparse::load(bundle, plan, &columns, truth, stream, &checker, progress)?;
                policies.base.iter().for_each(|base| base.keep(backend.as_mut()));
                let backend = backend.as_mut();
                let ffn = SparseFfn::open(&map, plan, columns, policies, recording, backend)?;
                Some((program, ffn))
            }
        };
        let mut loaded = loaded.into_iter();
        let resident = program
            .sections
            .iter()
            .map(|section| match section.resident().len {
                0 => None,
                len => loaded.next().map(|(slot, skip)| Resident { slot, skip, len }),
            })
            .collect();
        let (loaded_bytes, load) = (stream.store().counters().bytes, started.elapsed());
        Ok(Engine {
            map,
            program,
            sparse,
            controller: Some(Box::new(controller)),
            stream,
            checker,
            resident,
            backend,
            context: plan.context,
            pass_tokens: plan.pass_tokens,
            position: 0,
            stats: Stats { loaded_bytes, load, ..Stats::default() },
            recorder: None,
            timeline: Timeline::off(),
        })
    }

    /// Tokens that the KV cache holds.
    #[must_use]
    pub fn position(&self) -> u32 {
        self.position
    }

    /// Tokens that the KV cache can hold.
    #[must_use]
    pub fn context(&self) -> u32 {
        self.context
    }

    /// Lets a controller plan the FFNs of all tokens to come; none are planned if decode is dense.
    pub fn control(&mut self, controller: Box<dyn Controller>) {
        self.controller = Some(controller);
    }

    /// The program, for plans and reports.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Forgets all tokens from `position` on.
    pub fn rewind(&mut self, position: u32) {
        assert!(position <= self.position, "rewind to {position} of {}", self.position);
        self.position = position;
    }

    /// Takes `tokens` into the KV cache, in passes over the streamed weights of up to `pass_tokens` tokens each.
    /// The logits of the last one follow. `passes_after` more passes may be read ahead for.
    pub fn prefill(&mut self, tokens: &[u32], passes_after: u64) -> Result<&[f32], EngineError> {
        self.take(tokens, Outputs::LastLogits, passes_after)?;
        Ok(self.backend.logits())
    }

    /// As [`Engine::prefill`] for the beginning of a prompt whose rest is still to come: there are no logits.
    pub fn prefill_part(&mut self, tokens: &[u32], passes_after: u64) -> Result<(), EngineError> {
        self.take(tokens, Outputs::None, passes_after)
    }

    /// `outputs` are the last pass's.
    fn take(
        &mut self,
        tokens: &[u32],
        outputs: Outputs<'_>,
        passes_after: u64,
    ) -> Result<(), EngineError> {
        self.check_room(tokens.len())?;
        let started = Instant::now();
        let passes = tokens.len().div_ceil(self.pass_tokens as usize);
        // What is read ahead must be of the same walk.
        let passes_after = if self.sparse.is_some() { 0 } else { passes_after };
        self.stream.switch(DENSE_WALK);
        self.stream.expect_passes(passes as u64 + passes_after);
        for (index, pass) in tokens.chunks(self.pass_tokens as usize).enumerate() {
            let outputs = if index + 1 == passes { outputs } else { Outputs::None };
            self.pass(pass, outputs, None)?;
        }
        self.stats.prefill_tokens += tokens.len() as u64;
        self.stats.prefill_passes += passes as u64;
        self.stats.prefill += started.elapsed();
        self.stats.bytes_after_prefill = self.bytes_read();
        Ok(())
    }

    /// One token; its logits follow. `passes_after` more passes may be read ahead for.
    pub fn decode(&mut self, token: u32, passes_after: u64) -> Result<&[f32], EngineError> {
        let controller = self.controller.take().expect("decode puts it back");
        let decoded = self.decode_token(token, passes_after, controller.as_ref());
        self.controller = Some(controller);
        decoded?;
        Ok(self.backend.logits())
    }

    /// The same under another controller than the engine's own.
    pub fn decode_under(
        &mut self,
        controller: &dyn Controller,
        token: u32,
    ) -> Result<&[f32], EngineError> {
        self.decode_token(token, 0, controller)?;
        Ok(self.backend.logits())
    }

    fn decode_token(
        &mut self,
        token: u32,
        passes_after: u64,
        controller: &dyn Controller,
    ) -> Result<(), EngineError> {
        self.check_room(1)?;
        let started = Instant::now();
        if self.sparse.is_some() {
            self.stream.switch(SPARSE_WALK);
        }
        self.stream.expect_passes(1 + passes_after);
        self.pass(&[token], Outputs::LastLogits, Some(controller))?;
        self.stats.decode_tokens += 1;
        self.stats.decode += started.elapsed();
        Ok(())
    }

    /// Scores a window from an empty context: the negative log-likelihood (nats) of each token from `first` on, given
    /// those before it. The window is one pass.
    pub fn score(&mut self, window: &[u32], first: usize) -> Result<&[f32], EngineError> {
        self.position = 0;
        self.score_on(window, first)
    }

    /// The same behind the tokens that the KV cache holds. All of `window` but its last token is in the cache afterwards.
    pub fn score_on(&mut self, window: &[u32], first: usize) -> Result<&[f32], EngineError> {
        assert!(0 < first && first < window.len(), "score from {first} of {}", window.len());
        self.check_room(window.len() - 1)?;
        self.stream.switch(DENSE_WALK);
        self.stream.expect_passes(1);
        let outputs = Outputs::Score { first: first as u32 - 1, targets: &window[first..] };
        self.pass(&window[..window.len() - 1], outputs, None)?;
        self.stats.prefill_tokens += window.len() as u64 - 1;
        Ok(self.backend.nll())
    }

    fn check_room(&self, tokens: usize) -> Result<(), EngineError> {
        if tokens == 0 {
            return Err(EngineError::empty_prompt());
        }
        let needed = u64::from(self.position) + tokens as u64;
        if needed > u64::from(self.context) {
            return Err(EngineError::context_full(needed, self.context));
        }
        Ok(())
    }

    /// Walks the program once, a decoded token's under its controller. After an error the engine is as it was before, but
    /// for its statistics.
    fn pass(
        &mut self,
        tokens: &[u32],
        outputs: Outputs<'_>,
        decode: Option<&dyn Controller>,
    ) -> Result<(), EngineError> {
        let walked = self.walk_once(tokens, outputs, decode).map_err(|e| self.checker.naming(e));
        if walked.is_err() {
            let Engine { sparse, stream, checker, stats, timeline, .. } = self;
            if let Some((_, ffn)) = sparse {
                ffn.give_up(&mut Disk { stream, checker, stats, timeline });
            }
            self.stream.abort();
        }
        walked
    }

    fn walk_once(
        &mut self,
        tokens: &[u32],
        outputs: Outputs<'_>,
        controller: Option<&dyn Controller>,
    ) -> Result<(), EngineError> {
        let decode = controller.is_some();
        let controller = controller.filter(|_| self.sparse.is_some());
        let sparse = controller.is_some();
        let count = u32::try_from(tokens.len()).expect("a pass is at most a context long");
        let since = self.timeline.begin();
        let pass = Pass { first_position: self.position, tokens: count, outputs, decode };
        self.backend.begin(pass);
        self.stream.pump()?;
        self.embed(tokens)?;
        self.checker.begin(if sparse { SPARSE_WALK } else { DENSE_WALK });
        if let Some((_, ffn)) = self.sparse.as_mut().filter(|_| sparse) {
            ffn.begin();
        }
        self.recorder.iter_mut().for_each(|recorder| recorder.begin(decode));
        for index in 0..walk(&self.program, self.sparse.as_ref(), sparse).steps.len() {
            self.pump(sparse)?;
            let step = walk(&self.program, self.sparse.as_ref(), sparse).steps[index];
            if matches!(outputs, Outputs::None)
                && matches!(step, Step::HeadInput | Step::Head { .. })
            {
                self.skip(step)?;
                continue;
            }
            let since = self.timeline.begin();
            self.step(step, controller)?;
            if let Some((span, layer)) = span_of(step) {
                self.timeline.end(since, span, layer, 0);
            }
        }
        self.recorder.iter_mut().for_each(Recorder::token);
        self.sparse.iter_mut().for_each(|(_, ffn)| ffn.warmed());
        self.position += count;
        self.timeline.end(since, Span::Pass, None, tokens.len());
        Ok(())
    }

    /// Keeps the disk busy.
    fn pump(&mut self, is_sparse: bool) -> Result<(), EngineError> {
        let Engine { sparse, stream, checker, stats, timeline, .. } = self;
        match sparse.as_mut().filter(|_| is_sparse) {
            Some((_, ffn)) => ffn.pump(&mut Disk { stream, checker, stats, timeline }),
            None => stream.pump(),
        }
    }

    /// A pass without outputs needs no head, but what the stream has read ahead of it must still be taken.
    fn skip(&mut self, step: Step) -> Result<(), EngineError> {
        if let Step::Head { source: Source::Piece { piece, .. }, .. } = step {
            self.stream.wait(piece, &mut self.stats)?;
        }
        Ok(())
    }

    fn embed(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        let Engine { map, resident, backend, stream, checker, .. } = self;
        let matrix: &MatrixExtent = &map.embedding;
        let row_bytes = matrix.row_bytes();
        let prefix = resident.last().expect("a file has an embedding").as_ref();
        let resident_rows = prefix.map_or(0, |r| r.len / row_bytes);
        let mut embed = |index: usize, bytes: &[u8]| {
            backend.embed(index as u32, MatrixRows::new(matrix, tokens[index], 1, bytes));
        };
        let mut first_streamed = tokens.len();
        for (index, &token) in tokens.iter().enumerate() {
            match prefix {
                Some(prefix) if u64::from(token) < resident_rows => {
                    embed(index, &prefix.bytes()[(u64::from(token) * row_bytes) as usize..]);
                }
                _ => first_streamed = first_streamed.min(index),
            }
        }
        // Rows behind the resident prefix, read one by one. Those before it in this range are simply set again.
        let streamed = first_streamed..tokens.len();
        if !streamed.clone().any(|index| checker.tile_to_check(tokens[index]).is_some()) {
            let extent_of = |i: usize| matrix.rows_extent(tokens[first_streamed + i], 1);
            let use_row = &mut |i, bytes: &[u8]| embed(first_streamed + i, bytes);
            return stream.rows(streamed.len(), &extent_of, use_row);
        }
        for index in streamed {
            let token = tokens[index];
            let Some(tile) = checker.tile_to_check(token) else {
                let use_row = &mut |_, bytes: &[u8]| embed(index, bytes);
                stream.rows(1, &|_| matrix.rows_extent(token, 1), use_row)?;
                continue;
            };
            let wanted = token - tile * matrix.tile_rows;
            let mut read = || checker.row(stream, tile, wanted, &mut |bytes| embed(index, bytes));
            // A bit may have been flipped on its way.
            read()
                .or_else(|e| if e.kind() == EngineErrorKind::Corrupt { read() } else { Err(e) })?;
            checker.passed_tile(tile);
        }
        Ok(())
    }

    /// Waits until the weights at `source` are in memory, and checks them if they are new.
    fn arrive(&mut self, source: Source) -> Result<(), EngineError> {
        let Source::Piece { piece, .. } = source else { return Ok(()) };
        let since = self.timeline.begin().filter(|_| !self.stream.has(piece));
        self.stream.wait(piece, &mut self.stats)?;
        self.timeline.end(since, Span::Wait, None, 1);
        if self.checker.piece(piece, self.stream.bytes(piece)).is_ok() {
            return Ok(());
        }
        // A bit may have been flipped on its way.
        self.stream.read_again(piece)?;
        self.checker.piece(piece, self.stream.bytes(piece))
    }

    /// `controller` is there in the walk of sparse decode.
    fn step(&mut self, step: Step, controller: Option<&dyn Controller>) -> Result<(), EngineError> {
        let sparse = controller.is_some();
        match step {
            Step::AttnInput(layer) => self.backend.attn_input(layer),
            Step::Attend(layer) => self.backend.attend(layer),
            Step::MlpInput(layer) => self.backend.mlp_input(layer),
            Step::MlpOutput(layer) => {
                self.backend.mlp_output(layer);
                let ffn = &self.map.layers[layer.index()].ffn;
                self.recorder.iter_mut().for_each(|recorder| recorder.layer(layer, ffn));
            }
            Step::HeadInput => self.backend.head_input(),
            Step::Release(piece) => self.stream.release(piece),
            Step::Project { layer, first, count } => {
                let program = walk(&self.program, self.sparse.as_ref(), sparse);
                self.arrive(program.parts[first as usize].source)?;
                let program = walk(&self.program, self.sparse.as_ref(), sparse);
                let parts = &program.parts[first as usize..(first + count) as usize];
                let extents = &self.map.layers[layer.index()];
                let mut given = [None; MAX_PARTS];
                for (slot, part) in given.iter_mut().zip(parts) {
                    let bytes = weights(&self.resident, &self.stream, part.source);
                    let matrix = program::matrix_of(extents, part.projection);
                    let rows = MatrixRows::new(matrix, part.first_row, part.rows, bytes);
                    *slot = Some(ProjectionPart { projection: part.projection, rows });
                }
                let first = given[0].expect("a projection has parts");
                let given = given.map(|part| part.unwrap_or(first));
                self.backend.project(layer, &given[..parts.len()]);
            }
            Step::Mlp { layer, first_block, blocks, source } => {
                self.arrive(source)?;
                let bytes = weights(&self.resident, &self.stream, source);
                let ffn = &self.map.layers[layer.index()].ffn;
                let blocks = NeuronBlocks::new(ffn, first_block, blocks, bytes);
                if let Some(recorder) = &mut self.recorder {
                    recorder.blocks(self.backend.as_mut(), layer, &blocks);
                }
                if let Some((_, ffn)) = &mut self.sparse {
                    ffn.leave(&self.stream, layer, first_block, &blocks);
                }
                self.backend.mlp(layer, &blocks);
            }
            Step::Ffn(layer) => {
                let Engine { backend, stream, checker, stats, timeline, .. } = self;
                let (_, ffn) = self.sparse.as_mut().expect("a walk of sparse decode");
                let backend = backend.as_mut();
                let disk = Disk { stream, checker, stats, timeline };
                let controller = controller.expect("a walk of sparse decode");
                ffn.run(&mut Visit { layer, controller, backend, disk })?;
            }
            Step::Head { first_row, rows, source } => {
                self.arrive(source)?;
                let bytes = weights(&self.resident, &self.stream, source);
                let matrix = self.map.head.as_ref().unwrap_or(&self.map.embedding);
                self.backend.head(&MatrixRows::new(matrix, first_row, rows, bytes));
            }
        }
        Ok(())
    }
}

/// How a step is told of in a timeline.
fn span_of(step: Step) -> Option<(Span, Option<LayerId>)> {
    match step {
        Step::AttnInput(layer) | Step::Project { layer, .. } => Some((Span::Project, Some(layer))),
        Step::Attend(layer) => Some((Span::Attend, Some(layer))),
        Step::Mlp { layer, .. } | Step::Ffn(layer) => Some((Span::Ffn, Some(layer))),
        Step::Head { .. } => Some((Span::Head, None)),
        Step::MlpInput(_) | Step::MlpOutput(_) | Step::HeadInput | Step::Release(_) => None,
    }
}

/// The program of a pass.
fn walk<'a>(
    dense: &'a Program,
    sparse: Option<&'a (Program, SparseFfn)>,
    is_sparse: bool,
) -> &'a Program {
    match sparse {
        Some((program, _)) if is_sparse => program,
        _ => dense,
    }
}

/// The bytes at a source whose piece, if it is one, has arrived.
fn weights<'a>(resident: &'a [Option<Resident>], stream: &'a Stream, source: Source) -> &'a [u8] {
    match source {
        Source::Resident { section, at } => {
            let prefix = resident[section as usize].as_ref().expect("the prefix was loaded");
            &prefix.bytes()[at as usize..]
        }
        Source::Piece { piece, at } => &stream.bytes(piece)[at as usize..],
    }
}
