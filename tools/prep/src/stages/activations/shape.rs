//! Shapes and sizes of the recorded activations, and what recording them costs.

use crate::recipe;
use crate::stage::at_once;
use crate::stages::prompts::Windows;
use ls_bundle::model::ModelConfig;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// What is recorded, of how many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Layers of the model.
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Neurons of an FFN.
    pub neurons: u32,
    /// Tokens, whole windows.
    pub tokens: u64,
    /// Tokens of a window.
    pub window: u32,
    /// Tokens of a chunk, whole windows; the last may have fewer.
    pub chunk_tokens: u32,
    /// Stages that neurons run in.
    pub stages: u32,
    /// Share of the neurons that they run.
    pub staged_share: f64,
    /// Of so many tokens one is staged.
    pub stage_every: u32,
    /// Tokens whose likelihood is measured, whole windows.
    pub check_tokens: u64,
}

impl Params {
    pub(super) fn new(
        config: &ModelConfig,
        windows: &Windows,
        recipe: &recipe::Activations,
    ) -> Params {
        let window = windows.window;
        let tokens = windows.tokens.len() as u64;
        let whole = |tokens: u64| tokens / u64::from(window) * u64::from(window);
        Params {
            layers: config.layers.into(),
            hidden: config.hidden,
            neurons: config.ffn_hidden,
            tokens,
            window,
            chunk_tokens: (recipe.chunk_tokens / window).max(1) * window,
            stages: recipe.stages,
            staged_share: recipe.staged_share,
            stage_every: recipe.stage_every,
            check_tokens: whole(recipe.check_tokens.min(tokens)),
        }
    }

    /// Checks what a file claims.
    pub(super) fn check(&self) -> Result<(), String> {
        let counts = [self.layers, self.hidden, self.neurons, self.window, self.stages];
        let sound = counts.iter().all(|&count| (1..=1 << 24).contains(&count))
            && self.stage_every > 0
            && self.tokens > 0
            && self.chunk_tokens > 0
            && self.chunk_tokens.is_multiple_of(self.window)
            && self.tokens.div_ceil(u64::from(self.chunk_tokens)) < u64::from(u32::MAX);
        if sound { Ok(()) } else { Err(format!("makes no sense: {self:?}")) }
    }

    /// Chunks of a layer.
    #[must_use]
    pub fn chunks(&self) -> u32 {
        u32::try_from(self.tokens.div_ceil(u64::from(self.chunk_tokens))).expect("checked")
    }

    /// Tokens of a chunk.
    #[must_use]
    pub fn tokens_of(&self, chunk: u32) -> u64 {
        let first = u64::from(chunk) * u64::from(self.chunk_tokens);
        self.tokens.saturating_sub(first).min(self.chunk_tokens.into())
    }

    /// Bytes of a record of so many tokens.
    #[must_use]
    pub fn record_bytes(&self, tokens: u64) -> u64 {
        let hidden = 2 * u64::from(self.hidden);
        let staged = tokens / u64::from(self.stage_every) * u64::from(self.stages);
        32 + tokens * (hidden + 4 + u64::from(self.neurons)) + staged * hidden
    }

    /// About what a chunk's values take in memory while it goes through a layer of `config`'s shape.
    #[must_use]
    pub fn chunk_bytes(&self, config: &ModelConfig) -> u64 {
        let (hidden, neurons) = (u64::from(self.hidden), u64::from(self.neurons));
        let (query, kv) = (u64::from(config.query_width()), u64::from(config.kv_width()));
        let tokens = self.tokens_of(0);
        let staged = tokens / u64::from(self.stage_every);
        // x, q, k, v and copies of them; gate, up and activations; stages.
        let values = tokens * (6 * hidden + 2 * query + 4 * kv + 4 * neurons)
            + staged * (2 * neurons + 2 * u64::from(self.stages) * hidden);
        let scores = tokens * u64::from(self.window) * u64::from(config.heads);
        4 * (values + 3 * scores) + self.record_bytes(tokens)
    }

    /// Neurons that run in the first `stage` stages.
    #[must_use]
    pub fn staged_neurons(&self, stage: u32) -> usize {
        let all = f64::from(self.neurons) * self.staged_share;
        (all * f64::from(stage) / f64::from(self.stages)).round() as usize
    }
}

/// What a run takes, told before it starts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Bytes of the artifact.
    pub artifact_bytes: u64,
    /// Bytes of the two scratch files, removed at the end.
    pub scratch_bytes: u64,
    /// Most memory, about: one layer in f32 and the intermediate values of the chunks that are
    /// made side by side.
    pub memory_bytes: u64,
    /// Floating-point operations.
    pub operations: f64,
}

impl Cost {
    pub(super) fn of(params: &Params, config: &ModelConfig, layers: &Range<u32>) -> Cost {
        let (hidden, neurons) = (u64::from(params.hidden), u64::from(params.neurons));
        let (query, kv) = (u64::from(config.query_width()), u64::from(config.kv_width()));
        let attention = hidden * (2 * query + 2 * kv);
        let layer_weights = attention + 3 * hidden * neurons;
        let chunks_at_once =
            (at_once(params.chunk_bytes(config)) as u64).min(params.chunks().into());
        let recorded: u64 =
            (0..params.chunks()).map(|c| params.record_bytes(params.tokens_of(c))).sum();
        let window = u64::from(params.window);
        let tokens = params.tokens as f64;
        let mixing = 4.0 * (window * query) as f64;
        let forward = tokens * (2.0 * layer_weights as f64 + mixing);
        let staging = tokens / f64::from(params.stage_every)
            * (2 * hidden * neurons * u64::from(params.stages)) as f64;
        let recorded_layers = f64::from(layers.end - layers.start);
        let head = params.check_tokens * 2 * hidden * u64::from(config.vocab_size);
        let checks = if layers.end == params.layers { head as f64 } else { 0.0 };
        Cost {
            artifact_bytes: recorded * u64::from(layers.end - layers.start),
            scratch_bytes: 2 * 4 * params.tokens * hidden,
            memory_bytes: 4 * layer_weights
                + chunks_at_once * params.chunk_bytes(config)
                + (96 << 20),
            operations: f64::from(layers.end) * forward + recorded_layers * staging + checks,
        }
    }
}
