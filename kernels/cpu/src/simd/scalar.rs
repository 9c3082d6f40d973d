//! Plain Rust: the definition of every function.

mod low_bit;

use super::quantise::{BLOCK_GROUPS, GROUP, PARTS, group_scale};
use super::{Activations, KvOps, Ops, PANEL, QuantBlock, RowOps, Tile};
use half::f16;
use half::slice::HalfFloatSliceExt;

pub(crate) static OPS: Ops = Ops {
    name: "scalar",
    f16: RowOps { dot: dot_f16, axpy: axpy_f16, pack_rows: pack_rows::<F16>, unpack: F16::unpack },
    q8_0: quantised::<Q8_0>(),
    q4_0: quantised::<Q4_0>(),
    low_bit: low_bit::LOW_BIT,
    quantise,
    gemm,
    kv_f16: KvOps { store: store_f16, scores: scores::<F16>, weigh: weigh::<F16> },
    kv_q8_0: KvOps { store: store_q8_0, scores: scores::<Q8_0>, weigh: weigh::<Q8_0> },
    inverse_rms,
    swiglu,
    exp_sum,
    max,
};

const fn quantised<F: Quants>() -> RowOps {
    RowOps { dot: dot::<F>, axpy: axpy::<F>, pack_rows: pack_rows::<F>, unpack: F::unpack }
}

/// How rows of one number format are read.
trait Format {
    /// Bytes of a row.
    fn row_bytes(cols: usize) -> usize;
    /// See [`RowOps::unpack`].
    fn unpack(row: &[u8], cols: usize, first: usize, out: &mut [f32]);
}

/// A format of groups that share a scale.
trait Quants {
    /// Bytes of a group's quants.
    const BYTES: usize;
    /// The quants in `bytes`: w = scale * quant.
    fn quants(bytes: &[u8]) -> [i8; GROUP];
}

enum F16 {}
enum Q8_0 {}
enum Q4_0 {}

/// The half-precision number `index` of `bytes`.
fn half_at(bytes: &[u8], index: usize) -> f32 {
    f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f32()
}

impl Format for F16 {
    fn row_bytes(cols: usize) -> usize {
        2 * cols
    }

    fn unpack(row: &[u8], _cols: usize, first: usize, out: &mut [f32]) {
        for (weight, pair) in out.iter_mut().zip(row[2 * first..].chunks_exact(2)) {
            *weight = half_at(pair, 0);
        }
    }
}

impl Quants for Q8_0 {
    const BYTES: usize = GROUP;

    fn quants(bytes: &[u8]) -> [i8; GROUP] {
        std::array::from_fn(|i| bytes[i].cast_signed())
    }
}

impl Quants for Q4_0 {
    const BYTES: usize = GROUP / 2;

    fn quants(bytes: &[u8]) -> [i8; GROUP] {
        let nibble = |i| if i < Self::BYTES { bytes[i] & 15 } else { bytes[i - Self::BYTES] >> 4 };
        std::array::from_fn(|i| nibble(i).cast_signed() - 8)
    }
}

/// Groups `first ..` of a row of `cols` weights: quants and scale.
fn groups<F: Quants>(
    row: &[u8],
    cols: usize,
    first: usize,
) -> impl Iterator<Item = ([i8; GROUP], f32)> {
    let (quants, scales) = row.split_at(cols / GROUP * F::BYTES);
    let scales = scales.chunks_exact(2).map(|pair| half_at(pair, 0));
    quants.chunks_exact(F::BYTES).map(F::quants).zip(scales).skip(first)
}

impl<F: Quants> Format for F {
    fn row_bytes(cols: usize) -> usize {
        cols / GROUP * (F::BYTES + 2)
    }

    fn unpack(row: &[u8], cols: usize, first: usize, out: &mut [f32]) {
        let groups = groups::<F>(row, cols, first / GROUP);
        for (weights, (quants, scale)) in out.chunks_mut(GROUP).zip(groups) {
            for (weight, quant) in weights.iter_mut().zip(quants) {
                *weight = scale * f32::from(quant);
            }
        }
    }
}

/// Calls `each(first, weights)` for pieces of a row of `cols` weights.
fn for_pieces<F: Format>(row: &[u8], cols: usize, mut each: impl FnMut(usize, &[f32])) {
    let mut weights = [0.0; GROUP];
    for first in (0..cols).step_by(GROUP) {
        let weights = &mut weights[..GROUP.min(cols - first)];
        F::unpack(row, cols, first, weights);
        each(first, weights);
    }
}

fn dot_f16(rows: &[&[u8]], x: Activations<'_>, out: &mut [f32], _ahead: usize) {
    for (row, out) in rows.iter().zip(out) {
        *out = dot_floats::<F16>(row, x.floats);
    }
}

/// Several sums, so that the compiler may use vectors and errors stay small.
fn dot_floats<F: Format>(row: &[u8], x: &[f32]) -> f32 {
    let mut sums = [0f32; 8];
    for_pieces::<F>(row, x.len(), |first, weights| {
        for (i, (&w, &x)) in weights.iter().zip(&x[first..]).enumerate() {
            sums[i % 8] += w * x;
        }
    });
    sums.iter().sum()
}

fn axpy_f16(rows: &[&[u8]], weights: &[f32], acc: &mut [f32], _ahead: usize) {
    for (row, &weight) in rows.iter().zip(weights) {
        axpy_floats::<F16>(row, weight, acc);
    }
}

fn axpy_floats<F: Format>(row: &[u8], weight: f32, acc: &mut [f32]) {
    for_pieces::<F>(row, acc.len(), |first, row| {
        acc[first..].iter_mut().zip(row).for_each(|(acc, &w)| *acc += weight * w);
    });
}

/// Part j of a group's product is an integer; scaled it is added to sum j, groups ascending. At the end the halves of
/// the sums are added, and so on.
fn dot<F: Quants>(rows: &[&[u8]], x: Activations<'_>, out: &mut [f32], _ahead: usize) {
    let cols = x.floats.len();
    for (row, out) in rows.iter().zip(out) {
        let mut sums = [0f32; PARTS];
        for (g, (weights, scale)) in groups::<F>(row, cols, 0).enumerate() {
            let (block, g) = (&x.quants[g / BLOCK_GROUPS], g % BLOCK_GROUPS);
            let scale = scale * block.scales[g];
            let parts = weights.as_chunks::<4>().0.iter().zip(block.quants[g].as_chunks::<4>().0);
            for (sum, (weights, x)) in sums.iter_mut().zip(parts) {
                let products = weights.iter().zip(x).map(|(&w, &x)| i32::from(w) * i32::from(x));
                *sum = (products.sum::<i32>() as f32).mul_add(scale, *sum);
            }
        }
        let [a, b, c, d, e, f, g, h] = sums;
        *out = ((a + e) + (c + g)) + ((b + f) + (d + h));
    }
}

fn axpy<F: Quants>(rows: &[&[u8]], weights: &[f32], acc: &mut [f32], _ahead: usize) {
    let cols = acc.len();
    for (row, &weight) in rows.iter().zip(weights) {
        for (acc, (quants, scale)) in acc.chunks_exact_mut(GROUP).zip(groups::<F>(row, cols, 0)) {
            let scale = weight * scale;
            for (acc, quant) in acc.iter_mut().zip(quants) {
                *acc = f32::from(quant).mul_add(scale, *acc);
            }
        }
    }
}

fn quantise(x: &[f32], blocks: &mut [QuantBlock]) {
    assert!(x.len().is_multiple_of(GROUP), "{} activations are not whole groups", x.len());
    for (x, block) in x.chunks(GROUP * BLOCK_GROUPS).zip(blocks) {
        *block = bytemuck::Zeroable::zeroed();
        for (g, x) in x.chunks_exact(GROUP).enumerate() {
            let largest = x.iter().map(|x| x.abs().to_bits()).fold(0, u32::max);
            let (scale, inverse) = group_scale(largest);
            block.scales[g] = scale;
            for (quant, x) in block.quants[g].iter_mut().zip(x) {
                *quant = (x * inverse).round_ties_even() as i8;
            }
            for (sum, quants) in block.sums[g].iter_mut().zip(block.quants[g].as_chunks::<4>().0) {
                *sum = quants.iter().map(|&quant| i32::from(quant)).sum();
            }
        }
    }
}

fn pack_rows<F: Format>(rows: &[&[u8]], cols: usize, panel: &mut [f32]) {
    let panel = &mut panel[..cols * PANEL];
    if rows.len() < PANEL {
        panel.fill(0.0);
    }
    for (r, row) in rows.iter().enumerate() {
        for_pieces::<F>(row, cols, |first, weights| {
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

pub(super) fn store_f16(values: &[f32], row: &mut [u8]) {
    bytemuck::cast_slice_mut::<u8, f16>(row).convert_from_f32_slice(values);
}

/// The quants are those of the scale as it is stored, in half precision.
pub(super) fn store_q8_0(values: &[f32], row: &mut [u8]) {
    let (quants, scales) = row.split_at_mut(values.len());
    let groups = values.as_chunks::<GROUP>().0.iter().zip(quants.as_chunks_mut::<GROUP>().0);
    for ((values, quants), stored) in groups.zip(scales.as_chunks_mut::<2>().0) {
        let largest = values.iter().map(|value| value.abs().to_bits()).fold(0, u32::max);
        let scale = f16::from_f32(group_scale(largest).0);
        *stored = scale.to_le_bytes();
        let inverse = if scale == f16::ZERO { 0.0 } else { 1.0 / scale.to_f32() };
        for (quant, value) in quants.iter_mut().zip(values) {
            let rounded = (value * inverse).round_ties_even().clamp(-127.0, 127.0);
            *quant = (rounded as i8).cast_unsigned();
        }
    }
}

fn scores<F: Format>(keys: &[u8], queries: &[f32], head_dim: usize, out: &mut [f32]) {
    let row_bytes = F::row_bytes(head_dim);
    let count = keys.len() / row_bytes;
    for (query, out) in queries.chunks_exact(head_dim).zip(out.chunks_exact_mut(count)) {
        for (key, out) in keys.chunks_exact(row_bytes).zip(out) {
            *out = dot_floats::<F>(key, query);
        }
    }
}

fn weigh<F: Format>(values: &[u8], shares: &[f32], head_dim: usize, out: &mut [f32]) {
    let row_bytes = F::row_bytes(head_dim);
    let count = values.len() / row_bytes;
    out.fill(0.0);
    for (out, shares) in out.chunks_exact_mut(head_dim).zip(shares.chunks_exact(count)) {
        for (value, &share) in values.chunks_exact(row_bytes).zip(shares) {
            axpy_floats::<F>(value, share, out);
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
