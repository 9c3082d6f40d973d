//! TruthfulQA.csv (Lin et al., 2022): a question a row; lists of answers are cut at semicolons, and each gets the
//! full stop that the public scorers give it.

use super::{Item, Listener, Source};
use csv::{ErrorKind, ReaderBuilder, StringRecord};
use std::io::Read;

/// Columns by name; the last one only newer files have.
const COLUMNS: [&str; 4] = ["Question", "Best Answer", "Correct Answers", "Incorrect Answers"];
const BEST_INCORRECT: &str = "Best Incorrect Answer";

pub(super) fn each(
    file: impl Read,
    source: &Source<'_>,
    listen: &mut Listener<'_>,
) -> anyhow::Result<()> {
    let mut reader = ReaderBuilder::new().from_reader(file);
    let names = reader.headers().map_err(|error| unparsed(source, error))?.clone();
    let column =
        |name: &str| names.iter().position(|found| found.trim_start_matches('\u{feff}') == name);
    let missing: Vec<&str> = COLUMNS.into_iter().filter(|name| column(name).is_none()).collect();
    if !missing.is_empty() {
        let wanted = missing.join("`, `");
        return Err(source.foreign(format!("is not TruthfulQA's table: no column `{wanted}`")));
    }
    let [question, best, correct, incorrect] =
        COLUMNS.map(|name| column(name).expect("it is there"));
    let best_incorrect = column(BEST_INCORRECT);
    let mut row = StringRecord::new();
    while reader.read_record(&mut row).map_err(|error| unparsed(source, error))? {
        source.next();
        let line = row.position().map_or(0, csv::Position::line);
        let (place, field) =
            (format!("line {line}"), |column: usize| row.get(column).unwrap_or(""));
        let item = Item {
            question: field(question).trim().to_owned(),
            correct: answers(field(correct)),
            incorrect: answers(field(incorrect)),
            best: answers(field(best)).into_iter().next(),
            best_incorrect: best_incorrect.and_then(|at| answers(field(at)).into_iter().next()),
            place,
            ..Item::default()
        };
        if item.question.is_empty() || item.correct.is_empty() {
            return Err(source.corrupt(item.place, "a row without a question or a correct answer"));
        }
        listen(item)?;
    }
    Ok(())
}

/// The answers of a list, each with a full stop.
fn answers(list: &str) -> Vec<String> {
    let closed = |answer: &str| match answer.ends_with('.') {
        true => answer.to_owned(),
        false => format!("{answer}."),
    };
    list.split(';').map(str::trim).filter(|answer| !answer.is_empty()).map(closed).collect()
}

fn unparsed(source: &Source<'_>, error: csv::Error) -> anyhow::Error {
    let place = error.position().map_or(String::new(), |at| format!("line {}", at.line()));
    match error.into_kind() {
        ErrorKind::Io(error) => source.unread(place, error),
        ErrorKind::Utf8 { err, .. } => source.corrupt(place, format!("is not UTF-8 ({err})")),
        ErrorKind::UnequalLengths { expected_len, len, .. } => {
            source.corrupt(place, format!("{len} fields where the first line has {expected_len}"))
        }
        kind => source.corrupt(place, format!("{kind:?}")),
    }
}
