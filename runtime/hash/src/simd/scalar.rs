//! The definition, in plain Rust. Bodies are `inline(always)` where other instruction sets compile them again for
//! themselves.

use super::{Ops, Rounding, Scoring};
use crate::bits;
use crate::head::GROUP;
use crate::signals::{SignalTables, Signals};

pub(crate) static OPS: Ops = Ops {
    name: "scalar",
    sum_squares,
    round,
    dot_i8,
    dot_i4,
    dot_i2,
    dot_f32,
    distances,
    score_signs,
    score_levels,
    remember,
    range,
    at_least,
};

/// Sums that run beside each other in f32.
const LANES: usize = 8;

fn fold(sums: [f32; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = sums;
    let (a, b, c, d) = (a + e, b + f, c + g, d + h);
    (a + c) + (b + d)
}

#[inline(always)]
pub(super) fn sum_squares(x: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for chunk in whole {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x * x;
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += x * x;
    }
    fold(sums)
}

#[inline(always)]
pub(super) fn round(feature: Rounding<'_>, out: &mut [i8]) {
    let numbers = feature.x.iter().zip(feature.center).zip(feature.gain);
    for (q, ((x, center), gain)) in out.iter_mut().zip(numbers) {
        let z = (x * feature.scale - center) * gain;
        // A cast turns NaN into 0.
        *q = z.clamp(-127.0, 127.0).round_ties_even() as i8;
    }
}

/// `out[r] = sum of meaning(weight) * x` over rows of `BITS`-bit weights, laid out as [`crate::PlaneBits`] says.
#[inline(always)]
fn dot_int<const BITS: usize>(rows: &[u8], x: &[i8], out: &mut [i32], meaning: impl Fn(u8) -> i32) {
    if x.is_empty() {
        return out.fill(0);
    }
    let (stride, mask) = (x.len() * BITS / 8, 0xff >> (8 - BITS));
    for (row, out) in rows.chunks_exact(stride).zip(out) {
        let mut sum = 0;
        for (bytes, x) in row.chunks_exact(32).zip(x.chunks_exact(32 * 8 / BITS)) {
            for (part, x) in x.chunks_exact(32).enumerate() {
                for (&byte, &x) in bytes.iter().zip(x) {
                    sum += meaning(byte >> (part * BITS) & mask) * i32::from(x);
                }
            }
        }
        *out = sum;
    }
}

pub(super) fn dot_i8(rows: &[u8], x: &[i8], out: &mut [i32]) {
    dot_int::<8>(rows, x, out, |w| i32::from(w as i8));
}

pub(super) fn dot_i4(rows: &[u8], x: &[i8], out: &mut [i32]) {
    dot_int::<4>(rows, x, out, |w| i32::from(w) - 8);
}

pub(super) fn dot_i2(rows: &[u8], x: &[i8], out: &mut [i32]) {
    dot_int::<2>(rows, x, out, |w| 2 * i32::from(w) - 3);
}

#[inline(always)]
pub(super) fn dot_f32(rows: &[f32], x: &[f32], out: &mut [f32]) {
    if x.is_empty() {
        return out.fill(0.0);
    }
    for (row, out) in rows.chunks_exact(x.len()).zip(out) {
        let mut sums = [0.0; LANES];
        for (w, x) in row.as_chunks::<LANES>().0.iter().zip(x.as_chunks::<LANES>().0) {
            for ((sum, w), x) in sums.iter_mut().zip(w).zip(x) {
                *sum += w * x;
            }
        }
        *out = fold(sums);
    }
}

#[inline(always)]
pub(super) fn distances(rows: &[u64], code: &[u64], out: &mut [u32]) {
    // Loops of known length for one stack of 64 or 256 bits.
    match code.len() {
        0 => out.fill(0),
        1 => distances_of::<1>(rows, code, out),
        4 => distances_of::<4>(rows, code, out),
        len => {
            for (row, out) in rows.chunks_exact(len).zip(out) {
                *out = bits::distance(row, code);
            }
        }
    }
}

#[inline(always)]
fn distances_of<const WORDS: usize>(rows: &[u64], code: &[u64], out: &mut [u32]) {
    let code = code.as_chunks::<WORDS>().0[0];
    for (row, out) in rows.as_chunks::<WORDS>().0.iter().zip(out) {
        *out = (0..WORDS).map(|w| (row[w] ^ code[w]).count_ones()).sum();
    }
}

/// The score of a block whose signs have the dot product `dot` with the code.
#[inline(always)]
fn score(scoring: &Scoring<'_>, block: usize, dot: i32) -> i32 {
    i32::from(scoring.scales[block]) * dot + (i32::from(scoring.offsets[block]) << scoring.shift)
}

pub(super) fn score_signs(scoring: Scoring<'_>, code: &[u64], out: &mut [i32]) {
    let bytes = scoring.bits.div_ceil(8);
    // Bits behind the last sign are clear in the code; in a block they may be anything.
    let last = 0xff >> (8 * bytes - scoring.bits);
    let groups = scoring.signs.chunks_exact(bytes * GROUP);
    for (g, (signs, out)) in groups.zip(out.chunks_mut(GROUP)).enumerate() {
        let mut distances = [0u16; GROUP];
        for (k, signs) in signs.as_chunks::<GROUP>().0.iter().enumerate() {
            let (code, mask) = (bits::byte(code, k), if k + 1 == bytes { last } else { 0xff });
            for (distance, sign) in distances.iter_mut().zip(signs) {
                *distance += ((sign ^ code) & mask).count_ones() as u16;
            }
        }
        for (i, (out, distance)) in out.iter_mut().zip(distances).enumerate() {
            let dot = scoring.bits as i32 - 2 * i32::from(distance);
            *out = score(&scoring, g * GROUP + i, dot);
        }
    }
}

pub(super) fn score_levels(scoring: Scoring<'_>, levels: &[i8], out: &mut [i32]) {
    let bytes = scoring.bits.div_ceil(8);
    let groups = scoring.signs.chunks_exact(bytes * GROUP);
    for (g, (signs, out)) in groups.zip(out.chunks_mut(GROUP)).enumerate() {
        let mut dots = [0i16; GROUP];
        for (signs, levels) in signs.as_chunks::<GROUP>().0.iter().zip(levels.chunks(8)) {
            for (bit, &level) in levels.iter().enumerate() {
                for (dot, sign) in dots.iter_mut().zip(signs) {
                    let up = i16::from(sign >> bit & 1);
                    *dot += (2 * up - 1) * i16::from(level);
                }
            }
        }
        for (i, (out, dot)) in out.iter_mut().zip(dots).enumerate() {
            *out = score(&scoring, g * GROUP + i, i32::from(dot));
        }
    }
}

#[inline(always)]
pub(super) fn remember(
    tables: &SignalTables,
    fast_rate: u16,
    slow_rate: u16,
    biases: &[i16],
    signals: &mut Signals,
) {
    let blocks = biases.len();
    let (fast, slow) = (&mut signals.fast[..blocks], &mut signals.slow[..blocks]);
    let (active, offsets) = (&signals.active[..blocks], &mut signals.offsets[..blocks]);
    let weigh = |weight: i16, mean: u16| (i32::from(weight) * i32::from(mean)) >> 16;
    for block in 0..blocks {
        // All ones if active.
        let mask = u16::from(active[block]).wrapping_neg();
        let age = |mean: u16, rate: u16| {
            let lost = ((u32::from(mean) * u32::from(rate)) >> 16) as u16;
            (mean - lost).saturating_add(rate & mask)
        };
        fast[block] = age(fast[block], fast_rate);
        slow[block] = age(slow[block], slow_rate);
        let sum = i32::from(biases[block])
            + weigh(tables.fast_weight, fast[block])
            + weigh(tables.slow_weight, slow[block])
            + i32::from(tables.previous_weight & mask as i16);
        offsets[block] = sum.clamp(i32::from(i16::MIN), i32::from(i16::MAX)) as i16;
    }
}

#[inline(always)]
pub(super) fn range(x: &[i32]) -> (i32, i32) {
    let Some(&first) = x.first() else { return (0, 0) };
    x.iter().fold((first, first), |(low, high), &x| (low.min(x), high.max(x)))
}

pub(super) fn at_least(x: &[i32], least: i32, out: &mut [u64]) {
    for (x, out) in x.chunks(64).zip(out) {
        *out = x.iter().rev().fold(0, |bits, &x| bits << 1 | u64::from(x >= least));
    }
}
