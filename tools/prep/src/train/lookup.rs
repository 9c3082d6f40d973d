//! The look-up of Eq. 10, made differentiable: the arg-max of Eq. 12, φ_τ(m) = argmax_i Z\[i\] · m, relaxed by
//! Gumbel-softmax.
//!
//! Forward reads the row that the signs of the margins spell, as the packed form does. Backward sees the mixture of rows
//! in which row i has the share softmax_i((Z\[i\] · m + noise) / temperature); the noise is Gumbel's, and the temperature
//! goes down while training lasts.

use super::sign::Step;
use candle_core::{D, Device, Result, Shape, Tensor};
use rand::Rng;
use rand_xoshiro::Xoshiro256PlusPlus;

/// Z of Eq. 12, transposed: tau x 2^tau, all patterns of signs in counting order, the first sign the most significant.
pub fn patterns(tau: usize, device: &Device) -> Result<Tensor> {
    let rows = 1usize << tau;
    let sign = |place: usize| {
        if (place % rows) >> (tau - 1 - place / rows) & 1 == 1 { 1f32 } else { -1.0 }
    };
    Tensor::from_vec((0..tau * rows).map(sign).collect::<Vec<_>>(), (tau, rows), device)
}

/// The temperature of the relaxation, and where its noise comes from.
#[derive(Debug)]
pub struct Relaxation<'a> {
    /// Temperature.
    pub temperature: f64,
    /// Source of the noise.
    pub noise: &'a mut Xoshiro256PlusPlus,
}

/// Rows of `tables` (stacks x 2^tau x width, of any sign; their signs count) at the indices that the signs of `margins`
/// (batch x stacks * tau) spell: batch x stacks * width signs. Without `relaxation` there is no gradient.
pub fn look_up(
    margins: &Tensor,
    tables: &Tensor,
    relaxation: Option<&mut Relaxation<'_>>,
) -> Result<Tensor> {
    let (batch, _) = margins.dims2()?;
    let (stacks, rows, width) = tables.dims3()?;
    let tau = rows.trailing_zeros() as usize;
    let signs = Step::Sign.apply(tables)?;
    let hard = rows_of(margins, &signs, tau)?;
    let Some(relaxation) = relaxation else { return Ok(hard) };
    // stacks x batch x 2^tau
    let scores = margins
        .reshape((batch * stacks, tau))?
        .matmul(&patterns(tau, margins.device())?)?
        .reshape((batch, stacks, rows))?
        .transpose(0, 1)?
        .contiguous()?;
    let noise = if margins.device().is_cpu() {
        let noise = gumbel(stacks * batch * rows, relaxation.noise);
        Tensor::from_vec(noise, scores.shape(), margins.device())?
    } else {
        gumbel_in_tensors(scores.shape(), margins.device())?
    };
    let shares =
        candle_nn::ops::softmax(&((scores + noise)? / relaxation.temperature)?, D::Minus1)?;
    let soft = shares.matmul(&signs)?.transpose(0, 1)?.reshape((batch, stacks * width))?;
    // In this order it is exactly `hard`.
    (&soft - soft.detach())? + hard
}

/// The rows that the signs of the margins spell, without gradient.
fn rows_of(margins: &Tensor, signs: &Tensor, tau: usize) -> Result<Tensor> {
    let (batch, _) = margins.dims2()?;
    let (stacks, rows, width) = signs.dims3()?;
    let margins: Vec<f32> = margins.flatten_all()?.to_vec1()?;
    let spell = |signs: &[f32]| signs.iter().fold(0, |i, &m| i << 1 | u32::from(m >= 0.0));
    let row = |(place, signs): (usize, &[f32])| (place % stacks * rows) as u32 + spell(signs);
    let indices: Vec<u32> = margins.chunks_exact(tau).enumerate().map(row).collect();
    let indices = Tensor::from_vec(indices, batch * stacks, signs.device())?;
    signs
        .detach()
        .reshape((stacks * rows, width))?
        .index_select(&indices, 0)?
        .reshape((batch, stacks * width))
}

/// Draws from Gumbel's distribution: -ln(-ln u).
fn gumbel(count: usize, noise: &mut Xoshiro256PlusPlus) -> Vec<f32> {
    let draw = |_| {
        let u: f32 = noise.random_range(f32::EPSILON..1.0);
        -(-u.ln()).ln()
    };
    (0..count).map(draw).collect()
}

/// The same by the generator of `device`.
fn gumbel_in_tensors(shape: &Shape, device: &Device) -> Result<Tensor> {
    let u = Tensor::rand(0f32, 1f32, shape, device)?;
    // Neither end has a logarithm of a logarithm.
    u.clamp(f32::EPSILON, 1.0 - f32::EPSILON)?.log()?.neg()?.log()?.neg()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Var;
    use rand::SeedableRng;

    #[test]
    fn the_row_that_the_signs_spell_is_the_arg_max_of_eq_12() {
        let tau = 3;
        let margins: Vec<f32> = vec![0.4, -0.2, 0.9, -1.0, -0.1, 0.3];
        let margins = Tensor::from_vec(margins, (2, 3), &Device::Cpu).unwrap();
        let products: Vec<Vec<f32>> =
            margins.matmul(&patterns(tau, &Device::Cpu).unwrap()).unwrap().to_vec2().unwrap();
        let best = |row: &[f32]| (0..8).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
        assert_eq!([best(&products[0]), best(&products[1])], [0b101, 0b001]);
        // Row i of the table spells i.
        let table: Vec<f32> =
            (0..8).flat_map(|i| (0..3).map(move |k| (i >> k & 1) as f32 - 0.5)).collect();
        let table = Tensor::from_vec(table, (1, 8, 3), &Device::Cpu).unwrap();
        let rows: Vec<Vec<f32>> = look_up(&margins, &table, None).unwrap().to_vec2().unwrap();
        assert_eq!(rows, [[1.0, -1.0, 1.0], [1.0, -1.0, -1.0]]);
    }

    #[test]
    fn both_noises_are_gumbels() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        let tensor = gumbel_in_tensors(&Shape::from(40_000), &Device::Cpu).unwrap();
        for noise in [gumbel(40_000, &mut random), tensor.to_vec1().unwrap()] {
            let mean = noise.iter().sum::<f32>() / 40_000.0;
            let variance = noise.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 40_000.0;
            // Euler's constant and pi^2 / 6.
            assert!(
                (mean - 0.5772).abs() < 0.03 && (variance - 1.645).abs() < 0.08,
                "{mean} {variance}"
            );
        }
    }

    #[test]
    fn gradients_pull_margins_towards_better_rows() {
        // Two rows: index 0 gives -1, index 1 gives +1. A loss that falls with the output must push the margin up, and
        // the row that is read up as well.
        let margins = Var::from_slice(&[-0.2f32], (1, 1), &Device::Cpu).unwrap();
        let table = Var::from_slice(&[-0.5f32, 0.5], (1, 2, 1), &Device::Cpu).unwrap();
        let mut noise = Xoshiro256PlusPlus::seed_from_u64(1);
        let mut relaxation = Relaxation { temperature: 0.5, noise: &mut noise };
        let (mut slope, mut rows) = (0.0, [0.0; 2]);
        for _ in 0..200 {
            let code = look_up(&margins, &table, Some(&mut relaxation)).unwrap();
            assert_eq!(code.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [-1.0]);
            let gradients = code.sum_all().unwrap().backward().unwrap();
            slope += gradients.get(&margins).unwrap().sum_all().unwrap().to_vec0::<f32>().unwrap();
            let of_rows = gradients.get(&table).unwrap().flatten_all().unwrap();
            let of_rows: Vec<f32> = of_rows.to_vec1().unwrap();
            (rows[0], rows[1]) = (rows[0] + of_rows[0], rows[1] + of_rows[1]);
        }
        assert!(slope > 20.0, "{slope}");
        assert!(
            rows[0] > rows[1] && rows[1] > 0.0 && (rows[0] + rows[1] - 200.0).abs() < 0.1,
            "{rows:?}"
        );
    }
}
