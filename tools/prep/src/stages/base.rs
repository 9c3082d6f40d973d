//! `63-base`: a low-bit copy of each layer's gate, up and down that stays resident. It tells which neurons to run
//! exactly and stands in for the others ([`LayerBase`]).
//!
//! Gate and up are rounded with error feedback by the Hessian of the FFN's inputs. Then the calibration tokens run
//! with some share of the neurons, which the copy is most in doubt of, left out; down is what turns the stand-ins
//! of the rest into what the rest would have added (least squares, drawn towards the neurons' own columns), rounded
//! with feedback by the stand-ins' Hessian. Of calibration tokens a few are held out to measure what the copy leaves.
//!
//! A layer's unit has three records: 0 JSON ([`LayerInfo`]), 1 the neurons' low-bit records in the model's order
//! ([`ls_bundle::low_bit::RecordLayout`]), 2 tables (`content.rs`).

mod content;
mod fit;

pub use content::{LayerInfo, LeftOver};

use crate::artifact::{Artifact, Input, RecordId};
use crate::base::LayerBase;
use crate::error::{PrepError, Result};
use crate::journal::Journal;
use crate::key::Key;
use crate::model::forward::Forward;
use crate::progress::{Phase, Progress};
use crate::recipe::Recipe;
use crate::stage::{Stage, each_layer};
use crate::stages::activations::Activations;
use crate::stages::source::Source;
use ls_bundle::base::BaseTables;
use ls_bundle::low_bit::{Bits, RecordLayout, Row};
use ls_bundle::tiles::{self, Over, matrix_bytes};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The stage.
#[derive(Debug)]
pub struct BaseStage<'a> {
    source: &'a Source,
    activations: &'a Activations,
    params: Params,
}

/// What a base depends on besides the model and its activations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Params {
    /// Weights of a row.
    pub hidden: u32,
    /// Neurons of a layer.
    pub neurons: u32,
    /// Of gate, up and down; 0 where there is none.
    pub bits: [u32; 3],
    /// Tokens of the Hessians.
    pub hessian_tokens: u64,
    /// Shares of the neurons that run exactly; tokens take turns.
    pub exact_shares: Vec<f64>,
    /// Added to Hessians' diagonals, as a share of the mean.
    pub damping: f64,
    /// Neurons that make up for each other's errors.
    pub feedback_neurons: u32,
    /// Times that rounded matrices are gone through again.
    pub sweeps: u32,
}

impl Params {
    /// What a neuron's record looks like.
    pub fn layout(&self) -> Result<RecordLayout> {
        RecordLayout::new(self.hidden, self.bits.map(Bits::new)).map_err(PrepError::unsupported)
    }
}

impl<'a> BaseStage<'a> {
    /// A base of the model in `source`, fitted on `activations`, as `recipe` says.
    pub fn new(
        source: &'a Source,
        activations: &'a Activations,
        recipe: &Recipe,
    ) -> Result<BaseStage<'a>> {
        let base = &recipe.base;
        let bits = [base.gate_bits, base.up_bits, base.down_bits];
        BaseStage::with(source, activations, recipe, bits, base.exact_shares.clone())
    }

    /// The same with other bits and shares than the recipe's.
    pub fn with(
        source: &'a Source,
        activations: &'a Activations,
        recipe: &Recipe,
        bits: [u32; 3],
        exact_shares: Vec<f64>,
    ) -> Result<BaseStage<'a>> {
        let base = &recipe.base;
        let params = Params {
            hidden: activations.params().hidden,
            neurons: activations.params().neurons,
            bits,
            hessian_tokens: base.hessian_tokens.min(activations.params().tokens),
            exact_shares,
            damping: base.damping,
            feedback_neurons: base.feedback_neurons,
            sweeps: base.sweeps,
        };
        params.layout()?;
        Ok(BaseStage { source, activations, params })
    }
}

impl Stage for BaseStage<'_> {
    const NAME: &'static str = "63-base";
    const SCHEMA: u32 = 3;
    const IN_TENSORS: bool = true;
    type Params = Params;

    fn params(&self) -> Params {
        self.params.clone()
    }

    fn inputs(&self) -> Vec<Input> {
        vec![self.source.input(), self.activations.artifact().input()]
    }

    fn units(&self) -> u32 {
        self.activations.params().layers
    }

    fn records(&self, layers: Range<u32>) -> u64 {
        3 * layers.len() as u64
    }

    fn run(&self, journal: &mut Journal, progress: &mut dyn Progress) -> Result<()> {
        let forward = Forward::new(&self.source.model, self.activations.params().window)?;
        let fit = fit::Fit::new(&forward, self.activations, &self.params)?;
        each_layer(journal, progress, Phase::Base, 3, u64::MAX, |layer| fit.layer(layer))
    }
}

/// The base of a finished stage.
#[derive(Debug)]
pub struct Base {
    artifact: Artifact,
    params: Params,
    layout: RecordLayout,
}

impl Base {
    /// Takes an artifact of [`BaseStage`], whole or a share of layers.
    pub fn new(artifact: Artifact) -> Result<Base> {
        artifact.check_stage(BaseStage::NAME)?;
        let params: Params = artifact.params()?;
        let layout = params.layout().map_err(|problem| artifact.fault(problem))?;
        Ok(Base { artifact, params, layout })
    }

    /// The file.
    #[must_use]
    pub fn artifact(&self) -> &Artifact {
        &self.artifact
    }

    /// Its key.
    #[must_use]
    pub fn key(&self) -> Key {
        self.artifact.key()
    }

    /// What it depends on.
    #[must_use]
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// What a neuron's record looks like.
    #[must_use]
    pub fn layout(&self) -> RecordLayout {
        self.layout
    }

    /// Bytes that it keeps resident, as a share of gate, up and down in half precision.
    #[must_use]
    pub fn resident_share(&self) -> f64 {
        let neurons = f64::from(self.params.neurons);
        let bytes =
            neurons * self.layout.bytes() as f64 + content::table_bytes(&self.params) as f64;
        bytes / (neurons * 6.0 * f64::from(self.params.hidden))
    }

    /// Bytes of a layer's tiles in a bundle.
    #[must_use]
    pub fn tile_bytes(&self) -> usize {
        let bytes = |bits| matrix_bytes(bits, self.params.neurons, self.params.hidden);
        self.layout.bits().into_iter().flatten().map(bytes).sum()
    }

    /// Bytes of a layer in a bundle, and in memory.
    #[must_use]
    pub fn bundle_bytes(&self) -> u64 {
        self.tile_bytes() as u64 + BaseTables::bytes(self.params.neurons, self.layout.cols())
    }

    /// What is known of a layer.
    pub fn info(&self, layer: u32) -> Result<LayerInfo> {
        let text = self.artifact.read(RecordId::new(layer, 0))?;
        serde_json::from_slice(&text).map_err(|problem| self.artifact.fault(problem))
    }

    /// The low-bit records of a layer's neurons and its tables.
    pub fn bytes(&self, layer: u32) -> Result<[Vec<u8>; 2]> {
        Ok([
            self.artifact.read(RecordId::new(layer, 1))?,
            self.artifact.read(RecordId::new(layer, 2))?,
        ])
    }

    /// The tiles of a layer with neuron `order[p]` at place p, as a bundle holds them.
    pub fn tiles_in(&self, layer: u32, order: &[u32]) -> Result<Vec<u8>> {
        let info = self.info(layer)?;
        let [records, _] = self.bytes(layer)?;
        let len = self.layout.bytes();
        let found = info.codebooks.map(|book| book.map(|book| book.bits()));
        if records.len() != order.len() * len || found != self.layout.bits() {
            return Err(self.artifact.fault(format!("layer {layer} has not its shape")));
        }
        let mut tiles = vec![0; self.tile_bytes()];
        let mut rest = &mut tiles[..];
        let sums = [Over::Hidden, Over::Hidden, Over::Neurons];
        for (part, (over, book)) in sums.into_iter().zip(&info.codebooks).enumerate() {
            let Some(book) = book else { continue };
            let row = |&neuron: &u32| {
                let record = &records[neuron as usize * len..][..len];
                Row::new(book, self.layout.split(record)[part])
            };
            let rows: Vec<Row<'_>> = order.iter().map(row).collect();
            let bytes = matrix_bytes(book.bits(), self.params.neurons, self.params.hidden);
            let (matrix, behind) = std::mem::take(&mut rest).split_at_mut(bytes);
            tiles::pack(over, &rows, matrix);
            rest = behind;
        }
        Ok(tiles)
    }

    /// What goes with [`Base::tiles_in`].
    pub fn tables_in(&self, layer: u32, order: &[u32]) -> Result<BaseTables> {
        let info = self.info(layer)?;
        let LayerBase { doubt, constant, .. } = self.layer(layer)?;
        let placed = |values: &[f32]| order.iter().map(|&n| values[n as usize]).collect();
        Ok(BaseTables {
            cols: self.layout.cols(),
            codebooks: info.codebooks,
            // What a stand-in starts from and how far its estimate is trusted is in its low-bit column.
            offset: vec![0.0; order.len()],
            slope: vec![1.0; order.len()],
            down_error: placed(&doubt.down),
            gate_error: placed(&doubt.gate),
            up_error: placed(&doubt.up),
            constant,
        })
    }

    /// A layer, decoded.
    pub fn layer(&self, layer: u32) -> Result<LayerBase> {
        let info = self.info(layer)?;
        let [records, tables] = self.bytes(layer)?;
        content::decode(&self.params, self.layout, &info, &records, &tables)
            .ok_or_else(|| self.artifact.fault(format!("layer {layer} has not its shape")))
    }
}
