//! [`Predictor`]: which blocks a layer will want, asked before its input is known.
//!
//! The feature is a residual: before the layer's own (stale), after some stages of the FFN before (Eq. 2), or, in the
//! first layer, the layer's own. Answers are one key a block, larger for more wanted. A predictor may learn from what
//! was wanted in the end. Nothing allocates after construction.

use crate::recording::Recording;
use ls_bundle::ids::LayerId;
use ls_hash::{HashStack, Kernels, Mlp, MlpScratch, Scratch, Signals};
use std::sync::Arc;

/// See the module's documentation.
pub(crate) trait Predictor: Send {
    /// A key for each of the target's blocks.
    fn predict(&mut self, target: LayerId, feature: &[f32], keys: &mut [i32]);

    /// These blocks of a layer were wanted by the token.
    fn wanted(&mut self, layer: LayerId, blocks: &[u32]) {
        let _ = (layer, blocks);
    }

    /// Another token begins.
    fn token(&mut self) {}
}

/// The stacks of all layers, and what each remembers.
pub(crate) struct HashPredictor {
    layers: Vec<(HashStack, Signals)>,
    scratch: Scratch,
    kernels: Kernels,
}

impl HashPredictor {
    /// Of stacks whose heads score blocks.
    pub(crate) fn new(stacks: Vec<HashStack>, kernels: Kernels) -> HashPredictor {
        let mut scratch = Scratch::default();
        stacks.iter().for_each(|stack| scratch.grow_for(stack));
        let with_signals = |stack: HashStack| {
            let signals = Signals::new(stack.block_head().expect("a head that scores blocks"));
            (stack, signals)
        };
        HashPredictor { layers: stacks.into_iter().map(with_signals).collect(), scratch, kernels }
    }
}

impl Predictor for HashPredictor {
    fn predict(&mut self, target: LayerId, feature: &[f32], keys: &mut [i32]) {
        let (stack, signals) = &self.layers[target.index()];
        stack.scores(feature, Some(signals.offsets()), &mut self.scratch, keys);
    }

    fn wanted(&mut self, layer: LayerId, blocks: &[u32]) {
        let (stack, signals) = &mut self.layers[layer.index()];
        let head = stack.block_head().expect("a head that scores blocks");
        signals.update(self.kernels, head, blocks);
    }
}

/// Two-layer networks of all layers.
pub(crate) struct MlpPredictor {
    layers: Vec<Mlp>,
    scratch: MlpScratch,
    scores: Vec<f32>,
}

impl MlpPredictor {
    pub(crate) fn new(layers: Vec<Mlp>) -> MlpPredictor {
        let mut scratch = MlpScratch::default();
        layers.iter().for_each(|mlp| scratch.grow_for(mlp));
        let blocks = layers.iter().map(Mlp::blocks).max().unwrap_or(0);
        MlpPredictor { layers, scratch, scores: vec![0.0; blocks] }
    }
}

impl Predictor for MlpPredictor {
    fn predict(&mut self, target: LayerId, feature: &[f32], keys: &mut [i32]) {
        let scores = &mut self.scores[..keys.len()];
        self.layers[target.index()].scores(feature, &mut self.scratch, scores);
        for (key, score) in keys.iter_mut().zip(scores) {
            *key = float_key(*score);
        }
    }
}

/// An integer for a float, of the same order; NaN is below all.
pub(crate) fn float_key(value: f32) -> i32 {
    let bits = value.to_bits() as i32;
    // The bits of negative floats ascend downwards.
    if value.is_nan() { i32::MIN } else { bits ^ ((bits >> 31) as u32 >> 1) as i32 }
}

/// Knows what each token will want.
pub(crate) struct RecordedPredictor {
    recording: Arc<Recording>,
    /// Tokens begun.
    tokens: usize,
}

impl RecordedPredictor {
    pub(crate) fn new(recording: Arc<Recording>) -> RecordedPredictor {
        RecordedPredictor { recording, tokens: 0 }
    }
}

impl Predictor for RecordedPredictor {
    fn predict(&mut self, target: LayerId, _feature: &[f32], keys: &mut [i32]) {
        keys.fill(0);
        let wanted = self.recording.wanted(self.tokens.saturating_sub(1), target);
        for (rank, &block) in (1..).zip(wanted.iter().rev()) {
            keys[block as usize] = rank;
        }
    }

    fn token(&mut self) {
        self.tokens += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::float_key;

    #[test]
    fn keys_are_in_the_order_of_the_floats() {
        let ascending = [f32::NEG_INFINITY, -2.5, -1e-30, -0.0, 0.0, 1e-30, 1.0, f32::INFINITY];
        assert!(ascending.map(float_key).is_sorted());
        assert_eq!(float_key(f32::NAN), i32::MIN);
    }
}
