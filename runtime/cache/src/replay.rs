//! [`replay`]: a trace through a cache.

use crate::cache::{Counts, Request, WeightCache};
use crate::trace::AccessTrace;
use ls_bundle::ids::{BlockId, LayerId};
use std::ops::Range;

/// Makes the requests of some tokens and returns what happened to them, by layer.
///
/// `prefetch` has for every visit the blocks that are read before its requests are made, those that are there already
/// excepted; they are counted apart. A block for which no slot can be had is used without one. Newcomers are
/// unpinned before hits, each in the order of their ids: of blocks used in one visit, those that were there count as
/// used last.
///
/// # Panics
/// If the traces and the cache are of different blocks.
pub fn replay(
    trace: &AccessTrace,
    prefetch: Option<&AccessTrace>,
    tokens: Range<usize>,
    cache: &mut WeightCache,
) -> Vec<Counts> {
    assert_eq!(trace.blocks(), cache.blocks(), "blocks of the trace");
    assert!(prefetch.is_none_or(|ahead| ahead.blocks() == trace.blocks()), "blocks of prefetches");
    let layers: Vec<LayerId> = (0..trace.blocks().layers()).map(|n| LayerId(n as u16)).collect();
    let before: Vec<Counts> = layers.iter().map(|&layer| cache.counts(layer)).collect();
    let (mut pinned, mut newcomers) = (Vec::new(), Vec::new());
    let mut missing: Vec<BlockId> = Vec::new();
    for token in tokens {
        for &layer in &layers {
            for block in prefetch.into_iter().flat_map(|ahead| ahead.set(token, layer)) {
                if cache.find(block).is_none()
                    && let Some(loading) = cache.reserve_ahead(block)
                {
                    newcomers.push(cache.publish(loading));
                }
            }
            cache.begin(layer);
            for block in trace.set(token, layer) {
                match cache.request(block) {
                    Request::Hit(slot) | Request::Coming(slot) => pinned.push(slot),
                    Request::Miss => missing.push(block),
                }
            }
            for block in missing.drain(..) {
                if let Some(loading) = cache.reserve(block) {
                    newcomers.push(cache.publish(loading));
                }
            }
            newcomers.drain(..).for_each(|slot| cache.unpin(slot));
            pinned.drain(..).for_each(|slot| cache.unpin(slot));
            cache.settle();
        }
    }
    layers.iter().zip(before).map(|(&layer, before)| cache.counts(layer) - before).collect()
}
