//! [`Stats`]: what a run cost, counted where it happens.

use std::time::Duration;

/// Counters since the engine was opened. Reads are counted by the store as they complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tokens that went through prefill.
    pub prefill_tokens: u64,
    /// Time in prefill.
    pub prefill: Duration,
    /// Passes that prefill took.
    pub prefill_passes: u64,
    /// Tokens decoded.
    pub decode_tokens: u64,
    /// Time in decode, sampling not included.
    pub decode: Duration,
    /// Computation waited this long for reads; part of the times above.
    pub stalled: Duration,
    /// Bytes read when prefill ended.
    pub bytes_after_prefill: u64,
    /// Bytes read by loading what stays resident.
    pub loaded_bytes: u64,
    /// Time of loading.
    pub load: Duration,
}

/// What sparse decode did in one layer. Hits and misses are counted by the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerStats {
    /// Bytes read because they were wanted, what lies between blocks that are read together included.
    pub wanted_bytes: u64,
    /// Reads of these.
    pub wanted_reads: u64,
    /// Bytes read ahead.
    pub expected_bytes: u64,
    /// Computation waited this long for reads.
    pub stalled: Duration,
    /// Time in predictions for this layer.
    pub predicting: Duration,
    /// Predictions made for it.
    pub predictions: u64,
    /// Choices held against a recording of a dense run.
    pub audit: Audit,
}

/// How many of the blocks that a dense run of the same tokens wanted most were chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Audit {
    /// Blocks that it wanted.
    pub wanted: u64,
    /// Those of them that were chosen.
    pub found: u64,
    /// How much the blocks matter that it wanted.
    pub importance: f64,
    /// How much those of them matter that were chosen.
    pub found_importance: f64,
}

impl Audit {
    /// Share of the wanted blocks that were chosen; None if nothing was held against anything.
    #[must_use]
    pub fn recall(&self) -> Option<f64> {
        (self.wanted > 0).then(|| self.found as f64 / self.wanted as f64)
    }

    /// Share of what they matter.
    #[must_use]
    pub fn captured(&self) -> Option<f64> {
        (self.importance > 0.0).then(|| self.found_importance / self.importance)
    }
}

impl std::ops::AddAssign for Audit {
    fn add_assign(&mut self, other: Audit) {
        self.wanted += other.wanted;
        self.found += other.found;
        self.importance += other.importance;
        self.found_importance += other.found_importance;
    }
}
