//! `ls-run eval divergence`: how far a system's distributions are from the dense model's on the same tokens, as KL
//! divergence in nats a token, share of tokens whose likeliest successor is the same, and perplexity of both.
//!
//! Exact, under any budget: the dense model runs first, alone, and its logits go to a file, 4 bytes a token of the
//! vocabulary for each scored token (400 MB for 4,096 tokens of 49 thousand kinds); then the system runs, and each of
//! its distributions is held against what the file has. Memory is a row of either. Both decode token by token, so a
//! dense run against itself diverges by nothing. The file has no name and is gone when the program ends, however it
//! ends, unless `--dense` or `--resume` names it; then a later run takes from it what fits.

use super::journal::{Journal, Totals};
use super::perplexity::{TextArgs, Windows, walk};
use crate::args::RunArgs;
use crate::cmd::{extend, plan_json, print_json, print_line, sparse_json};
use crate::exit::UsageError;
use crate::likelihood::{divergence, nll, top};
use crate::progress::Progress;
use crate::session::{Session, peak_resident};
use anyhow::Context;
use clap::Args;
use ls_bundle::checksum;
use ls_bundle::ids::ByteCount;
use serde_json::json;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// `ls-run eval divergence`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  ls-run eval divergence model.lsb --text wiki.txt --system leanstream+base --sparsity 80%"
)]
pub(crate) struct DivergenceArgs {
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Only this many tokens of it.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    tokens: usize,
    /// Keep the dense model's logits in this file, for other systems' runs on the same text. [default: a file without a
    /// name; with --resume FILE, FILE.dense until all is done]
    #[arg(long, value_name = "FILE")]
    dense: Option<PathBuf>,
}

impl DivergenceArgs {
    /// Where dense logits are kept; whether only until all is done.
    fn dense_path(&self) -> Option<(PathBuf, bool)> {
        let of_resume = || {
            let mut name = self.text.resume.clone()?.into_os_string();
            name.push(".dense");
            Some((name.into(), true))
        };
        self.dense.clone().map(|path| (path, false)).or_else(of_resume)
    }
}

/// Runs the command.
pub(crate) fn run(args: &DivergenceArgs) -> anyhow::Result<()> {
    let mut session = Session::open(&args.run)?;
    let windows = Windows::of(&args.text, Some(args.tokens), &mut session)?;
    let vocab_size = session.bundle.model().vocab_size as usize;
    let run = windows.identity("divergence", &args.text, &session)?;
    let mut journal = Journal::open(args.text.resume.as_deref(), &run)?;
    let todo = windows.todo(&journal);
    // One row of each, and the bytes of one.
    session.reserve(ByteCount(3 * 4 * vocab_size as u64));
    let dense = args.dense_path();
    let path = dense.as_ref().map(|(path, _)| &**path);
    let mut rows = Rows::open(path, dense_key(&run, &args.run), &windows, vocab_size)?;
    run_dense(&mut session, &windows, &todo, &mut rows)?;
    let plan = session.plan(windows.workload())?;
    windows.check(&plan)?;
    let system = session.system.describe();
    let (_bundle, mut engine) = session.start(&plan, windows.workload())?;
    let tokens = (todo.len() * windows.window) as u64;
    let mut progress = Progress::of("scoring", tokens, "tokens");
    for (index, window) in &todo {
        let (started, mut sums, mut row) = (Instant::now(), Sums::default(), 0);
        walk(&mut engine, window, windows.first, &mut progress, &mut |logits, token| {
            sums.add(rows.read(*index, row)?, logits, token);
            row += 1;
            Ok(())
        })?;
        journal.add(&sums.record(*index, started.elapsed().as_secs_f64()))?;
    }
    progress.finish();
    let mut object = summary(journal.totals());
    if args.text.json {
        extend(
            &mut object,
            json!({
                "windows": windows.count(), "window": windows.window,
                "resumed_items": journal.resumed(),
                "dense_file_bytes": rows.bytes(windows.count()),
                "bytes_read": engine.bytes_read(),
                "peak_rss_bytes": peak_resident()?,
            }),
        );
        extend(&mut object, plan_json(&plan));
        extend(&mut object, system);
        extend(&mut object, sparse_json(&engine));
        print_json(&object)?;
    } else {
        print(&object)?;
    }
    match &dense {
        Some((path, true)) => {
            std::fs::remove_file(path).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Writes the dense model's logits of those windows that have none yet; of all where the system has to know the future,
/// which is recorded on the way.
fn run_dense(
    session: &mut Session,
    windows: &Windows,
    todo: &[(u64, Vec<u32>)],
    rows: &mut Rows,
) -> anyhow::Result<()> {
    let knows = session.system.columns.is_some_and(|columns| columns.knows_the_future());
    let missing: Vec<_> = todo.iter().filter(|(window, _)| knows || !rows.has(*window)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let decoded = missing.len() * (windows.scored() - 1);
    session.run_dense(windows.workload(), decoded, false, |engine| {
        let tokens = (missing.len() * windows.window) as u64;
        let mut progress = Progress::of("dense", tokens, "tokens");
        for (index, window) in missing {
            let mut row = 0;
            walk(engine, window, windows.first, &mut progress, &mut |logits, _| {
                rows.write(*index, row, logits)?;
                row += 1;
                Ok(())
            })?;
            rows.complete(*index)?;
        }
        progress.finish();
        Ok(())
    })
}

/// What dense logits depend on: not on budgets, threads or systems.
fn dense_key(run: &serde_json::Value, args: &RunArgs) -> u64 {
    let of = |name: &str| run[name].to_string();
    let text = ["bundle", "data_hash", "tokens", "window"].map(of).join(" ");
    checksum::of(format!("{text} {:?} {:?}", args.kv_cache, args.backend).as_bytes())
}

/// What the tokens of one window come to.
#[derive(Debug, Default)]
struct Sums {
    tokens: f64,
    divergence: f64,
    largest: f64,
    agree: f64,
    dense_nll: f64,
    nll: f64,
}

impl Sums {
    fn add(&mut self, dense: &[f32], logits: &[f32], token: u32) {
        let divergence = divergence(dense, logits);
        self.tokens += 1.0;
        self.divergence += divergence;
        self.largest = self.largest.max(divergence);
        self.agree += f64::from(u8::from(top(dense) == top(logits)));
        self.dense_nll += nll(dense, token);
        self.nll += nll(logits, token);
    }

    /// Scores are means over the window's tokens.
    fn record(&self, window: u64, seconds: f64) -> serde_json::Value {
        let mean = |sum: f64| sum / self.tokens;
        json!({
            "item": window,
            "scores": {
                "kl_nats": mean(self.divergence),
                "kl_max_nats": self.largest,
                "top1_agreement": mean(self.agree),
                "dense_nll_nats": mean(self.dense_nll),
                "nll_nats": mean(self.nll),
            },
            "sums": {"scored_tokens": self.tokens, "seconds": seconds},
        })
    }
}

/// Totals over windows, which all have as many tokens; spreads are from window to window.
fn summary(totals: &Totals) -> serde_json::Value {
    let mut object = json!({
        "task": "divergence",
        "items": totals.items(),
        "scored_tokens": totals.sum("scored_tokens") as u64,
        "seconds": totals.sum("seconds"),
        "perplexity": totals.mean("nll_nats").unwrap_or(0.0).exp(),
        "dense_perplexity": totals.mean("dense_nll_nats").unwrap_or(0.0).exp(),
    });
    extend(&mut object, totals.means());
    object
}

fn print(of: &serde_json::Value) -> anyhow::Result<()> {
    let figure = |name: &str| of[name].as_f64().unwrap_or(0.0);
    let spread = |name: &str| match of[format!("{name}_stderr")].as_f64() {
        Some(stderr) => format!(" ± {stderr:.5}"),
        None => String::new(),
    };
    print_line(&format!(
        "KL divergence from dense {:.5}{} nats a token, {:.2} % of tokens have the same likeliest successor, perplexity {:.4} \
         (dense {:.4}), over {} tokens ({:.1} s)",
        figure("kl_nats"),
        spread("kl_nats"),
        100.0 * figure("top1_agreement"),
        figure("perplexity"),
        figure("dense_perplexity"),
        figure("scored_tokens"),
        figure("seconds"),
    ))
}

/// The file of dense logits: [`MAGIC`], the key of what they are of, a byte a window that says whether it is
/// complete, and the rows, f32 in the machine's order.
#[derive(Debug)]
struct Rows {
    file: File,
    windows: u64,
    scored: u64,
    row: Vec<f32>,
    bytes: Vec<u8>,
}

const MAGIC: &[u8; 8] = b"LSDENSE1";
const HEADER_BYTES: u64 = 16;

impl Rows {
    /// Opens or makes the file. Without a path it has no name.
    fn open(
        path: Option<&Path>,
        key: u64,
        windows: &Windows,
        vocab_size: usize,
    ) -> anyhow::Result<Rows> {
        let unnamed = std::env::temp_dir().join(format!("leanstream-dense-{}", std::process::id()));
        let place = path.unwrap_or(&unnamed);
        let context = || format!("opening {}", place.display());
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).create_new(path.is_none());
        let mut file = options.truncate(false).open(place).with_context(context)?;
        if path.is_none() {
            std::fs::remove_file(place).with_context(context)?;
        }
        let wanted = [&MAGIC[..], &key.to_le_bytes()].concat();
        let rows = Rows {
            windows: windows.count(),
            scored: windows.scored() as u64,
            row: vec![0.0; vocab_size],
            bytes: vec![0; 4 * vocab_size],
            file: file.try_clone().with_context(context)?,
        };
        let len = file.metadata().with_context(context)?.len();
        if len == 0 {
            file.write_all(&wanted).with_context(context)?;
            file.set_len(rows.bytes(rows.windows)).with_context(context)?;
            return Ok(rows);
        }
        let mut found = [0; HEADER_BYTES as usize];
        let is_ours = file.read_exact_at(&mut found, 0).is_ok() && found[..] == wanted[..];
        if !is_ours || len != rows.bytes(rows.windows) {
            let text = format!(
                "{} does not hold dense logits of this run; name another file",
                place.display()
            );
            return Err(UsageError(text).into());
        }
        Ok(rows)
    }

    /// Bytes of the file with so many windows.
    fn bytes(&self, windows: u64) -> u64 {
        HEADER_BYTES + self.windows + windows * self.scored * self.bytes.len() as u64
    }

    fn has(&self, window: u64) -> bool {
        let mut flag = [0];
        self.file.read_exact_at(&mut flag, HEADER_BYTES + window).is_ok() && flag == [1]
    }

    fn complete(&self, window: u64) -> anyhow::Result<()> {
        self.file.write_all_at(&[1], HEADER_BYTES + window).context("writing dense logits")
    }

    fn write(&mut self, window: u64, row: u64, logits: &[f32]) -> anyhow::Result<()> {
        for (bytes, logit) in self.bytes.chunks_exact_mut(4).zip(logits) {
            bytes.copy_from_slice(&logit.to_ne_bytes());
        }
        let place = self.bytes(window) + row * self.bytes.len() as u64;
        self.file.write_all_at(&self.bytes, place).context("writing dense logits")
    }

    fn read(&mut self, window: u64, row: u64) -> anyhow::Result<&[f32]> {
        let place = self.bytes(window) + row * self.bytes.len() as u64;
        self.file.read_exact_at(&mut self.bytes, place).context("reading dense logits")?;
        for (logit, bytes) in self.row.iter_mut().zip(self.bytes.chunks_exact(4)) {
            *logit = f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Ok(&self.row)
    }
}

#[cfg(test)]
mod tests {
    use super::Sums;

    #[test]
    fn a_windows_scores_are_means_over_its_tokens() {
        let (even, skewed) = ([0.0, 0.0], [0.0, 3f32.ln()]);
        let mut sums = Sums::default();
        sums.add(&even, &skewed, 1);
        sums.add(&even, &skewed, 1);
        sums.add(&skewed, &even, 0);
        sums.add(&even, &even, 1);
        let record = sums.record(7, 1.5);
        let near = |name: &str, wanted: f64| {
            let found = record["scores"][name].as_f64().unwrap();
            assert!((found - wanted).abs() < 1e-6, "{name}: {found}, not {wanted}");
        };
        // Halves to quarters, and quarters to halves.
        let there = 0.5 * 2f64.ln() + 0.5 * (2.0 / 3.0f64).ln();
        let back = 0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln();
        near("kl_nats", (2.0 * there + back) / 4.0);
        near("kl_max_nats", there.max(back));
        near("top1_agreement", 0.25);
        let (half, most, least) = (2f64.ln(), (4.0 / 3.0f64).ln(), 4f64.ln());
        near("nll_nats", (2.0 * half + 2.0 * most) / 4.0);
        near("dense_nll_nats", (3.0 * half + least) / 4.0);
        assert_eq!(
            (record["item"].as_u64(), record["sums"]["scored_tokens"].as_f64()),
            (Some(7), Some(4.0))
        );
    }
}
