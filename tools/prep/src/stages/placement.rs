//! `40-placement`: in which order each layer's neurons lie on the disk, so that neurons that act together share blocks.
//!
//! A neuron is *active* in a token if it is among the token's `active_share` strongest. A block is read if any of its
//! neurons is active. The *redundancy* of an order is the number of neurons read in vain over the number of active
//! ones, over tokens that had no part in making the order. Orders that are made and measured:
//!
//! - `file`: as in the model; `random`: shuffled, the floor of what an order can be worth;
//! - `frequency`: most often active first;
//! - `greedy`: the best pair, then the best of what is left, grown to blocks;
//! - `matching`: blocks grown so and then improved by exchanging neurons, then pairs of blocks, pairs of pairs, and so
//!   on to the whole layer (of a block size that can be halved, halves first);
//! - `embedding`: the paper's: clusters of the vectors of `30-embedding`, filled into blocks by the vectors alone.
//!
//! Every order goes on from blocks to larger groups, so that neighbouring blocks act together too. A layer's unit has
//! two records: 0 is JSON ([`Measured`] and the choice), 1 the chosen order, u32 neurons.

mod clusters;
mod order;

use crate::artifact::{Artifact, Input, RecordId};
use crate::error::{PrepError, Result};
use crate::journal::Journal;
use crate::key::Key;
use crate::progress::{Phase, Progress};
use crate::recipe::Recipe;
use crate::stage::{Stage, each_layer};
use crate::stages::activations::Activations;
use crate::stages::coactivity::Split;
use crate::stages::embedding::Embedding;
use ls_bundle::model::Architecture;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The stage.
#[derive(Debug)]
pub struct PlacementStage<'a> {
    activations: &'a Activations,
    embedding: &'a Embedding,
    params: Params,
}

/// What orders depend on besides the activations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Params {
    /// Neurons of a block.
    pub block_neurons: u32,
    /// Which order is chosen.
    pub method: String,
    /// Share of the neurons that counts as active.
    pub active_share: f64,
    /// Of so many tokens the last one measures.
    pub holdout_every: u32,
    /// Neurons of a cluster, about.
    pub cluster_neurons: u32,
    /// Of the shuffled order, and of the first clusters.
    pub seed: u64,
}

/// How good an order is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The order.
    pub method: String,
    /// Neurons read in vain over active ones, with the recipe's blocks.
    pub redundancy: f64,
    /// The same with blocks of twice as many neurons.
    pub redundancy_of_double: f64,
}

/// What is known of a layer's order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerPlacement {
    /// Name of the chosen order.
    pub chosen: String,
    /// All orders.
    pub measured: Vec<Measured>,
    /// Neuron at each place.
    #[serde(skip)]
    pub order: Vec<u32>,
}

impl<'a> PlacementStage<'a> {
    /// Orders after `activations` and `embedding`, as `recipe` says for a model family.
    #[must_use]
    pub fn new(
        activations: &'a Activations,
        embedding: &'a Embedding,
        architecture: Architecture,
        recipe: &Recipe,
    ) -> Self {
        let recipe_of = &recipe.placement;
        let params = Params {
            block_neurons: recipe_of.block_neurons(architecture).min(activations.params().neurons),
            method: recipe_of.method.clone(),
            active_share: recipe_of.active_share,
            holdout_every: recipe_of.holdout_every,
            cluster_neurons: recipe_of.cluster_neurons,
            seed: recipe.stage_seed(Self::NAME),
        };
        PlacementStage { activations, embedding, params }
    }

    fn layer(&self, layer: u32) -> Result<LayerPlacement> {
        let Params { block_neurons, active_share, holdout_every, seed, .. } = self.params;
        let neurons = self.activations.params().neurons;
        let Split { taught, held_out } =
            Split::read(self.activations, layer, active_share, holdout_every)?;
        let vectors = self.embedding.layer(layer)?;
        let seed = seed.wrapping_add(layer.into());
        let (block, cluster) = (block_neurons as usize, self.params.cluster_neurons as usize);
        let singles = order::Singles::of(&taught);
        let greedy = singles.greedy(block);
        let mut orders: Vec<(&str, Vec<u32>)> = vec![
            ("file", (0..neurons).collect()),
            ("random", order::random(neurons, seed)),
            ("frequency", order::by_frequency(&taught)),
            ("greedy", greedy),
            ("matching", singles.matching(block)),
            ("embedding", clusters::order(&vectors, &taught, block, cluster, seed)?),
        ];
        let measured: Vec<Measured> = orders
            .iter()
            .map(|(method, order)| Measured {
                method: (*method).to_owned(),
                redundancy: held_out.redundancy(order, block),
                redundancy_of_double: held_out.redundancy(order, 2 * block),
            })
            .collect();
        let wanted = measured.iter().position(|found| found.method == self.params.method);
        let best = (0..measured.len())
            .min_by(|&a, &b| measured[a].redundancy.total_cmp(&measured[b].redundancy))
            .expect("there are orders");
        let choice = match (wanted, self.params.method.as_str()) {
            (Some(wanted), _) => wanted,
            (None, "measured") => best,
            (None, method) => {
                let problem = format!("order {method:?} for blocks of {block_neurons} neurons");
                return Err(PrepError::unsupported(problem));
            }
        };
        let (chosen, order) = orders.swap_remove(choice);
        Ok(LayerPlacement { chosen: chosen.to_owned(), measured, order })
    }
}

impl Stage for PlacementStage<'_> {
    const NAME: &'static str = "40-placement";
    const SCHEMA: u32 = 2;
    type Params = Params;

    fn params(&self) -> Params {
        self.params.clone()
    }

    fn inputs(&self) -> Vec<Input> {
        vec![self.activations.artifact().input(), self.embedding.artifact().input()]
    }

    fn units(&self) -> u32 {
        self.activations.params().layers
    }

    fn records(&self, layers: Range<u32>) -> u64 {
        2 * layers.len() as u64
    }

    fn run(&self, journal: &mut Journal, progress: &mut dyn Progress) -> Result<()> {
        // The units that are joined, twice, and their partners.
        let layer_bytes = 4 * Split::bytes(self.activations)
            + 2048 * u64::from(self.activations.params().neurons);
        each_layer(journal, progress, Phase::Placement, 2, layer_bytes, |layer| {
            let found = self.layer(layer)?;
            let order = found.order.iter().flat_map(|neuron| neuron.to_le_bytes()).collect();
            Ok(vec![serde_json::to_vec(&found).expect("plain data"), order])
        })
    }
}

/// The orders of a finished stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// Key of the artifact.
    pub key: Key,
    /// Neurons of a block.
    pub block_neurons: u32,
    /// The layers that the artifact holds, in order.
    pub layers: Vec<LayerPlacement>,
}

impl Placement {
    /// Reads the artifact of [`PlacementStage`], whole or a share of layers.
    pub fn read(artifact: &Artifact) -> Result<Placement> {
        let description = artifact.description();
        artifact.check_stage(PlacementStage::NAME)?;
        let params: Params = artifact.params()?;
        let layer = |layer| {
            let text = artifact.read(RecordId::new(layer, 0))?;
            let mut found: LayerPlacement =
                serde_json::from_slice(&text).map_err(|problem| artifact.fault(problem))?;
            let bytes = artifact.read(RecordId::new(layer, 1))?;
            found.order = bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
            let mut sorted = found.order.clone();
            sorted.sort_unstable();
            if sorted.iter().zip(0..).any(|(&neuron, place)| neuron != place) {
                return Err(artifact.fault(format!("layer {layer}: no order of all neurons")));
            }
            Ok(found)
        };
        let layers = description.units_held().map(layer).collect::<Result<_>>()?;
        Ok(Placement { key: artifact.key(), block_neurons: params.block_neurons, layers })
    }
}
