//! The cache's own rules.

use ls_bundle::ids::{BlockId, LayerId};
use ls_cache::policy::Lru;
use ls_cache::{Admission, Blocks, Request, Sharing, WeightCache};

fn cache(slots: u32, kept: u32, admission: Admission) -> WeightCache {
    let blocks = Blocks::even(1, 8);
    let policy = Box::new(Lru::new(&blocks));
    WeightCache::new(blocks, slots, Sharing::PerLayer(vec![kept]), admission, policy)
}

/// Requests blocks and reads those that are missing; says which were hits.
fn visit(cache: &mut WeightCache, blocks: &[u32]) -> Vec<bool> {
    cache.begin(LayerId(0));
    let found: Vec<_> = blocks.iter().map(|&block| cache.request(BlockId(block))).collect();
    let mut pinned = Vec::new();
    for (&block, request) in blocks.iter().zip(&found) {
        pinned.push(match *request {
            Request::Hit(slot) | Request::Coming(slot) => slot,
            Request::Miss => {
                let loading = cache.reserve(BlockId(block)).expect("room");
                cache.publish(loading)
            }
        });
    }
    pinned.into_iter().for_each(|slot| cache.unpin(slot));
    cache.settle();
    found.iter().map(|request| matches!(request, Request::Hit(_))).collect()
}

#[test]
fn what_stays_is_chosen_after_the_visit() {
    let mut cache = cache(8, 2, Admission::Compete);
    assert_eq!(visit(&mut cache, &[0, 1, 2]), [false; 3]);
    assert_eq!(visit(&mut cache, &[0, 1, 2]), [false, true, true], "the oldest of three went");
}

#[test]
fn room_for_a_newcomer_is_made_late_or_early() {
    for (admission, idle_stays) in [(Admission::Compete, true), (Admission::Always, false)] {
        let mut cache = cache(8, 2, admission);
        visit(&mut cache, &[1, 2]);
        cache.begin(LayerId(0));
        assert!(matches!(cache.request(BlockId(1)), Request::Hit(_)));
        assert_eq!(cache.request(BlockId(3)), Request::Miss);
        let loading = cache.reserve(BlockId(3)).unwrap();
        assert_eq!(cache.find(BlockId(2)).is_some(), idle_stays, "{admission:?}");
        assert!(cache.find(BlockId(1)).is_some(), "a pinned block stays");
        cache.abandon(loading);
    }
}

#[test]
fn without_free_slots_the_weakest_makes_room_and_pinned_ones_do_not() {
    let mut cache = cache(2, 2, Admission::Compete);
    cache.begin(LayerId(0));
    let first = cache.reserve(BlockId(0)).unwrap();
    let first = cache.publish(first);
    let second = cache.reserve(BlockId(1)).unwrap();
    assert!(cache.reserve(BlockId(2)).is_none(), "one is pinned, one is being read");
    cache.unpin(first);
    let third = cache.reserve(BlockId(2)).unwrap();
    assert_eq!((cache.find(BlockId(0)), third.slot()), (None, first));
    let (second, third) = (cache.publish(second), cache.publish(third));
    assert_eq!(cache.request(BlockId(1)), Request::Hit(second));
    cache.unpin(second);
    assert!(cache.reserve(BlockId(3)).is_none(), "one of its two users is left");
    cache.unpin(second);
    assert!(cache.reserve(BlockId(3)).is_some());
    assert_eq!(cache.find(BlockId(2)), Some(third));
}

#[test]
fn a_prefetched_block_counts_once_as_such() {
    let mut cache = cache(4, 2, Admission::Compete);
    let coming = cache.reserve_ahead(BlockId(5)).unwrap();
    cache.begin(LayerId(0));
    assert_eq!(cache.request(BlockId(5)), Request::Coming(coming.slot()));
    let slot = cache.publish(coming);
    cache.unpin(slot);
    assert!(cache.reserve_ahead(BlockId(6)).map(|ahead| cache.publish(ahead)).is_some());
    cache.unpin(slot);
    cache.settle();
    assert_eq!(visit(&mut cache, &[5]), [true]);
    let counts = cache.counts(LayerId(0));
    assert_eq!((counts.prefetch_hits, counts.demand_hits, counts.misses), (1, 1, 0));
}

#[test]
fn what_was_prefetched_and_went_unused_is_counted() {
    let mut cache = cache(4, 1, Admission::Compete);
    for block in [1, 2] {
        let ahead = cache.reserve_ahead(BlockId(block)).unwrap();
        let slot = cache.publish(ahead);
        cache.unpin(slot);
    }
    cache.begin(LayerId(0));
    cache.settle();
    assert_eq!(cache.counts(LayerId(0)).prefetched_in_vain, 1);
}

#[test]
#[should_panic(expected = "has a slot")]
fn a_block_has_one_slot() {
    let mut cache = cache(4, 2, Admission::Compete);
    let _first = cache.reserve(BlockId(1));
    let _second = cache.reserve(BlockId(1));
}

#[test]
#[should_panic(expected = "a pinned slot")]
fn a_pin_is_given_back_once() {
    let mut cache = cache(4, 2, Admission::Compete);
    let loading = cache.reserve(BlockId(1)).unwrap();
    let slot = cache.publish(loading);
    cache.unpin(slot);
    cache.unpin(slot);
}

#[test]
fn what_is_offered_stays_if_it_is_worth_it() {
    // LRU: the last ones.
    let mut cache = cache(6, 3, Admission::Compete);
    for block in 0..5 {
        assert!(cache.offer(BlockId(block)).is_some(), "the newest stays");
        assert!(cache.free() >= 3);
    }
    assert_eq!(
        (0..5).map(|b| cache.holds(BlockId(b))).collect::<Vec<_>>(),
        [false, false, true, true, true]
    );
    assert_eq!(visit(&mut cache, &[1, 2, 3]), [false, true, true]);
    let counts = cache.counts(LayerId(0));
    assert_eq!((counts.demand_hits, counts.misses, counts.prefetched_in_vain), (2, 1, 0));
}

#[test]
fn all_are_held_whatever_lies_between_layers() {
    let blocks = Blocks::new(vec![2..4, 7..9]);
    let policy = Box::new(Lru::new(&blocks));
    let sharing = Sharing::PerLayer(vec![2, 2]);
    let mut cache = WeightCache::new(blocks, 4, sharing, Admission::Compete, policy);
    for block in [2, 3, 7, 8] {
        assert!(!cache.holds_all());
        assert!(cache.offer(BlockId(block)).is_some());
    }
    assert!(cache.holds_all());
}
