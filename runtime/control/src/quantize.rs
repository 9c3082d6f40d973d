//! [`Quantizer`]: Q(R), the remaining load of a layer as one of a few states.

use ls_bundle::ids::ByteCount;

/// States of the controller.
pub const STATES: usize = 16;

/// A state of the controller: 0 has the least to load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct State(pub u8);

impl State {
    /// The state as an index into a slice.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// States of about equal probability, of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantizer {
    /// A load is in state i if exactly i of them are not above it. Ascending; repeated `u64::MAX` at the end where there
    /// are fewer different loads than states.
    thresholds: [u64; STATES - 1],
}

impl Quantizer {
    /// States that are about equally probable under `samples`, in bytes and any order. Equal loads are in one state; what
    /// they leave is shared among the others, so a load that is there half the time (often 0) costs one state and not
    /// eight. Without samples all loads are in state 0.
    #[must_use]
    pub fn of_samples(samples: &[u64]) -> Quantizer {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable();
        let mut thresholds = [u64::MAX; STATES - 1];
        let mut start = 0;
        for (index, threshold) in thresholds.iter_mut().enumerate() {
            let share = (sorted.len() - start).div_ceil(STATES - index);
            if share == 0 {
                break;
            }
            let last = sorted[start + share - 1];
            let end = start + sorted[start..].partition_point(|&load| load <= last);
            let Some(&next) = sorted.get(end) else { break };
            // In the middle of the gap, rounded up: above `last`, not above `next`.
            *threshold = last + (next - last).div_ceil(2);
            start = end;
        }
        Quantizer { thresholds }
    }

    /// As written; none if they do not ascend.
    pub(crate) fn from_thresholds(thresholds: [u64; STATES - 1]) -> Option<Quantizer> {
        thresholds.is_sorted().then_some(Quantizer { thresholds })
    }

    /// See the field.
    #[must_use]
    pub fn thresholds(&self) -> &[u64; STATES - 1] {
        &self.thresholds
    }

    /// Q(R).
    #[must_use]
    pub fn state(&self, remaining: ByteCount) -> State {
        State(self.thresholds.partition_point(|&threshold| threshold <= remaining.0) as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(samples: &[u64]) -> [usize; STATES] {
        let quantizer = Quantizer::of_samples(samples);
        let mut counts = [0; STATES];
        for &sample in samples {
            counts[quantizer.state(ByteCount(sample)).index()] += 1;
        }
        counts
    }

    #[test]
    fn different_loads_fill_all_states_equally() {
        let samples: Vec<u64> = (0..1600).map(|i| (i * i) % 1601 * 7 + i).collect();
        assert!(counts(&samples).iter().all(|&count| (90..=110).contains(&count)));
    }

    #[test]
    fn a_frequent_load_costs_one_state() {
        let mut samples = vec![0; 1000];
        samples.extend(1..=600);
        let counts = counts(&samples);
        assert_eq!(counts[0], 1000);
        assert!(counts[1..].iter().all(|&count| count == 40), "{counts:?}");
    }

    #[test]
    fn few_loads_make_few_states() {
        let quantizer = Quantizer::of_samples(&[5, 5, 9]);
        let states = [0, 5, 6, 7, 9, u64::MAX - 1].map(|r| quantizer.state(ByteCount(r)).0);
        assert_eq!(states, [0, 0, 0, 1, 1, 1]);
        assert_eq!(Quantizer::of_samples(&[]).state(ByteCount(1 << 40)), State(0));
    }

    #[test]
    fn thresholds_must_ascend() {
        let mut thresholds = *Quantizer::of_samples(&[1, 2, 3, 4]).thresholds();
        assert!(Quantizer::from_thresholds(thresholds).is_some());
        thresholds.swap(0, 1);
        assert!(Quantizer::from_thresholds(thresholds).is_none());
    }
}
