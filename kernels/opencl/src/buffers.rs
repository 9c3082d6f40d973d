//! What a backend allocates: computed first, so that a plan can count it.

use crate::backend::OpenClOptions;
use crate::device::{Device, Memory};
use crate::error::Kind;
use crate::weights::{STAGING_BYTES, STAGINGS};
use ls_bundle::ids::ByteCount;
use ls_bundle::model::{LayerVectors, ModelConfig, Vectors};
use ls_compute::Shape;

/// Neurons whose activations prefill holds.
pub(crate) const ACTIVATION_NEURONS: usize = 2048;
/// Rows of the head whose logits are held for scores; a multiple of 64.
pub(crate) const SCORE_ROWS: usize = 4096;
/// Positions of a chunk of decode's attention; `CHUNK` of `cl/attention.cl`.
pub(crate) const KEY_CHUNK: usize = 64;
/// Sums of one token's FFN.
pub(crate) const FFN_LANES: usize = 16;
/// Sums of its stand-ins.
pub(crate) const STAND_IN_LANES: usize = 8;
/// Neurons of a launch that are in several places.
pub(crate) const MAX_LIST: usize = 4096;

/// Bytes of each buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    x: usize,
    q: usize,
    kv: usize,
    turns: usize,
    hidden: usize,
    neurons: usize,
    activations: usize,
    partials: usize,
    logits: usize,
    scored: usize,
    score_logits: usize,
    cache: usize,
    vectors: usize,
    rows: usize,
}

impl Plan {
    pub(crate) fn new(config: &ModelConfig, options: &OpenClOptions) -> Plan {
        let shape = Shape::of(config);
        let tokens = options.pass_tokens as usize;
        let scored = options.scored_tokens as usize;
        let chunks = (options.context as usize).div_ceil(KEY_CHUNK) + 1;
        let row = options.kv_cache.dtype().row_bytes(config.head_dim) as usize;
        let layer_vectors =
            2 * shape.hidden + 2 * shape.head_dim + shape.query_width + 2 * shape.kv_width;
        Plan {
            x: 4 * tokens * shape.hidden,
            q: 4 * tokens * shape.query_width,
            kv: 4 * tokens * shape.kv_width,
            turns: 4 * tokens * shape.head_dim,
            hidden: 4 * shape.hidden,
            neurons: 4 * shape.ffn,
            activations: 4 * tokens * ACTIVATION_NEURONS.min(shape.ffn.next_multiple_of(64)),
            partials: 4 * shape.heads * chunks * (shape.head_dim + 2),
            logits: 4 * shape.vocab,
            scored: 4 * scored,
            score_logits: 4 * scored * SCORE_ROWS.min(shape.vocab),
            cache: 2 * shape.layers * shape.kv_heads * options.context as usize * row,
            vectors: 4 * (shape.layers * layer_vectors + shape.hidden),
            rows: 2 * tokens * shape.hidden,
        }
    }

    /// Bytes on the device and bytes of the host.
    pub(crate) fn bytes(&self) -> (ByteCount, ByteCount) {
        let staging = STAGINGS * STAGING_BYTES;
        let device = 2 * self.x
            + self.q
            + 2 * self.kv
            + (FFN_LANES + STAND_IN_LANES + 2) * self.hidden
            + 4 * self.neurons
            + self.activations
            + self.partials
            + self.logits
            + 6 * self.scored
            + self.score_logits
            + self.cache
            + self.vectors
            + self.turns
            + self.rows
            + staging;
        let host = self.turns + self.rows + self.neurons + self.logits + 2 * self.scored + staging;
        (ByteCount(device as u64), ByteCount(host as u64))
    }
}

/// The buffers on the device; f32 but for the cache and for what is said.
#[derive(Debug)]
pub(crate) struct Buffers {
    /// Residual; pass_tokens x hidden.
    pub(crate) x: Memory,
    /// Normed residual; pass_tokens x hidden.
    pub(crate) h: Memory,
    /// Queries, then the attention's result; pass_tokens x query_width.
    pub(crate) q: Memory,
    /// Keys; pass_tokens x kv_width.
    pub(crate) k: Memory,
    /// Values; pass_tokens x kv_width.
    pub(crate) v: Memory,
    /// Decode's FFN sums; FFN_LANES x hidden.
    pub(crate) lanes: Memory,
    /// The sums of its stand-ins; STAND_IN_LANES x hidden.
    pub(crate) stand_ins: Memory,
    /// What is added with them; hidden.
    pub(crate) constant: Memory,
    /// hidden.
    pub(crate) feature: Memory,
    /// Estimated activations; ffn.
    pub(crate) estimates: Memory,
    /// Expected errors; ffn.
    pub(crate) scores: Memory,
    /// Decode's activations of one launch; ffn.
    pub(crate) neurons: Memory,
    /// ffn.
    pub(crate) importance: Memory,
    /// Prefill's SwiGLU; pass_tokens x ACTIVATION_NEURONS.
    pub(crate) activations: Memory,
    /// Decode's attention over chunks of keys.
    pub(crate) partials: Memory,
    /// vocab_size.
    pub(crate) logits: Memory,
    /// Negative log-likelihoods; scored_tokens.
    pub(crate) nll: Memory,
    /// Logits of the targets; scored_tokens.
    pub(crate) target_logits: Memory,
    /// `Total` of `cl/vectors.cl`; scored_tokens.
    pub(crate) totals: Memory,
    /// scored_tokens x SCORE_ROWS.
    pub(crate) score_logits: Memory,
    /// Keys and values of all layers.
    pub(crate) cache: Memory,
    /// Cosines and sines of the pass; pass_tokens x head_dim.
    pub(crate) turns: Memory,
    /// Rows of the embedding table as they are stored.
    pub(crate) rows: Memory,
    /// u32; scored_tokens.
    pub(crate) targets: Memory,
}

/// The host's: what the queue copies from, and results.
#[derive(Debug)]
pub(crate) struct HostBuffers {
    pub(crate) turns: Vec<f32>,
    pub(crate) rows: Vec<u8>,
    pub(crate) targets: Vec<u32>,
    pub(crate) logits: Vec<f32>,
    pub(crate) nll: Vec<f32>,
    pub(crate) scores: Vec<f32>,
}

impl Plan {
    pub(crate) fn allocate(&self, device: &Device) -> Result<(Buffers, HostBuffers), Kind> {
        let buffers = Buffers {
            x: device.memory(self.x)?,
            h: device.memory(self.x)?,
            q: device.memory(self.q)?,
            k: device.memory(self.kv)?,
            v: device.memory(self.kv)?,
            lanes: device.memory(FFN_LANES * self.hidden)?,
            stand_ins: device.memory(STAND_IN_LANES * self.hidden)?,
            constant: device.memory(self.hidden)?,
            feature: device.memory(self.hidden)?,
            estimates: device.memory(self.neurons)?,
            scores: device.memory(self.neurons)?,
            // A list may name neurons more than once.
            neurons: device.memory(self.neurons.max(4 * MAX_LIST))?,
            importance: device.memory(self.neurons)?,
            activations: device.memory(self.activations)?,
            partials: device.memory(self.partials)?,
            logits: device.memory(self.logits)?,
            nll: device.memory(self.scored)?,
            target_logits: device.memory(self.scored)?,
            totals: device.memory(3 * self.scored)?,
            score_logits: device.memory(self.score_logits)?,
            cache: device.memory(self.cache)?,
            turns: device.memory(self.turns)?,
            rows: device.memory(self.rows)?,
            targets: device.memory(self.scored)?,
        };
        let host = HostBuffers {
            turns: vec![0.0; self.turns / 4],
            rows: vec![0; self.rows],
            targets: vec![0; self.scored / 4],
            logits: vec![0.0; self.logits / 4],
            nll: vec![0.0; self.scored / 4],
            scores: vec![0.0; self.neurons / 4],
        };
        Ok((buffers, host))
    }
}

/// The small vectors on the device, one behind the other.
#[derive(Debug)]
pub(crate) struct DeviceVectors {
    pub(crate) memory: Memory,
    /// One a layer.
    pub(crate) layers: Vec<LayerPlaces>,
    pub(crate) final_norm: u32,
}

/// Where a layer's vectors begin, in numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerPlaces {
    pub(crate) attn_norm: u32,
    pub(crate) mlp_norm: u32,
    /// `Places` of `cl/attention.cl`: biases of q, k, v, norms of q and k.
    pub(crate) attention: [u32; 5],
}

/// There is no such vector; `NONE` of `cl/attention.cl`.
const NONE: u32 = u32::MAX;

impl DeviceVectors {
    /// Copies all vectors; an error if they do not have the lengths that the model says.
    pub(crate) fn new(
        device: &Device,
        config: &ModelConfig,
        vectors: &Vectors,
    ) -> Result<DeviceVectors, Kind> {
        let mut all = Vec::new();
        let mut put = |name: &str, vector: &[f32], wanted: u32| {
            if vector.len() != wanted as usize {
                let found = vector.len();
                return Err(Kind::Vectors(format!("{name} has {found} elements, not {wanted}")));
            }
            let at = if wanted == 0 { NONE } else { all.len() as u32 };
            all.extend_from_slice(vector);
            Ok(at)
        };
        if vectors.layers.len() != usize::from(config.layers) {
            let count = vectors.layers.len();
            return Err(Kind::Vectors(format!("there are {count} layers of them")));
        }
        let given = |is_there: bool, len: u32| if is_there { len } else { 0 };
        let (bias, norm) = (config.qkv_bias, config.qk_norm);
        let mut layers = Vec::new();
        for vectors in &vectors.layers {
            let LayerVectors { attn_norm, mlp_norm, q_bias, k_bias, v_bias, q_norm, k_norm } =
                vectors;
            layers.push(LayerPlaces {
                attn_norm: put("attn_norm", attn_norm, config.hidden)?,
                mlp_norm: put("mlp_norm", mlp_norm, config.hidden)?,
                attention: [
                    put("q_bias", q_bias, given(bias, config.query_width()))?,
                    put("k_bias", k_bias, given(bias, config.kv_width()))?,
                    put("v_bias", v_bias, given(bias, config.kv_width()))?,
                    put("q_norm", q_norm, given(norm, config.head_dim))?,
                    put("k_norm", k_norm, given(norm, config.head_dim))?,
                ],
            });
        }
        let final_norm = put("final_norm", &vectors.final_norm, config.hidden)?;
        let memory = device.memory(4 * all.len())?;
        memory.write(0, bytemuck::cast_slice(&all))?;
        Ok(DeviceVectors { memory, layers, final_norm })
    }
}
