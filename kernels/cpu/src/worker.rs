//! A pool of threads that run one parallel region after another.
//!
//! A region is a function and a number of items. All regions share one atomic word, `items << 32 | next`: who adds one
//! to it has claimed item `next`, if that is below `items`. The caller works along and returns when every item is
//! done; a worker that wakes late finds nothing to claim and takes no part. Hot, a region costs about a microsecond.
//!
//! A worker without work spins for some tens of microseconds (hardly at all where threads outnumber cores), then
//! sleeps: an engine that waits for its disk burns no core.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Spins before a worker sleeps; one takes about 20 to 50 ns.
const SPINS: u32 = 1500;
/// The same where threads outnumber cores: whoever spins keeps another from working.
const SPINS_CROWDED: u32 = 20;
/// Spins of the caller, which has nothing left to do, before it starts to yield its core.
const SPINS_CALLER: u32 = 4000;

/// What a region runs: thread index, item index.
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// On a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// `items << 32 | next`.
    claims: Line<AtomicU64>,
    /// Items that are done.
    done: Line<AtomicUsize>,
    /// The region's function. Written by the caller while no item is claimed or claimable.
    task: UnsafeCell<Option<*const Task<'static>>>,
    /// Workers that sleep or are about to.
    sleepers: AtomicUsize,
    /// Workers that have started.
    started: AtomicUsize,
    stop: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
    spins: u32,
}

// SAFETY: `task` is written only between regions and read only by who has claimed an item, see `run` and `work`; the
// function behind it is Sync. Everything else is Sync by itself.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer belongs to no thread.
unsafe impl Send for Shared {}

/// Threads for parallel regions. Dropping the pool ends them.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.threads())
    }
}

/// Ends the process if a region's function panics: others still use what its frame holds.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

impl Pool {
    /// Starts `threads - 1` workers; the caller is the first thread. Panics if `threads` is zero.
    pub(crate) fn new(threads: usize) -> std::io::Result<Pool> {
        assert!(threads > 0, "a pool needs a thread");
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            claims: Line::default(),
            done: Line::default(),
            task: UnsafeCell::new(None),
            sleepers: AtomicUsize::new(0),
            started: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            spins: if threads > cores { SPINS_CROWDED } else { SPINS },
        });
        // Filled in place, so that an error stops the workers that have started.
        let mut pool = Pool { shared, workers: Vec::with_capacity(threads - 1) };
        for thread in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("ls-cpu-{thread}"));
            pool.workers.push(builder.spawn(move || shared.serve(thread))?);
        }
        // A starting thread allocates; afterwards nothing does.
        while pool.shared.started.load(Ordering::Acquire) < pool.workers.len() {
            std::thread::yield_now();
        }
        Ok(pool)
    }

    /// Number of threads, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(thread, item)` for every item below `items`, and returns when all are done. Items are claimed in
    /// ascending order. A panic in `task` ends the process.
    pub(crate) fn run(&mut self, items: usize, task: &Task<'_>) {
        if items <= 1 || self.workers.is_empty() {
            (0..items).for_each(|item| task(0, item));
            return;
        }
        let _abort = AbortOnPanic;
        let shared = &*self.shared;
        let items_bits =
            u64::from(u32::try_from(items).expect("a region has fewer than 2^32 items"));
        shared.done.0.store(0, Ordering::Relaxed);
        // SAFETY: of the previous region every item is done and none can be claimed, so nobody reads the cell;
        // `&mut self` keeps other callers out. The lifetime may be extended because this function returns only when
        // every item is done, and only who has claimed an item uses the pointer.
        unsafe {
            *shared.task.get() =
                Some(std::mem::transmute::<*const Task<'_>, *const Task<'static>>(task));
        }
        // SeqCst: against `sleep`. Either a worker sees the new claims, or we see that it sleeps. It also publishes
        // `task` and `done` to who claims.
        shared.claims.0.store(items_bits << 32, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            // Taking the lock once makes sure that who is about to sleep does.
            drop(shared.lock.lock().unwrap_or_else(PoisonError::into_inner));
            shared.wake.notify_all();
        }
        shared.work(0);
        let mut spins = 0;
        // Acquire: pairs with the Release in `work`; what items wrote is visible from here.
        while shared.done.0.load(Ordering::Acquire) < items {
            spins += 1;
            if spins < SPINS_CALLER {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker's panic has ended the process.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Whether an item can be claimed.
    fn has_work(&self, order: Ordering) -> bool {
        let claims = self.claims.0.load(order);
        claims & 0xffff_ffff < claims >> 32
    }

    /// Claims items until there are none.
    fn work(&self, thread: usize) {
        // Looking before adding bounds `next` by items + threads, far from the other half of the word.
        while self.has_work(Ordering::Relaxed) {
            // Acquire: pairs with the store in `run`.
            let claims = self.claims.0.fetch_add(1, Ordering::Acquire);
            let (items, item) = (claims >> 32, claims & 0xffff_ffff);
            if item >= items {
                return;
            }
            // SAFETY: this item is claimed and not done, so `run` has not returned: the cell is not being written,
            // and the function it points to is alive.
            let task = unsafe { &*(*self.task.get()).expect("a claimable region has a task") };
            task(thread, item as usize);
            // Release: what the item wrote, for `run`.
            self.done.0.fetch_add(1, Ordering::Release);
        }
    }

    /// A worker's life.
    fn serve(&self, thread: usize) {
        let _abort = AbortOnPanic;
        self.started.fetch_add(1, Ordering::Release);
        let mut spins = 0;
        while !self.stop.load(Ordering::Relaxed) {
            if self.has_work(Ordering::Relaxed) {
                self.work(thread);
                spins = 0;
            } else if spins < self.spins {
                spins += 1;
                std::hint::spin_loop();
            } else {
                self.sleep();
                spins = 0;
            }
        }
    }

    /// Sleeps until there is work or the pool stops.
    fn sleep(&self) {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !self.has_work(Ordering::SeqCst) && !self.stop.load(Ordering::SeqCst) {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_runs_once_in_every_region() {
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads).unwrap();
            for region in 0..2000 {
                let items = region % 17;
                let runs: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                pool.run(items, &|thread, item| {
                    assert!(thread < threads);
                    runs[item].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn sleeping_workers_wake_for_a_region() {
        let mut pool = Pool::new(3).unwrap();
        for _ in 0..5 {
            while pool.shared.sleepers.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
            // Each item waits for the others: only three awake threads finish.
            let arrived = AtomicUsize::new(0);
            pool.run(3, &|_, _| {
                arrived.fetch_add(1, Ordering::SeqCst);
                while arrived.load(Ordering::SeqCst) < 3 {
                    std::hint::spin_loop();
                }
            });
        }
    }
}
