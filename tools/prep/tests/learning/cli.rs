//! The commands of the learning half: what they print, that killing them costs little, and that they agree.

use crate::{Bench, text};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

pub(crate) fn program(command: &str) -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_ls-prep"));
    program.arg(command);
    program
}

/// A stage's command on the model of `bench`, with artifacts in `artifacts`.
pub(crate) fn stage(bench: &Bench, command: &str, artifacts: &str) -> Command {
    let mut program = program(command);
    program.arg(bench.model()).arg("--artifacts").arg(bench.dir.path().join(artifacts));
    program.args(["--recipe", "tiny", "--json", "--calibration"]).arg(text());
    program
}

pub(crate) fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

pub(crate) fn run(command: &mut Command) -> Value {
    json(&command.output().unwrap())
}

fn code_of(command: &mut Command) -> Option<i32> {
    command.output().unwrap().status.code()
}

pub(crate) fn artifact(report: &Value) -> PathBuf {
    PathBuf::from(report["path"].as_str().unwrap())
}

#[test]
fn texts_that_were_fetched_are_taken_where_none_is_named() {
    let bench = Bench::new();
    let folder = bench.dir.path();
    let model = std::path::absolute(bench.model()).unwrap();
    let mut prompts = program("prompts");
    prompts.current_dir(folder).arg(model).args(["--recipe", "tiny", "--json"]);
    let refused = prompts.output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("datasets fetch"));
    let texts = folder.join("datasets/text");
    std::fs::create_dir_all(&texts).unwrap();
    std::fs::write(texts.join("notes.md"), "not a text of the kind").unwrap();
    std::fs::copy(text(), texts.join("a.txt")).unwrap();
    let found = run(&mut prompts);
    let named = run(&mut stage(&bench, "prompts", "named"));
    assert_eq!(found["key"], named["key"], "{found} {named}");
}

#[test]
fn a_chain_is_made_told_and_kept() {
    let bench = Bench::new();
    // The states of the first stages.
    let states = |found: &Value| -> Vec<String> {
        let links = found["stages"].as_array().unwrap();
        let state = |link: &Value| link["state"].as_str().unwrap().to_owned();
        links[..6].iter().map(state).collect()
    };
    let status = || run(&mut stage(&bench, "status", "a"));
    let first = status();
    let links = first["stages"].as_array().unwrap();
    assert!(links[1..].iter().all(|link| link["state"] == "missing"), "{first}");
    assert_eq!(states(&first), ["done", "missing", "missing", "missing", "missing", "missing"]);
    let prompts = run(&mut stage(&bench, "prompts", "a"));
    assert_eq!((&prompts["outcome"], &prompts["tokens"]), (&"made".into(), &512.into()));
    let cost = run(stage(&bench, "activations", "a").arg("--estimate"));
    let made = run(&mut stage(&bench, "activations", "a"));
    assert_eq!(made["outcome"], "made");
    assert!(made["bytes"].as_u64() > cost["artifact_bytes"].as_u64());
    let perplexity = made["perplexity"].as_f64().unwrap();
    assert!(perplexity > 1.0 && perplexity.is_finite(), "{perplexity}");
    assert_eq!(states(&status()), ["done", "done", "done", "missing", "missing", "missing"]);
    assert_eq!(run(&mut stage(&bench, "activations", "a"))["outcome"], "kept");
    assert_eq!(code_of(&mut stage(&bench, "placement", "a")), Some(4), "it needs the embedding");
    let fitted = run(&mut stage(&bench, "embedding", "a"));
    assert_eq!(fitted["fits"].as_array().unwrap().len(), 3);
    let placed = run(&mut stage(&bench, "placement", "a"));
    let last = &placed["layers"][2]["measured"];
    assert_eq!((&last[4]["method"], &last[5]["method"]), (&"matching".into(), &"embedding".into()));
    let mut base = stage(&bench, "base", "a");
    assert_eq!(run(base.args(["--layers", "1..3"]))["first_layer"], 1);
    let mut priced = stage(&bench, "sparsity", "a");
    let priced = run(priced.args(["--arms", "0..3", "--eval"]).arg(text()));
    assert_eq!(priced["prices"][2]["way"], "oracle");
    let mut listed = stage(&bench, "sparsity", "a");
    let listed = run(listed.args(["--list", "--eval"]).arg(text()));
    assert_eq!(listed["arms"][1], serde_json::json!([{"way": "rounded", "format": "q4_0"}, 0.0]));
    let mut other = program("status");
    other.arg(bench.model()).arg("--artifacts").arg(bench.dir.path().join("a"));
    other.args(["--recipe", "quick", "--json", "--calibration"]).arg(text());
    assert_eq!(states(&run(&mut other)), ["done", "stale", "stale", "stale", "stale", "missing"]);
}

#[test]
fn all_makes_a_bundle_once() {
    let bench = Bench::new();
    let bundle = bench.dir.path().join("model.lsb");
    let all = |recipe: &str| {
        let mut all = program("all");
        all.arg(bench.model()).arg("--artifacts").arg(bench.dir.path().join("a"));
        all.arg("--out").arg(&bundle);
        all.args(["--recipe", recipe, "--json", "--calibration"]).arg(text());
        all
    };
    let outcomes = |found: &Value| -> Vec<String> {
        let stages = found["stages"].as_array().unwrap();
        stages.iter().map(|stage| stage["outcome"].as_str().unwrap().to_owned()).collect()
    };
    let first = run(&mut all("tiny"));
    assert!(outcomes(&first).iter().all(|outcome| outcome == "made"), "{first}");
    let opened = ls_bundle::Bundle::open(&bundle).unwrap();
    opened.verify(&mut |_, _| ()).unwrap();
    assert!(opened.placement().is_some());
    // Three layers, each with a predictor, a base with its scores, and a table of reuse.
    assert_eq!(opened.tables().tables.len(), 12);
    let pack = first["stages"].as_array().unwrap().last().unwrap();
    assert_eq!(pack["bytes"], opened.total_len());
    let written = || std::fs::metadata(&bundle).unwrap().modified().unwrap();
    let before = written();
    let second = run(&mut all("tiny"));
    assert!(outcomes(&second).iter().all(|outcome| outcome == "kept"), "{second}");
    assert_eq!(written(), before, "the bundle was not touched");
    let mut report = program("report");
    report.arg(&bundle).arg("--artifacts").arg(bench.dir.path().join("a")).arg("--json");
    let report = run(&mut report);
    let rows = report["predictors"].as_array().unwrap();
    assert_eq!(rows[0]["name"], "our stack");
    assert!(rows[0]["imp20"].as_f64().unwrap() > rows[1]["imp20"].as_f64().unwrap(), "{rows:?}");
    assert!(rows[0]["microseconds"].as_f64().unwrap() > 0.0);
    assert_eq!(report["placement"].as_array().unwrap().len(), 3);
    assert_eq!(report["reuse"].as_array().unwrap().len(), 3);
    assert!(report["base_resident_share"].as_f64().unwrap() > 0.1);
    // Another recipe makes another bundle of what it can still use.
    let recipe = bench.dir.path().join("mine.toml");
    std::fs::write(&recipe, "extends = \"tiny\"\n[pack]\nffn_dtype = \"q8_0\"\n").unwrap();
    let third = outcomes(&run(&mut all(recipe.to_str().unwrap())));
    let (pack, others) = third.split_last().unwrap();
    assert!(others.iter().all(|outcome| outcome == "kept") && pack == "made", "{third:?}");
    // The model itself is never replaced.
    let mut hostile = all("tiny");
    let weights = bench.model().join("model.safetensors");
    let output = hostile.arg("--out").arg(&weights).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn predictors_are_compared_on_the_same_tokens() {
    let bench = Bench::new();
    for command in ["prompts", "activations", "embedding", "placement"] {
        run(&mut stage(&bench, command, "a"));
    }
    let mut compared = stage(&bench, "compare", "a");
    let found = run(compared.args(["--layers", "1..2"]));
    let rows = found["predictors"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    let wanted = [
        "frequency prior",
        "EMA",
        "literal stack",
        "our stack",
        "our stack",
        "MLP full r=32",
        "MLP stale r=32",
        "MLP wide-full r=64",
        "MLP wide-stale r=64",
        "MLP tiny r=8",
        "BNN r=64",
        "sketch 2/2 bits",
        "sketch 3/3 bits",
        "oracle",
    ];
    assert_eq!(names, wanted);
    assert_eq!((&rows[3]["block"], &rows[4]["block"]), (&1.into(), &2.into()));
    let number = |row: usize, key: &str| rows[row][key].as_f64().unwrap();
    assert_eq!((number(13, "imp20"), number(13, "top10")), (1.0, 1.0), "the oracle is never wrong");
    assert!(number(13, "red95") < 0.0, "and needs less than a fifth for 95 %");
    assert!(number(12, "imp20") > number(11, "imp20") && number(11, "imp20") > number(0, "imp20"));
    assert!(rows[10]["microseconds"].is_null() && rows[13]["microseconds"].is_null());
    assert!(number(7, "microseconds") > 0.0 && number(12, "bytes_per_layer") > 1e7, "{rows:?}");
    let mut tested = stage(&bench, "compare", "a");
    tested.args(["--layers", "1..2", "--no-literal", "--no-mlp", "--test-tokens", "256"]);
    let tested = run(tested.arg("--test").arg(text()));
    assert_eq!(tested["tokens"], 256, "all windows of another text");
}

#[test]
fn killed_at_any_moment_it_goes_on_to_the_same_bytes() {
    let bench = Bench::new();
    let whole = run(&mut stage(&bench, "activations", "whole"));
    let wanted = std::fs::read(artifact(&whole)).unwrap();
    for milliseconds in [5, 15, 30, 60, 90] {
        let mut child = stage(&bench, "activations", "killed")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let resumed = run(&mut stage(&bench, "activations", "killed"));
    assert!(std::fs::read(artifact(&resumed)).unwrap() == wanted);
}

#[test]
fn shares_made_by_several_processes_are_merged() {
    let bench = Bench::new();
    let whole = run(&mut stage(&bench, "activations", "whole"));
    run(&mut stage(&bench, "prompts", "shares"));
    let share = |layers: &str| {
        let mut command = stage(&bench, "activations", "shares");
        command.args(["--layers", layers]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let running = ["0..1", "1..2", "2..3"].map(share);
    let parts = running.map(|child| artifact(&json(&child.wait_with_output().unwrap())));
    let status = run(&mut stage(&bench, "status", "shares"));
    assert_eq!(status["stages"][2]["state"], "partial");
    let merged = run(program("merge").args(&parts).arg("--json"));
    let read = |path: &Path| std::fs::read(path).unwrap();
    assert!(read(&artifact(&merged)) == read(&artifact(&whole)));
    let missing = program("merge").args(&parts[1..]).output().unwrap();
    assert_eq!(missing.status.code(), Some(4), "layer 0 is missing");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_card_is_not_passed_over_silently() {
    let output = program("recipe").args(["tiny", "--device", "cuda"]).output().unwrap();
    assert_eq!(output.status.code(), Some(5));
    assert!(String::from_utf8(output.stderr).unwrap().contains("--device cuda"));
    assert!(program("recipe").args(["tiny", "--device", "auto"]).status().unwrap().success());
}

#[test]
fn wrong_arguments_are_usage() {
    let bench = Bench::new();
    let code = code_of;
    assert_eq!(code(stage(&bench, "activations", "a").args(["--layers", "2..9"])), Some(2));
    assert_eq!(code(stage(&bench, "activations", "a").args(["--layers", "2..2"])), Some(2));
    let unknown =
        program("prompts").arg(bench.model()).args(["--recipe", "fast"]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(2));
    assert!(String::from_utf8(unknown.stderr).unwrap().contains("widened"));
    assert_eq!(code(program("prompts").arg(bench.model()).current_dir(bench.dir.path())), Some(2));
    assert_eq!(
        code(program("synth").arg("--out").arg(bench.dir.path()).args(["--hidden", "40"])),
        Some(2)
    );
    let recipe = program("recipe").arg("quick").output().unwrap();
    assert!(String::from_utf8(recipe.stdout).unwrap().contains("tau = 8"));
}
