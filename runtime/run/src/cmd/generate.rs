//! `ls-run generate`.

use crate::answer::{Answer, Question, Speaker, Step};
use crate::args::GenerateArgs;
use crate::cmd::{extend, plan_json, print_json, sparse_json};
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
    if session.system.columns.is_some_and(|columns| columns.knows_the_future()) {
        let text = "who knows the future is for `bench` and `eval`: a text that is still to be written has none";
        return Err(crate::exit::UsageError(text.into()).into());
    }
    let workload = Workload { prompt_tokens: ids.len() as u32, scored_tokens: 0 };
    let trace = Trace::to(args.trace.as_deref(), &mut session);
    let plan = session.plan(workload)?;
    let system = session.system.describe();
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
    generated.tokens.reserve(args.n_predict as usize);
    let (mut failed, asked) = (None, started.elapsed());
    let mut answer = speaker.answer(&question, &mut |step, _| {
        match step {
            Step::Prompt { .. } => {}
            Step::Token(token) => generated.tokens.push(token),
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
    trace.end(speaker.engine_mut())?;
    report(args, &plan, speaker.engine(), system, &answer, &generated)
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
) -> anyhow::Result<()> {
    let stats = engine.stats();
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
    if peak > plan.budget.0 {
        eprintln!("warning: the peak is above the budget; please report this");
    }
    Ok(())
}
