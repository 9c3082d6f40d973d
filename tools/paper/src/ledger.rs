//! [`Ledger`]: what has been measured, a line of JSON for each job that has ended.
//!
//! Lines are only added, each in one write and synced: a run that is killed loses the job in work. A torn last line is
//! left behind by a crash and is ignored; any other line that cannot be read is an error, as it was not written here.

use crate::{PaperError, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// A job that has ended.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct Entry {
    /// The job's key.
    pub key: String,
    /// Its command.
    pub command: String,
    /// Limit of the memory cgroup that it ran in; null: none was asked for, or the system gives none.
    pub limit_bytes: Option<u64>,
    /// Which repetition.
    pub rep: u32,
    /// Exit code; null if a signal or the clock ended it.
    pub exit: Option<i32>,
    /// How long it took.
    pub seconds: f64,
    /// The objects that it printed.
    pub output: Vec<Value>,
    /// The last line of its standard error, if it failed.
    pub error: Option<String>,
}

/// Exit codes that are answers: what was asked for does not fit, or is not there.
const ANSWERS: [i32; 3] = [0, 5, 6];

#[cfg(test)]
impl Entry {
    /// Of a command that ended well and printed `output`.
    pub(crate) fn printed(output: Vec<Value>) -> Entry {
        Entry {
            key: String::new(),
            command: String::new(),
            limit_bytes: None,
            rep: 0,
            exit: Some(0),
            seconds: 1.0,
            output,
            error: None,
        }
    }
}

impl Entry {
    /// Whether running it again would tell nothing new.
    #[must_use]
    pub fn is_answer(&self) -> bool {
        self.exit.is_some_and(|code| ANSWERS.contains(&code))
    }

    /// A number of the last object that was printed; dots lead into objects.
    #[must_use]
    pub fn number(&self, key: &str) -> Option<f64> {
        self.field(key)?.as_f64()
    }

    /// A field of the last object; dots lead into objects.
    #[must_use]
    pub fn field(&self, key: &str) -> Option<&Value> {
        key.split('.').try_fold(self.output.last()?, |value, part| value.get(part))
    }

    /// An array of numbers of the last object.
    #[must_use]
    pub fn numbers(&self, key: &str) -> Vec<f64> {
        numbers(self.field(key))
    }
}

/// Those of an array, if it is one.
pub(crate) fn numbers(array: Option<&Value>) -> Vec<f64> {
    let array = array.and_then(Value::as_array);
    array.into_iter().flatten().filter_map(Value::as_f64).collect()
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Ledger {
    path: PathBuf,
    file: File,
    entries: BTreeMap<String, Entry>,
}

impl Ledger {
    /// Opens or makes it.
    ///
    /// # Errors
    /// If the file cannot be read or written, or has a line that is none of ours.
    pub fn open(path: &Path) -> Result<Ledger> {
        let io = |source| PaperError::io(path, source);
        let mut file =
            OpenOptions::new().create(true).read(true).append(true).open(path).map_err(io)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io)?;
        let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
        if whole < bytes.len() {
            file.set_len(whole as u64).map_err(io)?;
        }
        let mut entries = BTreeMap::new();
        for (index, line) in bytes[..whole].split(|&byte| byte == b'\n').enumerate() {
            if line.is_empty() {
                continue;
            }
            let entry: Entry = serde_json::from_slice(line).map_err(|error| {
                PaperError::corrupt(format!("{}: line {}", path.display(), index + 1), error)
            })?;
            entries.insert(entry.key.clone(), entry);
        }
        Ok(Ledger { path: path.to_owned(), file, entries })
    }

    /// What came of the job with this key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Entry> {
        self.entries.get(key)
    }

    /// All entries, by their keys.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// Adds a job that has ended; it stays when power goes.
    pub fn add(&mut self, entry: Entry) -> Result<()> {
        let mut line = serde_json::to_vec(&entry).expect("plain data");
        line.push(b'\n');
        let written = self.file.write_all(&line).and_then(|()| self.file.sync_data());
        written.map_err(|source| PaperError::io(&self.path, source))?;
        self.entries.insert(entry.key.clone(), entry);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(key: &str, exit: Option<i32>) -> Entry {
        let first = json!({"rate": 1.0});
        let last = json!({"rate": 2.0, "device": {"power_w": 5}, "by_layer": [1, 2.5, null]});
        Entry { key: key.into(), exit, ..Entry::printed(vec![first, last]) }
    }

    #[test]
    fn figures_are_those_of_the_last_object() {
        let entry = entry("a", Some(0));
        assert_eq!((entry.number("rate"), entry.number("device.power_w")), (Some(2.0), Some(5.0)));
        assert_eq!((entry.number("device"), entry.number("rate.power_w")), (None, None));
        assert_eq!((entry.numbers("by_layer"), entry.numbers("rate")), (vec![1.0, 2.5], vec![]));
    }

    #[test]
    fn what_does_not_fit_or_is_not_there_is_an_answer_and_a_crash_is_none() {
        let codes = [Some(0), Some(5), Some(6), Some(1), Some(2), Some(3), Some(4), Some(7), None];
        let answers = codes.map(|exit| entry("a", exit).is_answer());
        assert_eq!(answers, [true, true, true, false, false, false, false, false, false]);
    }

    #[test]
    fn a_torn_line_is_cut_off_and_the_last_of_a_key_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        let mut ledger = Ledger::open(&path).unwrap();
        ledger.add(entry("a", None)).unwrap();
        ledger.add(entry("b", Some(0))).unwrap();
        ledger.add(entry("a", Some(6))).unwrap();
        drop(ledger);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&whole[..], b"{\"key\": \"c"].concat()).unwrap();
        let mut ledger = Ledger::open(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        assert_eq!((ledger.get("a").unwrap().exit, ledger.get("c")), (Some(6), None));
        ledger.add(entry("c", Some(0))).unwrap();
        let ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.entries().map(|entry| entry.key.as_str()).collect::<String>(), "abc");
    }
}
