//! The command line.

use crate::cmd::chat::ChatArgs;
use crate::cmd::doctor::DoctorArgs;
use crate::cmd::eval::EvalCommand;
use crate::cmd::profile::{ProfileArgs, TuneArgs};
use crate::cmd::sync::SyncArgs;
use crate::system::{PolicyArgs, named};
use clap::{Args, Parser, Subcommand, ValueEnum};
use ls_bundle::ids::ByteCount;
use ls_engine::memory::Budget;
use ls_engine::sampler::SamplerOptions;
use ls_engine::system::ControllerKind;
use std::path::PathBuf;

/// Runs a language model under a hard memory budget: what does not fit is streamed from the bundle.
#[derive(Debug, Parser)]
#[command(
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  ls-run generate model.lsb -p \"The capital of France is\" --memory 96MiB
  ls-run chat model.lsb --memory 160MiB
  ls-run plan model.lsb --memory 1.5GiB
  ls-run eval perplexity model.lsb --text wiki.txt --tokens 4096

Exit codes: 0 done, 2 usage, 3 corrupt file, 4 incomplete file, 5 unsupported, 6 budget too small, 7 I/O error."
)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Continue a prompt; the text goes to stdout, statistics to stderr.
    Generate(GenerateArgs),
    /// Talk with the model; it remembers the conversation.
    Chat(ChatArgs),
    /// Say what would be resident and what streamed, and how fast that should be here.
    Plan(PlanArgs),
    /// Measure quality.
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Measure speed, memory and bytes read, beside what this machine's disk and memory allow.
    Bench(BenchArgs),
    /// Measure what plans of reading and computing cost on this device.
    Profile(ProfileArgs),
    /// The same, and make the table that such runs are controlled by.
    Tune(TuneArgs),
    /// Say what this machine offers, what a bundle will do here, and what would help.
    Doctor(DoctorArgs),
    /// Measure what coordination between processor and GPU costs here.
    Sync(SyncArgs),
    /// Print what a bundle holds.
    Inspect(FileArgs),
    /// Read all of a bundle and check every byte.
    Verify(FileArgs),
}

/// How results are accumulated and where the model runs: common to all commands that run it.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// The bundle.
    pub(crate) bundle: PathBuf,
    /// Cap on resident bytes of this process, its page cache included: 96MiB, 1.5GiB, or bytes. [default: what the
    /// machine and the control group have available, less a margin; it is printed]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with = "weight_cache")]
    pub(crate) memory: Option<ByteCount>,
    /// Budget as the paper counts it: this share of the weights resident, everything else on top (20%).
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub(crate) weight_cache: Option<f64>,
    /// Context in tokens. [default: the model's, at most 2048, lowered to what the budget allows]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) context: Option<u32>,
    /// Threads that compute. [default: the big cores that the process may use, within its quota]
    #[arg(long, short = 't', value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) threads: Option<u16>,
    /// Number format of the KV cache; q8_0 takes about half the memory of f16.
    #[arg(long, value_enum, default_value = "f16")]
    pub(crate) kv_cache: KvChoice,
    /// What computes.
    #[arg(long, value_enum, default_value = "cpu")]
    pub(crate) backend: BackendChoice,
    #[command(flatten)]
    pub(crate) policies: PolicyArgs,
    /// How the bundle is read.
    #[arg(long, value_enum, default_value = "auto", hide_short_help = true)]
    pub(crate) io: IoChoice,
    /// What a read costs beside its bytes, as bytes of a large one: sparse decode reads blocks that lie near each other together
    /// where that costs less; 0: never. [default: as this disk was measured]
    #[arg(long, value_name = "BYTES", value_parser = parse_read_cost, hide_short_help = true)]
    pub(crate) read_cost: Option<ByteCount>,
    /// When weights are held against their checksums.
    #[arg(long, value_enum, default_value = "first", hide_short_help = true)]
    pub(crate) verify: VerifyChoice,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendChoice {
    /// The processor.
    Cpu,
    /// An NVIDIA GPU, with the resident weights in its memory, or an error.
    Cuda,
    /// What an OpenCL driver offers, a GPU first, or an error.
    #[value(name = "opencl")]
    OpenCl,
    /// An NVIDIA GPU if there is one, else a GPU with an OpenCL driver, else the processor.
    Auto,
}

/// When weights are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VerifyChoice {
    /// Never.
    Never,
    /// When they are read for the first time.
    First,
    /// Whenever they are read.
    Always,
}

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvChoice {
    /// Half precision.
    F16,
    /// Eight bits and a scale for every 32 numbers.
    #[value(name = "q8_0")]
    Q8_0,
}

/// How the bundle is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IoChoice {
    /// io_uring where the kernel allows it, else a pool of threads.
    Auto,
    /// io_uring or an error.
    Uring,
    /// A pool of threads.
    Pread,
}

impl RunArgs {
    /// The model's name for others: that of the bundle's file, without its ending.
    #[must_use]
    pub fn name(&self) -> String {
        self.bundle.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The budget that the flags ask for; `available` where they say nothing.
    #[must_use]
    pub(crate) fn budget(&self, available: ByteCount) -> Budget {
        match (self.weight_cache, self.memory) {
            (Some(share), _) => Budget::WeightCache(share),
            (None, memory) => Budget::Total(memory.unwrap_or(available)),
        }
    }
}

/// `ls-run generate`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  ls-run generate model.lsb -p \"Once upon a time\" -n 200 --memory 96MiB --context 512
  cat question.txt | ls-run generate model.lsb -p - --temp 0.7 --top-p 0.9 --seed 1
  ls-run generate model.lsb -p \"2 + 2 =\" --json | jq .text")]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// The text to continue; - reads it from standard input.
    #[arg(long, short, value_name = "TEXT")]
    pub(crate) prompt: String,
    /// Most tokens to generate.
    #[arg(short, long, value_name = "N", default_value_t = 128)]
    pub(crate) n_predict: u32,
    /// Randomness; 0 always takes the most likely token.
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = parse_non_negative)]
    pub(crate) temp: f32,
    /// Choose among the K most likely tokens; 0: all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub(crate) top_k: u32,
    /// Choose among the most likely tokens that together have probability P.
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = parse_probability)]
    pub(crate) top_p: f32,
    /// Choose among tokens at least P times as likely as the most likely one.
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = parse_probability)]
    pub(crate) min_p: f32,
    /// Make recent tokens less likely; 1: no.
    #[arg(long, value_name = "R", default_value_t = 1.0, value_parser = parse_positive)]
    pub(crate) repeat_penalty: f32,
    /// Same seed, same text.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Go on behind the model's end of text.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Print the prompt before its continuation.
    #[arg(long)]
    pub(crate) echo: bool,
    /// Write what the engine did when to a file that https://ui.perfetto.dev opens.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) trace: Option<PathBuf>,
    /// Tell what sensors show while it decodes: temperature, clocks, energy a token.
    #[arg(long)]
    pub(crate) stats: bool,
    /// Print one JSON object with tokens, text and statistics instead of the text.
    #[arg(long)]
    pub(crate) json: bool,
}

impl GenerateArgs {
    /// The sampling flags.
    #[must_use]
    pub(crate) fn sampler(&self) -> SamplerOptions {
        SamplerOptions {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            seed: self.seed,
        }
    }
}

/// `ls-run plan`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  ls-run plan model.lsb --memory 1.5GiB --context 1024")]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Length of the prompt to plan for, in tokens.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub(crate) prompt_tokens: u32,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `ls-run bench`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  ls-run bench model.lsb --memory 96MiB --reps 5 --json")]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Tokens of the prompt.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) prompt_tokens: u32,
    /// Tokens to decode.
    #[arg(short, long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) n_predict: u32,
    /// Take prompt and continuation from this text, so that all systems decode the same tokens. [default: a sentence,
    /// repeated, and what the model makes of it]
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Hold what a sparse system chooses against what a dense run of the same tokens wants most, which is run first.
    #[arg(long, requires = "text")]
    pub(crate) audit: bool,
    /// Write what the engine did when to a file that https://ui.perfetto.dev opens.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) trace: Option<PathBuf>,
    /// Run each repetition with each of these controllers, by turns (one-shot,fixed,static,lut,hindsight). Hindsight plans by
    /// what the same tokens took before, and wants --text.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = named::<ControllerKind>(), conflicts_with = "controller")]
    pub(crate) controllers: Vec<ControllerKind>,
    /// Repetitions; one line each.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) reps: u32,
    /// Tell what sensors show while it decodes: temperature, clocks, energy a token.
    #[arg(long)]
    pub(crate) stats: bool,
    /// Print JSON, one object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A command on a file.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  ls-run inspect model.lsb\n  ls-run verify model.lsb --json | jq .ok"
)]
pub(crate) struct FileArgs {
    /// The bundle.
    pub(crate) bundle: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A size like 96MiB, 1.5GiB or 1000000.
pub fn parse_bytes(text: &str) -> Result<ByteCount, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "kb" => 1e3,
        "m" | "mib" => 1024.0 * 1024.0,
        "mb" => 1e6,
        "g" | "gib" => 1024.0 * 1024.0 * 1024.0,
        "gb" => 1e9,
        _ => return Err(format!("unknown unit {unit:?}; use B, KiB, MiB, GiB, kB, MB or GB")),
    };
    let number: f64 = number
        .parse()
        .map_err(|_| format!("{text:?} is not a size like 96MiB, 1.5GiB or 1000000"))?;
    let bytes = number * scale;
    if !(1.0..9e18).contains(&bytes) {
        return Err(format!("{text:?} is out of range"));
    }
    Ok(ByteCount(bytes as u64))
}

/// A size that may be 0.
fn parse_read_cost(text: &str) -> Result<ByteCount, String> {
    if text == "0" { Ok(ByteCount::ZERO) } else { parse_bytes(text) }
}

pub(crate) fn parse_share(text: &str) -> Result<f64, String> {
    let (number, scale) = text.strip_suffix('%').map_or((text, 1.0), |t| (t, 100.0));
    match number.trim().parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&(share / scale)) => Ok(share / scale),
        _ => Err(format!("{text:?} is not a share like 20% or 0.2")),
    }
}

fn parse_float(text: &str, fits: impl Fn(f32) -> bool, what: &str) -> Result<f32, String> {
    text.parse()
        .ok()
        .filter(|&x: &f32| x.is_finite() && fits(x))
        .ok_or(format!("{text:?} is not {what}"))
}

pub(crate) fn parse_non_negative(text: &str) -> Result<f32, String> {
    parse_float(text, |x| x >= 0.0, "a number of at least 0")
}

pub(crate) fn parse_positive(text: &str) -> Result<f32, String> {
    parse_float(text, |x| x > 0.0, "a number above 0")
}

pub(crate) fn parse_probability(text: &str) -> Result<f32, String> {
    parse_float(text, |x| (0.0..=1.0).contains(&x), "a probability between 0 and 1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_bytes("96MiB"), Ok(ByteCount::mib(96)));
        assert_eq!(parse_bytes("1.5GiB"), Ok(ByteCount::mib(1536)));
        assert_eq!(parse_bytes("64M"), Ok(ByteCount::mib(64)));
        assert_eq!(parse_bytes("123456"), Ok(ByteCount(123_456)));
        assert_eq!(parse_bytes("2GB"), Ok(ByteCount(2_000_000_000)));
        for bad in ["", "MiB", "-3", "12 parsecs", "1e300GiB", "0", "nan"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn shares() {
        assert_eq!(parse_share("20%"), Ok(0.2));
        assert_eq!(parse_share("0.2"), Ok(0.2));
        for bad in ["120%", "2", "-1%", "x", "nan"] {
            assert!(parse_share(bad).is_err(), "{bad}");
        }
    }
}
