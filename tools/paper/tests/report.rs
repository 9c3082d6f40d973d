//! The whole way, with a program that only pretends to measure.

use ls_paper::{
    Inputs, Job, Ledger, Machine, Model, PANELS, Program, Programs, Stamps, fill, jobs, page, run,
};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Prints what `ls-run bench` and `sync` would, after a line in `calls`; refuses budgets for `oracle` as too small.
const FAKE: &str = r#"#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
case "$*" in *oracle*) echo "no room" >&2; exit 6;; esac
case "$*" in sync*) echo '{"methods": [{"method": "ours, lag 2", "stages": [1, 16], "us": [40, 60]}]}'; exit;; esac
echo '{"rep": 0, "decode_tok_s": 10.0, "bound_fraction": 0.5, "bytes_read_per_token": 2000000, "perplexity": 20.5, "avg_ts": 3.0}'
"#;

struct Bench {
    folder: tempfile::TempDir,
    inputs: Inputs,
    programs: Programs,
}

fn bench() -> Bench {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("fake"), FAKE).unwrap();
    fs::set_permissions(at("fake"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(at("model.lsb"), "a bundle").unwrap();
    fs::write(at("text.txt"), "a text").unwrap();
    let model = Model {
        name: "model".into(),
        bundle: at("model.lsb"),
        bundle_bytes: 100 << 20,
        source: None,
        peer: None,
        recipe: "quick".into(),
        artifacts: at("artifacts"),
    };
    let inputs = Inputs {
        models: vec![model],
        prompts: vec![at("text.txt")],
        calibration: Vec::new(),
        truthfulqa: None,
        qasper: None,
        coqa: None,
        peers: Vec::new(),
        gpu: false,
        panels: Vec::new(),
        quick: true,
    };
    let programs = Programs::new(&at("fake"), &at("fake"), Vec::new()).unwrap();
    Bench { folder, inputs, programs }
}

impl Bench {
    fn ledger(&self) -> Ledger {
        Ledger::open(&self.path("results.jsonl")).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn calls(&self) -> usize {
        fs::read_to_string(self.path("calls")).map_or(0, |text| text.lines().count())
    }
}

fn measure(bench: &Bench, jobs: &[Job]) -> usize {
    run(jobs, &bench.programs, &mut bench.ledger(), |_, _, _| {}).unwrap()
}

#[test]
fn work_goes_on_where_it_was_and_is_told_whole() {
    let bench = bench();
    let jobs = jobs(&bench.inputs);
    let (first, rest) = jobs.split_at(jobs.len() / 4);
    assert!(measure(&bench, first) > 0);
    let quarter = bench.calls();
    let pending = fill(&jobs, &bench.programs, &bench.ledger()).unwrap();
    let missing = |id: &str| {
        pending.iter().find(|panel| panel.panel.id == id).and_then(|panel| panel.missing).unwrap()
    };
    assert!(missing("table-5").contains("Not measured yet") && missing("table-3").contains("GPU"));
    // A crash in the midst of a line.
    let mut bytes = fs::read(bench.path("results.jsonl")).unwrap();
    bytes.extend(b"{\"key\": \"torn");
    fs::write(bench.path("results.jsonl"), bytes).unwrap();
    measure(&bench, &jobs);
    let all = bench.calls();
    assert!(all <= quarter + rest.len(), "{all} calls, {quarter} before, {} new jobs", rest.len());
    assert_eq!(measure(&bench, &jobs), 0, "all are done");
    assert_eq!(bench.calls(), all);

    let filled = fill(&jobs, &bench.programs, &bench.ledger()).unwrap();
    assert_eq!(filled.len(), PANELS.len());
    let figure_8 = filled.iter().find(|panel| panel.panel.id == "figure-8").unwrap();
    let dense = figure_8.series.iter().find(|series| series.name == "dense").unwrap();
    let point = &dense.points[0];
    assert_eq!(
        (point.x, point.y, point.low, point.high, point.repetitions),
        (37.5, 10.0, 10.0, 10.0, 2)
    );
    assert!(point.command.starts_with("ls-run bench "), "{}", point.command);
    // So many percent of 100 MiB.
    assert!(point.command.contains(" --memory 39321600 "), "{}", point.command);
    let empty = filled.iter().find(|panel| panel.panel.id == "table-3").unwrap();
    assert!(empty.missing.unwrap().contains("GPU"));

    let steady = filled.iter().find(|panel| panel.panel.id == "steadiness").unwrap();
    assert_eq!(steady.spread(), Some((10.0, 10.0, 6)));
    let html = page(&filled, &Machine::this(), &["A `bit` of <note>.".to_owned()]);
    assert!(
        html.contains("A <code>bit</code> of &lt;note&gt;.")
            && html.contains("<svg")
            && html.contains("Figure 8.")
            && html.contains("10 <small>(10 to 10)</small>")
            && html.contains("the same command reached 10 to 10 tokens/s, 6 times")
    );
    assert!(!html.contains("http://") || html.contains("xmlns=\"http://www.w3.org/2000/svg\""));
}

#[test]
fn panels_can_be_measured_alone() {
    let mut bench = bench();
    bench.inputs.gpu = true;
    let all = jobs(&bench.inputs).len();
    bench.inputs.panels = vec!["table-3".into(), "table-4".into()];
    let some = jobs(&bench.inputs);
    let feeds = |job: &Job| job.feeds.iter().any(|feed| feed.panel.starts_with("table-"));
    assert!(some.len() < all / 4 && some.iter().all(feeds), "{} of {all}", some.len());
    assert_eq!(measure(&bench, &some), some.len());
    let filled = fill(&some, &bench.programs, &bench.ledger()).unwrap();
    let of = |id: &str| filled.iter().find(|panel| panel.panel.id == id).unwrap();
    let lag = &of("table-3").series[0];
    let points: Vec<(f64, f64)> = lag.points.iter().map(|point| (point.x, point.y)).collect();
    assert_eq!((lag.name.as_str(), points), ("ours, lag 2", vec![(1.0, 0.0), (16.0, 50.0)]));
    assert_eq!(of("figure-3").series[0].points[1].y, 60.0);
    assert!(of("figure-8").missing.is_some(), "it was not asked for");
}

#[test]
fn another_input_is_another_job() {
    let bench = bench();
    let key = |jobs: &[Job]| jobs[0].key(&bench.programs, &mut Stamps::default()).unwrap();
    let before = key(&jobs(&bench.inputs));
    assert_eq!(before, key(&jobs(&bench.inputs)));
    fs::write(bench.path("model.lsb"), "another!").unwrap();
    assert_ne!(before, key(&jobs(&bench.inputs)));
}

#[test]
fn whatever_differs_is_another_job() {
    let bench = bench();
    let key = |change: &dyn Fn(&mut Job)| {
        let args = ["ab", "c"].map(str::to_owned).to_vec();
        let mut job = Job::new(Program::LsRun, "model", args, vec![bench.path("text.txt")]);
        change(&mut job);
        job.key(&bench.programs, &mut Stamps::default()).unwrap()
    };
    let changes: [&dyn Fn(&mut Job); 7] = [
        &|_| (),
        &|job| job.rep = 1,
        &|job| job.limit_bytes = Some(1),
        &|job| job.args = ["a", "bc"].map(str::to_owned).to_vec(),
        &|job| job.args = vec!["ab".into()],
        &|job| job.inputs = vec![bench.path("model.lsb")],
        &|job| job.inputs.clear(),
    ];
    let keys: std::collections::BTreeSet<String> =
        changes.iter().map(|change| key(*change)).collect();
    assert_eq!(keys.len(), changes.len());
    let before = key(&|_| ());
    fs::write(bench.path("fake"), "#!/bin/sh\n").unwrap();
    let other = Programs::new(&bench.path("fake"), &bench.path("fake"), Vec::new()).unwrap();
    let job = Job::new(
        Program::LsRun,
        "model",
        vec!["ab".into(), "c".into()],
        vec![bench.path("text.txt")],
    );
    assert_ne!(job.key(&other, &mut Stamps::default()).unwrap(), before, "another program");
}

#[test]
fn rows_take_turns() {
    let bench = bench();
    let mut jobs = jobs(&bench.inputs);
    let steady = |job: &Job| job.feeds.iter().any(|feed| feed.panel == "steadiness");
    // One command comes between all others.
    assert!([&jobs[0], &jobs[jobs.len() - 1]].into_iter().all(steady));
    jobs.retain(|job| !steady(job));
    measure(&bench, &jobs);
    let calls = fs::read_to_string(bench.path("calls")).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    let again: Vec<bool> = calls.lines().map(|call| !seen.insert(call)).collect();
    let first = again.iter().position(|&again| again).expect("there are two repetitions");
    assert!(again[first..].iter().all(|&again| again), "a second repetition came before a first");
    assert!(first > again.len() / 2, "{first} of {}", again.len());
}

#[test]
fn an_input_is_read_once_and_again_where_it_was_written() {
    let bench = bench();
    let jobs = jobs(&bench.inputs);
    let mut stamps = Stamps::default();
    let before = jobs[0].key(&bench.programs, &mut stamps).unwrap();
    let bundle = fs::File::options().write(true).open(bench.path("model.lsb")).unwrap();
    let written = bundle.metadata().unwrap().modified().unwrap();
    fs::write(bench.path("model.lsb"), "another!").unwrap();
    bundle.set_modified(written).unwrap();
    let same = jobs[0].key(&bench.programs, &mut stamps).unwrap();
    assert_eq!(same, before, "nothing tells that it has to be read again");
    bundle.set_modified(written + Duration::from_secs(1)).unwrap();
    assert_ne!(jobs[0].key(&bench.programs, &mut stamps).unwrap(), before);
}

#[test]
fn what_does_not_fit_is_an_answer_and_is_told() {
    let mut bench = bench();
    bench.inputs.quick = false;
    let oracle = |job: &Job| job.args.iter().any(|arg| arg == "oracle");
    let jobs: Vec<Job> = jobs(&bench.inputs).into_iter().filter(oracle).collect();
    assert_eq!(measure(&bench, &jobs), jobs.len());
    assert_eq!(measure(&bench, &jobs), 0, "a refusal is not asked for again");
    let filled = fill(&jobs, &bench.programs, &bench.ledger()).unwrap();
    let figure_8 = filled.iter().find(|panel| panel.panel.id == "figure-8").unwrap();
    assert!(
        figure_8.series.is_empty() && figure_8.failed.iter().all(|(_, error)| error == "no room")
    );
    assert_eq!(figure_8.failed.len(), 7, "one for each budget");
}

#[test]
fn peers_that_are_here_are_measured_and_others_named() {
    let mut bench = bench();
    let fake = bench.path("fake");
    let why = || Err("`pip install` said <no>".to_owned());
    let peers = vec![
        (Program::LlamaBench, Ok(fake.clone())),
        (Program::AirLlm, why()),
        (Program::MistralRs, Ok(fake.clone())),
    ];
    bench.programs = Programs::new(&fake, &fake, peers).unwrap();
    bench.inputs.peers = bench.programs.peers().collect();
    bench.inputs.models[0].peer = Some(bench.path("model.lsb"));
    let jobs: Vec<Job> = jobs(&bench.inputs)
        .into_iter()
        .filter(|job| job.feeds.iter().any(|feed| feed.panel == "peers"))
        .collect();
    measure(&bench, &jobs);
    let filled = fill(&jobs, &bench.programs, &bench.ledger()).unwrap();
    let panel = filled.iter().find(|panel| panel.panel.id == "peers").unwrap();
    let rates = |name: &str| {
        let series = panel.series.iter().find(|series| series.name == name).unwrap();
        let points = series.points.iter().map(|point| (point.x, point.y, point.repetitions));
        (points.collect::<Vec<_>>(), series.points[0].command.clone())
    };
    let (points, command) = rates("llama.cpp");
    assert_eq!(points, [(37.5, 3.0, 1), (50.0, 3.0, 1), (75.0, 3.0, 1)]);
    assert!(command.contains("llama-bench -m ") && command.contains(" -d 64 "), "{command}");
    let (points, command) = rates("mistral.rs");
    assert_eq!(points, [(50.0, 10.0, 1)]);
    assert!(command.contains("text.txt --prompt-tokens 64 -n 4 --threads "), "{command}");
    assert_eq!(rates("dense").0.len(), 3);
    let json = serde_json::to_value(panel).unwrap();
    let absent = serde_json::json!([{"name": "AirLLM", "why": "`pip install` said <no>"}]);
    assert_eq!(json["absent"], absent);
    assert!(filled.iter().all(|other| other.panel.id == "peers" || other.absent.is_empty()));
    let html = page(&filled, &Machine::this(), &[]);
    assert!(html.contains("AirLLM is missing: <code>pip install</code> said &lt;no&gt;"), "{html}");
}

#[test]
fn a_command_that_is_ended_is_told_by_what() {
    let bench = bench();
    let job = |script: &str, patience: u64| {
        let mut job = Job::new(Program::LsRun, "model", vec![script.to_owned()], Vec::new());
        job.patience = Duration::from_millis(patience);
        job.point("figure-8", "dense", 1.0, "decode_tok_s")
    };
    let script =
        "#!/bin/sh\ncase \"$1\" in slow) exec sleep 600;; *) echo last >&2; kill -9 $$;; esac\n";
    fs::write(bench.path("fake"), script).unwrap();
    let jobs = [job("killed", 600_000), job("slow", 1000)];
    measure(&bench, &jobs);
    let filled = fill(&jobs, &bench.programs, &bench.ledger()).unwrap();
    let figure_8 = filled.iter().find(|panel| panel.panel.id == "figure-8").unwrap();
    let said: Vec<&str> = figure_8.failed.iter().map(|(_, said)| said.as_str()).collect();
    assert_eq!(said, ["ended by signal 9: last", "ended after 1 s: no last words"]);
    assert_eq!(measure(&bench, &jobs[..1]), 1, "it is no answer");
}

#[test]
fn a_foreign_ledger_is_refused() {
    let bench = bench();
    fs::write(bench.path("results.jsonl"), "{\"key\": 1}\n").unwrap();
    let error = Ledger::open(&bench.path("results.jsonl")).unwrap_err().to_string();
    assert!(error.contains("line 1"), "{error}");
    assert!(Ledger::open(Path::new("/nowhere/results.jsonl")).is_err());
}
