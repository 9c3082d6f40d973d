//! What `ls-run eval` reads: datasets, and results to go on from.

use crate::target::{Run, Scratch, Target};
use ls_run::{EvalFile, check_eval_file};
use std::path::Path;

fn open(folder: &Path, kind: EvalFile) -> Run {
    let file = Scratch::new(folder, "file");
    Box::new(move |bytes| {
        file.put(bytes, 0);
        let _ = check_eval_file(kind, &file.path);
    })
}

pub(crate) const TRUTHFULQA: Target = Target {
    words: &[
        "Question",
        "Best Answer",
        "Correct Answers",
        "Incorrect Answers",
        "Best Incorrect Answer",
        "\"",
        "\"\"",
        "\",\"",
        ",",
        ",,,",
        ";",
        "; ;",
        "\r\n",
        "\r",
        "\n",
        "\u{feff}",
        "\\",
        "\0",
    ],
    ..Target::new("truthfulqa", "TruthfulQA's table", |folder| open(folder, EvalFile::TruthfulQa))
};

const LINES: &[&str] = &[
    "\"context\":",
    "\"question\":",
    "\"answers\":",
    "\"incorrect\":",
    "\"input\":",
    "\"instructions\":",
    "\"outputs\":",
    "\"evaluation\":\"f1\"",
    "[\"a\"]",
    "[[\"a\"]]",
    "[]",
    "[[",
    "{}",
    "{\"a\":",
    "null",
    "\"\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "1e999",
    "\n",
    "\n\n",
];

pub(crate) const QASPER: Target = Target {
    words: LINES,
    ..Target::new("qasper", "Qasper's papers", |folder| open(folder, EvalFile::Qasper))
};

pub(crate) const QUESTIONS: Target = Target {
    words: LINES,
    ..Target::new("questions", "questions of one's own", |folder| open(folder, EvalFile::Questions))
};

pub(crate) const COQA: Target = Target {
    words: &[
        "\"data\":",
        "\"story\":",
        "\"questions\":",
        "\"answers\":",
        "\"additional_answers\":",
        "\"input_text\":",
        "\"turn_id\":",
        "4294967295",
        "4294967296",
        "-1",
        "[]",
        "[[",
        "{}",
        "{\"a\":",
        "null",
        "\"\"",
        "\"\\ud800\"",
        "{\"input_text\":\"a\",\"turn_id\":1},",
    ],
    ..Target::new("coqa", "CoQA's document", |folder| open(folder, EvalFile::Coqa))
};

pub(crate) const RESULTS: Target = Target {
    words: &[
        "\"leanstream_eval\":",
        "\"run\":",
        "\"task\":",
        "\"qa\"",
        "\"item\":",
        "\"scores\":",
        "\"sums\":",
        "{\"f1\":",
        "18446744073709551615",
        "18446744073709551614",
        "9223372036854775808",
        "-1",
        "1e308",
        "-1e308",
        "1e999",
        "5e-324",
        "null",
        "{}",
        "[]",
        "[[",
        "\"\"",
        "\n",
    ],
    ..Target::new("results", "results that an evaluation goes on from", |folder| {
        open(folder, EvalFile::Results)
    })
};
