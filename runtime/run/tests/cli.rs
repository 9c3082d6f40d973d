//! The program as a user meets it: exit codes, messages, streams.

mod sample;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ls-run")).args(args).output().expect("the program starts")
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../artifacts/golden/tiny-v1.lsb")
}

/// Checks the exit code and that stderr names what is wanted; nothing may be on stdout.
fn refused(args: &[&str], code: i32, words: &[&str]) {
    let out = run(args);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{args:?}: {said}");
    assert!(out.stdout.is_empty(), "{args:?} prints {:?}", String::from_utf8_lossy(&out.stdout));
    for word in words {
        assert!(said.contains(word), "{args:?} should say {word:?}: {said}");
    }
}

/// A damaged copy of the golden bundle.
fn damaged(folder: &Path, name: &str, damage: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut bytes = std::fs::read(golden()).unwrap();
    damage(&mut bytes);
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn each_kind_of_failure_has_its_own_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    refused(&["no-such-command"], 2, &["no-such-command"]);
    refused(&["generate", "x.lsb", "-p", "hi", "--memory", "12 parsecs"], 2, &["parsecs"]);
    refused(&["inspect", "/nonexistent/x.lsb"], 7, &["/nonexistent/x.lsb"]);
    let flipped = damaged(folder, "flipped.lsb", |bytes| bytes[700] ^= 4);
    refused(&["inspect", &flipped], 3, &["flipped.lsb", "corrupt"]);
    let short = damaged(folder, "short.lsb", |bytes| bytes.truncate(bytes.len() / 2));
    refused(&["inspect", &short], 4, &["short.lsb"]);
    let foreign = damaged(folder, "foreign.lsb", |bytes| bytes[..4].copy_from_slice(b"GGUF"));
    refused(&["inspect", &foreign], 5, &["foreign.lsb"]);
    let newer = damaged(folder, "block.lsb", |bytes| {
        let last = bytes.iter().rposition(|&b| b != 0).expect("a bundle has weights");
        bytes[last] ^= 1;
    });
    refused(&["verify", &newer], 3, &["block.lsb", "embedding tile"]);
    assert!(run(&["inspect", &newer]).status.success(), "inspect reads no weights");
}

#[test]
fn inspect_and_verify_speak_to_people_and_to_machines() {
    let path = golden();
    let path = path.to_str().unwrap();
    let text = String::from_utf8(run(&["inspect", path]).stdout).unwrap();
    assert!(text.contains("padding") && text.contains("block checksums"), "{text}");
    let json: serde_json::Value =
        serde_json::from_slice(&run(&["inspect", path, "--json"]).stdout).unwrap();
    assert_eq!(json["bytes"], std::fs::metadata(path).unwrap().len());
    let json: serde_json::Value =
        serde_json::from_slice(&run(&["verify", path, "--json"]).stdout).unwrap();
    assert_eq!(json["ok"], true);
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    use std::process::Stdio;
    let mut child = Command::new(env!("CARGO_BIN_EXE_ls-run"))
        .args(["inspect", golden().to_str().unwrap()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn every_command_explains_itself() {
    for command in
        ["generate", "chat", "plan", "bench", "profile", "tune", "doctor", "inspect", "verify"]
    {
        let out = run(&[command, "--help"]);
        assert!(out.status.success());
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(text.contains("Example") && text.contains("ls-run "), "{command} --help: {text}");
    }
    for task in ["perplexity", "divergence", "truthfulqa", "qasper", "coqa", "qa"] {
        let out = run(&["eval", task, "--help"]);
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(text.contains("Example") && text.contains("--resume"), "eval {task}: {text}");
    }
}

#[test]
fn doctor_looks_at_the_machine_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let out = run(&["doctor", "--folder", path, "--json"]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert!(json["host"]["threads"].as_u64().unwrap() > 0 && json["advice"].is_array());
    assert!(json["memory_bytes_s"].as_f64().unwrap() > 0.0);
    let points = json["io"]["points"].as_array().unwrap();
    assert!(
        points.iter().all(|point| point["bytes_s"].as_f64().unwrap() > 0.0) && !points.is_empty()
    );
    assert_eq!(json["runs"], serde_json::json!([]));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    refused(&["doctor", "/nonexistent/x.lsb"], 7, &["/nonexistent/x.lsb"]);
}

#[test]
fn what_plans_nothing_cannot_be_tuned() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("dense.lsb");
    std::fs::copy(golden(), &bundle).unwrap();
    let path = bundle.to_str().unwrap();
    for command in ["profile", "tune"] {
        refused(&[command, path], 2, &["dense decode", "--system"]);
    }
    let sparse = ["--system", "leanstream", "--controller", "hindsight"];
    refused(&[&["bench", path], &sparse[..]].concat(), 2, &["bench --text --controllers"]);
    let lists = ["--controllers", "fixed,one-shot"];
    refused(&[&["bench", path], &lists[..]].concat(), 2, &["for sparse systems"]);
    let lut = ["--system", "leanstream", "--controller", "lut"];
    refused(&[&["generate", path, "-p", "x"], &lut[..]].concat(), 2, &["dense.lut", "ls-run tune"]);
    let files = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 1, "only the bundle is there");
}

/// Without OpenCL's library, without a driver and without a GPU: one line that says which, and the documented code.
#[test]
fn a_backend_that_is_not_there_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("noise.lsb");
    sample::write(&bundle);
    // The loader takes what it finds first, and this is no library.
    std::fs::write(folder.path().join("libOpenCL.so.1"), "no library\n").unwrap();
    let nowhere = folder.path().join("no-drivers");
    let cases = [
        ("opencl", "LD_LIBRARY_PATH", folder.path(), "libOpenCL.so.1"),
        ("opencl", "OCL_ICD_VENDORS", nowhere.as_path(), "no OpenCL"),
    ];
    for (backend, name, value, word) in cases {
        let out = Command::new(env!("CARGO_BIN_EXE_ls-run"))
            .args(["plan", bundle.to_str().unwrap(), "--backend", backend])
            .env(name, value)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(5), "{name}: {said}");
        assert!(out.stdout.is_empty() && said.contains(word), "{name}: {said}");
        assert!(!said.contains("panicked"), "{name}: {said}");
    }
    // Who leaves the choice to the program gets the processor.
    let out = Command::new(env!("CARGO_BIN_EXE_ls-run"))
        .args(["plan", bundle.to_str().unwrap(), "--backend", "auto", "--json"])
        .env("LD_LIBRARY_PATH", folder.path())
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn sensors_are_told_when_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("noise.lsb");
    sample::write(&bundle);
    let bundle = bundle.to_str().unwrap();
    let base = ["bench", bundle, "--prompt-tokens", "4", "-n", "4", "--reps", "1", "--json"];
    let json = |args: &[&str]| -> serde_json::Value {
        let out = run(args);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice(&out.stdout).unwrap()
    };
    assert_eq!(json(&base)["device"], serde_json::Value::Null);
    let told = json(&[&base[..], &["--stats"]].concat());
    assert_eq!(told["device"]["tokens"], 4);
    assert!(told["device"]["seconds"].as_f64().unwrap() > 0.0, "{told}");
}
