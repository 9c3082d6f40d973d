//! Reads from storage, many at a time, straight into memory that the caller planned.
//!
//! A [`BlockStore`] takes reads, each with the [`Slot`](ls_sync::Slot) it fills, and hands slot and result back when the
//! read is done, in any order. There are three: io_uring ([`open`] prefers it), a pool of threads that call `pread`
//! (where io_uring is forbidden), and [`SimStore`], a simulated disk with a seed and faults for tests. All pass one
//! conformance suite and share one description of what happens to a read (`progress.rs`): which errors are tried again,
//! what a short read means, where a file ends.
//!
//! Guarantees:
//! - Memory in flight belongs to the store. Dropping a store waits until the kernel has let go of it.
//! - Reads bypass the page cache (`O_DIRECT`) where the file system can; elsewhere they are buffered and the pages are
//!   dropped behind them, so that the cache does not grow on our behalf.
//! - No allocation between open and drop, except for error texts.
//! - Nothing here writes to storage.
//!
//! Left out: registered buffers, kernel-side polling (it burns a core), writes.
//!
//! [`mod@probe`] measures a disk; [`memory`] says what this process holds and how fast its memory is;
//! [`interrupt`] lets it be interrupted.

mod error;
pub mod interrupt;
pub mod memory;
mod pread;
pub mod probe;
mod progress;
mod random;
mod sim;
mod source;
mod store;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod uring;

pub use error::IoError;
pub use probe::{DiskProfile, probe};
pub use sim::{Event, Faults, SimOptions, SimStore};
pub use store::{
    Alignment, BlockRead, BlockStore, Completion, Counters, MAX_DEPTH, Opened, Prefer,
    StoreOptions, Wait, is_android, open, window,
};
