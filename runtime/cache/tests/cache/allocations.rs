//! A visit allocates nothing.

use crate::counting::allocations;
use crate::{POLICIES, policy};
use ls_bundle::ids::{BlockId, LayerId};
use ls_cache::{AccessTrace, Admission, Blocks, Request, Sharing, WeightCache};

#[test]
fn visits_allocate_nothing() {
    let blocks = Blocks::even(3, 50);
    let mut trace = AccessTrace::with_capacity(blocks.clone(), 200);
    for step in 0..600u32 {
        let layer = step % 3;
        trace.push(
            (0..50).filter(|n| (n * n + step / 3 * 7) % 11 < 3).map(|n| BlockId(50 * layer + n)),
        );
    }
    let mut recorded = AccessTrace::with_capacity(blocks.clone(), 200);
    for name in POLICIES {
        let sharing = Sharing::Global(40);
        let policy = policy(name, &trace, 5);
        let mut cache = WeightCache::new(blocks.clone(), 100, sharing, Admission::Compete, policy);
        let mut pinned = Vec::with_capacity(50);
        let before = allocations();
        for step in 0..600 {
            let (token, layer) = (step / 3, LayerId(step as u16 % 3));
            cache.begin(layer);
            for block in trace.set(token, layer) {
                match cache.request(block) {
                    Request::Hit(slot) | Request::Coming(slot) => pinned.push(slot),
                    Request::Miss => {
                        let loading = cache.reserve(block).expect("room");
                        pinned.push(cache.publish(loading));
                    }
                }
            }
            pinned.drain(..).for_each(|slot| cache.unpin(slot));
            cache.settle();
            if name == POLICIES[0] {
                recorded.push(trace.set(token, layer));
            }
        }
        assert_eq!(allocations(), before, "{name}");
    }
    assert_eq!(recorded, trace);
}
