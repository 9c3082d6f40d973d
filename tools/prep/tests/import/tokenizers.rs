//! Canonical tokenizers: ids, round trips, and the bytes of tokens.

use crate::fixture::gguf::{F16, GgufFile, Meta};
use crate::fixture::vocabulary::{
    END_OF_TEXT, IM_START, Tokens, byte_level, sentencepiece, spelled,
};
use crate::fixture::{TinyModel, folder, next_random};
use ls_bundle::ids::TokenId;
use ls_bundle::model::Architecture;
use ls_bundle::vocabulary::TokenKind;
use ls_prep::model::Model;
use ls_prep::model::tokenizer::CanonicalTokenizer;
use std::path::Path;
use tempfile::TempDir;
use tokenizers::Tokenizer;

struct Made {
    canonical: CanonicalTokenizer,
    tokenizer: Tokenizer,
}

impl Made {
    fn open(path: &Path) -> Made {
        let canonical = Model::open(path).unwrap().tokenizer;
        let tokenizer = Tokenizer::from_bytes(canonical.json.as_bytes()).unwrap();
        assert_eq!(tokenizer.to_string(false).unwrap(), canonical.json, "canonical");
        Made { canonical, tokenizer }
    }

    fn of(tokens: &Tokens, changes: &[(&str, Meta)]) -> Made {
        let dir = TempDir::new().unwrap();
        let mut file = GgufFile::of(&TinyModel::new(Architecture::Llama, true), tokens, F16);
        for (key, value) in changes {
            file.set(&format!("tokenizer.ggml.{key}"), Some(value.clone()));
        }
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, file.write().bytes).unwrap();
        Made::open(&path)
    }

    /// With special tokens asked for: the canonical form has none to add.
    fn encode(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode(text, true).unwrap().get_ids().to_vec()
    }

    /// The text's tokens as they stand in the vocabulary.
    fn words(&self, text: &str) -> Vec<String> {
        self.tokenizer.encode(text, true).unwrap().get_tokens().to_vec()
    }

    /// The pieces of the ids, joined.
    fn bytes(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|&id| self.canonical.vocabulary.piece(TokenId(id))).copied().collect()
    }
}

/// A random string: letters, digits, spaces, line ends, anything of Unicode, and tokens' own texts.
pub(crate) fn random_text(state: &mut u64) -> String {
    const OFTEN: [&str; 14] = [
        "hello", " world", "12345", "  ", "\n\n", "'ll", "é", "☃", "<tool>", "the", " a", "\r\n",
        "e\u{301}", "🤖",
    ];
    let len = next_random(state) % 24;
    (0..len)
        .map(|_| match next_random(state) % 4 {
            0 => OFTEN[(next_random(state) % 14) as usize].to_owned(),
            1 => char::from((next_random(state) % 128) as u8).to_string(),
            _ => loop {
                if let Some(c) = char::from_u32((next_random(state) % 0x11_0000) as u32) {
                    break c.to_string();
                }
            },
        })
        .collect()
}

#[test]
fn byte_level_families_give_10_000_random_texts_back() {
    for pre in ["smollm", "llama-bpe", "gpt-2", "default"] {
        let made = Made::of(&byte_level(pre), &[]);
        let mut state = 11;
        for _ in 0..10_000 {
            let text = random_text(&mut state);
            let ids = made.encode(&text);
            assert_eq!(made.tokenizer.decode(&ids, false).unwrap(), text, "{pre}");
            assert_eq!(made.bytes(&ids), text.as_bytes(), "{pre}: {text:?}");
        }
    }
}

#[test]
fn families_cut_words_each_in_their_way() {
    // Merged by the fixture: 12, 123, 1234, 'll, "  ", "\n\n", "..", "!!".
    let words = |pre, text: &str| Made::of(&byte_level(pre), &[]).words(text).join("|");
    assert_eq!(words("gpt-2", "12345"), "1234|5");
    assert_eq!(words("smollm", "12345"), "1|2|3|4|5");
    assert_eq!(words("qwen2", "12345"), "1|2|3|4|5");
    assert_eq!(words("llama-bpe", "12345"), "123|4|5");
    assert_eq!(words("default", "12345"), "123|4|5");
    let spaced = |pre| words(pre, "a   b");
    for pre in ["gpt-2", "smollm", "qwen2", "llama-bpe", "default"] {
        assert_eq!(spaced(pre), "a|ĠĠ|Ġ|b", "{pre}");
        assert_eq!(words(pre, "hello world"), "hello|Ġworld", "{pre}");
    }
    // Only the newer families know contractions in capitals and keep line ends together with what is before.
    assert_eq!(words("gpt-2", "we'll"), words("qwen2", "we'll"));
    assert_eq!(words("llama-bpe", "!!\n\n"), "!!|ĊĊ");
    // GPT-2 takes ". ." apart by the space; the default family cuts every run of punctuation out.
    assert_eq!(words("default", "$.."), "$|..");
    // Qwen composes: e and an acute accent become é, which has a token.
    assert_eq!(words("qwen2", "e\u{301}"), spelled("é"));
    assert_eq!(words("llama-bpe", "e\u{301}").split('|').count(), 3);
}

#[test]
fn llama_3_takes_a_known_word_whole() {
    // "hello" without the merge that leads to it.
    let mut tokens = byte_level("llama-bpe");
    tokens.merges.retain(|[left, _]| left != "hell");
    assert_eq!(Made::of(&tokens, &[]).encode("hello"), [tokens.id("hello")]);
    tokens.pre = "gpt-2";
    assert_eq!(Made::of(&tokens, &[]).encode("hello"), [tokens.id("hell"), tokens.id("o")]);
}

#[test]
fn special_tokens_are_found_in_text_and_never_added() {
    let tokens = byte_level("llama-bpe");
    let made = Made::of(&tokens, &[("add_bos_token", Meta::Bool(true))]);
    let hello = tokens.id("hello");
    assert_eq!(made.encode("<|im_start|>hello<tool>"), [IM_START, hello, tokens.id("<tool>")]);
    assert_eq!(made.encode("hello"), [hello], "BOS is the flag's business alone");
    assert!(made.canonical.special.add_bos);
    let kind = |id| made.canonical.vocabulary.kind(TokenId(id));
    assert_eq!(kind(END_OF_TEXT), TokenKind::Control);
    assert_eq!(kind(tokens.id("<tool>")), TokenKind::Normal);
    assert_eq!(made.bytes(&[IM_START, tokens.id("<tool>")]), b"<|im_start|><tool>");
}

#[test]
fn bos_rules_are_the_files_or_the_familys() {
    let mut silent = byte_level("llama-bpe");
    let adds = |tokens: &Tokens, changes: &[(&str, Meta)]| {
        Made::of(tokens, changes).canonical.special.add_bos
    };
    assert!(!adds(&silent, &[("add_bos_token", Meta::Bool(false))]));
    silent = sentencepiece();
    assert!(adds(&silent, &[]), "SentencePiece adds BOS unless told not to");
    assert!(!adds(&silent, &[("add_bos_token", Meta::Bool(false))]));
}

#[test]
fn folders_say_in_three_ways_whether_bos_is_added() {
    let special = |change: &dyn Fn(&Path)| {
        let dir = TempDir::new().unwrap();
        folder::write(
            dir.path(),
            &TinyModel::new(Architecture::Llama, true),
            &byte_level("smollm"),
            1,
        );
        change(dir.path());
        let made = Made::open(dir.path());
        assert_eq!(made.encode("hello world").len(), 2, "no truncation, no BOS");
        made.canonical.special
    };
    assert!(!special(&|_| {}).add_bos, "tokenizer_config.json says false");
    let by_template =
        special(&|dir| std::fs::remove_file(dir.join("tokenizer_config.json")).unwrap());
    assert_eq!((by_template.add_bos, by_template.bos), (true, Some(IM_START)));
    let neither = special(&|dir| {
        std::fs::remove_file(dir.join("tokenizer_config.json")).unwrap();
        let mut json = byte_level("smollm").smollm_json();
        json["post_processor"] = serde_json::Value::Null;
        std::fs::write(dir.join("tokenizer.json"), json.to_string()).unwrap();
    });
    assert_eq!((neither.add_bos, neither.bos), (false, Some(1)));
}

/// SentencePiece as it is defined: join the neighbours whose joint piece scores best, the first of equals, until no
/// joint piece exists; what is no piece then is spelled in bytes.
fn reference(tokens: &Tokens, text: &str) -> Vec<u32> {
    let piece = |text: &str| {
        let id = tokens.tokens.iter().position(|token| token == text)?;
        (tokens.kinds[id] == 1).then_some(id)
    };
    let mut parts: Vec<String> = text.replace(' ', "▁").chars().map(String::from).collect();
    loop {
        let joint = |at: usize| piece(&format!("{}{}", parts[at], parts[at + 1]));
        let mut best: Option<(usize, f32)> = None;
        for at in 0..parts.len().saturating_sub(1) {
            if let Some(id) = joint(at)
                && best.is_none_or(|(_, score)| tokens.scores[id] > score)
            {
                best = Some((at, tokens.scores[id]));
            }
        }
        let Some((at, _)) = best else { break };
        let right = parts.remove(at + 1);
        parts[at] += &right;
    }
    let ids = parts.iter().flat_map(|part| match piece(part) {
        Some(id) => vec![id as u32],
        None => part.bytes().map(|byte| tokens.id(&format!("<0x{byte:02X}>"))).collect(),
    });
    ids.collect()
}

#[test]
fn sentencepiece_gives_the_ids_of_its_definition() {
    let tokens = sentencepiece();
    let made = Made::of(&tokens, &[]);
    let mut state = 5;
    const PARTS: [&str; 16] = [
        "the", " ", "hello", "world", "a", "b", "c", "ab", "  ", "é", "et", "☃", "9", "in", "er",
        "lo",
    ];
    for _ in 0..3_000 {
        let count = next_random(&mut state) % 12 + 1;
        let text: String =
            (0..count).map(|_| PARTS[(next_random(&mut state) % 16) as usize]).collect();
        assert_eq!(made.encode(&text), reference(&tokens, &format!(" {text}")), "{text:?}");
    }
    assert_eq!(made.words("hello world").join("|"), "▁|he|ll|o|▁world");
    let bare = Made::of(&tokens, &[("add_space_prefix", Meta::Bool(false))]);
    assert_eq!(bare.encode("the☃9"), reference(&tokens, "the☃9"));
}

#[test]
fn sentencepiece_gives_10_000_random_texts_back() {
    for prefix in [true, false] {
        let made = Made::of(&sentencepiece(), &[("add_space_prefix", Meta::Bool(prefix))]);
        let mut state = 13;
        for _ in 0..10_000 {
            // The mark for a space cannot be told from a space.
            let text = random_text(&mut state).replace('▁', "");
            let ids = made.encode(&text);
            assert_eq!(made.tokenizer.decode(&ids, false).unwrap(), text);
            let bytes = made.bytes(&ids);
            let start = usize::from(prefix && !text.is_empty());
            assert_eq!(&bytes[start..], text.as_bytes(), "{text:?}");
        }
    }
    let made = Made::of(&sentencepiece(), &[]);
    assert_eq!(made.canonical.vocabulary.kind(TokenId(3 + 0x0a)), TokenKind::Byte);
    assert_eq!(made.bytes(&[3 + 0x0a]), b"\n");
}
