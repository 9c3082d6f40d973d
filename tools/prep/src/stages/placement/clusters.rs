//! An order after the neurons' vectors: clusters, blocks filled inside them, neighbouring clusters one after another.
//!
//! Vectors tell how much more often two neurons act together than by chance (see [`Vectors::lift`]); with how often each
//! acts, that estimates how often both do. Nothing else of the counts is used: this is what the embedding is worth.

use crate::error::{PrepError, Result};
use crate::stages::coactivity::{Coactivity, count};
use crate::stages::embedding::Vectors;
use linfa::DatasetBase;
use linfa::traits::{Fit, Predict};
use linfa_clustering::KMeans;
use ndarray::Array2;
use rand08::SeedableRng;
use rand08::rngs::SmallRng;

/// Iterations of k-means; later ones hardly move a neuron.
const ITERATIONS: u64 = 50;
/// Movement of the centroids at which it ends before.
const TOLERANCE: f32 = 1e-3;

/// Blocks of `block` neurons from clusters of about `cluster`.
pub(super) fn order(
    vectors: &Vectors,
    taught: &Coactivity,
    block: usize,
    cluster: usize,
    seed: u64,
) -> Result<Vec<u32>> {
    let tokens = taught.tokens().max(1) as f32;
    let activity: Vec<f32> =
        (0..taught.neurons()).map(|n| count(taught.row(n)) as f32 / tokens).collect();
    let mut order = Vec::new();
    // What does not fill a block goes on to the next cluster.
    let mut waiting = Vec::new();
    for members in clusters(vectors, &activity, cluster.max(block), seed)? {
        waiting.extend(members);
        order.extend(fill(vectors, &activity, block, &mut waiting));
    }
    order.extend(waiting.into_iter().map(|neuron| neuron as u32));
    Ok(order)
}

/// Clusters of neurons, each the nearest to the one before it, the busiest first.
fn clusters(
    vectors: &Vectors,
    activity: &[f32],
    cluster: usize,
    seed: u64,
) -> Result<Vec<Vec<usize>>> {
    let count = activity.len().div_ceil(cluster);
    let values = vectors.values.clone();
    let values = Array2::from_shape_vec((activity.len(), vectors.dimensions), values)
        .expect("a vector for each neuron");
    let data = DatasetBase::from(values);
    let found = KMeans::params_with_rng(count, SmallRng::seed_from_u64(seed))
        .n_runs(1)
        .max_n_iterations(ITERATIONS)
        .tolerance(TOLERANCE)
        .fit(&data)
        .map_err(|problem| PrepError::corrupt("the neurons' vectors", problem))?;
    let mut members = vec![Vec::new(); count];
    for (neuron, &cluster) in found.predict(&data).iter().enumerate() {
        members[cluster].push(neuron);
    }
    let centroids = found.centroids();
    let distance = |a: usize, b: usize| {
        let (a, b) = (centroids.row(a), centroids.row(b));
        a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f32>()
    };
    let busy = |&a: &usize| members[a].iter().map(|&neuron| activity[neuron]).sum::<f32>();
    let mut left: Vec<usize> = (0..count).collect();
    let first = left.iter().copied().max_by(|a, b| busy(a).total_cmp(&busy(b)));
    let mut chain = Vec::new();
    let mut next = first;
    while let Some(id) = next {
        left.retain(|&other| other != id);
        chain.push(id);
        let near = |a: &usize, b: &usize| distance(id, *a).total_cmp(&distance(id, *b));
        next = left.iter().copied().min_by(near);
    }
    Ok(chain.into_iter().map(|id| std::mem::take(&mut members[id])).collect())
}

/// Takes whole blocks out of `waiting`, the best pairs first, each grown by the neurons that fit it best.
fn fill(vectors: &Vectors, activity: &[f32], block: usize, waiting: &mut Vec<usize>) -> Vec<u32> {
    let ids = std::mem::take(waiting);
    // As in `order.rs`: what a pair saves beyond what each would with an equal that it knows nothing of.
    let gain = |a: usize, b: usize| {
        let (x, y) = (activity[ids[a]], activity[ids[b]]);
        2.0 * x * y * vectors.lift(ids[a], ids[b]) - x * x - y * y
    };
    let mut pairs: Vec<(f32, usize, usize)> = (0..ids.len())
        .flat_map(|a| (a + 1..ids.len()).map(move |b| (a, b)))
        .map(|(a, b)| (gain(a, b), a, b))
        .collect();
    pairs.sort_unstable_by(|x, y| y.0.total_cmp(&x.0).then((x.1, x.2).cmp(&(y.1, y.2))));
    let mut free = vec![true; ids.len()];
    let mut order = Vec::new();
    let mut whole = ids.len() / block;
    for (_, a, b) in pairs {
        if whole == 0 || block < 2 {
            break;
        }
        if !free[a] || !free[b] {
            continue;
        }
        let mut grown = vec![a, b];
        (free[a], free[b]) = (false, false);
        while grown.len() < block {
            let with = |id: usize| grown.iter().map(|&member| gain(id, member)).sum::<f32>();
            let best = (0..ids.len()).filter(|&id| free[id]).map(|id| (with(id), id));
            let best = best.max_by(|x, y| x.0.total_cmp(&y.0).then(y.1.cmp(&x.1)));
            let (_, best) = best.expect("enough are left for another whole block");
            free[best] = false;
            grown.push(best);
        }
        order.extend(grown.iter().map(|&id| ids[id] as u32));
        whole -= 1;
    }
    let left = (0..ids.len()).filter(|&id| free[id]).map(|id| ids[id]);
    if block < 2 {
        order.extend(left.map(|id| id as u32))
    } else {
        waiting.extend(left)
    }
    order
}
