//! Real vocabularies: the canonical tokenizer made of a GGUF file gives the ids that llama.cpp gives, and loses no text.
//!
//! The files are llama.cpp's own tests, fetched by `tools/fetch-vocabs.py`: inputs separated by a line of their own, and
//! for each a line of ids, without BOS and without special tokens. `goldens/smollm2.ids` has the same for SmolLM2, made
//! with llama.cpp of the same package. What "no text lost" means depends on the family:
//!
//! - byte-level BPE (GPT-2, Llama 3): the pieces of the ids, joined, are the text, whatever it is;
//! - SmolLM2, byte-level too: 21 of the 256 bytes have no token, and llama.cpp and transformers leave them out as well:
//!   six control characters, the planes 4 to 11 of Unicode, where no character is assigned, and bytes that UTF-8 never has;
//! - Qwen 2: the text in its composed form (NFC), as the model was trained on;
//! - SentencePiece (Llama 2, Mistral): a space before the text, and before what follows a special token; U+2581, its
//!   mark for a space, becomes a space.

#![forbid(unsafe_code)]

use ls_bundle::ids::TokenId;
use ls_bundle::limits::MAX_VOCAB;
use ls_prep::model::gguf::Gguf;
use ls_prep::model::tokenizer::{CanonicalTokenizer, from_gguf};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::path::{Path, PathBuf};
use tokenizers::{NormalizedString, Normalizer, Tokenizer, normalizers::NFC};

const SMOLLM2: &str = "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

fn artifact(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    root.join("artifacts").join(name)
}

fn vocab_path(name: &str, ending: &str) -> PathBuf {
    artifact(&format!("vocabs/ggml-vocab-{name}.gguf{ending}"))
}

struct Made {
    name: String,
    canonical: CanonicalTokenizer,
    tokenizer: Tokenizer,
}

impl Made {
    /// The tokenizer of a GGUF file, with or without a model around it.
    fn of(path: &Path) -> Made {
        let canonical = from_gguf(&Gguf::open(path).unwrap(), MAX_VOCAB).unwrap();
        let tokenizer = Tokenizer::from_bytes(canonical.json.as_bytes()).unwrap();
        Made { name: path.display().to_string(), canonical, tokenizer }
    }

    fn encode(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
    }

    /// The pieces of a text's ids, joined.
    fn there_and_back(&self, text: &str) -> Vec<u8> {
        let vocabulary = &self.canonical.vocabulary;
        let pieces = self.encode(text).into_iter().flat_map(|id| vocabulary.piece(TokenId(id)));
        pieces.copied().collect()
    }

    /// The bytes that no token stands for.
    fn absent_bytes(&self) -> Vec<u8> {
        let vocabulary = &self.canonical.vocabulary;
        let pieces = |byte| (0..vocabulary.len()).any(|id| vocabulary.piece(TokenId(id)) == [byte]);
        (0..=u8::MAX).filter(|&byte| !pieces(byte)).collect()
    }
}

/// The inputs, each with its line of ids. The file is the same for all vocabularies.
fn goldens(ids: &Path) -> Vec<(String, Vec<u32>)> {
    let inputs = std::fs::read_to_string(vocab_path("gpt-2", ".inp")).unwrap();
    let outputs = std::fs::read_to_string(ids).unwrap();
    let ids = |line: &str| line.split_whitespace().map(|id| id.parse().unwrap()).collect();
    // A separator ends each input, the last one too.
    let inputs = inputs.split_terminator("\n__ggml_vocab_test__\n").map(str::to_owned);
    let pairs: Vec<_> = inputs.zip(outputs.lines().map(ids)).collect();
    assert_eq!((pairs.len(), outputs.lines().count()), (46, 46));
    pairs
}

fn check_goldens(made: &Made, ids: &Path) {
    for (text, ids) in goldens(ids) {
        assert_eq!(made.encode(&text), ids, "{}: {text:?}", made.name);
    }
}

/// Text of any characters, rich in what tokenizers treat specially.
fn text(special: &'static [&'static str]) -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => any::<char>().prop_map(String::from),
        2 => "[a-zA-Z]{1,9}",
        2 => "[ \t\r\n\u{a0}\u{3000}]{1,5}",
        1 => "[0-9٣४]{1,7}",
        1 => "'(s|t|re|ve|m|ll|d|S|LL|x)",
        1 => "[!-/:-@]{1,4}",
        1 => "[aeo][\u{300}-\u{308}]{1,2}",
        1 => "[☃😀🦙中文한국ไทยéÅ\u{200d}\u{fe0f}]{1,3}",
        1 => proptest::sample::select(special).prop_map(str::to_owned),
    ];
    proptest::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

/// 10,000 texts come back as `expected` says.
fn check_10_000(made: &Made, special: &'static [&'static str], expected: impl Fn(&str) -> Vec<u8>) {
    let config = Config { cases: 10_000, failure_persistence: None, ..Config::default() };
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    TestRunner::new_with_rng(config, random)
        .run(&text(special), |text| {
            let (found, expected) = (made.there_and_back(&text), expected(&text));
            prop_assert_eq!(found.escape_ascii().to_string(), expected.escape_ascii().to_string());
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{}: {failure}", made.name));
}

#[test]
#[ignore = "needs fetched vocabularies: make test"]
fn ids_are_those_of_llama_cpp() {
    for name in ["gpt-2", "llama-bpe", "qwen2", "llama-spm"] {
        check_goldens(&Made::of(&vocab_path(name, "")), &vocab_path(name, ".out"));
    }
}

#[test]
#[ignore = "needs the fetched model and vocabularies: make test"]
fn ids_of_smollm2_are_those_of_llama_cpp() {
    let ids = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/smollm2.ids");
    check_goldens(&Made::of(&artifact(SMOLLM2)), &ids);
}

#[test]
#[ignore = "needs fetched vocabularies: make test"]
fn gpt_2_gives_10_000_random_texts_back() {
    let made = Made::of(&vocab_path("gpt-2", ""));
    check_10_000(&made, &["<|endoftext|>"], |text| text.into());
}

#[test]
#[ignore = "needs fetched vocabularies: make test"]
fn llama_3_gives_10_000_random_texts_back() {
    let made = Made::of(&vocab_path("llama-bpe", ""));
    check_10_000(&made, &["<|begin_of_text|>", "<|eot_id|>"], |text| text.into());
}

#[test]
#[ignore = "needs fetched vocabularies: make test"]
fn qwen_2_gives_10_000_random_texts_back_composed() {
    let made = Made::of(&vocab_path("qwen2", ""));
    check_10_000(&made, &["<|im_start|>", "<|endoftext|>"], |text| {
        let mut text = NormalizedString::from(text);
        NFC.normalize(&mut text).unwrap();
        text.get().into()
    });
}

#[test]
#[ignore = "needs fetched vocabularies: make test"]
fn sentencepiece_gives_10_000_random_texts_back_behind_a_space() {
    let made = Made::of(&vocab_path("llama-spm", ""));
    assert_eq!(made.there_and_back("<s>a</s>"), b"<s> a</s>");
    check_10_000(&made, &["\u{2581}", "  ", "<0x0A>"], |text| match text {
        "" => Vec::new(),
        text => format!(" {}", text.replace('\u{2581}', " ")).into(),
    });
}

#[test]
#[ignore = "needs the fetched model: make test"]
fn smollm2_gives_10_000_random_texts_back_but_for_bytes_without_a_token() {
    let made = Made::of(&artifact(SMOLLM2));
    let absent = made.absent_bytes();
    assert_eq!(absent[..10], [0x04, 0x06, 0x13, 0x14, 0x16, 0x1d, 0xc0, 0xc1, 0xf1, 0xf2]);
    assert_eq!(absent[10..], (0xf5..=0xff).collect::<Vec<u8>>());
    check_10_000(&made, &["<|im_start|>", "<|im_end|>", "<repo_name>"], |text| {
        text.bytes().filter(|byte| !absent.contains(byte)).collect()
    });
}
