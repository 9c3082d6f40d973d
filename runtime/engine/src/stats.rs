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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerStats {
    /// Bytes read because they were wanted.
    pub wanted_bytes: u64,
    /// Bytes read ahead.
    pub expected_bytes: u64,
    /// Computation waited this long for reads.
    pub stalled: Duration,
    /// Time in predictions for this layer.
    pub predicting: Duration,
    /// Predictions made for it.
    pub predictions: u64,
}
