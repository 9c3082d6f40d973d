//! `ls-prep all` on a disk with faults: the right bundle or a clear error, nothing half-made under a final name, and a
//! second run that goes on to the right bundle. Debug builds only: there a schedule can say what happens to which
//! operation (`ls_bundle::files::faults`).
//!
//! A few schedules run with every test; `make faults` runs a thousand.

#![forbid(unsafe_code)]
#![cfg(debug_assertions)]

use ls_bundle::Bundle;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const KINDS: [&str; 9] =
    ["eio", "eintr", "enospc", "einval", "short", "torn", "flip", "rot", "shrink"];
/// These change a file for good: what comes after may find it damaged.
const LASTING: [&str; 2] = ["rot", "shrink"];
const OUT: &str = "out.lsb";
const SIGABRT: i32 = 6;

type Faults = Vec<(u64, &'static str)>;

/// A model, a text, and what comes of them on a good disk.
struct Bench {
    dir: TempDir,
    /// By path below the folder of a run: artifacts, and the bundle.
    wanted: BTreeMap<PathBuf, Vec<u8>>,
    operations: u64,
}

/// Every file below a folder.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(now) = open.pop() {
        for entry in std::fs::read_dir(&now).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap().to_owned();
                all.insert(name, std::fs::read(&path).unwrap());
            }
        }
    }
    all
}

/// A folder for a run, with copies of the model and the text: faults may spoil them.
fn room(bench: &Path) -> TempDir {
    let room = TempDir::new().unwrap();
    std::fs::create_dir(room.path().join("model")).unwrap();
    for (name, bytes) in files(&bench.join("model")) {
        std::fs::write(room.path().join("model").join(name), bytes).unwrap();
    }
    std::fs::copy(bench.join("text.txt"), room.path().join("text.txt")).unwrap();
    room
}

fn all(room: &Path, faults: &Faults, log: Option<&Path>) -> Output {
    let schedule: Vec<String> = faults.iter().map(|(at, kind)| format!("{at}:{kind}")).collect();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ls-prep"));
    command.current_dir(room).env("RAYON_NUM_THREADS", "1").env("LS_FAULTS", schedule.join(","));
    command.args(["all", "model", "--artifacts", "artifacts", "--recipe", "tiny", "--json"]);
    command.args(["--calibration", "text.txt", "--out", OUT]);
    command.envs(log.map(|log| ("LS_FAULTS_LOG", log)));
    command.output().unwrap()
}

/// What a run has made.
fn made(room: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = files(room);
    all.retain(|path, _| path.starts_with("artifacts") || path.to_string_lossy().starts_with(OUT));
    // It tells of the model by path and time.
    all.retain(|path, _| !path.ends_with("source.json"));
    all
}

impl Bench {
    fn new() -> Bench {
        let dir = TempDir::new().unwrap();
        let mut synth = Command::new(env!("CARGO_BIN_EXE_ls-prep"));
        synth.current_dir(dir.path()).args([
            "synth",
            "--out",
            "model",
            "--layers",
            "1",
            "--neurons",
            "16",
        ]);
        assert!(synth.output().unwrap().status.success());
        let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../datasets/tiny/lighthouse.txt");
        std::fs::copy(text, dir.path().join("text.txt")).unwrap();
        let (room, log) = (room(dir.path()), dir.path().join("log"));
        let output = all(room.path(), &Vec::new(), Some(&log));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let wanted = made(room.path());
        Bench { dir, wanted, operations: std::fs::metadata(log).unwrap().len() }
    }

    fn schedule(&self, seed: u64) -> Faults {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let count = random.random_range(1..5);
        let fault = |_| {
            (random.random_range(0..self.operations), KINDS[random.random_range(0..KINDS.len())])
        };
        let faults: BTreeMap<u64, &'static str> = (0..count).map(fault).collect();
        faults.into_iter().collect()
    }

    /// Whether a run under these faults ended in an error; what is wrong with it, if something is.
    fn judge(&self, faults: &Faults) -> Result<bool, String> {
        let room = room(self.dir.path());
        let lasting = faults.iter().any(|(_, kind)| LASTING.contains(kind));
        let first = all(room.path(), faults, None);
        if lasting
            && first.status.success()
            && made(room.path()).get(Path::new(OUT)) != self.wanted.get(Path::new(OUT))
        {
            return self.is_of_what_is_there(&room);
        }
        self.check_output(&first, &room, lasting)?;
        let torn = first.status.signal() == Some(SIGABRT);
        for path in made(room.path()).keys() {
            if path.extension().is_some_and(|end| end == "tmp") && !torn {
                return Err(format!("{} was left behind", path.display()));
            }
        }
        let second = all(room.path(), &Vec::new(), None);
        if lasting
            && second.status.success()
            && made(room.path()).get(Path::new(OUT)) != self.wanted.get(Path::new(OUT))
        {
            return self.is_of_what_is_there(&room).map(|_| !first.status.success());
        }
        self.check_output(&second, &room, lasting)?;
        if !lasting && !second.status.success() {
            return Err(format!("the run after it: {}", String::from_utf8_lossy(&second.stderr)));
        }
        Ok(!first.status.success())
    }

    /// A source that was cut off before anything was made of it is another source: then the bundle must be what a good
    /// disk makes of it.
    ///
    /// What has rotted after it was written is found when it is read.
    fn is_of_what_is_there(&self, room: &TempDir) -> Result<bool, String> {
        let bundle = Bundle::open(&room.path().join(OUT));
        if bundle.and_then(|bundle| bundle.verify(&mut |_, _| ())).is_err() {
            return Ok(false);
        }
        let fresh = self::room(room.path());
        let output = all(fresh.path(), &Vec::new(), None);
        let [there, wanted] = [room, &fresh].map(|room| made(room.path()).remove(Path::new(OUT)));
        if output.status.success() && there == wanted {
            Ok(false)
        } else {
            Err("success, and a bundle of neither the old nor the new source".to_owned())
        }
    }

    fn check_output(&self, output: &Output, room: &TempDir, lasting: bool) -> Result<(), String> {
        let message = String::from_utf8_lossy(&output.stderr);
        let found = made(room.path());
        if output.status.success() && found.get(Path::new(OUT)) != self.wanted.get(Path::new(OUT)) {
            return Err("success, and another bundle".to_owned());
        }
        let is_told = |line: &str| line.starts_with("ls-prep: ") && line.len() < 1000;
        let clear = match (output.status.code(), output.status.signal()) {
            (Some(0), _) | (None, Some(SIGABRT)) => true,
            (Some(2..=7), _) => message.lines().last().is_some_and(is_told),
            _ => false,
        };
        if !clear {
            return Err(format!("{:?}: {message}", output.status));
        }
        let final_names =
            |path: &Path| path.extension().is_some_and(|end| end == "bin" || end == "lsb");
        for (path, bytes) in found.iter().filter(|(path, _)| final_names(path)) {
            if !lasting && self.wanted.get(path) != Some(bytes) {
                return Err(format!("{} is not what it should be", path.display()));
            }
        }
        Ok(())
    }
}

/// Runs schedules; whatever fails is made smaller by leaving faults out, one by one.
fn run_schedules(seeds: std::ops::Range<u64>) {
    let bench = Bench::new();
    let (mut passed, mut failed) = (0, 0);
    for seed in seeds {
        let mut faults = bench.schedule(seed);
        match bench.judge(&faults) {
            Ok(false) => passed += 1,
            Ok(true) => failed += 1,
            Err(mut problem) => {
                let mut at = 0;
                while at < faults.len() {
                    let mut fewer = faults.clone();
                    fewer.remove(at);
                    match bench.judge(&fewer) {
                        Err(same) => (faults, problem) = (fewer, same),
                        Ok(_) => at += 1,
                    }
                }
                panic!("seed {seed}, of {} operations: {problem}\n{faults:?}", bench.operations);
            }
        }
    }
    eprintln!(
        "{passed} gave the right bundle at once, {failed} an error and then the right bundle"
    );
    assert!(passed > 0 && failed > 0, "{passed} passed, {failed} failed: both must be seen");
}

/// Whether this process ignores a signal, as what runs in a shell's background does with SIGINT.
fn is_ignored(signal: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal - 1) & 1 == 1
}

/// What is being packed is removed by the signal that ends the program.
#[test]
fn a_signal_leaves_no_half_bundle() {
    let dir = TempDir::new().unwrap();
    let program = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ls-prep"));
        command.current_dir(dir.path());
        command
    };
    // Large enough to be met in the middle.
    let mut synth = program();
    synth.args([
        "synth",
        "--out",
        "model",
        "--layers",
        "40",
        "--hidden",
        "256",
        "--neurons",
        "2048",
    ]);
    assert!(synth.output().unwrap().status.success());
    for (number, signal) in [(2, "INT"), (15, "TERM")] {
        if is_ignored(number) {
            eprintln!(
                "SIG{signal}: whoever started these tests has it ignored, and so it is by what they start"
            );
            continue;
        }
        let mut import = program().args(["import", "model", "--out", OUT]).spawn().unwrap();
        let half = || {
            let names = std::fs::read_dir(dir.path()).unwrap();
            names
                .filter(|entry| {
                    entry.as_ref().unwrap().path().extension().is_some_and(|end| end == "tmp")
                })
                .count()
        };
        while half() == 0 && import.try_wait().unwrap().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let begun = std::time::Instant::now();
        let kill = Command::new("kill").args(["-s", signal, &import.id().to_string()]).status();
        assert!(kill.unwrap().success());
        let status = import.wait().unwrap();
        eprintln!("SIG{signal}: over after {:.1} ms", 1e3 * begun.elapsed().as_secs_f64());
        assert!(status.signal().is_some(), "{status}: it was over before");
        assert_eq!((half(), dir.path().join(OUT).exists()), (0, false));
    }
}

#[test]
fn faults_give_the_right_bundle_or_a_clear_error() {
    run_schedules(0..12);
}

#[test]
#[ignore = "takes minutes; `make faults`"]
fn a_thousand_schedules_of_faults() {
    run_schedules(0..1000);
}
