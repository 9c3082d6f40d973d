//! `ls-run bench`.

mod turns;

use crate::args::BenchArgs;
use crate::cmd::plan::{Load, Machine};
use crate::cmd::{extend, plan_json, print_audit, print_json, print_line, sparse_json};
use crate::exit::UsageError;
use crate::host::Root;
use crate::host::meter::Meter;
use crate::session::{Session, Workload, peak_resident};
use crate::system::System;
use crate::trace::Trace;
use anyhow::Context;
use ls_bundle::ids::ByteCount;
use ls_engine::Engine;
use ls_engine::memory::MemoryPlan;
use ls_engine::sampler::{Sampler, SamplerOptions};
use ls_engine::system::Choice;
use std::time::Instant;
use turns::Controllers;

/// A prompt of real words, repeated to length: what tokens it has does not matter to a dense model.
pub(crate) const PROMPT: &str =
    "The river had risen in the night, and by morning the lower fields were under water. ";

/// What is decoded.
struct Script {
    prompt: Vec<u32>,
    /// The tokens that follow; None: those that the model finds likeliest.
    forced: Option<Vec<u32>>,
}

fn script(args: &BenchArgs, session: &mut Session) -> anyhow::Result<Script> {
    let prompt_tokens = args.prompt_tokens as usize;
    let text = match &args.text {
        Some(path) => {
            let text = std::fs::read_to_string(path);
            let mut text = text.with_context(|| format!("reading {}", path.display()))?;
            // Encoding a whole book takes more memory than a small budget has.
            let most = TOKEN_BYTES * (prompt_tokens + args.n_predict as usize);
            text.truncate(text.floor_char_boundary(most));
            text.shrink_to_fit();
            text
        }
        None => PROMPT.repeat(1 + prompt_tokens / 8),
    };
    let mut prompt = session.with_tokenizer(|tokenizer| tokenizer.encode(&text, true))?;
    let mut rest = prompt.split_off(prompt_tokens.min(prompt.len()));
    if args.text.is_none() {
        return Ok(Script { prompt, forced: None });
    }
    if rest.len() < args.n_predict as usize {
        let (found, wanted) = (prompt.len() + rest.len(), args.prompt_tokens + args.n_predict);
        let text = format!("the text has {found} tokens, {wanted} are wanted");
        return Err(UsageError(text).into());
    }
    rest.truncate(args.n_predict as usize);
    Ok(Script { prompt, forced: Some(rest) })
}

/// Bytes of text that are sure to hold a token.
const TOKEN_BYTES: usize = 16;

/// Runs the command: each repetition prefills the prompt and decodes, on one engine.
pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let mut session = turns::open(args)?;
    let script = script(args, &mut session)?;
    let workload = Workload { prompt_tokens: args.prompt_tokens, scored_tokens: 0 };
    let vocab_size = session.bundle.model().vocab_size;
    let runs = turns::runs(args);
    let tokens = (args.n_predict * runs) as usize;
    session.look_ahead(workload, tokens, args.audit, |engine| {
        for _ in 0..runs {
            repetition(args, engine, vocab_size, &script)?;
        }
        Ok(())
    })?;
    let trace = Trace::to(args.trace.as_deref(), &mut session);
    let plan = session.plan(workload)?;
    let needed = u64::from(args.prompt_tokens) + u64::from(args.n_predict);
    if needed > u64::from(plan.context) {
        let text =
            format!("prompt and -n need {needed} tokens, the context holds {}", plan.context);
        return Err(UsageError(text).into());
    }
    let (store, threads, middle) =
        (session.store().name(), session.threads, args.prompt_tokens + args.n_predict / 2);
    let (system, table) = (session.system, session.table.clone());
    let on_device = session.is_on_device();
    let (bundle, mut engine) = session.start(&plan, workload)?;
    let decode = |engine: &mut Engine| repetition(args, engine, vocab_size, &script).map(drop);
    let controllers = Controllers::new(args, table, &mut engine, decode)?;
    trace.begin(&mut engine);
    let mut rates = Vec::new();
    for (rep, controller) in turns::turns(args) {
        let system = controllers.take(controller, system, &mut engine);
        // The bound is measured before and after each repetition: machines change from second to second.
        let before = Machine::of(&mut engine, threads, &plan)?;
        let run = repetition(args, &mut engine, vocab_size, &script)?;
        rates.push(run.decode_tok_s);
        let machine = Machine::between(before, Machine::of(&mut engine, threads, &plan)?)
            .computing_on(on_device);
        let map = bundle.weights();
        let (read, columns) = (run.bytes_per_token, system.columns.as_ref());
        let load = Load::of(bundle.model(), map, &plan, middle, columns, read);
        if !args.json {
            tell(&system, &script, &plan, &machine, &load, &run)?;
            continue;
        }
        let mut object = serde_json::json!({
            "rep": rep,
            "simd": ls_cpu::Kernels::detect().name(),
            "store": store,
            "threads": threads,
            "prompt_tokens": script.prompt.len(),
            "decode_tokens": args.n_predict,
            "forced": script.forced.is_some(),
            "load_s": engine.stats().load.as_secs_f64(),
            "planned_bytes_per_token": plan.streamed(map).0,
        });
        extend(&mut object, measured(&script, &machine, &load, &run)?);
        extend(&mut object, plan_json(&plan));
        extend(&mut object, system.describe());
        extend(&mut object, sparse_json(&engine));
        print_json(&object)?;
    }
    if !args.json {
        turns::summary(args, &rates).iter().try_for_each(|line| print_line(line))?;
        print_audit(&engine)?;
    }
    trace.end(&mut engine)
}

/// A repetition in a line.
fn tell(
    system: &System,
    script: &Script,
    plan: &MemoryPlan,
    machine: &Machine,
    load: &Load,
    run: &Repetition,
) -> anyhow::Result<()> {
    let bound_tok_s = machine.bound_tok_s(load);
    let controller =
        system.columns.map_or(String::new(), |columns| format!(", {}", columns.controller.name()));
    let of_bound = match bound_tok_s.is_finite() {
        true => {
            format!("{:.0} % of the bound {bound_tok_s:.2}", 100.0 * run.decode_tok_s / bound_tok_s)
        }
        false => "no bound is known".into(),
    };
    print_line(&format!(
        "{}{controller}: decode {:.2} tokens/s ({of_bound}), prefill {:.1} tokens/s, {} read a token, \
         peak {} of {}",
        system.name(),
        run.decode_tok_s,
        script.prompt.len() as f64 / run.ttft_s,
        ByteCount(run.bytes_per_token),
        ByteCount(peak_resident()?),
        plan.budget,
    ))?;
    run.device.iter().try_for_each(|(_, line)| print_line(line))
}

/// The same in figures.
fn measured(
    script: &Script,
    machine: &Machine,
    load: &Load,
    run: &Repetition,
) -> anyhow::Result<serde_json::Value> {
    let bound_tok_s = machine.bound_tok_s(load);
    let mut object = serde_json::json!({
        "decode_tok_s": run.decode_tok_s,
        "quarters_tok_s": run.quarters_tok_s,
        "prefill_tok_s": script.prompt.len() as f64 / run.ttft_s,
        "ttft_s": run.ttft_s,
        "stalled_s": run.stalled_s,
        "touched_bytes_per_token": load.touched_bytes,
        "bytes_read_per_token": run.bytes_per_token,
        "peak_rss_bytes": peak_resident()?,
        "disk_bytes_s": machine.disk_bytes_s,
        "memory_bytes_s": machine.memory_bytes_s,
        "bound_tok_s": bound_tok_s,
        "bound_fraction": bound_tok_s.is_finite().then(|| run.decode_tok_s / bound_tok_s),
    });
    run.device.iter().for_each(|(figures, _)| extend(&mut object, figures.clone()));
    Ok(object)
}

/// What one repetition measured.
struct Repetition {
    ttft_s: f64,
    decode_tok_s: f64,
    /// By quarters of the tokens, if there are four.
    quarters_tok_s: [f64; 4],
    bytes_per_token: u64,
    stalled_s: f64,
    /// Of the sensors, if they were asked for: figures and a line.
    device: Option<(serde_json::Value, String)>,
}

fn repetition(
    args: &BenchArgs,
    engine: &mut Engine,
    vocab_size: u32,
    script: &Script,
) -> anyhow::Result<Repetition> {
    engine.rewind(0);
    let stalled_before = engine.stats().stalled;
    let mut sampler = Sampler::new(SamplerOptions::default(), vocab_size, &[]);
    let started = Instant::now();
    let mut token = sampler.sample(engine.prefill(&script.prompt, u64::from(args.n_predict))?);
    let ttft_s = started.elapsed().as_secs_f64();
    let meter = args.stats.then(|| Meter::start(&Root::here()));
    let (read_before, decoding) = (engine.bytes_read(), Instant::now());
    let tokens = args.n_predict as usize;
    // When each quarter of the tokens ended.
    let mut ends_s = [0.0; 4];
    for (index, left) in (0..tokens).zip((0..args.n_predict).rev()) {
        token = script.forced.as_ref().map_or(token, |forced| forced[index]);
        token = sampler.sample(engine.decode(token, u64::from(left))?);
        ends_s[4 * index / tokens] = decoding.elapsed().as_secs_f64();
    }
    let decode_s = decoding.elapsed().as_secs_f64();
    let readings = meter.map(Meter::stop);
    let device = readings.map(|seen| (seen.json(tokens as u64), seen.line(tokens as u64)));
    // The first index that falls into a quarter.
    let first = |quarter: usize| (quarter * tokens).div_ceil(4);
    let begin_s = |quarter: usize| if quarter == 0 { 0.0 } else { ends_s[quarter - 1] };
    let quarters_tok_s = std::array::from_fn(|quarter| {
        let count = (first(quarter + 1) - first(quarter)) as f64;
        // Fewer than four tokens have no quarters.
        if tokens < 4 { 0.0 } else { count / (ends_s[quarter] - begin_s(quarter)) }
    });
    Ok(Repetition {
        ttft_s,
        decode_tok_s: f64::from(args.n_predict) / decode_s,
        quarters_tok_s,
        bytes_per_token: (engine.bytes_read() - read_before) / u64::from(args.n_predict),
        stalled_s: (engine.stats().stalled - stalled_before).as_secs_f64(),
        device,
    })
}
