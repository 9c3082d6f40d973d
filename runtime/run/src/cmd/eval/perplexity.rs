//! `ls-run eval`.

use crate::args::PerplexityArgs;
use crate::cmd::{extend, plan_json, print_audit, print_json, print_line, sparse_json};
use crate::exit::UsageError;
use crate::progress::Progress;
use crate::session::{Session, Workload, peak_resident};
use anyhow::Context;
use ls_engine::Engine;
use std::time::Instant;

/// `ls-run eval perplexity`: consecutive windows, the second half of each scored, as llama.cpp does. A last window
/// that is not full is left out.
pub(crate) fn perplexity(args: &PerplexityArgs) -> anyhow::Result<()> {
    let mut session = Session::open(&args.run)?;
    let (ids, window) = (encoded(args, &mut session)?, args.window as usize);
    let (prompt_tokens, first) = (args.window, window / 2 + 1);
    let workload = Workload { prompt_tokens, scored_tokens: (window - first) as u32 };
    let windows = ids.len() / window;
    let decoded = windows * (window - first - 1);
    session.look_ahead(workload, decoded, args.audit, |engine| {
        let mut progress = Progress::new("recording", (windows * window) as u64);
        for chunk in ids.chunks_exact(window) {
            decode_nll(engine, chunk, first, &mut progress)?;
        }
        progress.finish();
        Ok(())
    })?;
    let plan = session.plan(workload)?;
    let by_decode = args.decode || session.system.columns.is_some();
    let system = session.system.describe();
    if plan.context < args.window || plan.pass_tokens < args.window - 1 {
        let text = format!(
            "a window of {window} tokens does not fit: the budget allows a context of {} and passes of {} tokens; raise \
             --memory or lower --window",
            plan.context, plan.pass_tokens
        );
        return Err(UsageError(text).into());
    }
    let (_bundle, mut engine) = session.start(&plan, workload)?;
    let mut progress = Progress::new("scoring", (windows * window) as u64);
    let (mut nll, mut scored) = (0.0f64, 0u64);
    let started = Instant::now();
    for chunk in ids.chunks_exact(window) {
        nll += if by_decode {
            decode_nll(&mut engine, chunk, first, &mut progress)?
        } else {
            let each = engine.score(chunk, first)?;
            progress.add(window as u64);
            each.iter().map(|&x| f64::from(x)).sum::<f64>()
        };
        scored += (window - first) as u64;
    }
    progress.finish();
    let perplexity = (nll / scored as f64).exp();
    let seconds = started.elapsed().as_secs_f64();
    if args.json {
        let mut object = serde_json::json!({
            "perplexity": perplexity,
            "scored_tokens": scored,
            "windows": windows,
            "window": window,
            "seconds": seconds,
            "by_decode": by_decode,
            "bytes_read": engine.bytes_read(),
            "peak_rss_bytes": peak_resident()?,
        });
        extend(&mut object, plan_json(&plan));
        extend(&mut object, system);
        extend(&mut object, sparse_json(&engine));
        return print_json(&object);
    }
    print_line(&format!(
        "perplexity {perplexity:.4} over {scored} tokens in {windows} windows of {window} ({seconds:.1} s)"
    ))?;
    print_audit(&engine)
}

/// The text's tokens, at least a window of them.
fn encoded(args: &PerplexityArgs, session: &mut Session) -> anyhow::Result<Vec<u32>> {
    let text = std::fs::read_to_string(&args.text)
        .with_context(|| format!("reading {}", args.text.display()))?;
    let mut ids = session.with_tokenizer(|tokenizer| tokenizer.encode(&text, true))?;
    ids.truncate(args.tokens.unwrap_or(usize::MAX));
    ids.shrink_to_fit();
    if ids.len() < args.window as usize {
        let (found, window) = (ids.len(), args.window);
        let text = format!("the text has {found} tokens, less than one window of {window}");
        return Err(UsageError(text).into());
    }
    Ok(ids)
}

/// Negative log-likelihoods of the tokens of `window` from `first` on, summed: those before are a prompt, the others
/// are decoded one by one.
fn decode_nll(
    engine: &mut Engine,
    window: &[u32],
    first: usize,
    progress: &mut Progress,
) -> anyhow::Result<f64> {
    engine.rewind(0);
    let mut nll = nll_of(engine.prefill(&window[..first], 0)?, window[first]);
    progress.add(first as u64);
    for pair in window[first..].windows(2) {
        nll += nll_of(engine.decode(pair[0], 0)?, pair[1]);
        progress.add(1);
    }
    progress.add(1);
    Ok(nll)
}

/// -ln softmax(logits)\[token\].
fn nll_of(logits: &[f32], token: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    sum.ln() - f64::from(logits[token as usize] - largest)
}
