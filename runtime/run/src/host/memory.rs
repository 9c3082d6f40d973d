//! How much memory there is to have, and the default budget.

use super::{Root, cgroup, figure};
use ls_bundle::ids::ByteCount;

/// The default budget leaves this share of what is there, for others and for what no plan sees,
const MARGIN_SHARE: u64 = 16;
/// but at least so much,
const LEAST_MARGIN_BYTES: u64 = 16 << 20;
/// and at most so much.
const MOST_MARGIN_BYTES: u64 = 512 << 20;

/// Memory, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Of the machine.
    pub(crate) total: Option<u64>,
    /// What the machine could give out without swapping. Not what is free: most of what is not free is cache that would
    /// be given up.
    pub(crate) machine: Option<u64>,
    /// The tightest limit of a control group.
    pub(crate) limit: Option<u64>,
    /// What is left of it, or of a wider one that is nearer to its limit.
    pub(crate) left: Option<u64>,
    /// Swap of the machine.
    pub(crate) swap: Option<u64>,
}

/// The budget of who names none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DefaultBudget {
    /// The budget.
    pub(crate) bytes: ByteCount,
    available: ByteCount,
    margin: ByteCount,
    /// Whether a control group and not the machine is what limits.
    by_group: bool,
}

impl Root {
    /// What there is now.
    pub(crate) fn memory(&self) -> Memory {
        let meminfo = self.read("proc/meminfo").unwrap_or_default();
        let bytes = |name| figure(&meminfo, name).and_then(|kib| kib.checked_mul(1024));
        let total = bytes("MemTotal:");
        // A limit above all memory is none.
        let group =
            cgroup::memory(self).filter(|group| total.is_none_or(|total| group.limit < total));
        Memory {
            total,
            machine: bytes("MemAvailable:"),
            limit: group.map(|group| group.limit),
            left: group.map(|group| group.left),
            swap: bytes("SwapTotal:"),
        }
    }
}

impl Memory {
    /// What this process could have now; None where the system does not say.
    pub(crate) fn available(&self) -> Option<u64> {
        match (self.machine, self.left) {
            (Some(machine), Some(left)) => Some(machine.min(left)),
            (one, other) => one.or(other),
        }
    }

    /// The default budget.
    pub(crate) fn default_budget(&self) -> Option<DefaultBudget> {
        let available = self.available()?;
        let margin = (available / MARGIN_SHARE).clamp(LEAST_MARGIN_BYTES, MOST_MARGIN_BYTES);
        Some(DefaultBudget {
            bytes: ByteCount(available.saturating_sub(margin)),
            available: ByteCount(available),
            margin: ByteCount(margin),
            by_group: self.left == Some(available) && self.machine != Some(available),
        })
    }
}

impl std::fmt::Display for DefaultBudget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let DefaultBudget { bytes, available, margin, by_group } = self;
        let of = if *by_group { "by the limit of the control group" } else { "on this machine" };
        write!(f, "memory budget {bytes}: {available} available {of}, less a margin of {margin}")
    }
}
