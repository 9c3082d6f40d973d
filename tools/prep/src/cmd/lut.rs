//! `ls-prep lut`: from a device's profile to its table.

use super::print;
use ls_bundle::Bundle;
use ls_control::profile::DeviceProfile;
use ls_control::synthesis::{Options, Report, synthesize};
use ls_control::{CoordinationPlan, Lut, Target};
use ls_prep::error::{PrepError, Result};
use ls_prep::recipe::Recipe;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ls-prep lut --profile device.lsp --out model.lut
  ls-prep lut --profile device.lsp --bundle model.lsb --json | jq .error";

/// Makes the controller's table of what `ls-run profile` measured on a device.
///
/// The table lies in a file of its own beside the bundle, as it is for one device. Prints how well the model of a layer
/// tells plans that it was not fitted to, and what it expects of the table beside plans that do not change.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LutArgs {
    /// Profile of the device
    #[arg(long, value_name = "FILE.lsp")]
    profile: PathBuf,
    /// Table to write; an existing one is replaced [default: the profile's name with .lut]
    #[arg(long, short, value_name = "FILE.lut")]
    out: Option<PathBuf>,
    /// Bundle that the profile must be of
    #[arg(long, value_name = "FILE.lsb")]
    bundle: Option<PathBuf>,
    /// tiny, quick, full, widened, or a TOML file
    #[arg(long, value_name = "RECIPE", default_value = "full")]
    recipe: String,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &LutArgs) -> Result<()> {
    let start = Instant::now();
    let recipe = Recipe::load(&args.recipe)?;
    let profile = DeviceProfile::open(&args.profile)?;
    if profile.visits.is_empty() {
        let problem = "no visit of a layer was measured";
        return Err(PrepError::incomplete(args.profile.display(), problem));
    }
    if let Some(path) = &args.bundle {
        let bundle = Target::fingerprint(&Bundle::open(path)?);
        if bundle != profile.target.bundle {
            let problem = format!("profile of another bundle than {}", path.display());
            return Err(PrepError::unsupported(problem));
        }
    }
    let options = options(&recipe);
    let (lut, report) = synthesize(&profile, &options).lut();
    let out = args.out.clone().unwrap_or_else(|| args.profile.with_extension("lut"));
    lut.save(&out)?;
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        let mut object = told(&lut, &report);
        object["lut"] = json!(out);
        object["visits"] = profile.visits.len().into();
        object["seconds"] = seconds.into();
        return print(object);
    }
    let plans = lut.plans();
    print(format!("{}: {} layers, {plans} plans, {seconds:.1} s", out.display(), lut.layers()))?;
    print(text(&lut, &report, profile.visits.len()))
}

/// What the recipe's section says.
fn options(recipe: &Recipe) -> Options {
    let lut = &recipe.lut;
    let known = |side: &[u8]| side.iter().all(|frequency| lut.frequencies.contains(frequency));
    let all = CoordinationPlan::all().filter(|plan| known(&plan.compute) && known(&plan.io));
    Options {
        horizon: lut.horizon,
        samples: lut.samples as usize,
        significance: lut.significance,
        actions: std::iter::once(CoordinationPlan::ONE_SHOT).chain(all).collect(),
    }
}

fn text(lut: &Lut, report: &Report, visits: usize) -> String {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let error = &report.error;
    let [plan, class, bin, layer] = report.rows;
    let best = lut.best_static().0;
    [
        format!(
            "model: median error {} of a layer's time ({} configurations it had not seen; \
             loading {}, computing {}; single visits {})",
            percent(error.total),
            error.configurations,
            percent(error.first),
            percent(error.second),
            percent(error.total_of_visits),
        ),
        format!(
            "distributions: {visits} visits; {plan} of a plan's own, {class} of plans that look as \
             often, {bin} of bins of residual work, {layer} of these share their layer's",
        ),
        format!(
            "plans: {} of {} choices dropped by dominance; {} states are worth more than others \
             with less to load",
            percent(report.dropped as f64 / report.choices.max(1) as f64),
            report.choices,
            report.unordered,
        ),
        format!(
            "expected ms a token, without what no plan changes: one shot {:.3}, fixed {:.3}, best \
             static {:.3} ({:?} computing, {:?} loading), table {:.3}",
            report.one_shot_us / 1e3,
            report.fixed_us / 1e3,
            report.static_us / 1e3,
            best.compute,
            best.io,
            report.lut_us / 1e3,
        ),
    ]
    .join("\n")
}

fn told(lut: &Lut, report: &Report) -> Value {
    let best = lut.best_static().0;
    let [plan, class, bin, layer] = report.rows;
    json!({
        "layers": lut.layers(),
        "plans": lut.plans(),
        "horizon": lut.horizon(),
        "target": {
            "device": lut.target().device,
            "settings": lut.target().settings,
            "bundle": format!("{:016x}", lut.target().bundle),
        },
        "error": report.error,
        "distributions": { "plan": plan, "class": class, "bin": bin, "layer": layer },
        "choices": report.choices,
        "dropped": report.dropped,
        "unordered": report.unordered,
        "best_static": { "compute": best.compute, "io": best.io },
        "expected_us": {
            "one_shot": report.one_shot_us,
            "fixed": report.fixed_us,
            "static": report.static_us,
            "lut": report.lut_us,
        },
    })
}
