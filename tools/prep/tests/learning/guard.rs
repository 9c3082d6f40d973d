//! The guard: what it searches on, that a bundle takes its answer over, and that it goes on where it was ended.

use crate::cli::{program, run};
use crate::{Bench, text, tiny};
use ls_bundle::Bundle;
use ls_bundle::model::DType;
use ls_prep::artifact::Artifact;
use ls_prep::chain::Chain;
use ls_prep::model::forward::Forward;
use ls_prep::progress::{Phase, Progress};
use ls_prep::stage::Outcome;
use ls_prep::stages::base::Base;
use ls_prep::stages::guard::GuardStage;
use ls_prep::stages::prompts::{Prompts, Windows};
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;

/// The tiny recipe with a search over formats, one of which is coarse.
fn all(bench: &Bench, quality: &str) -> Command {
    let mut all = program("all");
    all.arg(bench.model()).arg("--artifacts").arg(bench.dir.path().join("a"));
    all.arg("--out").arg(bench.dir.path().join("model.lsb"));
    all.args(["--recipe", "tiny", "--json", "--quality", quality, "--resident", "30%"]);
    all.arg("--calibration").arg(text());
    all
}

#[test]
fn held_out_windows_share_no_text_with_those_that_are_learned_from() {
    let bench = Bench::new();
    let source = bench.source();
    let prompts = Prompts::new(&source, &[text()], &tiny()).unwrap();
    let (made, _) = source.store.run(&prompts, None, &mut ()).unwrap();
    let learned = Windows::read(&made, source.model.config.vocab_size).unwrap();
    let held_out = prompts.held_out(256).unwrap();
    assert_eq!(held_out.len(), 256);
    let pieces = |tokens: &[u32]| -> Vec<Vec<u32>> {
        tokens.chunks_exact(32).flat_map(|window| window.windows(12)).map(<[u32]>::to_vec).collect()
    };
    let known = pieces(&learned.tokens);
    assert!(known.len() == 16 * 21 && pieces(&held_out).iter().all(|piece| !known.contains(piece)));
    // A text that is hardly longer than the window that is learned from has no room for another.
    let short = bench.dir.path().join("short.txt");
    std::fs::write(&short, &std::fs::read(text()).unwrap()[..60]).unwrap();
    let mut one = tiny();
    one.calibration.tokens = 32;
    let prompts = Prompts::new(&source, &[short], &one).unwrap();
    assert!(prompts.held_out(256).is_err_and(|error| error.to_string().contains("no room")));
}

#[test]
fn rounded_weights_are_a_little_off() {
    let bench = Bench::new();
    let source = bench.source();
    let forward = Forward::new(&source.model, 32).unwrap();
    let neurons = |dtype: Option<DType>| {
        let layer = forward.layer(1).unwrap();
        dtype
            .map_or(Ok(layer), |dtype| forward.layer(1).unwrap().rounded(dtype))
            .unwrap()
            .neurons()
            .unwrap()
    };
    let exact = neurons(None);
    let off = |dtype| -> Vec<f32> {
        let of = |(a, b): (&Vec<f32>, &Vec<f32>)| {
            let error: f32 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
            error / a.iter().map(|a| a * a).sum::<f32>()
        };
        exact.iter().zip(&neurons(Some(dtype))).map(of).collect()
    };
    let between = |dtype, low: f32, high: f32| {
        let found = off(dtype);
        assert!(found.iter().all(|&error| error >= low && error < high), "{dtype:?}: {found:?}");
    };
    between(DType::F16, 0.0, 1e-6);
    between(DType::Q8_0, 1e-6, 1e-4);
    between(DType::Q4_0, 1e-3, 1e-2);
}

#[test]
fn a_bundle_is_run_as_the_guard_has_found() {
    let bench = Bench::new();
    let first = run(&mut all(&bench, "5%"));
    let told = |found: &Value, key: &str| -> Vec<String> {
        let stages = found["stages"].as_array().unwrap();
        stages.iter().map(|stage| stage[key].as_str().unwrap().to_owned()).collect()
    };
    let stages = told(&first, "stage");
    assert_eq!(
        stages.iter().filter(|stage| *stage == "63-base").count(),
        3,
        "two searched, one taken"
    );
    assert!(stages.contains(&"66-guard".to_owned()));
    let bundle = Bundle::open(&bench.dir.path().join("model.lsb")).unwrap();
    let settings = bundle.settings().unwrap();
    assert!(settings.perplexity <= 1.05 * settings.dense_perplexity);
    assert_eq!(settings.eval_tokens, 128);
    let mut report = program("report");
    report.arg(bench.dir.path().join("model.lsb")).arg("--json");
    let report = run(report.arg("--artifacts").arg(bench.dir.path().join("a")));
    let found = &report["guard"][0];
    let choice = &found["choices"][0];
    assert_eq!(choice["exact_share"].as_f64().unwrap() > 0.99, settings.exact_share > 0.99);
    let ffn = bundle.weights().layers[0].ffn;
    let format = if ffn.dtype == DType::F16 { "f16" } else { "q8_0" };
    assert_eq!(choice["format"], format);
    if !choice["bits"].is_null() {
        assert_eq!(choice["block_neurons"], ffn.block_neurons);
    }
    // It is the least that any arm reads within the limit.
    let limit = 1.05 * found["dense_perplexity"].as_f64().unwrap();
    let points =
        found["arms"].as_array().unwrap().iter().flat_map(|arm| arm["points"].as_array().unwrap());
    let within = points.filter(|point| {
        point["perplexity"].as_f64().unwrap() <= limit && point["tokens"] == found["tokens"]
    });
    let least = within.map(|point| point["bytes"].as_u64().unwrap()).min();
    assert_eq!(choice["bytes"].as_u64(), least);
    let second = run(&mut all(&bench, "5%"));
    assert!(told(&second, "outcome").iter().all(|outcome| outcome == "kept"), "{second}");
    // Looser by far: no exact neurons, or none beside the base's.
    let loose = run(&mut all(&bench, "900%"));
    assert_eq!(loose["settings"]["exact_share"], 0.0, "{}", loose["settings"]);
}

/// Loses patience after some measurements.
struct Impatient {
    left: usize,
    asked: usize,
}

impl Progress for Impatient {
    fn begin(&mut self, phase: Phase, _: u64) {
        assert_eq!(phase, Phase::Evaluation);
        assert!(self.asked < self.left, "out of patience");
        self.asked += 1;
    }
    fn advance(&mut self, _: u64) {}
}

#[test]
fn a_search_that_was_ended_goes_on_and_finds_the_same() {
    let bench = Bench::new();
    run(&mut all(&bench, "5%"));
    let chain = |artifacts: &str| {
        let (model, artifacts) = (bench.model(), bench.dir.path().join(artifacts));
        Chain::open(&model, &artifacts, tiny(), vec![text()], &mut ()).unwrap()
    };
    let made = chain("a");
    let activations = made.recorded("test", &mut ()).unwrap();
    let bases = made.recipe.guard.bases.clone().into_iter().map(|bits| {
        let stage = made.base_of(&activations, bits, &made.recipe.base.exact_shares).unwrap();
        Base::new(made.source.store.need(&stage, "test").unwrap()).unwrap()
    });
    let bases: Vec<Base> = bases.collect();
    let mut recipe = tiny();
    (recipe.guard.block_neurons, recipe.guard.resident) = (vec![1], 0.3);
    recipe.guard.thresholds = true;
    let tokens = made.prompts().unwrap().held_out(recipe.guard.eval_tokens).unwrap();
    let search = |artifacts: &str, left: usize| {
        let source = bench.source_in(artifacts);
        let stage = GuardStage::new(&source, &bases, &[], tokens.clone(), 32, &recipe);
        let mut progress = Impatient { left, asked: 0 };
        let ended =
            catch_unwind(AssertUnwindSafe(|| source.store.run(&stage, None, &mut progress)));
        (ended.ok().map(|made| made.unwrap()), progress.asked)
    };
    let (whole, all) = search("whole", usize::MAX);
    let (whole, outcome) = whole.unwrap();
    assert!(outcome == Outcome::Made && all > 5, "{all} measurements");
    let mut done = 0;
    for left in [0, 1, all / 2] {
        let (ended, asked) = search("ended", left);
        assert!(ended.is_none() && asked == left);
        done += asked;
    }
    let (ended, asked) = search("ended", usize::MAX);
    assert_eq!(asked, all - done, "what was measured is not measured again");
    let bytes = |artifact: &Artifact| std::fs::read(artifact.path()).unwrap();
    assert!(bytes(&ended.unwrap().0) == bytes(&whole));
    let folder = std::fs::read_dir(whole.path().parent().unwrap()).unwrap();
    assert_eq!(folder.count(), 1, "what was kept on the way is gone");
}
