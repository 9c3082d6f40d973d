//! [`Sampler`]: from logits to a token. Allocates its working memory once.

use rand::Rng;
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

/// How to choose. The defaults choose the most likely token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerOptions {
    /// 0: the most likely token, always.
    pub temperature: f32,
    /// Only the k most likely tokens; 0: all.
    pub top_k: u32,
    /// Only the most likely tokens that together have this probability; 1: all.
    pub top_p: f32,
    /// Only tokens at least this likely relative to the most likely one; 0: all.
    pub min_p: f32,
    /// Logits of tokens among the last [`PENALTY_WINDOW`] are divided (if positive) or multiplied by this; 1: none.
    pub repeat_penalty: f32,
    /// Same seed, same text.
    pub seed: u64,
}

impl Default for SamplerOptions {
    fn default() -> SamplerOptions {
        SamplerOptions {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            seed: 0,
        }
    }
}

/// Tokens that the repeat penalty looks back on.
pub const PENALTY_WINDOW: usize = 64;

/// A candidate: its logit, later its weight, and its id.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    score: f32,
    token: u32,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Sampler {
    options: SamplerOptions,
    random: Xoshiro256PlusPlus,
    candidates: Vec<Candidate>,
    recent: Vec<u32>,
}

impl Sampler {
    /// A sampler for `vocab_size` logits; it knows the prompt's tokens, for the repeat penalty.
    #[must_use]
    pub fn new(options: SamplerOptions, vocab_size: u32, prompt: &[u32]) -> Sampler {
        let mut recent = Vec::with_capacity(PENALTY_WINDOW);
        recent.extend(&prompt[prompt.len().saturating_sub(PENALTY_WINDOW)..]);
        Sampler {
            options,
            random: Xoshiro256PlusPlus::seed_from_u64(options.seed),
            candidates: Vec::with_capacity(vocab_size as usize),
            recent,
        }
    }

    /// Chooses the next token.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let token = if self.options.temperature <= 0.0 && self.options.repeat_penalty == 1.0 {
            most_likely(logits.iter().copied())
        } else {
            self.candidates.clear();
            let all = logits.iter().zip(0..).map(|(&score, token)| Candidate { score, token });
            self.candidates.extend(all);
            self.penalise();
            if self.options.temperature <= 0.0 {
                most_likely(self.candidates.iter().map(|c| c.score))
            } else {
                self.draw()
            }
        };
        if self.recent.len() == PENALTY_WINDOW {
            self.recent.remove(0);
        }
        self.recent.push(token);
        token
    }

    fn penalise(&mut self) {
        let penalty = self.options.repeat_penalty;
        for (i, &token) in self.recent.iter().enumerate() {
            let Some(candidate) = self.candidates.get_mut(token as usize) else { continue };
            if !self.recent[..i].contains(&token) {
                candidate.score = if candidate.score > 0.0 {
                    candidate.score / penalty
                } else {
                    candidate.score * penalty
                };
            }
        }
    }

    fn draw(&mut self) -> u32 {
        let options = self.options;
        let by_score =
            |a: &Candidate, b: &Candidate| b.score.total_cmp(&a.score).then(a.token.cmp(&b.token));
        let candidates = &mut self.candidates;
        let keep = options.top_k as usize;
        if keep > 0 && keep < candidates.len() {
            candidates.select_nth_unstable_by(keep - 1, by_score);
            candidates.truncate(keep);
        }
        candidates.sort_unstable_by(by_score);
        let best = candidates[0].score;
        for candidate in candidates.iter_mut() {
            candidate.score = ((candidate.score - best) / options.temperature).exp();
        }
        let likely = candidates.iter().take_while(|c| c.score >= options.min_p).count().max(1);
        candidates.truncate(likely);
        let total: f64 = candidates.iter().map(|c| f64::from(c.score)).sum();
        let mut kept = 0.0;
        let nucleus = candidates.iter().take_while(|c| {
            let needed = kept < f64::from(options.top_p) * total;
            kept += f64::from(c.score);
            needed
        });
        let count = nucleus.count().max(1);
        candidates.truncate(count);
        let mass: f64 = candidates.iter().map(|c| f64::from(c.score)).sum();
        let mut left = self.random.random::<f64>() * mass;
        for candidate in candidates.iter() {
            left -= f64::from(candidate.score);
            if left < 0.0 {
                return candidate.token;
            }
        }
        candidates[candidates.len() - 1].token
    }
}

/// The index of the largest value; the first of equals.
fn most_likely(values: impl Iterator<Item = f32>) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (value, index) in values.zip(0..) {
        if value > best.1 {
            best = (index, value);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(options: SamplerOptions, logits: &[f32], n: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(options, logits.len() as u32, &[]);
        (0..n).map(|_| sampler.sample(logits)).collect()
    }

    #[test]
    fn temperature_zero_takes_the_first_of_the_largest() {
        assert_eq!(draws(SamplerOptions::default(), &[0.0, 3.0, 3.0, 1.0], 3), [1, 1, 1]);
    }

    #[test]
    fn same_seed_same_tokens_and_another_seed_others() {
        let options = SamplerOptions { temperature: 1.0, ..SamplerOptions::default() };
        let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32 / 3.0).collect();
        assert_eq!(draws(options, &logits, 40), draws(options, &logits, 40));
        assert_ne!(
            draws(options, &logits, 40),
            draws(SamplerOptions { seed: 1, ..options }, &logits, 40)
        );
    }

    #[test]
    fn top_k_top_p_and_min_p_cut_the_tail() {
        let logits = [5.0, 4.0, 1.0, 0.0];
        let hot = SamplerOptions { temperature: 3.0, ..SamplerOptions::default() };
        let seen = |options| {
            let mut seen = draws(options, &logits, 400);
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        assert_eq!(seen(hot), [0, 1, 2, 3]);
        assert_eq!(seen(SamplerOptions { top_k: 2, ..hot }), [0, 1]);
        assert_eq!(seen(SamplerOptions { min_p: 0.5, ..hot }), [0, 1]);
        assert_eq!(seen(SamplerOptions { top_p: 0.4, ..hot }), [0]);
        assert_eq!(seen(SamplerOptions { top_p: 0.6, ..hot }), [0, 1]);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let options = SamplerOptions { temperature: 1.0, ..SamplerOptions::default() };
        let logits = [0.0, (3.0f32).ln()];
        let ones = draws(options, &logits, 20_000).iter().filter(|&&t| t == 1).count();
        assert!((14_700..15_300).contains(&ones), "{ones} of 20000, expected 15000");
    }

    #[test]
    fn a_repeated_token_is_penalised_once_however_often_it_came() {
        let options = SamplerOptions { repeat_penalty: 1.5, ..SamplerOptions::default() };
        let mut sampler = Sampler::new(options, 3, &[0, 0, 0, 2]);
        assert_eq!(sampler.sample(&[2.9, 2.0, -1.0]), 1, "2.9 / 1.5 is below 2.0");
        let mut sampler = Sampler::new(options, 3, &[0, 0, 0, 2]);
        assert_eq!(sampler.sample(&[3.1, 2.0, -1.0]), 0, "3.1 / 1.5 is above 2.0");
    }
}
