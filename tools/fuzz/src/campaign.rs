//! [`run`]: inputs by the million, on several threads, each target getting the same time.
//!
//! An input is known by its target and its number; one that breaks a promise is written to a file. What the process
//! itself does not survive (a stack that overflows, memory that the system refuses) is found by the note that each
//! thread keeps of the numbers it is at.

use crate::target::{Outcome, Session, TARGETS, Target};
use serde_json::json;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A turn of a target on a thread takes about so long.
const TURN: Duration = Duration::from_millis(250);
/// One input that takes so many looks at it, ten a second, never ends. Looks are counted and not time, which also goes
/// by while the whole machine stands still.
const HANG_LOOKS: u32 = 200;
/// More findings than this say nothing new.
const MAX_FINDINGS: u64 = 50;

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Ends after so long…
    pub time: Duration,
    /// … or after so many inputs.
    pub executions: u64,
    /// Threads.
    pub threads: usize,
    /// The targets.
    pub targets: Vec<Target>,
    /// Number of the first input of each target.
    pub first_seed: u64,
    /// Where findings are written.
    pub findings: PathBuf,
}

/// What became of a target's inputs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Inputs that were read.
    pub executions: u64,
    /// Those that broke a promise.
    pub findings: u64,
    /// Time of the slowest.
    pub slowest: Duration,
    /// Most bytes that one made its reader hold.
    pub peak_bytes: u64,
    /// Time of all.
    pub busy: Duration,
}

impl Tally {
    fn add(&mut self, other: &Tally) {
        self.executions += other.executions;
        self.findings += other.findings;
        self.slowest = self.slowest.max(other.slowest);
        self.peak_bytes = self.peak_bytes.max(other.peak_bytes);
        self.busy += other.busy;
    }

    fn count(&mut self, outcome: &Outcome) {
        self.executions += 1;
        self.slowest = self.slowest.max(outcome.took);
        self.peak_bytes = self.peak_bytes.max(outcome.peak_bytes);
    }
}

/// What the threads share.
struct Shared<'a> {
    options: &'a Options,
    started: Instant,
    /// The next turn: targets take turns.
    turn: AtomicU64,
    /// By target: the next input.
    seeds: Vec<AtomicU64>,
    tallies: Vec<Mutex<Tally>>,
    /// By thread: target, input, and whether it is being read.
    at: Vec<[AtomicU64; 3]>,
    over: AtomicBool,
}

/// Runs the targets; returns what became of them, in their order.
///
/// # Errors
/// If the folder of findings cannot be written.
pub fn run(options: &Options) -> io::Result<Vec<Tally>> {
    std::fs::create_dir_all(&options.findings)?;
    let shared = Shared {
        options,
        started: Instant::now(),
        turn: AtomicU64::new(0),
        seeds: options.targets.iter().map(|_| AtomicU64::new(options.first_seed)).collect(),
        tallies: options.targets.iter().map(|_| Mutex::default()).collect(),
        at: (0..options.threads).map(|_| Default::default()).collect(),
        over: AtomicBool::new(false),
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..options.threads)
            .map(|thread| {
                scope.spawn({
                    let shared = &shared;
                    move || shared.work(thread)
                })
            })
            .collect();
        shared.watch();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker catches panics"))
    })?;
    Ok(shared.tallies.iter().map(|tally| *lock(tally)).collect())
}

fn lock(tally: &Mutex<Tally>) -> std::sync::MutexGuard<'_, Tally> {
    tally.lock().expect("nobody panics with it")
}

impl Shared<'_> {
    fn total(&self) -> Tally {
        let mut total = Tally::default();
        self.tallies.iter().for_each(|tally| total.add(&lock(tally)));
        total
    }

    /// What a thread does.
    fn work(&self, thread: usize) -> io::Result<()> {
        let targets = &self.options.targets;
        let mut sessions: Vec<Option<Session>> = targets.iter().map(|_| None).collect();
        let mut sizes = vec![64u64; targets.len()];
        while !self.over.load(Ordering::Relaxed) {
            let index = (self.turn.fetch_add(1, Ordering::Relaxed) % targets.len() as u64) as usize;
            let session = sessions[index].get_or_insert_with(|| Session::new(targets[index]));
            let size = sizes[index];
            let first = self.seeds[index].fetch_add(size, Ordering::Relaxed);
            let note = note_of(&self.options.findings, thread);
            std::fs::write(&note, format!("{} {first} {size}\n", targets[index].name))?;
            let begun = Instant::now();
            let mut tally = Tally::default();
            for seed in first..first + size {
                self.begin(thread, index, seed);
                let input = session.input(seed);
                let outcome = session.execute(&input);
                tally.count(&outcome);
                if let Some(fault) = outcome.fault() {
                    tally.findings += 1;
                    self.keep(targets[index], seed, &input, &fault)?;
                }
            }
            self.at[thread][2].store(0, Ordering::Relaxed);
            tally.busy = begun.elapsed();
            lock(&self.tallies[index]).add(&tally);
            let ideal = size as f64 * TURN.as_secs_f64() / tally.busy.as_secs_f64();
            sizes[index] = (ideal as u64).clamp(1, 1 << 20).min(4 * size);
            std::fs::remove_file(&note)?;
        }
        Ok(())
    }

    fn begin(&self, thread: usize, index: usize, seed: u64) {
        for (at, value) in self.at[thread].iter().zip([index as u64, seed, 1]) {
            at.store(value, Ordering::Relaxed);
        }
    }

    fn keep(&self, target: Target, seed: u64, input: &[u8], fault: &str) -> io::Result<()> {
        let path = self.options.findings.join(format!("{}.{seed}", target.name));
        std::fs::write(&path, input)?;
        eprintln!("{}: {fault}", path.display());
        Ok(())
    }

    /// Tells how far it is, ends it in time, and ends the process if an input never ends.
    fn watch(&self) {
        let often = if io::stderr().is_terminal() {
            Duration::from_secs(1)
        } else {
            Duration::from_secs(60)
        };
        let mut told = Instant::now();
        let mut looks = vec![([0; 3], 0); self.at.len()];
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let (total, elapsed) = (self.total(), self.started.elapsed());
            let done = elapsed >= self.options.time || total.executions >= self.options.executions;
            if done || total.findings >= MAX_FINDINGS {
                self.over.store(true, Ordering::Relaxed);
                return;
            }
            if told.elapsed() >= often {
                told = Instant::now();
                self.tell(&total, elapsed);
            }
            for (at, looks) in self.at.iter().zip(&mut looks) {
                let now = [0, 1, 2].map(|i| at[i].load(Ordering::Relaxed));
                *looks = if looks.0 == now { (now, looks.1 + 1) } else { (now, 0) };
                let [index, seed, busy] = now;
                if busy > 0 && looks.1 > HANG_LOOKS {
                    let target = self.options.targets[index as usize];
                    let input = Session::new(target).input(seed);
                    let kept = self.keep(target, seed, &input, "does not end");
                    eprintln!("the run ends here ({kept:?})");
                    std::process::exit(1);
                }
            }
        }
    }

    fn tell(&self, total: &Tally, elapsed: Duration) {
        let rate = total.executions as f64 / elapsed.as_secs_f64();
        let by_count = self.options.executions.saturating_sub(total.executions) as f64 / rate;
        let by_time = self.options.time.saturating_sub(elapsed).as_secs_f64();
        let end = if io::stderr().is_terminal() { "\r" } else { "\n" };
        eprint!(
            "{} inputs, {rate:.0} a second, {} findings, {:.0} s left {end}",
            total.executions,
            total.findings,
            by_count.min(by_time),
        );
        let _ = io::stderr().flush();
    }
}

/// Where a thread notes what it is at.
fn note_of(findings: &Path, thread: usize) -> PathBuf {
    findings.join(format!("running.{thread}"))
}

/// The notes of a run that did not end: which inputs it was at. They are cleared away.
#[must_use]
pub fn notes_of_the_last_run(findings: &Path) -> Vec<String> {
    let Ok(entries) = findings.read_dir() else { return Vec::new() };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let notes = paths.filter(|path| path.file_stem().is_some_and(|stem| stem == "running"));
    let text = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).ok()?;
        std::fs::remove_file(&path).ok()?;
        Some(text.trim().to_owned())
    };
    notes.filter_map(text).collect()
}

/// One line a target.
#[must_use]
pub fn table(targets: &[Target], tallies: &[Tally]) -> String {
    let mut text = format!(
        "{:<18} {:>12} {:>9} {:>8} {:>11} {:>11}\n",
        "target", "executions", "a second", "findings", "slowest ms", "peak KiB"
    );
    for (target, tally) in targets.iter().zip(tallies) {
        let rate = tally.executions as f64 / tally.busy.as_secs_f64().max(1e-9);
        text += &format!(
            "{:<18} {:>12} {rate:>9.0} {:>8} {:>11.1} {:>11}\n",
            target.name,
            tally.executions,
            tally.findings,
            1e3 * tally.slowest.as_secs_f64(),
            tally.peak_bytes >> 10,
        );
    }
    text
}

/// The last line: all targets together.
#[must_use]
pub fn summary(tallies: &[Tally], elapsed: Duration) -> serde_json::Value {
    let mut total = Tally::default();
    tallies.iter().for_each(|tally| total.add(tally));
    json!({
        "executions": total.executions,
        "crashes": total.findings,
        "slowest_ms": (1e4 * total.slowest.as_secs_f64()).round() / 10.0,
        "peak_bytes": total.peak_bytes,
        "targets": tallies.len(),
        "seconds": elapsed.as_secs_f64().round(),
    })
}

/// The target of a finding's file, by its name.
#[must_use]
pub fn target_of(finding: &Path) -> Option<Target> {
    let name = finding.file_name()?.to_str()?;
    TARGETS.iter().find(|target| name.split('.').next() == Some(target.name)).copied()
}
