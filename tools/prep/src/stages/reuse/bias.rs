//! What a selection that prefers cached blocks gains in hits and loses in importance.
//!
//! A token uses its strongest blocks, `active_share` of them; a block is as strong as its neurons' magnitudes together,
//! and counts 2^bias times as much while it is cached. So, unlike in the traces, what is requested depends on the cache.

use super::Biased;
use super::requests::{ONE, held_out, strongest};
use crate::error::Result;
use crate::recipe;
use crate::stages::activations::{Activations, Chunk, decode_magnitude, encode_magnitude};
use ls_bundle::ids::BlockId;
use ls_cache::policy::{Hazard, HazardTable};
use ls_cache::{Admission, Blocks, Request, Sharing, WeightCache};

/// One bias at one capacity.
struct Run {
    steps: u16,
    cache: WeightCache,
    importance: f64,
}

/// Replays the held-out windows of a layer with every bias of the recipe at every capacity.
pub(super) fn biased(
    activations: &Activations,
    layer: u32,
    order: &[u32],
    block_neurons: u32,
    hazard: &HazardTable,
    recipe: &recipe::Reuse,
) -> Result<Vec<Biased>> {
    let count = order.len().div_ceil(block_neurons as usize);
    let blocks = Blocks::even(1, count as u32);
    let active = (recipe.active_share * count as f64).round().max(1.0) as usize;
    let new = |bias: f64, share: f64| {
        let kept = (share * count as f64).round() as u32;
        let policy = Box::new(Hazard::new(&blocks, std::slice::from_ref(hazard)));
        let (sharing, admission) = (Sharing::PerLayer(vec![kept]), Admission::Compete);
        let cache =
            WeightCache::new(blocks.clone(), kept + count as u32, sharing, admission, policy);
        // A code less by one is 16/254 of an octave less.
        Run { steps: (bias * 254.0 / 16.0).round() as u16, cache, importance: 0.0 }
    };
    let mut runs: Vec<Vec<Run>> = recipe
        .cache_bias
        .iter()
        .map(|&bias| recipe.capacities.iter().map(|&share| new(bias, share)).collect())
        .collect();
    let mut best = 0.0;
    if !runs.is_empty() {
        for chunk in activations.layer(layer) {
            let chunk = chunk?;
            for token in 0..chunk.tokens() {
                if held_out(activations.params(), &chunk, token, recipe.holdout_every) {
                    let codes = block_codes(&chunk, token, order, block_neurons as usize);
                    best += importance(&codes, strongest(&codes, active));
                    runs.iter_mut().flatten().for_each(|run| run.token(&codes, active));
                }
            }
        }
    }
    let of = |(bias, runs): (&f64, &Vec<Run>)| Biased {
        octaves: *bias,
        hits: runs.iter().map(|run| run.cache.counts(ONE).demand_hit_ratio()).collect(),
        importance: runs.iter().map(|run| run.importance / f64::max(best, 1e-300)).collect(),
    };
    Ok(recipe.cache_bias.iter().zip(&runs).map(of).collect())
}

impl Run {
    fn token(&mut self, codes: &[u16], active: usize) {
        let raised = |(&code, number): (&u16, u32)| {
            code + if self.cache.find(BlockId(number)).is_some() { self.steps } else { 0 }
        };
        let raised: Vec<u16> = codes.iter().zip(0..).map(raised).collect();
        self.importance += importance(codes, strongest(&raised, active));
        self.cache.begin(ONE);
        let mut pinned = Vec::new();
        for number in strongest(&raised, active) {
            let block = BlockId(number as u32);
            let slot = match self.cache.request(block) {
                Request::Hit(slot) | Request::Coming(slot) => Some(slot),
                Request::Miss => {
                    self.cache.reserve(block).map(|loading| self.cache.publish(loading))
                }
            };
            pinned.extend(slot);
        }
        pinned.into_iter().for_each(|slot| self.cache.unpin(slot));
        self.cache.settle();
    }
}

/// Each block's mean magnitude, as a code.
fn block_codes(chunk: &Chunk, token: usize, order: &[u32], block_neurons: usize) -> Vec<u16> {
    let codes = chunk.codes(token);
    let code = |block: &[u32]| {
        let magnitudes = block.iter().map(|&neuron| decode_magnitude(codes[neuron as usize]));
        u16::from(encode_magnitude(magnitudes.sum::<f32>() / block_neurons as f32))
    };
    order.chunks(block_neurons).map(code).collect()
}

fn importance(codes: &[u16], blocks: impl Iterator<Item = usize>) -> f64 {
    blocks.map(|block| f64::from(decode_magnitude(codes[block] as u8))).sum()
}
