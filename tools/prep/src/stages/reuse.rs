//! `61-reuse`: what tells, while a block is in memory, how soon it will be wanted again (paper section 3.3.3).
//!
//! The trace of a layer is replayed from the recorded activations: a token requests the blocks that its strongest
//! neurons lie in. From some windows is learned, the others are replayed. Two things are learned:
//!
//! - `reuse distance`: the paper's regression from the last inter-arrival times, by stacked hashing; made a table;
//! - `hazard`: a table of what was requested next, by the last visits and two running means, counted.
//!
//! Hit ratios are of demand: nothing is prefetched. All policies see one trace, with a cache a layer; what stays is
//! chosen after each token's set, so a block may be used without being kept. A layer's unit has two records: 0 is JSON
//! ([`LayerReuse`]: hit ratios with single neurons and with the placement's blocks, and the choice), 1 the chosen table
//! for the placement's blocks ([`ls_cache::ReuseTable`]).

mod bias;
mod hazard;
mod judge;
mod regression;
mod requests;

use crate::artifact::{Artifact, Input, RecordId};
use crate::error::{PrepError, Result};
use crate::journal::Journal;
use crate::progress::{Phase, Progress};
use crate::recipe::{self, Recipe};
use crate::stage::{Stage, each_layer};
use crate::stages::activations::Activations;
use crate::stages::placement::{Placement, PlacementStage};
use judge::{Learned, Rank, judge};
use ls_cache::ReuseTable;
use ls_cache::policy::{GapTable, HazardTable};
use regression::Extended;
use requests::Requests;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The stage.
#[derive(Debug)]
pub struct ReuseStage<'a> {
    activations: &'a Activations,
    placement: &'a Placement,
    params: Params,
}

/// What tables depend on besides their inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Params {
    /// The recipe's section.
    pub recipe: recipe::Reuse,
    /// Of every layer's randomness, which adds its number.
    pub seed: u64,
}

/// Hit ratios of one policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Its name.
    pub policy: String,
    /// Demand hits over requests at each capacity of the recipe.
    pub hits: Vec<f64>,
}

/// Hit ratios of all policies on one trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratios {
    /// Neurons of a block.
    pub block_neurons: u32,
    /// Tokens replayed.
    pub tokens: u64,
    /// Requests made.
    pub requests: u64,
    /// A row a policy; Belady's is the last.
    pub rows: Vec<Row>,
}

/// What a selection that prefers cached blocks gains and loses, with the hazard policy and the placement's blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Biased {
    /// Logarithm, to base 2, of what a cached block's magnitude is multiplied by.
    pub octaves: f64,
    /// Demand hits over requests at each capacity of the recipe.
    pub hits: Vec<f64>,
    /// Magnitude of the selected blocks over that of the strongest ones, at each capacity.
    pub importance: Vec<f64>,
}

/// What is known of a layer's reuse.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerReuse {
    /// The policy whose table was taken.
    pub chosen: String,
    /// With single neurons, and with the placement's blocks if those are others.
    pub measured: Vec<Ratios>,
    /// By the recipe's biases.
    pub biased: Vec<Biased>,
    /// The chosen table.
    #[serde(skip)]
    pub table: Vec<u8>,
}

impl<'a> ReuseStage<'a> {
    /// Reuse of the blocks of `placement`, replayed from `activations`, as `recipe` says.
    #[must_use]
    pub fn new(activations: &'a Activations, placement: &'a Placement, recipe: &Recipe) -> Self {
        let seed = recipe.stage_seed(Self::NAME);
        let params = Params { recipe: recipe.reuse.clone(), seed };
        ReuseStage { activations, placement, params }
    }

    fn layer(&self, layer: u32) -> Result<LayerReuse> {
        let neurons = self.activations.params().neurons;
        let block_neurons = self.placement.block_neurons;
        let order = &self.placement.layers[layer as usize].order;
        let single = || {
            let order: Vec<u32> = (0..neurons).collect();
            (block_neurons != 1).then(|| self.measure(layer, 1, &order)).transpose()
        };
        let (single, of_blocks) = rayon::join(single, || self.measure(layer, block_neurons, order));
        let (ratios, gaps, hazard) = of_blocks?;
        let chosen = self.choose(&ratios)?;
        let mut measured: Vec<Ratios> = single?.map(|(ratios, ..)| ratios).into_iter().collect();
        measured.push(ratios);
        let (recorded, recipe) = (self.activations, &self.params.recipe);
        let biased = bias::biased(recorded, layer, order, block_neurons, &hazard, recipe)?;
        let table = match (chosen, gaps) {
            ("reuse distance", Some(gaps)) => ReuseTable::Gaps(gaps),
            _ => ReuseTable::Hazard(hazard),
        };
        Ok(LayerReuse { chosen: chosen.to_owned(), measured, biased, table: table.to_bytes() })
    }

    /// Learns and replays with one size of block.
    fn measure(
        &self,
        layer: u32,
        block_neurons: u32,
        order: &[u32],
    ) -> Result<(Ratios, Option<GapTable>, HazardTable)> {
        let recipe = &self.params.recipe;
        let active = (recipe.active_share * order.len() as f64).round().max(1.0) as usize;
        let every = recipe.holdout_every;
        let requests =
            Requests::read(self.activations, layer, order, block_neurons, active, every)?;
        let seed = self.params.seed.wrapping_add(layer.into());
        let frequencies = requests.frequencies();
        // Training the paper's regression takes most of the time: not where the recipe has chosen otherwise.
        let measures = recipe.measures_regression(layer);
        let regresses = match recipe.method.as_str() {
            "hazard" => false,
            "reuse distance" => true,
            _ => measures,
        };
        let gaps =
            regresses.then(|| regression::gaps(&requests.taught, recipe, seed)).transpose()?;
        let hazard = hazard::learn(&requests.taught, &frequencies, recipe);
        let mut extended = if recipe.extended && measures {
            Some(Extended::learn(&requests.taught, &frequencies, recipe, seed)?)
        } else {
            None
        };
        let extended = extended.as_mut().map(|extended| extended as &mut dyn Rank);
        let learned = Learned { gaps: gaps.as_ref(), hazard: &hazard, extended };
        let ratios = judge(&requests, &frequencies, block_neurons, learned, recipe);
        Ok((ratios, gaps, hazard))
    }

    /// The policy that hits most, over all capacities, or the one that the recipe names.
    fn choose(&self, ratios: &Ratios) -> Result<&'static str> {
        let hits = |policy: &str| {
            let row = ratios.rows.iter().find(|row| row.policy == policy);
            row.map_or(0.0, |row| row.hits.iter().sum::<f64>())
        };
        match self.params.recipe.method.as_str() {
            "measured" if hits("reuse distance") > hits("hazard") => Ok("reuse distance"),
            "measured" | "hazard" => Ok("hazard"),
            "reuse distance" => Ok("reuse distance"),
            other => Err(PrepError::unsupported(format!("reuse by {other:?}"))),
        }
    }
}

impl Stage for ReuseStage<'_> {
    const NAME: &'static str = "61-reuse";
    const SCHEMA: u32 = 2;
    const IN_TENSORS: bool = true;
    type Params = Params;

    fn params(&self) -> Params {
        self.params.clone()
    }

    fn inputs(&self) -> Vec<Input> {
        let placement = Input { name: PlacementStage::NAME.to_owned(), key: self.placement.key };
        vec![self.activations.artifact().input(), placement]
    }

    fn units(&self) -> u32 {
        self.activations.params().layers
    }

    fn records(&self, layers: Range<u32>) -> u64 {
        2 * layers.len() as u64
    }

    fn run(&self, journal: &mut Journal, progress: &mut dyn Progress) -> Result<()> {
        let params = self.activations.params();
        let requests =
            self.params.recipe.active_share * params.tokens as f64 * f64::from(params.neurons);
        // The requests of neurons and those of blocks, and when each comes again.
        let layer_bytes = (2.0 * 12.0 * requests) as u64;
        each_layer(journal, progress, Phase::Reuse, 2, layer_bytes, |layer| {
            let found = self.layer(layer)?;
            Ok(vec![serde_json::to_vec(&found).expect("plain data"), found.table])
        })
    }
}

/// The tables and figures of a finished stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Reuse {
    /// Number of the first layer.
    pub first_layer: u32,
    /// Shares of the blocks that stay, in the order of the rows' hits.
    pub capacities: Vec<f64>,
    /// The layers that the artifact holds, in order.
    pub layers: Vec<LayerReuse>,
}

impl Reuse {
    /// Reads the artifact of [`ReuseStage`], whole or a share of layers.
    pub fn read(artifact: &Artifact) -> Result<Reuse> {
        let description = artifact.description();
        artifact.check_stage(ReuseStage::NAME)?;
        let params: Params = artifact.params()?;
        let layer = |layer| {
            let text = artifact.read(RecordId::new(layer, 0))?;
            let mut found: LayerReuse =
                serde_json::from_slice(&text).map_err(|problem| artifact.fault(problem))?;
            found.table = artifact.read(RecordId::new(layer, 1))?;
            ReuseTable::from_bytes(&found.table).map_err(|problem| artifact.fault(problem))?;
            Ok(found)
        };
        let layers = description.units_held().map(layer).collect::<Result<_>>()?;
        Ok(Reuse { first_layer: description.range.0, capacities: params.recipe.capacities, layers })
    }

    /// Means of [`Biased`] over the layers, by bias.
    #[must_use]
    pub fn mean_biased(&self) -> Vec<Biased> {
        let mut means = self.layers.first().map_or(Vec::new(), |layer| layer.biased.clone());
        for (which, mean) in means.iter_mut().enumerate() {
            let over = |of: &dyn Fn(&Biased) -> f64| {
                let sum: f64 = self.layers.iter().map(|layer| of(&layer.biased[which])).sum();
                sum / self.layers.len() as f64
            };
            for capacity in 0..self.capacities.len() {
                mean.hits[capacity] = over(&|biased| biased.hits[capacity]);
                mean.importance[capacity] = over(&|biased| biased.importance[capacity]);
            }
        }
        means
    }

    /// Means over the layers, one [`Ratios`] for each size of block. Where some layers have rows that others have not,
    /// only those with all rows count, so that rows can be compared.
    #[must_use]
    pub fn means(&self) -> Vec<Ratios> {
        let rows =
            |layer: &LayerReuse| layer.measured.first().map_or(0, |ratios| ratios.rows.len());
        let most = self.layers.iter().map(rows).max().unwrap_or(0);
        let counted: Vec<&LayerReuse> =
            self.layers.iter().filter(|layer| rows(layer) == most).collect();
        let mut means = counted.first().map_or(Vec::new(), |layer| layer.measured.clone());
        for (which, mean) in means.iter_mut().enumerate() {
            mean.requests = counted.iter().map(|layer| layer.measured[which].requests).sum();
            for (number, row) in mean.rows.iter_mut().enumerate() {
                for (capacity, hits) in row.hits.iter_mut().enumerate() {
                    let of =
                        |layer: &&LayerReuse| layer.measured[which].rows[number].hits[capacity];
                    *hits = counted.iter().map(of).sum::<f64>() / counted.len() as f64;
                }
            }
        }
        means
    }
}

impl Ratios {
    /// Share of the way from LRU's hit ratio to Belady's that a row goes, by capacity; nothing if either is missing.
    #[must_use]
    pub fn gap_closed(&self, row: &Row) -> Vec<f64> {
        let of = |policy: &str| self.rows.iter().find(|row| row.policy == policy);
        let (Some(lru), Some(best)) = (of("lru"), of("belady")) else { return Vec::new() };
        let ends = lru.hits.iter().zip(&best.hits);
        row.hits.iter().zip(ends).map(|(hits, (low, high))| (hits - low) / (high - low)).collect()
    }
}
