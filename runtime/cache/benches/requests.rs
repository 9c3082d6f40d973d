//! Nanoseconds of a request, everything included: the request, slot, pin and unpin, and its share of the settling.
//!
//! Eight layers of 7168 blocks (two neurons each of a 7B model's FFN), of which a visit requests 1434 (20 %) with a
//! skew; 12.5, 25 and 50 % stay. Each figure is the least of several runs over 40 tokens, the cache being full.
//!
//! `cargo bench -p ls-cache --bench requests`
//!
//! Kept results: 2 virtual cores of an AMD EPYC (Zen 4), others at work on both, November 2026; nanoseconds a request
//! with a cache a layer / one of all layers. The trace is made up: its hit ratios say nothing.
//!
//! | policy | 12.5 % | 25 % | 50 % |
//! |---|---|---|---|
//! | none | 42 / 50 | 24 / 34 | 54 / 47 |
//! | lru | 59 / 65 | 68 / 88 | 59 / 61 |
//! | lfu | 137 / 195 | 170 / 201 | 154 / 113 |
//! | ema | 116 / 192 | 106 / 226 | 83 / 101 |
//! | hot pinned | 114 / 106 | 143 / 154 | 56 / 74 |
//! | hazard | 237 / 298 | 318 / 371 | 168 / 200 |
//! | belady | 429 / 425 | 480 / 400 | 263 / 228 |
//!
//! Runs differed by up to a factor of two. Hazard ranks all candidates anew in each visit, up to 2.5 for each request.

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

use ls_bundle::ids::BlockId;
use ls_cache::policy::{
    Belady, Ema, GapTable, Hazard, HazardTable, HotPinned, Lfu, Lru, Nothing, ReuseDistance,
};
use ls_cache::{AccessTrace, Admission, Blocks, EvictionPolicy, Sharing, WeightCache, replay};
use std::time::Instant;

const LAYERS: u16 = 8;
const BLOCKS: u32 = 7168;
const REQUESTED: usize = 1434;
const TOKENS: usize = 120;
const WARM: usize = 80;
const RUNS: usize = 5;

/// Reproducible numbers.
struct Draw(u64);

impl Draw {
    fn unit(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }
}

/// Each block has a rate of its own, and what was requested is more often requested again.
fn trace() -> AccessTrace {
    let mut draw = Draw(7);
    let mut trace = AccessTrace::with_capacity(Blocks::even(LAYERS, BLOCKS), TOKENS);
    let layers = usize::from(LAYERS);
    let rates: Vec<Vec<f32>> =
        (0..layers).map(|_| (0..BLOCKS).map(|_| draw.unit().powi(2)).collect()).collect();
    let mut recent: Vec<Vec<f32>> = vec![vec![0.0; BLOCKS as usize]; layers];
    for _ in 0..TOKENS {
        for layer in 0..layers {
            let mut scores: Vec<(f32, u32)> = (0..BLOCKS)
                .map(|n| {
                    let at = n as usize;
                    (rates[layer][at] + recent[layer][at] + 1.5 * draw.unit(), n)
                })
                .collect();
            scores.sort_by(|a, b| b.0.total_cmp(&a.0));
            recent[layer].iter_mut().for_each(|value| *value *= 0.8);
            for (_, n) in &scores[..REQUESTED] {
                recent[layer][*n as usize] += 0.1;
            }
            let first = layer as u32 * BLOCKS;
            trace.push(scores[..REQUESTED].iter().map(|(_, n)| BlockId(first + n)));
        }
    }
    trace
}

fn policies(trace: &AccessTrace, kept: u32) -> Vec<(&'static str, Box<dyn EvictionPolicy>)> {
    let blocks = trace.blocks();
    let hot = vec![kept / 2; usize::from(LAYERS)];
    let frequencies: Vec<u32> = (0..blocks.len() as u32).collect();
    let gaps = GapTable {
        thresholds: vec![2, 3, 5, 8, 16, 32, 64],
        history: 4,
        distances: (0..4096).map(|history| 16 * (1 + history % 8 + history / 512)).collect(),
    };
    let hazard = HazardTable {
        recent: 4,
        rates: [1311, 131],
        thresholds: [(1..24).map(|n| 42 * n).collect(), (1..16).map(|n| 64 * n).collect()],
        worths: (0..16 * 24 * 16).map(|entry| entry % 384 + 30 * (entry / 384)).collect(),
        initial: vec![13_000; BLOCKS as usize],
    };
    vec![
        ("none", Box::new(Nothing)),
        ("lru", Box::new(Lru::new(blocks))),
        ("lfu", Box::new(Lfu::new(blocks))),
        ("ema", Box::new(Ema::new(blocks, 0.99))),
        ("hot pinned", Box::new(HotPinned::new(blocks, &frequencies, &hot))),
        ("reuse distance", Box::new(ReuseDistance::new(blocks, vec![gaps; usize::from(LAYERS)]))),
        ("hazard", Box::new(Hazard::new(blocks, &vec![hazard; usize::from(LAYERS)]))),
        ("belady", Box::new(Belady::new(trace))),
    ]
}

fn main() {
    let trace = trace();
    let blocks = trace.blocks().clone();
    println!("policy          kept %  hits    ns a request: per layer, global");
    for share in [0.125, 0.25, 0.5] {
        let kept = (f64::from(BLOCKS) * share) as u32;
        for index in 0..policies(&trace, kept).len() {
            let mut times = Vec::new();
            let (mut name, mut ratio) = ("", 0.0);
            for global in [false, true] {
                let all = kept * u32::from(LAYERS);
                let mut best = f64::INFINITY;
                for _ in 0..RUNS {
                    let policy = policies(&trace, kept).swap_remove(index);
                    name = policy.0;
                    let sharing = if global {
                        Sharing::Global(all)
                    } else {
                        Sharing::PerLayer(vec![kept; usize::from(LAYERS)])
                    };
                    let slots = all + 2 * REQUESTED as u32;
                    let admission = Admission::Compete;
                    let mut cache =
                        WeightCache::new(blocks.clone(), slots, sharing, admission, policy.1);
                    replay(&trace, None, 0..WARM, &mut cache);
                    let start = Instant::now();
                    let counts = replay(&trace, None, WARM..TOKENS, &mut cache);
                    let nanoseconds = start.elapsed().as_nanos() as f64;
                    let requests: u64 = counts.iter().map(|counts| counts.requests()).sum();
                    let hits: u64 = counts.iter().map(|counts| counts.demand_hits).sum();
                    best = best.min(nanoseconds / requests as f64);
                    if !global {
                        ratio = hits as f64 / requests as f64;
                    }
                }
                times.push(best);
            }
            println!(
                "{name:<15} {:>5.1}   {ratio:.3}  {:>5.0} {:>5.0}",
                100.0 * share,
                times[0],
                times[1]
            );
        }
    }
}
