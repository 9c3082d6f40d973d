//! `ls-fuzz`: see the library.

use clap::Parser;
use ls_fuzz::campaign::{self, Options};
use ls_fuzz::target::{Session, TARGETS, Target};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Feeds hostile bytes to everything that reads what others wrote.
#[derive(Debug, Parser)]
struct Args {
    /// Minutes to run
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// Inputs after which to end
    #[arg(long, default_value_t = u64::MAX)]
    executions: u64,
    /// Threads
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Targets; all if none is named
    #[arg(long = "target", value_name = "NAME")]
    targets: Vec<String>,
    /// Number of the first input; by the clock if not given, so that each run sees others
    #[arg(long, value_name = "N")]
    first_seed: Option<u64>,
    /// Folder for inputs that break a promise
    #[arg(long, value_name = "FOLDER", default_value = "target/fuzz")]
    findings: PathBuf,
    /// Runs one such input again
    #[arg(long, value_name = "FILE", exclusive = true)]
    replay: Option<PathBuf>,
    /// Lists the targets
    #[arg(long, exclusive = true)]
    list: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let result = if args.list {
        TARGETS
            .iter()
            .try_for_each(|target| print(&format!("{:<18} {}\n", target.name, target.reads)))
    } else if let Some(finding) = &args.replay {
        replay(finding)
    } else {
        run(&args)
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("ls-fuzz: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn print(text: &str) -> Result<(), String> {
    std::io::stdout().write_all(text.as_bytes()).map_err(|error| error.to_string())
}

fn named(names: &[String]) -> Result<Vec<Target>, String> {
    if names.is_empty() {
        return Ok(TARGETS.to_vec());
    }
    let find = |name: &String| TARGETS.iter().find(|target| target.name == name).copied();
    names
        .iter()
        .map(|name| find(name).ok_or_else(|| format!("there is no target {name}")))
        .collect()
}

fn run(args: &Args) -> Result<(), String> {
    for note in campaign::notes_of_the_last_run(&args.findings) {
        eprintln!("the last run ended within (target, first input, inputs): {note}");
    }
    // Runs begin at least a million inputs apart a second.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let first_seed = args.first_seed.unwrap_or(now.as_secs() << 20);
    let options = Options {
        time: Duration::from_secs_f64(60.0 * args.minutes),
        executions: args.executions,
        threads: args.threads.max(1),
        targets: named(&args.targets)?,
        first_seed,
        findings: args.findings.clone(),
    };
    eprintln!("inputs from number {first_seed} on; findings go to {}", args.findings.display());
    let started = Instant::now();
    let tallies =
        campaign::run(&options).map_err(|e| format!("{}: {e}", args.findings.display()))?;
    print(&campaign::table(&options.targets, &tallies))?;
    print(&format!("{}\n", campaign::summary(&tallies, started.elapsed())))?;
    match tallies.iter().map(|tally| tally.findings).sum() {
        0u64 => Ok(()),
        findings => Err(format!("{findings} inputs broke a promise")),
    }
}

fn replay(finding: &Path) -> Result<(), String> {
    let target =
        campaign::target_of(finding).ok_or("the file's name does not start with a target's")?;
    let input = std::fs::read(finding).map_err(|error| error.to_string())?;
    let outcome = Session::new(target).execute(&input);
    print(&format!("{outcome:?}\n"))?;
    outcome.fault().map_or(Ok(()), Err)
}
