//! The decomposition, by LAPACK.

use super::covariance::Covariance;
use super::{Basis, Params, Spread};
use crate::error::{PrepError, Result};
use ndarray::Array2;
use ndarray_linalg::{Eigh, UPLO};
// Names the library that is linked; without it the symbols of LAPACK are missing.
use openblas_src as _;

/// The components of the largest variance.
pub(super) fn components(covariance: &Covariance, params: &Params) -> Result<Basis> {
    let (hidden, kept) = (params.hidden as usize, params.kept as usize);
    let fault = |problem: ndarray_linalg::error::LinalgError| {
        PrepError::corrupt("the features' covariance", problem)
    };
    let matrix = Array2::from_shape_vec((hidden, hidden), covariance.matrix())
        .expect("hidden x hidden numbers");
    let (variances, vectors) = matrix.eigh(UPLO::Lower).map_err(fault)?;
    // Ascending; rounding may leave the last of them a little below zero.
    let variance = |index: usize| variances[hidden - 1 - index].max(0.0);
    let total: f64 = (0..hidden).map(variance).sum();
    let explained = (0..kept).map(variance).sum::<f64>() / total.max(f64::MIN_POSITIVE);
    let mut components = Vec::with_capacity(kept * hidden);
    for index in 0..kept {
        let column = vectors.column(hidden - 1 - index);
        // The first of equally large elements decides.
        let largest = column.iter().fold(0f64, |m, &x| if x.abs() > m.abs() { x } else { m });
        let sign = if largest < 0.0 { -1.0 } else { 1.0 };
        components.extend(column.iter().map(|&x| (sign * x) as f32));
    }
    let spread = Spread { features: covariance.count(), total_variance: total, explained };
    Ok(Basis {
        mean: covariance.mean(),
        variances: (0..kept).map(|index| variance(index) as f32).collect(),
        components,
        spread,
        whiten: params.whiten,
    })
}
