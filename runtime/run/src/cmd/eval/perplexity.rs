//! `ls-run eval perplexity`: consecutive windows, the second half of each scored, as llama.cpp does. A last window
//! that is not full is left out.

use super::data;
use super::journal::Journal;
use crate::args::RunArgs;
use crate::cmd::{extend, plan_json, print_audit, print_json, print_line, sparse_json};
use crate::exit::UsageError;
use crate::likelihood::nll;
use crate::progress::Progress;
use crate::session::{Session, Workload, peak_resident};
use anyhow::Context;
use clap::Args;
use ls_control::Target;
use ls_engine::Engine;
use ls_engine::memory::MemoryPlan;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// `ls-run eval perplexity`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  ls-run eval perplexity model.lsb --text wiki.txt --tokens 4096 --memory 128MiB"
)]
pub(crate) struct PerplexityArgs {
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Only this many tokens of it.
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Score with decode's arithmetic, a token at a time, as text is generated. Sparse systems always do.
    #[arg(long)]
    decode: bool,
    /// Hold what a sparse system chooses against what a dense run of the same tokens wants most, which is run first.
    #[arg(long)]
    audit: bool,
}

/// A text in windows, and what becomes of the results.
#[derive(Args, Debug)]
pub(super) struct TextArgs {
    /// The text.
    #[arg(long, value_name = "FILE")]
    pub(super) text: PathBuf,
    /// Tokens of a window.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(4..))]
    pub(super) window: u32,
    /// Write each window's result to a file as soon as it is known, and go on from what is there.
    #[arg(long, value_name = "FILE")]
    pub(super) resume: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    pub(super) json: bool,
}

/// A text's tokens in windows of which the second half is scored.
pub(super) struct Windows {
    ids: Vec<u32>,
    pub(super) window: usize,
    /// The first token of a window that is scored.
    pub(super) first: usize,
}

impl Windows {
    /// Of at most `most` tokens of a text, at least a window of them.
    pub(super) fn of(
        args: &TextArgs,
        most: Option<usize>,
        session: &mut Session,
    ) -> anyhow::Result<Windows> {
        let text = read(&args.text)?;
        let mut ids = session.with_tokenizer(|tokenizer| tokenizer.encode(&text, true))?;
        ids.truncate(most.unwrap_or(usize::MAX));
        ids.shrink_to_fit();
        let window = args.window as usize;
        if ids.len() < window {
            let found = ids.len();
            let text = format!("the text has {found} tokens, less than one window of {window}");
            return Err(UsageError(text).into());
        }
        Ok(Windows { ids, window, first: window / 2 + 1 })
    }

    pub(super) fn count(&self) -> u64 {
        (self.ids.len() / self.window) as u64
    }

    /// Scored tokens of a window.
    pub(super) fn scored(&self) -> usize {
        self.window - self.first
    }

    /// Those that a journal does not know yet, with their numbers.
    pub(super) fn todo(&self, journal: &Journal) -> Vec<(u64, Vec<u32>)> {
        let all = (0..).zip(self.ids.chunks_exact(self.window));
        all.filter(|(index, _)| !journal.has(*index)).map(|(i, ids)| (i, ids.to_vec())).collect()
    }

    /// What a plan has to fit.
    pub(super) fn workload(&self) -> Workload {
        Workload { prompt_tokens: self.window as u32, scored_tokens: self.scored() as u32 }
    }

    /// A window is a pass, and all of it is in the context.
    pub(super) fn check(&self, plan: &MemoryPlan) -> anyhow::Result<()> {
        let window = self.window as u32;
        if plan.context >= window && plan.pass_tokens >= window - 1 {
            return Ok(());
        }
        let text = format!(
            "a window of {window} tokens does not fit: the budget allows a context of {} and passes of {} tokens; raise \
             --memory or lower --window",
            plan.context, plan.pass_tokens
        );
        Err(UsageError(text).into())
    }

    /// What a result belongs to.
    pub(super) fn identity(
        &self,
        task: &str,
        args: &TextArgs,
        session: &Session,
    ) -> anyhow::Result<Value> {
        Ok(json!({
            "task": task,
            "bundle": format!("{:016x}", Target::fingerprint(&session.bundle)),
            "system": session.system.describe(),
            "settings": session.settings(),
            "data_hash": format!("{:016x}", data::hash(&args.text)?),
            "tokens": self.ids.len(),
            "window": self.window,
        }))
    }
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// Runs the command.
pub(crate) fn run(args: &PerplexityArgs) -> anyhow::Result<()> {
    let mut session = Session::open(&args.run)?;
    let windows = Windows::of(&args.text, args.tokens, &mut session)?;
    let by_decode = args.decode || session.system.columns.is_some();
    let mut run = windows.identity("perplexity", &args.text, &session)?;
    run["by_decode"] = by_decode.into();
    let mut journal = Journal::open(args.text.resume.as_deref(), &run)?;
    let todo = windows.todo(&journal);
    let (workload, first) = (windows.workload(), windows.first);
    let tokens = (todo.len() * windows.window) as u64;
    let decoded = todo.len() * (windows.scored() - 1);
    session.look_ahead(workload, decoded, args.audit, |engine| {
        let mut progress = Progress::of("recording", tokens, "tokens");
        for (_, window) in &todo {
            decode_nll(engine, window, first, &mut progress)?;
        }
        progress.finish();
        Ok(())
    })?;
    let plan = session.plan(workload)?;
    let system = session.system.describe();
    windows.check(&plan)?;
    let (_bundle, mut engine) = session.start(&plan, workload)?;
    let mut progress = Progress::of("scoring", tokens, "tokens");
    for (index, window) in &todo {
        let started = Instant::now();
        let nll = if by_decode {
            decode_nll(&mut engine, window, first, &mut progress)?
        } else {
            let each = engine.score(window, first)?;
            progress.add(window.len() as u64);
            each.iter().map(|&x| f64::from(x)).sum::<f64>()
        };
        let seconds = started.elapsed().as_secs_f64();
        let sums = json!({"nll": nll, "scored_tokens": windows.scored(), "seconds": seconds});
        journal.add(&json!({"item": index, "scores": {}, "sums": sums}))?;
    }
    progress.finish();
    report(args, &windows, &plan, system, &engine, &journal, by_decode)
}

fn report(
    args: &PerplexityArgs,
    windows: &Windows,
    plan: &MemoryPlan,
    system: Value,
    engine: &Engine,
    journal: &Journal,
    by_decode: bool,
) -> anyhow::Result<()> {
    let totals = journal.totals();
    let (scored, seconds) = (totals.sum("scored_tokens") as u64, totals.sum("seconds"));
    let perplexity = (totals.sum("nll") / scored as f64).exp();
    let (count, window) = (windows.count(), windows.window);
    if args.text.json {
        let mut object = json!({
            "perplexity": perplexity,
            "scored_tokens": scored,
            "windows": count,
            "window": window,
            "resumed_items": journal.resumed(),
            "seconds": seconds,
            "by_decode": by_decode,
            "bytes_read": engine.bytes_read(),
            "peak_rss_bytes": peak_resident()?,
        });
        extend(&mut object, plan_json(plan));
        extend(&mut object, system);
        extend(&mut object, sparse_json(engine));
        return print_json(&object);
    }
    print_line(&format!(
        "perplexity {perplexity:.4} over {scored} tokens in {count} windows of {window} ({seconds:.1} s)"
    ))?;
    print_audit(engine)
}

/// Negative log-likelihoods of the tokens of `window` from `first` on, summed: those before are a prompt, the others
/// are decoded one by one.
fn decode_nll(
    engine: &mut Engine,
    window: &[u32],
    first: usize,
    progress: &mut Progress,
) -> anyhow::Result<f64> {
    let mut sum = 0.0;
    walk(engine, window, first, progress, &mut |logits, token| {
        sum += nll(logits, token);
        Ok(())
    })?;
    Ok(sum)
}

/// Tells the logits before each token of `window` from `first` on: those before are a prompt, the others are decoded
/// one by one.
pub(super) fn walk(
    engine: &mut Engine,
    window: &[u32],
    first: usize,
    progress: &mut Progress,
    listen: &mut dyn FnMut(&[f32], u32) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    engine.rewind(0);
    listen(engine.prefill(&window[..first], 0)?, window[first])?;
    progress.add(first as u64);
    for pair in window[first..].windows(2) {
        listen(engine.decode(pair[0], 0)?, pair[1])?;
        progress.add(1);
    }
    progress.add(1);
    Ok(())
}
