//! [`EvictionPolicy`]: which unpinned block is worth least.

mod belady;
mod ema;
mod hazard;
mod hot_pinned;
mod lfu;
mod lru;
mod none;
mod ranks;
mod recency;
mod reuse_distance;

pub use belady::Belady;
pub use ema::Ema;
pub use hazard::{Hazard, HazardTable, MEAN_STEPS, Pasts};
pub use hot_pinned::HotPinned;
pub use lfu::Lfu;
pub use lru::Lru;
pub use none::Nothing;
pub use reuse_distance::{DISTANCE_UNITS, GapTable, ReuseDistance};

use ls_bundle::ids::{BlockId, LayerId};
use std::fmt::Debug;

/// Ranks blocks. It sees neither memory nor a clock: time is the number of a layer's visits, one a token, so ages of
/// different layers' blocks can be compared whatever layer is visited now.
///
/// The cache promises: [`visit`](Self::visit) comes before the requests of a visit, which are of that layer's blocks,
/// each at most once. A block is a *candidate* from [`enter`](Self::enter) to [`leave`](Self::leave); it is not while
/// it is pinned, so a block that is requested has left before it enters again. [`admit`](Self::admit) is asked before
/// each `enter`.
///
/// The policy promises: [`weakest`](Self::weakest) is a candidate of the scope, and `None` only if there is none; equal
/// histories give equal answers; nothing allocates after construction.
pub trait EvictionPolicy: Send + Debug {
    /// A visit of `layer` begins.
    fn visit(&mut self, layer: LayerId);
    /// A block of the visited layer was requested, whether it was there or not.
    fn requested(&mut self, block: BlockId);
    /// Whether an unpinned block may stay at all.
    fn admit(&mut self, block: BlockId) -> bool {
        let _ = block;
        true
    }
    /// A block of `layer` may go from now on.
    fn enter(&mut self, layer: LayerId, block: BlockId);
    /// It may not any more, or is gone.
    fn leave(&mut self, layer: LayerId, block: BlockId);
    /// The candidate worth least: of one layer, or of all.
    fn weakest(&self, scope: Option<LayerId>) -> Option<(LayerId, BlockId)>;
}
