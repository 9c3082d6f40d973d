//! Sparse decode: what runs, and that it does not depend on how weights arrive.

mod counting;
#[expect(dead_code, reason = "this test computes with a real backend")]
mod sample;

use counting::allocations;
use ls_bundle::Bundle;
use ls_bundle::ids::ByteCount;
use ls_cache::{Blocks, EvictionPolicy, policy};
use ls_cpu::{CpuBackend, CpuOptions, Kernels, KvDType};
use ls_engine::memory::{BackendBytes, Budget, MemoryPlan, PlanRequest};
use ls_engine::sparse::{self, SparseOptions};
use ls_engine::{Engine, EngineError, EngineErrorKind, EngineOptions, Verify};
use ls_io::{Alignment, Faults, SimOptions, SimStore};
use sample::{config, write_based_bundle};
use std::sync::Arc;

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
    weight_cache: f64,
    threads: usize,
    policy: MakePolicy,
}

type MakePolicy = fn(&Blocks) -> Box<dyn EvictionPolicy>;

const POLICIES: [MakePolicy; 4] = [
    |_| Box::new(policy::Nothing),
    |blocks| Box::new(policy::Lru::new(blocks)),
    |blocks| Box::new(policy::Lfu::new(blocks)),
    |blocks| Box::new(policy::Ema::new(blocks, 0.9)),
];

const CASE: Case =
    Case { exact_share: 0.3, canonical: true, weight_cache: 0.6, threads: 2, policy: POLICIES[3] };

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
        let bundle = &self.bundle;
        let options = SparseOptions { exact_share: case.exact_share, canonical: case.canonical };
        let request = PlanRequest {
            budget: Budget::WeightCache(case.weight_cache),
            fixed: ByteCount::ZERO,
            context: Some(CONTEXT),
            prompt_tokens: 23,
            alignment: disk.alignment,
            request_bytes: 30_000,
            depth: 3,
            sparse: sparse.then(|| sparse::needs(bundle, options).unwrap()),
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
        let backend = CpuBackend::new(bundle.model(), bundle.vectors().clone(), &cpu).unwrap();
        let ffn = bundle.weights().layers.iter().map(|layer| layer.ffn);
        let ranges = ffn.map(|ffn| ffn.first_block.0..ffn.first_block.0 + ffn.blocks());
        let blocks = Blocks::new(ranges.collect());
        let sparse = sparse.then(|| (options, (case.policy)(&blocks)));
        let options = EngineOptions { verify: Verify::First, sparse };
        let store = Box::new(SimStore::new(self.bytes.clone(), disk));
        Engine::open(bundle, &plan, options, store, Box::new(backend), &mut |_| {})
    }

    /// All logits of a prompt and six tokens.
    fn run(&self, case: &Case, disk: SimOptions, sparse: bool) -> Result<Vec<f32>, EngineError> {
        let mut engine = self.open(case, disk, sparse)?;
        let prompt: Vec<u32> = (0..23).map(|i| i * 21 % 500).collect();
        let mut logits = engine.prefill(&prompt, 6)?.to_vec();
        for token in TOKENS {
            logits.extend_from_slice(engine.decode(token, 0)?);
        }
        Ok(logits)
    }
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn with_all_neurons_logits_are_the_dense_engines() {
    for block_neurons in [1, 2, 3] {
        let sample = Sample::new(block_neurons);
        let dense = bits(&sample.run(&CASE, seeded(0), false).unwrap());
        for seed in 0..16 {
            let case = Case {
                exact_share: 1.0,
                weight_cache: f64::from(seed as u32) / 16.0,
                threads: 1 + seed as usize % 4,
                policy: POLICIES[seed as usize % 4],
                ..CASE
            };
            let found = sample.run(&case, seeded(seed), true).unwrap();
            assert!(bits(&found) == dense, "{case:?}, blocks of {block_neurons}");
        }
    }
}

#[test]
fn canonical_logits_depend_on_nothing_but_the_share() {
    let sample = Sample::new(1);
    let mut before = Vec::new();
    for exact_share in [0.0, 0.1, 0.5] {
        let first = Case { exact_share, ..CASE };
        let wanted = bits(&sample.run(&first, seeded(0), true).unwrap());
        assert_ne!(wanted, before, "the share matters");
        for seed in 1..12 {
            let case = Case {
                weight_cache: 0.3 + f64::from(seed as u32) / 16.0,
                threads: 1 + seed as usize % 4,
                policy: POLICIES[seed as usize % 4],
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
        let case = Case { canonical: false, weight_cache: 0.4, ..CASE };
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
        let case = Case { weight_cache: 0.4, policy: POLICIES[seed as usize % 4], ..CASE };
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
    let case = Case { weight_cache: 0.4, canonical: false, ..CASE };
    let mut seen = 0;
    for seed in 0..40 {
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
    let base = sample.bundle.tables().tables[2];
    let faults = Faults { flipped_bytes: vec![base.offset + 100], ..Faults::default() };
    let error = sample.open(&CASE, SimOptions { faults, ..seeded(1) }, true).unwrap_err();
    assert_eq!(error.kind(), EngineErrorKind::Corrupt);
    assert!(error.to_string().contains("layer 1 base block 0"), "{error}");
}

#[test]
fn decoding_does_not_allocate() {
    let sample = Sample::new(2);
    for (exact_share, canonical) in [(0.3, false), (0.3, true), (1.0, true), (0.0, false)] {
        let case = Case { exact_share, canonical, threads: 1, ..CASE };
        let mut engine = sample.open(&case, seeded(5), true).unwrap();
        engine.prefill(&[1, 2, 3], 0).unwrap();
        engine.decode(4, 0).unwrap();
        let before = allocations();
        for token in 0..30 {
            engine.decode(token, 0).unwrap();
        }
        let allocated = allocations() - before;
        assert_eq!(allocated, 0, "{case:?}: allocations in 30 tokens");
    }
}

#[test]
fn what_is_read_is_what_the_cache_missed() {
    let sample = Sample::new(1);
    let case = Case { exact_share: 0.2, canonical: false, weight_cache: 0.9, ..CASE };
    let mut engine = sample.open(&case, seeded(2), true).unwrap();
    engine.prefill(&[1, 2, 3], 0).unwrap();
    let before = engine.bytes_read();
    let counts = |engine: &Engine| engine.cache_counts().unwrap();
    let misses = counts(&engine).misses;
    for token in 0..20 {
        engine.decode(token * 7, 0).unwrap();
    }
    let after = counts(&engine);
    let ffn = sample.bundle.weights().layers[0].ffn;
    let chosen = (0.2 * f64::from(ffn.blocks())).ceil() as u64;
    assert_eq!(after.requests(), 20 * 3 * chosen);
    assert!(after.demand_hits > 0 && after.misses > misses);
    let read = engine.bytes_read() - before;
    let least = (after.misses - misses) * ffn.block_stride();
    // Windows of 512 bytes; the dense tensors are resident at this budget.
    assert!(read >= least && read <= least + (after.misses - misses) * 1024, "{read}, {least}");
}
