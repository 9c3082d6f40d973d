//! Decides where the big weights of a model go: the arithmetic behind a new [`WeightMap`].

use crate::error::{BundleError, Kind};
use crate::ids::BlockId;
use crate::model::{
    DType, FfnExtent, LayerExtents, MatrixExtent, ModelConfig, WeightMap, WeightTypes,
};
use crate::tables::TableMap;
use crate::validate;

/// Tiles are about this long: long enough for a disk to reach its bandwidth, short enough to be read singly.
pub const TILE_BYTES: u64 = 128 << 10;

/// Tiles have a multiple of this many rows, whatever a row's length: so tiles follow each other without padding.
pub const TILE_ROWS: u32 = 64;

/// Lays out the weights of `model`: dense matrices in `dense`, FFNs in `ffn` with `block_neurons` neurons a block.
///
/// Offsets count from the start of Data; [`BundleWriter::create`](crate::BundleWriter::create), which knows where
/// Data starts, moves them.
///
/// # Errors
/// The model is not one a bundle can hold, rows of a quantised type are no multiple of 32, or blocks are too long.
pub fn plan_weights(
    model: &ModelConfig,
    types: WeightTypes,
    block_neurons: u32,
) -> Result<WeightMap, BundleError> {
    validate::check_model(model).map_err(|flaw| Kind::invalid("model", flaw))?;
    if block_neurons == 0 {
        return Err(Kind::invalid("block_neurons", "0, at least 1 is wanted").into());
    }
    let mut cursor = Cursor::default();
    let (hidden, query, kv) = (model.hidden, model.query_width(), model.kv_width());
    let layers = model
        .layer_ids()
        .map(|_| LayerExtents {
            q_proj: cursor.matrix(query, hidden, types.attention),
            k_proj: cursor.matrix(kv, hidden, types.attention),
            v_proj: cursor.matrix(kv, hidden, types.attention),
            o_proj: cursor.matrix(hidden, query, types.attention),
            ffn: cursor.ffn(
                model.ffn_hidden,
                hidden,
                types.ffn,
                block_neurons.min(model.ffn_hidden),
            ),
        })
        .collect();
    let head = (!model.tied_head).then(|| cursor.matrix(model.vocab_size, hidden, types.embedding));
    let embedding = cursor.matrix(model.vocab_size, hidden, types.embedding);
    let map = WeightMap { layers, head, embedding };
    validate::check_weights(&map, model, 0).map_err(|flaw| Kind::invalid("weights", flaw))?;
    Ok(map)
}

/// Adds `offset` to every weight's and table's offset.
pub(crate) fn move_by(map: &mut WeightMap, tables: Option<&mut TableMap>, offset: u64) {
    tables.into_iter().flat_map(|t| &mut t.tables).for_each(|table| table.offset += offset);
    for layer in &mut map.layers {
        for matrix in [&mut layer.q_proj, &mut layer.k_proj, &mut layer.v_proj, &mut layer.o_proj] {
            matrix.offset += offset;
        }
        layer.ffn.offset += offset;
    }
    if let Some(head) = &mut map.head {
        head.offset += offset;
    }
    map.embedding.offset += offset;
}

/// The end of what is laid out. No sum overflows: a checked model has less than 2^13 weights of less than 2^40 bytes,
/// and ids that wrap are found by the check that follows.
#[derive(Default)]
struct Cursor {
    offset: u64,
    block: u32,
}

impl Cursor {
    fn matrix(&mut self, rows: u32, cols: u32, dtype: DType) -> MatrixExtent {
        let rows_wanted = TILE_BYTES / dtype.row_bytes(cols).max(1) / u64::from(TILE_ROWS);
        let tile_rows = (rows_wanted.min(u64::from(rows)) as u32).max(1) * TILE_ROWS;
        let matrix = MatrixExtent {
            offset: self.offset,
            rows,
            cols,
            dtype,
            tile_rows: tile_rows.min(rows),
            first_block: BlockId(self.block),
        };
        self.offset = matrix.extent().end();
        self.block = self.block.wrapping_add(matrix.tiles());
        matrix
    }

    fn ffn(&mut self, neurons: u32, hidden: u32, dtype: DType, block_neurons: u32) -> FfnExtent {
        let ffn = FfnExtent {
            offset: self.offset,
            neurons,
            hidden,
            dtype,
            block_neurons,
            first_block: BlockId(self.block),
        };
        self.offset = ffn.extent().end();
        self.block = self.block.wrapping_add(ffn.blocks());
        ffn
    }
}
