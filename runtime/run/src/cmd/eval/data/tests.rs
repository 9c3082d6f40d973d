use super::*;
use crate::exit::Exit;
use std::io::Write;

/// The items of a file with this content, and how many were left out.
fn read(format: Format, content: &[u8]) -> anyhow::Result<(Vec<Item>, u64)> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(content).unwrap();
    let mut items = Vec::new();
    let left_out = format.each(file.path(), &mut |item| {
        items.push(item);
        Ok(())
    })?;
    Ok((items, left_out))
}

/// The exit code and the message of a file that is refused.
fn refused(format: Format, content: &[u8]) -> (Exit, String) {
    let error = read(format, content).expect_err("it is refused");
    (Exit::of(&error), format!("{error:#}"))
}

const HEAD: &str = "Question,Best Answer,Correct Answers,Incorrect Answers\n";

#[test]
fn truthfulqas_lists_are_cut_and_closed() {
    let text =
        format!("{HEAD}\"Why, \"\"so\"\"?\",Because,\"Because; It rains. ;\",\"No;\nNever\"\n");
    let (items, _) = read(Format::TruthfulQa, text.as_bytes()).unwrap();
    let item = &items[0];
    assert_eq!((item.place.as_str(), item.question.as_str()), ("line 2", "Why, \"so\"?"));
    assert_eq!(item.correct, ["Because.", "It rains."]);
    assert_eq!(item.incorrect, ["No.", "Never."]);
    assert_eq!((item.best.as_deref(), item.best_incorrect.as_deref()), (Some("Because."), None));
    let with_more = "Best Incorrect Answer,".to_owned() + HEAD + "No,Why?,So,So,No\n";
    let (items, _) = read(Format::TruthfulQa, with_more.as_bytes()).unwrap();
    assert_eq!(items[0].best_incorrect.as_deref(), Some("No."));
}

#[test]
fn hostile_tables_are_refused_by_line() {
    let table = |rows: &str| refused(Format::TruthfulQa, format!("{HEAD}{rows}").as_bytes());
    let (exit, said) = table("Why?,So,So,No\nHow?,So\n");
    assert!(exit == Exit::Corrupt && said.contains("line 3: 2 fields"), "{said}");
    let (exit, said) = table("Why?,So,;,No\n");
    assert!(exit == Exit::Corrupt && said.contains("line 2: a row without"), "{said}");
    let (exit, said) = refused(Format::TruthfulQa, b"Question,Answer\nWhy?,So\n");
    assert!(exit == Exit::Unsupported && said.contains("`Best Answer`"), "{said}");
    let latin = [HEAD.as_bytes(), b"Why?,\xe9,So,No\n"].concat();
    let (exit, said) = refused(Format::TruthfulQa, &latin);
    assert!(exit == Exit::Corrupt && said.contains("line 2: is not UTF-8"), "{said}");
    let endless = format!("\"{}", "x".repeat(MAX_ITEM_BYTES as usize + 9000));
    let (exit, said) = table(&endless);
    assert!(exit == Exit::Corrupt && said.contains("longer than 4 MiB"), "{said}");
    assert_eq!(refused(Format::TruthfulQa, b"").0, Exit::Unsupported);
}

#[test]
fn papers_come_with_their_questions() {
    let lines = r#"{"input": "A paper.", "instructions": ["What?", "Who?"], "outputs": ["This", ["I", "me"]], "evaluation": "f1"}

{"input": "Another", "instructions": ["Why?"], "outputs": ["So"], "evaluation": "human"}
{"input": "Where?", "context": "A third.", "answers": ["Here", "there"], "length": 3}
"#;
    let (items, left_out) = read(Format::Qasper, lines.as_bytes()).unwrap();
    let short = |item: &Item| {
        let context = item.context.as_deref().unwrap();
        format!("{}|{context}|{}|{}", item.place, item.question, item.correct.join("/"))
    };
    let found: Vec<String> = items.iter().map(short).collect();
    let wanted = [
        "line 1, question 1|A paper.|What?|This",
        "line 1, question 2|A paper.|Who?|I/me",
        "line 4|A third.|Where?|Here/there",
    ];
    assert_eq!((found.as_slice(), left_out), (&wanted.map(str::to_owned)[..], 1));
}

#[test]
fn hostile_lines_are_refused_by_number() {
    for (format, content, exit, words) in [
        (
            Format::Plain,
            "{\"question\": \"a\", \"answers\": [\"b\"]}\n{\"question\": 3}",
            Exit::Corrupt,
            "line 2, column 14",
        ),
        (Format::Plain, "{\"question\": \"a\"}", Exit::Corrupt, "missing field `answers`"),
        (
            Format::Plain,
            "{\"question\": \"a\", \"answers\": []}",
            Exit::Corrupt,
            "line 1: a question without",
        ),
        (
            Format::Plain,
            "{\"question\": \" \", \"answers\": [\"b\"]}",
            Exit::Corrupt,
            "line 1: a question without",
        ),
        (Format::Plain, "{\"question\": \"a\", \"ans", Exit::Incomplete, "line 1, column"),
        (
            Format::Qasper,
            "{\"input\": \"a\", \"instructions\": [\"b\"], \"outputs\": []}",
            Exit::Corrupt,
            "1 instructions but 0",
        ),
        (Format::Qasper, "{\"input\": \"a\"}", Exit::Corrupt, "neither"),
        (Format::Qasper, "[]", Exit::Corrupt, "line 1"),
    ] {
        let (found, said) = refused(format, content.as_bytes());
        assert!(found == exit && said.contains(words), "{content}: {found:?} {said}");
    }
    let deep = "[".repeat(100_000);
    assert_eq!(refused(Format::Plain, deep.as_bytes()).0, Exit::Corrupt);
    let endless = format!("{{\"question\": \"{}", "x".repeat(MAX_ITEM_BYTES as usize + 9000));
    assert!(refused(Format::Plain, endless.as_bytes()).1.contains("longer than 4 MiB"));
}

/// Two stories, of which the first has answers by three people.
const STORIES: &str = r#"{"version": "1.0", "data": [
 {"id": "x", "story": " A red boat lay on the sand. ",
  "questions": [{"input_text": "What lay there?", "turn_id": 1}, {"input_text": "Its colour?", "turn_id": 2}],
  "answers": [{"input_text": "a boat", "turn_id": 1, "span_text": "red boat"}, {"input_text": "red", "turn_id": 2}],
  "additional_answers": {
    "0": [{"input_text": "a red boat", "turn_id": 1}, {"input_text": "Red", "turn_id": 2}],
    "1": [{"input_text": "boat", "turn_id": 1}, {"input_text": "it was red", "turn_id": 2}]}},
 {"story": "Snow.", "questions": [{"input_text": "What?", "turn_id": 1}], "answers": [{"input_text": "snow", "turn_id": 1}]}
]}"#;

#[test]
fn coqas_turns_come_with_the_conversation_so_far() {
    let (items, _) = read(Format::Coqa, STORIES.as_bytes()).unwrap();
    assert_eq!(items.len(), 3);
    let second = &items[1];
    assert_eq!(second.place, "story 1, turn 2");
    assert_eq!(second.context.as_deref(), Some("A red boat lay on the sand."));
    assert_eq!(second.history, [("What lay there?".into(), "a boat".into())]);
    assert_eq!((second.question.as_str(), second.correct.len()), ("Its colour?", 3));
    assert_eq!(second.correct, ["red", "Red", "it was red"]);
    assert_eq!((items[2].correct.len(), items[2].history.len()), (1, 0));
}

#[test]
fn a_conversation_is_told_in_its_order() {
    let turns = |texts: &[&str]| {
        let turn = |(index, text): (usize, &&str)| {
            format!("{{\"input_text\": \"{text}\", \"turn_id\": {}}}", index + 1)
        };
        texts.iter().enumerate().map(turn).collect::<Vec<_>>().join(",")
    };
    let (questions, answers) = (turns(&["a?", "b?", "c?"]), turns(&["a", "b", "c"]));
    let story = format!(
        "{{\"data\": [{{\"story\": \"s\", \"questions\": [{questions}], \"answers\": [{answers}]}}]}}"
    );
    let (items, _) = read(Format::Coqa, story.as_bytes()).unwrap();
    let asked: Vec<&str> = items.iter().map(|item| item.question.as_str()).collect();
    assert_eq!(asked, ["a?", "b?", "c?"]);
    assert_eq!(items[2].history, [("a?".into(), "a".into()), ("b?".into(), "b".into())]);
}

#[test]
fn hostile_documents_are_refused() {
    let (exit, said) =
        refused(Format::Coqa, STORIES.replacen("\"turn_id\": 2", "\"turn_id\": 3", 1).as_bytes());
    assert!(exit == Exit::Corrupt && said.contains("story 1: questions and answers"), "{said}");
    let turns = |count| vec!["{\"input_text\": \"a\", \"turn_id\": 1}"; count].join(",");
    let story = |count| {
        let turns = turns(count);
        format!(
            "{{\"data\": [{{\"story\": \"\", \"questions\": [{turns}], \"answers\": [{turns}]}}]}}"
        )
    };
    assert_eq!(read(Format::Coqa, story(1000).as_bytes()).unwrap().0.len(), 1000);
    let (exit, said) = refused(Format::Coqa, story(1001).as_bytes());
    assert!(exit == Exit::Corrupt && said.contains("story 1: has more than"), "{said}");
    let (exit, said) = refused(Format::Coqa, &STORIES.as_bytes()[..400]);
    assert!(exit == Exit::Incomplete && said.contains("line 6, column"), "{said}");
    let (exit, said) = refused(Format::Coqa, b"{\"stories\": []}");
    assert!(exit == Exit::Unsupported && said.contains("no `data`"), "{said}");
    let (exit, said) = refused(Format::Coqa, b"{\"data\": [{\"story\": 3}]}");
    assert!(exit == Exit::Corrupt && said.contains("line 1, column"), "{said}");
    let endless =
        format!("{{\"data\": [{{\"story\": \"{}", "x".repeat(MAX_ITEM_BYTES as usize + 9000));
    assert!(refused(Format::Coqa, endless.as_bytes()).1.contains("longer than 4 MiB"));
}

#[test]
fn what_a_listener_says_ends_the_reading() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(STORIES.as_bytes()).unwrap();
    let mut heard = 0;
    let said = Format::Coqa.each(file.path(), &mut |_| {
        heard += 1;
        anyhow::bail!("enough")
    });
    assert_eq!((said.unwrap_err().to_string().as_str(), heard), ("enough", 1));
}

#[test]
fn a_survey_counts_and_tells_files_apart() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(STORIES.as_bytes()).unwrap();
    let first = survey(Format::Coqa, file.path()).unwrap();
    assert_eq!((first.items, first.with_incorrect, first.left_out), (3, 0, 0));
    assert_eq!(first.hash, checksum_of(STORIES.as_bytes()));
    // The first story's second turn: 27 of the story, 21 of the first turn, 11 and 16 of its own.
    assert_eq!(first.largest_bytes, 75);
    let empty = tempfile::NamedTempFile::new().unwrap();
    let error = survey(Format::Plain, empty.path()).unwrap_err();
    assert!(Exit::of(&error) == Exit::Incomplete && error.to_string().contains("no questions"));
}

fn checksum_of(bytes: &[u8]) -> u64 {
    ls_bundle::checksum::of(bytes)
}
