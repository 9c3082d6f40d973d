//! Why a backend could not be made.

use ls_sync::AllocateError;

/// The backend could not be made.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct CpuError(#[from] Kind);

impl CpuError {
    /// Whether the model or the options ask for what this backend does not do; else memory or threads were refused,
    /// or sizes contradict each other.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        matches!(self.0, Kind::KvHeads { .. })
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Kind {
    #[error("memory of the CPU backend: {0}")]
    Allocate(#[from] AllocateError),
    #[error("cannot start a compute thread: {0}")]
    Thread(#[from] std::io::Error),
    #[error("the CPU backend needs at least one {0}")]
    Zero(&'static str),
    #[error("{name} of layer {layer} has {found} elements, {wanted} wanted")]
    Vector { name: &'static str, layer: usize, found: usize, wanted: usize },
    #[error("the model has {wanted} layers, but vectors for {found}")]
    Layers { found: usize, wanted: usize },
    #[error("{heads} query heads of width {head_dim} cannot share {kv_heads} key heads")]
    Heads { heads: u32, kv_heads: u32, head_dim: u32 },
    #[error(
        "unsupported: a KV cache in q8_0 wants heads of a multiple of 32, this model's are {head_dim} wide"
    )]
    KvHeads { head_dim: u32 },
}
