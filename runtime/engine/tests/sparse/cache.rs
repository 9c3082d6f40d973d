//! What is kept, what is read, and that both are counted.

use super::{CASE, Case, READ_COSTS, Sample, seeded};
use ls_engine::Engine;
use ls_engine::system::{Columns, Eviction, Prefetch, System};

#[test]
fn what_is_read_is_what_the_cache_missed() {
    let sample = Sample::new(1);
    let (prefetch, weight_cache) = (Prefetch::Off, 0.9);
    let case = Case { exact_share: 0.2, canonical: false, weight_cache, prefetch, ..CASE };
    let mut engine = sample.open(&case, seeded(2), true).unwrap();
    engine.prefill(&[1, 2, 3], 0).unwrap();
    let before = engine.bytes_read();
    let counts = |engine: &Engine| engine.cache_counts().unwrap();
    let misses = counts(&engine).misses;
    for token in 0..20 {
        engine.decode(token * 7, 0).unwrap();
    }
    let after = counts(&engine);
    let ffn = sample.bundle.weights().layers[0].ffn;
    let chosen = (0.2 * f64::from(ffn.blocks())).ceil() as u64;
    assert_eq!(after.requests(), 20 * 3 * chosen);
    assert!(after.demand_hits > 0 && after.misses > misses);
    let read = engine.bytes_read() - before;
    let least = (after.misses - misses) * ffn.block_stride();
    // Windows of 512 bytes; the dense tensors are resident at this budget.
    assert!(read >= least && read <= least + (after.misses - misses) * 1024, "{read}, {least}");
}

#[test]
fn wanted_neighbours_are_read_together() {
    let sample = Sample::new(1);
    let block = sample.bundle.weights().layers[0].ffn.block_stride();
    let few = Case { weight_cache: 0.9, prefetch: Prefetch::Off, ..CASE };
    let most_merged = [true, false].map(|canonical| {
        let run = |read_cost_bytes| {
            let case = Case { canonical, read_cost_bytes, ..few };
            let mut engine = sample.open(&case, seeded(2), true).unwrap();
            engine.prefill(&[1, 2, 3], 0).unwrap();
            for token in 0..20 {
                engine.decode(token * 7, 0).unwrap();
            }
            let misses = engine.cache_counts().unwrap().misses as f64;
            let sums = engine.layer_stats().fold((0, 0), |(reads, bytes), (s, _)| {
                (reads + s.wanted_reads, bytes + s.wanted_bytes)
            });
            (sums.0 as f64 / misses, sums.1 as f64 / misses) // a missed block's reads and bytes
        };
        let alone = run(0);
        assert_eq!(alone, (1.0, block as f64));
        let mut before = alone;
        for cost in READ_COSTS.into_iter().skip(1) {
            let found = run(cost);
            // Blocks that run in order are held back by room, not by the cost.
            assert!(found.0 < if canonical { alone.0 } else { before.0 }, "{found:?} at {cost}");
            // What lies between is read too, but for less than the saved reads would cost.
            let saved = (1.0 - found.0) * cost as f64;
            assert!(found.1 - alone.1 <= saved, "{found:?}, at most {saved} bytes in vain");
            before = found;
        }
        before.0
    });
    assert!(most_merged[1] < 0.8 * most_merged[0], "{most_merged:?}");
}

#[test]
fn what_is_read_ahead_is_counted_apart() {
    let sample = Sample::new(1);
    let case = Case { exact_share: 0.2, canonical: false, weight_cache: 0.5, ..CASE };
    let mut engine = sample.open(&case, seeded(2), true).unwrap();
    engine.prefill(&[1, 2, 3], 0).unwrap();
    for token in 0..20 {
        engine.decode(token * 7, 0).unwrap();
    }
    let layers: Vec<_> = engine.layer_stats().collect();
    let block = sample.bundle.weights().layers[0].ffn.block_stride();
    assert_eq!(layers.len(), 3);
    assert_eq!(layers[0].0.expected_bytes, 0, "nothing lies before the first layer");
    for (stats, counts) in &layers[1..] {
        assert!(stats.predictions > 0 && stats.expected_bytes > 0, "{stats:?}");
        assert!(counts.prefetch_hits > 0, "{counts:?}");
        let ahead = stats.expected_bytes / block;
        // What was read ahead was asked for, went unused, or is still there.
        assert!(counts.prefetch_hits + counts.prefetched_in_vain <= ahead, "{counts:?} of {ahead}");
        assert_eq!(stats.wanted_bytes / block, counts.misses, "{stats:?} {counts:?}");
    }
}

#[test]
fn who_knows_the_future_reads_no_block_twice_too_often() {
    let sample = Sample::new(1);
    let columns = Columns::of(System::Oracle, 0.3).unwrap();
    let recording = sample.recorded(&columns);
    let misses = |eviction, prefetch| {
        let columns = Columns { eviction, prefetch, ..columns };
        let mut engine = sample.open_columns(columns, Some(&recording), &CASE, seeded(1)).unwrap();
        engine.prefill(&[1, 2, 3], 0).unwrap();
        for token in 0..20 {
            engine.decode(token * 7, 0).unwrap();
        }
        let counts = engine.cache_counts().unwrap();
        let of_layer = sample.bundle.weights().layers[0].ffn.blocks();
        let blocks = columns.count(of_layer as usize) as u64;
        assert_eq!(counts.requests(), 3 * 20 * blocks, "what was recorded runs");
        assert_eq!(engine.layer_stats().map(|(s, _)| s.predictions).min(), Some(20));
        counts
    };
    let best = misses(Eviction::Belady, Prefetch::Off).misses;
    for eviction in [Eviction::None, Eviction::Lru, Eviction::Ema, Eviction::Reuse] {
        let other = misses(eviction, Prefetch::Off).misses;
        assert!(best < other, "{best} misses by knowing the future, {other} by {eviction:?}");
    }
    let ahead = misses(Eviction::Belady, Prefetch::On);
    assert!(ahead.prefetch_hits > 0 && ahead.misses <= best, "{ahead:?}, {best} without");
}

#[test]
fn with_room_for_all_blocks_decode_reads_nothing() {
    let sample = Sample::new(1);
    for policy in [Eviction::Reuse, Eviction::HotPinned, Eviction::Lru] {
        let case = Case { exact_share: 0.2, canonical: false, weight_cache: 2.0, policy, ..CASE };
        let mut engine = sample.open(&case, seeded(2), true).unwrap();
        let read = |engine: &mut Engine| {
            let before = engine.bytes_read();
            engine.rewind(0);
            engine.prefill(&[1, 2, 3], 0).unwrap();
            let since = engine.bytes_read();
            for token in 0..40 {
                engine.decode(token * 7, 0).unwrap();
            }
            (since - before, engine.bytes_read() - since)
        };
        let (_, first) = read(&mut engine);
        let (_, again) = read(&mut engine);
        assert_eq!((first, again), (0, 0), "{policy:?}: the prompt has left them");
        assert_eq!(engine.prefetched_tokens().0, 0, "there is nothing to read ahead");
    }
}

#[test]
fn a_prompt_leaves_blocks_behind() {
    let sample = Sample::new(1);
    let blocks: u32 = sample.bundle.weights().layers.iter().map(|layer| layer.ffn.blocks()).sum();
    for policy in super::POLICIES {
        for weight_cache in [0.9, 2.0] {
            let case =
                Case { canonical: false, weight_cache, policy, prefetch: Prefetch::Off, ..CASE };
            let mut engine = sample.open(&case, seeded(2), true).unwrap();
            engine.prefill(&[1, 2, 3], 0).unwrap();
            let read = engine.bytes_read();
            engine.decode(5, 0).unwrap();
            let counts = engine.cache_counts().unwrap();
            match (policy, weight_cache > 1.0) {
                (Eviction::None, _) => assert_eq!(counts.demand_hits, 0, "nothing may stay"),
                // All are there.
                (_, true) => {
                    assert_eq!((counts.misses, engine.bytes_read() - read), (0, 0), "{policy:?}");
                }
                (_, false) => {
                    assert!(counts.demand_hits > 0 && counts.misses > 0, "{policy:?}: {counts:?}");
                }
            }
            assert!(counts.requests() < u64::from(blocks));
            // A later prompt leaves what decode has brought.
            let before = engine.cache_counts().unwrap();
            engine.prefill(&[7, 8], 0).unwrap();
            assert_eq!(engine.cache_counts().unwrap(), before);
        }
    }
}
