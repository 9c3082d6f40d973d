//! `ls-prep guard`, and what `ls-prep all --quality` does of it.

use super::all::Run;
use super::print;
use super::stages::{StageArgs, report};
use crate::terminal::TerminalProgress;
use ls_bundle::ids::ByteCount;
use ls_prep::chain::Chain;
use ls_prep::error::Result;
use ls_prep::model::forward::operations_per_second;
use ls_prep::model::weights::SourceFile;
use ls_prep::stage::Stage;
use ls_prep::stages::activations::Activations;
use ls_prep::stages::base::Base;
use ls_prep::stages::embedding::Embedding;
use ls_prep::stages::guard::{Choice, Guard, GuardStage};
use ls_prep::stages::placement::Placement;
use ls_prep::stages::sparsity::first_windows;
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// What is searched, besides what the recipe says.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct SearchArgs {
    /// Search base, format, blocks and share of exact neurons for what reads least for a token while its perplexity is
    /// at most so much above the dense model's (5%)
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub(crate) quality: Option<f64>,
    /// Share of the FFNs' half-precision bytes that stays in memory (25%)
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub(crate) resident: Option<f64>,
    /// Text to measure quality on [default: places in the calibration text that nothing is learned from]
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) eval: Vec<PathBuf>,
}

impl SearchArgs {
    /// Lays the flags over the recipe.
    pub(crate) fn apply(&self, chain: &mut Chain) {
        let guard = &mut chain.recipe.guard;
        guard.quality = self.quality.unwrap_or(guard.quality);
        guard.resident = self.resident.unwrap_or(guard.resident);
    }
}

const EXAMPLES: &str = "\
Examples:
  ls-prep guard model.gguf --calibration datasets/text/*.txt --quality 5% --resident 25%
  ls-prep guard model.gguf --calibration datasets/text/*.txt --eval held-out.txt --estimate";

/// Searches what reads least for a token within some loss of quality.
///
/// Activations and embedding must be there; placements and bases that the recipe names are made first. `all --quality`
/// does this on the way, and packs what is found.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct GuardArgs {
    #[command(flatten)]
    stage: StageArgs,
    #[command(flatten)]
    search: SearchArgs,
    /// Only say how long it may take
    #[arg(long)]
    estimate: bool,
}

/// 5% or 0.05.
fn parse_share(text: &str) -> std::result::Result<f64, String> {
    let (number, scale) = text.strip_suffix('%').map_or((text, 1.0), |text| (text, 100.0));
    match number.trim().parse::<f64>() {
        Ok(number) if (0.0..=10.0).contains(&(number / scale)) => Ok(number / scale),
        _ => Err(format!("{text:?} is not a share like 5% or 0.05")),
    }
}

/// `ls-prep guard`.
pub(crate) fn run(args: &GuardArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let mut chain = args.stage.chain(&mut progress)?;
    args.search.apply(&mut chain);
    let recorded = chain.recorded(GuardStage::NAME, &mut progress)?;
    let embedding = chain.source.store.need(&chain.embedding(&recorded), GuardStage::NAME)?;
    drop(progress);
    let mut run = Run::new(&chain, args.stage.json);
    let made = Made::of(&mut run, &recorded, &Embedding::new(embedding)?)?;
    let stage = made.stage(&chain, &args.search)?;
    if args.estimate || chain.source.store.find(&stage)?.is_none() {
        announce(&stage)?;
    }
    if args.estimate {
        return Ok(());
    }
    let mut progress = TerminalProgress::new();
    let (artifact, outcome) = chain.source.store.run(&stage, None, &mut progress)?;
    drop(progress);
    let found = Guard::read(&artifact)?;
    if !args.stage.json {
        lines(&found).into_iter().try_for_each(print)?;
    }
    let text = format!("{} tokens", found.tokens);
    report(args.stage.json, &artifact, outcome, start.elapsed(), &text, json!({"guard": found}))
}

/// What the search chooses among.
struct Made {
    placements: Vec<Placement>,
    bases: Vec<Base>,
}

impl Made {
    fn of(run: &mut Run<'_>, activations: &Activations, embedding: &Embedding) -> Result<Made> {
        let chain = run.chain;
        let guard = &chain.recipe.guard;
        let mut made = Made { placements: Vec::new(), bases: Vec::new() };
        for &size in guard.block_neurons.iter().filter(|&&size| size > 1) {
            let stage = chain.placement_in(activations, embedding, size);
            made.placements.push(Placement::read(&run.stage(&stage)?)?);
        }
        for &bits in &guard.bases {
            let stage = chain.base_of(activations, bits, &chain.recipe.base.exact_shares)?;
            made.bases.push(Base::new(run.stage(&stage)?)?);
        }
        Ok(made)
    }

    fn stage<'a>(&'a self, chain: &'a Chain, args: &SearchArgs) -> Result<GuardStage<'a>> {
        let (recipe, source) = (&chain.recipe, &chain.source);
        let window = recipe.calibration.window.min(source.model.config.context_length);
        let tokens = if args.eval.is_empty() {
            chain.prompts()?.held_out(recipe.guard.eval_tokens)?
        } else {
            let texts = args.eval.iter().map(|path| SourceFile::open(path));
            let texts = texts.collect::<Result<Vec<_>>>()?;
            first_windows(source, &texts, window, recipe.guard.eval_tokens)?
        };
        Ok(GuardStage::new(source, &self.bases, &self.placements, tokens, window, recipe))
    }
}

/// Searches on the way of `all`.
pub(super) fn search(
    run: &mut Run<'_>,
    activations: &Activations,
    embedding: &Embedding,
    args: &SearchArgs,
) -> Result<(ls_prep::key::Key, Guard)> {
    let made = Made::of(run, activations, embedding)?;
    let chain = run.chain;
    let stage = made.stage(chain, args)?;
    if chain.source.store.find(&stage)?.is_none() {
        announce(&stage)?;
    }
    let artifact = run.stage(&stage)?;
    let found = Guard::read(&artifact)?;
    lines(&found).iter().for_each(|line| eprintln!("  {line}"));
    Ok((artifact.key(), found))
}

/// Says what the search may take.
fn announce(stage: &GuardStage<'_>) -> Result<()> {
    let minutes = stage.operations() / operations_per_second()? / 60.0;
    eprintln!("{}: about {minutes:.0} minutes", GuardStage::NAME);
    Ok(())
}

/// The choices for people.
pub(super) fn lines(found: &Guard) -> Vec<String> {
    let mut lines = Vec::new();
    let dense = found.dense_perplexity;
    let of = |choice: &Choice| {
        let (arm, point) = (choice.arm, &choice.point);
        format!(
            "within {:.1} %: {arm}, {:.2} % exact, perplexity {:.3} ({:+.2} %{}), {} read a token ({:.1} % hits)",
            100.0 * choice.tolerance,
            100.0 * point.exact_share,
            point.perplexity,
            100.0 * (point.perplexity / dense - 1.0),
            point.error.map_or(String::new(), |error| format!(", error {:.2}", 100.0 * error)),
            ByteCount(point.bytes),
            100.0 * point.hit_ratio,
        )
    };
    let resident = 100.0 * found.resident;
    lines.push(format!(
        "{resident:.1} % of the FFNs in memory, dense perplexity {dense:.3} on {} tokens; {} measurements of {} tokens in all",
        found.tokens, found.measurements, found.measured_tokens
    ));
    lines.extend(found.choices.iter().map(of));
    let better = found.with_thresholds.iter().filter(|choice| choice.arm.threshold);
    lines.extend(better.map(|choice| format!("a threshold would do better {}", of(choice))));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_numbers_or_percent() {
        assert_eq!((parse_share("5%"), parse_share("0.05")), (Ok(0.05), Ok(0.05)));
        for bad in ["-1%", "x", "nan", "11", ""] {
            assert!(parse_share(bad).is_err(), "{bad}");
        }
    }
}
