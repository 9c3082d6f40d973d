//! The whole chain, as a person runs it: killed anywhere, run twice, made in shares, on a full disk.

use crate::Bench;
use crate::cli::{artifact, json, program, run, stage};
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// The commands of a chain in order, and whether they take `--layers`.
const STAGES: &[(&str, bool)] = &[
    ("prompts", false),
    ("activations", true),
    ("embedding", true),
    ("placement", true),
    #[cfg(feature = "lapack")]
    ("projection", true),
];

/// Runs the chain; what each stage reports.
fn run_chain(bench: &Bench, artifacts: &str) -> Vec<Value> {
    STAGES.iter().map(|(command, _)| run(&mut stage(bench, command, artifacts))).collect()
}

/// Every file below a folder, and what `look` sees of it.
fn files<T>(folder: &Path, look: &dyn Fn(&Path) -> T) -> BTreeMap<PathBuf, T> {
    let mut all = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder_now) = open.pop() {
        for entry in std::fs::read_dir(&folder_now).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else {
                all.insert(path.strip_prefix(folder).unwrap().to_owned(), look(&path));
            }
        }
    }
    all
}

fn bytes(bench: &Bench, artifacts: &str) -> BTreeMap<PathBuf, Vec<u8>> {
    files(&bench.dir.path().join(artifacts), &|path| std::fs::read(path).unwrap())
}

fn same(found: &BTreeMap<PathBuf, Vec<u8>>, wanted: &BTreeMap<PathBuf, Vec<u8>>, when: &str) {
    assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>(), "{when}");
    for (path, content) in wanted {
        assert!(found[path] == *content, "{when}: {} differs", path.display());
    }
}

/// Runs the chain until so long after its start, and kills what runs then. Whether something did.
fn run_until(bench: &Bench, artifacts: &str, limit: Duration) -> bool {
    let start = Instant::now();
    for (command, _) in STAGES {
        let mut command = stage(bench, command, artifacts);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                assert!(status.success());
                break;
            }
            if start.elapsed() >= limit {
                child.kill().unwrap();
                child.wait().unwrap();
                return true;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    false
}

#[test]
fn killed_at_random_points_it_goes_on_to_the_same_bytes() {
    let bench = Bench::new();
    let start = Instant::now();
    run_chain(&bench, "whole");
    let took = start.elapsed();
    let wanted = bytes(&bench, "whole");
    assert!(wanted.len() > STAGES.len(), "an artifact each, and the remembered hash");
    let mut random = Xoshiro256PlusPlus::seed_from_u64(11);
    for point in 0..5 {
        let limit = took.mul_f64(random.random_range(0.0..1.0));
        let artifacts = format!("killed-{point}");
        run_until(&bench, &artifacts, limit);
        run_chain(&bench, &artifacts);
        same(&bytes(&bench, &artifacts), &wanted, &format!("killed after {limit:?} of {took:?}"));
    }
}

#[test]
fn a_second_run_does_nothing() {
    let bench = Bench::new();
    run_chain(&bench, "a");
    let folder = bench.dir.path().join("a");
    let look = |path: &Path| -> (SystemTime, u64) {
        let metadata = std::fs::metadata(path).unwrap();
        (metadata.modified().unwrap(), metadata.len())
    };
    // A folder's time tells of files that came and went.
    let snapshot = || {
        let folders = ["", "synth", "synth/20-activations"].map(|name| look(&folder.join(name)).0);
        (files(&folder, &look), folders)
    };
    let before = snapshot();
    for report in run_chain(&bench, "a") {
        assert_eq!(report["outcome"], "kept", "{report}");
    }
    assert_eq!(snapshot(), before);
}

#[test]
fn every_stage_is_made_in_shares_with_the_same_bytes() {
    let bench = Bench::new();
    let whole = run_chain(&bench, "whole");
    for ((command, in_layers), whole) in STAGES.iter().zip(&whole) {
        if !in_layers {
            run(&mut stage(&bench, command, "shares"));
            continue;
        }
        let share = |layers: &str| {
            artifact(&run(stage(&bench, command, "shares").args(["--layers", layers])))
        };
        let parts = ["2..3", "0..2"].map(share);
        let merged = run(program("merge").args(&parts).arg("--json"));
        let read = |report: &Value| std::fs::read(artifact(report)).unwrap();
        assert!(read(&merged) == read(whole), "{command}");
        parts.iter().for_each(|part| std::fs::remove_file(part).unwrap());
    }
    same(&bytes(&bench, "shares"), &bytes(&bench, "whole"), "in shares");
}

#[test]
fn a_full_disk_is_an_error_that_can_be_mended() {
    let bench = Bench::new();
    let whole = run_chain(&bench, "whole");
    for ((command, _), whole) in STAGES.iter().zip(&whole) {
        // No file may grow beyond half of what the artifact takes, which is what a full disk looks like to a process.
        let blocks = (whole["bytes"].as_u64().unwrap() / 2 / 512).max(1);
        let limited = stage(&bench, command, "full");
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"")]);
        let output = shell.arg(limited.get_program()).args(limited.get_args()).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(7), "{command}: {message}");
        assert!(message.lines().last().unwrap().contains("too large"), "{command}: {message}");
        assert!(output.stdout.is_empty(), "{command} reports nothing");
        let mended = json(&stage(&bench, command, "full").output().unwrap());
        assert_ne!(mended["outcome"], "kept");
    }
    same(&bytes(&bench, "full"), &bytes(&bench, "whole"), "after a full disk");
}
