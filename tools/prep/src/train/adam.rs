//! [`Adam`] without weight decay.

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use rayon::prelude::*;

/// Shares that the moments keep of themselves.
const KEEP: [f32; 2] = [0.9, 0.99];
const EPSILON: f32 = 1e-8;
/// Elements that a thread takes at least.
const GRAIN: usize = 1 << 14;

/// The optimiser and its moments.
#[derive(Debug)]
pub(super) enum Adam {
    /// Here.
    Loops(Loops),
    /// Where the parameters are.
    Tensors(AdamW),
}

impl Adam {
    pub(super) fn new(vars: Vec<Var>) -> Result<Adam> {
        if vars.iter().all(|var| var.device().is_cpu()) {
            return Ok(Adam::Loops(Loops::new(vars)));
        }
        Adam::in_tensors(vars).map(Adam::Tensors)
    }

    fn in_tensors(vars: Vec<Var>) -> Result<AdamW> {
        let [beta1, beta2] = KEEP.map(f64::from);
        let eps = f64::from(EPSILON);
        AdamW::new(vars, ParamsAdamW { lr: 0.0, beta1, beta2, eps, weight_decay: 0.0 })
    }

    /// One step against `gradients`. Parameters that have none stay.
    pub(super) fn step(&mut self, gradients: &GradStore, learning_rate: f64) -> Result<()> {
        match self {
            Adam::Loops(adam) => adam.step(gradients, learning_rate),
            Adam::Tensors(adam) => {
                adam.set_learning_rate(learning_rate);
                adam.step(gradients)
            }
        }
    }
}

/// Each parameter read and written once a step.
#[derive(Debug)]
pub(super) struct Loops {
    vars: Vec<(Var, Vec<[f32; 2]>)>,
    step: i32,
}

impl Loops {
    fn new(vars: Vec<Var>) -> Loops {
        let with_moments = |var: Var| {
            let moments = vec![[0.0; 2]; var.elem_count()];
            (var, moments)
        };
        Loops { vars: vars.into_iter().map(with_moments).collect(), step: 0 }
    }

    fn step(&mut self, gradients: &GradStore, learning_rate: f64) -> Result<()> {
        self.step += 1;
        let [first, second] = KEEP.map(|keep| 1.0 / (1.0 - keep.powi(self.step)));
        let rate = learning_rate as f32 * first;
        for (var, moments) in &mut self.vars {
            let Some(gradient) = gradients.get(var) else { continue };
            let gradient: Vec<f32> = gradient.flatten_all()?.to_vec1()?;
            let mut values: Vec<f32> = var.flatten_all()?.to_vec1()?;
            let cells = values.par_iter_mut().zip(&gradient).zip(moments);
            cells.with_min_len(GRAIN).for_each(|((value, &g), [mean, square])| {
                *mean = KEEP[0] * *mean + (1.0 - KEEP[0]) * g;
                *square = KEEP[1] * *square + (1.0 - KEEP[1]) * g * g;
                *value -= rate * *mean / ((*square * second).sqrt() + EPSILON);
            });
            var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_step_is_the_learning_rate_whatever_the_gradient() {
        let in_tensors = |vars| Ok(Adam::Tensors(Adam::in_tensors(vars)?));
        let mut ends: Vec<Vec<f32>> = Vec::new();
        for make in [Adam::new, in_tensors] {
            let x = Var::from_slice(&[5.0f32, -3.0], 2, &Device::Cpu).unwrap();
            let mut adam = make(vec![x.clone()]).unwrap();
            for step in 0..400 {
                let loss = x.sqr().unwrap().affine(1000.0, 0.0).unwrap().sum_all().unwrap();
                let before: Vec<f32> = x.to_vec1().unwrap();
                adam.step(&loss.backward().unwrap(), 0.05).unwrap();
                let after: Vec<f32> = x.to_vec1().unwrap();
                if step == 0 {
                    assert!((before[0] - after[0] - 0.05).abs() < 1e-5);
                    assert!((before[1] - after[1] + 0.05).abs() < 1e-5);
                }
            }
            ends.push(x.to_vec1().unwrap());
            assert!(ends.iter().flatten().all(|x| x.abs() < 0.1), "{ends:?}");
        }
        let apart = ends[0].iter().zip(&ends[1]).map(|(a, b)| (a - b).abs());
        assert!(apart.fold(0f32, f32::max) < 1e-3, "{ends:?}");
    }
}
