//! [`Ranks`]: candidates ordered by a number, a heap for each layer.

use crate::blocks::Blocks;
use ls_bundle::ids::{BlockId, LayerId};

const NONE: u32 = u32::MAX;
/// Children of a heap's node: four lie in half a cache line, and the heap is half as deep as with two.
const FAN: usize = 4;

/// Candidates of all layers. An entry is its key (upper half) and its number within its layer, so ties are broken by
/// number and one comparison tells. Insertion, removal: O(log candidates of the layer).
#[derive(Debug)]
pub(super) struct Ranks {
    blocks: Blocks,
    /// By layer: the smallest first.
    heaps: Vec<Vec<u64>>,
    /// By block: its place in its heap, or [`NONE`].
    place: Vec<u32>,
    /// By layer: the smallest entry, or all ones. Beside each other, as the whole cache's weakest is looked for here.
    tops: Vec<u64>,
}

fn entry(key: u32, number: u32) -> u64 {
    u64::from(key) << 32 | u64::from(number)
}

impl Ranks {
    pub(super) fn new(blocks: &Blocks) -> Ranks {
        Ranks {
            heaps: blocks.ranges().iter().map(|range| Vec::with_capacity(range.len())).collect(),
            place: vec![NONE; blocks.len()],
            tops: vec![u64::MAX; blocks.layers()],
            blocks: blocks.clone(),
        }
    }

    pub(super) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    pub(super) fn insert(&mut self, layer: LayerId, block: BlockId, key: u32) {
        let first = self.blocks.of(layer).start;
        let base = self.blocks.index(BlockId(first));
        let heap = &mut self.heaps[layer.index()];
        let at = heap.len();
        heap.push(entry(key, block.0 - first));
        up(heap, &mut self.place[base..], at);
        self.tops[layer.index()] = heap[0];
    }

    pub(super) fn remove(&mut self, layer: LayerId, block: BlockId) {
        let base = self.blocks.index(BlockId(self.blocks.of(layer).start));
        let heap = &mut self.heaps[layer.index()];
        let place = &mut self.place[base..];
        let number = self.blocks.index(block) - base;
        let at = std::mem::replace(&mut place[number], NONE) as usize;
        let last = heap.pop().expect("a candidate is in its layer's heap");
        if at < heap.len() {
            let removed = std::mem::replace(&mut heap[at], last);
            if last < removed { up(heap, place, at) } else { down(heap, place, at) }
        }
        self.tops[layer.index()] = heap.first().copied().unwrap_or(u64::MAX);
    }

    /// Gives every candidate of a layer a new key, by its entry in tables. O(candidates).
    pub(super) fn rekey(&mut self, layer: LayerId, mut key: impl FnMut(usize) -> u32) {
        let base = self.blocks.index(BlockId(self.blocks.of(layer).start));
        let heap = &mut self.heaps[layer.index()];
        for held in &mut *heap {
            let number = *held as u32;
            *held = entry(key(base + number as usize), number);
        }
        for at in (0..heap.len().div_ceil(FAN)).rev() {
            down(heap, &mut self.place[base..], at);
        }
        self.tops[layer.index()] = heap.first().copied().unwrap_or(u64::MAX);
    }

    pub(super) fn weakest(&self, scope: Option<LayerId>) -> Option<(LayerId, BlockId)> {
        let layer = scope.unwrap_or_else(|| {
            let layers = self.tops.iter().zip(0u16..);
            LayerId(layers.min_by_key(|(top, _)| **top >> 32).map_or(0, |(_, layer)| layer))
        });
        // With all keys at their largest, a layer without candidates may have been found before one with.
        let heaps = self.heaps.iter().zip(0u16..);
        let (heap, layer) = match self.heaps[layer.index()].first() {
            None if scope.is_none() => {
                let (heap, layer) = heaps.into_iter().find(|(heap, _)| !heap.is_empty())?;
                (heap, LayerId(layer))
            }
            _ => (&self.heaps[layer.index()], layer),
        };
        let number = *heap.first()? as u32;
        Some((layer, BlockId(self.blocks.of(layer).start + number)))
    }
}

/// Moves the entry at `at` towards the root. Writes its place, and those of entries it passes.
fn up(heap: &mut [u64], place: &mut [u32], mut at: usize) {
    let moved = heap[at];
    while at > 0 {
        let parent = (at - 1) / FAN;
        if heap[parent] <= moved {
            break;
        }
        heap[at] = heap[parent];
        place[heap[at] as u32 as usize] = at as u32;
        at = parent;
    }
    heap[at] = moved;
    place[moved as u32 as usize] = at as u32;
}

/// Moves it away from the root.
fn down(heap: &mut [u64], place: &mut [u32], mut at: usize) {
    let moved = heap[at];
    loop {
        let first = at * FAN + 1;
        let Some(children) = heap.get(first..heap.len().min(first + FAN)) else { break };
        let Some((child, least)) = (first..).zip(children).min_by_key(|(_, entry)| **entry) else {
            break;
        };
        if *least >= moved {
            break;
        }
        heap[at] = *least;
        place[heap[at] as u32 as usize] = at as u32;
        at = child;
    }
    heap[at] = moved;
    place[moved as u32 as usize] = at as u32;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_weakest_is_the_smallest(steps in prop::collection::vec((0u32..24, 0u32..6, 0u8..8), 1..200)) {
            let blocks = Blocks::new(vec![3..11, 12..20, 20..28]);
            let mut ranks = Ranks::new(&blocks);
            let mut plain: Vec<(u32, u32, u32)> = Vec::new();
            for (n, key, action) in steps {
                let layer = n / 8;
                let block = blocks.of(LayerId(layer as u16)).start + n % 8;
                match plain.iter().position(|held| held.2 == block) {
                    Some(at) => {
                        plain.swap_remove(at);
                        ranks.remove(LayerId(layer as u16), BlockId(block));
                    }
                    None => {
                        let key = if action == 0 { u32::MAX } else { key };
                        plain.push((key, layer, block));
                        ranks.insert(LayerId(layer as u16), BlockId(block), key);
                    }
                }
                if action == 1 {
                    let new = |index: usize| (index as u32 * 7 + n) % 5;
                    plain.iter_mut().filter(|held| held.1 == layer)
                        .for_each(|held| held.0 = new(held.2 as usize - 3));
                    ranks.rekey(LayerId(layer as u16), new);
                }
                let as_pair = |held: &(u32, u32, u32)| (LayerId(held.1 as u16), BlockId(held.2));
                prop_assert_eq!(ranks.weakest(None), plain.iter().min().map(as_pair));
                for of in 0..3 {
                    let least = plain.iter().filter(|held| held.1 == of).min();
                    prop_assert_eq!(ranks.weakest(Some(LayerId(of as u16))), least.map(as_pair));
                }
            }
        }
    }
}
