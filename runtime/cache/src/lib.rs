//! Which streamed blocks stay in memory: the bookkeeping of a cache of fixed size, and the policies that choose what goes.
//!
//! A token visits every layer once, and a visit requests a set of that layer's blocks. [`WeightCache`] knows which slot
//! holds which block; an [`EvictionPolicy`] says which unpinned block is worth least. A block that was just used and is
//! worth least goes at once, which is what others call bypassing the cache. An [`AccessTrace`] is the record of such
//! sets; [`replay`] runs one through a cache and counts hits.
//!
//! Nothing here allocates after construction (recording into a trace neither), reads a clock or knows memory or files:
//! time is the number of a layer's visits, so that every run can be repeated.

#![forbid(unsafe_code)]

mod blocks;
mod cache;
mod error;
pub mod policy;
mod replay;
mod trace;
mod wire;

pub use blocks::Blocks;
pub use cache::{Admission, Counts, Loading, Request, Sharing, SlotId, WeightCache};
pub use error::{ReuseError, TraceError};
pub use policy::EvictionPolicy;
pub use replay::replay;
pub use trace::AccessTrace;
pub use wire::ReuseTable;
