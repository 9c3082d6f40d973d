//! [`Quantiles`]: equal-probability quantisation of a regression's labels.

use crate::error::{self, HashError};

/// Bins of about equal probability mass.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantiles {
    /// A number belongs to bin i if exactly i thresholds are <= it. Ascending; one fewer than bins.
    pub thresholds: Vec<f32>,
    /// What each bin means: the median of its labels. Ascending, with repetitions where labels repeat.
    pub values: Vec<f32>,
}

impl Quantiles {
    /// Thresholds from the inverse of the labels' distribution function at i / bins, after the share `clip` of the
    /// labels (0 to below 0.5) has been left out at each end. Labels that are not finite are left out first.
    ///
    /// # Errors
    /// If no label is left, `bins` is 0, or `clip` is outside its range.
    pub fn fit(labels: &[f32], bins: usize, clip: f32) -> Result<Quantiles, HashError> {
        error::within("bins", bins, 1, 1 << crate::limits::MAX_TAU)?;
        if !(0.0..0.5).contains(&clip) {
            return Err(HashError::invalid("share to clip", clip, "0 to below 0.5"));
        }
        let mut sorted: Vec<f32> = labels.iter().copied().filter(|l| l.is_finite()).collect();
        sorted.sort_by(f32::total_cmp);
        let cut = (clip * sorted.len() as f32) as usize;
        let kept = &sorted[cut..sorted.len() - cut];
        if kept.is_empty() {
            return Err(HashError::invalid("finite labels", 0, "one or more"));
        }
        let last = kept.len() - 1;
        let edge = |bin: usize| bin * kept.len() / bins;
        Ok(Quantiles {
            thresholds: (1..bins).map(|bin| kept[edge(bin)]).collect(),
            values: (0..bins)
                .map(|bin| kept[((edge(bin) + edge(bin + 1)) / 2).min(last)])
                .collect(),
        })
    }

    /// The bin of a number. NaN is in bin 0.
    #[must_use]
    pub fn bin(&self, number: f32) -> usize {
        self.thresholds.partition_point(|&t| t <= number)
    }

    pub(crate) fn check(&self, bins: usize) -> Result<(), HashError> {
        error::same("values of bins", self.values.len(), bins)?;
        error::same("thresholds of bins", self.thresholds.len(), bins - 1)?;
        error::finite("thresholds of bins", &self.thresholds)?;
        error::finite("values of bins", &self.values)?;
        if !self.thresholds.is_sorted() || !self.values.is_sorted() {
            return Err(HashError::invalid("bins", "unordered numbers", "ascending ones"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bins_hold_equal_shares_of_distinct_labels(bins in 1usize..=16, more in 0usize..200, power in 1i32..4) {
            // Distinct, and far from uniform.
            let count = bins + more;
            let labels: Vec<f32> = (0..count).map(|i| (i as f32).powi(power)).rev().collect();
            let quantiles = Quantiles::fit(&labels, bins, 0.0).unwrap();
            let mut held = vec![0; bins];
            for &label in &labels {
                held[quantiles.bin(label)] += 1;
            }
            for held in held {
                prop_assert!(held == count / bins || held == count.div_ceil(bins), "{held} of {count} in {bins}");
            }
            for (bin, &value) in quantiles.values.iter().enumerate() {
                prop_assert_eq!(quantiles.bin(value), bin);
            }
            prop_assert!(quantiles.check(bins).is_ok());
        }
    }

    #[test]
    fn outliers_are_clipped() {
        let mut labels: Vec<f32> = (0..98).map(|i| i as f32).collect();
        labels.extend([-1e9, 1e9, f32::NAN, f32::INFINITY]);
        let quantiles = Quantiles::fit(&labels, 4, 0.01).unwrap();
        assert_eq!(quantiles.thresholds, [24.0, 49.0, 73.0]);
        assert_eq!(quantiles.bin(f32::MAX), 3);
        assert_eq!(quantiles.bin(f32::NAN), 0);
    }

    #[test]
    fn impossible_requests_are_refused() {
        assert!(Quantiles::fit(&[], 4, 0.0).is_err());
        assert!(Quantiles::fit(&[1.0], 0, 0.0).is_err());
        assert!(Quantiles::fit(&[1.0], 4, 0.5).is_err());
        assert!(Quantiles::fit(&[1.0], 4, f32::NAN).is_err());
    }
}
