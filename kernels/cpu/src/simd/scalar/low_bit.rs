//! Low-bit rows.

use crate::simd::Activations;
use crate::simd::low_bit::{GROUP, LowBitOps, PARTS, spread};
use crate::simd::quantise::{self, BLOCK_GROUPS};
use ls_bundle::low_bit::{Codebook, Row, UNIT};

pub(super) const LOW_BIT: LowBitOps = LowBitOps { dot, axpy };

/// Groups of activations that a group of weights meets.
const HALVES: usize = GROUP / quantise::GROUP;

/// Groups `0 ..` of a row of `cols` weights: scale, and values of the codes.
fn groups<'a>(
    row: &'a [u8],
    codebook: &'a Codebook,
    cols: usize,
) -> impl Iterator<Item = (f32, [i8; GROUP])> + 'a {
    let row = &row[..codebook.bits().row_bytes(cols as u32)];
    let values = codebook.values();
    Row::new(codebook, row)
        .groups()
        .map(|(scale, codes)| (scale.to_f32(), codes.map(|code| values[usize::from(code)])))
}

/// Part j of a group's product is an integer; scaled it is added to sum j, groups ascending. At the end the halves of
/// the sums are added, and so on.
fn dot(rows: &[&[u8]], codebook: &Codebook, x: Activations<'_>, out: &mut [f32], _ahead: usize) {
    for (row, out) in rows.iter().zip(out) {
        let mut sums = [0f32; PARTS];
        for (g, (scale, weights)) in groups(row, codebook, x.floats.len()).enumerate() {
            for (half, weights) in weights.as_chunks::<{ quantise::GROUP }>().0.iter().enumerate() {
                let g = HALVES * g + half;
                let (block, g) = (&x.quants[g / BLOCK_GROUPS], g % BLOCK_GROUPS);
                let scale = scale * block.scales[g];
                let sums = sums.as_chunks_mut::<{ PARTS / HALVES }>().0[half].iter_mut();
                let weights = weights.as_chunks::<4>().0.iter();
                let parts = weights.zip(block.quants[g].as_chunks::<4>().0);
                for (sum, (weights, x)) in sums.zip(parts) {
                    let products =
                        weights.iter().zip(x).map(|(&w, &x)| i32::from(w) * i32::from(x));
                    *sum = (products.sum::<i32>() as f32).mul_add(scale, *sum);
                }
            }
        }
        let (low, high) = sums.split_at(PARTS / 2);
        let [a, b, c, d, e, f, g, h]: [f32; PARTS / 2] = std::array::from_fn(|i| low[i] + high[i]);
        *out = (((a + e) + (c + g)) + ((b + f) + (d + h))) / UNIT;
    }
}

fn axpy(rows: &[&[u8]], codebook: &Codebook, weights: &[f32], acc: &mut [f32], _ahead: usize) {
    for (row, &weight) in rows.iter().zip(weights) {
        let weight = weight / UNIT;
        let groups = groups(row, codebook, acc.len());
        for (acc, (scale, values)) in acc.chunks_exact_mut(GROUP).zip(groups) {
            let factor = weight * scale;
            for (k, value) in values.into_iter().enumerate() {
                let acc = &mut acc[spread(k)];
                *acc = f32::from(value).mul_add(factor, *acc);
            }
        }
    }
}
