//! The resident base, and what it is worth in the forward.

use crate::activations::record;
use crate::{Bench, text, tiny};
use ls_prep::artifact::Artifact;
use ls_prep::model::forward::Forward;
use ls_prep::recipe::Recipe;
use ls_prep::sparse::{
    Dense, Oracle, Policy, Selected, Selection, WithBase, likelihoods, likelihoods_of,
};
use ls_prep::stage::{Outcome, merge};
use ls_prep::stages::activations::Activations;
use ls_prep::stages::base::{Base, BaseStage};
use ls_prep::stages::prompts::{Prompts, Windows};
use ls_prep::stages::source::Source;
use ls_prep::stages::sparsity::{Learnt, SparsityStage, Way, prices};
use std::ops::Range;

fn made(
    source: &Source,
    activations: &Activations,
    recipe: &Recipe,
    layers: Option<Range<u32>>,
) -> Artifact {
    let stage = BaseStage::new(source, activations, recipe).unwrap();
    source.store.run(&stage, layers, &mut ()).unwrap().0
}

fn with_bits(bits: [u32; 3]) -> Recipe {
    let mut recipe = tiny();
    (recipe.base.gate_bits, recipe.base.up_bits, recipe.base.down_bits) = bits.into();
    recipe
}

#[test]
fn more_bits_and_more_exact_neurons_leave_less() {
    let bench = Bench::new();
    let (source, activations) = (bench.source(), record(&bench, &tiny()));
    let mut last = f64::INFINITY;
    for bits in [1, 2, 4] {
        let base = made(&source, &activations, &with_bits([bits; 3]), None);
        let base = Base::new(base).unwrap();
        let info = base.info(1).unwrap();
        let errors: Vec<f64> = info.left_over.iter().map(|left| left.error).collect();
        assert!(errors.is_sorted_by(|a, b| a >= b), "{bits} bits: {errors:?}");
        assert!(errors[2] < last && errors[2] < 0.5, "{bits} bits: {errors:?}");
        last = errors[2];
        // 8 bytes a bit and 2 a scale for 64 weights of 128, three bytes a neuron, two a constant.
        let bytes = 128 * (3 * (8 * bits + 2) + 3) + 128;
        assert!((base.resident_share() - f64::from(bytes) / f64::from(128 * 3 * 128)).abs() < 1e-9);
        let [records, tables] = base.bytes(1).unwrap();
        assert_eq!((records.len() + tables.len()) as u32, bytes);
    }
}

#[test]
fn shares_of_layers_join_to_the_bytes_of_one_run() {
    let bench = Bench::new();
    let (source, activations) = (bench.source(), record(&bench, &tiny()));
    let parts = [2..3, 0..2].map(|layers| made(&source, &activations, &tiny(), Some(layers)));
    let parts = parts.map(|part| part.path().to_owned());
    let joined = merge(&parts).unwrap();
    let bytes = std::fs::read(joined.path()).unwrap();
    std::fs::remove_file(joined.path()).unwrap();
    let whole = made(&source, &activations, &tiny(), None);
    assert!(std::fs::read(whole.path()).unwrap() == bytes);
}

#[test]
fn neurons_that_make_up_for_each_other_in_blocks_still_make_a_base() {
    let bench = Bench::new();
    let (source, activations) = (bench.source(), record(&bench, &tiny()));
    let left = |neurons| {
        let mut recipe = tiny();
        recipe.base.feedback_neurons = neurons;
        let base = Base::new(made(&source, &activations, &recipe, Some(0..1))).unwrap();
        base.info(0).unwrap().left_over[1].error
    };
    // 50 is rounded down to three blocks of 43, 43 and 42.
    let (whole, blocks) = (left(128), left(50));
    assert!(blocks < 2.0 * whole && blocks != whole, "{blocks} {whole}");
}

#[test]
fn a_width_that_groups_do_not_divide_is_refused() {
    let bench = Bench::new();
    let (source, activations) = (bench.source(), record(&bench, &tiny()));
    let stage = BaseStage::new(&source, &activations, &tiny()).unwrap();
    let mut params = ls_prep::stage::Stage::params(&stage);
    params.hidden = 96;
    assert!(params.layout().unwrap_err().to_string().contains("multiple of 64"));
}

fn windows(source: &Source) -> Windows {
    let prompts = Prompts::new(source, &[text()], &tiny()).unwrap();
    let (artifact, _) = source.store.run(&prompts, None, &mut ()).unwrap();
    Windows::read(&artifact, source.model.config.vocab_size).unwrap()
}

/// The calibration windows and what `policy` makes of them.
fn run(source: &Source, policy: &mut dyn Policy) -> Vec<f32> {
    let windows = windows(source);
    likelihoods(&source.model, &windows.tokens, windows.window, policy, &mut ()).unwrap()
}

#[test]
fn the_dense_policy_is_the_model() {
    let bench = Bench::new();
    let (source, activations) = (bench.source(), record(&bench, &tiny()));
    let mut dense = Dense::default();
    let found = run(&source, &mut dense);
    let recorded = activations.nll().unwrap();
    assert!(recorded.len() < found.len());
    assert!(recorded.iter().zip(&found).all(|(a, b)| (a - b).abs() < 1e-4));
    assert_eq!(dense.exact_neurons(), 512 * 3 * 128);
    let mut all = Selected::new(Oracle::new(true), 1.0);
    let all_run = run(&source, &mut all);
    assert!(all_run.iter().zip(&found).all(|(a, b)| (a - b).abs() < 1e-4));
    assert_eq!(all.exact_neurons(), dense.exact_neurons());
}

#[test]
fn a_base_brings_a_few_neurons_nearer_to_the_model_than_an_oracle_alone() {
    let bench = Bench::new();
    let (source, activations) = (bench.source(), record(&bench, &tiny()));
    let base = Base::new(made(&source, &activations, &tiny(), None)).unwrap();
    let dense = run(&source, &mut Dense::default());
    let distance =
        |found: &[f32]| -> f32 { found.iter().zip(&dense).map(|(a, b)| (a - b) * (a - b)).sum() };
    let oracle = distance(&run(&source, &mut Selected::new(Oracle::new(false), 0.1)));
    let mut beside = WithBase::new(&base, Selection::Share(0.1));
    let with_base = distance(&run(&source, &mut beside));
    assert_eq!(beside.exact_neurons(), 512 * 3 * 13);
    assert!(with_base < 0.5 * oracle, "{with_base} {oracle}");
}

/// What a card runs gives what the processor's loops give. Sums in another order now and then choose another neuron.
#[test]
fn tensor_operations_make_the_same_of_every_policy() {
    let bench = Bench::new();
    let (source, activations) = (bench.source(), record(&bench, &tiny()));
    let base = |bits| Base::new(made(&source, &activations, &with_bits(bits), None)).unwrap();
    let (base, sketch) = (base([3, 3, 2]), base([2, 2, 0]));
    let windows = windows(&source);
    let forward = || Forward::new(&source.model, windows.window).unwrap();
    let policies: [&dyn Fn() -> Box<dyn Policy>; 6] = [
        &|| Box::new(Dense::default()),
        &|| Box::new(Selected::new(Oracle::new(true), 0.3)),
        &|| Box::new(WithBase::new(&base, Selection::Share(0.0))),
        &|| Box::new(WithBase::new(&base, Selection::Share(0.2))),
        &|| Box::new(WithBase::new(&base, Selection::Share(1.0))),
        &|| Box::new(WithBase::new(&sketch, Selection::Share(0.3))),
    ];
    for (place, policy) in policies.into_iter().enumerate() {
        let [loops, tensors] = [forward(), forward().in_tensors()].map(|forward| {
            let mut policy = policy();
            likelihoods_of(&forward, None, &windows.tokens, &mut *policy, &mut ()).unwrap()
        });
        let apart = loops.iter().zip(&tensors).filter(|(a, b)| (*a - *b).abs() > 1e-3).count();
        assert!(apart <= loops.len() / 50, "{place}: {apart} of {}", loops.len());
    }
}

#[test]
fn the_price_list_has_every_arm_and_is_kept() {
    let bench = Bench::new();
    let (source, activations) = (bench.source(), record(&bench, &tiny()));
    let base = |recipe: &Recipe| Base::new(made(&source, &activations, recipe, None)).unwrap();
    let mut plain = with_bits([2, 2, 2]);
    plain.base.exact_shares = vec![0.0];
    let bases = [base(&with_bits([3, 3, 0])), base(&with_bits([2, 2, 2])), base(&plain)];
    let stage = SparsityStage::new(&source, &bases, Learnt::default(), &[text()], &tiny()).unwrap();
    let (artifact, outcome) = source.store.run(&stage, None, &mut ()).unwrap();
    assert_eq!(outcome, Outcome::Made);
    let found = prices(&artifact).unwrap();
    let names: Vec<String> = found.iter().map(|price| price.way.to_string()).collect();
    let wanted = [
        "dense",
        "q4_0",
        "oracle",
        "sketch 3/3",
        "sketch 3/3 t",
        "base 2/2/2",
        "base 2/2/2 t",
        "uniform 2/2/2",
    ];
    assert_eq!(names, wanted);
    assert_eq!((found[0].way, found[0].exact_share), (Way::Dense, 1.0));
    let neuron_bytes = 6 * 64;
    assert_eq!(found[0].streamed_bytes, 3 * 128 * neuron_bytes);
    // 18 bytes for 32 weights instead of 64.
    assert_eq!(found[1].streamed_bytes, 3 * 128 * neuron_bytes * 18 / 64);
    assert!((found[1].total_share - 18.0 / 64.0).abs() < 1e-12);
    assert!(found[1].perplexity != found[0].perplexity);
    assert_eq!(found[5].streamed_bytes, 3 * 64 * neuron_bytes);
    assert_eq!(found[5].total_share, 0.5 + found[5].resident_share);
    // A threshold meets the share of the tokens that it was set on.
    assert!((found[6].exact_share - 0.5).abs() < 0.1, "{}", found[6].exact_share);
    assert_eq!((found[7].exact_share, found[7].streamed_bytes), (0.0, 0));
    assert!(found.iter().all(|price| price.perplexity > 1.0 && price.perplexity.is_finite()));
    assert_eq!(source.store.run(&stage, None, &mut ()).unwrap().1, Outcome::Kept);
}
