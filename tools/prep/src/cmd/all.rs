//! `ls-prep all`: the whole chain, from a model to a bundle.

use super::guard::{self, SearchArgs};
use super::stages::StageArgs;
use super::{extend, print};
use crate::peak_rss_bytes;
use crate::terminal::TerminalProgress;
use ls_bundle::ids::ByteCount;
use ls_bundle::tables::Settings;
use ls_prep::artifact::Artifact;
use ls_prep::chain::{Chain, Made};
use ls_prep::error::{PrepError, Result};
use ls_prep::exit::Exit;
use ls_prep::key::Key;
use ls_prep::model::forward::operations_per_second;
use ls_prep::progress::Progress;
use ls_prep::room::need_room;
use ls_prep::stage::{Outcome, Stage};
use ls_prep::stages::activations::{Activations, ActivationsStage};
use ls_prep::stages::base::Base;
use ls_prep::stages::embedding::Embedding;
use ls_prep::stages::placement::Placement;
use ls_prep::stages::predictor::Predictors;
use ls_prep::stages::reuse::Reuse;
use serde::Serialize;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ls-prep datasets fetch && ls-prep all model.gguf -o model.lsb
  ls-prep all model.gguf --out model.lsb --recipe quick --calibration datasets/text/*.txt
  ls-prep all model.gguf --out model.lsb --calibration datasets/text/*.txt --quality 5% --resident 25%
  ls-prep all ./Qwen2.5-0.5B-Instruct --out qwen.lsb --recipe full --calibration a.txt b.txt --json
  ls-prep all model.gguf --out model.lsb --calibration datasets/text/*.txt --dry-run";

/// Prepares a model: runs every stage that is not done yet, and packs the bundle.
///
/// Ended at any point and started again, it goes on where it was. Where nothing has changed it does nothing. With
/// --quality it first searches how the bundle is best run, and makes that the bundle's default.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct AllArgs {
    #[command(flatten)]
    pub(crate) stage: StageArgs,
    #[command(flatten)]
    pub(crate) search: SearchArgs,
    /// Bundle to write; an existing one is replaced
    #[arg(long, short, value_name = "FILE.lsb")]
    pub(crate) out: PathBuf,
    /// Tell what is done and what is not, what the longest stage will take and whether there is room for it; run no stage
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// What became of a stage.
#[derive(Debug, Serialize)]
struct Told {
    stage: String,
    key: Key,
    outcome: Outcome,
    bytes: u64,
    seconds: f64,
}

/// Runs stages one after another and tells of each.
pub(super) struct Run<'a> {
    pub(super) chain: &'a Chain,
    as_json: bool,
    told: Vec<Told>,
}

impl<'a> Run<'a> {
    pub(super) fn new(chain: &'a Chain, as_json: bool) -> Run<'a> {
        Run { chain, as_json, told: Vec::new() }
    }

    pub(super) fn stage<S: Stage>(&mut self, stage: &S) -> Result<Artifact> {
        let start = Instant::now();
        let mut progress = TerminalProgress::new();
        let (artifact, outcome) = self.chain.source.store.run(stage, None, &mut progress)?;
        drop(progress);
        self.tell(S::NAME, artifact.key(), outcome, artifact.total_bytes(), start);
        Ok(artifact)
    }

    fn tell(&mut self, stage: &str, key: Key, outcome: Outcome, bytes: u64, start: Instant) {
        let told = Told {
            stage: stage.to_owned(),
            key,
            outcome,
            bytes,
            seconds: start.elapsed().as_secs_f64(),
        };
        if !self.as_json {
            let (word, bytes) = (outcome.word(), ByteCount(bytes));
            eprintln!("{stage:<16} {}  {word}, {bytes}, {:.1} s", key.short(), told.seconds);
        }
        self.told.push(told);
    }
}

/// `ls-prep all`.
pub(crate) fn run(args: &AllArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let mut chain = args.stage.chain(&mut progress)?;
    drop(progress);
    chain.refuse_to_replace(&args.out)?;
    args.search.apply(&mut chain);
    if args.dry_run {
        return dry_run(&chain, args.stage.json);
    }
    let mut run = Run::new(&chain, args.stage.json);
    let (activations, embedding) = recorded(&mut run)?;
    let mut told = std::mem::take(&mut run.told);
    let mut settings = None;
    if args.search.quality.is_some() {
        let (key, found) = guard::search(&mut run, &activations, &embedding, &args.search)?;
        told.append(&mut run.told);
        let quality = chain.recipe.guard.quality;
        let choice = *found.choice(quality).ok_or_else(|| {
            let problem = "no way to run the model keeps this quality in this memory";
            PrepError::usage(format!("--quality {quality}: {problem}"))
        })?;
        settings = Some((key, found.settings(&choice)));
        chain.follow(&choice);
    }
    let mut run = Run { chain: &chain, as_json: args.stage.json, told };
    packed(&mut run, &activations, &embedding, settings, &args.out)?;
    let seconds = start.elapsed().as_secs_f64();
    if !args.stage.json {
        let peak =
            peak_rss_bytes().map_or(String::new(), |b| format!(", at most {}", ByteCount(b)));
        return print(format!("{}: {seconds:.1} s{peak} of memory", args.out.display()));
    }
    let mut object = json!({
        "bundle": args.out,
        "recipe": chain.recipe.name,
        "seconds": seconds,
        "peak_rss_bytes": peak_rss_bytes(),
    });
    let settings = settings.map(|(_, settings)| settings);
    extend(&mut object, json!({"settings": settings, "stages": run.told}));
    print(object)
}

/// What a run would find and need.
fn dry_run(chain: &Chain, as_json: bool) -> Result<()> {
    super::stages::tell_links(chain, as_json)?;
    let store = &chain.source.store;
    if store.find(&chain.prompts()?)?.is_none() {
        eprintln!("what activations will take is told once the prompts are taken");
        return Ok(());
    }
    let (windows, prompts) = chain.windows(&mut ())?;
    announce(chain, &chain.activations(&windows, prompts))
}

/// What everything else is learned from.
fn recorded(run: &mut Run<'_>) -> Result<(Activations, Embedding)> {
    let chain = run.chain;
    run.stage(&chain.prompts()?)?;
    let (windows, prompts) = chain.windows(&mut ())?;
    let activations = chain.activations(&windows, prompts);
    announce(chain, &activations)?;
    let activations = Activations::new(run.stage(&activations)?)?;
    let embedding = Embedding::new(run.stage(&chain.embedding(&activations))?)?;
    Ok((activations, embedding))
}

/// Learns the rest, and packs it.
fn packed(
    run: &mut Run<'_>,
    activations: &Activations,
    embedding: &Embedding,
    settings: Option<(Key, Settings)>,
    out: &Path,
) -> Result<()> {
    let chain = run.chain;
    let placement = Placement::read(&run.stage(&chain.placement(activations, embedding))?)?;
    let stage = chain.predictor(activations, Some(&placement), false);
    let predictors = Predictors::read(&run.stage(&stage)?)?;
    let reuse = run.stage(&chain.reuse(activations, &placement))?;
    let (key, reuse) = (reuse.key(), Reuse::read(&reuse)?);
    let base = base(run, activations)?;
    let mlp = if chain.recipe.pack.baseline {
        Some(run.stage(&chain.mlp(activations, Some(&placement)))?)
    } else {
        None
    };
    let packing = Instant::now();
    let mut progress = TerminalProgress::new();
    let made = Made {
        placement: &placement,
        predictors: Some(&predictors),
        base: base.as_ref(),
        reuse: Some((key, &reuse)),
        mlp: mlp.as_ref(),
        settings,
    };
    let bundle = chain.pack(out, &made, &mut progress as &mut dyn Progress)?;
    drop(progress);
    run.tell(Chain::PACK, bundle.key, bundle.outcome, bundle.bytes, packing);
    Ok(())
}

/// The base, where the model can have one.
fn base(run: &mut Run<'_>, activations: &Activations) -> Result<Option<Base>> {
    match run.chain.base(activations) {
        Ok(stage) => Ok(Some(Base::new(run.stage(&stage)?)?)),
        Err(problem) if problem.exit() == Exit::Unsupported => {
            eprintln!("no base: {problem}");
            Ok(None)
        }
        Err(problem) => Err(problem),
    }
}

/// Says what the longest stage will take, unless it is done, and refuses what the disk cannot hold.
fn announce(chain: &Chain, stage: &ActivationsStage<'_>) -> Result<()> {
    let store = &chain.source.store;
    let layers = 0..stage.units();
    let target = store.path(ActivationsStage::NAME, stage.key(), stage.units(), &layers);
    if target.exists() {
        return Ok(());
    }
    let cost = stage.cost(&layers);
    let seconds = cost.operations / operations_per_second()?;
    eprintln!("{}: {}", ActivationsStage::NAME, super::stages::estimate(&cost, seconds));
    let there = std::fs::metadata(target.with_extension("part")).map_or(0, |part| part.len());
    let wanted = (cost.artifact_bytes + cost.scratch_bytes).saturating_sub(there);
    need_room(store.folder(), wanted)
}
