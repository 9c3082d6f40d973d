//! The batched forward is the model: it equals the plain reference of ls-compute on every architecture of the zoo.

use ls_bundle::model::ModelConfig;
use ls_compute::reference::{LayerWeights, ReferenceModel, ReferenceState, ReferenceWeights};
use ls_prep::model::Model;
use ls_prep::model::forward::Forward;
use ls_prep::model::roles::{Part, Role};
use std::path::Path;

/// Most that a row of logits may differ: squared distance over squared length. Both are exact but for rounding in f32;
/// 3e-12 is the most that was seen.
const MAX_ERROR: f64 = 1e-10;

fn matrix(model: &Model, role: Role) -> Vec<f32> {
    let rows = model.weights.shape(role).unwrap()[0] as u32;
    let mut source = model.weights.rows(role);
    (0..rows).flat_map(|row| source.row(row).unwrap().to_vec()).collect()
}

pub(crate) fn reference(model: &Model) -> ReferenceModel {
    let config: &ModelConfig = &model.config;
    let layer = |layer| {
        let part = |part| matrix(model, Role::Layer(layer, part));
        let mut down = model.weights.columns(Role::Layer(layer, Part::Down)).unwrap();
        let down = (0..config.ffn_hidden)
            .flat_map(|neuron| down.column(neuron).unwrap().to_vec())
            .collect();
        LayerWeights {
            q: part(Part::Query),
            k: part(Part::Key),
            v: part(Part::Value),
            o: part(Part::Output),
            gate: part(Part::Gate),
            up: part(Part::Up),
            down,
        }
    };
    let weights = ReferenceWeights {
        layers: (0..config.layers).map(layer).collect(),
        head: (!config.tied_head).then(|| matrix(model, Role::Head)),
        embedding: matrix(model, Role::Embedding),
    };
    ReferenceModel::new(config.clone(), model.vectors().unwrap(), weights)
}

/// Logits of all tokens, windows of `window`, and their likelihoods of the next token.
fn batched(model: &Model, tokens: &[u32], forward: &Forward<'_>) -> (Vec<f32>, Vec<f32>) {
    let hidden = model.config.hidden as usize;
    let mut x = vec![0.0; tokens.len() * hidden];
    let put = |index: usize, row: &[f32]| {
        x[index * hidden..][..hidden].copy_from_slice(row);
        Ok(())
    };
    forward.embed(tokens, put).unwrap();
    for layer in 0..model.config.layers {
        let layer = forward.layer(layer).unwrap();
        layer.attend(&mut x).unwrap();
        let activations = layer.activations(layer.ffn_input(&x)).unwrap();
        let output = layer.ffn_output(activations).unwrap();
        x.iter_mut().zip(&output).for_each(|(x, y)| *x += y);
    }
    let mut targets = tokens[1..].to_vec();
    targets.push(0);
    (forward.logits(&x).unwrap(), forward.nll(&x, &targets).unwrap())
}

#[test]
fn logits_and_likelihoods_are_those_of_the_reference() {
    let zoo = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/zoo");
    let mut seen = 0;
    for entry in std::fs::read_dir(zoo).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.join("config.json").exists() {
            continue;
        }
        seen += 1;
        let model = Model::open(&folder).unwrap();
        let reference = reference(&model);
        let vocab = model.config.vocab_size;
        let window = 144;
        let tokens: Vec<u32> = (0..2 * window).map(|i| (i * i * 7 + i * 13 + 5) % vocab).collect();
        let loops = Forward::new(&model, window).unwrap();
        let tensors = Forward::new(&model, window).unwrap().in_tensors();
        let results = [loops, tensors].map(|forward| batched(&model, &tokens, &forward));
        let mut worst = 0f64;
        for (start, window_tokens) in
            (0..).step_by(window as usize).zip(tokens.chunks(window as usize))
        {
            let mut state = ReferenceState::new(&model.config);
            for (position, &token) in window_tokens.iter().enumerate() {
                let wanted = reference.forward(&mut state, token, position as u32);
                let row = start + position;
                for (logits, nll) in &results {
                    let found = &logits[row * vocab as usize..][..vocab as usize];
                    let squares = |x: f64| x * x;
                    let distance: f64 = wanted
                        .iter()
                        .zip(found)
                        .map(|(&a, &b)| squares(f64::from(a) - f64::from(b)))
                        .sum();
                    let length: f64 = wanted.iter().map(|&a| squares(f64::from(a))).sum();
                    worst = worst.max(distance / length);
                    let target = tokens.get(row + 1).copied().unwrap_or(0) as usize;
                    let total: f64 = wanted.iter().map(|&x| f64::from(x).exp()).sum();
                    let likelihood = total.ln() - f64::from(wanted[target]);
                    assert!(
                        (likelihood - f64::from(nll[row])).abs() < 1e-4,
                        "{likelihood} {}",
                        nll[row]
                    );
                }
            }
        }
        assert!(worst <= MAX_ERROR, "{}: {worst:.1e}", folder.display());
    }
    assert!(seen >= 9, "{seen} models");
}
