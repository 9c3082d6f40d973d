//! How many threads compute: as many as there are big cores that this process may use, and time on them.

use super::{Root, cgroup};

/// Processors beyond this number are not looked at.
const MAX_PROCESSORS: usize = 4096;

/// The default number of threads, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Threads {
    /// How many.
    pub(crate) count: usize,
    /// Processors that this process may use.
    pub(crate) allowed: usize,
    /// Those of them that are big.
    pub(crate) big: usize,
    /// Processors' worth of time that the control group has.
    pub(crate) quota: Option<f64>,
}

impl Root {
    /// The default.
    pub(crate) fn threads(&self) -> Threads {
        let allowed = self.allowed();
        let big = self.big(&allowed);
        let quota = cgroup::quota(self);
        // Where a quota is spent all threads stop until the period is over; one thread there must be.
        let by_quota = quota.map_or(usize::MAX, |quota| (quota as usize).max(1));
        Threads { count: big.min(by_quota).max(1), allowed: allowed.len(), big, quota }
    }

    /// Numbers of the processors that are switched on and that the process may use.
    fn allowed(&self) -> Vec<usize> {
        let status = self.read("proc/self/status").unwrap_or_default();
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let affinity = list.and_then(|list| parse_list(list.trim()));
        let online = self.read("sys/devices/system/cpu/online");
        let online = online.and_then(|online| parse_list(online.trim()));
        match (affinity, online) {
            (Some(affinity), Some(online)) => {
                let both: Vec<usize> =
                    affinity.iter().copied().filter(|cpu| online.contains(cpu)).collect();
                if both.is_empty() { affinity } else { both }
            }
            (one, other) => one.or(other).unwrap_or_else(|| vec![0]),
        }
    }

    /// How many of them have at least half of the capacity of the largest. A little core among big ones would have them wait
    /// for it.
    fn big(&self, allowed: &[usize]) -> usize {
        let capacity =
            |cpu: &usize| self.count(format!("sys/devices/system/cpu/cpu{cpu}/cpu_capacity"));
        // Unless all tell there is nothing to compare.
        let Some(capacities) = allowed.iter().map(capacity).collect::<Option<Vec<u64>>>() else {
            return allowed.len();
        };
        let largest = capacities.iter().copied().max().unwrap_or(0);
        capacities.iter().filter(|&&capacity| capacity >= largest.div_ceil(2)).count()
    }
}

/// Numbers as the kernel lists them: `0-3,8`. None if that is no such list.
fn parse_list(list: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MAX_PROCESSORS {
            return None;
        }
        numbers.extend(first..=last);
    }
    numbers.sort_unstable();
    numbers.dedup();
    Some(numbers)
}

impl std::fmt::Display for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Threads { count, allowed, big, quota } = self;
        write!(f, "{count} {}", if *count == 1 { "thread" } else { "threads" })?;
        if big < allowed {
            write!(f, ", {big} of {allowed} cores are big")?;
        }
        match quota {
            Some(quota) => write!(f, ", a quota of {quota:.2} processors"),
            None => Ok(()),
        }
    }
}
