//! `ls-run`: the runtime's command line, and as a library what other programs share with it: [`args::RunArgs`] and
//! [`session::Session`], from flags to an open engine; [`answer::Speaker`], from prompts to answers.
#![forbid(unsafe_code)]

mod accelerator;
pub mod answer;
pub mod args;
mod cmd;
mod disk;
pub mod exit;
mod host;
mod likelihood;
mod progress;
pub mod session;
mod system;
mod trace;
mod tuning;

pub use cmd::eval::{EvalFile, check_eval_file};
pub use cmd::plan_json;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use exit::Exit;
use std::process::ExitCode;

/// The description of its command line, for manuals and completions.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// What the program does.
#[must_use]
pub fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Generate(args) => cmd::generate::run(&args),
        Command::Chat(args) => cmd::chat::run(&args),
        Command::Plan(args) => cmd::plan::run(&args),
        Command::Eval(command) => cmd::eval::run(&command),
        Command::Bench(args) => cmd::bench::run(&args),
        Command::Profile(args) => cmd::profile::run(&args),
        Command::Tune(args) => cmd::profile::tune(&args),
        Command::Doctor(args) => cmd::doctor::run(&args),
        Command::Sync(args) => cmd::sync::run(&args),
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
