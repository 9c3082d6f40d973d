//! [`Figures`]: how well an order of blocks finds what a token needs. All predictors are measured by these.
//!
//! A token's blocks have importances, |SiLU(gate) * up| summed over a block's neurons. A predictor puts the N blocks
//! in an order, and the first n of them are fetched; C(n) is the importance of those. The oracle's order is by
//! importance itself; its C is O. With F = 0.2 N, rounded:
//!
//! - `imp20` = C(F) / O(F): importance captured by a 20 % fetch, as a share of what such a fetch can capture;
//! - `top10` = share of the 0.1 N most important blocks that are among the first F;
//! - `red95` = n / F - 1 for the least n with C(n) >= 0.95 O(F): how much more than 20 % must be fetched to have 95 % of
//!   what the oracle's 20 % has. Negative if less would do.
//!
//! Each is the mean over tokens of the token's own value: no token counts more for being loud.

use serde::{Deserialize, Serialize};

/// Share of the blocks that a fetch is of.
pub const FETCH_SHARE: f64 = 0.2;
/// Share of the blocks that `top10` looks for.
pub const TOP_SHARE: f64 = 0.1;
/// Share of the oracle's importance that `red95` asks for.
pub const WANTED_SHARE: f64 = 0.95;

/// Means over tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Importance captured by a 20 % fetch, of the oracle's.
    pub imp20: f64,
    /// Share of the top 10 % in a 20 % fetch.
    pub top10: f64,
    /// Extra fetch to capture 95 % of the oracle's 20 %.
    pub red95: f64,
    /// How many tokens were measured.
    pub tokens: u64,
}

/// Collects [`Figures`].
#[derive(Clone, Debug, Default)]
pub struct Meter {
    sums: [f64; 3],
    tokens: u64,
}

/// Blocks in descending order of `scores`; equal ones in their own order.
#[must_use]
pub fn order_of(scores: &[f32]) -> Vec<u32> {
    // Numbers that ascend as the scores descend: all bits of positive ones flipped but the sign, none of negative ones.
    let key = |(block, score): (u64, &f32)| {
        let bits = (score + 0.0).to_bits();
        let descending = if bits >> 31 == 0 { !bits & 0x7fff_ffff } else { bits };
        u64::from(descending) << 32 | block
    };
    let mut keys: Vec<u64> = (0..).zip(scores).map(key).collect();
    keys.sort_unstable();
    keys.into_iter().map(|key| key as u32).collect()
}

fn share_of(blocks: usize, share: f64) -> usize {
    ((blocks as f64 * share).round() as usize).clamp(1, blocks)
}

/// What an oracle would do for one token: shared by all predictors measured on it.
#[derive(Clone, Debug)]
pub struct Oracle<'a> {
    importance: &'a [f32],
    order: Vec<u32>,
    fetched: usize,
    captured: f64,
}

impl<'a> Oracle<'a> {
    /// Of a token whose blocks have these importances.
    #[must_use]
    pub fn new(importance: &'a [f32]) -> Oracle<'a> {
        let order = order_of(importance);
        let fetched = share_of(importance.len(), FETCH_SHARE);
        let captured = order[..fetched].iter().map(|&b| f64::from(importance[b as usize])).sum();
        Oracle { importance, order, fetched, captured }
    }

    /// Blocks, the most important first.
    #[must_use]
    pub fn order(&self) -> &[u32] {
        &self.order
    }

    /// The blocks of a fetch: those that run.
    #[must_use]
    pub fn active(&self) -> &[u32] {
        &self.order[..self.fetched]
    }
}

impl Meter {
    /// One token more, whose blocks a predictor puts in `order`, all of them. Tokens in which nothing is active say
    /// nothing and are passed over.
    pub fn add(&mut self, oracle: &Oracle<'_>, order: &[u32]) {
        if oracle.captured <= 0.0 {
            return;
        }
        let (fetched, blocks) = (oracle.fetched, oracle.importance.len());
        let mut found = vec![false; blocks];
        let (mut sum, mut captured, mut enough) = (0f64, 0f64, None);
        for (place, &block) in order.iter().enumerate() {
            sum += f64::from(oracle.importance[block as usize]);
            if place < fetched {
                captured = sum;
                found[block as usize] = true;
            }
            // The tolerance is for sums in another order.
            if enough.is_none() && sum >= WANTED_SHARE * oracle.captured * (1.0 - 1e-9) {
                enough = Some(place + 1);
            }
            if enough.is_some() && place >= fetched {
                break;
            }
        }
        let top = &oracle.order[..share_of(blocks, TOP_SHARE)];
        let hits = top.iter().filter(|&&block| found[block as usize]).count();
        self.sums[0] += captured / oracle.captured;
        self.sums[1] += hits as f64 / top.len() as f64;
        self.sums[2] += enough.unwrap_or(blocks) as f64 / fetched as f64 - 1.0;
        self.tokens += 1;
    }

    /// Takes over what another has collected.
    pub fn join(&mut self, other: &Meter) {
        self.tokens += other.tokens;
        self.sums.iter_mut().zip(other.sums).for_each(|(sum, more)| *sum += more);
    }

    /// The means; zeros of no tokens.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let [imp20, top10, red95] = self.sums.map(|sum| sum / self.tokens.max(1) as f64);
        Figures { imp20, top10, red95, tokens: self.tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_their_formulas() {
        // Twenty blocks: F = 4, top = 2. The oracle's four: 10, 8, 2, 2 = 22.
        let mut importance = [0.5f32; 20];
        (importance[3], importance[7], importance[11], importance[19]) = (10.0, 8.0, 2.0, 2.0);
        let oracle = Oracle::new(&importance);
        assert_eq!(oracle.active(), [3, 7, 11, 19]);
        let mut meter = Meter::default();
        // Fetches 3, 0, 1, 2: 11.5 of 22, one of the top two. Has 20.9 after 3, 0, 1, 2, 11, 4, 7: 7 blocks.
        let mut order = vec![3, 0, 1, 2, 11, 4, 7, 19];
        order.extend((5..19).filter(|b| ![7, 11].contains(b)));
        meter.add(&oracle, &order);
        let found = meter.figures();
        assert!((found.imp20 - 11.5 / 22.0).abs() < 1e-12);
        assert_eq!((found.top10, found.red95, found.tokens), (0.5, 7.0 / 4.0 - 1.0, 1));
        // The oracle itself: 20.9 needs all of its four.
        let mut best = Meter::default();
        best.add(&oracle, oracle.order());
        assert_eq!(best.figures(), Figures { imp20: 1.0, top10: 1.0, red95: 0.0, tokens: 1 });
        meter.join(&best);
        assert_eq!((meter.figures().tokens, meter.figures().top10), (2, 0.75));
        meter.add(&Oracle::new(&[0.0; 20]), &order);
        assert_eq!(meter.figures().tokens, 2, "silent tokens are passed over");
    }

    #[test]
    fn equal_scores_keep_their_order() {
        assert_eq!(order_of(&[1.0, 3.0, 1.0, 3.0]), [1, 3, 0, 2]);
        assert_eq!(order_of(&[-1.0, 0.0, -0.0, -3.0, 0.5]), [4, 1, 2, 0, 3]);
    }
}
