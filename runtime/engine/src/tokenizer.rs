//! Text to tokens by the bundle's tokenizer, tokens to text by its vocabulary.
//!
//! Encoding needs the tokenizer, which is large while it loads; decoding needs only each token's bytes. So a runtime
//! with little memory encodes its prompt, drops the [`Tokenizer`], and goes on with a [`TextDecoder`].

use crate::error::EngineError;
use ls_bundle::Bundle;
use ls_bundle::ids::TokenId;
use ls_bundle::model::SpecialTokens;
use ls_bundle::vocabulary::{TokenKind, Vocabulary};
use serde::Deserialize;
use serde_json::Value;

/// What loading the tokenizer takes at its peak, as a multiple of its JSON's size: about 22 for SmolLM2's 49 thousand
/// entries, the only vocabulary it was measured on.
pub const LOAD_PEAK_FACTOR: u64 = 24;

/// Encodes text. See the module's documentation.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    special: SpecialTokens,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads the bundle's tokenizer, and takes its text out of the bundle, as it is not needed again.
    pub fn load(bundle: &mut Bundle) -> Result<Tokenizer, EngineError> {
        let json = bundle.take_tokenizer();
        Tokenizer::new(&json, bundle.model().special.clone())
    }

    /// The tokenizer that `json` describes, of a model with these special tokens.
    pub fn new(json: &str, special: SpecialTokens) -> Result<Tokenizer, EngineError> {
        Outline::of(json)?;
        let inner =
            tokenizers::Tokenizer::from_bytes(json.as_bytes()).map_err(EngineError::tokenizer)?;
        Ok(Tokenizer { inner, special })
    }

    /// The tokens of a text. `start`: it begins a sequence, so BOS goes first where the model wants one.
    pub fn encode(&self, text: &str, start: bool) -> Result<Vec<u32>, EngineError> {
        let encoding = self.inner.encode_fast(text, false).map_err(EngineError::tokenizer)?;
        let bos = self.special.bos.filter(|_| start && self.special.add_bos);
        let mut ids = Vec::with_capacity(encoding.len() + 1);
        ids.extend(bos);
        let text_ids = encoding.get_ids();
        // A prompt that spells BOS out has it once.
        let skip = usize::from(bos.is_some() && text_ids.first() == bos.as_ref());
        ids.extend(&text_ids[skip..]);
        Ok(ids)
    }
}

/// What is looked at before the `tokenizers` crate sees a document: that it is JSON, and that it has none of the parts
/// that no bundle needs and whose contents are trusted there. Found by fuzzing: both can end the process.
#[derive(Deserialize)]
struct Outline {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    post_processor: Value,
    /// Only that all of its texts can be read.
    #[serde(default)]
    decoder: Value,
}

impl Outline {
    fn of(json: &str) -> Result<(), EngineError> {
        let Outline { normalizer, post_processor, decoder } =
            serde_json::from_str(json).map_err(EngineError::tokenizer)?;
        drop(decoder);
        let members = normalizer["normalizers"].as_array().map_or(&[][..], |members| members);
        let of_type = |part: &Value, name| part["type"] == name;
        // Without a type a normalizer is guessed at.
        if members.iter().chain([&normalizer]).any(|part| {
            of_type(part, "Precompiled") || (part.is_object() && part["type"].is_null())
        }) {
            return Err(EngineError::tokenizer("its normalizer is precompiled or has no type"));
        }
        if !post_processor.is_null() {
            return Err(EngineError::tokenizer("it has a post-processor"));
        }
        Ok(())
    }
}

/// The bytes that a token adds to a text: none for control tokens.
#[must_use]
pub fn text_bytes(vocabulary: &Vocabulary, token: u32) -> &[u8] {
    if token >= vocabulary.len() || vocabulary.kind(TokenId(token)) == TokenKind::Control {
        return &[];
    }
    vocabulary.piece(TokenId(token))
}

/// Turns the bytes of successive tokens into text, never cutting a character in two.
#[derive(Debug, Default)]
pub struct TextDecoder {
    pending: Vec<u8>,
}

impl TextDecoder {
    /// Appends to `text` what is complete after `bytes`; bytes that can never become a character become U+FFFD.
    pub fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut from = 0;
        loop {
            match std::str::from_utf8(&self.pending[from..]) {
                Ok(complete) => {
                    text.push_str(complete);
                    from = self.pending.len();
                    break;
                }
                Err(error) => {
                    let valid = from + error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.pending[from..valid]));
                    from = valid;
                    let Some(bad) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    from += bad;
                }
            }
        }
        self.pending.drain(..from);
    }

    /// What is left at the end: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod hostile {
    use super::*;

    /// Found by fuzzing: each of these ended the process.
    #[test]
    fn documents_that_the_tokenizers_crate_trusts_are_refused() {
        let outline = |json: &str| Outline::of(json).map_err(|error| error.to_string());
        outline(r#"{"version": "1.0", "post_processor": null, "model": {"type": "BPE"}}"#).unwrap();
        for (json, word) in [
            (r#"{"decoder": {"type": "ByteLevel", "#, "EOF"),
            (r#"{"decoder": {"type": "\ud800"}}"#, "escape"),
            (
                r#"{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "x"}}"#,
                "precompiled",
            ),
            (r#"{"normalizer": {"type": "Sequence", "normalizers": [{"lower": 1}]}}"#, "no type"),
            (r#"{"post_processor": {"type": "TemplateProcessing"}}"#, "post-processor"),
        ] {
            let error = outline(json).unwrap_err();
            assert!(error.contains(word), "{json}: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::TextDecoder;

    fn decode(pieces: &[&[u8]]) -> (Vec<String>, String) {
        let mut decoder = TextDecoder::default();
        let mut steps = Vec::new();
        for piece in pieces {
            let mut text = String::new();
            decoder.push(piece, &mut text);
            steps.push(text);
        }
        let mut end = String::new();
        decoder.finish(&mut end);
        (steps, end)
    }

    #[test]
    fn a_character_cut_over_tokens_comes_whole() {
        let snowman = "☃".as_bytes();
        let (steps, end) = decode(&[b"a", &snowman[..1], &snowman[1..2], &snowman[2..], b"b"]);
        assert_eq!(steps, ["a", "", "", "☃", "b"]);
        assert_eq!(end, "");
    }

    #[test]
    fn bytes_that_are_no_character_become_replacements_at_once() {
        let (steps, end) = decode(&[b"\xff", b"x\xc3", b"y", b"\xe2\x98"]);
        assert_eq!(steps, ["\u{fffd}", "x", "\u{fffd}y", ""]);
        assert_eq!(end, "\u{fffd}");
    }
}
