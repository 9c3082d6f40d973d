//! How fast a disk gives back parts of a file, by request size and number of reads in flight.
//!
//! Reads at random offsets, each point for its share of a time budget. It is a quick look: a second is too short to see
//! a disk throttle, and a host's cache behind a virtual disk looks like a fast disk. Direct probes never touch the page
//! cache; buffered ones drop what they read.

use std::path::Path;
use std::time::{Duration, Instant};

use ls_sync::Slot;

use crate::error::{IoError, Kind};
use crate::random::Random;
use crate::store::{BlockRead, BlockStore, Prefer, StoreOptions, Wait, open};

/// Memory that a probe uses while it runs. Points that need more are not measured.
pub const PROBE_MEMORY_BYTES: usize = 16 << 20;

const REQUEST_BYTES: [usize; 6] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
const DEPTHS: [u32; 4] = [1, 4, 8, 16];

/// Any; a fixed one makes two probes comparable.
const PROBE_SEED: u64 = 0x70_72_6f_62_65;

/// One combination of request size and depth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProbePoint {
    /// Bytes of each read.
    pub request_bytes: usize,
    /// Reads in flight.
    pub depth: u32,
    /// What came back.
    pub bytes_per_s: f64,
}

/// What a probe saw.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskProfile {
    /// By request size, then depth, both rising; never empty.
    pub points: Vec<ProbePoint>,
    /// Median time of the smallest request alone, in microseconds.
    pub latency_us: f64,
}

impl DiskProfile {
    /// The smallest request size, and for it the smallest depth, within 95 % of the best throughput.
    #[must_use]
    pub fn knee(&self) -> ProbePoint {
        let best = self.points.iter().map(|p| p.bytes_per_s).fold(0.0, f64::max);
        let enough = |p: &&ProbePoint| p.bytes_per_s >= 0.95 * best;
        *self.points.iter().find(enough).expect("the best point is within 95 % of itself")
    }

    /// Throughput expected of requests of this size at this depth: that of the largest measured point that is not
    /// larger in either, or the smallest point.
    #[must_use]
    pub fn bytes_per_s(&self, request_bytes: usize, depth: u32) -> f64 {
        let fits = |p: &&ProbePoint| p.request_bytes <= request_bytes && p.depth <= depth;
        self.points.iter().rfind(fits).unwrap_or(&self.points[0]).bytes_per_s
    }
}

/// Measures reads of the file at `path` for about `budget_ms`; 500 to 1000 give useful figures.
pub fn probe(path: &Path, direct: bool, budget_ms: u64) -> Result<DiskProfile, IoError> {
    let mut run = Run::open(path, DEPTHS[DEPTHS.len() - 1], direct)?;
    let mut combinations = Vec::new();
    for request_bytes in REQUEST_BYTES {
        let fits = |&&depth: &&u32| request_bytes * depth as usize <= PROBE_MEMORY_BYTES;
        let aligned = request_bytes.is_multiple_of(run.store.alignment().offset as usize);
        if aligned && request_bytes as u64 <= run.file_bytes {
            combinations.extend(DEPTHS.iter().filter(fits).map(|&depth| (request_bytes, depth)));
        }
    }
    if combinations.is_empty() {
        return Err(run.too_small(path));
    }
    let share = Duration::from_millis(budget_ms) / (combinations.len() as u32);
    let mut points = Vec::with_capacity(combinations.len());
    for (request_bytes, depth) in combinations {
        let bytes_per_s = run.measure(request_bytes, depth, share)?;
        points.push(ProbePoint { request_bytes, depth, bytes_per_s });
    }
    run.latencies_us.sort_by(f64::total_cmp);
    let latency_us = run.latencies_us[run.latencies_us.len() / 2];
    Ok(DiskProfile { points, latency_us })
}

/// Bytes a second of direct reads of `request_bytes` with `depth` in flight, measured for about `budget_ms`. Uses
/// `request_bytes * depth` bytes of memory meanwhile. The size is rounded to what the disk and the file allow.
pub fn bandwidth(
    path: &Path,
    request_bytes: usize,
    depth: u32,
    budget_ms: u64,
) -> Result<f64, IoError> {
    let mut run = Run::open(path, depth, true)?;
    let unit = run.store.alignment().offset as usize;
    let most = usize::try_from(run.file_bytes).unwrap_or(usize::MAX) / unit * unit;
    if most == 0 {
        return Err(run.too_small(path));
    }
    let request_bytes = request_bytes.max(1).next_multiple_of(unit).min(most);
    let depth = run.store.depth();
    run.measure(request_bytes, depth, Duration::from_millis(budget_ms))
}

struct Run {
    store: Box<dyn BlockStore>,
    file_bytes: u64,
    random: Random,
    /// Of single reads of the smallest size; at least one.
    latencies_us: Vec<f64>,
}

impl Run {
    fn open(path: &Path, depth: u32, direct: bool) -> Result<Run, IoError> {
        let store = open(path, &StoreOptions { depth, prefer: Prefer::Auto, direct })?.store;
        let data =
            std::fs::metadata(path).map_err(|source| Kind::Open { path: path.into(), source })?;
        Ok(Run {
            store,
            file_bytes: data.len(),
            random: Random::new(PROBE_SEED),
            latencies_us: Vec::new(),
        })
    }

    fn too_small(&self, path: &Path) -> IoError {
        Kind::TooSmallToProbe { path: path.into(), len: self.file_bytes }.into()
    }

    /// Bytes a second of `depth` reads in flight for about `share`.
    fn measure(
        &mut self,
        request_bytes: usize,
        depth: u32,
        share: Duration,
    ) -> Result<f64, IoError> {
        let mut memory = Slot::allocate(request_bytes * depth as usize)?;
        // As weights are read into memory: scattered pages halve what some disks bring.
        memory.prefer_huge_pages();
        let begin = Instant::now();
        for tag in 0..depth {
            let rest = memory.split_off(request_bytes);
            let into = std::mem::replace(&mut memory, rest);
            self.submit(into, request_bytes, tag);
        }
        let lone = depth == 1 && request_bytes == REQUEST_BYTES[0];
        let mut last = begin;
        let mut bytes = 0;
        let mut free = Vec::with_capacity(depth as usize);
        let mut failure = Ok(());
        while self.store.in_flight() > 0 {
            self.store.reap(Wait::One, &mut |completion| match completion.result {
                Ok(()) => free.push(completion.read),
                Err(e) => failure = Err(e),
            })?;
            let now = Instant::now();
            if lone {
                self.latencies_us.push((now - last).as_secs_f64() * 1e6);
                last = now;
            }
            for read in free.drain(..) {
                bytes += read.len;
                if now - begin < share && failure.is_ok() {
                    self.submit(read.into, request_bytes, read.tag);
                }
            }
        }
        failure.map(|()| bytes as f64 / begin.elapsed().as_secs_f64())
    }

    fn submit(&mut self, into: Slot, len: usize, tag: u32) {
        // Lengths are multiples of the disk's unit, and requests start at multiples of their length.
        let offset = self.random.below(self.file_bytes / len as u64) * len as u64;
        let read = BlockRead { offset, len, into, tag };
        self.store.submit(read).expect("depths probed are at most the store's");
    }
}
