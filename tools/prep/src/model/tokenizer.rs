//! One canonical tokenizer from either format: a `tokenizer.json` that the `tokenizers` crate is known to load, the
//! bytes of every token, the special tokens and the chat template.
//!
//! The canonical form adds nothing by itself: post-processor, truncation and padding are removed, so whether a prompt
//! starts with BOS is told by [`SpecialTokens::add_bos`] alone and it can never be there twice. Only BPE models and
//! the components listed in `refuse_foreign` are let through. Serialising is deterministic.

mod gguf;
mod huggingface;
mod pieces;
mod pre_tokenizer;
mod sentencepiece;

pub use gguf::from_gguf;
pub use huggingface::from_folder;

use crate::error::{PrepError, Result};
use ls_bundle::model::SpecialTokens;
use ls_bundle::vocabulary::Vocabulary;
use pieces::PieceRule;
use serde_json::Value;
use tokenizers::{PostProcessorWrapper, Tokenizer};

/// Bytes of a chat template.
pub const MAX_TEMPLATE_BYTES: u64 = 1 << 20;

/// What the bundle keeps of a tokenizer.
#[derive(Debug)]
pub struct CanonicalTokenizer {
    /// The canonical `tokenizer.json`.
    pub json: String,
    /// The bytes of every token.
    pub vocabulary: Vocabulary,
    /// Special tokens.
    pub special: SpecialTokens,
    /// The Jinja template of conversations, if the model has one.
    pub chat_template: Option<String>,
}

/// Control tokens that end an answer in every model that has them.
const END_OF_TURN: [&str; 2] = ["<|im_end|>", "<|eot_id|>"];
/// Ends a document. Stops generation where a file names it as any kind of end or as padding.
const END_OF_TEXT: &str = "<|endoftext|>";

/// A tokenizer that loads and whose ids fit the model.
struct Loaded {
    tokenizer: Tokenizer,
    rule: PieceRule,
}

impl Loaded {
    /// Loads the `tokenizer.json` in `document`, which `place` names in messages. `vocab_size` is the number of rows
    /// of the embedding table.
    fn new(mut document: Value, vocab_size: u32, place: &str) -> Result<Loaded> {
        refuse_foreign(&document, place)?;
        check_post_processor(&document["post_processor"], place)?;
        let rule = PieceRule::of_decoder(&document["decoder"])
            .ok_or_else(|| PrepError::unsupported(format!("tokenizer decoder ({place})")))?;
        for part in ["truncation", "padding"] {
            document[part] = Value::Null;
        }
        let added = document["added_tokens"].clone();
        // By value: the document is larger than the tokenizer made of it.
        let tokenizer: Tokenizer =
            serde_json::from_value(document).map_err(|error| PrepError::corrupt(place, error))?;
        for added in added.as_array().into_iter().flatten() {
            let content = added["content"].as_str().unwrap_or_default();
            let id = tokenizer.token_to_id(content);
            if id.map(u64::from) != added["id"].as_u64() {
                let found = id.map_or("none".to_owned(), |id| id.to_string());
                let problem =
                    format!("added token {content:?} has id {found}, wants {}", added["id"]);
                return Err(PrepError::corrupt(place, problem));
            }
        }
        match tokenizer.get_vocab(true).into_values().max() {
            Some(highest) if highest < vocab_size => Ok(Loaded { tokenizer, rule }),
            Some(highest) => Err(too_many_tokens(highest as usize + 1, vocab_size, place)),
            None => Err(PrepError::corrupt(place, "the vocabulary is empty")),
        }
    }

    /// The id of `token`, if it is a control token.
    fn control(&self, token: &str) -> Option<u32> {
        let id = self.tokenizer.token_to_id(token)?;
        self.tokenizer.get_added_tokens_decoder().get(&id).filter(|added| added.special).map(|_| id)
    }

    /// The ids that end generation: `declared` by the model's files, and those that always do.
    fn stop(&self, declared: &[u32], padding: Option<u32>) -> Vec<u32> {
        let known = END_OF_TURN.iter().filter_map(|token| self.control(token));
        let end_of_text = padding.filter(|&id| self.control(END_OF_TEXT) == Some(id));
        let mut stop: Vec<u32> = declared.iter().copied().chain(known).chain(end_of_text).collect();
        stop.sort_unstable();
        stop.dedup();
        stop
    }

    /// The result. Special ids are checked against the vocabulary.
    fn finish(
        mut self,
        special: SpecialTokens,
        chat_template: Option<String>,
        place: &str,
    ) -> Result<CanonicalTokenizer> {
        for id in special.bos.iter().chain(&special.stop) {
            if self.tokenizer.id_to_token(*id).is_none() {
                return Err(PrepError::corrupt(
                    place,
                    format!("special token {id} is not in the vocabulary"),
                ));
            }
        }
        if special.add_bos && special.bos.is_none() {
            return Err(PrepError::corrupt(
                place,
                "prompts start with BOS, but no token is named as BOS",
            ));
        }
        self.tokenizer.with_post_processor(None::<PostProcessorWrapper>);
        let json =
            self.tokenizer.to_string(false).map_err(|error| PrepError::corrupt(place, error))?;
        let vocabulary = pieces::vocabulary(&self.tokenizer, self.rule)?;
        Ok(CanonicalTokenizer { json, vocabulary, special, chat_template })
    }
}

fn too_many_tokens(tokens: usize, vocab_size: u32, place: &str) -> PrepError {
    PrepError::corrupt(place, format!("{tokens} tokens; the embedding has {vocab_size} rows"))
}

/// Lets through only components whose behaviour on any text is known to round-trip or to be the model's own.
fn refuse_foreign(document: &Value, place: &str) -> Result<()> {
    let unsupported = |part: &str, what: &str| {
        Err(PrepError::unsupported(format!("tokenizer {part} `{what}` ({place})")))
    };
    let model = &document["model"];
    // Files written before models had a type are BPE when they have merges.
    let kind =
        model["type"].as_str().unwrap_or(if model["merges"].is_array() { "BPE" } else { "?" });
    if kind != "BPE" {
        return unsupported("model", kind);
    }
    for affix in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model[affix].as_str().is_some_and(|affix| !affix.is_empty()) {
            return unsupported("model with", affix);
        }
    }
    if model["dropout"].as_f64().is_some_and(|dropout| dropout > 0.0) {
        return unsupported("model with", "dropout");
    }
    let allowed: [(&str, &[&str]); 3] = [
        ("normalizer", &["NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"]),
        ("pre_tokenizer", &["ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"]),
        ("decoder", &["ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"]),
    ];
    for (part, allowed) in allowed {
        for component in components(&document[part]) {
            let kind = component["type"].as_str().unwrap_or("?");
            let strips_ends = kind == "Strip" && component["stop"].as_u64() != Some(0);
            if !allowed.contains(&kind) || strips_ends {
                return unsupported(part, kind);
            }
        }
    }
    Ok(())
}

/// Fails if a template, by that name or without one, puts a token before or behind a text that it does not describe: the
/// `tokenizers` crate takes its word for it.
fn check_post_processor(part: &Value, place: &str) -> Result<()> {
    if let Some(members) = part["processors"].as_array() {
        return members.iter().try_for_each(|member| check_post_processor(member, place));
    }
    let pieces = ["single", "pair"].into_iter().filter_map(|form| part[form].as_array());
    let mut named = pieces.flatten().filter_map(|piece| piece["SpecialToken"]["id"].as_str());
    match named.find(|token| part["special_tokens"].get(*token).is_none()) {
        None => Ok(()),
        Some(token) => {
            let problem = format!("the post-processor adds {token:?}, which it does not describe");
            Err(PrepError::corrupt(place, problem))
        }
    }
}

/// The members of a component that may be a sequence, at one level: none of the known tokenizers nests them.
fn components(part: &Value) -> Vec<&Value> {
    if part.is_null() {
        return Vec::new();
    }
    if part["type"] != "Sequence" {
        return vec![part];
    }
    ["normalizers", "pretokenizers", "decoders"]
        .iter()
        .filter_map(|key| part[key].as_array())
        .flatten()
        .collect()
}
