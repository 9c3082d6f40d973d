//! Predictors learn which of the planted groups act, and shares of the stage join to one run's bytes.

use crate::activations::record;
use crate::{Bench, tiny};
use ls_bundle::model::Architecture;
use ls_hash::{HashStack, Kernels};
use ls_prep::chain::Chain;
use ls_prep::metrics::Figures;
use ls_prep::model::forward::Forward;
use ls_prep::predictors::{Grouping, PackedScorer, Refinement, refinement};
use ls_prep::recipe::Recipe;
use ls_prep::stage::{Stage, merge};
use ls_prep::stages::activations::Activations;
use ls_prep::stages::embedding::{Embedding, EmbeddingStage};
use ls_prep::stages::mlp::{self, MlpStage};
use ls_prep::stages::placement::{Placement, PlacementStage};
use ls_prep::stages::predictor::{PredictorStage, Predictors};

fn learn(bench: &Bench, recipe: &Recipe, activations: &Activations) -> Predictors {
    let stage = PredictorStage::new(activations, None, &recipe.predictor, 7);
    let (artifact, _) = bench.source().store.run(&stage, None, &mut ()).unwrap();
    Predictors::read(&artifact).unwrap()
}

fn recipe() -> Recipe {
    let mut recipe = tiny();
    recipe.predictor.epochs = 30;
    recipe
}

#[test]
fn a_predictor_finds_more_than_what_costs_nothing() {
    let bench = Bench::new();
    let recipe = recipe();
    let activations = record(&bench, &recipe);
    let found = learn(&bench, &recipe, &activations);
    assert_eq!((found.first_layer, found.layers.len()), (0, 3));
    for (number, layer) in found.layers.iter().enumerate() {
        let rows = &layer.measured;
        let (hash, frequency) = (&rows.hash, &rows.frequency);
        assert!(hash.full.imp20 > frequency.full.imp20 + 0.1, "{number}: {rows:?}");
        assert!(hash.full.top10 > frequency.full.top10 && hash.full.red95 < frequency.full.red95);
        assert_eq!(hash.full.tokens, 128, "4 of 16 windows of 32 tokens");
        // Layer 0 has no FFN before it.
        let asked = if number == 0 { 0 } else { 128 };
        assert_eq!((hash.stale.tokens, hash.steps.len()), (asked, 5));
        assert!(hash.steps.iter().all(|step| step.tokens == asked / 4));
        assert!(number == 0 || hash.stale.imp20 > frequency.full.imp20 + 0.05, "{rows:?}");
        let tables = layer.stack().unwrap();
        assert!(layer.bytes >= tables.bytes() as u64);
        HashStack::new(tables, Kernels::detect()).unwrap();
    }
}

#[test]
fn refinement_ends_alike_in_any_order() {
    let bench = Bench::new();
    let mut recipe = recipe();
    recipe.predictor.epochs = 5;
    let activations = record(&bench, &recipe);
    let found = learn(&bench, &recipe, &activations);
    let source = bench.source();
    let forward = Forward::new(&source.model, 32).unwrap();
    let blocks = Grouping::single(128);
    let mut scorer = PackedScorer::new(found.layers[2].stack().unwrap()).unwrap();
    let mut of =
        |layer| refinement(&forward, &activations, layer, &blocks, |w| w % 4 == 3, 20, &mut scorer);
    assert!(of(0).is_err());
    let Refinement { priority, file } = of(2).unwrap();
    assert_eq!((priority.len(), file.len(), priority[0].tokens), (5, 5, 20));
    // Nothing has run at the first step, everything at the last; recorded residuals are rounded to 16 bits.
    assert_eq!(priority[0], file[0]);
    assert!((priority[4].imp20 - file[4].imp20).abs() < 0.01, "{priority:?} {file:?}");
    let moved = |steps: &[Figures]| (steps[1].imp20 - steps[0].imp20).abs();
    assert!(moved(&priority) + moved(&file) > 0.0, "a stage changes what is seen");
}

#[test]
fn shares_join_to_the_bytes_of_one_run() {
    let bench = Bench::new();
    let mut recipe = recipe();
    recipe.predictor.epochs = 1;
    let activations = record(&bench, &recipe);
    let stage = PredictorStage::new(&activations, None, &recipe.predictor, 7);
    let store = bench.source().store;
    let (whole, _) = store.run(&stage, None, &mut ()).unwrap();
    let bytes = std::fs::read(whole.path()).unwrap();
    let parts: Vec<_> = [0..1, 1..3]
        .map(|layers| store.run(&stage, Some(layers), &mut ()).unwrap().0.path().to_owned())
        .into();
    std::fs::remove_file(whole.path()).unwrap();
    assert_eq!(std::fs::read(merge(&parts).unwrap().path()).unwrap(), bytes);
}

#[test]
fn blocks_of_a_placement_are_scored() {
    let bench = Bench::new();
    let mut recipe = recipe();
    recipe.placement.block_neurons = Some(4);
    let activations = record(&bench, &recipe);
    let store = bench.source().store;
    let vectors = EmbeddingStage::new(&activations, &recipe);
    let vectors = Embedding::new(store.run(&vectors, None, &mut ()).unwrap().0).unwrap();
    let orders = PlacementStage::new(&activations, &vectors, Architecture::Llama, &recipe);
    let placement = Placement::read(&store.run(&orders, None, &mut ()).unwrap().0).unwrap();
    let single = PredictorStage::new(&activations, None, &recipe.predictor, 7);
    let stage = PredictorStage::new(&activations, Some(&placement), &recipe.predictor, 7);
    assert_ne!(single.key(), stage.key());
    let found = Predictors::read(&store.run(&stage, None, &mut ()).unwrap().0).unwrap();
    for layer in &found.layers {
        let rows = &layer.measured;
        assert_eq!((rows.hash.block, layer.frequency.len()), (4, 32));
        assert!(rows.hash.full.imp20 > rows.frequency.full.imp20 + 0.05, "{rows:?}");
        assert!((layer.frequency.iter().sum::<f32>() - 6.0).abs() < 1e-3, "20 % of 32 are active");
    }
}

#[test]
fn the_literal_stack_and_the_baselines_learn_too() {
    let bench = Bench::new();
    let mut recipe = recipe();
    recipe.literal.epochs = 20;
    recipe.mlp.epochs = 30;
    recipe.mlp.tiny_hidden = 32;
    let activations = record(&bench, &recipe);
    let artifacts = bench.dir.path().join("artifacts");
    let chain = Chain::open(&bench.model(), &artifacts, recipe, Vec::new(), &mut ()).unwrap();
    let store = &chain.source.store;
    let stage = chain.predictor(&activations, None, true);
    let found = Predictors::read(&store.run(&stage, None, &mut ()).unwrap().0).unwrap();
    for layer in &found.layers {
        assert_eq!((layer.stack().unwrap().layers(), layer.weights), (2, None));
        let rows = &layer.measured;
        assert!(rows.hash.full.imp20 > rows.frequency.full.imp20 - 0.02, "{rows:?}");
    }
    let stage: MlpStage<'_> = chain.mlp(&activations, None);
    let artifact = store.run(&stage, None, &mut ()).unwrap().0;
    let layers = mlp::read(&artifact).unwrap();
    for (number, (baselines, hash)) in (0..).zip(layers.iter().zip(&found.layers)) {
        let names: Vec<&str> = baselines.iter().map(|row| row.name.as_str()).collect();
        let wanted: &[&str] = if number == 1 {
            &["full", "wide-full", "stale", "wide-stale", "tiny", "binary"]
        } else {
            &["full", "stale", "tiny", "binary"]
        };
        assert_eq!(names, wanted);
        for row in baselines {
            let stale = row.name.ends_with("stale") && number > 0;
            let figures = if stale { row.measured.stale } else { row.measured.full };
            let free = hash.measured.frequency.full;
            assert!(figures.imp20 > free.imp20 + 0.02, "{number} {}: {figures:?}", row.name);
            let tables = mlp::tables(&artifact, number, &row.name).unwrap().unwrap();
            assert_eq!(tables.bytes(), row.bytes);
        }
    }
}
