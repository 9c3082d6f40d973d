//! [`Levels`]: the values that weights are rounded to, and Lloyd's fit of them (a codebook) to a matrix.
//!
//! A group of weights shares a scale; a weight divided by its scale is rounded to the nearest level. The fit takes
//! turns: each group's scale is the one with the least squared error, each level the mean of what is rounded to it.

use half::f16;
use ls_bundle::low_bit::{Bits, Codebook, UNIT};

/// Groups that a codebook is fitted on, at most; they are spread over the matrix.
const FIT_GROUPS: usize = 4096;
const FIT_ROUNDS: usize = 12;
/// Scales tried for a group: from the largest magnitude on the outermost level downwards, in these steps.
const SCALE_STEPS: [f32; 10] = [1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.74, 0.68, 0.6, 0.5];

/// Midpoints between levels that are looked at one after another, not searched.
const FEW_LEVELS: usize = 16;
/// Weights that are rounded together.
const SIDE_BY_SIDE: usize = 16;

/// Values in ascending order.
#[derive(Clone, Debug, PartialEq)]
pub struct Levels {
    values: Vec<f32>,
    /// Between neighbours.
    midpoints: Vec<f32>,
    largest: f32,
    /// Whether a scale may be negative, which helps where the levels are lopsided.
    both_signs: bool,
}

/// A scale and what it leaves.
#[derive(Clone, Copy, Debug)]
struct Fit {
    scale: f32,
    error: f32,
}

impl Levels {
    /// Levels `values`, ascending, not all zero.
    #[must_use]
    pub fn new(values: Vec<f32>, both_signs: bool) -> Levels {
        assert!(values.is_sorted() && values.len() <= 256);
        let largest = values.iter().fold(0f32, |m, x| m.max(x.abs()));
        assert!(largest > 0.0, "levels that are all zero");
        let midpoints = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        Levels { values, midpoints, largest, both_signs }
    }

    /// Every integer of a range, as in the uniform formats.
    #[must_use]
    pub fn integers(range: std::ops::RangeInclusive<i16>, both_signs: bool) -> Levels {
        Levels::new(range.map(f32::from).collect(), both_signs)
    }

    /// What the codes of `codebook` stand for.
    #[must_use]
    pub fn of(codebook: &Codebook) -> Levels {
        Levels::new(codebook.values().iter().map(|&v| f32::from(v) / UNIT).collect(), false)
    }

    /// The level of a code.
    #[must_use]
    pub fn value(&self, code: u8) -> f32 {
        self.values[usize::from(code)]
    }

    /// The code of the level nearest to `x`.
    #[must_use]
    pub fn nearest(&self, x: f32) -> u8 {
        if self.midpoints.len() < FEW_LEVELS {
            self.midpoints.iter().map(|&midpoint| u8::from(x > midpoint)).sum()
        } else {
            self.midpoints.partition_point(|&midpoint| x > midpoint) as u8
        }
    }

    /// The scale of least squared error of the group `x`, each weight counting as `importance` says; zero for zeros.
    /// It is what half precision holds.
    #[must_use]
    pub fn fit_scale(&self, x: &[f32], importance: &[f32]) -> f16 {
        let largest = x.iter().fold(0f32, |m, x| m.max(x.abs()));
        if largest == 0.0 {
            return f16::ZERO;
        }
        let start = largest / self.largest;
        let signs: &[f32] = if self.both_signs { &[1.0, -1.0] } else { &[1.0] };
        let mut best = Fit { scale: start, error: f32::INFINITY };
        for sign in signs {
            for step in SCALE_STEPS {
                // The best scale for the codes that a scale gives often gives better codes.
                let first = self.refit(x, importance, sign * step * start);
                for fit in [first, self.refit(x, importance, first.scale)] {
                    if fit.error < best.error {
                        best = fit;
                    }
                }
            }
        }
        let limit = f16::MAX.to_f32();
        f16::from_f32(best.scale.clamp(-limit, limit))
    }

    /// The best scale for the codes that `scale` gives.
    fn refit(&self, x: &[f32], importance: &[f32], scale: f32) -> Fit {
        let inverse = 1.0 / scale;
        let mut sums = Sums::default();
        let (x, rest) = x.as_chunks::<SIDE_BY_SIDE>();
        let (importance, importance_of_rest) = importance.as_chunks();
        for (x, weight) in x.iter().zip(importance) {
            sums.add(x, weight, &self.levels_of(x.map(|x| x * inverse)));
        }
        // What fills up counts for nothing.
        let (mut x, mut weight) = ([0.0; SIDE_BY_SIDE], [0.0; SIDE_BY_SIDE]);
        x[..rest.len()].copy_from_slice(rest);
        weight[..rest.len()].copy_from_slice(&importance_of_rest[..rest.len()]);
        sums.add(&x, &weight, &self.levels_of(x.map(|x| x * inverse)));
        let [squares, product, energy] = sums.0.map(|lanes| lanes.iter().sum::<f32>());
        if energy == 0.0 || product == 0.0 {
            return Fit { scale, error: squares };
        }
        Fit { scale: product / energy, error: squares - product * product / energy }
    }

    /// The levels nearest to each of `x`. Few levels are compared with all of `x` at once: that is the loop in which
    /// rounding a matrix spends its time.
    fn levels_of(&self, x: [f32; SIDE_BY_SIDE]) -> [f32; SIDE_BY_SIDE] {
        if self.midpoints.len() >= FEW_LEVELS {
            return x.map(|x| self.value(self.nearest(x)));
        }
        let mut levels = [self.values[0]; SIDE_BY_SIDE];
        for (&midpoint, &value) in self.midpoints.iter().zip(&self.values[1..]) {
            for (level, &x) in levels.iter_mut().zip(&x) {
                *level = if x > midpoint { value } else { *level };
            }
        }
        levels
    }
}

/// Sums of w x^2, w x l and w l^2, each in as many parts as there are lanes.
#[derive(Default)]
struct Sums([[f32; SIDE_BY_SIDE]; 3]);

impl Sums {
    fn add(
        &mut self,
        x: &[f32; SIDE_BY_SIDE],
        weight: &[f32; SIDE_BY_SIDE],
        level: &[f32; SIDE_BY_SIDE],
    ) {
        let [squares, product, energy] = &mut self.0;
        for lane in 0..SIDE_BY_SIDE {
            let (x, weight, level) = (x[lane], weight[lane], level[lane]);
            squares[lane] += weight * x * x;
            product[lane] += weight * x * level;
            energy[lane] += weight * level * level;
        }
    }
}

/// The codebook of `bits` for a matrix of `weights`, row after row, in groups of `group`. All weights count the same:
/// counting them by a Hessian's diagonal gained nothing.
#[must_use]
pub fn fit_codebook(bits: Bits, weights: &[f32], group: usize) -> Codebook {
    let even = vec![1f32; group];
    let groups = weights.len() / group;
    // An odd step does not stay on the same places of rows that have an even number of groups.
    let step = (groups / FIT_GROUPS) | 1;
    let mut levels: Vec<f32> = start_levels(bits);
    for _ in 0..FIT_ROUNDS {
        let current = Levels::new(levels.clone(), false);
        let mut sums = vec![(0f64, 0f64); levels.len()];
        for index in (0..groups).step_by(step) {
            let x = &weights[index * group..][..group];
            let scale = current.fit_scale(x, &even).to_f32();
            if scale == 0.0 {
                continue;
            }
            for &x in x {
                let (sum, count) = &mut sums[usize::from(current.nearest(x / scale))];
                *sum += f64::from(x * scale);
                *count += f64::from(scale * scale);
            }
        }
        for (level, (sum, count)) in levels.iter_mut().zip(sums) {
            if count > 0.0 {
                *level = (sum / count) as f32;
            }
        }
        let largest = levels.iter().fold(0f32, |m, x| m.max(x.abs()));
        levels.iter_mut().for_each(|level| *level /= largest);
    }
    let bytes: Vec<i8> = levels.iter().map(|level| (level * UNIT).round() as i8).collect();
    Codebook::new(&bytes).expect("a power of two values")
}

/// Evenly spread quantiles of a bell, drawn out at the ends: near enough to the optimum for Lloyd's rounds.
fn start_levels(bits: Bits) -> Vec<f32> {
    let count = bits.values() as f32;
    let place = |code: usize| (2.0 * code as f32 + 1.0 - count) / (count - 1.0).max(1.0);
    (0..bits.values()).map(place).map(|x| x.signum() * x.abs().powf(1.2)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::{Rng, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    /// Sums of twelve uniform numbers: nearly normal, variance 1.
    fn bell(count: usize) -> Vec<f32> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(7);
        (0..count).map(|_| (0..12).map(|_| random.random::<f32>()).sum::<f32>() - 6.0).collect()
    }

    proptest! {
        #[test]
        fn nearest_is_nearest(x in -20f32..20.0, both in 0..2) {
            let levels = if both == 0 {
                Levels::new(vec![-9.0, -2.5, -2.0, 0.1, 4.0, 7.0, 7.5, 11.0], false)
            } else {
                Levels::integers(-127..=127, false)
            };
            let distance = |code: u8| (levels.value(code) - x).abs();
            let found = distance(levels.nearest(x));
            prop_assert!((0..levels.values.len() as u8).all(|code| found <= distance(code) + 1e-6));
        }
    }

    /// Mean squared error of `x` with the scales that the levels find.
    fn error(levels: &Levels, x: &[f32], group: usize) -> f32 {
        let of = |x: &[f32]| -> f32 {
            let scale = levels.fit_scale(x, &vec![1.0; x.len()]).to_f32();
            x.iter().map(|x| (x - scale * levels.value(levels.nearest(x / scale))).powi(2)).sum()
        };
        x.chunks(group).map(of).sum::<f32>() / x.len() as f32
    }

    #[test]
    fn a_bell_is_fitted_nearly_as_well_as_theory_allows() {
        let x = bell(1 << 16);
        // Max's errors of the best fixed levels; a scale for every 64 values gains a little beside.
        for (bits, best) in [(1, 0.363), (2, 0.1175), (3, 0.0345), (4, 0.0095)] {
            let codebook = fit_codebook(Bits::new(bits).unwrap(), &x, 64);
            let found = error(&Levels::of(&codebook), &x, 64);
            assert!(
                found < 1.05 * best && found > 0.65 * best,
                "{bits} bits: {found}, best {best}"
            );
        }
    }

    #[test]
    fn importance_moves_the_error_to_where_it_matters_little() {
        let x = bell(1 << 14);
        let importance: Vec<f32> = (0..64).map(|j| if j % 8 == 0 { 100.0 } else { 1.0 }).collect();
        let levels = Levels::of(&fit_codebook(Bits::Two, &x, 64));
        let of = |importance: &[f32]| -> f32 {
            let group = |x: &[f32]| -> f32 {
                let scale = levels.fit_scale(x, importance).to_f32();
                let error = |x: &f32| (x - scale * levels.value(levels.nearest(x / scale))).powi(2);
                x.iter().step_by(8).map(error).sum()
            };
            x.chunks(64).map(group).sum()
        };
        assert!(of(&importance) < 0.95 * of(&[1.0; 64]));
    }

    #[test]
    fn zeros_have_no_scale_and_a_lone_value_is_kept() {
        let levels = Levels::integers(-8..=7, true);
        assert_eq!(levels.fit_scale(&[0.0; 32], &[1.0; 32]), f16::ZERO);
        let mut x = [0.0; 32];
        x[3] = 5.0;
        let scale = levels.fit_scale(&x, &[1.0; 32]).to_f32();
        let kept = scale * levels.value(levels.nearest(5.0 / scale));
        assert!((kept - 5.0).abs() < 0.01, "{kept}");
    }
}
