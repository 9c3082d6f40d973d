//! `ls-prep report`.

use super::print;
use ls_prep::error::Result;
use ls_prep::report::{Report, table};
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
    table(&report.predictors).into_iter().try_for_each(print)?;
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
