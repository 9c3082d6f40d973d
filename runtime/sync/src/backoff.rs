//! [`Backoff`]: how a wait spends its time.

use super::primitive::{SPINS, SPINS_CROWDED, pause};

/// Looks again a bounded number of times, then sleeps: what comes soon is seen within nanoseconds, and a wait for a slow
/// disk burns no core. Where threads outnumber cores it hardly spins at all, as it would do so instead of whom it waits
/// for.
#[derive(Clone, Debug)]
pub struct Backoff {
    spins: u32,
    left: u32,
}

impl Backoff {
    /// For one of `threads` threads that may all want to run. Asks the system for the number of cores.
    #[must_use]
    pub fn new(threads: usize) -> Backoff {
        Backoff::among(threads, std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// For one of `threads` threads on `cores` cores.
    #[must_use]
    pub fn among(threads: usize, cores: usize) -> Backoff {
        let spins = if threads > cores { SPINS_CROWDED } else { SPINS };
        Backoff { spins, left: spins }
    }

    /// Begins a wait.
    pub(super) fn reset(&mut self) {
        self.left = self.spins;
    }

    /// Passes a moment and says yes, or says that it is time to sleep.
    pub(super) fn spin(&mut self) -> bool {
        let again = self.left > 0;
        if again {
            self.left -= 1;
            pause();
        }
        again
    }
}
