//! [`synthesize`]: from a profile to a table.
//!
//! The deterministic parts of Eq. 4 come from a [`Fit`]; the distributions of Eq. 5 from the profile's samples of R_{n+1}.
//! Samples are shared where a test finds no difference: a plan has a distribution of its own only if it has enough
//! samples and they differ (Kolmogorov-Smirnov) from those of plans that look as often; these only if they differ from
//! those of all plans; a bin of residual work, with its neighbours where it was hardly seen, only if it differs from the
//! rest of the layer. Without that the minimum of Eq. 7 goes where samples happened to be small. The sweep of Eq. 7 is [`bellman`](crate::bellman)'s.

use crate::bellman::{Choice, Policy, Problem, prune};
use crate::controller::{Fixed, Hindsight};
use crate::execution::Loading;
use crate::fit::{Fit, FitError};
use crate::lut::Lut;
use crate::plan::{CoordinationPlan, Frequencies};
use crate::profile::{DeviceProfile, Visit, WORK_BINS};
use crate::quantize::{Quantizer, STATES};
use crate::target::Target;
use ls_bundle::ids::ByteCount;
use std::collections::BTreeMap;
use std::ops::Range;

/// Looks that tell classes of plans apart: 1, 2 to 3, 4 to 7, … up to 32.
const CLASSES: usize = 6;
/// The long run of [`Problem::long_run`].
const TOKENS: u32 = 16;
/// Static plans that are judged by the long run; all are ranked first.
const FINALISTS: usize = 64;

/// How a table is made.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// H of Eq. 7.
    pub horizon: u32,
    /// Samples of a distribution, at least.
    pub samples: usize,
    /// Sets of samples differ if chance would make any of a layer's do so less often than this.
    pub significance: f64,
    /// The action space.
    pub actions: Vec<CoordinationPlan>,
}

impl Default for Options {
    /// The paper's: four layers ahead, 20 samples, all plans; and one shot beside them.
    fn default() -> Options {
        let one_shot = std::iter::once(CoordinationPlan::ONE_SHOT);
        let actions = one_shot.chain(CoordinationPlan::all()).collect();
        Options { horizon: 4, samples: 20, significance: 0.01, actions }
    }
}

/// What is known of a table when it is made. Times are the model's, in microseconds a token.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Of the costs behind it.
    pub error: FitError,
    /// Choices in all states, and those of them that dominance dropped.
    pub choices: usize,
    /// See above.
    pub dropped: usize,
    /// States that are worth more than the one before, which has less to load: samples were too few to tell, and there
    /// dominance may have dropped what was better.
    pub unordered: usize,
    /// Bins of residual work in which a plan has samples of its own, or plans that look as often; those that differ from
    /// their layer's other bins; and those that do not.
    pub rows: [usize; 4],
    /// With one prediction a layer.
    pub one_shot_us: f64,
    /// With the default plan.
    pub fixed_us: f64,
    /// With the best plan that does not change.
    pub static_us: f64,
    /// With the table.
    pub lut_us: f64,
}

/// A profile's table, and what it came from.
#[derive(Debug)]
pub struct Synthesis<'a> {
    model: Model<'a>,
    problem: Problem,
    policy: Policy,
    choices: usize,
    dropped: usize,
    target: Target,
}

/// Makes the table of a profile.
///
/// # Panics
/// If the profile has no layers, there are no actions, or the horizon is 0.
#[must_use]
pub fn synthesize<'a>(profile: &DeviceProfile, options: &'a Options) -> Synthesis<'a> {
    let mut problem = Problem::new(STATES);
    let model = Model::new(profile, options, &mut problem);
    let (mut choices, mut dropped) = (0, 0);
    for place in 0..model.layers() * STATES {
        let mut open = model.choices(place / STATES, place % STATES);
        choices += open.len();
        dropped += prune(&mut open, problem.rows(), STATES);
        problem.push_state(&open);
    }
    let policy = problem.solve(options.horizon);
    Synthesis { model, problem, policy, choices, dropped, target: profile.target.clone() }
}

impl Synthesis<'_> {
    /// The table, and what is known of it.
    #[must_use]
    pub fn lut(&self) -> (Lut, Report) {
        let options = self.model.options;
        let choose = |layer: usize, state: usize| *self.problem.chosen(&self.policy, layer, state);
        let (lut_us, likely) = self.problem.long_run(TOKENS, choose);
        let (best_static, static_us) = self.best_static(&likely);
        let layers = self.model.layers.iter().zip(self.policy.plans.chunks(STATES));
        let layers = layers.map(|(layer, plans)| {
            let plan = |state: usize| options.actions[plans[state] as usize];
            (layer.quantizer.clone(), std::array::from_fn(plan))
        });
        let lut = Lut::new(self.target.clone(), options.horizon, best_static, layers);
        let report = Report {
            error: self.model.error,
            choices: self.choices,
            dropped: self.dropped,
            unordered: self.unordered(),
            rows: self.model.rows,
            one_shot_us: self.static_us(&CoordinationPlan::ONE_SHOT),
            fixed_us: self.static_us(&Fixed::DEFAULT.0),
            static_us,
            lut_us,
        };
        (lut, report)
    }

    fn unordered(&self) -> usize {
        let layers = self.policy.values_us.chunks(STATES);
        layers.map(|values| values.windows(2).filter(|pair| pair[1] < pair[0]).count()).sum()
    }

    /// What a token takes under one plan.
    fn static_us(&self, plan: &CoordinationPlan) -> f64 {
        let choices: Vec<Choice> = (0..self.model.layers() * STATES)
            .map(|place| {
                let (time_us, next) = self.model.outcome(place / STATES, place % STATES, plan);
                Choice { plan: 0, time_us, next }
            })
            .collect();
        self.problem.long_run(TOKENS, |layer, state| choices[layer * STATES + state]).0
    }

    /// The best plan of the action space for all layers and states: by the long run, among those that are best where the
    /// table's policy is likely to be.
    fn best_static(&self, likely: &[f64]) -> (CoordinationPlan, f64) {
        let (model, problem) = (&self.model, &self.problem);
        let actions = &model.options.actions;
        let mut ranked: Vec<(f64, usize)> =
            (0..actions.len()).map(|action| (0.0, action)).collect();
        for (place, &likely) in likely.iter().enumerate().filter(|(_, likely)| **likely > 1e-3) {
            let (layer, state) = (place / STATES, place % STATES);
            let next = (layer + 1) % model.layers() * STATES;
            let next = &self.policy.values_us[next..][..STATES];
            for choice in model.choices(layer, state) {
                let ahead = problem.row(choice.next).iter().zip(next);
                let value = choice.time_us + ahead.map(|(p, value)| p * value).sum::<f64>();
                ranked[choice.plan as usize].0 += likely * value;
            }
        }
        ranked.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        ranked.truncate(FINALISTS);
        let finalists = ranked.iter().map(|&(_, action)| actions[action]);
        let timed = finalists
            .chain([CoordinationPlan::ONE_SHOT, Fixed::DEFAULT.0])
            .map(|plan| (plan, self.static_us(&plan)));
        timed.reduce(|best, other| if other.1 < best.1 { other } else { best }).expect("two plans")
    }

    /// The best plans for a recorded trace. Another plan would have met the same luck: its R_{n+1} differs from the recorded
    /// one by as much as its samples do on average.
    ///
    /// # Panics
    /// If the trace is empty, or does not start with layer 0 and go through all layers in turn.
    #[must_use]
    pub fn hindsight(&self, trace: &[Visit]) -> Hindsight {
        let layers = self.model.layers();
        let luck: Vec<f64> = trace
            .iter()
            .enumerate()
            .map(|(index, visit)| {
                let layer = visit.layer.index();
                assert_eq!(layer, index % layers, "layers in turn");
                let state = self.state(layer, visit.remaining_bytes);
                let (_, row) = self.model.outcome(layer, state, &visit.plan);
                visit.next_remaining_bytes as f64 - self.model.means[row as usize]
            })
            .collect();
        let next = |visit: usize, row: u32| {
            let remaining = luck[visit] + self.model.means[row as usize];
            // Casting takes what is below 0 to 0.
            self.state((visit + 1) % layers, remaining as u64)
        };
        let (plans, _) = self.problem.hindsight(trace.len(), next);
        let visits = plans.chunks_exact(STATES);
        let plan = |&plan: &u32| self.model.options.actions[plan as usize];
        let visits = visits.map(|plans| std::array::from_fn(|state| plan(&plans[state])));
        let quantizers = self.model.layers.iter().map(|layer| layer.quantizer.clone());
        Hindsight::new(quantizers.collect(), visits.collect())
    }

    fn state(&self, layer: usize, remaining_bytes: u64) -> usize {
        self.model.layers[layer].quantizer.state(ByteCount(remaining_bytes)).index()
    }
}

/// What plans do in states.
#[derive(Debug)]
struct Model<'a> {
    options: &'a Options,
    layers: Vec<LayerModel>,
    error: FitError,
    rows: [usize; 4],
    /// By row of the problem: mean R_{n+1} of its samples, in bytes.
    means: Vec<f64>,
    /// Actions by their I/O side.
    by_io: BTreeMap<Frequencies, Vec<usize>>,
}

#[derive(Debug)]
struct LayerModel {
    costs: crate::execution::Costs,
    work_bytes: u64,
    quantizer: Quantizer,
    /// R that stands for each state.
    remaining_bytes: [u64; STATES],
    /// By bin of residual work.
    bins: Vec<BinRows>,
}

/// Distributions of R_{n+1} behind a bin.
#[derive(Clone, Debug)]
struct BinRows {
    all: u32,
    of_class: [Option<u32>; CLASSES],
    of_plan: Vec<(CoordinationPlan, u32)>,
}

/// Plans of a class look equally often, to a power of two: a prediction is only as fresh as both sides let it be.
fn class(plan: &CoordinationPlan) -> usize {
    let [compute, io] = plan.points();
    compute.min(io).ilog2() as usize
}

impl<'a> Model<'a> {
    fn new(profile: &DeviceProfile, options: &'a Options, problem: &mut Problem) -> Model<'a> {
        let layers = profile.work_bytes.len();
        let fit = Fit::new(profile);
        let mut visits: Vec<Vec<&Visit>> = vec![Vec::new(); layers];
        for visit in &profile.visits {
            visits[visit.layer.index()].push(visit);
        }
        let quantizers: Vec<Quantizer> = visits
            .iter()
            .map(|visits| {
                let loads: Vec<u64> = visits.iter().map(|visit| visit.remaining_bytes).collect();
                Quantizer::of_samples(&loads)
            })
            .collect();
        let mut plans: Vec<CoordinationPlan> = profile.visits.iter().map(|v| v.plan).collect();
        plans.sort_unstable();
        plans.dedup();
        let plans = plans.len();
        let (mut rows, mut means) = ([0; 4], Vec::new());
        let models = (0..layers).map(|layer| {
            let work_bytes = profile.work_bytes[layer];
            let next = &quantizers[(layer + 1) % layers];
            let comparisons = WORK_BINS * (1 + CLASSES + plans);
            let mut maker = RowMaker {
                problem,
                next,
                options,
                rows: &mut rows,
                means: &mut means,
                comparisons,
            };
            LayerModel {
                costs: fit.costs[layer],
                work_bytes,
                quantizer: quantizers[layer].clone(),
                remaining_bytes: stand_for(&quantizers[layer], &visits[layer], work_bytes),
                bins: maker.bins(&visits[layer], work_bytes),
            }
        });
        let models = models.collect();
        let mut by_io: BTreeMap<Frequencies, Vec<usize>> = BTreeMap::new();
        for (action, plan) in options.actions.iter().enumerate() {
            by_io.entry(plan.io).or_default().push(action);
        }
        Model { options, layers: models, error: fit.error, rows, means, by_io }
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    /// All actions in a state, as they are numbered.
    fn choices(&self, layer: usize, state: usize) -> Vec<Choice> {
        let mut choices = Vec::with_capacity(self.options.actions.len());
        choices.resize(choices.capacity(), Choice { plan: 0, time_us: 0.0, next: 0 });
        let model = &self.layers[layer];
        for (io, actions) in &self.by_io {
            let loading = Loading::new(&model.costs, model.remaining_bytes[state], *io);
            for &action in actions {
                let plan = &self.options.actions[action];
                let (time_us, next) = self.behind(layer, &loading, plan);
                choices[action] = Choice { plan: action as u32, time_us, next };
            }
        }
        choices
    }

    /// T_n(q, φ), and the distribution that follows.
    fn outcome(&self, layer: usize, state: usize, plan: &CoordinationPlan) -> (f64, u32) {
        let model = &self.layers[layer];
        let loading = Loading::new(&model.costs, model.remaining_bytes[state], plan.io);
        self.behind(layer, &loading, plan)
    }

    fn behind(&self, layer: usize, loading: &Loading, plan: &CoordinationPlan) -> (f64, u32) {
        let model = &self.layers[layer];
        let played = loading.compute(&model.costs, model.work_bytes, plan.compute);
        let bin = &model.bins[DeviceProfile::work_bin(played.left_bytes, model.work_bytes)];
        let own = bin.of_plan.iter().find(|(known, _)| known == plan).map(|(_, row)| *row);
        let row = own.or(bin.of_class[class(plan)]).unwrap_or(bin.all);
        (played.total_us(), row)
    }
}

/// The median load of each state, or what it starts with where no visit was in it.
fn stand_for(quantizer: &Quantizer, visits: &[&Visit], work_bytes: u64) -> [u64; STATES] {
    let mut loads: [Vec<u64>; STATES] = std::array::from_fn(|_| Vec::new());
    for visit in visits {
        let state = quantizer.state(ByteCount(visit.remaining_bytes));
        loads[state.index()].push(visit.remaining_bytes);
    }
    std::array::from_fn(|state| {
        loads[state].sort_unstable();
        let middle = loads[state].get(loads[state].len() / 2).copied();
        let start = if state == 0 { 0 } else { quantizer.thresholds()[state - 1] };
        middle.unwrap_or(start).min(work_bytes)
    })
}

/// Makes the distributions of a layer.
struct RowMaker<'a> {
    problem: &'a mut Problem,
    /// Of the layer that follows.
    next: &'a Quantizer,
    options: &'a Options,
    rows: &'a mut [usize; 4],
    means: &'a mut Vec<f64>,
    /// Tests of a layer, at most: each bin, class and plan.
    comparisons: usize,
}

impl RowMaker<'_> {
    fn bins(&mut self, visits: &[&Visit], work_bytes: u64) -> Vec<BinRows> {
        let mut bins: Vec<Vec<&Visit>> = vec![Vec::new(); WORK_BINS];
        for &visit in visits {
            bins[DeviceProfile::work_bin(visit.left_bytes, work_bytes)].push(visit);
        }
        let of_layer = self.row(visits);
        (0..WORK_BINS).map(|bin| self.bin(&bins, bin, of_layer)).collect()
    }

    fn bin(&mut self, bins: &[Vec<&Visit>], bin: usize, of_layer: u32) -> BinRows {
        // Enough samples, from as near as they are.
        let within = |reach: usize| bin.saturating_sub(reach)..(bin + reach + 1).min(WORK_BINS);
        let samples = |near: Range<usize>| bins[near].iter().map(Vec::len).sum::<usize>();
        let enough = |reach: &usize| samples(within(*reach)) >= self.options.samples;
        let near = within((0..WORK_BINS).find(enough).unwrap_or(WORK_BINS));
        let ours = bins[near.clone()].concat();
        let others = [&bins[..near.start], &bins[near.end..]].concat().concat();
        let differs = self.differ(&ours, &others);
        self.rows[if differs { 2 } else { 3 }] += 1;
        let all = if differs { self.row(&ours) } else { of_layer };
        let mut rows = BinRows { all, of_class: [None; CLASSES], of_plan: Vec::new() };
        for of_class in 0..CLASSES {
            let within = |visit: &&&Visit| class(&visit.plan) == of_class;
            let ours: Vec<&Visit> = bins[bin].iter().filter(within).copied().collect();
            let others: Vec<&Visit> = bins[bin].iter().filter(|v| !within(v)).copied().collect();
            if self.differ(&ours, &others) {
                rows.of_class[of_class] = Some(self.row(&ours));
                self.rows[1] += 1;
            }
            let mut plans: Vec<CoordinationPlan> = ours.iter().map(|visit| visit.plan).collect();
            plans.sort_unstable();
            plans.dedup();
            for plan in plans {
                let (own, others): (Vec<&Visit>, Vec<&Visit>) =
                    ours.iter().partition(|visit| visit.plan == plan);
                if self.differ(&own, &others) {
                    rows.of_plan.push((plan, self.row(&own)));
                    self.rows[0] += 1;
                }
            }
        }
        rows
    }

    /// How likely each of the next layer's states is behind these visits; the least load if there are none.
    fn row(&mut self, visits: &[&Visit]) -> u32 {
        let mut row = [0.0; STATES];
        for visit in visits {
            row[self.next.state(ByteCount(visit.next_remaining_bytes)).index()] += 1.0;
        }
        row[0] += f64::from(u8::from(visits.is_empty()));
        let total: u64 = visits.iter().map(|visit| visit.next_remaining_bytes).sum();
        self.means.push(total as f64 / visits.len().max(1) as f64);
        let sum: f64 = row.iter().sum();
        self.problem.push_row(&row.map(|count| count / sum))
    }

    /// Whether there are enough of `own` to say that they are not like `others` (Kolmogorov-Smirnov, two samples).
    fn differ(&self, own: &[&Visit], others: &[&Visit]) -> bool {
        if own.len() < self.options.samples || others.len() < self.options.samples {
            return false;
        }
        let loads = |visits: &[&Visit]| {
            let mut loads: Vec<u64> = visits.iter().map(|v| v.next_remaining_bytes).collect();
            loads.sort_unstable();
            loads
        };
        let (own, others) = (loads(own), loads(others));
        let (n, m) = (own.len() as f64, others.len() as f64);
        let below = |loads: &[u64], load: u64| loads.partition_point(|&l| l <= load) as f64;
        let gap = |&load: &u64| (below(&own, load) / n - below(&others, load) / m).abs();
        let widest = own.iter().chain(&others).map(gap).fold(0.0, f64::max);
        let significance = self.options.significance / self.comparisons as f64;
        widest > ((significance / 2.0).ln() / -2.0 * (n + m) / (n * m)).sqrt()
    }
}
