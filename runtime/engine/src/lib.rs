//! The engine: one walk through a bundle's model, weights resident or streamed, under a memory plan.
//!
//! Read [`engine`] for the walk, [`program`] for what is walked, [`memory`] for what stays in memory, [`stream`] for
//! how the rest comes by in time.
#![forbid(unsafe_code)]

mod checker;
pub mod engine;
mod error;
pub mod memory;
pub mod program;
pub mod sampler;
pub mod sparse;
pub mod stats;
pub mod stream;
pub mod tokenizer;

pub use checker::Verify;
pub use engine::{Engine, EngineOptions};
pub use error::{EngineError, EngineErrorKind};
