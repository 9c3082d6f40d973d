//! What the flags are made of, in one place: models of them (`tests/loom.rs`) put others here, some of them wrong.

use std::sync::atomic::Ordering;
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, fence};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Of the store that publishes. Pairs with [`OBSERVE`]: who observes an epoch sees all that was written before it was
/// published.
pub(super) const PUBLISH: Ordering = Ordering::Release;
/// Of the load that observes; see [`PUBLISH`].
pub(super) const OBSERVE: Ordering = Ordering::Acquire;

/// Looks before a waiter sleeps; one takes about 20 to 50 ns, all of them less than a read from a fast disk.
pub(super) const SPINS: u32 = 1500;
/// The same where threads outnumber cores: whoever spins keeps another from working.
pub(super) const SPINS_CROWDED: u32 = 20;

/// The longest sleep before a look. Nobody wakes a sleeper for a flag that a device has written or a stop that a signal
/// handler has raised.
const SLEEP: Duration = Duration::from_millis(1);

/// Passes a moment.
pub(super) fn pause() {
    std::hint::spin_loop();
}

/// Sleeps until woken, for no reason, or for [`SLEEP`].
pub(super) fn sleep<'a>(wake: &Condvar, guard: MutexGuard<'a, ()>) -> MutexGuard<'a, ()> {
    wake.wait_timeout(guard, SLEEP).unwrap_or_else(PoisonError::into_inner).0
}
