//! [`Demand`]: what a run of chosen blocks would read, with a cache of some of them in each layer.
//!
//! Hits are of demand, nothing is prefetched, and what stays is chosen by moving averages of use after each token, as
//! the engine's default does. A text's windows follow each other without a break.

use ls_bundle::ids::BlockId;
use ls_cache::policy::Ema;
use ls_cache::{AccessTrace, Admission, Blocks, Counts, Sharing, WeightCache, replay};

/// Decay of the moving average: `ls-run`'s.
const EMA_DECAY: f32 = 0.99;

/// See the module's documentation.
#[derive(Debug)]
pub struct Demand {
    kept: u32,
    layer: Option<(u16, WeightCache)>,
    counts: Counts,
}

impl Demand {
    /// Nothing yet; `kept` blocks stay in each layer.
    #[must_use]
    pub fn new(kept: u32) -> Demand {
        Demand { kept, layer: None, counts: Counts::default() }
    }

    /// Hits and misses so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The next tokens of a layer use the `chosen` of its `blocks`; tokens x blocks. Layers come in order.
    pub(super) fn add(&mut self, layer: u16, blocks: usize, chosen: &[bool]) {
        let all = Blocks::even(1, blocks as u32);
        let (_, cache) = match &mut self.layer {
            Some(held) if held.0 == layer => held,
            held => held.insert((layer, cache(&all, self.kept.min(blocks as u32)))),
        };
        let mut trace = AccessTrace::with_capacity(all, chosen.len() / blocks);
        for chosen in chosen.chunks_exact(blocks) {
            let used = (0u32..).zip(chosen).filter(|(_, chosen)| **chosen);
            trace.push(used.map(|(block, _)| BlockId(block)));
        }
        replay(&trace, None, 0..trace.tokens(), cache).into_iter().for_each(|c| self.counts += c);
    }
}

fn cache(blocks: &Blocks, kept: u32) -> WeightCache {
    let policy = Box::new(Ema::new(blocks, EMA_DECAY));
    let slots = kept + blocks.count();
    let sharing = Sharing::PerLayer(vec![kept]);
    WeightCache::new(blocks.clone(), slots, sharing, Admission::Compete, policy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_begins_with_an_empty_cache_and_goes_on_with_what_it_kept() {
        let mut demand = Demand::new(1);
        let token = [true, false, true];
        demand.add(0, 3, &[token, token].concat());
        assert_eq!((demand.counts().misses, demand.counts().demand_hits), (3, 1));
        demand.add(0, 3, &token);
        assert_eq!((demand.counts().misses, demand.counts().demand_hits), (4, 2));
        demand.add(1, 3, &token);
        assert_eq!((demand.counts().misses, demand.counts().demand_hits), (6, 2));
        let mut nothing = Demand::new(0);
        nothing.add(0, 3, &[token, token].concat());
        assert_eq!((nothing.counts().misses, nothing.counts().demand_hits), (4, 0));
    }
}
