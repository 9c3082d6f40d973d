//! Other backends under the engine: dense and sparse, resident and streamed, they say what the processor says.

mod cuda;
mod opencl;
#[path = "../sample/mod.rs"]
#[expect(dead_code, reason = "this test computes with real backends")]
mod sample;

use ls_bundle::Bundle;
use ls_bundle::ids::ByteCount;
use ls_bundle::model::ModelConfig;
use ls_compute::ComputeBackend;
use ls_cpu::{CpuBackend, CpuOptions, Kernels, KvDType};
use ls_engine::memory::{BackendBytes, Budget, MemoryPlan, PlanRequest};
use ls_engine::system::Columns;
use ls_engine::{Engine, EngineOptions, SparseOptions, Verify, sparse};
use ls_io::{Alignment, SimOptions, SimStore};
use sample::{config, write_based_bundle};
use std::sync::Arc;

const CONTEXT: u32 = 64;
const TOKENS: u32 = 12;
/// Makes a backend for a bundle and passes of so many tokens.
type Make<'a> = dyn Fn(&Bundle, u32) -> Box<dyn ComputeBackend> + 'a;

/// Logits of a prompt's last token and of tokens behind it.
fn logits(
    bundle: &Arc<Bundle>,
    bytes: &Arc<Vec<u8>>,
    columns: Option<Columns>,
    weight_cache: f64,
    make: &Make<'_>,
) -> Vec<f32> {
    let alignment = Alignment { offset: 512, memory: 512 };
    let disk = SimOptions { seed: 1, alignment, latency_us: 1..300, ..SimOptions::default() };
    let needs = |columns: &Columns| sparse::needs(bundle, columns, None).unwrap();
    let request = PlanRequest {
        budget: Budget::WeightCache(weight_cache),
        fixed: ByteCount::ZERO,
        context: Some(CONTEXT),
        prompt_tokens: 23,
        alignment,
        request_bytes: 30_000,
        depth: 3,
        sparse: columns.as_ref().map(needs),
        read_cost_bytes: 0,
    };
    let none = |_, _| BackendBytes::default();
    let plan = MemoryPlan::fit(&request, bundle.model(), bundle.weights(), &none).unwrap();
    let backend = make(bundle, plan.pass_tokens);
    let sparse = columns.map(|columns| SparseOptions { columns, recording: None });
    let options = EngineOptions { verify: Verify::First, sparse };
    let store = Box::new(SimStore::new(bytes.clone(), disk));
    let mut engine = Engine::open(bundle, &plan, options, store, backend, &mut |_| {}).unwrap();
    let prompt: Vec<u32> = (0..23).map(|i| i * 21 % 500).collect();
    let mut all = engine.prefill(&prompt, u64::from(TOKENS)).unwrap().to_vec();
    for token in 0..TOKENS {
        let left = u64::from(TOKENS - 1 - token);
        all.extend_from_slice(engine.decode(token * 37 % 500, left).unwrap());
    }
    all
}

fn processor(bundle: &Bundle, pass_tokens: u32) -> Box<dyn ComputeBackend> {
    let options = CpuOptions {
        context: CONTEXT,
        pass_tokens,
        scored_tokens: 0,
        threads: 2,
        kv_cache: KvDType::F16,
        kernels: Kernels::detect(),
    };
    let vectors = bundle.vectors().clone();
    Box::new(CpuBackend::new(bundle.model(), vectors, &options).unwrap())
}

struct Sample {
    _folder: tempfile::TempDir,
    bundle: Arc<Bundle>,
    bytes: Arc<Vec<u8>>,
}

impl Sample {
    fn new() -> Sample {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sample.lsb");
        let model = ModelConfig { hidden: 128, ..config(true) };
        let bundle = Arc::new(write_based_bundle(&path, model, 2));
        let bytes = Arc::new(std::fs::read(&path).unwrap());
        Sample { _folder: folder, bundle, bytes }
    }

    /// |a - b|^2 / |b|^2 of the logits of a backend and of the processor.
    fn error(&self, columns: Option<Columns>, weight_cache: f64, make: &Make<'_>) -> f64 {
        let run = |make| logits(&self.bundle, &self.bytes, columns, weight_cache, make);
        let (got, want) = (run(make), run(&processor));
        let squares = got.iter().zip(&want).map(|(a, b)| f64::from(a - b).powi(2));
        squares.sum::<f64>() / want.iter().map(|&b| f64::from(b).powi(2)).sum::<f64>()
    }
}
