//! [`Role`]: what a tensor is for, and what each format calls it.

use ls_bundle::model::ModelConfig;

/// Who named the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// llama.cpp's converter.
    Gguf,
    /// Hugging Face transformers.
    HuggingFace,
}

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// vocab x hidden.
    Embedding,
    /// vocab x hidden.
    Head,
    /// hidden.
    FinalNorm,
    /// A part of one layer.
    Layer(u16, Part),
}

/// A tensor of a layer. Shapes as in [`ls_bundle::model`]; `Down` is hidden x neurons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Part {
    AttnNorm,
    Query,
    Key,
    Value,
    Output,
    QueryBias,
    KeyBias,
    ValueBias,
    QueryNorm,
    KeyNorm,
    MlpNorm,
    Gate,
    Up,
    Down,
}

impl Part {
    /// The name inside a layer: llama.cpp's and transformers'.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Part::AttnNorm => ("attn_norm.weight", "input_layernorm.weight"),
            Part::Query => ("attn_q.weight", "self_attn.q_proj.weight"),
            Part::Key => ("attn_k.weight", "self_attn.k_proj.weight"),
            Part::Value => ("attn_v.weight", "self_attn.v_proj.weight"),
            Part::Output => ("attn_output.weight", "self_attn.o_proj.weight"),
            Part::QueryBias => ("attn_q.bias", "self_attn.q_proj.bias"),
            Part::KeyBias => ("attn_k.bias", "self_attn.k_proj.bias"),
            Part::ValueBias => ("attn_v.bias", "self_attn.v_proj.bias"),
            Part::QueryNorm => ("attn_q_norm.weight", "self_attn.q_norm.weight"),
            Part::KeyNorm => ("attn_k_norm.weight", "self_attn.k_norm.weight"),
            Part::MlpNorm => ("ffn_norm.weight", "post_attention_layernorm.weight"),
            Part::Gate => ("ffn_gate.weight", "mlp.gate_proj.weight"),
            Part::Up => ("ffn_up.weight", "mlp.up_proj.weight"),
            Part::Down => ("ffn_down.weight", "mlp.down_proj.weight"),
        }
    }

    fn shape(self, config: &ModelConfig) -> Vec<u32> {
        let (hidden, query, kv) = (config.hidden, config.query_width(), config.kv_width());
        match self {
            Part::AttnNorm | Part::MlpNorm => vec![hidden],
            Part::Query => vec![query, hidden],
            Part::Key | Part::Value => vec![kv, hidden],
            Part::Output => vec![hidden, query],
            Part::QueryBias => vec![query],
            Part::KeyBias | Part::ValueBias => vec![kv],
            Part::QueryNorm | Part::KeyNorm => vec![config.head_dim],
            Part::Gate | Part::Up => vec![config.ffn_hidden, hidden],
            Part::Down => vec![hidden, config.ffn_hidden],
        }
    }
}

impl Role {
    /// The tensor's name in a file.
    #[must_use]
    pub fn name(self, naming: Naming) -> String {
        match (self, naming) {
            (Role::Embedding, Naming::Gguf) => "token_embd.weight".to_owned(),
            (Role::Embedding, Naming::HuggingFace) => "model.embed_tokens.weight".to_owned(),
            (Role::Head, Naming::Gguf) => "output.weight".to_owned(),
            (Role::Head, Naming::HuggingFace) => "lm_head.weight".to_owned(),
            (Role::FinalNorm, Naming::Gguf) => "output_norm.weight".to_owned(),
            (Role::FinalNorm, Naming::HuggingFace) => "model.norm.weight".to_owned(),
            (Role::Layer(layer, part), Naming::Gguf) => format!("blk.{layer}.{}", part.names().0),
            (Role::Layer(layer, part), Naming::HuggingFace) => {
                format!("model.layers.{layer}.{}", part.names().1)
            }
        }
    }

    /// Every tensor that a model of this configuration has, with its shape.
    #[must_use]
    pub fn all(config: &ModelConfig) -> Vec<(Role, Vec<u32>)> {
        use Part::*;
        let mut roles = vec![
            (Role::Embedding, vec![config.vocab_size, config.hidden]),
            (Role::FinalNorm, vec![config.hidden]),
        ];
        if !config.tied_head {
            roles.push((Role::Head, vec![config.vocab_size, config.hidden]));
        }
        let mut parts = vec![AttnNorm, Query, Key, Value, Output, MlpNorm, Gate, Up, Down];
        if config.qkv_bias {
            parts.extend([QueryBias, KeyBias, ValueBias]);
        }
        if config.qk_norm {
            parts.extend([QueryNorm, KeyNorm]);
        }
        for layer in 0..config.layers {
            roles.extend(parts.iter().map(|&part| (Role::Layer(layer, part), part.shape(config))));
        }
        roles
    }
}
