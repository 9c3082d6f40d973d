//! Planning allocates nothing.

use crate::counting::allocations;
use ls_bundle::ids::{ByteCount, LayerId};
use ls_control::explore::{Explorer, candidates};
use ls_control::{
    Controller, CoordinationPlan, Fixed, Hindsight, Lut, Quantizer, Segments, Target,
};

#[test]
fn no_controller_allocates() {
    let quantizer = Quantizer::of_samples(&(0..100).collect::<Vec<_>>());
    let plans = std::array::from_fn(|state| CoordinationPlan::uniform(1 << (state % 4), 2));
    let lut = Lut::new(Target::default(), 4, plans[0], vec![(quantizer.clone(), plans); 3]);
    let controllers: [Box<dyn Controller>; 5] = [
        Box::new(Fixed::ONE_SHOT),
        Box::new(lut.best_static()),
        Box::new(lut),
        Box::new(Hindsight::new(vec![quantizer; 3], vec![plans; 7])),
        Box::new(Explorer::new(candidates(), vec![1000; 3])),
    ];
    let before = allocations();
    let mut segments = 0;
    for controller in &controllers {
        for load in 0..200 {
            let plan = controller.plan(LayerId(load as u16 % 3), ByteCount(load));
            segments +=
                Segments::new(plan.compute, 64).count() + Segments::new(plan.io, load).count();
        }
    }
    assert_eq!(allocations(), before);
    assert!(segments > 0);
}
