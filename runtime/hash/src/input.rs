//! [`Input`]: how a feature becomes what the hyperplanes see.
//!
//! Element i of a feature x becomes z_i = (x_i * r - center_i) * gain_i in f32, where r is the token's scale. For
//! integer hyperplanes it is rounded: q_i = z_i to the nearest integer, ties to even, within -127 to 127, NaN to 0. A
//! gain is thus 127 over the largest size that shall not be clipped: a few standard deviations, so that one enormous
//! element costs only its own precision. All of it is defined operation by operation: the same q everywhere.

use crate::error::{self, HashError};
use crate::limits::MAX_DIMS;
use crate::simd::{Kernels, Ops, Rounding};

/// What a token's feature is multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// Nothing: 1.
    Fixed,
    /// One over its root mean square (1e-12 is added to the mean).
    Rms,
}

/// Added to the mean of squares, so that a feature of zeros stays finite.
const EPSILON: f32 = 1e-12;

/// From feature to hyperplane input.
#[derive(Clone, Debug, PartialEq)]
pub struct Input {
    /// The token's scale.
    pub scaling: Scaling,
    /// Subtracted after scaling; one number a dimension.
    pub center: Vec<f32>,
    /// Multiplied last; one number a dimension.
    pub gain: Vec<f32>,
}

impl Input {
    /// Numbers of a feature.
    #[must_use]
    pub fn dims(&self) -> usize {
        self.gain.len()
    }

    pub(crate) fn check(&self) -> Result<(), HashError> {
        error::within("dimensions of the feature", self.dims(), 1, MAX_DIMS)?;
        error::same("centers", self.center.len(), self.dims())?;
        error::finite("centers", &self.center)?;
        error::finite("gains", &self.gain)
    }

    fn scale(&self, ops: &Ops, feature: &[f32]) -> f32 {
        match self.scaling {
            Scaling::Fixed => 1.0,
            Scaling::Rms => {
                let mean = (ops.sum_squares)(feature) / feature.len() as f32;
                1.0 / (mean + EPSILON).sqrt()
            }
        }
    }

    /// q of the feature, as integer hyperplanes see it: for training on what will run.
    ///
    /// # Panics
    /// If the feature or `out` has not as many numbers as the input.
    pub fn rounded(&self, kernels: Kernels, feature: &[f32], out: &mut [i8]) {
        assert_eq!(feature.len(), self.dims(), "numbers of the feature");
        assert_eq!(out.len(), self.dims(), "rounded numbers of the feature");
        self.round(kernels.0, feature, out);
    }

    /// q of the feature, in the first elements of `out`.
    pub(crate) fn round(&self, ops: &Ops, feature: &[f32], out: &mut [i8]) {
        let scale = self.scale(ops, feature);
        let rounding = Rounding { x: feature, scale, center: &self.center, gain: &self.gain };
        (ops.round)(rounding, &mut out[..feature.len()]);
    }

    /// z of the feature, in the first elements of `out`.
    pub(crate) fn center(&self, ops: &Ops, feature: &[f32], out: &mut [f32]) {
        let scale = self.scale(ops, feature);
        for (((z, x), c), g) in out.iter_mut().zip(feature).zip(&self.center).zip(&self.gain) {
            *z = (x * scale - c) * g;
        }
    }
}
