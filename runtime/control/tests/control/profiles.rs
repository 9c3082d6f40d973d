//! Measuring: what explorers try, when it is enough, and what is learned from visits.

use crate::policies::{COSTS, actions, measure, world};
use ls_bundle::ids::{ByteCount, LayerId};
use ls_control::explore::{Enough, Explorer, Progress, candidates, explore};
use ls_control::fit::Fit;
use ls_control::profile::{DeviceProfile, DiskPoint, KernelPoint};
use ls_control::synthesis::{Options, synthesize};
use ls_control::{Controller, CoordinationPlan};

fn missing() -> Vec<u64> {
    (0..64).map(|i| i * 16_000).collect()
}

#[test]
fn every_plan_is_tried_as_often_as_any_other() {
    let plans = candidates();
    let explorer = Explorer::new(plans.clone(), vec![1000]);
    let mut tried = vec![0; plans.len()];
    for _ in 0..5 * plans.len() {
        let plan = explorer.plan(LayerId(0), ByteCount(10));
        tried[plans.iter().position(|p| *p == plan).unwrap()] += 1;
    }
    assert!(tried.iter().all(|&count| count == 5), "{tried:?}");
    assert!(plans.iter().all(CoordinationPlan::is_sound));
}

#[test]
fn costs_are_found_again() {
    let profile = measure(&world(&missing()), &candidates());
    let fit = Fit::new(&profile);
    for costs in &fit.costs {
        let pairs = [
            ("lead", costs.lead_us, COSTS.lead_us),
            ("read", costs.read_us, COSTS.read_us),
            ("read a byte", costs.read_us_per_byte, COSTS.read_us_per_byte),
            ("read a segment", costs.read_us_per_segment, COSTS.read_us_per_segment),
            ("compute a byte", costs.compute_us_per_byte, COSTS.compute_us_per_byte),
            ("compute a segment", costs.compute_us_per_segment, COSTS.compute_us_per_segment),
        ];
        for (what, found, planted) in pairs {
            assert!(
                (found / planted - 1.0).abs() < 0.05,
                "{what}: {found} found, {planted} planted"
            );
        }
    }
    let error = fit.error;
    assert!(error.configurations > 20, "{error:?}");
    assert!(error.total < 0.01 && error.left < 0.01 && error.total_of_visits < 0.01, "{error:?}");
}

/// Every fifth visit takes three times as long to load, as disks have it; and the model still tells most of them.
#[test]
fn outliers_do_not_move_the_fit() {
    let mut profile = measure(&world(&missing()), &candidates());
    for visit in profile.visits.iter_mut().step_by(5) {
        visit.first_us *= 3.0;
    }
    let fit = Fit::new(&profile);
    let read = fit.costs[0].read_us_per_byte;
    assert!((read / COSTS.read_us_per_byte - 1.0).abs() < 0.05, "{read}");
    assert!(fit.error.first < 0.02, "{:?}", fit.error);
    // A cost that the model has no place for is taken for a part of the lead.
    let mut more = profile.clone();
    more.visits.iter_mut().for_each(|visit| visit.second_us += 50.0);
    let error = Fit::new(&more).error.second;
    assert!(error < 0.01, "{error}");
    // A model that is wrong says so.
    for visit in &mut profile.visits {
        visit.second_us *= if visit.plan.points()[0] > 8 { 3.0 } else { 1.0 };
    }
    assert!(Fit::new(&profile).error.second > 0.1);
}

/// A few bytes more that come with a slower moment do not make bytes dear.
#[test]
fn loads_that_hardly_vary_tell_little_of_a_byte() {
    let mut profile = measure(&world(&[800_000]), &candidates());
    for (index, visit) in profile.visits.iter_mut().enumerate() {
        let slow = index % 2;
        visit.remaining_bytes = 800_000 + 500 * slow as u64;
        visit.first_us = 900.0 + 60.0 * slow as f32;
    }
    let fit = Fit::new(&profile);
    let read = fit.costs[0].read_us_per_byte;
    assert!(read > 0.5 * COSTS.read_us_per_byte && read < 1.5 * COSTS.read_us_per_byte, "{read}");
    assert!(fit.error.first < 0.1, "{:?}", fit.error);
}

#[test]
fn measuring_ends_when_it_knows_enough_and_goes_on_from_where_it_was() {
    let (mut rig, plans) = (world(&missing()), actions().actions);
    let mut profile = DeviceProfile::default();
    let Ok(early) =
        explore(&mut rig, &mut profile, &plans, Enough::DEFAULT, |progress| progress.visits < 300);
    assert_eq!((early.visits, profile.visits.len()), (300, 300));
    let mut profile = DeviceProfile::from_bytes(&profile.to_bytes()).unwrap();
    let mut seen = Progress::default();
    let Ok(end) = explore(&mut rig, &mut profile, &plans, Enough::DEFAULT, |progress| {
        seen = progress;
        true
    });
    assert!(seen.visits >= 300 && end.bins_done == end.bins && end.bins > 3, "{end:?}");
    assert_eq!(end.visits, profile.visits.len());
    let mut tried = vec![[0u32; 16]; plans.len()];
    for visit in profile.visits.iter().filter(|visit| visit.layer == LayerId(0)) {
        let plan = plans.iter().position(|plan| *plan == visit.plan).unwrap();
        tried[plan][DeviceProfile::work_bin(visit.remaining_bytes, 1 << 20)] += 1;
    }
    for bin in 0..16 {
        let counts = tried.iter().map(|tried| tried[bin]);
        let (least, most) = (counts.clone().min().unwrap(), counts.max().unwrap());
        assert!(most - least <= 1, "plans of bin {bin} tried {least} to {most} times");
    }
    let stricter = Enough { error: 0.01, ..Enough::DEFAULT };
    let Ok(more) = explore(&mut rig, &mut profile, &plans, stricter, |_| true);
    assert!(more.visits > end.visits, "{more:?}");
}

/// Where plans do not change what follows they share one distribution; where they do, some have their own.
#[test]
fn distributions_are_shared_where_no_difference_shows() {
    let options = Options { samples: 20, ..actions() };
    let looks = |plan: &CoordinationPlan| plan.points()[0].min(plan.points()[1]);
    let learn = |change: bool| {
        let mut profile = measure(&world(&missing()), &options.actions);
        for (index, visit) in profile.visits.iter_mut().enumerate() {
            let coarse = change && looks(&visit.plan) < 8;
            let noise = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 46;
            visit.next_remaining_bytes = if coarse { 900_000 } else { noise };
        }
        let (lut, report) = synthesize(&profile, &options).lut();
        // How often a plan that looks so seldom is chosen.
        let loads = (0..1 << 20).step_by(1 << 14).map(ByteCount);
        let places = loads.flat_map(|load| (0..3).map(move |layer| (LayerId(layer), load)));
        let chosen = places.filter(|&(layer, load)| looks(&lut.plan(layer, load)) < 8).count();
        (report.rows, chosen)
    };
    let (rows, indifferent) = learn(false);
    assert_eq!(rows, [0, 0, 0, 3 * 16]);
    let ([plan, class, ..], chosen) = learn(true);
    assert!(plan + class > 2, "{plan} of plans, {class} of classes");
    assert!(3 * chosen < indifferent, "chosen {chosen} times, {indifferent} where all are alike");
}

/// Without visits the parts' own measurements stand; with visits they do not matter.
#[test]
fn what_visits_cannot_tell_is_taken_from_the_parts() {
    let kernel = |(blocks, segments)| KernelPoint {
        blocks,
        segments,
        time_us: 5.0 + 0.5 * blocks as f32 + 2.0 * segments as f32,
    };
    let parts = DeviceProfile {
        disk_latency_us: 90.0,
        disk: vec![
            DiskPoint { request_bytes: 4096, depth: 1, bytes_per_s: 5e7 },
            DiskPoint { request_bytes: 1 << 20, depth: 8, bytes_per_s: 2e9 },
        ],
        memory_bytes_per_s: 1e10,
        kernels: [(10, 1), (10, 4), (40, 1), (40, 8), (20, 2)].map(kernel).to_vec(),
        compute_point_us: 3.0,
        io_point_us: 7.0,
        ..DeviceProfile::default()
    };
    let found = Fit::new(&DeviceProfile { work_bytes: vec![1000], ..parts.clone() }).costs[0];
    assert_eq!((found.read_us, found.read_us_per_segment), (90.0, 7.0));
    assert!((found.read_us_per_byte - 5e-4).abs() < 1e-9, "{found:?}");
    assert!((found.compute_us_per_byte - 1e-4).abs() < 1e-9, "{found:?}");
    assert!((found.compute_us_per_segment - 5.0).abs() < 1e-3, "{found:?}");
    let measured = measure(&world(&missing()), &candidates());
    let visits = measured.clone();
    let both = DeviceProfile { work_bytes: measured.work_bytes, visits: measured.visits, ..parts };
    assert_eq!(Fit::new(&both), Fit::new(&visits));
}

/// What is left of the next layer falls with the work that is left to prefetch behind: then bins differ.
#[test]
fn bins_of_residual_work_that_differ_are_kept_apart() {
    let options = actions();
    let mut profile = measure(&world(&missing()), &options.actions);
    for visit in &mut profile.visits {
        visit.next_remaining_bytes = (1 << 20) - visit.left_bytes;
    }
    let [.., bin, layer] = synthesize(&profile, &options).lut().1.rows;
    assert!(bin > 3 * layer, "{bin} of bins, {layer} of layers");
}

#[test]
fn an_empty_profile_makes_a_table_that_answers() {
    let profile = DeviceProfile { work_bytes: vec![1000; 2], ..DeviceProfile::default() };
    let (lut, report) = synthesize(&profile, &actions()).lut();
    assert!(lut.plan(LayerId(1), ByteCount(500)).is_sound());
    assert_eq!(report.error.configurations, 0);
}
