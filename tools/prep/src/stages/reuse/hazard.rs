//! The table of [`ls_cache::policy::Hazard`], counted: what was requested next, by what had happened before.

use super::requests::ONE;
use crate::recipe;
use ls_cache::AccessTrace;
use ls_cache::policy::{HazardTable, MEAN_STEPS, Pasts};

/// Imagined blocks of each entry that do as all do.
const PRIOR_BLOCKS: f64 = 8.0;

/// Means and worths, learned from a trace of one layer in which the blocks were requested `frequencies` times.
///
/// A past is worth the requests of the visits behind it, each weighted as the recipe says; thresholds cut both means in
/// intervals of equal probability.
pub(super) fn learn(
    trace: &AccessTrace,
    frequencies: &[u32],
    recipe: &recipe::Reuse,
) -> HazardTable {
    let tokens = trace.tokens();
    let mean = |&count: &u32| (65535.0 * f64::from(count) / tokens.max(1) as f64).round() as u16;
    let initial: Vec<u16> = frequencies.iter().map(mean).collect();
    let rates = recipe.means.map(|keep| ((1.0 - keep) * 65536.0).round() as u16);
    let mut steps = [vec![0u64; usize::from(MEAN_STEPS)], vec![0; usize::from(MEAN_STEPS)]];
    live(trace, recipe.recent, rates, &initial, |_, number, pasts| {
        for (steps, mean) in steps.iter_mut().zip(pasts.of(number).1) {
            steps[usize::from(mean / (u16::MAX / MEAN_STEPS + 1))] += 1;
        }
    });
    let thresholds = [0, 1].map(|which| equal_shares(&steps[which], recipe.levels[which]));
    let mut table =
        HazardTable { recent: recipe.recent, rates, thresholds, worths: Vec::new(), initial };
    let [fast, slow] = table.levels();
    let mut sums = vec![(0f64, 0f64); (fast * slow) << recipe.recent];
    let total: f64 = recipe.ahead.iter().sum();
    let mut coming = vec![0f32; frequencies.len()];
    let mut known = None;
    live(trace, recipe.recent, rates, &table.initial, |token, number, pasts| {
        if known != Some(token) {
            known = Some(token);
            coming.fill(0.0);
            for (ahead, weight) in (token + 1..tokens).zip(&recipe.ahead) {
                let share = (weight / total) as f32;
                trace.set(ahead, ONE).for_each(|block| coming[block.index()] += share);
            }
        }
        let (recent, means) = pasts.of(number);
        let (sum, count) = &mut sums[table.entry(recent, means)];
        (*sum, *count) = (*sum + f64::from(coming[number]), *count + 1.0);
    });
    let (sum, count) = sums.iter().fold((0.0, 0.0), |(s, c), (sum, count)| (s + sum, c + count));
    let all = sum / f64::max(count, 1.0);
    let worth = |(sum, count): &(f64, f64)| {
        (65535.0 * (sum + PRIOR_BLOCKS * all) / (count + PRIOR_BLOCKS)).round() as u16
    };
    table.worths = sums.iter().map(worth).collect();
    table
}

/// Lives through a trace: tells of every block after every visit but the last.
fn live(
    trace: &AccessTrace,
    recent: u32,
    rates: [u16; 2],
    initial: &[u16],
    mut tell: impl FnMut(usize, usize, &Pasts),
) {
    let mut pasts = Pasts::new(recent, rates, initial);
    for token in 0..trace.tokens().saturating_sub(1) {
        pasts.visit();
        trace.set(token, ONE).for_each(|block| pasts.requested(block.index()));
        (0..initial.len()).for_each(|number| tell(token, number, &pasts));
    }
}

/// Thresholds between `levels` intervals that hold about as many each.
fn equal_shares(counts: &[u64], levels: u32) -> Vec<u16> {
    let total: u64 = counts.iter().sum();
    let (mut below, mut step) = (0, 0);
    let mut threshold = |level: u32| {
        let wanted = total * u64::from(level) / u64::from(levels);
        while step + 1 < counts.len() && below < wanted {
            below += counts[step];
            step += 1;
        }
        step as u16
    };
    (1..levels).map(&mut threshold).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Recipe;
    use ls_bundle::ids::BlockId;
    use ls_cache::Blocks;

    #[test]
    fn intervals_hold_equal_shares() {
        assert_eq!(equal_shares(&[4, 0, 1, 1, 2], 2), [1]);
        assert_eq!(equal_shares(&[1, 1, 1, 1], 4), [1, 2, 3]);
        assert_eq!(equal_shares(&[0, 0, 8, 0], 4), [3, 3, 3]);
    }

    #[test]
    fn a_block_is_worth_what_follows_its_past() {
        // Block 0 comes every other visit, block 1 in pairs of visits and pairs without, block 2 always, block 3 never.
        let mut trace = AccessTrace::with_capacity(Blocks::even(1, 4), 2000);
        for token in 0..2000 {
            let wanted = [token % 2 == 0, token % 4 < 2, true, false];
            trace.push((0..4).filter(|&n| wanted[n as usize]).map(BlockId));
        }
        let mut recipe = Recipe::load("tiny").unwrap().reuse;
        (recipe.recent, recipe.ahead) = (3, vec![1.0]);
        let frequencies = [1000, 1000, 2000, 0];
        let table = learn(&trace, &frequencies, &recipe);
        assert!(table.is_sound());
        let mut pasts = Pasts::new(3, table.rates, &table.initial);
        for token in 0..1000 {
            pasts.visit();
            trace.set(token, ONE).for_each(|block| pasts.requested(block.index()));
            if token < 500 {
                continue;
            }
            for number in 0..4 {
                let (recent, means) = pasts.of(number);
                let next = trace.set(token + 1, ONE).any(|block| block.index() == number);
                let worth = f64::from(table.worths[table.entry(recent, means)]) / 65535.0;
                assert!(
                    (worth - f64::from(u8::from(next))).abs() < 0.05,
                    "{token} {number}: {worth}"
                );
            }
        }
    }
}
