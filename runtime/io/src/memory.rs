//! What this process holds and moves, by the kernel's account, and how fast memory is.
//!
//! The figures come from `/proc`; reading them allocates nothing, so they can be taken between tokens.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ls_sync::Slot;

use crate::error::{IoError, Kind};

/// Bytes of this process in memory now, shared ones included (`VmRSS`).
pub fn resident_bytes() -> Result<u64, IoError> {
    proc_figure("/proc/self/status", "VmRSS:")
}

/// The most that [`resident_bytes`] ever was (`VmHWM`).
pub fn peak_resident_bytes() -> Result<u64, IoError> {
    proc_figure("/proc/self/status", "VmHWM:")
}

/// Bytes that this process made storage read; page cache hits do not count.
pub fn io_read_bytes() -> Result<u64, IoError> {
    proc_figure("/proc/self/io", "read_bytes:")
}

/// Bytes that this process made storage write.
pub fn write_bytes() -> Result<u64, IoError> {
    proc_figure("/proc/self/io", "write_bytes:")
}

/// The figure behind `name` at the start of a line of a file in `/proc`, in bytes.
fn proc_figure(path: &'static str, name: &'static str) -> Result<u64, IoError> {
    let failed = |source| IoError::from(Kind::Proc { path, name, source });
    // The files are below 2 KiB, and what we want stands near their beginning.
    let mut text = [0; 4096];
    let mut len = 0;
    let mut file = File::open(path).map_err(failed)?;
    while len < text.len() {
        match file.read(&mut text[len..]) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(failed(e)),
        }
    }
    // Only the process's name can hold anything but ASCII.
    let text = match std::str::from_utf8(&text[..len]) {
        Ok(text) => text,
        Err(e) => {
            let valid = &text[..e.valid_up_to()];
            std::str::from_utf8(valid).expect("this part was found valid")
        }
    };
    figure(text, name).ok_or_else(|| failed(ErrorKind::InvalidData.into()))
}

fn figure(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let mut words = line.split_ascii_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    match words.next() {
        None => Some(number),
        Some("kB") => number.checked_mul(1024),
        Some(_) => None,
    }
}

/// Bytes a second that `threads` threads read together from memory, measured for about `budget_ms` after a first touch.
///
/// They walk through a buffer of `buffer_bytes` (at least 1 MiB) that is released afterwards. It should be several
/// times the last-level cache; where the memory budget allows less, the figure tends towards the cache's bandwidth.
pub fn memory_bandwidth(
    threads: usize,
    buffer_bytes: usize,
    budget_ms: u64,
) -> Result<f64, IoError> {
    let threads = threads.max(1);
    let part_bytes = (buffer_bytes.max(1 << 20) / threads).next_multiple_of(4096);
    let mut rest = Slot::allocate(part_bytes * threads)?;
    let budget = Duration::from_millis(budget_ms);
    let start = Barrier::new(threads);
    let rate = std::thread::scope(|scope| {
        let mut walks = Vec::with_capacity(threads);
        for _ in 0..threads {
            let tail = rest.split_off(part_bytes);
            let part = std::mem::replace(&mut rest, tail);
            walks.push(scope.spawn(|| read_rate(part, &start, budget)));
        }
        walks.into_iter().map(|walk| walk.join().expect("summing does not panic")).sum()
    });
    Ok(rate)
}

/// Bytes a second that `threads` threads read together from `parts`, which hold real data; at least one walk over all
/// of it, for about `budget_ms`. Allocates nothing big: for those who may not have more than what they measure.
#[must_use]
pub fn read_bandwidth(parts: &[&[u8]], threads: usize, budget_ms: u64) -> f64 {
    const PIECE_BYTES: usize = 1 << 20;
    let pieces: Vec<&[u8]> = parts.iter().flat_map(|part| part.chunks(PIECE_BYTES)).collect();
    let total: usize = parts.iter().map(|part| part.len()).sum();
    let budget = Duration::from_millis(budget_ms);
    let (mut walks, begin) = (0, Instant::now());
    while total > 0 && (walks == 0 || begin.elapsed() < budget) {
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..threads.max(1) {
                scope.spawn(|| {
                    while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                        std::hint::black_box(sum(piece));
                    }
                });
            }
        });
        walks += 1;
    }
    (walks * total) as f64 / begin.elapsed().as_secs_f64()
}

/// Bytes a second at which one thread walks through `part` again and again.
fn read_rate(mut part: Slot, start: &Barrier, budget: Duration) -> f64 {
    // Untouched pages would all be the kernel's one page of zeros.
    part.bytes_mut().fill(1);
    start.wait();
    let begin = Instant::now();
    let mut bytes = 0;
    loop {
        for piece in part.bytes().chunks(1 << 20) {
            std::hint::black_box(sum(piece));
            bytes += piece.len();
            let elapsed = begin.elapsed();
            if elapsed >= budget {
                return bytes as f64 / elapsed.as_secs_f64();
            }
        }
    }
}

/// Eight independent chains of additions, so that memory and not the processor is the limit.
fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 8];
    for group in bytes.as_chunks::<64>().0 {
        for (sum, word) in sums.iter_mut().zip(group.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_by_their_whole_name_and_scaled() {
        let text = "VmHWM:\t    1236 kB\nVmRSS:\t     456 kB\nrchar: 7\nread_bytes: 8192\n";
        assert_eq!(figure(text, "VmRSS:"), Some(456 * 1024));
        assert_eq!(figure(text, "read_bytes:"), Some(8192));
        assert_eq!(figure(text, "bytes:"), None);
        assert_eq!(figure("VmRSS: 3 MB", "VmRSS:"), None);
    }

    #[test]
    fn touched_memory_is_counted_as_resident() {
        let before = resident_bytes().unwrap();
        let mut slot = Slot::allocate(32 << 20).unwrap();
        slot.bytes_mut().fill(1);
        let after = resident_bytes().unwrap();
        assert!(after >= before + (24 << 20), "{before} -> {after}");
        assert!(peak_resident_bytes().unwrap() >= after);
    }

    #[test]
    fn every_byte_takes_part_in_the_sum() {
        let mut bytes = vec![0u8; 128];
        for i in 0..bytes.len() {
            bytes[i] = 1;
            assert_ne!(sum(&bytes), 0, "byte {i}");
            bytes[i] = 0;
        }
    }

    #[test]
    fn bandwidth_is_a_positive_number() {
        let rate = memory_bandwidth(2, 4 << 20, 5).unwrap();
        assert!(rate.is_finite() && rate > 0.0, "{rate}");
    }
}
