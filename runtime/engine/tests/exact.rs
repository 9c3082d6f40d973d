//! With the CPU backend: logits have the same bits whatever the budget, the threads and the store.

#[expect(dead_code, reason = "this test computes with a real backend")]
mod sample;

use ls_bundle::Bundle;
use ls_bundle::ids::ByteCount;
use ls_cpu::{CpuBackend, CpuOptions, Kernels, KvDType};
use ls_engine::memory::{BackendBytes, Budget, MemoryPlan, PlanRequest};
use ls_engine::{Engine, Verify};
use ls_io::{Alignment, BlockStore, Prefer, SimOptions, SimStore, StoreOptions};
use sample::{config, write_bundle};
use std::sync::Arc;

const CONTEXT: u32 = 64;

#[derive(Debug)]
struct Case {
    share: f64,
    threads: usize,
    pass_tokens: u32,
}

/// The bits of all logits of a prompt and six tokens.
fn run(bundle: &Arc<Bundle>, case: &Case, store: Box<dyn BlockStore>) -> Vec<u32> {
    let request = PlanRequest {
        budget: Budget::WeightCache(case.share),
        fixed: ByteCount::ZERO,
        context: Some(CONTEXT),
        prompt_tokens: case.pass_tokens,
        alignment: store.alignment(),
        request_bytes: 30_000,
        depth: 3,
        sparse: None,
        read_cost_bytes: 0,
    };
    let none = |_, _| BackendBytes::default();
    let plan = MemoryPlan::fit(&request, bundle.model(), bundle.weights(), &none).unwrap();
    let options = CpuOptions {
        context: CONTEXT,
        pass_tokens: plan.pass_tokens,
        scored_tokens: 0,
        threads: case.threads,
        kv_cache: KvDType::F16,
        kernels: Kernels::detect(),
    };
    let backend = CpuBackend::new(bundle.model(), bundle.vectors().clone(), &options).unwrap();
    let mut engine =
        Engine::open(bundle, &plan, Verify::Always.into(), store, Box::new(backend), &mut |_| {})
            .unwrap();
    let prompt: Vec<u32> = (0..23).map(|i| i * 21 % 500).collect();
    let mut bits: Vec<u32> =
        engine.prefill(&prompt, 6).unwrap().iter().map(|l| l.to_bits()).collect();
    for token in [3, 499, 250, 3, 17, 80] {
        bits.extend(engine.decode(token, 0).unwrap().iter().map(|l| l.to_bits()));
    }
    bits
}

#[test]
fn logits_have_the_same_bits_at_every_budget_and_thread_count() {
    for tied in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sample.lsb");
        let bundle = Arc::new(write_bundle(&path, config(tied), 2));
        let bytes = Arc::new(std::fs::read(&path).unwrap());
        let simulated = |seed| -> Box<dyn BlockStore> {
            let alignment = Alignment { offset: 512, memory: 512 };
            let options =
                SimOptions { seed, alignment, latency_us: 1..900, ..SimOptions::default() };
            Box::new(SimStore::new(bytes.clone(), options))
        };
        let whole = Case { share: 1.0, threads: 1, pass_tokens: 23 };
        let resident = run(&bundle, &whole, simulated(0));
        let says_something = resident.iter().any(|&bits| f32::from_bits(bits).abs() > 1e-3);
        assert!(says_something, "all logits are zero");
        for seed in 0..12u32 {
            let case = Case {
                share: f64::from(seed) / 12.0,
                threads: 1 + seed as usize % 4,
                pass_tokens: [23, 5, 1][seed as usize % 3],
            };
            let found = run(&bundle, &case, simulated(u64::from(seed)));
            assert!(found == resident, "{case:?}");
        }
        for prefer in [Prefer::Auto, Prefer::Pread] {
            let options = StoreOptions { depth: 16, prefer, direct: true };
            let store = ls_io::open(&path, &options).unwrap().store;
            let case = Case { share: 0.3, threads: 2, pass_tokens: 23 };
            assert!(run(&bundle, &case, store) == resident, "from a file, {prefer:?}");
        }
    }
}
