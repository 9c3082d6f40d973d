//! `ls-prep predictor` and `ls-prep mlp`.

use super::print;
use super::stages::{StageArgs, parse_range, report};
use crate::terminal::TerminalProgress;
use ls_bundle::ids::ByteCount;
use ls_prep::chain::Chain;
use ls_prep::error::Result;
use ls_prep::predictors::Measured;
use ls_prep::stages::activations::Activations;
use ls_prep::stages::embedding::Embedding;
use ls_prep::stages::mlp::{self, MlpStage};
use ls_prep::stages::placement::{Placement, PlacementStage};
use ls_prep::stages::predictor::{PredictorStage, Predictors};
use serde_json::json;
use std::ops::Range;
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
}

/// The recorded activations, and the placement if it is wanted.
fn inputs(
    chain: &Chain,
    by: &str,
    placed: bool,
    progress: &mut TerminalProgress,
) -> Result<(Activations, Option<Placement>)> {
    let (windows, prompts) = chain.windows(progress)?;
    let store = &chain.source.store;
    let recorded = Activations::new(store.need(&chain.activations(&windows, prompts), by)?)?;
    let placement = if placed {
        let embedding = Embedding::new(store.need(&chain.embedding(&recorded), by)?)?;
        let stage: PlacementStage<'_> = chain.placement(&recorded, &embedding);
        Some(Placement::read(&store.need(&stage, by)?)?)
    } else {
        None
    };
    Ok((recorded, placement))
}

/// A line of figures.
fn figures(name: &str, found: &Measured) -> String {
    let (stale, full) = (&found.stale, &found.full);
    let steps: Vec<String> = found.steps.iter().map(|step| format!("{:.3}", step.imp20)).collect();
    format!(
        "  {name:<10} imp20 {:.4}, top10 {:.3}, red95 {:.3}; stale {:.4}, {:.3}, {:.3}; by step {}",
        full.imp20,
        full.top10,
        full.red95,
        stale.imp20,
        stale.top10,
        stale.red95,
        steps.join(" "),
    )
}

/// `ls-prep predictor`.
pub(crate) fn predictor(args: &PredictorArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let chain = args.stage.chain(&mut progress)?;
    let (recorded, placement) = inputs(&chain, "60-predictor", args.placed, &mut progress)?;
    let stage: PredictorStage<'_> = chain.predictor(&recorded, placement.as_ref(), args.literal);
    let (artifact, outcome) = chain.source.store.run(&stage, args.layers.clone(), &mut progress)?;
    drop(progress);
    let found = Predictors::read(&artifact)?;
    if !args.stage.json {
        for (number, layer) in (found.first_layer..).zip(&found.layers) {
            let (bytes, compared) = (ByteCount(layer.bytes), ByteCount(layer.compared_bytes));
            print(format!(
                "layer {number}: {bytes}, at 7B shape {compared}, loss {:.4?}",
                layer.losses
            ))?;
            print(figures("hash", &layer.hash))?;
            print(figures("frequency", &layer.frequency))?;
            print(figures("ema", &layer.ema))?;
        }
    }
    let text = format!("{} layers", found.layers.len());
    let details = json!({"first_layer": found.first_layer, "layers": found.layers});
    report(args.stage.json, &artifact, outcome, start.elapsed(), &text, details)
}

/// `ls-prep mlp`.
pub(crate) fn mlp(args: &MlpArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let chain = args.stage.chain(&mut progress)?;
    let (recorded, placement) = inputs(&chain, "62-mlp", args.placed, &mut progress)?;
    let stage: MlpStage<'_> = chain.mlp(&recorded, placement.as_ref());
    let (artifact, outcome) = chain.source.store.run(&stage, args.layers.clone(), &mut progress)?;
    drop(progress);
    let (found, first) = (mlp::read(&artifact)?, artifact.description().range.0);
    if !args.stage.json {
        for (number, layer) in (first..).zip(&found) {
            print(format!("layer {number}:"))?;
            for baseline in layer {
                let compared = ByteCount(baseline.compared_bytes);
                print(format!(
                    "{}, at 7B shape {compared}",
                    figures(&baseline.name, &baseline.measured)
                ))?;
            }
        }
    }
    let text = format!("{} layers", found.len());
    let details = json!({"first_layer": first, "layers": found});
    report(args.stage.json, &artifact, outcome, start.elapsed(), &text, details)
}
