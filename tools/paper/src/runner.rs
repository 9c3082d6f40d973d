//! Runs jobs, one at a time, into the ledger.

use crate::job::{Job, Program, Stamps};
use crate::ledger::{Entry, Ledger};
use crate::limit::Limit;
use crate::panels::Absent;
use crate::{PaperError, Result};
use rustix::fs::Advice;
use serde::Serialize;
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What makes the kernel kill a command as soon as we are gone: nobody else ends what a killed run has started, and it
/// would go on for minutes, beside the next run. A process can ask for this only itself, between fork and exec, where Rust
/// calls nothing that is safe; so a program of util-linux asks and then becomes the command. An option of `ls-run` would
/// not do: peers are started too.
const LEASH: [&str; 3] = ["setpriv", "--pdeathsig", "KILL"];
/// What the command is started by: a shell that becomes it. `$1` is our number; if we were gone before the leash was
/// there the shell has another parent. `$2` is the list of the members of a memory cgroup, or nothing.
const START: &str =
    r#"[ "$PPID" = "$1" ] || exit 1; [ -z "$2" ] || echo $$ > "$2" || exit 1; shift 2; exec "$@""#;

/// A program and its hash.
type Known = (PathBuf, [u8; 32]);

/// The programs, and what they are known by.
#[derive(Debug)]
pub struct Programs {
    ls_run: Known,
    ls_prep: Known,
    /// Where each peer is, or why it is not here.
    peers: Vec<(Program, std::result::Result<Known, String>)>,
    /// Whether [`LEASH`] is there. Without it commands outlive a run that is killed.
    leash: bool,
}

impl Programs {
    /// Hashes the programs, and looks for what starts them. Of a peer that is not here `peers` says why.
    pub fn new(
        ls_run: &Path,
        ls_prep: &Path,
        peers: Vec<(Program, std::result::Result<PathBuf, String>)>,
    ) -> Result<Programs> {
        let known = |path: &Path| {
            let bytes = std::fs::read(path).map_err(|source| PaperError::io(path, source))?;
            Ok((path.to_owned(), *blake3::hash(&bytes).as_bytes()))
        };
        Ok(Programs {
            ls_run: known(ls_run)?,
            ls_prep: known(ls_prep)?,
            peers: peers
                .into_iter()
                .map(|(peer, place)| {
                    let place = place.map(|path| known(&path));
                    Ok((peer, place.map_or_else(|why| Ok(Err(why)), |found| found.map(Ok))?))
                })
                .collect::<Result<_>>()?,
            leash: Command::new(LEASH[0])
                .args(&LEASH[1..])
                .arg("true")
                .output()
                .is_ok_and(|output| output.status.success()),
        })
    }

    /// Starts `program`, which ends when the thread that calls this does.
    fn command(&self, program: &Path, limit: Option<&Limit>) -> Command {
        let start = if self.leash { &LEASH[..] } else { &[] };
        let mut words = start.iter().chain(&["/bin/sh"]);
        let mut command = Command::new(words.next().expect("the shell at least"));
        command.args(words).args(["-c", START, "sh", &std::process::id().to_string()]);
        command.arg(limit.map(Limit::members).unwrap_or_default()).arg(program);
        command
    }

    /// The peers that are here.
    pub fn peers(&self) -> impl Iterator<Item = Program> {
        self.peers.iter().filter(|(_, place)| place.is_ok()).map(|(peer, _)| *peer)
    }

    /// The peers that are not.
    #[must_use]
    pub fn absent(&self) -> Vec<Absent> {
        let absent = |(peer, place): &(Program, std::result::Result<_, String>)| {
            let why = place.as_ref().err()?.clone();
            Some(Absent { name: peer.title(), why })
        };
        self.peers.iter().filter_map(absent).collect()
    }

    fn of(&self, program: Program) -> Option<&Known> {
        match program {
            Program::LsRun => Some(&self.ls_run),
            Program::LsPrep => Some(&self.ls_prep),
            peer => self.peers.iter().find(|(other, _)| *other == peer)?.1.as_ref().ok(),
        }
    }

    pub(crate) fn hash(&self, program: Program) -> &[u8] {
        self.of(program).map_or(&[], |(_, hash)| hash)
    }
}

/// What the figures are true for.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Name of the processor.
    pub processor: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory of the machine.
    pub memory_bytes: u64,
    /// Release of the kernel.
    pub kernel: String,
}

impl Machine {
    /// This one, as far as the system tells.
    #[must_use]
    pub fn this() -> Machine {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split(':').nth(1)).unwrap_or("unknown").trim().to_owned()
        };
        let memory = field(&read("/proc/meminfo"), "MemTotal");
        let kib: u64 = memory.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        Machine {
            processor: field(&read("/proc/cpuinfo"), "model name"),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kib << 10,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        }
    }
}

/// Runs what the ledger has no answer for, in this order; tells `progress` of each job that is done (all, done). Returns how many ran.
///
/// # Errors
/// If a program cannot be started or the ledger not be written. A command that fails is an entry.
pub fn run(
    jobs: &[Job],
    programs: &Programs,
    ledger: &mut Ledger,
    mut progress: impl FnMut(usize, usize, &str),
) -> Result<usize> {
    let (mut stamps, mut ran) = (Stamps::default(), 0);
    for (done, job) in jobs.iter().enumerate() {
        let command = job.command();
        progress(jobs.len(), done, &command);
        let key = job.key(programs, &mut stamps)?;
        if ledger.get(&key).is_some_and(Entry::is_answer) {
            continue;
        }
        ledger.add(one(job, key, command, programs)?)?;
        ran += 1;
    }
    progress(jobs.len(), jobs.len(), "");
    Ok(ran)
}

fn one(job: &Job, key: String, command: String, programs: &Programs) -> Result<Entry> {
    let started = Instant::now();
    let Some((program, _)) = programs.of(job.program) else {
        let error = Some("the program is not there".to_owned());
        let (limit_bytes, output) = (None, Vec::new());
        return Ok(Entry {
            key,
            command,
            limit_bytes,
            rep: job.rep,
            exit: None,
            seconds: 0.0,
            output,
            error,
        });
    };
    // Pages that an earlier command left in the page cache would not count against this one's limit.
    job.inputs.iter().for_each(|input| evict(input));
    let limit = job.limit_bytes.and_then(Limit::new);
    let mut child = programs.command(program, limit.as_ref());
    child.args(&job.args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = child.spawn().map_err(|source| PaperError::io(program, source))?;
    let ended = ended(child, started, job.patience).map_err(|e| PaperError::io(program, e))?;
    let (exit, how, stdout, stderr) = ended;
    let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no last words");
    Ok(Entry {
        key,
        command,
        limit_bytes: limit.and(job.limit_bytes),
        rep: job.rep,
        exit,
        seconds: started.elapsed().as_secs_f64(),
        output: objects(&stdout),
        error: (exit != Some(0)).then(|| format!("{how}{}", last.trim())),
    })
}

/// Waits for the child, reading what it prints; kills one that takes too long. Its exit code, or what ended it before it
/// could give one; standard output and standard error.
fn ended(
    mut child: Child,
    started: Instant,
    patience: Duration,
) -> std::io::Result<(Option<i32>, String, String, String)> {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let text = |from: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // A pipe that breaks ends what is read; the exit code tells the rest.
            let _ = from.map(|mut from| from.read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let stdout = text(stdout.map(|out| Box::new(out) as Box<dyn Read + Send>));
    let stderr = text(stderr.map(|out| Box::new(out) as Box<dyn Read + Send>));
    let mut late = String::new();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if started.elapsed() > patience {
            late = format!("ended after {} s: ", patience.as_secs());
            child.kill()?;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let read = "a thread that only reads";
    let how = match status.signal() {
        Some(signal) if late.is_empty() => format!("ended by signal {signal}: "),
        _ => late,
    };
    Ok((status.code(), how, stdout.join().expect(read), stderr.join().expect(read)))
}

/// The objects in what was printed: one a line, or one array of them.
fn objects(stdout: &str) -> Vec<Value> {
    if let Ok(Value::Array(all)) = serde_json::from_str(stdout) {
        return all;
    }
    stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Asks the system to forget a file's pages. What it keeps costs accuracy, not rightness.
fn evict(path: &Path) {
    if let Ok(file) = File::open(path) {
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_found_in_lines_and_arrays() {
        assert_eq!(objects("{\"a\": 1}\nnoise\n{\"a\": 2}\n").len(), 2);
        assert_eq!(objects("[\n {\"a\": 1},\n {\"a\": 2}\n]\n").len(), 2);
        assert!(objects("nothing").is_empty());
    }
}
