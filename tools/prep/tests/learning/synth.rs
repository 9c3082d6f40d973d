//! Models that are made up in the shape of large ones, here scaled down: they import, and act like trained ones.

use crate::cli::{artifact, program, run};
use crate::text;
use ls_bundle::Bundle;
use ls_prep::artifact::Artifact;
use ls_prep::exit::Exit;
use ls_prep::model::Model;
use ls_prep::stages::activations::Activations;
use ls_prep::synth::like::{LikeOptions, Shape, like};
use std::path::Path;
use tempfile::TempDir;

fn small(shape: Shape) -> LikeOptions {
    LikeOptions { shape, layers: Some(2), hidden: Some(256), neurons: Some(512), seed: 3 }
}

#[test]
fn every_shape_is_a_model_that_imports() {
    for (name, shape, kv_heads) in
        [("mistral-7b", Shape::Mistral7b, 1), ("llama2-7b", Shape::Llama2x7b, 2)]
    {
        let dir = TempDir::new().unwrap();
        let folder = dir.path().join("model");
        let mut command = program("synth");
        command.arg("--out").arg(&folder).args(["--like", name, "--layers", "2", "--json"]);
        let told = run(command.args(["--hidden", "256", "--neurons", "512", "--seed", "3"]));
        let weights = std::fs::metadata(folder.join("model.safetensors")).unwrap().len();
        let header = weights - told["bytes"].as_u64().unwrap();
        assert!((1..10_000).contains(&header), "{header}");
        let model = Model::open(&folder).unwrap();
        assert_eq!(model.config.kv_heads, kv_heads);
        let out = dir.path().join("model.lsb");
        run(program("import").arg(&folder).arg("--out").arg(&out).arg("--json"));
        assert_eq!(Bundle::open(&out).unwrap().model().ffn_hidden, 512);
        let again = dir.path().join("again");
        like(&again, &small(shape), &mut ()).unwrap();
        let read = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
        assert!(read(&again) == read(&folder), "the same seed gives the same bytes");
    }
}

#[test]
fn the_full_shapes_have_the_sizes_of_their_models() {
    for (shape, billions) in
        [(Shape::Mistral7b, 7.24), (Shape::Llama2x7b, 6.74), (Shape::Qwen25x7b, 7.62)]
    {
        let options = LikeOptions { shape, layers: None, hidden: None, neurons: None, seed: 0 };
        let config = options.config().unwrap();
        let roles = ls_prep::model::roles::Role::all(&config);
        let count = |shape: &[u32]| shape.iter().map(|&dim| f64::from(dim)).product::<f64>();
        let weights: f64 = roles.iter().map(|(_, shape)| count(shape)).sum();
        assert!((weights / 1e9 - billions).abs() < 0.01, "{shape:?}: {weights}");
    }
    let odd = LikeOptions { hidden: Some(200), ..small(Shape::Mistral7b) };
    assert_eq!(odd.config().unwrap_err().exit(), Exit::Usage);
}

/// Overlap with the token before of what is among a token's strongest fifth, and the share of all activity (summed
/// magnitudes) that this fifth holds, and that the fifth most often active holds.
fn statistics(found: &Activations, layer: u32) -> (f64, f64, f64) {
    let (neurons, active) = (512, 102);
    let chunks: Vec<_> = found.layer(layer).map(|chunk| chunk.unwrap()).collect();
    let mut rows = Vec::new();
    for chunk in &chunks {
        for token in 0..chunk.tokens() {
            let mut row = vec![0f32; neurons];
            chunk.magnitudes(token, &mut row);
            rows.push(row);
        }
    }
    let strongest = |row: &[f32]| -> Vec<usize> {
        let mut order: Vec<usize> = (0..neurons).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        order[..active].to_vec()
    };
    let sets: Vec<Vec<usize>> = rows.iter().map(|row| strongest(row)).collect();
    let mut frequency = vec![0f32; neurons];
    sets.iter().flatten().for_each(|&neuron| frequency[neuron] += 1.0);
    let often = strongest(&frequency);
    let shared: usize = sets
        .windows(2)
        .map(|pair| pair[1].iter().filter(|neuron| pair[0].contains(neuron)).count())
        .sum();
    let held = |row: &[f32], set: &[usize]| -> f64 {
        let of_set: f32 = set.iter().map(|&neuron| row[neuron]).sum();
        f64::from(of_set / row.iter().sum::<f32>())
    };
    let mean = |sum: f64| sum / rows.len() as f64;
    (
        mean(shared as f64 / active as f64),
        mean(rows.iter().zip(&sets).map(|(row, set)| held(row, set)).sum()),
        mean(rows.iter().map(|row| held(row, &often)).sum()),
    )
}

#[test]
fn activations_are_like_a_trained_models() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("model");
    like(&folder, &small(Shape::Mistral7b), &mut ()).unwrap();
    let stage = |command: &str| {
        let mut stage = program(command);
        stage.arg(&folder).arg("--artifacts").arg(dir.path().join("artifacts"));
        stage.args(["--recipe", "tiny", "--json", "--calibration"]).arg(text());
        run(&mut stage)
    };
    let found =
        Activations::new(Artifact::open(&artifact(&stage("activations"))).unwrap()).unwrap();
    for layer in 0..2 {
        let (overlap, held, often) = statistics(&found, layer);
        // SmolLM2's layers 2, 12 and 27: .24, .31, .45; .57, .57, .68; .49, .53, .65.
        let told = format!("layer {layer}: overlap {overlap:.2}, held {held:.2}, often {often:.2}");
        assert!((0.2..0.6).contains(&overlap), "{told}");
        assert!((0.5..0.75).contains(&held), "{told}");
        assert!((0.4..0.8).contains(&(often / held)), "{told}");
    }
    stage("embedding");
    for layer in stage("placement")["layers"].as_array().unwrap() {
        let of = |index: usize| layer["measured"][index]["redundancy"].as_f64().unwrap();
        let [random, frequency, matching] = [of(1), of(2), of(4)];
        assert!(matching < frequency && frequency < random, "{layer}");
    }
}
