//! `ls-prep synth`.

use super::{extend, print};
use crate::terminal::TerminalProgress;
use clap::ValueEnum;
use ls_bundle::ids::ByteCount;
use ls_prep::error::Result;
use ls_prep::synth::like::{LikeOptions, Shape, like};
use ls_prep::synth::{SynthOptions, synth};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ls-prep synth --out small --layers 3 --neurons 128
  ls-prep synth --out big --like mistral-7b
  ls-prep synth --out probe --like qwen2.5-7b --layers 2";

/// Makes a model up: a small one whose neurons act in planted groups, or one with the shape of a well-known 7B.
///
/// Writes a Hugging Face folder with byte-level tokens. A small one comes with planted.json, each layer's groups of
/// neurons. One like a 7B is streamed to disk, is never in memory, and has activations much like a trained model's.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SynthArgs {
    /// Folder to write
    #[arg(long, short, value_name = "DIR")]
    out: PathBuf,
    /// Take the shape of this model
    #[arg(long, value_enum)]
    like: Option<ShapeArg>,
    /// Layers [default: 3, or the model's]
    #[arg(long)]
    layers: Option<u16>,
    /// Width of the residual stream, a multiple of 32 (128 with --like) [default: 64, or the model's]
    #[arg(long)]
    hidden: Option<u32>,
    /// Neurons of a layer [default: 128, or the model's]
    #[arg(long)]
    neurons: Option<u32>,
    /// Neurons of a planted group [default: 4]
    #[arg(long, conflicts_with = "like")]
    group: Option<u32>,
    /// Seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// With --like: only say what it will take
    #[arg(long, requires = "like")]
    estimate: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// A model whose shape is taken.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ShapeArg {
    #[value(name = "mistral-7b")]
    Mistral7b,
    #[value(name = "llama2-7b")]
    Llama2x7b,
    #[value(name = "qwen2.5-7b")]
    Qwen25x7b,
}

/// Runs the command.
pub(crate) fn run(args: &SynthArgs) -> Result<()> {
    match args.like {
        Some(shape) => run_like(args, shape),
        None => run_small(args),
    }
}

fn run_small(args: &SynthArgs) -> Result<()> {
    let default = SynthOptions::default();
    let options = SynthOptions {
        layers: args.layers.unwrap_or(default.layers),
        hidden: args.hidden.unwrap_or(default.hidden),
        neurons: args.neurons.unwrap_or(default.neurons),
        group: args.group.unwrap_or(default.group),
        seed: args.seed,
    };
    let groups = synth(&args.out, &options)?;
    let (layers, group, count) = (options.layers, options.group, groups[0].len());
    if args.json {
        return print(json!({"folder": args.out, "layers": layers, "groups_per_layer": count}));
    }
    print(format!(
        "{}: {layers} layers, {count} groups of {group} neurons in each",
        args.out.display()
    ))
}

fn run_like(args: &SynthArgs, shape: ShapeArg) -> Result<()> {
    let shape = match shape {
        ShapeArg::Mistral7b => Shape::Mistral7b,
        ShapeArg::Llama2x7b => Shape::Llama2x7b,
        ShapeArg::Qwen25x7b => Shape::Qwen25x7b,
    };
    let SynthArgs { layers, hidden, neurons, seed, .. } = *args;
    let options = LikeOptions { shape, layers, hidden, neurons, seed };
    let cost = options.cost()?;
    let billions = cost.weights as f64 / 1e9;
    let (bytes, seconds) = (ByteCount(cost.bytes), cost.seconds.max(1.0));
    let text = format!(
        "{billions:.2} billion weights, {bytes} on disk, about {seconds:.0} s or the disk's time"
    );
    let mut object = serde_json::to_value(cost).expect("a cost is plain data");
    if !args.estimate {
        eprintln!("{text}");
        let start = Instant::now();
        like(&args.out, &options, &mut TerminalProgress::new())?;
        let seconds = start.elapsed().as_secs_f64();
        extend(&mut object, json!({"folder": args.out, "seconds": seconds}));
    }
    if args.json {
        return print(object);
    }
    print(if args.estimate { text } else { format!("{}: {bytes}", args.out.display()) })
}
