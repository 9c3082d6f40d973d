//! `ls-run generate`.

use crate::args::GenerateArgs;
use crate::cmd::{extend, plan_json, print_json, sparse_json};
use crate::session::{Session, Workload, peak_resident};
use anyhow::Context;
use ls_bundle::ids::ByteCount;
use ls_engine::Engine;
use ls_engine::memory::MemoryPlan;
use ls_engine::sampler::Sampler;
use ls_engine::tokenizer::{TextDecoder, text_bytes};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

/// Longest prompt read from standard input, bytes.
const MAX_PROMPT_BYTES: u64 = 16 << 20;

/// What came out.
struct Generated {
    tokens: Vec<u32>,
    text: String,
    time_to_first_token: Duration,
    /// From the first token to the last.
    decoding: Duration,
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
    let plan = session.plan(workload)?;
    let system = session.system.describe();
    check_length(args, ids.len(), &plan)?;
    let (bundle, mut engine) = session.start(&plan, workload)?;
    let mut writer =
        TextWriter { quiet: args.json, decoder: TextDecoder::default(), text: String::new() };
    if args.echo {
        writer.write(prompt.as_bytes())?;
    }
    let mut generated = Generated {
        tokens: Vec::with_capacity(args.n_predict as usize),
        text: String::new(),
        time_to_first_token: Duration::ZERO,
        decoding: Duration::ZERO,
    };
    generate(args, &bundle, &mut engine, &ids, &mut writer, &mut generated, started)?;
    generated.text = writer.finish()?;
    report(args, &plan, &engine, system, ids.len(), &generated)
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

fn generate(
    args: &GenerateArgs,
    bundle: &ls_bundle::Bundle,
    engine: &mut Engine,
    prompt: &[u32],
    writer: &mut TextWriter,
    out: &mut Generated,
    started: Instant,
) -> anyhow::Result<()> {
    let config = bundle.model();
    let mut sampler = Sampler::new(args.sampler(), config.vocab_size, prompt);
    let room = u64::from(engine.context()).saturating_sub(prompt.len() as u64);
    let most = u64::from(args.n_predict).min(room + 1);
    let mut first = None;
    if most == 0 {
        return Ok(());
    }
    let mut token = sampler.sample(engine.prefill(prompt, most - 1)?);
    loop {
        let now = Instant::now();
        out.time_to_first_token = first.get_or_insert(now).duration_since(started);
        out.decoding = now.duration_since(*first.get_or_insert(now));
        if !args.ignore_eos && config.special.stop.contains(&token) {
            break;
        }
        out.tokens.push(token);
        writer.write(text_bytes(bundle.vocabulary(), token))?;
        let left = most - out.tokens.len() as u64;
        if left == 0 {
            break;
        }
        token = sampler.sample(engine.decode(token, left - 1)?);
    }
    Ok(())
}

/// Writes text as it completes, flushed piece by piece.
struct TextWriter {
    quiet: bool,
    decoder: TextDecoder,
    text: String,
}

impl TextWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let from = self.text.len();
        self.decoder.push(bytes, &mut self.text);
        self.flush(from)
    }

    fn flush(&self, from: usize) -> std::io::Result<()> {
        if self.quiet || from == self.text.len() {
            return Ok(());
        }
        let mut out = std::io::stdout().lock();
        out.write_all(&self.text.as_bytes()[from..])?;
        out.flush()
    }

    fn finish(mut self) -> std::io::Result<String> {
        let from = self.text.len();
        self.decoder.finish(&mut self.text);
        self.flush(from)?;
        Ok(self.text)
    }
}

fn report(
    args: &GenerateArgs,
    plan: &MemoryPlan,
    engine: &Engine,
    system: serde_json::Value,
    prompt_tokens: usize,
    out: &Generated,
) -> anyhow::Result<()> {
    let stats = engine.stats();
    let rate = |count: u64, time: Duration| {
        if time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() }
    };
    let decode_tok_s = rate(stats.decode_tokens, out.decoding);
    let prefill_tok_s = rate(stats.prefill_tokens, stats.prefill);
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
            "ttft_s": out.time_to_first_token.as_secs_f64(),
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
        out.time_to_first_token.as_secs_f64(),
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
