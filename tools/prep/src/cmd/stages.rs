//! `ls-prep prompts`, `activations`, `embedding`, `placement`, `projection`, `merge`, `status` and `recipe`.

use super::{extend, print};
use crate::peak_rss_bytes;
use crate::terminal::TerminalProgress;
use ls_bundle::ids::ByteCount;
use ls_prep::artifact::Artifact;
use ls_prep::chain::Chain;
use ls_prep::error::{PrepError, Result};
use ls_prep::model::forward::operations_per_second;
use ls_prep::recipe::Recipe;
use ls_prep::room::need_room;
use ls_prep::stage::{Outcome, Stage, State, merge};
use ls_prep::stages::activations::{Activations, ActivationsStage, Cost};
use ls_prep::stages::embedding::{Embedding, EmbeddingStage, Fit};
use ls_prep::stages::placement::{Measured, Placement, PlacementStage};
use ls_prep::stages::projection::{Projection, ProjectionStage, Spread};
use serde_json::{Value, json};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What every stage is told.
#[derive(Debug, clap::Args)]
pub(crate) struct StageArgs {
    /// GGUF file or Hugging Face folder
    pub(crate) model: PathBuf,
    /// Calibration text [default: what `ls-prep datasets fetch` has put into datasets/text]
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) calibration: Vec<PathBuf>,
    /// Hyper-parameters: tiny, quick, full, widened, or a TOML file
    #[arg(long, value_name = "NAME|FILE", default_value = "quick")]
    pub(crate) recipe: String,
    /// Folder of the artifacts; each model has one inside
    #[arg(long, value_name = "DIR", default_value = "artifacts")]
    pub(crate) artifacts: PathBuf,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

impl StageArgs {
    /// The chain of stages that these arguments name.
    pub(crate) fn chain(&self, progress: &mut TerminalProgress) -> Result<Chain> {
        let recipe = Recipe::load(&self.recipe)?;
        let texts = match self.calibration.is_empty() {
            true => fetched_texts(Path::new(FETCHED)),
            false => self.calibration.clone(),
        };
        Chain::open(&self.model, &self.artifacts, recipe, texts, progress)
    }
}

/// Where `ls-prep datasets fetch` puts texts.
const FETCHED: &str = "datasets/text";

/// The texts in a folder, by name; none if it is not there.
fn fetched_texts(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut texts: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    texts.retain(|path| path.extension().is_some_and(|extension| extension == "txt"));
    texts.sort();
    texts
}

const ACTIVATIONS_EXAMPLES: &str = "\
Examples:
  ls-prep activations model.gguf --recipe quick --calibration datasets/text/*.txt
  ls-prep activations model.gguf --calibration a.txt b.txt --layers 0..16   # on one machine
  ls-prep activations model.gguf --calibration a.txt b.txt --layers 16..32  # on another, same --artifacts
  ls-prep merge artifacts/model/20-activations/*.bin";

/// Records what a dense forward over the calibration text shows.
///
/// One layer's weights are in memory at a time. Ended at any point and started again, it goes on. With --layers it
/// makes a share, in a file of its own; shares are joined by `merge`.
#[derive(Debug, clap::Args)]
#[command(after_help = ACTIVATIONS_EXAMPLES)]
pub(crate) struct ActivationsArgs {
    #[command(flatten)]
    stage: StageArgs,
    /// Only these layers: A..B, without B
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    layers: Option<Range<u32>>,
    /// Only say what it will take
    #[arg(long)]
    estimate: bool,
}

/// A stage whose layers can be made apart.
#[derive(Debug, clap::Args)]
pub(crate) struct LayersArgs {
    #[command(flatten)]
    stage: StageArgs,
    /// Only these layers: A..B, without B
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    layers: Option<Range<u32>>,
}

/// Joins shares of a stage into the artifact that one run would have made, byte for byte.
#[derive(Debug, clap::Args)]
pub(crate) struct MergeArgs {
    /// The shares of one artifact
    #[arg(required = true)]
    parts: Vec<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Prints a recipe with all its keys.
#[derive(Debug, clap::Args)]
pub(crate) struct RecipeArgs {
    /// tiny, quick, full, widened, or a TOML file
    #[arg(value_name = "NAME|FILE", default_value = "full")]
    recipe: String,
}

pub(crate) fn parse_range(text: &str) -> std::result::Result<Range<u32>, String> {
    let parsed = text.split_once("..").and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?));
    match parsed {
        Some(range) if !range.is_empty() => Ok(range),
        _ => Err("wanted A..B with A < B".to_owned()),
    }
}

/// `ls-prep prompts`.
pub(crate) fn prompts(args: &StageArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let chain = args.chain(&mut progress)?;
    let stage = chain.prompts()?;
    let (artifact, outcome) = chain.source.store.run(&stage, None, &mut progress)?;
    let (windows, _) = chain.windows(&mut progress)?;
    let details = json!({
        "tokens": windows.tokens.len(),
        "window": windows.window,
        "windows_of_text": windows.of_text,
    });
    let text = format!("{} tokens in windows of {}", windows.tokens.len(), windows.window);
    report(args.json, &artifact, outcome, start.elapsed(), &text, details)
}

/// `ls-prep activations`.
pub(crate) fn activations(args: &ActivationsArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let chain = args.stage.chain(&mut progress)?;
    let (windows, prompts) = chain.windows(&mut progress)?;
    let stage = chain.activations(&windows, prompts);
    let layers = args.layers.clone().unwrap_or(0..stage.units());
    if layers.end > stage.units() {
        let problem =
            format!("--layers {}..{}: the model has {}", layers.start, layers.end, stage.units());
        return Err(PrepError::usage(problem));
    }
    let store = &chain.source.store;
    let target = store.path(ActivationsStage::NAME, stage.key(), stage.units(), &layers);
    let cost = stage.cost(&layers);
    if args.estimate || !target.exists() {
        let seconds = cost.operations / operations_per_second()?;
        let text = estimate(&cost, seconds);
        if args.estimate {
            let mut object = serde_json::to_value(cost).expect("a cost is plain data");
            extend(&mut object, json!({"stage": ActivationsStage::NAME, "seconds": seconds}));
            return if args.stage.json { print(object) } else { print(text) };
        }
        eprintln!("{}: {text}", ActivationsStage::NAME);
        let there = std::fs::metadata(target.with_extension("part")).map_or(0, |part| part.len());
        let wanted = (cost.artifact_bytes + cost.scratch_bytes).saturating_sub(there);
        need_room(store.folder(), wanted)?;
    }
    let (artifact, outcome) = store.run(&stage, Some(layers.clone()), &mut progress)?;
    drop(progress);
    let found = Activations::new(artifact)?;
    let perplexity = if layers.end == stage.units() { Some(found.perplexity()?) } else { None };
    let details = json!({"layers": [layers.start, layers.end], "perplexity": perplexity});
    let text = perplexity.map_or(String::new(), |perplexity| {
        format!("perplexity of the calibration text {perplexity:.3}")
    });
    report(args.stage.json, found.artifact(), outcome, start.elapsed(), &text, details)
}

/// `ls-prep embedding`.
pub(crate) fn embedding(args: &LayersArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let chain = args.stage.chain(&mut progress)?;
    let store = &chain.source.store;
    let recorded = chain.recorded(EmbeddingStage::NAME, &mut progress)?;
    let stage = chain.embedding(&recorded);
    let (artifact, outcome) = store.run(&stage, args.layers.clone(), &mut progress)?;
    drop(progress);
    let found = Embedding::new(artifact)?;
    let layers = found.artifact().description().units_held();
    let fits = layers.clone().map(|layer| found.fit(layer)).collect::<Result<Vec<_>>>()?;
    let mean = |of: fn(&Fit) -> f64| fits.iter().map(of).sum::<f64>() / fits.len() as f64;
    let (first, last) = (mean(|fit| fit.first_loss), mean(|fit| fit.last_loss));
    let text = format!("mean loss {first:.4} at first, {last:.4} at last");
    let details = json!({"first_layer": layers.start, "fits": fits});
    report(args.stage.json, found.artifact(), outcome, start.elapsed(), &text, details)
}

/// `ls-prep placement`.
pub(crate) fn placement(args: &LayersArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let chain = args.stage.chain(&mut progress)?;
    let store = &chain.source.store;
    let recorded = chain.recorded(PlacementStage::NAME, &mut progress)?;
    let embedding = store.need(&chain.embedding(&recorded), PlacementStage::NAME)?;
    let embedding = Embedding::new(embedding)?;
    let stage = chain.placement(&recorded, &embedding);
    let (artifact, outcome) = store.run(&stage, args.layers.clone(), &mut progress)?;
    drop(progress);
    let found = Placement::read(&artifact)?;
    let first = artifact.description().range.0;
    if !args.stage.json {
        for (number, layer) in (first..).zip(&found.layers) {
            let of = |m: &Measured| {
                format!("{} {:.3} ({:.3})", m.method, m.redundancy, m.redundancy_of_double)
            };
            let measured: Vec<String> = layer.measured.iter().map(of).collect();
            print(format!("layer {number:>3}: {}", measured.join("  ")))?;
        }
    }
    let text = format!("redundancy in blocks of {} (and twice that) above", found.block_neurons);
    let details =
        json!({"block_neurons": found.block_neurons, "first_layer": first, "layers": found.layers});
    report(args.stage.json, &artifact, outcome, start.elapsed(), &text, details)
}

/// `ls-prep projection`.
pub(crate) fn projection(args: &LayersArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let chain = args.stage.chain(&mut progress)?;
    let store = &chain.source.store;
    let recorded = chain.recorded(ProjectionStage::NAME, &mut progress)?;
    let stage = chain.projection(&recorded);
    let (artifact, outcome) = store.run(&stage, args.layers.clone(), &mut progress)?;
    drop(progress);
    let found = Projection::new(artifact)?;
    let layers = found.artifact().description().units_held();
    let spread = |layer| found.layer(layer).map(|basis| basis.spread);
    let spreads = layers.clone().map(spread).collect::<Result<Vec<Spread>>>()?;
    let least = spreads.iter().map(|spread| spread.explained).fold(1.0, f64::min);
    let (kept, hidden) = (found.params().kept, found.params().hidden);
    let percent = 100.0 * least;
    let text = format!("{kept} of {hidden} dimensions hold {percent:.1} % of the variance or more");
    let details = json!({
        "kept": kept, "hidden": hidden, "first_layer": layers.start, "layers": spreads,
    });
    report(args.stage.json, found.artifact(), outcome, start.elapsed(), &text, details)
}

pub(crate) fn estimate(cost: &Cost, seconds: f64) -> String {
    format!(
        "{} on disk, {} more while it runs, at most about {} of memory, about {:.0} s",
        ByteCount(cost.artifact_bytes),
        ByteCount(cost.scratch_bytes),
        ByteCount(cost.memory_bytes),
        seconds.max(1.0),
    )
}

/// `ls-prep merge`.
pub(crate) fn merge_parts(args: &MergeArgs) -> Result<()> {
    let start = Instant::now();
    let artifact = merge(&args.parts)?;
    let text = format!("{} parts", args.parts.len());
    let details = json!({"parts": args.parts.len()});
    report(args.json, &artifact, Outcome::Made, start.elapsed(), &text, details)
}

pub(crate) fn report(
    as_json: bool,
    artifact: &Artifact,
    outcome: Outcome,
    elapsed: Duration,
    text: &str,
    details: Value,
) -> Result<()> {
    let stage = &artifact.description().stage;
    if !as_json {
        let word = outcome.word();
        let bytes = ByteCount(artifact.total_bytes());
        let (path, seconds) = (artifact.path().display(), elapsed.as_secs_f64());
        let text = if text.is_empty() { String::new() } else { format!(", {text}") };
        return print(format!("{path}\n{stage} {word}: {bytes}{text}, {seconds:.1} s"));
    }
    let mut object = json!({
        "stage": stage,
        "key": artifact.key(),
        "path": artifact.path(),
        "outcome": outcome,
        "bytes": artifact.total_bytes(),
        "seconds": elapsed.as_secs_f64(),
        "peak_rss_bytes": peak_rss_bytes(),
    });
    extend(&mut object, details);
    print(object)
}

/// `ls-prep status`.
pub(crate) fn status(args: &StageArgs) -> Result<()> {
    let chain = args.chain(&mut TerminalProgress::new())?;
    tell_links(&chain, args.json)
}

/// How far each stage has come.
pub(super) fn tell_links(chain: &Chain, as_json: bool) -> Result<()> {
    let links = chain.links()?;
    let folder = chain.source.store.folder();
    if as_json {
        return print(json!({"folder": folder, "recipe": chain.recipe.name, "stages": links}));
    }
    print(format!("{} with recipe {}", folder.display(), chain.recipe.name))?;
    for link in links {
        let key = link.key.map_or("-".repeat(12), |key| key.short());
        let state = match link.state {
            State::Done { bytes } => format!("done, {}", ByteCount(bytes)),
            State::Partial { percent, bytes } => {
                format!("partial {percent:.0} %, {}", ByteCount(bytes))
            }
            State::Stale { others } => {
                format!("stale: {others} made of other parameters or inputs")
            }
            State::Missing => "missing".to_owned(),
            State::Broken { problem } => format!("broken: {problem}"),
        };
        print(format!("{:<16} {key}  {state}", link.stage))?;
    }
    Ok(())
}

/// `ls-prep recipe`.
pub(crate) fn recipe(args: &RecipeArgs) -> Result<()> {
    print(Recipe::load(&args.recipe)?.to_toml().trim_end())
}
