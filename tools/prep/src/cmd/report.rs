//! `ls-prep report`.

use super::print;
use ls_prep::error::Result;
use ls_prep::report::Report;
use std::path::PathBuf;

/// Prints what is known of a bundle's preparation: predictors, orders, caches, prices.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  ls-prep report model.lsb --json | jq .predictors")]
pub(crate) struct ReportArgs {
    /// A bundle of `ls-prep all`
    bundle: PathBuf,
    /// Folder of the artifacts; each model has one inside
    #[arg(long, value_name = "DIR", default_value = "artifacts")]
    artifacts: PathBuf,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &ReportArgs) -> Result<()> {
    let report = Report::of(&args.bundle, &args.artifacts)?;
    if args.json {
        return print(serde_json::to_string(&report).expect("plain data"));
    }
    print(format!("{}, from {} artifacts", report.model, report.made_of.len()))?;
    print(
        "predictor            block  imp20  top10  red95  stale   bytes a layer (7B)     us (7B)",
    )?;
    for row in &report.predictors {
        let time = row.microseconds.map_or("-".to_owned(), |us| format!("{us:.1}"));
        print(format!(
            "{:<20} {:>5}  {:.3}  {:.3}  {:.3}  {:.3}  {:>12}  {time:>16}",
            row.name,
            row.block,
            row.imp20,
            row.top10,
            row.red95,
            row.imp20_stale,
            row.bytes_per_layer,
        ))?;
    }
    for (layer, placed) in report.placement.iter().enumerate() {
        let of =
            |m: &ls_prep::stages::placement::Measured| format!("{} {:.3}", m.method, m.redundancy);
        let measured: Vec<String> = placed.measured.iter().map(of).collect();
        print(format!("layer {layer:>3}: {} ({})", placed.chosen, measured.join("  ")))?;
    }
    if let Some(share) = report.base_resident_share {
        print(format!("base: {:.2} % of the FFNs in half precision", 100.0 * share))?;
    }
    for line in report.guard.iter().flat_map(super::guard::lines) {
        print(line)?;
    }
    report.prices.iter().try_for_each(|price| print(super::base::row(price, None)))
}
