//! Orders of neurons find the planted groups.

use crate::activations::record;
use crate::{Bench, tiny};
use ls_bundle::model::Architecture;
use ls_prep::artifact::Artifact;
use ls_prep::recipe::Recipe;
use ls_prep::stages::activations::Activations;
use ls_prep::stages::embedding::{Embedding, EmbeddingStage};
use ls_prep::stages::placement::{Placement, PlacementStage};

fn placement(bench: &Bench, method: &str, block_neurons: u32) -> Placement {
    placement_of(bench, method, block_neurons, tiny())
}

fn placement_of(bench: &Bench, method: &str, block_neurons: u32, mut recipe: Recipe) -> Placement {
    recipe.placement.method = method.to_owned();
    recipe.placement.block_neurons = Some(block_neurons);
    recipe.placement.active_share = 0.0625;
    let activations = record(bench, &recipe);
    let store = bench.source().store;
    let stage = EmbeddingStage::new(&activations, &recipe);
    let embedding = Embedding::new(store.run(&stage, None, &mut ()).unwrap().0).unwrap();
    let stage = PlacementStage::new(&activations, &embedding, Architecture::Llama, &recipe);
    let (artifact, _) = store.run(&stage, None, &mut ()).unwrap();
    Placement::read(&artifact).unwrap()
}

/// How often each neuron is among a token's strongest eight.
fn activity(activations: &Activations, layer: u32) -> Vec<f64> {
    let mut activity = vec![0.0; 128];
    for chunk in activations.layer(layer) {
        let chunk = chunk.unwrap();
        for token in 0..chunk.tokens() {
            let codes = chunk.codes(token);
            let mut order: Vec<usize> = (0..128).collect();
            order.sort_by_key(|&neuron| std::cmp::Reverse(codes[neuron]));
            order[..8].iter().for_each(|&neuron| activity[neuron] += 1.0);
        }
    }
    activity
}

/// Of all activity, the share in blocks that are parts of one planted group (idle neurons may lie anywhere), by layer.
fn purity(bench: &Bench, activations: &Activations, found: &Placement) -> Vec<f64> {
    let layers = (0..).zip(found.layers.iter().zip(&bench.groups));
    let purity = layers.map(|(number, (layer, groups))| {
        let activity = activity(activations, number);
        let of = |n: u32| groups.iter().position(|group| group.contains(&n)).unwrap();
        let blocks = layer.order.chunks(found.block_neurons as usize);
        let pure = blocks.filter(|block| block.iter().all(|&neuron| of(neuron) == of(block[0])));
        let pure: f64 = pure.flatten().map(|&neuron| activity[neuron as usize]).sum();
        pure / activity.iter().sum::<f64>()
    });
    purity.collect()
}

#[test]
fn planted_groups_lie_together_and_shuffled_ones_do_not() {
    let bench = Bench::new();
    let activations = record(&bench, &tiny());
    let methods = [
        ("matching", 0.7..1.01),
        ("greedy", 0.7..1.01),
        ("embedding", 0.7..1.01),
        ("random", 0.0..0.15),
    ];
    for (method, range) in methods {
        let found = placement(&bench, method, 2);
        assert!(found.layers.iter().all(|layer| layer.chosen == method));
        let pure = purity(&bench, &activations, &found);
        assert!(pure.iter().all(|pure| range.contains(pure)), "{method}: {pure:.2?}");
    }
}

#[test]
fn vectors_that_stay_random_find_no_groups() {
    let bench = Bench::new();
    let activations = record(&bench, &tiny());
    let mut recipe = tiny();
    recipe.embedding.learning_rate = 0.0;
    let pure = purity(&bench, &activations, &placement_of(&bench, "embedding", 2, recipe));
    assert!(pure.iter().all(|&pure| pure < 0.35), "{pure:.2?}");
}

#[test]
fn a_fit_lowers_the_loss_and_its_scores_are_what_was_counted() {
    let bench = Bench::new();
    let recipe = tiny();
    let activations = record(&bench, &recipe);
    let stage = EmbeddingStage::new(&activations, &recipe);
    let run =
        |artifacts: &str| bench.source_in(artifacts).store.run(&stage, None, &mut ()).unwrap();
    let (found, again) = (run("artifacts").0, run("again").0);
    let bytes = |artifact: &Artifact| std::fs::read(artifact.path()).unwrap();
    assert!(bytes(&found) == bytes(&again), "the same seed gives the same bytes");
    let found = Embedding::new(found).unwrap();
    for (layer, groups) in (0..).zip(&bench.groups) {
        let fit = found.fit(layer).unwrap();
        assert!(fit.last_loss < fit.first_loss - 0.05, "{fit:?}");
        let vectors = found.layer(layer).unwrap();
        let activity = activity(&activations, layer);
        let busy = |n: &&u32| activity[**n as usize] > 50.0;
        let lifts = groups.iter().flat_map(|group| {
            let busy: Vec<u32> = group.iter().filter(busy).copied().collect();
            busy.windows(2)
                .map(|pair| vectors.lift(pair[0] as usize, pair[1] as usize))
                .collect::<Vec<_>>()
        });
        let lifts: Vec<f32> = lifts.collect();
        assert!(!lifts.is_empty());
        let high = lifts.iter().filter(|&&lift| lift > 2.0).count();
        assert!(10 * high >= 8 * lifts.len(), "layer {layer}: {lifts:.1?}");
    }
}

#[test]
fn the_least_redundant_order_is_chosen() {
    let bench = Bench::new();
    let found = placement(&bench, "measured", 2);
    assert_eq!(found.layers.len(), 3);
    for layer in &found.layers {
        let of = |method: &str| {
            let found = layer.measured.iter().find(|found| found.method == method).unwrap();
            (found.redundancy, found.redundancy_of_double)
        };
        let best = of(&layer.chosen).0;
        assert!(layer.measured.iter().all(|found| found.redundancy >= best));
        assert!(of("matching").0 < 0.25 && of("random").0 > 0.6, "{layer:?}");
        assert!(of("matching").1 < of("frequency").1 && of("frequency").1 < of("random").1 + 0.1);
    }
    let threes = placement(&bench, "measured", 3);
    for layer in &threes.layers {
        let of = |method: &str| {
            layer.measured.iter().find(|found| found.method == method).unwrap().redundancy
        };
        assert!(of("matching") < 0.75 * of("random"), "{layer:?}");
    }
}
