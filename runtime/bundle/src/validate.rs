//! What must be true of a bundle's contents, beyond checksums. The writer checks it before a byte is written, the
//! reader before anything is handed out: both sides of the boundary, one code.
//!
//! Counts are compared with their caps before anything is multiplied, so that the rest cannot overflow.

use crate::blocks::{Place, Tensor, Weight};
use crate::error::Flaw;
use crate::identity::Identity;
use crate::limits::{
    MAX_BLOCK_BYTES, MAX_BLOCKS, MAX_CONTEXT, MAX_FFN_HIDDEN, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN,
    MAX_LAYERS, MAX_NAME_BYTES, MAX_RECIPE_BYTES, MAX_STOP_TOKENS, MAX_TABLES, MAX_VOCAB,
};
use crate::model::{
    DType, LayerVectors, ModelConfig, QUANT_GROUP, RopeScaling, Vectors, WeightMap,
};
use crate::placement::Placement;
use crate::tables::{Settings, TABLE_BLOCK_BYTES, TableMap};
use crate::vocabulary::Vocabulary;

type Check = Result<(), Flaw>;

/// Fails with a formatted flaw unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($flaw:tt)+) => {
        if !$condition {
            return Err(format!($($flaw)+));
        }
    };
}

pub(crate) fn check_identity(identity: &Identity) -> Check {
    check_name("tool", &identity.tool)?;
    check_name("source", &identity.source)?;
    let hash = identity.source_hash.as_bytes();
    let hexadecimal = hash.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    ensure!(hash.len() == 64 && hexadecimal, "source_hash is not 64 hexadecimal digits");
    let recipe_bytes = identity.recipe.len();
    ensure!(
        recipe_bytes <= MAX_RECIPE_BYTES,
        "recipe has {recipe_bytes} bytes, at most {MAX_RECIPE_BYTES} may be"
    );
    Ok(())
}

/// Names are printed: no control characters.
fn check_name(field: &str, name: &str) -> Check {
    ensure!(
        name.len() <= MAX_NAME_BYTES,
        "{field} has {} bytes, at most {MAX_NAME_BYTES} may be",
        name.len()
    );
    ensure!(!name.chars().any(char::is_control), "{field} has control characters");
    Ok(())
}

pub(crate) fn check_model(model: &ModelConfig) -> Check {
    check_name("name", &model.name)?;
    for (field, value, max) in [
        ("vocab_size", model.vocab_size, MAX_VOCAB),
        ("hidden", model.hidden, MAX_HIDDEN),
        ("ffn_hidden", model.ffn_hidden, MAX_FFN_HIDDEN),
        ("layers", u32::from(model.layers), u32::from(MAX_LAYERS)),
        ("heads", model.heads, MAX_HEADS),
        ("kv_heads", model.kv_heads, MAX_HEADS),
        ("head_dim", model.head_dim, MAX_HEAD_DIM),
        ("context_length", model.context_length, MAX_CONTEXT),
        ("sliding_window", model.sliding_window.unwrap_or(1), MAX_CONTEXT),
    ] {
        ensure!((1..=max).contains(&value), "{field} is {value}, 1 to {max} may be");
    }
    ensure!(
        model.heads.is_multiple_of(model.kv_heads),
        "kv_heads is {}, which does not divide heads, {}",
        model.kv_heads,
        model.heads
    );
    ensure!(model.head_dim.is_multiple_of(2), "head_dim is {}, which is odd", model.head_dim);
    check_positive("norm_epsilon", model.norm_epsilon)?;
    check_positive("rope theta", model.rope.theta)?;
    match model.rope.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => check_positive("rope factor", factor)?,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            check_positive("rope factor", factor)?;
            check_positive("rope low_freq_factor", low_freq_factor)?;
            check_positive("rope high_freq_factor", high_freq_factor)?;
            let rising = low_freq_factor < high_freq_factor;
            ensure!(rising, "rope low_freq_factor is not below high_freq_factor");
            ensure!(
                (1..=MAX_CONTEXT).contains(&original_context),
                "rope original_context is {original_context}, 1 to {MAX_CONTEXT} may be"
            );
        }
    }
    let special = &model.special;
    ensure!(
        special.stop.len() <= MAX_STOP_TOKENS,
        "{} stop tokens, at most {MAX_STOP_TOKENS} may be",
        special.stop.len()
    );
    ensure!(special.bos.is_some() || !special.add_bos, "add_bos is set, but there is no bos");
    Ok(())
}

fn check_positive(field: &str, value: f32) -> Check {
    ensure!(
        value.is_finite() && value > 0.0,
        "{field} is {value}, a finite number above 0 is wanted"
    );
    Ok(())
}

/// The weights of a checked model, from `data_start` on. Returns the end of the last one; holes, overlaps and wrong
/// orders are all found because each offset and id must be where the one before ended.
pub(crate) fn check_weights(
    map: &WeightMap,
    model: &ModelConfig,
    data_start: u64,
) -> Result<WeightsEnd, Flaw> {
    ensure!(
        map.layers.len() == usize::from(model.layers),
        "{} layers, the model has {}",
        map.layers.len(),
        model.layers
    );
    ensure!(
        map.head.is_none() == model.tied_head,
        "a head of its own: {}, tied_head: {}",
        map.head.is_some(),
        model.tied_head
    );
    let mut end = WeightsEnd { offset: data_start, blocks: 0, padding_bytes: 0 };
    for weight in map.weights() {
        check_shape(&weight, model).map_err(|flaw| format!("{weight}: {flaw}"))?;
        end = end.behind(weight.place).map_err(|flaw| format!("{weight}: {flaw}"))?;
    }
    Ok(end)
}

/// The tables behind the weights, which end at `end`.
pub(crate) fn check_tables(
    map: &TableMap,
    model: &ModelConfig,
    mut end: WeightsEnd,
) -> Result<WeightsEnd, Flaw> {
    let count = map.tables.len();
    ensure!(count <= MAX_TABLES, "{count} tables, at most {MAX_TABLES} may be");
    let ordered = map.tables.windows(2).all(|t| (t[0].layer, t[0].kind) < (t[1].layer, t[1].kind));
    ensure!(ordered, "tables are not in the order of layers and kinds, or are there twice");
    for table in map.weights() {
        let layer = table.layer.map_or(0, |layer| layer.0);
        ensure!(layer < model.layers, "{table}: the model has {} layers", model.layers);
        let len = table.place.weight_bytes();
        let most = u64::from(MAX_BLOCKS) * TABLE_BLOCK_BYTES;
        ensure!((1..=most).contains(&len), "{table}: {len} bytes, 1 to {most} may be");
        end = end.behind(table.place).map_err(|flaw| format!("{table}: {flaw}"))?;
    }
    Ok(end)
}

pub(crate) fn check_settings(settings: &Settings) -> Check {
    let share = settings.exact_share;
    ensure!((0.0..=1.0).contains(&share), "exact_share is {share}, 0 to 1 may be");
    check_positive("perplexity", settings.perplexity)?;
    check_positive("dense_perplexity", settings.dense_perplexity)
}

/// What lies before the end of the last weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WeightsEnd {
    pub(crate) offset: u64,
    pub(crate) blocks: u32,
    pub(crate) padding_bytes: u64,
}

impl WeightsEnd {
    /// The end moved behind `place`, whose shape is checked and which must start here.
    fn behind(self, place: Place) -> Result<WeightsEnd, Flaw> {
        let block_bytes = place.block_bytes();
        ensure!(
            block_bytes <= MAX_BLOCK_BYTES,
            "tiles or blocks of {block_bytes} bytes, at most {MAX_BLOCK_BYTES} may be"
        );
        let offset = match place {
            Place::Matrix(matrix) => matrix.offset,
            Place::Ffn(ffn) => ffn.offset,
            Place::Table(table) => table.offset,
        };
        ensure!(offset == self.offset, "offset is {offset}, {} is wanted", self.offset);
        let first = place.first_block().0;
        ensure!(first == self.blocks, "first block is {first}, {} is wanted", self.blocks);
        let blocks = self.blocks.saturating_add(place.blocks());
        ensure!(blocks <= MAX_BLOCKS, "more than {MAX_BLOCKS} tiles and blocks");
        let extent = place.extent();
        let offset = offset.checked_add(extent.len).ok_or("it ends beyond any file")?;
        let padding_bytes = self.padding_bytes + (extent.len - place.weight_bytes());
        Ok(WeightsEnd { offset, blocks, padding_bytes })
    }
}

fn check_shape(weight: &Weight, model: &ModelConfig) -> Check {
    let (query, kv) = (model.query_width(), model.kv_width());
    let (rows, cols) = match weight.tensor {
        Tensor::QProj => (query, model.hidden),
        Tensor::KProj | Tensor::VProj => (kv, model.hidden),
        Tensor::OProj => (model.hidden, query),
        Tensor::Ffn => (model.ffn_hidden, model.hidden),
        Tensor::Head | Tensor::Embedding => (model.vocab_size, model.hidden),
        Tensor::Table(_) => return Ok(()),
    };
    let (found, dtype, unit) = match weight.place {
        Place::Matrix(matrix) => ((matrix.rows, matrix.cols), matrix.dtype, matrix.tile_rows),
        Place::Ffn(ffn) => ((ffn.neurons, ffn.hidden), ffn.dtype, ffn.block_neurons),
        Place::Table(_) => return Ok(()),
    };
    ensure!(
        found == (rows, cols),
        "shape is {} x {}, the model says {rows} x {cols}",
        found.0,
        found.1
    );
    ensure!(
        dtype == DType::F16 || cols.is_multiple_of(QUANT_GROUP),
        "rows of {cols} weights cannot be {dtype:?}, only multiples of {QUANT_GROUP}"
    );
    ensure!(
        (1..=rows).contains(&unit),
        "{unit} rows or neurons a tile or block, 1 to {rows} may be"
    );
    if let Place::Matrix(matrix) = weight.place {
        let tile_bytes = u64::from(unit) * matrix.row_bytes();
        ensure!(
            unit == rows || tile_bytes.is_multiple_of(crate::extent::BLOCK_ALIGNMENT),
            "tiles of {tile_bytes} bytes, no multiple of 64"
        );
    }
    Ok(())
}

/// Lengths of a layer's vectors in the order of the file; a model has these and no others.
pub(crate) fn vector_lens(model: &ModelConfig) -> [u32; 7] {
    let when = |present, len| if present { len } else { 0 };
    [
        model.hidden,
        model.hidden,
        when(model.qkv_bias, model.query_width()),
        when(model.qkv_bias, model.kv_width()),
        when(model.qkv_bias, model.kv_width()),
        when(model.qk_norm, model.head_dim),
        when(model.qk_norm, model.head_dim),
    ]
}

/// Bytes of the section Vectors of a checked model.
pub(crate) fn vectors_bytes(model: &ModelConfig) -> u64 {
    let layer: u64 = vector_lens(model).into_iter().map(u64::from).sum();
    4 * (u64::from(model.layers) * layer + u64::from(model.hidden))
}

/// A layer's vectors in the order of the file, with their names.
pub(crate) fn named_vectors(layer: &LayerVectors) -> [(&'static str, &[f32]); 7] {
    [
        ("attn_norm", &layer.attn_norm),
        ("mlp_norm", &layer.mlp_norm),
        ("q_bias", &layer.q_bias),
        ("k_bias", &layer.k_bias),
        ("v_bias", &layer.v_bias),
        ("q_norm", &layer.q_norm),
        ("k_norm", &layer.k_norm),
    ]
}

pub(crate) fn check_vectors(vectors: &Vectors, model: &ModelConfig) -> Check {
    ensure!(
        vectors.layers.len() == usize::from(model.layers),
        "{} layers, the model has {}",
        vectors.layers.len(),
        model.layers
    );
    let lens = vector_lens(model);
    for (index, layer) in vectors.layers.iter().enumerate() {
        for ((name, values), len) in named_vectors(layer).into_iter().zip(lens) {
            check_vector(values, len).map_err(|flaw| format!("layer {index} {name}: {flaw}"))?;
        }
    }
    check_vector(&vectors.final_norm, model.hidden).map_err(|flaw| format!("final_norm: {flaw}"))
}

fn check_vector(values: &[f32], len: u32) -> Check {
    ensure!(values.len() == len as usize, "{} values, the model says {len}", values.len());
    if let Some(index) = values.iter().position(|value| !value.is_finite()) {
        return Err(format!("value {index} is {}", values[index]));
    }
    Ok(())
}

/// The vocabulary may be shorter than the embedding table (some models pad it), but special tokens have a piece.
pub(crate) fn check_vocabulary(vocabulary: &Vocabulary, model: &ModelConfig) -> Check {
    let len = vocabulary.len();
    ensure!(len <= model.vocab_size, "{len} tokens, the model has {} rows", model.vocab_size);
    for &id in model.special.bos.iter().chain(&model.special.stop) {
        ensure!(id < len, "special token {id} is not among the {len} tokens");
    }
    Ok(())
}

pub(crate) fn check_placement(placement: &Placement, model: &ModelConfig) -> Check {
    let (len, layers) = (model.ffn_hidden as usize, usize::from(model.layers));
    let neurons = placement.neurons();
    ensure!(
        neurons.len() == len * layers,
        "{} entries, {} are wanted",
        neurons.len(),
        len * layers
    );
    let mut seen = vec![false; len];
    for (layer, order) in neurons.chunks_exact(len).enumerate() {
        seen.fill(false);
        for neuron in order {
            let fresh =
                seen.get_mut(neuron.index()).is_some_and(|seen| !std::mem::replace(seen, true));
            ensure!(fresh, "layer {layer}: neuron {neuron} is there twice or beyond {len}");
        }
    }
    Ok(())
}

pub(crate) fn check_text(text: &str) -> Check {
    ensure!(!text.is_empty(), "the text is empty");
    Ok(())
}
