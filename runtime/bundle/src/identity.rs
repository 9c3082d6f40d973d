//! Where a bundle comes from.

use serde::{Deserialize, Serialize};

/// Where a bundle comes from: all that decided its bytes, and nothing that changes between two runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Name and version of the program that wrote it.
    pub tool: String,
    /// Name of what it was made from.
    pub source: String,
    /// BLAKE3 of what it was made from: 64 lowercase hexadecimal digits.
    pub source_hash: String,
    /// Seed of everything random.
    pub seed: u64,
    /// The recipe's text.
    pub recipe: String,
}
