//! The OpenCL backend under the engine: dense and beside a base, resident and streamed, it says what the processor says.
//! On the first device; where there is no graphics processor, on PoCL, which `tools/setup.sh` installs.

#[expect(dead_code, reason = "this test computes with real backends")]
mod sample;

use ls_bundle::Bundle;
use ls_bundle::ids::ByteCount;
use ls_bundle::model::ModelConfig;
use ls_compute::ComputeBackend;
use ls_cpu::{CpuBackend, CpuOptions, Kernels, KvDType};
use ls_engine::memory::{BackendBytes, Budget, MemoryPlan, PlanRequest};
use ls_engine::system::{Columns, System};
use ls_engine::{Engine, EngineOptions, SparseOptions, Verify, sparse};
use ls_io::{Alignment, SimOptions, SimStore};
use ls_opencl::{Device, OpenClBackend, OpenClOptions, Wanted};
use sample::{config, write_based_bundle};
use std::sync::Arc;

const CONTEXT: u32 = 64;
const TOKENS: u32 = 12;
/// |a - b|^2 / |b|^2 of logits, by the share of neurons that run exactly; none: dense. The processor rounds activations to
/// eight bits beside a base. Where some neurons run that may choose others: the scores of random ones are close.
const ERRORS_MAX: [(Option<f32>, f64); 4] =
    [(None, 1e-6), (Some(1.0), 1e-6), (Some(0.0), 1e-4), (Some(0.3), 5e-2)];

/// Logits of a prompt's last token and of tokens behind it.
fn logits(
    bundle: &Arc<Bundle>,
    bytes: &Arc<Vec<u8>>,
    columns: Option<Columns>,
    weight_cache: f64,
    device: Option<&Device>,
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
    let (context, pass_tokens, kv_cache) = (CONTEXT, plan.pass_tokens, KvDType::F16);
    let backend: Box<dyn ComputeBackend> = match device {
        Some(device) => {
            let options =
                OpenClOptions { context, pass_tokens, scored_tokens: 0, kv_cache, in_place: None };
            let (model, vectors) = (bundle.model(), bundle.vectors());
            Box::new(OpenClBackend::new(device, model, vectors, &options).unwrap())
        }
        None => {
            let options = CpuOptions {
                context,
                pass_tokens,
                scored_tokens: 0,
                threads: 2,
                kv_cache,
                kernels: Kernels::detect(),
            };
            let vectors = bundle.vectors().clone();
            Box::new(CpuBackend::new(bundle.model(), vectors, &options).unwrap())
        }
    };
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

#[test]
fn it_says_what_the_processor_says() {
    let device = Device::open(Wanted::Any);
    let device = device.unwrap_or_else(|error| panic!("tools/setup.sh helps: {error}"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sample.lsb");
    let model = ModelConfig { hidden: 128, ..config(true) };
    let bundle = Arc::new(write_based_bundle(&path, model, 2));
    let bytes = Arc::new(std::fs::read(&path).unwrap());
    for (share, error_max) in ERRORS_MAX {
        let columns = share.and_then(|share| Columns::of(System::LeanStreamBase, share));
        let columns = columns.map(Columns::canonical);
        for weight_cache in [1.0, 0.5] {
            let run = |device| logits(&bundle, &bytes, columns, weight_cache, device);
            let (got, want) = (run(Some(&device)), run(None));
            let squares = got.iter().zip(&want).map(|(a, b)| f64::from(a - b).powi(2));
            let size = want.iter().map(|&b| f64::from(b).powi(2)).sum::<f64>();
            let error = squares.sum::<f64>() / size;
            eprintln!("share {share:?}, cache {weight_cache}: error {error:e}");
            assert!(error <= error_max, "share {share:?}, cache {weight_cache}: error {error:e}");
        }
    }
}
