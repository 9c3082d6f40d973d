//! A layer under a plan: the paper's execution model (3.2.3, paragraph 2 and Eq. 4), as arithmetic.
//!
//! ```text
//!  T^GPU_{n-1}                   load of n done                                T^GPU_n
//!   ├──────── Interval I ─────────────┼──────────────── Interval II ──────────────┤
//!   reads  ▐ segment ▐ segment ▐ segm ▐  layer n+1 …
//!   lead   ▐▐▐▐▐▐▐▐ (attention)
//!   computes       ▐ resident ▐  waits ▐ segment ▐ segment ▐ segment ▐ segment ▐
//! ```
//!
//! Weights that are resident are computed first, then those that arrive, in the order of arrival. A segment of either
//! side costs its bytes and a constant; one of computation starts when all its weights are there, and they are there
//! segment by segment of I/O. With costs that were measured this is the model of what a profile calls deterministic; with
//! costs that were made up it is a simulator.

use crate::plan::{CoordinationPlan, Frequencies, MAX_SEGMENTS, Segments};

/// What a layer costs on a device. Microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Costs {
    /// From the end of the layer before to the first segment that may be computed: attention, mostly.
    pub lead_us: f64,
    /// From there to the first byte, if anything is to be loaded.
    pub read_us: f64,
    /// To load a byte.
    pub read_us_per_byte: f64,
    /// To begin a segment of I/O: order the queue anew, submit, publish.
    pub read_us_per_segment: f64,
    /// To compute a byte of weights.
    pub compute_us_per_byte: f64,
    /// To end a segment of computation: publish the partial result.
    pub compute_us_per_segment: f64,
}

/// What became of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Played {
    /// T^I: from the end of the layer before until all is loaded.
    pub first_us: f64,
    /// T^II: from there until all is computed.
    pub second_us: f64,
    /// C^{G,I}: bytes of weights computed in Interval I.
    pub done_bytes: u64,
    /// C^{G,II}: bytes computed in Interval II.
    pub left_bytes: u64,
}

impl Played {
    /// T of Eq. 4.
    #[must_use]
    pub fn total_us(&self) -> f64 {
        self.first_us + self.second_us
    }
}

/// Plays a layer of which `work_bytes` are to be computed and `remaining_bytes` of them to be loaded first.
///
/// # Panics
/// If more is to be loaded than computed.
#[must_use]
pub fn play(
    costs: &Costs,
    work_bytes: u64,
    remaining_bytes: u64,
    plan: &CoordinationPlan,
) -> Played {
    assert!(remaining_bytes <= work_bytes, "{remaining_bytes} of {work_bytes} bytes to load");
    Loading::new(costs, remaining_bytes, plan.io).compute(costs, work_bytes, plan.compute)
}

/// When a layer's weights arrive. It depends on the I/O side alone, so many plans of the other side can share it.
#[derive(Clone, Debug)]
pub struct Loading {
    /// Of each segment, how much is there when; as many as `segments`.
    arrivals: [(u64, f64); MAX_SEGMENTS],
    segments: usize,
}

impl Loading {
    /// Loads `remaining_bytes`.
    #[must_use]
    pub fn new(costs: &Costs, remaining_bytes: u64, io: Frequencies) -> Loading {
        let mut loading = Loading { arrivals: [(0, 0.0); MAX_SEGMENTS], segments: 0 };
        let (mut arrived_bytes, mut now_us) = (0, costs.read_us);
        for (arrival, end) in loading.arrivals.iter_mut().zip(Segments::new(io, remaining_bytes)) {
            let bytes = end - arrived_bytes;
            now_us += costs.read_us_per_segment + bytes as f64 * costs.read_us_per_byte;
            *arrival = (end, now_us);
            arrived_bytes = end;
            loading.segments += 1;
        }
        loading
    }

    /// Computes `work_bytes`, of which what is not loaded is resident.
    #[must_use]
    pub fn compute(&self, costs: &Costs, work_bytes: u64, compute: Frequencies) -> Played {
        let arrivals = &self.arrivals[..self.segments];
        let (remaining_bytes, first_us) = arrivals.last().copied().unwrap_or_default();
        let resident_bytes = work_bytes - remaining_bytes;
        let mut arrivals = arrivals.iter();
        let (mut arrived_bytes, mut arrived_us) = (0, 0.0);
        let (mut now_us, mut passed_bytes, mut done_bytes) = (costs.lead_us, 0u64, 0u64);
        for end in Segments::new(compute, work_bytes) {
            while arrived_bytes + resident_bytes < end {
                (arrived_bytes, arrived_us) = *arrivals.next().expect("all of it arrives");
            }
            let start_us = now_us.max(arrived_us);
            let bytes = end - passed_bytes;
            let computed_us = bytes as f64 * costs.compute_us_per_byte;
            if first_us > start_us {
                let share = ((first_us - start_us) / computed_us).min(1.0);
                done_bytes = passed_bytes + (bytes as f64 * share) as u64;
            }
            now_us = start_us + computed_us + costs.compute_us_per_segment;
            passed_bytes = end;
        }
        Played {
            first_us,
            second_us: (now_us - first_us).max(0.0),
            done_bytes,
            left_bytes: work_bytes - done_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: Costs = Costs {
        lead_us: 100.0,
        read_us: 10.0,
        read_us_per_byte: 1.0,
        read_us_per_segment: 5.0,
        compute_us_per_byte: 0.5,
        compute_us_per_segment: 2.0,
    };

    #[test]
    fn nothing_to_load_leaves_no_first_interval() {
        let played = play(&COSTS, 400, 0, &CoordinationPlan::uniform(1, 8));
        assert_eq!(played.first_us, 0.0);
        assert_eq!(played.second_us, 100.0 + 200.0 + 4.0 * 2.0);
        assert_eq!((played.done_bytes, played.left_bytes), (0, 400));
    }

    #[test]
    fn one_shot_waits_for_everything() {
        let played = play(&COSTS, 400, 400, &CoordinationPlan::ONE_SHOT);
        assert_eq!(played.first_us, 10.0 + 5.0 + 400.0);
        assert_eq!(played.second_us, 200.0 + 2.0);
        assert_eq!(played.done_bytes, 0);
    }

    /// By hand: 200 resident, 200 to load in four segments of 50 (arrive at 65, 120, 175, 230); four segments of 100
    /// bytes to compute. The first two need nothing: 100..152, 152..204. The third needs 100 loaded bytes (120): 204..256.
    /// Loading ends at 230, half of it is computed then. The fourth: 256..308.
    #[test]
    fn reads_and_computation_overlap() {
        let played = play(&COSTS, 400, 200, &CoordinationPlan::uniform(1, 1));
        assert_eq!(played.first_us, 230.0);
        assert_eq!(played.total_us(), 308.0);
        assert_eq!(played.done_bytes, 200 + 52);
    }

    #[test]
    fn finer_plans_cost_points_and_save_waits() {
        // Slow reads: waiting for large segments costs more than points do.
        let slow = Costs { read_us_per_byte: 4.0, ..COSTS };
        let total = |costs: &Costs, plan| play(costs, 4000, 2000, &plan).total_us();
        let (coarse, fine) = (CoordinationPlan::ONE_SHOT, CoordinationPlan::uniform(4, 4));
        assert!(total(&slow, fine) < total(&slow, coarse));
        // Dear points and nothing to wait for: the other way around.
        let dear = Costs { compute_us_per_segment: 1000.0, ..COSTS };
        assert!(total(&dear, fine) > total(&dear, coarse));
    }

    #[test]
    fn more_to_load_never_takes_less_time() {
        for plan in CoordinationPlan::all().step_by(1013) {
            let total = |remaining| play(&COSTS, 1 << 12, remaining, &plan).total_us();
            let totals: Vec<f64> = (0..=1 << 12).step_by(64).map(total).collect();
            assert!(totals.is_sorted(), "{plan:?}");
        }
    }
}
