//! The search along one arm: the fewest exact neurons that keep the perplexity within each of some limits.

use crate::error::Result;
use serde::{Deserialize, Serialize};

/// Where a search starts that knows nothing: at a tenth of all steps, and with strides of as many.
const FIRST: u32 = 10;

/// What was found at one share of exact neurons.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The share that was asked for, in steps of the recipe.
    pub step: u32,
    /// Share of the neurons that ran exactly; a threshold meets what is asked only about.
    pub exact_share: f64,
    /// Of the held-out text.
    pub perplexity: f64,
    /// Share of the requested blocks that were in memory.
    pub hit_ratio: f64,
    /// Bytes read for a token, padding included.
    pub bytes: u64,
}

/// What is looked for along an arm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Goal {
    /// On the perplexity.
    pub(super) limit: f64,
    /// Bytes that another arm needs: what is not better is not looked for.
    pub(super) known_bytes: Option<u64>,
    /// The step at which this arm would need about as many.
    pub(super) near: Option<u32>,
}

/// The point within `limit` that reads least.
pub(super) fn cheapest<'a>(
    points: impl IntoIterator<Item = &'a Point>,
    limit: f64,
) -> Option<&'a Point> {
    points.into_iter().filter(|point| point.perplexity <= limit).min_by_key(|point| point.bytes)
}

/// Brackets and bisects the steps 0 to `steps` for each goal, all with the same points; those by steps.
pub(super) fn search(
    goals: &[Goal],
    steps: u32,
    mut ask: impl FnMut(u32) -> Result<Point>,
) -> Result<Vec<Point>> {
    let mut points: Vec<Point> = Vec::new();
    for goal in goals {
        let mut stride = if goal.near.is_some() { 1 } else { (steps / FIRST).max(1) };
        let (start, mut last_kept) = (goal.near.unwrap_or(steps / FIRST), None);
        while let Some(bracket) = Bracket::of(&points, goal, steps) {
            let step = match last_kept {
                None => bracket.inside(start),
                Some(kept) => bracket.towards(kept, stride),
            };
            if last_kept.is_some() {
                stride *= 2;
            }
            let point = ask(step)?;
            last_kept = Some(point.perplexity <= goal.limit);
            points.push(point);
        }
    }
    points.sort_by_key(|point| point.step);
    Ok(points)
}

/// Steps that are known to break a limit (`low`, or -1) and to keep it (`high`, or one more than there are).
#[derive(Clone, Copy, Debug)]
struct Bracket {
    low: i64,
    high: i64,
}

impl Bracket {
    /// Of the points so far, if there is anything left to ask.
    fn of(points: &[Point], goal: &Goal, steps: u32) -> Option<Bracket> {
        let (keep, broken): (Vec<&Point>, Vec<&Point>) =
            points.iter().partition(|point| point.perplexity <= goal.limit);
        let low = broken.into_iter().max_by_key(|point| point.step);
        // More neurons than there are needed, and so more bytes.
        if let (Some(low), Some(known)) = (low, goal.known_bytes)
            && low.bytes >= known
        {
            return None;
        }
        let low = low.map_or(-1, |point| i64::from(point.step));
        let high = keep.into_iter().map(|point| i64::from(point.step)).min();
        let high = high.unwrap_or(i64::from(steps) + 1);
        (high - low > 1).then_some(Bracket { low, high })
    }

    /// `step`, or what is nearest inside.
    fn inside(self, step: u32) -> u32 {
        i64::from(step).clamp(self.low + 1, self.high - 1) as u32
    }

    /// `stride` on from the end that was asked last, but not beyond the middle.
    fn towards(self, kept: bool, stride: u32) -> u32 {
        let stride = i64::from(stride).min((self.high - self.low) / 2).max(1);
        (if kept { self.high - stride } else { self.low + stride }) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(step: u32) -> Point {
        let exact_share = f64::from(step) / 80.0;
        Point {
            step,
            exact_share,
            perplexity: 20.0 * (1.0 + 0.3 * (-8.0 * exact_share).exp()),
            hit_ratio: 0.0,
            bytes: 1000 * u64::from(step),
        }
    }

    fn goal(limit: f64) -> Goal {
        Goal { limit, known_bytes: None, near: None }
    }

    fn found(goals: &[Goal]) -> Vec<Point> {
        search(goals, 80, |step| Ok(point(step))).unwrap()
    }

    #[test]
    fn the_fewest_neurons_within_each_limit_are_found() {
        let limits = [22.0, 21.0, 20.2];
        let points = found(&limits.map(goal));
        for limit in limits {
            let best = cheapest(&points, limit).unwrap().step;
            assert!(point(best).perplexity <= limit && point(best - 1).perplexity > limit);
        }
        assert!(points.len() < 20, "{} points for three limits", points.len());
        assert!(points.is_sorted_by(|a, b| a.step < b.step), "none is asked twice");
    }

    #[test]
    fn where_no_neuron_or_not_even_all_are_enough_it_ends() {
        assert_eq!(cheapest(&found(&[goal(30.0)]), 30.0).unwrap().step, 0);
        let points = found(&[goal(20.0)]);
        assert!(cheapest(&points, 20.0).is_none());
        assert_eq!(points.last().unwrap().step, 80);
        assert_eq!(search(&[goal(21.0)], 1, |step| Ok(point(step))).unwrap().len(), 2);
    }

    #[test]
    fn what_another_arm_does_better_is_left() {
        let best = cheapest(&found(&[goal(21.0)]), 21.0).unwrap().step;
        let beside = |near, known| {
            let goal = Goal { limit: 21.0, known_bytes: Some(known), near: Some(near) };
            found(&[goal])
        };
        // A worse arm is given up at the first point that reads as much and does not keep the limit.
        assert_eq!(beside(best - 1, 1000 * u64::from(best - 1)).len(), 1);
        // One that needs no more is searched to its end, at once if it was expected there.
        let points = beside(best, 1000 * u64::from(best) + 1);
        let steps: Vec<u32> = points.iter().map(|point| point.step).collect();
        assert_eq!(steps, [best - 1, best]);
    }
}
