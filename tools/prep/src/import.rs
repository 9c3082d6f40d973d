//! `ls-prep import`: a model on disk becomes a bundle of which nothing was learned, with every neuron in its source's
//! order. It runs densely. Calibration text may say how its weights are rounded ([`crate::rounding`]).

use crate::error::{PrepError, Result};
use crate::key::stage_seed;
use crate::model::Model;
use crate::model::weights::SourceFile;
use crate::pack::{self, Learned, Packed};
use crate::progress::{Phase, Progress};
use crate::rounding;
use crate::stage::Stage;
use crate::stages::prompts::{Params, Prompts, Windows};
use ls_bundle::identity::Identity;
use ls_bundle::limits::MAX_NAME_BYTES;
use ls_bundle::model::{DType, WeightTypes};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What to import, and how.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// A GGUF file or a Hugging Face folder.
    pub source: PathBuf,
    /// The bundle to write. An existing file is replaced, at the end and at once.
    pub out: PathBuf,
    /// Number formats.
    pub types: WeightTypes,
    /// Neurons of a block.
    pub block_neurons: u32,
    /// Text by which the layers' q4_0 weights are rounded; without it each is rounded on its own.
    pub calibration: Option<Calibration>,
    /// Kept in the bundle for the stages that draw random numbers. Import draws where windows of text begin.
    pub seed: u64,
}

/// Calibration text.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// Files, in this order.
    pub texts: Vec<PathBuf>,
    /// Tokens to take of them, at most.
    pub tokens: u64,
    /// Tokens of a window, a text of its own; at most the model's context.
    pub window: u32,
}

impl Calibration {
    /// The windows for `model`.
    fn windows(&self, model: &Model, seed: u64) -> Result<Windows> {
        let texts =
            self.texts.iter().map(|path| SourceFile::open(path)).collect::<Result<Vec<_>>>()?;
        let window = self.window.min(model.config.context_length);
        let seed = stage_seed(seed, Prompts::NAME);
        Windows::take(model, &texts, &Params { tokens: self.tokens, window, seed })
    }
}

/// What was made.
#[derive(Clone, Debug, Serialize)]
pub struct ImportReport {
    /// The bundle.
    pub bundle: PathBuf,
    /// The model's name.
    pub model: String,
    /// Bytes of the bundle.
    pub bundle_bytes: u64,
    /// Bytes of tiles and blocks without padding.
    pub weight_bytes: u64,
    /// Zeros behind tiles and blocks.
    pub padding_bytes: u64,
    /// Tiles and blocks.
    pub blocks: u32,
    /// BLAKE3 of the source.
    pub source_hash: String,
}

/// Imports a model.
pub fn import(options: &ImportOptions, progress: &mut dyn Progress) -> Result<ImportReport> {
    let model = Model::open(&options.source)?;
    refuse_to_replace(&model, &options.out)?;
    let source_hash = hash(&model.files, progress)?;
    let mut identity = identity(options, source_hash.clone());
    let (types, block_neurons) = (options.types, options.block_neurons);
    let mut windows = None;
    if let Some(calibration) = &options.calibration {
        if !rounding::wanted(types) {
            let problem = "calibration text is for q4_0 weights of layers; there are none";
            return Err(PrepError::usage(problem));
        }
        let found = calibration.windows(&model, options.seed)?;
        let text = hash(&calibration.texts, progress)?;
        let Windows { tokens, window, .. } = &found;
        identity.recipe += &format!(
            "calibration = \"{text}\"\ncalibration_tokens = {}\ncalibration_window = {window}\n",
            tokens.len()
        );
        windows = Some(found);
    }
    let learned = Learned { calibration: windows.as_ref(), ..Learned::default() };
    let packed =
        pack::write(&options.out, &model, identity, types, block_neurons, &learned, progress)?;
    let Packed { bundle_bytes, blocks, weight_bytes, padding_bytes } = packed;
    Ok(ImportReport {
        bundle: options.out.clone(),
        model: model.config.name,
        bundle_bytes,
        weight_bytes,
        padding_bytes,
        blocks,
        source_hash,
    })
}

fn identity(options: &ImportOptions, source_hash: String) -> Identity {
    let WeightTypes { attention, ffn, embedding } = options.types;
    Identity {
        tool: TOOL.to_owned(),
        source: source_name(&options.source),
        source_hash,
        seed: options.seed,
        recipe: format!(
            "dtype = \"{}\"\nffn_dtype = \"{}\"\nembedding_dtype = \"{}\"\nblock_neurons = {}\n",
            dtype_name(attention),
            dtype_name(ffn),
            dtype_name(embedding),
            options.block_neurons
        ),
    }
}

/// Fails if a bundle of this name would replace a file that the model is read from.
pub(crate) fn refuse_to_replace(model: &Model, out: &Path) -> Result<()> {
    if let Ok(out) = out.canonicalize()
        && model.files.iter().any(|file| file.canonicalize().is_ok_and(|file| file == out))
    {
        return Err(PrepError::usage(format!("{} would replace its own source", out.display())));
    }
    Ok(())
}

/// Name and version of this program, as bundles tell it.
pub(crate) const TOOL: &str = concat!("ls-prep ", env!("CARGO_PKG_VERSION"));

/// The last part of a path, as bundles tell where they come from.
pub(crate) fn source_name(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mut name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    name.truncate(name.floor_char_boundary(MAX_NAME_BYTES));
    name
}

/// The name of a number format on the command line and in recipes.
#[must_use]
pub fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "f16",
        DType::Q8_0 => "q8_0",
        DType::Q4_0 => "q4_0",
    }
}

/// BLAKE3 of a single file; of many, of the list of their names and hashes.
pub fn hash(files: &[PathBuf], progress: &mut dyn Progress) -> Result<String> {
    let mut total_bytes = 0;
    for path in files {
        total_bytes += std::fs::metadata(path).map_err(|source| PrepError::io(path, source))?.len();
    }
    progress.begin(Phase::Hash, total_bytes);
    let mut hashes = Vec::new();
    for path in files {
        let hash = SourceFile::open(path)?.hash(&mut |bytes| progress.advance(bytes))?;
        hashes.push((path.file_name().unwrap_or_default(), hash.to_hex()));
    }
    if let [(_, hash)] = &hashes[..] {
        return Ok(hash.to_string());
    }
    let mut hasher = blake3::Hasher::new();
    for (name, hash) in hashes {
        hasher.update(format!("{hash}  {}\n", name.display()).as_bytes());
    }
    Ok(hasher.finalize().to_hex().to_string())
}
