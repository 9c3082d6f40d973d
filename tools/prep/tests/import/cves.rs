//! The kinds of faults for which other readers of models have got public warnings (CVEs), one row each: what is lied about,
//! in both formats where both can, the exit code and what the message names.

use crate::cli::refused;
use crate::fixture::gguf::Meta;
use crate::hostile::{broken, file, save};
use crate::hostile_folder::{edit, made, with_header};
use serde_json::{Value, json};
use std::os::unix::fs::symlink;
use tempfile::TempDir;

const CORRUPT: i32 = 3;
const INCOMPLETE: i32 = 4;
const UNSUPPORTED: i32 = 5;

const TENSOR: &str = "blk.0.ffn_up.weight";
const NORM: &str = "model.norm.weight";
const SHARD: &str = "model-00002-of-00002.safetensors";

#[test]
fn fields_of_gguf() {
    let dir = TempDir::new().unwrap();
    let written = file().write();
    let first = written.at["offset:token_embd.weight"];
    let first = written.bytes[first..first + 8].to_vec();
    let u64s = |number: u64| number.to_le_bytes().to_vec();
    let rows: Vec<(&str, &str, Vec<u8>, i32, &str)> = vec![
        ("a dimension that overflows", "dim0", u64s(u64::MAX), CORRUPT, "overflows"),
        ("a size that overflows", "dim1", u64s(1 << 60), CORRUPT, "overflows"),
        ("a size past the end", "dim1", u64s(1 << 40), INCOMPLETE, "ends at byte"),
        ("an offset past the end", "offset", u64s(1 << 50), CORRUPT, "hole"),
        ("a negative offset", "offset", u64s(-64i64 as u64), CORRUPT, "hole"),
        ("an offset that stands twice", "offset", first, CORRUPT, "overlaps"),
        ("a negative dimension", "dim0", u64s(-1i64 as u64), CORRUPT, "overflows"),
    ];
    for (kind, field, bytes, exit, word) in rows {
        eprintln!("{kind}");
        refused(
            &save(&dir, &broken(&written, &format!("{field}:{TENSOR}"), &bytes)),
            exit,
            &[word],
        );
    }
}

#[test]
fn values_of_gguf() {
    let dir = TempDir::new().unwrap();
    let texts = |count: usize| Meta::Texts(vec!["a".to_owned(); count]);
    let rows: Vec<(&str, &str, Meta, i32, &str)> = vec![
        (
            "an array of another type",
            "tokenizer.ggml.tokens",
            Meta::I32s(vec![1; 9]),
            CORRUPT,
            "tokens",
        ),
        (
            "an array of texts for numbers",
            "tokenizer.ggml.token_type",
            texts(9),
            CORRUPT,
            "token_type",
        ),
        ("no array at all", "tokenizer.ggml.merges", Meta::U32(7), CORRUPT, "merges"),
        (
            "a token that is not there",
            "tokenizer.ggml.eos_token_id",
            Meta::U32(1 << 31),
            CORRUPT,
            "special token 2147483648",
        ),
        (
            "a token that is not there",
            "tokenizer.ggml.bos_token_id",
            Meta::U32(320),
            CORRUPT,
            "special token 320",
        ),
        (
            "more layers than any model",
            "llama.block_count",
            Meta::U32(1 << 20),
            UNSUPPORTED,
            "number of layers",
        ),
        (
            "more heads than any model",
            "llama.attention.head_count",
            Meta::U32(u32::MAX),
            UNSUPPORTED,
            "heads",
        ),
    ];
    for (kind, key, value, exit, word) in rows {
        eprintln!("{kind}");
        refused(&save(&dir, &file().set(key, Some(value)).write().bytes), exit, &[word]);
    }
    eprintln!("arrays of arrays, which others have followed down");
    let written = file().write();
    let nested = broken(&written, "array_type:tokenizer.ggml.tokens", &9u32.to_le_bytes());
    refused(&save(&dir, &nested), UNSUPPORTED, &["array of arrays"]);
}

#[test]
fn headers_of_safetensors() {
    let far = u64::MAX / 2;
    let rows: Vec<(&str, &str, Value, &str)> = vec![
        ("a size that overflows", "shape", json!([1u64 << 33, 1u64 << 33]), "header"),
        ("a size past its range", "shape", json!([1 << 30]), "header"),
        ("an offset past the end", "data_offsets", json!([far, far + 128]), "header"),
        ("an offset that wraps", "data_offsets", json!([u64::MAX - 63, 64]), "header"),
        ("a negative offset", "data_offsets", json!([-128, 0]), "header"),
        ("an offset that stands twice", "data_offsets", json!([0, 128]), "header"),
        ("an array of another type", "data_offsets", json!(["0", "128"]), "header"),
        ("a fraction", "shape", json!([64.5]), "header"),
    ];
    for (kind, field, value, word) in rows {
        eprintln!("{kind}");
        refused(with_header(|header| header[NORM][field] = value).path(), CORRUPT, &[word]);
    }
    eprintln!("nesting");
    let text = format!("{{\"a\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let dir = made(1);
    std::fs::write(dir.path().join("config.json"), text).unwrap();
    refused(dir.path(), CORRUPT, &["config.json", "recursion limit"]);
}

#[test]
fn names_of_files() {
    for name in [
        "../model.safetensors",
        "/etc/hostname",
        "sub/model.safetensors",
        "a\\b.safetensors",
        "a\0.safetensors",
        "..",
    ] {
        eprintln!("a path: {name:?}");
        let dir = made(2);
        edit(&dir, "model.safetensors.index.json", |index| index["weight_map"][NORM] = name.into());
        refused(dir.path(), CORRUPT, &["names the file"]);
    }
    eprintln!("links that lead in a circle, nowhere, and to what is no file");
    for (to, exit) in [(SHARD, INCOMPLETE), ("nowhere", INCOMPLETE), ("/dev/zero", 2), ("/", 2)] {
        let dir = made(2);
        let shard = dir.path().join(SHARD);
        std::fs::remove_file(&shard).unwrap();
        symlink(to, &shard).unwrap();
        refused(dir.path(), exit, &[SHARD]);
    }
}

#[test]
fn numbers_of_a_folder() {
    let rows: Vec<(&str, &str, Value, i32, &str)> = vec![
        (
            "more layers than any model",
            "num_hidden_layers",
            json!(1 << 20),
            UNSUPPORTED,
            "number of layers",
        ),
        (
            "a negative number of layers",
            "num_hidden_layers",
            json!(-1),
            CORRUPT,
            "num_hidden_layers",
        ),
        ("a size that overflows", "hidden_size", json!(u64::MAX), CORRUPT, "hidden_size"),
        (
            "a token that is not there",
            "eos_token_id",
            json!(4_294_967_295u64),
            CORRUPT,
            "special token",
        ),
        ("a token beyond all numbers", "eos_token_id", json!(u64::MAX), CORRUPT, "eos_token_id"),
        (
            "an array for a number",
            "num_attention_heads",
            json!([4]),
            CORRUPT,
            "num_attention_heads",
        ),
    ];
    for (kind, field, value, exit, word) in rows {
        eprintln!("{kind}");
        let dir = made(1);
        edit(&dir, "config.json", |config| config[field] = value);
        edit(&dir, "generation_config.json", |config| *config = json!({}));
        refused(dir.path(), exit, &[word]);
    }
}

/// A name that somebody has prepared: what is written does not go where it leads.
#[test]
fn a_link_in_the_place_of_a_bundle_is_replaced_and_not_followed() {
    let dir = TempDir::new().unwrap();
    let victim = dir.path().join("victim");
    std::fs::write(&victim, "precious").unwrap();
    let out = dir.path().join("out.lsb");
    symlink(&victim, &out).unwrap();
    let output = crate::cli::import(&save(&dir, &file().write().bytes), &out);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
    assert!(std::fs::symlink_metadata(&out).unwrap().is_file());
}
