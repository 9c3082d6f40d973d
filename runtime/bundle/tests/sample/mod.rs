//! Small bundles for tests, made from a seed.

use ls_bundle::identity::Identity;
use ls_bundle::ids::{LayerId, NeuronId};
use ls_bundle::model::{
    Architecture, DType, LayerVectors, ModelConfig, RopeConfig, RopeScaling, SpecialTokens,
    Vectors, WeightTypes,
};
use ls_bundle::placement::Placement;
use ls_bundle::tables::{Settings, TableKind, TableMap};
use ls_bundle::vocabulary::{TokenKind, Vocabulary};
use ls_bundle::{BundleError, BundleParts, BundleWriter, plan_weights};
use std::path::Path;

/// A small model with all there is: odd widths, a head of its own, biases, norms.
pub(crate) fn tiny_model() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Qwen3,
        name: "tiny".into(),
        vocab_size: 70,
        hidden: 10,
        ffn_hidden: 7,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 2,
        norm_epsilon: 1e-5,
        rope: RopeConfig {
            theta: 10_000.0,
            scaling: RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_context: 64,
            },
        },
        context_length: 128,
        sliding_window: Some(32),
        tied_head: false,
        qkv_bias: true,
        qk_norm: true,
        special: SpecialTokens { bos: Some(1), add_bos: true, stop: vec![2, 3] },
    }
}

pub(crate) fn tiny_parts() -> BundleParts {
    parts(tiny_model(), DType::F16, DType::F16, 2, 7)
}

/// Parts around `model`, with contents from `seed`. Optional parts are there when the seed is odd.
pub(crate) fn parts(
    model: ModelConfig,
    dense: DType,
    ffn: DType,
    block_neurons: u32,
    seed: u64,
) -> BundleParts {
    let mut random = Random(seed);
    let types = WeightTypes { attention: dense, ffn, embedding: dense };
    let weights = plan_weights(&model, types, block_neurons).unwrap();
    let biases = |width| if model.qkv_bias { width } else { 0 };
    let norms = if model.qk_norm { model.head_dim } else { 0 };
    let layers = (0..model.layers).map(|_| LayerVectors {
        attn_norm: random.floats(model.hidden),
        mlp_norm: random.floats(model.hidden),
        q_bias: random.floats(biases(model.query_width())),
        k_bias: random.floats(biases(model.kv_width())),
        v_bias: random.floats(biases(model.kv_width())),
        q_norm: random.floats(norms),
        k_norm: random.floats(norms),
    });
    let vectors = Vectors { layers: layers.collect(), final_norm: random.floats(model.hidden) };
    let order = |layer: u16| {
        (0..model.ffn_hidden).map(move |n| NeuronId((n + u32::from(layer)) % model.ffn_hidden))
    };
    let optional = !seed.is_multiple_of(2);
    BundleParts {
        identity: Identity {
            tool: "sample 1".into(),
            source: "none".into(),
            source_hash: "0123456789abcdef".repeat(4),
            seed,
            recipe: "[pack]\nblock_neurons = 2\n".into(),
        },
        weights,
        vectors,
        tokenizer: r#"{"version":"1.0"}"#.into(),
        vocabulary: vocabulary(model.vocab_size.min(67)),
        chat_template: optional.then(|| "{{ messages }}".into()),
        placement: optional
            .then(|| Placement::new(model.ffn_hidden, (0..model.layers).flat_map(order).collect())),
        tables: None,
        settings: None,
        model,
    }
}

/// The smallest bundle with all there is.
pub(crate) fn learned_parts() -> BundleParts {
    learned(tiny_parts(), 300)
}

/// The same parts with what was learned, a base of `base_bytes`: a bundle of version 2.
pub(crate) fn learned(parts: BundleParts, base_bytes: u64) -> BundleParts {
    let lens = [
        (LayerId(0), TableKind::Predictor, 100),
        (LayerId(0), TableKind::Base, base_bytes),
        (LayerId(1), TableKind::BaseScores, 64),
        (LayerId(1), TableKind::Reuse, 1),
    ];
    let settings = Settings {
        exact_share: 0.2,
        perplexity: 31.0,
        dense_perplexity: 30.0,
        eval_tokens: 65_536,
    };
    let tables = Some(TableMap::behind(&parts.weights, &lens));
    BundleParts { tables, settings: Some(settings), ..parts }
}

fn vocabulary(len: u32) -> Vocabulary {
    let piece = |id: u32| match id {
        0..4 => (format!("<{id}>").into_bytes(), TokenKind::Control),
        4..8 => (vec![0xF0 + id as u8], TokenKind::Byte),
        8 => (Vec::new(), TokenKind::Unused),
        _ => (format!(" w{id}").into_bytes(), TokenKind::Normal),
    };
    Vocabulary::new((0..len).map(piece)).unwrap()
}

/// Writes a bundle of these parts with blocks from `seed`, and returns the blocks as they should lie in Data.
pub(crate) fn write(path: &Path, parts: BundleParts, seed: u64) -> Result<Vec<u8>, BundleError> {
    let mut random = Random(seed);
    let mut writer = BundleWriter::create(path, parts)?;
    let mut data = Vec::new();
    while let Some(block) = writer.next_block() {
        let bytes: Vec<u8> = (0..block.weight_bytes).map(|_| random.next() as u8 | 1).collect();
        writer.write_block(&bytes)?;
        data.extend_from_slice(&bytes);
        data.resize(data.len() + (block.extent.len - block.weight_bytes) as usize, 0);
    }
    writer.finish()?;
    Ok(data)
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn floats(&mut self, len: u32) -> Vec<f32> {
        (0..len).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32 - 0.5).collect()
    }
}
