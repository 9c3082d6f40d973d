//! [`Lut`]: LUT\[n, q\] of Eq. 8, one plan for each layer and state, and its form as bytes (a file of its own beside the
//! bundle, `.lut`: what is measured on one device stays out of what is copied to many).
//!
//! | content (see `seal`) | as |
//! |---|---|
//! | target: bundle, device, settings | u64; u32 bytes, UTF-8 each |
//! | horizon, layers, plans | u32 each |
//! | plans | 4 bytes compute, 4 bytes I/O each |
//! | best static plan | u16 |
//! | for each layer: thresholds, plan of each state | u64 \[15\], u16 \[16\] |

use crate::controller::{Controller, Fixed};
use crate::error::ControlError;
use crate::plan::CoordinationPlan;
use crate::quantize::{Quantizer, STATES};
use crate::seal::Form;
use crate::target::Target;
use ls_bundle::ids::{ByteCount, LayerId};

/// Layers of a table, at most: as many as a bundle may have.
pub const MAX_LAYERS: usize = ls_bundle::limits::MAX_LAYERS as usize;
/// Different plans of a table, at most.
const MAX_PLANS: usize = 1 << 16;
const MAX_HORIZON: usize = 1 << 10;
const PLAN_BYTES: usize = 8;
const LAYER_BYTES: usize = 8 * (STATES - 1) + 2 * STATES;

static FORM: Form = Form { name: "controller table", magic: b"LSLU", version: 1 };

/// The explicit policy (Eq. 9), with what it was made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lut {
    target: Target,
    horizon: u32,
    plans: Vec<CoordinationPlan>,
    best_static: u16,
    quantizers: Vec<Quantizer>,
    /// By layer and state: index of its plan.
    table: Vec<[u16; STATES]>,
}

impl Lut {
    /// A table of each layer's quantizer and its states' plans; `best_static` is what to run if one plan must do.
    ///
    /// # Panics
    /// If there is no layer or more than [`MAX_LAYERS`], a plan is not sound, a text of the target is too long, or the
    /// horizon is not 1 to 1024.
    #[must_use]
    pub fn new(
        target: Target,
        horizon: u32,
        best_static: CoordinationPlan,
        layers: impl IntoIterator<Item = (Quantizer, [CoordinationPlan; STATES])>,
    ) -> Lut {
        let mut plans = vec![best_static];
        let (mut quantizers, mut table) = (Vec::new(), Vec::new());
        for (quantizer, row) in layers {
            quantizers.push(quantizer);
            table.push(row.map(|plan| {
                let known = plans.iter().position(|known| *known == plan);
                known.unwrap_or_else(|| {
                    plans.push(plan);
                    plans.len() - 1
                }) as u16
            }));
        }
        assert!((1..=MAX_LAYERS).contains(&table.len()), "{} layers", table.len());
        assert!((1..=MAX_HORIZON).contains(&(horizon as usize)), "a horizon of {horizon}");
        assert!(target.is_sound(), "short texts");
        assert!(plans.iter().all(CoordinationPlan::is_sound), "sound plans");
        Lut { target, horizon, plans, best_static: 0, quantizers, table }
    }

    /// What it was made for.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Layers that it looked ahead.
    #[must_use]
    pub fn horizon(&self) -> u32 {
        self.horizon
    }

    /// Number of layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.table.len()
    }

    /// Number of different plans.
    #[must_use]
    pub fn plans(&self) -> usize {
        self.plans.len()
    }

    /// The best plan that does not change.
    #[must_use]
    pub fn best_static(&self) -> Fixed {
        Fixed(self.plans[usize::from(self.best_static)])
    }

    /// How a layer's loads become states.
    #[must_use]
    pub fn quantizer(&self, layer: LayerId) -> &Quantizer {
        &self.quantizers[layer.index()]
    }

    /// The table as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut to = FORM.writer();
        self.target.write(&mut to);
        to.u32(self.horizon);
        to.count(self.layers());
        to.count(self.plans.len());
        self.plans.iter().for_each(|plan| to.plan(plan));
        to.u16(self.best_static);
        for (quantizer, row) in self.quantizers.iter().zip(&self.table) {
            quantizer.thresholds().iter().for_each(|&threshold| to.u64(threshold));
            row.iter().for_each(|&plan| to.u16(plan));
        }
        to.seal()
    }

    /// Reads what [`Lut::to_bytes`] gives.
    ///
    /// # Errors
    /// If the bytes are anything else.
    pub fn from_bytes(bytes: &[u8]) -> Result<Lut, ControlError> {
        let mut from = FORM.reader(bytes)?;
        let target = Target::read(&mut from)?;
        let horizon = from.count("layers ahead", 1, MAX_HORIZON, 0)? as u32;
        let layers = from.count("layers", 1, MAX_LAYERS, LAYER_BYTES)?;
        let count = from.count("plans", 1, MAX_PLANS, PLAN_BYTES)?;
        let plans = (0..count).map(|_| from.plan()).collect::<Result<Vec<_>, _>>()?;
        let index = |from: &mut crate::seal::Reader<'_>| {
            let index = from.u16()?;
            if usize::from(index) < count {
                Ok(index)
            } else {
                Err(from.wrong("plan of a state", index, format!("one of {count}")))
            }
        };
        let best_static = index(&mut from)?;
        let (mut quantizers, mut table) = (Vec::new(), Vec::new());
        for _ in 0..layers {
            let mut thresholds = [0; STATES - 1];
            for threshold in &mut thresholds {
                *threshold = from.u64()?;
            }
            let quantizer = Quantizer::from_thresholds(thresholds);
            quantizers.push(
                quantizer.ok_or_else(|| {
                    from.wrong("thresholds", "unordered numbers", "ascending ones")
                })?,
            );
            let mut row = [0; STATES];
            for plan in &mut row {
                *plan = index(&mut from)?;
            }
            table.push(row);
        }
        from.end()?;
        Ok(Lut { target, horizon, plans, best_static, quantizers, table })
    }
}

impl Controller for Lut {
    /// # Panics
    /// If the table has no such layer.
    fn plan(&self, layer: LayerId, remaining: ByteCount) -> CoordinationPlan {
        let state = self.quantizers[layer.index()].state(remaining);
        self.plans[usize::from(self.table[layer.index()][state.index()])]
    }
}
