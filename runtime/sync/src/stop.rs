//! [`Stop`]: the way out of every wait.

use super::primitive::AtomicBool;
use std::sync::atomic::Ordering;

/// Once raised, every wait ends. May be raised in a signal handler: it is one store.
#[derive(Debug)]
pub struct Stop(AtomicBool);

/// A wait ended because of a [`Stop`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped;

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("stopped while waiting")
    }
}

impl std::error::Error for Stopped {}

impl Stop {
    /// One that is not raised.
    #[must_use]
    pub fn new() -> Stop {
        Stop(AtomicBool::new(false))
    }

    /// Ends all waits, within a millisecond; [`StageFlags::stop`](crate::StageFlags::stop) ends them at once.
    pub fn raise(&self) {
        // No pair: nothing is handed over with it.
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was raised.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Default for Stop {
    fn default() -> Stop {
        Stop::new()
    }
}
