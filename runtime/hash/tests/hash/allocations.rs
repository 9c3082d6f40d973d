//! A prediction, a selection and an update allocate nothing.

use crate::counting::allocations;
use crate::plain::{BLOCKS, HeadKind, Plain, Shape};
use ls_hash::{HashStack, Kernels, PlaneBits, Scaling, Scratch, Selection, Signals};

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

    let before = allocations();
    for (stack, signals) in stacks.iter().zip(&mut signals) {
        stack.scores(&feature, Some(signals.offsets()), &mut scratch, &mut scores);
        let best = selection.best(&scores, 9);
        signals.update(kernels, stack.block_head().unwrap(), best);
        selection.at_least(&scores, 0, 9);
    }
    assert_eq!(allocations() - before, 0);
}
