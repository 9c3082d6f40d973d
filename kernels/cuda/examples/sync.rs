//! What coordination costs here: `cargo run --release -p ls-cuda --example sync -- --splits 1,2,4,8,16,32 [--sms 4]`.
//!
//! Flag round trips; one FFN layer of a model's shape, cut into stages in several ways, each checked against a plain sum;
//! layers with a part of their blocks in pinned host memory.
#![expect(clippy::print_stdout, reason = "its output is a table")]

use ls_bundle::model::DType;
use ls_cuda::bench::{Method, SyncBench, SyncOptions, copy_bandwidth, round_trip_us};
use ls_cuda::{CudaError, Device, KernelSource, Loads};

const USAGE: &str = "sync [--splits 1,2,4,8,16,32] [--shape mistral-7b|llama2-7b|qwen2.5-7b] [--sms N] [--reps N]
     [--dtype f16|q8_0|q4_0] [--block N] [--loads plain|async|bulk] [--misses 0,2,5,11,20] [--launch alone] [--nvrtc FOLDER]";

fn main() {
    if let Err(error) = run() {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

/// Value of a flag.
fn flag(name: &str) -> Option<String> {
    let mut args = std::env::args().skip_while(|arg| arg != name);
    args.next()?;
    args.next()
}

fn number<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = flag(name)?;
    text.parse().ok().or_else(usage)
}

fn numbers(name: &str, default: &str) -> Vec<u32> {
    let text = flag(name).unwrap_or(default.into());
    text.split(',').map(|n| n.parse().ok().unwrap_or_else(usage)).collect()
}

fn usage<T>() -> T {
    eprintln!("usage: {USAGE}");
    std::process::exit(2);
}

fn run() -> Result<(), CudaError> {
    let source = KernelSource {
        compile: flag("--nvrtc").is_some(),
        nvrtc: flag("--nvrtc").into_iter().map(Into::into).collect(),
    };
    let device = Device::open(0, &source)?;
    let info = device.info();
    let all = info.multiprocessors;
    println!("{} ({all} multiprocessors, driver {})", info.name, info.driver);
    for (name, blocks, forwarder) in [
        ("one block polls", 1, false),
        ("all blocks poll the host", all, false),
        ("one forwards to all", all, true),
    ] {
        println!("flag round trip, {name}: {:.1} us", round_trip_us(&device, blocks, forwarder)?);
    }
    let options = options(&device);
    println!("layer: {options}");
    let mut bench = SyncBench::new(&device, options)?;
    let bytes = bench.layer_bytes();
    let us = bench.back_to_back_us(0.0)?;
    println!("unsplit, back to back: {us:.1} us ({:.0} GB/s)", bytes as f64 / us / 1e3);
    splits(&mut bench);
    if flag("--misses").is_some() {
        misses(&device, &mut bench)?;
    }
    Ok(())
}

/// What is measured.
fn options(device: &Device) -> SyncOptions {
    let info = device.info();
    let (hidden, neurons) = match flag("--shape").as_deref() {
        None | Some("mistral-7b") => (4096, 14336),
        Some("llama2-7b") => (4096, 11008),
        Some("qwen2.5-7b") => (3584, 18944),
        _ => usage(),
    };
    SyncOptions {
        hidden,
        neurons,
        sparsity: 0.8,
        dtype: match flag("--dtype").as_deref() {
            None | Some("f16") => DType::F16,
            Some("q8_0") => DType::Q8_0,
            Some("q4_0") => DType::Q4_0,
            _ => usage(),
        },
        block_neurons: number("--block").unwrap_or(2),
        multiprocessors: number("--sms").unwrap_or(info.multiprocessors),
        loads: match flag("--loads").as_deref() {
            None => Loads::best(info.capability),
            Some("plain") => Loads::Plain,
            Some("async") => Loads::Async,
            Some("bulk") => Loads::Bulk,
            _ => usage(),
        },
        overlapping: flag("--launch").as_deref() != Some("alone"),
        reps: number("--reps").unwrap_or(100),
    }
}

/// The table of methods and numbers of stages.
fn splits(bench: &mut SyncBench) {
    let splits = numbers("--splits", "1,2,4,8,16,32");
    let heads: String = splits.iter().map(|s| format!("{s:>8}")).collect();
    println!("us by number of stages  {heads}   added a stage");
    for method in Method::ALL {
        let mut row = Vec::new();
        for &stages in &splits {
            match bench.layer_us(method, stages) {
                Ok(us) => row.push(us),
                Err(error) => {
                    println!("{}: {error}", method.name());
                    break;
                }
            }
        }
        let cells: String = row.iter().map(|us| format!("{us:8.1}")).collect();
        let slope = match (row.first(), row.last(), splits.first(), splits.last()) {
            (Some(a), Some(b), Some(s), Some(t)) if t > s => (b - a) / f64::from(t - s),
            _ => 0.0,
        };
        println!("{:<24}{cells}{slope:>16.1}", method.name());
    }
}

/// Layers with blocks in host memory.
fn misses(device: &Device, bench: &mut SyncBench) -> Result<(), CudaError> {
    let bandwidth = copy_bandwidth(device)?;
    println!("copies from pinned memory: {:.1} GB/s", bandwidth / 1e9);
    for percent in numbers("--misses", "") {
        let share = f64::from(percent) / 100.0;
        let bound = bench.missing_bytes(share) as f64 / bandwidth * 1e6;
        let (alone, row) = (bench.layer_with_misses_us(share)?, bench.back_to_back_us(share)?);
        let ratio = row / bound;
        println!(
            "{percent:>3} % in host memory: {alone:.1} us alone, {row:.1} us back to back; their bytes over the \
                 bus {bound:.1} us, {ratio:.2} times"
        );
    }
    Ok(())
}
