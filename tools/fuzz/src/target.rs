//! [`Target`]: one way in, and [`Session`]: a target being run.

use crate::allocations::peak_bytes;
use crate::mutation::{Mutator, Shape};
use crate::targets;
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest that one input may take.
pub const MAX_TIME: Duration = Duration::from_secs(1);
/// Most memory that one input may make a reader hold.
pub const MAX_PEAK_BYTES: u64 = 64 << 20;

/// Reads an input. What it finds wrong is not told: it is the panics that count.
pub type Run = Box<dyn FnMut(&[u8])>;

/// A reader of bytes that others wrote.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, also of its corpus.
    pub name: &'static str,
    /// What it reads.
    pub reads: &'static str,
    /// Words of its language, if it is a text.
    pub(crate) words: &'static [&'static str],
    /// Whether changes of length are mostly found at once.
    pub(crate) rigid: bool,
    /// The parts of a good input; none: it is one.
    pub(crate) parts: fn(&[u8]) -> Vec<Range<usize>>,
    /// Makes the checksums right, as far as there is something left to sum.
    pub(crate) seal: fn(&mut [u8]),
    /// Prepares to read, with a folder of its own.
    pub(crate) open: fn(&Path) -> Run,
}

impl Target {
    /// A target without checksums and parts.
    pub(crate) const fn new(
        name: &'static str,
        reads: &'static str,
        open: fn(&Path) -> Run,
    ) -> Target {
        Target { name, reads, words: &[], rigid: false, parts: |_| Vec::new(), seal: |_| (), open }
    }

    /// The committed inputs.
    ///
    /// # Panics
    /// If there are none.
    #[must_use]
    pub fn corpus(&self) -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(self.name);
        let entries = folder.read_dir().unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let mut paths: Vec<PathBuf> =
            entries.map(|entry| entry.expect("a folder's entry").path()).collect();
        paths.sort();
        assert!(!paths.is_empty(), "{} is empty", folder.display());
        paths.iter().map(|path| std::fs::read(path).expect("a corpus can be read")).collect()
    }
}

/// All targets.
pub static TARGETS: &[Target] = targets::ALL;

/// What became of one input.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Time by the clock.
    pub took: Duration,
    /// Most bytes held beyond those before.
    pub peak_bytes: u64,
    /// What a panic said, and where it was.
    pub panic: Option<String>,
}

impl Outcome {
    /// The promise that was broken, if one was.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        if let Some(panic) = &self.panic {
            return Some(format!("panic: {panic}"));
        }
        if self.took > MAX_TIME {
            return Some(format!("took {:.1} s", self.took.as_secs_f64()));
        }
        (self.peak_bytes > MAX_PEAK_BYTES).then(|| format!("held {} MiB", self.peak_bytes >> 20))
    }
}

/// A target, its corpus and its reader.
pub struct Session {
    target: Target,
    corpus: Vec<Vec<u8>>,
    parts: Vec<Vec<Range<usize>>>,
    scratch: TempDir,
    run: Run,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("target", &self.target.name).finish_non_exhaustive()
    }
}

impl Session {
    /// Opens a target.
    ///
    /// # Panics
    /// If there is no corpus, or no room for a scratch folder.
    #[must_use]
    pub fn new(target: Target) -> Session {
        catch_panics_quietly();
        let corpus = target.corpus();
        let parts = corpus.iter().map(|bytes| (target.parts)(bytes)).collect();
        // In memory where there is such a place: a disk would be all that is measured.
        let shm = Path::new("/dev/shm");
        let scratch = if shm.is_dir() { TempDir::new_in(shm) } else { TempDir::new() };
        let scratch = scratch.expect("a scratch folder");
        let run = (target.open)(scratch.path());
        Session { target, corpus, parts, scratch, run }
    }

    /// Input number `seed`. The first are the corpus itself.
    #[must_use]
    pub fn input(&self, seed: u64) -> Vec<u8> {
        if let Some(good) = usize::try_from(seed).ok().and_then(|index| self.corpus.get(index)) {
            return good.clone();
        }
        let Target { words, rigid, seal, .. } = self.target;
        let mut mutator = Mutator::new(seed);
        let mut bytes =
            mutator.input(&self.corpus, |index| Shape { words, rigid, parts: &self.parts[index] });
        if mutator.below(8) > 0 {
            seal(&mut bytes);
        }
        bytes
    }

    /// Lets the target read `input`. One that seems slow is timed again: the machine may have been busy.
    pub fn execute(&mut self, input: &[u8]) -> Outcome {
        let mut outcome = self.execute_once(input);
        for _ in 0..2 {
            if outcome.panic.is_none() && outcome.took > MAX_TIME / 20 {
                outcome.took = outcome.took.min(self.execute_once(input).took);
            }
        }
        outcome
    }

    fn execute_once(&mut self, input: &[u8]) -> Outcome {
        let started = Instant::now();
        QUIET.set(true);
        let (result, peak_bytes) =
            peak_bytes(|| panic::catch_unwind(AssertUnwindSafe(|| (self.run)(input))));
        QUIET.set(false);
        let took = started.elapsed();
        let panic = result.is_err().then(|| LAST_PANIC.take());
        if panic.is_some() {
            self.run = (self.target.open)(self.scratch.path());
        }
        Outcome { took, peak_bytes, panic }
    }
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Panics of targets are kept instead of printed; those of others are printed as ever.
fn catch_panics_quietly() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if QUIET.get() {
                LAST_PANIC.set(info.to_string());
            } else {
                usual(info);
            }
        }));
    });
}

/// A file that is overwritten again and again, for readers that want one.
#[derive(Debug)]
pub(crate) struct Scratch {
    pub(crate) path: PathBuf,
    file: File,
}

impl Scratch {
    pub(crate) fn new(folder: &Path, name: &str) -> Scratch {
        let path = folder.join(name);
        let file = File::create(&path).expect("a scratch file");
        Scratch { path, file }
    }

    /// Makes `bytes` all that the file holds, but for `zeros` zeros behind them.
    pub(crate) fn put(&self, bytes: &[u8], zeros: u64) {
        // Cut to nothing first: what stands behind must be zeros.
        let len = bytes.len() as u64;
        self.file.set_len(len).expect("room for an input");
        self.file.write_all_at(bytes, 0).expect("room for an input");
        if zeros > 0 {
            self.file.set_len(len + zeros).expect("room for zeros");
        }
    }
}
