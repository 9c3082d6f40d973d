//! [`TableMap`]: what `ls-prep` has learned about a model, for the runtime to load or to leave.
//!
//! Tables lie in Data behind the weights and are opaque here: bytes with a kind and a layer, cut into blocks with
//! checksums of their own as weights are. So a dense run reads none of them, and memory is taken for those alone that a
//! policy asks for. Their contents are told where they are used.

use crate::extent::{Extent, align_up};
use crate::ids::{BlockId, LayerId};
use crate::model::WeightMap;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Bytes of a table's block; the last of a table may be shorter.
pub const TABLE_BLOCK_BYTES: u64 = 1 << 20;

/// What a table is for. There is at most one of a kind a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum TableKind {
    /// Scores the layer's blocks from an early feature (paper, 3.3): stacked hashing as `ls-hash` writes it.
    Predictor,
    /// Low-bit copies of the layer's neurons, in file order: the [`tiles`](crate::tiles) of gate, up and down.
    Base,
    /// Codebooks of the base, and what it needs to know about each neuron.
    BaseScores,
    /// Predicts when a block of the layer will be asked for again (paper, 3.3.3).
    Reuse,
    /// Scores the layer's blocks as other systems do: a two-layer network as `ls-hash` writes it. Since version 3.
    Mlp,
}

impl TableKind {
    /// The first version of the format that knows this kind.
    pub(crate) fn since(self) -> u32 {
        if self == TableKind::Mlp { 3 } else { 2 }
    }
}

impl fmt::Display for TableKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TableKind::Predictor => "predictor",
            TableKind::Base => "base",
            TableKind::BaseScores => "base scores",
            TableKind::Reuse => "reuse",
            TableKind::Mlp => "mlp",
        })
    }
}

/// Where a table lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableExtent {
    /// Whose neurons it is about.
    pub layer: LayerId,
    /// What it is for.
    pub kind: TableKind,
    /// First byte in the file; a multiple of 64.
    pub offset: u64,
    /// Bytes, without the zeros behind them.
    pub len: u64,
    /// Id of the first block; the others follow.
    pub first_block: BlockId,
}

impl TableExtent {
    /// The whole table, padding included.
    #[must_use]
    pub fn extent(&self) -> Extent {
        Extent { offset: self.offset, len: align_up(self.len) }
    }

    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        // Lengths are checked to be at most 2^21 blocks.
        self.len.div_ceil(TABLE_BLOCK_BYTES) as u32
    }

    /// Block `index` with its checksum's id; padding included.
    #[must_use]
    pub fn block(&self, index: u32) -> (BlockId, Extent) {
        let start = u64::from(index) * TABLE_BLOCK_BYTES;
        let len = align_up(TABLE_BLOCK_BYTES.min(self.len - start));
        (BlockId(self.first_block.0 + index), Extent { offset: self.offset + start, len })
    }
}

/// All tables, in the order of the file: by layer, then by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableMap {
    /// The tables.
    pub tables: Vec<TableExtent>,
}

impl TableMap {
    /// Lays tables of these layers, kinds and lengths out behind the weights of `map`, whose offsets count from the
    /// start of Data.
    #[must_use]
    pub fn behind(map: &WeightMap, lens: &[(LayerId, TableKind, u64)]) -> TableMap {
        let mut offset = map.embedding.extent().end();
        let mut block = map.embedding.first_block.0.wrapping_add(map.embedding.tiles());
        let tables = lens.iter().map(|&(layer, kind, len)| {
            let table = TableExtent { layer, kind, offset, len, first_block: BlockId(block) };
            offset = table.extent().end();
            block = block.wrapping_add(table.blocks());
            table
        });
        TableMap { tables: tables.collect() }
    }

    /// The table of this kind of a layer.
    #[must_use]
    pub fn find(&self, layer: LayerId, kind: TableKind) -> Option<&TableExtent> {
        let place = self.tables.binary_search_by_key(&(layer, kind), |t| (t.layer, t.kind));
        place.ok().map(|place| &self.tables[place])
    }
}

/// How a bundle asks to be run, unless the user says otherwise: what `ls-prep` found on held-out text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Share of each layer's neurons that run exactly; the base, if there is one, stands in for the others. 1 is dense.
    pub exact_share: f32,
    /// Perplexity at that share on `eval_tokens` tokens of held-out text, in `ls-prep`'s arithmetic.
    pub perplexity: f32,
    /// The same of the dense model.
    pub dense_perplexity: f32,
    /// Tokens that both were measured on.
    pub eval_tokens: u64,
}
