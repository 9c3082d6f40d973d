//! Packed stacks give what the equations say, written out with numbers for signs, on every instruction set.

use crate::plain::{BLOCKS, Draw, HeadKind, Plain, Shape, shapes};
use ls_hash::{
    BlockCode, BlockHead, F32_SIGN_MARGIN, HashStack, Head, Input, Kernels, MAX_LEVEL, PlaneBits,
    Planes, Scaling, Scratch, Signals, StackTables, bits,
};
use proptest::prelude::*;

fn sign(x: f64) -> i32 {
    if x >= 0.0 { 1 } else { -1 }
}

/// Eq. 12: the row of Z that has the largest product with f.
fn argmax(f: &[i32]) -> usize {
    let tau = f.len();
    let z = |i: usize, k: usize| if i >> (tau - 1 - k) & 1 == 1 { 1 } else { -1 };
    (0..1 << tau).max_by_key(|&i| (0..tau).map(|k| z(i, k) * f[k]).sum::<i32>()).unwrap()
}

/// What a stack makes of a feature.
struct Result {
    /// x W of the first layer.
    sums: Vec<f64>,
    /// The sizes of their terms, summed.
    sizes: Vec<f64>,
    code: Vec<i32>,
    /// φ of the last layer, if it has one stack.
    index: Option<usize>,
}

/// The hyperplanes' input.
fn input(plain: &Plain, x: &[f32]) -> Vec<f64> {
    let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
    // The same f32 where the sum is exact; features are made so.
    let scale = match plain.shape.scaling {
        Scaling::Fixed => 1.0,
        Scaling::Rms => 1.0 / (mean as f32 + 1e-12).sqrt(),
    };
    let one = |(i, &x): (usize, &f32)| {
        let z = (x * scale - plain.center[i]) * plain.gain[i];
        match plain.shape.planes {
            None => f64::from(z),
            Some(_) => f64::from(z).round_ties_even().clamp(-127.0, 127.0),
        }
    };
    x.iter().enumerate().map(one).collect()
}

/// Eq. 10 and 11, layer after layer.
fn run(plain: &Plain, x: &[f32]) -> Result {
    let (x, s) = (input(plain, x), &plain.shape);
    let terms =
        |row: &[f32]| -> Vec<f64> { row.iter().zip(&x).map(|(&w, x)| f64::from(w) * x).collect() };
    let bias = |r: usize| f64::from(plain.plane_bias[r]);
    let rows = || plain.planes.iter().enumerate();
    let sums: Vec<f64> = rows().map(|(r, row)| terms(row).iter().sum::<f64>() + bias(r)).collect();
    let size = |(r, row): (usize, &Vec<f32>)| {
        terms(row).iter().map(|t| t.abs()).sum::<f64>() + bias(r).abs()
    };
    let sizes = rows().map(size).collect();
    // f of the first layer.
    let mut code: Vec<i32> = sums.iter().map(|&sum| sign(sum)).collect();
    let mut index = None;
    for layer in 0..s.layers {
        if layer > 0 {
            let hash = plain.hashes[layer - 1].iter().zip(&plain.hash_bias[layer - 1]);
            let sum = |row: &[i32]| row.iter().zip(&code).map(|(w, x)| w * x).sum::<i32>();
            let sums = hash.map(|(row, &bias)| f64::from(sum(row) + i32::from(bias)));
            code = sums.map(sign).collect();
        }
        if s.stacks == 1 {
            index = Some(argmax(&code));
        }
        if let Some(tables) = plain.tables.get(layer) {
            let rows = code.chunks(s.tau).zip(tables).map(|(f, table)| table[argmax(f)].clone());
            code = rows.collect::<Vec<_>>().concat();
        }
    }
    Result { sums, sizes, code, index }
}

/// Multiples of 1/64 with exact sums of squares, so that the naive mean is the same f32.
fn feature(shape: &Shape) -> Vec<f32> {
    let mut draw = Draw(shape.seed ^ 0x55);
    (0..shape.dims).map(|_| (draw.below(257) as f32 - 128.0) / 64.0).collect()
}

fn ready(tables: StackTables, kernels: Kernels) -> (HashStack, Scratch) {
    let stack = HashStack::new(tables, kernels).unwrap();
    let mut scratch = Scratch::default();
    scratch.grow_for(&stack);
    (stack, scratch)
}

fn check_blocks(
    plain: &Plain,
    stack: &HashStack,
    scratch: &mut Scratch,
    x: &[f32],
    result: &Result,
) {
    let code: Vec<i32> = match plain.shape.head {
        HeadKind::Signs => result.code.clone(),
        _ => {
            let level = |(sum, gain): (&f64, &f32)| {
                let limit = f32::from(MAX_LEVEL);
                (*sum as f32 * gain).round_ties_even().clamp(-limit, limit) as i32
            };
            result.sums.iter().zip(&plain.level_gains).map(level).collect()
        }
    };
    let mut signals = Signals::new(stack.block_head().unwrap());
    signals.update(Kernels::detect(), stack.block_head().unwrap(), &[3, 44, 7]);
    for offsets in [None, Some(signals.offsets())] {
        let mut scores = [1; BLOCKS];
        stack.scores(x, offsets, scratch, &mut scores);
        for (b, &score) in scores.iter().enumerate() {
            let dot: i32 = plain.blocks[b].iter().zip(&code).map(|(w, x)| w * x).sum();
            let offset = offsets.map_or(plain.biases[b], |o| o[b]);
            assert_eq!(score, i32::from(plain.scales[b]) * dot + 8 * i32::from(offset));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_packed_stack_follows_the_equations(shape in shapes()) {
        let plain = Plain::random(&shape);
        let x = feature(&shape);
        let result = run(&plain, &x);
        let margin = |(sum, size): (&f64, &f64)| sum.abs() > F32_SIGN_MARGIN * size;
        let clear = shape.planes.is_some() || result.sums.iter().zip(&result.sizes).all(margin);
        prop_assume!(clear);
        for kernels in [Kernels::scalar(), Kernels::detect()] {
            let (stack, mut scratch) = ready(plain.pack(), kernels);
            prop_assert_eq!(stack.tables().code_bits(), result.code.len());
            let code = stack.code(&x, &mut scratch).to_vec();
            let found: Vec<i32> = (0..result.code.len()).map(|i| bits::sign(&code, i)).collect();
            prop_assert_eq!(&found, &result.code);
            match shape.head {
                HeadKind::Code => {}
                HeadKind::Class => {
                    let class = stack.class(&x, &mut scratch);
                    prop_assert_eq!(class, plain.labels[result.index.unwrap()]);
                }
                HeadKind::Value => {
                    let bin = result.index.unwrap();
                    prop_assert_eq!(stack.value(&x, &mut scratch), (bin, plain.values[bin]));
                }
                HeadKind::Signs | HeadKind::Levels => {
                    check_blocks(&plain, &stack, &mut scratch, &x, &result);
                }
            }
        }
    }

    #[test]
    fn bytes_give_the_same_tables_back(shape in shapes()) {
        let tables = Plain::random(&shape).pack();
        let bytes = tables.to_bytes().unwrap();
        prop_assert_eq!(StackTables::from_bytes(&bytes).unwrap(), tables);
    }

    #[test]
    fn packed_weights_can_be_read(shape in shapes()) {
        let plain = Plain::random(&shape);
        let tables = plain.pack();
        for (r, row) in plain.planes.iter().enumerate() {
            for (dim, &weight) in row.iter().enumerate() {
                prop_assert_eq!(tables.planes.weight(r, dim), weight);
            }
        }
        if let Head::Blocks(head) = &tables.head {
            for (b, block) in plain.blocks.iter().enumerate() {
                for (i, &sign) in block.iter().enumerate() {
                    prop_assert_eq!(head.sign(b, i), sign);
                }
            }
        }
    }

    /// A scratch that others have used, for larger stacks, changes nothing.
    #[test]
    fn a_scratch_carries_nothing_over(first in shapes(), second in shapes()) {
        let (used, mut scratch) = ready(Plain::random(&first).pack(), Kernels::detect());
        let (stack, mut fresh) = ready(Plain::random(&second).pack(), Kernels::detect());
        // What is left behind is as bad as it can be.
        used.code(&vec![f32::INFINITY; first.dims], &mut scratch);
        scratch.grow_for(&stack);
        let x = feature(&second);
        prop_assert_eq!(stack.code(&x, &mut scratch), stack.code(&x, &mut fresh));
    }
}

#[test]
fn means_of_activity_rise_and_fall() {
    let shape = Shape {
        dims: 8,
        stacks: 1,
        tau: 4,
        width: 8,
        layers: 1,
        last_table: false,
        planes: None,
        scaling: Scaling::Fixed,
        head: HeadKind::Signs,
        seed: 1,
    };
    let mut tables = Plain::random(&shape).pack();
    let Head::Blocks(head) = &mut tables.head else { unreachable!() };
    head.biases.fill(0);
    let signals = head.signals.as_mut().unwrap();
    signals.initial.fill(0);
    (signals.fast_weight, signals.slow_weight, signals.previous_weight) = (1000, 0, 0);
    signals.initial[BLOCKS - 1] = 255;
    let mut state = Signals::new(head);
    assert_eq!(state.offsets()[..BLOCKS - 1], [0; BLOCKS - 1]);
    assert_eq!(state.offsets()[BLOCKS - 1], 999);
    for _ in 0..200 {
        state.update(Kernels::detect(), head, &[2]);
    }
    assert_eq!(state.offsets()[1..4], [0, 999, 0]);
    state.update(Kernels::detect(), head, &[3]);
    assert_eq!(state.offsets()[1..4], [0, 862, 137]);
}

/// Integer planes made from f32 ones hash nearly as those do.
#[test]
fn rounded_planes_keep_most_signs() {
    let (dims, rows) = (512, 64);
    let mut draw = Draw(11);
    let (weights, bias) = (draw.floats(dims * rows), vec![0.0; rows]);
    let x = draw.floats(dims);
    let signs = |planes: Planes| {
        let input =
            Input { scaling: Scaling::Fixed, center: vec![0.0; dims], gain: vec![127.0; dims] };
        let tables = StackTables {
            input,
            stacks: 8,
            tau: 8,
            planes,
            hashes: vec![],
            tables: vec![],
            head: Head::Code,
        };
        let (stack, mut scratch) = ready(tables, Kernels::detect());
        stack.code(&x, &mut scratch)[0]
    };
    let exact = signs(Planes::from_f32(dims, &weights, &bias));
    for (bits, most) in [(PlaneBits::Eight, 1), (PlaneBits::Four, 6), (PlaneBits::Two, 18)] {
        let rounded = signs(Planes::quantize(dims, &weights, &bias, bits));
        let differ = (exact ^ rounded).count_ones();
        assert!(differ <= most, "{differ} of {rows} signs differ at {bits:?}");
    }
}

/// Where training must agree: sign(0) is +1, halves of levels go to even.
#[test]
fn nothing_is_positive_and_halves_go_to_even() {
    let (dims, rows) = (4, 4);
    for few in [None, Some(PlaneBits::Eight)] {
        let (weights, bias) = (vec![1.0; dims * rows], [0.0, 1.0, 3.0, -5.0]);
        let planes = match few {
            None => Planes::from_f32(dims, &weights, &bias),
            Some(few) => Planes::from_rounded(dims, &weights, &bias, few),
        };
        let codes = [!0u64; 1];
        let head = BlockHead {
            bits: rows,
            code: BlockCode::Levels(vec![0.5; rows]),
            signs: BlockHead::interleave(&codes, rows),
            scales: vec![1],
            biases: vec![0],
            shift: 0,
            unit: 1.0,
            signals: None,
        };
        let tables = StackTables {
            input: Input {
                scaling: Scaling::Fixed,
                center: vec![0.0; dims],
                gain: vec![1.0; dims],
            },
            stacks: 1,
            tau: rows,
            planes,
            hashes: vec![],
            tables: vec![],
            head: if few.is_some() { Head::Blocks(head) } else { Head::Code },
        };
        let (stack, mut scratch) = ready(tables, Kernels::detect());
        assert_eq!(stack.code(&[0.0; 4], &mut scratch), [0b0111]);
        if few.is_some() {
            let mut score = [9];
            stack.scores(&[0.0; 4], None, &mut scratch, &mut score);
            // 0, 0.5, 1.5 and -2.5.
            assert_eq!(score, [2 - 2]);
            scratch.sums_mut().copy_from_slice(&[1, 5, 3, 900]);
            stack.scores_of_sums(None, &mut scratch, &mut score);
            assert_eq!(score, [2 + 2 + 7]);
        }
    }
}
