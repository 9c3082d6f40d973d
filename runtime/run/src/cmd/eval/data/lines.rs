//! One JSON object a line: papers with lists of questions, or plain questions.

use super::{Item, Listener, Source};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::io::BufRead;
use std::rc::Rc;

/// A paper with its questions, as L-Eval tells it; or, as LongBench does, a question with its paper.
#[derive(Deserialize)]
struct Paper {
    /// The paper, or the question.
    input: String,
    instructions: Option<Vec<String>>,
    outputs: Option<Vec<Output>>,
    /// How the public scorer would judge; only `f1` is this task's.
    evaluation: Option<String>,
    context: Option<String>,
    answers: Option<Vec<String>>,
}

/// One reference or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum Output {
    One(String),
    Several(Vec<String>),
}

#[derive(Deserialize)]
struct Plain {
    context: Option<String>,
    question: String,
    answers: Vec<String>,
    #[serde(default)]
    incorrect: Vec<String>,
}

/// Qasper's papers. Returns how many questions belong to other scores than F1.
pub(super) fn papers(
    file: impl BufRead,
    source: &Source<'_>,
    listen: &mut Listener<'_>,
) -> anyhow::Result<u64> {
    let mut left_out = 0;
    each_line(file, source, &mut |place, paper: Paper| {
        let Paper { input, instructions, outputs, evaluation, context, answers } = paper;
        match (instructions, outputs, context, answers) {
            (Some(questions), Some(_), ..)
                if evaluation.as_deref().is_some_and(|how| how != "f1") =>
            {
                left_out += questions.len() as u64;
                Ok(())
            }
            (Some(questions), Some(answers), ..) => {
                of_paper(source, place, input.into(), questions, answers, listen)
            }
            (_, _, Some(context), Some(correct)) => {
                let context = Some(context.into());
                let item = Item { context, question: input, correct, ..Item::default() };
                checked(source, place, item, listen)
            }
            _ => {
                let problem = "neither `instructions` and `outputs` nor `context` and `answers`";
                Err(source.corrupt(place, problem))
            }
        }
    })?;
    Ok(left_out)
}

/// All questions about one paper.
fn of_paper(
    source: &Source<'_>,
    place: String,
    context: Rc<str>,
    questions: Vec<String>,
    answers: Vec<Output>,
    listen: &mut Listener<'_>,
) -> anyhow::Result<()> {
    if questions.len() != answers.len() {
        let (questions, answers) = (questions.len(), answers.len());
        let problem = format!("{questions} instructions but {answers} outputs");
        return Err(source.corrupt(place, problem));
    }
    for (index, (question, answer)) in questions.into_iter().zip(answers).enumerate() {
        let correct = match answer {
            Output::One(answer) => vec![answer],
            Output::Several(answers) => answers,
        };
        let place = format!("{place}, question {}", index + 1);
        let context = Some(Rc::clone(&context));
        checked(source, place, Item { context, question, correct, ..Item::default() }, listen)?;
    }
    Ok(())
}

/// Plain questions.
pub(super) fn plain(
    file: impl BufRead,
    source: &Source<'_>,
    listen: &mut Listener<'_>,
) -> anyhow::Result<()> {
    each_line(file, source, &mut |place, plain: Plain| {
        let Plain { context, question, answers, incorrect } = plain;
        let (context, best) = (context.map(Rc::from), answers.first().cloned());
        let item = Item { context, question, correct: answers, incorrect, best, ..Item::default() };
        checked(source, place, item, listen)
    })
}

/// Passes on an item that can be asked and scored.
fn checked(
    source: &Source<'_>,
    place: String,
    mut item: Item,
    listen: &mut Listener<'_>,
) -> anyhow::Result<()> {
    item.question = item.question.trim().to_owned();
    if item.question.is_empty() || item.correct.is_empty() {
        return Err(source.corrupt(place, "a question without text or without an answer"));
    }
    listen(Item { place, ..item })
}

fn each_line<T: DeserializeOwned>(
    mut file: impl BufRead,
    source: &Source<'_>,
    listen: &mut dyn FnMut(String, T) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut line = Vec::new();
    for number in 1u64.. {
        let place = format!("line {number}");
        source.next();
        line.clear();
        let count = file.read_until(b'\n', &mut line).map_err(|e| source.unread(&place, e))?;
        if count == 0 {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let parsed = serde_json::from_slice(&line);
        listen(place.clone(), parsed.map_err(|error| source.unparsed(Some(place), error))?)?;
    }
    Ok(())
}
