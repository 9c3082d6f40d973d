//! `ls-run doctor`: what this machine offers a model that is larger than memory, what a bundle will do here, and what
//! would help. It measures for a few seconds and changes nothing but for a file to measure with, which it removes.

use crate::args::parse_bytes;
use crate::cmd::{print_json, print_line};
use anyhow::Context;
use clap::Args;
use ls_bundle::ids::ByteCount;
use ls_io::{Prefer, StoreOptions};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

mod host;

/// Time for all sizes of requests together.
const DISK_MS: u64 = 2000;
/// Time for memory.
const MEMORY_MS: u64 = 400;
/// Buffer that memory is measured with, where there is room for it.
const MEMORY_BYTES: u64 = 256 << 20;
/// Size of the file to measure with where no bundle is given.
const FILE_BYTES: usize = 64 << 20;
/// Shares of the weights that are tried as budgets, besides all that is available.
const SHARES: [f64; 3] = [0.33, 0.5, 0.8];
/// Below this a disk limits any model that does not fit.
const SLOW_DISK_BYTES_S: f64 = 500e6;
/// Prompt of the estimates.
const PROMPT_TOKENS: &str = "128";

/// `ls-run doctor`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  ls-run doctor
  ls-run doctor model.lsb --memory 2GiB
  ls-run doctor model.lsb --json | jq .advice")]
pub(crate) struct DoctorArgs {
    /// A bundle: its disk is measured, and what it will do here is said. Without one a file is written for a moment.
    bundle: Option<PathBuf>,
    /// The budget you mean to give. [default: a few are tried]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    memory: Option<ByteCount>,
    /// Where to measure the disk if no bundle is given.
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    folder: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// What was found; the same for people and programs.
struct Findings {
    host: host::Host,
    io: Io,
    memory_bytes_s: f64,
    runs: Vec<Run>,
    advice: Vec<String>,
}

/// How the disk can be read, and how fast.
struct Io {
    direct: bool,
    /// Why not, if not.
    uring: Result<(), String>,
    store: &'static str,
    profile: ls_io::DiskProfile,
}

/// What a bundle does with a budget.
struct Run {
    budget: ByteCount,
    /// The plan as JSON, or why there is none.
    outcome: Result<Value, String>,
}

/// Runs the command.
pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let host = host::Host::look();
    let (io, _file) = match &args.bundle {
        Some(bundle) => (Io::measure(bundle)?, None),
        None => {
            let file = Scratch::write(&args.folder)?;
            (Io::measure(&file.path)?, Some(file))
        }
    };
    let room = (host.available_bytes() / 4).clamp(1 << 20, MEMORY_BYTES);
    let memory_bytes_s =
        ls_io::memory::memory_bandwidth(host.threads.count, room as usize, MEMORY_MS)?;
    let runs = match &args.bundle {
        Some(bundle) => estimates(bundle, args.memory, &host)?,
        None => Vec::new(),
    };
    let mut findings = Findings { host, io, memory_bytes_s, runs, advice: Vec::new() };
    findings.advice = findings.advise();
    if args.json { print_json(&findings.json()) } else { findings.print() }
}

impl Io {
    fn measure(path: &Path) -> anyhow::Result<Io> {
        let open = |prefer| ls_io::open(path, &StoreOptions { depth: 1, prefer, direct: true });
        let opened = open(Prefer::Auto)?.store;
        let (direct, store) = (opened.is_direct(), opened.name());
        drop(opened);
        let uring = open(Prefer::Uring).map(|_| ()).map_err(|error| error.to_string());
        Ok(Io { direct, uring, store, profile: ls_io::probe(path, true, DISK_MS)? })
    }

    /// The most that came of any request, bytes a second.
    fn best_bytes_s(&self) -> f64 {
        self.profile.points.iter().map(|point| point.bytes_per_s).fold(0.0, f64::max)
    }

    /// The best rate of each request size, in the order of sizes.
    fn by_size(&self) -> Vec<(usize, f64)> {
        let mut sizes: Vec<(usize, f64)> = Vec::new();
        for point in &self.profile.points {
            match sizes.last_mut() {
                Some((size, best)) if *size == point.request_bytes => {
                    *best = best.max(point.bytes_per_s);
                }
                _ => sizes.push((point.request_bytes, point.bytes_per_s)),
            }
        }
        sizes
    }
}

/// What `ls-run plan` says of the bundle for each budget, in a process of its own: this one holds the memory that it
/// measured with.
fn estimates(
    bundle: &Path,
    memory: Option<ByteCount>,
    host: &host::Host,
) -> anyhow::Result<Vec<Run>> {
    let budgets = match memory {
        Some(budget) => vec![budget],
        None => {
            let weights = ls_bundle::Bundle::open(bundle)?.data_extent().len;
            let shares = SHARES.iter().map(|share| ByteCount((weights as f64 * share) as u64));
            shares.chain([ByteCount(host.available_bytes())]).collect()
        }
    };
    budgets.into_iter().map(|budget| Ok(Run { budget, outcome: plan(bundle, budget)? })).collect()
}

fn plan(bundle: &Path, budget: ByteCount) -> anyhow::Result<Result<Value, String>> {
    let program = std::env::current_exe().context("finding this program")?;
    let out = Command::new(program)
        .arg("plan")
        .arg(bundle)
        .args(["--memory", &budget.0.to_string(), "--prompt-tokens", PROMPT_TOKENS, "--json"])
        .output()
        .context("running ls-run plan")?;
    if out.status.success() {
        return Ok(Ok(
            serde_json::from_slice(&out.stdout).context("reading what ls-run plan said")?
        ));
    }
    let said = String::from_utf8_lossy(&out.stderr);
    let reason = said.lines().last().unwrap_or_default();
    Ok(Err(reason.trim_start_matches("ls-run: ").to_owned()))
}

impl Findings {
    /// What would help, the most important first.
    fn advise(&self) -> Vec<String> {
        let (host, io) = (&self.host, &self.io);
        let mut advice = Vec::new();
        let best = io.best_bytes_s();
        if !io.direct {
            advice.push(
                "This file system has no direct I/O: reads go through the page cache. Put the bundle on ext4, XFS or \
                 F2FS, not on an overlay, a network share or tmpfs."
                    .to_owned(),
            );
        }
        if let Err(reason) = &io.uring {
            advice.push(format!(
                "io_uring is not available ({reason}): threads read instead, which costs some processor time. \
                 Containers often forbid it in their seccomp profile; see also /proc/sys/kernel/io_uring_disabled."
            ));
        }
        if best < SLOW_DISK_BYTES_S {
            advice.push(format!(
                "The disk gives {:.0} MB/s: what does not fit in memory costs a second for every {:.0} MB a token. \
                 A bundle in q8_0 or q4_0 (ls-prep import --dtype) reads a half or a quarter; an NVMe drive gives \
                 more than an SD card or a USB stick.",
                best / 1e6,
                best / 1e6
            ));
        }
        if host.simd == "scalar" {
            advice.push(
                "No SIMD instructions that this program knows: computing will be slow.".to_owned(),
            );
        }
        if let (Some(limit), Some(total)) = (host.memory.limit, host.memory.total) {
            advice.push(format!(
                "This process may hold {} of the machine's {}: give --memory less than that.",
                ByteCount(limit),
                ByteCount(total)
            ));
        }
        if !host.gpus.is_empty() {
            advice.push(format!(
                "There is a GPU ({}): --backend auto computes on it, where CUDA or OpenCL reaches it.",
                host.gpus.join(", ")
            ));
        }
        if self.runs.iter().any(|run| run.outcome.is_err()) {
            advice.push(
                "Budgets that are too small: a shorter --context or --kv-cache q8_0 makes the minimum smaller."
                    .to_owned(),
            );
        }
        advice
    }

    fn json(&self) -> Value {
        let points = self.io.profile.points.iter().map(|point| {
            json!({
                "request_bytes": point.request_bytes,
                "depth": point.depth,
                "bytes_s": point.bytes_per_s,
            })
        });
        let runs = self.runs.iter().map(|run| match &run.outcome {
            Ok(plan) => plan.clone(),
            Err(reason) => json!({ "memory_budget_bytes": run.budget.0, "error": reason }),
        });
        json!({
            "host": self.host.json(),
            "io": {
                "direct": self.io.direct,
                "io_uring": self.io.uring.is_ok(),
                "io_uring_error": self.io.uring.as_ref().err(),
                "store": self.io.store,
                "latency_us": self.io.profile.latency_us,
                "points": points.collect::<Vec<_>>(),
            },
            "memory_bytes_s": self.memory_bytes_s,
            "runs": runs.collect::<Vec<_>>(),
            "advice": self.advice,
        })
    }

    fn print(&self) -> anyhow::Result<()> {
        let (host, io) = (&self.host, &self.io);
        let yes = |yes: bool| if yes { "yes" } else { "no" };
        host.print()?;
        print_line(&format!(
            "memory      {:.1} GB/s by {} threads",
            self.memory_bytes_s / 1e9,
            host.threads.count
        ))?;
        let uring =
            io.uring.as_ref().map_or_else(|reason| format!("no ({reason})"), |()| "yes".into());
        print_line(&format!(
            "disk        direct I/O {}, io_uring {uring}; one small read takes {:.0} us",
            yes(io.direct),
            io.profile.latency_us
        ))?;
        for (size, rate) in io.by_size() {
            print_line(&format!("  reads of {:>5} KiB {:>8.0} MB/s", size >> 10, rate / 1e6))?;
        }
        if !self.runs.is_empty() {
            print_line("this bundle, as `ls-run plan` sees it (`ls-run bench` measures):")?;
        }
        for Run { budget, outcome } in &self.runs {
            let text = match outcome {
                Ok(plan) => format!(
                    "{:>3.0} % of the weights resident, up to {} read a token, at most {:.1} tokens/s, context {}",
                    100.0 * plan["weight_cache_share"].as_f64().unwrap_or(0.0),
                    ByteCount(plan["streamed_bytes_per_token"].as_u64().unwrap_or(0)),
                    plan["bound_tok_s"].as_f64().unwrap_or(0.0),
                    plan["context"]
                ),
                Err(reason) => reason.clone(),
            };
            print_line(&format!("  in {:>11}: {text}", budget.to_string()))?;
        }
        match self.advice.is_empty() {
            true => print_line("nothing here stands in the way"),
            false => self.advice.iter().try_for_each(|advice| print_line(&format!("- {advice}"))),
        }
    }
}

/// A file to measure with; it goes when this is dropped.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn write(folder: &Path) -> anyhow::Result<Scratch> {
        let path = folder.join(format!(".ls-run-doctor.{}", std::process::id()));
        let scratch = Scratch { path };
        // No zeros: some disks and file systems would store none of them.
        let bytes: Vec<u8> = (0..FILE_BYTES as u64)
            .map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8)
            .collect();
        let file = std::fs::File::create(&scratch.path)
            .and_then(|mut file| std::io::Write::write_all(&mut file, &bytes).map(|()| file))
            .and_then(|file| file.sync_all());
        file.with_context(|| format!("{}: a file to measure with", scratch.path.display()))?;
        Ok(scratch)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed was never written.
        let _ = std::fs::remove_file(&self.path);
    }
}
