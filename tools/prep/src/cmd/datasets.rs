//! `ls-prep datasets`.

use super::print;
use ls_bundle::ids::ByteCount;
use ls_prep::datasets::{fetch, manifests};
use ls_prep::error::Result;
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
}

/// Puts the texts that manifests describe into datasets/text.
///
/// Texts of Debian packages are downloaded by apt-get and unpacked by dpkg, without being installed; those of other
/// sources are checked if they are there. What is there is kept.
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

/// Runs the command.
pub(crate) fn run(args: &DatasetsArgs) -> Result<()> {
    let DatasetsCommand::Fetch(args) = &args.command;
    let mut all = Vec::new();
    for manifest in manifests(&args.dir)? {
        let fetched = fetch(&args.dir, &manifest, args.packages.as_deref())?;
        if !args.json {
            let note =
                if fetched.note.is_empty() { String::new() } else { format!(": {}", fetched.note) };
            let (name, bytes) = (&fetched.name, ByteCount(fetched.bytes));
            print(format!("{name:<22} {:<12} {bytes}{note}", fetched.outcome))?;
        }
        all.push(fetched);
    }
    if args.json { print(json!({"texts": all})) } else { Ok(()) }
}
