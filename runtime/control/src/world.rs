//! [`World`]: a made-up device and model that plays whole tokens by the execution model.
//!
//! A layer's loads are drawn by rank from what is missing of it before anything was prefetched; Interval II of the layer
//! before prefetches some of that, the more of it usefully the more often the prediction was refined. So a plan changes
//! what is left to load, as in Eq. 5, and two controllers meet the same luck when they are given the same ranks.

use crate::controller::Controller;
use crate::execution::{Costs, Played, play};
use crate::explore::Rig;
use crate::plan::CoordinationPlan;
use crate::profile::Visit;
use ls_bundle::ids::{ByteCount, LayerId};

/// A layer of a [`World`].
#[derive(Clone, Debug, PartialEq)]
pub struct WorldLayer {
    /// What it costs.
    pub costs: Costs,
    /// C^G.
    pub work_bytes: u64,
    /// What is missing of it before prefetching, equally likely each; ascending, at most `work_bytes`.
    pub missing_bytes: Vec<u64>,
    /// Share of the bytes prefetched for it that are wanted in the end: as first predicted, and as refined without end.
    pub useful: [f64; 2],
}

/// Layers in a ring, and where it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct World {
    layers: Vec<WorldLayer>,
    remaining_bytes: u64,
    seed: u64,
}

impl World {
    /// A world at the start of its first layer, with nothing loaded. `seed` decides what [`Rig::token`] draws.
    ///
    /// # Panics
    /// If there is no layer, or more is missing than there is.
    #[must_use]
    pub fn new(layers: Vec<WorldLayer>, seed: u64) -> World {
        let sound = |layer: &WorldLayer| {
            let missing = &layer.missing_bytes;
            missing.is_sorted() && missing.last().is_some_and(|&most| most <= layer.work_bytes)
        };
        assert!(!layers.is_empty() && layers.iter().all(sound), "layers that could be");
        let remaining_bytes = layers[0].missing_bytes[layers[0].missing_bytes.len() / 2];
        World { layers, remaining_bytes, seed }
    }

    /// Its layers.
    #[must_use]
    pub fn layers(&self) -> &[WorldLayer] {
        &self.layers
    }

    /// R of the first layer, for a run that starts now.
    #[must_use]
    pub fn remaining_bytes(&self) -> u64 {
        self.remaining_bytes
    }

    /// What a plan makes of a layer, and what it leaves of the next if that one's luck is `rank` (0 to 1).
    #[must_use]
    pub fn visit(
        &self,
        layer: usize,
        remaining_bytes: u64,
        plan: &CoordinationPlan,
        rank: f64,
    ) -> (Played, u64) {
        let this = &self.layers[layer];
        let next = &self.layers[(layer + 1) % self.layers.len()];
        let played = play(&this.costs, this.work_bytes, remaining_bytes, plan);
        let [stale, refined] = next.useful;
        let looks = f64::from(plan.points()[0].min(plan.points()[1]));
        let useful = refined - (refined - stale) / looks;
        let prefetched = useful * played.second_us / next.costs.read_us_per_byte;
        let missing = &next.missing_bytes;
        let drawn = missing[((rank * missing.len() as f64) as usize).min(missing.len() - 1)];
        (played, drawn.saturating_sub(prefetched as u64))
    }

    /// Plays a visit a rank, from the first layer on.
    pub fn run(&mut self, controller: &dyn Controller, ranks: &[f64]) -> Vec<Visit> {
        let visits = ranks.iter().enumerate().map(|(visit, &rank)| {
            let layer = visit % self.layers.len();
            let remaining_bytes = self.remaining_bytes;
            let id = LayerId(layer as u16);
            let plan = controller.plan(id, ByteCount(remaining_bytes));
            let (played, next) = self.visit(layer, remaining_bytes, &plan, rank);
            self.remaining_bytes = next;
            Visit {
                layer: id,
                plan,
                remaining_bytes,
                first_us: played.first_us as f32,
                second_us: played.second_us as f32,
                left_bytes: played.left_bytes,
                next_remaining_bytes: next,
            }
        });
        visits.collect()
    }

    /// `count` ranks, evenly spread and independent of each other.
    pub fn ranks(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.rank()).collect()
    }

    fn rank(&mut self) -> f64 {
        crate::explore::random(&mut self.seed) as f64 / (u64::MAX as f64 + 1.0)
    }
}

impl Rig for World {
    type Error = std::convert::Infallible;

    fn work_bytes(&self) -> Vec<u64> {
        self.layers.iter().map(|layer| layer.work_bytes).collect()
    }

    fn token(
        &mut self,
        controller: &dyn Controller,
        visited: &mut dyn FnMut(Visit),
    ) -> Result<(), Self::Error> {
        let ranks = self.ranks(self.layers.len());
        self.run(controller, &ranks).into_iter().for_each(visited);
        Ok(())
    }
}
