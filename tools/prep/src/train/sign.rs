//! Steps that gradients pass as if they were not there: the sign of Eq. 11 and the rounding of weights and levels.
//!
//! Forward gives what the tables will hold; backward multiplies the gradient with the slope of the line that the step
//! approximates, within the range in which the step still changes anything, and with zero outside (Bengio et al.).

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor};
use ls_hash::{MAX_LEVEL, PlaneBits};
use rayon::prelude::*;

/// Elements that a thread takes at least.
const GRAIN: usize = 1 << 14;

/// A function whose derivative is zero almost everywhere.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// None: the number itself.
    Plain,
    /// +1 for x >= 0, else -1. Passes gradients of -1 <= x <= 1.
    Sign,
    /// The nearest integer to x times this.
    Integer(f32),
    /// The weight of an integer hyperplane nearest to x times [`grid`].
    Weight(PlaneBits),
    /// The nearest whole level, ties to even, within ±[`MAX_LEVEL`].
    Level,
}

/// What a weight of standard deviation 1 is multiplied with before it is rounded: near the least squared error for a
/// normal distribution.
#[must_use]
pub fn grid(bits: PlaneBits) -> f32 {
    match bits {
        PlaneBits::Eight => 32.0,
        PlaneBits::Four => 3.0,
        PlaneBits::Two => 2.0,
    }
}

impl Step {
    pub(super) fn value(self, x: f32) -> f32 {
        match self {
            Step::Plain => x,
            Step::Sign => {
                if x >= 0.0 {
                    1.0
                } else {
                    -1.0
                }
            }
            Step::Integer(scale) => (x * scale).round(),
            Step::Weight(bits) => {
                let w = x * grid(bits);
                match bits {
                    PlaneBits::Eight => w.round().clamp(-127.0, 127.0),
                    PlaneBits::Four => w.round().clamp(-8.0, 7.0),
                    PlaneBits::Two => ((w + 3.0) / 2.0).round().clamp(0.0, 3.0) * 2.0 - 3.0,
                }
            }
            Step::Level => {
                let limit = f32::from(MAX_LEVEL);
                x.clamp(-limit, limit).round_ties_even()
            }
        }
    }

    pub(super) fn slope(self, x: f32) -> f32 {
        let (slope, limit) = self.line();
        if x.abs() <= limit { slope } else { 0.0 }
    }

    /// The slope of the line that the step approximates, and how far from zero gradients pass.
    fn line(self) -> (f32, f32) {
        match self {
            Step::Plain => (1.0, f32::INFINITY),
            Step::Sign => (1.0, 1.0),
            Step::Integer(scale) => (scale, f32::INFINITY),
            Step::Weight(bits) => {
                let largest = match bits {
                    PlaneBits::Eight => 127.5,
                    PlaneBits::Four => 8.0,
                    PlaneBits::Two => 4.0,
                };
                (grid(bits), largest / grid(bits))
            }
            Step::Level => (1.0, f32::from(MAX_LEVEL) + 0.5),
        }
    }

    /// The step of every element.
    pub(super) fn values(self, x: &[f32]) -> Vec<f32> {
        x.par_iter().with_min_len(GRAIN).map(|&x| self.value(x)).collect()
    }

    /// Turns derivatives by the step of `x` into those by `x`.
    pub(super) fn chain(self, x: &[f32], gradients: &mut [f32]) {
        let pairs = gradients.par_iter_mut().zip(x).with_min_len(GRAIN);
        pairs.for_each(|(gradient, &x)| *gradient *= self.slope(x));
    }

    /// Applies the step to every element of a contiguous tensor of f32.
    pub fn apply(self, x: &Tensor) -> Result<Tensor> {
        if x.device().is_cpu() { x.apply_op1(self) } else { self.in_tensors(x) }
    }

    /// [`Step::apply`] by plain operations.
    pub(super) fn in_tensors(self, x: &Tensor) -> Result<Tensor> {
        if self == Step::Plain {
            return Ok(x.clone());
        }
        let fixed = x.detach();
        let value = match self {
            Step::Plain => unreachable!("it has returned"),
            Step::Sign => fixed.ge(0f32)?.to_dtype(DType::F32)?.affine(2.0, -1.0)?,
            Step::Integer(scale) => fixed.affine(scale.into(), 0.0)?.round()?,
            Step::Weight(bits) => {
                let w = fixed.affine(grid(bits).into(), 0.0)?;
                match bits {
                    PlaneBits::Eight => w.round()?.clamp(-127f32, 127f32)?,
                    PlaneBits::Four => w.round()?.clamp(-8f32, 7f32)?,
                    PlaneBits::Two => {
                        let code = w.affine(0.5, 1.5)?.round()?.clamp(0f32, 3f32)?;
                        code.affine(2.0, -3.0)?
                    }
                }
            }
            Step::Level => {
                let limit = f32::from(MAX_LEVEL);
                // Beyond this number only integers are left: adding it rounds, ties to even.
                let far = 12_582_912.0;
                fixed.clamp(-limit, limit)?.affine(1.0, far)?.affine(1.0, -far)?
            }
        };
        let (slope, limit) = self.line();
        let line = if limit == f32::INFINITY {
            x.affine(slope.into(), 0.0)?
        } else {
            (x * fixed.abs()?.le(limit)?.to_dtype(DType::F32)?.affine(slope.into(), 0.0)?)?
        };
        // In this order it is exactly the value.
        (&line - line.detach())? + value
    }
}

/// The elements of a contiguous tensor of f32.
pub(super) fn elements<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("a step wants contiguous elements")
    };
    Ok(&storage.as_slice::<f32>()?[start..end])
}

impl CustomOp1 for Step {
    fn name(&self) -> &'static str {
        "step"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = self.values(elements(storage, layout)?);
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }

    fn bwd(&self, arg: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let mut gradients = gradient.flatten_all()?.to_vec1()?;
        self.chain(&arg.flatten_all()?.to_vec1::<f32>()?, &mut gradients);
        Ok(Some(Tensor::from_vec(gradients, arg.shape(), &Device::Cpu)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Var;

    /// Values and slopes; of the tensor operations too, which must be the same.
    fn both(step: Step, x: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let x = Var::from_slice(x, x.len(), &Device::Cpu).unwrap();
        let [loops, tensors] = [step.apply(&x), step.in_tensors(&x)].map(|y| {
            let y = y.unwrap();
            let gradients = y.sum_all().unwrap().backward().unwrap();
            (y.to_vec1().unwrap(), gradients.get(&x).unwrap().to_vec1().unwrap())
        });
        assert_eq!(loops, tensors, "{step:?}");
        loops
    }

    #[test]
    fn steps_round_forward_and_pass_gradients_backward() {
        let (signs, slopes) = both(Step::Sign, &[-2.0, -0.5, -0.0, 0.0, 0.3, 1.5]);
        assert_eq!(signs, [-1.0, -1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(slopes, [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]);
        let (levels, slopes) = both(Step::Level, &[-9.0, -0.5, 0.5, 1.5, 7.4, 8.0]);
        assert_eq!(levels, [-7.0, 0.0, 0.0, 2.0, 7.0, 7.0]);
        assert_eq!(slopes, [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]);
        let (whole, slopes) = both(Step::Integer(10.0), &[-0.26, 12.34]);
        assert_eq!((whole, slopes), (vec![-3.0, 123.0], vec![10.0, 10.0]));
    }

    #[test]
    fn weights_are_those_that_planes_hold() {
        let x: Vec<f32> = (-60..60).map(|i| i as f32 / 9.7).collect();
        for bits in [PlaneBits::Eight, PlaneBits::Four, PlaneBits::Two] {
            let (weights, _) = both(Step::Weight(bits), &x);
            let planes = ls_hash::Planes::from_rounded(x.len(), &weights, &[0.0], bits);
            let held: Vec<f32> = (0..x.len()).map(|dim| planes.weight(0, dim)).collect();
            assert_eq!(weights, held, "{bits:?}");
        }
    }
}
