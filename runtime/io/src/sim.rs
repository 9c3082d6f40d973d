//! [`SimStore`]: a disk that exists in memory, with latency, bandwidth and faults from a seed.
//!
//! Time is virtual and only moves when the store is called, so the same calls with the same seed give the same
//! completions in the same order, however fast the machine is. Faults happen to requests, below the rules of
//! `progress.rs`: an `EIO` once is survived, one forever is not, a short read is continued. A flipped bit is
//! delivered as if all were well: finding it is the caller's task.

use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::error::IoError;
use crate::progress::{Progress, Step};
use crate::random::Random;
use crate::source::Rules;
use crate::store::{Alignment, BlockRead, BlockStore, Completion, Counters, Wait};

/// What goes wrong. Chances are per mille of requests (a read and each of its retries is a request).
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// `EIO` on a request; the next one may succeed.
    pub eio_per_mille: u32,
    /// `EIO` on the first so many requests, whatever they are.
    pub eio_first: u32,
    /// `EIO` on every request that touches one of these ranges of the file.
    pub eio_ranges: Vec<Range<u64>>,
    /// A request ends early, at a multiple of the alignment, as disks do.
    pub short_per_mille: u32,
    /// A random bit of a completed read is flipped.
    pub flip_per_mille: u32,
    /// The lowest bit of these bytes of the file is always read flipped.
    pub flipped_bytes: Vec<u64>,
    /// These bits of the file are always read flipped.
    pub flipped_bits: Vec<u64>,
    /// The file ends here although it was longer when it was opened.
    pub truncated_to: Option<u64>,
    /// What happens to certain requests, of which the first has number 0; one thing to each.
    pub events: Vec<(u64, Event)>,
}

/// Something that goes wrong at one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// It fails with this error number; nothing is read.
    Errno(i32),
    /// It ends after the first aligned unit.
    Short,
    /// This bit of what was read is flipped on its way; the file keeps its own.
    Flip(u64),
    /// From now on this bit of the file is flipped.
    FlipOnDisk(u64),
    /// From now on the file ends here.
    Truncate(u64),
    /// From now on all bytes are others: another file has taken this one's place.
    Replace,
}

/// What is simulated.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// Everything random follows from it.
    pub seed: u64,
    /// Most reads in flight.
    pub depth: u32,
    /// What reads must be aligned to.
    pub alignment: Alignment,
    /// A request takes a random time in this range, in virtual microseconds.
    pub latency_us: Range<u64>,
    /// Requests share this bandwidth; `None`: infinitely fast.
    pub bytes_per_s: Option<u64>,
    /// What goes wrong.
    pub faults: Faults,
}

impl Default for SimOptions {
    fn default() -> SimOptions {
        SimOptions {
            seed: 0,
            depth: 16,
            alignment: Alignment { offset: 4096, memory: 4096 },
            latency_us: 50..500,
            bytes_per_s: None,
            faults: Faults::default(),
        }
    }
}

/// A request that ends at a known time.
#[derive(Debug)]
struct Flight {
    due_us: u64,
    progress: Progress,
}

/// A simulated store over the bytes of a file.
#[derive(Debug)]
pub struct SimStore {
    bytes: Arc<Vec<u8>>,
    rules: Rules,
    options: SimOptions,
    random: Random,
    now_us: u64,
    /// When the shared wire is free again.
    wire_free_us: u64,
    requests: u64,
    /// The file is another one by now.
    replaced: bool,
    flights: Vec<Flight>,
    counters: Counters,
}

impl SimStore {
    /// A disk that holds `bytes`.
    #[must_use]
    pub fn new(bytes: Arc<Vec<u8>>, options: SimOptions) -> SimStore {
        let rules = Rules {
            path: Path::new("simulated").into(),
            len: bytes.len() as u64,
            alignment: options.alignment,
        };
        SimStore {
            bytes,
            rules,
            random: Random::new(options.seed),
            now_us: 0,
            wire_free_us: 0,
            requests: 0,
            replaced: false,
            flights: Vec::with_capacity(options.depth as usize),
            counters: Counters::default(),
            options,
        }
    }

    /// A disk that holds all that `reader` gives.
    pub fn from_reader(reader: &mut dyn Read, options: SimOptions) -> io::Result<SimStore> {
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes)?;
        Ok(SimStore::new(Arc::new(bytes), options))
    }

    /// Virtual time since the store was opened.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        self.now_us
    }

    /// When a request for `len` bytes issued now will end.
    fn due_us(&mut self, len: usize) -> u64 {
        let latency = &self.options.latency_us;
        let latency_us =
            latency.start + self.random.below(latency.end.saturating_sub(latency.start));
        let transfer_us = match self.options.bytes_per_s {
            Some(rate) => len as u64 * 1_000_000 / rate.max(1),
            None => 0,
        };
        self.wire_free_us = self.wire_free_us.max(self.now_us) + transfer_us;
        self.wire_free_us + latency_us
    }

    /// Performs what is still missing of a read, faults included.
    fn request(&mut self, progress: &mut Progress) -> Result<usize, i32> {
        let number = self.requests;
        self.requests += 1;
        let faults = &mut self.options.faults;
        let event = faults.events.iter().find(|(at, _)| *at == number).map(|&(_, event)| event);
        match event {
            Some(Event::Errno(errno)) => return Err(errno),
            Some(Event::FlipOnDisk(bit)) => faults.flipped_bits.push(bit),
            Some(Event::Truncate(len)) => faults.truncated_to = Some(len),
            Some(Event::Replace) => self.replaced = true,
            Some(Event::Short | Event::Flip(_)) | None => {}
        }
        let faults = &self.options.faults;
        let missing = progress.missing();
        let start = missing.offset;
        let end = start + missing.bytes.len() as u64;
        let broken = self.requests <= u64::from(faults.eio_first)
            || faults.eio_ranges.iter().any(|range| range.start < end && start < range.end);
        if broken || self.random.chance(faults.eio_per_mille) {
            return Err(libc::EIO);
        }
        let file_end = faults.truncated_to.unwrap_or(u64::MAX).min(self.bytes.len() as u64);
        let mut count = file_end.saturating_sub(start).min(missing.bytes.len() as u64);
        let units = count / u64::from(self.rules.alignment.offset);
        if units > 1 && event == Some(Event::Short) {
            count = self.rules.alignment.offset.into();
        } else if units > 1 && self.random.chance(faults.short_per_mille) {
            count = (1 + self.random.below(units - 1)) * u64::from(self.rules.alignment.offset);
        }
        let count = count as usize;
        if count > 0 {
            let from = start as usize;
            missing.bytes[..count].copy_from_slice(&self.bytes[from..from + count]);
        }
        if self.replaced {
            missing.bytes[..count].iter_mut().for_each(|byte| *byte = !*byte);
        }
        if let Some(Event::Flip(bit)) = event
            && count > 0
        {
            flip(missing.bytes, bit % (8 * count as u64));
        }
        let on_disk = 8 * start..8 * (start + count as u64);
        let on_disk = faults.flipped_bits.iter().filter(|bit| on_disk.contains(bit));
        on_disk.for_each(|bit| flip(missing.bytes, bit - 8 * start));
        for &byte in
            faults.flipped_bytes.iter().filter(|&&b| (start..start + count as u64).contains(&b))
        {
            missing.bytes[(byte - start) as usize] ^= 1;
        }
        if count > 0 && self.random.chance(faults.flip_per_mille) {
            flip(missing.bytes, self.random.below(8 * count as u64));
        }
        Ok(count)
    }

    /// Ends the request that is due first; `None` if that is behind `until_us`.
    fn end_first(&mut self, until_us: u64) -> Option<Flight> {
        let first = (0..self.flights.len()).min_by_key(|&i| self.flights[i].due_us)?;
        (self.flights[first].due_us <= until_us).then(|| self.flights.swap_remove(first))
    }
}

fn flip(bytes: &mut [u8], bit: u64) {
    bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
}

impl BlockStore for SimStore {
    fn depth(&self) -> u32 {
        self.options.depth
    }

    fn alignment(&self) -> Alignment {
        self.options.alignment
    }

    fn submit(&mut self, read: BlockRead) -> Result<(), BlockRead> {
        if self.in_flight() == self.depth() {
            return Err(read);
        }
        let due_us = self.due_us(read.len);
        let progress = Progress::start(read, &self.rules);
        self.flights.push(Flight { due_us, progress });
        Ok(())
    }

    fn reap(&mut self, wait: Wait, done: &mut dyn FnMut(Completion)) -> Result<(), IoError> {
        // Between two calls some time passes.
        self.now_us += 1 + self.random.below(self.options.latency_us.end.max(1));
        let mut reported = 0;
        loop {
            let must_wait = wait == Wait::One && reported == 0;
            let until_us = if must_wait { u64::MAX } else { self.now_us };
            let Some(Flight { due_us, mut progress }) = self.end_first(until_us) else {
                return Ok(());
            };
            self.now_us = self.now_us.max(due_us);
            let outcome = self.request(&mut progress);
            match progress.absorb(outcome, &self.rules) {
                Step::Again => {
                    let due_us = self.due_us(0);
                    self.flights.push(Flight { due_us, progress });
                }
                Step::Over(result) => {
                    reported += 1;
                    done(progress.finish(result, &mut self.counters));
                }
            }
        }
    }

    fn in_flight(&self) -> u32 {
        self.flights.len() as u32
    }

    fn name(&self) -> &'static str {
        "simulated"
    }

    fn counters(&self) -> Counters {
        self.counters
    }

    fn is_direct(&self) -> bool {
        self.options.alignment.offset > 1
    }
}
