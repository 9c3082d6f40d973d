//! Speed of the kernels by themselves: decode and prefill of models with random weights in memory, next to the
//! memory bandwidth of this machine, measured in the same run with the same threads.
//!
//! `cargo bench -p ls-cpu -- [THREADS..] [narrow] [wide] [f16] [q8_0] [q4_0] [kv_f16] [kv_q8_0] [scalar] [avx2]
//! [avx512] [decode] [prefill] [score]`: of a kind of which nothing is named all is run, but two threads, an f16 cache and
//! the fastest instruction set.
//!
//! `cargo bench -p ls-cpu -- base [THREADS..] [h2304] [h4096] [1bit] [2bit] [3bit] [4bit] [avx2] ..` runs FFNs beside a low-bit base
//! instead; see [`base`].

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

#[path = "kernels/base.rs"]
mod base;

use ls_bundle::ids::{BlockId, LayerId};
use ls_bundle::model::{
    Architecture, DType, FfnExtent, LayerVectors, MatrixExtent, ModelConfig, QUANT_GROUP,
    RopeConfig, RopeScaling, SpecialTokens, Vectors,
};
use ls_compute::conformance::Rng;
use ls_compute::{
    ComputeBackend, KvDType, MatrixRows, NeuronBlocks, Outputs, Pass, Projection, ProjectionPart,
};
use ls_cpu::{CpuBackend, CpuOptions, Kernels};
use ls_sync::Slot;
use std::time::Instant;

const CONTEXT: u32 = 2048;
const PROMPT: u32 = 512;
/// Rows of a part of the head.
const HEAD_PART: usize = 6144;
const REPETITIONS: usize = 20;

/// SmolLM2-135M.
fn narrow() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        name: "narrow".into(),
        vocab_size: 49152,
        hidden: 576,
        ffn_hidden: 1536,
        layers: 30,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        norm_epsilon: 1e-5,
        rope: RopeConfig { theta: 1e5, scaling: RopeScaling::None },
        context_length: 8192,
        sliding_window: None,
        tied_head: true,
        qkv_bias: false,
        qk_norm: false,
        special: SpecialTokens::default(),
    }
}

/// A few layers of a model four times as wide.
fn wide() -> ModelConfig {
    ModelConfig {
        name: "wide".into(),
        vocab_size: 8192,
        hidden: 2304,
        ffn_hidden: 9216,
        layers: 4,
        heads: 36,
        kv_heads: 12,
        ..narrow()
    }
}

/// Weights of all layers and the head, one after another.
struct Model {
    config: ModelConfig,
    dtype: DType,
    weights: Slot,
    /// Bytes of a layer: q, k, v, o, FFN.
    layer_bytes: usize,
}

impl Model {
    fn new(config: ModelConfig, dtype: DType) -> Model {
        assert_eq!(config.hidden, config.query_width(), "all rows have the same width");
        let rows = 2 * (config.query_width() + config.kv_width()) + 3 * config.ffn_hidden;
        let row_bytes = dtype.row_bytes(config.hidden) as usize;
        let layer_bytes = rows as usize * row_bytes;
        let len = usize::from(config.layers) * layer_bytes + config.vocab_size as usize * row_bytes;
        let mut weights = Slot::allocate(len).expect("memory for the weights");
        weights.prefer_huge_pages();
        let mut rng = Rng(7);
        let amplitude = 1.7 / (config.hidden as f32).sqrt();
        let largest = if dtype == DType::Q8_0 { 128.0 } else { 8.0 };
        for row in weights.bytes_mut().chunks_exact_mut(row_bytes) {
            let halves = match dtype {
                DType::F16 => row,
                DType::Q8_0 | DType::Q4_0 => {
                    let scales = 2 * (config.hidden / QUANT_GROUP) as usize;
                    let (quants, scales) = row.split_at_mut(row_bytes - scales);
                    quants.chunks_mut(8).for_each(|bytes| {
                        bytes.copy_from_slice(&rng.bits().to_le_bytes()[..bytes.len()]);
                    });
                    scales
                }
            };
            for half in halves.chunks_exact_mut(2) {
                let value = match dtype {
                    DType::F16 => amplitude * rng.unit(),
                    DType::Q8_0 | DType::Q4_0 => amplitude / largest,
                };
                half.copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
            }
        }
        Model { config, dtype, weights, layer_bytes }
    }

    fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.config.hidden) as usize
    }

    fn backend(&self, threads: usize, kernels: Kernels, kv_cache: KvDType) -> CpuBackend {
        let ones = vec![1.0; self.config.hidden as usize];
        let layer = LayerVectors {
            attn_norm: ones.clone(),
            mlp_norm: ones.clone(),
            ..LayerVectors::default()
        };
        let layers = vec![layer; usize::from(self.config.layers)];
        let vectors = Vectors { layers, final_norm: ones };
        let options = CpuOptions {
            context: CONTEXT,
            pass_tokens: PROMPT,
            scored_tokens: 256,
            threads,
            kv_cache,
            kernels,
        };
        CpuBackend::new(&self.config, vectors, &options).expect("a backend")
    }

    /// Rows of a matrix `offset` bytes behind the start of the weights, and the offset behind them.
    fn rows(&self, offset: &mut usize, rows: u32, cols: u32) -> MatrixRows<'_> {
        let first_block = BlockId(0);
        let dtype = self.dtype;
        let extent = MatrixExtent { offset: 0, rows, cols, dtype, tile_rows: 1, first_block };
        let rows = MatrixRows::new(&extent, 0, rows, &self.weights.bytes()[*offset..]);
        *offset += rows.bytes.len();
        rows
    }

    fn pass(&self, backend: &mut CpuBackend, pass: Pass<'_>, laps: &mut Laps) {
        let config = &self.config;
        let (hidden, query, kv) = (config.hidden, config.query_width(), config.kv_width());
        backend.begin(pass);
        for index in 0..pass.tokens {
            let mut offset = index as usize * self.row_bytes();
            backend.embed(index, self.rows(&mut offset, 1, hidden));
        }
        let mut offset = 0;
        for layer in config.layer_ids() {
            let part = |projection, rows| ProjectionPart { projection, rows };
            let qkv = [
                part(Projection::Query, self.rows(&mut offset, query, hidden)),
                part(Projection::Key, self.rows(&mut offset, kv, hidden)),
                part(Projection::Value, self.rows(&mut offset, kv, hidden)),
            ];
            let o = [part(Projection::Output, self.rows(&mut offset, hidden, query))];
            self.layer(backend, layer, &qkv, &o, &mut offset, laps);
            laps.lap();
        }
        if pass.outputs != Outputs::None {
            backend.head_input();
            let head = self.rows(&mut offset, config.vocab_size, hidden);
            for first in (0..head.rows).step_by(HEAD_PART) {
                let rows = (HEAD_PART as u32).min(head.rows - first);
                let bytes = &head.bytes[first as usize * self.row_bytes()..];
                let bytes = &bytes[..rows as usize * self.row_bytes()];
                backend.head(&MatrixRows { bytes, first_row: first, rows, ..head });
                laps.lap();
            }
        }
    }

    fn layer(
        &self,
        backend: &mut CpuBackend,
        layer: LayerId,
        qkv: &[ProjectionPart<'_>],
        o: &[ProjectionPart<'_>],
        offset: &mut usize,
        laps: &mut Laps,
    ) {
        backend.attn_input(layer);
        backend.project(layer, qkv);
        laps.lap();
        backend.attend(layer);
        laps.lap();
        backend.project(layer, o);
        laps.lap();
        backend.mlp_input(layer);
        let ffn = FfnExtent {
            offset: 0,
            neurons: self.config.ffn_hidden,
            hidden: self.config.hidden,
            dtype: self.dtype,
            // Whole cache lines in all formats, so that nothing is padded.
            block_neurons: 16,
            first_block: BlockId(0),
        };
        let bytes = &self.weights.bytes()[*offset..];
        let blocks = NeuronBlocks::new(&ffn, 0, ffn.blocks(), bytes);
        *offset += blocks.bytes.len();
        backend.mlp(layer, &blocks);
        backend.mlp_output(layer);
    }
}

/// Seconds of each step of something that is repeated: the fastest of all repetitions. On a machine that does other
/// things too, a step of a millisecond finds a quiet moment sooner than the whole does.
struct Laps {
    best: Vec<f64>,
    step: usize,
    last: Instant,
}

impl Laps {
    fn lap(&mut self) {
        let seconds = self.last.elapsed().as_secs_f64();
        match self.best.get_mut(self.step) {
            Some(best) => *best = best.min(seconds),
            None => self.best.push(seconds),
        }
        self.step += 1;
        self.last = Instant::now();
    }
}

/// The sum of the fastest steps of some repetitions.
fn time(repetitions: usize, mut run: impl FnMut(&mut Laps)) -> f64 {
    let mut laps = Laps { best: Vec::new(), step: 0, last: Instant::now() };
    for _ in 0..repetitions {
        (laps.step, laps.last) = (0, Instant::now());
        run(&mut laps);
    }
    laps.best.iter().sum()
}

/// Adds up all of `bytes` on `threads` threads.
fn read_all(bytes: &[u8], threads: usize) {
    std::thread::scope(|scope| {
        for part in bytes.chunks(bytes.len() / threads) {
            scope.spawn(move || {
                let (numbers, _) = part.as_chunks::<64>();
                let mut sums = [0u64; 8];
                for line in numbers {
                    for (sum, number) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                        *sum = sum.wrapping_add(u64::from_le_bytes(*number));
                    }
                }
                std::hint::black_box(sums);
            });
        }
    });
}

/// The arguments that are among `names`; `otherwise` if there is none.
fn chosen<'a>(names: &[&'a str], otherwise: &[&'a str]) -> Vec<&'a str> {
    let given: Vec<String> = std::env::args().collect();
    let named: Vec<_> = names.iter().copied().filter(|n| given.iter().any(|g| g == n)).collect();
    if named.is_empty() { otherwise.to_vec() } else { named }
}

fn main() {
    let mut threads: Vec<usize> = std::env::args().filter_map(|arg| arg.parse().ok()).collect();
    if threads.is_empty() {
        threads.push(2);
    }
    let available: Vec<Kernels> = Kernels::available().collect();
    if std::env::args().any(|arg| arg == "base") {
        return base::main(&threads, &available);
    }
    let names: Vec<_> = available.iter().map(|kernels| kernels.name()).collect();
    let sets = chosen(&names, &names[..1]);
    let (shapes, formats) = (["narrow", "wide"], ["f16", "q8_0", "q4_0"]);
    for shape in chosen(&shapes, &shapes) {
        for format in chosen(&formats, &formats) {
            let dtype = match format {
                "f16" => DType::F16,
                "q8_0" => DType::Q8_0,
                _ => DType::Q4_0,
            };
            let config = if shape == "wide" { wide() } else { narrow() };
            let model = Model::new(config, dtype);
            for (&threads, kernels) in
                threads.iter().flat_map(|threads| available.iter().map(move |k| (threads, *k)))
            {
                if !sets.contains(&kernels.name()) {
                    continue;
                }
                for cache in chosen(&["kv_f16", "kv_q8_0"], &["kv_f16"]) {
                    let kv_cache = if cache == "kv_f16" { KvDType::F16 } else { KvDType::Q8_0 };
                    let set = kernels.name();
                    println!("{shape} {format}, {cache}, {set} kernels, {threads} threads");
                    measure(&model, model.backend(threads, kernels, kv_cache), threads);
                }
            }
        }
    }
}

fn measure(model: &Model, mut backend: CpuBackend, threads: usize) {
    let bytes = model.weights.len() as f64;
    let all = ["decode", "prefill", "score"];
    let what = chosen(&all, &all);
    let reading = time(REPETITIONS, |laps| {
        for part in model.weights.bytes().chunks(model.layer_bytes) {
            read_all(part, threads);
            laps.lap();
        }
    });
    println!("  reading        {:7.2} GB/s, {:.0} MB", bytes / reading / 1e9, bytes / 1e6);

    for position in [0, 500, 2000].into_iter().filter(|_| what.contains(&"decode")) {
        let outputs = Outputs::LastLogits;
        let decode = Pass { first_position: position, tokens: 1, outputs, decode: true };
        let seconds = time(REPETITIONS, |laps| model.pass(&mut backend, decode, laps));
        let (speed, tokens) = (bytes / seconds / 1e9, 1.0 / seconds);
        let share = 100.0 * reading / seconds;
        println!(
            "  decode at {position:4} {speed:7.2} GB/s, {share:.0} % of reading, {tokens:.1} tokens/s"
        );
    }

    let weights = bytes * f64::from(model.config.hidden) / model.row_bytes() as f64;
    let head = f64::from(model.config.vocab_size) * f64::from(model.config.hidden);
    let prompts = [(8, REPETITIONS), (64, REPETITIONS / 2), (PROMPT, 4)];
    for (tokens, repetitions) in prompts.into_iter().filter(|_| what.contains(&"prefill")) {
        let outputs = Outputs::LastLogits;
        let prefill = Pass { first_position: 0, tokens, outputs, decode: false };
        let seconds = time(repetitions, |laps| model.pass(&mut backend, prefill, laps));
        let gflop = 2.0 * (weights - head) * f64::from(tokens) / 1e9;
        let (speed, tokens_s) = (gflop / seconds, f64::from(tokens) / seconds);
        println!("  prefill of {tokens:3} {speed:7.2} GFLOP/s, {tokens_s:.1} tokens/s");
    }

    if what.contains(&"score") {
        let targets = vec![1; 256];
        let outputs = Outputs::Score { first: 0, targets: &targets };
        let score = Pass { first_position: 0, tokens: 256, outputs, decode: false };
        let seconds = time(2, |laps| model.pass(&mut backend, score, laps));
        println!("  scores of 256  {:7.1} tokens/s", 256.0 / seconds);
    }
}
