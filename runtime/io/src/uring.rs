//! [`UringStore`]: reads through a ring shared with the kernel.
//!
//! One entry a read, handed to the kernel at once so that the disk works while the caller computes. At most `depth`
//! reads are in flight, the submission queue has at least as many entries and the completion queue twice as many, so
//! neither can overflow. No kernel thread polls for us.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, opcode, types};
use ls_sync::Slot;

use crate::error::{IoError, Kind};
use crate::progress::{Progress, Step};
use crate::source::Source;
use crate::store::{Alignment, BlockRead, BlockStore, Completion, Counters, Wait};

/// How often, and how long apart, the kernel may say that it has no memory for a request (`EAGAIN`, `EBUSY`) while we
/// wait: ten seconds.
const ENTER_ATTEMPTS: u32 = 10_000;
const ENTER_PAUSE: Duration = Duration::from_millis(1);

/// See the module's text.
pub(crate) struct UringStore {
    ring: IoUring,
    source: Arc<Source>,
    /// Reads in flight; the index travels through the kernel. Some read until its completion was taken.
    flight: Vec<Option<Progress>>,
    /// Free indices of `flight`.
    free: Vec<u32>,
    counters: Counters,
}

impl UringStore {
    /// Sets up a ring and reads a block through it.
    pub(crate) fn new(source: &Arc<Source>, depth: u32) -> io::Result<UringStore> {
        let mut store = UringStore::unproven(source, depth)?;
        store.prove()?;
        store.counters = Counters::default();
        Ok(store)
    }

    fn unproven(source: &Arc<Source>, depth: u32) -> io::Result<UringStore> {
        Ok(UringStore {
            ring: IoUring::new(depth.next_power_of_two())?,
            source: Arc::clone(source),
            flight: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            counters: Counters::default(),
        })
    }

    /// Kernels before 5.6 have a ring but not the read request, and a sandbox may forbid one of the calls.
    fn prove(&mut self) -> io::Result<()> {
        let len = self.source.rules.alignment.offset as usize;
        if self.source.rules.len == 0 {
            return Ok(());
        }
        let into = Slot::allocate(len).map_err(|e| e.source)?;
        let mut result = Ok(());
        self.submit(BlockRead { offset: 0, len, into, tag: 0 }).expect("nothing is in flight yet");
        self.reap(Wait::One, &mut |completion| result = completion.result).and(result).map_err(
            |e| e.errno().map_or_else(|| io::Error::other(e), io::Error::from_raw_os_error),
        )
    }

    /// Puts the next request of read `index` into the submission queue.
    fn push(&mut self, index: u32) {
        let fd = types::Fd(self.source.fd());
        let progress = self.flight[index as usize].as_mut().expect("the read is in flight");
        let missing = progress.missing();
        let len = u32::try_from(missing.bytes.len()).expect("requests are at most 1 GiB");
        let entry = opcode::Read::new(fd, missing.bytes.as_mut_ptr(), len)
            .offset(missing.offset)
            .build()
            .user_data(u64::from(index));
        // SAFETY: the memory belongs to the slot in `flight[index]`, which stays there, unread, until this request's
        // completion was taken, also while dropping; the descriptor is closed after that. Moving the store moves the
        // slot's handle, not its memory.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("the submission queue has an entry for every read in flight");
    }

    /// Hands over what is queued and waits for `want` completions to be there. `Ok(false)`: the kernel is short of
    /// memory, try again later.
    fn enter(&self, want: usize) -> io::Result<bool> {
        loop {
            match self.ring.submit_and_wait(want) {
                Ok(_) => return Ok(true),
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN | libc::EBUSY) => return Ok(false),
                    _ => return Err(e),
                },
            }
        }
    }

    /// The next completion in the queue: which read, and how it went.
    fn next_completion(&mut self) -> Option<(u32, Result<usize, i32>)> {
        let entry = self.ring.completion().next()?;
        let index = u32::try_from(entry.user_data()).expect("user data is an index of ours");
        Some((index, usize::try_from(entry.result()).map_err(|_| -entry.result())))
    }

    /// Reports what has completed; requests that must go on are queued but not handed over. Number of reads reported.
    fn drain(&mut self, done: &mut dyn FnMut(Completion)) -> u32 {
        let mut reported = 0;
        while let Some((index, outcome)) = self.next_completion() {
            let place = &mut self.flight[index as usize];
            let mut progress = place.take().expect("a completion belongs to a read in flight");
            match progress.absorb(outcome, &self.source.rules) {
                Step::Again => {
                    *place = Some(progress);
                    self.push(index);
                }
                Step::Over(result) => {
                    self.free.push(index);
                    self.source.forget(progress.range());
                    reported += 1;
                    done(progress.finish(result, &mut self.counters));
                }
            }
        }
        reported
    }

    fn has_queued(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    fn failed(&self, source: io::Error) -> IoError {
        Kind::Ring { path: self.source.rules.path.clone(), source }.into()
    }
}

impl BlockStore for UringStore {
    fn depth(&self) -> u32 {
        self.flight.len() as u32
    }

    fn alignment(&self) -> Alignment {
        self.source.rules.alignment
    }

    fn submit(&mut self, read: BlockRead) -> Result<(), BlockRead> {
        self.queue(read)?;
        self.flush();
        Ok(())
    }

    fn queue(&mut self, read: BlockRead) -> Result<(), BlockRead> {
        if self.free.is_empty() {
            return Err(read);
        }
        let progress = Progress::start(read, &self.source.rules);
        let index = self.free.pop().expect("just looked");
        self.flight[index as usize] = Some(progress);
        self.push(index);
        Ok(())
    }

    fn flush(&mut self) {
        if self.has_queued() {
            // What the kernel does not take now stays queued; the next `reap` hands it over or reports the error.
            drop(self.enter(0));
        }
    }

    fn reap(&mut self, wait: Wait, done: &mut dyn FnMut(Completion)) -> Result<(), IoError> {
        let mut attempts = 0;
        loop {
            let reported = self.drain(done);
            let must_wait = wait == Wait::One && reported == 0 && self.in_flight() > 0;
            if !must_wait && !self.has_queued() {
                return Ok(());
            }
            let entered = self.enter(usize::from(must_wait)).map_err(|e| self.failed(e))?;
            if !must_wait {
                return Ok(());
            }
            if !entered {
                attempts += 1;
                if attempts == ENTER_ATTEMPTS {
                    return Err(self.failed(io::Error::from_raw_os_error(libc::EAGAIN)));
                }
                std::thread::sleep(ENTER_PAUSE);
            }
        }
    }

    fn in_flight(&self) -> u32 {
        (self.flight.len() - self.free.len()) as u32
    }

    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn counters(&self) -> Counters {
        self.counters
    }

    fn is_direct(&self) -> bool {
        self.source.direct
    }
}

impl Drop for UringStore {
    fn drop(&mut self) {
        let mut attempts = 0;
        loop {
            while let Some((index, _)) = self.next_completion() {
                if let Some(progress) = self.flight[index as usize].take() {
                    self.source.forget(progress.range());
                }
                self.free.push(index);
            }
            if self.in_flight() == 0 {
                return;
            }
            match self.enter(1) {
                Ok(true) => continue,
                Ok(false) if attempts < ENTER_ATTEMPTS => {
                    attempts += 1;
                    std::thread::sleep(ENTER_PAUSE);
                }
                Ok(false) | Err(_) => {
                    // The kernel may still write into these slots and will not tell when it has: they are never freed.
                    std::mem::forget(std::mem::take(&mut self.flight));
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{PipeWriter, Write};
    use std::os::fd::OwnedFd;

    use super::*;

    /// A store that reads from a pipe, so that reads wait until the test writes. `None` where io_uring is forbidden.
    fn over_pipe() -> Option<(UringStore, PipeWriter)> {
        let (read, write) = io::pipe().unwrap();
        let read = File::from(OwnedFd::from(read));
        let store = UringStore::unproven(&Arc::new(Source::over(read, 4096)), 2).ok()?;
        Some((store, write))
    }

    fn read() -> BlockRead {
        BlockRead { offset: 0, len: 4096, into: Slot::allocate(4096).unwrap(), tag: 5 }
    }

    #[test]
    fn the_kernel_has_a_read_as_soon_as_it_is_submitted() {
        let Some((mut store, mut pipe)) = over_pipe() else { return };
        store.submit(read()).unwrap();
        assert!(!store.has_queued());
        store.reap(Wait::Poll, &mut |_| panic!("nothing was written yet")).unwrap();
        // In two parts, so that the first read is short.
        pipe.write_all(&[1; 1000]).unwrap();
        store.reap(Wait::Poll, &mut |_| panic!("not all was written yet")).unwrap();
        pipe.write_all(&[2; 3096]).unwrap();
        let mut bytes = Vec::new();
        store
            .reap(Wait::One, &mut |completion| {
                completion.result.unwrap();
                bytes.extend_from_slice(completion.read.into.bytes());
            })
            .unwrap();
        assert_eq!((bytes[999], bytes[1000], bytes[4095]), (1, 2, 2));
        assert!(store.counters().retries >= 1);
    }

    #[test]
    fn drop_waits_for_what_is_in_flight() {
        let Some((mut store, mut pipe)) = over_pipe() else { return };
        store.submit(read()).unwrap();
        std::thread::scope(|scope| {
            let dropping = scope.spawn(move || drop(store));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!dropping.is_finished(), "the kernel still writes into the slot");
            pipe.write_all(&[1; 4096]).unwrap();
            dropping.join().unwrap();
        });
    }
}
