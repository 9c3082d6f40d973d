//! `ls-prep`: the command line of the preparation tools. Results go to stdout, everything else to stderr.

#![forbid(unsafe_code)]

mod args;
mod cmd;
mod terminal;

use args::{Args, Command, ImportArgs};
use clap::{CommandFactory, Parser};
use clap_complete::Shell;
use ls_bundle::ids::ByteCount;
use ls_prep::device;
use ls_prep::error::{PrepError, Result};
use ls_prep::exit::Exit;
use ls_prep::import::{Calibration, ImportOptions, ImportReport, import};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;
use terminal::TerminalProgress;

fn main() -> ExitCode {
    // Wrong arguments end here with clap's message and code 2, which is `Exit::Usage`.
    let args = Args::parse();
    match device::choose(args.device.into()).and_then(|()| run(args.command)) {
        Ok(()) => Exit::Ok.into(),
        Err(error) => {
            eprintln!("ls-prep: {error}");
            error.exit().into()
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Import(args) => run_import(args),
        Command::All(args) => cmd::all::run(&args),
        Command::Prompts(args) => cmd::stages::prompts(&args),
        Command::Activations(args) => cmd::stages::activations(&args),
        Command::Embedding(args) => cmd::stages::embedding(&args),
        Command::Placement(args) => cmd::stages::placement(&args),
        Command::Predictor(args) => cmd::predictor::predictor(&args),
        Command::Mlp(args) => cmd::predictor::mlp(&args),
        Command::Compare(args) => cmd::compare::run(&args),
        Command::Base(args) => cmd::base::base(&args),
        Command::Sparsity(args) => cmd::base::sparsity(&args),
        Command::Guard(args) => cmd::guard::run(&args),
        Command::Projection(args) => cmd::stages::projection(&args),
        Command::Reuse(args) => cmd::reuse::reuse(&args),
        Command::Report(args) => cmd::report::run(&args),
        Command::Lut(args) => cmd::lut::run(&args),
        Command::Merge(args) => cmd::stages::merge_parts(&args),
        Command::Status(args) => cmd::stages::status(&args),
        Command::Recipe(args) => cmd::stages::recipe(&args),
        Command::Datasets(args) => cmd::datasets::run(&args),
        Command::Paper(args) => cmd::paper::run(&args),
        Command::Synth(args) => cmd::synth::run(&args),
        Command::Manuals { folder } => manuals(&folder),
    }
}

fn manuals(folder: &Path) -> Result<()> {
    let write = || -> std::io::Result<()> {
        std::fs::create_dir_all(folder)?;
        let mut command = Args::command();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            clap_complete::generate_to(shell, &mut command, "ls-prep", folder)?;
        }
        clap_mangen::generate_to(command.disable_help_subcommand(true), folder)
    };
    write().map_err(|source| PrepError::io(folder, source))
}

/// Tokens of a window of calibration text, as in the recipes.
const CALIBRATION_WINDOW: u32 = 512;

fn run_import(args: ImportArgs) -> Result<()> {
    let start = Instant::now();
    let types = args.types();
    let calibration = Calibration {
        texts: args.calibration,
        tokens: args.calibration_tokens,
        window: CALIBRATION_WINDOW,
    };
    let options = ImportOptions {
        source: args.model,
        out: args.out,
        types,
        block_neurons: args.block_neurons,
        calibration: (!calibration.texts.is_empty()).then_some(calibration),
        seed: args.seed,
    };
    let report = import(&options, &mut TerminalProgress::new())?;
    let seconds = start.elapsed().as_secs_f64();
    let text = if args.json { json_line(&report, seconds) } else { summary(&report, seconds) };
    let written = writeln!(std::io::stdout(), "{text}");
    written.map_err(|source| PrepError::io(Path::new("standard output"), source))
}

fn summary(report: &ImportReport, seconds: f64) -> String {
    let padding =
        100.0 * report.padding_bytes as f64 / (report.weight_bytes + report.padding_bytes) as f64;
    let mut text = format!(
        "{}: {}\n{}, {} blocks, {padding:.3} % padding, {seconds:.1} s",
        report.bundle.display(),
        report.model,
        ByteCount(report.bundle_bytes),
        report.blocks,
    );
    if let Some(peak_bytes) = peak_rss_bytes() {
        text += &format!(", peak memory {}", ByteCount(peak_bytes));
    }
    text
}

fn json_line(report: &ImportReport, seconds: f64) -> String {
    let mut object = serde_json::to_value(report).expect("a report is plain data");
    object["seconds"] = seconds.into();
    object["peak_rss_bytes"] = peak_rss_bytes().into();
    object.to_string()
}

/// The most memory that this process has held, where the system tells.
fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}
