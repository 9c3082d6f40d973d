//! The tokenizer in a GGUF file's metadata, rebuilt as `tokenizer.json`.

use super::pieces::{SPACE_MARK, fallback_byte};
use super::pre_tokenizer::family;
use super::{CanonicalTokenizer, Loaded, sentencepiece, too_many_tokens};
use crate::error::{PrepError, Result};
use crate::model::gguf::{Gguf, Strings, Value as Meta};
use ls_bundle::model::SpecialTokens;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Bytes of a SentencePiece piece: trying all ways to cut one takes time by the square of its length. Real ones have
/// at most 16 characters, or 31 spaces.
const MAX_PIECE_BYTES: usize = 256;

/// Kinds of tokens, as numbered in `tokenizer.ggml.token_type`.
mod token_type {
    pub(super) const NORMAL: i64 = 1;
    pub(super) const UNKNOWN: i64 = 2;
    pub(super) const CONTROL: i64 = 3;
    pub(super) const USER_DEFINED: i64 = 4;
    pub(super) const BYTE: i64 = 6;
}

/// The tokenizer of `gguf`, whose embedding has `vocab_size` rows.
pub fn from_gguf(gguf: &Gguf, vocab_size: u32) -> Result<CanonicalTokenizer> {
    let keys = Keys { gguf, place: gguf.file.path.display().to_string() };
    let tokens = match keys.get("tokens") {
        Some(Meta::Strings(tokens)) => tokens,
        _ => return Err(keys.corrupt("no `tokenizer.ggml.tokens`")),
    };
    // Before anything is built of them: their number is bounded by rows that are really in the file.
    if tokens.len() > vocab_size as usize {
        return Err(too_many_tokens(tokens.len(), vocab_size, &keys.place));
    }
    let kinds = keys.token_types(tokens.len())?;
    if keys.bool("add_eos_token")? == Some(true) {
        return Err(keys.unsupported("prompts that end with EOS"));
    }
    let ids = ids(&keys, tokens)?;
    let special = Special::read(&keys, tokens.len())?;
    let model = keys.string("model")?.ok_or_else(|| keys.corrupt("no `tokenizer.ggml.model`"))?;
    // Everything is checked before the first part is built: a broken file costs no more than its metadata.
    let (document, add_bos) = match model {
        "gpt2" => byte_level(&keys, tokens, &kinds, &ids)?,
        "llama" => metaspace(&keys, tokens, &kinds)?,
        other => return Err(keys.unsupported(format!("tokenizer model `{other}`"))),
    };
    drop(ids);
    let loaded = Loaded::new(document, vocab_size, &keys.place)?;
    let special = SpecialTokens {
        bos: special.bos,
        add_bos: keys.bool("add_bos_token")?.unwrap_or(add_bos),
        stop: loaded.stop(&special.ends, special.padding),
    };
    let template = match gguf.metadata.get("tokenizer.chat_template") {
        Some(Meta::String(template)) => Some(template.clone()),
        _ => None,
    };
    loaded.finish(special, template, &keys.place)
}

/// A `tokenizer.json` of the byte-level families, and whether it adds BOS by default.
fn byte_level(
    keys: &Keys<'_>,
    tokens: &Strings,
    kinds: &[i64],
    ids: &HashMap<&str, usize>,
) -> Result<(Value, bool)> {
    let pre = keys
        .string("pre")?
        .ok_or_else(|| keys.unsupported("a BPE tokenizer that names no pre-tokenizer"))?;
    let family = family(pre).ok_or_else(|| keys.unsupported(format!("pre-tokenizer `{pre}`")))?;
    if keys.bool("add_space_prefix")? == Some(true) {
        return Err(keys.unsupported("a byte-level tokenizer that starts texts with a space"));
    }
    let Some(Meta::Strings(pairs)) = keys.get("merges") else {
        return Err(keys.corrupt("no `tokenizer.ggml.merges`"));
    };
    for (index, pair) in pairs.iter().enumerate() {
        let parts =
            pair.split_once(' ').filter(|(left, right)| !left.is_empty() && !right.is_empty());
        let (left, right) = parts
            .ok_or_else(|| keys.corrupt(format!("merge {index} is {pair:?}; wanted two parts")))?;
        let joint = [left, right].concat();
        if let Some(part) = [left, right, &joint].into_iter().find(|part| !ids.contains_key(part)) {
            return Err(keys.corrupt(format!("merge {index}, {pair:?}: {part:?} is no token")));
        }
    }
    let merges: Vec<Value> = pairs
        .iter()
        .filter_map(|pair| pair.split_once(' '))
        .map(|pair| json!([pair.0, pair.1]))
        .collect();
    let document = json!({
        "version": "1.0",
        "added_tokens": added_tokens(tokens, kinds),
        "normalizer": family.normalizer,
        "pre_tokenizer": family.pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE",
            "ignore_merges": family.ignore_merges,
            "vocab": vocab(tokens),
            "merges": merges,
        },
    });
    Ok((document, family.add_bos))
}

/// A `tokenizer.json` of SentencePiece's BPE, and whether it adds BOS by default: it does.
fn metaspace(keys: &Keys<'_>, tokens: &Strings, kinds: &[i64]) -> Result<(Value, bool)> {
    let scores = match keys.get("scores") {
        Some(Meta::Floats(scores)) if scores.len() == tokens.len() => scores,
        _ => return Err(keys.corrupt("`tokenizer.ggml.scores` does not give each token a number")),
    };
    if scores.iter().any(|score| !score.is_finite()) {
        return Err(keys.corrupt("`tokenizer.ggml.scores` holds a number that is not finite"));
    }
    if keys.bool("remove_extra_whitespaces")? == Some(true) {
        return Err(keys.unsupported("a tokenizer that removes spaces"));
    }
    if let Some(token) = tokens.iter().find(|token| token.len() > MAX_PIECE_BYTES) {
        let len = token.len();
        return Err(keys.unsupported(format!("a piece of {len} bytes (limit {MAX_PIECE_BYTES})")));
    }
    let bytes = tokens
        .iter()
        .zip(kinds)
        .filter(|&(token, &kind)| kind == token_type::BYTE && fallback_byte(token).is_some());
    if bytes.count() != 256 {
        return Err(keys.unsupported("a SentencePiece tokenizer without a token for every byte"));
    }
    let unknown = kinds.iter().position(|&kind| kind == token_type::UNKNOWN);
    let prefix = keys.bool("add_space_prefix")?.unwrap_or(true);
    let mut normalizers =
        vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE_MARK}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let merges = sentencepiece::merges(tokens, scores, |id| kinds[id] == token_type::NORMAL);
    let document = json!({
        "version": "1.0",
        "added_tokens": added_tokens(tokens, kinds),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": unknown.map(|id| tokens.get(id)),
            "fuse_unk": true,
            "byte_fallback": true,
            "vocab": vocab(tokens),
            "merges": merges,
        },
    });
    Ok((document, true))
}

fn vocab(tokens: &Strings) -> Map<String, Value> {
    tokens.iter().enumerate().map(|(id, token)| (token.to_owned(), json!(id))).collect()
}

/// The ids of the tokens, each of which stands once.
fn ids<'a>(keys: &Keys<'_>, tokens: &'a Strings) -> Result<HashMap<&'a str, usize>> {
    let mut ids = HashMap::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        if let Some(earlier) = ids.insert(token, id) {
            return Err(keys.corrupt(format!("token {id}, {token:?}, stands twice: see {earlier}")));
        }
    }
    Ok(ids)
}

/// The special tokens that the metadata names.
struct Special {
    bos: Option<u32>,
    ends: Vec<u32>,
    padding: Option<u32>,
}

impl Special {
    fn read(keys: &Keys<'_>, tokens: usize) -> Result<Special> {
        let id =
            |key: &str| match keys.id(key)? {
                Some(id) if id as usize >= tokens => Err(keys
                    .corrupt(format!("special token {id} (`{key}`) is not among {tokens} tokens"))),
                id => Ok(id),
            };
        let ends = [id("eos_token_id")?, id("eot_token_id")?, id("eom_token_id")?];
        Ok(Special {
            bos: id("bos_token_id")?,
            ends: ends.into_iter().flatten().collect(),
            padding: id("padding_token_id")?,
        })
    }
}

/// The tokens that are found in a text as they are, before anything else.
fn added_tokens(tokens: &Strings, kinds: &[i64]) -> Vec<Value> {
    let is_added = |kind: i64| {
        matches!(kind, token_type::CONTROL | token_type::UNKNOWN | token_type::USER_DEFINED)
    };
    let added = tokens.iter().zip(kinds).enumerate().filter(|&(_, (_, &kind))| is_added(kind));
    added
        .map(|(id, (token, &kind))| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kind != token_type::USER_DEFINED})
        })
        .collect()
}

/// The metadata of the tokenizer.
struct Keys<'a> {
    gguf: &'a Gguf,
    place: String,
}

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Meta> {
        self.gguf.metadata.get(&format!("tokenizer.ggml.{key}"))
    }

    fn corrupt(&self, problem: impl std::fmt::Display) -> PrepError {
        PrepError::corrupt(&self.place, problem)
    }

    fn unsupported(&self, what: impl std::fmt::Display) -> PrepError {
        PrepError::unsupported(format!("{what} ({})", self.place))
    }

    fn wrong(&self, key: &str, wanted: &str) -> PrepError {
        self.corrupt(format!("`tokenizer.ggml.{key}` is not {wanted}"))
    }

    fn string(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Meta::String(value)) => Ok(Some(value)),
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }

    fn bool(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(&Meta::Bool(value)) => Ok(Some(value)),
            Some(_) => Err(self.wrong(key, "a bool")),
        }
    }

    fn id(&self, key: &str) -> Result<Option<u32>> {
        match self.get(key) {
            // Some converters write -1 for "none", in 32 bits.
            None | Some(&Meta::Integer(-1 | 0xffff_ffff)) => Ok(None),
            Some(&Meta::Integer(value)) => {
                u32::try_from(value).map(Some).map_err(|_| self.wrong(key, "a token's id"))
            }
            Some(_) => Err(self.wrong(key, "an integer")),
        }
    }

    /// One kind a token. A file without kinds has normal tokens only.
    fn token_types(&self, tokens: usize) -> Result<Vec<i64>> {
        match self.get("token_type") {
            None => Ok(vec![token_type::NORMAL; tokens]),
            Some(Meta::Integers(kinds)) if kinds.len() == tokens => Ok(kinds.clone()),
            Some(_) => Err(self.wrong("token_type", "one integer a token")),
        }
    }
}
