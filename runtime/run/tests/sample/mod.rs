//! A small bundle that can be talked to: bytes are its tokens, its weights come from a seed, so what it says is noise,
//! but always the same noise.

use ls_bundle::identity::Identity;
use ls_bundle::model::{
    Architecture, DType, LayerVectors, ModelConfig, RopeConfig, RopeScaling, SpecialTokens,
    Vectors, WeightTypes,
};
use ls_bundle::vocabulary::{TokenKind, Vocabulary};
use ls_bundle::{BundleParts, BundleWriter, plan_weights};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Marks that the template writes, behind the 256 bytes.
const MARKS: [&str; 2] = ["<|im_start|>", "<|im_end|>"];
const TEMPLATE: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Writes the bundle. Nothing ends its answers but their length.
pub(crate) fn write(path: &Path) {
    write_with(path, Some(TEMPLATE));
}

/// The same with another chat template, or none.
pub(crate) fn write_with(path: &Path, template: Option<&str>) {
    let model = ModelConfig {
        architecture: Architecture::Llama,
        name: "noise".into(),
        vocab_size: 256 + MARKS.len() as u32,
        hidden: 128,
        ffn_hidden: 384,
        layers: 3,
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        norm_epsilon: 1e-5,
        rope: RopeConfig { theta: 1e4, scaling: RopeScaling::None },
        context_length: 4096,
        sliding_window: None,
        tied_head: true,
        qkv_bias: false,
        qk_norm: false,
        special: SpecialTokens::default(),
    };
    let weights = plan_weights(&model, WeightTypes::all(DType::F16), 2).unwrap();
    let ones = vec![1.0; model.hidden as usize];
    let layer =
        LayerVectors { attn_norm: ones.clone(), mlp_norm: ones.clone(), ..LayerVectors::default() };
    let bytes = (0..=255u8).map(|byte| (vec![byte], TokenKind::Byte));
    let marks = MARKS.iter().map(|mark| (mark.as_bytes().to_vec(), TokenKind::Control));
    let parts = BundleParts {
        identity: Identity { source_hash: "0".repeat(64), ..Identity::default() },
        vectors: Vectors { layers: vec![layer; usize::from(model.layers)], final_norm: ones },
        tokenizer: tokenizer().to_string(),
        vocabulary: Vocabulary::new(bytes.chain(marks)).unwrap(),
        chat_template: template.map(str::to_owned),
        placement: None,
        tables: None,
        settings: None,
        weights,
        model,
    };
    let mut writer = BundleWriter::create(path, parts).unwrap();
    let mut state = 7u64;
    // Halves of either sign between 2^-4 and 2^-3.
    let mut half = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (0x2C00 | ((state >> 40) as u16 & 0x83FF)).to_le_bytes()
    };
    while let Some(block) = writer.next_block() {
        let bytes: Vec<u8> = (0..block.weight_bytes / 2).flat_map(|_| half()).collect();
        writer.write_block(&bytes).unwrap();
    }
    writer.finish().unwrap();
}

/// Byte-level BPE without merges.
fn tokenizer() -> Value {
    let mut vocab = Map::new();
    let mut invisible = 256;
    for byte in 0..=255u8 {
        let visible = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if visible { u32::from(byte) } else { invisible };
        invisible += u32::from(!visible);
        vocab.insert(char::from_u32(code).unwrap().to_string(), byte.into());
    }
    let mark = |(id, mark): (u32, &&str)| {
        json!({
            "id": id, "content": mark, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    vocab.extend((256u32..).zip(MARKS).map(|(id, mark)| (mark.to_owned(), id.into())));
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": (256..).zip(&MARKS).map(mark).collect::<Vec<_>>(),
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocab, "merges": [],
        },
    })
}
