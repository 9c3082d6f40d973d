//! The CPU backend: weights in f16, Q8_0 and Q4_0, f32 activations, a KV cache in f16
//! or Q8_0.
//!
//! [`CpuBackend`] owns activations, cache and threads, all made in [`CpuBackend::new`]; calls neither allocate nor
//! lock. Weights are read where they lie, in the bundle's layout.
//!
//! **Canonical order.** Every output is summed in one order that depends neither on the number of threads nor on how
//! weights are cut into parts nor on the other tokens of a pass:
//!
//! - a dot product belongs to one row and one token, in the order of its instruction set's kernel (for quantised rows
//!   all have the same);
//! - decode's FFN adds neuron i to one of 16 accumulators, i / 4 % 16, neurons ascending (single blocks: as they are
//!   given), and then the accumulators;
//! - low-bit tiles are summed as integers, 32 inputs at a time, and these sums by f32, inputs ascending; stand-ins are
//!   added to the constant, and their sum to what runs exactly;
//! - prefill's sums go over k ascending, one fused multiply-add after another, whatever the tile;
//! - attention goes over blocks of keys at fixed multiples of positions, and over blocks ascending;
//! - the log-likelihoods' sums go over 64 rows of the head, and over these ascending.
//!
//! Decode (one token) reads each weight once, several rows at a time, and is bound by memory. With quantised weights it
//! rounds activations to eight bits, a scale for every 32 of them, and multiplies integers; the down columns of the FFN
//! are unpacked. Prefill unpacks 16 rows into a panel and multiplies all tokens with it, activations as they are.

mod attention;
mod backend;
mod base;
mod buffer;
mod decode;
mod error;
mod memory;
mod prefill;
mod score;
mod simd;
mod worker;

pub use backend::{CpuBackend, CpuOptions};
pub use error::CpuError;
pub use ls_compute::KvDType;
pub use memory::kv_bytes;
pub use simd::Kernels;
