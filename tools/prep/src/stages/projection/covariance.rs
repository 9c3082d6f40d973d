//! The mean and covariance of features, added up chunk by chunk in bounded memory.

use super::feature_scale;
use crate::error::{PrepError, Result};
use candle_core::{Device, Tensor};
use half::f16;

/// Features that are multiplied at a time.
const STRIP: usize = 1024;

/// Sums over features, of their distances from the first strip's mean: close to their own mean, so that little is lost
/// when that is subtracted.
#[derive(Debug)]
pub(super) struct Covariance {
    hidden: usize,
    count: u64,
    origin: Vec<f32>,
    sums: Vec<f64>,
    /// Hidden x hidden.
    products: Vec<f64>,
}

impl Covariance {
    pub(super) fn new(hidden: usize) -> Covariance {
        let products = vec![0.0; hidden * hidden];
        Covariance { hidden, count: 0, origin: Vec::new(), sums: vec![0.0; hidden], products }
    }

    /// Adds residuals, each as a feature.
    pub(super) fn add<'a>(&mut self, residuals: impl Iterator<Item = &'a [f16]>) -> Result<()> {
        let mut strip: Vec<f32> = Vec::with_capacity(STRIP * self.hidden);
        for residual in residuals {
            let scale = feature_scale(residual.iter().map(|x| x.to_f32()));
            strip.extend(residual.iter().map(|x| scale * x.to_f32()));
            if strip.len() == STRIP * self.hidden {
                self.multiply(&mut strip)?;
            }
        }
        self.multiply(&mut strip)
    }

    /// Adds the features of `strip` and empties it.
    fn multiply(&mut self, strip: &mut Vec<f32>) -> Result<()> {
        let (hidden, count) = (self.hidden, strip.len() / self.hidden);
        if count == 0 {
            return Ok(());
        }
        if self.origin.is_empty() {
            let mut sums = vec![0f64; hidden];
            for feature in strip.chunks_exact(hidden) {
                sums.iter_mut().zip(feature).for_each(|(sum, &x)| *sum += f64::from(x));
            }
            self.origin = sums.iter().map(|sum| (sum / count as f64) as f32).collect();
        }
        for feature in strip.chunks_exact_mut(hidden) {
            for ((x, origin), sum) in feature.iter_mut().zip(&self.origin).zip(&mut self.sums) {
                *x -= origin;
                *sum += f64::from(*x);
            }
        }
        let product = || {
            let features = Tensor::from_slice(strip, (count, hidden), &Device::Cpu)?;
            features.t()?.matmul(&features)?.flatten_all()?.to_vec1::<f32>()
        };
        let product = product().map_err(|problem| PrepError::corrupt("the features", problem))?;
        self.products.iter_mut().zip(&product).for_each(|(sum, &x)| *sum += f64::from(x));
        self.count += count as u64;
        strip.clear();
        Ok(())
    }
}

#[cfg(feature = "lapack")]
impl Covariance {
    /// Features.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Of the features; hidden.
    pub(super) fn mean(&self) -> Vec<f32> {
        let count = self.count.max(1) as f64;
        let sums = self.origin.iter().zip(&self.sums);
        sums.map(|(&origin, sum)| (f64::from(origin) + sum / count) as f32).collect()
    }

    /// Hidden x hidden, symmetric.
    pub(super) fn matrix(&self) -> Vec<f64> {
        let (hidden, count) = (self.hidden, self.count.max(1) as f64);
        let means: Vec<f64> = self.sums.iter().map(|sum| sum / count).collect();
        let mut matrix = vec![0.0; hidden * hidden];
        for (i, row) in matrix.chunks_exact_mut(hidden).enumerate() {
            for (j, value) in row.iter_mut().enumerate() {
                // Both halves the same to the last bit.
                let product = self.products[i.min(j) * hidden + i.max(j)];
                *value = product / count - means[i] * means[j];
            }
        }
        matrix
    }
}
