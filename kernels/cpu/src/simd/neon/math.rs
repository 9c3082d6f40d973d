//! Norm, gate and softmax.

use super::{LANES, load, store, sum_lanes};
use std::arch::aarch64::*;

pub(super) fn inverse_rms(x: &[f32], epsilon: f32) -> f32 {
    // SAFETY: the CPU has NEON, see `available`.
    unsafe { inverse_rms_neon(x, epsilon) }
}

/// Squares are summed in f64: residuals have few, very large elements.
#[target_feature(enable = "neon")]
fn inverse_rms_neon(x: &[f32], epsilon: f32) -> f32 {
    let mut sums = [vdupq_n_f64(0.0); 2];
    let (vectors, tail) = x.as_chunks::<LANES>();
    for x in vectors {
        let x = load(x);
        let (low, high) = (vcvt_f64_f32(vget_low_f32(x)), vcvt_high_f64_f32(x));
        sums[0] = vfmaq_f64(sums[0], low, low);
        sums[1] = vfmaq_f64(sums[1], high, high);
    }
    let sum = vaddq_f64(sums[0], sums[1]);
    let tail: f64 = tail.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let squares = vpaddd_f64(sum) + tail;
    (1.0 / (squares / x.len() as f64 + f64::from(epsilon)).sqrt()) as f32
}

pub(super) fn swiglu(gate: &mut [f32], up: &[f32]) {
    // SAFETY: the CPU has NEON, see `available`; lengths are checked inside.
    unsafe { swiglu_neon(gate, up) }
}

#[target_feature(enable = "neon")]
fn swiglu_neon(gate: &mut [f32], up: &[f32]) {
    let up = &up[..gate.len()];
    let silu = |gate: float32x4_t, up: float32x4_t| {
        let one_more = vaddq_f32(vdupq_n_f32(1.0), exp(vnegq_f32(gate)));
        vmulq_f32(vdivq_f32(gate, one_more), up)
    };
    let (gates, gate_tail) = gate.as_chunks_mut::<LANES>();
    let (ups, up_tail) = up.as_chunks::<LANES>();
    for (gate, up) in gates.iter_mut().zip(ups) {
        *gate = store(silu(load(gate), load(up)));
    }
    let rest = gate_tail.len();
    let (mut gate, mut up) = ([0.0; LANES], [0.0; LANES]);
    gate[..rest].copy_from_slice(gate_tail);
    up[..rest].copy_from_slice(up_tail);
    gate_tail.copy_from_slice(&store(silu(load(&gate), load(&up)))[..rest]);
}

pub(super) fn exp_sum(x: &mut [f32], max: f32) -> f32 {
    // SAFETY: the CPU has NEON, see `available`.
    unsafe { exp_sum_neon(x, max) }
}

#[target_feature(enable = "neon")]
fn exp_sum_neon(x: &mut [f32], max: f32) -> f32 {
    let max = vdupq_n_f32(max);
    let mut sum = vdupq_n_f32(0.0);
    let (vectors, tail) = x.as_chunks_mut::<LANES>();
    for x in vectors {
        let shares = exp(vsubq_f32(load(x), max));
        sum = vaddq_f32(sum, shares);
        *x = store(shares);
    }
    if !tail.is_empty() {
        // Padded with what exp makes zero of.
        let mut padded = [f32::NEG_INFINITY; LANES];
        padded[..tail.len()].copy_from_slice(tail);
        let shares = exp(vsubq_f32(load(&padded), max));
        sum = vaddq_f32(sum, shares);
        tail.copy_from_slice(&store(shares)[..tail.len()]);
    }
    sum_lanes(sum)
}

pub(super) fn max(x: &[f32]) -> f32 {
    // SAFETY: the CPU has NEON, see `available`.
    unsafe { max_neon(x) }
}

/// Numbers win against NaN, as with `f32::max`.
#[target_feature(enable = "neon")]
fn max_neon(x: &[f32]) -> f32 {
    let (vectors, tail) = x.as_chunks::<LANES>();
    let mut largest = vdupq_n_f32(f32::NEG_INFINITY);
    for x in vectors {
        largest = vmaxnmq_f32(largest, load(x));
    }
    tail.iter().copied().fold(vmaxnmvq_f32(largest), f32::max)
}

/// e^x within 2 units of the last place; zero below the normal numbers, infinity above the largest; NaN stays.
///
/// e^x = 2^n * e^r with n = round(x / ln 2), |r| <= ln 2 / 2; e^r by its Taylor series, whose eighth term is below
/// half a unit.
#[inline]
#[target_feature(enable = "neon")]
fn exp(x: float32x4_t) -> float32x4_t {
    const LOWEST: f32 = -87.33;
    const HIGHEST: f32 = 88.72;
    // ln 2 in two parts, so that n * LN2_HIGH is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = vmaxq_f32(vdupq_n_f32(LOWEST), vminq_f32(vdupq_n_f32(HIGHEST), x));
    let n = vrndnq_f32(vmulq_f32(clamped, vdupq_n_f32(std::f32::consts::LOG2_E)));
    let r = vfmsq_f32(clamped, n, vdupq_n_f32(LN2_HIGH));
    let r = vfmsq_f32(r, n, vdupq_n_f32(LN2_LOW));
    let mut sum = vdupq_n_f32(1.0 / 5040.0);
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = vfmaq_f32(vdupq_n_f32(coefficient), sum, r);
    }
    // 2^n in two factors: n may be 128, which has no exponent of its own.
    let n = vcvtq_s32_f32(n);
    let half = vshrq_n_s32::<1>(n);
    let power = |n| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))));
    let sum = vmulq_f32(vmulq_f32(sum, power(half)), power(vsubq_s32(n, half)));
    let too_low = vcltq_f32(x, vdupq_n_f32(LOWEST));
    let too_high = vcgtq_f32(x, vdupq_n_f32(HIGHEST));
    let sum = vbslq_f32(too_high, vdupq_n_f32(f32::INFINITY), sum);
    vbslq_f32(too_low, vdupq_n_f32(0.0), sum)
}
