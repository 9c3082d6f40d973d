//! The program itself: exit codes, messages, output, and the memory that a hostile file can make it take.

use crate::fixture::TinyModel;
use crate::fixture::gguf::{F16, GgufFile};
use crate::fixture::vocabulary::byte_level;
use ls_bundle::Bundle;
use ls_bundle::model::Architecture;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// What a hostile file may make the program allocate.
const LIMIT_KIB: u32 = 64 << 10;

/// Runs `ls-prep import source --out out` with at most 64 MiB of memory of its own.
pub(crate) fn import(source: &Path, out: &Path) -> Output {
    Command::new("sh")
        .arg("-c")
        .arg(format!("ulimit -d {LIMIT_KIB}; exec \"$0\" import \"$1\" --out \"$2\" --json"))
        .args([Path::new(env!("CARGO_BIN_EXE_ls-prep")), source, out])
        // OpenBLAS's threads want 128 MiB each as soon as the program starts, and never end if they get none.
        .env("OPENBLAS_NUM_THREADS", "1")
        .output()
        .unwrap()
}

/// Imports `source`, which must fail with this exit code and all these words, and leave nothing behind.
pub(crate) fn refused(source: &Path, exit: i32, words: &[&str]) {
    let dir = TempDir::new().unwrap();
    let output = import(source, &dir.path().join("out.lsb"));
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(exit), "wanted {words:?}, got: {message}");
    for word in words {
        assert!(message.contains(word), "no {word:?} in: {message}");
    }
    assert_eq!(message.trim_end().lines().count(), 1, "one line: {message}");
    assert!(message.len() < 1000, "short: {message}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "something was left behind");
}

fn tiny_gguf(dir: &TempDir) -> std::path::PathBuf {
    let path = dir.path().join("tiny.gguf");
    let model = TinyModel::new(Architecture::Llama, true);
    std::fs::write(&path, GgufFile::of(&model, &byte_level("smollm"), F16).write().bytes).unwrap();
    path
}

#[test]
fn import_prints_one_json_object_and_writes_the_bundle() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("tiny.lsb");
    let output = import(&tiny_gguf(&dir), &out);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stderr, b"", "no progress bar without a terminal");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let bundle = Bundle::open(&out).unwrap();
    assert_eq!(report["bundle_bytes"], bundle.total_len());
    assert_eq!(report["model"], "tiny");
    assert!(report["peak_rss_bytes"].as_u64().unwrap() < u64::from(LIMIT_KIB) << 10);
}

#[test]
fn wrong_arguments_are_usage() {
    let program = || Command::new(env!("CARGO_BIN_EXE_ls-prep"));
    for args in [&["import"][..], &["import", "x", "--out", "y", "--dtype", "f64"], &["export"]] {
        assert_eq!(program().args(args).output().unwrap().status.code(), Some(2), "{args:?}");
    }
    let help = program().args(["import", "--help"]).output().unwrap();
    assert!(String::from_utf8(help.stdout).unwrap().contains("Examples:"));
}

#[test]
fn a_bundle_cannot_replace_its_source() {
    let dir = TempDir::new().unwrap();
    let path = tiny_gguf(&dir);
    let before = std::fs::read(&path).unwrap();
    assert_eq!(import(&path, &path).status.code(), Some(2));
    assert!(std::fs::read(&path).unwrap() == before);
}

#[test]
fn a_missing_source_and_an_unwritable_target_are_io_errors() {
    let dir = TempDir::new().unwrap();
    refused(&dir.path().join("nothing"), 7, &["nothing"]);
    let output = import(&tiny_gguf(&dir), &dir.path().join("no/folder/out.lsb"));
    assert_eq!(output.status.code(), Some(7));
}

#[test]
fn what_a_bundle_cannot_hold_is_unsupported() {
    let dir = TempDir::new().unwrap();
    let mut model = TinyModel::new(Architecture::Llama, true);
    // Rows of 40 are no multiple of 32.
    model.config.hidden = 40;
    model.tensors = ls_prep::model::roles::Role::all(&model.config)
        .into_iter()
        .map(|(role, shape)| {
            let values = vec![0.0; shape.iter().product::<u32>() as usize];
            crate::fixture::TinyTensor { role, shape, values }
        })
        .collect();
    let path = dir.path().join("odd.gguf");
    std::fs::write(&path, GgufFile::of(&model, &byte_level("smollm"), F16).write().bytes).unwrap();
    let out = dir.path().join("odd.lsb");
    let output = Command::new(env!("CARGO_BIN_EXE_ls-prep"))
        .args([Path::new("import"), &path, Path::new("--out"), &out])
        .args(["--dtype", "q8_0"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(5), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(import(&path, &out).status.success(), "f16 has no such rule");
}
