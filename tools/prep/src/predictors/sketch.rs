//! A low-bit copy of gate and up as a predictor: it is asked with a residual, which it normalises as the FFN would.

use super::Scorer;
use crate::base::LayerBase;
use crate::model::forward::norm_row;
use std::sync::Arc;

/// One layer's sketch; neurons by themselves.
#[derive(Clone, Debug)]
pub struct SketchScorer {
    base: Arc<LayerBase>,
    gain: Arc<[f32]>,
    epsilon: f32,
}

impl SketchScorer {
    /// `gain` and `epsilon` are those of the norm before the layer's FFN.
    #[must_use]
    pub fn new(base: LayerBase, gain: &[f32], epsilon: f32) -> SketchScorer {
        SketchScorer { base: Arc::new(base), gain: gain.into(), epsilon }
    }
}

impl Scorer for SketchScorer {
    fn scores(&mut self, residual: &[f32], scores: &mut [f32]) {
        let mut h = vec![0.0; residual.len()];
        norm_row(residual, &self.gain, self.epsilon, &mut h);
        let [gate, up] = self.base.gate_up(&h);
        self.base.doubt.squared(&gate, &up, scores);
    }
}
