//! Random stacks, in the plain form the equations speak of and packed.

use ls_hash::{
    BinaryHash, BlockCode, BlockHead, Head, Input, PlaneBits, Planes, Quantiles, Scaling,
    SignalTables, StackTables, Table, bits,
};
use proptest::prelude::*;

/// Reproducible numbers (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct Draw(pub(crate) u64);

impl Draw {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.bits() % n
    }

    /// -1 to 1.
    pub(crate) fn unit(&mut self) -> f32 {
        self.bits() as i32 as f32 / 2f32.powi(31)
    }

    pub(crate) fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }

    pub(crate) fn signs(&mut self, len: usize) -> Vec<i32> {
        (0..len).map(|_| if self.below(2) == 0 { -1 } else { 1 }).collect()
    }
}

/// A stack's sizes, and what its head does.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) dims: usize,
    pub(crate) stacks: usize,
    pub(crate) tau: usize,
    pub(crate) width: usize,
    pub(crate) layers: usize,
    pub(crate) last_table: bool,
    pub(crate) planes: Option<PlaneBits>,
    pub(crate) scaling: Scaling,
    pub(crate) head: HeadKind,
    pub(crate) seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum HeadKind {
    Code,
    Class,
    Value,
    Signs,
    Levels,
}

/// All shapes that are allowed, small.
pub(crate) fn shapes() -> impl Strategy<Value = Shape> {
    let planes = prop::sample::select(vec![
        None,
        Some(PlaneBits::Eight),
        Some(PlaneBits::Four),
        Some(PlaneBits::Two),
    ]);
    let heads = prop::sample::select(vec![
        HeadKind::Code,
        HeadKind::Class,
        HeadKind::Value,
        HeadKind::Signs,
        HeadKind::Levels,
    ]);
    let sizes = (1usize..150, 1usize..5, 1usize..6, prop::sample::select(vec![8, 24, 64, 128]));
    (sizes, 1usize..6, any::<(bool, bool)>(), planes, heads, any::<u64>()).prop_map(
        |((dims, stacks, tau, width), layers, (last_table, rms), planes, head, seed)| {
            let scaling = if rms { Scaling::Rms } else { Scaling::Fixed };
            let mut shape =
                Shape { dims, stacks, tau, width, layers, last_table, planes, scaling, head, seed };
            match head {
                HeadKind::Class | HeadKind::Value => (shape.stacks, shape.last_table) = (1, false),
                HeadKind::Levels => {
                    (shape.layers, shape.last_table) = (1, false);
                    shape.planes = planes.or(Some(PlaneBits::Eight));
                }
                HeadKind::Code | HeadKind::Signs => {}
            }
            shape
        },
    )
}

/// Number of blocks of a head: not whole groups.
pub(crate) const BLOCKS: usize = 45;

/// What the equations speak of. Signs are numbers, +1 and -1.
pub(crate) struct Plain {
    pub(crate) shape: Shape,
    pub(crate) center: Vec<f32>,
    pub(crate) gain: Vec<f32>,
    /// W of the first layer by row, and what is added to the rows' sums.
    pub(crate) planes: Vec<Vec<f32>>,
    pub(crate) plane_bias: Vec<f32>,
    /// W of the other layers by row, and what is added.
    pub(crate) hashes: Vec<Vec<Vec<i32>>>,
    pub(crate) hash_bias: Vec<Vec<i16>>,
    /// T by layer, stack and index.
    pub(crate) tables: Vec<Vec<Vec<Vec<i32>>>>,
    pub(crate) level_gains: Vec<f32>,
    pub(crate) blocks: Vec<Vec<i32>>,
    pub(crate) scales: Vec<i16>,
    pub(crate) biases: Vec<i16>,
    pub(crate) labels: Vec<u32>,
    pub(crate) values: Vec<f32>,
}

impl Plain {
    pub(crate) fn random(shape: &Shape) -> Plain {
        let s = shape.clone();
        let mut draw = Draw(s.seed);
        let rows = s.stacks * s.tau;
        let tables = s.layers - usize::from(!s.last_table);
        let code_bits = if s.last_table { s.stacks * s.width } else { rows };
        let mut weight = |bits: Option<PlaneBits>| match bits {
            None => draw.unit(),
            Some(PlaneBits::Eight) => draw.below(255) as f32 - 127.0,
            Some(PlaneBits::Four) => draw.below(16) as f32 - 8.0,
            Some(PlaneBits::Two) => 2.0 * draw.below(4) as f32 - 3.0,
        };
        let planes: Vec<Vec<f32>> =
            (0..rows).map(|_| (0..s.dims).map(|_| weight(s.planes)).collect()).collect();
        let hash = |draw: &mut Draw| (0..rows).map(|_| draw.signs(s.stacks * s.width)).collect();
        let hashes: Vec<_> = (1..s.layers).map(|_| hash(&mut draw)).collect();
        let table = |draw: &mut Draw| {
            (0..s.stacks).map(|_| (0..1 << s.tau).map(|_| draw.signs(s.width)).collect()).collect()
        };
        Plain {
            center: draw.floats(s.dims).iter().map(|c| 0.1 * c).collect(),
            gain: draw.floats(s.dims).iter().map(|g| 100.0 * g).collect(),
            plane_bias: draw.floats(rows).iter().map(|b| (b * 500.0).round()).collect(),
            hash_bias: hashes
                .iter()
                .map(|_| (0..rows).map(|_| draw.below(7) as i16 - 3).collect())
                .collect(),
            tables: (0..tables).map(|_| table(&mut draw)).collect(),
            level_gains: draw.floats(code_bits).iter().map(|g| 0.003 * g).collect(),
            blocks: (0..BLOCKS).map(|_| draw.signs(code_bits)).collect(),
            scales: (0..BLOCKS).map(|_| draw.bits() as i16).collect(),
            biases: (0..BLOCKS).map(|_| draw.bits() as i16).collect(),
            labels: (0..1 << s.tau).map(|_| draw.bits() as u32).collect(),
            values: (0..1 << s.tau).map(|v| v as f32 * 1.5).collect(),
            planes,
            hashes,
            shape: s,
        }
    }

    pub(crate) fn pack(&self) -> StackTables {
        let s = &self.shape;
        let (weights, bias) = (self.planes.concat(), &self.plane_bias);
        let planes = match s.planes {
            None => Planes::from_f32(s.dims, &weights, bias),
            Some(few) => Planes::from_rounded(s.dims, &weights, bias, few),
        };
        let hash = |(rows, bias): (&Vec<Vec<i32>>, &Vec<i16>)| BinaryHash {
            inputs: s.stacks * s.width,
            rows: rows.iter().flat_map(|row| packed(row)).collect(),
            bias: bias.clone(),
        };
        let table = |stacks: &Vec<Vec<Vec<i32>>>| Table {
            width: s.width,
            rows: stacks.iter().flatten().flat_map(|row| bytes(row)).collect(),
        };
        StackTables {
            input: Input {
                scaling: s.scaling,
                center: self.center.clone(),
                gain: self.gain.clone(),
            },
            stacks: s.stacks,
            tau: s.tau,
            planes,
            hashes: self.hashes.iter().zip(&self.hash_bias).map(hash).collect(),
            tables: self.tables.iter().map(table).collect(),
            head: self.head(),
        }
    }

    fn head(&self) -> Head {
        let code = match self.shape.head {
            HeadKind::Code => return Head::Code,
            HeadKind::Class => return Head::Class(self.labels.clone()),
            HeadKind::Value => {
                let thresholds = self.values[1..].to_vec();
                return Head::Value(Quantiles { thresholds, values: self.values.clone() });
            }
            HeadKind::Signs => BlockCode::Signs,
            HeadKind::Levels => BlockCode::Levels(self.level_gains.clone()),
        };
        let bits = self.level_gains.len();
        let codes: Vec<u64> = self.blocks.iter().flat_map(|block| packed(block)).collect();
        Head::Blocks(BlockHead {
            bits,
            code,
            signs: BlockHead::interleave(&codes, bits),
            scales: self.scales.clone(),
            biases: self.biases.clone(),
            shift: 3,
            unit: 0.25,
            signals: Some(SignalTables {
                fast_rate: 9000,
                slow_rate: 300,
                fast_weight: 700,
                slow_weight: -900,
                previous_weight: 50,
                initial: (0..BLOCKS).map(|b| b as u8).collect(),
            }),
        })
    }
}

fn packed(signs: &[i32]) -> Vec<u64> {
    let mut code = vec![0; bits::words(signs.len())];
    bits::pack(signs.iter().map(|&s| s > 0), &mut code);
    code
}

fn bytes(signs: &[i32]) -> Vec<u8> {
    let byte = |signs: &[i32]| signs.iter().rev().fold(0, |b, &s| b << 1 | u8::from(s > 0));
    signs.chunks(8).map(byte).collect()
}
