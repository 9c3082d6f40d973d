//! The tokenizer of a Hugging Face folder: `tokenizer.json`, and what `tokenizer_config.json` and
//! `generation_config.json` say about special tokens and the chat template.

use super::{CanonicalTokenizer, Loaded, MAX_TEMPLATE_BYTES};
use crate::error::{PrepError, Result};
use crate::model::huggingface::{Folder, MAX_CONFIG_BYTES};
use ls_bundle::model::SpecialTokens;
use serde_json::Value;
use tokenizers::Tokenizer;

/// Bytes of tokenizer.json. One with 256,000 tokens takes 33 MB.
const MAX_TOKENIZER_BYTES: u64 = 40 << 20;

/// The tokenizer in `folder`. `config` is the model's configuration as JSON; the embedding has `vocab_size` rows.
pub fn from_folder(
    folder: &mut Folder,
    config: &Value,
    vocab_size: u32,
) -> Result<CanonicalTokenizer> {
    let text = folder.required("tokenizer.json", MAX_TOKENIZER_BYTES)?;
    let place = folder.place("tokenizer.json");
    let document: Value =
        serde_json::from_slice(&text).map_err(|error| PrepError::corrupt(&place, error))?;
    drop(text);
    let loaded = Loaded::new(document, vocab_size, &place)?;
    let settings = object(folder, "tokenizer_config.json")?;
    let generation = object(folder, "generation_config.json")?;
    let token = |key: &str| {
        named_token(&settings, key).and_then(|token| loaded.tokenizer.token_to_id(token))
    };
    let bos = match token("bos_token") {
        Some(id) => Some(id),
        None => ids(config, "bos_token_id", "config.json")?.first().copied(),
    };
    let (adds_first, bos) = match settings["add_bos_token"].as_bool() {
        Some(adds) => (adds, bos),
        None => added_at_front(&loaded.tokenizer, bos, &place)?,
    };
    let mut declared = ids(&generation, "eos_token_id", "generation_config.json")?;
    declared.extend(ids(config, "eos_token_id", "config.json")?);
    declared.extend(token("eos_token"));
    let special = SpecialTokens {
        bos,
        add_bos: adds_first,
        stop: loaded.stop(&declared, token("pad_token")),
    };
    let template = chat_template(folder, &settings)?;
    loaded.finish(special, template, &place)
}

/// An optional file that holds a JSON object; null if it is absent.
fn object(folder: &mut Folder, name: &str) -> Result<Value> {
    let Some(text) = folder.optional(name, MAX_CONFIG_BYTES)? else { return Ok(Value::Null) };
    let value: Value = serde_json::from_slice(&text)
        .map_err(|error| PrepError::corrupt(folder.place(name), error))?;
    if value.is_object() {
        Ok(value)
    } else {
        Err(PrepError::corrupt(folder.place(name), "is not an object"))
    }
}

/// A token that is written as a string or as an object with its content.
fn named_token<'a>(settings: &'a Value, key: &str) -> Option<&'a str> {
    settings[key].as_str().or_else(|| settings[key]["content"].as_str())
}

/// One id or a list of ids.
fn ids(value: &Value, key: &str, place: &str) -> Result<Vec<u32>> {
    let wrong = || PrepError::corrupt(place, format!("`{key}` is not a token's id"));
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong);
    match &value[key] {
        Value::Null => Ok(Vec::new()),
        Value::Array(values) => values.iter().map(id).collect(),
        single => Ok(vec![id(single)?]),
    }
}

/// Whether the post-processor puts BOS before a text, and which token that is: seen by trying. Where a file does not
/// say what is added, what its post-processor does is the rule.
fn added_at_front(
    tokenizer: &Tokenizer,
    bos: Option<u32>,
    place: &str,
) -> Result<(bool, Option<u32>)> {
    let encode = |special| {
        let encoding = tokenizer.encode_fast("a", special);
        encoding.map(|e| e.get_ids().to_vec()).map_err(|error| PrepError::corrupt(place, error))
    };
    let (with, without) = (encode(true)?, encode(false)?);
    match with.strip_suffix(without.as_slice()) {
        Some([]) => Ok((false, bos)),
        Some(&[first]) => Ok((true, Some(first))),
        _ => Err(PrepError::unsupported(format!(
            "a tokenizer that adds more than one BOS ({place})"
        ))),
    }
}

/// `chat_template.jinja` if it exists, else the template, or the one called "default", of tokenizer_config.json.
fn chat_template(folder: &mut Folder, settings: &Value) -> Result<Option<String>> {
    if let Some(text) = folder.optional("chat_template.jinja", MAX_TEMPLATE_BYTES)? {
        let place = folder.place("chat_template.jinja");
        return String::from_utf8(text)
            .map(Some)
            .map_err(|_| PrepError::corrupt(place, "is not UTF-8"));
    }
    let template = match &settings["chat_template"] {
        Value::Array(named) => named
            .iter()
            .find(|template| template["name"] == "default")
            .and_then(|template| template["template"].as_str()),
        single => single.as_str(),
    };
    Ok(template.map(str::to_owned))
}
