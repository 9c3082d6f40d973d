//! Sparse decode: what runs, and that it does not depend on how weights arrive.

mod cache;
#[path = "../counting/mod.rs"]
mod counting;
mod lent;
#[path = "../sample/mod.rs"]
#[expect(dead_code, reason = "this test computes with a real backend")]
mod sample;

use counting::allocations;
use ls_bundle::Bundle;
use ls_bundle::ids::{ByteCount, LayerId};
use ls_bundle::tables::TableKind;
use ls_compute::ComputeBackend;
use ls_control::{Controller, CoordinationPlan, Lut, Quantizer, STATES, Target};
use ls_cpu::{CpuBackend, CpuOptions, Kernels, KvDType};
use ls_engine::memory::{BackendBytes, Budget, MemoryPlan, PlanRequest};
use ls_engine::sparse;
use ls_engine::stats::Audit;
use ls_engine::system::{Columns, Eviction, PredictorKind, Prefetch, System};
use ls_engine::timeline::{Span, Timeline};
use ls_engine::{
    Engine, EngineError, EngineErrorKind, EngineOptions, Recording, SparseOptions, Verify,
};
use ls_io::{Alignment, Faults, SimOptions, SimStore};
use sample::{config, write_based_bundle};
use std::sync::{Arc, Mutex};

const CONTEXT: u32 = 64;
const TOKENS: [u32; 6] = [3, 499, 250, 3, 17, 80];

struct Sample {
    _folder: tempfile::TempDir,
    bundle: Arc<Bundle>,
    bytes: Arc<Vec<u8>>,
}

/// A run's choices.
#[derive(Clone, Copy, Debug)]
struct Case {
    exact_share: f32,
    canonical: bool,
    /// Above 1: room for everything.
    weight_cache: f64,
    threads: usize,
    policy: Eviction,
    prefetch: Prefetch,
    system: System,
    read_cost_bytes: u64,
}

const POLICIES: [Eviction; 6] = [
    Eviction::None,
    Eviction::Lru,
    Eviction::Lfu,
    Eviction::Ema,
    Eviction::Reuse,
    Eviction::HotPinned,
];

/// What a read costs beside its bytes; a block of the sample has 768 bytes or a few times that.
const READ_COSTS: [u64; 3] = [0, 2000, 8000];

const CASE: Case = Case {
    exact_share: 0.3,
    canonical: true,
    weight_cache: 0.6,
    threads: 2,
    policy: Eviction::Ema,
    prefetch: Prefetch::On,
    system: System::LeanStreamBase,
    read_cost_bytes: 0,
};

fn seeded(seed: u64) -> SimOptions {
    let alignment = Alignment { offset: 512, memory: 512 };
    SimOptions { seed, alignment, latency_us: 1..900, ..SimOptions::default() }
}

impl Sample {
    fn new(block_neurons: u32) -> Sample {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sample.lsb");
        let model = ls_bundle::model::ModelConfig { hidden: 128, ..config(true) };
        let bundle = Arc::new(write_based_bundle(&path, model, block_neurons));
        let bytes = Arc::new(std::fs::read(&path).unwrap());
        Sample { _folder: folder, bundle, bytes }
    }

    fn open(&self, case: &Case, disk: SimOptions, sparse: bool) -> Result<Engine, EngineError> {
        let options = sparse.then(|| case.options());
        self.open_with(options, case, disk, &|cpu| Box::new(cpu))
    }

    /// Sparse decode on another backend, made from the processor's.
    fn open_on(
        &self,
        case: &Case,
        disk: SimOptions,
        backend: &Make<'_>,
    ) -> Result<Engine, EngineError> {
        self.open_with(Some(case.options()), case, disk, backend)
    }
}

type Make<'a> = dyn Fn(CpuBackend) -> Box<dyn ComputeBackend> + 'a;

impl Case {
    fn options(&self) -> SparseOptions {
        let columns = Columns::of(self.system, self.exact_share).unwrap();
        let columns = if self.canonical { columns.canonical() } else { columns };
        let columns = Columns { eviction: self.policy, prefetch: self.prefetch, ..columns };
        SparseOptions { columns, recording: None }
    }
}

impl Sample {
    fn open_columns(
        &self,
        columns: Columns,
        recording: Option<&Arc<Recording>>,
        case: &Case,
        disk: SimOptions,
    ) -> Result<Engine, EngineError> {
        let recording = recording.map(Arc::clone);
        let options = SparseOptions { columns, recording };
        self.open_with(Some(options), case, disk, &|cpu| Box::new(cpu))
    }

    fn open_with(
        &self,
        sparse: Option<SparseOptions>,
        case: &Case,
        disk: SimOptions,
        backend: &Make<'_>,
    ) -> Result<Engine, EngineError> {
        let bundle = &self.bundle;
        let needs = |options: &SparseOptions| {
            sparse::needs(bundle, &options.columns, options.recording.as_deref()).unwrap()
        };
        let request = PlanRequest {
            budget: match case.weight_cache {
                share if share <= 1.0 => Budget::WeightCache(share),
                _ => Budget::Total(ByteCount::mib(64)),
            },
            fixed: ByteCount::ZERO,
            context: Some(CONTEXT),
            prompt_tokens: 23,
            alignment: disk.alignment,
            request_bytes: 30_000,
            depth: 3,
            sparse: sparse.as_ref().map(needs),
            read_cost_bytes: case.read_cost_bytes,
        };
        let none = |_, _| BackendBytes::default();
        let plan = MemoryPlan::fit(&request, bundle.model(), bundle.weights(), &none)?;
        let cpu = CpuOptions {
            context: CONTEXT,
            pass_tokens: plan.pass_tokens,
            scored_tokens: 0,
            threads: case.threads,
            kv_cache: KvDType::F16,
            kernels: Kernels::detect(),
        };
        let cpu = CpuBackend::new(bundle.model(), bundle.vectors().clone(), &cpu).unwrap();
        let options = EngineOptions { verify: Verify::First, sparse };
        let store = Box::new(SimStore::new(self.bytes.clone(), disk));
        Engine::open(bundle, &plan, options, store, backend(cpu), &mut |_| {})
    }

    /// What a dense engine wants of twenty tokens, as many blocks as `columns` run.
    fn recorded(&self, columns: &Columns) -> Arc<Recording> {
        let mut dense = self.open(&CASE, seeded(0), false).unwrap();
        dense.prefill(&[1, 2, 3], 0).unwrap();
        let weights = self.bundle.weights();
        dense.record(Recording::with_capacity(weights, 20, |blocks| columns.count(blocks)));
        for token in 0..25 {
            dense.decode(token * 7, 0).unwrap();
        }
        let recording = dense.take_recording().unwrap();
        assert!(recording.is_full());
        Arc::new(recording)
    }

    /// What an engine says that is opened for a case.
    fn run(&self, case: &Case, disk: SimOptions, sparse: bool) -> Result<Vec<f32>, EngineError> {
        said(&mut self.open(case, disk, sparse)?)
    }
}

/// All logits of a prompt and six tokens.
fn said(engine: &mut Engine) -> Result<Vec<f32>, EngineError> {
    let prompt: Vec<u32> = (0..23).map(|i| i * 21 % 500).collect();
    let mut logits = engine.prefill(&prompt, 6)?.to_vec();
    for token in TOKENS {
        logits.extend_from_slice(engine.decode(token, 0)?);
    }
    Ok(logits)
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

const SYSTEMS: [System; 5] = [
    System::DejaVu,
    System::DejaVuPlus,
    System::PowerInfer2,
    System::LeanStream,
    System::LeanStreamBase,
];

#[test]
fn with_all_neurons_logits_are_the_dense_engines() {
    for block_neurons in [1, 2, 3] {
        let sample = Sample::new(block_neurons);
        let dense = bits(&sample.run(&CASE, seeded(0), false).unwrap());
        for seed in 0..20 {
            let case = Case {
                exact_share: 1.0,
                weight_cache: f64::from(seed as u32) / 20.0,
                threads: 1 + seed as usize % 4,
                policy: POLICIES[seed as usize % 6],
                system: SYSTEMS[seed as usize % 5],
                read_cost_bytes: READ_COSTS[seed as usize % 3],
                ..CASE
            };
            let found = sample.run(&case, seeded(seed), true).unwrap();
            assert!(bits(&found) == dense, "{case:?}, blocks of {block_neurons}");
        }
    }
}

#[test]
fn canonical_logits_depend_on_nothing_but_who_chooses_how_many() {
    let sample = Sample::new(1);
    let mut before = Vec::new();
    for (exact_share, system) in [
        (0.0, System::LeanStreamBase),
        (0.1, System::LeanStreamBase),
        (0.5, System::LeanStreamBase),
        (0.4, System::LeanStream),
        (0.4, System::PowerInfer2),
    ] {
        let first = Case { exact_share, system, ..CASE };
        let wanted = bits(&sample.run(&first, seeded(0), true).unwrap());
        assert_ne!(wanted, before, "share and system matter");
        for seed in 1..15 {
            let case = Case {
                weight_cache: 0.3 + f64::from(seed as u32) / 20.0,
                threads: 1 + seed as usize % 4,
                policy: POLICIES[seed as usize % 6],
                prefetch: [Prefetch::Off, Prefetch::On, Prefetch::Auto][seed as usize % 3],
                read_cost_bytes: READ_COSTS[seed as usize / 3 % 3],
                ..first
            };
            let found = bits(&sample.run(&case, seeded(seed), true).unwrap());
            assert!(found == wanted, "{case:?}");
        }
        before = wanted;
    }
}

#[test]
fn in_order_of_arrival_sums_differ_by_rounding_only() {
    let sample = Sample::new(2);
    let canonical = sample.run(&CASE, seeded(0), true).unwrap();
    let scale = canonical.iter().fold(0f32, |m, x| m.max(x.abs()));
    for seed in 0..8 {
        let read_cost_bytes = READ_COSTS[seed as usize % 3];
        let case = Case { canonical: false, weight_cache: 0.4, read_cost_bytes, ..CASE };
        let found = sample.run(&case, seeded(seed), true).unwrap();
        let worst = found.iter().zip(&canonical).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(worst < 1e-4 * scale, "seed {seed}: {worst} of {scale}");
    }
}

#[test]
fn a_fault_gives_a_retry_or_an_error_never_a_wrong_token() {
    let sample = Sample::new(1);
    let wanted = bits(&sample.run(&CASE, seeded(0), true).unwrap());
    let (mut passed, mut failed) = (0, 0);
    for seed in 0..120 {
        let faults = Faults { eio_per_mille: 20, short_per_mille: 50, ..Faults::default() };
        let (policy, read_cost_bytes) =
            (POLICIES[seed as usize % 6], READ_COSTS[seed as usize % 3]);
        let case = Case { weight_cache: 0.4, policy, read_cost_bytes, ..CASE };
        match sample.run(&case, SimOptions { faults, ..seeded(seed) }, true) {
            Ok(found) => {
                assert!(bits(&found) == wanted, "seed {seed}");
                passed += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), EngineErrorKind::Io, "{error}");
                failed += 1;
            }
        }
    }
    assert!(passed > 0 && failed > 0, "{passed} passed, {failed} failed: both must be seen");
}

#[test]
fn after_a_fault_the_engine_goes_on() {
    let sample = Sample::new(1);
    let mut seen = 0;
    for seed in 0..40 {
        let read_cost_bytes = READ_COSTS[seed as usize % 3];
        let case = Case { weight_cache: 0.4, canonical: false, read_cost_bytes, ..CASE };
        let faults = Faults { eio_per_mille: 10, ..Faults::default() };
        let mut engine = match sample.open(&case, SimOptions { faults, ..seeded(seed) }, true) {
            Ok(engine) => engine,
            Err(_) => continue,
        };
        if engine.prefill(&[1, 2, 3], 0).is_err() {
            continue;
        }
        for round in 0..40 {
            let position = engine.position();
            if engine.decode(round, 0).is_err() {
                seen += 1;
                engine.rewind(position.min(engine.position()));
            }
        }
    }
    assert!(seen > 3, "{seen} faults in decode");
}

#[test]
fn a_damaged_neuron_never_becomes_a_token() {
    let sample = Sample::new(1);
    let ffn = sample.bundle.weights().layers[1].ffn;
    let (_, extent) = ffn.block(17);
    let faults = Faults { flipped_bytes: vec![extent.offset + 5], ..Faults::default() };
    let case = Case { exact_share: 1.0, ..CASE };
    let mut engine = sample.open(&case, SimOptions { faults, ..seeded(1) }, true).unwrap();
    // A prompt of one token: read densely, and checked there.
    let error = engine.prefill(&[1], 0).unwrap_err();
    assert!(error.to_string().contains("layer 1 ffn block 17"), "{error}");
    let base = sample.bundle.tables().find(LayerId(1), TableKind::Base).unwrap();
    let faults = Faults { flipped_bytes: vec![base.offset + 100], ..Faults::default() };
    let error = sample.open(&CASE, SimOptions { faults, ..seeded(1) }, true).unwrap_err();
    assert_eq!(error.kind(), EngineErrorKind::Corrupt);
    assert!(error.to_string().contains("layer 1 base block 0"), "{error}");
}

#[test]
fn decoding_does_not_allocate() {
    let sample = Sample::new(2);
    let cases = [(0.3, false), (0.3, true), (1.0, true), (0.0, false)];
    for ((exact_share, canonical), system) in cases.into_iter().cycle().zip(SYSTEMS) {
        let (policy, read_cost_bytes) = (Eviction::Reuse, READ_COSTS[2]);
        let case =
            Case { exact_share, canonical, threads: 1, system, policy, read_cost_bytes, ..CASE };
        let mut engine = sample.open(&case, seeded(5), true).unwrap();
        engine.prefill(&[1, 2, 3], 0).unwrap();
        engine.decode(4, 0).unwrap();
        let quantizer = Quantizer::of_samples(&[0, 5000, 20_000]);
        let best = CoordinationPlan::uniform(4, 1);
        let layers = vec![(quantizer, [best; STATES]); 3];
        engine.control(Box::new(Lut::new(Target::default(), 1, best, layers)));
        // Which are full soon.
        engine.trace(Timeline::with_capacity(1000));
        engine.keep_visits(50);
        let before = allocations();
        for token in 0..30 {
            engine.decode(token, 0).unwrap();
        }
        let allocated = allocations() - before;
        assert_eq!(allocated, 0, "{case:?}: allocations in 30 tokens");
    }
}

/// Always the same plan; remembers what it was asked.
struct Spy(CoordinationPlan, Arc<Mutex<Vec<(LayerId, u64)>>>);

impl Controller for Spy {
    fn plan(&self, layer: LayerId, remaining: ByteCount) -> CoordinationPlan {
        self.1.lock().unwrap().push((layer, remaining.0));
        self.0
    }
}

#[test]
fn plans_cut_the_work_and_change_no_result() {
    let (sample, few) = (Sample::new(1), Case { exact_share: 0.05, ..CASE });
    let wanted = bits(&sample.run(&few, seeded(0), true).unwrap());
    let work = 15 * sample.bundle.weights().layers[0].ffn.block_stride();
    let mut overlapped = 0;
    for (seed, plan) in [(1, 1), (1, 8), (8, 1), (8, 8)].into_iter().enumerate() {
        for plan in [CoordinationPlan::uniform(plan.0, plan.1), CoordinationPlan::ONE_SHOT] {
            let asked = Arc::default();
            let case = Case { weight_cache: 0.3 + 0.2 * seed as f64, ..few };
            let mut engine = sample.open(&case, seeded(seed as u64), true).unwrap();
            engine.control(Box::new(Spy(plan, Arc::clone(&asked))));
            engine.keep_visits(17);
            assert!(bits(&said(&mut engine).unwrap()) == wanted, "{plan:?}");
            assert!(engine.work_bytes().eq([work; 3]));
            let (visits, asked) = (engine.visits(), asked.lock().unwrap());
            assert_eq!((asked.len(), visits.len()), (18, 17), "room for one less");
            for (index, (visit, asked)) in visits.iter().zip(asked.iter()).enumerate() {
                assert_eq!((visit.layer, visit.remaining_bytes), *asked);
                assert_eq!((visit.layer.index(), visit.plan), (index % 3, plan));
                assert!(visit.left_bytes <= work && visit.second_us > 0.0, "{visit:?}");
                let loads = visit.first_us > 0.0;
                assert_eq!(loads, visit.remaining_bytes > 0, "{visit:?}");
                assert!(loads || visit.left_bytes == work, "{visit:?}");
                let one_shot = plan == CoordinationPlan::ONE_SHOT;
                assert!(!one_shot || visit.left_bytes == work, "computes when all is there");
                overlapped += usize::from(visit.left_bytes < work);
            }
            let mut pairs = visits.windows(2);
            assert!(pairs.all(|pair| pair[0].next_remaining_bytes == pair[1].remaining_bytes));
            assert_eq!(visits[16].next_remaining_bytes, asked[17].1);
        }
    }
    assert!(overlapped > 0, "others compute before");
}

#[test]
fn a_text_that_ends_before_its_time_is_no_hindrance_to_the_next() {
    let sample = Sample::new(2);
    let prompt: Vec<u32> = (0..23).map(|i| i * 21 % 500).collect();
    // Little enough memory that attention is streamed in both kinds of pass.
    let case = Case { weight_cache: 0.1, ..CASE };
    let mut engine = sample.open(&case, seeded(1), true).unwrap();
    let mut said = Vec::new();
    for _ in 0..3 {
        engine.rewind(0);
        let mut logits = bits(engine.prefill(&prompt, 9).unwrap());
        // Nine more tokens are announced, and never come.
        logits.extend(bits(engine.decode(17, 9).unwrap()));
        said.push(logits);
    }
    assert!(said[0] == said[1] && said[1] == said[2]);
}

#[test]
fn somebody_has_to_choose_unless_all_runs() {
    let sample = Sample::new(1);
    let columns = |share| Columns {
        predictor: PredictorKind::None,
        ..Columns::of(System::LeanStream, share).unwrap()
    };
    let error = sparse::needs(&sample.bundle, &columns(0.5), None).unwrap_err();
    assert_eq!(error.kind(), EngineErrorKind::Request);
    assert!(error.to_string().contains("--predictor"), "{error}");
    assert!(sparse::needs(&sample.bundle, &columns(1.0), None).is_ok());
}

#[test]
fn choices_are_held_against_what_a_dense_run_wanted() {
    let sample = Sample::new(2);
    let audit = |system, recording: Option<&Arc<Recording>>| {
        let columns = Columns::of(system, 0.3).unwrap();
        let mut engine = sample.open_columns(columns, recording, &CASE, seeded(1)).unwrap();
        engine.prefill(&[1, 2, 3], 0).unwrap();
        for token in 0..20 {
            engine.decode(token * 7, 0).unwrap();
        }
        let mut all = Audit::default();
        engine.layer_stats().for_each(|(stats, _)| all += stats.audit);
        all
    };
    let columns = Columns::of(System::Oracle, 0.3).unwrap();
    let recording = sample.recorded(&columns);
    let known = audit(System::Oracle, Some(&recording));
    let of_layer = sample.bundle.weights().layers[0].ffn.blocks();
    assert_eq!(known.wanted, 3 * 20 * columns.count(of_layer as usize) as u64);
    assert_eq!((known.recall(), known.captured()), (Some(1.0), Some(1.0)));
    let found = audit(System::LeanStreamBase, Some(&recording));
    let (recall, captured) = (found.recall().unwrap(), found.captured().unwrap());
    assert_eq!((found.wanted, found.importance), (known.wanted, known.importance));
    // The sample's base knows nothing of the weights: it finds what chance finds.
    assert!((0.2..0.4).contains(&recall) && (0.2..0.4).contains(&captured), "{recall} {captured}");
    assert_eq!(audit(System::LeanStreamBase, None), Audit::default());
}

/// What a timeline writes.
fn events(timeline: &Timeline) -> Vec<serde_json::Value> {
    let mut text = Vec::new();
    timeline.write(&mut text).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
    json["traceEvents"].as_array().unwrap().clone()
}

#[test]
fn what_needs_no_input_of_the_layer_is_asked_for_before_its_attention() {
    let sample = Sample::new(2);
    for (system, exact_share, early) in [
        (System::LeanStream, 0.3, true),
        (System::PowerInfer2, 0.3, true),
        (System::LeanStream, 1.0, true),
        (System::LeanStreamBase, 0.3, false),
    ] {
        let case = Case { system, exact_share, ..CASE };
        let mut engine = sample.open(&case, seeded(1), true).unwrap();
        engine.prefill(&[1, 2, 3], 0).unwrap();
        engine.trace(Timeline::with_capacity(10_000));
        engine.decode(7, 0).unwrap();
        let events = events(&engine.trace(Timeline::off()));
        let begins = |name: &str, layer: u64| {
            let mut of_layer =
                events.iter().filter(|e| e["name"] == name && e["args"]["layer"] == layer);
            of_layer.next().unwrap()["ts"].as_f64().unwrap()
        };
        // Nothing lies before the first layer.
        assert!(begins("select", 0) > begins("attend", 0), "{case:?}");
        for layer in 1..3 {
            let is_early = begins("select", layer) < begins("attend", layer);
            assert_eq!(is_early, early, "{case:?}, layer {layer}");
        }
    }
}

#[test]
fn a_timeline_tells_of_every_pass() {
    let sample = Sample::new(2);
    let mut engine = sample.open(&CASE, seeded(1), true).unwrap();
    engine.prefill(&[1, 2, 3], 0).unwrap();
    engine.trace(Timeline::with_capacity(10_000));
    for token in 0..5 {
        engine.decode(token * 7, 0).unwrap();
    }
    let requests = engine.cache_counts().unwrap().requests();
    let timeline = engine.trace(Timeline::off());
    assert_eq!(timeline.left_out(), 0);
    assert!(timeline.spent(Span::Ffn) < timeline.spent(Span::Pass));
    let events = events(&timeline);
    let spans =
        |name: &str| events.iter().filter(|event| event["name"] == name).collect::<Vec<_>>();
    let count = |name| {
        spans(name).iter().map(|event| event["args"]["count"].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!((spans("pass").len(), spans("ffn").len(), spans("attend").len()), (5, 15, 15));
    assert_eq!((count("select"), count("compute")), (requests, requests));
    assert!(!spans("reads in flight").is_empty() && !spans("wait").is_empty());
    let ends = |event: &serde_json::Value| {
        let [ts, dur] = ["ts", "dur"].map(|field| event[field].as_f64().unwrap());
        (ts, ts + dur)
    };
    for span in spans("ffn") {
        let (from, to) = ends(span);
        let around = |pass: &&serde_json::Value| ends(pass).0 <= from && to <= ends(pass).1;
        assert_eq!(spans("pass").into_iter().filter(around).count(), 1, "{span}");
    }
    engine.trace(Timeline::with_capacity(3));
    engine.decode(1, 0).unwrap();
    let timeline = engine.trace(Timeline::off());
    assert_eq!(self::events(&timeline).len(), 3);
    assert!(timeline.left_out() > 0);
}
