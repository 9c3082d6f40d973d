//! `ls-prep compare`.

use super::print;
use super::stages::{StageArgs, parse_range, report};
use crate::cmd::predictor::test_activations;
use crate::terminal::TerminalProgress;
use ls_prep::artifact::Artifact;
use ls_prep::chain::Chain;
use ls_prep::error::Result;
use ls_prep::report::{Row, table};
use ls_prep::stage::Stage;
use ls_prep::stages::base::Base;
use ls_prep::stages::comparison::{Candidates, ComparisonStage, Params, Stacks, summaries};
use serde_json::json;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ls-prep compare model.gguf --calibration datasets/text/*.txt
  ls-prep compare model.gguf --calibration a.txt --layers 12..13 --test wikitext2-test.txt --test-tokens 16384";

/// Measures all predictors beside each other, on tokens that none has learned from.
///
/// Activations and placement must be there; what is missing of the predictors is trained first, for these layers alone.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CompareArgs {
    #[command(flatten)]
    stage: StageArgs,
    /// Only these layers: A..B, without B
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    layers: Option<Range<u32>>,
    /// Measure on this text instead of held-out windows; its activations are recorded first
    #[arg(long, value_name = "FILE", num_args = 1..)]
    test: Vec<PathBuf>,
    /// Tokens of the test text
    #[arg(long, value_name = "N", default_value_t = 65536)]
    test_tokens: u64,
    /// Leave out the paper's stack, which takes long to train
    #[arg(long)]
    no_literal: bool,
    /// Leave out the two-layer baselines, which do too
    #[arg(long)]
    no_mlp: bool,
}

/// The whole artifact of a stage if it is there, else that of some layers, made if it is not.
fn held<S: Stage>(
    chain: &Chain,
    stage: &S,
    layers: &Option<Range<u32>>,
    progress: &mut TerminalProgress,
) -> Result<Artifact> {
    let store = &chain.source.store;
    match store.find(stage)? {
        Some(whole) => Ok(whole),
        None => Ok(store.run(stage, layers.clone(), progress)?.0),
    }
}

/// `ls-prep compare`.
pub(crate) fn run(args: &CompareArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let chain = args.stage.chain(&mut progress)?;
    let recorded = chain.recorded(ComparisonStage::NAME, &mut progress)?;
    let placement = chain.placed(&recorded, ComparisonStage::NAME)?;
    let layers = &args.layers;
    let single = held(&chain, &chain.predictor(&recorded, None, false), layers, &mut progress)?;
    let single = Stacks::read(&single, None)?;
    let stage = chain.predictor(&recorded, Some(&placement), false);
    let placed = Stacks::read(&held(&chain, &stage, layers, &mut progress)?, Some(&placement))?;
    let mut literal = None;
    if !args.no_literal {
        let stage = chain.predictor(&recorded, None, true);
        literal = Some(Stacks::read(&held(&chain, &stage, layers, &mut progress)?, None)?);
    }
    let mut mlp = None;
    if !args.no_mlp {
        mlp = Some(held(&chain, &chain.mlp(&recorded, None), layers, &mut progress)?);
    }
    let mut sketches = Vec::new();
    for bits in [[2, 2, 0], [3, 3, 0]] {
        let stage = chain.base_of(&recorded, bits, &chain.recipe.base.exact_shares)?;
        sketches.push(Base::new(held(&chain, &stage, layers, &mut progress)?)?);
    }
    let candidates = Candidates {
        single: Some(&single),
        placed: Some(&placed),
        literal: literal.as_ref(),
        mlp: mlp.as_ref(),
        sketches: &sketches,
    };
    let (test, params) = if args.test.is_empty() {
        (None, Params { holdout_every: chain.recipe.predictor.holdout_every })
    } else {
        let test = test_activations(&args.stage, &args.test, args.test_tokens, &mut progress)?;
        (Some(test), Params { holdout_every: 1 })
    };
    let measured = test.as_ref().unwrap_or(&recorded);
    let stage = ComparisonStage::new(&chain.source, measured, candidates, params)?;
    let (artifact, outcome) = chain.source.store.run(&stage, layers.clone(), &mut progress)?;
    drop(progress);
    let summaries = summaries(std::slice::from_ref(&artifact))?;
    let rows = summaries.iter().map(Row::of).collect::<Result<Vec<_>>>()?;
    if !args.stage.json {
        table(&rows).into_iter().try_for_each(print)?;
    }
    let tokens = summaries.first().map_or(0, |row| row.layers[0].1.full.tokens);
    let text = format!("{tokens} tokens");
    let details = json!({"tokens": tokens, "predictors": rows});
    report(args.stage.json, &artifact, outcome, start.elapsed(), &text, details)
}
