//! [`PreadStore`]: a pool of threads, each with one `pread` at a time.
//!
//! For places where io_uring is forbidden (containers, Android), and for buffered reads. The queues are allocated once,
//! for `depth` reads. Threads and owner share one mutex that is held for moments only; reads happen outside of it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::error::{IoError, Kind};
use crate::progress::{Progress, Step};
use crate::source::Source;
use crate::store::{Alignment, BlockRead, BlockStore, Completion, Counters, Wait};

/// More threads than this gain nothing on the disks we know and cost stacks.
const MAX_THREADS: u32 = 8;

/// A thread calls `pread` and formats an error at most.
const STACK_BYTES: usize = 128 * 1024;

#[derive(Debug)]
struct Shared {
    source: Arc<Source>,
    queues: Mutex<Queues>,
    /// Signals a new read, or the end.
    work: Condvar,
    /// Signals a finished read.
    finished: Condvar,
}

/// Both together never hold more than `depth` reads.
#[derive(Debug)]
struct Queues {
    waiting: VecDeque<Progress>,
    finished: VecDeque<(Progress, Result<(), IoError>)>,
    closing: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        // Queues are only pushed to and popped from under the lock, so a panic elsewhere leaves them whole.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a thread does until the store is dropped.
    fn serve(&self) {
        loop {
            let mut queues = self.lock();
            let mut progress = loop {
                if queues.closing {
                    return;
                }
                match queues.waiting.pop_front() {
                    Some(progress) => break progress,
                    None => {
                        queues = self.work.wait(queues).unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            drop(queues);
            let result = self.perform(&mut progress);
            self.source.forget(progress.range());
            self.lock().finished.push_back((progress, result));
            self.finished.notify_one();
        }
    }

    fn perform(&self, progress: &mut Progress) -> Result<(), IoError> {
        loop {
            let missing = progress.missing();
            let outcome = self.source.read(missing.bytes, missing.offset);
            if let Step::Over(result) = progress.absorb(outcome, &self.source.rules) {
                return result;
            }
        }
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct PreadStore {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    depth: u32,
    in_flight: u32,
    counters: Counters,
}

impl PreadStore {
    pub(crate) fn new(source: &Arc<Source>, depth: u32) -> Result<PreadStore, IoError> {
        let queues = Queues {
            waiting: VecDeque::with_capacity(depth as usize),
            finished: VecDeque::with_capacity(depth as usize),
            closing: false,
        };
        let shared = Shared {
            source: Arc::clone(source),
            queues: Mutex::new(queues),
            work: Condvar::new(),
            finished: Condvar::new(),
        };
        // Built before the threads, so that its drop ends those that started when a later one does not.
        let mut store = PreadStore {
            shared: Arc::new(shared),
            threads: Vec::new(),
            depth,
            in_flight: 0,
            counters: Counters::default(),
        };
        for index in 0..depth.min(MAX_THREADS) {
            let shared = Arc::clone(&store.shared);
            let thread = std::thread::Builder::new()
                .name(format!("ls-read-{index}"))
                .stack_size(STACK_BYTES)
                .spawn(move || shared.serve())
                .map_err(Kind::Thread)?;
            store.threads.push(thread);
        }
        Ok(store)
    }
}

impl BlockStore for PreadStore {
    fn depth(&self) -> u32 {
        self.depth
    }

    fn alignment(&self) -> Alignment {
        self.shared.source.rules.alignment
    }

    fn submit(&mut self, read: BlockRead) -> Result<(), BlockRead> {
        if self.in_flight == self.depth {
            return Err(read);
        }
        let progress = Progress::start(read, &self.shared.source.rules);
        self.shared.lock().waiting.push_back(progress);
        self.shared.work.notify_one();
        self.in_flight += 1;
        Ok(())
    }

    fn reap(&mut self, wait: Wait, done: &mut dyn FnMut(Completion)) -> Result<(), IoError> {
        let mut queues = self.shared.lock();
        if wait == Wait::One && self.in_flight > 0 {
            while queues.finished.is_empty() {
                queues = self.shared.finished.wait(queues).unwrap_or_else(PoisonError::into_inner);
            }
        }
        // Only what is there now: `done` runs without the lock, and more may finish meanwhile.
        for _ in 0..queues.finished.len() {
            let (progress, result) = queues.finished.pop_front().expect("only the owner pops");
            drop(queues);
            self.in_flight -= 1;
            done(progress.finish(result, &mut self.counters));
            queues = self.shared.lock();
        }
        Ok(())
    }

    fn in_flight(&self) -> u32 {
        self.in_flight
    }

    fn name(&self) -> &'static str {
        "pread"
    }

    fn counters(&self) -> Counters {
        self.counters
    }

    fn is_direct(&self) -> bool {
        self.shared.source.direct
    }
}

impl Drop for PreadStore {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has printed why; there is nothing to add while dropping.
            drop(thread.join());
        }
    }
}
