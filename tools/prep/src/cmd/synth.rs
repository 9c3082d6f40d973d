//! `ls-prep synth`.

use super::print;
use ls_prep::error::Result;
use ls_prep::synth::{SynthOptions, synth};
use serde_json::json;
use std::path::PathBuf;

/// Makes a small model whose neurons act in planted groups, to test what looks for such groups.
///
/// Writes a Hugging Face folder with byte-level tokens, and planted.json with each layer's groups of neurons.
#[derive(Debug, clap::Args)]
pub(crate) struct SynthArgs {
    /// Folder to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Layers
    #[arg(long, default_value_t = 3)]
    layers: u16,
    /// Width of the residual stream, a multiple of 32
    #[arg(long, default_value_t = 64)]
    hidden: u32,
    /// Neurons of a layer
    #[arg(long, default_value_t = 128)]
    neurons: u32,
    /// Neurons of a planted group
    #[arg(long, default_value_t = 4)]
    group: u32,
    /// Seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &SynthArgs) -> Result<()> {
    let SynthArgs { layers, hidden, neurons, group, seed, .. } = *args;
    let groups = synth(&args.out, &SynthOptions { layers, hidden, neurons, group, seed })?;
    let count = groups[0].len();
    if args.json {
        return print(json!({"folder": args.out, "layers": layers, "groups_per_layer": count}));
    }
    print(format!(
        "{}: {layers} layers, {count} groups of {group} neurons in each",
        args.out.display()
    ))
}
