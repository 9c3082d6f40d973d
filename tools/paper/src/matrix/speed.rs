//! Speed: Figures 8 to 11 and 13, Tables 5 and 7, peers.

use super::{Bench, MIDDLE, SPARSE, requests, row, text};
use crate::job::{Job, Program, Reading};
use serde_json::Value;
use std::time::Duration;

/// The paper's budget for what is compared within a system: a fifth of the weights in memory.
const FIFTH: [&str; 2] = ["--weight-cache", "20%"];

impl Bench<'_> {
    pub(super) fn speed(&self, jobs: &mut Vec<Job>) {
        self.by_memory(jobs);
        self.peers(jobs);
        self.by_sparsity(jobs);
        self.by_text(jobs);
        self.ablation(jobs);
        self.ahead(jobs);
        self.by_prompt_length(jobs);
        self.controllers(jobs);
    }

    /// Figure 8 and what is beside it, Table 7.
    fn by_memory(&self, jobs: &mut Vec<Job>) {
        let rows = std::iter::once(("dense", "80%")).chain(SPARSE.map(|system| (system, "80%")));
        let rows = rows.chain((!self.inputs.quick).then_some(("oracle", "80%")));
        // What a base is for: it forgives leaving out more.
        let rows: Vec<_> = rows.chain([("leanstream+base", "95%")]).collect();
        for &percent in self.effort.budgets {
            let limit_bytes = self.memory_bytes(percent);
            let memory = limit_bytes.to_string();
            for &(system, sparsity) in &rows {
                let flags =
                    ["--system", system, "--sparsity", sparsity, "--memory", &memory, "--stats"];
                let flags = if system == "dense" {
                    [&flags[..2], &flags[4..]].concat()
                } else {
                    flags.to_vec()
                };
                let name =
                    if sparsity == "95%" { format!("{system} 95 %") } else { system.to_owned() };
                jobs.extend(Self::repeated(self.effort.reps, || {
                    let mut job = self.bench(&flags);
                    job.limit_bytes = Some(limit_bytes);
                    let job = job
                        .point("figure-8", &name, percent, "decode_tok_s")
                        .cell("bound", &name, (percent, ""), |entry| {
                            Some(100.0 * entry.number("bound_fraction")?)
                        })
                        .cell("bytes", &name, (percent, ""), |entry| {
                            Some(entry.number("bytes_read_per_token")? / 1e6)
                        });
                    let job = energy(job, &name, percent);
                    match system {
                        "dense" | "leanstream+base" if self.has_peers() => {
                            job.point("peers", &name, percent, "decode_tok_s")
                        }
                        _ => job,
                    }
                }));
            }
        }
    }

    /// One command again and again over the whole run.
    pub(super) fn steadiness(&self) -> Vec<Job> {
        let memory = self.memory_bytes(MIDDLE).to_string();
        let last = f64::from(self.effort.again - 1);
        let again = Self::repeated(self.effort.again, || {
            self.bench(&["--system", "dense", "--memory", &memory])
        });
        let placed = |job: Job| {
            let place = (100.0 * f64::from(job.rep) / last).round();
            job.point("steadiness", "dense", place, "decode_tok_s")
        };
        again.map(placed).collect()
    }

    fn has_peers(&self) -> bool {
        !self.inputs.peers.is_empty() && self.model.peer.is_some()
    }

    /// Programs of others in the same cgroup, with as many threads and as long a prompt.
    fn peers(&self, jobs: &mut Vec<Job>) {
        let Some(model) = &self.model.peer else { return };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).to_string();
        // Where the weights do not fit a token may take ten seconds.
        let tokens = if self.inputs.quick { 4 } else { self.effort.tokens.min(16) }.to_string();
        let reps = if self.inputs.quick { 1 } else { self.effort.reps.min(3) };
        let prompt = &self.inputs.prompts[0];
        for &percent in self.effort.budgets {
            for &peer in &self.inputs.peers {
                if self.inputs.quick && peer != Program::LlamaBench && percent != MIDDLE {
                    continue;
                }
                let (model_text, prompt_text) = (text(model), text(prompt));
                let (args, rate) = match peer {
                    // It makes up the words of its prompt.
                    Program::LlamaBench => {
                        let own =
                            ["-m", &model_text, "-t", &threads, "-n", &tokens].map(str::to_owned);
                        let fixed = ["-p", "0", "-d", "64", "-r", "1", "-lm", "mmap", "-o", "json"];
                        ([&own[..], &fixed.map(str::to_owned)].concat(), "avg_ts")
                    }
                    _ => {
                        let own =
                            [model_text.as_str(), "--text", &prompt_text, "--prompt-tokens", "64"];
                        let own = own.map(str::to_owned);
                        // AirLLM takes seconds for a token of the smallest model.
                        let tokens = if peer == Program::AirLlm { "4" } else { &tokens };
                        let counts = ["-n", tokens, "--threads", &threads].map(str::to_owned);
                        ([&own[..], &counts].concat(), "decode_tok_s")
                    }
                };
                jobs.extend(Self::repeated(reps, || {
                    let inputs = vec![model.clone(), prompt.clone()];
                    let mut job = Job::new(peer, &self.model.name, args.clone(), inputs);
                    job.limit_bytes = Some(self.memory_bytes(percent));
                    if peer != Program::LlamaBench {
                        // What does not fit is not always refused: it may read the same pages again and again.
                        job.patience = Duration::from_mins(if self.inputs.quick { 2 } else { 10 });
                    }
                    job.point("peers", peer.title(), percent, rate)
                }));
            }
        }
    }

    fn by_sparsity(&self, jobs: &mut Vec<Job>) {
        let memory = self.memory_bytes(MIDDLE).to_string();
        for &sparsity in self.effort.sparsities {
            let share = format!("{sparsity}%");
            for system in SPARSE {
                let flags = ["--system", system, "--sparsity", &share, "--memory", &memory];
                jobs.extend(Self::repeated(self.effort.reps, || {
                    self.bench(&flags).point(
                        "figure-10",
                        system,
                        f64::from(sparsity),
                        "decode_tok_s",
                    )
                }));
            }
        }
    }

    /// Figure 9: by kind of text.
    fn by_text(&self, jobs: &mut Vec<Job>) {
        for (place, prompt) in self.inputs.prompts.iter().enumerate() {
            let name = prompt.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            for system in SPARSE {
                let flags = ["--system", system, "--controller", "fixed", FIFTH[0], FIFTH[1]];
                jobs.extend(Self::repeated(self.effort.reps, || {
                    let job = self.bench_on(prompt, 64, self.effort.tokens, &flags);
                    job.cell("figure-9", system, (place as f64, &name), |entry| {
                        entry.number("decode_tok_s")
                    })
                }));
            }
        }
    }

    /// Figure 11.
    fn ablation(&self, jobs: &mut Vec<Job>) {
        let steps: [(&str, &[&str]); 4] = [
            ("DejaVu, our predictor", &["--system", "dejavu", "--predictor", "hash"]),
            (
                "+ prioritised computation",
                &["--cadence", "stage", "--compute-order", "arrival", "--controller", "fixed"],
            ),
            ("+ prioritised loading", &["--load-order", "priority"]),
            ("+ prioritised caching", &["--eviction", "reuse", "--admission", "compete"]),
        ];
        let mut flags = FIFTH.to_vec();
        for (name, more) in steps {
            flags.extend(more);
            jobs.extend(Self::repeated(self.effort.reps, || {
                self.bench(&flags).many("figure-11", |entry| {
                    let mb = entry.number("bytes_read_per_token").map(|bytes| bytes / 1e6);
                    let stalled = entry.number("stalled_s").zip(entry.number("decode_tok_s"));
                    let tokens = entry.number("decode_tokens").unwrap_or(1.0);
                    let stalled = stalled.map(|(s, rate)| 100.0 * s * rate / tokens);
                    let cells = [
                        ("tokens/s", entry.number("decode_tok_s")),
                        ("MB a token", mb),
                        ("misses, %", requests(entry, "missed")),
                        ("waiting, % of the time", stalled),
                    ];
                    row(name, &cells)
                })
            }));
        }
    }

    /// Reading ahead and refinement, on and off, at each budget.
    fn ahead(&self, jobs: &mut Vec<Job>) {
        let variants: [(&str, &str, &[&str]); 5] = [
            ("leanstream", "leanstream", &[]),
            ("leanstream, reading ahead off", "leanstream", &["--prefetch", "off"]),
            ("leanstream, predicting once a layer", "leanstream", &["--cadence", "layer"]),
            ("leanstream+base", "leanstream+base", &[]),
            ("leanstream+base, reading ahead off", "leanstream+base", &["--prefetch", "off"]),
        ];
        for &percent in self.effort.budgets {
            let memory = self.memory_bytes(percent).to_string();
            for (name, system, more) in variants {
                let flags = [&["--system", system, "--memory", &memory], more].concat();
                jobs.extend(Self::repeated(self.effort.reps, || {
                    self.bench(&flags).point("refinement", name, percent, "decode_tok_s")
                }));
            }
        }
    }

    /// Figure 13.
    fn by_prompt_length(&self, jobs: &mut Vec<Job>) {
        let memory = self.memory_bytes(MIDDLE).to_string();
        let large = self.effort.tokens < 48;
        let (lengths, tokens): (&[u32], _) = match (large, self.inputs.quick) {
            (true, _) => (&[32, 128, 256], 32),
            (false, true) => (&[32, 128, 512], 128),
            (false, false) => (&[32, 64, 128, 256, 512], 256),
        };
        for &length in lengths {
            let flags = ["--system", "leanstream+base", "--memory", &memory];
            let job = self.bench_on(&self.inputs.prompts[0], length, tokens, &flags);
            jobs.push(job.many("figure-13", move |entry| {
                let (prompt, rate) = (entry.number("ttft_s"), entry.number("decode_tok_s"));
                let answer = rate.map(|rate| f64::from(tokens) / rate);
                let both = prompt.zip(answer).map(|(a, b)| a + b);
                let answer_name = format!("answer of {tokens} tokens");
                [("prompt", prompt), (&answer_name, answer), ("both", both)]
                    .into_iter()
                    .filter_map(|(name, y)| {
                        let series = name.to_owned();
                        y.map(|y| Reading { series, x: f64::from(length), tick: String::new(), y })
                    })
                    .collect()
            }));
        }
    }

    /// Table 5: a table of this device first.
    fn controllers(&self, jobs: &mut Vec<Job>) {
        let minutes = if self.effort.tokens < 48 { "9.5" } else { "1.8" };
        let mut flags = vec!["--system", "leanstream"];
        flags.extend(FIFTH);
        let tune = [flags.as_slice(), &["--minutes", minutes]].concat();
        jobs.push(self.ls_run(&["tune"], &tune, &[]).many("table-5", |_| Vec::new()));
        let (reps, tokens) =
            (if self.inputs.quick { "3" } else { "7" }, self.effort.tokens.to_string());
        let prompt = text(&self.inputs.prompts[0]);
        flags.extend(["--text", &prompt, "--prompt-tokens", "64", "-n", &tokens, "--reps", reps]);
        flags.extend(["--controllers", "one-shot,fixed,static,lut,hindsight"]);
        let job = self.ls_run(&["bench"], &flags, &[&self.inputs.prompts[0]]);
        jobs.push(job.many("table-5", |entry| {
            let turn = |object: &Value| {
                let name = object.get("controller")?.as_str()?;
                Some(row(name, &[("tokens/s", object.get("decode_tok_s")?.as_f64())]))
            };
            entry.output.iter().filter_map(turn).flatten().collect()
        }));
    }
}

/// The cells of Table 7, where the system exposes them.
fn energy(job: Job, name: &str, percent: f64) -> Job {
    let series = format!("{name}, {percent} %");
    job.many("table-7", move |entry| {
        let cells = [
            ("J a token", entry.number("device.energy_per_token_j")),
            ("W", entry.number("device.mean_power_w")),
            ("°C at most", entry.number("device.temperature_max_c")),
        ];
        row(&series, &cells)
    })
}
