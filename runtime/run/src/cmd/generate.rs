//! `ls-run generate`.

use crate::answer::{Answer, Question, Speaker, Step};
use crate::args::GenerateArgs;
use crate::cmd::plan::{Load, Machine};
use crate::cmd::{extend, plan_json, print_json, sparse_json};
use crate::host::Root;
use crate::host::meter::{Meter, Readings};
use crate::session::{Session, Workload, peak_resident};
use crate::trace::Trace;
use anyhow::Context;
use ls_bundle::ids::ByteCount;
use ls_engine::Engine;
use ls_engine::memory::MemoryPlan;
use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Longest prompt read from standard input, bytes.
const MAX_PROMPT_BYTES: u64 = 16 << 20;

/// What came out.
#[derive(Default)]
struct Generated {
    tokens: Vec<u32>,
    text: String,
}

/// Runs the command.
pub(crate) fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    let started = Instant::now();
    let prompt = read_prompt(&args.prompt)?;
    let mut session = Session::open(&args.run)?;
    let ids = session.with_tokenizer(|tokenizer| tokenizer.encode(&prompt, true))?;
    check_system(&session)?;
    let workload = Workload { prompt_tokens: ids.len() as u32, scored_tokens: 0 };
    let trace = Trace::to(args.trace.as_deref(), &mut session);
    let plan = session.plan(workload)?;
    let (system, threads) = (session.system.describe(), session.threads);
    let (is_dense, on_device) = (session.system.columns.is_none(), session.is_on_device());
    check_length(args, ids.len(), &plan)?;
    let (bundle, mut engine) = session.start(&plan, workload)?;
    trace.begin(&mut engine);
    let mut speaker = Speaker::new(bundle, engine, plan.pass_tokens);
    if args.echo {
        show(args, &prompt)?;
    }
    let question = Question {
        tokens: &ids,
        sampler: args.sampler(),
        max_tokens: args.n_predict,
        stop: &[],
        ignore_eos: args.ignore_eos,
    };
    let mut generated = Generated::default();
    generated.tokens.reserve(args.n_predict.min(plan.context + 1) as usize);
    let meter = args.stats.then(|| Meter::start(&Root::here()));
    let (mut failed, asked) = (None, started.elapsed());
    let mut waited_before = Duration::ZERO;
    let mut answer = speaker.answer(&question, &mut |step, engine| {
        match step {
            Step::Prompt { .. } => {}
            Step::Token(token) => {
                if generated.tokens.is_empty() {
                    waited_before = engine.stats().stalled;
                    meter.iter().for_each(Meter::begin);
                }
                generated.tokens.push(token);
            }
            Step::Text(piece) => {
                generated.text.push_str(piece);
                failed = show(args, piece).err();
            }
        }
        if failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    if let Some(problem) = failed {
        return Err(problem.into());
    }
    answer.first_token += asked;
    let readings = meter.map(Meter::stop);
    trace.end(speaker.engine_mut())?;
    let (bundle, engine) = (speaker.bundle(), speaker.engine());
    report(args, &plan, engine, system, &answer, &generated, readings)?;
    if is_dense && answer.tokens >= LEAST_TOKENS && !args.json {
        let machine = Machine::as_loaded(engine, threads).computing_on(on_device);
        let position = answer.prompt_tokens + answer.tokens / 2;
        let load = Load::dense(bundle.model(), bundle.weights(), &plan, position);
        let waited = engine.stats().stalled - waited_before;
        let waited_share = waited.as_secs_f64() / answer.decoding.as_secs_f64();
        if let Some(why) = slowness(answer.tok_s(), machine.bound_tok_s(&load), waited_share) {
            eprintln!("warning: {why}");
        }
    }
    Ok(())
}

/// A text that is still to be written has no future to know.
fn check_system(session: &Session) -> anyhow::Result<()> {
    if session.system.columns.is_some_and(|columns| columns.knows_the_future()) {
        let text = "who knows the future is for `bench` and `eval`: a text that is still to be written has none";
        return Err(crate::exit::UsageError(text.into()).into());
    }
    Ok(())
}

/// Shorter texts say little about speed.
const LEAST_TOKENS: u32 = 16;
/// So many times slower than expected is worth a word.
const MUCH: f64 = 2.0;

/// Why text came at `tok_s` where the machine should reach `bound_tok_s`, if that is far from each other;
/// `waited_share` of the time was spent on waiting for reads.
fn slowness(tok_s: f64, bound_tok_s: f64, waited_share: f64) -> Option<String> {
    if !bound_tok_s.is_finite() || tok_s * MUCH >= bound_tok_s {
        return None;
    }
    let why = if waited_share > 0.5 {
        "the disk reads more slowly now than while the model was loaded: another program may be using it"
    } else {
        "computing takes longer than memory needs: other programs may be using the cores"
    };
    Some(format!(
        "{tok_s:.1} tokens/s where {bound_tok_s:.1} could be expected; {why} (`ls-run doctor` measures both)"
    ))
}

/// Writes a piece of text where people look for it; JSON comes at the end.
fn show(args: &GenerateArgs, piece: &str) -> std::io::Result<()> {
    if args.json {
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    out.write_all(piece.as_bytes())?;
    out.flush()
}

fn read_prompt(prompt: &str) -> anyhow::Result<String> {
    if prompt != "-" {
        return Ok(prompt.to_owned());
    }
    let mut text = String::new();
    let limited = &mut std::io::stdin().lock().take(MAX_PROMPT_BYTES + 1);
    limited.read_to_string(&mut text).context("reading the prompt from standard input")?;
    if text.len() as u64 > MAX_PROMPT_BYTES {
        let limit = ByteCount(MAX_PROMPT_BYTES);
        return Err(crate::exit::UsageError(format!("a prompt may have at most {limit}")).into());
    }
    Ok(text)
}

/// An explicit context that cannot hold prompt and answer is refused; a default one ends the answer early.
fn check_length(args: &GenerateArgs, prompt: usize, plan: &MemoryPlan) -> anyhow::Result<()> {
    let wanted = prompt as u64 + u64::from(args.n_predict);
    if wanted <= u64::from(plan.context) {
        return Ok(());
    }
    if args.run.context.is_some() {
        let (n, context) = (args.n_predict, plan.context);
        let text = format!(
            "{prompt} prompt tokens and -n {n} do not fit --context {context}; use --context {wanted} or a smaller -n"
        );
        return Err(crate::exit::UsageError(text).into());
    }
    eprintln!(
        "the context of {} tokens ends this text before -n {} tokens",
        plan.context, args.n_predict
    );
    Ok(())
}

fn report(
    args: &GenerateArgs,
    plan: &MemoryPlan,
    engine: &Engine,
    system: serde_json::Value,
    answer: &Answer,
    out: &Generated,
    readings: Option<Readings>,
) -> anyhow::Result<()> {
    let stats = engine.stats();
    // The first token comes from the prompt.
    let decoded = stats.decode_tokens;
    let (decode_tok_s, prompt_tokens) = (answer.tok_s(), answer.prompt_tokens);
    let prefill_tok_s = match stats.prefill {
        Duration::ZERO => 0.0,
        time => stats.prefill_tokens as f64 / time.as_secs_f64(),
    };
    let decode_bytes = engine.bytes_read() - stats.bytes_after_prefill;
    let bytes_per_token = decode_bytes.checked_div(stats.decode_tokens).unwrap_or(0);
    let peak = peak_resident()?;
    if args.json {
        let mut object = serde_json::json!({
            "tokens": out.tokens,
            "text": out.text,
            "prompt_tokens": prompt_tokens,
            "decode_tok_s": decode_tok_s,
            "prefill_tok_s": prefill_tok_s,
            "ttft_s": answer.first_token.as_secs_f64(),
            "load_s": stats.load.as_secs_f64(),
            "stalled_s": stats.stalled.as_secs_f64(),
            "loaded_bytes": stats.loaded_bytes,
            "prefill_bytes": stats.bytes_after_prefill - stats.loaded_bytes,
            "bytes_read_per_token": bytes_per_token,
            "bytes_read": engine.bytes_read(),
            "planned_bytes_per_token": engine.program().streamed_bytes(),
            "peak_rss_bytes": peak,
        });
        extend(&mut object, plan_json(plan));
        extend(&mut object, system);
        extend(&mut object, sparse_json(engine));
        readings.iter().for_each(|readings| extend(&mut object, readings.json(decoded)));
        return print_json(&object);
    }
    eprintln!();
    eprintln!(
        "prompt {prompt_tokens} tokens, {prefill_tok_s:.1} tokens/s; {} tokens, {decode_tok_s:.2} tokens/s; first token \
         after {:.2} s; {:.1} MB read a token",
        out.tokens.len(),
        answer.first_token.as_secs_f64(),
        bytes_per_token as f64 / 1e6,
    );
    eprintln!(
        "memory: budget {}, peak {}; {} of {} weights resident, context {}",
        plan.budget,
        ByteCount(peak),
        plan.resident(),
        plan.weights,
        plan.context,
    );
    readings.iter().for_each(|readings| eprintln!("{}", readings.line(decoded)));
    if peak > plan.budget.0 {
        eprintln!("warning: the peak is above the budget; please report this");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::slowness;

    #[test]
    fn what_is_much_slower_than_expected_is_explained() {
        assert_eq!(slowness(5.1, 10.0, 0.9), None);
        assert_eq!(slowness(5.1, f64::INFINITY, 0.9), None, "nothing is known");
        assert!(slowness(4.9, 10.0, 0.9).unwrap().contains("disk"));
        assert!(slowness(4.9, 10.0, 0.1).unwrap().contains("cores"));
    }
}
