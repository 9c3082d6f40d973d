//! Measuring: what explorers try, when it is enough, and what is learned from visits.

use crate::policies::{COSTS, actions, measure, world};
use ls_bundle::ids::{ByteCount, LayerId};
use ls_control::explore::{Enough, Explorer, Progress, candidates, explore};
use ls_control::fit::Fit;
use ls_control::profile::DeviceProfile;
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
    // A model that is wrong says so.
    for visit in &mut profile.visits {
        visit.second_us *= if visit.plan.points()[0] > 8 { 3.0 } else { 1.0 };
    }
    assert!(Fit::new(&profile).error.second > 0.1);
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
    let stricter = Enough { error: 0.01, ..Enough::DEFAULT };
    let Ok(more) = explore(&mut rig, &mut profile, &plans, stricter, |_| true);
    assert!(more.visits > end.visits, "{more:?}");
}

/// Where plans do not change what follows they share one distribution; where they do, some have their own.
#[test]
fn distributions_are_shared_where_no_difference_shows() {
    let options = Options { samples: 20, ..actions() };
    let rows = |change: bool| {
        let mut profile = measure(&world(&missing()), &options.actions);
        for (index, visit) in profile.visits.iter_mut().enumerate() {
            let coarse = change && visit.plan.points()[1] == 4;
            let noise = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 46;
            visit.next_remaining_bytes = if coarse { 900_000 } else { noise };
        }
        synthesize(&profile, &options).lut().1.rows
    };
    let [plan, class, all, _] = rows(false);
    assert!(plan + class <= 2, "{plan} of plans, {class} of classes");
    assert_eq!(all, 3 * 16);
    let [plan, class, ..] = rows(true);
    assert!(plan + class > 20, "{plan} of plans, {class} of classes");
}

#[test]
fn an_empty_profile_makes_a_table_that_answers() {
    let profile = DeviceProfile { work_bytes: vec![1000; 2], ..DeviceProfile::default() };
    let (lut, report) = synthesize(&profile, &actions()).lut();
    assert!(lut.plan(LayerId(1), ByteCount(500)).is_sound());
    assert_eq!(report.error.configurations, 0);
}
