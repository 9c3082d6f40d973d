//! Random predictors and tables of reuse, as `ls-prep` would learn them.

use super::Random;
use ls_bundle::ids::LayerId;
use ls_bundle::model::ModelConfig;
use ls_bundle::tables::TableKind;
use ls_cache::ReuseTable;
use ls_cache::policy::HazardTable;
use ls_hash::{
    BlockCode, BlockHead, Head, Input, MlpTables, MlpWeights, PlaneBits, Planes, Scaling,
    SignalTables, StackTables,
};

const CODE_BITS: usize = 64;
const MLP_UNITS: usize = 8;

/// The tables of a layer of `blocks` blocks, in the order of their kinds.
pub(super) fn tables_of(
    layer: LayerId,
    model: &ModelConfig,
    blocks: usize,
    random: &mut Random,
) -> [(LayerId, TableKind, Vec<u8>); 3] {
    let dims = model.hidden as usize;
    [
        (layer, TableKind::Predictor, stack(dims, blocks, random).to_bytes().unwrap()),
        (layer, TableKind::Reuse, ReuseTable::Hazard(hazard(blocks, random)).to_bytes()),
        (layer, TableKind::Mlp, mlp(dims, blocks, random).to_bytes()),
    ]
}

fn input(dims: usize) -> Input {
    Input { scaling: Scaling::Rms, center: vec![0.0; dims], gain: vec![30.0; dims] }
}

fn stack(dims: usize, blocks: usize, random: &mut Random) -> StackTables {
    let weights: Vec<f32> = (0..CODE_BITS * dims).map(|_| f32::from(random.next() as i8)).collect();
    let codes: Vec<u64> = (0..blocks).map(|_| random.next()).collect();
    StackTables {
        input: input(dims),
        stacks: 8,
        tau: 8,
        planes: Planes::quantize(dims, &weights, &[0.0; CODE_BITS], PlaneBits::Eight),
        hashes: Vec::new(),
        tables: Vec::new(),
        head: Head::Blocks(BlockHead {
            bits: CODE_BITS,
            code: BlockCode::Signs,
            signs: BlockHead::interleave(&codes, CODE_BITS),
            scales: (0..blocks).map(|_| 1 + random.next() as i16 % 8).collect(),
            biases: (0..blocks).map(|_| random.next() as i16 % 64).collect(),
            shift: 2,
            unit: 1.0,
            signals: Some(SignalTables {
                fast_rate: 9000,
                slow_rate: 600,
                fast_weight: 80,
                slow_weight: 40,
                previous_weight: 9,
                initial: vec![50; blocks],
            }),
        }),
    }
}

fn hazard(blocks: usize, random: &mut Random) -> HazardTable {
    HazardTable {
        recent: 3,
        rates: [12_000, 900],
        thresholds: [vec![100, 300, 600], vec![50, 200]],
        worths: (0..(4 * 3) << 3).map(|_| random.next() as u16).collect(),
        initial: (0..blocks).map(|_| random.next() as u16).collect(),
    }
}

fn mlp(dims: usize, blocks: usize, random: &mut Random) -> MlpTables {
    let mut ints = |len: usize| (0..len).map(|_| random.next() as i8 / 2).collect::<Vec<i8>>();
    MlpTables {
        input: input(dims),
        weights: MlpWeights::Int8 {
            first: ints(MLP_UNITS * dims),
            first_scales: vec![0.01; MLP_UNITS],
            second: ints(blocks * MLP_UNITS),
        },
        first_biases: vec![0.1; MLP_UNITS],
        scales: vec![0.02; blocks],
        biases: vec![0.0; blocks],
    }
}
