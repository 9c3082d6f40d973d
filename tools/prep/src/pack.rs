//! Writes a bundle: a model's weights in the bundle's formats and order, and what was learned about them.
//!
//! Weights pass through a strip at a time (see [`crate::model::weights`]), a block of the bundle at a time, in the
//! order of the file. Peak memory is the tokenizer, the small vectors, and one layer's down projection as stored; with
//! an order of its own also that projection as f32; or one table. Rounding by calibration text ([`crate::rounding`])
//! goes along, a layer at a time, and takes what it takes.

use crate::encode::{OutOfRange, encode_row};
use crate::error::{PrepError, Result};
use crate::model::Model;
use crate::model::roles::{Part, Role};
use crate::model::weights::{Columns, Rows, Weights};
use crate::progress::{Phase, Progress};
use crate::rounding::{RoundedLayer, Rounder};
use crate::stages::prompts::Windows;
use ls_bundle::blocks::{Block, BlockName, Tensor};
use ls_bundle::identity::Identity;
use ls_bundle::ids::{LayerId, NeuronId};
use ls_bundle::model::{FfnExtent, MatrixExtent, WeightMap, WeightTypes};
use ls_bundle::placement::Placement;
use ls_bundle::tables::{Settings, TABLE_BLOCK_BYTES, TableKind, TableMap};
use ls_bundle::{BundleParts, BundleWriter, plan_weights};
use ls_io::interrupt::Doomed;
use std::fmt;
use std::path::Path;

/// What a bundle holds besides the model.
#[derive(Debug, Default)]
pub struct Learned<'a> {
    /// The order of the neurons.
    pub placement: Option<Placement>,
    /// Text by which the layers' q4_0 weights are rounded; without it each is rounded on its own.
    pub calibration: Option<&'a Windows>,
    /// Tables by layer and kind.
    pub tables: Vec<Table<'a>>,
    /// How the bundle asks to be run.
    pub settings: Option<Settings>,
}

/// A table that is made when its turn comes.
pub struct Table<'a> {
    /// Whose neurons it is about.
    pub layer: LayerId,
    /// What it is for.
    pub kind: TableKind,
    /// Its bytes.
    pub len: u64,
    /// Makes them.
    pub content: Box<dyn Fn() -> Result<Vec<u8>> + 'a>,
}

impl fmt::Debug for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {} {}, {} bytes", self.layer, self.kind, self.len)
    }
}

/// What was written.
#[derive(Clone, Copy, Debug, Default)]
pub struct Packed {
    /// Bytes of the bundle.
    pub bundle_bytes: u64,
    /// Bytes of tiles and blocks without padding.
    pub weight_bytes: u64,
    /// Zeros behind tiles and blocks.
    pub padding_bytes: u64,
    /// Tiles and blocks.
    pub blocks: u32,
}

/// Writes the bundle `out`, replacing what has its name at the end and at once.
pub fn write(
    out: &Path,
    model: &Model,
    identity: Identity,
    types: WeightTypes,
    block_neurons: u32,
    learned: &Learned<'_>,
    progress: &mut dyn Progress,
) -> Result<Packed> {
    let map = plan_weights(&model.config, types, block_neurons)?;
    let lens: Vec<_> = learned.tables.iter().map(|t| (t.layer, t.kind, t.len)).collect();
    let parts = BundleParts {
        identity,
        model: model.config.clone(),
        vectors: model.vectors()?,
        tokenizer: model.tokenizer.json.clone(),
        vocabulary: model.tokenizer.vocabulary.clone(),
        chat_template: model.tokenizer.chat_template.clone(),
        placement: learned.placement.clone(),
        tables: (!lens.is_empty()).then(|| TableMap::behind(&map, &lens)),
        settings: learned.settings,
        weights: map,
    };
    let mut writer = BundleWriter::create(out, parts)?;
    let temporary = writer.temporary_path();
    let doomed = Doomed::new(temporary).map_err(|source| PrepError::io(temporary, source))?;
    let map = writer.weights().clone();
    let first = map.layers.first().map_or(0, |layer| layer.q_proj.offset);
    let table_bytes: u64 = lens.iter().map(|&(_, _, len)| len).sum();
    let mut left_bytes = map.embedding.extent().end() - first + table_bytes;
    let rounder = learned.calibration.map(|windows| Rounder::new(model, windows, types));
    // The layers come first. Rounding them takes so long that their bytes tell nothing.
    let mut rounding = rounder.is_some();
    match rounding {
        true => progress.begin(Phase::Rounding, model.config.layers.into()),
        false => progress.begin(Phase::Pack, left_bytes),
    }
    let rounded = RoundedLayer::default();
    let rounder = rounder.transpose()?;
    let mut packer =
        Packer { weights: &model.weights, map: &map, learned, rounder, rounded, open: None };
    let mut bytes = Vec::new();
    let mut packed = Packed::default();
    while let Some(block) = writer.next_block() {
        if rounding && block.name.layer.is_none() {
            rounding = false;
            progress.begin(Phase::Pack, left_bytes);
        }
        packer.fill(&block, &mut bytes)?;
        writer.write_block(&bytes)?;
        packed.blocks += 1;
        packed.weight_bytes += block.weight_bytes;
        packed.padding_bytes += block.extent.len - block.weight_bytes;
        left_bytes = left_bytes.saturating_sub(block.extent.len);
        match rounding {
            true => progress.advance(u64::from(begins_layer(&block.name))),
            false => progress.advance(block.extent.len),
        }
    }
    writer.finish()?;
    drop(doomed);
    packed.bundle_bytes =
        std::fs::metadata(out).map_err(|source| PrepError::io(out, source))?.len();
    Ok(packed)
}

fn begins_layer(name: &BlockName) -> bool {
    name.tensor == Tensor::QProj && name.index == 0
}

/// Makes the bytes of tiles and blocks, asked for in the order of the file.
struct Packer<'a> {
    weights: &'a Weights,
    map: &'a WeightMap,
    learned: &'a Learned<'a>,
    rounder: Option<Rounder<'a>>,
    /// What was rounded of the layer that blocks are made of.
    rounded: RoundedLayer,
    /// The weight that the last block belonged to.
    open: Option<(Option<LayerId>, Tensor, Source<'a>)>,
}

/// A weight being read.
enum Source<'a> {
    Matrix { extent: MatrixExtent, role: Role, rows: Rows<'a> },
    Ffn(Box<FfnSource<'a>>),
    Table(Vec<u8>),
}

struct FfnSource<'a> {
    extent: FfnExtent,
    layer: u16,
    gate: Rows<'a>,
    up: Rows<'a>,
    down: Columns<'a>,
    /// Which neuron of the source lies at each place, unless they lie as there.
    order: Option<&'a [NeuronId]>,
}

impl<'a> Packer<'a> {
    /// Replaces `bytes` by those of `block`.
    fn fill(&mut self, block: &Block, bytes: &mut Vec<u8>) -> Result<()> {
        let BlockName { layer, tensor, index } = block.name;
        if let Some(rounder) = &mut self.rounder
            && begins_layer(&block.name)
        {
            self.rounded = RoundedLayer::default();
            self.rounded = rounder.layer()?;
        }
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
                    if !self.rounded.write_row(*role, row, into) {
                        checked(*role, encode_row(extent.dtype, rows.row(row)?, into))?;
                    }
                }
            }
            Source::Ffn(source) => {
                let FfnSource { extent, layer, gate, up, down, order } = &mut **source;
                let row_bytes = extent.dtype.row_bytes(extent.hidden) as usize;
                let first = index * extent.block_neurons;
                for (place, into) in (first..).zip(bytes.chunks_exact_mut(3 * row_bytes)) {
                    let neuron = order.map_or(place, |order| order[place as usize].0);
                    let rows = [
                        (Part::Gate, gate.row(neuron)?),
                        (Part::Up, up.row(neuron)?),
                        (Part::Down, down.column(neuron)?),
                    ];
                    for ((part, row), into) in
                        rows.into_iter().zip(into.chunks_exact_mut(row_bytes))
                    {
                        let role = Role::Layer(*layer, part);
                        if !self.rounded.write_row(role, neuron, into) {
                            checked(role, encode_row(extent.dtype, row, into))?;
                        }
                    }
                }
            }
            Source::Table(content) => {
                let start = (u64::from(index) * TABLE_BLOCK_BYTES) as usize;
                let end = start + bytes.len();
                bytes.copy_from_slice(&content[start..end]);
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
            Tensor::Ffn => {
                let order = self.learned.placement.as_ref().map(|order| order.layer(layer));
                let (gate, up) = (part(Part::Gate), part(Part::Up));
                let weights = self.weights;
                let rows = |role| match order {
                    Some(_) => weights.rows_in_any_order(role),
                    None => weights.rows(role),
                };
                let down = match order {
                    Some(_) => weights.columns_in_any_order(part(Part::Down))?,
                    None => weights.columns(part(Part::Down))?,
                };
                let (gate, up, extent) = (rows(gate), rows(up), extents.ffn);
                let layer = layer.0;
                Source::Ffn(Box::new(FfnSource { extent, layer, gate, up, down, order }))
            }
            Tensor::Table(kind) => {
                let of = |table: &&Table<'_>| (table.layer, table.kind) == (layer, kind);
                let table = self.learned.tables.iter().find(of).expect("it was laid out");
                let content = (table.content)()?;
                assert_eq!(content.len() as u64, table.len, "{table:?}");
                Source::Table(content)
            }
            Tensor::Head | Tensor::Embedding => unreachable!("they belong to no layer"),
        })
    }
}
