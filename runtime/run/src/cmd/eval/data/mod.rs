//! Questions and reference answers from files: [`Format::each`] calls whoever listens with one [`Item`] after the
//! other.
//!
//! Files are foreign. They are read in pieces, with at most [`MAX_ITEM_BYTES`] between two items, so memory is
//! bounded by the longest item, which [`survey`] tells before anything is planned. What is wrong with one is a
//! [`DataError`] that names the line, or the story where a file has one line; the whole file is checked before the
//! first answer.

mod coqa;
mod csv;
mod lines;

use anyhow::Context;
use ls_bundle::checksum::Running;
use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;
use std::rc::Rc;

/// Bytes of a file between one item and the next.
const MAX_ITEM_BYTES: u64 = 4 << 20;

/// A question and the answers that are known to it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Item {
    /// Where it stands in the file.
    pub(crate) place: String,
    /// The text that it is about.
    pub(crate) context: Option<Rc<str>>,
    /// Questions before it in the same conversation, and their answers.
    pub(crate) history: Vec<(Rc<str>, Rc<str>)>,
    pub(crate) question: String,
    /// At least one.
    pub(crate) correct: Vec<String>,
    pub(crate) incorrect: Vec<String>,
    /// The answer that MC1 is about.
    pub(crate) best: Option<String>,
    pub(crate) best_incorrect: Option<String>,
}

/// Who hears of items; an error ends the reading.
pub(crate) type Listener<'a> = dyn FnMut(Item) -> anyhow::Result<()> + 'a;

/// How a file tells its items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// TruthfulQA's CSV.
    TruthfulQa,
    /// Papers, one JSON object a line, as L-Eval or LongBench give Qasper.
    Qasper,
    /// CoQA's JSON document.
    Coqa,
    /// One question a line: `{"context"?, "question", "answers": […], "incorrect"?: […]}`.
    Plain,
}

/// What a file comes to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Survey {
    pub(crate) items: u64,
    /// Items that are not this task's.
    pub(crate) left_out: u64,
    /// Items that have incorrect answers too.
    pub(crate) with_incorrect: u64,
    /// Most bytes of one item's texts.
    pub(crate) largest_bytes: u64,
    /// XXH3-64 of the file.
    pub(crate) hash: u64,
}

impl Format {
    /// All items of a file, in its order. Returns how many were left out.
    ///
    /// # Errors
    /// A [`DataError`], a failed read, or what the listener says.
    pub(crate) fn each(self, path: &Path, listen: &mut Listener<'_>) -> anyhow::Result<u64> {
        let file = File::open(path).with_context(|| format!("reading {}", path.display()))?;
        let (metered, meter) = Metered::new(file);
        let source = Source { path, meter };
        match self {
            Format::TruthfulQa => csv::each(metered, &source, listen).map(|()| 0),
            Format::Coqa => coqa::each(BufReader::new(metered), &source, listen).map(|()| 0),
            Format::Qasper => lines::papers(BufReader::new(metered), &source, listen),
            Format::Plain => lines::plain(BufReader::new(metered), &source, listen).map(|()| 0),
        }
    }
}

/// Reads all of a file once.
pub(crate) fn survey(format: Format, path: &Path) -> anyhow::Result<Survey> {
    let mut survey = Survey { hash: hash(path)?, ..Survey::default() };
    survey.left_out = format.each(path, &mut |item| {
        survey.items += 1;
        survey.with_incorrect += u64::from(!item.incorrect.is_empty());
        survey.largest_bytes = survey.largest_bytes.max(item.bytes());
        Ok(())
    })?;
    if survey.items == 0 {
        return Err(DataError::incomplete(path, "", "has no questions").into());
    }
    Ok(survey)
}

/// XXH3-64 of a file.
pub(crate) fn hash(path: &Path) -> anyhow::Result<u64> {
    let context = || format!("reading {}", path.display());
    let mut file = File::open(path).with_context(context)?;
    let (mut running, mut piece) = (Running::new(), vec![0; 64 << 10]);
    loop {
        match file.read(&mut piece).with_context(context)? {
            0 => return Ok(running.finish()),
            count => running.add(&piece[..count]),
        }
    }
}

impl Item {
    /// Bytes of its texts.
    fn bytes(&self) -> u64 {
        let history = self.history.iter().map(|(question, answer)| question.len() + answer.len());
        let answers = self.correct.iter().chain(&self.incorrect).map(String::len);
        let context = self.context.as_ref().map_or(0, |context| context.len());
        (context + self.question.len() + history.chain(answers).sum::<usize>()) as u64
    }
}

/// The file that is read, for those who tell of its faults.
pub(crate) struct Source<'a> {
    path: &'a Path,
    meter: Meter,
}

impl Source<'_> {
    fn corrupt(&self, place: impl Into<String>, problem: impl Into<String>) -> anyhow::Error {
        DataError::new(Class::Corrupt, self.path, place, problem).into()
    }

    fn foreign(&self, problem: impl Into<String>) -> anyhow::Error {
        DataError::new(Class::Foreign, self.path, "", problem).into()
    }

    /// A read that failed, because an item is too long or the system refuses.
    fn unread(&self, place: impl Into<String>, error: io::Error) -> anyhow::Error {
        if error.kind() == io::ErrorKind::FileTooLarge {
            return self.corrupt(place, error.to_string());
        }
        anyhow::Error::from(error).context(format!("reading {}", self.path.display()))
    }

    /// JSON that cannot be parsed. `place`: where, if the parser does not know.
    fn unparsed(&self, place: Option<String>, error: serde_json::Error) -> anyhow::Error {
        if error.is_io() {
            return self.unread(format!("line {}", error.line()), error.into());
        }
        let line = place.unwrap_or_else(|| format!("line {}", error.line()));
        let place = format!("{line}, column {}", error.column());
        let told = error.to_string();
        // The parser counts lines from where it began.
        let problem = told.split(" at line ").next().unwrap_or(&told);
        let class = if error.is_eof() { Class::Incomplete } else { Class::Corrupt };
        DataError::new(class, self.path, place, problem).into()
    }

    /// The next item may be as long as any.
    fn next(&self) {
        self.meter.0.set(MAX_ITEM_BYTES);
    }
}

/// Bytes that may still be read for the item in work.
#[derive(Clone, Debug)]
struct Meter(Rc<Cell<u64>>);

/// A reader that refuses items without end.
struct Metered<R> {
    inner: R,
    meter: Meter,
}

impl<R> Metered<R> {
    fn new(inner: R) -> (Metered<R>, Meter) {
        let meter = Meter(Rc::new(Cell::new(MAX_ITEM_BYTES)));
        (Metered { inner, meter: meter.clone() }, meter)
    }
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.meter.0.get();
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        if most == 0 && !buffer.is_empty() {
            let problem = format!("one item is longer than {} MiB", MAX_ITEM_BYTES >> 20);
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
        }
        let count = self.inner.read(&mut buffer[..most])?;
        self.meter.0.set(left - count as u64);
        Ok(count)
    }
}

/// What is wrong with a dataset's file.
#[derive(Debug, thiserror::Error)]
#[error("{path}{place}: {problem}")]
pub(crate) struct DataError {
    class: Class,
    path: String,
    place: String,
    problem: String,
}

/// Kinds of such faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Its content is wrong.
    Corrupt,
    /// It ends early.
    Incomplete,
    /// It is something else.
    Foreign,
}

impl DataError {
    pub(crate) fn new(
        class: Class,
        path: &Path,
        place: impl Into<String>,
        problem: impl Into<String>,
    ) -> DataError {
        let (place, problem) = (place.into(), problem.into());
        let place = if place.is_empty() { place } else { format!(": {place}") };
        DataError { class, path: path.display().to_string(), place, problem }
    }

    fn incomplete(path: &Path, place: &str, problem: &str) -> DataError {
        DataError::new(Class::Incomplete, path, place, problem)
    }

    pub(crate) fn class(&self) -> Class {
        self.class
    }
}

#[cfg(test)]
mod tests;
