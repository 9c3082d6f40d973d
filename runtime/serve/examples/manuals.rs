//! Writes man pages and shell completions of `ls-run` and `ls-serve`: `cargo run -p ls-serve --example manuals FOLDER`.
//! An example, so that no program on a device carries what writes them.

#[path = "../src/args.rs"]
mod args;

use clap::CommandFactory;
use clap_complete::Shell;
use std::io::Result;
use std::path::Path;

fn main() -> Result<()> {
    let folder = std::env::args_os().nth(1).unwrap_or_else(|| "manuals".into());
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder)?;
    for (name, mut command) in
        [("ls-run", ls_run::command()), ("ls-serve", args::ServeArgs::command().name("ls-serve"))]
    {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            clap_complete::generate_to(shell, &mut command, name, folder)?;
        }
        // A page for the program and one for each of its commands.
        clap_mangen::generate_to(command.disable_help_subcommand(true), folder)?;
    }
    Ok(())
}
