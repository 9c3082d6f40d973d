//! Flags with real threads. What orderings they need is asked in `loom.rs`.

use ls_sync::{Backoff, Epoch, FlagKind, StageFlags, Stop, Stopped};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const ALL: [FlagKind; 4] = [FlagKind::GpuRd, FlagKind::GpuWr, FlagKind::IoRd, FlagKind::IoWr];

fn flags(rows: u16, groups: u16) -> StageFlags {
    StageFlags::new(rows, groups, Arc::new(Stop::new()))
}

#[test]
fn every_flag_is_its_own() {
    let flags = flags(3, 5);
    let places = || (0..3).flat_map(|row| (0..5).map(move |group| (row, group)));
    let number = |kind: FlagKind, row: u16, group: u16| {
        1 + u32::from(row) + 10 * u32::from(group) + 100 * kind as u32
    };
    for (row, group) in places() {
        for kind in ALL {
            assert_eq!(flags.observe(kind, flags.at(row, group)), Epoch(0));
            flags.publish(kind, flags.at(row, group), Epoch(number(kind, row, group)));
        }
    }
    for (row, group) in places() {
        for kind in ALL {
            let found = flags.observe(kind, flags.at(row, group));
            assert_eq!(found, Epoch(number(kind, row, group)), "{kind:?} {row}.{group}");
        }
    }
    assert_eq!(StageFlags::heap_bytes(3, 5), 3 * 5 * 4 * 128);
}

#[test]
#[should_panic(expected = "goes back from 2 to 1")]
fn epochs_only_grow() {
    let flags = flags(1, 1);
    flags.publish(FlagKind::IoWr, flags.at(0, 0), Epoch(2));
    flags.publish(FlagKind::IoWr, flags.at(0, 0), Epoch(1));
}

#[test]
#[should_panic(expected = "flag 0.2 of 2 rows of 2")]
fn a_group_of_the_next_row_is_none_of_this() {
    let _ = flags(2, 2).at(0, 2);
}

/// The whole protocol: control asks for groups, a reader brings them, two threads compute one each, control goes on when
/// both have, and the memory is used again for the next pass. Spinning (more cores than threads) and sleeping.
#[test]
fn the_protocol_keeps_passes_apart() {
    const PASSES: u32 = 300;
    for cores in [1, 64] {
        let flags = flags(1, 2);
        let (weights, results) = ([AtomicU64::new(0), AtomicU64::new(0)], AtomicU64::new(0));
        let at = |group: usize| flags.at(0, group as u16);
        let backoff = || Backoff::among(4, cores);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for pass in (1..=PASSES).map(Epoch) {
                    for (group, weight) in weights.iter().enumerate() {
                        flags.wait(FlagKind::IoRd, at(group), pass, &mut backoff()).unwrap();
                        weight.store(u64::from(pass.0) * (1 + group as u64), Ordering::Relaxed);
                        flags.publish(FlagKind::IoWr, at(group), pass);
                    }
                }
            });
            for (group, weight) in weights.iter().enumerate() {
                let (results, flags, backoff) = (&results, &flags, &backoff);
                scope.spawn(move || {
                    for pass in (1..=PASSES).map(Epoch) {
                        flags.wait(FlagKind::GpuRd, at(group), pass, &mut backoff()).unwrap();
                        results.fetch_add(weight.load(Ordering::Relaxed), Ordering::Relaxed);
                        flags.publish(FlagKind::GpuWr, at(group), pass);
                    }
                });
            }
            for pass in (1..=PASSES).map(Epoch) {
                for group in [1, 0] {
                    flags.publish(FlagKind::IoRd, at(group), pass);
                }
                for group in [0, 1] {
                    flags.wait(FlagKind::IoWr, at(group), pass, &mut backoff()).unwrap();
                    flags.publish(FlagKind::GpuRd, at(group), pass);
                }
                let both = |flags: &StageFlags| {
                    (0..2).all(|group| flags.observe(FlagKind::GpuWr, at(group)) >= pass)
                };
                flags.wait_until(&mut backoff(), both).unwrap();
                assert_eq!(results.swap(0, Ordering::Relaxed), 3 * u64::from(pass.0));
            }
        });
    }
}

#[test]
fn a_stop_ends_waits_and_what_is_there_counts_first() {
    let stop = Arc::new(Stop::new());
    let flags = StageFlags::new(1, 1, Arc::clone(&stop));
    let (at, mut backoff) = (flags.at(0, 0), Backoff::among(2, 1));
    std::thread::scope(|scope| {
        let waiter =
            scope.spawn(|| flags.wait(FlagKind::GpuRd, at, Epoch(1), &mut Backoff::among(2, 1)));
        // As a signal handler would: nobody is woken.
        stop.raise();
        assert_eq!(waiter.join().unwrap(), Err(Stopped));
    });
    flags.publish(FlagKind::IoWr, at, Epoch(1));
    assert_eq!(flags.wait(FlagKind::IoWr, at, Epoch(1), &mut backoff), Ok(()));
    assert_eq!(flags.wait(FlagKind::IoWr, at, Epoch(2), &mut backoff), Err(Stopped));
}

/// A wait that outlives its spins takes no processor time: the thread's own clock says so.
#[test]
fn a_long_wait_sleeps() {
    let flags = flags(1, 1);
    let at = flags.at(0, 0);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let before = thread_time();
            flags.wait(FlagKind::IoWr, at, Epoch(1), &mut Backoff::new(2)).unwrap();
            thread_time() - before
        });
        let wait = std::time::Duration::from_millis(200);
        std::thread::sleep(wait);
        flags.publish(FlagKind::IoWr, at, Epoch(1));
        let burnt = waiter.join().unwrap();
        assert!(burnt < wait / 4, "{burnt:?} of processor time in a wait of {wait:?}");
    });
}

fn thread_time() -> std::time::Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    std::time::Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
