//! What model a bundle holds: its shape, its arithmetic, and where each weight lies in the file.
//!
//! Plain data, filled by `ls-prep`, validated by [`Bundle::open`](crate::Bundle::open), read by everyone.

use crate::ids::{BlockId, LayerId};
use serde::{Deserialize, Serialize};

/// The model families whose arithmetic the runtime knows. All are pre-norm decoders with RMSNorm, rotary
/// positions, grouped-query attention and a SwiGLU FFN; what differs is in [`ModelConfig`]'s fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Architecture {
    /// Llama 2 and 3, SmolLM2.
    Llama,
    /// Mistral: Llama with an optional sliding window.
    Mistral,
    /// Qwen 2 and 2.5: biases on q, k and v.
    Qwen2,
    /// Qwen 3: RMSNorm on every head of q and k.
    Qwen3,
}

/// Rotary position embedding. Weights are always stored for the half-split layout (`rotate_half`): dimension i
/// turns with dimension i + head_dim / 2; `ls-prep` reorders rows of q and k that come interleaved.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f32,
    /// How positions beyond the trained context are squeezed.
    pub scaling: RopeScaling,
}

/// Rotary frequency scaling.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    /// Frequencies as trained.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// Divisor, > 0.
        factor: f32,
    },
    /// Llama 3.1: long waves divided by `factor`, short ones kept, a smooth blend between.
    Llama3 {
        /// Divisor of the long waves.
        factor: f32,
        /// Waves longer than original_context / low_freq_factor are scaled.
        low_freq_factor: f32,
        /// Waves shorter than original_context / high_freq_factor are kept.
        high_freq_factor: f32,
        /// The context that the model was first trained with.
        original_context: u32,
    },
}

/// Token ids with a meaning, and the rule for the first token.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecialTokens {
    /// Beginning of sequence.
    pub bos: Option<u32>,
    /// Whether a prompt starts with `bos`.
    pub add_bos: bool,
    /// Tokens that end generation. May be empty.
    pub stop: Vec<u32>,
}

/// A model's shape and arithmetic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Family.
    pub architecture: Architecture,
    /// Name for people.
    pub name: String,
    /// Rows of the embedding table and of the head.
    pub vocab_size: u32,
    /// Width of the residual stream (d).
    pub hidden: u32,
    /// Neurons of each FFN.
    pub ffn_hidden: u32,
    /// Number of transformer layers.
    pub layers: u16,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Width of one head; even. Often, not always, hidden / heads.
    pub head_dim: u32,
    /// Added to the mean square in RMSNorm.
    pub norm_epsilon: f32,
    /// Rotary positions.
    pub rope: RopeConfig,
    /// Longest context that the model was made for, in tokens.
    pub context_length: u32,
    /// Attention reaches this many tokens back (the token itself included), where limited.
    pub sliding_window: Option<u32>,
    /// Whether the head is the embedding table.
    pub tied_head: bool,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether q and k are normalised head by head.
    pub qk_norm: bool,
    /// Special tokens.
    pub special: SpecialTokens,
}

impl ModelConfig {
    /// Width of all query heads together: rows of q_proj, columns of o_proj.
    #[must_use]
    pub fn query_width(&self) -> u32 {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    #[must_use]
    pub fn kv_width(&self) -> u32 {
        self.kv_heads * self.head_dim
    }

    /// Layer ids in order.
    pub fn layer_ids(&self) -> impl Iterator<Item = LayerId> + use<> {
        (0..self.layers).map(LayerId)
    }
}

/// How the numbers of a weight row are stored. A row of `cols` weights takes [`DType::row_bytes`] bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DType {
    /// IEEE half precision, little endian.
    F16,
    /// Groups of 32: `cols` signed bytes, then cols / 32 half-precision scales. w = scale * q.
    Q8_0,
    /// Groups of 32: cols / 2 bytes (element i of a group in the low nibble of byte i for i < 16, element 16 + i in
    /// its high nibble), then cols / 32 half-precision scales. w = scale * (q - 8).
    Q4_0,
}

/// The number formats of a model's weights, by what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightTypes {
    /// q, k, v and o.
    pub attention: DType,
    /// gate, up and down.
    pub ffn: DType,
    /// Embedding and head, the most sensitive to rounding.
    pub embedding: DType,
}

impl WeightTypes {
    /// The same everywhere.
    #[must_use]
    pub fn all(dtype: DType) -> WeightTypes {
        WeightTypes { attention: dtype, ffn: dtype, embedding: dtype }
    }
}

/// Weights that share one scale in the quantised types.
pub const QUANT_GROUP: u32 = 32;

impl DType {
    /// Bytes of one row of `cols` weights. For quantised types `cols` is a multiple of [`QUANT_GROUP`].
    #[must_use]
    pub fn row_bytes(self, cols: u32) -> u64 {
        let cols = u64::from(cols);
        let scales = 2 * (cols / u64::from(QUANT_GROUP));
        match self {
            DType::F16 => 2 * cols,
            DType::Q8_0 => cols + scales,
            DType::Q4_0 => cols / 2 + scales,
        }
    }
}

/// Where a dense matrix lies. Row r starts at `offset + r * row_bytes`.
///
/// The matrix is cut into tiles of `tile_rows` rows (the last may have fewer), each with its own checksum. Where there
/// are several, a tile is a multiple of 64 bytes; the last is zero-padded to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatrixExtent {
    /// First byte in the file; a multiple of 64.
    pub offset: u64,
    /// Output width.
    pub rows: u32,
    /// Input width.
    pub cols: u32,
    /// Number format.
    pub dtype: DType,
    /// Rows of a tile, 1 ..= rows.
    pub tile_rows: u32,
    /// Id of the first tile; the others follow.
    pub first_block: BlockId,
}

/// Where one layer's FFN lies: blocks of `block_neurons` neurons (the last may hold fewer), one after another.
/// A neuron is its gate row, its up row and its down column, `hidden` weights each, side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FfnExtent {
    /// First byte in the file; a multiple of 64.
    pub offset: u64,
    /// Neurons in the layer.
    pub neurons: u32,
    /// Weights of each of the three rows of a neuron.
    pub hidden: u32,
    /// Number format of all three rows.
    pub dtype: DType,
    /// Neurons of a block, 1 ..= neurons.
    pub block_neurons: u32,
    /// Id of the first block; the others follow.
    pub first_block: BlockId,
}

/// All big weights of one layer, in the order of the file, which is the order of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerExtents {
    /// query_width x hidden.
    pub q_proj: MatrixExtent,
    /// kv_width x hidden.
    pub k_proj: MatrixExtent,
    /// kv_width x hidden.
    pub v_proj: MatrixExtent,
    /// hidden x query_width.
    pub o_proj: MatrixExtent,
    /// gate, up and down.
    pub ffn: FfnExtent,
}

/// Where every big weight lies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightMap {
    /// One entry a layer.
    pub layers: Vec<LayerExtents>,
    /// vocab_size x hidden; present when the head is not tied. Lies before `embedding`.
    pub head: Option<MatrixExtent>,
    /// vocab_size x hidden; the head too when tied. Last in the file.
    pub embedding: MatrixExtent,
}

/// The small vectors of one layer, in f32, always resident.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerVectors {
    /// RMSNorm gain before attention; hidden.
    pub attn_norm: Vec<f32>,
    /// RMSNorm gain before the FFN; hidden.
    pub mlp_norm: Vec<f32>,
    /// Biases of q, k, v (query_width, kv_width, kv_width); empty unless `qkv_bias`.
    pub q_bias: Vec<f32>,
    /// See `q_bias`.
    pub k_bias: Vec<f32>,
    /// See `q_bias`.
    pub v_bias: Vec<f32>,
    /// RMSNorm gain of each query head; head_dim; empty unless `qk_norm`.
    pub q_norm: Vec<f32>,
    /// RMSNorm gain of each key head; head_dim; empty unless `qk_norm`.
    pub k_norm: Vec<f32>,
}

/// All small vectors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Vectors {
    /// One entry a layer.
    pub layers: Vec<LayerVectors>,
    /// RMSNorm gain before the head; hidden.
    pub final_norm: Vec<f32>,
}
