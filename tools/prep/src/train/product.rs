//! The products that training spends its time in, each with what stands around it in one operation: rounding of the
//! weights before, bias and slopes after. A tensor of a batch times all blocks is then touched twice a step, not ten
//! times; and the features, which nobody derives by, get no derivative. On a card the plain operations that they stand
//! for run instead (`in_tensors`), which the tests hold them against.

use super::sign::{Step, elements};
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Device, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

fn matrix(values: Vec<f32>, rows: usize, cols: usize) -> Result<Tensor> {
    Tensor::from_vec(values, (rows, cols), &Device::Cpu)
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

/// Sum of each column.
fn column_sums(rows: &[f32], cols: usize) -> Vec<f32> {
    let mut sums = vec![0f32; cols];
    for row in rows.chunks_exact(cols) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
    sums
}

/// Sums of the first layer: `features` (batch x dims) times the rounded weights, and the rounded bias; batch x rows.
/// Arguments: weights (rows x dims) and bias (rows), both before rounding.
pub(super) struct Project {
    pub(super) features: Tensor,
    pub(super) weight: Step,
    pub(super) bias: Step,
}

impl Project {
    pub(super) fn apply(self, weights: &Tensor, bias: &Tensor) -> Result<Tensor> {
        if weights.device().is_cpu() {
            weights.apply_op2(bias, self)
        } else {
            self.in_tensors(weights, bias)
        }
    }

    fn in_tensors(&self, weights: &Tensor, bias: &Tensor) -> Result<Tensor> {
        let sums = self.features.matmul(&self.weight.in_tensors(weights)?.t()?)?;
        sums.broadcast_add(&self.bias.in_tensors(bias)?)
    }
}

impl CustomOp2 for Project {
    fn name(&self) -> &'static str {
        "project"
    }

    fn cpu_fwd(
        &self,
        weights: &CpuStorage,
        weights_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, dims) = weights_layout.shape().dims2()?;
        let weights = self.weight.values(elements(weights, weights_layout)?);
        let bias = self.bias.values(elements(bias, bias_layout)?);
        let sums = self.features.matmul(&matrix(weights, rows, dims)?.t()?)?;
        let shape = sums.shape().clone();
        let mut sums = values(&sums)?;
        sums.par_chunks_exact_mut(rows)
            .for_each(|row| row.iter_mut().zip(&bias).for_each(|(sum, bias)| *sum += bias));
        Ok((CpuStorage::F32(sums), shape))
    }

    fn bwd(
        &self,
        weights: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (rows, dims) = weights.dims2()?;
        let mut of_weights = values(&gradient.t()?.matmul(&self.features)?)?;
        self.weight.chain(&values(weights)?, &mut of_weights);
        let mut of_bias = column_sums(&values(gradient)?, rows);
        self.bias.chain(&values(bias)?, &mut of_bias);
        let of_bias = Tensor::from_vec(of_bias, rows, &Device::Cpu)?;
        Ok((Some(matrix(of_weights, rows, dims)?), Some(of_bias)))
    }
}

/// Levels of `sums` (batch x rows) times gains (rows).
pub(super) struct Leveling;

impl Leveling {
    pub(super) fn apply(self, sums: &Tensor, gains: &Tensor) -> Result<Tensor> {
        if sums.device().is_cpu() {
            sums.apply_op2(gains, self)
        } else {
            Leveling::in_tensors(sums, gains)
        }
    }

    fn in_tensors(sums: &Tensor, gains: &Tensor) -> Result<Tensor> {
        Step::Level.in_tensors(&sums.broadcast_mul(gains)?)
    }
}

impl CustomOp2 for Leveling {
    fn name(&self) -> &'static str {
        "levels"
    }

    fn cpu_fwd(
        &self,
        sums: &CpuStorage,
        layout: &Layout,
        gains: &CpuStorage,
        gains_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let mut levels = elements(sums, layout)?.to_vec();
        let gains = elements(gains, gains_layout)?;
        levels.par_chunks_exact_mut(gains.len()).for_each(|row| {
            row.iter_mut().zip(gains).for_each(|(x, gain)| *x = Step::Level.value(*x * gain));
        });
        Ok((CpuStorage::F32(levels), layout.shape().clone()))
    }

    fn bwd(
        &self,
        sums: &Tensor,
        gains: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (shape, sums, gains) = (sums.shape(), values(sums)?, values(gains)?);
        let mut of_sums = values(gradient)?;
        let mut of_gains = vec![0f32; gains.len()];
        let rows = of_sums.chunks_exact_mut(gains.len()).zip(sums.chunks_exact(gains.len()));
        for (gradients, sums) in rows {
            let cells = gradients.iter_mut().zip(sums).zip(&gains).zip(&mut of_gains);
            for (((gradient, sum), gain), of_gain) in cells {
                let passed = *gradient * Step::Level.slope(sum * gain);
                *of_gain += passed * sum;
                *gradient = passed * gain;
            }
        }
        let of_gains = Tensor::from_vec(of_gains, gains.len(), &Device::Cpu)?;
        Ok((Some(Tensor::from_vec(of_sums, shape, &Device::Cpu)?), Some(of_gains)))
    }
}

/// Scores: code (batch x bits) times the blocks' rounded weights times scale, and the bias; batch x blocks. Arguments:
/// code, weights before rounding (blocks x bits), scales and biases (2 x blocks).
pub(super) struct Scoring {
    pub(super) weight: Step,
}

impl Scoring {
    pub(super) fn apply(self, code: &Tensor, signs: &Tensor, factors: &Tensor) -> Result<Tensor> {
        if code.device().is_cpu() {
            code.apply_op3(signs, factors, self)
        } else {
            self.in_tensors(code, signs, factors)
        }
    }

    fn in_tensors(&self, code: &Tensor, signs: &Tensor, factors: &Tensor) -> Result<Tensor> {
        let (scales, biases) = (factors.get(0)?.unsqueeze(1)?, factors.get(1)?);
        let weights = self.weight.in_tensors(signs)?.broadcast_mul(&scales)?;
        code.matmul(&weights.t()?)?.broadcast_add(&biases)
    }
}

impl CustomOp3 for Scoring {
    fn name(&self) -> &'static str {
        "scores"
    }

    fn cpu_fwd(
        &self,
        code: &CpuStorage,
        code_layout: &Layout,
        signs: &CpuStorage,
        signs_layout: &Layout,
        factors: &CpuStorage,
        factors_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (blocks, bits) = signs_layout.shape().dims2()?;
        let (batch, _) = code_layout.shape().dims2()?;
        let code = matrix(elements(code, code_layout)?.to_vec(), batch, bits)?;
        let signs = elements(signs, signs_layout)?;
        let (scales, biases) = elements(factors, factors_layout)?.split_at(blocks);
        let scores =
            code.matmul(&matrix(scaled(self.weight, signs, scales), blocks, bits)?.t()?)?;
        let mut scores = values(&scores)?;
        scores
            .par_chunks_exact_mut(blocks)
            .for_each(|row| row.iter_mut().zip(biases).for_each(|(score, bias)| *score += bias));
        Ok((CpuStorage::F32(scores), Shape::from((batch, blocks))))
    }

    fn bwd(
        &self,
        code: &Tensor,
        signs: &Tensor,
        factors: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (blocks, bits) = signs.dims2()?;
        let (latent, mut factors) = (values(signs)?, values(factors)?);
        let weights = matrix(scaled(self.weight, &latent, &factors[..blocks]), blocks, bits)?;
        let of_code = gradient.matmul(&weights)?;
        let mut of_signs = values(&gradient.t()?.matmul(code)?)?;
        let of_biases = column_sums(&values(gradient)?, blocks);
        let rows = of_signs.par_chunks_exact_mut(bits).zip(latent.par_chunks_exact(bits));
        rows.zip(&mut factors[..blocks]).for_each(|((gradients, latent), scale)| {
            let along = gradients.iter().zip(latent);
            let of_scale = along.map(|(g, &x)| g * self.weight.value(x)).sum();
            let scale = std::mem::replace(scale, of_scale);
            gradients.iter_mut().zip(latent).for_each(|(g, &x)| {
                *g *= scale * self.weight.slope(x);
            });
        });
        factors[blocks..].copy_from_slice(&of_biases);
        Ok((
            Some(of_code),
            Some(matrix(of_signs, blocks, bits)?),
            Some(matrix(factors, 2, blocks)?),
        ))
    }
}

/// The rounded weights times their rows' scales.
fn scaled(weight: Step, latent: &[f32], scales: &[f32]) -> Vec<f32> {
    let bits = latent.len() / scales.len();
    let mut weights = latent.to_vec();
    weights.par_chunks_exact_mut(bits).zip(scales).for_each(|(row, &scale)| {
        row.iter_mut().for_each(|x| *x = weight.value(*x) * scale);
    });
    weights
}

/// What a batch's outputs are if no gradient is wanted of features that have the wrong width.
pub(super) fn check_width(features: &Tensor, dims: usize) -> Result<()> {
    match features.dims2()? {
        (_, width) if width == dims => Ok(()),
        (_, width) => bail!("features of {width} numbers; wanted {dims}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Var;

    fn var(values: &[f32], rows: usize) -> Var {
        Var::from_slice(values, (rows, values.len() / rows), &Device::Cpu).unwrap()
    }

    /// Gradients of the sum of squares of `f`.
    fn gradients(vars: &[&Var], f: Tensor) -> Vec<Vec<f32>> {
        let found = f.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        vars.iter().map(|var| values(found.get(var).unwrap()).unwrap()).collect()
    }

    fn close(a: &[Vec<f32>], b: &[Vec<f32>]) {
        for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
            assert!((a - b).abs() <= 1e-4 * (1.0 + a.abs()), "{a} {b}");
        }
    }

    /// Each operation equals the plain operations it stands for, in values and in gradients.
    #[test]
    fn fused_products_equal_plain_ones() {
        let features = matrix(vec![3.0, -40.0, 17.0, 90.0, 2.0, -60.0], 2, 3).unwrap();
        let weights = var(&[0.3, -0.9, 0.45, 1.2, 0.1, -0.2, 5.0, -0.6, 0.7], 3);
        let bias = Var::from_slice(&[0.4f32, -0.3, 0.1], 3, &Device::Cpu).unwrap();
        let (weight, integer) = (Step::Weight(ls_hash::PlaneBits::Four), Step::Integer(20.0));
        let op = || Project { features: features.clone(), weight, bias: integer };
        let fused = op().apply(&weights, &bias).unwrap();
        let plain = op().in_tensors(&weights, &bias).unwrap();
        assert_eq!(values(&fused).unwrap(), values(&plain).unwrap());
        close(&gradients(&[&weights, &bias], fused), &gradients(&[&weights, &bias], plain));

        let sums = var(&[30.0, -70.0, 12.0, 300.0, 55.0, -9.0], 2);
        let gains = Var::from_slice(&[0.1f32, 0.05, 0.2], 3, &Device::Cpu).unwrap();
        let fused = Leveling.apply(&sums, &gains).unwrap();
        let plain = Leveling::in_tensors(&sums, &gains).unwrap();
        assert_eq!(values(&fused).unwrap(), values(&plain).unwrap());
        close(&gradients(&[&sums, &gains], fused), &gradients(&[&sums, &gains], plain));

        let code = var(&[3.0, -7.0, 1.0, 0.0, 2.0, -5.0], 2);
        let signs = var(&[0.3, -0.2, 1.4, -0.1, 0.0, 0.8, -2.0, 0.4], 4);
        let code = var(&values(&code).unwrap()[..4], 2);
        let factors = var(&[0.5, 1.5, -0.25, 1.0, 3.0, -1.0, 0.5, 0.0], 2);
        let op = || Scoring { weight: Step::Sign };
        let fused = op().apply(&code, &signs, &factors).unwrap();
        let plain = op().in_tensors(&code, &signs, &factors).unwrap();
        assert_eq!(values(&fused).unwrap(), values(&plain).unwrap());
        let vars = [&code, &signs, &factors];
        close(&gradients(&vars, fused), &gradients(&vars, plain));
    }
}
