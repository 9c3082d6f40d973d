//! GGUF files that are cut, contradictory or absurd. Each gives a clear error within 64 MiB.

use crate::cli::refused;
use crate::fixture::TinyModel;
use crate::fixture::gguf::{F16, GgufFile, Meta, Written};
use crate::fixture::vocabulary::{Tokens, byte_level, sentencepiece};
use ls_bundle::model::Architecture;
use ls_prep::exit::Exit;
use ls_prep::model::Model;
use std::path::PathBuf;
use tempfile::TempDir;

const CORRUPT: i32 = 3;
const INCOMPLETE: i32 = 4;
const UNSUPPORTED: i32 = 5;

pub(super) fn file() -> GgufFile {
    GgufFile::of(&TinyModel::new(Architecture::Llama, true), &byte_level("smollm"), F16)
}

fn file_with(tokens: &Tokens) -> GgufFile {
    GgufFile::of(&TinyModel::new(Architecture::Llama, true), tokens, F16)
}

pub(super) fn save(dir: &TempDir, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join("hostile.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// The file with `bytes` written over `field`.
pub(super) fn broken(written: &Written, field: &str, bytes: &[u8]) -> Vec<u8> {
    let mut all = written.bytes.clone();
    let at = *written.at.get(field).unwrap_or_else(|| panic!("no field {field}"));
    all[at..at + bytes.len()].copy_from_slice(bytes);
    all
}

#[test]
fn a_file_cut_anywhere_is_incomplete() {
    let dir = TempDir::new().unwrap();
    let written = file().write();
    let len = written.bytes.len();
    // Ten cuts in the header, ten in the data; the file's last bytes may be padding, so not those.
    let cuts = (0..10).map(|i| 4 + i * (written.data - 4) / 10);
    let cuts = cuts.chain((0..10).map(|i| written.data + i * (len - 64 - written.data) / 10));
    for cut in cuts {
        let path = save(&dir, &written.bytes[..cut]);
        let error = Model::open(&path).unwrap_err();
        assert_eq!(error.exit(), Exit::Incomplete, "cut at {cut}: {error}");
        assert!(error.to_string().contains(&format!("byte {cut}")), "cut at {cut}: {error}");
    }
    refused(
        &save(&dir, &written.bytes[..written.data / 2]),
        INCOMPLETE,
        &["hostile.gguf", "inside"],
    );
    refused(&save(&dir, &written.bytes[..len - 64]), INCOMPLETE, &["hostile.gguf", "tensor `"]);
    refused(&save(&dir, b""), INCOMPLETE, &["magic"]);
}

#[test]
fn broken_fields_of_the_frame_are_named() {
    let dir = TempDir::new().unwrap();
    let written = file().write();
    let huge = u64::MAX.to_le_bytes();
    let key = "tokenizer.ggml.tokens";
    let types = "tokenizer.ggml.token_type";
    let tensor = "blk.0.ffn_up.weight";
    let field = |kind: &str, name: &str| format!("{kind}:{name}");
    let cases: Vec<(String, Vec<u8>, i32, &str)> = vec![
        ("version".into(), 1u32.to_le_bytes().into(), UNSUPPORTED, "version 1"),
        ("version".into(), 9u32.to_le_bytes().into(), UNSUPPORTED, "version 9"),
        ("version".into(), 3u32.to_be_bytes().into(), UNSUPPORTED, "big-endian"),
        ("version".into(), 77_777u32.to_le_bytes().into(), CORRUPT, "version 77777"),
        ("tensor_count".into(), huge.into(), CORRUPT, "number of tensors"),
        ("tensor_count".into(), 16_000u64.to_le_bytes().into(), INCOMPLETE, "number of tensors"),
        ("tensor_count".into(), 0u64.to_le_bytes().into(), INCOMPLETE, "token_embd.weight"),
        ("pair_count".into(), huge.into(), CORRUPT, "metadata pairs"),
        (field("key", key), huge.into(), CORRUPT, "length of key"),
        (field("key", key), 0u64.to_le_bytes().into(), CORRUPT, "is empty"),
        (field("type", key), 99u32.to_le_bytes().into(), CORRUPT, "unknown type 99"),
        (field("array_type", key), 99u32.to_le_bytes().into(), CORRUPT, "unknown type 99"),
        (field("array_type", key), 9u32.to_le_bytes().into(), UNSUPPORTED, "array of arrays"),
        (
            field("array_len", key),
            huge.into(),
            CORRUPT,
            "length of the value of `tokenizer.ggml.tokens`",
        ),
        (field("array_len", types), (1u64 << 20).to_le_bytes().into(), INCOMPLETE, types),
        (field("array_len", types), (1u64 << 62).to_le_bytes().into(), CORRUPT, types),
        (field("value", "general.name"), huge.into(), CORRUPT, "general.name"),
        (field("value", "tokenizer.ggml.add_bos_token"), vec![7], CORRUPT, "a bool is 0 or 1"),
        (field("name", tensor), huge.into(), CORRUPT, "name of tensor"),
        (field("dims", tensor), 5u32.to_le_bytes().into(), CORRUPT, "5 dimensions"),
        (field("dims", tensor), 0u32.to_le_bytes().into(), CORRUPT, "0 dimensions"),
        (field("dim0", tensor), huge.into(), CORRUPT, "overflows"),
        (field("dim1", tensor), 0u64.to_le_bytes().into(), CORRUPT, "is empty"),
        (field("ggml", tensor), 23u32.to_le_bytes().into(), UNSUPPORTED, "tensor type IQ4_XS"),
        (field("ggml", tensor), 4242u32.to_le_bytes().into(), UNSUPPORTED, "tensor type 4242"),
        (field("offset", tensor), 8u64.to_le_bytes().into(), CORRUPT, "not aligned"),
        (field("offset", tensor), 32u64.to_le_bytes().into(), CORRUPT, "overlaps"),
        (field("offset", tensor), (1u64 << 40).to_le_bytes().into(), CORRUPT, "hole"),
        (field("offset", tensor), (u64::MAX - 31).to_le_bytes().into(), CORRUPT, "wanted"),
    ];
    for (field, bytes, exit, word) in cases {
        refused(&save(&dir, &broken(&written, &field, &bytes)), exit, &["ls-prep: ", word]);
    }
    refused(&save(&dir, b"GGML\x03\0\0\0"), CORRUPT, &["hostile.gguf at byte 0", "GGML"]);
}

#[test]
fn names_that_stand_twice_are_corrupt() {
    let dir = TempDir::new().unwrap();
    let mut twice = file();
    twice.metadata.push(("general.name".into(), Meta::Text("again".into())));
    refused(&save(&dir, &twice.write().bytes), CORRUPT, &["`general.name` stands twice"]);
    let mut twice = file();
    twice.tensors.push(twice.tensors[3].clone());
    refused(&save(&dir, &twice.write().bytes), CORRUPT, &["stands twice", &twice.tensors[3].name]);
    let mut name = file().write();
    let at = name.at["key:general.name"] + 8;
    name.bytes[at] = 0xff;
    refused(&save(&dir, &name.bytes), CORRUPT, &["not UTF-8"]);
}

#[test]
fn a_long_array_in_a_long_file_meets_the_limit_on_metadata() {
    let dir = TempDir::new().unwrap();
    let mut long = file();
    for index in 0..5 {
        long.set(&format!("x.{index}"), Some(Meta::I32s(vec![1; 1 << 20])));
    }
    refused(&save(&dir, &long.write().bytes), CORRUPT, &["metadata takes more than"]);
}

#[test]
fn metadata_that_the_model_contradicts_is_named() {
    let dir = TempDir::new().unwrap();
    let text = |text: &str| Some(Meta::Text(text.to_owned()));
    let cases: Vec<(&str, Option<Meta>, i32, &str)> = vec![
        ("general.architecture", None, CORRUPT, "general.architecture"),
        ("general.architecture", text("mamba"), UNSUPPORTED, "architecture `mamba`"),
        ("general.alignment", Some(Meta::U32(33)), CORRUPT, "general.alignment"),
        ("general.alignment", Some(Meta::U32(0)), CORRUPT, "general.alignment"),
        ("split.count", Some(Meta::U32(3)), UNSUPPORTED, "split into 3"),
        ("llama.block_count", None, CORRUPT, "no `llama.block_count`"),
        ("llama.block_count", Some(Meta::U32(3)), INCOMPLETE, "blk.2."),
        ("llama.block_count", Some(Meta::U32(1)), UNSUPPORTED, "`blk.1."),
        ("llama.block_count", Some(Meta::U32(u32::MAX)), UNSUPPORTED, "number of layers"),
        ("llama.embedding_length", Some(Meta::U32(0)), CORRUPT, "hidden size is 0"),
        ("llama.embedding_length", Some(Meta::U32(96)), CORRUPT, "wants [320, 96]"),
        ("llama.feed_forward_length", Some(Meta::U32(31)), CORRUPT, "ffn_gate"),
        ("llama.attention.head_count", Some(Meta::U32(0)), CORRUPT, "number of heads is 0"),
        ("llama.attention.head_count", Some(Meta::Bool(true)), CORRUPT, "not an integer"),
        ("llama.attention.head_count_kv", Some(Meta::U32(3)), CORRUPT, "evenly"),
        (
            "llama.attention.head_count_kv",
            Some(Meta::I32s(vec![2, 4])),
            UNSUPPORTED,
            "between layers",
        ),
        ("llama.attention.value_length", Some(Meta::U32(16)), UNSUPPORTED, "values of width 16"),
        (
            "llama.rope.dimension_count",
            Some(Meta::U32(16)),
            UNSUPPORTED,
            "rotary positions of width 16",
        ),
        ("llama.rope.scaling.type", text("yarn"), UNSUPPORTED, "rotary scaling `yarn`"),
        ("llama.rope.freq_base", Some(Meta::F32(f32::NAN)), CORRUPT, "rotary base is NaN"),
        ("llama.attention.layer_norm_rms_epsilon", None, CORRUPT, "rms_epsilon"),
        ("llama.expert_count", Some(Meta::U32(8)), UNSUPPORTED, "experts"),
        ("llama.logit_scale", Some(Meta::F32(2.0)), UNSUPPORTED, "logit_scale"),
    ];
    for (key, value, exit, word) in cases {
        refused(&save(&dir, &file().set(key, value).write().bytes), exit, &[word]);
    }
    let mut biased = file();
    let mut bias = biased.tensors[1].clone();
    bias.name = "blk.0.attn_q.bias".to_owned();
    biased.tensors.push(bias);
    refused(&save(&dir, &biased.write().bytes), UNSUPPORTED, &["`blk.0.attn_q.bias`"]);
}

#[test]
fn tokenizers_that_are_unknown_or_broken_are_named() {
    let dir = TempDir::new().unwrap();
    let key = |key: &str| format!("tokenizer.ggml.{key}");
    let text = |text: &str| Some(Meta::Text(text.to_owned()));
    let cases: Vec<(&str, Option<Meta>, i32, &str)> = vec![
        ("pre", text("chameleon"), UNSUPPORTED, "pre-tokenizer `chameleon`"),
        ("pre", None, UNSUPPORTED, "names no pre-tokenizer"),
        ("model", text("bert"), UNSUPPORTED, "tokenizer model `bert`"),
        ("model", text("llama"), CORRUPT, "scores"),
        ("tokens", None, CORRUPT, "tokenizer.ggml.tokens"),
        ("tokens", Some(Meta::Texts(vec!["a".into(), "a".into()])), CORRUPT, "token_type"),
        ("merges", None, CORRUPT, "merges"),
        ("merges", Some(Meta::Texts(vec!["ab".into()])), CORRUPT, "merge 0"),
        ("merges", Some(Meta::Texts(vec!["q zz".into()])), CORRUPT, "zz"),
        ("token_type", Some(Meta::I32s(vec![1; 5])), CORRUPT, "token_type"),
        ("eos_token_id", Some(Meta::U32(50_000)), CORRUPT, "special token 50000"),
        ("bos_token_id", text("one"), CORRUPT, "bos_token_id"),
        ("add_eos_token", Some(Meta::Bool(true)), UNSUPPORTED, "EOS"),
    ];
    for (name, value, exit, word) in cases {
        refused(&save(&dir, &file().set(&key(name), value).write().bytes), exit, &[word]);
    }
    let mut doubled = byte_level("smollm");
    doubled.tokens.push("<|im_start|>".to_owned());
    doubled.kinds.push(5);
    refused(&save(&dir, &file_with(&doubled).write().bytes), CORRUPT, &["stands twice"]);
    let mut long = byte_level("smollm");
    long.tokens.extend((0..100).map(|index| format!("[extra{index}]")));
    long.kinds.resize(long.tokens.len(), 5);
    refused(&save(&dir, &file_with(&long).write().bytes), CORRUPT, &["the embedding has 320 rows"]);
    let mut nan = sentencepiece();
    nan.scores[270] = f32::NAN;
    refused(&save(&dir, &file_with(&nan).write().bytes), CORRUPT, &["not finite"]);
    let mut long = sentencepiece();
    long.tokens.push("a".repeat(257));
    long.kinds.push(1);
    long.scores.push(-1000.0);
    refused(&save(&dir, &file_with(&long).write().bytes), UNSUPPORTED, &["a piece of 257 bytes"]);
    let mut few = sentencepiece();
    few.kinds[100] = 1;
    refused(&save(&dir, &file_with(&few).write().bytes), UNSUPPORTED, &["every byte"]);
}

/// Any change of a header byte gives an error or a model, and never a panic.
#[test]
fn flipped_header_bytes_never_panic() {
    let dir = TempDir::new().unwrap();
    let written = file().write();
    let mut state = 3;
    for at in (0..written.data).filter(|at| *at < 600 || at % 37 == 0) {
        let mut bytes = written.bytes.clone();
        bytes[at] ^= (crate::fixture::next_random(&mut state) % 255 + 1) as u8;
        let _ = Model::open(&save(&dir, &bytes));
    }
}
