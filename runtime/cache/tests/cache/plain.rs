//! Policies against plain versions that sort all blocks after every visit.

use crate::{gaps, hazard, policy, traces};
use ls_bundle::ids::{BlockId, LayerId};
use ls_cache::{AccessTrace, Admission, Sharing, WeightCache, replay};
use proptest::prelude::*;

/// What a policy may look at: the visits in which a block was requested so far, and will be.
struct History<'a> {
    past: &'a [u32],
    /// Whether it was there when it was last requested.
    was_there: bool,
    future: Option<u32>,
    now: u32,
}

/// Hits of one layer's cache of `kept` blocks: after each visit the best of what was there and what was requested stay.
/// Ties are broken by number, the higher stays.
fn plain(trace: &AccessTrace, kept: usize, worth: impl Fn(&History<'_>) -> f64) -> u64 {
    let layer = LayerId(0);
    let sets: Vec<Vec<BlockId>> =
        (0..trace.tokens()).map(|token| trace.set(token, layer).collect()).collect();
    let (mut held, mut hits): (Vec<BlockId>, _) = (Vec::new(), 0);
    let mut found = std::collections::HashMap::new();
    for (token, set) in sets.iter().enumerate() {
        found.extend(set.iter().map(|&block| (block, held.contains(&block))));
        hits += set.iter().filter(|block| held.contains(block)).count() as u64;
        held.extend(set);
        held.sort();
        held.dedup();
        let worth = |block: &BlockId| {
            let in_set = |n: &u32| sets[*n as usize].contains(block);
            let past: Vec<u32> = (0..=token as u32).filter(in_set).collect();
            let future = (token as u32 + 1..sets.len() as u32).find(in_set);
            worth(&History { past: &past, was_there: found[block], future, now: token as u32 })
        };
        held.sort_by(|a, b| (worth(b), b).partial_cmp(&(worth(a), a)).unwrap());
        held.truncate(kept);
    }
    hits
}

fn hits(name: &str, trace: &AccessTrace, kept: u32) -> u64 {
    let blocks = trace.blocks().clone();
    let layers = blocks.layers();
    let sharing = Sharing::PerLayer(vec![kept; layers]);
    let slots = kept * layers as u32 + 8;
    let policy = policy(name, trace, 0);
    let mut cache = WeightCache::new(blocks, slots, sharing, Admission::Compete, policy);
    replay(trace, None, 0..trace.tokens(), &mut cache)[0].demand_hits
}

proptest! {
    #[test]
    fn lru_is_the_plain_one(trace in traces(), kept in 0u32..6) {
        let plain = plain(&trace, kept as usize, |of| {
            f64::from(2 * of.past.last().unwrap() + u32::from(of.was_there))
        });
        prop_assert_eq!(hits("lru", &trace, kept), plain);
        prop_assert_eq!(hits("hot_pinned", &trace, kept), plain, "nothing hot");
    }

    #[test]
    fn lfu_is_the_plain_one(trace in traces(), kept in 0u32..6) {
        prop_assert_eq!(hits("lfu", &trace, kept), plain(&trace, kept as usize, |of| of.past.len() as f64));
    }

    #[test]
    fn ema_is_the_plain_one(trace in traces(), kept in 0u32..6) {
        let plain = plain(&trace, kept as usize, |of| {
            // Rounded so that equal histories tie.
            let sum: f64 = of.past.iter().map(|&at| 0.9f64.powi((of.now - at) as i32)).sum();
            (sum * 1e6).round()
        });
        prop_assert_eq!(hits("ema", &trace, kept), plain);
    }

    #[test]
    fn belady_is_the_plain_one(trace in traces(), kept in 0u32..6) {
        let plain = plain(&trace, kept as usize, |of| -of.future.map_or(f64::INFINITY, f64::from));
        prop_assert_eq!(hits("belady", &trace, kept), plain);
    }

    #[test]
    fn reuse_distance_is_the_plain_one(trace in traces(), kept in 0u32..6) {
        let table = gaps();
        let plain = plain(&trace, kept as usize, |of| {
            // Visits are numbered from 1, and the time before counts as a visit.
            let mut history = 15;
            let mut before = 0;
            for &at in of.past {
                history = table.push(history, at + 1 - before);
                before = at + 1;
            }
            let distance = u32::from(table.distances[usize::from(history)]);
            f64::from(before * 16) - f64::from(distance)
        });
        prop_assert_eq!(hits("reuse_distance", &trace, kept), plain);
    }
}

proptest! {
    #[test]
    fn hazard_is_the_plain_one(trace in traces(), kept in 0u32..6) {
        let table = hazard(trace.blocks().of(LayerId(0)).len());
        let plain = plain(&trace, kept as usize, |of| {
            let recent = (0..3).filter(|n| of.past.contains(&(of.now.wrapping_sub(*n))));
            let recent = recent.map(|n| 1u8 << n).sum();
            let mut means = [20_000u32; 2];
            for visit in 0..=of.now {
                for (mean, rate) in means.iter_mut().zip(table.rates) {
                    *mean -= *mean * u32::from(rate) / 65536;
                    let gain = u32::from(rate) * u32::from(of.past.contains(&visit));
                    *mean = (*mean + gain).min(65535);
                }
            }
            f64::from(table.worths[table.entry(recent, means.map(|mean| mean as u16))])
        });
        prop_assert_eq!(hits("hazard", &trace, kept), plain);
    }
}

#[test]
fn averages_keep_their_order_over_rescaling() {
    // A weight passes 2^60 after 645 visits and what an f32 holds after 1376. One block is requested in every visit, the
    // other in every third; every 300 visits they change places.
    let blocks = ls_cache::Blocks::even(1, 2);
    let mut trace = AccessTrace::with_capacity(blocks.clone(), 3000);
    for token in 0..3000u32 {
        let often = token / 300 % 2;
        trace.push((0..2).filter(|&n| n == often || token % 3 == 0).map(BlockId));
    }
    let ema = Box::new(ls_cache::policy::Ema::new(&blocks, 0.9375));
    let mut cache = WeightCache::new(blocks, 4, Sharing::Global(1), Admission::Compete, ema);
    for phase in 0..10 {
        replay(&trace, None, 300 * phase..300 * phase + 100, &mut cache);
        let counts = replay(&trace, None, 300 * phase + 100..300 * (phase + 1), &mut cache);
        assert_eq!(counts[0].demand_hits, 200, "phase {phase}: the frequent one stays");
    }
}
