//! [`Belady`]: the block whose next use is furthest away goes. The optimum, which knows the future from a trace.

use super::EvictionPolicy;
use super::ranks::Ranks;
use crate::trace::AccessTrace;
use ls_bundle::ids::{BlockId, LayerId};

/// No policy misses less on the trace that it was made from, with [`Admission::Compete`](crate::Admission::Compete). A
/// run that leaves the trace gets an answer too, but not the best.
#[derive(Debug)]
pub struct Belady {
    ranks: Ranks,
    /// Visits in which blocks are requested, ascending, block after block.
    uses: Vec<u32>,
    /// By block: the first of its uses that is not known to be past; and one more, the end of the last block's.
    next: Vec<u32>,
    ends: Vec<u32>,
    visits: Vec<u32>,
}

impl Belady {
    /// For the requests of `trace`.
    ///
    /// # Panics
    /// If there are 2^32 or more.
    #[must_use]
    pub fn new(trace: &AccessTrace) -> Belady {
        let blocks = trace.blocks();
        let mut counts = vec![0u32; blocks.len()];
        let each = |visit: &mut dyn FnMut(usize, u32)| {
            for token in 0..trace.tokens() {
                for layer in 0..blocks.layers() {
                    for block in trace.set(token, LayerId(layer as u16)) {
                        visit(blocks.index(block), token as u32);
                    }
                }
            }
        };
        let mut total = 0u64;
        each(&mut |at, _| {
            counts[at] += 1;
            total += 1;
        });
        let total = u32::try_from(total).expect("fewer than 2^32 requests");
        let mut end = 0;
        let ends: Vec<u32> = counts
            .iter()
            .map(|count| {
                end += count;
                end
            })
            .collect();
        let next: Vec<u32> = ends.iter().zip(&counts).map(|(end, count)| end - count).collect();
        let (mut uses, mut fill) = (vec![0; total as usize], next.clone());
        each(&mut |at, token| {
            uses[fill[at] as usize] = token;
            fill[at] += 1;
        });
        let visits = vec![0; blocks.layers()];
        Belady { ranks: Ranks::new(blocks), uses, next, ends, visits }
    }
}

impl EvictionPolicy for Belady {
    fn visit(&mut self, layer: LayerId) {
        self.visits[layer.index()] += 1;
    }

    fn requested(&mut self, _: BlockId) {}

    fn enter(&mut self, layer: LayerId, block: BlockId) {
        let at = self.ranks.blocks().index(block);
        let (next, coming) = (&mut self.next[at], self.visits[layer.index()]);
        while *next < self.ends[at] && self.uses[*next as usize] < coming {
            *next += 1;
        }
        // Ordered over all layers: by token, then by layer. Blocks that are not used again are the weakest.
        let step = if *next < self.ends[at] {
            let layers = self.visits.len() as u64;
            let step = u64::from(self.uses[*next as usize]) * layers + u64::from(layer.0);
            u32::try_from(step).unwrap_or(u32::MAX)
        } else {
            u32::MAX
        };
        self.ranks.insert(layer, block, u32::MAX - step);
    }

    fn leave(&mut self, layer: LayerId, block: BlockId) {
        self.ranks.remove(layer, block);
    }

    fn weakest(&self, scope: Option<LayerId>) -> Option<(LayerId, BlockId)> {
        self.ranks.weakest(scope)
    }
}
