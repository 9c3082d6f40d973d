//! `ls-run profile` and `ls-run tune`: what plans cost on this device, measured by running the model; and the table of
//! which plan is best when.

use crate::args::RunArgs;
use crate::cmd::bench::PROMPT;
use crate::cmd::{extend, print_json, print_line};
use crate::exit::UsageError;
use crate::progress::Line;
use crate::session::{Session, Workload};
use crate::tuning;
use anyhow::Context;
use clap::Args;
use ls_bundle::ids::LayerId;
use ls_control::explore::{Enough, Progress, Rig, candidates, explore};
use ls_control::fit::Fit;
use ls_control::profile::{DeviceProfile, DiskPoint, KernelPoint, Visit};
use ls_control::synthesis::{Options, synthesize};
use ls_control::{Controller, Hindsight, Lut};
use ls_engine::Engine;
use ls_engine::sampler::{Sampler, SamplerOptions};
use ls_engine::system::ControllerKind;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Tokens of the prompt, and of the text behind it that is decoded again and again.
const PROMPT_TOKENS: usize = 64;
const SCRIPT_TOKENS: usize = 192;
/// How varied that text is.
const TEMPERATURE: f32 = 0.8;
/// Time for the disk's curve, and for memory.
const DISK_MS: u64 = 1000;
const MEMORY_MS: u64 = 200;
/// Most blocks and segments of the kernel's curve, and how often each point is measured.
const KERNEL_BLOCKS: [usize; 3] = [16, 64, 256];
const KERNEL_SEGMENTS: [usize; 4] = [1, 2, 4, 8];
const KERNEL_ROUNDS: usize = 9;
/// The profile is saved so often.
const SAVE: Duration = Duration::from_secs(10);

/// `ls-run profile`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  ls-run profile model.lsb --out device.lsp --minutes 2 --weight-cache 20%
  ls-prep lut --profile device.lsp --out model.lut

Run it with the flags that the model is to run with: a table is for one bundle, device, system and budget. What was \
measured is saved every ten seconds, and the next start goes on from there. Needs some memory beside the budget.")]
pub(crate) struct ProfileArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Profile to write, or to go on with. [default: the bundle's name with .lsp]
    #[arg(long, short, value_name = "FILE.lsp")]
    out: Option<PathBuf>,
    #[command(flatten)]
    effort: Effort,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// `ls-run tune`.
#[derive(Args, Debug)]
#[command(after_help = "\
Example:
  ls-run tune model.lsb --weight-cache 20% --minutes 2

Writes model.lsp (what was measured) and model.lut (the table) beside the bundle. Runs with the same flags use the table.")]
pub(crate) struct TuneArgs {
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    effort: Effort,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// How much is measured, and on what.
#[derive(Args, Debug)]
struct Effort {
    /// Most minutes of measuring; it ends earlier when enough is known.
    #[arg(long, value_name = "N", default_value_t = 10.0, value_parser = crate::args::parse_positive)]
    minutes: f32,
    /// Replay this text. [default: what the model makes of a sentence]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
}

/// Runs `ls-run profile`.
pub(crate) fn run(args: &ProfileArgs) -> anyhow::Result<()> {
    let out = args.out.clone().unwrap_or_else(|| tuning::profile_path(&args.run.bundle));
    let measured = measure(&args.run, &args.effort, &out)?;
    if args.json { print_json(&measured.json(&out)) } else { measured.print(&out) }
}

/// Runs `ls-run tune`.
pub(crate) fn tune(args: &TuneArgs) -> anyhow::Result<()> {
    let bundle = &args.run.bundle;
    let profile = tuning::profile_path(bundle);
    let measured = measure(&args.run, &args.effort, &profile)?;
    let started = Instant::now();
    let options = Options::default();
    let (lut, report) = synthesize(&measured.profile, &options).lut();
    let out = tuning::table_path(bundle);
    lut.save(&out)?;
    let seconds = started.elapsed().as_secs_f64();
    if args.json {
        let mut object = measured.json(&profile);
        extend(
            &mut object,
            json!({
                "lut": out,
                "plans": lut.plans(),
                "table_s": seconds,
                "best_static": {
                    "compute": lut.best_static().0.compute,
                    "io": lut.best_static().0.io,
                },
                "expected_us": {
                    "one_shot": report.one_shot_us,
                    "fixed": report.fixed_us,
                    "static": report.static_us,
                    "lut": report.lut_us,
                },
            }),
        );
        return print_json(&object);
    }
    measured.print(&profile)?;
    print_line(&format!(
        "{}: {} plans in {} layers, made in {seconds:.1} s; FFNs are expected to take {:.2} ms a token with it, {:.2} \
         with the best static plan, {:.2} with the fixed one, {:.2} with one shot",
        out.display(),
        lut.plans(),
        lut.layers(),
        report.lut_us / 1e3,
        report.static_us / 1e3,
        report.fixed_us / 1e3,
        report.one_shot_us / 1e3,
    ))
}

/// A profile, and how it came about.
struct Measured {
    profile: DeviceProfile,
    /// Visits that were there when it was begun.
    before: usize,
    progress: Progress,
    seconds: f64,
    fit: Fit,
}

impl Measured {
    fn json(&self, out: &Path) -> Value {
        let Measured { profile, progress, fit, .. } = self;
        json!({
            "profile": out,
            "device": profile.target.device,
            "settings": profile.target.settings,
            "layers": profile.work_bytes.len(),
            "visits": profile.visits.len(),
            "visits_before": self.before,
            "bins_done": progress.bins_done,
            "bins": progress.bins,
            "measured_s": self.seconds,
            "disk_latency_us": profile.disk_latency_us,
            "memory_bytes_s": profile.memory_bytes_per_s,
            "compute_point_us": fit.costs[0].compute_us_per_segment,
            "io_point_us": fit.costs[0].read_us_per_segment,
            "error": fit.error,
        })
    }

    fn print(&self, out: &Path) -> anyhow::Result<()> {
        let Measured { profile, progress, fit, .. } = self;
        print_line(&format!(
            "{}: {} layers visited in {:.0} s ({} before); enough is known of {} of {} bins of residual work",
            out.display(),
            profile.visits.len(),
            self.seconds,
            self.before,
            progress.bins_done,
            progress.bins,
        ))?;
        print_line(&format!(
            "the model of a layer is {:.1} % off (median of {} configurations that it was not fitted to)",
            100.0 * fit.error.total,
            fit.error.configurations,
        ))
    }
}

/// Goes on with the profile at `out`, or begins it.
fn measure(run: &RunArgs, effort: &Effort, out: &Path) -> anyhow::Result<Measured> {
    let mut run = run.clone();
    // Which plans are tried is the explorer's business.
    run.policies.controller = Some(ControllerKind::Fixed);
    let mut session = Session::open(&run)?;
    if session.system.columns.is_none() {
        let text = "dense decode reads in one order: there is nothing to plan (see --system)";
        return Err(UsageError(text.into()).into());
    }
    let target = tuning::target(&session);
    let known = if out.exists() { Some(DeviceProfile::open(out)?) } else { None };
    if let Some(misfit) = known.as_ref().and_then(|known| known.target.misfit(&target)) {
        let text = format!("{}: {misfit}; remove it, or name another file", out.display());
        return Err(UsageError(text).into());
    }
    let tokens = tokens(effort, &mut session)?;
    let workload = Workload { prompt_tokens: tokens.len() as u32, scored_tokens: 0 };
    let plan = session.plan(workload)?;
    let (path, threads) = (run.bundle.clone(), session.threads);
    let (bundle, engine) = session.start(&plan, workload)?;
    let vocab_size = bundle.model().vocab_size;
    let mut rig = Replay::new(engine, tokens, effort.text.is_none(), vocab_size)?;
    let mut profile = match known {
        Some(known) if known.work_bytes != rig.work_bytes() => {
            let text = format!("{}: of other layers; remove it", out.display());
            return Err(UsageError(text).into());
        }
        Some(known) => known,
        None => rig.parts(&path, threads, target)?,
    };
    let (before, started) = (profile.visits.len(), Instant::now());
    let progress = fill(&mut profile, &mut rig, effort.minutes, out)?;
    if profile.visits.is_empty() {
        return Err(UsageError("no time to measure anything: --minutes".into()).into());
    }
    let (fit, seconds) = (Fit::new(&profile), started.elapsed().as_secs_f64());
    Ok(Measured { profile, before, progress, seconds, fit })
}

/// Measures until time is up or enough is known; saves what is there now and then, and at the end.
fn fill<R: Rig>(
    profile: &mut DeviceProfile,
    rig: &mut R,
    minutes: f32,
    out: &Path,
) -> anyhow::Result<Progress>
where
    R::Error: Into<anyhow::Error>,
{
    let most = Duration::from_secs_f32(60.0 * minutes);
    let mut line = Line::new();
    loop {
        let (since, mut over) = (Instant::now(), false);
        let progress = explore(rig, profile, &candidates(), Enough::DEFAULT, |progress| {
            let spent = line.elapsed();
            line.show(|| eta(&progress, spent, most));
            over = spent >= most;
            !over && since.elapsed() < SAVE
        })
        .map_err(Into::into)?;
        profile.save(out)?;
        // The profile may also be as long as one can be.
        if over || progress.is_enough() || since.elapsed() < SAVE {
            line.finish();
            return Ok(progress);
        }
    }
}

/// How far it is, and how long it will take: no longer than it may.
fn eta(progress: &Progress, spent: Duration, most: Duration) -> String {
    let (share, left) = (progress.share(), most.saturating_sub(spent).as_secs_f64());
    let at_this_rate = spent.as_secs_f64() * (1.0 / share.max(1e-3) - 1.0);
    let (visits, percent) = (progress.visits, 100.0 * share);
    format!(
        "profiling: {visits} layers visited, {percent:.0} % of what is wanted, {:.0} s left",
        left.min(at_this_rate)
    )
}

/// The text to replay: a prompt alone if the model is to go on from there.
fn tokens(effort: &Effort, session: &mut Session) -> anyhow::Result<Vec<u32>> {
    let text = match &effort.text {
        None => PROMPT.repeat(1 + PROMPT_TOKENS / 8),
        Some(path) => {
            let text = std::fs::read_to_string(path);
            text.with_context(|| format!("reading {}", path.display()))?
        }
    };
    let most = if effort.text.is_some() { PROMPT_TOKENS + SCRIPT_TOKENS } else { PROMPT_TOKENS };
    let mut tokens = session.with_tokenizer(|tokenizer| tokenizer.encode(&text, true))?;
    tokens.truncate(most);
    if tokens.len() < most {
        let text = format!("the text has {} tokens, {most} are wanted", tokens.len());
        return Err(UsageError(text).into());
    }
    Ok(tokens)
}

/// Decodes the same tokens again and again.
struct Replay {
    engine: Engine,
    /// Prompt, and what follows it.
    tokens: Vec<u32>,
    /// Goes on with the text until it is long enough.
    sampler: Option<Sampler>,
}

impl Replay {
    fn new(
        mut engine: Engine,
        tokens: Vec<u32>,
        goes_on: bool,
        vocab_size: u32,
    ) -> anyhow::Result<Replay> {
        let options = SamplerOptions { temperature: TEMPERATURE, ..SamplerOptions::default() };
        let mut sampler = goes_on.then(|| Sampler::new(options, vocab_size, &[]));
        let mut tokens = tokens;
        let logits = engine.prefill(&tokens[..PROMPT_TOKENS], 0)?;
        if let Some(sampler) = &mut sampler {
            tokens.push(sampler.sample(logits));
        }
        let layers = engine.work_bytes().count();
        engine.keep_visits(2 * layers);
        Ok(Replay { engine, tokens, sampler })
    }

    /// The next token, under a controller.
    fn step(&mut self, controller: &dyn Controller) -> anyhow::Result<()> {
        let Replay { engine, tokens, sampler } = self;
        let most = (PROMPT_TOKENS + SCRIPT_TOKENS).min(engine.context() as usize);
        if engine.position() as usize == tokens.len().min(most) {
            engine.rewind(PROMPT_TOKENS as u32);
        }
        let at = engine.position() as usize;
        let logits = engine.decode_under(controller, tokens[at])?;
        if let Some(sampler) = sampler.as_mut().filter(|_| at + 1 == tokens.len() && at + 1 < most)
        {
            tokens.push(sampler.sample(logits));
        }
        Ok(())
    }

    /// What can be measured by itself: the start of a profile.
    fn parts(
        &mut self,
        path: &Path,
        threads: usize,
        target: ls_control::Target,
    ) -> anyhow::Result<DeviceProfile> {
        let disk = ls_io::probe(path, true, DISK_MS)?;
        // Some blocks to compute with, and a token whose FFN input they are computed with.
        for _ in 0..2 {
            self.step(&ls_control::Fixed::DEFAULT)?;
        }
        self.engine.visits().clear();
        let points = disk.points.iter().map(|point| DiskPoint {
            request_bytes: point.request_bytes as u32,
            depth: point.depth,
            bytes_per_s: point.bytes_per_s as f32,
        });
        let memory = self.engine.memory_bandwidth(threads, MEMORY_MS);
        Ok(DeviceProfile {
            target,
            disk_latency_us: disk.latency_us as f32,
            disk: points.collect(),
            memory_bytes_per_s: memory.unwrap_or(0.0) as f32,
            kernels: self.kernels(),
            work_bytes: self.engine.work_bytes().collect(),
            ..DeviceProfile::default()
        })
    }

    /// The kernel's curve, on blocks of the first layer that are in memory.
    fn kernels(&mut self) -> Vec<KernelPoint> {
        let mut points = Vec::new();
        for most in KERNEL_BLOCKS {
            for segments in KERNEL_SEGMENTS {
                let mut times = Vec::with_capacity(KERNEL_ROUNDS);
                let mut computed = 0;
                for _ in 0..KERNEL_ROUNDS {
                    let (blocks, time) = self.engine.time_blocks(LayerId(0), most, segments);
                    computed = blocks;
                    times.push(time);
                }
                times.sort_unstable();
                points.push(KernelPoint {
                    blocks: computed as u32,
                    segments: segments as u32,
                    time_us: times[KERNEL_ROUNDS / 2].as_secs_f32() * 1e6,
                });
            }
        }
        points.retain(|point| point.blocks > 0);
        points.dedup_by_key(|point| (point.blocks, point.segments));
        points
    }
}

impl Rig for Replay {
    type Error = anyhow::Error;

    fn work_bytes(&self) -> Vec<u64> {
        self.engine.work_bytes().collect()
    }

    fn token(
        &mut self,
        controller: &dyn Controller,
        visited: &mut dyn FnMut(Visit),
    ) -> anyhow::Result<()> {
        self.step(controller)?;
        // What the last layer left is known when the next token's first one has asked.
        let visits = self.engine.visits();
        let known = visits.len().saturating_sub(1);
        visits.drain(..known).for_each(visited);
        Ok(())
    }
}

/// The plans that would have been best for the visits of a run, by the profile beside the bundle, from which `table` was
/// made.
pub(crate) fn hindsight(bundle: &Path, table: &Lut, trace: &[Visit]) -> anyhow::Result<Hindsight> {
    let path = tuning::profile_path(bundle);
    let profile = DeviceProfile::open(&path)?;
    if profile.target != *table.target() || profile.work_bytes.len() != table.layers() {
        let text = format!("{} is not what the table was made from: tune again", path.display());
        return Err(UsageError(text).into());
    }
    let options = Options::default();
    Ok(synthesize(&profile, &options).hindsight(trace))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ls_control::execution::Costs;
    use ls_control::world::{World, WorldLayer};

    #[test]
    fn a_profile_that_was_stopped_goes_on_until_enough_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("model.lsp");
        let costs = Costs { read_us_per_byte: 1e-3, compute_us_per_byte: 1e-4, ..Costs::default() };
        let missing_bytes = vec![100_000, 150_000, 200_000];
        let layer = WorldLayer { costs, work_bytes: 1 << 18, missing_bytes, useful: [0.2, 0.3] };
        let mut world = World::new(vec![layer; 2], 1);
        let mut profile = DeviceProfile::default();
        // A few tokens, then no time at all.
        explore(&mut world, &mut profile, &candidates(), Enough::DEFAULT, |p| p.visits < 10)
            .unwrap();
        let stopped = fill(&mut profile, &mut world, 0.0, &out).unwrap();
        assert!(!stopped.is_enough() && stopped.visits == 10, "{stopped:?}");
        let mut found = DeviceProfile::open(&out).unwrap();
        assert_eq!(found, profile);
        let done = fill(&mut found, &mut world, 10.0, &out).unwrap();
        assert!(done.is_enough() && done.visits > 400, "{done:?}");
        let mut known = DeviceProfile::open(&out).unwrap();
        assert_eq!((known.visits.len(), &known.visits[..10]), (done.visits, &profile.visits[..]));
        assert_eq!(
            fill(&mut known, &mut world, 10.0, &out).unwrap(),
            done,
            "nothing is left to do"
        );
    }

    #[test]
    fn the_time_left_is_no_more_than_there_is() {
        let progress = Progress { bins: 3, layers: 1, bins_done: 1, ..Progress::default() };
        let left = |most| eta(&progress, Duration::from_secs(10), Duration::from_secs(most));
        assert!(left(600).ends_with("25 % of what is wanted, 30 s left"), "{}", left(600));
        assert!(left(15).ends_with(" 5 s left"), "{}", left(15));
    }
}
