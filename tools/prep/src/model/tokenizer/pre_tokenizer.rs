//! The families of byte-level BPE by the name that llama.cpp's converter gives them (`tokenizer.ggml.pre`).
//!
//! A family is how text is cut into words before merging. The patterns are those of the models' own tokenizer.json;
//! a wrong one gives other ids and quietly worse answers, so an unknown name is an error.

use serde_json::{Value, json};

/// What a family sets in `tokenizer.json`.
pub(super) struct Family {
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    /// A word that is a token is taken whole, without merges.
    pub(super) ignore_merges: bool,
    /// Whether prompts start with BOS where the file does not say.
    pub(super) add_bos: bool,
}

/// Llama 3's words; digits in groups of up to three.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2's words; digits one by one.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The family called `name`.
pub(super) fn family(name: &str) -> Option<Family> {
    let plain = |pre_tokenizer| Family {
        normalizer: Value::Null,
        pre_tokenizer,
        ignore_merges: false,
        add_bos: false,
    };
    Some(match name {
        "gpt-2" => plain(byte_level(true)),
        "smollm" => plain(sequence(vec![
            json!({"type": "Digits", "individual_digits": true}),
            byte_level(true),
        ])),
        "llama-bpe" | "llama3" | "llama-v3" => Family {
            ignore_merges: true,
            add_bos: true,
            ..plain(sequence(vec![split(LLAMA3), byte_level(false)]))
        },
        "qwen2" => Family {
            normalizer: json!({"type": "NFC"}),
            ..plain(sequence(vec![split(QWEN2), byte_level(false)]))
        },
        // What llama.cpp runs for this name: runs of punctuation stand alone, GPT-2's words, digits three by three.
        "default" => plain(sequence(vec![
            split(r"[\p{P}\$\+<=>\^~\|]+"),
            split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
            split(r"\p{N}+"),
            split(r"[0-9][0-9][0-9]"),
            byte_level(false),
        ])),
        _ => return None,
    })
}

fn sequence(parts: Vec<Value>) -> Value {
    json!({"type": "Sequence", "pretokenizers": parts})
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

/// Bytes as characters; with `words`, cut by GPT-2's pattern first.
fn byte_level(words: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": words})
}
