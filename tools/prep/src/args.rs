//! The command line.

use crate::cmd::all::AllArgs;
use crate::cmd::base::{BaseArgs, SparsityArgs};
use crate::cmd::compare::CompareArgs;
use crate::cmd::datasets::DatasetsArgs;
use crate::cmd::guard::GuardArgs;
use crate::cmd::lut::LutArgs;
use crate::cmd::paper::PaperArgs;
use crate::cmd::predictor::{MlpArgs, PredictorArgs};
use crate::cmd::report::ReportArgs;
use crate::cmd::reuse::ReuseArgs;
use crate::cmd::stages::{ActivationsArgs, LayersArgs, MergeArgs, RecipeArgs, StageArgs};
use crate::cmd::synth::SynthArgs;
use clap::{Parser, Subcommand, ValueEnum};
use ls_bundle::model::{DType, WeightTypes};
use ls_prep::device::Choice;
use std::path::PathBuf;

const EXIT_CODES: &str =
    "Exit codes: 0 done, 2 usage, 3 corrupt input, 4 incomplete input, 5 unsupported, 7 I/O error";

/// Prepares models for LeanStream.
#[derive(Debug, Parser)]
#[command(name = "ls-prep", version, after_help = EXIT_CODES)]
pub(crate) struct Args {
    /// What to compute on: a card makes learning and measuring much faster, needs a build with the feature `cuda`, and
    /// makes artifacts of its own [default: auto in such a build, else cpu]
    #[arg(long, value_enum, global = true, hide_default_value = true, default_value_t)]
    pub(crate) device: DeviceArg,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Import(ImportArgs),
    All(AllArgs),
    /// Takes windows of tokens from calibration text
    Prompts(StageArgs),
    Activations(ActivationsArgs),
    Predictor(PredictorArgs),
    Mlp(MlpArgs),
    Compare(CompareArgs),
    Base(BaseArgs),
    Sparsity(SparsityArgs),
    Guard(GuardArgs),
    /// Fits a vector for each neuron, near those of the neurons that it acts together with
    Embedding(LayersArgs),
    /// Orders each layer's neurons so that those that act together share blocks, and measures what that saves
    Placement(LayersArgs),
    /// Finds the directions in which each layer's residuals differ most
    Projection(LayersArgs),
    Reuse(ReuseArgs),
    Lut(LutArgs),
    Merge(MergeArgs),
    Report(ReportArgs),
    /// Tells how far each stage has come
    Status(StageArgs),
    Recipe(RecipeArgs),
    Datasets(DatasetsArgs),
    Paper(PaperArgs),
    Synth(SynthArgs),
    /// Writes man pages and shell completions into a folder
    #[command(hide = true)]
    Manuals {
        /// Where to
        folder: PathBuf,
    },
}

const IMPORT_EXAMPLES: &str = "\
Examples:
  ls-prep import SmolLM2-135M-Instruct.Q4_1.gguf --out smol.lsb
  ls-prep import ./Qwen2.5-0.5B-Instruct --out qwen.lsb --dtype q8_0 --ffn-dtype q4_0
  ls-prep import model.gguf --out model.lsb --dtype q4_0 --calibration datasets/text/*.txt
  ls-prep import model.gguf --out model.lsb --block-neurons 3 --json";

/// Makes a bundle of a GGUF file or a Hugging Face folder.
///
/// Reads GGUF 2 and 3 (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K to Q6_K) and folders with safetensors
/// files, of the architectures Llama, Mistral, Qwen 2 and Qwen 3. Works a strip of weights at a time: memory stays far
/// below the model's size; with --calibration a layer at a time, in single precision. The bundle gets its name only when
/// it is complete.
#[derive(Debug, clap::Args)]
#[command(after_help = IMPORT_EXAMPLES)]
pub(crate) struct ImportArgs {
    /// GGUF file or Hugging Face folder
    pub(crate) model: PathBuf,
    /// Bundle to write; an existing one is replaced
    #[arg(long, short, value_name = "FILE.lsb")]
    pub(crate) out: PathBuf,
    /// Number format of attention, and of the rest unless told otherwise
    #[arg(long, value_enum, default_value_t = DTypeArg::F16)]
    pub(crate) dtype: DTypeArg,
    /// Number format of the FFNs [default: that of --dtype]
    #[arg(long, value_enum)]
    pub(crate) ffn_dtype: Option<DTypeArg>,
    /// Number format of embedding and head [default: that of --dtype, but q8_0 for q4_0: they suffer most]
    #[arg(long, value_enum)]
    pub(crate) embedding_dtype: Option<DTypeArg>,
    /// Text by which the layers' q4_0 weights are rounded; without it each is rounded on its own, which costs quality
    #[arg(long, value_name = "TEXT", num_args = 1..)]
    pub(crate) calibration: Vec<PathBuf>,
    /// Tokens of the calibration text, in windows of 512: time and memory grow with it
    #[arg(long, value_name = "N", default_value_t = 16384, requires = "calibration")]
    pub(crate) calibration_tokens: u64,
    /// Neurons of a block, the unit that is streamed
    #[arg(long, value_name = "K", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) block_neurons: u32,
    /// Seed kept in the bundle
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// [`Choice`] of a device.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum DeviceArg {
    /// The processor
    Cpu,
    /// The first NVIDIA card
    Cuda,
    /// A card if there is one
    Auto,
}

impl Default for DeviceArg {
    /// A program that was built for cards uses them.
    fn default() -> DeviceArg {
        if cfg!(feature = "cuda") { DeviceArg::Auto } else { DeviceArg::Cpu }
    }
}

impl From<DeviceArg> for Choice {
    fn from(device: DeviceArg) -> Choice {
        match device {
            DeviceArg::Cpu => Choice::Cpu,
            DeviceArg::Cuda => Choice::Cuda,
            DeviceArg::Auto => Choice::Auto,
        }
    }
}

/// A number format.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum DTypeArg {
    #[value(name = "f16")]
    F16,
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q4_0")]
    Q4_0,
}

impl ImportArgs {
    /// The number formats that the flags ask for.
    pub(crate) fn types(&self) -> WeightTypes {
        let embedding = match self.dtype {
            DTypeArg::Q4_0 => DTypeArg::Q8_0,
            dtype => dtype,
        };
        WeightTypes {
            attention: self.dtype.into(),
            ffn: self.ffn_dtype.unwrap_or(self.dtype).into(),
            embedding: self.embedding_dtype.unwrap_or(embedding).into(),
        }
    }
}

impl From<DTypeArg> for DType {
    fn from(dtype: DTypeArg) -> Self {
        match dtype {
            DTypeArg::F16 => DType::F16,
            DTypeArg::Q8_0 => DType::Q8_0,
            DTypeArg::Q4_0 => DType::Q4_0,
        }
    }
}
