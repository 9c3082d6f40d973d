//! One tokenizer in both forms, a folder's `tokenizer.json` and GGUF metadata as llama.cpp's converter writes them,
//! gives the same ids, pieces and special tokens: the zoo's byte-level families, and SentencePiece.

use crate::fixture::gguf::{GgufFile, Meta};
use crate::fixture::vocabulary::{IM_END, IM_START, Tokens, byte_level, sentencepiece};
use crate::fixture::{TinyModel, folder};
use crate::tokenizers::random_text;
use ls_bundle::limits::MAX_VOCAB;
use ls_bundle::model::Architecture;
use ls_prep::model::Model;
use ls_prep::model::gguf::Gguf;
use ls_prep::model::tokenizer::{CanonicalTokenizer, from_gguf};
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;
use tokenizers::Tokenizer;

/// A GGUF file without tensors: its tokenizer, and what else the converter says about special tokens.
fn of_gguf(tokens: &Tokens, special: &[(&str, Meta)]) -> CanonicalTokenizer {
    let dir = TempDir::new().unwrap();
    let mut file = GgufFile { metadata: tokens.gguf_metadata(), tensors: Vec::new() };
    for (key, value) in special {
        file.set(&format!("tokenizer.ggml.{key}"), Some(value.clone()));
    }
    let path = dir.path().join("vocab.gguf");
    std::fs::write(&path, file.write().bytes).unwrap();
    from_gguf(&Gguf::open(&path).unwrap(), MAX_VOCAB).unwrap()
}

/// `name` of a `tokenizer.json` as the converter spells it in metadata.
fn converted(json: &Value, pre: &'static str) -> Tokens {
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![String::new(); vocab.len()];
    for (token, id) in vocab {
        tokens[id.as_u64().unwrap() as usize] = token.clone();
    }
    let mut kinds = vec![1; tokens.len()];
    for added in json["added_tokens"].as_array().unwrap() {
        kinds[added["id"].as_u64().unwrap() as usize] = 3;
    }
    let pair = |pair: &Value| [0, 1].map(|side| pair[side].as_str().unwrap().to_owned());
    let merges = json["model"]["merges"].as_array().unwrap().iter().map(pair).collect();
    Tokens { model: "gpt2", pre, tokens, kinds, merges, scores: Vec::new() }
}

fn assert_same(name: &str, one: &CanonicalTokenizer, other: &CanonicalTokenizer) {
    assert_eq!(one.special, other.special, "{name}");
    assert!(one.vocabulary == other.vocabulary, "{name}");
    let [one, other] =
        [one, other].map(|canonical| Tokenizer::from_bytes(&canonical.json).unwrap());
    let mut state = 17;
    for _ in 0..3_000 {
        let text = random_text(&mut state);
        let ids =
            |tokenizer: &Tokenizer| tokenizer.encode(&*text, true).unwrap().get_ids().to_vec();
        assert_eq!(ids(&one), ids(&other), "{name}: {text:?}");
    }
}

#[test]
fn byte_level_families_give_the_same_ids_in_both_forms() {
    for (name, pre) in [("llama2", "llama-bpe"), ("smollm2-sharded", "smollm"), ("qwen2", "qwen2")]
    {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/zoo").join(name);
        let json = std::fs::read(folder.join("tokenizer.json")).unwrap();
        let tokens = converted(&serde_json::from_slice(&json).unwrap(), pre);
        let adds_bos = Meta::Bool(name == "llama2");
        let special = [
            ("bos_token_id", Meta::U32(0)),
            ("eos_token_id", Meta::U32(1)),
            ("add_bos_token", adds_bos),
        ];
        assert_same(name, &Model::open(&folder).unwrap().tokenizer, &of_gguf(&tokens, &special));
    }
}

/// A SentencePiece vocabulary as transformers converts it: for every piece each way to cut it in two pieces, sorted by
/// score and then by the lengths of the parts, all descending.
fn sentencepiece_json(tokens: &Tokens) -> Value {
    let mut merges = Vec::new();
    for (piece, &score) in tokens.tokens.iter().zip(&tokens.scores).skip(3 + 256) {
        for (cut, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(cut);
            if [left, right].iter().all(|part| tokens.tokens.iter().any(|token| token == part)) {
                merges.push((score, left.chars().count(), right.chars().count(), [left, right]));
            }
        }
    }
    merges.sort_by(|a, b| b.partial_cmp(a).unwrap());
    let added: Vec<Value> = (0..3)
        .map(|id| {
            json!({"id": id, "content": tokens.tokens[id], "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    let mut json = byte_level("smollm").smollm_json();
    json["added_tokens"] = added.into();
    json["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]});
    json["pre_tokenizer"] = Value::Null;
    json["post_processor"] = Value::Null;
    json["decoder"] = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]});
    let model = &mut json["model"];
    model["vocab"] = tokens.tokens.iter().zip(0..).map(|(t, id)| (t.clone(), json!(id))).collect();
    model["merges"] = merges.iter().map(|(_, _, _, [l, r])| json!(format!("{l} {r}"))).collect();
    model["unk_token"] = "<unk>".into();
    model["fuse_unk"] = true.into();
    model["byte_fallback"] = true.into();
    json
}

#[test]
fn sentencepiece_gives_the_same_ids_in_both_forms() {
    let tokens = sentencepiece();
    let dir = TempDir::new().unwrap();
    let model = TinyModel::new(Architecture::Llama, true);
    folder::write(dir.path(), &model, &byte_level("smollm"), 1);
    let write =
        |name: &str, json: Value| std::fs::write(dir.path().join(name), json.to_string()).unwrap();
    write("tokenizer.json", sentencepiece_json(&tokens));
    write(
        "tokenizer_config.json",
        json!({"add_bos_token": true, "bos_token": "<s>", "eos_token": "</s>"}),
    );
    assert_eq!((tokens.id("<s>"), tokens.id("</s>")), (IM_START, IM_END));
    let from_folder = Model::open(dir.path()).unwrap().tokenizer;
    assert!(from_folder.special.add_bos);
    assert_same("sentencepiece", &from_folder, &of_gguf(&tokens, &[]));
}
