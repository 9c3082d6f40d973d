//! `ls-run sync`: what coordination between processor and GPU costs here (paper, Table 1 and Figure 3). Flag round trips; one
//! FFN layer of a model's shape cut into stages in several ways, each checked against a plain sum before it is timed; and
//! layers with a part of their blocks in host memory.

use crate::cmd::{print_json, print_line};
use anyhow::Context;
use clap::{Args, ValueEnum};
use ls_bundle::model::DType;
use ls_cuda::bench::{Method, SyncBench, SyncOptions, copy_bandwidth, round_trip_us};
use ls_cuda::{CudaError, Device, KernelSource, Loads};
use serde_json::{Value, json};
use std::path::PathBuf;

/// `ls-run sync`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  ls-run sync
  ls-run sync --shape mistral-7b --splits 1,2,4,8,16,32 --misses 0,2,5,11,20
  ls-run sync --sms 4 --splits 1,16 --json")]
pub(crate) struct SyncArgs {
    /// Numbers of stages that a layer is cut into.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32], value_parser = clap::value_parser!(u32).range(1..=32))]
    splits: Vec<u32>,
    /// Whose layer.
    #[arg(long, value_enum, default_value = "mistral-7b")]
    shape: ShapeChoice,
    /// Share of the neurons that do not run.
    #[arg(long, value_name = "SHARE", value_parser = crate::args::parse_share, default_value = "80%")]
    sparsity: f64,
    /// Number format of the weights.
    #[arg(long, value_enum, default_value = "f16")]
    dtype: DTypeChoice,
    /// Neurons of a block.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    block: u32,
    /// Multiprocessors, to stand in for a smaller GPU. [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    sms: Option<u32>,
    /// How the kernel reads weights. [default: the device's fastest]
    #[arg(long, value_enum)]
    loads: Option<LoadsChoice>,
    /// Launch each layer behind the one before, instead of letting it begin earlier.
    #[arg(long)]
    alone: bool,
    /// Percentages of the blocks that lie in host memory and are read in place.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(0..=100))]
    misses: Vec<u32>,
    /// Repetitions; medians are told.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,
    /// Compile the kernels with the NVRTC in this folder, even where machine code is built in.
    #[arg(long, value_name = "FOLDER")]
    nvrtc: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ShapeChoice {
    #[value(name = "mistral-7b")]
    Mistral7b,
    #[value(name = "llama2-7b")]
    Llama2x7b,
    #[value(name = "qwen2.5-7b")]
    Qwen25x7b,
}

impl ShapeChoice {
    /// Width and neurons.
    fn size(self) -> (u32, u32) {
        match self {
            ShapeChoice::Mistral7b => (4096, 14336),
            ShapeChoice::Llama2x7b => (4096, 11008),
            ShapeChoice::Qwen25x7b => (3584, 18944),
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DTypeChoice {
    F16,
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q4_0")]
    Q4_0,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LoadsChoice {
    /// Threads read weights where they are.
    Plain,
    /// cp.async; compute capability 8.0.
    Async,
    /// The copy engine of the multiprocessor; 9.0.
    Bulk,
}

impl SyncArgs {
    fn options(&self, device: &Device) -> SyncOptions {
        let info = device.info();
        let (hidden, neurons) = self.shape.size();
        SyncOptions {
            hidden,
            neurons,
            sparsity: self.sparsity,
            dtype: match self.dtype {
                DTypeChoice::F16 => DType::F16,
                DTypeChoice::Q8_0 => DType::Q8_0,
                DTypeChoice::Q4_0 => DType::Q4_0,
            },
            block_neurons: self.block,
            multiprocessors: self.sms.unwrap_or(info.multiprocessors),
            loads: match self.loads {
                None => Loads::best(info.capability),
                Some(LoadsChoice::Plain) => Loads::Plain,
                Some(LoadsChoice::Async) => Loads::Async,
                Some(LoadsChoice::Bulk) => Loads::Bulk,
            },
            overlapping: !self.alone,
            reps: self.reps as usize,
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: &SyncArgs) -> anyhow::Result<()> {
    let nvrtc: Vec<PathBuf> = args.nvrtc.iter().cloned().collect();
    let device = Device::open(0, &KernelSource { compile: !nvrtc.is_empty(), nvrtc })?;
    let (name, all) = (device.info().name.clone(), device.info().multiprocessors);
    say(args, || format!("{name} ({all} multiprocessors, driver {})", device.info().driver))?;
    let trips = round_trips(args, &device, all)?;
    let options = args.options(&device);
    let layer = options.to_string();
    say(args, || format!("layer: {layer}"))?;
    let mut bench = SyncBench::new(&device, options).context("a layer on the device")?;
    let (bytes, us) = (bench.layer_bytes(), bench.back_to_back_us(0.0)?);
    let rate = bytes as f64 / us / 1e3;
    say(args, || format!("unsplit, back to back: {us:.1} us ({rate:.0} GB/s)"))?;
    let methods = splits(args, &mut bench)?;
    let misses =
        if args.misses.is_empty() { Vec::new() } else { misses(args, &device, &mut bench)? };
    if !args.json {
        return Ok(());
    }
    print_json(&json!({
        "device": name,
        "multiprocessors": all,
        "round_trips": trips,
        "layer": layer,
        "layer_bytes": bytes,
        "back_to_back_us": us,
        "methods": methods,
        "misses": misses,
    }))
}

/// For people.
fn say(args: &SyncArgs, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    if args.json { Ok(()) } else { print_line(&text()) }
}

fn round_trips(args: &SyncArgs, device: &Device, all: u32) -> anyhow::Result<Vec<Value>> {
    let ways = [
        ("one block polls", 1, false),
        ("all blocks poll the host", all, false),
        ("one forwards to all", all, true),
    ];
    let mut told = Vec::new();
    for (name, blocks, forwarder) in ways {
        let us = round_trip_us(device, blocks, forwarder)?;
        say(args, || format!("flag round trip, {name}: {us:.1} us"))?;
        told.push(json!({"way": name, "us": us}));
    }
    Ok(told)
}

/// The table of methods and numbers of stages.
fn splits(args: &SyncArgs, bench: &mut SyncBench) -> anyhow::Result<Vec<Value>> {
    let heads: String = args.splits.iter().map(|s| format!("{s:>8}")).collect();
    say(args, || format!("us by number of stages  {heads}   added a stage"))?;
    let mut told = Vec::new();
    for method in Method::ALL {
        let row: Result<Vec<f64>, CudaError> =
            args.splits.iter().map(|&stages| bench.layer_us(method, stages)).collect();
        let name = method.name();
        let row = match row {
            Ok(row) => row,
            Err(error) => {
                // A driver without one of the ways still has the others.
                say(args, || format!("{name:<24}{error}"))?;
                told.push(json!({"method": name, "error": error.to_string()}));
                continue;
            }
        };
        let cells: String = row.iter().map(|us| format!("{us:8.1}")).collect();
        let slope = match (row.first(), row.last(), args.splits.first(), args.splits.last()) {
            (Some(a), Some(b), Some(s), Some(t)) if t > s => (b - a) / f64::from(t - s),
            _ => 0.0,
        };
        say(args, || format!("{name:<24}{cells}{slope:>16.1}"))?;
        told.push(json!({
            "method": name, "stages": args.splits, "us": row, "added_us_per_stage": slope
        }));
    }
    Ok(told)
}

/// Layers with blocks in host memory.
fn misses(args: &SyncArgs, device: &Device, bench: &mut SyncBench) -> anyhow::Result<Vec<Value>> {
    let bandwidth = copy_bandwidth(device)?;
    say(args, || format!("copies from pinned memory: {:.1} GB/s", bandwidth / 1e9))?;
    let mut told = Vec::new();
    for &percent in &args.misses {
        let share = f64::from(percent) / 100.0;
        let bound = bench.missing_bytes(share) as f64 / bandwidth * 1e6;
        let (alone, row) = (bench.layer_with_misses_us(share)?, bench.back_to_back_us(share)?);
        say(args, || {
            let times =
                if percent == 0 { String::new() } else { format!(", {:.2} times", row / bound) };
            format!(
                "{percent:>3} % in host memory: {alone:.1} us alone, {row:.1} us back to back; their bytes over \
                 the bus {bound:.1} us{times}"
            )
        })?;
        told.push(json!({
            "percent": percent, "alone_us": alone, "back_to_back_us": row, "bus_us": bound
        }));
    }
    Ok(told)
}
