//! `ls-prep datasets`.

use super::print;
use ls_bundle::ids::ByteCount;
use ls_prep::datasets::{Fetched, fetch, import, manifests};
use ls_prep::error::{PrepError, Result};
use serde_json::json;
use std::path::PathBuf;

/// Text for calibration and evaluation
#[derive(Debug, clap::Args)]
pub(crate) struct DatasetsArgs {
    #[command(subcommand)]
    command: DatasetsCommand,
}

#[derive(Debug, clap::Subcommand)]
enum DatasetsCommand {
    Fetch(FetchArgs),
    Import(ImportArgs),
}

/// Puts the texts that manifests describe into datasets/text.
///
/// Texts of Debian packages are downloaded by apt-get and unpacked by dpkg, without being installed; those with an
/// address by curl; those of other sources are checked if they are there. What is there is kept. What cannot be
/// reached is named, with what to do.
#[derive(Debug, clap::Args)]
struct FetchArgs {
    /// Folder with manifests/
    #[arg(long, value_name = "DIR", default_value = "datasets")]
    dir: PathBuf,
    /// Folder with .deb files to take instead of downloading
    #[arg(long, value_name = "DIR")]
    packages: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Puts a file that you have into datasets/text, under the name of a manifest, if it is what the manifest says.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  ls-prep datasets import truthfulqa ~/Downloads/TruthfulQA.csv")]
struct ImportArgs {
    /// Name of a manifest
    name: String,
    /// The file
    file: PathBuf,
    /// Folder with manifests/
    #[arg(long, value_name = "DIR", default_value = "datasets")]
    dir: PathBuf,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &DatasetsArgs) -> Result<()> {
    match &args.command {
        DatasetsCommand::Fetch(args) => run_fetch(args),
        DatasetsCommand::Import(args) => run_import(args),
    }
}

fn run_fetch(args: &FetchArgs) -> Result<()> {
    let mut all = Vec::new();
    for manifest in manifests(&args.dir)? {
        let fetched = fetch(&args.dir, &manifest, args.packages.as_deref())?;
        if !args.json {
            tell(&fetched)?;
        }
        all.push(fetched);
    }
    if args.json { print(json!({"texts": all})) } else { Ok(()) }
}

fn run_import(args: &ImportArgs) -> Result<()> {
    let all = manifests(&args.dir)?;
    let Some(manifest) = all.iter().find(|manifest| manifest.name == args.name) else {
        let names: Vec<&str> = all.iter().map(|manifest| manifest.name.as_str()).collect();
        let (name, names) = (&args.name, names.join(", "));
        return Err(PrepError::usage(format!("no manifest {name:?}; there are {names}")));
    };
    let imported = import(&args.dir, manifest, &args.file)?;
    if args.json { print(json!({"texts": [imported]})) } else { tell(&imported) }
}

fn tell(fetched: &Fetched) -> Result<()> {
    let note = if fetched.note.is_empty() { String::new() } else { format!(": {}", fetched.note) };
    let (name, bytes) = (&fetched.name, ByteCount(fetched.bytes));
    print(format!("{name:<22} {:<12} {bytes}{note}", fetched.outcome))
}
