//! Predictors that do not look at the residual: what is often or lately active will be active again; and the oracle,
//! which is told.

use super::Scorer;

/// Orders blocks by their mean share of importance.
#[derive(Clone, Debug)]
pub struct Frequency {
    /// One a block.
    pub shares: Vec<f32>,
}

impl Scorer for Frequency {
    const LOOKS: bool = false;

    fn scores(&mut self, _: &[f32], scores: &mut [f32]) {
        scores.copy_from_slice(&self.shares);
    }
}

/// Orders blocks by what they are about to do: what no predictor can better.
#[derive(Clone, Debug, Default)]
pub struct Foresight {
    importance: Vec<f32>,
}

impl Scorer for Foresight {
    const LOOKS: bool = false;

    fn foresee(&mut self, importance: &[f32]) {
        self.importance.clear();
        self.importance.extend_from_slice(importance);
    }

    fn scores(&mut self, _: &[f32], scores: &mut [f32]) {
        scores.copy_from_slice(&self.importance);
    }
}

/// A moving average of past activity, added to the frequency of activity.
#[derive(Clone, Debug)]
pub struct Ema {
    frequency: Vec<f32>,
    mean: Vec<f32>,
    decay: f32,
}

impl Ema {
    /// `frequency`: how often each block is active, 0 to 1. `decay`: what a mean keeps of itself at a token.
    #[must_use]
    pub fn new(frequency: Vec<f32>, decay: f32) -> Ema {
        Ema { mean: frequency.clone(), frequency, decay }
    }
}

impl Scorer for Ema {
    const LOOKS: bool = false;

    fn restart(&mut self) {
        self.mean.copy_from_slice(&self.frequency);
    }

    fn scores(&mut self, _: &[f32], scores: &mut [f32]) {
        for ((score, mean), frequency) in scores.iter_mut().zip(&self.mean).zip(&self.frequency) {
            *score = mean + frequency;
        }
    }

    fn remember(&mut self, active: &[u32]) {
        self.mean.iter_mut().for_each(|mean| *mean *= self.decay);
        active.iter().for_each(|&block| self.mean[block as usize] += 1.0 - self.decay);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_follow_activity_and_forget_at_a_new_text() {
        let mut ema = Ema::new(vec![0.5, 0.3, 0.2], 0.8);
        let scores = |ema: &mut Ema| {
            let mut scores = vec![0.0; 3];
            ema.scores(&[], &mut scores);
            scores
        };
        let first = scores(&mut ema);
        assert_eq!(first, [1.0, 0.6, 0.4]);
        ema.remember(&[2]);
        ema.remember(&[2]);
        let later = scores(&mut ema);
        assert!(later[2] > later[1] && later[0] < first[0]);
        ema.restart();
        assert_eq!(scores(&mut ema), first);
    }
}
