//! Whole trainings of stacks that give a number or a class from a few numbers (section 3.3.2): what other stages call.

use super::features::Features;
use super::fit::{Options, fit};
use super::loss::{ClassTargets, CodeTargets, Objective};
use super::pack::{Meaning, majority};
use super::stack::{HeadShape, Model, Shape};
use crate::error::{PrepError, Result};
use crate::train::fault;
use ls_hash::{HashStack, Kernels, PlaneBits, Quantiles, Scratch, StackTables};
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

/// Sizes of a stack whose last index, of `tau` bits, is the result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexStack {
    /// Hashing layers.
    pub layers: usize,
    /// Bits of every index.
    pub tau: usize,
    /// Signs of a table's row; a multiple of 8.
    pub width: usize,
}

impl IndexStack {
    fn shape(self, dims: usize) -> Result<Shape> {
        let IndexStack { layers, tau, width } = self;
        let (plane_bits, head) = (PlaneBits::Eight, HeadShape::Index);
        let shape = Shape { dims, layers, stacks: 1, tau, width, plane_bits, head };
        shape.check().map_err(PrepError::usage)?;
        if tau > ls_hash::limits::MAX_TAU {
            return Err(PrepError::usage(format!(
                "an index of {tau} bits; at most 12 have meanings"
            )));
        }
        Ok(shape)
    }
}

/// Trains a regression: `labels` (one a sample, finite ones alone count) in 2^tau bins of equal probability, after the
/// share `clip` at each end is left out. The packed stack gives a bin and the median of its labels.
pub fn regression(
    stack: IndexStack,
    features: &Features,
    labels: &[f32],
    clip: f32,
    options: &Options,
    seed: u64,
) -> Result<StackTables> {
    let shape = stack.shape(features.dims())?;
    let quantiles = Quantiles::fit(labels, 1 << stack.tau, clip).map_err(PrepError::usage)?;
    let bins = labels.iter().map(|&label| quantiles.bin(label) as u32).collect();
    let model = train(shape, features, &CodeTargets { bins }, options, seed)?;
    model.pack_index(features, Meaning::Bins(quantiles))
}

/// Trains a classification: `classes` (one a sample), fewer than 2^tau or as many. An index means the class that most
/// samples of it have.
pub fn classification(
    stack: IndexStack,
    features: &Features,
    classes: &[u32],
    options: &Options,
    seed: u64,
) -> Result<StackTables> {
    let shape = stack.shape(features.dims())?;
    // Refuses classes that do not fit before training on them.
    majority(stack.tau, &[], classes)?;
    let targets = ClassTargets { classes: classes.to_vec() };
    let model = train(shape, features, &targets, options, seed)?;
    let plain = (0..1 << stack.tau).collect();
    let mut tables = model.pack_index(features, Meaning::Classes(plain))?;
    let packed =
        HashStack::new(tables.clone(), Kernels::detect()).map_err(PrepError::unsupported)?;
    let mut scratch = Scratch::default();
    scratch.grow_for(&packed);
    let index = |sample: usize| {
        let code = packed.code_of_rounded(features.row(features.of(sample).start), &mut scratch);
        ls_hash::bits::index(code, 0, stack.tau)
    };
    let indices: Vec<usize> = (0..features.samples()).map(index).collect();
    tables.head = ls_hash::Head::Class(majority(stack.tau, &indices, classes)?);
    Ok(tables)
}

fn train(
    shape: Shape,
    features: &Features,
    objective: &dyn Objective,
    options: &Options,
    seed: u64,
) -> Result<Model> {
    if features.samples() == 0 || features.samples() != objective.samples() {
        let (found, wanted) = (features.samples(), objective.samples());
        return Err(PrepError::usage(format!("{found} features for {wanted} targets")));
    }
    let mut draw = Xoshiro256PlusPlus::seed_from_u64(seed);
    let model = Model::new(shape, &[], &mut draw).map_err(fault)?;
    fit(&model, features, objective, options, &mut draw).map_err(fault)?;
    Ok(model)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::features::Statistics;
    use crate::train::loss::{BlockTargets, Loss, Past};
    use crate::train::pack::Memory;
    use candle_core::{Device, Tensor};
    use ls_hash::{Scaling, bits};
    use rand::Rng;

    /// Features (their first element says the rest), raw and rounded.
    fn samples(
        scaling: Scaling,
        count: usize,
        dims: usize,
        seed: u64,
    ) -> (Vec<Vec<f32>>, Features) {
        let mut draw = Xoshiro256PlusPlus::seed_from_u64(seed);
        let raw: Vec<Vec<f32>> =
            (0..count).map(|_| (0..dims).map(|_| draw.random_range(-1.0..3.0)).collect()).collect();
        let mut statistics = Statistics::new(scaling, dims);
        raw.iter().for_each(|feature| statistics.add(feature));
        let mut features = Features::new(statistics.input());
        raw.iter().for_each(|feature| features.push([&feature[..]]));
        (raw, features)
    }

    const OPTIONS: Options =
        Options { epochs: 30, batch: 64, learning_rate: 0.03, temperature: [1.0, 0.3] };

    /// The trained model's outputs for all samples, and the packed stack.
    fn outputs(model: &Model, features: &Features) -> Tensor {
        let rows: Vec<f32> = (0..features.samples())
            .flat_map(|row| features.row(row).iter().map(|&q| f32::from(q)))
            .collect();
        let rows = Tensor::from_vec(rows, (features.samples(), features.dims()), &Device::Cpu);
        model.code(&rows.unwrap(), None).unwrap()
    }

    #[test]
    fn packed_scores_are_the_trained_ones_bit_for_bit() {
        let bits = [PlaneBits::Eight, PlaneBits::Four, PlaneBits::Two];
        // layers, stacks, tau, width, levels
        let shapes = [
            (1, 1, 40, 0, false),
            (1, 1, 40, 0, true),
            (1, 4, 5, 8, false),
            (3, 1, 6, 72, false),
            (2, 5, 4, 24, false),
        ];
        for (case, (layers, stacks, tau, width, levels)) in shapes.into_iter().enumerate() {
            let head = HeadShape::Blocks { blocks: 37, levels };
            let plane_bits = bits[case % 3];
            let shape = Shape { dims: 19, layers, stacks, tau, width, plane_bits, head };
            shape.check().unwrap();
            let (raw, features) = samples(Scaling::Rms, 120, 19, case as u64);
            let mut draw = Xoshiro256PlusPlus::seed_from_u64(9);
            let mut signal = || (0..120 * 37).map(|_| draw.random()).collect::<Vec<u8>>();
            let codes = signal();
            let past = Past { fast: signal(), slow: signal(), previous: signal() };
            let targets = BlockTargets::new(37, codes, Some(past), 0.2, Loss::Softmax).unwrap();
            let mut draw = Xoshiro256PlusPlus::seed_from_u64(3);
            let model = Model::new(shape, &targets.prior(), &mut draw).unwrap();
            let options = Options { epochs: 2, ..OPTIONS };
            fit(&model, &features, &targets, &options, &mut draw).unwrap();
            let memory = Memory { rates: [0.15, 0.01], initial: vec![0.2; 37] };
            let tables = model.pack_blocks(&features, &targets, Some(&memory)).unwrap();
            let packed = HashStack::new(tables, Kernels::detect()).unwrap();
            let mut scratch = Scratch::default();
            scratch.grow_for(&packed);
            let trained: Vec<Vec<f32>> = outputs(&model, &features).to_vec2().unwrap();
            let head = packed.block_head().unwrap();
            let mut varied = std::collections::BTreeSet::new();
            for (raw, code) in raw.iter().zip(&trained) {
                let mut scores = vec![0; 37];
                packed.scores(raw, None, &mut scratch, &mut scores);
                for (block, &score) in scores.iter().enumerate() {
                    let dot: i32 =
                        code.iter().zip(0..).map(|(&x, i)| x as i32 * head.sign(block, i)).sum();
                    let offset = i32::from(head.biases[block]) << head.shift;
                    assert_eq!(score, dot * i32::from(head.scales[block]) + offset, "{case}");
                    varied.insert(dot);
                }
            }
            assert!(varied.len() > 3, "{case}: {varied:?}");
        }
    }

    #[test]
    fn rounded_factors_change_trained_scores_little() {
        let head = HeadShape::Blocks { blocks: 50, levels: true };
        let (dims, plane_bits) = (24, PlaneBits::Four);
        let shape = Shape { dims, layers: 1, stacks: 1, tau: 64, width: 0, plane_bits, head };
        let (raw, features) = samples(Scaling::Rms, 200, dims, 4);
        let mut draw = Xoshiro256PlusPlus::seed_from_u64(8);
        let codes = (0..200 * 50).map(|_| draw.random()).collect::<Vec<u8>>();
        let targets = BlockTargets::new(50, codes, None, 0.2, Loss::Softmax).unwrap();
        let model = Model::new(shape, &targets.prior(), &mut draw).unwrap();
        fit(&model, &features, &targets, &Options { epochs: 5, ..OPTIONS }, &mut draw).unwrap();
        let packed = model.pack_blocks(&features, &targets, None).unwrap();
        let packed = HashStack::new(packed, Kernels::detect()).unwrap();
        let mut scratch = Scratch::default();
        scratch.grow_for(&packed);
        let unit = packed.block_head().unwrap().unit;
        let row: Vec<f32> = features.row(7).iter().map(|&q| f32::from(q)).collect();
        let row = Tensor::from_vec(row, (1, dims), &Device::Cpu).unwrap();
        let trained: Vec<f32> =
            model.forward(&row, None).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let mut scores = vec![0; 50];
        packed.scores(&raw[7], None, &mut scratch, &mut scores);
        // Up to what all scores share.
        let gap = |block: usize| scores[block] as f32 * unit - trained[block];
        let spread = trained.iter().fold(0f32, |m, s| m.max((s - trained[0]).abs()));
        assert!(spread > 0.1, "{spread}");
        let worst = (0..50).map(|block| (gap(block) - gap(0)).abs()).fold(0f32, f32::max);
        assert!(worst < 0.01 * spread, "{worst} of {spread}");
    }

    #[test]
    fn a_regression_finds_the_bins_of_a_number() {
        let (raw, features) = samples(Scaling::Fixed, 1500, 4, 1);
        let labels: Vec<f32> = raw.iter().map(|x| (x[0] + 0.3 * x[1]).powi(3)).collect();
        let (train_on, stack) = (&labels[..], IndexStack { layers: 2, tau: 6, width: 64 });
        let tables = regression(stack, &features, train_on, 0.01, &OPTIONS, 5).unwrap();
        let again = regression(stack, &features, train_on, 0.01, &OPTIONS, 5).unwrap();
        assert_eq!(tables, again, "a seed gives one result");
        let packed = HashStack::new(tables, Kernels::detect()).unwrap();
        let mut scratch = Scratch::default();
        scratch.grow_for(&packed);
        let quantiles = Quantiles::fit(&labels, 64, 0.01).unwrap();
        let mut off = 0;
        for (x, &label) in raw.iter().zip(&labels) {
            off += packed.value(x, &mut scratch).0.abs_diff(quantiles.bin(label));
        }
        // Chance is off by 21 bins, always the middle by 16.
        assert!(off < 8 * raw.len(), "{off} bins in {}", raw.len());
    }

    #[test]
    fn a_classification_finds_classes() {
        let (raw, features) = samples(Scaling::Fixed, 1000, 4, 2);
        let class = |x: &[f32]| u32::from(x[0] > 1.0) + u32::from(x[1] > x[0]);
        let classes: Vec<u32> = raw.iter().map(|x| class(x)).collect();
        let stack = IndexStack { layers: 2, tau: 5, width: 64 };
        let tables = classification(stack, &features, &classes, &OPTIONS, 5).unwrap();
        let packed = HashStack::new(tables, Kernels::detect()).unwrap();
        let mut scratch = Scratch::default();
        scratch.grow_for(&packed);
        let right = raw.iter().filter(|x| packed.class(x, &mut scratch) == class(x)).count();
        // Without a second layer 780, the most frequent class alone 500.
        assert!(right > 850, "{right} of 1000");
        let many = vec![33; 1000];
        assert!(classification(stack, &features, &many, &OPTIONS, 5).is_err());
    }

    #[test]
    fn the_code_of_a_rounded_feature_is_the_features_code() {
        let (raw, features) = samples(Scaling::Rms, 50, 7, 3);
        let labels: Vec<f32> = raw.iter().map(|x| x[2]).collect();
        let stack = IndexStack { layers: 3, tau: 4, width: 16 };
        let options = Options { epochs: 1, ..OPTIONS };
        let tables = regression(stack, &features, &labels, 0.0, &options, 5).unwrap();
        let packed = HashStack::new(tables, Kernels::detect()).unwrap();
        let mut scratch = Scratch::default();
        scratch.grow_for(&packed);
        for (row, raw) in raw.iter().enumerate() {
            let code = bits::index(packed.code(raw, &mut scratch), 0, 4);
            let of_rounded = packed.code_of_rounded(features.row(row), &mut scratch);
            assert_eq!(bits::index(of_rounded, 0, 4), code);
        }
    }
}
