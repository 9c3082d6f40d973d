//! Models as others publish them.

use crate::target::{Scratch, Target};
use ls_bundle::model::{ModelConfig, SpecialTokens};
use ls_engine::tokenizer::Tokenizer;
use ls_prep::model::gguf::Gguf;
use ls_prep::model::huggingface::Folder;
use ls_prep::model::roles::{Naming, Role};
use ls_prep::model::safetensors::read_header;
use ls_prep::model::weights::{SourceFile, StoredTensor, Weights};
use ls_prep::model::{config, tokenizer};
use std::collections::BTreeMap;

/// Tokens that a tokenizer's model has; those of the corpus have fewer.
const VOCAB_SIZE: u32 = 400;
/// Zeros that stand for tensor data, at most. They take no room: the file has holes.
const MAX_ZEROS: u64 = 1 << 26;

/// The last four bytes say how many zeros follow as tensor data.
pub(crate) const GGUF: Target =
    Target::new("gguf", "headers of GGUF files, and small vectors behind them", |folder| {
        let file = Scratch::new(folder, "model.gguf");
        Box::new(move |bytes| {
            let (header, zeros) = split_zeros(bytes);
            file.put(header, zeros);
            let Ok(mut gguf) = Gguf::open(&file.path) else { return };
            let Ok(config) = config::from_gguf(&gguf) else { return };
            let tensors = std::mem::take(&mut gguf.tensors);
            read_vectors(&config, vec![gguf.file], tensors, Naming::Gguf);
        })
    });

/// The same for a file of tensors alone, which belongs to the model of [`CONFIG`]'s first input.
pub(crate) const SAFETENSORS: Target = Target {
    words: &[
        "\"dtype\":",
        "\"F16\"",
        "\"BF16\"",
        "\"F32\"",
        "\"I64\"",
        "\"F8_E4M3\"",
        "\"shape\":",
        "\"data_offsets\":",
        "[0,0]",
        "[-1]",
        "[18446744073709551615]",
        "[4294967296,4294967296]",
        "[[",
        "{",
        "}",
        "\"__metadata__\":{",
        "null",
        "\"\"",
        "\"\\u0000\"",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
    seal: seal_length,
    ..Target::new("safetensors", "headers of safetensors files", |folder| {
        let file = Scratch::new(folder, "model.safetensors");
        Box::new(move |bytes| {
            let (header, zeros) = split_zeros(bytes);
            file.put(header, zeros);
            let Ok(source) = SourceFile::open(&file.path) else { return };
            let Ok(tensors) = read_header(&source, 0) else { return };
            for (_, tensor) in tensors.iter().filter(|(_, tensor)| tensor.shape.len() == 1) {
                let mut first = [0; 2];
                source.read_at(tensor.offset, &mut first).expect("checked to lie in the file");
            }
        })
    })
};

/// The folder has the files that it names, empty.
pub(crate) const INDEX: Target = Target {
    words: &[
        "weight_map",
        "metadata",
        "..",
        "../",
        "/etc/passwd",
        "\\",
        "\\u0000",
        ".safetensors",
        "model.safetensors",
        "null",
        "{}",
        "[[",
        "\"\"",
        "CON",
        "%2e%2e",
        "~",
    ],
    ..Target::new("index", "indices of sharded models", |folder| {
        let file = Scratch::new(folder, "model.safetensors.index.json");
        let folder = folder.to_owned();
        Box::new(move |bytes| {
            file.put(bytes, 0);
            let _ = Folder::new(&folder).weights();
        })
    })
};

pub(crate) const CONFIG: Target = Target {
    words: &[
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "architectures",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "head_dim",
        "rope_theta",
        "rope_scaling",
        "rope_type",
        "linear",
        "llama3",
        "yarn",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "max_position_embeddings",
        "sliding_window",
        "use_sliding_window",
        "rms_norm_eps",
        "tie_word_embeddings",
        "vocab_size",
        "attention_bias",
        "quantization_config",
        "null",
        "true",
        "false",
        "{}",
        "[[",
        "1e999",
        "4294967296",
        "-1",
        "0",
        "\"\"",
    ],
    ..Target::new("config", "config.json, and what its model would be made of", |_| {
        Box::new(|bytes| {
            let Ok(config) = config::from_config_json(bytes, "model", "config.json") else {
                return;
            };
            let wanted = Role::all(&config);
            assert!(wanted.len() > usize::from(config.layers), "every layer has weights");
        })
    })
};

/// As [`GGUF`], with whole vocabularies.
pub(crate) const GGUF_TOKENIZER: Target =
    Target::new("gguf-tokenizer", "vocabularies of GGUF files", |folder| {
        let file = Scratch::new(folder, "model.gguf");
        Box::new(move |bytes| {
            let (header, zeros) = split_zeros(bytes);
            file.put(header, zeros);
            let Ok(gguf) = Gguf::open(&file.path) else { return };
            let _ = tokenizer::from_gguf(&gguf, VOCAB_SIZE);
        })
    });

pub(crate) const TOKENIZER: Target = Target {
    words: &[
        "null",
        "{}",
        "[]",
        "[[",
        "\"\"",
        "BPE",
        "Unigram",
        "ByteLevel",
        "ByteFallback",
        "Metaspace",
        "Digits",
        "Split",
        "Replace",
        "Strip",
        "Fuse",
        "Sequence",
        "Prepend",
        "NFC",
        "Regex",
        "pattern",
        "(a|a)*$",
        "(?:a{1000}){1000}",
        "[[:alpha:]]{99999}",
        "(?=.*)*",
        "\\\\p{L}+",
        "content",
        "added_tokens",
        "id",
        "special",
        "merges",
        "vocab",
        "byte_fallback",
        "unk_token",
        "dropout",
        "ignore_merges",
        "add_prefix_space",
        "individual_digits",
        "normalizers",
        "pretokenizers",
        "decoders",
        "4294967295",
        "4294967296",
        "-1",
        "true",
        "false",
        "post_processor",
        "truncation",
        "padding",
        "\\u0120",
        "\\ud800",
    ],
    ..Target::new("tokenizer", "tokenizer.json", |folder| {
        let file = Scratch::new(folder, "tokenizer.json");
        let folder = folder.to_owned();
        let config = serde_json::json!({ "bos_token_id": 1, "eos_token_id": [2] });
        Box::new(move |bytes| {
            file.put(bytes, 0);
            let _ = tokenizer::from_folder(&mut Folder::new(&folder), &config, VOCAB_SIZE);
        })
    })
};

/// A bundle's own tokenizer is read as it is.
pub(crate) const PROMPT: Target = Target {
    words: TOKENIZER.words,
    ..Target::new("prompt", "tokenizers of bundles, and prompts for them", |_| {
        Box::new(|bytes| {
            let text = String::from_utf8_lossy(bytes);
            let Ok(tokenizer) = Tokenizer::new(&text, SpecialTokens::default()) else { return };
            let _ = tokenizer.encode("What is a tide? 12345 caf\u{e9} <|im_end|>\n", true);
        })
    })
};

/// A header and the number of zeros behind it.
fn split_zeros(bytes: &[u8]) -> (&[u8], u64) {
    match bytes.split_last_chunk::<4>() {
        Some((header, zeros)) => (header, u64::from(u32::from_le_bytes(*zeros)).min(MAX_ZEROS)),
        None => (bytes, 0),
    }
}

/// Reads every vector of a model whose tensors are all there.
fn read_vectors(
    config: &ModelConfig,
    files: Vec<SourceFile>,
    tensors: BTreeMap<String, StoredTensor>,
    naming: Naming,
) {
    let weights = Weights::new(files, tensors, naming, Some(config.head_dim));
    let wanted = Role::all(config);
    if weights.check(&wanted, &[]).is_ok() {
        for (role, shape) in wanted {
            match shape[..] {
                [_] => drop(weights.vector(role)),
                _ => drop(weights.rows(role).row(0).map(<[f32]>::len)),
            }
        }
    }
}

/// The length of a safetensors file's header, if its end can be told.
fn seal_length(bytes: &mut [u8]) {
    let end = bytes.len().saturating_sub(4);
    if let Some(json) = bytes.get(8..end) {
        let len = (json.len() as u64).to_le_bytes();
        bytes[..8].copy_from_slice(&len);
    }
}
