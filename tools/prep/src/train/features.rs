//! [`Features`]: what training sees of each sample, rounded as `ls-hash` rounds it.

use ls_hash::{Input, Kernels, Scaling};
use rand::Rng;
use rand_xoshiro::Xoshiro256PlusPlus;
use std::ops::Range;

/// Standard deviations from the mean at which rounded features are clipped. A few elements of a residual are enormous;
/// they shall cost only their own precision.
const CLIP: f64 = 4.0;

/// Means and variances of the elements of features.
#[derive(Clone, Debug)]
pub struct Statistics {
    scaling: Scaling,
    count: f64,
    sums: Vec<(f64, f64)>,
}

impl Statistics {
    /// Of features of `dims` numbers, each multiplied as `scaling` says.
    #[must_use]
    pub fn new(scaling: Scaling, dims: usize) -> Statistics {
        Statistics { scaling, count: 0.0, sums: vec![(0.0, 0.0); dims] }
    }

    /// One feature more.
    pub fn add(&mut self, feature: &[f32]) {
        let scale = match self.scaling {
            Scaling::Fixed => 1.0,
            Scaling::Rms => {
                let squares: f64 = feature.iter().map(|&x| f64::from(x).powi(2)).sum();
                1.0 / (squares / feature.len() as f64 + 1e-12).sqrt()
            }
        };
        self.count += 1.0;
        for ((sum, squares), &x) in self.sums.iter_mut().zip(feature) {
            let x = f64::from(x) * scale;
            (*sum, *squares) = (*sum + x, *squares + x * x);
        }
    }

    /// Centres each element and gives it a common variance: [`Features::DEVIATION`] squared.
    #[must_use]
    pub fn input(&self) -> Input {
        let count = self.count.max(1.0);
        let of = |&(sum, squares): &(f64, f64)| {
            let mean = sum / count;
            let deviation = (squares / count - mean * mean).max(0.0).sqrt();
            // An element that never changes tells nothing.
            let known = deviation > 1e-6 * mean.abs() && deviation > 1e-20;
            (mean as f32, if known { (127.0 / CLIP / deviation) as f32 } else { 0.0 })
        };
        let (center, gain) = self.sums.iter().map(of).unzip();
        Input { scaling: self.scaling, center, gain }
    }
}

/// Rounded features of samples. A sample may have several, any of which stands for it: the residual a token had at
/// different moments, say.
#[derive(Clone, Debug)]
pub struct Features {
    input: Input,
    kernels: Kernels,
    values: Vec<i8>,
    /// First row of each sample, and the number of rows.
    starts: Vec<u32>,
}

impl Features {
    /// Standard deviation of the rounded elements, about.
    pub const DEVIATION: f32 = 127.0 / CLIP as f32;

    /// No samples yet.
    #[must_use]
    pub fn new(input: Input) -> Features {
        Features { input, kernels: Kernels::detect(), values: Vec::new(), starts: vec![0] }
    }

    /// One sample more, which has these features; at least one.
    pub fn push<'a>(&mut self, features: impl IntoIterator<Item = &'a [f32]>) {
        let before = self.values.len();
        for feature in features {
            let start = self.values.len();
            self.values.resize(start + self.dims(), 0);
            self.input.rounded(self.kernels, feature, &mut self.values[start..]);
        }
        assert!(self.values.len() > before, "a sample has a feature");
        let rows = self.values.len() / self.dims();
        self.starts.push(u32::try_from(rows).expect("fewer than 2^32 features"));
    }

    /// From feature to what is kept of it.
    #[must_use]
    pub fn input(&self) -> &Input {
        &self.input
    }

    /// Numbers of a feature.
    #[must_use]
    pub fn dims(&self) -> usize {
        self.input.dims()
    }

    /// Number of samples.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.starts.len() - 1
    }

    /// The features of a sample.
    #[must_use]
    pub fn of(&self, sample: usize) -> Range<usize> {
        self.starts[sample] as usize..self.starts[sample + 1] as usize
    }

    /// The numbers of a feature.
    #[must_use]
    pub fn row(&self, row: usize) -> &[i8] {
        &self.values[row * self.dims()..][..self.dims()]
    }

    /// One feature of each of `samples`, drawn evenly; samples x dims.
    pub fn draw(&self, samples: &[u32], draw: &mut Xoshiro256PlusPlus) -> Vec<f32> {
        let mut values = Vec::with_capacity(samples.len() * self.dims());
        for &sample in samples {
            let row = draw.random_range(self.of(sample as usize));
            values.extend(self.row(row).iter().map(|&q| f32::from(q)));
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn elements_get_a_common_spread_and_constants_none() {
        let mut draw = Xoshiro256PlusPlus::seed_from_u64(5);
        let mut feature = || -> [f32; 3] {
            let (a, b): (f32, f32) = (draw.random(), draw.random());
            [1000.0 * a + 7.0, 1e-3 * b, 4.0]
        };
        let mut statistics = Statistics::new(Scaling::Fixed, 3);
        let all: Vec<[f32; 3]> = (0..1000).map(|_| feature()).collect();
        all.iter().for_each(|feature| statistics.add(feature));
        let mut features = Features::new(statistics.input());
        all.chunks(2).for_each(|pair| features.push(pair.iter().map(|feature| &feature[..])));
        assert_eq!((features.samples(), features.of(3)), (500, 6..8));
        for (dim, wanted) in [(0, Features::DEVIATION), (1, Features::DEVIATION), (2, 0.0)] {
            let squares = (0..1000).map(|row| f32::from(features.row(row)[dim]).powi(2));
            let deviation = (squares.sum::<f32>() / 1000.0).sqrt();
            assert!((deviation - wanted).abs() < 1.0, "{dim}: {deviation}");
        }
    }
}
