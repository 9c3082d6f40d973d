//! What the dense forward records: right, resumable, and the same in shares.

use crate::{Bench, text, tiny};
use ls_prep::model::forward::Forward;
use ls_prep::progress::{Phase, Progress};
use ls_prep::recipe::Recipe;
use ls_prep::stage::{Outcome, Stage, merge};
use ls_prep::stages::activations::{Activations, ActivationsStage, MAX_MAGNITUDE_ERROR};
use ls_prep::stages::prompts::{Prompts, Windows};
use ls_prep::stages::source::Source;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs both stages with artifacts in a folder of their own; the forward tells `progress`.
fn record_as(
    bench: &Bench,
    artifacts: &str,
    recipe: &Recipe,
    layers: Option<Range<u32>>,
    progress: &mut dyn Progress,
) -> (Activations, Outcome) {
    record_into(&bench.source_in(artifacts), recipe, layers, progress)
}

fn record_into(
    source: &Source,
    recipe: &Recipe,
    layers: Option<Range<u32>>,
    progress: &mut dyn Progress,
) -> (Activations, Outcome) {
    let windows = windows(source, recipe);
    let prompts = Prompts::new(source, &[text()], recipe).unwrap().key();
    let stage = ActivationsStage::new(source, &windows, prompts, recipe);
    let (artifact, outcome) = source.store.run(&stage, layers, progress).unwrap();
    (Activations::new(artifact).unwrap(), outcome)
}

/// Everything of `recipe`'s, in the bench's own artifacts.
pub(crate) fn record(bench: &Bench, recipe: &Recipe) -> Activations {
    record_from(&bench.source(), recipe)
}

/// Everything of `recipe`'s, of any model.
pub(crate) fn record_from(source: &Source, recipe: &Recipe) -> Activations {
    record_into(source, recipe, None, &mut ()).0
}

pub(crate) fn windows(source: &Source, recipe: &Recipe) -> Windows {
    let prompts = Prompts::new(source, &[text()], recipe).unwrap();
    let (artifact, _) = source.store.run(&prompts, None, &mut ()).unwrap();
    Windows::read(&artifact, source.model.config.vocab_size).unwrap()
}

fn bytes(activations: &Activations) -> Vec<u8> {
    std::fs::read(activations.artifact().path()).unwrap()
}

/// Ends the work, as a signal would, after so many steps.
struct Killed(u64);

impl Progress for Killed {
    fn begin(&mut self, _: Phase, _: u64) {}
    fn advance(&mut self, _: u64) {
        assert!(self.0 > 0, "killed");
        self.0 -= 1;
    }
}

#[test]
fn records_are_what_the_forward_does() {
    let bench = Bench::new();
    // 21 staged tokens do not fill the last chunk, which is shorter.
    let mut recipe = tiny();
    recipe.calibration.tokens = 352;
    recipe.activations.stage_every = 5;
    recipe.activations.staged_share = 0.5;
    let (found, _) = record_as(&bench, "artifacts", &recipe, None, &mut ());
    let source = bench.source();
    let windows = windows(&source, &recipe);
    let (hidden, neurons) = (64, 128);
    let forward = Forward::new(&source.model, windows.window).unwrap();
    let mut x = vec![0f32; windows.tokens.len() * hidden];
    let put = |index: usize, row: &[f32]| {
        x[index * hidden..][..hidden].copy_from_slice(row);
        Ok(())
    };
    forward.embed(&windows.tokens, put).unwrap();
    let close = |a: f32, b: f32, bound: f32| (a - b).abs() <= bound * a.abs().max(b.abs()) + 1e-4;
    for layer in 0..3 {
        let weights = forward.layer(layer as u16).unwrap();
        weights.attend(&mut x).unwrap();
        let activations = weights.activations(weights.ffn_input(&x)).unwrap();
        let chunks = found.layer(layer).collect::<Result<Vec<_>, _>>().unwrap();
        assert_eq!(chunks.iter().map(|chunk| chunk.tokens()).collect::<Vec<_>>(), [128, 128, 96]);
        for chunk in &chunks {
            let mut magnitudes = vec![0.0; neurons];
            for token in 0..chunk.tokens() {
                let row = chunk.first_token as usize + token;
                let input = &x[row * hidden..][..hidden];
                assert!(input.iter().zip(chunk.input(token)).all(|(&x, y)| close(
                    x,
                    y.to_f32(),
                    1e-3
                )));
                chunk.magnitudes(token, &mut magnitudes);
                let activations = &activations[row * neurons..][..neurons];
                for (&activation, &magnitude) in activations.iter().zip(&magnitudes) {
                    let lost = magnitude == 0.0 && activation.abs() < chunk.scales[token] / 65000.0;
                    let bound = 1.01 * MAX_MAGNITUDE_ERROR;
                    let kept = close(activation.abs(), magnitude, bound);
                    assert!(kept || lost, "{activation} {magnitude}");
                }
            }
            assert_eq!(chunk.staged_tokens().len(), chunk.tokens() / 5);
            for (index, token) in chunk.staged_tokens().enumerate() {
                assert_eq!(token % 5, 4);
                let row = chunk.first_token as usize + token;
                let all = &activations[row * neurons..][..neurons];
                let mut order: Vec<usize> = (0..neurons).collect();
                order.sort_by(|&a, &b| all[b].abs().total_cmp(&all[a].abs()));
                for stage in 1..=4 {
                    let mut masked = vec![0.0; neurons];
                    order[..16 * stage].iter().for_each(|&neuron| masked[neuron] = all[neuron]);
                    let added = weights.ffn_output(masked).unwrap();
                    let input = &x[row * hidden..][..hidden];
                    for ((x, y), found) in
                        input.iter().zip(&added).zip(chunk.staged(index, stage as u32))
                    {
                        assert!(close(x + y, found.to_f32(), 1e-3), "{} {found}", x + y);
                    }
                }
            }
        }
        let output = weights.ffn_output(activations).unwrap();
        x.iter_mut().zip(&output).for_each(|(x, y)| *x += y);
    }
    assert_eq!(found.nll().unwrap().len(), 4 * 31, "four windows are checked");
    check_likelihoods(&found, &forward, &x, &windows);
}

#[test]
fn a_part_of_a_chunk_can_be_checked() {
    let bench = Bench::new();
    let likelihoods = |check_tokens| {
        let mut recipe = tiny();
        recipe.activations.check_tokens = check_tokens;
        let folder = format!("checked-{check_tokens}");
        record_as(&bench, &folder, &recipe, None, &mut ()).0.nll().unwrap()
    };
    let (some, whole) = (likelihoods(64), likelihoods(128));
    assert_eq!((some.len(), whole.len()), (2 * 31, 4 * 31));
    assert_eq!(some, whole[..some.len()]);
}

/// Compares the recorded likelihoods with those of the residuals `x` behind the last layer.
fn check_likelihoods(found: &Activations, forward: &Forward<'_>, x: &[f32], windows: &Windows) {
    let nll = found.nll().unwrap();
    let mut targets = windows.tokens[1..].to_vec();
    targets.push(0);
    let wanted = forward.nll(x, &targets).unwrap();
    for (index, nll) in nll.iter().enumerate() {
        let row = index / 31 * 32 + index % 31;
        assert!((nll - wanted[row]).abs() < 1e-4, "{nll} {}", wanted[row]);
    }
}

#[test]
fn work_killed_anywhere_goes_on_to_the_same_bytes() {
    let bench = Bench::new();
    let (whole, outcome) = record_as(&bench, "whole", &tiny(), None, &mut ());
    assert_eq!(outcome, Outcome::Made);
    let whole = bytes(&whole);
    for (steps, damaged) in [(0, false), (1, false), (6, false), (6, true), (12, false)] {
        let folder = "killed";
        let _ = std::fs::remove_dir_all(bench.dir.path().join("killed/synth/20-activations"));
        let ended = catch_unwind(AssertUnwindSafe(|| {
            record_as(&bench, folder, &tiny(), None, &mut Killed(steps));
        }));
        assert!(ended.is_err(), "three layers of four chunks and a beginning take 13 steps");
        let stage = bench.dir.path().join(folder).join("synth/20-activations");
        if damaged {
            // As if the power had failed before the residuals were written.
            for name in std::fs::read_dir(&stage).unwrap().map(|entry| entry.unwrap().path()) {
                if name.extension().is_some_and(|e| e.to_string_lossy().starts_with("scratch")) {
                    std::fs::write(name, b"").unwrap();
                }
            }
        }
        let (resumed, outcome) = record_as(&bench, folder, &tiny(), None, &mut ());
        assert_eq!(outcome == Outcome::Resumed, steps > 0);
        assert!(bytes(&resumed) == whole, "killed after {steps} steps, damaged: {damaged}");
        assert_eq!(std::fs::read_dir(&stage).unwrap().count(), 1, "scratch is cleared away");
    }
}

#[test]
fn resumed_work_does_not_start_over() {
    struct Counts(u64);
    impl Progress for Counts {
        fn begin(&mut self, _: Phase, _: u64) {}
        fn advance(&mut self, count: u64) {
            self.0 += u64::from(count == 128);
        }
    }
    let bench = Bench::new();
    let killed = catch_unwind(AssertUnwindSafe(|| {
        record_as(&bench, "a", &tiny(), None, &mut Killed(7));
    }));
    assert!(killed.is_err());
    let mut counts = Counts(0);
    record_as(&bench, "a", &tiny(), None, &mut counts);
    // Killed(7) lets the beginning and six chunks tell; the seventh was recorded before it told.
    assert_eq!(counts.0, 12 - 7);
}

#[test]
fn shares_of_layers_join_to_the_bytes_of_one_run() {
    let bench = Bench::new();
    let (whole, _) = record_as(&bench, "whole", &tiny(), None, &mut ());
    let part = |layers| record_as(&bench, "shares", &tiny(), Some(layers), &mut ()).0;
    let parts = [part(1..3), part(0..1)];
    assert!(parts[1].nll().is_err(), "only the last layer has likelihoods");
    assert!(parts[0].chunk(0, 0).is_err() && parts[0].chunk(1, 0).is_ok());
    let paths = parts.map(|part| part.artifact().path().to_owned());
    let merged = merge(&paths).unwrap();
    assert!(std::fs::read(merged.path()).unwrap() == bytes(&whole));
}

#[test]
fn the_cost_is_told_before() {
    let bench = Bench::new();
    let source = bench.source();
    let windows = windows(&source, &tiny());
    let stage = ActivationsStage::new(&source, &windows, ls_prep::key::Key::of(b""), &tiny());
    let cost = stage.cost(&(0..3));
    let (found, _) = record_as(&bench, "artifacts", &tiny(), None, &mut ());
    let measured = found.artifact().total_bytes();
    let frame = 48 * stage.records(0..3) + 4 * found.nll().unwrap().len() as u64 + 2000;
    assert!(
        (cost.artifact_bytes..cost.artifact_bytes + frame).contains(&measured),
        "{measured} {cost:?}"
    );
    assert_eq!(cost.scratch_bytes, 2 * 4 * 512 * 64);
}

#[test]
fn planted_groups_act_together() {
    let bench = Bench::new();
    let (found, _) = record_as(&bench, "artifacts", &tiny(), None, &mut ());
    for layer in 0..3u32 {
        // How often two neurons are both among a token's strongest tenth.
        let mut together = vec![0f64; 128 * 128];
        let mut alone = vec![0f64; 128];
        for chunk in found.layer(layer) {
            let chunk = chunk.unwrap();
            for token in 0..chunk.tokens() {
                let codes = chunk.codes(token);
                let mut order: Vec<usize> = (0..128).collect();
                order.sort_by_key(|&neuron| std::cmp::Reverse(codes[neuron]));
                for &a in &order[..16] {
                    alone[a] += 1.0;
                    order[..16].iter().for_each(|&b| together[a * 128 + b] += 1.0);
                }
            }
        }
        let share = |pairs: &mut dyn Iterator<Item = (u32, u32)>| {
            let (mut both, mut either) = (0.0, 0.0);
            for (a, b) in pairs {
                both += together[a as usize * 128 + b as usize];
                either += alone[a as usize];
            }
            both / either
        };
        let groups = &bench.groups[layer as usize];
        let of = |a: u32| groups.iter().position(|group| group.contains(&a)).unwrap();
        let pairs =
            || (0..128u32).flat_map(|a| (0..128u32).map(move |b| (a, b))).filter(|(a, b)| a != b);
        let within = share(&mut pairs().filter(|&(a, b)| of(a) == of(b)));
        let across = share(&mut pairs().filter(|&(a, b)| of(a) != of(b)));
        assert!(
            within > 0.6 && across < 0.2,
            "layer {layer}: {within:.2} within, {across:.2} across"
        );
    }
}
