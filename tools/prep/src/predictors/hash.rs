//! The packed stack as `ls-run` runs it.

use super::Scorer;
use crate::error::{PrepError, Result};
use ls_hash::{HashStack, Kernels, Scratch, Signals, StackTables};
use std::sync::Arc;

/// A packed stack that scores blocks, with its signals.
#[derive(Clone, Debug)]
pub struct PackedScorer {
    stack: Arc<HashStack>,
    kernels: Kernels,
    scratch: Scratch,
    signals: Signals,
    scores: Vec<i32>,
}

impl PackedScorer {
    /// Checks tables.
    ///
    /// # Errors
    /// If they contradict themselves or score no blocks.
    pub fn new(tables: StackTables) -> Result<PackedScorer> {
        let kernels = Kernels::detect();
        let stack = HashStack::new(tables, kernels).map_err(PrepError::unsupported)?;
        let Some(head) = stack.block_head() else {
            return Err(PrepError::unsupported("a stack that scores no blocks"));
        };
        let (signals, scores) = (Signals::new(head), vec![0; head.blocks()]);
        let mut scratch = Scratch::default();
        scratch.grow_for(&stack);
        Ok(PackedScorer { stack: Arc::new(stack), kernels, scratch, signals, scores })
    }
}

impl PackedScorer {
    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.scores.len()
    }
}

impl Scorer for PackedScorer {
    fn restart(&mut self) {
        self.signals = Signals::new(self.stack.block_head().expect("checked"));
    }

    fn scores(&mut self, residual: &[f32], scores: &mut [f32]) {
        let offsets = Some(self.signals.offsets());
        self.stack.scores(residual, offsets, &mut self.scratch, &mut self.scores);
        scores.iter_mut().zip(&self.scores).for_each(|(score, &found)| *score = found as f32);
    }

    fn remember(&mut self, active: &[u32]) {
        self.signals.update(self.kernels, self.stack.block_head().expect("checked"), active);
    }
}
