//! Components are those of the features, and fold into hyperplanes.

use crate::activations::record;
use crate::{Bench, tiny};
use half::f16;
use ls_prep::stages::activations::Activations;
use ls_prep::stages::projection::{Basis, Projection, ProjectionStage, feature_scale};
use ndarray::Array2;
use ndarray_linalg::SVD;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

const HIDDEN: usize = 64;

fn projection(bench: &Bench, activations: &Activations, artifacts: &str) -> Projection {
    let stage = ProjectionStage::new(activations, &tiny());
    Projection::new(bench.source_in(artifacts).store.run(&stage, None, &mut ()).unwrap().0).unwrap()
}

/// All features of a layer, row after row.
fn features(activations: &Activations, layer: u32) -> Vec<f32> {
    let feature = |residual: &[f16]| -> Vec<f32> {
        let scale = feature_scale(residual.iter().map(|x| x.to_f32()));
        residual.iter().map(|x| scale * x.to_f32()).collect()
    };
    let mut all = Vec::new();
    for chunk in activations.layer(layer) {
        let chunk = chunk.unwrap();
        (0..chunk.tokens()).for_each(|token| all.extend(feature(chunk.input(token))));
        for index in 0..chunk.staged_tokens().len() {
            (1..=4).for_each(|stage| all.extend(feature(chunk.staged(index, stage))));
        }
    }
    all
}

fn close(found: f64, wanted: f64, bound: f64) -> bool {
    (found - wanted).abs() <= bound * wanted.abs().max(1e-3)
}

#[test]
fn components_are_the_singular_vectors_of_the_centred_features() {
    let bench = Bench::new();
    let activations = record(&bench, &tiny());
    let found = projection(&bench, &activations, "artifacts");
    for layer in 0..3 {
        let basis = found.layer(layer).unwrap();
        assert_eq!((basis.kept(), basis.hidden()), (19, HIDDEN), "30 % of 64");
        let all = features(&activations, layer);
        let count = all.len() / HIDDEN;
        assert_eq!((basis.spread.features, count), (1024, 1024), "512 tokens, of 128 four stages");
        let wide: Vec<f64> = all.iter().map(|&x| f64::from(x)).collect();
        let all = Array2::from_shape_vec((count, HIDDEN), wide).unwrap();
        let mean = all.mean_axis(ndarray::Axis(0)).unwrap();
        assert!(mean.iter().zip(&basis.mean).all(|(&a, &b)| close(f64::from(b), a, 1e-4)));
        let (_, singular, vectors) = (&all - &mean).svd(false, true).unwrap();
        let vectors = vectors.unwrap();
        for (index, row) in basis.components.chunks_exact(HIDDEN).enumerate() {
            let variance = singular[index] * singular[index] / count as f64;
            assert!(close(f64::from(basis.variances[index]), variance, 1e-4));
            // Up to its sign; those of nearly equal variance may turn into each other.
            let gap = |other: usize| (singular[index] / singular[other] - 1.0).abs();
            if index > 0 && gap(index - 1) < 0.01 || gap(index + 1) < 0.01 {
                continue;
            }
            let along: f64 =
                row.iter().zip(vectors.row(index)).map(|(&a, b)| f64::from(a) * b).sum();
            assert!(along.abs() > 0.9999, "component {index} of layer {layer}: {along}");
        }
        let kept: f64 = basis.variances.iter().map(|&v| f64::from(v)).sum();
        assert!(close(basis.spread.explained, kept / basis.spread.total_variance, 1e-5));
    }
}

#[test]
fn projections_are_white_and_signs_are_fixed() {
    let bench = Bench::new();
    let activations = record(&bench, &tiny());
    let found = projection(&bench, &activations, "artifacts");
    let again = projection(&bench, &activations, "again");
    let bytes = |found: &Projection| std::fs::read(found.artifact().path()).unwrap();
    assert!(bytes(&found) == bytes(&again));
    let basis = found.layer(1).unwrap();
    let projected: Vec<Vec<f32>> =
        features(&activations, 1).chunks_exact(HIDDEN).map(|x| basis.project(x)).collect();
    let moment = |i: usize, j: usize| {
        let products = projected.iter().map(|row| f64::from(row[i]) * f64::from(row[j]));
        products.sum::<f64>() / projected.len() as f64
    };
    for i in 0..basis.kept() {
        for j in 0..=i {
            let wanted = if i == j { 1.0 } else { 0.0 };
            assert!((moment(i, j) - wanted).abs() < 1e-3, "{i} {j}: {}", moment(i, j));
        }
    }
    for row in basis.components.chunks_exact(HIDDEN) {
        let largest = row.iter().fold(0f32, |m, &x| if x.abs() > m.abs() { x } else { m });
        assert!(largest > 0.0);
    }
}

/// Random hyperplanes on projections.
fn planes(basis: &Basis, count: usize) -> (Vec<f32>, Vec<f32>) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(5);
    let mut draw = |n: usize| (0..n).map(|_| random.random_range(-1.0..1.0)).collect::<Vec<f32>>();
    (draw(count * basis.kept()), draw(count))
}

#[test]
fn folded_hyperplanes_give_the_sums_of_projected_features() {
    let bench = Bench::new();
    let activations = record(&bench, &tiny());
    let basis = projection(&bench, &activations, "artifacts").layer(2).unwrap();
    let (rows, bias) = planes(&basis, 32);
    let (folded, folded_bias) = basis.fold(&rows, &bias);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    for feature in features(&activations, 2).chunks_exact(HIDDEN).take(100) {
        let projected = basis.project(feature);
        for plane in 0..32 {
            let wanted =
                bias[plane] + dot(&rows[plane * basis.kept()..][..basis.kept()], &projected);
            let found = folded_bias[plane] + dot(&folded[plane * HIDDEN..][..HIDDEN], feature);
            assert!((found - wanted).abs() < 1e-3 * (1.0 + wanted.abs()), "{found} {wanted}");
        }
    }
}
