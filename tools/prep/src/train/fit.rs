//! [`fit()`]: the training loop. Adam, a learning rate that rises for a few steps and falls along a cosine, samples in a
//! new order each pass.

use super::adam::Adam;
use super::features::Features;
use super::lookup::Relaxation;
use super::loss::Objective;
use super::stack::Model;
use crate::device;
use candle_core::{Result, Tensor};
use rand::Rng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;

/// Share of the steps in which the learning rate rises.
const WARMUP: f64 = 0.05;

/// How to train.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Passes over the samples.
    pub epochs: u32,
    /// Samples of a step.
    pub batch: u32,
    /// The largest learning rate.
    pub learning_rate: f64,
    /// Temperature of the tables' relaxation at the first and at the last step; geometric between.
    pub temperature: [f64; 2],
}

/// Trains `model` on `features` (sample i is row i of the objective). Returns the mean loss of each pass.
///
/// # Panics
/// If there are no samples, or not as many as the objective's.
pub fn fit(
    model: &Model,
    features: &Features,
    objective: &dyn Objective,
    options: &Options,
    draw: &mut Xoshiro256PlusPlus,
) -> Result<Vec<f64>> {
    let samples = features.samples();
    assert_eq!(samples, objective.samples(), "samples of features and targets");
    assert!(samples > 0, "samples to train on");
    let forward =
        |rows: &Tensor, relaxation: &mut Relaxation<'_>| model.forward(rows, Some(relaxation));
    let vars = model.vars();
    descend(vars, features, objective, options, draw, forward)
}

/// The loop of [`fit()`] for any function with parameters `vars` of rounded features.
pub(crate) fn descend(
    mut vars: Vec<candle_core::Var>,
    features: &Features,
    objective: &dyn Objective,
    options: &Options,
    draw: &mut Xoshiro256PlusPlus,
    forward: impl Fn(&Tensor, &mut Relaxation<'_>) -> Result<Tensor>,
) -> Result<Vec<f64>> {
    let samples = features.samples();
    vars.extend(objective.vars());
    let mut adam = Adam::new(vars)?;
    let device = device::current();
    if !device.is_cpu() {
        // Of the noise that is drawn there.
        device.set_seed(draw.random())?;
    }
    let batch = (options.batch as usize).clamp(1, samples);
    let steps = samples.div_ceil(batch) * options.epochs as usize;
    let mut order: Vec<u32> = (0..samples as u32).collect();
    let (mut step, mut losses) = (0usize, Vec::new());
    for _ in 0..options.epochs {
        order.shuffle(draw);
        let mut total = 0f64;
        for chosen in order.chunks(batch) {
            let done = (step as f64 + 0.5) / steps as f64;
            let [first, last] = options.temperature;
            let temperature = first * (last / first).powf(done);
            let rows = features.draw(chosen, draw);
            let rows = Tensor::from_vec(rows, (chosen.len(), features.dims()), device)?;
            let outputs = forward(&rows, &mut Relaxation { temperature, noise: draw })?;
            let loss = objective.loss(&outputs, chosen)?;
            adam.step(&loss.backward()?, options.learning_rate * rate(done))?;
            total += f64::from(loss.to_vec0::<f32>()?) * chosen.len() as f64;
            step += 1;
        }
        losses.push(total / samples as f64);
    }
    Ok(losses)
}

/// Share of the largest learning rate when the share `done` of the steps is done.
fn rate(done: f64) -> f64 {
    if done < WARMUP {
        done / WARMUP
    } else {
        0.5 + 0.5 * (std::f64::consts::PI * (done - WARMUP) / (1.0 - WARMUP)).cos()
    }
}
