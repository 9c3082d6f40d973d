//! Stacked learnable hashing, inference only: from a feature to a code of bits, and from the code to a class, a number
//! or one score a block.
//!
//! A [`StackTables`] is what training produces and what a file holds; a [`HashStack`] is such tables checked, with the
//! instruction set chosen. A prediction allocates nothing: what it needs is in a [`Scratch`], made beforehand and shared
//! by all layers' stacks. The order of work: [`HashStack::project`] (the feature on hyperplanes, Eq. 11),
//! [`HashStack::encode`] (tables and binary hashes, Eq. 10), then a head.
//!
//! Every path but the one with f32 hyperplanes is integers from the rounded feature on, and gives the same bits on every
//! instruction set; `simd/scalar.rs` is the definition. Training, which needs derivatives, is elsewhere; so is what is
//! done with the scores, but for [`Selection`], which puts the best blocks in order. [`Mlp`] is what others predict with.

pub mod bits;
mod error;
mod head;
mod input;
mod layer;
mod mlp;
mod quantiles;
mod select;
mod signals;
mod simd;
mod stack;
mod wire;

pub use error::{ErrorClass, HashError};
pub use head::{BlockCode, BlockHead, Head, MAX_LEVEL};
pub use input::{Input, Scaling};
pub use layer::{BinaryHash, F32_SIGN_MARGIN, PlaneBits, PlaneWeights, Planes, Table};
pub use mlp::{Mlp, MlpScratch, MlpTables, MlpWeights};
pub use quantiles::Quantiles;
pub use select::Selection;
pub use signals::{SignalTables, Signals};
pub use simd::Kernels;
pub use stack::{HashStack, Scratch, StackTables};

/// What sizes may be. They bound memory before a file's numbers are believed, and sums within 32 bits.
pub mod limits {
    /// Numbers of a feature: 127 * 127 * this, a plane's largest sum, leaves room for a bias within an i32.
    pub const MAX_DIMS: usize = 1 << 16;
    /// Bits of a code, and of all stacks' hashes.
    pub const MAX_CODE_BITS: usize = 4096;
    /// Bits of one stack's index.
    pub const MAX_TAU: usize = 12;
    /// Layers of a stack.
    pub const MAX_LAYERS: usize = 8;
    /// Blocks of a head.
    pub const MAX_BLOCKS: usize = 1 << 20;
    /// Size of a plane's bias.
    pub const MAX_BIAS: i32 = 1 << 30;
    /// Left shift of a block's bias.
    pub const MAX_SHIFT: u32 = 8;
}
