//! The stages, each a file: what it makes, of what, and how others read it.

pub mod activations;
pub mod base;
pub(crate) mod coactivity;
pub mod comparison;
pub mod embedding;
pub mod guard;
pub mod mlp;
pub mod placement;
pub mod predictor;
pub mod projection;
pub mod prompts;
pub mod reuse;
pub mod source;
pub mod sparsity;
