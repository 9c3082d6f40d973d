//! Orders of neurons from the sets of tokens that they are active in.
//!
//! A neuron's tokens are a bit set, so how often two act together is one `and` and a population count. Two neurons in
//! one block cost as many reads as tokens in which at least one is active: what a pair saves is how often both are, so
//! good pairs are a matching of large weight. Candidates are each unit's best [`PARTNERS`]; memory stays linear.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;

/// Partners of a unit that are looked at.
const PARTNERS: usize = 48;
/// Rounds of exchanging partners; it mostly ends by itself after a few.
const ROUNDS: usize = 16;

/// Which neurons are active in which tokens.
#[derive(Debug)]
pub(super) struct Active {
    neurons: usize,
    tokens: usize,
    /// Active neurons of each token, `active` each.
    sets: Vec<u32>,
}

/// Neurons that stay together, and the tokens in which any is active.
#[derive(Clone, Debug)]
struct Unit {
    members: Vec<u32>,
    bits: Vec<u64>,
    count: u32,
}

impl Unit {
    fn new(members: Vec<u32>, bits: Vec<u64>) -> Unit {
        let count = bits.iter().map(|word| word.count_ones()).sum();
        Unit { members, bits, count }
    }

    fn together(&self, other: &Unit) -> u32 {
        self.bits.iter().zip(&other.bits).map(|(a, b)| (a & b).count_ones()).sum()
    }

    fn join(&self, other: &Unit) -> Unit {
        let members = [&self.members[..], &other.members].concat();
        Unit::new(members, self.bits.iter().zip(&other.bits).map(|(a, b)| a | b).collect())
    }
}

/// A shuffled order.
pub(super) fn random(neurons: u32, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..neurons).collect();
    order.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(seed));
    order
}

impl Active {
    pub(super) fn new(neurons: u32) -> Active {
        Active { neurons: neurons as usize, tokens: 0, sets: Vec::new() }
    }

    /// Adds a token whose neurons have these codes; the `active` largest count, the first of equals.
    pub(super) fn push(&mut self, codes: &[u8], active: usize) {
        let mut keys: Vec<u32> = codes
            .iter()
            .zip(0..)
            .map(|(&code, neuron)| u32::from(255 - code) << 24 | neuron)
            .collect();
        if active < keys.len() {
            keys.select_nth_unstable(active);
        }
        self.sets.extend(keys.iter().take(active).map(|key| key & 0x00ff_ffff));
        self.tokens += 1;
    }

    fn units(&self) -> Vec<Unit> {
        let words = self.tokens.div_ceil(64);
        let mut bits = vec![vec![0u64; words]; self.neurons];
        let active = self.sets.len() / self.tokens.max(1);
        for (token, set) in self.sets.chunks_exact(active.max(1)).enumerate() {
            for &neuron in set {
                bits[neuron as usize][token / 64] |= 1 << (token % 64);
            }
        }
        (0..).zip(bits).map(|(neuron, bits)| Unit::new(vec![neuron], bits)).collect()
    }

    /// Most often active first.
    pub(super) fn by_frequency(&self) -> Vec<u32> {
        let mut units = self.units();
        units.sort_by_key(|unit| std::cmp::Reverse(unit.count));
        units.into_iter().flat_map(|unit| unit.members).collect()
    }

    /// Blocks of `block` grown from the best pairs.
    pub(super) fn greedy(&self, block: usize) -> Vec<u32> {
        let units = self.units();
        let partners = partners(&units);
        let mut free = vec![true; units.len()];
        let mut blocks = Vec::new();
        for (_, a, b) in ranked(&partners) {
            if block < 2 || !free[a] || !free[b] {
                continue;
            }
            free[a] = false;
            free[b] = false;
            let (mut grown, mut ids) = (units[a].join(&units[b]), vec![a, b]);
            while ids.len() < block {
                let near = ids.iter().flat_map(|&id| &partners[id]).map(|&(_, other)| other);
                // What a neuron adds to the block's tokens is read in vain for the others.
                let best = near.filter(|&other| free[other]).min_by_key(|&other| {
                    (units[other].count - units[other].together(&grown), other)
                });
                let Some(best) = best else { break };
                free[best] = false;
                grown = grown.join(&units[best]);
                ids.push(best);
            }
            blocks.push(grown);
        }
        // Whole blocks first: one that is short would shift all that follow it.
        let (mut whole, short): (Vec<Unit>, Vec<Unit>) =
            blocks.into_iter().partition(|unit| unit.members.len() == block);
        let mut left: Vec<usize> = (0..units.len()).filter(|&id| free[id]).collect();
        let broken = short.iter().flat_map(|unit| &unit.members).map(|&neuron| neuron as usize);
        left.extend(broken);
        left.sort_by_key(|&id| (std::cmp::Reverse(units[id].count), id));
        let mut rest = left.chunks_exact(block.max(1));
        for ids in rest.by_ref() {
            let joined =
                ids[1..].iter().fold(units[ids[0]].clone(), |unit, &id| unit.join(&units[id]));
            whole.push(joined);
        }
        let tail: Vec<u32> = rest.remainder().iter().map(|&id| id as u32).collect();
        let mut order = nest(whole);
        order.extend(tail);
        order
    }

    /// Pairs, pairs of pairs, and so on.
    pub(super) fn matching(&self) -> Vec<u32> {
        nest(self.units())
    }

    /// Neurons read in vain over active ones, in blocks of `block` in this order.
    pub(super) fn redundancy(&self, order: &[u32], block: usize) -> f64 {
        let mut block_of = vec![0; self.neurons];
        for (place, &neuron) in order.iter().enumerate() {
            block_of[neuron as usize] = place / block;
        }
        let active = (self.sets.len() / self.tokens.max(1)).max(1);
        let last = (self.neurons - 1) / block;
        let mut read = 0u64;
        let mut seen = vec![usize::MAX; last + 1];
        for (token, set) in self.sets.chunks_exact(active).enumerate() {
            for &neuron in set {
                let id = block_of[neuron as usize];
                if seen[id] != token {
                    seen[id] = token;
                    read += if id == last { self.neurons - id * block } else { block } as u64;
                }
            }
        }
        read as f64 / self.sets.len().max(1) as f64 - 1.0
    }
}

/// Each unit's best partners: how often both are active, and who.
fn partners(units: &[Unit]) -> Vec<Vec<(u32, usize)>> {
    let of = |a: usize| {
        let mut all: Vec<(u32, usize)> = (0..units.len())
            .filter(|&b| b != a)
            .map(|b| (units[a].together(&units[b]), b))
            .collect();
        let best = |&(count, id): &(u32, usize)| (std::cmp::Reverse(count), id);
        if all.len() > PARTNERS {
            all.select_nth_unstable_by_key(PARTNERS, best);
            all.truncate(PARTNERS);
        }
        all.sort_unstable_by_key(best);
        all
    };
    (0..units.len()).into_par_iter().map(of).collect()
}

/// All candidate pairs, best first.
fn ranked(partners: &[Vec<(u32, usize)>]) -> Vec<(u32, usize, usize)> {
    let pair = |(a, partners): (usize, &Vec<(u32, usize)>)| {
        partners.iter().map(move |&(count, b)| (count, a.min(b), a.max(b))).collect::<Vec<_>>()
    };
    let mut pairs: Vec<_> = partners.iter().enumerate().flat_map(pair).collect();
    pairs.sort_unstable_by_key(|&(count, a, b)| (std::cmp::Reverse(count), a, b));
    pairs.dedup();
    pairs
}

/// Joins units in pairs until one is left, and returns its members. A unit without a partner stays last.
fn nest(mut units: Vec<Unit>) -> Vec<u32> {
    let mut tails: Vec<Vec<u32>> = Vec::new();
    while units.len() > 1 {
        if units.len() % 2 == 1 {
            let rarest = (0..units.len()).min_by_key(|&id| (units[id].count, id));
            tails.push(units.remove(rarest.expect("there are units")).members);
        }
        units = pair_up(&units);
    }
    let mut order = units.pop().map_or(Vec::new(), |unit| unit.members);
    order.extend(tails.into_iter().rev().flatten());
    order
}

/// Joins an even number of units in pairs: greedily, then exchanging partners as long as that gains.
fn pair_up(units: &[Unit]) -> Vec<Unit> {
    const NONE: usize = usize::MAX;
    let partners = partners(units);
    let mut mate = vec![NONE; units.len()];
    let join = |mate: &mut Vec<usize>, a: usize, b: usize| {
        mate[a] = b;
        mate[b] = a;
    };
    for (_, a, b) in ranked(&partners) {
        if mate[a] == NONE && mate[b] == NONE {
            join(&mut mate, a, b);
        }
    }
    let mut left: Vec<usize> = (0..units.len()).filter(|&id| mate[id] == NONE).collect();
    left.sort_by_key(|&id| (std::cmp::Reverse(units[id].count), id));
    left.chunks_exact(2).for_each(|pair| join(&mut mate, pair[0], pair[1]));
    for _ in 0..ROUNDS {
        let mut gained = false;
        for a in 0..units.len() {
            for &(with_c, c) in &partners[a] {
                let (b, d) = (mate[a], mate[c]);
                if c == b {
                    continue;
                }
                let now = units[a].together(&units[b]) + units[c].together(&units[d]);
                if with_c + units[b].together(&units[d]) > now {
                    join(&mut mate, a, c);
                    join(&mut mate, b, d);
                    gained = true;
                }
            }
        }
        if !gained {
            break;
        }
    }
    let mut pairs: Vec<Unit> =
        (0..units.len()).filter(|&a| a < mate[a]).map(|a| units[a].join(&units[mate[a]])).collect();
    pairs.sort_by_key(|pair| std::cmp::Reverse(pair.count));
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn active(neurons: u32, tokens: &[&[u32]]) -> Active {
        let mut all = Active::new(neurons);
        for set in tokens {
            let codes: Vec<u8> =
                (0..neurons).map(|n| if set.contains(&n) { 200 } else { 3 }).collect();
            all.push(&codes, set.len());
        }
        all
    }

    #[test]
    fn redundancy_counts_what_is_read_in_vain() {
        let found = active(5, &[&[0, 1], &[0, 2], &[4, 3]]);
        let order = [0, 1, 2, 3, 4];
        // Blocks {0 1} {2 3} {4}: 2, 4 and 3 neurons are read for 2 each.
        assert_eq!(found.redundancy(&order, 2), 9.0 / 6.0 - 1.0);
        assert_eq!(found.redundancy(&order, 1), 0.0);
        assert_eq!(found.redundancy(&[0, 1, 4, 3, 2], 2), 7.0 / 6.0 - 1.0);
        assert_eq!(found.redundancy(&order, 5), 15.0 / 6.0 - 1.0);
    }

    #[test]
    fn exchanging_partners_finds_what_greed_misses() {
        // 1 and 2 are together most often, but 0-1 and 2-3 together save more.
        let tokens: [&[u32]; 7] = [&[1, 2], &[1, 2], &[1, 2], &[0, 1], &[0, 1], &[2, 3], &[2, 3]];
        let found = active(4, &tokens);
        assert_eq!(found.redundancy(&found.matching(), 2), 20.0 / 14.0 - 1.0);
        assert_eq!(found.redundancy(&found.greedy(2), 2), 22.0 / 14.0 - 1.0);
    }

    #[test]
    fn groups_that_act_as_one_are_found_at_every_block_size() {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        let mut order: Vec<u32> = (0..64).collect();
        order.shuffle(&mut random);
        let groups: Vec<&[u32]> = order.chunks(4).collect();
        let mut found = Active::new(64);
        for _ in 0..200 {
            let mut codes = [3u8; 64];
            let mut ids: Vec<usize> = (0..16).collect();
            ids.shuffle(&mut random);
            ids[..3].iter().flat_map(|&id| groups[id]).for_each(|&n| codes[n as usize] = 200);
            found.push(&codes, 12);
        }
        for block in [2, 4] {
            assert_eq!(found.redundancy(&found.matching(), block), 0.0);
            assert_eq!(found.redundancy(&found.greedy(block), block), 0.0);
            assert!(found.redundancy(&super::random(64, 2), block) > 0.5);
        }
    }

    proptest! {
        #[test]
        fn every_method_orders_every_neuron_once(
            sets in prop::collection::vec(prop::collection::btree_set(0u32..13, 3), 1..20),
            block in 1usize..6,
        ) {
            let sets: Vec<Vec<u32>> = sets.into_iter().map(|set| set.into_iter().collect()).collect();
            let sets: Vec<&[u32]> = sets.iter().map(|set| &set[..]).collect();
            let found = active(13, &sets);
            for mut order in [found.by_frequency(), found.greedy(block), found.matching(), random(13, 1)] {
                order.sort_unstable();
                prop_assert_eq!(order, (0..13).collect::<Vec<u32>>());
            }
        }
    }
}
