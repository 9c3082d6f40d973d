//! FFNs that run in part beside a random low-bit base: what [`check_base`](super::check_base) drives.

use super::model::{Rng, TinyModel, build, llama};
use super::{
    Cut, DECODE_ERROR_MAX_BASE, Driver, SCORES_ERROR_MAX, Setup, assert_near, assert_same_bits,
    decode_error_max,
};
use crate::base::{BaseNeurons, BaseTables, is_chosen};
use crate::reference::{ReferenceBase, ReferenceState};
use crate::{ComputeBackend, NeuronBlocks, dequantize_row};
use half::f16;
use ls_bundle::ids::LayerId;
use ls_bundle::low_bit::{Codebook, GROUP, Row, UNIT, pack_row};
use ls_bundle::model::{DType, ModelConfig};
use ls_bundle::tiles::{self, Over, matrix_bytes};

/// Tables of a layer, as [`BaseTables`].
#[derive(Clone, Debug, Default)]
struct Tables {
    offset: Vec<f32>,
    slope: Vec<f32>,
    down_error: Vec<f32>,
    gate_error: Vec<f32>,
    up_error: Vec<f32>,
    constant: Vec<f32>,
}

/// The low-bit copy of a model's FFNs.
#[derive(Clone, Debug)]
pub struct TinyBase {
    shape: (u32, u32),
    gate_and_up: [Codebook; 2],
    down: Option<Codebook>,
    /// Tiles and tables of each layer.
    layers: Vec<(Vec<u8>, Tables)>,
}

impl TinyBase {
    /// Rounds the FFNs of `model` to `bits` of gate, up and down (0: no down); tables are drawn.
    #[must_use]
    pub fn new(model: &TinyModel, bits: [u32; 3], seed: u64) -> TinyBase {
        let mut rng = Rng(seed);
        let [gate, up, down] = bits.map(|bits| draw_codebook(bits, &mut rng));
        let gate_and_up = [gate, up].map(|codebook| codebook.expect("gate and up have bits"));
        let layer = |layer| draw_layer(model, layer, [gate, up, down], &mut rng);
        let layers = model.config.layer_ids().map(layer).collect();
        let shape = (model.config.ffn_hidden, model.config.hidden);
        TinyBase { shape, gate_and_up, down, layers }
    }

    /// A layer's neurons and tables.
    #[must_use]
    pub fn layer(&self, layer: LayerId) -> (BaseNeurons<'_>, BaseTables<'_>) {
        let (bytes, tables) = &self.layers[layer.index()];
        let neurons = BaseNeurons::new(bytes, self.shape, self.gate_and_up, self.down);
        let tables = BaseTables {
            offset: &tables.offset,
            slope: &tables.slope,
            down_error: &tables.down_error,
            gate_error: &tables.gate_error,
            up_error: &tables.up_error,
            constant: &tables.constant,
        };
        (neurons, tables)
    }
}

/// Values in no particular order, the extremes among them.
fn draw_codebook(bits: u32, rng: &mut Rng) -> Option<Codebook> {
    let mut values: Vec<i8> = (0..1 << bits).map(|_| rng.bits() as i8).collect();
    let last = values.len() - 1;
    (values[0], values[last]) = (-128, 127);
    (bits > 0).then(|| Codebook::new(&values).expect("2, 4, 8 or 16 values"))
}

fn draw_layer(
    model: &TinyModel,
    layer: LayerId,
    codebooks: [Option<Codebook>; 3],
    rng: &mut Rng,
) -> (Vec<u8>, Tables) {
    let ffn = &model.map.layers[layer.index()].ffn;
    let blocks = model.neuron_blocks(layer, 0, ffn.blocks());
    let mut tables = Tables::default();
    // Of gate, up and down: the rows of all neurons, one behind the other.
    let mut rows: [Vec<u8>; 3] = Default::default();
    let mut weights = vec![0.0; ffn.hidden as usize];
    for neuron in 0..ffn.neurons {
        let neuron = blocks.neuron(neuron);
        let parts = neuron.chunks_exact(neuron.len() / 3).zip(&codebooks);
        for ((row, codebook), rows) in parts.zip(&mut rows) {
            dequantize_row(ffn.dtype, row, &mut weights);
            if let Some(codebook) = codebook {
                round_row(&weights, codebook, rows);
            }
        }
        tables.offset.push(0.1 * rng.unit());
        tables.slope.push(0.7 + 0.3 * rng.unit());
        for table in [&mut tables.down_error, &mut tables.gate_error, &mut tables.up_error] {
            table.push(1.0 + rng.unit());
        }
    }
    tables.constant = (0..ffn.hidden).map(|_| 0.3 * rng.unit()).collect();
    let sums = [Over::Hidden, Over::Hidden, Over::Neurons];
    let mut bytes = Vec::new();
    for ((over, codebook), rows) in sums.into_iter().zip(&codebooks).zip(&rows) {
        let Some(codebook) = codebook else { continue };
        let row_bytes = codebook.bits().row_bytes(ffn.hidden);
        let rows: Vec<Row<'_>> =
            rows.chunks_exact(row_bytes).map(|row| Row::new(codebook, row)).collect();
        let start = bytes.len();
        bytes.resize(start + matrix_bytes(codebook.bits(), ffn.neurons, ffn.hidden), 0);
        tiles::pack(over, &rows, &mut bytes[start..]);
    }
    (bytes, tables)
}

/// Appends `weights`, each rounded to the nearest value of the codebook.
fn round_row(weights: &[f32], codebook: &Codebook, bytes: &mut Vec<u8>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for weights in weights.chunks_exact(GROUP) {
        let largest = weights.iter().fold(0f32, |largest, w| largest.max(w.abs()));
        let scale = f16::from_f32(largest);
        let distance =
            |value: i8, weight: f32| (scale.to_f32() * f32::from(value) / UNIT - weight).abs();
        codes.extend(weights.iter().map(|&weight| {
            let values = codebook.values().iter().zip(0u8..);
            let nearest = values
                .min_by(|(a, _), (b, _)| distance(**a, weight).total_cmp(&distance(**b, weight)));
            nearest.expect("a codebook has values").1
        }));
        scales.push(scale);
    }
    let start = bytes.len();
    bytes.resize(start + codebook.bits().row_bytes(weights.len() as u32), 0);
    pack_row(codebook.bits(), &codes, &scales, &mut bytes[start..]);
}

/// What sparse decode tells besides logits, layer after layer.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Of the base.
    pub(super) scores: Vec<f32>,
    /// What each FFN has added to the feature.
    sums: Vec<f32>,
    /// Of all neurons.
    importance: Vec<f32>,
}

/// In which order the blocks of a layer run.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    /// As they are numbered.
    Ascending,
    /// As this seed shuffles them.
    Shuffled(u64),
}

/// How decode runs FFNs.
#[derive(Clone, Copy, Debug)]
pub struct Sparse<'a> {
    /// The base.
    pub base: &'a TinyBase,
    /// One bit a neuron, for each layer; whole blocks.
    pub chosen: &'a [Vec<u64>],
    /// Order of the blocks that run.
    pub order: Order,
    /// Blocks of a call.
    pub call_blocks: usize,
    /// Whether stand-ins come before exact neurons, or after them.
    pub stand_ins_first: bool,
}

impl Sparse<'_> {
    /// Everything between `mlp_input` and `mlp_output`.
    pub(super) fn run<B: ComputeBackend>(
        &self,
        model: &TinyModel,
        backend: &mut B,
        layer: LayerId,
        seen: &mut Seen,
    ) {
        let (base, tables) = self.base.layer(layer);
        let chosen = &self.chosen[layer.index()];
        let hidden = model.config.hidden as usize;
        let feature = |backend: &B| {
            let mut feature = vec![f32::NAN; hidden];
            backend.feature(&mut feature);
            feature
        };
        let before = feature(backend);
        backend.estimate(layer, &base, &tables);
        seen.scores.extend_from_slice(backend.scores());
        if self.stand_ins_first {
            backend.stand_in(layer, &base, &tables, chosen);
        }
        let blocks = self.blocks(model, layer);
        for blocks in blocks.chunks(self.call_blocks) {
            backend.mlp_blocks(layer, blocks);
        }
        if !self.stand_ins_first {
            backend.stand_in(layer, &base, &tables, chosen);
        }
        seen.sums.extend(feature(backend).iter().zip(before).map(|(after, before)| after - before));
        let all = model.neuron_blocks(layer, 0, model.map.layers[layer.index()].ffn.blocks());
        let mut importance = vec![f32::NAN; all.neurons as usize];
        backend.importance(layer, &all, &mut importance);
        seen.importance.extend(importance);
    }

    /// The chosen blocks in their order.
    fn blocks<'m>(&self, model: &'m TinyModel, layer: LayerId) -> Vec<NeuronBlocks<'m>> {
        let ffn = &model.map.layers[layer.index()].ffn;
        let chosen = |&block: &u32| {
            is_chosen(&self.chosen[layer.index()], (block * ffn.block_neurons) as usize)
        };
        let mut blocks: Vec<u32> = (0..ffn.blocks()).filter(chosen).collect();
        if let Order::Shuffled(seed) = self.order {
            let mut rng = Rng(seed);
            for end in (1..blocks.len()).rev() {
                blocks.swap(end, rng.below(end as u32 + 1) as usize);
            }
        }
        blocks.into_iter().map(|block| model.neuron_blocks(layer, block, 1)).collect()
    }
}

/// Chooses `share` of 16 of each layer's blocks.
fn choose(model: &TinyModel, share: u32, seed: u64) -> Vec<Vec<u64>> {
    let mut rng = Rng(seed);
    let mut layer = |ffn: &ls_bundle::model::FfnExtent| {
        let mut chosen = vec![0u64; (ffn.neurons as usize).div_ceil(64)];
        for block in (0..ffn.blocks()).filter(|_| rng.below(16) < share) {
            let first = block * ffn.block_neurons;
            for neuron in first..(first + ffn.block_neurons).min(ffn.neurons) {
                chosen[neuron as usize / 64] |= 1 << (neuron % 64);
            }
        }
        chosen
    };
    model.map.layers.iter().map(|layer_extents| layer(&layer_extents.ffn)).collect()
}

/// Models whose rows are whole groups of a base.
#[must_use]
pub fn base_models(dtype: DType, seed: u64) -> Vec<TinyModel> {
    let one_group = ModelConfig {
        name: "rows of one group, blocks of one neuron".into(),
        vocab_size: 64,
        hidden: 64,
        ffn_hidden: 53,
        heads: 2,
        ..llama()
    };
    let some_groups = ModelConfig {
        name: "rows of five groups, blocks of three neurons".into(),
        hidden: 320,
        ffn_hidden: 200,
        ..llama()
    };
    let many_groups = ModelConfig {
        name: "rows of ten groups, blocks of sixteen neurons".into(),
        hidden: 640,
        ffn_hidden: 330,
        layers: 1,
        ..llama()
    };
    [(one_group, 1, 15), (some_groups, 3, 7), (many_groups, 16, 5)]
        .map(|(config, block_neurons, tokens)| build(config, dtype, block_neurons, tokens, seed))
        .into()
}

/// Runs all checks of sparse decode on `model`, which has rows of whole groups, with a base of `bits`.
pub fn check_base<B: ComputeBackend>(
    model: &TinyModel,
    bits: [u32; 3],
    seed: u64,
    make: &dyn Fn(Setup<'_>) -> B,
) {
    let base = TinyBase::new(model, bits, seed);
    for share in [0, 5, 16] {
        let chosen = choose(model, share, seed);
        matches_reference(model, &base, &chosen, make);
        only_the_order_matters(model, &base, &chosen, make);
    }
    everything_is_dense(model, &base, make);
}

/// Logits and scores equal the reference's.
fn matches_reference<B: ComputeBackend>(
    model: &TinyModel,
    base: &TinyBase,
    chosen: &[Vec<u64>],
    make: &dyn Fn(Setup<'_>) -> B,
) {
    let sparse =
        Sparse { base, chosen, order: Order::Shuffled(1), call_blocks: 7, stand_ins_first: true };
    let mut driver = Driver::new(model, make, 2, Cut::WHOLE).with(sparse);
    let logits = driver.decode_all();
    let layers = model.config.layer_ids().map(|layer| {
        let (base, tables) = base.layer(layer);
        ReferenceBase::read(&base, &tables)
    });
    let layers: Vec<ReferenceBase> = layers.collect();
    let mut state = ReferenceState::with_f16_cache(&model.config);
    let (mut want, mut seen) = (Vec::new(), Seen::default());
    for (position, &token) in (0..).zip(&model.tokens) {
        want.extend(model.reference.forward_with(&mut state, token, position, |layer, w, h| {
            seen.scores.extend(layers[layer].estimate(h).iter().map(|&(_, score)| score as f32));
            seen.importance.extend(w.importance(h).iter().map(|&importance| importance as f32));
            let sum = layers[layer].ffn(w, h, |neuron| is_chosen(&chosen[layer], neuron));
            seen.sums.extend(sum.iter().map(|&sum| sum as f32));
            sum
        }));
    }
    let error_max = decode_error_max(model) + DECODE_ERROR_MAX_BASE;
    assert_near(model, "decode beside a base", &logits, &want, error_max);
    assert_near(model, "scores", &driver.seen.scores, &seen.scores, SCORES_ERROR_MAX);
    assert_near(model, "sums", &driver.seen.sums, &seen.sums, error_max);
    assert_near(model, "importance", &driver.seen.importance, &seen.importance, error_max);
}

/// The same bits with any number of threads and however neurons are split into calls; another order of the neurons
/// gives nearly the same.
fn only_the_order_matters<B: ComputeBackend>(
    model: &TinyModel,
    base: &TinyBase,
    chosen: &[Vec<u64>],
    make: &dyn Fn(Setup<'_>) -> B,
) {
    let results = |threads, order, call_blocks, stand_ins_first| {
        let sparse = Sparse { base, chosen, order, call_blocks, stand_ins_first };
        let mut driver = Driver::new(model, make, threads, Cut::WHOLE).with(sparse);
        (driver.decode_last(), driver.seen.scores)
    };
    let ascending = results(1, Order::Ascending, usize::MAX, true);
    for order in [Order::Ascending, Order::Shuffled(1), Order::Shuffled(2)] {
        let one = results(1, order, usize::MAX, true);
        for (threads, call_blocks, stand_ins_first) in
            [(1, 3, false), (2, 5, true), (3, usize::MAX, false), (5, 1, true)]
        {
            let what = format!("sparse decode, {threads} threads, {call_blocks} blocks a call");
            let other = results(threads, order, call_blocks, stand_ins_first);
            assert_same_bits(model, &what, &other.0, &one.0);
            assert_same_bits(model, &format!("scores, {what}"), &other.1, &one.1);
        }
        // Sums of f32 in another order, and activations that are rounded to the other side.
        let error_max = decode_error_max(model).max(1e-5);
        assert_near(model, "another order", &one.0, &ascending.0, error_max);
    }
}

/// Whoever chooses all neurons gets the bits of dense decode, whatever the base says.
fn everything_is_dense<B: ComputeBackend>(
    model: &TinyModel,
    base: &TinyBase,
    make: &dyn Fn(Setup<'_>) -> B,
) {
    let dense = Driver::new(model, make, 2, Cut::WHOLE).decode_all();
    let chosen = &choose(model, 16, 0);
    for (call_blocks, stand_ins_first) in [(usize::MAX, true), (1, false), (5, true)] {
        let order = Order::Ascending;
        let sparse = Sparse { base, chosen, order, call_blocks, stand_ins_first };
        let all = Driver::new(model, make, 3, Cut::WHOLE).with(sparse).decode_all();
        assert_same_bits(model, "decode with everything chosen", &all, &dense);
    }
}
