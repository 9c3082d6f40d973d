//! What a backend allocates on the device, and pinned on the host: computed first, so that a plan can count it.

use crate::backend::CudaOptions;
use crate::device::{Device, Mapped, Memory};
use crate::error::Kind;
use crate::stages::StagedMlp;
use crate::weights::STAGING_BYTES;
use ls_bundle::ids::ByteCount;
use ls_bundle::model::{LayerVectors, ModelConfig, Vectors};
use ls_compute::Shape;

/// Neurons whose activations prefill holds.
pub(crate) const ACTIVATION_NEURONS: usize = 2048;
/// Rows of the head whose logits are held for scores; a multiple of 64.
pub(crate) const SCORE_ROWS: usize = 4096;
/// Positions of a chunk of decode's attention.
pub(crate) const KEY_CHUNK: usize = 64;
/// Most sums of the FFN: two groups on each of so many multiprocessors.
const MOST_LANES: usize = 2 * 160;

/// Bytes of each buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    x: usize,
    q: usize,
    kv: usize,
    turns: usize,
    lanes: usize,
    stand_ins: usize,
    neurons: usize,
    activations: usize,
    partials: usize,
    logits: usize,
    scored: usize,
    score_logits: usize,
    cache: usize,
    vectors: usize,
    rows: usize,
    /// Of the kernel that is fed while it runs: on the device, and pinned.
    staged: (usize, usize),
}

impl Plan {
    pub(crate) fn new(config: &ModelConfig, options: &CudaOptions) -> Plan {
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
            lanes: 4 * MOST_LANES * shape.hidden,
            stand_ins: 4 * shape.hidden,
            neurons: 4 * shape.ffn,
            activations: 4 * tokens * ACTIVATION_NEURONS.min(shape.ffn.next_multiple_of(64)),
            partials: 4 * shape.heads * chunks * (shape.head_dim + 2),
            logits: 4 * shape.vocab,
            scored: 4 * scored,
            score_logits: 4 * scored * SCORE_ROWS.min(shape.vocab),
            cache: 2 * shape.layers * shape.kv_heads * options.context as usize * row,
            vectors: 4 * (shape.layers * layer_vectors + shape.hidden),
            rows: 2 * tokens * shape.hidden,
            staged: match options.staged {
                true => StagedMlp::memory(shape.hidden, MOST_LANES / 2),
                false => (0, 0),
            },
        }
    }

    /// Bytes on the device and bytes pinned on the host.
    pub(crate) fn bytes(&self) -> (ByteCount, ByteCount) {
        let device = 2 * self.x
            + self.q
            + 2 * self.kv
            + self.lanes
            + self.stand_ins
            + 2 * self.neurons
            + self.activations
            + self.partials
            + self.logits
            + 7 * self.scored
            + self.score_logits
            + self.cache
            + self.vectors
            + self.stand_ins
            + self.staged.0
            + 2 * STAGING_BYTES;
        let host = self.turns
            + 2 * self.neurons
            + self.stand_ins
            + self.logits
            + 2 * self.scored
            + self.rows
            + self.staged.1
            + 2 * STAGING_BYTES;
        (ByteCount(device as u64), ByteCount(host as u64))
    }
}

/// The buffers; f32 but for the cache and for what is said.
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
    /// Decode's FFN sums; lanes x hidden.
    pub(crate) lanes: Memory,
    /// The sums of its stand-ins; hidden.
    pub(crate) stand_ins: Memory,
    /// What is added with them; hidden.
    pub(crate) constant: Memory,
    /// Estimated activations; ffn.
    pub(crate) estimates: Memory,
    /// Expected errors; ffn.
    pub(crate) scores: Memory,
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
    /// Maximum and sum of exponentials, f64; scored_tokens.
    pub(crate) sums: Memory,
    /// scored_tokens x SCORE_ROWS.
    pub(crate) score_logits: Memory,
    /// Keys and values of all layers.
    pub(crate) cache: Memory,
    /// Cosines and sines of the pass; pass_tokens x head_dim; pinned, read in place.
    pub(crate) turns: Mapped,
    /// Rows of the embedding table as they are stored; pinned, read in place.
    pub(crate) rows: Mapped,
    /// u32; pinned, read in place.
    pub(crate) targets: Mapped,
    /// Results, pinned.
    pub(crate) host_logits: Mapped,
    pub(crate) host_nll: Mapped,
    pub(crate) host_scores: Mapped,
    /// hidden; written by the device.
    pub(crate) host_feature: Mapped,
    /// ffn; written by the device.
    pub(crate) host_importance: Mapped,
}

impl Plan {
    pub(crate) fn allocate(&self, device: &Device, hidden: usize) -> Result<Buffers, Kind> {
        Ok(Buffers {
            x: device.memory(self.x)?,
            h: device.memory(self.x)?,
            q: device.memory(self.q)?,
            k: device.memory(self.kv)?,
            v: device.memory(self.kv)?,
            lanes: device.memory(self.lanes)?,
            stand_ins: device.memory(self.stand_ins)?,
            constant: device.memory(4 * hidden)?,
            estimates: device.memory(self.neurons)?,
            scores: device.memory(self.neurons)?,
            activations: device.memory(self.activations)?,
            partials: device.memory(self.partials)?,
            logits: device.memory(self.logits)?,
            nll: device.memory(self.scored)?,
            target_logits: device.memory(self.scored)?,
            sums: device.memory(4 * self.scored)?,
            score_logits: device.memory(self.score_logits)?,
            cache: device.memory(self.cache)?,
            turns: device.mapped(self.turns)?,
            rows: device.mapped(self.rows)?,
            targets: device.mapped(self.scored)?,
            host_logits: device.mapped(self.logits)?,
            host_nll: device.mapped(self.scored)?,
            host_scores: device.mapped(self.neurons)?,
            host_feature: device.mapped(4 * hidden)?,
            host_importance: device.mapped(self.neurons)?,
        })
    }
}

/// The small vectors on the device.
#[derive(Debug)]
pub(crate) struct DeviceVectors {
    _memory: Memory,
    /// One a layer.
    pub(crate) layers: Vec<LayerAddresses>,
    pub(crate) final_norm: u64,
}

/// Addresses of a layer's vectors; 0: there is none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerAddresses {
    pub(crate) attn_norm: u64,
    pub(crate) mlp_norm: u64,
    pub(crate) q_bias: u64,
    pub(crate) k_bias: u64,
    pub(crate) v_bias: u64,
    pub(crate) q_norm: u64,
    pub(crate) k_norm: u64,
}

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
            let at = if wanted == 0 { None } else { Some(4 * all.len() as u64) };
            all.extend_from_slice(vector);
            Ok(at)
        };
        if vectors.layers.len() != usize::from(config.layers) {
            return Err(Kind::Vectors(format!(
                "there are {} layers of them",
                vectors.layers.len()
            )));
        }
        let given = |is_there: bool, len: u32| if is_there { len } else { 0 };
        let (bias, norm) = (config.qkv_bias, config.qk_norm);
        let mut places = Vec::new();
        for vectors in &vectors.layers {
            let LayerVectors { attn_norm, mlp_norm, q_bias, k_bias, v_bias, q_norm, k_norm } =
                vectors;
            places.push([
                put("attn_norm", attn_norm, config.hidden)?,
                put("mlp_norm", mlp_norm, config.hidden)?,
                put("q_bias", q_bias, given(bias, config.query_width()))?,
                put("k_bias", k_bias, given(bias, config.kv_width()))?,
                put("v_bias", v_bias, given(bias, config.kv_width()))?,
                put("q_norm", q_norm, given(norm, config.head_dim))?,
                put("k_norm", k_norm, given(norm, config.head_dim))?,
            ]);
        }
        let final_norm = put("final_norm", &vectors.final_norm, config.hidden)?;
        let memory = device.memory(4 * all.len())?;
        memory.write(0, bytemuck::cast_slice(&all))?;
        let address = |place: Option<u64>| place.map_or(0, |at| memory.address() + at);
        let layers = places.into_iter().map(|places| {
            let [attn_norm, mlp_norm, q_bias, k_bias, v_bias, q_norm, k_norm] = places.map(address);
            LayerAddresses { attn_norm, mlp_norm, q_bias, k_bias, v_bias, q_norm, k_norm }
        });
        let layers = layers.collect();
        Ok(DeviceVectors { final_norm: address(final_norm), layers, _memory: memory })
    }
}
