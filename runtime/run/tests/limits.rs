//! A world that gives less: system calls, memory, files, disks and time that are refused, and signals. The same tokens or
//! a clear end, and nothing half-written.

mod cgroup;
mod sample;

#[path = "../../io/tests/refusal/mod.rs"]
mod refusal;

use cgroup::Cgroup;
use refusal::{Refusal, refuse};
use serde_json::Value;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A bundle in a folder of its own, and one for what the program remembers.
struct Bench {
    bundle: TempDir,
    cache: TempDir,
}

impl Bench {
    fn new() -> Bench {
        let bench = Bench { bundle: TempDir::new().unwrap(), cache: TempDir::new().unwrap() };
        sample::write(&bench.path());
        bench
    }

    fn path(&self) -> PathBuf {
        self.bundle.path().join("sample.lsb")
    }

    /// A command that generates `tokens` tokens, half of the weights streamed.
    fn generate(&self, tokens: u32) -> Command {
        self.generate_in(&["--weight-cache", "50%"], tokens)
    }

    fn generate_in(&self, memory: &[&str], tokens: u32) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ls-run"));
        command.arg("generate").arg(self.path()).args([
            "-p",
            "The sea",
            "--temp",
            "0",
            "--ignore-eos",
        ]);
        command.args(["--context", "4000", "-n", &tokens.to_string(), "--threads", "2"]);
        command.args(memory);
        command.env("XDG_CACHE_HOME", self.cache.path());
        command
    }

    /// The tokens of a run that must succeed.
    fn tokens(&self, command: &mut Command) -> Value {
        let output = command.arg("--json").output().unwrap();
        assert!(output.status.success(), "{:?}", output);
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(said["tokens"].as_array().is_some_and(|tokens| tokens.len() == 20), "{said}");
        said["tokens"].clone()
    }

    fn usual(&self) -> Value {
        self.tokens(&mut self.generate(20))
    }

    /// The same command under a shell that first says `limit`.
    fn under(&self, limit: &str, generate: &Command) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("{limit} && exec \"$0\" \"$@\""));
        command.arg(generate.get_program()).args(generate.get_args());
        command.env("XDG_CACHE_HOME", self.cache.path());
        command
    }

    /// That nothing lies beside the bundle.
    fn assert_clean(&self) {
        let names = std::fs::read_dir(self.bundle.path()).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["sample.lsb"]);
    }
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn where_io_uring_is_forbidden_the_tokens_are_the_same() {
    let bench = Bench::new();
    let usual = bench.usual();
    for errno in [libc::EPERM, libc::ENOSYS] {
        let mut command = bench.generate(20);
        let refusal = Refusal { call: libc::SYS_io_uring_setup, argument_bits: 0, errno };
        // SAFETY: between fork and exec only system calls are made: the filter is made on the stack.
        unsafe {
            command.pre_exec(move || {
                refuse(&refusal);
                Ok(())
            });
        }
        assert_eq!(bench.tokens(&mut command), usual, "error {errno}");
    }
}

#[test]
fn little_locked_memory_and_few_files_are_enough() {
    let bench = Bench::new();
    let usual = bench.usual();
    for limit in ["ulimit -l 64", "ulimit -n 32"] {
        assert_eq!(bench.tokens(&mut bench.under(limit, &bench.generate(20))), usual, "{limit}");
    }
}

/// The least budget that there can be, and hardly a byte more from the kernel.
#[test]
fn a_budget_holds_under_a_limit_of_its_size() {
    let bench = Bench::new();
    let usual = bench.usual();
    let refused = bench.generate_in(&["--memory", "1MiB"], 20).output().unwrap();
    assert_eq!(refused.status.code(), Some(6), "{}", told(&refused));
    // The message says what would be enough, in MiB with one decimal.
    let told = told(&refused);
    let number = |word: &str| word.trim_matches('(').parse::<f64>().ok();
    let least_mib = told.split_whitespace().filter_map(number).fold(0.0, f64::max);
    assert!(least_mib > 2.0, "{told}");
    let budget = ((least_mib + 0.1) * f64::from(1 << 20)) as u64;
    // Beside the process's own memory the kernel charges for page tables and the like.
    let group = match Cgroup::make(budget + (2 << 20)) {
        Ok(group) => group,
        Err(error) => return eprintln!("NOT TESTED: no memory cgroup can be made here ({error})"),
    };
    let generate = bench.generate_in(&["--memory", &budget.to_string()], 20);
    let join = format!("echo $$ > {}/cgroup.procs", group.0.display());
    assert_eq!(bench.tokens(&mut bench.under(&join, &generate)), usual);
}

#[test]
fn a_read_only_file_system_is_enough() {
    let bench = Bench::new();
    let usual = bench.usual();
    let folder = bench.bundle.path().display();
    // A world of mounts of its own, in which the bundle's folder and the cache's cannot be written.
    let cache = bench.cache.path().display();
    let mount = |at: &str| format!("mount --bind {at} {at} && mount -o remount,bind,ro {at}");
    let script = format!(
        "{} && {} && ! touch {folder}/x 2>/dev/null",
        mount(&folder.to_string()),
        mount(&cache.to_string())
    );
    let possible = Command::new("unshare").args(["-rm", "sh", "-c", &script]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        return eprintln!("NOT TESTED: no file system can be mounted here");
    }
    let generate = bench.generate(20);
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", &format!("{script} && exec \"$0\" \"$@\"")]);
    command.arg(generate.get_program()).args(generate.get_args());
    command.env("XDG_CACHE_HOME", bench.cache.path());
    assert_eq!(bench.tokens(&mut command), usual);
}

#[test]
fn a_full_disk_is_told() {
    let bench = Bench::new();
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    for json in [&[][..], &["--json"]] {
        let output = bench.generate(20).args(json).stdout(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(7), "{}", told(&output));
        assert!(told(&output).contains("No space left"), "{}", told(&output));
    }
}

/// A run that is in the middle of its answer.
fn started(bench: &Bench) -> Child {
    let mut child =
        bench.generate(3900).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 8]).unwrap();
    child
}

#[test]
fn a_signal_ends_it_at_once_and_leaves_nothing() {
    let bench = Bench::new();
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let mut child = started(&bench);
        let begun = Instant::now();
        // SAFETY: a signal to a child that was not waited for, so its number is its own.
        unsafe { libc::kill(child.id() as i32, signal) };
        let status = child.wait().unwrap();
        eprintln!("signal {signal}: over after {:.1} ms", 1e3 * begun.elapsed().as_secs_f64());
        assert!(begun.elapsed() < Duration::from_secs(30), "it goes on");
        assert_eq!(status.signal(), Some(signal), "{status}");
        bench.assert_clean();
    }
}

#[test]
fn a_reader_that_has_enough_ends_it_quietly() {
    let bench = Bench::new();
    let mut child = started(&bench);
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    assert!(!told(&output).contains("panicked"), "{}", told(&output));
    bench.assert_clean();
}

/// A number of a file of `/proc`, by its name there.
fn proc_number(child: &Child, file: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/{file}", child.id())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn decoding_writes_nothing_and_swaps_nothing() {
    if std::fs::read_to_string("/proc/self/io").is_err() {
        return eprintln!("NOT TESTED: the kernel does not count what a process writes");
    }
    let bench = Bench::new();
    let mut child = started(&bench);
    let before = proc_number(&child, "io", "write_bytes");
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 200]).unwrap();
    let written = proc_number(&child, "io", "write_bytes") - before;
    let swapped = proc_number(&child, "status", "VmSwap");
    child.kill().unwrap();
    child.wait().unwrap();
    eprintln!("{written} bytes written, {swapped} KiB swapped");
    assert_eq!((written, swapped), (0, 0));
}

/// Time is only measured by the clock that nobody sets, so a jump of the other one changes nothing.
#[test]
fn only_dates_come_from_the_clock_that_can_jump() {
    let runtime = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    let mut open = vec![runtime.clone()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() && name != "tests" && name != "target" {
                open.push(path);
            } else if name.ends_with(".rs")
                && std::fs::read_to_string(&path).unwrap().contains("SystemTime::now")
            {
                found.push(path.strip_prefix(&runtime).unwrap().display().to_string());
            }
        }
    }
    found.sort();
    // The date that a chat template shows, seeds, and when an answer was made.
    assert_eq!(found, ["run/src/cmd/chat.rs", "serve/src/reply.rs", "serve/src/routes.rs"]);
}
