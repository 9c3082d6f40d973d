//! The finite-horizon stochastic dynamic programme of Eq. 7 on plain slices, and what is compared with its policy.
//!
//! ```text
//! V_n^h(q) = min over φ of  T_n(q, φ) + E[ V_{n+1}^{h-1}(Q(R_{n+1})) ],   V^0 = 0
//! ```
//!
//! Layers are a ring: behind the last comes the next token's first. Each layer's best plan with `horizon` layers ahead is
//! the table's entry (Eq. 8). All sums run in one order, so equal problems have equal policies, bit for bit.

/// What a plan costs in a state, and where it leads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Which plan; any number that tells plans apart.
    pub plan: u32,
    /// T_n(q, φ).
    pub time_us: f64,
    /// The distribution of the next layer's state, from [`Problem::push_row`].
    pub next: u32,
}

/// Choices in every state of every layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Problem {
    states: usize,
    /// Where the choices of layer n in state q begin: entry n * states + q.
    starts: Vec<usize>,
    choices: Vec<Choice>,
    /// Distributions, `states` probabilities each.
    rows: Vec<f64>,
}

/// What to do in every state, and what it will take.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// By layer and state: the plan.
    pub plans: Vec<u32>,
    /// By layer and state: V^H.
    pub values_us: Vec<f64>,
}

impl Problem {
    /// A problem of `states` states a layer, without layers.
    #[must_use]
    pub fn new(states: usize) -> Problem {
        assert!(states > 0, "a state");
        Problem { states, starts: vec![0], choices: Vec::new(), rows: Vec::new() }
    }

    /// Adds a distribution.
    ///
    /// # Panics
    /// Unless it is one over the states.
    pub fn push_row(&mut self, row: &[f64]) -> u32 {
        assert_eq!(row.len(), self.states, "a probability a state");
        let sum: f64 = row.iter().sum();
        assert!(row.iter().all(|&p| p >= 0.0) && (sum - 1.0).abs() < 1e-9, "they add up to {sum}");
        self.rows.extend(row);
        (self.rows.len() / self.states - 1) as u32
    }

    /// Adds the next state's choices: all states of layer 0, then those of layer 1, and so on. Where two are equally
    /// good, the first is taken.
    ///
    /// # Panics
    /// If there is none, or one leads nowhere.
    pub fn push_state(&mut self, choices: &[Choice]) {
        assert!(!choices.is_empty(), "something to choose from");
        let rows = (self.rows.len() / self.states) as u32;
        assert!(choices.iter().all(|c| c.next < rows && c.time_us.is_finite()), "sound choices");
        self.choices.extend(choices);
        self.starts.push(self.choices.len());
    }

    /// Number of layers.
    ///
    /// # Panics
    /// If the last layer lacks states.
    #[must_use]
    pub fn layers(&self) -> usize {
        let states = self.starts.len() - 1;
        assert!(states > 0 && states.is_multiple_of(self.states), "{states} states");
        states / self.states
    }

    /// Number of states a layer.
    #[must_use]
    pub fn states(&self) -> usize {
        self.states
    }

    /// The choices in a state.
    #[must_use]
    pub fn choices(&self, layer: usize, state: usize) -> &[Choice] {
        let place = layer * self.states + state;
        &self.choices[self.starts[place]..self.starts[place + 1]]
    }

    /// The distribution that a choice leads to.
    #[must_use]
    pub fn row(&self, next: u32) -> &[f64] {
        &self.rows[next as usize * self.states..][..self.states]
    }

    /// All distributions, one behind the other.
    #[must_use]
    pub fn rows(&self) -> &[f64] {
        &self.rows
    }

    fn expected(&self, next: u32, values: &[f64]) -> f64 {
        self.row(next).iter().zip(values).map(|(p, value)| p * value).sum()
    }

    /// Solves Eq. 7 for every layer and state.
    ///
    /// # Panics
    /// If the horizon is 0.
    #[must_use]
    pub fn solve(&self, horizon: u32) -> Policy {
        assert!(horizon > 0, "a layer to plan for");
        let (layers, states) = (self.layers(), self.states);
        let mut policy = Policy { plans: vec![0; layers * states], values_us: Vec::new() };
        let mut ahead = vec![0.0; layers * states];
        for _ in 0..horizon {
            let mut values = Vec::with_capacity(layers * states);
            for layer in 0..layers {
                let next = &ahead[(layer + 1) % layers * states..][..states];
                for state in 0..states {
                    let (choice, value) = self.best(layer, state, next);
                    policy.plans[layer * states + state] = choice.plan;
                    values.push(value);
                }
            }
            ahead = values;
        }
        policy.values_us = ahead;
        policy
    }

    /// The best choice if the next layer's states are worth `next`.
    fn best(&self, layer: usize, state: usize, next: &[f64]) -> (Choice, f64) {
        let valued = self
            .choices(layer, state)
            .iter()
            .map(|choice| (*choice, choice.time_us + self.expected(choice.next, next)));
        valued.reduce(|best, other| if other.1 < best.1 { other } else { best }).expect("a choice")
    }

    /// The choice that a policy makes.
    ///
    /// # Panics
    /// If its plan is none of the state's.
    #[must_use]
    pub fn chosen(&self, policy: &Policy, layer: usize, state: usize) -> &Choice {
        let plan = policy.plans[layer * self.states + state];
        let choices = self.choices(layer, state);
        choices.iter().find(|choice| choice.plan == plan).expect("a policy of this problem")
    }

    /// What a token takes under a policy, in the long run: the mean of the last `tokens` of twice as many, from all
    /// states alike. Also how likely each layer's states are meanwhile, by layer and state.
    #[must_use]
    pub fn long_run(
        &self,
        tokens: u32,
        choose: impl Fn(usize, usize) -> Choice,
    ) -> (f64, Vec<f64>) {
        let (layers, states) = (self.layers(), self.states);
        let mut likely = vec![1.0 / states as f64; states];
        let mut seen = vec![0.0; layers * states];
        let mut total_us = 0.0;
        for token in 0..2 * tokens {
            for layer in 0..layers {
                let mut next = vec![0.0; states];
                for (state, &probability) in likely.iter().enumerate().filter(|(_, p)| **p > 0.0) {
                    let choice = choose(layer, state);
                    for (next, p) in next.iter_mut().zip(self.row(choice.next)) {
                        *next += probability * p;
                    }
                    if token >= tokens {
                        total_us += probability * choice.time_us;
                        seen[layer * states + state] += probability / f64::from(tokens);
                    }
                }
                likely = next;
            }
        }
        (total_us / f64::from(tokens), seen)
    }

    /// The best plans for `visits` visits whose luck is known beforehand: visit t is of layer t modulo the number of layers,
    /// and a choice that leads to distribution `row` leads to state `next(t, row)` of the next layer. By visit and state:
    /// the plan; and what all visits take from each state of the first. No controller can take less.
    #[must_use]
    pub fn hindsight(
        &self,
        visits: usize,
        next: impl Fn(usize, u32) -> usize,
    ) -> (Vec<u32>, Vec<f64>) {
        let (layers, states) = (self.layers(), self.states);
        let mut plans = vec![0; visits * states];
        let mut ahead = vec![0.0; states];
        for visit in (0..visits).rev() {
            let valued = (0..states).map(|state| {
                let choices = self.choices(visit % layers, state).iter();
                let valued = choices
                    .map(|c| (c.plan, c.time_us + ahead[next(visit, c.next)]))
                    .reduce(|best, other| if other.1 < best.1 { other } else { best });
                let (plan, value) = valued.expect("a choice");
                plans[visit * states + state] = plan;
                value
            });
            ahead = valued.collect();
        }
        (plans, ahead)
    }

    /// The state at `rank` of a distribution: the first by which so much probability has passed.
    #[must_use]
    pub fn at_rank(&self, next: u32, rank: f64) -> usize {
        let mut passed = 0.0;
        let row = self.row(next);
        let found = row.iter().position(|p| {
            passed += p;
            rank < passed
        });
        found.unwrap_or_else(|| row.iter().rposition(|&p| p > 0.0).expect("a distribution"))
    }
}

/// Drops choices that another is never worse than: takes no longer, and leads to no more load (its distribution is
/// nowhere behind, stochastically). Where values grow with the state, as more load is never better, no value changes.
/// `rows` holds the distributions, `states` probabilities each. Returns how many were dropped.
pub fn prune(choices: &mut Vec<Choice>, rows: &[f64], states: usize) -> usize {
    let before = choices.len();
    // Of those that lead to the same, the fastest; the earlier among equals.
    let mut fastest: Vec<Option<usize>> = vec![None; rows.len() / states];
    for (index, choice) in choices.iter().enumerate() {
        let known = &mut fastest[choice.next as usize];
        if known.is_none_or(|known| choice.time_us < choices[known].time_us) {
            *known = Some(index);
        }
    }
    let mut order: Vec<usize> = fastest.into_iter().flatten().collect();
    order.sort_by(|&a, &b| choices[a].time_us.total_cmp(&choices[b].time_us).then(a.cmp(&b)));
    // Only those that are as fast can dominate.
    let row = |index: usize| &rows[choices[index].next as usize * states..][..states];
    let mut kept: Vec<usize> = Vec::new();
    for &index in &order {
        if !kept.iter().any(|&other| is_no_more(row(other), row(index))) {
            kept.push(index);
        }
    }
    kept.sort_unstable();
    *choices = kept.iter().map(|&index| choices[index]).collect();
    before - choices.len()
}

/// Whether `a` is nowhere behind `b`: up to every state it has at least as much probability.
fn is_no_more(a: &[f64], b: &[f64]) -> bool {
    let mut lead = 0.0;
    a.iter().zip(b).all(|(a, b)| {
        lead += a - b;
        lead >= -1e-12
    })
}
