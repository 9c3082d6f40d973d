//! The recursion of Eq. 7 against everything that could be done, on small instances.

use ls_control::bellman::{Choice, Policy, Problem, prune};
use proptest::prelude::*;

/// A problem as drawn: by layer and state, choices of (time, weights of the next states).
type Drawn = Vec<Vec<Vec<(f64, Vec<u32>)>>>;

fn drawn(layers: usize, states: usize, choices: usize) -> impl Strategy<Value = Drawn> {
    let weights = prop::collection::vec(0u32..5, states).prop_map(|mut row| {
        // Something must be possible.
        row[0] += u32::from(row.iter().all(|&w| w == 0));
        row
    });
    let choice = (0u32..100, weights).prop_map(|(time, row)| (f64::from(time), row));
    let of_state = prop::collection::vec(choice, 1..=choices);
    prop::collection::vec(prop::collection::vec(of_state, states), layers)
}

fn distribution(weights: &[u32]) -> Vec<f64> {
    let sum: u32 = weights.iter().sum();
    weights.iter().map(|&weight| f64::from(weight) / f64::from(sum)).collect()
}

fn problem(drawn: &Drawn) -> Problem {
    let states = drawn[0].len();
    let mut problem = Problem::new(states);
    for choices in drawn.iter().flatten() {
        let choices: Vec<Choice> = choices
            .iter()
            .enumerate()
            .map(|(plan, (time_us, weights))| Choice {
                plan: plan as u32,
                time_us: *time_us,
                next: problem.push_row(&distribution(weights)),
            })
            .collect();
        problem.push_state(&choices);
    }
    problem
}

/// What `rules` take from (layer, state): rule number step * states + state is the choice at that step.
fn follow(problem: &Problem, layer: usize, state: usize, rules: &[usize]) -> f64 {
    let (layers, states) = (problem.layers(), problem.states());
    let mut likely = vec![0.0; states];
    likely[state] = 1.0;
    let mut total = 0.0;
    for (step, rules) in rules.chunks(states).enumerate() {
        let mut next = vec![0.0; states];
        for state in 0..states {
            let choices = problem.choices((layer + step) % layers, state);
            let choice = choices[rules[state] % choices.len()];
            total += likely[state] * choice.time_us;
            for (next, p) in next.iter_mut().zip(problem.row(choice.next)) {
                *next += likely[state] * p;
            }
        }
        likely = next;
    }
    total
}

/// Every assignment of `count` rules with `choices` values each.
fn assignments(count: usize, choices: usize) -> impl Iterator<Item = Vec<usize>> {
    (0..choices.pow(count as u32)).map(move |mut code| {
        let rules = (0..count).map(|_| {
            let rule = code % choices;
            code /= choices;
            rule
        });
        rules.collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn no_policy_is_better(drawn in drawn(2, 2, 3), horizon in 1u32..=3) {
        let problem = problem(&drawn);
        let policy = problem.solve(horizon);
        for (place, &value) in policy.values_us.iter().enumerate() {
            let (layer, state) = (place / 2, place % 2);
            let best = assignments(2 * horizon as usize, 3)
                .map(|rules| follow(&problem, layer, state, &rules))
                .fold(f64::INFINITY, f64::min);
            prop_assert!((value - best).abs() < 1e-9, "{value} by recursion, {best} by trying all");
        }
    }

    #[test]
    fn the_table_s_plan_reaches_the_value(drawn in drawn(3, 2, 3), horizon in 2u32..=3) {
        let problem = problem(&drawn);
        let (policy, shorter) = (problem.solve(horizon), problem.solve(horizon - 1));
        for layer in 0..3 {
            for state in 0..2 {
                let choice = problem.chosen(&policy, layer, state);
                let next = &shorter.values_us[(layer + 1) % 3 * 2..][..2];
                let ahead: f64 = problem.row(choice.next).iter().zip(next).map(|(p, v)| p * v).sum();
                let value = policy.values_us[layer * 2 + state];
                prop_assert!((choice.time_us + ahead - value).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn a_horizon_of_one_is_greedy(drawn in drawn(3, 4, 4)) {
        let problem = problem(&drawn);
        let policy = problem.solve(1);
        for layer in 0..3 {
            for state in 0..4 {
                let times = problem.choices(layer, state).iter().map(|choice| choice.time_us);
                let least = times.fold(f64::INFINITY, f64::min);
                prop_assert_eq!(problem.chosen(&policy, layer, state).time_us, least);
                prop_assert_eq!(policy.values_us[layer * 4 + state], least);
            }
        }
    }

    /// Where more load never helps, values grow with it, and what dominance drops is never missed.
    #[test]
    fn values_grow_with_the_load_and_pruning_changes_none(
        times in prop::collection::vec(0u32..50, 2 * 4 * 5),
        shifts in prop::collection::vec(0u32..5, 2 * 5),
        horizon in 1u32..=4,
    ) {
        let (mut all, mut pruned) = (Problem::new(4), Problem::new(4));
        // Plan p of a layer takes longer in every further state, and its next load is that of the state or more.
        let shift_row = |state: usize, shift: u32| {
            let mut row = [0.0; 4];
            row[(state + shift as usize).min(3)] += 0.5;
            row[(state / 2 + shift as usize).min(3)] += 0.5;
            row
        };
        for layer in 0..2 {
            for state in 0..4 {
                let choices: Vec<Choice> = (0..5).map(|plan| {
                    let own = &times[(layer * 5 + plan) * 4..][..=state];
                    let row = shift_row(state, shifts[layer * 5 + plan]);
                    pruned.push_row(&row);
                    Choice {
                        plan: plan as u32,
                        time_us: own.iter().map(|&time| f64::from(time)).sum(),
                        next: all.push_row(&row),
                    }
                }).collect();
                all.push_state(&choices);
                let mut kept = choices;
                let dropped = prune(&mut kept, all.rows(), 4);
                prop_assert_eq!(kept.len() + dropped, 5);
                pruned.push_state(&kept);
            }
        }
        let policy = all.solve(horizon);
        for layer in policy.values_us.chunks(4) {
            prop_assert!(layer.is_sorted(), "{layer:?}");
        }
        prop_assert_eq!(policy.values_us, pruned.solve(horizon).values_us);
    }

    #[test]
    fn hindsight_is_the_best_of_all_sequences(
        drawn in drawn(2, 3, 2),
        ranks in prop::collection::vec(0.0f64..1.0, 1..=7),
        start in 0usize..3,
    ) {
        let problem = problem(&drawn);
        // The plan of a visit may depend on its state.
        let play = |plan: &dyn Fn(usize, usize) -> usize| {
            let (mut state, mut total) = (start, 0.0);
            for (visit, &rank) in ranks.iter().enumerate() {
                let choices = problem.choices(visit % 2, state);
                let choice = choices[plan(visit, state) % choices.len()];
                total += choice.time_us;
                state = problem.at_rank(choice.next, rank);
            }
            total
        };
        let (plans, totals) = problem
            .hindsight(ranks.len(), |visit, row| problem.at_rank(row, ranks[visit]));
        let best = assignments(ranks.len(), 2)
            .map(|plans| play(&|visit, _| plans[visit]))
            .fold(f64::INFINITY, f64::min);
        prop_assert!((totals[start] - best).abs() < 1e-9, "{totals:?}, {best} by trying all");
        let total = play(&|visit, state| plans[visit * 3 + state] as usize);
        prop_assert!((total - best).abs() < 1e-9, "{total}, {best} by trying all");
    }
}

/// By hand: from the light state the slow plan keeps the load light. One layer ahead it is not worth it; two are.
#[test]
fn a_longer_horizon_pays_now_to_save_later() {
    let mut problem = Problem::new(2);
    let (light, heavy) = (problem.push_row(&[1.0, 0.0]), problem.push_row(&[0.0, 1.0]));
    let choice = |plan, time_us, next| Choice { plan, time_us, next };
    problem.push_state(&[choice(0, 10.0, heavy), choice(1, 15.0, light)]);
    problem.push_state(&[choice(0, 30.0, heavy), choice(1, 40.0, light)]);
    assert_eq!(problem.solve(1).plans, [0, 0]);
    let policy = problem.solve(2);
    assert_eq!(policy.plans, [1, 1]);
    assert_eq!(policy.values_us, [15.0 + 10.0, 40.0 + 10.0]);
    let long_run =
        |policy: &Policy| problem.long_run(4, |layer, state| *problem.chosen(policy, layer, state));
    assert_eq!(long_run(&policy), (15.0, vec![1.0, 0.0]));
    assert_eq!(long_run(&problem.solve(1)), (30.0, vec![0.0, 1.0]));
}

#[test]
fn pruning_keeps_what_is_slower_but_leads_to_less() {
    let rows = [1.0, 0.0, 0.5, 0.5, 0.4, 0.6];
    let choice = |plan, time_us, next| Choice { plan, time_us, next };
    let mut choices = vec![
        choice(0, 5.0, 2),
        choice(1, 6.0, 1),
        choice(2, 6.5, 1),
        choice(3, 7.0, 2),
        choice(4, 8.0, 0),
        choice(5, 9.0, 0),
    ];
    assert_eq!(prune(&mut choices, &rows, 2), 3);
    assert_eq!(choices.iter().map(|choice| choice.plan).collect::<Vec<_>>(), [0, 1, 4]);
}
