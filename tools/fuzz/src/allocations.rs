//! What a thread has allocated, and the most that it ever had.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, with counters.
#[derive(Debug)]
pub(crate) struct Counting;

thread_local! {
    static NOW_BYTES: Cell<isize> = const { Cell::new(0) };
    static PEAK_BYTES: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let now = NOW_BYTES.get() + bytes;
    NOW_BYTES.set(now);
    PEAK_BYTES.set(PEAK_BYTES.get().max(now));
}

/// Runs `f`; returns the most bytes that this thread held meanwhile beyond those that it held before.
pub(crate) fn peak_bytes<T>(f: impl FnOnce() -> T) -> (T, u64) {
    let before = NOW_BYTES.get();
    PEAK_BYTES.set(before);
    let result = f();
    (result, (PEAK_BYTES.get() - before).unsigned_abs() as u64)
}

// SAFETY: every call goes to `System` unchanged; the counters are plain thread-local cells without destructors, which
// allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the pointer came from `System`, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may be there for a moment.
        count(size as isize);
        count(-(layout.size() as isize));
        // SAFETY: the pointer came from `System`, with this layout.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_what_was_held_at_once() {
        let (_, peak) = peak_bytes(|| {
            drop(vec![1u8; 1000]);
            drop(vec![0u8; 3000]);
        });
        assert_eq!(peak, 3000);
        let (kept, peak) = peak_bytes(|| vec![1u8; 500]);
        assert_eq!((kept.len(), peak), (500, 500));
    }
}
