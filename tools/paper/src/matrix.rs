//! [`jobs`]: which commands measure the panels, for each model.
//!
//! What is small enough is measured as the paper does; of a model that takes seconds a token fewer tokens are decoded. All
//! systems decode the same tokens of the same text, and take turns.

use crate::job::{Job, Program, Reading};
use crate::ledger::Entry;
use std::path::{Path, PathBuf};

mod beside;
mod quality;
mod speed;

/// A model that is measured.
#[derive(Clone, Debug)]
pub struct Model {
    /// Its name in the report.
    pub name: String,
    /// What `ls-prep all` made of it.
    pub bundle: PathBuf,
    /// The bundle's length.
    pub bundle_bytes: u64,
    /// The model's file that the bundle was made of; refinement is measured on it.
    pub source: Option<PathBuf>,
    /// The same weights as a GGUF file in the bundle's precision, for llama.cpp.
    pub peer: Option<PathBuf>,
    /// Recipe and folder of artifacts that the bundle was made with.
    pub recipe: String,
    /// See `recipe`.
    pub artifacts: PathBuf,
}

/// What is measured, and on what.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The models.
    pub models: Vec<Model>,
    /// Texts, at least one: the first is what most rows decode.
    pub prompts: Vec<PathBuf>,
    /// The calibration texts that the bundles were made with.
    pub calibration: Vec<PathBuf>,
    /// TruthfulQA's table.
    pub truthfulqa: Option<PathBuf>,
    /// Qasper's papers and questions.
    pub qasper: Option<PathBuf>,
    /// CoQA's conversations.
    pub coqa: Option<PathBuf>,
    /// Peers that are here.
    pub peers: Vec<Program>,
    /// Whether there is an NVIDIA GPU.
    pub gpu: bool,
    /// Ids of the panels that are measured; none: all.
    pub panels: Vec<String>,
    /// Fewer points and repetitions.
    pub quick: bool,
}

/// How much is measured.
struct Effort {
    reps: u32,
    /// Tokens that are decoded for a speed.
    tokens: u32,
    /// Tokens of text for a perplexity.
    eval_tokens: u32,
    /// Memory, as shares of the bundle in percent.
    budgets: &'static [f64],
    /// Shares of neurons left out, in percent.
    sparsities: &'static [u32],
    /// Items of a dataset.
    items: u32,
    /// Times that one command is repeated, to see how steady the machine is.
    again: u32,
}

/// The budget at which other things are varied, in percent of the bundle.
const MIDDLE: f64 = 50.0;
/// Bundles above this are slow to decode.
const LARGE_BYTES: u64 = 1 << 30;

impl Effort {
    fn of(model: &Model, quick: bool) -> Effort {
        let large = model.bundle_bytes > LARGE_BYTES;
        Effort {
            reps: if quick { 2 } else { 5 },
            tokens: if large {
                12
            } else if quick {
                48
            } else {
                96
            },
            eval_tokens: if large || quick { 1024 } else { 8192 },
            budgets: if quick {
                &[75.0, 50.0, 37.5]
            } else {
                &[100.0, 75.0, 62.5, 50.0, 37.5, 25.0, 12.5]
            },
            sparsities: if quick { &[50, 80, 90] } else { &[25, 50, 70, 80, 90, 95] },
            items: if quick || large { 4 } else { 100 },
            again: if quick { 6 } else { 12 },
        }
    }
}

/// Systems that leave neurons out, as lines of plots.
const SPARSE: [&str; 5] = ["dejavu", "dejavu+", "powerinfer2", "leanstream", "leanstream+base"];

/// A model with how much of it is measured: what makes jobs.
struct Bench<'a> {
    model: &'a Model,
    inputs: &'a Inputs,
    effort: Effort,
}

/// All jobs, in the order in which they run.
#[must_use]
pub fn jobs(inputs: &Inputs) -> Vec<Job> {
    let bench = |model| Bench { model, inputs, effort: Effort::of(model, inputs.quick) };
    let benches: Vec<Bench<'_>> = inputs.models.iter().map(bench).collect();
    let mut jobs = Vec::new();
    for bench in &benches {
        bench.quality(&mut jobs);
        bench.speed(&mut jobs);
        bench.beside(&mut jobs);
    }
    if let Some(bench) = benches.first().filter(|_| inputs.gpu) {
        jobs.extend(beside::coordination(&bench.model.name, bench.effort.reps));
    }
    let wanted = |panel: &str| inputs.panels.is_empty() || inputs.panels.iter().any(|p| p == panel);
    jobs.retain(|job| job.feeds.iter().any(|feed| wanted(feed.panel)));
    // Stable: all jobs of a repetition come before the next, so that rows alternate.
    jobs.sort_by_key(|job| job.rep);
    if wanted("steadiness") {
        jobs = benches.iter().fold(jobs, |jobs, bench| between(jobs, bench.steadiness()));
    }
    jobs
}

/// Puts some jobs evenly between the others, before the first and behind the last.
fn between(jobs: Vec<Job>, some: Vec<Job>) -> Vec<Job> {
    let (count, gaps) = (jobs.len(), some.len().saturating_sub(1).max(1));
    let mut jobs = jobs.into_iter();
    let mut all = Vec::new();
    for (place, job) in some.into_iter().enumerate() {
        let before = count * place / gaps;
        all.extend(jobs.by_ref().take(before - (all.len() - place)));
        all.push(job);
    }
    all.extend(jobs);
    all
}

impl Bench<'_> {
    /// A command of `ls-run` on the bundle.
    fn ls_run(&self, command: &[&str], flags: &[&str], reads: &[&Path]) -> Job {
        let bundle = text(&self.model.bundle);
        let args = command.iter().copied().chain([bundle.as_str()]).chain(flags.iter().copied());
        let args = args.map(str::to_owned).chain(["--json".to_owned()]).collect();
        let inputs = std::iter::once(self.model.bundle.as_path()).chain(reads.iter().copied());
        let inputs = inputs.map(Path::to_owned).collect();
        Job::new(Program::LsRun, &self.model.name, args, inputs)
    }

    /// `ls-run bench` on the first prompt.
    fn bench(&self, flags: &[&str]) -> Job {
        self.bench_on(&self.inputs.prompts[0], 64, self.effort.tokens, flags)
    }

    fn bench_on(&self, prompt: &Path, prompt_tokens: u32, tokens: u32, flags: &[&str]) -> Job {
        let context = (prompt_tokens + tokens).next_multiple_of(64).max(256);
        let numbers = [prompt_tokens, tokens, context].map(|n| n.to_string());
        let prompt_text = text(prompt);
        let own = ["--text", &prompt_text, "--prompt-tokens", &numbers[0], "-n", &numbers[1]];
        let own = own.into_iter().chain(["--context", &numbers[2]]);
        let flags: Vec<&str> = own.chain(flags.iter().copied()).chain(["--reps", "1"]).collect();
        self.ls_run(&["bench"], &flags, &[prompt])
    }

    /// Bytes that are this percentage of the bundle.
    fn memory_bytes(&self, percent: f64) -> u64 {
        (self.model.bundle_bytes as f64 * percent / 100.0) as u64
    }

    /// Room for all weights, tables and a context.
    fn all_memory(&self) -> String {
        (self.model.bundle_bytes * 2 + (1 << 29)).to_string()
    }

    /// `job`, `n` times.
    fn repeated(n: u32, job: impl Fn() -> Job) -> impl Iterator<Item = Job> {
        (0..n).map(move |rep| {
            let mut job = job();
            job.rep = rep;
            job
        })
    }
}

/// The path as an argument.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Share of requests that were hits of the kind `kept` or `ahead`, or misses, in percent.
fn requests(entry: &Entry, what: &str) -> Option<f64> {
    let [kept, ahead, missed] =
        ["demand_hits", "prefetch_hits", "misses"].map(|key| entry.number(key).unwrap_or(0.0));
    let part = match what {
        "kept" => kept,
        "ahead" => ahead,
        _ => missed,
    };
    let all = kept + ahead + missed;
    (all > 0.0).then(|| 100.0 * part / all)
}

/// Misses of each layer, in percent of its requests.
fn misses_by_layer(entry: &Entry) -> Vec<f64> {
    let [kept, ahead, missed] =
        ["demand_hits_by_layer", "prefetch_hits_by_layer", "misses_by_layer"]
            .map(|key| entry.numbers(key));
    let each = kept.iter().zip(&ahead).zip(&missed);
    each.map(|((kept, ahead), missed)| 100.0 * missed / (kept + ahead + missed)).collect()
}

/// The cells of a row.
fn row(series: &str, cells: &[(&str, Option<f64>)]) -> Vec<Reading> {
    let cell = |(x, (tick, y)): (usize, &(&str, Option<f64>))| {
        y.map(|y| Reading { series: series.to_owned(), x: x as f64, tick: (*tick).to_owned(), y })
    };
    cells.iter().enumerate().filter_map(cell).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(output: serde_json::Value) -> Entry {
        Entry::printed(vec![output])
    }

    #[test]
    fn requests_are_shared_out_by_where_they_found_their_block() {
        let found = entry(json!({
            "demand_hits": 5, "prefetch_hits": 3, "misses": 2, "demand_hits_by_layer": [4, 1],
            "prefetch_hits_by_layer": [3, 0], "misses_by_layer": [1, 1],
        }));
        let shares = ["kept", "ahead", "missed"].map(|what| requests(&found, what));
        assert_eq!(shares, [Some(50.0), Some(30.0), Some(20.0)]);
        assert_eq!(misses_by_layer(&found), [12.5, 50.0]);
        assert_eq!(requests(&entry(json!({})), "missed"), None);
    }

    #[test]
    fn some_jobs_come_evenly_between_the_others() {
        let job = |model: &str| Job::new(Program::LsRun, model, Vec::new(), Vec::new());
        let names = |others: usize, some: usize| {
            let jobs = (0..others).map(|_| job("-")).collect();
            let all = between(jobs, (0..some).map(|_| job("X")).collect());
            all.iter().map(|job| job.model.clone()).collect::<String>()
        };
        assert_eq!(names(6, 3), "X---X---X");
        assert_eq!(names(5, 3), "X--X---X");
        assert_eq!(["X--", "XXXX", "--"], [names(2, 1), names(0, 4), names(2, 0)]);
    }

    #[test]
    fn a_row_leaves_out_what_was_not_measured_but_not_its_place() {
        let cells = row("lut", &[("a", Some(1.0)), ("b", None), ("c", Some(3.0))]);
        let found: Vec<_> = cells.iter().map(|cell| (cell.x, cell.tick.as_str(), cell.y)).collect();
        assert_eq!(found, [(0.0, "a", 1.0), (2.0, "c", 3.0)]);
    }
}
