//! Tiny random models, packed as a bundle packs them.

use crate::KvDType;
use crate::reference::{ReferenceModel, ReferenceWeights};
use half::f16;
use ls_bundle::extent::align_up;
use ls_bundle::ids::BlockId;
use ls_bundle::model::{
    Architecture, DType, FfnExtent, LayerExtents, LayerVectors, MatrixExtent, ModelConfig,
    QUANT_GROUP, RopeConfig, RopeScaling, SpecialTokens, Vectors, WeightMap,
};

/// SplitMix64: enough randomness for test data, the same everywhere.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1 .. 1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Uniform in 0 .. limit.
    pub fn below(&mut self, limit: u32) -> u32 {
        (self.bits() % u64::from(limit)) as u32
    }
}

/// A model, its bundle's bytes, its reference, and tokens to run it on.
#[derive(Clone, Debug)]
pub struct TinyModel {
    /// Shape.
    pub config: ModelConfig,
    /// Small vectors.
    pub vectors: Vectors,
    /// Where weights lie in `image`.
    pub map: WeightMap,
    /// The packed weights. Padding holds 0xff, which no kernel may use.
    pub image: Vec<u8>,
    /// The same model in f32.
    pub reference: ReferenceModel,
    /// A random text.
    pub tokens: Vec<u32>,
    /// How a backend keeps keys and values.
    pub kv_cache: KvDType,
    seed: u64,
}

impl TinyModel {
    /// Name and seed, for messages.
    #[must_use]
    pub fn label(&self) -> String {
        format!("{} (seed {})", self.config.name, self.seed)
    }
}

/// One model of each kind that kernels treat differently, weights in `dtype`, keys and values in `kv_cache`.
#[must_use]
pub fn models(dtype: DType, kv_cache: KvDType, seed: u64) -> Vec<TinyModel> {
    // Quantised rows are made of whole groups.
    let whole = |width: u32| match dtype {
        DType::F16 => width,
        DType::Q8_0 | DType::Q4_0 => width.next_multiple_of(QUANT_GROUP),
    };
    let llama = llama();
    let [qwen2, qwen3] = qwens(&llama, whole);
    let mistral = ModelConfig {
        architecture: Architecture::Mistral,
        name: "mistral, long text, long window".into(),
        vocab_size: 70,
        hidden: 32,
        ffn_hidden: 33,
        layers: 1,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        sliding_window: Some(150),
        ..llama.clone()
    };
    let wide = ModelConfig {
        name: "llama, wider and longer than kernels' tiles".into(),
        vocab_size: 2100,
        hidden: 288,
        ffn_hidden: 530,
        layers: 1,
        heads: 9,
        kv_heads: 3,
        ..llama.clone()
    };
    let configs =
        [(llama, 1, 47), (qwen2, 3, 41), (qwen3, 4, 43), (mistral, 1, 530), (wide, 2, 19)];
    configs
        .map(|(mut config, block_neurons, tokens)| {
            if kv_cache == KvDType::Q8_0 {
                config.head_dim = config.head_dim.next_multiple_of(QUANT_GROUP);
            }
            TinyModel { kv_cache, ..build(config, dtype, block_neurons, tokens, seed) }
        })
        .into()
}

pub(super) fn llama() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        name: "llama, tied".into(),
        vocab_size: 200,
        hidden: 96,
        ffn_hidden: 200,
        layers: 2,
        heads: 3,
        kv_heads: 1,
        head_dim: 32,
        norm_epsilon: 1e-5,
        rope: RopeConfig { theta: 1e4, scaling: RopeScaling::None },
        context_length: 512,
        sliding_window: None,
        tied_head: true,
        qkv_bias: false,
        qk_norm: false,
        special: SpecialTokens::default(),
    }
}

/// Models with biases, and with norms of heads; `whole` widens a row to whole groups.
fn qwens(llama: &ModelConfig, whole: impl Fn(u32) -> u32) -> [ModelConfig; 2] {
    let qwen2 = ModelConfig {
        architecture: Architecture::Qwen2,
        name: "qwen2, untied, biases, wide heads, padded blocks".into(),
        vocab_size: 131,
        hidden: whole(40),
        ffn_hidden: 50,
        heads: 4,
        kv_heads: 2,
        head_dim: whole(24),
        rope: RopeConfig { theta: 1e6, scaling: RopeScaling::Linear { factor: 2.0 } },
        tied_head: false,
        qkv_bias: true,
        ..llama.clone()
    };
    let qwen3 = ModelConfig {
        architecture: Architecture::Qwen3,
        name: "qwen3, head norms, short window".into(),
        vocab_size: 64,
        hidden: 64,
        ffn_hidden: 70,
        heads: 2,
        kv_heads: 2,
        head_dim: 16,
        rope: RopeConfig {
            theta: 1e4,
            scaling: RopeScaling::Llama3 {
                factor: 4.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_context: 64,
            },
        },
        sliding_window: Some(5),
        qk_norm: true,
        ..llama.clone()
    };
    [qwen2, qwen3]
}

/// Draws the weights of `config` and packs them; `tokens` tokens of text, a cache in f16.
#[must_use]
pub fn build(
    config: ModelConfig,
    dtype: DType,
    block_neurons: u32,
    tokens: u32,
    seed: u64,
) -> TinyModel {
    let mut packer = Packer { rng: Rng(seed), image: Vec::new(), dtype, next_block: 0 };
    let (hidden, query, kv) = (config.hidden, config.query_width(), config.kv_width());
    let mut layers = Vec::new();
    for _ in 0..config.layers {
        layers.push(LayerExtents {
            q_proj: packer.matrix(query, hidden),
            k_proj: packer.matrix(kv, hidden),
            v_proj: packer.matrix(kv, hidden),
            o_proj: packer.matrix(hidden, query),
            ffn: packer.ffn(config.ffn_hidden, hidden, block_neurons),
        });
    }
    let head = (!config.tied_head).then(|| packer.matrix(config.vocab_size, hidden));
    let embedding = packer.matrix(config.vocab_size, hidden);
    let map = WeightMap { layers, head, embedding };
    let Packer { mut rng, image, .. } = packer;
    let vectors = draw_vectors(&config, &mut rng);
    let weights = ReferenceWeights::read(&map, |extent| {
        Ok::<_, std::convert::Infallible>(
            image[extent.offset as usize..extent.end() as usize].to_vec(),
        )
    });
    let Ok(weights) = weights;
    let reference = ReferenceModel::new(config.clone(), vectors.clone(), weights);
    let tokens = (0..tokens).map(|_| rng.below(config.vocab_size)).collect();
    TinyModel { config, vectors, map, image, reference, tokens, kv_cache: KvDType::F16, seed }
}

fn draw_vectors(config: &ModelConfig, rng: &mut Rng) -> Vectors {
    let (hidden, head_dim) = (config.hidden, config.head_dim);
    let mut gain = |len: u32| (0..len).map(|_| 1.0 + 0.3 * rng.unit()).collect::<Vec<f32>>();
    let final_norm = gain(hidden);
    let mut layers = Vec::new();
    for _ in 0..config.layers {
        let mut layer = LayerVectors {
            attn_norm: gain(hidden),
            mlp_norm: gain(hidden),
            ..LayerVectors::default()
        };
        if config.qkv_bias {
            layer.q_bias = gain(config.query_width());
            layer.k_bias = gain(config.kv_width());
            layer.v_bias = gain(config.kv_width());
        }
        if config.qk_norm {
            layer.q_norm = gain(head_dim);
            layer.k_norm = gain(head_dim);
        }
        layers.push(layer);
    }
    Vectors { layers, final_norm }
}

/// Writes random weights in the bundle's layout.
struct Packer {
    rng: Rng,
    image: Vec<u8>,
    dtype: DType,
    next_block: u32,
}

impl Packer {
    fn matrix(&mut self, rows: u32, cols: u32) -> MatrixExtent {
        let offset = self.image.len() as u64;
        for _ in 0..rows {
            self.row(cols);
        }
        // The fewest rows whose bytes are a multiple of 64.
        let tile_rows = 64 >> self.dtype.row_bytes(cols).trailing_zeros().min(6);
        let first_block = BlockId(self.next_block);
        let extent = MatrixExtent { offset, rows, cols, dtype: self.dtype, tile_rows, first_block };
        self.next_block += extent.tiles();
        self.pad_to(extent.extent().end());
        extent
    }

    fn ffn(&mut self, neurons: u32, hidden: u32, block_neurons: u32) -> FfnExtent {
        let offset = self.image.len() as u64;
        let dtype = self.dtype;
        let first_block = BlockId(self.next_block);
        let extent = FfnExtent { offset, neurons, hidden, dtype, block_neurons, first_block };
        for neuron in 0..neurons {
            for _ in 0..3 {
                self.row(hidden);
            }
            if (neuron + 1) % block_neurons == 0 || neuron + 1 == neurons {
                self.pad_to(extent.block(neuron / block_neurons).1.end());
            }
        }
        self.next_block += extent.blocks();
        extent
    }

    fn pad_to(&mut self, end: u64) {
        debug_assert_eq!(end, align_up(end));
        self.image.resize(end as usize, 0xff);
    }

    /// One row of weights of about 1.5 / sqrt(cols), so that activations keep their size.
    fn row(&mut self, cols: u32) {
        let amplitude = 2.5 / (cols as f32).sqrt();
        let quants = match self.dtype {
            DType::F16 => {
                for _ in 0..cols {
                    let weight = f16::from_f32(amplitude * self.rng.unit());
                    self.image.extend(weight.to_le_bytes());
                }
                return;
            }
            DType::Q8_0 => cols,
            DType::Q4_0 => cols / 2,
        };
        self.image.extend((0..quants).map(|_| self.rng.bits() as u8));
        let largest = if self.dtype == DType::Q8_0 { 128.0 } else { 8.0 };
        for _ in 0..cols / QUANT_GROUP {
            let scale = amplitude / largest * (1.0 + 0.5 * self.rng.unit());
            self.image.extend(f16::from_f32(scale).to_le_bytes());
        }
    }
}
