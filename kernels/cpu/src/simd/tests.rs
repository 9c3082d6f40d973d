//! Every function of every instruction set against plain arithmetic in f64: nothing, one, tails, unaligned rows,
//! extremes, random numbers.

mod low_bit;

use super::quantise::{BLOCK_GROUPS, GROUP, QuantBlock, block_count};
use super::{Activations, Kernels, Ops, PANEL, Tile};
use half::f16;
use low_bit::{low_bit_scales_are_folded, low_bit_tiles_are_multiplied};
use ls_bundle::model::DType;
use ls_compute::conformance::Rng;
use ls_compute::{KvDType, dequantize_row};

/// Largest accepted error of a sum, relative to the sum of the terms' sizes.
const SUM_ERROR: f64 = 2e-6;
/// Largest accepted relative error of an exponential.
const EXP_ERROR: f64 = 1e-6;
/// Lengths around the widths of vectors, steps and groups.
const LENGTHS: [usize; 19] =
    [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 64, 96, 200, 256, 288, 576];
const DTYPES: [DType; 3] = [DType::F16, DType::Q8_0, DType::Q4_0];

/// Test data of one seed.
struct Draw(Rng);

impl Draw {
    /// Numbers of very different sizes, some zero.
    fn floats(&mut self, len: usize) -> Vec<f32> {
        let mut one = || match self.0.below(8) {
            0 => 0.0,
            1 => 300.0 * self.0.unit(),
            2 => 1e-6 * self.0.unit(),
            _ => self.0.unit(),
        };
        (0..len).map(|_| one()).collect()
    }

    /// Rows of weights at odd addresses (all in one vector, each behind one spare byte), and what they mean.
    fn rows(&mut self, dtype: DType, count: usize, cols: usize) -> (Vec<u8>, Vec<Vec<f32>>) {
        let len = dtype.row_bytes(cols as u32) as usize;
        let (mut bytes, mut meant) = (Vec::new(), Vec::new());
        for _ in 0..count {
            bytes.push(0);
            let start = bytes.len();
            match dtype {
                DType::F16 => {
                    // Largest, smallest and subnormal halves among ordinary ones.
                    let special = [f16::MAX, f16::MIN, f16::MIN_POSITIVE_SUBNORMAL, f16::ZERO];
                    for _ in 0..cols {
                        let half = match self.0.below(32) as usize {
                            i @ 0..4 => special[i],
                            _ => f16::from_f32(self.0.unit()),
                        };
                        bytes.extend(half.to_le_bytes());
                    }
                }
                DType::Q8_0 | DType::Q4_0 => {
                    bytes.extend((0..len - cols / 16).map(|_| self.0.bits() as u8));
                    for _ in 0..cols / 32 {
                        bytes.extend(f16::from_f32(self.0.unit()).to_le_bytes());
                    }
                }
            }
            let mut row = vec![f32::NAN; cols];
            dequantize_row(dtype, &bytes[start..], &mut row);
            meant.push(row);
        }
        (bytes, meant)
    }
}

/// The rows in what [`Draw::rows`] drew.
fn slices(bytes: &[u8], dtype: DType, cols: usize) -> Vec<&[u8]> {
    let len = dtype.row_bytes(cols as u32) as usize;
    bytes.chunks_exact(1 + len).map(|row| &row[1..]).collect()
}

fn lengths(dtype: DType) -> impl Iterator<Item = usize> {
    LENGTHS.into_iter().filter(move |&len| dtype == DType::F16 || len % 32 == 0)
}

/// `got` equals the sum of `terms`.
#[track_caller]
fn assert_sum(got: f32, terms: impl Iterator<Item = f64> + Clone) {
    let (sum, size): (f64, f64) = (terms.clone().sum(), terms.map(f64::abs).sum());
    // Written so that NaN fails.
    assert!((f64::from(got) - sum).abs() <= SUM_ERROR * size + 1e-30, "{got} is not {sum}");
}

fn product(a: &f32, b: &f32) -> f64 {
    f64::from(*a) * f64::from(*b)
}

fn dot_sums_products(ops: &Ops, draw: &mut Draw) {
    for dtype in DTYPES {
        for (cols, count) in lengths(dtype).flat_map(|cols| [1, 2, 3, 4].map(|n| (cols, n))) {
            let (bytes, meant) = draw.rows(dtype, count, cols);
            let rows = slices(&bytes, dtype, cols);
            let floats = draw.floats(cols);
            let quants = quantised(ops, &floats);
            let x = Activations { floats: &floats, quants: &quants };
            let mut out = vec![f32::NAN; count];
            (ops.rows(dtype).dot)(&rows, x, &mut out, 64);
            let factors = if dtype == DType::F16 { floats.clone() } else { meaning(&quants, cols) };
            for (i, row) in meant.iter().enumerate() {
                assert_sum(out[i], row.iter().zip(&factors).map(|(w, x)| product(w, x)));
                let mut alone = [f32::NAN];
                (ops.rows(dtype).dot)(&rows[i..=i], x, &mut alone, 0);
                assert_eq!(alone[0].to_bits(), out[i].to_bits(), "a row depends on its neighbours");
            }
            if dtype != DType::F16 {
                let mut plain = vec![f32::NAN; count];
                (super::scalar::OPS.rows(dtype).dot)(&rows, x, &mut plain, 0);
                assert_eq!(bits(&plain), bits(&out), "not what scalar kernels give");
            }
        }
    }
}

fn axpy_adds_row_after_row(ops: &Ops, draw: &mut Draw) {
    for dtype in DTYPES {
        for (cols, count) in lengths(dtype).flat_map(|cols| [1, 2, 3, 4].map(|n| (cols, n))) {
            let (bytes, meant) = draw.rows(dtype, count, cols);
            let rows = slices(&bytes, dtype, cols);
            let weights = draw.floats(count);
            let start = draw.floats(cols);
            let (mut together, mut one_by_one) = (start.clone(), start.clone());
            (ops.rows(dtype).axpy)(&rows, &weights, &mut together, 64);
            for (i, row) in rows.iter().enumerate() {
                (ops.rows(dtype).axpy)(&[row], &weights[i..=i], &mut one_by_one, 0);
            }
            assert_eq!(bits(&together), bits(&one_by_one), "rows are not added one by one");
            if dtype != DType::F16 {
                let mut plain = start.clone();
                (super::scalar::OPS.rows(dtype).axpy)(&rows, &weights, &mut plain, 0);
                assert_eq!(bits(&plain), bits(&together), "not what scalar kernels give");
            }
            for (k, &got) in together.iter().enumerate() {
                let terms = meant.iter().zip(&weights).map(|(row, w)| product(&row[k], w));
                assert_sum(got, terms.chain([f64::from(start[k])]));
            }
        }
    }
}

fn quantised(ops: &Ops, x: &[f32]) -> Vec<QuantBlock> {
    let mut blocks = vec![bytemuck::Zeroable::zeroed(); block_count(x.len())];
    if x.len().is_multiple_of(GROUP) {
        // What an earlier, longer vector has left.
        blocks.fill(QuantBlock {
            quants: [[99; 32]; 8],
            sums: [[99; 8]; 8],
            scales: [f32::NAN; 8],
        });
        (ops.quantise)(x, &mut blocks);
    }
    blocks
}

/// The first `len` activations of what has been quantised.
fn meaning(blocks: &[QuantBlock], len: usize) -> Vec<f32> {
    let groups = blocks.iter().flat_map(|block| block.quants.iter().zip(block.scales));
    let all = groups.flat_map(|(quants, scale)| quants.map(|quant| scale * f32::from(quant)));
    all.take(len).collect()
}

fn quantising_rounds_to_nearest(ops: &Ops, draw: &mut Draw) {
    for len in lengths(DType::Q8_0) {
        let mut x = draw.floats(len);
        if len >= 64 {
            // Nothing, and too little to have an inverse.
            x[..32].fill(0.0);
            x[32..64].fill(1e-39);
        }
        let blocks = quantised(ops, &x);
        assert_eq!(blocks, quantised(&super::scalar::OPS, &x), "not what scalar kernels give");
        for ((x, got), group) in x.chunks(GROUP).zip(meaning(&blocks, len).chunks(GROUP)).zip(0..) {
            let block = &blocks[group / BLOCK_GROUPS];
            let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            // Half a step, and what rounding the scale costs.
            let error = (largest / 127.0 * 0.501).max(1e-30);
            assert!(x.iter().zip(got).all(|(x, got)| (x - got).abs() <= error), "{x:?} {got:?}");
            let quants = &block.quants[group % BLOCK_GROUPS];
            for (sum, quants) in block.sums[group % BLOCK_GROUPS].iter().zip(quants.chunks(4)) {
                assert_eq!(*sum, quants.iter().map(|&quant| i32::from(quant)).sum::<i32>());
            }
        }
    }
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = draw.floats(64);
        x[40] = bad;
        let blocks = quantised(ops, &x);
        assert!(blocks[0].scales[0].is_finite() && blocks[0].scales[1].is_nan(), "{bad} vanishes");
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn packing_moves_weights(ops: &Ops, draw: &mut Draw) {
    for dtype in DTYPES {
        for (cols, count) in lengths(dtype).flat_map(|cols| [1, 5, 15, PANEL].map(|n| (cols, n))) {
            let (bytes, meant) = draw.rows(dtype, count, cols);
            let rows = slices(&bytes, dtype, cols);
            let mut panel = vec![f32::NAN; cols * PANEL];
            (ops.rows(dtype).pack_rows)(&rows, cols, &mut panel);
            for (k, column) in panel.chunks_exact(PANEL).enumerate() {
                for (r, &got) in column.iter().enumerate() {
                    assert_eq!(got, meant.get(r).map_or(0.0, |row| row[k]), "row {r}, weight {k}");
                }
            }
            for first in [0, 32, 64].into_iter().filter(|&first| first <= cols) {
                let mut out = vec![f32::NAN; cols - first];
                (ops.rows(dtype).unpack)(rows[0], cols, first, &mut out);
                assert_eq!(out, meant[0][first..]);
            }
        }
    }
}

fn gemm_multiplies(ops: &Ops, draw: &mut Draw) {
    for (m, n, k) in [
        (0, 16, 4),
        (1, 1, 1),
        (1, 16, 0),
        (5, 16, 33),
        (6, 15, 64),
        (7, 16, 7),
        (13, 3, 200),
        (24, 16, 64),
    ] {
        for accumulate in [false, true] {
            let (a_stride, b_stride, c_stride) = (k + 3, PANEL + 5, n + 2);
            let a = draw.floats(m * a_stride + 1);
            let b = draw.floats(k * b_stride + 1);
            let start = draw.floats(m * c_stride + 1);
            let mut c = start.clone();
            let mut tile = Tile {
                m,
                n,
                k,
                a: a[1..].as_ptr(),
                a_stride,
                b: b[1..].as_ptr(),
                b_stride,
                c: c[1..].as_mut_ptr(),
                c_stride,
                accumulate,
            };
            // SAFETY: a, b and c have m, k and m rows of their strides; c is ours.
            unsafe { (ops.gemm)(&tile) };
            for (i, (got, before)) in c[1..].iter().zip(&start[1..]).enumerate() {
                let (row, column) = (i / c_stride, i % c_stride);
                if column >= n {
                    assert_eq!(got.to_bits(), before.to_bits(), "written behind the columns");
                    continue;
                }
                let terms = (0..k)
                    .map(|p| product(&a[1 + row * a_stride + p], &b[1 + p * b_stride + column]));
                let start = if accumulate { f64::from(*before) } else { 0.0 };
                assert_sum(*got, terms.chain([start]));
            }
            // The same rows one by one, and the sum in two steps.
            let mut alone = start.clone();
            for i in 0..m {
                (tile.m, tile.accumulate) = (1, accumulate);
                tile.c = alone[1 + i * c_stride..].as_mut_ptr();
                for (p, len) in [(0, k / 2), (k / 2, k - k / 2)] {
                    tile.a = a[1 + i * a_stride + p..].as_ptr();
                    tile.b = b[(1 + p * b_stride).min(b.len())..].as_ptr();
                    tile.k = len;
                    // SAFETY: as above, for one row and some of k.
                    unsafe { (ops.gemm)(&tile) };
                    tile.accumulate = true;
                }
            }
            assert_eq!(bits(&alone), bits(&c), "a row depends on its neighbours, or on the steps");
        }
    }
}

fn attention_scores_and_weighs(ops: &Ops, draw: &mut Draw) {
    for kv_cache in [KvDType::F16, KvDType::Q8_0] {
        for (head_dim, group, count) in [
            (8, 1, 1),
            (64, 3, 128),
            (64, 4, 7),
            (24, 2, 5),
            (20, 7, 9),
            (128, 8, 3),
            (2, 1, 13),
            (96, 5, 10),
        ] {
            if kv_cache == KvDType::F16 || head_dim % GROUP == 0 {
                attention(ops, draw, kv_cache, (head_dim, group, count));
            }
        }
    }
}

fn attention(
    ops: &Ops,
    draw: &mut Draw,
    kv_cache: KvDType,
    (head_dim, group, count): (usize, usize, usize),
) {
    let (kv, dtype) = (ops.kv(kv_cache), kv_cache.dtype());
    let row_bytes = dtype.row_bytes(head_dim as u32) as usize;
    let mut bytes = vec![0xff; count * row_bytes];
    let mut rows = vec![f32::NAN; count * head_dim];
    for (bytes, meant) in bytes.chunks_mut(row_bytes).zip(rows.chunks_mut(head_dim)) {
        let values = draw.floats(head_dim);
        (kv.store)(&values, bytes);
        dequantize_row(dtype, bytes, meant);
        for (values, meant) in values.chunks(GROUP).zip(meant.chunks(GROUP)) {
            let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            // Half a step and the scale's rounding; halves are far more exact. The last is for subnormal halves.
            let error = largest / 127.0 * 0.57 + 3e-8 * 128.0;
            let near = values.iter().zip(meant).all(|(x, got)| (*x - *got).abs() <= error);
            assert!(near, "{values:?} is kept as something else");
        }
    }
    let queries = draw.floats(group * head_dim);
    let mut scores = vec![f32::NAN; group * count];
    (kv.scores)(&bytes, &queries, head_dim, &mut scores);
    for (i, &score) in scores.iter().enumerate() {
        let query = &queries[i / count * head_dim..][..head_dim];
        let key = &rows[i % count * head_dim..][..head_dim];
        assert_sum(score, query.iter().zip(key).map(|(q, k)| product(q, k)));
    }
    let shares = draw.floats(group * count);
    let mut out = vec![f32::NAN; group * head_dim];
    (kv.weigh)(&bytes, &shares, head_dim, &mut out);
    for (i, &got) in out.iter().enumerate() {
        let shares = &shares[i / head_dim * count..][..count];
        let values = rows.iter().skip(i % head_dim).step_by(head_dim);
        assert_sum(got, shares.iter().zip(values).map(|(s, v)| product(s, v)));
    }
}

fn norm_swiglu_and_softmax(ops: &Ops, draw: &mut Draw) {
    for len in LENGTHS.into_iter().filter(|&len| len > 0) {
        let x = draw.floats(len);
        let squares: f64 = x.iter().map(|x| product(x, x)).sum();
        let want = 1.0 / (squares / len as f64 + 1e-5).sqrt();
        let got = f64::from((ops.inverse_rms)(&x, 1e-5));
        assert!((got / want - 1.0).abs() < 1e-6, "norm of {len}: {got}, not {want}");

        let (mut gate, up) = (draw.floats(len), draw.floats(len));
        let want: Vec<f64> = gate
            .iter()
            .zip(&up)
            .map(|(&g, &u)| f64::from(g) / (1.0 + (-f64::from(g)).exp()) * f64::from(u))
            .collect();
        (ops.swiglu)(&mut gate, &up);
        for (got, want) in gate.iter().zip(want) {
            // e^-gate may be infinite.
            let error = (f64::from(*got) - want).abs();
            assert!(error <= EXP_ERROR * want.abs() + 1e-33, "{got} is not {want}");
        }

        let mut x = draw.floats(len);
        x[len / 2] = f32::NEG_INFINITY;
        let max = (ops.max)(&x);
        assert_eq!(max, x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let max = max.max(-1e30);
        let want: Vec<f64> = x.iter().map(|&x| f64::from(x - max).exp()).collect();
        let sum = (ops.exp_sum)(&mut x, max);
        assert_sum(sum, want.iter().copied());
        assert_eq!(x[len / 2], 0.0, "masked elements count nothing");
        for (got, want) in x.iter().zip(want) {
            let error = (f64::from(*got) - want).abs();
            assert!(error <= EXP_ERROR * want + 1e-37, "{got} is not {want}");
        }
    }
    assert_eq!((ops.max)(&[]), f32::NEG_INFINITY);
    assert_eq!((ops.exp_sum)(&mut [], 0.0), 0.0);
}

fn extremes_stay_in_bounds(ops: &Ops) {
    let mut x = [f32::NAN, 0.0, f32::INFINITY, 88.7, -87.3, -104.0, -1e30, 1.0, 89.0];
    (ops.exp_sum)(&mut x, 0.0);
    assert!(x[0].is_nan() && x[2].is_infinite() && x[8].is_infinite());
    assert_eq!((x[1], x[6]), (1.0, 0.0));
    assert!((x[3] / 88.7f32.exp() - 1.0).abs() < 1e-6 && (0.0..1e-37).contains(&x[5]));
    let mut gate = [-1e30, 1e30, -200.0, 0.0, f32::NAN];
    (ops.swiglu)(&mut gate, &[1.0; 5]);
    assert!(gate[0] == 0.0 && gate[1] == 1e30 && gate[2] == 0.0 && gate[3] == 0.0);
    assert!(gate[4].is_nan());
}

/// The suite for one instruction set, if this CPU has it.
macro_rules! suite {
    ($name:ident) => {
        mod $name {
            use super::*;

            fn ops() -> Option<&'static Ops> {
                let mut available = Kernels::available();
                available.find(|kernels| kernels.name() == stringify!($name)).map(|k| k.0)
            }

            suite!(@test dot_sums_products 1);
            suite!(@test axpy_adds_row_after_row 2);
            suite!(@test packing_moves_weights 3);
            suite!(@test gemm_multiplies 4);
            suite!(@test attention_scores_and_weighs 5);
            suite!(@test norm_swiglu_and_softmax 6);
            suite!(@test quantising_rounds_to_nearest 7);
            suite!(@test low_bit_tiles_are_multiplied 8);
            suite!(@test low_bit_scales_are_folded 9);

            #[test]
            fn extremes_stay_in_bounds() {
                if let Some(ops) = ops() {
                    super::extremes_stay_in_bounds(ops);
                }
            }
        }
    };
    (@test $test:ident $number:literal) => {
        #[test]
        fn $test() {
            let clock = std::time::SystemTime::UNIX_EPOCH.elapsed().expect("a clock");
            let seed = clock.as_nanos() as u64 ^ $number;
            if let Some(ops) = ops() {
                eprintln!("{} kernels, seed {seed}", ops.name);
                super::$test(ops, &mut Draw(Rng(seed)));
            }
        }
    };
}

suite!(scalar);
#[cfg(target_arch = "x86_64")]
suite!(avx2);
#[cfg(target_arch = "x86_64")]
suite!(avx512);
#[cfg(target_arch = "aarch64")]
suite!(neon);
#[cfg(target_arch = "aarch64")]
suite!(dotprod);
