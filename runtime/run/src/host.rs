//! [`Root`]: what the operating system says of the machine, in files below a folder.
//!
//! Everything that is decided by looking at `/proc` and `/sys` is decided here: how many threads compute, how much memory
//! there is to have, and what the sensors show. The folder is `/`, or a tree of fixtures: phones, boards and containers are
//! tested as text. What is missing, unreadable or nonsense counts as absent, and never as a number.

mod cgroup;
mod memory;
pub(crate) mod meter;
mod processors;
mod sensors;
#[cfg(test)]
mod tests;

pub(crate) use memory::{DefaultBudget, Memory};
pub(crate) use processors::Threads;

use std::io::Read;
use std::path::{Path, PathBuf};

/// What a file is read of at most: all that is looked at is shorter.
const MAX_BYTES: u64 = 256 << 10;
/// Entries of a folder that are looked at.
const MAX_ENTRIES: usize = 4096;

/// The folder.
#[derive(Clone, Debug)]
pub(crate) struct Root(PathBuf);

impl Root {
    /// This machine.
    pub(crate) fn here() -> Root {
        Root::at(Path::new("/"))
    }

    /// A machine whose files lie below `folder`.
    pub(crate) fn at(folder: &Path) -> Root {
        Root(folder.to_owned())
    }

    /// `relative` below the folder, wherever it says it begins.
    fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        let relative = relative.as_ref();
        self.0.join(relative.strip_prefix("/").unwrap_or(relative))
    }

    /// A file's text; None if there is none, or it is not text.
    fn read(&self, relative: impl AsRef<Path>) -> Option<String> {
        let mut text = String::new();
        let file = std::fs::File::open(self.path(relative)).ok()?;
        file.take(MAX_BYTES).read_to_string(&mut text).ok()?;
        Some(text)
    }

    /// A file that is one number.
    fn number(&self, relative: impl AsRef<Path>) -> Option<i64> {
        self.read(relative)?.trim().parse().ok()
    }

    /// A file that is one number, none of them negative.
    fn count(&self, relative: impl AsRef<Path>) -> Option<u64> {
        self.read(relative)?.trim().parse().ok()
    }

    /// The entries of a folder, by name, relative to the root.
    fn entries(&self, relative: impl AsRef<Path>) -> Vec<PathBuf> {
        let relative = relative.as_ref();
        let entries = std::fs::read_dir(self.path(relative)).into_iter().flatten().flatten();
        let mut names: Vec<PathBuf> =
            entries.take(MAX_ENTRIES).map(|entry| relative.join(entry.file_name())).collect();
        names.sort();
        names
    }
}

/// The figure behind `name` at the start of a line, without its unit.
fn figure(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}
