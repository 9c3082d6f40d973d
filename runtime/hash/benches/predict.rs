//! Microseconds of a prediction's parts at the shape of a 7B model's layer: 4096 dimensions, 14336 neurons, 256 bits, one
//! thread, random tables. Each figure is the median of many runs; behind it is the bytes it reads.
//!
//! The parts' tables come from the third cache; "together" reads those of eight layers in turn, which do not all fit
//! where others use the cache too: from about a megabyte a layer on, its median is memory's speed.
//!
//! `cargo bench -p ls-hash --bench predict [-- scalar]`
//!
//! Kept results: 2 virtual cores of an AMD EPYC (Zen 4), others at work on both, AVX2, November 2026; microseconds, one
//! and two neurons a block. "Together" is the least and the median of 61 runs. Update: once a token, all blocks.
//!
//! | tables | planes | head | top-k, sorted | together | update | KB a layer |
//! |---|---|---|---|---|---|---|
//! | 8-bit, 1229 dims (behind PCA) | 8 | 17 / 8 | 18 / 10 | 43, 54 / 26, 27 | 6 / 3 | 961 / 645 |
//! | 8-bit, 4096 dims | 22 | 16 / 8 | 18 / 10 | 79, 392 / 43, 87 | 6 / 3 | 1713 / 1397 |
//! | 4-bit, 4096 dims | 14 | 16 / 8 | 18 / 10 | 50, 84 / 33, 36 | 5 / 3 | 1188 / 873 |
//! | 2-bit, 4096 dims | 12 | 16 / 8 | 18 / 10 | 47, 59 / 30, 31 | 5 / 3 | 926 / 611 |
//! | 4-bit, 4096 dims, code of levels | 14 | 19 / 10 | 19 / 10 | 55, 129 / 34, 38 | 6 / 3 | 1189 / 874 |
//!
//! Codes alone: one stack of 5 layers, d = 256: 0.7 us; 32 stacks, d = 32: 7 us with 1 layer, 14 us with 5. Regression
//! of 5 numbers: 81 ns with 1 layer, 231 ns with 5 of d = 256. With all tables in the second cache the head takes 14.5 us
//! instead of 16.5: arithmetic, mostly. AVX-512 has not been tried.

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

use ls_hash::{
    BinaryHash, BlockCode, BlockHead, HashStack, Head, Input, Kernels, PlaneBits, Planes,
    Quantiles, Scaling, Scratch, Selection, SignalTables, Signals, StackTables, Table, bits,
};
use std::hint::black_box;
use std::time::Instant;

const DIMS: usize = 4096;
/// What PCA leaves of them.
const PCA_DIMS: usize = 1229;
const NEURONS: usize = 14336;
const BITS: usize = 256;
/// Share of the blocks that a token uses.
const SHARE: f64 = 0.2;

/// Reproducible numbers.
struct Draw(u64);

impl Draw {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.bits() as i32 as f32 / 2f32.powi(31)).collect()
    }

    fn words(&mut self, len: usize) -> Vec<u64> {
        (0..len).map(|_| self.bits()).collect()
    }
}

fn input(dims: usize) -> Input {
    Input { scaling: Scaling::Rms, center: vec![0.0; dims], gain: vec![40.0; dims] }
}

fn planes(draw: &mut Draw, dims: usize, rows: usize, plane_bits: Option<PlaneBits>) -> Planes {
    let (weights, bias) = (draw.floats(dims * rows), vec![0.0; rows]);
    match plane_bits {
        None => Planes::from_f32(dims, &weights, &bias),
        Some(PlaneBits::Eight) => Planes::quantize(dims, &weights, &bias, PlaneBits::Eight),
        Some(few) => {
            let scaled: Vec<f32> = weights.iter().map(|w| 4.0 * w).collect();
            Planes::from_rounded(dims, &scaled, &bias, few)
        }
    }
}

fn block_head(draw: &mut Draw, blocks: usize, bits: usize, code: BlockCode) -> BlockHead {
    let codes = draw.words(blocks * bits::words(bits));
    BlockHead {
        bits,
        code,
        signs: BlockHead::interleave(&codes, bits),
        scales: (0..blocks).map(|_| 50 + draw.bits() as i16 % 20).collect(),
        biases: (0..blocks).map(|_| draw.bits() as i16 % 1000).collect(),
        shift: 2,
        unit: 0.001,
        signals: Some(SignalTables {
            fast_rate: 9830,
            slow_rate: 655,
            fast_weight: 500,
            slow_weight: 900,
            previous_weight: 200,
            initial: vec![50; blocks],
        }),
    }
}

/// 32 stacks of 8 bits, whose signs are the code: no tables.
fn tables(
    dims: usize,
    plane_bits: Option<PlaneBits>,
    blocks: usize,
    code: BlockCode,
) -> StackTables {
    let mut draw = Draw(7);
    StackTables {
        input: input(dims),
        stacks: 32,
        tau: 8,
        planes: planes(&mut draw, dims, BITS, plane_bits),
        hashes: Vec::new(),
        tables: Vec::new(),
        head: Head::Blocks(block_head(&mut draw, blocks, BITS, code)),
    }
}

/// `layers` hashing layers of `stacks` stacks; `width` bits a row; a table behind the last layer or none.
fn deep(dims: usize, stacks: usize, width: usize, layers: usize, last: bool) -> StackTables {
    let mut draw = Draw(9);
    let (rows, inputs) = (8 * stacks, stacks * width);
    let mut tables = Vec::new();
    let mut hashes = Vec::new();
    for layer in 0..layers {
        if layer + 1 < layers || last {
            let bytes = (stacks << 8) * width / 8;
            tables.push(Table { width, rows: (0..bytes).map(|_| draw.bits() as u8).collect() });
        }
        if layer > 0 {
            let words = draw.words(rows * inputs / 64);
            hashes.push(BinaryHash { inputs, rows: words, bias: vec![0; rows] });
        }
    }
    let planes = planes(&mut draw, dims, rows, Some(PlaneBits::Eight));
    StackTables { input: input(dims), stacks, tau: 8, planes, hashes, tables, head: Head::Code }
}

/// Least and median microseconds of a call, by `runs` runs of `repeat` calls.
fn times(runs: usize, repeat: usize, mut call: impl FnMut()) -> [f64; 2] {
    let mut run = || {
        let start = Instant::now();
        (0..repeat).for_each(|_| call());
        start.elapsed().as_secs_f64() * 1e6 / repeat as f64
    };
    run();
    let mut times: Vec<f64> = (0..runs).map(|_| run()).collect();
    times.sort_by(f64::total_cmp);
    [times[0], times[runs / 2]]
}

/// The median of [`times`].
fn time(runs: usize, repeat: usize, call: impl FnMut()) -> f64 {
    times(runs, repeat, call)[1]
}

fn ready(tables: StackTables, kernels: Kernels) -> (HashStack, Scratch) {
    let stack = HashStack::new(tables, kernels).expect("the tables are valid");
    let mut scratch = Scratch::default();
    scratch.grow_for(&stack);
    (stack, scratch)
}

/// A stack that scores blocks, part by part. Eight layers' tables take turns, so that none stays in the second cache.
fn scoring(name: &str, tables: impl Fn() -> StackTables, kernels: Kernels) {
    const LAYERS: usize = 8;
    let (stack, mut scratch) = ready(tables(), kernels);
    let stacks: Vec<HashStack> = (0..LAYERS).map(|_| stack.clone()).collect();
    let dims = stack.tables().input.dims();
    let head = stack.block_head().expect("a head that scores blocks");
    let (blocks, most) = (head.blocks(), (SHARE * head.blocks() as f64) as usize);
    let feature = Draw(3).floats(dims);
    let mut scores = vec![0; blocks];
    let mut selection = Selection::with_capacity(kernels, blocks);
    let mut signals = Signals::new(head);
    let resident = stack.tables().bytes() + signals.bytes();

    let mut turn = 0;
    let mut next = || {
        turn = (turn + 1) % LAYERS;
        &stacks[turn]
    };
    let project = time(31, 16, || next().project(black_box(&feature), &mut scratch));
    let score =
        time(31, 16, || next().scores_of_sums(Some(signals.offsets()), &mut scratch, &mut scores));
    let select = time(31, 16, || {
        black_box(selection.best(black_box(&scores), most));
    });
    let [least, all] = times(61, 16, || {
        next().scores(black_box(&feature), Some(signals.offsets()), &mut scratch, &mut scores);
        black_box(selection.best(&scores, most));
    });
    let active = selection.best(&scores, most).to_vec();
    let update = time(31, 16, || signals.update(kernels, head, black_box(&active)));
    println!(
        "{name:32} planes {project:6.1}  head {score:6.1}  top-k {select:6.1}  together {all:6.1} (least {least:5.1}) us  update {update:5.1}  {:5} KB",
        resident / 1000
    );
}

fn main() {
    let scalar = std::env::args().any(|a| a == "scalar");
    let kernels = if scalar { Kernels::scalar() } else { Kernels::detect() };
    println!("{}; blocks of one and two neurons, {BITS} bits", kernels.name());
    let kinds = [
        ("8-bit planes, PCA", PCA_DIMS, Some(PlaneBits::Eight)),
        ("8-bit planes, all dimensions", DIMS, Some(PlaneBits::Eight)),
        ("4-bit planes, all dimensions", DIMS, Some(PlaneBits::Four)),
        ("2-bit planes, all dimensions", DIMS, Some(PlaneBits::Two)),
        ("f32 planes, PCA", PCA_DIMS, None),
    ];
    for blocks in [NEURONS, NEURONS / 2] {
        println!("{blocks} blocks");
        for (name, dims, plane_bits) in kinds {
            scoring(name, || tables(dims, plane_bits, blocks, BlockCode::Signs), kernels);
        }
        let levels = || {
            let code = BlockCode::Levels(vec![1e-4; BITS]);
            tables(DIMS, Some(PlaneBits::Four), blocks, code)
        };
        scoring("4-bit planes, levels", levels, kernels);
    }
    let codes = [
        ("one stack, 5 layers, d=256, PCA", deep(PCA_DIMS, 1, 256, 5, true)),
        ("32 stacks, 1 layer, d=32, PCA", deep(PCA_DIMS, 32, 32, 1, true)),
        ("32 stacks, 5 layers, d=32, PCA", deep(PCA_DIMS, 32, 32, 5, true)),
    ];
    for (name, tables) in codes {
        let kilobytes = tables.bytes() / 1000;
        let (stack, mut scratch) = ready(tables, kernels);
        let feature = Draw(3).floats(stack.tables().input.dims());
        let code = time(31, 64, || {
            black_box(stack.code(black_box(&feature), &mut scratch));
        });
        println!("{name:32} {code:6.1} us  {kilobytes:5} KB");
    }
    for (layers, width) in [(1, 64), (2, 64), (5, 256)] {
        let mut tables = deep(5, 1, width, layers, false);
        tables.input.scaling = Scaling::Fixed;
        let labels: Vec<f32> = (0..4096).map(|i| i as f32).collect();
        tables.head = Head::Value(Quantiles::fit(&labels, 256, 0.01).expect("labels are given"));
        let (stack, mut scratch) = ready(tables, kernels);
        let feature = Draw(3).floats(5);
        let value = time(31, 4096, || {
            black_box(stack.value(black_box(&feature), &mut scratch));
        });
        println!("regression of 5 numbers, {layers} layers {:6.1} ns", 1000.0 * value);
    }
}
