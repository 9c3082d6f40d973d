//! `ls-run`: the runtime's command line.
#![forbid(unsafe_code)]

mod args;
mod cmd;
mod disk;
mod exit;
mod progress;
mod session;
mod system;

use args::{Cli, Command, EvalCommand};
use clap::Parser;
use exit::Exit;
use std::process::ExitCode;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Generate(args) => cmd::generate::run(&args),
        Command::Plan(args) => cmd::plan::run(&args),
        Command::Eval(EvalCommand::Perplexity(args)) => cmd::eval::perplexity(&args),
        Command::Bench(args) => cmd::bench::run(&args),
        Command::Inspect(args) => cmd::inspect::run(&args),
        Command::Verify(args) => cmd::verify::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ls-run: {error:#}");
            ExitCode::from(Exit::of(&error) as u8)
        }
    }
}

/// Whoever read our output has seen enough.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
