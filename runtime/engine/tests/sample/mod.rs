//! A small bundle on disk with weights from a seed, and a backend that only remembers what it was given.

mod learned;

use half::f16;
use ls_bundle::base;
use ls_bundle::blocks::Tensor;
use ls_bundle::identity::Identity;
use ls_bundle::ids::LayerId;
use ls_bundle::low_bit::{Codebook, Row, pack_row};
use ls_bundle::model::{
    Architecture, DType, LayerVectors, ModelConfig, RopeConfig, RopeScaling, SpecialTokens,
    Vectors, WeightTypes,
};
use ls_bundle::tables::{TABLE_BLOCK_BYTES, TableKind, TableMap};
use ls_bundle::tiles::{self, Over, matrix_bytes};
use ls_bundle::vocabulary::{TokenKind, Vocabulary};
use ls_bundle::{Bundle, BundleParts, BundleWriter, plan_weights};
use ls_compute::{
    BaseNeurons, BaseTables, ComputeBackend, MatrixRows, NeuronBlocks, Pass, Projection,
    ProjectionPart, is_chosen,
};
use std::path::Path;

pub(crate) fn config(tied_head: bool) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        name: "sample".into(),
        vocab_size: 500,
        hidden: 96,
        ffn_hidden: 300,
        layers: 3,
        heads: 6,
        kv_heads: 2,
        head_dim: 16,
        norm_epsilon: 1e-5,
        rope: RopeConfig { theta: 1e4, scaling: RopeScaling::None },
        context_length: 256,
        sliding_window: None,
        tied_head,
        qkv_bias: false,
        qk_norm: false,
        special: SpecialTokens::default(),
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// Writes a bundle whose half-precision weights are small and random.
pub(crate) fn write_bundle(path: &Path, model: ModelConfig, block_neurons: u32) -> Bundle {
    write(path, model, block_neurons, false)
}

/// The same with random tables of all kinds. A base (3 bits) wants a width that is a multiple of 64.
pub(crate) fn write_based_bundle(path: &Path, model: ModelConfig, block_neurons: u32) -> Bundle {
    write(path, model, block_neurons, true)
}

fn write(path: &Path, model: ModelConfig, block_neurons: u32, based: bool) -> Bundle {
    let weights = plan_weights(&model, WeightTypes::all(DType::F16), block_neurons).unwrap();
    let ones = vec![1.0; model.hidden as usize];
    let layer =
        LayerVectors { attn_norm: ones.clone(), mlp_norm: ones.clone(), ..LayerVectors::default() };
    let vectors = Vectors { layers: vec![layer; usize::from(model.layers)], final_norm: ones };
    let piece = |id: u32| (format!(" w{id}").into_bytes(), TokenKind::Normal);
    let mut random = Random(7);
    let contents: Vec<_> = if based {
        let blocks = model.ffn_hidden.div_ceil(block_neurons) as usize;
        let tables = |layer| {
            let [base, scores] = base_of(layer, &model, &mut random);
            let [predictor, reuse, mlp] = learned::tables_of(layer, &model, blocks, &mut random);
            [predictor, base, scores, reuse, mlp]
        };
        model.layer_ids().flat_map(tables).collect()
    } else {
        Vec::new()
    };
    let lens: Vec<_> = contents.iter().map(|(l, kind, b)| (*l, *kind, b.len() as u64)).collect();
    let parts = BundleParts {
        identity: Identity { source_hash: "0".repeat(64), ..Identity::default() },
        vectors,
        tokenizer: "{}".into(),
        vocabulary: Vocabulary::new((0..model.vocab_size).map(piece)).unwrap(),
        chat_template: None,
        placement: None,
        tables: based.then(|| TableMap::behind(&weights, &lens)),
        settings: None,
        weights,
        model,
    };
    let mut writer = BundleWriter::create(path, parts).unwrap();
    while let Some(block) = writer.next_block() {
        if let Tensor::Table(kind) = block.name.tensor {
            let of =
                |t: &&(LayerId, TableKind, Vec<u8>)| (Some(t.0), t.1) == (block.name.layer, kind);
            let (_, _, content) = contents.iter().find(of).unwrap();
            let start = block.name.index as usize * TABLE_BLOCK_BYTES as usize;
            writer.write_block(&content[start..][..block.weight_bytes as usize]).unwrap();
            continue;
        }
        // Sign, an exponent of about -3, ten random bits.
        let half = |r: u64| (0x2C00 | (r as u16 & 0x83FF)).to_le_bytes();
        let bytes: Vec<u8> =
            (0..block.weight_bytes / 2).flat_map(|_| half(random.next())).collect();
        writer.write_block(&bytes).unwrap();
    }
    writer.finish().unwrap();
    Bundle::open(path).unwrap()
}

/// A layer's base: random codes, scales and tables.
fn base_of(
    layer: LayerId,
    model: &ModelConfig,
    random: &mut Random,
) -> [(LayerId, TableKind, Vec<u8>); 2] {
    let (neurons, cols) = (model.ffn_hidden, model.hidden);
    let book = Codebook::new(&[-127, -80, -45, -15, 15, 45, 80, 127]).unwrap();
    let row = |random: &mut Random| {
        let codes: Vec<u8> = (0..cols).map(|_| (random.next() % 8) as u8).collect();
        let scales = vec![f16::from_f32(0.1); cols as usize / 64];
        let mut row = vec![0; book.bits().row_bytes(cols)];
        pack_row(book.bits(), &codes, &scales, &mut row);
        row
    };
    let mut tiles = Vec::new();
    for over in [Over::Hidden, Over::Hidden, Over::Neurons] {
        let rows: Vec<_> = (0..neurons).map(|_| row(random)).collect();
        let rows: Vec<_> = rows.iter().map(|bytes| Row::new(&book, bytes)).collect();
        let mut matrix = vec![0; matrix_bytes(book.bits(), neurons, cols)];
        tiles::pack(over, &rows, &mut matrix);
        tiles.extend(matrix);
    }
    let mut floats =
        |len: u32| -> Vec<f32> { (0..len).map(|_| (random.next() >> 40) as f32 * 1e-8).collect() };
    let tables = base::BaseTables {
        cols,
        codebooks: [Some(book); 3],
        offset: floats(neurons),
        slope: floats(neurons),
        down_error: floats(neurons),
        gate_error: floats(neurons),
        up_error: floats(neurons),
        constant: floats(cols),
    };
    [(layer, TableKind::Base, tiles), (layer, TableKind::BaseScores, tables.to_bytes())]
}

/// Folds every weight it is given into a hash that does not depend on how weights are cut into parts, but on their
/// values and their order. Its logits are the bits of that hash.
pub(crate) struct HashBackend {
    hash: u64,
    logits: Vec<f32>,
    scores: Vec<f32>,
}

impl HashBackend {
    pub(crate) fn new() -> HashBackend {
        HashBackend { hash: 0, logits: vec![0.0; 64], scores: Vec::new() }
    }

    fn fold(&mut self, tag: u64, bytes: &[u8]) {
        let mut hash = self.hash ^ tag.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for pair in bytes.chunks_exact(2) {
            let half = u64::from(u16::from_le_bytes([pair[0], pair[1]]));
            hash = (hash.rotate_left(5) ^ half).wrapping_mul(0x517C_C1B7_2722_0A95);
        }
        self.hash = hash;
    }

    fn rows(&mut self, tag: u64, rows: &MatrixRows<'_>) {
        let row_bytes = rows.dtype.row_bytes(rows.cols) as usize;
        for (row, bytes) in (rows.first_row..).zip(rows.bytes.chunks_exact(row_bytes)) {
            self.fold(tag << 32 | u64::from(row), bytes);
        }
    }
}

impl ComputeBackend for HashBackend {
    fn begin(&mut self, pass: Pass<'_>) {
        self.hash ^= u64::from(pass.first_position) << 20 | u64::from(pass.tokens);
    }

    fn embed(&mut self, index: u32, row: MatrixRows<'_>) {
        // Rows may be set in any order, and twice.
        let before = std::mem::replace(&mut self.hash, u64::from(index));
        self.rows(1, &row);
        self.hash = if index == 0 { self.hash ^ before.rotate_left(1) } else { before };
    }

    fn attn_input(&mut self, layer: LayerId) {
        self.fold(2 << 40 | u64::from(layer.0), &[]);
    }

    fn project(&mut self, layer: LayerId, parts: &[ProjectionPart<'_>]) {
        for part in parts {
            let tag = match part.projection {
                Projection::Query => 3,
                Projection::Key => 4,
                Projection::Value => 5,
                Projection::Output => 6,
            };
            self.rows(tag << 8 | u64::from(layer.0), &part.rows);
        }
    }

    fn attend(&mut self, layer: LayerId) {
        self.fold(7 << 40 | u64::from(layer.0), &[]);
    }

    fn mlp_input(&mut self, layer: LayerId) {
        self.fold(8 << 40 | u64::from(layer.0), &[]);
    }

    fn mlp(&mut self, _layer: LayerId, blocks: &NeuronBlocks<'_>) {
        for index in 0..blocks.neurons {
            self.fold(9 << 40 | u64::from(blocks.first_neuron + index), blocks.neuron(index));
        }
    }

    fn mlp_blocks(&mut self, layer: LayerId, blocks: &[NeuronBlocks<'_>]) {
        blocks.iter().for_each(|blocks| self.mlp(layer, blocks));
    }

    fn estimate(&mut self, layer: LayerId, base: &BaseNeurons<'_>, _tables: &BaseTables<'_>) {
        self.fold(13 << 40 | u64::from(layer.0), &[]);
        let hash = self.hash;
        let score = |neuron: u64| (hash.rotate_left(neuron as u32 % 64) ^ neuron) as u16;
        self.scores = (0..base.neurons() as u64).map(|n| f32::from(score(n))).collect();
    }

    fn scores(&self) -> &[f32] {
        &self.scores
    }

    fn feature(&self, out: &mut [f32]) {
        for (bit, x) in out.iter_mut().enumerate() {
            *x = f32::from((self.hash >> (bit % 61)) as u8);
        }
    }

    fn importance(&mut self, _layer: LayerId, blocks: &NeuronBlocks<'_>, out: &mut [f32]) {
        for (x, neuron) in out.iter_mut().zip(blocks.first_neuron..) {
            *x = f32::from((self.hash.rotate_left(neuron % 64) ^ u64::from(neuron)) as u16);
        }
    }

    fn stand_in(
        &mut self,
        _layer: LayerId,
        base: &BaseNeurons<'_>,
        _tables: &BaseTables<'_>,
        chosen: &[u64],
    ) {
        for neuron in (0..base.neurons()).filter(|&neuron| !is_chosen(chosen, neuron)) {
            let mut down = vec![0.0; base.hidden() as usize];
            base.down().expect("a base with all parts").decode(neuron, &mut down);
            let bytes: Vec<u8> = down.iter().flat_map(|weight| weight.to_le_bytes()).collect();
            self.fold(14 << 40 | neuron as u64, &bytes);
        }
    }

    fn mlp_output(&mut self, layer: LayerId) {
        self.fold(10 << 40 | u64::from(layer.0), &[]);
    }

    fn head_input(&mut self) {
        self.fold(11 << 40, &[]);
    }

    fn head(&mut self, rows: &MatrixRows<'_>) {
        self.rows(12, rows);
        for bit in 0..64 {
            self.logits[bit] = ((self.hash >> bit) & 1) as f32;
        }
    }

    fn logits(&self) -> &[f32] {
        &self.logits
    }

    fn nll(&self) -> &[f32] {
        &self.logits[..0]
    }
}
