//! The ledger of `ls-prep paper`, and what programs printed into it, up to the page.

use crate::target::{Run, Scratch, Target};
use ls_paper::{Inputs, Job, Ledger, Machine, Model, Program, filled, jobs, page};
use std::collections::BTreeSet;
use std::path::Path;

/// Entries of an input that pages are made of.
const MAX_PAGES: usize = 2;

pub(crate) const LEDGER: Target = Target {
    words: &[
        "\"key\":",
        "\"output\":",
        "\"error\":",
        "\"exit\":",
        "\"rep\":",
        "decode_tok_s",
        "misses_by_layer",
        "perplexity",
        "predictors",
        "guard",
        "choices",
        "refinement",
        "controller",
        "1e308",
        "-1e308",
        "5e-324",
        "1e-300",
        "-1",
        "0",
        "1e999",
        "18446744073709551615",
        "null",
        "[]",
        "{}",
        "[[",
        "\"\"",
        "\"<script>\"",
        "\"\\ud800\"",
        "\n",
    ],
    ..Target::new("ledger", "ledgers of measurements, and pages made of them", open)
};

fn open(folder: &Path) -> Run {
    let file = Scratch::new(folder, "results.jsonl");
    let jobs = each_panel();
    Box::new(move |bytes| {
        file.put(bytes, 0);
        let Ok(ledger) = Ledger::open(&file.path) else { return };
        for entry in ledger.entries().take(MAX_PAGES) {
            let filled = filled(&jobs, &[], |_| Ok(Some(entry))).expect("no file is read");
            let machine = Machine {
                processor: String::new(),
                cores: 1,
                memory_bytes: 0,
                kernel: String::new(),
            };
            let html = page(&filled, &machine, &[]);
            assert!(!html.contains("<script"), "what programs printed is no part of a page");
        }
    })
}

/// A job for each panel that has any.
fn each_panel() -> Vec<Job> {
    let path = |name: &str| Path::new(name).to_owned();
    let model = Model {
        name: "model".into(),
        bundle: path("model.lsb"),
        bundle_bytes: 1 << 20,
        source: Some(path("model.gguf")),
        peer: Some(path("model.f16.gguf")),
        recipe: "paper".into(),
        artifacts: path("artifacts"),
    };
    let inputs = Inputs {
        models: vec![model],
        prompts: vec![path("text.txt")],
        calibration: vec![path("text.txt")],
        truthfulqa: Some(path("truthfulqa.csv")),
        qasper: Some(path("qasper.jsonl")),
        coqa: Some(path("coqa.json")),
        peers: Program::PEERS.to_vec(),
        gpu: true,
        panels: Vec::new(),
        quick: true,
    };
    let mut seen = BTreeSet::new();
    let mut jobs = jobs(&inputs);
    jobs.retain(|job| job.feeds.iter().filter(|feed| seen.insert(feed.panel)).count() > 0);
    jobs
}
