//! [`ModelConfig`] from what a file says about its model, in either format.
//!
//! Only arithmetic that the runtime has is let through. Anything else that would change a result (experts, partial or
//! YaRN rotary positions, soft caps, other activations) is "unsupported", never ignored.

mod gguf;
mod huggingface;

pub use gguf::from_gguf;
pub use huggingface::from_config_json;

use crate::error::{PrepError, Result};
use ls_bundle::limits::{
    MAX_CONTEXT, MAX_FFN_HIDDEN, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_LAYERS, MAX_NAME_BYTES,
    MAX_VOCAB,
};
use ls_bundle::model::{ModelConfig, RopeScaling};

/// Checks what both formats must give: numbers in range, and heads that fit each other. Zero is nonsense (corrupt);
/// a size above the bundle's limits is real but too big (unsupported).
fn check(config: &ModelConfig, place: &str) -> Result<()> {
    let sizes = [
        ("vocabulary size", config.vocab_size, MAX_VOCAB),
        ("hidden size", config.hidden, MAX_HIDDEN),
        ("FFN size", config.ffn_hidden, MAX_FFN_HIDDEN),
        ("number of layers", u32::from(config.layers), u32::from(MAX_LAYERS)),
        ("number of heads", config.heads, MAX_HEADS),
        ("number of key-value heads", config.kv_heads, MAX_HEADS),
        ("head dimension", config.head_dim, MAX_HEAD_DIM),
        ("context length", config.context_length, MAX_CONTEXT),
        ("sliding window", config.sliding_window.unwrap_or(1), u32::MAX),
    ];
    for (name, size, limit) in sizes {
        if size == 0 {
            return Err(PrepError::corrupt(place, format!("the {name} is 0")));
        }
        if size > limit {
            return Err(PrepError::unsupported(format!(
                "a {name} of {size} (limit {limit}; {place})"
            )));
        }
    }
    if !config.heads.is_multiple_of(config.kv_heads) {
        let (heads, kv_heads) = (config.heads, config.kv_heads);
        return Err(PrepError::corrupt(
            place,
            format!("{heads} heads cannot share {kv_heads} key-value heads evenly"),
        ));
    }
    if !config.head_dim.is_multiple_of(2) {
        let head_dim = config.head_dim;
        return Err(PrepError::unsupported(format!("an odd head dimension, {head_dim} ({place})")));
    }
    let mut positive =
        vec![("RMSNorm epsilon", config.norm_epsilon), ("rotary base", config.rope.theta)];
    match config.rope.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => positive.push(("rotary factor", factor)),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            positive.extend([
                ("rotary factor", factor),
                ("low frequency factor", low_freq_factor),
                ("high frequency factor less the low one", high_freq_factor - low_freq_factor),
                ("original context", original_context as f32),
            ]);
        }
    }
    for (name, value) in positive {
        if !(value.is_finite() && value > 0.0) {
            return Err(PrepError::corrupt(
                place,
                format!("the {name} is {value}; wanted more than 0"),
            ));
        }
    }
    Ok(())
}

/// A name for people: never empty, cut at the bundle's limit.
fn display_name(name: &str, otherwise: &str) -> String {
    let name = if name.trim().is_empty() { otherwise } else { name.trim() };
    name[..name.floor_char_boundary(MAX_NAME_BYTES)].to_owned()
}

/// What Llama 3 divides the rotary frequency number `index` of `head_dim / 2` by.
fn llama3_divisor(index: u32, head_dim: u32, theta: f32, scaling: &Llama3) -> f32 {
    let frequency = f64::from(theta).powf(-2.0 * f64::from(index) / f64::from(head_dim));
    let wave = std::f64::consts::TAU / frequency;
    let original = f64::from(scaling.original_context);
    let (low, high) = (f64::from(scaling.low_freq_factor), f64::from(scaling.high_freq_factor));
    let factor = f64::from(scaling.factor);
    let kept = ((original / wave - low) / (high - low)).clamp(0.0, 1.0);
    (1.0 / (kept + (1.0 - kept) / factor)) as f32
}

/// The fields of [`RopeScaling::Llama3`].
struct Llama3 {
    factor: f32,
    low_freq_factor: f32,
    high_freq_factor: f32,
    original_context: u32,
}

impl From<Llama3> for RopeScaling {
    fn from(scaling: Llama3) -> Self {
        let Llama3 { factor, low_freq_factor, high_freq_factor, original_context } = scaling;
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }
    }
}
