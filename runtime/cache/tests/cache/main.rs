//! The cache and its policies from outside.

mod allocations;
mod cache;
mod conformance;
#[path = "../../../engine/tests/counting/mod.rs"]
mod counting;
mod plain;
mod trace;
mod wire;

use ls_bundle::ids::BlockId;
use ls_cache::policy::{
    Belady, Ema, GapTable, Hazard, HazardTable, HotPinned, Lfu, Lru, Nothing, ReuseDistance,
};
use ls_cache::{AccessTrace, Blocks, EvictionPolicy};
use proptest::prelude::*;

/// Every policy, by name.
const POLICIES: [&str; 7] = ["none", "lru", "lfu", "ema", "hot_pinned", "reuse_distance", "belady"];

/// A policy for a trace. Up to `hot` blocks of each layer may be called hot.
fn policy(name: &str, trace: &AccessTrace, hot: u32) -> Box<dyn EvictionPolicy> {
    let blocks = trace.blocks();
    match name {
        "none" => Box::new(Nothing),
        "lru" => Box::new(Lru::new(blocks)),
        "lfu" => Box::new(Lfu::new(blocks)),
        "ema" => Box::new(Ema::new(blocks, 0.9)),
        "hot_pinned" => {
            let frequencies: Vec<u32> = (0..blocks.len() as u32).map(|n| n * 7 % 5).collect();
            Box::new(HotPinned::new(blocks, &frequencies, &vec![hot; blocks.layers()]))
        }
        "reuse_distance" => Box::new(ReuseDistance::new(blocks, vec![gaps(); blocks.layers()])),
        "hazard" => {
            let tables: Vec<_> = blocks.ranges().iter().map(|range| hazard(range.len())).collect();
            Box::new(Hazard::new(blocks, &tables))
        }
        "belady" => Box::new(Belady::new(trace)),
        other => panic!("no policy {other}"),
    }
}

/// Two gaps in four intervals; the mean of the intervals' middles.
fn gaps() -> GapTable {
    let distances = (0..16).map(|history| 16 + 11 * (history & 3) + 13 * (history >> 2)).collect();
    GapTable { thresholds: vec![2, 3, 6], history: 2, distances }
}

/// Three visits, means in five and three levels, worths without an order.
fn hazard(blocks: usize) -> HazardTable {
    HazardTable {
        recent: 3,
        rates: [9830, 655],
        thresholds: [vec![100, 200, 400, 800], vec![310, 320]],
        worths: (0..120).map(|entry| entry * 37 % 101).collect(),
        initial: vec![20_000; blocks],
    }
}

prop_compose! {
    /// Traces of two to three layers with gaps between their ids, in which low numbers are requested more often and a
    /// set repeats some of the one before.
    fn traces()(
        layers in 1u32..4,
        size in 1u32..9,
        rolls in prop::collection::vec(prop::collection::vec(0u32..100, 8), 1..40),
    ) -> AccessTrace {
        let blocks = Blocks::new((0..layers).map(|n| 5 + 10 * n..5 + 10 * n + size).collect());
        let mut trace = AccessTrace::with_capacity(blocks, rolls.len());
        for roll in &rolls {
            for layer in 0..layers {
                let wanted = |n: &u32| roll[(n + layer) as usize % 8] < 70 / (n + 1);
                trace.push((0..size).filter(wanted).map(|n| BlockId(5 + 10 * layer + n)));
            }
        }
        trace
    }
}
