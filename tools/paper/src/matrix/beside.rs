//! Inside a system: Table 1, Figure 4, Table 4; and a GPU's part of it: Table 3, Figure 3.

use super::{Bench, misses_by_layer, requests, row};
use crate::job::{Job, Program, Reading};
use crate::ledger::{Entry, numbers};
use serde_json::Value;

impl Bench<'_> {
    pub(super) fn beside(&self, jobs: &mut Vec<Job>) {
        self.predictions(jobs);
        self.misses(jobs);
        self.policies(jobs);
    }

    /// Table 1.
    fn predictions(&self, jobs: &mut Vec<Job>) {
        let memory = self.all_memory();
        // `dejavu` itself keeps nothing, and would read.
        for (name, system) in [("two-layer network", "dejavu+"), ("hashing", "leanstream")] {
            let flags = ["--system", system, "--memory", &memory];
            jobs.extend(Self::repeated(self.effort.reps, || {
                self.bench(&flags).many("table-1", move |entry| table_1(entry, name))
            }));
        }
    }

    /// Figure 4.
    fn misses(&self, jobs: &mut Vec<Job>) {
        let flags = ["--system", "leanstream", "--controller", "fixed", "--weight-cache", "50%"];
        for (place, prompt) in self.inputs.prompts.iter().enumerate() {
            let mut job = self.bench_on(prompt, 64, self.effort.tokens, &flags);
            if place == 0 {
                job = job.many("figure-4a", |entry| {
                    let by_layer = misses_by_layer(entry).into_iter().enumerate();
                    by_layer.map(|(layer, y)| point("misses", layer as f64, y)).collect()
                });
            }
            jobs.push(job.many("figure-4b", move |entry| {
                let first = misses_by_layer(entry).first().copied();
                first.map(|y| point("first layer", place as f64, y)).into_iter().collect()
            }));
        }
    }

    /// Table 4.
    fn policies(&self, jobs: &mut Vec<Job>) {
        let ours = |eviction, admission| {
            vec![
                "--system",
                "leanstream",
                "--controller",
                "fixed",
                "--eviction",
                eviction,
                "--admission",
                admission,
            ]
        };
        let rows = [
            ("powerinfer2", vec!["--system", "powerinfer2"]),
            ("LRU, every block must be kept", ours("lru", "always")),
            ("LRU", ours("lru", "compete")),
            ("LFU", ours("lfu", "compete")),
            ("moving average", ours("ema", "compete")),
            ("predicted reuse (leanstream)", ours("reuse", "compete")),
            ("Belady", ours("belady", "compete")),
        ];
        for (place, share) in ["25%", "50%"].into_iter().enumerate() {
            for (name, flags) in &rows {
                let name = *name;
                let flags = [flags.as_slice(), &["--weight-cache", share]].concat();
                let ticks = [format!("{share}: misses"), format!("{share}: ahead")];
                let x = 2.0 * place as f64;
                let job = self.bench(&flags);
                let job =
                    job.cell("table-4", name, (x, &ticks[0]), |entry| requests(entry, "missed"));
                jobs.push(
                    job.cell("table-4", name, (x + 1.0, &ticks[1]), |entry| {
                        requests(entry, "ahead")
                    }),
                );
            }
        }
    }
}

/// Table 3 and Figure 3, which are about a device and not about a model; `model` is whose panels they are shown with.
pub(super) fn coordination(model: &str, reps: u32) -> impl Iterator<Item = Job> {
    let args = ["sync", "--shape", "mistral-7b", "--splits", "1,2,4,8,16,32", "--json"];
    let args: Vec<String> = args.map(str::to_owned).to_vec();
    let model = model.to_owned();
    (0..reps).map(move |rep| {
        let job = Job { rep, ..Job::new(Program::LsRun, &model, args.clone(), Vec::new()) };
        job.many("figure-3", |entry| each_method(entry, |us, _| us))
            .many("table-3", |entry| each_method(entry, |us, unsplit| 100.0 * (us / unsplit - 1.0)))
    })
}

/// A point a method and number of stages: what `value` makes of its microseconds and of those of one stage.
fn each_method(entry: &Entry, value: impl Fn(f64, f64) -> f64) -> Vec<Reading> {
    let methods = entry.field("methods").and_then(Value::as_array);
    let mut points = Vec::new();
    for method in methods.into_iter().flatten() {
        let numbers = |key| numbers(method.get(key));
        let name = method.get("method").and_then(Value::as_str).unwrap_or_default();
        let (stages, us) = (numbers("stages"), numbers("us"));
        let Some(&unsplit) = us.first() else { continue };
        points.extend(stages.iter().zip(&us).map(|(&stages, &us)| {
            let (series, tick) = (name.to_owned(), format!("{stages:.0} stages"));
            Reading { series, x: stages, tick, y: value(us, unsplit) }
        }));
    }
    points
}

fn point(series: &str, x: f64, y: f64) -> Reading {
    Reading { series: series.to_owned(), x, tick: String::new(), y }
}

fn table_1(entry: &Entry, name: &str) -> Vec<Reading> {
    let layers = entry.numbers("misses_by_layer").len() as f64;
    let number = |key: &str| entry.number(key);
    let all = number("decode_tokens").zip(number("decode_tok_s")).map(|(n, rate)| n / rate);
    let computed = all.zip(number("predicting_s")).zip(number("decode_tokens"));
    let computed = computed.map(|((all, predicting), n)| 1e6 * (all - predicting) / n / layers);
    let once = number("predicting_s").zip(number("predictions")).map(|(s, n)| 1e6 * s / n);
    let a_layer = number("predictions").zip(number("decode_tokens")).map(|(p, n)| p / n / layers);
    let cells = [
        ("a layer computed, µs", computed),
        ("a prediction, µs", once),
        ("predictions a layer", a_layer),
    ];
    row(name, &cells)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn table_1_by_hand() {
        // Two layers, ten tokens a second, ten tokens: a second, of which 0.2 went into 40 predictions.
        let output = json!({
            "misses_by_layer": [1, 1], "decode_tokens": 10, "decode_tok_s": 10.0, "predicting_s": 0.2, "predictions": 40,
        });
        let entry = Entry::printed(vec![output]);
        let found = table_1(&entry, "hashing");
        let found: Vec<f64> = found.iter().map(|reading| reading.y.round()).collect();
        assert_eq!(found, [40_000.0, 5_000.0, 2.0]);
    }
}
