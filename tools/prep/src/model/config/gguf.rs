//! The metadata of a GGUF file. Keys of the model start with its architecture: `llama.block_count`.

use super::{Llama3, check, display_name, llama3_divisor};
use crate::error::{PrepError, Result};
use crate::model::gguf::{Gguf, Value};
use crate::model::weights::Encoding;
use ls_bundle::model::{Architecture, ModelConfig, RopeConfig, RopeScaling, SpecialTokens};

/// Keys that change the arithmetic in ways the runtime does not know.
const FOREIGN: [&str; 8] = [
    "attention.scale",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.clamp_kqv",
];

/// The configuration of the model in `gguf`; its special tokens are left empty.
pub fn from_gguf(gguf: &Gguf) -> Result<ModelConfig> {
    let place = gguf.file.path.display().to_string();
    let Some(Value::String(name)) = gguf.metadata.get("general.architecture") else {
        return Err(PrepError::corrupt(place, "no `general.architecture`"));
    };
    let architecture = match name.as_str() {
        "llama" => Architecture::Llama,
        "qwen2" => Architecture::Qwen2,
        "qwen3" => Architecture::Qwen3,
        other => return Err(PrepError::unsupported(format!("architecture `{other}` ({place})"))),
    };
    let keys = Keys { gguf, prefix: name, place: &place };
    if keys.integer("expert_count")?.unwrap_or(0) > 0 {
        return Err(PrepError::unsupported(format!("a mixture of experts ({place})")));
    }
    for key in FOREIGN {
        if keys.float(key)?.is_some_and(|value| value != 0.0) {
            return Err(PrepError::unsupported(format!("`{name}.{key}` ({place})")));
        }
    }
    let hidden = keys.required("embedding_length")?;
    let heads = keys.required("attention.head_count")?;
    let head_dim = match keys.integer("attention.key_length")? {
        Some(explicit) => explicit,
        None => hidden / heads.max(1),
    };
    for (key, what) in
        [("attention.value_length", "values"), ("rope.dimension_count", "rotary positions")]
    {
        if let Some(other) = keys.integer(key)?.filter(|&other| other != head_dim) {
            return Err(PrepError::unsupported(format!(
                "{what} of width {other} in heads of width {head_dim} ({place})"
            )));
        }
    }
    let embedding = gguf.tensors.get("token_embd.weight");
    let vocab_size = embedding.and_then(|tensor| u32::try_from(tensor.shape[0]).ok());
    let general_name = match gguf.metadata.get("general.name") {
        Some(Value::String(name)) => name,
        _ => "",
    };
    let stem = gguf.file.path.file_stem().unwrap_or_default().to_string_lossy();
    let theta = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
    let config = ModelConfig {
        architecture,
        name: display_name(general_name, &stem),
        vocab_size: vocab_size
            .ok_or_else(|| PrepError::incomplete(&place, "no tensor `token_embd.weight`"))?,
        hidden,
        ffn_hidden: keys.required("feed_forward_length")?,
        layers: u16::try_from(keys.required("block_count")?).unwrap_or(u16::MAX),
        heads,
        kv_heads: keys.integer("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        norm_epsilon: keys
            .float("attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon"))?,
        rope: RopeConfig { theta, scaling: rope_scaling(&keys, theta, head_dim)? },
        context_length: keys.required("context_length")?,
        sliding_window: keys.integer("attention.sliding_window")?.filter(|&window| window > 0),
        tied_head: !gguf.tensors.contains_key("output.weight"),
        qkv_bias: architecture == Architecture::Qwen2,
        qk_norm: architecture == Architecture::Qwen3,
        special: SpecialTokens::default(),
    };
    check(&config, &place)?;
    Ok(config)
}

fn rope_scaling(keys: &Keys<'_>, theta: f32, head_dim: u32) -> Result<RopeScaling> {
    let factors = rope_factors(keys.gguf)?;
    let kind = keys.string("rope.scaling.type")?;
    // Before there was a type, linear scaling had a key of its own.
    let old_factor = keys.float("rope.scale_linear")?.filter(|&factor| factor != 1.0);
    let unsupported =
        |what: String| Err(PrepError::unsupported(format!("{what} ({})", keys.place)));
    match (kind, old_factor, factors) {
        (None | Some("none"), None, None) => Ok(RopeScaling::None),
        (None | Some("none"), None, Some(factors)) => {
            match recognise_llama3(&factors, theta, head_dim) {
                Some(scaling) => Ok(scaling.into()),
                None => unsupported(
                    "rotary factors (`rope_freqs.weight`) that are not Llama 3's".into(),
                ),
            }
        }
        (Some("linear"), _, None) => {
            let factor = keys.float("rope.scaling.factor")?.or(old_factor);
            Ok(RopeScaling::Linear {
                factor: factor.ok_or_else(|| keys.missing("rope.scaling.factor"))?,
            })
        }
        (None, Some(factor), None) => Ok(RopeScaling::Linear { factor }),
        (kind, _, _) => {
            unsupported(format!("rotary scaling `{}`", kind.unwrap_or("with two rules")))
        }
    }
}

/// The tensor in which the converter keeps what Llama 3's frequencies are divided by.
fn rope_factors(gguf: &Gguf) -> Result<Option<Vec<f32>>> {
    let Some(tensor) = gguf.tensors.get("rope_freqs.weight") else { return Ok(None) };
    let place = format!("{}: tensor `rope_freqs.weight`", gguf.file.path.display());
    let values: u64 = tensor.shape.iter().product();
    if tensor.encoding != Encoding::F32 || values > 1 << 10 {
        return Err(PrepError::corrupt(place, "is not a short vector of f32"));
    }
    let mut bytes = vec![0; 4 * values as usize];
    gguf.file.read_at(tensor.offset, &mut bytes)?;
    Ok(Some(bytes.as_chunks().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect()))
}

/// The file keeps Llama 3's rule only as its result. Its parameters are found again by trying those that all of the
/// Llama 3 family use, with the largest factor found, and comparing.
fn recognise_llama3(factors: &[f32], theta: f32, head_dim: u32) -> Option<Llama3> {
    let factor = factors.iter().copied().fold(1.0, f32::max);
    let scaling =
        Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
    let close = |(index, &found): (u32, &f32)| {
        let wanted = llama3_divisor(index, head_dim, theta, &scaling);
        (found - wanted).abs() <= 1e-3 * wanted
    };
    (factors.len() == head_dim as usize / 2 && (0..).zip(factors).all(close)).then_some(scaling)
}

/// The metadata of one architecture.
struct Keys<'a> {
    gguf: &'a Gguf,
    prefix: &'a str,
    place: &'a str,
}

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.gguf.metadata.get(&format!("{}.{key}", self.prefix))
    }

    fn wrong(&self, key: &str, wanted: &str) -> PrepError {
        PrepError::corrupt(self.place, format!("`{}.{key}` is not {wanted}", self.prefix))
    }

    fn missing(&self, key: &str) -> PrepError {
        PrepError::corrupt(self.place, format!("no `{}.{key}`", self.prefix))
    }

    fn integer(&self, key: &str) -> Result<Option<u32>> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::Integer(value)) => {
                u32::try_from(value).map(Some).map_err(|_| self.wrong(key, "between 0 and 2^32"))
            }
            Some(Value::Integers(_)) => Err(PrepError::unsupported(format!(
                "`{}.{key}` that differs between layers ({})",
                self.prefix, self.place
            ))),
            Some(_) => Err(self.wrong(key, "an integer")),
        }
    }

    fn required(&self, key: &str) -> Result<u32> {
        self.integer(key)?.ok_or_else(|| self.missing(key))
    }

    fn float(&self, key: &str) -> Result<Option<f32>> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::Float(value)) => Ok(Some(value as f32)),
            Some(_) => Err(self.wrong(key, "a float")),
        }
    }

    fn string(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_is_recognised_by_its_factors_and_nothing_else_is() {
        let scaling = Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        let mut factors: Vec<f32> =
            (0..32).map(|index| llama3_divisor(index, 64, 500_000.0, &scaling)).collect();
        assert_eq!((factors[0], factors[31]), (1.0, 32.0));
        assert!(factors.iter().any(|&factor| factor > 1.0 && factor < 32.0), "a blend between");
        let found = recognise_llama3(&factors, 500_000.0, 64).expect("the same rule");
        assert_eq!(found.factor, 32.0);
        assert!(recognise_llama3(&factors, 10_000.0, 64).is_none());
        assert!(recognise_llama3(&factors[..31], 500_000.0, 64).is_none());
        factors[15] *= 1.01;
        assert!(recognise_llama3(&factors, 500_000.0, 64).is_none());
    }
}
