//! Inside a system: Table 1, Figure 4, Table 4.

use super::{Bench, misses_by_layer, requests, row};
use crate::job::{Job, Reading};
use crate::ledger::Entry;

impl Bench<'_> {
    pub(super) fn beside(&self, jobs: &mut Vec<Job>) {
        self.predictions(jobs);
        self.misses(jobs);
        self.policies(jobs);
    }

    /// Table 1.
    fn predictions(&self, jobs: &mut Vec<Job>) {
        let memory = self.all_memory();
        for (name, system) in [("two-layer network", "dejavu"), ("hashing", "leanstream")] {
            // Otherwise nothing is predicted: all is in memory.
            let flags = ["--system", system, "--prefetch", "on", "--memory", &memory];
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
