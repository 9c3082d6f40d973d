//! [`Job`]: one command, and what its output is good for.

use crate::ledger::Entry;
use crate::panels::Panel;
use crate::runner::Programs;
use crate::{PaperError, Result};
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// What runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// The runtime.
    LsRun,
    /// The preparation tools.
    LsPrep,
    /// llama.cpp's own benchmark, a peer.
    LlamaBench,
    /// AirLLM's driver, a peer.
    AirLlm,
    /// mistral.rs' driver, a peer.
    MistralRs,
}

impl Program {
    /// Programs of others that are measured beside ours, where they are.
    pub const PEERS: [Program; 3] = [Program::LlamaBench, Program::AirLlm, Program::MistralRs];

    /// The name of its file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Program::LsRun => "ls-run",
            Program::LsPrep => "ls-prep",
            Program::LlamaBench => "llama-bench",
            Program::AirLlm => "airllm",
            Program::MistralRs => "mistralrs",
        }
    }

    /// What people call it.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Program::LlamaBench => "llama.cpp",
            Program::AirLlm => "AirLLM",
            Program::MistralRs => "mistral.rs",
            Program::LsRun | Program::LsPrep => "LeanStream",
        }
    }
}

/// A point of a series.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// The line of a plot, the row of a table.
    pub series: String,
    /// Where on the axis; in a table the column's place.
    pub x: f64,
    /// The column's head; empty on an axis.
    pub tick: String,
    /// The value.
    pub y: f64,
}

/// What is read from a job's output.
type Reader = Box<dyn Fn(&Entry) -> Vec<Reading>>;

/// Which panel a job's output is for.
pub struct Feed {
    /// The panel's id (see [`crate::PANELS`]).
    pub panel: &'static str,
    /// The points; none if the output lacks them.
    pub read: Reader,
}

impl fmt::Debug for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Feed").field("panel", &self.panel).finish_non_exhaustive()
    }
}

/// Bytes at a file's ends that stand for it: bundles and models differ there, and are too large to be hashed each time.
const STAMP_BYTES: u64 = 1 << 20;

/// None of our commands takes as long.
const PATIENCE: Duration = Duration::from_mins(40);

/// One command.
#[derive(Debug)]
pub struct Job {
    /// What runs.
    pub program: Program,
    /// Its arguments.
    pub args: Vec<String>,
    /// Files that it reads: other contents, other job.
    pub inputs: Vec<PathBuf>,
    /// Limit of the memory cgroup that it runs in.
    pub limit_bytes: Option<u64>,
    /// How long it may take; it is ended then.
    pub patience: Duration,
    /// Which repetition.
    pub rep: u32,
    /// Name of the model that it is about.
    pub model: String,
    /// What comes of it.
    pub feeds: Vec<Feed>,
}

impl Job {
    /// A first repetition without limit.
    #[must_use]
    pub fn new(program: Program, model: &str, args: Vec<String>, inputs: Vec<PathBuf>) -> Job {
        let model = model.to_owned();
        let (limit_bytes, rep, feeds) = (None, 0, Vec::new());
        Job { program, args, inputs, limit_bytes, patience: PATIENCE, rep, model, feeds }
    }

    /// The point (`x`, field `key` of the last object that the command prints) of `series`.
    #[must_use]
    pub fn point(self, panel: &'static str, series: &str, x: f64, key: &'static str) -> Job {
        self.cell(panel, series, (x, ""), move |entry| entry.number(key))
    }

    /// The point that `value` finds.
    #[must_use]
    pub fn cell(
        self,
        panel: &'static str,
        series: &str,
        (x, tick): (f64, &str),
        value: impl Fn(&Entry) -> Option<f64> + 'static,
    ) -> Job {
        let (series, tick) = (series.to_owned(), tick.to_owned());
        self.many(panel, move |entry| {
            let point = |y| Reading { series: series.clone(), x, tick: tick.clone(), y };
            value(entry).map(point).into_iter().collect()
        })
    }

    /// All points that `read` finds.
    #[must_use]
    pub fn many(
        mut self,
        panel: &'static str,
        read: impl Fn(&Entry) -> Vec<Reading> + 'static,
    ) -> Job {
        debug_assert!(Panel::named(panel).is_some(), "panel {panel}");
        self.feeds.push(Feed { panel, read: Box::new(read) });
        self
    }

    /// The command as a shell takes it, with the programs' plain names.
    #[must_use]
    pub fn command(&self) -> String {
        let plain = |arg: &str| {
            !arg.is_empty()
                && arg.chars().all(|c| c.is_ascii_alphanumeric() || "-_./%+=,:".contains(c))
        };
        let quoted = self.args.iter().map(|arg| {
            if plain(arg) { arg.clone() } else { format!("'{}'", arg.replace('\'', "'\\''")) }
        });
        std::iter::once(self.program.name().to_owned()).chain(quoted).collect::<Vec<_>>().join(" ")
    }

    /// What the job is known by: program, arguments, inputs, limit and repetition.
    pub fn key(&self, programs: &Programs, stamps: &mut Stamps) -> Result<String> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(programs.hash(self.program));
        for arg in &self.args {
            hasher.update(arg.as_bytes()).update(b"\0");
        }
        for input in &self.inputs {
            hasher.update(&stamps.of(input)?);
        }
        hasher.update(&self.limit_bytes.unwrap_or(0).to_le_bytes()).update(&self.rep.to_le_bytes());
        Ok(hasher.finalize().to_hex()[..32].to_owned())
    }
}

/// What inputs are known by. Many jobs read the same bundle: it is read once, and again where it was written since.
#[derive(Debug, Default)]
pub struct Stamps(HashMap<PathBuf, ((u64, SystemTime), [u8; 32])>);

impl Stamps {
    /// A file's length and the hash of its ends.
    fn of(&mut self, path: &Path) -> Result<[u8; 32]> {
        let io = |source| PaperError::io(path, source);
        let mut file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        let (bytes, written) = (metadata.len(), metadata.modified().map_err(io)?);
        if let Some((state, stamp)) = self.0.get(path)
            && *state == (bytes, written)
        {
            return Ok(*stamp);
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&bytes.to_le_bytes());
        let mut end = Vec::new();
        file.by_ref().take(STAMP_BYTES).read_to_end(&mut end).map_err(io)?;
        hasher.update(&end);
        file.seek(SeekFrom::Start(bytes.saturating_sub(STAMP_BYTES))).map_err(io)?;
        end.clear();
        file.take(STAMP_BYTES).read_to_end(&mut end).map_err(io)?;
        hasher.update(&end);
        let stamp = *hasher.finalize().as_bytes();
        self.0.insert(path.to_owned(), ((bytes, written), stamp));
        Ok(stamp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_takes_the_command() {
        let args = ["bench", "my model.lsb", "it's", "", "--sparsity", "80%"];
        let job = Job::new(Program::LsRun, "model", args.map(str::to_owned).into(), Vec::new());
        assert_eq!(job.command(), r"ls-run bench 'my model.lsb' 'it'\''s' '' --sparsity 80%");
    }
}
