//! Controllers on made-up devices: measured as a real one would be, then played.

use ls_bundle::ids::{ByteCount, LayerId};
use ls_control::execution::Costs;
use ls_control::explore::{Enough, explore};
use ls_control::profile::{DeviceProfile, Visit};
use ls_control::synthesis::{Options, Synthesis, synthesize};
use ls_control::world::{World, WorldLayer};
use ls_control::{Controller, CoordinationPlan, Fixed, Lut};

/// A disk of 1 GB/s, a processor of 1.7 GB/s, and points that cost as much as 67 KB of computation.
pub(crate) const COSTS: Costs = Costs {
    lead_us: 150.0,
    read_us: 80.0,
    read_us_per_byte: 1e-3,
    read_us_per_segment: 15.0,
    compute_us_per_byte: 6e-4,
    compute_us_per_segment: 40.0,
};
const WORK_BYTES: u64 = 1 << 20;

pub(crate) fn world(missing_bytes: &[u64]) -> World {
    let layer = WorldLayer {
        costs: COSTS,
        work_bytes: WORK_BYTES,
        missing_bytes: missing_bytes.to_vec(),
        // Prefetching helps little: what is saved in a layer is not spent on the next.
        useful: [0.2, 0.25],
    };
    World::new(vec![layer; 3], 7)
}

/// Half of the visits miss hardly anything, half of them most.
fn swinging() -> World {
    let calm = (0..20).map(|i| i * 1_000);
    let wild = (0..20).map(|i| 800_000 + i * 10_000);
    world(&calm.chain(wild).collect::<Vec<_>>())
}

/// All visits miss the same.
fn steady() -> World {
    world(&[700_000])
}

/// Plans with one, two, four or eight segments in all stages, or in the last alone, on either side.
pub(crate) fn actions() -> Options {
    let sides = [1, 2, 4, 8].map(|f| [f; 4]).into_iter().chain([2, 4, 8].map(|f| [1, 1, 1, f]));
    let sides: Vec<[u8; 4]> = sides.collect();
    let pairs = sides
        .iter()
        .flat_map(|&compute| sides.iter().map(move |&io| CoordinationPlan { compute, io }));
    let one_shot = std::iter::once(CoordinationPlan::ONE_SHOT);
    Options { actions: one_shot.chain(pairs).collect(), ..Options::default() }
}

pub(crate) fn measure(world: &World, plans: &[CoordinationPlan]) -> DeviceProfile {
    let mut profile = DeviceProfile::default();
    let mut world = world.clone();
    let Ok(_) = explore(&mut world, &mut profile, plans, Enough::DEFAULT, |progress| {
        progress.visits < 6_000
    });
    profile
}

fn total_us(world: &World, controller: &dyn Controller, ranks: &[f64]) -> (f64, Vec<Visit>) {
    let visits = world.clone().run(controller, ranks);
    (visits.iter().map(Visit::total_us).sum(), visits)
}

struct Played {
    one_shot: f64,
    best_static: f64,
    lut: f64,
    hindsight: f64,
}

/// One shot, best static, table and hindsight meet the same luck.
fn play(world: &World) -> Played {
    let options = actions();
    let profile = measure(world, &options.actions);
    let synthesis: Synthesis<'_> = synthesize(&profile, &options);
    let (table, _) = synthesis.lut();
    let ranks = world.clone().ranks(3 * 1_000);
    let (lut, trace) = total_us(world, &table, &ranks);
    let hindsight = synthesis.hindsight(&trace);
    Played {
        one_shot: total_us(world, &Fixed::ONE_SHOT, &ranks).0,
        best_static: total_us(world, &table.best_static(), &ranks).0,
        lut,
        hindsight: total_us(world, &hindsight, &ranks).0,
    }
}

#[test]
fn where_loads_swing_the_table_beats_the_best_static_plan() {
    let Played { one_shot, best_static, lut, hindsight } = play(&swinging());
    assert!(lut < 0.98 * best_static, "table {lut} us, static {best_static} us");
    assert!(best_static < one_shot, "static {best_static} us, one shot {one_shot} us");
    assert!(hindsight < 1.01 * lut, "hindsight {hindsight} us, table {lut} us");
    assert!(one_shot - lut > 0.5 * (one_shot - hindsight), "{one_shot} {lut} {hindsight}");
}

/// Where they do not, it does as well as the best of all static plans, and that is all there is.
#[test]
fn where_loads_are_steady_the_table_is_a_static_plan() {
    let world = steady();
    let Played { lut, hindsight, .. } = play(&world);
    let ranks = world.clone().ranks(3 * 1_000);
    let us = |plan: CoordinationPlan| total_us(&world, &Fixed(plan), &ranks).0;
    let best = actions().actions.into_iter().map(us).fold(f64::INFINITY, f64::min);
    for (name, us) in [("table", lut), ("hindsight", hindsight)] {
        assert!((us / best - 1.0).abs() < 5e-3, "{name} {us} us, static {best} us");
    }
}

/// The best of all static plans when played is (nearly) the one that was found best offline.
#[test]
fn the_best_static_plan_is_found_without_playing_them_all() {
    // More than are judged one by one.
    let world = swinging();
    let options =
        Options { actions: CoordinationPlan::all().step_by(151).collect(), ..Options::default() };
    let (lut, report) = synthesize(&measure(&world, &actions().actions), &options).lut();
    let ranks = world.clone().ranks(3 * 1_000);
    let us = |plan: CoordinationPlan| total_us(&world, &Fixed(plan), &ranks).0;
    let best = options.actions.iter().map(|&plan| us(plan)).fold(f64::INFINITY, f64::min);
    let found = us(lut.best_static().0);
    assert!(found < 1.01 * best, "{found} us found, {best} us best");
    // What the model says a token takes is what it takes.
    let said = report.static_us * 1_000.0;
    assert!((said / found - 1.0).abs() < 0.03, "{said} us said, {found} us played");
}

#[test]
fn dominance_drops_nearly_all_plans_and_says_so() {
    let options = actions();
    let (_, report) = synthesize(&measure(&swinging(), &options.actions), &options).lut();
    assert_eq!(report.choices, 3 * 16 * options.actions.len());
    assert!(report.dropped < report.choices && 10 * report.dropped > 7 * report.choices);
}

/// Where plans change nothing for the next layer, the luck of samples must not either: the table is greedy.
#[test]
fn noise_in_samples_does_not_sway_the_table() {
    let missing: Vec<u64> = (0..60).map(|i| i * 16_000).collect();
    let mut layers = world(&missing).layers().to_vec();
    layers.iter_mut().for_each(|layer| layer.useful = [0.0, 0.0]);
    let options = actions();
    let profile = measure(&World::new(layers, 3), &options.actions);
    let greedy = Options { horizon: 1, ..options.clone() };
    let (far, _) = synthesize(&profile, &options).lut();
    let (near, _) = synthesize(&profile, &greedy).lut();
    for load in (0..940_000).step_by(10_000) {
        let plan = |lut: &Lut| lut.plan(LayerId(1), ByteCount(load));
        assert_eq!(plan(&far), plan(&near), "{load} bytes");
    }
    assert_eq!(near.plan(LayerId(0), ByteCount(0)), CoordinationPlan::ONE_SHOT);
}

/// Conditions change while it runs, the disk gives half: the table, which sees larger loads, stays ahead.
#[test]
fn the_table_stays_ahead_of_the_static_plan_when_the_disk_slows_down() {
    let (world, options) = (swinging(), actions());
    let (lut, _) = synthesize(&measure(&world, &options.actions), &options).lut();
    let slow = world.layers().iter().map(|layer| {
        let read_us_per_byte = 2.0 * layer.costs.read_us_per_byte;
        WorldLayer { costs: Costs { read_us_per_byte, ..layer.costs }, ..layer.clone() }
    });
    let slow = World::new(slow.collect(), 7);
    let ranks = slow.clone().ranks(3 * 1_000);
    let us = |controller: &dyn Controller| total_us(&slow, controller, &ranks).0;
    let (table, fixed) = (us(&lut), us(&lut.best_static()));
    assert!(table < 0.98 * fixed, "table {table} us, static {fixed} us");
}
