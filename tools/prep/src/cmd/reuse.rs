//! `ls-prep reuse`.

use super::print;
use super::stages::{StageArgs, parse_range, report};
use crate::terminal::TerminalProgress;
use ls_prep::error::Result;
use ls_prep::stage::Stage;
use ls_prep::stages::reuse::{Ratios, Reuse, ReuseStage, Row};
use serde_json::{Value, json};
use std::ops::Range;
use std::time::Instant;

/// Learns when blocks are wanted again, and replays held-out requests with every policy.
#[derive(Debug, clap::Args)]
pub(crate) struct ReuseArgs {
    #[command(flatten)]
    stage: StageArgs,
    /// Only these layers: A..B, without B
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    layers: Option<Range<u32>>,
}

/// `ls-prep reuse`.
pub(crate) fn reuse(args: &ReuseArgs) -> Result<()> {
    let start = Instant::now();
    let mut progress = TerminalProgress::new();
    let chain = args.stage.chain(&mut progress)?;
    let store = &chain.source.store;
    let recorded = chain.recorded(ReuseStage::NAME, &mut progress)?;
    let placement = chain.placed(&recorded, ReuseStage::NAME)?;
    let stage = chain.reuse(&recorded, &placement);
    let (artifact, outcome) = store.run(&stage, args.layers.clone(), &mut progress)?;
    drop(progress);
    let found = Reuse::read(&artifact)?;
    let means = found.means();
    if !args.stage.json {
        for ratios in &means {
            print(table(ratios, &found.capacities))?;
        }
        for biased in found.mean_biased() {
            let pairs = biased.hits.iter().zip(&biased.importance);
            let text: Vec<String> =
                pairs.map(|(hits, kept)| format!("{hits:.4} ({kept:.4})")).collect();
            let octaves = biased.octaves;
            print(format!("cached +{octaves} octaves, hits (importance): {}", text.join(" ")))?;
        }
    }
    let chosen = found.layers.iter().filter(|layer| layer.chosen == "hazard").count();
    let text = format!("hazard chosen in {chosen} of {} layers", found.layers.len());
    let details = json!({
        "first_layer": found.first_layer,
        "capacities": found.capacities,
        "hits": "demand only: nothing is prefetched",
        "means": means.iter().map(with_gaps).collect::<Vec<_>>(),
        "biased": found.mean_biased(),
        "layers": found.layers,
    });
    report(args.stage.json, &artifact, outcome, start.elapsed(), &text, details)
}

/// Hit ratios, and the share of the gap between LRU and Belady that each policy closes.
fn table(ratios: &Ratios, capacities: &[f64]) -> String {
    let (block, tokens) = (ratios.block_neurons, ratios.tokens);
    let shares: Vec<String> = capacities.iter().map(|c| format!("{:.1} %", 100.0 * c)).collect();
    let mut text = format!(
        "demand hits, {tokens} tokens, blocks of {block}, {} of a layer's blocks kept (of the gap between LRU and \
         Belady)",
        shares.join(", ")
    );
    for row in &ratios.rows {
        text += &format!("\n  {:<26}", row.policy);
        for (hits, closed) in row.hits.iter().zip(ratios.gap_closed(row)) {
            text += &format!(" {hits:.4} ({:3.0} %)", 100.0 * closed);
        }
    }
    text
}

fn with_gaps(ratios: &Ratios) -> Value {
    let row = |row: &Row| json!({"policy": row.policy, "hits": row.hits, "gap_closed": ratios.gap_closed(row)});
    json!({
        "block_neurons": ratios.block_neurons,
        "tokens": ratios.tokens,
        "requests": ratios.requests,
        "rows": ratios.rows.iter().map(row).collect::<Vec<_>>(),
    })
}
