//! `ls-prep base` and `sparsity`.

use super::print;
use super::stages::{StageArgs, parse_range, report};
use crate::terminal::TerminalProgress;
use ls_bundle::ids::ByteCount;
use ls_prep::error::Result;
use ls_prep::stage::Stage;
use ls_prep::stages::base::{Base, BaseStage};
use ls_prep::stages::predictor::Predictors;
use ls_prep::stages::sparsity::{Learnt, Price, SparsityStage, Way, prices};
use serde_json::json;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Instant;

/// Makes a low-bit copy of the FFNs that stays resident, selects neurons and stands in for the others.
#[derive(Debug, clap::Args)]
pub(crate) struct BaseArgs {
    #[command(flatten)]
    stage: StageArgs,
    /// Only these layers: A..B, without B
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    layers: Option<Range<u32>>,
}

const SPARSITY_EXAMPLES: &str = "\
Examples:
  ls-prep sparsity model.gguf --calibration datasets/text/*.txt --eval wikitext2-test.txt
  ls-prep sparsity model.gguf --calibration a.txt --eval b.txt --list         # numbers of the rows
  ls-prep sparsity model.gguf --calibration a.txt --eval b.txt --arms 0..12   # a share of them
  ls-prep merge artifacts/model/65-sparsity/*.bin                             # all shares to one";

/// The price list: perplexity of held-out text when only some neurons run.
///
/// Bases that the recipe names are made first. Ended at any point and started again, it goes on with the next row.
#[derive(Debug, clap::Args)]
#[command(after_help = SPARSITY_EXAMPLES)]
pub(crate) struct SparsityArgs {
    #[command(flatten)]
    stage: StageArgs,
    /// Held-out text
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    eval: Vec<PathBuf>,
    /// Only these rows: A..B, without B
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    arms: Option<Range<u32>>,
    /// Only say which rows there are, once the bases are made
    #[arg(long)]
    list: bool,
}

/// `ls-prep base`.
pub(crate) fn base(args: &BaseArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let chain = args.stage.chain(&mut progress)?;
    let recorded = chain.recorded(BaseStage::NAME, &mut progress)?;
    let stage = chain.base(&recorded)?;
    let (artifact, outcome) = chain.source.store.run(&stage, args.layers.clone(), &mut progress)?;
    drop(progress);
    let held = artifact.description().units_held();
    let found = Base::new(artifact)?;
    let layers = held.clone().map(|layer| found.info(layer)).collect::<Result<Vec<_>>>()?;
    if !args.stage.json {
        for (number, layer) in held.clone().zip(&layers) {
            let [gate, up] = layer.product_errors;
            let left = layer.left_over.iter();
            let left: Vec<String> =
                left.map(|l| format!("{:.0} %: {:.4}", 100.0 * l.exact_share, l.error)).collect();
            let left = left.join("  ");
            print(format!("layer {number:>3}: gate {gate:.4}  up {up:.4}  left over at {left}"))?;
        }
    }
    let share = found.resident_share();
    let text = format!("{:.2} % of the FFNs in half precision", 100.0 * share);
    let details = json!({
        "bits": found.params().bits,
        "resident_share": share,
        "first_layer": held.start,
        "layers": layers,
    });
    report(args.stage.json, found.artifact(), outcome, start.elapsed(), &text, details)
}

/// `ls-prep sparsity`.
pub(crate) fn sparsity(args: &SparsityArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let chain = args.stage.chain(&mut progress)?;
    let recorded = chain.recorded(SparsityStage::NAME, &mut progress)?;
    let (with_exact, plain) = (&chain.recipe.sparsity.bases, &chain.recipe.sparsity.uniform);
    let wanted = with_exact.iter().map(|&bits| (bits, chain.recipe.base.exact_shares.clone()));
    let wanted: Vec<_> = wanted.chain(plain.iter().map(|&bits| (bits, vec![0.0]))).collect();
    let mut bases = Vec::new();
    for (bits, exact_shares) in wanted {
        let stage = chain.base_of(&recorded, bits, &exact_shares)?;
        bases.push(Base::new(chain.source.store.run(&stage, None, &mut progress)?.0)?);
    }
    let store = &chain.source.store;
    let hash = store.find(&chain.predictor(&recorded, None, false))?;
    let hash = hash.as_ref().map(Predictors::read).transpose()?;
    let mlp = store.find(&chain.mlp(&recorded, None))?;
    let learned = Learnt { hash: hash.as_ref(), mlp: mlp.as_ref() };
    let stage = SparsityStage::new(&chain.source, &bases, learned, &args.eval, &chain.recipe)?;
    if args.list {
        drop(progress);
        let arms = stage.params().arms;
        if args.stage.json {
            return print(json!({"arms": arms}));
        }
        let line = |(number, (way, level)): (usize, &(Way, f64))| {
            print(format!("{number:>4}  {way}, {:.0} % left out", 100.0 * level))
        };
        return arms.iter().enumerate().try_for_each(line);
    }
    let (artifact, outcome) = chain.source.store.run(&stage, args.arms.clone(), &mut progress)?;
    drop(progress);
    let prices = prices(&artifact)?;
    let dense = prices.iter().find(|price| price.way == Way::Dense).map(|price| price.perplexity);
    if !args.stage.json {
        prices.iter().try_for_each(|price| print(row(price, dense)))?;
    }
    let tokens = stage.params().tokens;
    let text = format!("{tokens} tokens");
    let details = json!({"tokens": tokens, "dense_perplexity": dense, "prices": prices});
    report(args.stage.json, &artifact, outcome, start.elapsed(), &text, details)
}

pub(crate) fn row(price: &Price, dense: Option<f64>) -> String {
    let more = dense.map_or(String::new(), |dense| {
        format!(" ({:+.1} %)", 100.0 * (price.perplexity / dense - 1.0))
    });
    format!(
        "{:<14} {:>4.1} % exact  perplexity {:>9.3}{more:<12} resident {:>5.2} %  streamed {} a token  total {:>5.1} %",
        price.way.to_string(),
        100.0 * price.exact_share,
        price.perplexity,
        100.0 * price.resident_share,
        ByteCount(price.streamed_bytes),
        100.0 * price.total_share,
    )
}
