//! Training of stacked learnable hashing (paper section 3.3), end to end, by gradients: what comes out are the tables
//! that `ls-hash` runs, and they give the same codes there, bit for bit.
//!
//! [`Features`] are rounded as `ls-hash` rounds them, once, beforehand. A [`Model`] holds real numbers behind the signs
//! and integers that the tables hold; its forward uses the latter, so training sees what will run ([`sign`]), and
//! gradients pass the steps as if they were not there ("straight-through"; [`lookup`] for the arg-max of Eq. 12). An
//! [`Objective`] tells how good outputs are ([`loss`]); [`fit()`] is the loop (Adam, cosine). [`Model::pack_blocks`] ends it.
//!
//! Sums over a batch are spread over threads by output, not by summand: the same seed gives the same tables on any
//! number of threads.

mod adam;
pub mod features;
pub mod fit;
pub mod lookup;
pub mod loss;
pub mod mlp;
pub mod pack;
mod product;
pub mod sign;
pub mod stack;
pub mod tasks;

pub use features::{Features, Statistics};
pub use fit::{Options, fit};
pub use loss::{BlockTargets, ClassTargets, CodeTargets, Loss, Objective, Past};
pub use pack::Memory;
pub use stack::{HeadShape, Model, Shape};
pub use tasks::{IndexStack, classification, regression};

use crate::error::PrepError;

/// Shapes are checked before training, so what candle refuses is not the user's doing.
pub(crate) fn fault(problem: candle_core::Error) -> PrepError {
    PrepError::unsupported(format!("training: {problem}"))
}
