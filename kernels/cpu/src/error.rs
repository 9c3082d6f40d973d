//! Why a backend could not be made.

use ls_sync::AllocateError;

/// The backend could not be made.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct CpuError(#[from] Kind);

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
}
