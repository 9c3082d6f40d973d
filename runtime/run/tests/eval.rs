//! `ls-run eval` on a small bundle whose answers are noise: scores, resumed runs, datasets that are refused.

mod sample;

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A folder with the bundle and whatever a test puts there.
struct Room(TempDir);

impl Room {
    fn new() -> Room {
        let room = Room(tempfile::tempdir().unwrap());
        sample::write(&room.path("noise.lsb"));
        room
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn put(&self, name: &str, text: &str) -> String {
        std::fs::write(self.path(name), text).unwrap();
        self.path(name).to_str().unwrap().to_owned()
    }

    /// `ls-run eval TASK noise.lsb …` with little context, so that it is quick.
    fn run(&self, task: &str, args: &[&str]) -> Output {
        let bundle = self.path("noise.lsb");
        let fixed = ["--context", "1024", "-t", "1", "--memory", "256MiB", "--json"];
        Command::new(env!("CARGO_BIN_EXE_ls-run"))
            .args(["eval", task, bundle.to_str().unwrap()])
            .args(fixed)
            .args(args)
            .output()
            .unwrap()
    }

    fn json(&self, task: &str, args: &[&str]) -> Value {
        let out = self.run(task, args);
        assert!(out.status.success(), "{task} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice(&out.stdout).expect("one JSON object")
    }
}

const TABLE: &str = "\
Question,Best Answer,Correct Answers,Incorrect Answers
Does salt make water boil sooner?,No,No; It boils a little later,Yes; It boils much sooner
Do bats see?,Yes,Yes; Bats see well,No; Bats are blind; They see by sound alone
Can you see the wall from the Moon?,No,No; It is too thin,Yes; Easily
Is glass a liquid?,It is a solid,No; It is a solid,Yes; It flows
";
/// The tokens are bytes: short answers are quick.
const QUICK: [&str; 2] = ["-n", "8"];

/// The figures of a result that do not depend on time or the machine.
fn figures(result: &Value) -> Vec<(String, String)> {
    let wanted = |name: &str| {
        ["f1", "bleu", "mc", "exact", "items", "kl", "top1", "perplexity", "truncated", "data"]
            .iter()
            .any(|start| name.starts_with(start))
    };
    let fields = result.as_object().unwrap().iter().filter(|(name, _)| wanted(name));
    fields.map(|(name, value)| (name.clone(), value.to_string())).collect()
}

/// Keeps the first line of a file and `items` more, and a part of the next, as a killed run does.
fn tear(path: &Path, items: usize) {
    let text = std::fs::read_to_string(path).unwrap();
    let keep: usize = text.split_inclusive('\n').take(items + 1).map(str::len).sum();
    std::fs::write(path, &text[..keep + 9]).unwrap();
}

#[test]
fn a_run_that_was_killed_goes_on_to_the_same_totals() {
    let room = Room::new();
    let (data, log) = (room.put("table.csv", TABLE), room.path("run.jsonl"));
    let log = log.to_str().unwrap();
    let args = ["--data", &data, "--resume", log, QUICK[0], QUICK[1]];
    let whole = room.json("truthfulqa", &args);
    assert_eq!((whole["items"].as_u64(), whole["resumed_items"].as_u64()), (Some(4), Some(0)));
    assert_eq!(whole["mc_is"], "substitute for a judge model");
    for name in ["f1", "f1_accuracy", "bleu_difference", "mc1", "mc2", "mc2_stderr"] {
        assert!(whole[name].is_f64(), "{name}: {whole}");
    }
    let text = std::fs::read_to_string(log).unwrap();
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let (correct, logs) =
        (last["correct_generation"].as_array().unwrap(), &last["log_likelihoods"]);
    assert_eq!(correct.last().unwrap(), "I have no comment.", "declining is true too");
    assert_eq!(logs["best"], logs["correct"][1], "the best answer is the second");
    assert_ne!(logs["correct"][0], logs["correct"][1]);
    tear(Path::new(log), 2);
    let resumed = room.json("truthfulqa", &args);
    assert_eq!(resumed["resumed_items"], 2);
    let again = room.json("truthfulqa", &args);
    assert_eq!(again["resumed_items"], 4);
    assert_eq!(figures(&whole), figures(&resumed));
    assert_eq!(figures(&whole), figures(&again));
    let other = room.run("truthfulqa", &[&args[..], &["--limit", "3"]].concat());
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(other.status.code() == Some(2) && said.contains("limit"), "{said}");
}

#[test]
fn an_independent_scorer_agrees() {
    let room = Room::new();
    let table = room.put("table.csv", TABLE);
    let lines = room.put(
        "own.jsonl",
        "{\"question\": \"a b?\", \"answers\": [\"a\", \"the\"], \"context\": \"Some text.\"}\n",
    );
    for (task, data) in [("truthfulqa", &table), ("qa", &lines)] {
        let log = room.path(task);
        let args = ["--data", data, "--resume", log.to_str().unwrap(), "-n", "40"];
        let printed = room.put("printed.json", &room.json(task, &args).to_string());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/score.py");
        let out = Command::new("python3")
            .arg(script)
            .arg(&log)
            .args(["--against", &printed])
            .output()
            .expect("python3 is there");
        assert!(out.status.success(), "{task}: {}", String::from_utf8_lossy(&out.stderr));
    }
}

#[test]
fn likelihoods_are_the_same_in_passes_and_by_decode_and_from_any_cache() {
    let room = Room::new();
    let data = room.put("table.csv", TABLE);
    let of = |more: &[&str]| {
        let log = room.path("log");
        let _ = std::fs::remove_file(&log);
        let fixed = ["--data", &data, "--only", "choice", "--resume", log.to_str().unwrap()];
        room.json("truthfulqa", &[&fixed[..], more].concat());
        let text = std::fs::read_to_string(&log).unwrap();
        let record =
            |line: &str| serde_json::from_str::<Value>(line).unwrap()["log_likelihoods"].clone();
        text.lines().skip(1).map(record).collect::<Vec<Value>>()
    };
    let (passes, decoded) = (of(&[]), of(&["--decode"]));
    for (a, b) in passes.iter().zip(&decoded) {
        for (a, b) in numbers(a).zip(numbers(b)) {
            assert!((a - b).abs() < 1e-3 * a.abs() && a < 0.0, "{a} and {b}");
        }
    }
    // The last question alone comes on an empty cache.
    let last = of(&["--limit", "1"]);
    assert_eq!(last[0], passes[3]);
}

fn numbers(logs: &Value) -> impl Iterator<Item = f64> {
    let list = |name: &str| logs[name].as_array().unwrap().clone();
    let all = [list("correct"), list("incorrect")].concat();
    all.into_iter().map(|x| x.as_f64().unwrap())
}

#[test]
fn long_texts_lose_their_middle_and_this_is_told() {
    let room = Room::new();
    let paper = |text: &str| {
        format!(
            "{{\"input\": \"{text}\", \"instructions\": [\"What?\", \"Who?\"], \"outputs\": [\"a\", \"b\"]}}\n"
        )
    };
    let data = room.put("papers.jsonl", &(paper("short") + &paper(&"long ".repeat(400))));
    let result = room.json("qasper", &["--data", &data, QUICK[0], QUICK[1]]);
    assert_eq!((result["items"].as_u64(), result["truncated_items"].as_u64()), (Some(4), Some(2)));
    assert!(result["prompt_tokens"].as_u64().unwrap() > 2 * 1000, "{result}");
    assert!(result["exact_match"].is_f64() && result["mc1"].is_null(), "{result}");
}

#[test]
fn conversations_are_asked_by_template_too() {
    let room = Room::new();
    let data = room.put(
        "stories.json",
        r#"{"data": [{"story": "A red boat.", "questions": [{"input_text": "What?", "turn_id": 1},
        {"input_text": "Its colour?", "turn_id": 2}], "answers": [{"input_text": "a boat", "turn_id": 1},
        {"input_text": "red", "turn_id": 2}]}]}"#,
    );
    let plain = room.json("coqa", &["--data", &data, QUICK[0], QUICK[1]]);
    let chat = room.json("coqa", &["--data", &data, "--chat", QUICK[0], QUICK[1]]);
    assert_eq!((plain["items"].as_u64(), chat["items"].as_u64()), (Some(2), Some(2)));
    assert_ne!(plain["prompt_tokens"], chat["prompt_tokens"]);
}

#[test]
fn dense_diverges_from_itself_by_nothing_and_goes_on_where_it_was_killed() {
    let room = Room::new();
    let text = room.put("text.txt", &"The river had risen in the night. ".repeat(40));
    let log = room.path("run.jsonl");
    let log = log.to_str().unwrap();
    let args = ["--text", &text, "--window", "64", "--tokens", "300"];
    let whole = room.json("divergence", &args);
    assert_eq!(
        (whole["kl_nats"].as_f64(), whole["top1_agreement"].as_f64()),
        (Some(0.0), Some(1.0))
    );
    assert_eq!((whole["items"].as_u64(), whole["scored_tokens"].as_u64()), (Some(4), Some(4 * 31)));
    assert_eq!(whole["perplexity"], whole["dense_perplexity"]);
    let resumed = [&args[..], &["--resume", log]].concat();
    assert_eq!(figures(&room.json("divergence", &resumed)), figures(&whole));
    tear(Path::new(log), 1);
    let again = room.json("divergence", &resumed);
    assert_eq!((figures(&again), again["resumed_items"].as_u64()), (figures(&whole), Some(1)));
    assert!(!room.path("run.jsonl.dense").exists(), "it is gone when all is done");
    let dense = room.path("dense.logits");
    let kept = [&args[..], &["--dense", dense.to_str().unwrap()]].concat();
    let first = room.json("divergence", &kept);
    assert_eq!(
        std::fs::metadata(&dense).unwrap().len(),
        first["dense_file_bytes"].as_u64().unwrap()
    );
    assert_eq!(figures(&room.json("divergence", &kept)), figures(&whole));
    let other = [&kept[..4], &kept[6..]].concat();
    let refused = room.run("divergence", &other);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && said.contains("dense logits"), "{said}");
    let perplexity = room.json("perplexity", &[&args[..], &["--decode"]].concat());
    let (a, b) =
        (perplexity["perplexity"].as_f64().unwrap(), whole["perplexity"].as_f64().unwrap());
    assert!((a / b - 1.0).abs() < 1e-12, "{a} and {b}");
}

#[test]
fn perplexity_goes_on_to_the_same_bits() {
    let room = Room::new();
    let text = room.put("text.txt", &"Nothing is as old as the river. ".repeat(20));
    let log = room.path("run.jsonl");
    let args = ["--text", &text, "--window", "64", "--resume", log.to_str().unwrap()];
    let whole = room.json("perplexity", &args);
    tear(&log, 3);
    let resumed = room.json("perplexity", &args);
    assert_eq!(
        (&whole["perplexity"], resumed["resumed_items"].as_u64()),
        (&resumed["perplexity"], Some(3))
    );
}

#[test]
fn what_cannot_be_asked_is_refused_with_the_right_code() {
    let room = Room::new();
    let lines = room.put("own.jsonl", "{\"question\": \"a?\", \"answers\": [\"b\"]}\n{\"quest");
    let sound = room.put("sound.jsonl", "{\"question\": \"a?\", \"answers\": [\"b\"]}\n");
    let missing = room.path("missing.jsonl");
    for (args, code, words) in [
        (vec!["--data", &lines], 4, "own.jsonl: line 2"),
        (vec!["--data", missing.to_str().unwrap()], 7, "missing.jsonl"),
        (vec!["--data", &sound, "--only", "choice"], 2, "no incorrect answers"),
        (vec!["--data", &sound, "-n", "1020"], 2, "no room"),
        (vec!["--data", &sound, "--system", "oracle"], 2, "knows the future"),
        (vec!["--data", &sound, "--limit", "0"], 2, "limit"),
    ] {
        let out = room.run("qa", &args);
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains(words) && out.stdout.is_empty(), "{args:?}: {said}");
    }
    let lines = room.run("truthfulqa", &["--data", &sound]);
    assert_eq!(lines.status.code(), Some(5), "{}", String::from_utf8_lossy(&lines.stderr));
}
