//! The arithmetic of a transformer as a trait, its plain definition, and the suite that every backend passes.
//!
//! A backend owns activations and the KV cache, and borrows weights for the length of one call: where weights are
//! (resident, streamed, read in place) is the engine's business. One [`Pass`] carries one token (decode) or many
//! (prefill); the engine calls, in this order,
//!
//! ```text
//! begin, embed (each token)
//! for each layer: attn_input, project (q, k, v in any number of parts), attend, project (o), mlp_input,
//!                 mlp (any number of parts, neurons ascending), mlp_output
//! head_input, head (any number of parts), logits or nll
//! ```
//!
//! In decode it may run some of a layer's neurons only, and stand-ins for the others from a resident low-bit base:
//!
//! ```text
//! mlp_input, estimate, scores; mlp_blocks (any number of times) and stand_in (once) in any order; mlp_output
//! ```
//!
//! **Canonical order.** Results do not depend on how weights are cut into parts nor on the number of threads: each
//! output is accumulated in one fixed order. So a streamed run equals a resident one bit for bit. What `mlp_blocks`
//! adds depends on the order in which it is given neurons, and on nothing else: ascending is the order of `mlp`, the
//! order in which they arrive from a disk saves waiting.
//!
//! The plain f32 definition is [`reference`](mod@reference); the suite is [`conformance`].
#![forbid(unsafe_code)]

mod backend;
mod base;
pub use backend::{
    ComputeBackend, KvDType, MatrixRows, MlpShape, NeuronBlocks, Outputs, Pass, Projection,
    ProjectionPart,
};
pub use base::{BaseNeurons, BaseTables, is_chosen};

pub mod conformance;
mod dequantize;
mod pass;
pub mod reference;
mod rope;
mod shape;

pub use dequantize::{dequantize_row, row_norm};
pub use pass::{Asked, Current, PassLimits};
pub use rope::{rope_frequencies, rope_turn};
pub use shape::Shape;
