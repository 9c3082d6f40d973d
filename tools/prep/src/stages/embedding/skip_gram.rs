//! The expected loss of a skip-gram with negative sampling, and its descent.
//!
//! Draw one of all co-activations: neurons i and j with probability C_ij = C_ji. Draw k negatives for i as its partners
//! are drawn when i is not looked at, with probability p_j = sum_i C_ij. The expected loss is
//!
//! ```text
//! L = sum over i != j of  -C_ij log σ(z_i · z_j) - k p_i p_j log σ(-z_i · z_j)
//! ```
//!
//! with its least value where z_i · z_j = log(C_ij / (k p_i p_j)). A pass goes over strips of rows i, each a step of
//! AdamW on the gradient of the strip's part, (k p_i p_j σ(s) - C_ij σ(-s)) for each score s; a strip's scores are all
//! that is in memory of the N x N.

use super::{Fit, Params, Vectors};
use crate::error::{PrepError, Result};
use crate::stages::coactivity::{self, Coactivity, count, together_in_strip};
use candle_core::{Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;

/// Rows of a strip. Fewer are more steps a pass, and more memory traffic.
const STRIP: usize = 256;
/// Size of the first vectors' elements.
const FIRST: f32 = 0.15;

/// How often two neurons act together.
struct Counts {
    neurons: usize,
    /// Neurons x neurons, zero for a neuron with itself.
    pairs: Vec<f32>,
    /// Sum of each row over the sum of all.
    shares: Vec<f32>,
    total: f64,
}

impl Counts {
    fn of(taught: &Coactivity) -> Counts {
        let neurons = taught.neurons();
        let mut pairs = vec![0f32; neurons * neurons];
        let counts: Vec<u32> = (0..neurons).map(|neuron| count(taught.row(neuron))).collect();
        let strip = coactivity::STRIP;
        pairs.par_chunks_mut(strip * neurons).enumerate().for_each_init(
            || vec![0; strip * neurons],
            |together, (number, rows)| {
                let (first, together) = (number * strip, &mut together[..rows.len()]);
                together_in_strip(taught.rows(), &counts, first, together);
                rows.iter_mut().zip(together).for_each(|(pair, &mut count)| *pair = count as f32);
                for (index, row) in rows.chunks_exact_mut(neurons).enumerate() {
                    row[first + index] = 0.0;
                }
            },
        );
        let sum = |row: &[f32]| row.iter().map(|&pair| f64::from(pair)).sum::<f64>();
        let sums: Vec<f64> = pairs.par_chunks_exact(neurons).map(sum).collect();
        let total = sums.iter().sum::<f64>().max(1.0);
        let shares = sums.iter().map(|sum| (sum / total) as f32).collect();
        Counts { neurons, pairs, shares, total }
    }

    /// Turns the scores of the rows from `first` on into the gradient of the loss by them, times the number of neurons.
    fn gradient(&self, first: usize, scores: &mut [f32], negatives: f32) {
        let (share_of_pair, scale) = ((1.0 / self.total) as f32, self.neurons as f32);
        self.each_pair(first, scores, negatives, |score, pair, negative| {
            let positive = pair * share_of_pair;
            let fall = (-score.abs()).exp();
            let of_positive = if *score >= 0.0 { fall / (1.0 + fall) } else { 1.0 / (1.0 + fall) };
            *score = scale * (negative * (1.0 - of_positive) - positive * of_positive);
            0.0
        });
    }

    /// The rows' part of the loss.
    fn loss(&self, first: usize, scores: &mut [f32], negatives: f32) -> f64 {
        let share_of_pair = (1.0 / self.total) as f32;
        self.each_pair(first, scores, negatives, |score, pair, negative| {
            // log(1 + e^-|s|) serves both logarithms.
            let log = (-score.abs()).exp().ln_1p();
            let positive = pair * share_of_pair;
            positive * ((-*score).max(0.0) + log) + negative * (score.max(0.0) + log)
        })
    }

    /// Sum of what `of` makes of a score, how often its two neurons act together, and how often that is drawn as a
    /// negative. A neuron's score with itself becomes zero.
    fn each_pair(
        &self,
        first: usize,
        scores: &mut [f32],
        negatives: f32,
        of: impl Fn(&mut f32, f32, f32) -> f32 + Sync,
    ) -> f64 {
        let neurons = self.neurons;
        let row = |(index, scores): (usize, &mut [f32])| {
            let a = first + index;
            let pairs = &self.pairs[a * neurons..][..neurons];
            let drawn = negatives * self.shares[a];
            let mut sum = 0.0;
            for (b, ((score, &pair), share)) in
                scores.iter_mut().zip(pairs).zip(&self.shares).enumerate()
            {
                if a == b {
                    *score = 0.0;
                } else {
                    sum += f64::from(of(score, pair, drawn * share));
                }
            }
            sum
        };
        let sums: Vec<f64> = scores.par_chunks_exact_mut(neurons).enumerate().map(row).collect();
        sums.iter().sum()
    }
}

/// Fits a layer's vectors.
pub(super) fn fit(taught: &Coactivity, params: &Params, layer: u32) -> Result<(Fit, Vectors)> {
    let counts = Counts::of(taught);
    let mut random = Xoshiro256PlusPlus::seed_from_u64(params.seed.wrapping_add(u64::from(layer)));
    let dimensions = params.dimensions as usize;
    let first: Vec<f32> =
        (0..counts.neurons * dimensions).map(|_| random.random_range(-FIRST..FIRST)).collect();
    descend(&counts, first, params)
        .map_err(|problem: candle_core::Error| PrepError::corrupt("the embedding", problem))
}

fn descend(
    counts: &Counts,
    first: Vec<f32>,
    params: &Params,
) -> candle_core::Result<(Fit, Vectors)> {
    let (neurons, dimensions) = (counts.neurons, params.dimensions as usize);
    let vectors = Var::from_vec(first, (neurons, dimensions), &Device::Cpu)?;
    let settings = ParamsAdamW { weight_decay: 0.0, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(vec![vectors.clone()], settings)?;
    let strips = neurons.div_ceil(STRIP);
    let steps = strips * params.epochs as usize;
    let mut fit = Fit { first_loss: 0.0, last_loss: 0.0 };
    for step in 0..steps {
        let along = step as f64 / steps as f64;
        optimizer.set_learning_rate(
            params.learning_rate * 0.5 * (1.0 + (std::f64::consts::PI * along).cos()),
        );
        let start = step % strips * STRIP;
        let rows = STRIP.min(neurons - start);
        let all = vectors.as_detached_tensor();
        let strip = all.narrow(0, start, rows)?;
        let mut scores: Vec<f32> = strip.matmul(&all.t()?)?.flatten_all()?.to_vec1()?;
        let negatives = params.negatives as f32;
        let (is_first, is_last) = (step < strips, step >= steps - strips);
        if is_first || is_last {
            let loss = counts.loss(start, &mut scores, negatives);
            fit.first_loss += if is_first { loss } else { 0.0 };
            fit.last_loss += if is_last { loss } else { 0.0 };
        }
        counts.gradient(start, &mut scores, negatives);
        // A pair's score has a vector of the strip on one side and any on the other.
        let by_score = Tensor::from_vec(scores, (rows, neurons), &Device::Cpu)?;
        let others = by_score.t()?.matmul(&strip)?;
        let own = by_score.matmul(&all)?.pad_with_zeros(0, start, neurons - start - rows)?;
        // Its derivative is the gradient, which is what the optimiser asks for.
        let slope = (vectors.as_tensor() * (others + own)?)?.sum_all()?;
        optimizer.step(&slope.backward()?)?;
    }
    let values = vectors.flatten_all()?.to_vec1()?;
    let negatives = params.negatives as f32;
    Ok((fit, Vectors { dimensions, negatives, values }))
}
