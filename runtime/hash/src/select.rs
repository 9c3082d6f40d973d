//! [`Selection`]: the best blocks, best first.
//!
//! A bucket sort by the scores' leading bits finds where the best end and nearly sorts them; what shares a bucket is
//! then sorted exactly. Equal scores are in the order of their blocks. Nothing is allocated after the first use with
//! the most blocks, or after [`Selection::with_capacity`].

use crate::simd::Kernels;

/// Buckets: enough that a bucket of the best holds a few blocks, few enough that counting stays in the first cache.
const BUCKETS: usize = 1 << BUCKET_BITS;
const BUCKET_BITS: u32 = 12;
/// Blocks in a bucket from which on inserting each would be slow.
const CROWDED: usize = 24;

/// Room for choosing among blocks.
#[derive(Debug)]
pub struct Selection {
    kernels: Kernels,
    /// By bucket: how many blocks it holds; then where the next of them goes.
    counts: Box<[u32; BUCKETS]>,
    /// A bit for each block that may be among the best.
    good: Vec<u64>,
    /// Those blocks' scores and indices in one number, larger for better: see [`key`].
    keys: Vec<u64>,
    order: Vec<u32>,
}

/// Better scores, then lower indices, give larger keys.
fn key(score: i32, block: u32) -> u64 {
    // The sign bit flipped: negative scores below positive ones.
    u64::from(score as u32 ^ 1 << 31) << 32 | u64::from(!block)
}

impl Selection {
    /// Room for choosing among `blocks`.
    #[must_use]
    pub fn with_capacity(kernels: Kernels, blocks: usize) -> Selection {
        Selection {
            kernels,
            counts: Box::new([0; BUCKETS]),
            good: vec![0; blocks.div_ceil(64)],
            keys: vec![0; blocks],
            order: vec![0; blocks],
        }
    }

    /// The `most` blocks of the largest scores (all, if there are no more), the best first.
    ///
    /// # Panics
    /// If there are 2^32 scores or more.
    pub fn best(&mut self, scores: &[i32], most: usize) -> &[u32] {
        let most = most.min(scores.len());
        if most == 0 {
            return &[];
        }
        assert!(u32::try_from(scores.len()).is_ok(), "a block's index has 32 bits");
        if self.keys.len() < scores.len() {
            *self = Selection::with_capacity(self.kernels, scores.len());
        }
        let (low, high) = (self.kernels.0.range)(scores);
        let spread = high.wrapping_sub(low) as u32;
        let shift = (u32::BITS - spread.leading_zeros()).saturating_sub(BUCKET_BITS);
        let bucket = |score: i32| (score.wrapping_sub(low) as u32 >> shift) as usize;

        self.counts.fill(0);
        for &score in scores {
            self.counts[bucket(score)] += 1;
        }
        // From the best bucket down: counts become places, until `most` are found.
        let (mut found, mut worst) = (0, BUCKETS);
        while found < most {
            worst -= 1;
            let held = std::mem::replace(&mut self.counts[worst], found as u32);
            found += held as usize;
        }
        let least = low.wrapping_add((worst << shift) as i32);
        // Which blocks are good cannot be foreseen: a bit for each costs less than a branch.
        let good = &mut self.good[..scores.len().div_ceil(64)];
        (self.kernels.0.at_least)(scores, least, good);
        for (word, &good) in good.iter().enumerate() {
            let mut good = good;
            while good != 0 {
                let block = 64 * word + good.trailing_zeros() as usize;
                let score = scores[block];
                let place = &mut self.counts[bucket(score)];
                self.keys[*place as usize] = key(score, block as u32);
                *place += 1;
                good &= good - 1;
            }
        }
        self.finish(worst, most)
    }

    /// The blocks of scores >= `least`, at most `most` of them, the best first.
    ///
    /// # Panics
    /// If there are 2^32 scores or more.
    pub fn at_least(&mut self, scores: &[i32], least: i32, most: usize) -> &[u32] {
        let enough = scores.iter().filter(|&&score| score >= least).count();
        self.best(scores, enough.min(most))
    }

    /// Sorts within the buckets from the best to `worst`, whose counts are now their ends.
    fn finish(&mut self, worst: usize, most: usize) -> &[u32] {
        let (mut begin, keys) = (0, &mut self.keys);
        for &end in self.counts[worst..].iter().rev() {
            let end = end as usize;
            if end - begin > CROWDED {
                keys[begin..end].sort_unstable_by(|a, b| b.cmp(a));
            }
            begin = end;
        }
        // One pass for all the others, in which no key leaves its bucket.
        for i in 1..begin {
            let key = keys[i];
            let mut to = i;
            while to > 0 && keys[to - 1] < key {
                keys[to] = keys[to - 1];
                to -= 1;
            }
            keys[to] = key;
        }
        let order = &mut self.order[..most];
        for (block, &key) in order.iter_mut().zip(&self.keys[..most]) {
            *block = !(key as u32);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sorted(scores: &[i32]) -> Vec<u32> {
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        order.sort_by_key(|&block| std::cmp::Reverse(scores[block as usize]));
        order
    }

    fn check(scores: &[i32], most: usize, least: i32) {
        let mut selection = Selection::with_capacity(Kernels::detect(), scores.len() / 2);
        let order = sorted(scores);
        let best = selection.best(scores, most).to_vec();
        assert_eq!(best, order[..most.min(scores.len())]);
        let passing: Vec<u32> =
            order.into_iter().filter(|&b| scores[b as usize] >= least).take(most).collect();
        assert_eq!(selection.at_least(scores, least, most), passing);
    }

    #[test]
    fn extremes_are_in_order() {
        check(&[], 3, 0);
        check(&[5], 0, 5);
        check(&[5], 1, 6);
        check(&[i32::MIN, i32::MAX, 0, -1, 1, i32::MIN, i32::MAX], 5, -1);
        check(&[7; 100], 30, 7);
    }

    #[test]
    fn one_far_score_does_not_matter() {
        let mut scores: Vec<i32> = (0..5000).map(|i| i * 7919 % 4999).collect();
        scores[17] = i32::MAX;
        check(&scores, 1000, 100);
    }

    proptest! {
        #[test]
        fn selection_equals_sorting(
            scores in prop::collection::vec(prop_oneof![any::<i32>(), -50i32..50], 0..600),
            most in 0usize..700,
            least in any::<i32>(),
        ) {
            check(&scores, most, least);
        }
    }
}
