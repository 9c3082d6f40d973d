//! [`Controller`]: which plan a layer gets; and its forms that need no table.

use crate::plan::CoordinationPlan;
use crate::quantize::{Quantizer, STATES};
use ls_bundle::ids::{ByteCount, LayerId};
use std::cell::Cell;

/// Chooses a layer's plan when the layer before it ends (T^GPU_{n-1}).
///
/// A function of its arguments, cheap enough for every layer, without allocation. [`Hindsight`] alone also counts its calls.
pub trait Controller: Send {
    /// The plan of `layer`, of which `remaining` bytes (R_n) are selected and not loaded yet.
    fn plan(&self, layer: LayerId, remaining: ByteCount) -> CoordinationPlan;
}

/// The same plan always: `one-shot`, `fixed`, and `static` with the plan that [`Lut`](crate::Lut) found best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixed(pub CoordinationPlan);

impl Fixed {
    /// One prediction a layer.
    pub const ONE_SHOT: Fixed = Fixed(CoordinationPlan::ONE_SHOT);
    /// Two segments a stage on both sides: what runs where nothing was measured.
    pub const DEFAULT: Fixed = Fixed(CoordinationPlan::uniform(2, 2));
}

impl Controller for Fixed {
    fn plan(&self, _: LayerId, _: ByteCount) -> CoordinationPlan {
        self.0
    }
}

/// Tables made for the visits of a trace, one each, the first again after the last: `hindsight` (see
/// [`Synthesis::hindsight`](crate::synthesis::Synthesis::hindsight)).
#[derive(Clone, Debug)]
pub struct Hindsight {
    /// By layer.
    quantizers: Vec<Quantizer>,
    visits: Vec<[CoordinationPlan; STATES]>,
    next: Cell<usize>,
}

impl Hindsight {
    /// The plan of each state of each visit, in turn.
    ///
    /// # Panics
    /// If there are none.
    #[must_use]
    pub fn new(quantizers: Vec<Quantizer>, visits: Vec<[CoordinationPlan; STATES]>) -> Hindsight {
        assert!(!visits.is_empty(), "plans for the first visit");
        Hindsight { quantizers, visits, next: Cell::new(0) }
    }
}

impl Controller for Hindsight {
    fn plan(&self, layer: LayerId, remaining: ByteCount) -> CoordinationPlan {
        let visit = self.next.get();
        self.next.set((visit + 1) % self.visits.len());
        self.visits[visit][self.quantizers[layer.index()].state(remaining).index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hindsight_goes_on_from_visit_to_visit_and_looks_at_the_state() {
        let [coarse, fine] = [1, 8].map(|f| CoordinationPlan::uniform(f, f));
        let mut by_load = [coarse; STATES];
        by_load[1] = fine;
        let quantizer = Quantizer::of_samples(&[0, 10]);
        let hindsight = Hindsight::new(vec![quantizer], vec![by_load, [coarse; STATES]]);
        let plan = |bytes| hindsight.plan(LayerId(0), ByteCount(bytes));
        assert_eq!([10, 10, 0, 10, 10].map(plan), [fine, coarse, coarse, coarse, fine]);
    }
}
