//! The tiles and blocks of a bundle in the order of the file: ids, places, names for messages.

use crate::extent::{Extent, align_up};
use crate::ids::{BlockId, LayerId};
use crate::model::{FfnExtent, MatrixExtent, WeightMap};
use crate::tables::{TABLE_BLOCK_BYTES, TableExtent, TableKind, TableMap};
use std::fmt;

/// A big weight of a layer, or of the whole model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tensor {
    /// query_width x hidden.
    QProj,
    /// kv_width x hidden.
    KProj,
    /// kv_width x hidden.
    VProj,
    /// hidden x query_width.
    OProj,
    /// gate, up and down.
    Ffn,
    /// vocab_size x hidden.
    Head,
    /// vocab_size x hidden.
    Embedding,
    /// What was learned about a layer.
    Table(TableKind),
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tensor::QProj => "q_proj",
            Tensor::KProj => "k_proj",
            Tensor::VProj => "v_proj",
            Tensor::OProj => "o_proj",
            Tensor::Ffn => "ffn",
            Tensor::Head => "head",
            Tensor::Embedding => "embedding",
            Tensor::Table(kind) => return kind.fmt(f),
        })
    }
}

/// What a block is called: `layer 3 q_proj tile 2`, `layer 3 ffn block 17`, `embedding tile 5`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockName {
    /// The layer; none for head and embedding.
    pub layer: Option<LayerId>,
    /// The weight.
    pub tensor: Tensor,
    /// Which of its tiles or blocks.
    pub index: u32,
}

impl fmt::Display for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(layer) = self.layer {
            write!(f, "layer {layer} ")?;
        }
        let unit = match self.tensor {
            Tensor::Ffn | Tensor::Table(_) => "block",
            _ => "tile",
        };
        write!(f, "{} {unit} {}", self.tensor, self.index)
    }
}

/// A tile or block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its number in the order of the file.
    pub id: BlockId,
    /// Its bytes, padding included: what its checksum covers.
    pub extent: Extent,
    /// Bytes of weights; zeros follow up to `extent.len`.
    pub weight_bytes: u64,
    /// What it is called.
    pub name: BlockName,
}

/// Where a weight lies, matrix or FFN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Matrix(MatrixExtent),
    Ffn(FfnExtent),
    Table(TableExtent),
}

impl Place {
    pub(crate) fn extent(self) -> Extent {
        match self {
            Place::Matrix(matrix) => matrix.extent(),
            Place::Ffn(ffn) => ffn.extent(),
            Place::Table(table) => table.extent(),
        }
    }

    pub(crate) fn first_block(self) -> BlockId {
        match self {
            Place::Matrix(matrix) => matrix.first_block,
            Place::Ffn(ffn) => ffn.first_block,
            Place::Table(table) => table.first_block,
        }
    }

    pub(crate) fn blocks(self) -> u32 {
        match self {
            Place::Matrix(matrix) => matrix.tiles(),
            Place::Ffn(ffn) => ffn.blocks(),
            Place::Table(table) => table.blocks(),
        }
    }

    /// Length of the longest tile or block, padding included.
    pub(crate) fn block_bytes(self) -> u64 {
        match self {
            Place::Matrix(matrix) => align_up(u64::from(matrix.tile_rows) * matrix.row_bytes()),
            Place::Ffn(ffn) => ffn.block_stride(),
            Place::Table(table) => align_up(table.len.min(TABLE_BLOCK_BYTES)),
        }
    }

    /// Bytes of weights, without padding.
    pub(crate) fn weight_bytes(self) -> u64 {
        match self {
            Place::Matrix(matrix) => u64::from(matrix.rows) * matrix.row_bytes(),
            Place::Ffn(ffn) => u64::from(ffn.neurons) * ffn.neuron_bytes(),
            Place::Table(table) => table.len,
        }
    }
}

/// A weight with its name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weight {
    pub(crate) layer: Option<LayerId>,
    pub(crate) tensor: Tensor,
    pub(crate) place: Place,
}

impl Weight {
    /// Its tile or block with this id, if it has it.
    fn find(&self, id: BlockId) -> Option<Block> {
        let first = self.place.first_block().0;
        let held = first..first + self.place.blocks();
        held.contains(&id.0).then(|| self.block(id.0 - first))
    }

    /// Its tile or block `index`.
    pub(crate) fn block(&self, index: u32) -> Block {
        let (id, extent, weight_bytes) = match self.place {
            Place::Matrix(matrix) => {
                let (id, extent) = matrix.tile(index);
                let rows = matrix.tile_rows.min(matrix.rows - index * matrix.tile_rows);
                (id, extent, u64::from(rows) * matrix.row_bytes())
            }
            Place::Ffn(ffn) => {
                let (id, extent) = ffn.block(index);
                let neurons = ffn.block_neurons.min(ffn.neurons - index * ffn.block_neurons);
                (id, extent, u64::from(neurons) * ffn.neuron_bytes())
            }
            Place::Table(table) => {
                let (id, extent) = table.block(index);
                let rest = table.len - u64::from(index) * TABLE_BLOCK_BYTES;
                (id, extent, rest.min(TABLE_BLOCK_BYTES))
            }
        };
        let name = BlockName { layer: self.layer, tensor: self.tensor, index };
        Block { id, extent, weight_bytes, name }
    }
}

impl TableMap {
    /// Every block in the order of the file.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        self.weights()
            .flat_map(|table| (0..table.place.blocks()).map(move |index| table.block(index)))
    }

    /// The block with this id. Walks the tables.
    #[must_use]
    pub fn block(&self, id: BlockId) -> Option<Block> {
        self.weights().find_map(|table| table.find(id))
    }

    /// Every table as a weight.
    pub(crate) fn weights(&self) -> impl Iterator<Item = Weight> + '_ {
        self.tables.iter().map(|&table| Weight {
            layer: Some(table.layer),
            tensor: Tensor::Table(table.kind),
            place: Place::Table(table),
        })
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(layer) = self.layer {
            write!(f, "layer {layer} ")?;
        }
        self.tensor.fmt(f)
    }
}

impl WeightMap {
    /// Every tile and block in the order of the file.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        self.weights()
            .flat_map(|weight| (0..weight.place.blocks()).map(move |index| weight.block(index)))
    }

    /// The tile or block with this id. Walks the weights: for messages, not for the decode loop.
    #[must_use]
    pub fn block(&self, id: BlockId) -> Option<Block> {
        self.weights().find_map(|weight| weight.find(id))
    }

    /// Every weight in the order of the file.
    pub(crate) fn weights(&self) -> impl Iterator<Item = Weight> + '_ {
        let layers = self.layers.iter().enumerate().flat_map(|(index, layer)| {
            let weight =
                move |tensor, place| Weight { layer: Some(LayerId(index as u16)), tensor, place };
            [
                weight(Tensor::QProj, Place::Matrix(layer.q_proj)),
                weight(Tensor::KProj, Place::Matrix(layer.k_proj)),
                weight(Tensor::VProj, Place::Matrix(layer.v_proj)),
                weight(Tensor::OProj, Place::Matrix(layer.o_proj)),
                weight(Tensor::Ffn, Place::Ffn(layer.ffn)),
            ]
        });
        let whole = |tensor, matrix| Weight { layer: None, tensor, place: Place::Matrix(matrix) };
        layers
            .chain(self.head.map(|matrix| whole(Tensor::Head, matrix)))
            .chain([whole(Tensor::Embedding, self.embedding)])
    }
}
