//! [`MlpScorer`]: the two-layer baselines, asked.

use super::Scorer;
use crate::error::{PrepError, Result};
use ls_hash::{Kernels, Mlp, MlpScratch, MlpTables};
use std::sync::Arc;

/// Reads tables as `ls-hash` writes them.
pub fn read(bytes: &[u8]) -> Result<MlpTables> {
    MlpTables::from_bytes(bytes)
        .map_err(|error| PrepError::corrupt("two-layer predictor", error.to_string()))
}

/// A two-layer predictor that is asked.
#[derive(Clone, Debug)]
pub struct MlpScorer {
    mlp: Arc<Mlp>,
    scratch: MlpScratch,
}

impl MlpScorer {
    /// Of sound tables.
    ///
    /// # Panics
    /// If their sizes contradict each other.
    #[must_use]
    pub fn new(tables: MlpTables) -> MlpScorer {
        let mlp = Mlp::new(tables, Kernels::detect()).expect("trained tables are sound");
        let mut scratch = MlpScratch::default();
        scratch.grow_for(&mlp);
        MlpScorer { mlp: Arc::new(mlp), scratch }
    }
}

impl Scorer for MlpScorer {
    fn scores(&mut self, residual: &[f32], scores: &mut [f32]) {
        self.mlp.scores(residual, &mut self.scratch, scores);
    }
}
