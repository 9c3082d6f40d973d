//! The `config.json` of a Hugging Face folder. Defaults are those of the architecture's configuration class.

use super::{Llama3, check, display_name};
use crate::error::{PrepError, Result};
use ls_bundle::model::{Architecture, ModelConfig, RopeConfig, RopeScaling, SpecialTokens};
use serde_json::{Map, Value};

/// Keys whose presence with a number above 0 means a mixture of experts.
const EXPERT_KEYS: [&str; 4] =
    ["num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size"];

/// The configuration told by `config.json`, the text of the file `place`; its special tokens are left empty.
pub fn from_config_json(text: &[u8], folder_name: &str, place: &str) -> Result<ModelConfig> {
    let fields: Map<String, Value> =
        serde_json::from_slice(text).map_err(|error| PrepError::corrupt(place, error))?;
    let fields = Fields { map: &fields, place };
    refuse_foreign(&fields)?;
    let architecture = architecture(&fields)?;
    let hidden = fields.required("hidden_size")?;
    let heads = fields.required("num_attention_heads")?;
    let layers = fields.required("num_hidden_layers")?;
    let head_dim = match (fields.integer("head_dim")?, architecture) {
        (Some(explicit), _) => explicit,
        (None, Architecture::Qwen3) => 128,
        (None, _) => hidden / heads.max(1),
    };
    let kv_heads = match (fields.integer("num_key_value_heads")?, architecture) {
        (Some(explicit), _) => explicit,
        (None, Architecture::Llama) => heads,
        (None, Architecture::Mistral) => 8,
        (None, _) => 32,
    };
    let config = ModelConfig {
        architecture,
        name: display_name(folder_name, "model"),
        vocab_size: fields.required("vocab_size")?,
        hidden,
        ffn_hidden: fields.required("intermediate_size")?,
        layers: u16::try_from(layers).unwrap_or(u16::MAX),
        heads,
        kv_heads,
        head_dim,
        norm_epsilon: fields.float("rms_norm_eps")?.unwrap_or(1e-6),
        rope: rope(&fields)?,
        context_length: fields.required("max_position_embeddings")?,
        sliding_window: sliding_window(&fields, architecture, layers)?,
        tied_head: fields.bool("tie_word_embeddings")?.unwrap_or(false),
        qkv_bias: architecture == Architecture::Qwen2,
        qk_norm: architecture == Architecture::Qwen3,
        special: SpecialTokens::default(),
    };
    check(&config, place)?;
    Ok(config)
}

fn architecture(fields: &Fields<'_>) -> Result<Architecture> {
    let name = match fields.map.get("architectures") {
        Some(Value::Array(names)) => names.first().and_then(Value::as_str),
        _ => None,
    };
    match name {
        Some("LlamaForCausalLM") => Ok(Architecture::Llama),
        Some("MistralForCausalLM") => Ok(Architecture::Mistral),
        Some("Qwen2ForCausalLM") => Ok(Architecture::Qwen2),
        Some("Qwen3ForCausalLM") => Ok(Architecture::Qwen3),
        Some(other) => Err(fields.unsupported(format!("architecture `{other}`"))),
        None => Err(PrepError::corrupt(fields.place, "no `architectures`")),
    }
}

/// Refuses what would change the arithmetic.
fn refuse_foreign(fields: &Fields<'_>) -> Result<()> {
    if let Some(quantisation) = fields.present("quantization_config") {
        let method = quantisation.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
        return Err(fields.unsupported(format!("weights quantised by `{method}`")));
    }
    for key in EXPERT_KEYS {
        if fields.present(key).is_some_and(|value| value.as_u64() != Some(0)) {
            return Err(fields.unsupported(format!("a mixture of experts (`{key}`)")));
        }
    }
    for key in ["attention_bias", "mlp_bias"] {
        if fields.bool(key)? == Some(true) {
            return Err(fields.unsupported(format!("`{key}`")));
        }
    }
    let activation = fields.string("hidden_act")?.unwrap_or("silu");
    if !matches!(activation, "silu" | "swish") {
        return Err(fields.unsupported(format!("activation `{activation}`")));
    }
    if fields.float("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(fields.unsupported("partial rotary positions"));
    }
    Ok(())
}

fn rope(fields: &Fields<'_>) -> Result<RopeConfig> {
    // Since version 5 transformers keeps both in `rope_parameters`.
    let scaling = fields.object("rope_parameters")?.or(fields.object("rope_scaling")?);
    let Some(scaling) = scaling else {
        let theta = fields.float("rope_theta")?.unwrap_or(10_000.0);
        return Ok(RopeConfig { theta, scaling: RopeScaling::None });
    };
    let theta = match scaling.float("rope_theta")? {
        Some(theta) => theta,
        None => fields.float("rope_theta")?.unwrap_or(10_000.0),
    };
    let kind = match scaling.string("rope_type")? {
        Some(kind) => kind,
        None => scaling.string("type")?.unwrap_or("default"),
    };
    let need = |key: &str| scaling.float(key)?.ok_or_else(|| scaling.missing(key));
    let scaling = match kind {
        "default" if !scaling.map.values().any(Value::is_object) => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: need("factor")? },
        "llama3" => Llama3 {
            factor: need("factor")?,
            low_freq_factor: need("low_freq_factor")?,
            high_freq_factor: need("high_freq_factor")?,
            original_context: scaling.required("original_max_position_embeddings")?,
        }
        .into(),
        other => return Err(fields.unsupported(format!("rotary scaling `{other}`"))),
    };
    Ok(RopeConfig { theta, scaling })
}

/// The window that all layers have in common.
fn sliding_window(
    fields: &Fields<'_>,
    architecture: Architecture,
    layers: u32,
) -> Result<Option<u32>> {
    let window = fields.integer("sliding_window")?;
    let qwen = matches!(architecture, Architecture::Qwen2 | Architecture::Qwen3);
    if architecture == Architecture::Llama
        || (qwen && fields.bool("use_sliding_window")? != Some(true))
    {
        return Ok(None);
    }
    let Some(window) = window else { return Ok(None) };
    let limited = match fields.map.get("layer_types") {
        Some(Value::Array(kinds)) => {
            kinds.iter().filter(|kind| kind.as_str() == Some("sliding_attention")).count()
        }
        // Qwen's first layers see everything.
        _ if qwen => {
            layers.saturating_sub(fields.integer("max_window_layers")?.unwrap_or(28)) as usize
        }
        _ => layers as usize,
    };
    match limited {
        0 => Ok(None),
        all if all == layers as usize => Ok(Some(window)),
        some => Err(fields.unsupported(format!("a sliding window in {some} of {layers} layers"))),
    }
}

/// The fields of a JSON object. A null counts as absent, as it does for transformers.
struct Fields<'a> {
    map: &'a Map<String, Value>,
    place: &'a str,
}

impl Fields<'_> {
    fn present(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, wanted: &str) -> PrepError {
        PrepError::corrupt(self.place, format!("`{key}` is not {wanted}"))
    }

    fn missing(&self, key: &str) -> PrepError {
        PrepError::corrupt(self.place, format!("no `{key}`"))
    }

    fn unsupported(&self, what: impl std::fmt::Display) -> PrepError {
        PrepError::unsupported(format!("{what} ({})", self.place))
    }

    fn integer(&self, key: &str) -> Result<Option<u32>> {
        let Some(value) = self.present(key) else { return Ok(None) };
        let value = value.as_u64().and_then(|value| u32::try_from(value).ok());
        value.map(Some).ok_or_else(|| self.wrong(key, "an integer between 0 and 2^32"))
    }

    fn required(&self, key: &str) -> Result<u32> {
        self.integer(key)?.ok_or_else(|| self.missing(key))
    }

    fn float(&self, key: &str) -> Result<Option<f32>> {
        let Some(value) = self.present(key) else { return Ok(None) };
        value.as_f64().map(|value| Some(value as f32)).ok_or_else(|| self.wrong(key, "a number"))
    }

    fn bool(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.present(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(key, "true or false"))
    }

    fn string(&self, key: &str) -> Result<Option<&str>> {
        let Some(value) = self.present(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(key, "a string"))
    }

    fn object(&self, key: &str) -> Result<Option<Fields<'_>>> {
        let Some(value) = self.present(key) else { return Ok(None) };
        let map = value.as_object().ok_or_else(|| self.wrong(key, "an object"))?;
        Ok(Some(Fields { map, place: self.place }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Exit;
    use serde_json::json;

    fn llama() -> Value {
        json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu"})
    }

    fn with(changes: Value) -> Result<ModelConfig> {
        let mut config = llama();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        from_config_json(config.to_string().as_bytes(), "folder", "config.json")
    }

    #[test]
    fn llama_reads_with_the_defaults_of_its_class() {
        let config = with(json!({})).unwrap();
        assert_eq!((config.head_dim, config.kv_heads, config.rope.theta), (16, 2, 10_000.0));
        assert_eq!(
            (config.tied_head, config.qkv_bias, config.sliding_window),
            (false, false, None)
        );
        assert_eq!(config.name, "folder");
        assert_eq!(with(json!({"head_dim": 32})).unwrap().head_dim, 32);
    }

    #[test]
    fn rope_scaling_reads_in_both_spellings() {
        let rules = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 500000.0});
        let wanted = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        for key in ["rope_parameters", "rope_scaling"] {
            let rope = with(json!({ key: rules })).unwrap().rope;
            assert_eq!(rope, RopeConfig { theta: 500_000.0, scaling: wanted });
        }
        let linear = with(json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
        assert_eq!(linear.rope.scaling, RopeScaling::Linear { factor: 2.0 });
    }

    #[test]
    fn windows_follow_the_architecture() {
        let mistral = json!({"architectures": ["MistralForCausalLM"], "sliding_window": 128});
        assert_eq!(with(mistral).unwrap().sliding_window, Some(128));
        let qwen = |used: bool, full_layers: u32| {
            with(json!({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128,
                "use_sliding_window": used, "max_window_layers": full_layers}))
        };
        assert_eq!(qwen(false, 0).unwrap().sliding_window, None);
        assert_eq!(qwen(true, 0).unwrap().sliding_window, Some(128));
        assert_eq!(qwen(true, 4).unwrap().sliding_window, None);
        assert_eq!(qwen(true, 2).unwrap_err().exit(), Exit::Unsupported);
    }

    #[test]
    fn what_the_runtime_does_not_know_is_unsupported() {
        for changes in [
            json!({"architectures": ["MixtralForCausalLM"]}),
            json!({"num_local_experts": 8}),
            json!({"quantization_config": {"quant_method": "gptq"}}),
            json!({"attention_bias": true}),
            json!({"hidden_act": "gelu"}),
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
            json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
            json!({"partial_rotary_factor": 0.5}),
            json!({"num_hidden_layers": 60000}),
        ] {
            let error = with(changes.clone()).unwrap_err();
            assert_eq!(error.exit(), Exit::Unsupported, "{changes}: {error}");
        }
    }

    #[test]
    fn nonsense_is_corrupt_and_names_the_field() {
        for (changes, word) in [
            (json!({"hidden_size": "64"}), "hidden_size"),
            (json!({"hidden_size": -1}), "hidden_size"),
            (json!({"num_attention_heads": 0}), "heads"),
            (json!({"num_key_value_heads": 3}), "key-value"),
            (json!({"vocab_size": null}), "vocab_size"),
            (json!({"rms_norm_eps": 0.0}), "epsilon"),
            (json!({"rope_theta": -3}), "rotary base"),
            (json!({"architectures": []}), "architectures"),
        ] {
            let error = with(changes.clone()).unwrap_err();
            assert_eq!(error.exit(), Exit::Corrupt, "{changes}: {error}");
            assert!(error.to_string().contains(word), "{changes}: {error}");
        }
    }
}
