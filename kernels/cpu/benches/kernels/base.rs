//! FFNs beside a low-bit base: estimates of all neurons, stand-ins for nine in ten, and the rest in f16; next to
//! dense f16 and to reading the same bytes.
//!
//! What counts is the base's time in per cent of what reading the layer's f16 weights takes: 20.3 % of the bytes at
//! three bits.

use super::{Laps, chosen, narrow, read_all, time};
use half::f16;
use ls_bundle::ids::{BlockId, LayerId};
use ls_bundle::low_bit::{Bits, Codebook};
use ls_bundle::model::{DType, FfnExtent, LayerVectors, ModelConfig, Vectors};
use ls_bundle::tiles::{code_bytes, matrix_bytes, tile_bytes};
use ls_compute::conformance::Rng;
use ls_compute::{
    BaseNeurons, BaseTables, ComputeBackend, KvDType, NeuronBlocks, Outputs, Pass, is_chosen,
};
use ls_cpu::{CpuBackend, CpuOptions, Kernels};
use ls_sync::Slot;

const REPETITIONS: usize = 30;
/// Bytes of a kind that are gone through in turn, at least: more than caches hold.
const WORKING_SET: usize = 256 << 20;
/// One neuron in so many runs exactly.
const CHOSEN: usize = 10;

/// Random weights of some layers.
struct Ffns {
    config: ModelConfig,
    ffn: FfnExtent,
    exact: Slot,
    base: Slot,
    codebook: Codebook,
}

impl Ffns {
    fn new(hidden: u32, ffn_hidden: u32, bits: u32) -> Ffns {
        let config = ModelConfig {
            hidden,
            ffn_hidden,
            heads: hidden / 64,
            kv_heads: hidden / 64,
            layers: 1,
            vocab_size: 64,
            ..narrow()
        };
        let ffn = FfnExtent {
            offset: 0,
            neurons: ffn_hidden,
            hidden,
            dtype: DType::F16,
            block_neurons: 1,
            first_block: BlockId(0),
        };
        let bits = Bits::new(bits).expect("1 to 4 bits");
        let values: Vec<i8> = (0..bits.values() as i16).map(|v| (16 * v - 120) as i8).collect();
        let codebook = Codebook::new(&values).expect("a codebook");
        let mut rng = Rng(7);
        let layer = ffn.extent().len as usize;
        let mut exact = allocate(layer * WORKING_SET.div_ceil(layer));
        for half in exact.bytes_mut().as_chunks_mut().0 {
            *half = f16::from_f32(0.03 * rng.unit()).to_le_bytes();
        }
        let layer = 3 * matrix_bytes(bits, ffn_hidden, hidden);
        let mut base = allocate(layer * WORKING_SET.div_ceil(layer));
        for tile in base.bytes_mut().chunks_exact_mut(tile_bytes(bits)) {
            let (codes, scales) = tile.split_at_mut(code_bytes(bits));
            codes.fill_with(|| rng.bits() as u8);
            for half in scales.as_chunks_mut().0 {
                *half = f16::from_f32(0.03).to_le_bytes();
            }
        }
        Ffns { config, ffn, exact, base, codebook }
    }

    fn backend(&self, threads: usize, kernels: Kernels) -> CpuBackend {
        let ones = vec![1.0; self.config.hidden as usize];
        let layer = LayerVectors {
            attn_norm: ones.clone(),
            mlp_norm: ones.clone(),
            ..LayerVectors::default()
        };
        let vectors = Vectors { layers: vec![layer], final_norm: ones };
        let options = CpuOptions {
            context: 1,
            pass_tokens: 1,
            scored_tokens: 0,
            threads,
            kv_cache: KvDType::F16,
            kernels,
        };
        CpuBackend::new(&self.config, vectors, &options).expect("a backend")
    }

    fn exact_layers(&self) -> impl Iterator<Item = &[u8]> {
        self.exact.bytes().chunks_exact(self.ffn.extent().len as usize)
    }

    /// One neuron of a layer.
    fn block<'a>(&self, layer: &'a [u8], neuron: usize) -> NeuronBlocks<'a> {
        let offset = neuron * self.ffn.block_stride() as usize;
        NeuronBlocks::new(&self.ffn, neuron as u32, 1, &layer[offset..])
    }

    fn base_layers(&self) -> impl Iterator<Item = BaseNeurons<'_>> {
        let codebooks = [self.codebook; 2];
        let shape = (self.config.ffn_hidden, self.config.hidden);
        let len = 3 * matrix_bytes(self.codebook.bits(), shape.0, shape.1);
        let layers = self.base.bytes().chunks_exact(len);
        layers.map(move |bytes| BaseNeurons::new(bytes, shape, codebooks, Some(self.codebook)))
    }
}

fn allocate(len: usize) -> Slot {
    let slot = Slot::allocate(len).expect("memory for the weights");
    slot.prefer_huge_pages();
    slot
}

/// Seconds a layer.
fn per_layer(layers: usize, run: impl FnMut(&mut Laps)) -> f64 {
    time(REPETITIONS, run) / layers as f64
}

pub(super) fn main(threads: &[usize], available: &[Kernels]) {
    let names: Vec<_> = available.iter().map(|kernels| kernels.name()).collect();
    let sets = chosen(&names, &names[..1]);
    for (name, hidden, ffn_hidden) in [("h2304", 2304, 6144), ("h4096", 4096, 14336)] {
        if !chosen(&["h2304", "h4096"], &["h2304", "h4096"]).contains(&name) {
            continue;
        }
        for bits in chosen(&["1bit", "2bit", "3bit", "4bit"], &["3bit"]) {
            let bits = u32::from(bits.as_bytes()[0] - b'0');
            let ffns = Ffns::new(hidden, ffn_hidden, bits);
            for &threads in threads {
                for kernels in available.iter().filter(|kernels| sets.contains(&kernels.name())) {
                    println!(
                        "hidden {hidden}, ffn {ffn_hidden}, {bits} bits, {} kernels, {threads} threads",
                        kernels.name()
                    );
                    measure(&ffns, ffns.backend(threads, *kernels), threads);
                }
            }
        }
    }
}

fn measure(ffns: &Ffns, mut backend: CpuBackend, threads: usize) {
    let layer = LayerId(0);
    let neurons = ffns.config.ffn_hidden as usize;
    let pass = Pass { first_position: 0, tokens: 1, outputs: Outputs::None, decode: true };
    backend.begin(pass);
    let bits: Vec<u64> = (0..neurons.div_ceil(64) as u64).map(one_in_ten).collect();
    let numbers = vec![1.0; neurons];
    let tables = BaseTables {
        offset: &numbers,
        slope: &numbers,
        down_error: &numbers,
        gate_error: &numbers,
        up_error: &numbers,
        constant: &numbers[..ffns.config.hidden as usize],
    };

    let layers = ffns.exact_layers().count();
    let layer_bytes = ffns.ffn.extent().len as f64;
    let reading = per_layer(layers, |laps| {
        for bytes in ffns.exact_layers() {
            read_all(bytes, threads);
            laps.lap();
        }
    });
    print("reading f16", layer_bytes, reading, reading);
    let dense = per_layer(layers, |laps| {
        for bytes in ffns.exact_layers() {
            backend.mlp_input(layer);
            backend.mlp(layer, &NeuronBlocks::new(&ffns.ffn, 0, ffns.ffn.blocks(), bytes));
            backend.mlp_output(layer);
            laps.lap();
        }
    });
    print("dense f16", layer_bytes, dense, reading);

    let running = (0..neurons).filter(|&neuron| is_chosen(&bits, neuron));
    let running: Vec<usize> = running.collect();
    let blocks: Vec<Vec<NeuronBlocks<'_>>> = ffns
        .exact_layers()
        .map(|bytes| running.iter().map(|&neuron| ffns.block(bytes, neuron)).collect())
        .collect();
    let some = per_layer(layers, |laps| {
        for blocks in &blocks {
            backend.mlp_input(layer);
            backend.mlp_blocks(layer, blocks);
            backend.mlp_output(layer);
            laps.lap();
        }
    });
    print("one f16 in ten", layer_bytes * running.len() as f64 / neurons as f64, some, reading);

    measure_base(ffns, &mut backend, &tables, &bits, reading);
}

/// The base's estimates and stand-ins, beside the time of reading a layer.
fn measure_base(
    ffns: &Ffns,
    backend: &mut CpuBackend,
    tables: &BaseTables<'_>,
    bits: &[u64],
    reading: f64,
) {
    let layer = LayerId(0);
    let layers = ffns.base_layers().count();
    let base_bytes = ffns.base.len() as f64 / layers as f64;
    let estimates = per_layer(layers, |laps| {
        for base in ffns.base_layers() {
            backend.mlp_input(layer);
            backend.estimate(layer, &base, tables);
            laps.lap();
        }
    });
    print("estimates", base_bytes * 2.0 / 3.0, estimates, reading);
    let both = per_layer(layers, |laps| {
        for base in ffns.base_layers() {
            backend.mlp_input(layer);
            backend.estimate(layer, &base, tables);
            backend.stand_in(layer, &base, tables, bits);
            backend.mlp_output(layer);
            laps.lap();
        }
    });
    print("stand-ins", base_bytes / 3.0, both - estimates, reading);
    print("base", base_bytes, both, reading);
}

/// Word `word` of a choice of neurons, which are not at the same places of all words.
fn one_in_ten(word: u64) -> u64 {
    let chosen = |bit: &u64| (64 * word + bit).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (0..64).filter(|bit| chosen(bit) % CHOSEN as u64 == 0).map(|bit| 1 << bit).sum()
}

fn print(what: &str, bytes: f64, seconds: f64, reading: f64) {
    let (ms, speed, share) = (1e3 * seconds, bytes / seconds / 1e9, 100.0 * seconds / reading);
    println!("  {what:15} {ms:7.3} ms {speed:7.2} GB/s, {share:5.1} % of reading f16");
}
