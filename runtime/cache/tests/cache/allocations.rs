//! A visit allocates nothing.

use crate::{POLICIES, policy};
use ls_bundle::ids::{BlockId, LayerId};
use ls_cache::{AccessTrace, Admission, Blocks, Request, Sharing, WeightCache};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// By thread: tests run beside each other.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

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
        let before = ALLOCATIONS.get();
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
        assert_eq!(ALLOCATIONS.get(), before, "{name}");
    }
    assert_eq!(recorded, trace);
}
