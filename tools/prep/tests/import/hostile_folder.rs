//! Hugging Face folders that are incomplete, contradictory or absurd.

use crate::cli::refused;
use crate::fixture::vocabulary::byte_level;
use crate::fixture::{TinyModel, folder};
use ls_bundle::model::Architecture;
use ls_prep::exit::Exit;
use ls_prep::model::Model;
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

const CORRUPT: i32 = 3;
const INCOMPLETE: i32 = 4;
const UNSUPPORTED: i32 = 5;

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

pub(super) fn made(shards: usize) -> TempDir {
    let dir = TempDir::new().unwrap();
    folder::write(
        dir.path(),
        &TinyModel::new(Architecture::Qwen2, false),
        &byte_level("smollm"),
        shards,
    );
    dir
}

fn write(dir: &TempDir, name: &str, bytes: impl AsRef<[u8]>) {
    std::fs::write(dir.path().join(name), bytes).unwrap();
}

pub(super) fn edit(dir: &TempDir, name: &str, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&std::fs::read(dir.path().join(name)).unwrap()).unwrap();
    change(&mut value);
    write(dir, name, value.to_string());
}

/// The folder whose safetensors header was changed.
pub(super) fn with_header(change: impl FnOnce(&mut Value)) -> TempDir {
    let dir = made(1);
    let file = std::fs::read(dir.path().join(WEIGHTS)).unwrap();
    let len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header = serde_json::from_slice(&file[8..8 + len]).unwrap();
    change(&mut header);
    let header = header.to_string().into_bytes();
    write(
        &dir,
        WEIGHTS,
        [&(header.len() as u64).to_le_bytes(), &header[..], &file[8 + len..]].concat(),
    );
    dir
}

#[test]
fn missing_files_are_listed() {
    for (name, word) in
        [("config.json", "config.json"), ("tokenizer.json", "tokenizer.json"), (WEIGHTS, WEIGHTS)]
    {
        let dir = made(1);
        std::fs::remove_file(dir.path().join(name)).unwrap();
        refused(dir.path(), INCOMPLETE, &[word]);
    }
    let dir = made(4);
    for shard in ["model-00002-of-00004.safetensors", "model-00004-of-00004.safetensors"] {
        std::fs::remove_file(dir.path().join(shard)).unwrap();
    }
    let words = ["2 of 4", "model-00002-of-00004.safetensors, model-00004-of-00004.safetensors"];
    refused(dir.path(), INCOMPLETE, &words);
    let dir = TempDir::new().unwrap();
    refused(dir.path(), INCOMPLETE, &["no config.json"]);
}

#[test]
fn weights_cut_anywhere_are_incomplete() {
    let dir = made(1);
    let file = std::fs::read(dir.path().join(WEIGHTS)).unwrap();
    for cut in (0..20).map(|i| i * file.len() / 20) {
        write(&dir, WEIGHTS, &file[..cut]);
        let error = Model::open(dir.path()).unwrap_err();
        assert_eq!(error.exit(), Exit::Incomplete, "cut at {cut}: {error}");
        assert!(error.to_string().contains(WEIGHTS), "cut at {cut}: {error}");
    }
    refused(dir.path(), INCOMPLETE, &[WEIGHTS, "asks for"]);
    write(&dir, WEIGHTS, [&file[..], b"more"].concat());
    refused(dir.path(), CORRUPT, &[WEIGHTS, "4 bytes behind"]);
}

#[test]
fn json_cut_anywhere_is_corrupt() {
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    {
        let dir = made(1);
        let text = std::fs::read(dir.path().join(name)).unwrap();
        for cut in (0..20).map(|i| i * text.len() / 20) {
            write(&dir, name, &text[..cut]);
            let error = Model::open(dir.path()).unwrap_err();
            assert_eq!(error.exit(), Exit::Corrupt, "{name} cut at {cut}: {error}");
            assert!(error.to_string().contains(name), "{name} cut at {cut}: {error}");
        }
    }
}

#[test]
fn broken_headers_are_named() {
    let dir = made(1);
    write(&dir, WEIGHTS, [&u64::MAX.to_le_bytes()[..], b"{}"].concat());
    refused(dir.path(), CORRUPT, &["header length at byte 0"]);
    write(&dir, WEIGHTS, [&2u64.to_le_bytes()[..], b"[]"].concat());
    refused(dir.path(), CORRUPT, &[WEIGHTS, "header"]);
    write(&dir, WEIGHTS, b"PK\x03\x04 pytorch's old format, as a zip file");
    refused(dir.path(), CORRUPT, &[WEIGHTS, "is this safetensors?"]);

    let norm = "model.norm.weight";
    let cases: Vec<(&str, Value, i32, &str)> = vec![
        ("data_offsets", json!([0, 128]), CORRUPT, "header"),
        ("data_offsets", json!([5, 2]), CORRUPT, "header"),
        ("data_offsets", json!([0, u64::MAX]), CORRUPT, "header"),
        ("shape", json!([63]), CORRUPT, "header"),
        ("shape", json!([u64::MAX, u64::MAX]), CORRUPT, "header"),
        ("shape", json!([8, 8]), CORRUPT, norm),
        ("shape", json!([-1]), CORRUPT, "header"),
        ("dtype", json!("F8"), CORRUPT, "header"),
        ("dtype", json!("I16"), UNSUPPORTED, "tensor type I16"),
    ];
    for (field, value, exit, word) in cases {
        refused(with_header(|header| header[norm][field] = value).path(), exit, &[WEIGHTS, word]);
    }
    let renamed = |from: &str, to: &str| {
        with_header(|header| {
            let info = header.as_object_mut().unwrap().remove(from).unwrap();
            header[to] = info;
        })
    };
    refused(renamed(norm, "model.other.weight").path(), INCOMPLETE, &[norm]);
    let extra = "model.layers.0.self_attn.q_norm.weight";
    let dir = with_header(|header| {
        header[extra] = json!({"dtype": "F16", "shape": [0], "data_offsets": [0, 0]})
    });
    refused(dir.path(), CORRUPT, &[extra, "is empty"]);
}

#[test]
fn an_index_cannot_reach_out_of_its_folder_or_lie() {
    for name in ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", ""] {
        let dir = made(2);
        edit(&dir, INDEX, |index| index["weight_map"]["model.norm.weight"] = name.into());
        refused(dir.path(), CORRUPT, &[INDEX]);
    }
    let dir = made(2);
    edit(&dir, INDEX, |index| {
        index["weight_map"]["model.norm.weight"] = "model-00002-of-00002.safetensors".into()
    });
    refused(
        dir.path(),
        CORRUPT,
        &["`model.norm.weight` is not in model-00002-of-00002.safetensors"],
    );
    let dir = made(2);
    edit(&dir, INDEX, |index| index["weight_map"] = json!({}));
    refused(dir.path(), CORRUPT, &[INDEX, "0 files"]);
    let dir = made(2);
    std::fs::copy(
        dir.path().join("model-00001-of-00002.safetensors"),
        dir.path().join("model-00002-of-00002.safetensors"),
    )
    .unwrap();
    refused(dir.path(), CORRUPT, &["stands in an earlier file too"]);
}

#[test]
fn oversized_small_files_are_refused_unread() {
    for (name, bytes) in [("config.json", 2 << 20), (INDEX, 3 << 20), ("tokenizer.json", 100 << 20)]
    {
        let dir = made(2);
        let file = std::fs::File::options().write(true).open(dir.path().join(name)).unwrap();
        file.set_len(bytes).unwrap();
        refused(dir.path(), CORRUPT, &[name, "the limit is"]);
    }
}

#[test]
fn deeply_nested_and_wide_json_stays_small() {
    let nested = format!("{}1{}", "[".repeat(200_000), "]".repeat(200_000));
    let wide = format!("{{\"a\":[{}1]}}", "1,".repeat(500_000));
    for text in [nested, wide] {
        let dir = made(1);
        write(&dir, "config.json", &text);
        refused(dir.path(), CORRUPT, &["config.json"]);
        write(&dir, WEIGHTS, [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat());
        write(
            &dir,
            "config.json",
            folder::config_json(&TinyModel::new(Architecture::Qwen2, false).config).to_string(),
        );
        refused(dir.path(), CORRUPT, &[WEIGHTS]);
    }
}

#[test]
fn tokenizers_beyond_plain_bpe_are_unsupported() {
    let check = |exit: i32, word: &str, change: &dyn Fn(&mut Value)| {
        let dir = made(1);
        edit(&dir, "tokenizer.json", change);
        refused(dir.path(), exit, &[word]);
    };
    check(UNSUPPORTED, "model `Unigram`", &|t| t["model"]["type"] = "Unigram".into());
    check(UNSUPPORTED, "dropout", &|t| t["model"]["dropout"] = 0.5.into());
    check(UNSUPPORTED, "pre_tokenizer `BertPreTokenizer`", &|t| {
        t["pre_tokenizer"] = json!({"type": "BertPreTokenizer"})
    });
    check(UNSUPPORTED, "decoder", &|t| t["decoder"] = Value::Null);
    check(UNSUPPORTED, "normalizer `Lowercase`", &|t| {
        t["normalizer"] = json!({"type": "Lowercase"})
    });
    check(CORRUPT, "added token", &|t| t["added_tokens"][1]["id"] = 7.into());
    check(CORRUPT, "tokenizer.json", &|t| t["model"]["merges"] = json!(["zz q"]));
    check(CORRUPT, "tokenizer.json", &|t| t["version"] = "9".into());
    // Found by fuzzing: the crate that reads it panics when it is used.
    check(CORRUPT, "the post-processor adds \"<|im_start|>\"", &|t| {
        t["post_processor"]["special_tokens"] = json!({})
    });
    check(CORRUPT, "the post-processor adds \"x\"", &|t| {
        let mut template = t["post_processor"].take();
        template["pair"][0] = json!({"SpecialToken": {"id": "x", "type_id": 0}});
        template.as_object_mut().unwrap().remove("type");
        t["post_processor"] = json!({"type": "Sequence", "processors": [template]});
    });
    let dir = made(1);
    edit(&dir, "generation_config.json", |g| g["eos_token_id"] = json!([-4]));
    refused(dir.path(), CORRUPT, &["eos_token_id"]);
}

#[test]
fn a_folder_that_is_a_file_and_a_file_that_is_a_folder_are_errors() {
    let dir = made(1);
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    std::fs::create_dir(dir.path().join("tokenizer.json")).unwrap();
    refused(dir.path(), 2, &["tokenizer.json is not a regular file"]);
    refused(Path::new("/dev/null"), 2, &["not a regular file"]);
}
