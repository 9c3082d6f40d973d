//! Hit ratios of policies on one trace.

use super::requests::{ONE, Requests};
use super::{Ratios, Row};
use crate::recipe;
use ls_cache::policy::{
    Belady, Ema, GapTable, Hazard, HazardTable, HotPinned, Lfu, Lru, ReuseDistance,
};
use ls_cache::{AccessTrace, Admission, EvictionPolicy, Sharing, WeightCache, replay};
use rayon::prelude::*;

/// Decay of the moving average that learned policies are compared with.
const EMA_DECAY: f32 = 0.99;

/// Tells after each visit what every block is worth.
pub(super) trait Rank {
    fn rank(&mut self, trace: &AccessTrace, token: usize, worths: &mut [f32]);
}

/// What was learned.
pub(super) struct Learned<'a> {
    pub(super) gaps: Option<&'a GapTable>,
    pub(super) hazard: &'a HazardTable,
    pub(super) extended: Option<&'a mut dyn Rank>,
}

/// Replays the held-out windows with every policy at every capacity.
pub(super) fn judge(
    requests: &Requests,
    frequencies: &[u32],
    block_neurons: u32,
    learned: Learned<'_>,
    recipe: &recipe::Reuse,
) -> Ratios {
    let trace = &requests.replayed;
    let blocks = trace.blocks();
    let Learned { gaps, hazard, extended } = learned;
    let kept: Vec<u32> = recipe
        .capacities
        .iter()
        .map(|share| (share * f64::from(blocks.count())).round() as u32)
        .collect();
    let policy = |name: &str, kept: u32| -> Box<dyn EvictionPolicy> {
        match name {
            "lru" => Box::new(Lru::new(blocks)),
            "lfu" => Box::new(Lfu::new(blocks)),
            "ema" => Box::new(Ema::new(blocks, EMA_DECAY)),
            "hot pinned" => {
                let hot = (recipe.hot_share * f64::from(kept)).round() as u32;
                Box::new(HotPinned::new(blocks, frequencies, &[hot]))
            }
            "reuse distance" => {
                let gaps = gaps.expect("a row for what was learned").clone();
                Box::new(ReuseDistance::new(blocks, vec![gaps]))
            }
            "hazard" => Box::new(Hazard::new(blocks, std::slice::from_ref(hazard))),
            _ => Box::new(Belady::new(trace)),
        }
    };
    let names = ["lru", "lfu", "ema", "hot pinned", "reuse distance", "hazard", "belady"];
    let known = |name: &&&str| **name != "reuse distance" || gaps.is_some();
    // Each replay is work of its own, and most of the stage's.
    let mut rows: Vec<Row> = names
        .par_iter()
        .filter(known)
        .map(|name| Row {
            policy: (*name).to_owned(),
            hits: kept.par_iter().map(|&kept| hits(trace, kept, policy(name, kept))).collect(),
        })
        .collect();
    if let Some(extended) = extended {
        let hits = ranked_hits(trace, &kept, extended);
        rows.insert(rows.len() - 2, Row { policy: "reuse distance, extended".to_owned(), hits });
    }
    let requests = (0..trace.tokens()).map(|token| trace.set_len(token, ONE) as u64).sum();
    Ratios { block_neurons, tokens: trace.tokens() as u64, requests, rows }
}

/// Demand hits over requests. Nothing is prefetched.
fn hits(trace: &AccessTrace, kept: u32, policy: Box<dyn EvictionPolicy>) -> f64 {
    let blocks = trace.blocks().clone();
    let slots = kept + blocks.count();
    let sharing = Sharing::PerLayer(vec![kept]);
    let mut cache = WeightCache::new(blocks, slots, sharing, Admission::Compete, policy);
    replay(trace, None, 0..trace.tokens(), &mut cache)[0].demand_hit_ratio()
}

/// The same for worths that are too costly for a policy: all capacities in one pass.
fn ranked_hits(trace: &AccessTrace, kept: &[u32], rank: &mut dyn Rank) -> Vec<f64> {
    let count = trace.blocks().len();
    let mut worths = vec![0f32; count];
    let mut held = vec![vec![false; count]; kept.len()];
    let (mut hits, mut requests) = (vec![0u64; kept.len()], 0u64);
    let mut candidates: Vec<usize> = Vec::new();
    for token in 0..trace.tokens() {
        rank.rank(trace, token, &mut worths);
        requests += trace.set_len(token, ONE) as u64;
        for ((held, hits), &kept) in held.iter_mut().zip(&mut hits).zip(kept) {
            for block in trace.set(token, ONE) {
                *hits += u64::from(std::mem::replace(&mut held[block.index()], true));
            }
            candidates.clear();
            candidates.extend((0..count).filter(|&number| held[number]));
            let kept = kept as usize;
            if candidates.len() > kept {
                candidates.select_nth_unstable_by(kept, |&a, &b| {
                    worths[b].total_cmp(&worths[a]).then(b.cmp(&a))
                });
                candidates[kept..].iter().for_each(|&number| held[number] = false);
            }
        }
    }
    hits.into_iter().map(|hits| hits as f64 / requests.max(1) as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ls_bundle::ids::BlockId;
    use ls_cache::Blocks;

    /// Counts requests.
    struct Counts(Vec<f32>);

    impl Rank for Counts {
        fn rank(&mut self, trace: &AccessTrace, token: usize, worths: &mut [f32]) {
            trace.set(token, ONE).for_each(|block| self.0[block.index()] += 1.0);
            worths.copy_from_slice(&self.0);
        }
    }

    #[test]
    fn ranking_and_replaying_count_the_same_hits() {
        let mut trace = AccessTrace::with_capacity(Blocks::even(1, 30), 300);
        for token in 0..300u32 {
            let wanted = |n: &u32| (n * 7 + token * token) % (n + 2) < 2;
            trace.push((0..30).filter(wanted).map(BlockId));
        }
        let ranked = ranked_hits(&trace, &[3, 10], &mut Counts(vec![0.0; 30]));
        for (&kept, ranked) in [3, 10].iter().zip(ranked) {
            let replayed = hits(&trace, kept, Box::new(Lfu::new(trace.blocks())));
            assert!(ranked > 0.1 && (ranked - replayed).abs() < 1e-12, "{ranked} {replayed}");
        }
    }
}
