//! [`Progress`]: how long work tells how far it is, without knowing who listens.

/// A part of the work that takes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Reading the source once for its hash; counted in bytes.
    Hash,
    /// Reading weights and writing blocks; counted in bytes.
    Pack,
    /// The dense forward; counted in tokens, each once a layer.
    Forward,
    /// Fitting neurons' vectors; counted in layers.
    Embedding,
    /// Measuring orders of neurons; counted in layers.
    Placement,
    /// Training predictors; counted in layers.
    Predictor,
    /// Training baseline predictors; counted in layers.
    Mlp,
    /// Rounding a resident copy of the FFNs; counted in layers.
    Base,
    /// Measuring predictors beside each other; counted in layers.
    Comparison,
    /// Measuring perplexity; counted in tokens, each once a layer.
    Evaluation,
    /// Decomposing features; counted in layers.
    Projection,
    /// Making a model up; counted in bytes.
    Synth,
    /// Rounding weights by calibration text; counted in layers.
    Rounding,
    /// Replaying requests and learning from them; counted in layers.
    Reuse,
}

/// Told how the work goes on.
pub trait Progress {
    /// A phase of `total` bytes or steps begins; the one before has ended.
    fn begin(&mut self, phase: Phase, total: u64);
    /// That many more are done.
    fn advance(&mut self, count: u64);
}

/// Tells nobody.
impl Progress for () {
    fn begin(&mut self, _: Phase, _: u64) {}
    fn advance(&mut self, _: u64) {}
}
