//! What holds for every policy, sharing and admission.

use crate::{POLICIES, policy, traces};
use ls_bundle::ids::LayerId;
use ls_cache::{AccessTrace, Admission, Counts, Loading, Request, Sharing, SlotId, WeightCache};
use proptest::prelude::*;
use std::collections::HashMap;

fn cache(
    name: &str,
    trace: &AccessTrace,
    global: bool,
    admission: Admission,
    kept: u32,
) -> WeightCache {
    let blocks = trace.blocks().clone();
    let layers = blocks.layers() as u32;
    let sharing = if global {
        Sharing::Global(kept * layers)
    } else {
        Sharing::PerLayer(vec![kept; layers as usize])
    };
    let slots = kept * layers + 8;
    WeightCache::new(blocks, slots, sharing, admission, policy(name, trace, kept))
}

fn total(counts: Vec<Counts>) -> Counts {
    counts.into_iter().fold(Counts::default(), |mut all, one| {
        all += one;
        all
    })
}

fn all(trace: &AccessTrace) -> impl Iterator<Item = LayerId> + use<> {
    (0..trace.blocks().layers()).map(|n| LayerId(n as u16))
}

/// Runs a trace by hand, holding one block in `hold_every` pinned for some visits, and checks every step.
fn run_and_check(
    cache: &mut WeightCache,
    trace: &AccessTrace,
    kept: u32,
    global: bool,
    hold_every: usize,
) {
    let mut held: Vec<SlotId> = Vec::new();
    let mut requests = 0u64;
    for token in 0..trace.tokens() {
        for layer in all(trace) {
            cache.begin(layer);
            let mut used = Vec::new();
            let mut where_found = HashMap::new();
            for block in trace.set(token, layer) {
                requests += 1;
                let before = cache.find(block);
                let slot = match cache.request(block) {
                    Request::Hit(slot) => {
                        assert_eq!(before, Some(slot), "a hit is where the block is");
                        slot
                    }
                    Request::Coming(_) => panic!("nothing was begun"),
                    Request::Miss => {
                        assert_eq!(before, None);
                        let Some(loading) = cache.reserve(block) else { continue };
                        assert_eq!(cache.find(block), None, "not there before it is published");
                        cache.publish(loading)
                    }
                };
                assert_eq!(where_found.insert(slot, block), None, "one block a slot");
                used.push((slot, block));
            }
            for &(slot, block) in &used {
                assert_eq!(cache.find(block), Some(slot), "a pinned block stays where it is");
            }
            for (n, (slot, _)) in used.into_iter().enumerate() {
                if (token + n) % hold_every == 0 && held.len() < 3 {
                    held.push(slot)
                } else {
                    cache.unpin(slot)
                }
            }
            cache.settle();
            let layers = all(trace);
            let (found, may) = if global {
                (layers.map(|layer| cache.held(layer)).sum(), kept * trace.blocks().layers() as u32)
            } else {
                (cache.held(layer), kept)
            };
            let pinned = held.len() as u32;
            assert!(found <= may + pinned, "{found} held, {may} kept, {pinned} pinned");
            if token % 3 == 2 {
                held.drain(..).for_each(|slot| cache.unpin(slot));
                cache.settle();
            }
        }
    }
    let counts = total(all(trace).map(|layer| cache.counts(layer)).collect());
    assert_eq!(counts.requests(), requests);
    assert_eq!(counts.demand_hits + counts.misses, requests);
}

proptest! {
    #[test]
    fn every_policy_keeps_the_rules(trace in traces(), kept in 0u32..6, hold_every in 1usize..5) {
        for name in POLICIES {
            for (global, admission) in
                [(false, Admission::Compete), (true, Admission::Compete), (false, Admission::Always), (true, Admission::Always)]
            {
                let mut cache = cache(name, &trace, global, admission, kept);
                run_and_check(&mut cache, &trace, kept, global, hold_every);
            }
        }
    }

    #[test]
    fn no_policy_beats_belady(trace in traces(), kept in 0u32..6) {
        for global in [false, true] {
            let hits = |name: &str, admission| {
                let mut cache = cache(name, &trace, global, admission, kept);
                total(ls_cache::replay(&trace, None, 0..trace.tokens(), &mut cache)).demand_hits
            };
            let best = hits("belady", Admission::Compete);
            for name in POLICIES {
                for admission in [Admission::Compete, Admission::Always] {
                    let found = hits(name, admission);
                    prop_assert!(found <= best, "{name} {admission:?}: {found} hits, belady {best}");
                }
            }
        }
    }

    #[test]
    fn equal_runs_are_equal(trace in traces(), kept in 0u32..6) {
        for name in POLICIES {
            let run = || {
                let mut cache = cache(name, &trace, true, Admission::Compete, kept);
                let counts = ls_cache::replay(&trace, None, 0..trace.tokens(), &mut cache);
                let places: Vec<_> = all(&trace)
                    .flat_map(|layer| trace.blocks().of(layer))
                    .map(|id| cache.find(ls_bundle::ids::BlockId(id)))
                    .collect();
                (counts, places)
            };
            prop_assert_eq!(run(), run());
        }
    }

    #[test]
    fn prefetch_hits_are_counted_apart(trace in traces(), kept in 1u32..6) {
        for name in POLICIES {
            let mut cache = cache(name, &trace, false, Admission::Compete, kept);
            let found = total(ls_cache::replay(&trace, Some(&trace), 0..trace.tokens(), &mut cache));
            let requests: usize = (0..trace.tokens())
                .flat_map(|token| all(&trace).map(move |layer| (token, layer)))
                .map(|(token, layer)| trace.set_len(token, layer))
                .sum();
            prop_assert_eq!(found.requests(), requests as u64);
            // Everything is prefetched just in time, so nothing is missing, nothing in vain.
            prop_assert_eq!((found.misses, found.prefetched_in_vain), (0, 0), "{}", name);
            // Who ranks by recency sees prefetched blocks in another order.
            if !["lru", "hot_pinned"].contains(&name) {
                let mut plain = self::cache(name, &trace, false, Admission::Compete, kept);
                let plain = total(ls_cache::replay(&trace, None, 0..trace.tokens(), &mut plain));
                prop_assert_eq!(found.demand_hits, plain.demand_hits, "{}", name);
            }
        }
    }
}

/// A block being loaded is dropped by nobody, and what was abandoned is not there.
#[test]
fn an_abandoned_block_is_not_there() {
    let trace = AccessTrace::with_capacity(ls_cache::Blocks::even(1, 4), 0);
    let block = ls_bundle::ids::BlockId(2);
    for name in POLICIES {
        let mut cache = cache(name, &trace, false, Admission::Compete, 2);
        cache.begin(LayerId(0));
        assert_eq!(cache.request(block), Request::Miss);
        let loading: Loading = cache.reserve(block).unwrap();
        let free = cache.free();
        cache.abandon(loading);
        assert_eq!((cache.find(block), cache.free(), cache.held(LayerId(0))), (None, free + 1, 0));
        assert!(cache.reserve(block).is_some());
    }
}
