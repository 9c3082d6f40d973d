//! The zoo: tiny random models of every architecture, made by `tools/make-zoo.py`, must give the logits that
//! Hugging Face transformers computes from the same folder.
//!
//! The whole way is taken: folder, bundle, tokenizer, engine, CPU kernels. What is compared is every logit at every
//! position; what a text becomes is compared too. That the fixtures can tell right from nearly right is a test of its
//! own: [`every_detail_of_the_arithmetic_shows`].

#![forbid(unsafe_code)]

use ls_bundle::Bundle;
use ls_bundle::extent::Extent;
use ls_bundle::ids::ByteCount;
use ls_bundle::model::{DType, ModelConfig, RopeScaling, Vectors, WeightTypes};
use ls_compute::reference::{ReferenceModel, ReferenceState, ReferenceWeights};
use ls_cpu::{CpuBackend, CpuOptions, Kernels, KvDType, kv_bytes};
use ls_engine::memory::{BackendBytes, Budget, MemoryPlan, PlanRequest, ROW_BUFFERS};
use ls_engine::tokenizer::Tokenizer;
use ls_engine::{Engine, Verify};
use ls_io::StoreOptions;
use ls_prep::import::{ImportOptions, import};
use safetensors::{Dtype, SafeTensors};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

const ZOO: [&str; 9] = [
    "llama2",
    "llama3.1",
    "linear-rope",
    "head-dim",
    "mistral",
    "smollm2-sharded",
    "qwen2",
    "qwen2-window",
    "qwen3",
];

/// Most that the logits of a position may differ: squared distance over squared length. Weights are exact, so what is
/// left is the KV cache's half precision; transformers moves by up to 3.8e-6 (in `llama3.1`) when it rounds keys and
/// values so, and the bound is about five times that.
const MAX_ERROR: f64 = 2e-5;
/// The same where transformers rounds keys and values too. A number between two halves may still fall on either side
/// there and here, which moves a row by up to 6.6e-7 (in `llama3.1`); the bound is about five times that.
const MAX_ERROR_HALF_CACHE: f64 = 3e-6;
/// The same of a model's best path and instruction set: no kernel's rounding, but arithmetic that all of them have in
/// common. Between 1.4e-13 and 8.8e-10 (in `head-dim`); the bound is about five times that.
const MAX_ERROR_OF_BEST: f64 = 4e-9;
/// Least that a wrong detail makes of the logits at some position. Measured: 3.0e-3 and more.
const MIN_MISTAKE: f64 = 1e-3;

/// Most that decode differs from plain f32 with the same quantised weights: its kernels round activations to eight bits.
/// Measured: up to 2.7e-3 (in `llama2`). Prefill does not round them; it keeps [`MAX_ERROR`], and was seen at 1.5e-6.
const MAX_ERROR_OF_ACTIVATIONS: f64 = 1e-2;
/// Most that perplexity then moves, as a share. Measured: up to 1.2e-2.
const MAX_PERPLEXITY_MOVE: f64 = 4e-2;

/// Number formats that stand beside each other: attention with embedding, and the FFNs.
const MIXES: [(DType, DType); 6] = [
    (DType::F16, DType::Q8_0),
    (DType::F16, DType::Q4_0),
    (DType::Q8_0, DType::F16),
    (DType::Q4_0, DType::F16),
    (DType::Q8_0, DType::Q4_0),
    (DType::Q4_0, DType::Q8_0),
];

/// `expected.safetensors` of a folder.
struct Expected {
    text: String,
    tokens: Vec<u32>,
    /// One row a position.
    logits: Vec<Vec<f32>>,
    /// The last rows again, from keys and values in half precision.
    half_cache: Vec<Vec<f32>>,
}

impl Expected {
    fn read(folder: &Path) -> Expected {
        let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let text = header.metadata().as_ref().unwrap()["text"].clone();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name, dtype| {
            let tensor = tensors.tensor(name).unwrap();
            assert_eq!(tensor.dtype(), dtype, "{name}");
            tensor.data().as_chunks().0.to_vec()
        };
        let rows = |name| {
            let cols = tensors.tensor(name).unwrap().shape()[1];
            let values = words(name, Dtype::F32).into_iter().map(f32::from_le_bytes);
            values.collect::<Vec<_>>().chunks(cols).map(<[f32]>::to_vec).collect::<Vec<_>>()
        };
        let tokens: Vec<_> =
            words("tokens", Dtype::U32).into_iter().map(u32::from_le_bytes).collect();
        let (logits, half_cache) = (rows("logits"), rows("half_cache"));
        assert_eq!(logits.len(), tokens.len());
        Expected { text, tokens, logits, half_cache }
    }

    /// How far `found`, a row a position, is from what is expected at the worst position.
    fn error(&self, found: &[Vec<f32>]) -> Error {
        let half_cache_from = found.len() - self.half_cache.len();
        Error {
            full: distance(found, &self.logits),
            half_cache: distance(&found[half_cache_from..], &self.half_cache),
        }
    }
}

/// Distances from transformers as it is and from transformers with keys and values in half precision.
#[derive(Clone, Copy, Debug)]
struct Error {
    full: f64,
    half_cache: f64,
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1e} (half-precision cache: {:.1e})", self.full, self.half_cache)
    }
}

/// The largest of a row: squared distance over squared length.
fn distance(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let rows = found.iter().zip(expected).map(|(found, expected)| {
        assert_eq!(found.len(), expected.len());
        let square = |value: f32| f64::from(value) * f64::from(value);
        let distance: f64 = found.iter().zip(expected).map(|(f, e)| square(f - e)).sum();
        distance / expected.iter().copied().map(square).sum::<f64>()
    });
    rows.fold(0.0, f64::max)
}

/// A model of the zoo as a bundle.
struct Animal {
    bundle: Arc<Bundle>,
    expected: Expected,
    _dir: TempDir,
}

/// How an engine is set up.
#[derive(Clone, Copy)]
struct Setup {
    kernels: Kernels,
    budget: Budget,
    pass_tokens: u32,
}

const CONTEXT: u32 = 64;
const THREADS: usize = 2;

/// Everything resident, any prompt in one pass.
fn resident() -> Setup {
    let budget = Budget::Total(ByteCount(1 << 30));
    Setup { kernels: Kernels::detect(), budget, pass_tokens: CONTEXT }
}

impl Animal {
    fn import(name: &str) -> Animal {
        Animal::import_as(name, WeightTypes::all(DType::F16))
    }

    fn import_as(name: &str, types: WeightTypes) -> Animal {
        let dir = TempDir::new().unwrap();
        let source = zoo().join(name);
        let out = dir.path().join("model.lsb");
        let options = ImportOptions {
            source: source.clone(),
            out: out.clone(),
            types,
            block_neurons: 2,
            calibration: None,
            seed: 0,
        };
        import(&options, &mut ()).unwrap_or_else(|error| panic!("{name}: {error}"));
        Animal {
            bundle: Arc::new(Bundle::open(&out).unwrap()),
            expected: Expected::read(&source),
            _dir: dir,
        }
    }

    fn engine(&self, setup: Setup) -> Engine {
        self.engine_of(setup, self.bundle.model(), self.bundle.vectors().clone())
    }

    /// An engine for the bundle's matrices with another configuration or other vectors.
    fn engine_of(&self, setup: Setup, config: &ModelConfig, vectors: Vectors) -> Engine {
        let depth = 4;
        let options = StoreOptions { depth: depth + ROW_BUFFERS, ..StoreOptions::default() };
        let store = ls_io::open(self.bundle.path(), &options).unwrap().store;
        let request = PlanRequest {
            budget: setup.budget,
            fixed: ByteCount(0),
            context: Some(CONTEXT),
            prompt_tokens: setup.pass_tokens,
            alignment: store.alignment(),
            request_bytes: 1 << 14,
            depth,
            sparse: None,
            read_cost_bytes: 0,
        };
        let options = CpuOptions {
            context: CONTEXT,
            pass_tokens: setup.pass_tokens,
            scored_tokens: 0,
            threads: THREADS,
            kv_cache: KvDType::F16,
            kernels: setup.kernels,
        };
        let backend_bytes = |context, pass_tokens| BackendBytes {
            kv_cache: kv_bytes(config, context, options.kv_cache),
            activations: CpuBackend::memory(
                config,
                &CpuOptions { context, pass_tokens, ..options },
            ),
        };
        let plan =
            MemoryPlan::fit(&request, config, self.bundle.weights(), &backend_bytes).unwrap();
        let (context, pass) = (plan.context, plan.pass_tokens);
        assert_eq!((context, pass), (CONTEXT, setup.pass_tokens));
        let backend = Box::new(CpuBackend::new(config, vectors, &options).unwrap());
        Engine::open(&self.bundle, &plan, Verify::First.into(), store, backend, &mut |_| {})
            .unwrap()
    }

    /// Every position as the end of a prompt.
    fn prefill(&self, engine: Engine) -> Error {
        self.expected.error(&self.prefill_logits(engine))
    }

    fn prefill_logits(&self, mut engine: Engine) -> Vec<Vec<f32>> {
        let logits = (1..=self.expected.tokens.len()).map(|count| {
            engine.rewind(0);
            engine.prefill(&self.expected.tokens[..count], 0).unwrap().to_vec()
        });
        logits.collect()
    }

    /// One token after another.
    fn decode(&self, engine: Engine) -> Error {
        self.expected.error(&self.decode_logits(engine))
    }

    fn decode_logits(&self, mut engine: Engine) -> Vec<Vec<f32>> {
        let logits = self.expected.tokens.iter().map(|&token| match engine.position() {
            0 => engine.prefill(&[token], 0).unwrap().to_vec(),
            _ => engine.decode(token, 0).unwrap().to_vec(),
        });
        logits.collect()
    }

    /// Logits of the bundle's own numbers in plain f32.
    fn reference_logits(&self) -> Vec<Vec<f32>> {
        let file = std::fs::read(self.bundle.path()).unwrap();
        let read = |extent: Extent| -> Result<Vec<u8>, Infallible> {
            Ok(file[extent.offset as usize..extent.end() as usize].to_vec())
        };
        let weights = ReferenceWeights::read(self.bundle.weights(), read).unwrap();
        let (config, vectors) = (self.bundle.model().clone(), self.bundle.vectors().clone());
        let mut state = ReferenceState::new(&config);
        let model = ReferenceModel::new(config, vectors, weights);
        let tokens = (0..).zip(&self.expected.tokens);
        tokens.map(|(at, &token)| model.forward(&mut state, token, at)).collect()
    }

    /// Of the text, by logits of each position.
    fn perplexity(&self, logits: &[Vec<f32>]) -> f64 {
        let next = &self.expected.tokens[1..];
        let nll = logits.iter().zip(next).map(|(logits, &token)| {
            let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
            sum.ln() - f64::from(logits[token as usize])
        });
        (nll.sum::<f64>() / next.len() as f64).exp()
    }
}

fn zoo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/zoo")
}

#[test]
fn logits_are_those_of_transformers_on_every_path() {
    for name in ZOO {
        let animal = Animal::import(name);
        let mut errors = Vec::new();
        for kernels in [Kernels::detect(), Kernels::scalar()] {
            let whole = Setup { kernels, ..resident() };
            // Windows and causality across the seams of passes.
            let parts = Setup { pass_tokens: 5, ..whole };
            let streamed = Setup { budget: Budget::WeightCache(0.0), ..whole };
            errors.push(("prefill", kernels, animal.prefill(animal.engine(whole))));
            errors.push(("prefill in passes", kernels, animal.prefill(animal.engine(parts))));
            errors.push(("decode", kernels, animal.decode(animal.engine(whole))));
            errors.push(("decode, streamed", kernels, animal.decode(animal.engine(streamed))));
        }
        let best = errors.iter().map(|(_, _, error)| error.half_cache).fold(1.0, f64::min);
        assert!(best <= MAX_ERROR_OF_BEST, "{name}: {best:.1e} at best");
        for (path, kernels, error) in errors {
            eprintln!("{name}, {path}, {}: {error}", kernels.name());
            let good = error.full <= MAX_ERROR && error.half_cache <= MAX_ERROR_HALF_CACHE;
            assert!(good, "{name}, {path}, {}: {error}", kernels.name());
        }
    }
}

#[test]
fn formats_can_be_mixed() {
    let mut beyond = Vec::new();
    for (dense, ffn) in MIXES {
        for name in ["llama2", "mistral", "qwen2", "qwen3"] {
            let types = WeightTypes { attention: dense, ffn, embedding: dense };
            let animal = Animal::import_as(name, types);
            let reference = animal.reference_logits();
            let exact = animal.perplexity(&reference);
            let prefill = animal.prefill_logits(animal.engine(resident()));
            let decode = animal.decode_logits(animal.engine(resident()));
            let paths =
                [("prefill", prefill, MAX_ERROR), ("decode", decode, MAX_ERROR_OF_ACTIVATIONS)];
            for (path, logits, max_error) in paths {
                let error = distance(&logits, &reference);
                let moved = animal.perplexity(&logits) / exact - 1.0;
                let what = format!(
                    "{dense:?} and {ffn:?} FFNs, {name}, {path}: {error:.1e}, perplexity {moved:+.1e}"
                );
                eprintln!("{what}");
                if error > max_error || moved.abs() > MAX_PERPLEXITY_MOVE {
                    beyond.push(what);
                }
            }
        }
    }
    assert!(beyond.is_empty(), "{beyond:#?}");
}

#[test]
fn texts_become_the_tokens_of_transformers() {
    for name in ZOO {
        let Animal { bundle, expected, _dir } = Animal::import(name);
        let mut bundle = Arc::into_inner(bundle).expect("nobody else has it");
        let tokenizer = Tokenizer::load(&mut bundle).unwrap();
        assert_eq!(tokenizer.encode(&expected.text, true).unwrap(), expected.tokens, "{name}");
        assert!(bundle.model().special.stop.contains(&1), "{name}: the configuration's end");
    }
}

#[test]
fn every_folder_is_in_the_list() {
    let mut folders: Vec<String> = std::fs::read_dir(zoo())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    folders.sort();
    let mut listed = ZOO.to_vec();
    listed.sort_unstable();
    assert_eq!(folders, listed);
}

/// A wrong detail: what is wrong, and the change that makes it so.
type Mistake = (&'static str, fn(&mut ModelConfig, &mut Vectors));

/// What could be wrong with this model.
fn mistakes(config: &ModelConfig) -> Vec<Mistake> {
    let mut all: Vec<Mistake> = vec![
        ("attention gain", |_, v| v.layers[0].attn_norm.fill(1.0)),
        ("FFN gain", |_, v| v.layers[1].mlp_norm.fill(1.0)),
        ("final gain", |_, v| v.final_norm.fill(1.0)),
        ("rotary base", |c, _| c.rope.theta *= 3.0),
        ("gains of another layer", |_, v| v.layers.swap(0, 1)),
    ];
    if config.rope.scaling != RopeScaling::None {
        all.push(("rotary scaling", |c, _| c.rope.scaling = RopeScaling::None));
    }
    if let RopeScaling::Llama3 { .. } = config.rope.scaling {
        all.push(("linear instead of Llama 3's", |c, _| {
            c.rope.scaling = RopeScaling::Linear { factor: 8.0 };
        }));
    }
    if config.sliding_window.is_some() {
        all.push(("window", |c, _| c.sliding_window = None));
        all.push(("window + 1", |c, _| c.sliding_window = c.sliding_window.map(|w| w + 1)));
        all.push(("window - 1", |c, _| c.sliding_window = c.sliding_window.map(|w| w - 1)));
    }
    if config.qkv_bias {
        all.push(("q bias", |_, v| v.layers[0].q_bias.fill(0.0)));
        all.push(("k bias", |_, v| v.layers[0].k_bias.fill(0.0)));
        all.push(("v bias", |_, v| v.layers[1].v_bias.fill(0.0)));
    }
    if config.qk_norm {
        all.push(("q norm", |_, v| v.layers[0].q_norm.fill(1.0)));
        all.push(("k norm", |_, v| v.layers[1].k_norm.fill(1.0)));
        all.push(("q and k norm swapped", |_, v| {
            for layer in &mut v.layers {
                std::mem::swap(&mut layer.q_norm, &mut layer.k_norm);
            }
        }));
    }
    all
}

#[test]
fn every_detail_of_the_arithmetic_shows() {
    for name in ZOO {
        let animal = Animal::import(name);
        for (mistake, make) in mistakes(animal.bundle.model()) {
            let mut config = animal.bundle.model().clone();
            let mut vectors = animal.bundle.vectors().clone();
            make(&mut config, &mut vectors);
            let error = animal.prefill(animal.engine_of(resident(), &config, vectors));
            eprintln!("{name}, wrong {mistake}: {error}");
            assert!(error.full >= MIN_MISTAKE, "{name}, wrong {mistake}: {error}");
        }
    }
}
