//! Memory that computation and I/O share.

mod slot;
pub use slot::{AllocateError, Slot, release_free_memory};
