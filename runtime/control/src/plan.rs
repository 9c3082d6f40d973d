//! [`CoordinationPlan`]: φ = (ω_G, ω_IO) of Eq. 3, and the segments that it cuts work into.

/// Logical stages of each side.
pub const LOGICAL_STAGES: usize = 4;

/// The frequencies that a stage may have: powers of two.
pub const FREQUENCIES: [u8; 4] = [1, 2, 4, 8];

/// Segments of a side, at most.
pub const MAX_SEGMENTS: usize = LOGICAL_STAGES * 8;

/// Communication points of each stage: so many equal segments end in it. A stage with none (which only
/// [`CoordinationPlan::ONE_SHOT`] has) goes on into the next.
pub type Frequencies = [u8; LOGICAL_STAGES];

/// How often each side talks to the other in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CoordinationPlan {
    /// ω_G: after a segment, whoever computes publishes its partial result.
    pub compute: Frequencies,
    /// ω_IO: before a segment is read, the queue takes up the latest prediction; after it, its weights may be used.
    pub io: Frequencies,
}

impl CoordinationPlan {
    /// One segment a side: no overlap within a layer and no refinement.
    pub const ONE_SHOT: CoordinationPlan =
        CoordinationPlan { compute: [0, 0, 0, 1], io: [0, 0, 0, 1] };

    /// The same frequency in all stages.
    #[must_use]
    pub const fn uniform(compute: u8, io: u8) -> CoordinationPlan {
        CoordinationPlan { compute: [compute; LOGICAL_STAGES], io: [io; LOGICAL_STAGES] }
    }

    /// The paper's action space: every frequency in every stage, fewest points first within each side. 65,536 plans.
    pub fn all() -> impl Iterator<Item = CoordinationPlan> {
        let side = |code: usize| {
            std::array::from_fn(|stage| FREQUENCIES[code >> (2 * (LOGICAL_STAGES - 1 - stage)) & 3])
        };
        const SIDE: usize = FREQUENCIES.len().pow(LOGICAL_STAGES as u32);
        (0..SIDE * SIDE)
            .map(move |code| CoordinationPlan { compute: side(code / SIDE), io: side(code % SIDE) })
    }

    /// Segments of the two sides: compute, I/O.
    #[must_use]
    pub fn points(&self) -> [u32; 2] {
        [self.compute, self.io].map(|side| side.iter().map(|&f| u32::from(f)).sum())
    }

    /// Whether frequencies are known ones and the last stages end.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let known = |f: &u8| *f == 0 || FREQUENCIES.contains(f);
        [self.compute, self.io]
            .iter()
            .all(|side| side.iter().all(known) && side[LOGICAL_STAGES - 1] > 0)
    }
}

const STAGE_BITS: u32 = LOGICAL_STAGES.trailing_zeros();
const _: () = assert!(LOGICAL_STAGES.is_power_of_two());

/// The ends of the segments that frequencies cut `units` of work (blocks, bytes) into: ascending, the last one is
/// `units`. Where there are more segments than units, some are empty and left out.
#[derive(Clone, Debug)]
pub struct Segments {
    frequencies: Frequencies,
    units: u64,
    stage: usize,
    point: u8,
    last: u64,
}

impl Segments {
    /// Cuts `units`, fewer than 2^58, by frequencies of a sound plan.
    #[must_use]
    pub fn new(frequencies: Frequencies, units: u64) -> Segments {
        Segments { frequencies, units, stage: 0, point: 0, last: 0 }
    }
}

impl Iterator for Segments {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        while self.stage < LOGICAL_STAGES {
            let frequency = self.frequencies[self.stage];
            if self.point == frequency {
                (self.stage, self.point) = (self.stage + 1, 0);
                continue;
            }
            self.point += 1;
            let passed = self.stage as u64 * u64::from(frequency) + u64::from(self.point);
            // A division by the number of segments that this frequency would make of all.
            let end = (self.units * passed) >> (frequency.trailing_zeros() + STAGE_BITS);
            if end > self.last {
                self.last = end;
                return Some(end);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(frequencies: Frequencies, units: u64) -> Vec<u64> {
        Segments::new(frequencies, units).collect()
    }

    #[test]
    fn stages_are_quarters_cut_by_their_frequency() {
        assert_eq!(ends([1, 2, 4, 1], 160), [40, 60, 80, 90, 100, 110, 120, 160]);
        assert_eq!(ends([8, 1, 1, 1], 32), [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32]);
        assert_eq!(ends(CoordinationPlan::ONE_SHOT.io, 160), [160]);
    }

    #[test]
    fn no_segment_is_empty_and_nothing_is_left() {
        for units in 0..70 {
            for plan in CoordinationPlan::all().step_by(97) {
                let ends = ends(plan.compute, units);
                assert!(ends.is_sorted_by(|a, b| a < b), "{ends:?}");
                assert_eq!(ends.last().copied().unwrap_or(0), units);
                assert!(ends.len() <= plan.points()[0] as usize);
            }
        }
        assert_eq!(ends([8; 4], 1 << 57).last(), Some(&(1 << 57)));
    }

    #[test]
    fn the_action_space_has_every_plan_once() {
        let mut all: Vec<_> = CoordinationPlan::all().collect();
        assert_eq!(all[0], CoordinationPlan::uniform(1, 1));
        assert!(all.iter().all(CoordinationPlan::is_sound));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 65_536);
        assert!(CoordinationPlan::ONE_SHOT.is_sound());
        assert!(!CoordinationPlan { compute: [1, 1, 1, 0], io: [1; 4] }.is_sound());
        assert!(!CoordinationPlan { compute: [1; 4], io: [1, 3, 1, 1] }.is_sound());
    }
}
