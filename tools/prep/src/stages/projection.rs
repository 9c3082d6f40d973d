//! `50-projection`: the directions in which a layer's residuals differ most, for predictors to look along (paper,
//! section 3.3.3).
//!
//! Features are the residuals of a layer: those entering its FFN of all tokens, and those after each stage of the tokens
//! that have them, as a predictor sees them while the layer runs; each divided by its root mean square. Their principal
//! components are the right singular vectors of the centred features, which are the eigenvectors of their covariance,
//! with eigenvalues that are the squared singular values over the number of features. The covariance is what is
//! decomposed: it has hidden x hidden numbers however many tokens there are.
//!
//! A layer's unit has four records: 0 is JSON ([`Spread`]), 1 the mean (hidden f32), 2 the variance along each kept
//! component (f32, descending), 3 the components (kept x hidden f32, orthonormal; of the two directions of each the one
//! whose largest element is positive).
//!
//! A hashing predictor's first layer is linear up to its sign, so the projection costs it nothing: [`Basis::fold`].
//!
//! Tried beyond the paper: with each neuron's hashed column W d (d its column of down) beside its block, the hashes of a
//! partial residual follow the stages without another product, W (x + sum of a d) = W x + sum of a (W d). In bytes with
//! one scale that is + 1.1 % of a 7B neuron in f16, where a projected column is + 10 %. On SmolLM2 (layers 2, 12, 27; 256
//! random planes, 8 stages) 0.07 to 0.09 % of the signs then differ from those of the partial residual itself, of which
//! 11 to 14 % change from the FFN's input to its output; with the root mean square of the input instead of the partial
//! residual's own, 1.2 to 3.7 %. So the columns may be bytes, but the residual's length must be kept up to date, or the
//! hyperplanes must do without a bias. The measurement is a test beside this stage's.
//!
//! Needs LAPACK, which the cargo feature `lapack` brings; without it the stage can be read but not made.

mod covariance;
#[cfg(feature = "lapack")]
mod decompose;

use crate::artifact::{Artifact, Input, RecordId};
use crate::error::{PrepError, Result};
use crate::journal::Journal;
use crate::progress::{Phase, Progress};
use crate::recipe::Recipe;
use crate::stage::{Stage, each_layer};
use crate::stages::activations::Activations;
use covariance::Covariance;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The least variance that whitening believes, as a share of the mean variance of all directions.
const LEAST_VARIANCE: f32 = 1e-6;

/// The stage.
#[derive(Debug)]
pub struct ProjectionStage<'a> {
    activations: &'a Activations,
    params: Params,
}

/// What the components depend on besides the activations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Width of the residual stream.
    pub hidden: u32,
    /// Components that are kept.
    pub kept: u32,
    /// Whether projections are divided by their standard deviations.
    pub whiten: bool,
}

/// How a layer's features are spread.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Features that were seen.
    pub features: u64,
    /// Sum of the variances along all directions.
    pub total_variance: f64,
    /// Share of it along the kept components.
    pub explained: f64,
}

/// The principal components of a layer's features: an affine map from hidden to fewer dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct Basis {
    /// Of the features; hidden.
    pub mean: Vec<f32>,
    /// Along each component, descending.
    pub variances: Vec<f32>,
    /// Kept x hidden, orthonormal.
    pub components: Vec<f32>,
    /// How much there is in all.
    pub spread: Spread,
    /// Whether projections are divided by their standard deviations.
    pub whiten: bool,
}

impl Basis {
    /// Width of a feature.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.mean.len()
    }

    /// Dimensions of a projection.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.variances.len()
    }

    /// What the projection on a component is multiplied by.
    fn gain(&self, component: usize) -> f32 {
        let least = LEAST_VARIANCE * self.spread.total_variance as f32 / self.hidden() as f32;
        if self.whiten { 1.0 / self.variances[component].max(least).sqrt() } else { 1.0 }
    }

    /// The projection of a feature (hidden, divided by its root mean square): P (x - mean); kept.
    #[must_use]
    pub fn project(&self, feature: &[f32]) -> Vec<f32> {
        let centred: Vec<f32> = feature.iter().zip(&self.mean).map(|(x, mean)| x - mean).collect();
        let along = |(component, row): (usize, &[f32])| self.gain(component) * dot(row, &centred);
        self.components.chunks_exact(self.hidden()).enumerate().map(along).collect()
    }

    /// Hyperplanes on features that are what `planes` (rows of [`Basis::kept`] weights) with `bias` are on projections:
    /// W P x + (b - W P mean) is W (P (x - mean)) + b. Rows of hidden weights, and biases.
    ///
    /// # Panics
    /// If `planes` is not a row for each bias.
    #[must_use]
    pub fn fold(&self, planes: &[f32], bias: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (hidden, kept) = (self.hidden(), self.kept());
        assert_eq!(planes.len(), kept * bias.len(), "weights of all planes");
        let mut folded = vec![0f32; hidden * bias.len()];
        for (to, plane) in folded.chunks_exact_mut(hidden).zip(planes.chunks_exact(kept)) {
            for ((component, row), &weight) in
                self.components.chunks_exact(hidden).enumerate().zip(plane)
            {
                let weight = weight * self.gain(component);
                to.iter_mut().zip(row).for_each(|(to, x)| *to += weight * x);
            }
        }
        let rows = folded.chunks_exact(hidden).zip(bias);
        let bias = rows.map(|(row, bias)| bias - dot(row, &self.mean)).collect();
        (folded, bias)
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// What a residual is multiplied by to become a feature: one over its root mean square, as `ls_hash::Scaling::Rms`.
#[must_use]
pub fn feature_scale(residual: impl ExactSizeIterator<Item = f32>) -> f32 {
    let count = residual.len() as f64;
    let squares: f64 = residual.map(|x| f64::from(x) * f64::from(x)).sum();
    (1.0 / (squares / count + 1e-12).sqrt()) as f32
}

impl<'a> ProjectionStage<'a> {
    /// Components of `activations`, as `recipe` says.
    #[must_use]
    pub fn new(activations: &'a Activations, recipe: &Recipe) -> Self {
        let hidden = activations.params().hidden;
        let kept = (f64::from(hidden) * recipe.projection.share).round().max(1.0) as u32;
        let params = Params { hidden, kept, whiten: recipe.projection.whiten };
        ProjectionStage { activations, params }
    }

    fn layer(&self, layer: u32) -> Result<Basis> {
        let mut covariance = Covariance::new(self.params.hidden as usize);
        for chunk in self.activations.layer(layer) {
            let chunk = chunk?;
            let stages = 1..=self.activations.params().stages;
            let inputs = (0..chunk.tokens()).map(|token| chunk.input(token));
            let staged = (0..chunk.staged_tokens().len())
                .flat_map(|index| stages.clone().map(move |stage| (index, stage)))
                .map(|(index, stage)| chunk.staged(index, stage));
            covariance.add(inputs.chain(staged))?;
        }
        components(&covariance, &self.params)
    }
}

#[cfg(feature = "lapack")]
use decompose::components;

#[cfg(not(feature = "lapack"))]
fn components(_: &Covariance, _: &Params) -> Result<Basis> {
    let name = <ProjectionStage<'_> as Stage>::NAME;
    Err(PrepError::unsupported(format!(
        "{name}: this ls-prep was built without LAPACK; build it with --features lapack"
    )))
}

impl Stage for ProjectionStage<'_> {
    const NAME: &'static str = "50-projection";
    const SCHEMA: u32 = 1;
    type Params = Params;

    fn params(&self) -> Params {
        self.params.clone()
    }

    fn inputs(&self) -> Vec<Input> {
        vec![self.activations.artifact().input()]
    }

    fn units(&self) -> u32 {
        self.activations.params().layers
    }

    fn records(&self, layers: Range<u32>) -> u64 {
        4 * layers.len() as u64
    }

    fn run(&self, journal: &mut Journal, progress: &mut dyn Progress) -> Result<()> {
        if cfg!(not(feature = "lapack")) {
            let problem = format!(
                "{}: this ls-prep was built without LAPACK; build it with --features lapack",
                Self::NAME
            );
            return Err(PrepError::unsupported(problem));
        }
        // LAPACK keeps all processors busy by itself.
        each_layer(journal, progress, Phase::Projection, 4, u64::MAX, |layer| {
            let Basis { mean, variances, components, spread, .. } = self.layer(layer)?;
            let bytes = |values: Vec<f32>| values.iter().flat_map(|x| x.to_le_bytes()).collect();
            let spread = serde_json::to_vec(&spread).expect("plain data");
            Ok(vec![spread, bytes(mean), bytes(variances), bytes(components)])
        })
    }
}

/// The components of a finished stage.
#[derive(Debug)]
pub struct Projection {
    artifact: Artifact,
    params: Params,
}

impl Projection {
    /// Takes the artifact of [`ProjectionStage`], whole or a share of layers.
    pub fn new(artifact: Artifact) -> Result<Projection> {
        artifact.check_stage(ProjectionStage::NAME)?;
        let params: Params = artifact.params()?;
        if params.hidden == 0 || !(1..=params.hidden).contains(&params.kept) {
            return Err(artifact.fault(format!("makes no sense: {params:?}")));
        }
        Ok(Projection { artifact, params })
    }

    /// The file.
    #[must_use]
    pub fn artifact(&self) -> &Artifact {
        &self.artifact
    }

    /// Shape of what is kept.
    #[must_use]
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Reads a layer.
    pub fn layer(&self, layer: u32) -> Result<Basis> {
        let Params { hidden, kept, whiten } = self.params;
        let text = self.artifact.read(RecordId::new(layer, 0))?;
        let spread = serde_json::from_slice(&text).map_err(|p| self.artifact.fault(p))?;
        let read = |part, wanted: u32| -> Result<Vec<f32>> {
            let bytes = self.artifact.read(RecordId::new(layer, part))?;
            let values: Vec<f32> =
                bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            if values.len() != wanted as usize || values.iter().any(|value| !value.is_finite()) {
                let place = format!("record {layer}.{part}");
                return Err(self
                    .artifact
                    .fault(format!("{place}: wanted {wanted} finite numbers")));
            }
            Ok(values)
        };
        Ok(Basis {
            mean: read(1, hidden)?,
            variances: read(2, kept)?,
            components: read(3, kept * hidden)?,
            spread,
            whiten,
        })
    }
}
