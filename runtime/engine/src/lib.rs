//! The engine: one walk through a bundle's model, weights resident or streamed, under a memory plan.
//!
//! Read [`engine`] for the walk, [`program`] for what is walked, [`memory`] for what stays in memory, [`stream`] for
//! how the rest comes by in time; [`sparse`] for what runs of an FFN if not all of it, [`system`] for who decides.
#![forbid(unsafe_code)]

mod bits;
mod checker;
mod demand;
pub mod engine;
mod error;
mod flow;
pub mod memory;
mod predictor;
pub mod program;
mod recording;
pub mod sampler;
pub mod sparse;
pub mod stats;
pub mod stream;
pub mod system;
pub mod timeline;
pub mod tokenizer;

pub use checker::Verify;
pub use engine::{Engine, EngineOptions, SparseOptions};
pub use error::{EngineError, EngineErrorKind};
pub use recording::Recording;
