//! [`Model`]: a model on disk, GGUF file or Hugging Face folder, brought to one form.

pub mod config;
pub mod forward;
pub mod gguf;
pub mod huggingface;
pub mod roles;
pub mod safetensors;
pub mod tokenizer;
pub mod weights;

use crate::error::{PrepError, Result};
use gguf::Gguf;
use huggingface::{Folder, MAX_CONFIG_BYTES};
use ls_bundle::model::{Architecture, LayerVectors, ModelConfig, Vectors};
use roles::{Naming, Part, Role};
use std::path::{Path, PathBuf};
use tokenizer::CanonicalTokenizer;
use weights::Weights;

/// A model whose configuration, tokenizer and tensor table are read and fit each other. Its weights are still on disk.
#[derive(Debug)]
pub struct Model {
    /// Shape and arithmetic.
    pub config: ModelConfig,
    /// Tokenizer, special tokens and chat template.
    pub tokenizer: CanonicalTokenizer,
    /// The tensors; exactly those that `config` asks for.
    pub weights: Weights,
    /// Every file that the model was read from, sorted.
    pub files: Vec<PathBuf>,
}

impl Model {
    /// Opens a GGUF file or a Hugging Face folder.
    pub fn open(path: &Path) -> Result<Model> {
        let metadata = std::fs::metadata(path).map_err(|source| PrepError::io(path, source))?;
        let mut model = if metadata.is_dir() { open_folder(path) } else { open_gguf(path) }?;
        model.config.special = model.tokenizer.special.clone();
        model.files.sort();
        Ok(model)
    }

    /// Reads the small vectors.
    pub fn vectors(&self) -> Result<Vectors> {
        let config = &self.config;
        let layer = |layer: u16| {
            let read = |part| self.weights.vector(Role::Layer(layer, part));
            let read_if = |wanted, part| if wanted { read(part) } else { Ok(Vec::new()) };
            Ok(LayerVectors {
                attn_norm: read(Part::AttnNorm)?,
                mlp_norm: read(Part::MlpNorm)?,
                q_bias: read_if(config.qkv_bias, Part::QueryBias)?,
                k_bias: read_if(config.qkv_bias, Part::KeyBias)?,
                v_bias: read_if(config.qkv_bias, Part::ValueBias)?,
                q_norm: read_if(config.qk_norm, Part::QueryNorm)?,
                k_norm: read_if(config.qk_norm, Part::KeyNorm)?,
            })
        };
        Ok(Vectors {
            layers: (0..config.layers).map(layer).collect::<Result<_>>()?,
            final_norm: self.weights.vector(Role::FinalNorm)?,
        })
    }
}

fn open_gguf(path: &Path) -> Result<Model> {
    let mut gguf = Gguf::open(path)?;
    let config = config::from_gguf(&gguf)?;
    let wanted = Role::all(&config);
    let tensors = std::mem::take(&mut gguf.tensors);
    // llama.cpp's converter reorders q and k of this family for its own rotary kernel.
    let interleaved = (config.architecture == Architecture::Llama).then_some(config.head_dim);
    let file = weights::SourceFile::open(path)?;
    let weights = Weights::new(vec![file], tensors, Naming::Gguf, interleaved);
    weights.check(&wanted, &["rope_freqs.weight"])?;
    let tokenizer = tokenizer::from_gguf(&gguf, config.vocab_size)?;
    Ok(Model { config, tokenizer, weights, files: vec![path.to_owned()] })
}

fn open_folder(path: &Path) -> Result<Model> {
    let mut folder = Folder::new(path);
    let text = folder.required("config.json", MAX_CONFIG_BYTES)?;
    let name = path.canonicalize().map_err(|source| PrepError::io(path, source))?;
    let name = name.file_name().unwrap_or_default().to_string_lossy();
    let config = config::from_config_json(&text, &name, &folder.place("config.json"))?;
    let (files, tensors) = folder.weights()?;
    let weights = Weights::new(files, tensors, Naming::HuggingFace, None);
    // Old files carry rotary tables, and some carry a head that is ignored because it is tied.
    let ignored: &[&str] =
        if config.tied_head { &[".inv_freq", "lm_head.weight"] } else { &[".inv_freq"] };
    weights.check(&Role::all(&config), ignored)?;
    let document = serde_json::from_slice(&text).expect("the configuration was read from it");
    let tokenizer = tokenizer::from_folder(&mut folder, &document, config.vocab_size)?;
    let shards = weights.files().iter().map(|file| file.path.clone());
    let files = folder.files_read().iter().cloned().chain(shards).collect();
    Ok(Model { config, tokenizer, weights, files })
}
