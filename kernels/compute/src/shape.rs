//! [`Shape`]: what backends index with.

use ls_bundle::model::ModelConfig;

/// A model's sizes as indices.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Width of the residual.
    pub hidden: usize,
    /// Neurons of a layer.
    pub ffn: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// All query heads.
    pub query_width: usize,
    /// All key heads.
    pub kv_width: usize,
    /// Positions that a token sees, itself included.
    pub window: usize,
}

impl Shape {
    /// Of a model.
    #[must_use]
    pub fn of(config: &ModelConfig) -> Shape {
        Shape {
            vocab: config.vocab_size as usize,
            hidden: config.hidden as usize,
            ffn: config.ffn_hidden as usize,
            layers: usize::from(config.layers),
            heads: config.heads as usize,
            kv_heads: config.kv_heads as usize,
            head_dim: config.head_dim as usize,
            query_width: config.query_width() as usize,
            kv_width: config.kv_width() as usize,
            window: config.sliding_window.map_or(usize::MAX, |window| window as usize),
        }
    }

    /// Query heads that share a key head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}
