//! [`Parking`]: where waiters sleep, so that waking nobody costs a fence and a load.

use super::primitive::{AtomicU32, Condvar, Mutex, PoisonError, fence, sleep};
use std::sync::atomic::Ordering;

/// A place to sleep until something is published.
#[derive(Debug)]
pub(super) struct Parking {
    sleepers: AtomicU32,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Parking {
    pub(super) fn new() -> Parking {
        Parking { sleepers: AtomicU32::new(0), lock: Mutex::new(()), wake: Condvar::new() }
    }

    /// Wakes all who sleep; what they wait for was published before.
    pub(super) fn wake_all(&self) {
        // Pairs with the fence in `sleep_until`. One of the two comes first: if this one, the sleeper sees what was
        // published; if that one, the sleeper is counted here.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            // A sleeper that was counted before it looked holds the lock until it sleeps: so it will hear this.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }

    /// Sleeps until `ready`.
    pub(super) fn sleep_until(&self, mut ready: impl FnMut() -> bool) {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // Relaxed: the fence orders it before the look.
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while !ready() {
            guard = sleep(&self.wake, guard);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}
