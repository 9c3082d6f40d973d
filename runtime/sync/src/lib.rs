//! What threads that compute, threads that read and devices touch at once: memory and the flags that hand it over.
//!
//! [`Slot`] is memory with one owner. [`StageFlags`] are the paper's four flags (3.2.1): who reads says what has arrived,
//! who computes says how far it is, and nobody waits for more than it needs. [`Backoff`] decides how a wait spends its
//! time, and [`Stop`] ends every wait.

mod backoff;
mod flags;
mod parking;
mod primitive;
mod slot;
mod stop;

pub use backoff::Backoff;
pub use flags::{Epoch, FlagIndex, FlagKind, StageFlags};
pub use slot::{AllocateError, Slot, page_bytes, release_free_memory};
pub use stop::{Stop, Stopped};
