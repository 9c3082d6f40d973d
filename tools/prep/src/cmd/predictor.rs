//! `ls-prep predictor` and `ls-prep mlp`.

use super::print;
use super::stages::{StageArgs, parse_range, report};
use crate::terminal::TerminalProgress;
use ls_bundle::ids::ByteCount;
use ls_prep::chain::Chain;
use ls_prep::error::Result;
use ls_prep::metrics::Figures;
use ls_prep::model::forward::Forward;
use ls_prep::predictors::{Measured, PackedScorer, Refinement, refinement};
use ls_prep::recipe::Recipe;
use ls_prep::stage::Stage;
use ls_prep::stages::activations::Activations;
use ls_prep::stages::mlp::{self, MlpStage};
use ls_prep::stages::placement::Placement;
use ls_prep::stages::predictor::{PredictorStage, Predictors, Rows, grouping};
use serde_json::json;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Instant;

/// Trains the hashing predictor of each layer and measures it on windows that it did not learn from.
#[derive(Debug, clap::Args)]
pub(crate) struct PredictorArgs {
    #[command(flatten)]
    stage: StageArgs,
    /// Only these layers: A..B, without B
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    layers: Option<Range<u32>>,
    /// The paper's stack, recipe section [literal], instead of [predictor]
    #[arg(long)]
    literal: bool,
    /// Score the placement's blocks instead of neurons
    #[arg(long)]
    placed: bool,
    /// Measure on this text too, all of whose tokens are held out; its activations are recorded first
    #[arg(long, value_name = "FILE", num_args = 1..)]
    test: Vec<PathBuf>,
    /// Tokens of the test text
    #[arg(long, value_name = "N", default_value_t = 65536)]
    test_tokens: u64,
    /// Measure refinement by priority and in file order, on at most so many staged tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    refinement: usize,
}

/// Trains the two-layer baselines of each layer and measures them as the hashing predictor.
#[derive(Debug, clap::Args)]
pub(crate) struct MlpArgs {
    #[command(flatten)]
    stage: StageArgs,
    /// Only these layers: A..B, without B
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    layers: Option<Range<u32>>,
    /// Score the placement's blocks instead of neurons
    #[arg(long)]
    placed: bool,
    /// Measure on this text too, all of whose tokens are held out; its activations are recorded first
    #[arg(long, value_name = "FILE", num_args = 1..)]
    test: Vec<PathBuf>,
    /// Tokens of the test text
    #[arg(long, value_name = "N", default_value_t = 65536)]
    test_tokens: u64,
}

/// The recorded activations, and the placement if it is wanted.
fn inputs(
    chain: &Chain,
    by: &str,
    placed: bool,
    progress: &mut TerminalProgress,
) -> Result<(Activations, Option<Placement>)> {
    let recorded = chain.recorded(by, progress)?;
    let placement = if placed { Some(chain.placed(&recorded, by)?) } else { None };
    Ok((recorded, placement))
}

/// The activations of a test text, which are recorded if they are not there.
pub(crate) fn test_activations(
    args: &StageArgs,
    texts: &[PathBuf],
    tokens: u64,
    progress: &mut TerminalProgress,
) -> Result<Activations> {
    let mut recipe = Recipe::load(&args.recipe)?;
    recipe.calibration.tokens = tokens;
    let chain = Chain::open(&args.model, &args.artifacts, recipe, texts.to_vec(), progress)?;
    let (windows, prompts) = chain.windows(progress)?;
    let stage = chain.activations(&windows, prompts);
    Activations::new(chain.source.store.run(&stage, None, progress)?.0)
}

/// A line of figures.
fn figures(name: &str, found: &Measured) -> String {
    let (stale, full) = (&found.stale, &found.full);
    format!(
        "  {name:<14} imp20 {:.4}, top10 {:.3}, red95 {:.3}; stale {:.4}, {:.3}, {:.3}; by step {}",
        full.imp20,
        full.top10,
        full.red95,
        stale.imp20,
        stale.top10,
        stale.red95,
        imp20(&found.steps),
    )
}

fn imp20(steps: &[Figures]) -> String {
    let asked = steps.iter().filter(|step| step.tokens > 0);
    let steps: Vec<String> = asked.map(|step| format!("{:.3}", step.imp20)).collect();
    if steps.is_empty() { "none".to_owned() } else { steps.join(" ") }
}

fn print_rows(of: &str, rows: &Rows) -> Result<()> {
    for (name, row) in [("hash", &rows.hash), ("frequency", &rows.frequency), ("ema", &rows.ema)] {
        print(figures(&format!("{of}{name}"), row))?;
    }
    Ok(())
}

/// `ls-prep predictor`.
pub(crate) fn predictor(args: &PredictorArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let chain = args.stage.chain(&mut progress)?;
    let (recorded, placement) = inputs(&chain, PredictorStage::NAME, args.placed, &mut progress)?;
    let stage: PredictorStage<'_> = chain.predictor(&recorded, placement.as_ref(), args.literal);
    let (artifact, outcome) = chain.source.store.run(&stage, args.layers.clone(), &mut progress)?;
    let found = Predictors::read(&artifact)?;
    let numbered = || (found.first_layer..).zip(&found.layers);
    let of_layer = |layer| grouping(&recorded, placement.as_ref(), layer);
    let mut tested: Vec<Rows> = Vec::new();
    if !args.test.is_empty() {
        let test = test_activations(&args.stage, &args.test, args.test_tokens, &mut progress)?;
        for (number, layer) in numbered() {
            tested.push(layer.measure(&test, number, &of_layer(number)?, |_| true)?);
        }
    }
    let mut refined: Vec<Option<Refinement>> = Vec::new();
    if args.refinement > 0 {
        let forward = Forward::new(&chain.source.model, recorded.params().window)?;
        for (number, layer) in numbered() {
            if number == 0 {
                // No FFN runs before it.
                refined.push(None);
                continue;
            }
            let (blocks, mut scorer) = (of_layer(number)?, PackedScorer::new(layer.stack()?)?);
            let (held_out, most) = (|window| stage.holds_out(window), args.refinement);
            let found =
                refinement(&forward, &recorded, number, &blocks, held_out, most, &mut scorer)?;
            refined.push(Some(found));
        }
    }
    drop(progress);
    if !args.stage.json {
        for (place, (number, layer)) in numbered().enumerate() {
            let (bytes, compared) = (ByteCount(layer.bytes), ByteCount(layer.compared_bytes));
            print(format!(
                "layer {number}: {bytes}, at 7B shape {compared}, loss {:.4?}",
                layer.losses
            ))?;
            print_rows("", &layer.measured)?;
            if let Some(rows) = tested.get(place) {
                print_rows("test ", rows)?;
            }
            if let Some(Some(found)) = refined.get(place) {
                print(format!("  by step, by priority {}", imp20(&found.priority)))?;
                print(format!("        in file order {}", imp20(&found.file)))?;
            }
        }
    }
    let text = format!("{} layers", found.layers.len());
    let details = json!({
        "first_layer": found.first_layer,
        "layers": found.layers,
        "test": tested,
        "refinement": refined,
    });
    report(args.stage.json, &artifact, outcome, start.elapsed(), &text, details)
}

/// `ls-prep mlp`.
pub(crate) fn mlp(args: &MlpArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let chain = args.stage.chain(&mut progress)?;
    let (recorded, placement) = inputs(&chain, MlpStage::NAME, args.placed, &mut progress)?;
    let stage: MlpStage<'_> = chain.mlp(&recorded, placement.as_ref());
    let (artifact, outcome) = chain.source.store.run(&stage, args.layers.clone(), &mut progress)?;
    let (found, first) = (mlp::read(&artifact)?, artifact.description().range.0);
    let mut tested = Vec::new();
    if !args.test.is_empty() {
        let test = test_activations(&args.stage, &args.test, args.test_tokens, &mut progress)?;
        for number in (first..).take(found.len()) {
            let blocks = grouping(&recorded, placement.as_ref(), number)?;
            tested.push(mlp::measure_on(&artifact, &test, number, &blocks)?);
        }
    }
    drop(progress);
    if !args.stage.json {
        for (place, (number, layer)) in (first..).zip(&found).enumerate() {
            print(format!("layer {number}:"))?;
            for baseline in layer {
                let compared = ByteCount(baseline.compared_bytes);
                print(format!(
                    "{}, at 7B shape {compared}",
                    figures(&baseline.name, &baseline.measured)
                ))?;
            }
            for (name, row) in tested.get(place).into_iter().flatten() {
                print(figures(&format!("test {name}"), row))?;
            }
        }
    }
    let text = format!("{} layers", found.len());
    let details = json!({"first_layer": first, "layers": found, "test": tested});
    report(args.stage.json, &artifact, outcome, start.elapsed(), &text, details)
}
