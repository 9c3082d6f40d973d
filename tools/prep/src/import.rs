//! The import stage: a model on disk becomes a draft bundle, which runs, with every neuron in its source's order.
//!
//! Weights pass through a strip at a time (see [`crate::model::weights`]), a block of the bundle at a time, in the
//! order of the file. Peak memory is the tokenizer, the small vectors, and one layer's down projection as stored.

use crate::encode::{OutOfRange, encode_row};
use crate::error::{PrepError, Result};
use crate::model::Model;
use crate::model::roles::{Part, Role};
use crate::model::weights::{Columns, Rows, Weights};
use crate::progress::{Phase, Progress};
use ls_bundle::blocks::{Block, BlockName, Tensor};
use ls_bundle::identity::Identity;
use ls_bundle::ids::LayerId;
use ls_bundle::limits::MAX_NAME_BYTES;
use ls_bundle::model::{DType, FfnExtent, MatrixExtent, WeightMap, WeightTypes};
use ls_bundle::{BundleParts, BundleWriter, plan_weights};
use serde::Serialize;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

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
    /// Kept in the bundle for the stages that draw random numbers; import draws none.
    pub seed: u64,
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
    if let Ok(out) = options.out.canonicalize()
        && model.files.iter().any(|file| file.canonicalize().is_ok_and(|file| file == out))
    {
        return Err(PrepError::usage(format!("{} would replace its own source", out.display())));
    }
    let map = plan_weights(&model.config, options.types, options.block_neurons)?;
    let vectors = model.vectors()?;
    let source_hash = hash(&model.files, progress)?;
    let name = model.config.name.clone();
    let parts = BundleParts {
        identity: identity(options, source_hash.clone()),
        model: model.config,
        weights: map,
        vectors,
        tokenizer: model.tokenizer.json,
        vocabulary: model.tokenizer.vocabulary,
        chat_template: model.tokenizer.chat_template,
        placement: None,
        tables: None,
        settings: None,
    };
    let mut writer = BundleWriter::create(&options.out, parts)?;
    let Packed { blocks, weight_bytes, padding_bytes } =
        pack(&mut writer, &model.weights, progress)?;
    writer.finish()?;
    let written =
        std::fs::metadata(&options.out).map_err(|source| PrepError::io(&options.out, source))?;
    Ok(ImportReport {
        bundle: options.out.clone(),
        model: name,
        bundle_bytes: written.len(),
        weight_bytes,
        padding_bytes,
        blocks,
        source_hash,
    })
}

fn identity(options: &ImportOptions, source_hash: String) -> Identity {
    let source = options.source.canonicalize().unwrap_or_else(|_| options.source.clone());
    let mut source = source.file_name().unwrap_or_default().to_string_lossy().into_owned();
    source.truncate(source.floor_char_boundary(MAX_NAME_BYTES));
    let WeightTypes { attention, ffn, embedding } = options.types;
    Identity {
        tool: concat!("ls-prep ", env!("CARGO_PKG_VERSION")).to_owned(),
        source,
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
    let mut buffer = vec![0; 1 << 20];
    let mut hashes = Vec::new();
    for path in files {
        let io = |source| PrepError::io(path, source);
        let mut file = File::open(path).map_err(io)?;
        let mut hasher = blake3::Hasher::new();
        loop {
            match file.read(&mut buffer).map_err(io)? {
                0 => break,
                count => {
                    hasher.update(&buffer[..count]);
                    progress.advance(count as u64);
                }
            }
        }
        hashes.push((path.file_name().unwrap_or_default(), hasher.finalize().to_hex()));
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

#[derive(Default)]
struct Packed {
    blocks: u32,
    weight_bytes: u64,
    padding_bytes: u64,
}

/// Writes all blocks.
fn pack(
    writer: &mut BundleWriter,
    weights: &Weights,
    progress: &mut dyn Progress,
) -> Result<Packed> {
    let map = writer.weights().clone();
    progress.begin(Phase::Pack, data_bytes(&map));
    let mut packer = Packer { weights, map: &map, open: None };
    let mut bytes = Vec::new();
    let mut packed = Packed::default();
    while let Some(block) = writer.next_block() {
        packer.fill(&block, &mut bytes)?;
        writer.write_block(&bytes)?;
        packed.blocks += 1;
        packed.weight_bytes += block.weight_bytes;
        packed.padding_bytes += block.extent.len - block.weight_bytes;
        progress.advance(block.extent.len);
    }
    Ok(packed)
}

fn data_bytes(map: &WeightMap) -> u64 {
    let first = map.layers.first().map_or(0, |layer| layer.q_proj.offset);
    map.embedding.extent().end() - first
}

/// Makes the bytes of tiles and blocks, asked for in the order of the file.
struct Packer<'a> {
    weights: &'a Weights,
    map: &'a WeightMap,
    /// The weight that the last block belonged to.
    open: Option<(Option<LayerId>, Tensor, Source<'a>)>,
}

/// A weight being read.
enum Source<'a> {
    Matrix { extent: MatrixExtent, role: Role, rows: Rows<'a> },
    Ffn(Box<FfnSource<'a>>),
}

struct FfnSource<'a> {
    extent: FfnExtent,
    layer: u16,
    gate: Rows<'a>,
    up: Rows<'a>,
    down: Columns<'a>,
}

impl<'a> Packer<'a> {
    /// Replaces `bytes` by those of `block`.
    fn fill(&mut self, block: &Block, bytes: &mut Vec<u8>) -> Result<()> {
        let BlockName { layer, tensor, index } = block.name;
        if self.open.as_ref().is_none_or(|(l, t, _)| (*l, *t) != (layer, tensor)) {
            // Let go of the old weight first: its buffers may be as long as a down projection.
            self.open = None;
            self.open = Some((layer, tensor, self.source(layer, tensor)?));
        }
        let (_, _, source) = self.open.as_mut().expect("opened above");
        bytes.clear();
        bytes.resize(usize::try_from(block.weight_bytes).expect("a block fits in memory"), 0);
        let weights = self.weights;
        let checked = |role: Role, result: std::result::Result<(), OutOfRange>| {
            result.map_err(|OutOfRange { value }| {
                let name = role.name(weights.naming());
                PrepError::unsupported(format!(
                    "tensor `{name}` holds {value:e}, beyond half precision"
                ))
            })
        };
        match source {
            Source::Matrix { extent, role, rows } => {
                let row_bytes = extent.row_bytes() as usize;
                let first = index * extent.tile_rows;
                for (row, into) in (first..).zip(bytes.chunks_exact_mut(row_bytes)) {
                    checked(*role, encode_row(extent.dtype, rows.row(row)?, into))?;
                }
            }
            Source::Ffn(source) => {
                let FfnSource { extent, layer, gate, up, down } = &mut **source;
                let row_bytes = extent.dtype.row_bytes(extent.hidden) as usize;
                let first = index * extent.block_neurons;
                for (neuron, into) in (first..).zip(bytes.chunks_exact_mut(3 * row_bytes)) {
                    let rows = [
                        (Part::Gate, gate.row(neuron)?),
                        (Part::Up, up.row(neuron)?),
                        (Part::Down, down.column(neuron)?),
                    ];
                    for ((part, row), into) in
                        rows.into_iter().zip(into.chunks_exact_mut(row_bytes))
                    {
                        checked(Role::Layer(*layer, part), encode_row(extent.dtype, row, into))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn source(&self, layer: Option<LayerId>, tensor: Tensor) -> Result<Source<'a>> {
        let matrix = |extent: MatrixExtent, role| Source::Matrix {
            extent,
            role,
            rows: self.weights.rows(role),
        };
        let Some(layer) = layer else {
            return Ok(match (tensor, self.map.head) {
                (Tensor::Head, Some(head)) => matrix(head, Role::Head),
                _ => matrix(self.map.embedding, Role::Embedding),
            });
        };
        let extents = &self.map.layers[layer.index()];
        let part = |part| Role::Layer(layer.0, part);
        Ok(match tensor {
            Tensor::QProj => matrix(extents.q_proj, part(Part::Query)),
            Tensor::KProj => matrix(extents.k_proj, part(Part::Key)),
            Tensor::VProj => matrix(extents.v_proj, part(Part::Value)),
            Tensor::OProj => matrix(extents.o_proj, part(Part::Output)),
            Tensor::Ffn => Source::Ffn(Box::new(FfnSource {
                extent: extents.ffn,
                layer: layer.0,
                gate: self.weights.rows(part(Part::Gate)),
                up: self.weights.rows(part(Part::Up)),
                down: self.weights.columns(part(Part::Down))?,
            })),
            Tensor::Head | Tensor::Embedding => unreachable!("they belong to no layer"),
        })
    }
}
