//! A prediction, a selection and an update allocate nothing.

use crate::plain::{BLOCKS, HeadKind, Plain, Shape};
use ls_hash::{HashStack, Kernels, PlaneBits, Scaling, Scratch, Selection, Signals};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// By thread: tests run beside each other.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_token_allocates_nothing() {
    let kernels = Kernels::detect();
    let kinds = [(HeadKind::Signs, 5), (HeadKind::Levels, 1)];
    let stacks = kinds.map(|(head, layers)| {
        let shape = Shape {
            dims: 100,
            stacks: 4,
            tau: 5,
            width: 24,
            layers,
            last_table: false,
            planes: Some(PlaneBits::Four),
            scaling: Scaling::Rms,
            head,
            seed: 3,
        };
        HashStack::new(Plain::random(&shape).pack(), kernels).unwrap()
    });
    let mut scratch = Scratch::default();
    stacks.iter().for_each(|stack| scratch.grow_for(stack));
    let mut selection = Selection::with_capacity(kernels, BLOCKS);
    let mut signals = stacks.each_ref().map(|stack| Signals::new(stack.block_head().unwrap()));
    let (mut scores, feature) = ([0; BLOCKS], [0.5; 100]);

    let before = ALLOCATIONS.get();
    for (stack, signals) in stacks.iter().zip(&mut signals) {
        stack.scores(&feature, Some(signals.offsets()), &mut scratch, &mut scores);
        let best = selection.best(&scores, 9);
        signals.update(kernels, stack.block_head().unwrap(), best);
        selection.at_least(&scores, 0, 9);
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
}
