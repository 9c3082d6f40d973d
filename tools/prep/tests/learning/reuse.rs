//! Reuse is learned from some windows and measured on others.

use crate::activations::record;
use crate::{Bench, tiny};
use ls_bundle::model::Architecture;
use ls_cache::ReuseTable;
use ls_prep::recipe::Recipe;
use ls_prep::stages::embedding::{Embedding, EmbeddingStage};
use ls_prep::stages::placement::{Placement, PlacementStage};
use ls_prep::stages::reuse::{Reuse, ReuseStage};

fn reuse(bench: &Bench, recipe: &Recipe) -> Reuse {
    let activations = record(bench, recipe);
    let store = bench.source().store;
    let vectors = EmbeddingStage::new(&activations, recipe);
    let vectors = Embedding::new(store.run(&vectors, None, &mut ()).unwrap().0).unwrap();
    let stage = PlacementStage::new(&activations, &vectors, Architecture::Llama, recipe);
    let placement = Placement::read(&store.run(&stage, None, &mut ()).unwrap().0).unwrap();
    let stage = ReuseStage::new(&activations, &placement, recipe);
    Reuse::read(&store.run(&stage, None, &mut ()).unwrap().0).unwrap()
}

#[test]
fn no_policy_beats_the_optimum_on_one_trace() {
    let bench = Bench::new();
    let found = reuse(&bench, &tiny());
    assert_eq!((found.first_layer, found.layers.len(), found.capacities.len()), (0, 3, 3));
    for layer in &found.layers {
        assert_eq!(layer.measured.iter().map(|m| m.block_neurons).collect::<Vec<_>>(), [1, 2]);
        // A fourth of 512 tokens, of each 20 % of 128 neurons.
        assert_eq!((layer.measured[0].tokens, layer.measured[0].requests), (128, 128 * 26));
        assert!(layer.measured[1].requests < 128 * 26, "neurons share blocks");
        for ratios in &layer.measured {
            let names: Vec<&str> = ratios.rows.iter().map(|row| &*row.policy).collect();
            let extended = "reuse distance, extended";
            let wanted =
                ["lru", "lfu", "ema", "hot pinned", "reuse distance", extended, "hazard", "belady"];
            assert_eq!(names, wanted);
            let best = ratios.rows.last().unwrap();
            for row in &ratios.rows {
                for (hits, best) in row.hits.iter().zip(&best.hits) {
                    assert!(*hits > 0.0 && hits <= best, "{row:?}, belady {best}");
                }
                assert!(row.hits.is_sorted(), "a larger cache hits more: {row:?}");
            }
            assert_eq!(ratios.gap_closed(best), [1.0; 3]);
            assert_eq!(ratios.gap_closed(&ratios.rows[0]), [0.0; 3]);
        }
        assert!(ReuseTable::from_bytes(&layer.table).is_ok());
        let [plain, biased] = &layer.biased[..] else { panic!("two biases: {:?}", layer.biased) };
        for capacity in 0..3 {
            assert_eq!(plain.importance[capacity], 1.0, "what is strongest is selected");
            assert!(biased.hits[capacity] > plain.hits[capacity] + 0.01, "{layer:?}");
            assert!((0.7..1.0).contains(&biased.importance[capacity]), "{layer:?}");
        }
    }
}

#[test]
fn the_recipe_or_the_hits_choose_the_table() {
    let bench = Bench::new();
    let mut recipe = tiny();
    recipe.reuse.extended = false;
    for (method, gaps) in [("hazard", false), ("reuse distance", true)] {
        recipe.reuse.method = method.to_owned();
        for layer in reuse(&bench, &recipe).layers {
            assert_eq!(layer.chosen, method);
            let names: Vec<_> = layer.measured[0].rows.iter().map(|row| &*row.policy).collect();
            assert_eq!(names.contains(&"reuse distance"), gaps, "trained where it is wanted");
            let table = ReuseTable::from_bytes(&layer.table).unwrap();
            assert_eq!(matches!(table, ReuseTable::Gaps(_)), gaps);
            if let ReuseTable::Hazard(table) = table {
                assert_eq!(table.initial.len(), 64, "blocks of two of 128 neurons");
            }
        }
    }
    recipe.reuse.method = "measured".to_owned();
    for layer in reuse(&bench, &recipe).layers {
        let rows = &layer.measured.last().unwrap().rows;
        let sum = |policy: &str| -> f64 {
            rows.iter().find(|row| row.policy == policy).unwrap().hits.iter().sum()
        };
        let other = if layer.chosen == "hazard" { "reuse distance" } else { "hazard" };
        assert!(sum(&layer.chosen) >= sum(other), "{layer:?}");
    }
}
