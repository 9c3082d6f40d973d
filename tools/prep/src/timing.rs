//! How long predictors take at the shape that they are compared at, on one thread with AVX2 where there is such a form:
//! medians of many predictions of made-up tables. What is in the tables does not matter to the time.

use crate::error::{PrepError, Result};
use crate::predictors::{Ema, Frequency, MlpScorer, PackedScorer, Scorer};
use crate::recipe;
use crate::stages::predictor::{COMPARED_SHAPE, blank_at};
use half::f16;
use ls_bundle::ids::{BlockId, LayerId};
use ls_bundle::low_bit::{Bits, Codebook, GROUP, Row, pack_row};
use ls_bundle::model::{
    Architecture, DType, LayerVectors, MatrixExtent, ModelConfig, RopeConfig, RopeScaling,
    SpecialTokens, Vectors,
};
use ls_bundle::tiles::{self, Over, matrix_bytes};
use ls_compute::{BaseNeurons, BaseTables, ComputeBackend, KvDType, MatrixRows, Outputs, Pass};
use ls_cpu::{CpuBackend, CpuOptions, Kernels};
use ls_hash::{Input, MlpTables, MlpWeights, Scaling};
use std::time::Instant;

/// Predictions timed.
const TIMED: usize = 40;
/// Instruction set that all are timed with.
const KERNELS: &str = "avx2";

const HIDDEN: usize = COMPARED_SHAPE[0];
const NEURONS: usize = COMPARED_SHAPE[1];

fn median_us(mut once: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..TIMED)
        .map(|_| {
            let start = Instant::now();
            once();
            1e6 * start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[TIMED / 2]
}

/// Of a scorer of so many blocks, asked with a residual.
fn scorer(mut scorer: impl Scorer, blocks: usize) -> f64 {
    let residual = residual();
    let mut scores = vec![0.0; blocks];
    median_us(|| scorer.scores(&residual, &mut scores))
}

fn residual() -> Vec<f32> {
    (0..HIDDEN).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect()
}

/// Of a stack as `recipe` says, for blocks of so many neurons.
pub fn stack_us(recipe: &recipe::Predictor, block_neurons: u32) -> Result<f64> {
    let blocks = NEURONS.div_ceil(block_neurons as usize);
    Ok(scorer(PackedScorer::new(blank_at(recipe, HIDDEN, blocks)?)?, blocks))
}

/// Of a two-layer predictor in 8 bits with so many hidden units.
#[must_use]
pub fn mlp_us(hidden: usize, block_neurons: u32) -> f64 {
    let blocks = NEURONS.div_ceil(block_neurons as usize);
    let weights = |count: usize| (0..count).map(|i| (i * 31 % 255) as u8 as i8 / 2).collect();
    let tables = MlpTables {
        input: Input { scaling: Scaling::Rms, center: vec![0.0; HIDDEN], gain: vec![40.0; HIDDEN] },
        weights: MlpWeights::Int8 {
            first: weights(hidden * HIDDEN),
            first_scales: vec![0.01; hidden],
            second: weights(blocks * hidden),
        },
        first_biases: vec![0.0; hidden],
        scales: vec![0.01; blocks],
        biases: vec![0.0; blocks],
    };
    scorer(MlpScorer::new(tables), blocks)
}

/// Of the frequency prior.
#[must_use]
pub fn frequency_us() -> f64 {
    scorer(Frequency { shares: vec![0.1; NEURONS] }, NEURONS)
}

/// Of the moving average, with its update.
#[must_use]
pub fn average_us() -> f64 {
    let mut average = Ema::new(vec![0.1; NEURONS], 0.85);
    let active: Vec<u32> = (0..NEURONS as u32).step_by(5).collect();
    let mut scores = vec![0.0; NEURONS];
    median_us(|| {
        average.scores(&[], &mut scores);
        average.remember(&active);
    })
}

/// Of a low-bit copy's scores by the kernels that `ls-run` has; nothing without AVX2 or for bits that are none.
pub fn sketch_us([gate, up]: [u32; 2]) -> Result<Option<f64>> {
    let bits = [gate, up].map(Bits::new);
    let ([Some(gate), Some(up)], Some(kernels)) =
        (bits, Kernels::available().find(|kernels| kernels.name() == KERNELS))
    else {
        return Ok(None);
    };
    let books = [gate, up].map(codebook);
    let shape = (NEURONS as u32, HIDDEN as u32);
    let tiles: Vec<u8> = books.iter().flat_map(tiles_of).collect();
    let base = BaseNeurons::new(&tiles, shape, books, None);
    let (ones, constant) = (vec![1.0; NEURONS], vec![0.0; HIDDEN]);
    let tables = BaseTables {
        offset: &ones,
        slope: &ones,
        down_error: &ones,
        gate_error: &ones,
        up_error: &ones,
        constant: &constant,
    };
    let mut backend = backend(kernels)?;
    Ok(Some(median_us(|| backend.estimate(LayerId(0), &base, &tables))))
}

/// A codebook of values at equal distances.
fn codebook(bits: Bits) -> Codebook {
    let step = 254 / (bits.values() - 1);
    let values: Vec<i8> = (0..bits.values()).map(|code| (code * step) as i8).collect();
    Codebook::new(&values).expect("a power of two values")
}

/// A matrix of gate or up.
fn tiles_of(book: &Codebook) -> Vec<u8> {
    let bits = book.bits();
    let codes: Vec<u8> = (0..HIDDEN).map(|i| (i * 7 % bits.values()) as u8).collect();
    let mut row = vec![0; bits.row_bytes(HIDDEN as u32)];
    pack_row(bits, &codes, &[f16::ONE; HIDDEN / GROUP], &mut row);
    let mut bytes = vec![0; matrix_bytes(bits, NEURONS as u32, HIDDEN as u32)];
    tiles::pack(Over::Hidden, &vec![Row::new(book, &row); NEURONS], &mut bytes);
    bytes
}

/// A backend of one layer of that shape that has the FFN's input of one token.
fn backend(kernels: Kernels) -> Result<CpuBackend> {
    let (hidden, ffn_hidden) = (HIDDEN as u32, NEURONS as u32);
    let config = ModelConfig {
        architecture: Architecture::Llama,
        name: "one layer".to_owned(),
        vocab_size: 1,
        hidden,
        ffn_hidden,
        layers: 1,
        heads: 1,
        kv_heads: 1,
        head_dim: 64,
        norm_epsilon: 1e-5,
        rope: RopeConfig { theta: 1e4, scaling: RopeScaling::None },
        context_length: 1,
        sliding_window: None,
        tied_head: true,
        qkv_bias: false,
        qk_norm: false,
        special: SpecialTokens::default(),
    };
    let gain = vec![1.0; HIDDEN];
    let norms =
        LayerVectors { attn_norm: gain.clone(), mlp_norm: gain.clone(), ..Default::default() };
    let vectors = Vectors { layers: vec![norms], final_norm: gain };
    let options = CpuOptions {
        context: 1,
        pass_tokens: 1,
        scored_tokens: 1,
        threads: 1,
        kv_cache: KvDType::F16,
        kernels,
    };
    let mut backend =
        CpuBackend::new(&config, vectors, &options).map_err(PrepError::unsupported)?;
    let outputs = Outputs::None;
    backend.begin(Pass { first_position: 0, tokens: 1, outputs, decode: true });
    let matrix = MatrixExtent {
        offset: 0,
        rows: 1,
        cols: hidden,
        dtype: DType::F16,
        tile_rows: 1,
        first_block: BlockId(0),
    };
    let row: Vec<u8> = residual().iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
    backend.embed(0, MatrixRows::new(&matrix, 0, 1, &row));
    backend.mlp_input(LayerId(0));
    Ok(backend)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sketch_of_more_bits_is_not_free() {
        let two = sketch_us([2, 2]).unwrap();
        assert_eq!(two.is_some(), Kernels::available().any(|kernels| kernels.name() == KERNELS));
        assert!(two.is_none_or(|us| us > 1.0 && us < 1e6));
        assert_eq!(sketch_us([2, 5]).unwrap(), None, "bits that are none");
    }
}
