//! Between open and drop, stores allocate nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ls_io::{BlockRead, BlockStore, Prefer, SimOptions, SimStore, StoreOptions, Wait, open};
use ls_sync::Slot;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is the system allocator's work; counting touches nothing of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn reading_allocates_nothing() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&vec![5; 1 << 20]).unwrap();
    file.as_file().sync_all().unwrap();
    let mut stores: Vec<Box<dyn BlockStore>> = Vec::new();
    for (prefer, direct) in [(Prefer::Uring, true), (Prefer::Pread, true), (Prefer::Pread, false)] {
        let options = StoreOptions { depth: 8, prefer, direct };
        stores.extend(open(file.path(), &options).ok().map(|opened| opened.store));
    }
    let options = SimOptions { depth: 8, ..SimOptions::default() };
    stores.push(Box::new(SimStore::new(Arc::new(vec![5; 1 << 20]), options)));
    for mut store in stores {
        let mut free: Vec<Slot> = (0..8).map(|_| Slot::allocate(4096).unwrap()).collect();
        let mut round = |store: &mut dyn BlockStore, first: u64| {
            for block in first..first + 64 {
                while free.is_empty() {
                    store.reap(Wait::One, &mut |done| free.push(done.read.into)).unwrap();
                }
                let into = free.pop().unwrap();
                let read = BlockRead { offset: block * 4096, len: 4096, into, tag: 0 };
                assert!(store.submit(read).is_ok());
            }
        };
        // Threads set themselves up when they first run, which may be late; a read that allocated would do so always.
        let allocations = (0..20).map(|_| {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            round(&mut *store, 0);
            ALLOCATIONS.load(Ordering::Relaxed) - before
        });
        let fewest = allocations.min();
        assert_eq!(fewest, Some(0), "{} direct={}", store.name(), store.is_direct());
    }
}
