//! `ls-prep paper`, with a program that only pretends to measure: what it has started ends with it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Tells its number, and goes on for longer than any test.
const FAKE: &str = r#"#!/bin/sh
cd "$(dirname "$0")" && echo $$ > part && mv part started && exec sleep 600
"#;

/// What `found` finds, sooner or later.
fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(started.elapsed() < Duration::from_secs(120), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a process runs; what has ended and waits for its parent to hear of it does not.
fn runs(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

fn signal(signal: &str, process: u32) {
    let sent = Command::new("kill").args([signal, &process.to_string()]).status().unwrap();
    assert!(sent.success(), "kill {signal} {process}");
}

/// Ends `ls-prep paper` by a signal while a command runs.
fn ends_with_its_command(folder: &Path, with: &str) {
    let at = |name: &str| folder.join(name);
    fs::write(at("ls-run"), FAKE).unwrap();
    fs::set_permissions(at("ls-run"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(at("model.lsb"), "a bundle").unwrap();
    fs::write(at("text.txt"), "A text that nobody reads.").unwrap();
    let mut paper = Command::new(env!("CARGO_BIN_EXE_ls-prep"));
    paper.arg("paper").arg(at("model.lsb")).arg("--text").arg(at("text.txt"));
    paper.arg("--out").arg(at("report")).arg("--ls-run").arg(at("ls-run")).arg("--quick");
    let mut paper = paper.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let command: u32 = wait_for("no command was started", || {
        assert_eq!(paper.try_wait().unwrap(), None, "it has a command to wait for");
        fs::read_to_string(at("started")).ok().map(|text| text.trim().parse().unwrap())
    });
    assert!(runs(command));
    signal(with, paper.id());
    paper.wait().unwrap();
    let waited = Instant::now();
    while runs(command) {
        if waited.elapsed() > Duration::from_secs(30) {
            signal("-KILL", command);
            panic!("{with}: the command outlived its run");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn nothing_outlives_a_run_that_is_killed() {
    for with in ["-KILL", "-INT"] {
        ends_with_its_command(tempfile::tempdir().unwrap().path(), with);
    }
}
