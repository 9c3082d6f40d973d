//! Orders of neurons from the tokens that they are active in.
//!
//! Two neurons in one block cost as many reads as tokens in which at least one is active: what a pair saves is how often
//! both are, so good pairs are a matching of large weight, and good blocks are those whose union of tokens is small.
//! Only each unit's best [`PARTNERS`] are looked at, so memory stays linear. What makes a partner good is not how often
//! both act, which is always most for those that act most, but how much of that a partner of its own kind would not
//! have given them anyhow: see [`Units::partners`].

use crate::stages::coactivity::{Coactivity, STRIP, count, together, together_in_strip};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;

/// Partners of a unit that are looked at.
const PARTNERS: usize = 48;
/// Rounds of exchanging members; it mostly ends by itself after a few.
const ROUNDS: usize = 16;

/// Neurons that stay together, and the tokens in which any is active.
#[derive(Clone, Debug)]
struct Unit {
    members: Vec<u32>,
    bits: Vec<u64>,
    count: u32,
}

/// Units of one size, over so many tokens.
#[derive(Debug)]
struct Units {
    tokens: usize,
    all: Vec<Unit>,
}

/// Each neuron by itself and its best partners: what blocks are made of.
#[derive(Debug)]
pub(super) struct Singles {
    units: Units,
    partners: Vec<Vec<Partner>>,
}

/// A candidate for a unit's block.
#[derive(Clone, Copy, Debug)]
struct Partner {
    /// How good it is, for the unit whose candidate it is.
    gain: i64,
    id: usize,
}

/// A shuffled order.
pub(super) fn random(neurons: u32, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..neurons).collect();
    order.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(seed));
    order
}

/// Most often active first.
pub(super) fn by_frequency(found: &Coactivity) -> Vec<u32> {
    let mut order: Vec<u32> = (0..found.neurons() as u32).collect();
    order.sort_by_key(|&neuron| std::cmp::Reverse(count(found.row(neuron as usize))));
    order
}

impl Singles {
    pub(super) fn of(found: &Coactivity) -> Singles {
        let units = Units::of(found);
        let partners = units.partners();
        Singles { units, partners }
    }

    /// Blocks of `block` grown from the best pairs.
    pub(super) fn greedy(&self, block: usize) -> Vec<u32> {
        let blocks = self.units.grow(&self.partners, block.max(1));
        self.units.join(&blocks).nest()
    }

    /// Blocks of `block` that are grown and then improved by exchanging neurons; of a block size that can be halved,
    /// halves first. On to pairs of blocks, pairs of pairs, and so on.
    pub(super) fn matching(self, block: usize) -> Vec<u32> {
        let Singles { units, partners } = self;
        match block.max(1) >> block.max(1).trailing_zeros() {
            1 if units.all.len() % 2 == 1 => units.nest(),
            1 => units.group(&partners, 2).nest(),
            odd => units.group(&partners, odd).nest(),
        }
    }
}

impl Unit {
    fn new(members: Vec<u32>, bits: Vec<u64>) -> Unit {
        let count = count(&bits);
        Unit { members, bits, count }
    }

    fn add(&mut self, other: &Unit) {
        self.members.extend(&other.members);
        self.bits.iter_mut().zip(&other.bits).for_each(|(all, word)| *all |= word);
        self.count = count(&self.bits);
    }
}

impl Units {
    /// Each neuron by itself.
    fn of(found: &Coactivity) -> Units {
        let unit = |neuron| Unit::new(vec![neuron as u32], found.row(neuron).to_vec());
        Units { tokens: found.tokens(), all: (0..found.neurons()).map(unit).collect() }
    }

    /// Each unit's best partners, best first.
    ///
    /// Pairing every unit with one of its own frequency is worth count^2 / tokens / 2 to each of two that know nothing
    /// of each other, and costs nothing to get. A partner's gain is what it adds to that, times 2 tokens.
    fn partners(&self) -> Vec<Vec<Partner>> {
        let tokens = self.tokens as i64;
        let own = |unit: &Unit| i64::from(unit.count) * i64::from(unit.count);
        let bits: Vec<u64> = self.all.iter().flat_map(|unit| &unit.bits).copied().collect();
        let counts: Vec<u32> = self.all.iter().map(|unit| unit.count).collect();
        let all = self.all.len();
        let best_of = |id: usize, together: &[u32], candidates: &mut Vec<Partner>| {
            let unit = &self.all[id];
            let gain = |other: usize| {
                2 * tokens * i64::from(together[other]) - own(unit) - own(&self.all[other])
            };
            candidates.clear();
            let others = (0..all).filter(|&other| other != id);
            candidates.extend(others.map(|id| Partner { gain: gain(id), id }));
            let best = |partner: &Partner| (std::cmp::Reverse(partner.gain), partner.id);
            if candidates.len() > PARTNERS {
                candidates.select_nth_unstable_by_key(PARTNERS, best);
                candidates.truncate(PARTNERS);
            }
            candidates.sort_unstable_by_key(best);
            // Not the candidates themselves, whose memory is for all units.
            candidates.as_slice().to_vec()
        };
        let strips = (0..all).into_par_iter().step_by(STRIP);
        let of_strip = |(together, candidates): &mut (Vec<u32>, Vec<Partner>), first: usize| {
            let together = &mut together[..STRIP.min(all - first) * all];
            together_in_strip(&bits, &counts, first, together);
            let rows = (first..).zip(together.chunks_exact(all));
            rows.map(|(id, row)| best_of(id, row, candidates)).collect::<Vec<_>>()
        };
        let found: Vec<_> =
            strips.map_init(|| (vec![0; STRIP * all], Vec::new()), of_strip).collect();
        found.into_iter().flatten().collect()
    }

    /// Blocks of `size` units, grown from the best pairs by what adds least; then of what is left, by frequency. The
    /// last block may be short.
    fn grow(&self, partners: &[Vec<Partner>], size: usize) -> Vec<Vec<usize>> {
        let mut free = vec![true; self.all.len()];
        let mut blocks = Vec::new();
        for (a, b) in ranked(partners) {
            if size < 2 || !free[a] || !free[b] {
                continue;
            }
            let mut ids = vec![a, b];
            let mut grown = self.union(&ids);
            while ids.len() < size {
                let near = ids.iter().flat_map(|&id| &partners[id]).map(|partner| partner.id);
                // What a unit adds to the block's tokens is read in vain for the others.
                let best = near.filter(|id| free[*id] && !ids.contains(id)).min_by_key(|&id| {
                    let unit = &self.all[id];
                    (unit.count - together(&unit.bits, &grown.bits), id)
                });
                let Some(best) = best else { break };
                grown.add(&self.all[best]);
                ids.push(best);
            }
            // A short block would shift all that follow it: its units are left over.
            if ids.len() == size {
                ids.iter().for_each(|&id| free[id] = false);
                blocks.push(ids);
            }
        }
        let mut left: Vec<usize> = (0..self.all.len()).filter(|&id| free[id]).collect();
        left.sort_by_key(|&id| (std::cmp::Reverse(self.all[id].count), id));
        blocks.extend(left.chunks(size).map(<[usize]>::to_vec));
        blocks
    }

    fn union(&self, ids: &[usize]) -> Unit {
        let mut unit = self.all[ids[0]].clone();
        ids[1..].iter().for_each(|&id| unit.add(&self.all[id]));
        unit
    }

    /// Each block as a unit, most often active first; a short one stays last.
    fn join(&self, blocks: &[Vec<usize>]) -> Units {
        let size = blocks.first().map_or(0, Vec::len);
        let mut all: Vec<Unit> = blocks.iter().map(|ids| self.union(ids)).collect();
        let short = all.pop_if(|_| blocks.last().is_some_and(|ids| ids.len() < size));
        all.sort_by_key(|unit| std::cmp::Reverse(unit.count));
        all.extend(short);
        Units { tokens: self.tokens, all }
    }

    /// Blocks of `size` as units, grown and then improved: two units of different blocks change places wherever that
    /// makes the blocks' tokens fewer.
    fn group(&self, partners: &[Vec<Partner>], size: usize) -> Units {
        let mut blocks = self.grow(partners, size);
        let mut block_of = vec![0; self.all.len()];
        for (number, ids) in blocks.iter().enumerate() {
            ids.iter().for_each(|&id| block_of[id] = number);
        }
        let cost = |ids: &[usize]| self.tokens_of(ids);
        let mut costs: Vec<u32> = blocks.iter().map(|ids| cost(ids)).collect();
        for _ in 0..ROUNDS {
            let mut gained = false;
            for a in 0..self.all.len() {
                for partner in &partners[a] {
                    let (from, to) = (block_of[a], block_of[partner.id]);
                    if from == to {
                        continue;
                    }
                    // a takes the place of one of its partner's companions.
                    for place in 0..blocks[to].len() {
                        let other = blocks[to][place];
                        if other == partner.id {
                            continue;
                        }
                        let swapped = |ids: &[usize], out: usize, into: usize| -> Vec<usize> {
                            ids.iter().map(|&id| if id == out { into } else { id }).collect()
                        };
                        let new =
                            [swapped(&blocks[from], a, other), swapped(&blocks[to], other, a)];
                        let new_costs = [cost(&new[0]), cost(&new[1])];
                        if new_costs[0] + new_costs[1] < costs[from] + costs[to] {
                            [costs[from], costs[to]] = new_costs;
                            [blocks[from], blocks[to]] = new;
                            (block_of[a], block_of[other]) = (to, from);
                            gained = true;
                            break;
                        }
                    }
                }
            }
            if !gained {
                break;
            }
        }
        self.join(&blocks)
    }

    /// How many tokens any of these units is active in.
    fn tokens_of(&self, ids: &[usize]) -> u32 {
        let rows: Vec<&[u64]> = ids.iter().map(|&id| &self.all[id].bits[..]).collect();
        match rows[..] {
            [a, b] => self.all[ids[0]].count + self.all[ids[1]].count - together(a, b),
            [a, b, c] => {
                let union = a.iter().zip(b).zip(c).map(|((a, b), c)| (a | b | c).count_ones());
                union.sum()
            }
            _ => self.union(ids).count,
        }
    }

    /// Joins units in pairs until one is left, and returns its members. A unit without a partner stays last.
    fn nest(mut self) -> Vec<u32> {
        let mut tails: Vec<Vec<u32>> = Vec::new();
        let size = self.all.first().map_or(0, |unit| unit.members.len());
        if let Some(short) = self.all.pop_if(|unit| unit.members.len() < size) {
            tails.push(short.members);
        }
        while self.all.len() > 1 {
            if self.all.len() % 2 == 1 {
                let rarest = (0..self.all.len()).min_by_key(|&id| (self.all[id].count, id));
                tails.push(self.all.remove(rarest.expect("there are units")).members);
            }
            self = self.group(&self.partners(), 2);
        }
        let mut order = self.all.pop().map_or(Vec::new(), |unit| unit.members);
        order.extend(tails.into_iter().rev().flatten());
        order
    }
}

/// All candidate pairs, best first.
fn ranked(partners: &[Vec<Partner>]) -> Vec<(usize, usize)> {
    let pair = |(a, partners): (usize, &Vec<Partner>)| {
        let pair = move |b: &Partner| (std::cmp::Reverse(b.gain), a.min(b.id), a.max(b.id));
        partners.iter().map(pair).collect::<Vec<_>>()
    };
    let mut pairs: Vec<_> = partners.iter().enumerate().flat_map(pair).collect();
    pairs.sort_unstable();
    pairs.dedup();
    pairs.into_iter().map(|(_, a, b)| (a, b)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn coactivity(neurons: u32, tokens: &[&[u32]]) -> Coactivity {
        let mut all = Coactivity::new(neurons, tokens.len());
        for set in tokens {
            let codes: Vec<u8> =
                (0..neurons).map(|n| if set.contains(&n) { 200 } else { 3 }).collect();
            all.push(&codes, set.len());
        }
        all
    }

    #[test]
    fn exchanging_partners_finds_what_greed_misses() {
        // All act five times. 1 and 2 are together most often, but 0-1 and 2-3 together save more.
        let tokens: [(&[u32], usize); 5] =
            [(&[1, 2], 3), (&[0, 1], 2), (&[2, 3], 2), (&[0], 3), (&[3], 3)];
        let tokens: Vec<&[u32]> =
            tokens.iter().flat_map(|&(set, times)| std::iter::repeat_n(set, times)).collect();
        let found = coactivity(4, &tokens);
        assert_eq!(found.redundancy(&Singles::of(&found).matching(2), 2), 32.0 / 20.0 - 1.0);
        assert_eq!(found.redundancy(&Singles::of(&found).greedy(2), 2), 34.0 / 20.0 - 1.0);
    }

    /// Groups of `group` neurons of 60 that act as one, three at a time.
    fn planted(group: usize) -> Coactivity {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        let mut order: Vec<u32> = (0..60).collect();
        order.shuffle(&mut random);
        let groups: Vec<&[u32]> = order.chunks(group).collect();
        let mut found = Coactivity::new(60, 200);
        for _ in 0..200 {
            let mut codes = [3u8; 60];
            let mut ids: Vec<usize> = (0..60 / group).collect();
            ids.shuffle(&mut random);
            ids[..3].iter().flat_map(|&id| groups[id]).for_each(|&n| codes[n as usize] = 200);
            found.push(&codes, 3 * group);
        }
        found
    }

    #[test]
    fn groups_that_act_as_one_are_found_at_every_block_size() {
        for (group, block) in [(4, 2), (4, 4), (3, 3), (6, 3), (6, 6), (5, 5)] {
            let found = planted(group);
            let redundancy = |order: &[u32]| found.redundancy(order, block);
            assert_eq!(redundancy(&Singles::of(&found).matching(block)), 0.0, "{group} {block}");
            assert_eq!(redundancy(&Singles::of(&found).greedy(block)), 0.0, "{group} {block}");
            assert!(redundancy(&random(60, 2)) > 0.5);
        }
    }

    #[test]
    fn rare_partners_are_found_beside_ones_that_are_always_active() {
        // Neurons 0 to 79 act in most tokens; each pair from 80 on in a few, always together.
        let mut random = Xoshiro256PlusPlus::seed_from_u64(3);
        let mut found = Coactivity::new(160, 400);
        for token in 0..400 {
            let mut codes = [3u8; 160];
            codes[..80]
                .iter_mut()
                .for_each(|code| *code = 200 + rand::Rng::random_range(&mut random, 0..9));
            let pair = 80 + token % 40;
            (codes[pair], codes[pair + 40]) = (255, 255);
            found.push(&codes, 70);
        }
        let order = Singles::of(&found).matching(2);
        let mate = |neuron: u32| {
            let place = order.iter().position(|&n| n == neuron).unwrap();
            order[place ^ 1]
        };
        assert!((80..120).all(|neuron| mate(neuron) == neuron + 40));
    }

    proptest! {
        #[test]
        fn every_method_orders_every_neuron_once(
            sets in prop::collection::vec(prop::collection::btree_set(0u32..13, 3), 1..20),
            block in 1usize..6,
        ) {
            let sets: Vec<Vec<u32>> = sets.into_iter().map(|set| set.into_iter().collect()).collect();
            let sets: Vec<&[u32]> = sets.iter().map(|set| &set[..]).collect();
            let found = coactivity(13, &sets);
            let orders = [
                by_frequency(&found),
                Singles::of(&found).greedy(block),
                Singles::of(&found).matching(block),
                random(13, 1),
            ];
            for mut order in orders {
                order.sort_unstable();
                prop_assert_eq!(order, (0..13).collect::<Vec<u32>>());
            }
        }
    }
}
