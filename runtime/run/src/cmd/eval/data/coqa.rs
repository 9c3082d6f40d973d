//! CoQA's document (Reddy et al., 2019): `{"data": [{"story", "questions": […], "answers": […], "additional_answers":
//! {"0": […], …}}]}`. Each question comes with the story and the conversation so far, by its first answers; its
//! references are that answer and the additional ones. Stories are read one by one, however long the document is.

use super::{Item, Listener, Source};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::rc::Rc;

/// Questions of a story: each item has those before it, so that more of them take memory and time as their square. The
/// dataset's longest conversation has a few dozen.
const MAX_TURNS: usize = 1000;

#[derive(Deserialize)]
struct Story {
    story: String,
    questions: Vec<Turn>,
    answers: Vec<Turn>,
    #[serde(default)]
    additional_answers: BTreeMap<String, Vec<Turn>>,
}

#[derive(Deserialize)]
struct Turn {
    input_text: String,
    turn_id: u32,
}

pub(super) fn each(
    file: impl Read,
    source: &Source<'_>,
    listen: &mut Listener<'_>,
) -> anyhow::Result<()> {
    let mut stopped = None;
    let mut reader = serde_json::Deserializer::from_reader(file);
    let stories = Stories { source, listen, stopped: &mut stopped, number: 0 };
    let read = Document(stories).deserialize(&mut reader).and_then(|found| {
        reader.end()?;
        Ok(found)
    });
    match (stopped, read) {
        (Some(reason), _) => Err(reason),
        (None, Err(error)) => Err(source.unparsed(None, error)),
        (None, Ok(false)) => Err(source.foreign("is not CoQA's document: it has no `data`")),
        (None, Ok(true)) => Ok(()),
    }
}

/// Tells the items of one story.
fn tell(
    story: Story,
    number: u64,
    source: &Source<'_>,
    listen: &mut Listener<'_>,
) -> anyhow::Result<()> {
    let place = format!("story {number}");
    let Story { story, questions, answers, additional_answers } = story;
    if questions.len() > MAX_TURNS {
        return Err(source.corrupt(place, format!("has more than {MAX_TURNS} questions")));
    }
    let fits = |turns: &[Turn]| {
        let same = |(turn, question): (&Turn, &Turn)| turn.turn_id == question.turn_id;
        turns.len() == questions.len() && turns.iter().zip(&questions).all(same)
    };
    if !fits(&answers) || !additional_answers.values().all(|turns| fits(turns)) {
        return Err(source.corrupt(place, "questions and answers are not of the same turns"));
    }
    let context: Rc<str> = story.trim().into();
    let mut history = Vec::new();
    for (index, (question, answer)) in questions.iter().zip(&answers).enumerate() {
        let others = additional_answers.values().map(|turns| &turns[index]);
        let text = |turn: &Turn| turn.input_text.trim().to_owned();
        let item = Item {
            place: format!("{place}, turn {}", question.turn_id),
            context: Some(Rc::clone(&context)),
            history: history.clone(),
            question: text(question),
            correct: [answer].into_iter().chain(others).map(text).collect(),
            ..Item::default()
        };
        if item.question.is_empty() {
            return Err(source.corrupt(item.place, "a question without text"));
        }
        history.push((item.question.as_str().into(), item.correct[0].as_str().into()));
        listen(item)?;
    }
    Ok(())
}

/// The document's object; whether it had stories.
struct Document<'a, 'b>(Stories<'a, 'b>);

/// The list of stories, told as it is read.
struct Stories<'a, 'b> {
    source: &'a Source<'a>,
    listen: &'a mut Listener<'b>,
    /// Why telling ended; the parser has another error then.
    stopped: &'a mut Option<anyhow::Error>,
    number: u64,
}

impl<'de> DeserializeSeed<'de> for Document<'_, '_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<bool, D::Error> {
        reader.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Document<'_, '_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `data`")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<bool, A::Error> {
        let mut found = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "data" {
                map.next_value_seed(&mut self.0)?;
                found = true;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

impl<'de> DeserializeSeed<'de> for &mut Stories<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<(), D::Error> {
        reader.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for &mut Stories<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of stories")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while let Some(story) = list.next_element::<Story>()? {
            self.source.next();
            self.number += 1;
            if let Err(reason) = tell(story, self.number, self.source, self.listen) {
                *self.stopped = Some(reason);
                return Err(A::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}
