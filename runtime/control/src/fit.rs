//! [`Fit`]: what layers cost, from the visits of a profile; and how well that tells what was not looked at.
//!
//! Given (q, φ) the paper takes T^I, T^II and C^{G,II} as deterministic and measures every combination. Here a few
//! numbers per device and one or two per layer stand for all of them (see [`Costs`]): least absolute deviations, as disks
//! have long tails, over visits of four fifths of the plans. The rest judges.

use crate::execution::{Costs, Played, play};
use crate::plan::{CoordinationPlan, Segments};
use crate::profile::{DeviceProfile, Visit};
use serde::Serialize;
use std::collections::BTreeMap;

/// Every so many plans, one is held out.
const HELD_OUT: usize = 5;
/// Visits of a layer that its lead is fitted to, at most.
const LEAD_VISITS: usize = 400;
/// Visits that costs are fitted to, at least.
const ENOUGH_VISITS: usize = 16;
const ROUNDS: usize = 20;

/// Costs of all layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// By layer.
    pub costs: Vec<Costs>,
    /// How wrong they are.
    pub error: FitError,
}

/// Errors of the model on plans that it was not fitted to, or on all if there are too few plans. Relative to what was
/// measured; medians over layers, bins of R_n and plans with at least three visits, whose own medians are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct FitError {
    /// Configurations that were compared.
    pub configurations: usize,
    /// Of T.
    pub total: f64,
    /// Of T^I, where something was loaded.
    pub first: f64,
    /// Of T^II.
    pub second: f64,
    /// Of C^{G,II}, as a share of the layer's work.
    pub left: f64,
    /// Of T, visit by visit: what noise adds.
    pub total_of_visits: f64,
}

impl Fit {
    /// Fits costs to a profile's visits.
    ///
    /// # Panics
    /// If there are no layers.
    #[must_use]
    pub fn new(profile: &DeviceProfile) -> Fit {
        let layers = profile.work_bytes.len();
        assert!(layers > 0, "a profile has layers");
        let held_out = held_out(&profile.visits);
        let fitted: Vec<&Visit> =
            profile.visits.iter().filter(|visit| !held_out.contains(&visit.plan)).collect();
        let mut costs = vec![prior(profile); layers];
        fit_reads(&mut costs, &fitted);
        fit_compute(&mut costs, profile, &fitted);
        for (layer, costs) in costs.iter_mut().enumerate() {
            let visits = fitted.iter().copied().filter(|visit| visit.layer.index() == layer);
            fit_lead(costs, profile.work_bytes[layer], &visits.collect::<Vec<_>>());
        }
        let judged: Vec<&Visit> = if held_out.is_empty() {
            profile.visits.iter().collect()
        } else {
            profile.visits.iter().filter(|visit| held_out.contains(&visit.plan)).collect()
        };
        let error = judge(&costs, &profile.work_bytes, &judged);
        Fit { costs, error }
    }
}

/// The plans that only judge.
fn held_out(visits: &[Visit]) -> Vec<CoordinationPlan> {
    let mut plans: Vec<CoordinationPlan> = visits.iter().map(|visit| visit.plan).collect();
    plans.sort_unstable();
    plans.dedup();
    // From the middle: the extremes anchor the fit.
    plans.into_iter().skip(HELD_OUT / 2).step_by(HELD_OUT).collect()
}

/// What the parts were measured to cost by themselves: stands where visits cannot tell.
fn prior(profile: &DeviceProfile) -> Costs {
    let us_per_byte = |bytes_per_s: f32| {
        if bytes_per_s > 0.0 { 1e6 / f64::from(bytes_per_s) } else { 0.0 }
    };
    let kernels: Vec<Point> = profile
        .kernels
        .iter()
        .map(|point| Point {
            group: 0,
            x: [f64::from(point.blocks), f64::from(point.segments)],
            y: f64::from(point.time_us),
        })
        .collect();
    let [_, call_us] = regress(&kernels, 1);
    Costs {
        lead_us: 0.0,
        read_us: f64::from(profile.disk_latency_us),
        read_us_per_byte: us_per_byte(
            profile.disk.iter().map(|point| point.bytes_per_s).fold(0.0, f32::max),
        ),
        read_us_per_segment: f64::from(profile.io_point_us),
        // One token's kernels take what reading the weights from memory takes.
        compute_us_per_byte: us_per_byte(profile.memory_bytes_per_s),
        compute_us_per_segment: call_us + f64::from(profile.compute_point_us),
    }
}

/// T^I = a_n + b R + c segments: a by layer, b and c of all.
fn fit_reads(costs: &mut [Costs], visits: &[&Visit]) {
    let points: Vec<Point> = visits
        .iter()
        .filter(|visit| visit.remaining_bytes > 0)
        .map(|visit| Point {
            group: visit.layer.index(),
            x: [
                visit.remaining_bytes as f64,
                Segments::new(visit.plan.io, visit.remaining_bytes).count() as f64,
            ],
            y: f64::from(visit.first_us),
        })
        .collect();
    if points.len() < ENOUGH_VISITS {
        return;
    }
    let slopes = bounded(regress(&points, costs.len()), &points);
    let mut rests: Vec<Vec<f64>> = vec![Vec::new(); costs.len()];
    for point in &points {
        rests[point.group].push(point.rest(slopes));
    }
    for (costs, rests) in costs.iter_mut().zip(&mut rests) {
        [costs.read_us_per_byte, costs.read_us_per_segment] = slopes;
        costs.read_us = median(rests).unwrap_or(costs.read_us).max(0.0);
    }
}

/// T^II = b C^{G,II} + c segments, where Interval I got past the lead.
fn fit_compute(costs: &mut [Costs], profile: &DeviceProfile, visits: &[&Visit]) {
    let work = |visit: &Visit| profile.work_bytes[visit.layer.index()];
    let overlapped = visits.iter().filter(|visit| visit.left_bytes < work(visit));
    let points: Vec<Point> = overlapped
        .map(|visit| {
            let done = work(visit) - visit.left_bytes;
            let left = Segments::new(visit.plan.compute, work(visit)).filter(|&end| end > done);
            let x = [visit.left_bytes as f64, left.count() as f64];
            Point { group: 0, x, y: f64::from(visit.second_us) }
        })
        .collect();
    if points.len() < ENOUGH_VISITS {
        return;
    }
    // What is the same for all is left to the lead.
    let slopes = bounded(regress(&points, 1), &points);
    for costs in costs {
        [costs.compute_us_per_byte, costs.compute_us_per_segment] = slopes;
    }
}

/// The lead that makes played times most like measured ones.
fn fit_lead(costs: &mut Costs, work_bytes: u64, visits: &[&Visit]) {
    let step = visits.len().div_ceil(LEAD_VISITS).max(1);
    let sample: Vec<&Visit> = visits.iter().copied().step_by(step).collect();
    let most = sample.iter().map(|visit| visit.total_us()).fold(0.0, f64::max);
    let wrong = |lead_us: f64| -> f64 {
        let costs = Costs { lead_us, ..*costs };
        let error = |visit: &&Visit| {
            let played = play(&costs, work_bytes, visit.remaining_bytes, &visit.plan);
            (played.total_us() - visit.total_us()).abs()
        };
        sample.iter().map(error).sum()
    };
    // The sum is convex where all leads bind; a coarse look first, as it need not be elsewhere.
    let (mut low, mut high) = (0.0, most);
    for _ in 0..6 {
        let width = (high - low) / 8.0;
        let looks = (0..=8).map(|look| low + width * f64::from(look));
        let valued = looks.map(|lead| (wrong(lead), lead));
        let (_, best) = valued.reduce(|a, b| if b.0 < a.0 { b } else { a }).expect("nine looks");
        (low, high) = ((best - width).max(0.0), best + width);
    }
    costs.lead_us = 0.5 * (low + high);
}

/// Layer, bin of R_n, plan.
type Configuration = (usize, usize, CoordinationPlan);

fn judge(costs: &[Costs], work_bytes: &[u64], visits: &[&Visit]) -> FitError {
    let mut of_visits = Vec::new();
    let mut cells: BTreeMap<Configuration, Vec<(Played, &Visit)>> = BTreeMap::new();
    for &visit in visits {
        let layer = visit.layer.index();
        let played = play(&costs[layer], work_bytes[layer], visit.remaining_bytes, &visit.plan);
        of_visits.extend(relative(played.total_us(), visit.total_us()));
        let bin = DeviceProfile::work_bin(visit.remaining_bytes, work_bytes[layer]);
        cells.entry((layer, bin, visit.plan)).or_default().push((played, visit));
    }
    cells.retain(|_, cell| cell.len() >= 3);
    let compare = |told: &dyn Fn(&Played) -> f64, measured: &dyn Fn(&Visit) -> f64| {
        let errors = cells.values().filter_map(|cell| {
            let mut pair = [
                cell.iter().map(|(played, _)| told(played)).collect::<Vec<_>>(),
                cell.iter().map(|(_, visit)| measured(visit)).collect(),
            ];
            let [told, measured] = pair.each_mut().map(|side| median(side).unwrap_or(0.0));
            relative(told, measured)
        });
        median(&mut errors.collect::<Vec<_>>()).unwrap_or(0.0)
    };
    let mut left: Vec<f64> = cells
        .iter()
        .map(|((layer, ..), cell)| {
            let work = work_bytes[*layer].max(1) as f64;
            let mut differences: Vec<f64> = cell
                .iter()
                .map(|(played, visit)| played.left_bytes as f64 - visit.left_bytes as f64)
                .collect();
            median(&mut differences).unwrap_or(0.0).abs() / work
        })
        .collect();
    FitError {
        configurations: cells.len(),
        total: compare(&Played::total_us, &Visit::total_us),
        first: compare(&|played| played.first_us, &|visit| f64::from(visit.first_us)),
        second: compare(&|played| played.second_us, &|visit| f64::from(visit.second_us)),
        left: median(&mut left).unwrap_or(0.0),
        total_of_visits: median(&mut of_visits).unwrap_or(0.0),
    }
}

/// |a - b| / b, where b is something.
fn relative(told: f64, measured: f64) -> Option<f64> {
    (measured > 0.0).then(|| (told - measured).abs() / measured)
}

/// The middle value; none of none.
pub(crate) fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// y is to be told from x, with an intercept for each group.
struct Point {
    group: usize,
    x: [f64; 2],
    y: f64,
}

impl Point {
    fn rest(&self, slopes: [f64; 2]) -> f64 {
        self.y - slopes[0] * self.x[0] - slopes[1] * self.x[1]
    }
}

/// Slopes of least absolute deviations, none negative, by least squares whose weights follow the deviations.
fn regress(points: &[Point], groups: usize) -> [f64; 2] {
    let mut weights = vec![1.0; points.len()];
    let mut slopes = [0.0; 2];
    for _ in 0..ROUNDS {
        let (sums, means) = centered(points, &weights, groups);
        slopes = solve(sums);
        let rests: Vec<f64> = points
            .iter()
            .map(|point| {
                let [x0, x1, y] = means[point.group];
                (point.rest(slopes) - (y - slopes[0] * x0 - slopes[1] * x1)).abs()
            })
            .collect();
        // No point may weigh more than all others: deviations below a thousandth of the median count as that, or below a
        // millionth of what is told where nearly all is told exactly.
        let told = points.iter().map(|point| point.y.abs()).fold(1e-9, f64::max);
        let floor = 1e-3 * median(&mut rests.clone()).unwrap_or(0.0) + 1e-6 * told;
        for (weight, rest) in weights.iter_mut().zip(rests) {
            *weight = 1.0 / rest.max(floor);
        }
    }
    slopes
}

/// A byte costs no more than all of the time there is for each, at the median: where loads hardly vary their slope is
/// noise, and says nothing of other loads.
fn bounded(slopes: [f64; 2], points: &[Point]) -> [f64; 2] {
    let whole = points.iter().filter(|point| point.x[0] > 0.0);
    let mut rates: Vec<f64> =
        whole.map(|point| (point.rest([0.0, slopes[1]]) / point.x[0]).max(0.0)).collect();
    let most = median(&mut rates).unwrap_or(f64::INFINITY);
    [slopes[0].min(most), slopes[1]]
}

/// Weighted sums of products (x0x0, x0x1, x1x1, x0y, x1y) of what differs from the groups' means, and those means.
fn centered(points: &[Point], weights: &[f64], groups: usize) -> ([f64; 5], Vec<[f64; 3]>) {
    let mut means = vec![[0.0; 3]; groups];
    let mut totals = vec![0.0; groups];
    for (point, &weight) in points.iter().zip(weights) {
        let values = [point.x[0], point.x[1], point.y];
        means[point.group].iter_mut().zip(values).for_each(|(mean, value)| *mean += weight * value);
        totals[point.group] += weight;
    }
    for (mean, &total) in means.iter_mut().zip(&totals).filter(|(_, total)| **total > 0.0) {
        mean.iter_mut().for_each(|mean| *mean /= total);
    }
    let mut sums = [0.0; 5];
    for (point, &weight) in points.iter().zip(weights) {
        let [m0, m1, my] = means[point.group];
        let (x0, x1, y) = (point.x[0] - m0, point.x[1] - m1, point.y - my);
        let products = [x0 * x0, x0 * x1, x1 * x1, x0 * y, x1 * y];
        sums.iter_mut().zip(products).for_each(|(sum, product)| *sum += weight * product);
    }
    (sums, means)
}

/// The slopes, none negative.
fn solve([aa, ab, bb, ay, by]: [f64; 5]) -> [f64; 2] {
    let alone = |xx: f64, xy: f64| if xx > 0.0 { (xy / xx).max(0.0) } else { 0.0 };
    let determinant = aa * bb - ab * ab;
    if determinant > 1e-9 * aa * bb {
        let slopes = [(ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant];
        if slopes[0] < 0.0 {
            return [0.0, alone(bb, by)];
        }
        if slopes[1] >= 0.0 {
            return slopes;
        }
    }
    [alone(aa, ay), 0.0]
}
