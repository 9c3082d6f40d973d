//! How much worse than dense a way to run is, from some of the text: differences on the same tokens, their mean and its
//! standard error.
//!
//! A hard token is hard for both, so the differences of log-likelihoods scatter much less than the likelihoods do: a few
//! thousand tokens tell 4 from 5 per cent where perplexities by themselves would need a hundred thousand. Neighbouring
//! tokens are not independent; *pieces* of some dozens are taken for so, and the scatter of their means is what the
//! error is made of.
//!
//! What is wanted is the mean over a held-out text of given length. A part of it leaves an error of
//! `error * sqrt(1 - part)`, and the whole none.

use std::ops::Range;

/// Tokens of a piece.
const PIECE: usize = 64;
/// Fewer pieces than this tell nothing of their scatter.
const MIN_PIECES: usize = 8;
/// Each look at the text is at so many times the tokens of the one before.
const GROWTH: usize = 2;

/// In which order the windows of a held-out text are taken, and how many of them at each *level*.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Text {
    window: usize,
    /// Any beginning of it is spread over the whole text.
    order: Vec<usize>,
    /// Windows up to each level, ascending; the last is all.
    ends: Vec<usize>,
}

impl Text {
    /// A text of `windows` windows of `window` tokens, of which the first level takes about `first_tokens`.
    pub(super) fn new(windows: usize, window: usize, first_tokens: u64) -> Text {
        let mut order: Vec<usize> = (0..windows).collect();
        order.sort_by_key(|index| index.reverse_bits());
        let mut end = usize::try_from(first_tokens).unwrap_or(usize::MAX).div_euclid(window).max(1);
        let mut ends = Vec::new();
        // A last level of less than half a step would tell little.
        while end.saturating_mul(3) <= windows.saturating_mul(GROWTH) {
            ends.push(end);
            end *= GROWTH;
        }
        ends.push(windows);
        Text { window, order, ends }
    }

    /// Number of levels.
    pub(super) fn levels(&self) -> u32 {
        self.ends.len() as u32
    }

    /// The windows that a level adds to those before it.
    pub(super) fn added(&self, level: u32) -> &[usize] {
        let level = level as usize;
        let start = level.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.order[start..self.ends[level]]
    }

    /// Tokens up to a level.
    pub(super) fn tokens(&self, level: u32) -> u64 {
        (self.ends[level as usize] * self.window) as u64
    }

    /// Sums of the likelihoods (window - 1 of each window) over pieces.
    pub(super) fn sums(&self, nll: &[f32]) -> Vec<f64> {
        let sum = |piece: &[f32]| piece.iter().map(|&x| f64::from(x)).sum();
        nll.chunks_exact(self.window - 1).flat_map(|of| of.chunks(PIECE).map(sum)).collect()
    }

    /// Likelihoods in each piece of so many windows.
    fn counts(&self, windows: usize) -> Vec<f64> {
        let scored: Range<usize> = 0..self.window - 1;
        let of_one: Vec<f64> =
            scored.step_by(PIECE).map(|at| PIECE.min(self.window - 1 - at) as f64).collect();
        of_one.repeat(windows)
    }

    /// Compares `own` sums of pieces with the `dense` ones, both from the first piece up to the end of a level.
    pub(super) fn compare(&self, own: &[f64], dense: &[f64], level: u32) -> Estimate {
        let windows = self.ends[level as usize];
        let counts = self.counts(windows);
        assert_eq!((own.len(), dense.len()), (counts.len(), counts.len()), "pieces");
        let total: f64 = counts.iter().sum();
        let differences: Vec<f64> = own.iter().zip(dense).map(|(own, dense)| own - dense).collect();
        let excess = differences.iter().sum::<f64>() / total;
        let pieces = counts.len() as f64;
        let off = |(difference, count): (&f64, &f64)| (difference - count * excess).powi(2);
        let squares: f64 = differences.iter().zip(&counts).map(off).sum();
        let error = if counts.len() < MIN_PIECES {
            f64::INFINITY
        } else {
            (squares * pieces / (pieces - 1.0)).sqrt() / total
        };
        Estimate { excess, error, part: self.part(level) }
    }

    /// The part of the text up to a level.
    pub(super) fn part(&self, level: u32) -> f64 {
        self.ends[level as usize] as f64 / self.order.len() as f64
    }

    /// The perplexity of the text that sums of all its pieces stand for.
    pub(super) fn perplexity(&self, sums: &[f64]) -> f64 {
        let total: f64 = self.counts(self.order.len()).iter().sum();
        (sums.iter().sum::<f64>() / total).exp()
    }
}

/// How much worse than dense.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    /// Logarithm of the perplexity's ratio to the dense one.
    pub(super) excess: f64,
    /// Its standard error as a statement about text of this kind.
    pub(super) error: f64,
    /// Part of the held-out text that it is from.
    pub(super) part: f64,
}

/// What is known of an excess and a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Within it.
    Kept,
    /// Above it.
    Broken,
    /// More text is needed.
    Open,
}

impl Estimate {
    /// Whether the whole text's excess is at most `limit`, unless that is nearer than `sigmas` errors.
    pub(super) fn verdict(&self, limit: f64, sigmas: f64) -> Verdict {
        let margin =
            if self.part < 1.0 { sigmas * self.error * (1.0 - self.part).sqrt() } else { 0.0 };
        if self.excess + margin <= limit {
            Verdict::Kept
        } else if self.excess - margin > limit {
            Verdict::Broken
        } else {
            Verdict::Open
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    #[test]
    fn levels_double_and_each_is_spread_over_the_text() {
        let text = Text::new(16, 512, 2048);
        let tokens: Vec<u64> = (0..text.levels()).map(|level| text.tokens(level)).collect();
        assert_eq!(tokens, [2048, 4096, 8192]);
        assert_eq!(text.added(0), [0, 8, 4, 12]);
        assert_eq!(text.added(1), [2, 10, 6, 14]);
        let all: Vec<usize> = (0..3).flat_map(|level| text.added(level)).copied().collect();
        assert_eq!(all.len(), 16);
        // What is left over is no level of its own, and a text of one level is that.
        assert_eq!(Text::new(17, 512, 2048).ends, [4, 8, 17]);
        assert_eq!(Text::new(5, 512, 2048).ends, [5]);
        assert_eq!(Text::new(3, 512, 0).ends, [1, 2, 3]);
    }

    /// Text of 64 windows, and likelihoods of its first `windows`: dense ones that scatter much, own ones `excess` more
    /// that scatter `scatter` about that.
    fn likelihoods(windows: usize, excess: f64, scatter: f64, seed: u64) -> (Text, [Vec<f64>; 2]) {
        let text = Text::new(64, 129, 129 * windows as u64);
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut uniform = || 12f64.sqrt() * (random.random::<f64>() - 0.5);
        let mut all = [Vec::new(), Vec::new()];
        for _ in 0..128 * windows {
            let dense = 3.0 + 3.0 * uniform();
            all[1].push(dense as f32);
            all[0].push((dense + excess + scatter * uniform()) as f32);
        }
        let sums = all.map(|nll| text.sums(&nll));
        (text, sums)
    }

    #[test]
    fn the_error_is_the_scatter_of_the_difference_not_of_the_text() {
        let mut off = Vec::new();
        for seed in 0..200 {
            let (text, [own, dense]) = likelihoods(16, 0.04, 0.3, seed);
            let found = text.compare(&own, &dense, 0);
            // 2048 tokens.
            let wanted = 0.3 / 2048f64.sqrt();
            assert!((found.error / wanted - 1.0).abs() < 0.6, "{} {wanted}", found.error);
            off.push((found.excess - 0.04) / found.error);
        }
        let square = off.iter().map(|off| off * off).sum::<f64>() / off.len() as f64;
        assert!((0.7..1.5).contains(&square), "errors are {square} of what they are said to be");
        assert!(off.iter().filter(|off| off.abs() > 3.0).count() <= 3);
    }

    #[test]
    fn a_verdict_is_given_when_it_is_sure_and_always_on_the_whole_text() {
        let (text, [own, dense]) = likelihoods(16, 0.04, 0.3, 1);
        let found = text.compare(&own, &dense, 0);
        let (far, near) = (4.0 * found.error, found.error);
        assert_eq!(found.verdict(found.excess + far, 3.0), Verdict::Kept);
        assert_eq!(found.verdict(found.excess - far, 3.0), Verdict::Broken);
        assert_eq!(found.verdict(found.excess + near, 3.0), Verdict::Open);
        let whole = Estimate { part: 1.0, ..found };
        assert_eq!(whole.verdict(found.excess, 3.0), Verdict::Kept);
        assert_eq!(whole.verdict(found.excess - 1e-9, 3.0), Verdict::Broken);
        // A few pieces are no ground for a verdict, but the whole text is whatever it has.
        let few = Text::new(4, 33, 33);
        let nothing = few.compare(&[32.0], &[1.0], 0);
        assert_eq!(nothing.verdict(0.01, 3.0), Verdict::Open);
        let all = few.compare(&[32.0; 4], &[1.0; 4], few.levels() - 1);
        assert_eq!(all.verdict(0.01, 3.0), Verdict::Broken);
        assert!((few.perplexity(&[32.0; 4]) - 1f64.exp()).abs() < 1e-12);
    }
}
