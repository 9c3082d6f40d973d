//! [`Ema`]: the block with the smallest moving average of requests goes.

use super::EvictionPolicy;
use super::ranks::Ranks;
use crate::blocks::Blocks;
use ls_bundle::ids::{BlockId, LayerId};

/// Where the growing weight is brought back to one.
const RESCALE: f32 = (1u64 << 60) as f32;

/// Exponential moving average: a request counts `decay` to the power of the visits of its layer since.
///
/// All averages decay alike, so their order changes by requests alone. Instead of multiplying every average in every
/// visit, a request's weight grows by 1 / decay; a block's key changes when it is requested and at no other time.
#[derive(Debug)]
pub struct Ema {
    ranks: Ranks,
    averages: Vec<f32>,
    /// By layer: what a request counts now.
    weights: Vec<f32>,
    growth: f32,
    visited: LayerId,
}

impl Ema {
    /// For these blocks, none requested yet. `decay` is the factor of one visit, within 0.5 to 1.
    ///
    /// # Panics
    /// If it is not.
    #[must_use]
    pub fn new(blocks: &Blocks, decay: f32) -> Ema {
        assert!((0.5..=1.0).contains(&decay), "a decay of {decay} a visit");
        Ema {
            ranks: Ranks::new(blocks),
            averages: vec![0.0; blocks.len()],
            weights: vec![1.0; blocks.layers()],
            growth: 1.0 / decay,
            visited: LayerId(0),
        }
    }

    /// All layers at once, as they are compared with each other. Once in thousands of tokens.
    fn rescale(&mut self) {
        self.averages.iter_mut().chain(&mut self.weights).for_each(|value| *value /= RESCALE);
        for layer in 0..self.weights.len() {
            let averages = &self.averages;
            self.ranks.rekey(LayerId(layer as u16), |at| averages[at].to_bits());
        }
    }
}

impl EvictionPolicy for Ema {
    fn visit(&mut self, layer: LayerId) {
        self.visited = layer;
        self.weights[layer.index()] *= self.growth;
        if self.weights[layer.index()] > RESCALE {
            self.rescale();
        }
    }

    fn requested(&mut self, block: BlockId) {
        self.averages[self.ranks.blocks().index(block)] += self.weights[self.visited.index()];
    }

    fn enter(&mut self, layer: LayerId, block: BlockId) {
        // Floats that are not negative have the order of their bits.
        let key = self.averages[self.ranks.blocks().index(block)].to_bits();
        self.ranks.insert(layer, block, key);
    }

    fn leave(&mut self, layer: LayerId, block: BlockId) {
        self.ranks.remove(layer, block);
    }

    fn weakest(&self, scope: Option<LayerId>) -> Option<(LayerId, BlockId)> {
        self.ranks.weakest(scope)
    }
}
