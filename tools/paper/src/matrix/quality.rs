//! Quality: perplexity by sparsity, Table 2, Table 6, Figure 12, the guard.

use super::{Bench, row, text};
use crate::job::{Job, Program, Reading};
use crate::ledger::Entry;
use serde_json::Value;

/// Systems that differ in what they compute; those without a base that predict with the same network are one.
const DIFFERENT: [&str; 3] = ["powerinfer2", "leanstream", "leanstream+base"];

impl Bench<'_> {
    pub(super) fn quality(&self, jobs: &mut Vec<Job>) {
        self.perplexity(jobs);
        self.predictors(jobs);
        self.refinement(jobs);
        self.tasks(jobs);
    }

    fn perplexity(&self, jobs: &mut Vec<Job>) {
        let evaluated = self.inputs.prompts.last().expect("at least one text");
        let (path, tokens) = (text(evaluated), self.effort.eval_tokens.to_string());
        let memory = self.all_memory();
        let common = ["--text", &path, "--tokens", &tokens, "--decode", "--memory", &memory];
        let eval = |flags: &[&str]| {
            self.ls_run(&["eval", "perplexity"], &[&common[..], flags].concat(), &[evaluated])
        };
        let dense = eval(&["--system", "dense"]);
        jobs.push(dense.point("perplexity", "dense", 0.0, "perplexity"));
        for system in DIFFERENT {
            for &sparsity in self.effort.sparsities {
                let share = format!("{sparsity}%");
                let job = eval(&["--system", system, "--sparsity", &share]);
                jobs.push(job.point("perplexity", system, f64::from(sparsity), "perplexity"));
            }
        }
    }

    /// Table 6 and the guard's settings: what the preparation has measured.
    fn predictors(&self, jobs: &mut Vec<Job>) {
        let args = [
            "report",
            &text(&self.model.bundle),
            "--artifacts",
            &text(&self.model.artifacts),
            "--json",
        ];
        let args = args.map(str::to_owned).to_vec();
        let bundle = vec![self.model.bundle.clone()];
        let job = Job::new(Program::LsPrep, &self.model.name, args, bundle);
        jobs.push(job.many("table-6", table_6).many("guard", guard));
    }

    /// Table 2.
    fn tasks(&self, jobs: &mut Vec<Job>) {
        let (items, memory) = (self.effort.items.to_string(), self.all_memory());
        let data = [
            ("qasper", &self.inputs.qasper, &[("Qasper F1, %", "f1")][..]),
            ("coqa", &self.inputs.coqa, &[("CoQA F1, %", "f1")]),
            (
                "truthfulqa",
                &self.inputs.truthfulqa,
                &[("TruthfulQA F1, %", "f1"), ("MC1, %", "mc1"), ("MC2, %", "mc2")],
            ),
        ];
        let mut first = 0;
        for (task, path, cells) in data {
            if let Some(path) = path {
                let file = text(path);
                let common = ["--data", &file, "--limit", &items, "--memory", &memory];
                let systems = std::iter::once(("dense", "80%")).chain(
                    DIFFERENT.into_iter().flat_map(|system| [(system, "50%"), (system, "80%")]),
                );
                for (system, sparsity) in systems {
                    let sparse: &[&str] =
                        if system == "dense" { &[] } else { &["--sparsity", sparsity] };
                    let flags = [&common[..], &["--system", system], sparse].concat();
                    let name = if sparse.is_empty() {
                        system.to_owned()
                    } else {
                        format!("{system}, {sparsity} out")
                    };
                    let job = self.ls_run(&["eval", task], &flags, &[path]);
                    jobs.push(cells.iter().enumerate().fold(job, |job, (place, &(tick, key))| {
                        let x = (first + place) as f64;
                        job.cell("table-2", &name, (x, tick), move |entry| {
                            Some(100.0 * entry.number(key)?)
                        })
                    }));
                }
            }
            first += cells.len();
        }
    }

    /// Figure 12.
    fn refinement(&self, jobs: &mut Vec<Job>) {
        let Some(source) = &self.model.source else { return };
        if self.inputs.calibration.is_empty() {
            return;
        }
        let staged = if self.inputs.quick { "128" } else { "2048" };
        let mut args = vec!["predictor".to_owned(), text(source), "--recipe".to_owned()];
        args.extend([
            self.model.recipe.clone(),
            "--artifacts".to_owned(),
            text(&self.model.artifacts),
        ]);
        args.extend(
            ["--placed", "--refinement", staged, "--json", "--calibration"].map(str::to_owned),
        );
        args.extend(self.inputs.calibration.iter().map(|path| text(path)));
        let job = Job::new(Program::LsPrep, &self.model.name, args, vec![source.clone()]);
        jobs.push(job.many("figure-12", figure_12));
    }
}

fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    value.get(key).and_then(Value::as_array).into_iter().flatten()
}

fn table_6(entry: &Entry) -> Vec<Reading> {
    let Some(report) = entry.output.last() else { return Vec::new() };
    let of_row = |predictor: &Value| {
        let number = |key: &str| predictor.get(key).and_then(Value::as_f64);
        let percent = |key: &str| number(key).map(|share| 100.0 * share);
        let name = predictor.get("name").and_then(Value::as_str).unwrap_or("?");
        let block = number("block").unwrap_or(1.0);
        let cells = [
            ("captured by 20 %, %", percent("imp20")),
            ("of the top 10 %, %", percent("top10")),
            ("beyond 20 % for 95 %, %", percent("red95")),
            ("KB a layer", number("bytes_per_layer").map(|bytes| bytes / 1e3)),
            ("µs", number("microseconds")),
        ];
        row(&format!("{name}, blocks of {block}"), &cells)
    };
    list(report, "predictors").flat_map(of_row).collect()
}

fn guard(entry: &Entry) -> Vec<Reading> {
    let Some(report) = entry.output.last() else { return Vec::new() };
    let mut readings = Vec::new();
    for guard in list(report, "guard") {
        let dense = guard.get("dense_perplexity").and_then(Value::as_f64);
        for choice in list(guard, "choices") {
            let number = |key: &str| choice.get(key).and_then(Value::as_f64);
            let ratio = number("perplexity").zip(dense).map(|(own, dense)| own / dense);
            let cells = [
                ("run exactly, %", number("exact_share").map(|share| 100.0 * share)),
                ("resident base, % of the FFNs", number("base_share").map(|share| 100.0 * share)),
                ("MB read a token", number("bytes").map(|bytes| bytes / 1e6)),
                ("perplexity over dense", ratio),
            ];
            let tolerance = 100.0 * number("tolerance").unwrap_or(0.0);
            readings.extend(row(&format!("{tolerance} %"), &cells));
        }
    }
    readings
}

/// Means over layers of what a prediction captures after each stage.
fn figure_12(entry: &Entry) -> Vec<Reading> {
    let Some(report) = entry.output.last() else { return Vec::new() };
    let mut readings = Vec::new();
    for (order, name) in [("priority", "by priority"), ("file", "in file order")] {
        let mut sums: Vec<(f64, u32)> = Vec::new();
        for layer in list(report, "refinement").filter(|layer| !layer.is_null()) {
            for (stage, figures) in list(layer, order).enumerate() {
                let Some(imp20) = figures.get("imp20").and_then(Value::as_f64) else { continue };
                sums.resize(sums.len().max(stage + 1), (0.0, 0));
                sums[stage] = (sums[stage].0 + imp20, sums[stage].1 + 1);
            }
        }
        let counted = sums.iter().enumerate().filter(|(_, (_, layers))| *layers > 0);
        readings.extend(counted.map(|(stage, (sum, layers))| Reading {
            series: name.to_owned(),
            x: stage as f64,
            tick: String::new(),
            y: 100.0 * sum / f64::from(*layers),
        }));
    }
    readings
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn found(read: fn(&Entry) -> Vec<Reading>, output: Value) -> Vec<(String, f64, f64)> {
        let entry = Entry::printed(vec![output]);
        read(&entry).into_iter().map(|reading| (reading.series, reading.x, reading.y)).collect()
    }

    #[test]
    fn figure_12_is_means_over_layers() {
        let layer = |stages: &[f64]| -> Vec<Value> {
            stages.iter().map(|imp20| json!({"imp20": imp20})).collect()
        };
        let layers = json!({"refinement": [
            null,
            {"priority": layer(&[0.25, 0.75]), "file": layer(&[0.5])},
            {"priority": layer(&[0.75]), "file": []},
        ]});
        let wanted =
            [("by priority", 0.0, 50.0), ("by priority", 1.0, 75.0), ("in file order", 0.0, 50.0)];
        assert_eq!(found(figure_12, layers), wanted.map(|(name, x, y)| (name.to_owned(), x, y)));
    }

    #[test]
    fn the_guards_perplexities_are_over_dense() {
        let guard_of = json!({"guard": [{"dense_perplexity": 20.0, "choices": [
            {"tolerance": 0.05, "exact_share": 0.25, "base_share": 0.125, "bytes": 3e6, "perplexity": 21.0},
        ]}]});
        let wanted = [(0.0, 25.0), (1.0, 12.5), (2.0, 3.0), (3.0, 1.05)];
        assert_eq!(found(guard, guard_of), wanted.map(|(x, y)| ("5 %".to_owned(), x, y)));
    }
}
