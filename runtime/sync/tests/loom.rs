//! Models of the flags: every interleaving that loom finds, and every value that a weak memory may show. Run by `make loom`.
//!
//! The sources themselves are compiled here, over loom's primitives; and three times more over primitives with one thing
//! left out, which the same models must catch. A model that cannot fail would prove nothing.

#![cfg(loom)]
#![expect(unreachable_pub, reason = "the library's sources are private modules here")]
#![expect(clippy::duplicate_mod, reason = "once for each set of primitives")]

/// The flags over loom, with these orderings.
macro_rules! bank {
    ($name:ident, $publish:ident, $observe:ident, $fence:expr) => {
        #[expect(dead_code, reason = "models need less than the library offers")]
        #[path = "../src"]
        mod $name {
            mod backoff;
            mod flags;
            mod parking;
            mod stop;

            pub use backoff::Backoff;
            pub use flags::{Epoch, FlagKind, StageFlags};
            pub use stop::{Stop, Stopped};

            mod primitive {
                pub use loom::sync::atomic::{AtomicBool, AtomicU32};
                pub use loom::sync::{Condvar, Mutex, MutexGuard};
                pub use std::sync::PoisonError;
                use std::sync::atomic::Ordering;

                pub const PUBLISH: Ordering = Ordering::$publish;
                pub const OBSERVE: Ordering = Ordering::$observe;
                // A spinning model never ends.
                pub const SPINS: u32 = 1;
                pub const SPINS_CROWDED: u32 = 0;

                pub fn pause() {}

                pub fn fence(ordering: Ordering) {
                    if $fence {
                        loom::sync::atomic::fence(ordering);
                    }
                }

                /// Without the timeout: who is not woken sleeps for ever, which loom tells.
                pub fn sleep<'a>(wake: &Condvar, guard: MutexGuard<'a, ()>) -> MutexGuard<'a, ()> {
                    wake.wait(guard).unwrap_or_else(PoisonError::into_inner)
                }
            }
        }
    };
}

bank!(sound, Release, Acquire, true);
bank!(relaxed_publish, Relaxed, Acquire, true);
bank!(relaxed_observe, Release, Relaxed, true);
bank!(no_fence, Release, Acquire, false);

/// Models of one bank.
macro_rules! models {
    ($name:ident, $bank:ident) => {
        mod $name {
            use super::$bank::{Backoff, Epoch, FlagKind, StageFlags, Stop, Stopped};
            use loom::cell::UnsafeCell;
            use std::sync::Arc;

            /// A slot that both sides touch without a lock, as weights are.
            struct Shared {
                flags: StageFlags,
                weight: UnsafeCell<u32>,
                result: UnsafeCell<u32>,
            }

            // SAFETY: the flags say whose turn it is; loom checks every access.
            unsafe impl Sync for Shared {}
            // SAFETY: as above.
            unsafe impl Send for Shared {}

            fn shared() -> Arc<Shared> {
                Arc::new(Shared {
                    flags: StageFlags::new(1, 1, Arc::new(Stop::new())),
                    weight: UnsafeCell::new(0),
                    result: UnsafeCell::new(0),
                })
            }

            /// Runs every interleaving, or those with at most so many changes of a thread that could go on.
            fn model(preemptions: Option<usize>, run: impl Fn() + Sync + Send + 'static) {
                let mut builder = loom::model::Builder::new();
                builder.preemption_bound = preemptions;
                builder.check(run);
            }

            /// A reader fills a slot, who computes reads it and writes a result, and the slot is filled again.
            pub fn a_slot_is_handed_over_and_back(passes: u32) {
                model(Some(4), move || {
                    let ours = shared();
                    let theirs = Arc::clone(&ours);
                    let compute = loom::thread::spawn(move || {
                        let (flags, at) = (&theirs.flags, theirs.flags.at(0, 0));
                        for pass in 1..=passes {
                            let backoff = &mut Backoff::among(1, 1);
                            flags.wait(FlagKind::IoWr, at, Epoch(pass), backoff).unwrap();
                            // SAFETY: the reader waits for `gpu_wr` before it writes again.
                            let weight = theirs.weight.with(|weight| unsafe { *weight });
                            assert_eq!(weight, pass);
                            // SAFETY: only this thread writes it, before it publishes.
                            theirs.result.with_mut(|result| unsafe { *result = 10 * weight });
                            flags.publish(FlagKind::GpuWr, at, Epoch(pass));
                        }
                    });
                    let (flags, at) = (&ours.flags, ours.flags.at(0, 0));
                    for pass in 1..=passes {
                        // SAFETY: the pass before was waited for.
                        ours.weight.with_mut(|weight| unsafe { *weight = pass });
                        flags.publish(FlagKind::IoWr, at, Epoch(pass));
                        let backoff = &mut Backoff::among(2, 1);
                        flags.wait(FlagKind::GpuWr, at, Epoch(pass), backoff).unwrap();
                        // SAFETY: it was published.
                        assert_eq!(ours.result.with(|result| unsafe { *result }), 10 * pass);
                    }
                    compute.join().unwrap();
                });
            }

            /// Two wait for one flag, one of them asleep: both see what it hands over.
            pub fn one_flag_wakes_all_who_wait() {
                model(None, || {
                    let ours = shared();
                    let waiters = [0, 1].map(|_| {
                        let theirs = Arc::clone(&ours);
                        loom::thread::spawn(move || {
                            let (flags, at) = (&theirs.flags, theirs.flags.at(0, 0));
                            let backoff = &mut Backoff::among(2, 1);
                            flags.wait(FlagKind::GpuRd, at, Epoch(1), backoff).unwrap();
                            // SAFETY: it was published, and nobody writes it again.
                            assert_eq!(theirs.weight.with(|weight| unsafe { *weight }), 7);
                        })
                    });
                    // SAFETY: nobody looks before it is published.
                    ours.weight.with_mut(|weight| unsafe { *weight = 7 });
                    ours.flags.publish(FlagKind::GpuRd, ours.flags.at(0, 0), Epoch(1));
                    for waiter in waiters {
                        waiter.join().unwrap();
                    }
                });
            }

            /// A stop reaches a wait wherever it is.
            pub fn a_stop_ends_a_wait() {
                model(None, || {
                    let ours = shared();
                    let theirs = Arc::clone(&ours);
                    let waiter = loom::thread::spawn(move || {
                        let (flags, at) = (&theirs.flags, theirs.flags.at(0, 0));
                        flags.wait(FlagKind::IoRd, at, Epoch(1), &mut Backoff::among(1, 1))
                    });
                    ours.flags.stop();
                    assert_eq!(waiter.join().unwrap(), Err(Stopped));
                });
            }
        }
    };
}

models!(of_sound, sound);
models!(of_relaxed_publish, relaxed_publish);
models!(of_relaxed_observe, relaxed_observe);
models!(of_no_fence, no_fence);

#[test]
fn a_slot_is_handed_over_and_back() {
    of_sound::a_slot_is_handed_over_and_back(2);
}

#[test]
fn one_flag_wakes_all_who_wait() {
    of_sound::one_flag_wakes_all_who_wait();
}

#[test]
fn a_stop_ends_a_wait() {
    of_sound::a_stop_ends_a_wait();
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_publish_is_caught() {
    of_relaxed_publish::a_slot_is_handed_over_and_back(1);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_publish_to_many_is_caught() {
    of_relaxed_publish::one_flag_wakes_all_who_wait();
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_observe_is_caught() {
    of_relaxed_observe::a_slot_is_handed_over_and_back(1);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_observe_by_many_is_caught() {
    of_relaxed_observe::one_flag_wakes_all_who_wait();
}

/// A stop hands nothing over, so it needs neither.
#[test]
fn a_stop_needs_no_ordering() {
    of_relaxed_publish::a_stop_ends_a_wait();
    of_relaxed_observe::a_stop_ends_a_wait();
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_lost_wake_up_is_caught() {
    of_no_fence::a_slot_is_handed_over_and_back(1);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_lost_wake_up_of_many_is_caught() {
    of_no_fence::one_flag_wakes_all_who_wait();
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_stop_that_wakes_nobody_is_caught() {
    of_no_fence::a_stop_ends_a_wait();
}
