//! How a profile comes about: [`Rig`], what is asked of an engine; [`Explorer`], which plans it is to try; [`explore`], the
//! loop around them.
//!
//! Every token is a sample of every layer: each tries a plan of its own, the one that was tried least in a state like the
//! layer's. So nothing has to be forced into a state, and a hundred seconds of decoding give tens of thousands of visits.

use crate::controller::Controller;
use crate::plan::CoordinationPlan;
use crate::profile::{DeviceProfile, MAX_VISITS, Visit, WORK_BINS};
use ls_bundle::ids::{ByteCount, LayerId};
use std::cell::{Cell, RefCell};

/// What is asked of an engine that is profiled: to decode as it always does, under any controller, and to tell what each
/// layer took. Its text should be recorded (replayed) rather than sampled, so that plans meet the same tokens.
pub trait Rig {
    /// Why it could not go on.
    type Error;

    /// C^G of each layer: the bytes of weights that a token computes there.
    fn work_bytes(&self) -> Vec<u64>;

    /// Decodes the next token under `controller`, and tells of every layer in turn; see [`Visit`] for what. What it does not
    /// know yet it tells with the next token.
    ///
    /// # Errors
    /// If decoding fails.
    fn token(
        &mut self,
        controller: &dyn Controller,
        visited: &mut dyn FnMut(Visit),
    ) -> Result<(), Self::Error>;
}

/// Plans that a profile tries unless told otherwise: one shot, and both sides even at each frequency, rising and falling.
/// Other plans are judged by the model that is fitted to these.
#[must_use]
pub fn candidates() -> Vec<CoordinationPlan> {
    let sides = [[1; 4], [2; 4], [4; 4], [8; 4], [1, 2, 4, 8], [8, 4, 2, 1]];
    let pairs = sides
        .iter()
        .flat_map(|&compute| sides.iter().map(move |&io| CoordinationPlan { compute, io }));
    std::iter::once(CoordinationPlan::ONE_SHOT).chain(pairs).collect()
}

/// When there are enough visits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Enough {
    /// Samples of R_{n+1} wanted for a layer and bin of residual work.
    pub samples: u32,
    /// And so small a standard error of their mean, as a share of the layer's work.
    pub error: f64,
    /// A bin that fewer than this share of a layer's visits fall into is not waited for.
    pub rare: f64,
    /// Visits of each layer under each plan, which tell what plans cost.
    pub tries: u32,
}

impl Enough {
    /// The paper's 20 samples, and a mean that is known to a fiftieth of the layer. Most layers' loads lie in one or two
    /// bins: then each plan is met three times in each, and the costs can be judged.
    pub const DEFAULT: Enough = Enough { samples: 20, error: 0.02, rare: 0.02, tries: 6 };
}

/// How far a profile has come.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Visits so far.
    pub visits: usize,
    /// Of the bins that are waited for, those that have enough.
    pub bins_done: usize,
    /// Bins that are waited for.
    pub bins: usize,
    /// Layers that have met all plans often enough.
    pub layers_done: usize,
    /// Layers.
    pub layers: usize,
}

impl Progress {
    /// Whether there is enough of all.
    #[must_use]
    pub fn is_enough(&self) -> bool {
        self.bins > 0 && self.bins_done == self.bins && self.layers_done == self.layers
    }

    /// How much of what is waited for is there, 0 to 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        (self.bins_done + self.layers_done) as f64 / (self.bins + self.layers).max(1) as f64
    }
}

/// Lets `rig` decode until there are enough visits or `go_on` says no, and adds them to `profile`, which may have some.
///
/// # Errors
/// If the rig fails; what was measured before is in the profile.
///
/// # Panics
/// If the profile has visits of other layers than the rig's, or the rig tells of a visit that cannot be: see [`Visit`].
pub fn explore<R: Rig>(
    rig: &mut R,
    profile: &mut DeviceProfile,
    plans: &[CoordinationPlan],
    enough: Enough,
    mut go_on: impl FnMut(Progress) -> bool,
) -> Result<Progress, R::Error> {
    let work_bytes = rig.work_bytes();
    assert!(profile.visits.is_empty() || profile.work_bytes == work_bytes, "the same layers");
    profile.work_bytes = work_bytes;
    let explorer = Explorer::new(plans.to_vec(), profile.work_bytes.clone());
    let mut tally = Tally::new(&profile.work_bytes, plans);
    for visit in &profile.visits {
        explorer.count(visit);
        tally.add(visit);
    }
    loop {
        let progress = tally.progress(&enough);
        let room = MAX_VISITS - profile.visits.len() >= profile.work_bytes.len();
        if !room || progress.is_enough() || !go_on(progress) {
            return Ok(progress);
        }
        rig.token(&explorer, &mut |visit| {
            if let Some((what, found, wanted)) = profile.flaw_of(&visit) {
                panic!("{what}: {found} found, {wanted} wanted");
            }
            tally.add(&visit);
            profile.visits.push(visit);
        })?;
    }
}

/// Gives each layer the plan that was tried least in a state like its own, any of them where several were.
#[derive(Debug)]
pub struct Explorer {
    plans: Vec<CoordinationPlan>,
    work_bytes: Vec<u64>,
    /// By layer, bin of remaining load and plan.
    tried: RefCell<Vec<u32>>,
    seed: Cell<u64>,
}

impl Explorer {
    /// Tries `plans` in layers of so much work.
    ///
    /// # Panics
    /// If there are no plans.
    #[must_use]
    pub fn new(plans: Vec<CoordinationPlan>, work_bytes: Vec<u64>) -> Explorer {
        assert!(!plans.is_empty(), "something to try");
        let tried = RefCell::new(vec![0; work_bytes.len() * WORK_BINS * plans.len()]);
        Explorer { plans, work_bytes, tried, seed: Cell::new(1) }
    }

    fn cell(&self, layer: LayerId, remaining_bytes: u64) -> usize {
        let bin = DeviceProfile::work_bin(remaining_bytes, self.work_bytes[layer.index()]);
        (layer.index() * WORK_BINS + bin) * self.plans.len()
    }

    /// Counts a visit of an earlier run.
    fn count(&self, visit: &Visit) {
        if let Some(plan) = self.plans.iter().position(|plan| *plan == visit.plan) {
            self.tried.borrow_mut()[self.cell(visit.layer, visit.remaining_bytes) + plan] += 1;
        }
    }
}

impl Controller for Explorer {
    fn plan(&self, layer: LayerId, remaining: ByteCount) -> CoordinationPlan {
        let start = self.cell(layer, remaining.0);
        let mut tried = self.tried.borrow_mut();
        let tried = &mut tried[start..start + self.plans.len()];
        let least = *tried.iter().min().expect("there are plans");
        let count = tried.iter().filter(|&&count| count == least).count();
        let mut seed = self.seed.get();
        let pick = (random(&mut seed) % count as u64) as usize;
        self.seed.set(seed);
        let mut least = (0..tried.len()).filter(|&plan| tried[plan] == least);
        let plan = least.nth(pick).expect("fewer than were counted");
        tried[plan] += 1;
        self.plans[plan]
    }
}

/// Means of R_{n+1} by layer and bin of residual work, and how often plans were tried, kept as visits come.
struct Tally<'a> {
    plans: &'a [CoordinationPlan],
    /// By layer and plan.
    tries: Vec<u32>,
    work_bytes: Vec<u64>,
    visits: usize,
    /// By layer and bin: count, mean, sum of squared differences from it; shares of the next layer's work.
    bins: Vec<(u32, f64, f64)>,
}

impl Tally<'_> {
    fn new<'a>(work_bytes: &[u64], plans: &'a [CoordinationPlan]) -> Tally<'a> {
        let bins = vec![(0, 0.0, 0.0); work_bytes.len() * WORK_BINS];
        let tries = vec![0; work_bytes.len() * plans.len()];
        Tally { plans, tries, work_bytes: work_bytes.to_vec(), visits: 0, bins }
    }

    fn add(&mut self, visit: &Visit) {
        let layer = visit.layer.index();
        let next = self.work_bytes[(layer + 1) % self.work_bytes.len()];
        let share = visit.next_remaining_bytes as f64 / next.max(1) as f64;
        let bin = DeviceProfile::work_bin(visit.left_bytes, self.work_bytes[layer]);
        let (count, mean, squares) = &mut self.bins[layer * WORK_BINS + bin];
        *count += 1;
        let before = share - *mean;
        *mean += before / f64::from(*count);
        *squares += before * (share - *mean);
        self.visits += 1;
        if let Some(plan) = self.plans.iter().position(|plan| *plan == visit.plan) {
            self.tries[layer * self.plans.len() + plan] += 1;
        }
    }

    fn progress(&self, enough: &Enough) -> Progress {
        let layers = self.work_bytes.len();
        let mut progress = Progress { visits: self.visits, layers, ..Progress::default() };
        let often = |tries: &&[u32]| tries.iter().all(|&tries| tries >= enough.tries);
        progress.layers_done = self.tries.chunks(self.plans.len()).filter(often).count();
        for layer in self.bins.chunks(WORK_BINS) {
            let visits: u32 = layer.iter().map(|(count, ..)| count).sum();
            for &(count, _, squares) in layer {
                if count == 0 || f64::from(count) < enough.rare * f64::from(visits) {
                    continue;
                }
                let error = (squares / f64::from(count)).sqrt() / f64::from(count).sqrt();
                progress.bins += 1;
                progress.bins_done += usize::from(count >= enough.samples && error <= enough.error);
            }
        }
        progress
    }
}

/// SplitMix64: enough to take turns.
pub(crate) fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut bits = *seed;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
