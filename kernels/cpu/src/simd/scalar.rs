//! Plain Rust: the definition of every function, and the fallback for number formats that have no fast kernel yet.

use super::{Ops, PANEL, RowOps, Tile};
use half::f16;

/// Weights that are unpacked at a time: a group of the quantised types.
const CHUNK: usize = 32;

pub(crate) static OPS: Ops = Ops {
    name: "scalar",
    f16: row_ops::<F16>(),
    q8_0: Q8_0_ROWS,
    q4_0: Q4_0_ROWS,
    gemm,
    scores,
    weigh,
    inverse_rms,
    swiglu,
    exp_sum,
    max,
};

/// Any instruction set may use these.
pub(crate) const Q8_0_ROWS: RowOps = row_ops::<Q8_0>();
pub(crate) const Q4_0_ROWS: RowOps = row_ops::<Q4_0>();

/// How rows of one number format are read.
trait Format {
    /// See [`RowOps::unpack`].
    fn unpack(row: &[u8], cols: usize, first: usize, out: &mut [f32]);
}

enum F16 {}
enum Q8_0 {}
enum Q4_0 {}

/// The half-precision number `index` of `bytes`.
fn half_at(bytes: &[u8], index: usize) -> f32 {
    f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f32()
}

impl Format for F16 {
    fn unpack(row: &[u8], _cols: usize, first: usize, out: &mut [f32]) {
        for (weight, pair) in out.iter_mut().zip(row[2 * first..].chunks_exact(2)) {
            *weight = half_at(pair, 0);
        }
    }
}

impl Format for Q8_0 {
    fn unpack(row: &[u8], cols: usize, first: usize, out: &mut [f32]) {
        let (quants, scales) = row.split_at(cols);
        for (group, weights) in out.chunks_mut(CHUNK).enumerate() {
            let scale = half_at(scales, first / CHUNK + group);
            for (weight, &quant) in weights.iter_mut().zip(&quants[first + group * CHUNK..]) {
                *weight = scale * f32::from(quant.cast_signed());
            }
        }
    }
}

impl Format for Q4_0 {
    fn unpack(row: &[u8], cols: usize, first: usize, out: &mut [f32]) {
        let (quants, scales) = row.split_at(cols / 2);
        for (group, weights) in out.chunks_mut(CHUNK).enumerate() {
            let scale = half_at(scales, first / CHUNK + group);
            let bytes = &quants[(first + group * CHUNK) / 2..];
            for (i, weight) in weights.iter_mut().enumerate() {
                let byte = bytes[i % (CHUNK / 2)];
                let quant = if i < CHUNK / 2 { byte & 15 } else { byte >> 4 };
                *weight = scale * (f32::from(quant) - 8.0);
            }
        }
    }
}

const fn row_ops<F: Format>() -> RowOps {
    RowOps { dot: dot::<F>, axpy: axpy::<F>, pack_rows: pack_rows::<F>, unpack: F::unpack }
}

/// Calls `each(first, weights)` for the chunks of a row of `cols` weights.
fn for_chunks<F: Format>(row: &[u8], cols: usize, mut each: impl FnMut(usize, &[f32])) {
    let mut weights = [0.0; CHUNK];
    for first in (0..cols).step_by(CHUNK) {
        let weights = &mut weights[..CHUNK.min(cols - first)];
        F::unpack(row, cols, first, weights);
        each(first, weights);
    }
}

fn dot<F: Format>(rows: &[&[u8]], x: &[f32], out: &mut [f32], _ahead: usize) {
    for (row, out) in rows.iter().zip(out) {
        // Several sums, so that the compiler may use vectors and errors stay small.
        let mut sums = [0f32; 8];
        for_chunks::<F>(row, x.len(), |first, weights| {
            for (i, (&w, &x)) in weights.iter().zip(&x[first..]).enumerate() {
                sums[i % 8] += w * x;
            }
        });
        *out = sums.iter().sum();
    }
}

fn axpy<F: Format>(rows: &[&[u8]], weights: &[f32], acc: &mut [f32], _ahead: usize) {
    for (row, &weight) in rows.iter().zip(weights) {
        for_chunks::<F>(row, acc.len(), |first, row| {
            acc[first..].iter_mut().zip(row).for_each(|(acc, &w)| *acc += weight * w);
        });
    }
}

fn pack_rows<F: Format>(rows: &[&[u8]], cols: usize, panel: &mut [f32]) {
    let panel = &mut panel[..cols * PANEL];
    if rows.len() < PANEL {
        panel.fill(0.0);
    }
    for (r, row) in rows.iter().enumerate() {
        for_chunks::<F>(row, cols, |first, weights| {
            for (i, &weight) in weights.iter().enumerate() {
                panel[(first + i) * PANEL + r] = weight;
            }
        });
    }
}

/// # Safety
/// See [`Ops::gemm`].
unsafe fn gemm(tile: &Tile) {
    for i in 0..tile.m {
        let mut sums = [0f32; PANEL];
        // SAFETY: the caller guarantees row i of a and c, and all of b.
        let (a, c) = unsafe {
            (
                std::slice::from_raw_parts(tile.a.add(i * tile.a_stride), tile.k),
                std::slice::from_raw_parts_mut(tile.c.add(i * tile.c_stride), tile.n),
            )
        };
        if tile.accumulate {
            sums[..tile.n].copy_from_slice(c);
        }
        for (p, &a) in a.iter().enumerate() {
            // SAFETY: p < k, and the caller guarantees PANEL elements of each row of b.
            let b = unsafe { std::slice::from_raw_parts(tile.b.add(p * tile.b_stride), PANEL) };
            sums.iter_mut().zip(b).for_each(|(sum, &b)| *sum += a * b);
        }
        c.copy_from_slice(&sums[..tile.n]);
    }
}

fn scores(keys: &[u8], queries: &[f32], head_dim: usize, out: &mut [f32]) {
    let count = keys.len() / (2 * head_dim);
    for (query, out) in queries.chunks_exact(head_dim).zip(out.chunks_exact_mut(count)) {
        for (key, out) in keys.chunks_exact(2 * head_dim).zip(out) {
            dot::<F16>(&[key], query, std::slice::from_mut(out), 0);
        }
    }
}

fn weigh(values: &[u8], shares: &[f32], head_dim: usize, out: &mut [f32]) {
    let count = values.len() / (2 * head_dim);
    out.fill(0.0);
    for (out, shares) in out.chunks_exact_mut(head_dim).zip(shares.chunks_exact(count)) {
        for (value, &share) in values.chunks_exact(2 * head_dim).zip(shares) {
            axpy::<F16>(&[value], &[share], out, 0);
        }
    }
}

fn inverse_rms(x: &[f32], epsilon: f32) -> f32 {
    let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    (1.0 / (squares / x.len() as f64 + f64::from(epsilon)).sqrt()) as f32
}

fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (gate, &up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
}

fn exp_sum(x: &mut [f32], max: f32) -> f32 {
    let mut sum = 0.0;
    for x in x {
        *x = (*x - max).exp();
        sum += *x;
    }
    sum
}

fn max(x: &[f32]) -> f32 {
    x.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}
