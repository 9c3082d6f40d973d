//! A Hugging Face folder as it is written: configuration, byte-level tokenizer, and weights that stream to disk.

use crate::error::{PrepError, Result};
use crate::model::roles::{Naming, Role};
use half::f16;
use half::slice::HalfFloatSliceExt;
use ls_bundle::model::{Architecture, ModelConfig};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// What ends a text, in [`tokenizer_json`].
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// Its token.
pub const END_OF_TEXT_ID: u32 = 256;

/// `config.json` of a model whose texts end with the token `eos`.
#[must_use]
pub fn config_json(config: &ModelConfig, eos: u32) -> Value {
    let class = match config.architecture {
        Architecture::Llama => "LlamaForCausalLM",
        Architecture::Mistral => "MistralForCausalLM",
        Architecture::Qwen2 => "Qwen2ForCausalLM",
        Architecture::Qwen3 => "Qwen3ForCausalLM",
    };
    let mut object = json!({
        "architectures": [class],
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn_hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_head,
        "eos_token_id": eos,
    });
    if let Some(window) = config.sliding_window {
        object["sliding_window"] = window.into();
    }
    object
}

/// Byte-level BPE without merges: token n is byte n, 256 ends a text, and those from 257 on are words that no text is
/// cut into but a model may say.
#[must_use]
pub fn tokenizer_json(vocab_size: u32) -> Value {
    let visible = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut vocab = Map::new();
    let mut invisible = 256;
    for byte in 0..=255u8 {
        let code = if visible(byte) {
            u32::from(byte)
        } else {
            invisible += 1;
            invisible - 1
        };
        let character = char::from_u32(code).expect("these are characters");
        vocab.insert(character.to_string(), byte.into());
    }
    vocab.insert(END_OF_TEXT.to_owned(), END_OF_TEXT_ID.into());
    // "Ġ" is the space of byte-level BPE.
    vocab.extend((END_OF_TEXT_ID + 1..vocab_size).map(|id| (format!("Ġw{id}"), id.into())));
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": END_OF_TEXT_ID, "content": END_OF_TEXT, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocab, "merges": [],
        },
    })
}

/// Writes JSON files into `folder`.
pub fn write_json(folder: &Path, files: &[(&str, &Value)]) -> Result<()> {
    for (name, value) in files {
        let path = folder.join(name);
        std::fs::write(&path, value.to_string()).map_err(|source| PrepError::io(&path, source))?;
    }
    Ok(())
}

/// Writes the half-precision tensors of a safetensors file one after another. The file has its name only when it is
/// complete.
#[derive(Debug)]
pub struct WeightsFile {
    path: PathBuf,
    unfinished: PathBuf,
    file: BufWriter<File>,
    /// Numbers that are still to come.
    left: u64,
}

impl WeightsFile {
    /// Begins the file at `path` with tensors of these roles and shapes.
    pub fn create(path: &Path, tensors: &[(Role, Vec<u32>)]) -> Result<WeightsFile> {
        let mut header = Map::new();
        let mut count = 0;
        for (role, shape) in tensors {
            let next = count + shape.iter().map(|&dim| u64::from(dim)).product::<u64>();
            let entry =
                json!({"dtype": "F16", "shape": shape, "data_offsets": [2 * count, 2 * next]});
            header.insert(role.name(Naming::HuggingFace), entry);
            count = next;
        }
        let mut header = Value::from(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let unfinished = path.with_extension("safetensors.part");
        let io = |source| PrepError::io(&unfinished, source);
        let file = File::create(&unfinished).map_err(io)?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        file.write_all(&(header.len() as u64).to_le_bytes()).map_err(io)?;
        file.write_all(&header).map_err(io)?;
        Ok(WeightsFile { path: path.to_owned(), unfinished, file, left: count })
    }

    /// Adds the next values, rounded to half precision.
    pub fn push(&mut self, values: &[f32]) -> Result<()> {
        self.left = self.left.checked_sub(values.len() as u64).expect("no more than announced");
        let mut halves = vec![f16::ZERO; values.len()];
        halves.convert_from_f32_slice(values);
        let bytes: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
        self.file.write_all(&bytes).map_err(|source| PrepError::io(&self.unfinished, source))
    }

    /// Gives the file its name.
    pub fn finish(mut self) -> Result<()> {
        assert_eq!(self.left, 0, "all that was announced has come");
        let io = |source| PrepError::io(&self.unfinished, source);
        self.file.flush().map_err(io)?;
        self.file.get_ref().sync_all().map_err(io)?;
        std::fs::rename(&self.unfinished, &self.path).map_err(io)
    }
}
