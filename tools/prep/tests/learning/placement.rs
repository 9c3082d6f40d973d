//! Orders of neurons find the planted groups.

use crate::activations::record;
use crate::{Bench, tiny};
use ls_bundle::model::Architecture;
use ls_prep::stages::activations::Activations;
use ls_prep::stages::placement::{Placement, PlacementStage};

fn placement(bench: &Bench, method: &str, block_neurons: u32) -> Placement {
    let mut recipe = tiny();
    recipe.placement.method = method.to_owned();
    recipe.placement.block_neurons = Some(block_neurons);
    recipe.placement.active_share = 0.0625;
    let activations = record(bench, &recipe);
    let stage = PlacementStage::new(&activations, Architecture::Llama, &recipe);
    let (artifact, _) = bench.source().store.run(&stage, None, &mut ()).unwrap();
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

#[test]
fn planted_groups_lie_together_and_shuffled_ones_do_not() {
    let bench = Bench::new();
    let activations = record(&bench, &tiny());
    for (method, block, range) in
        [("matching", 2, 0.7..1.01), ("greedy", 2, 0.7..1.01), ("random", 2, 0.0..0.15)]
    {
        let found = placement(&bench, method, block);
        for (number, (layer, groups)) in (0..).zip(found.layers.iter().zip(&bench.groups)) {
            assert_eq!(layer.chosen, method);
            let activity = activity(&activations, number);
            let of = |n: u32| groups.iter().position(|group| group.contains(&n)).unwrap();
            // Of all activity, the share in blocks that are parts of one group: idle neurons may lie anywhere.
            let mut pure = 0.0;
            for block in layer.order.chunks(block as usize) {
                if block.iter().all(|&neuron| of(neuron) == of(block[0])) {
                    pure += block.iter().map(|&neuron| activity[neuron as usize]).sum::<f64>();
                }
            }
            let pure = pure / activity.iter().sum::<f64>();
            assert!(range.contains(&pure), "{method} {block}, layer {number}: {pure:.2}");
        }
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
