//! [`Mlp`]: two-layer predictors in training, of real weights or binarised (straight-through, as in the stack).

use super::features::Features;
use super::fit::{Options, descend};
use super::loss::Objective;
use super::product::{Project, Scoring};
use super::sign::Step;
use super::stack::random;
use crate::device;
use candle_core::{Result, Tensor, Var};
use ls_hash::{MlpTables, MlpWeights};
use rand_xoshiro::Xoshiro256PlusPlus;

/// Parameters in training.
#[derive(Debug)]
pub struct Mlp {
    signs: bool,
    /// hidden x dims.
    first: Var,
    /// hidden.
    first_biases: Var,
    /// blocks x hidden.
    second: Var,
    /// Scales and biases; 2 x blocks.
    factors: Var,
}

impl Mlp {
    /// Random weights, real ones or `signs`; scores begin as `prior`.
    pub fn new(
        dims: usize,
        hidden: usize,
        signs: bool,
        prior: &[f32],
        draw: &mut Xoshiro256PlusPlus,
    ) -> Result<Mlp> {
        let blocks = prior.len();
        let (of_first, of_second, scale) = if signs {
            (0.3, 0.3, 1.0 / (hidden as f32).sqrt())
        } else {
            // He's for what a ReLU follows; small behind, so that scores begin as the prior.
            ((2.0 / dims as f32).sqrt(), 0.3 / (hidden as f32).sqrt(), 1.0)
        };
        let factors = [&vec![scale; blocks], prior].concat();
        Ok(Mlp {
            signs,
            first: random((hidden, dims), of_first, draw)?,
            first_biases: Var::zeros(hidden, candle_core::DType::F32, device::current())?,
            second: random((blocks, hidden), of_second, draw)?,
            factors: Var::from_vec(factors, (2, blocks), device::current())?,
        })
    }

    fn forward(&self, features: &Tensor) -> Result<Tensor> {
        let weight = if self.signs { Step::Sign } else { Step::Plain };
        // Elements of deviation 1, as real weights like them; signs' sums are brought to 1.
        let dims = self.first.dim(1)? as f64;
        let unit =
            f64::from(1.0 / Features::DEVIATION) / if self.signs { dims.sqrt() } else { 1.0 };
        let features = features.affine(unit, 0.0)?;
        let project = Project { features, weight, bias: Step::Plain };
        let sums = project.apply(&self.first, &self.first_biases)?;
        let hidden = if self.signs { Step::Sign.apply(&sums)? } else { sums.relu()? };
        Scoring { weight }.apply(&hidden, &self.second, &self.factors)
    }

    /// Trains it as [`super::fit()`] trains a stack.
    pub fn fit(
        &self,
        features: &Features,
        objective: &dyn Objective,
        options: &Options,
        draw: &mut Xoshiro256PlusPlus,
    ) -> Result<Vec<f64>> {
        let vars = [&self.first, &self.first_biases, &self.second, &self.factors];
        let vars = vars.map(Var::clone).to_vec();
        descend(vars, features, objective, options, draw, |rows, _| self.forward(rows))
    }

    /// As it runs: 8 bits or signs.
    pub fn pack(&self, features: &Features) -> Result<MlpTables> {
        let read = |var: &Tensor| var.flatten_all()?.to_vec1::<f32>();
        let (dims, hidden) = (self.first.dim(1)?, self.first.dim(0)?);
        let (first, second) = (read(&self.first)?, read(&self.second)?);
        let mut first_biases = read(&self.first_biases)?;
        let [mut scales, biases]: [Vec<f32>; 2] =
            self.factors.to_vec2()?.try_into().expect("two rows");
        let weights = if self.signs {
            // Of sums of rounded elements that are not brought to 1.
            let unit = Features::DEVIATION * (dims as f32).sqrt();
            first_biases.iter_mut().for_each(|bias| *bias *= unit);
            let signs = |values: Vec<f32>| -> Vec<i8> {
                values.into_iter().map(|x| if x >= 0.0 { 1 } else { -1 }).collect()
            };
            let (first, second) = (signs(first), signs(second));
            MlpWeights::Signs { first, second }
        } else {
            let (first, mut first_scales) = MlpTables::round_rows(&first, dims);
            first_scales.iter_mut().for_each(|scale| *scale /= Features::DEVIATION);
            let (second, of_rows) = MlpTables::round_rows(&second, hidden);
            scales.iter_mut().zip(of_rows).for_each(|(scale, of_row)| *scale *= of_row);
            MlpWeights::Int8 { first, first_scales, second }
        };
        Ok(MlpTables { input: features.input().clone(), weights, first_biases, scales, biases })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predictors::{MlpScorer, Scorer};
    use crate::train::features::Statistics;
    use crate::train::loss::{BlockTargets, Loss};
    use candle_core::Device;
    use ls_hash::Scaling;
    use rand::{Rng, SeedableRng};

    #[test]
    fn packed_scores_are_the_trained_ones_up_to_rounding() {
        for signs in [false, true] {
            let mut draw = Xoshiro256PlusPlus::seed_from_u64(6);
            let raw: Vec<Vec<f32>> =
                (0..300).map(|_| (0..16).map(|_| draw.random_range(-1.0..1.0)).collect()).collect();
            let mut statistics = Statistics::new(Scaling::Rms, 16);
            raw.iter().for_each(|x| statistics.add(x));
            let mut features = Features::new(statistics.input());
            raw.iter().for_each(|x| features.push([&x[..]]));
            // Block b is important where element b is large.
            let code = |x: &f32| (120.0 + 100.0 * x) as u8;
            let codes = raw.iter().flat_map(|x| x.iter().map(code)).collect();
            let targets = BlockTargets::new(16, codes, None, 0.2, Loss::Softmax).unwrap();
            let model = Mlp::new(16, 48, signs, &targets.prior(), &mut draw).unwrap();
            let options =
                Options { epochs: 60, batch: 50, learning_rate: 0.01, temperature: [1.0; 2] };
            let losses = model.fit(&features, &targets, &options, &mut draw).unwrap();
            assert!(losses[59] < losses[0] - 0.1, "{losses:?}");
            let mut packed = MlpScorer::new(model.pack(&features).unwrap());
            let rows: Vec<f32> =
                (0..300).flat_map(|row| features.row(row).iter().map(|&q| f32::from(q))).collect();
            let rows = Tensor::from_vec(rows, (300, 16), &Device::Cpu).unwrap();
            let trained: Vec<Vec<f32>> = model.forward(&rows).unwrap().to_vec2().unwrap();
            let mut hits = 0;
            for (x, trained) in raw.iter().zip(&trained) {
                let mut scores = vec![0.0; 16];
                packed.scores(x, &mut scores);
                let best = crate::metrics::order_of(&scores)[0] as usize;
                hits += usize::from(x.iter().filter(|other| **other > x[best]).count() < 3);
                let spread = trained.iter().fold(0f32, |m, s| m.max((s - trained[0]).abs()));
                for (found, wanted) in scores.iter().zip(trained) {
                    let most = if signs { 1e-3 } else { 0.05 * spread };
                    assert!((found - wanted).abs() <= most, "{signs} {found} {wanted} {spread}");
                }
            }
            assert!(hits > 200, "{signs}: {hits} of 300");
        }
    }
}
