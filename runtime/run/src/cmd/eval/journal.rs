//! [`Journal`]: the results of an evaluation, item by item, in memory or in a file that a later run goes on from.
//!
//! A file's first line says which run it belongs to; each other line is one item, written in one piece as soon as it is
//! known, so a run that is killed loses the item in work and nothing else. What a killed run left of a line is cut off.
//! Totals are computed from the lines' text in either case: a run in two parts gives the same bits as one.

use super::data::{Class, DataError};
use crate::exit::UsageError;
use anyhow::Context;
use serde_json::{Value, json};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::Path;

/// Version of the lines.
const VERSION: u64 = 1;
/// Bytes of a line; records hold texts of one item and a few figures.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Journal {
    file: Option<File>,
    totals: Totals,
    /// The item behind the last one that is known.
    next: u64,
    resumed: u64,
}

impl Journal {
    /// A journal of the run that `run` describes. Without a path it is in memory only.
    ///
    /// # Errors
    /// The file is of another run, in use, or damaged; or the system refuses.
    pub(crate) fn open(path: Option<&Path>, run: &Value) -> anyhow::Result<Journal> {
        let mut journal = Journal { file: None, totals: Totals::default(), next: 0, resumed: 0 };
        let Some(path) = path else { return Ok(journal) };
        let context = || format!("opening {}", path.display());
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path);
        let mut file = file.with_context(context)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let text = format!("{}: another run is writing it", path.display());
                return Err(UsageError(text).into());
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(context),
        }
        let whole = journal.read(path, &file, run)?;
        // What a killed run left of its last line.
        file.set_len(whole).with_context(context)?;
        file.seek(SeekFrom::Start(whole)).with_context(context)?;
        if whole == 0 {
            file.write_all(header(run).as_bytes()).with_context(context)?;
        }
        journal.resumed = journal.totals.items;
        journal.file = Some(file);
        Ok(journal)
    }

    /// Takes what complete lines say; returns the bytes that they take.
    fn read(&mut self, path: &Path, file: &File, run: &Value) -> anyhow::Result<u64> {
        let (mut reader, mut line, mut whole) = (BufReader::new(file), Vec::new(), 0);
        for number in 1u64.. {
            line.clear();
            let limited = &mut std::io::Read::take(&mut reader, MAX_LINE_BYTES);
            limited
                .read_until(b'\n', &mut line)
                .with_context(|| format!("reading {}", path.display()))?;
            let corrupt = |problem: &str| {
                DataError::new(Class::Corrupt, path, format!("line {number}"), problem)
            };
            if line.len() as u64 == MAX_LINE_BYTES {
                return Err(corrupt("is too long").into());
            }
            if line.last() != Some(&b'\n') {
                // Nothing that others wrote is cut off.
                if number == 1 && !header(run).as_bytes().starts_with(&line) {
                    return Err(foreign(path).into());
                }
                break;
            }
            let value: Value =
                serde_json::from_slice(&line).map_err(|error| corrupt(&error.to_string()))?;
            if number == 1 {
                same_run(path, &value, run)?;
            } else {
                let is_next = |item: &u64| (self.next..u64::MAX).contains(item);
                let item = value["item"].as_u64().filter(is_next);
                self.next = item.ok_or_else(|| corrupt("is no item behind the one before"))? + 1;
                self.totals.add(&value);
            }
            whole += line.len() as u64;
        }
        Ok(whole)
    }

    /// Whether the item with this number is known already.
    pub(crate) fn has(&self, item: u64) -> bool {
        item < self.next
    }

    /// Items that were known when the journal was opened.
    pub(crate) fn resumed(&self) -> u64 {
        self.resumed
    }

    /// One more item. `record` has its number as `item` and its scores, by name, as `scores`.
    pub(crate) fn add(&mut self, record: &Value) -> anyhow::Result<()> {
        let item = record["item"].as_u64().expect("records are numbered");
        assert!(!self.has(item), "item {item} is known");
        let is_number = |(_, value): (&String, &Value)| value.is_number();
        let scores = record["scores"].as_object().expect("records have scores");
        // JSON has no NaN, and no mean should be without the items that had one.
        anyhow::ensure!(
            scores.iter().all(is_number),
            "item {item} has a score that is no number: {record}"
        );
        let line = format!("{record}\n");
        if let Some(file) = &mut self.file {
            file.write_all(line.as_bytes()).context("writing the results")?;
        }
        // As the next run will read it.
        self.totals.add(&serde_json::from_str(&line)?);
        self.next = item + 1;
        Ok(())
    }

    /// All items so far.
    pub(crate) fn totals(&self) -> &Totals {
        &self.totals
    }
}

/// The first line of a run's file.
fn header(run: &Value) -> String {
    format!("{}\n", json!({"leanstream_eval": VERSION, "run": run}))
}

fn foreign(path: &Path) -> DataError {
    DataError::new(Class::Foreign, path, "", "holds no results of `ls-run eval`")
}

/// Refuses a file whose first line is of another run, and says what differs.
fn same_run(path: &Path, first: &Value, run: &Value) -> anyhow::Result<()> {
    let version = &first["leanstream_eval"];
    if version.is_null() {
        return Err(foreign(path).into());
    }
    if *version != VERSION {
        let problem = format!("has version {version} of its lines, this is {VERSION}");
        return Err(DataError::new(Class::Foreign, path, "", problem).into());
    }
    let (Value::Object(there), Value::Object(here)) = (&first["run"], run) else {
        return Err(DataError::new(Class::Corrupt, path, "line 1", "names no run").into());
    };
    let differs = |key: &&String| there.get(*key) != here.get(*key);
    let Some(key) = here.keys().chain(there.keys()).find(differs) else { return Ok(()) };
    let of =
        |run: &serde_json::Map<String, Value>| run.get(key).unwrap_or(&Value::Null).to_string();
    let text = format!(
        "{} holds results of another run: {key} is {} there and {} here; name another file",
        path.display(),
        of(there),
        of(here)
    );
    Err(UsageError(text).into())
}

/// Means over items.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    items: u64,
    scores: Vec<(String, Mean)>,
    sums: Vec<(String, f64)>,
}

/// A running mean and the squares around it (Welford).
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    count: f64,
    mean: f64,
    squares: f64,
}

impl Totals {
    fn add(&mut self, record: &Value) {
        self.items += 1;
        for (name, value) in numbers(&record["scores"]) {
            let at = place(&mut self.scores, name, Mean::default());
            at.count += 1.0;
            let off = value - at.mean;
            at.mean += off / at.count;
            at.squares += off * (value - at.mean);
        }
        for (name, value) in numbers(&record["sums"]) {
            *place(&mut self.sums, name, 0.0) += value;
        }
    }

    pub(crate) fn items(&self) -> u64 {
        self.items
    }

    /// The sum of a figure; 0 if no item had it.
    pub(crate) fn sum(&self, name: &str) -> f64 {
        self.sums.iter().find(|(found, _)| found == name).map_or(0.0, |(_, sum)| *sum)
    }

    /// The mean of each score; where there are two items or more also its standard error, as `name_stderr`.
    pub(crate) fn means(&self) -> Value {
        let mut object = json!({});
        for (name, mean) in &self.scores {
            object[name] = mean.mean.into();
            if mean.count > 1.0 {
                let variance = mean.squares / (mean.count - 1.0);
                object[format!("{name}_stderr")] = (variance / mean.count).sqrt().into();
            }
        }
        object
    }

    /// The mean of one.
    pub(crate) fn mean(&self, name: &str) -> Option<f64> {
        self.scores.iter().find(|(found, _)| found == name).map(|(_, mean)| mean.mean)
    }

    /// The names of all scores.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.scores.iter().map(|(name, _)| name.as_str())
    }
}

/// The numbers of an object, by name.
fn numbers(object: &Value) -> impl Iterator<Item = (&str, f64)> {
    let fields = object.as_object().into_iter().flatten();
    fields.filter_map(|(name, value)| Some((name.as_str(), value.as_f64()?)))
}

fn place<'a, T>(list: &'a mut Vec<(String, T)>, name: &str, new: T) -> &'a mut T {
    let found = list.iter().position(|(found, _)| found == name);
    let index = found.unwrap_or_else(|| {
        list.push((name.to_owned(), new));
        list.len() - 1
    });
    &mut list[index].1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Value {
        json!({"task": "qa", "limit": 3})
    }

    fn record(item: u64, f1: f64) -> Value {
        json!({"item": item, "scores": {"f1": f1}, "sums": {"tokens": 3}})
    }

    /// The code that the program would end with, and what it would say.
    fn refusal(path: &Path, run: &Value) -> (crate::exit::Exit, String) {
        let error = Journal::open(Some(path), run).unwrap_err();
        (crate::exit::Exit::of(&error), error.to_string())
    }

    #[test]
    fn a_killed_run_loses_its_last_line_at_most_and_totals_are_the_same_bits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.jsonl");
        let values = [0.1, 0.7, 1.0 / 3.0, 0.123_456_789_012_345_67];
        let mut whole = Journal::open(None, &run()).unwrap();
        for (item, &f1) in (0..).step_by(2).zip(&values) {
            whole.add(&record(item, f1)).unwrap();
        }
        let mut first = Journal::open(Some(&path), &run()).unwrap();
        first.add(&record(0, values[0])).unwrap();
        first.add(&record(2, values[1])).unwrap();
        drop(first);
        let mut torn = OpenOptions::new().append(true).open(&path).unwrap();
        torn.write_all(b"{\"item\": 4, \"sco").unwrap();
        let mut second = Journal::open(Some(&path), &run()).unwrap();
        assert!(second.has(2) && !second.has(3) && second.resumed() == 2);
        second.add(&record(4, values[2])).unwrap();
        second.add(&record(6, values[3])).unwrap();
        assert_eq!(second.totals().means(), whole.totals().means());
        assert_eq!((second.totals().items(), second.totals().sum("tokens")), (4, 12.0));
        drop(second);
        let third = Journal::open(Some(&path), &run()).unwrap();
        assert_eq!((third.resumed(), third.totals().means()), (4, whole.totals().means()));
        let mean = third.totals().mean("f1").unwrap();
        assert!((mean - values.iter().sum::<f64>() / 4.0).abs() < 1e-15);
        let stderr = third.totals().means()["f1_stderr"].as_f64().unwrap();
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 3.0;
        assert!((stderr - (variance / 4.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn results_of_other_runs_and_damaged_ones_are_refused() {
        use crate::exit::Exit;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.jsonl");
        let journal = Journal::open(Some(&path), &run()).unwrap();
        let (exit, said) = refusal(&path, &run());
        assert!(exit == Exit::Usage && said.contains("another run is writing"), "{said}");
        drop(journal);
        let (exit, said) = refusal(&path, &json!({"task": "qa", "limit": 4}));
        assert!(exit == Exit::Usage && said.contains("limit is 3 there and 4 here"), "{said}");
        let with_line = |line: &str| {
            std::fs::write(&path, "").unwrap();
            drop(Journal::open(Some(&path), &run()).unwrap());
            let mut file = OpenOptions::new().append(true).open(&path).unwrap();
            file.write_all(line.as_bytes()).unwrap();
            refusal(&path, &run())
        };
        for line in [
            "{\"item\": \n",
            "{\"scores\": {}}\n",
            "{\"item\": 1}\n{\"item\": 1}\n",
            "{\"item\": 18446744073709551615}\n",
        ] {
            let (exit, said) = with_line(line);
            assert!(exit == Exit::Corrupt && said.contains("line "), "{line}: {said}");
        }
        for other in ["{\"some\": \"log\"}\n", "a note without an end"] {
            std::fs::write(&path, other).unwrap();
            let (exit, said) = refusal(&path, &run());
            assert!(exit == Exit::Unsupported && said.contains("no results"), "{said}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), other, "it is left alone");
        }
        std::fs::write(&path, &header(&run())[..20]).unwrap();
        assert_eq!(Journal::open(Some(&path), &run()).unwrap().resumed(), 0, "killed at once");
    }
}
