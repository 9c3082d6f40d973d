//! Prepares models for LeanStream on a workstation: reads the formats in which models are published and writes
//! bundles that `ls-run` streams on a device.
//!
//! Guarantees: inputs are not trusted, and every fault in them is an error that names its place ([`error`]); same
//! inputs and same options give the same bytes; memory stays far below the model's size (see [`model::weights`]).

#![forbid(unsafe_code)]

pub mod artifact;
pub mod base;
pub mod chain;
pub mod datasets;
pub mod descent;
pub mod device;
pub mod encode;
pub mod error;
pub mod exit;
pub mod gptq;
pub mod import;
pub mod journal;
pub mod key;
pub mod lloyd;
pub mod matmul;
pub mod metrics;
pub mod model;
pub mod pack;
pub mod predictors;
pub mod progress;
pub mod recipe;
pub mod report;
pub mod room;
pub mod rounding;
pub mod sparse;
pub mod stage;
pub mod stages;
pub mod synth;
pub mod timing;
pub mod train;
