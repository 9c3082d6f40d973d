//! The forward with each layer's FFN replaced by a [`Policy`], and the perplexity that it leaves.
//!
//! Windows of a text are pushed through a layer, a chunk after another, then through the next; residuals are in
//! memory. What a policy sees is what an engine could know when that FFN is about to run. The dense model is a policy
//! too, so every figure comes out of the same loop.
//!
//! Most policies are a [`Scorer`], which ranks the neurons, in a [`Selected`], which runs the best exactly and asks the
//! base, if there is one, for the rest.

mod demand;

pub use demand::Demand;

use crate::base::{BaseTensors, LayerBase, largest, masked, mean_squares, relate};
use crate::error::{PrepError, Result};
use crate::model::Model;
use crate::model::forward::{Forward, Layer};
use crate::progress::{Phase, Progress};
use crate::stages::base::Base;
use crate::stages::placement::Placement;
use candle_core::{DType as Numbers, Device, Tensor};
use ls_bundle::model::DType;
use rayon::prelude::*;

/// Tokens pushed through a layer together, about.
const CHUNK_TOKENS: usize = 2048;

/// What is known when an FFN is to run. Rows are tokens, whole windows.
#[derive(Clone, Copy, Debug)]
pub struct FfnAt<'a> {
    /// The layer.
    pub layer: u16,
    /// Its weights.
    pub weights: &'a Layer<'a>,
    /// The FFN's input, normalised; tokens x hidden.
    pub h: &'a [f32],
    /// The residual that enters the FFN, before its norm; tokens x hidden.
    pub residual: &'a [f32],
    /// The residual that entered the layer, before attention: behind the FFN of the layer before; tokens x hidden.
    pub entered: &'a [f32],
    /// The residual that entered the FFN of the layer before; the embedding in layer 0; tokens x hidden.
    pub previous: &'a [f32],
}

/// What stands in an FFN's place.
pub trait Policy {
    /// What the layer's FFN adds to the residuals; tokens x hidden. Layers come in order, each in several calls.
    fn ffn(&mut self, at: &FfnAt<'_>) -> Result<Vec<f32>>;

    /// Neurons that it has run exactly so far, over all tokens and layers.
    fn exact_neurons(&self) -> u64;
}

/// Ranks neurons.
pub trait Scorer {
    /// A score of every neuron, larger for one that is wanted more; tokens x neurons.
    fn scores(&mut self, at: &FfnAt<'_>) -> Result<Vec<f32>>;
}

/// The model as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Dense {
    exact_neurons: u64,
}

impl Policy for Dense {
    fn ffn(&mut self, at: &FfnAt<'_>) -> Result<Vec<f32>> {
        let activations = at.weights.activations(at.h.to_vec())?;
        self.exact_neurons += activations.len() as u64;
        at.weights.ffn_output(activations)
    }

    fn exact_neurons(&self) -> u64 {
        self.exact_neurons
    }
}

/// Ranks by what neurons really do: |SiLU(gate h) * (up h)|, or that times the norm of the down column.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    /// Whether down counts.
    pub with_down: bool,
    norms: Option<(u16, Vec<f32>)>,
}

impl Oracle {
    /// An oracle.
    #[must_use]
    pub fn new(with_down: bool) -> Oracle {
        Oracle { with_down, norms: None }
    }
}

impl Scorer for Oracle {
    fn scores(&mut self, at: &FfnAt<'_>) -> Result<Vec<f32>> {
        let mut scores = at.weights.activations(at.h.to_vec())?;
        if !self.with_down {
            scores.par_iter_mut().for_each(|x| *x = x.abs());
            return Ok(scores);
        }
        if self.norms.as_ref().is_none_or(|(layer, _)| *layer != at.layer) {
            self.norms = Some((at.layer, down_norms(at.weights)?));
        }
        let (_, norms) = self.norms.as_ref().expect("it was just set");
        scores.par_chunks_exact_mut(norms.len()).for_each(|row| {
            row.iter_mut().zip(norms).for_each(|(x, norm)| *x = x.abs() * norm);
        });
        Ok(scores)
    }
}

fn down_norms(weights: &Layer<'_>) -> Result<Vec<f32>> {
    let [_, _, down] = weights.neurons()?;
    let hidden = weights.hidden();
    let norm = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>().sqrt();
    Ok(down.chunks_exact(hidden).map(norm).collect())
}

/// Runs the neurons that a scorer ranks highest and drops the others.
#[derive(Debug)]
pub struct Selected<S> {
    scorer: S,
    exact_share: f64,
    exact_neurons: u64,
}

impl<S: Scorer> Selected<S> {
    /// The best `exact_share` of each layer's neurons by `scorer`.
    pub fn new(scorer: S, exact_share: f64) -> Selected<S> {
        Selected { scorer, exact_share, exact_neurons: 0 }
    }
}

impl<S: Scorer> Policy for Selected<S> {
    fn ffn(&mut self, at: &FfnAt<'_>) -> Result<Vec<f32>> {
        let scores = self.scorer.scores(at)?;
        let activations = at.weights.activations(at.h.to_vec())?;
        let neurons = at.weights.ffn_hidden();
        let count = blocks_run(self.exact_share, neurons);
        self.exact_neurons += (count * activations.len() / neurons) as u64;
        let chosen = largest(&scores, neurons, |_| count);
        at.weights.ffn_output(masked(&activations, &chosen, true))
    }

    fn exact_neurons(&self) -> u64 {
        self.exact_neurons
    }
}

/// Which neurons run exactly beside a base.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Selection {
    /// The same share of each layer's blocks for every token, rounded as the engine does.
    Share(f64),
    /// Those whose mean expected error, relative to the residual's mean square, is above this.
    Above(f32),
}

impl Selection {
    /// Marks what it selects of the scores (tokens x blocks); `squares` are the residuals' mean squares, for a threshold.
    fn of(self, scores: &[f32], blocks: usize, squares: &[f32]) -> Vec<bool> {
        match self {
            Selection::Share(share) => largest(scores, blocks, |_| blocks_run(share, blocks)),
            Selection::Above(threshold) => {
                let mut related = scores.to_vec();
                relate(&mut related, squares);
                related.iter().map(|&score| score > threshold).collect()
            }
        }
    }
}

/// Runs the blocks that a base is most in doubt of; the base stands in for the others, which a sketch drops.
#[derive(Debug)]
pub struct WithBase<'a> {
    base: &'a Base,
    selection: Selection,
    blocks: Option<&'a Placement>,
    demand: Option<Demand>,
    /// What others would have selected by the same scores.
    others: Vec<(Selection, Demand)>,
    layer: Option<(u16, LayerBase)>,
    /// The layer's base where the model is, if that is not the processor.
    tensors: Option<BaseTensors>,
    exact_neurons: u64,
}

impl<'a> WithBase<'a> {
    /// `selection` of single neurons runs exactly beside `base`.
    #[must_use]
    pub fn new(base: &'a Base, selection: Selection) -> WithBase<'a> {
        let (blocks, demand, others) = (None, None, Vec::new());
        let (layer, tensors, exact_neurons) = (None, None, 0);
        WithBase { base, selection, blocks, demand, others, layer, tensors, exact_neurons }
    }

    /// The same with the blocks of a placement.
    #[must_use]
    pub fn in_blocks(self, placement: &'a Placement) -> WithBase<'a> {
        WithBase { blocks: Some(placement), ..self }
    }

    /// Also counts what would have to be read.
    #[must_use]
    pub fn counting(self, demand: Demand) -> WithBase<'a> {
        WithBase { demand: Some(demand), ..self }
    }

    /// Also counts what other selections would have to read, about: of what they would change in the layers before
    /// nothing is seen.
    #[must_use]
    pub fn also_counting(self, others: Vec<(Selection, Demand)>) -> WithBase<'a> {
        WithBase { others, ..self }
    }

    /// What would have had to be read.
    #[must_use]
    pub fn demand(&self) -> Option<&Demand> {
        self.demand.as_ref()
    }

    /// What others would have had to read.
    #[must_use]
    pub fn also_counted(&self) -> &[(Selection, Demand)] {
        &self.others
    }

    /// The neurons that run exactly, by the `scores` of all; tokens x neurons.
    fn choose(&mut self, at: &FfnAt<'_>, mut scores: Vec<f32>) -> Vec<bool> {
        let neurons = at.weights.ffn_hidden();
        let placed = self.blocks.map(|placement| {
            let order = &placement.layers[usize::from(at.layer)].order;
            (order, placement.block_neurons as usize)
        });
        let relates = |selection: &Selection| matches!(selection, Selection::Above(_));
        let squares = if relates(&self.selection) || self.others.iter().any(|(o, _)| relates(o)) {
            mean_squares(at.residual, at.weights.hidden())
        } else {
            Vec::new()
        };
        if let Some((order, size)) = placed {
            scores = of_blocks(&scores, order, size);
        }
        let blocks = neurons.div_ceil(placed.map_or(1, |(_, size)| size));
        let chosen = self.selection.of(&scores, blocks, &squares);
        if let Some(demand) = &mut self.demand {
            demand.add(at.layer, blocks, &chosen);
        }
        self.others.par_iter_mut().for_each(|(selection, demand)| {
            demand.add(at.layer, blocks, &selection.of(&scores, blocks, &squares));
        });
        let Some((order, size)) = placed else { return chosen };
        let mut of_neurons = vec![false; at.h.len() / at.weights.hidden() * neurons];
        let rows = of_neurons.par_chunks_exact_mut(neurons).zip(chosen.par_chunks_exact(blocks));
        rows.for_each(|(of_neurons, chosen)| {
            for (block, &chosen) in order.chunks(size).zip(chosen) {
                block.iter().for_each(|&neuron| of_neurons[neuron as usize] = chosen);
            }
        });
        of_neurons
    }
}

/// How many of a layer's blocks run at a share: the engine's rounding.
#[must_use]
pub fn blocks_run(share: f64, blocks: usize) -> usize {
    ((share * blocks as f64 - 1e-3).ceil().max(0.0) as usize).min(blocks)
}

/// Means of the scores (tokens x neurons) over blocks of `size` neighbours in `order`; tokens x blocks.
fn of_blocks(scores: &[f32], order: &[u32], size: usize) -> Vec<f32> {
    let blocks = order.len().div_ceil(size);
    let mut means = vec![0f32; scores.len() / order.len() * blocks];
    let rows = means.par_chunks_exact_mut(blocks).zip(scores.par_chunks_exact(order.len()));
    rows.for_each(|(means, scores)| {
        for (mean, block) in means.iter_mut().zip(order.chunks(size)) {
            *mean = block.iter().map(|&neuron| scores[neuron as usize]).sum::<f32>() / size as f32;
        }
    });
    means
}

impl WithBase<'_> {
    /// What [`Policy::ffn`] computes, in tensors on `device`; the choice alone is made here.
    fn ffn_in_tensors(&mut self, at: &FfnAt<'_>, device: &Device) -> Result<Vec<f32>> {
        let fault = |problem| PrepError::corrupt("tensor arithmetic", problem);
        let (hidden, neurons) = (at.weights.hidden(), at.weights.ffn_hidden());
        let shape = (at.h.len() / hidden, neurons);
        let h = Tensor::from_slice(at.h, (shape.0, hidden), device).map_err(fault)?;
        let base = self.tensors.take().expect("it was set with the layer");
        let [gate, up] = base.gate_up(&h).map_err(fault)?;
        let scores = base.scores(&gate, &up).and_then(|scores| scores.flatten_all()?.to_vec1());
        let chosen = self.choose(at, scores.map_err(fault)?);
        let count = chosen.iter().filter(|&&chosen| chosen).count();
        self.exact_neurons += count as u64;
        let mask = || {
            let bytes: Vec<u8> = chosen.par_iter().map(|&chosen| u8::from(chosen)).collect();
            Tensor::from_vec(bytes, shape, device)?.to_dtype(Numbers::F32)
        };
        let mask = mask().map_err(fault)?;
        let mut sum = if count == 0 {
            h.zeros_like().map_err(fault)?
        } else {
            at.weights.output(&at.weights.exact(&h)?.mul(&mask).map_err(fault)?)?
        };
        if count < chosen.len() {
            sum = base.add(&gate, &up, &mask, &sum).map_err(fault)?;
        }
        self.tensors = Some(base);
        sum.flatten_all().and_then(|sum| sum.to_vec1()).map_err(fault)
    }
}

impl Policy for WithBase<'_> {
    fn ffn(&mut self, at: &FfnAt<'_>) -> Result<Vec<f32>> {
        let device = at.weights.tensors_on();
        if self.layer.as_ref().is_none_or(|(layer, _)| *layer != at.layer) {
            let base = self.base.layer(at.layer.into())?;
            self.tensors = device.map(|device| base.on(device)).transpose()?;
            self.layer = Some((at.layer, base));
        }
        if let Some(device) = device {
            return self.ffn_in_tensors(at, device);
        }
        let (_, base) = self.layer.as_ref().expect("it was just set");
        let [gate, up] = base.gate_up(at.h);
        let scores = base.doubt.of_rows(&gate, &up);
        let chosen = self.choose(at, scores);
        let count = chosen.iter().filter(|&&chosen| chosen).count();
        self.exact_neurons += count as u64;
        let mut sum = if count == 0 {
            vec![0.0; at.h.len()]
        } else {
            let activations = at.weights.activations(at.h.to_vec())?;
            at.weights.ffn_output(masked(&activations, &chosen, true))?
        };
        if count < chosen.len() {
            let (_, base) = self.layer.as_ref().expect("it was set above");
            base.add(&gate, &up, &chosen, &mut sum);
        }
        Ok(sum)
    }

    fn exact_neurons(&self) -> u64 {
        self.exact_neurons
    }
}

/// Negative log-likelihoods of `tokens` (whole windows of `window`), all but each window's first, with `policy` in
/// place of the FFNs.
pub fn likelihoods(
    model: &Model,
    tokens: &[u32],
    window: u32,
    policy: &mut dyn Policy,
    progress: &mut dyn Progress,
) -> Result<Vec<f32>> {
    likelihoods_in(model, None, tokens, window, policy, progress)
}

/// The same with the FFNs' exact weights in the format `ffn`; as they are if there is none.
pub fn likelihoods_in(
    model: &Model,
    ffn: Option<DType>,
    tokens: &[u32],
    window: u32,
    policy: &mut dyn Policy,
    progress: &mut dyn Progress,
) -> Result<Vec<f32>> {
    likelihoods_of(&Forward::new(model, window)?, ffn, tokens, policy, progress)
}

/// The same by `forward`, in windows of its.
pub fn likelihoods_of(
    forward: &Forward<'_>,
    ffn: Option<DType>,
    tokens: &[u32],
    policy: &mut dyn Policy,
    progress: &mut dyn Progress,
) -> Result<Vec<f32>> {
    let (hidden, length) = (forward.config().hidden as usize, forward.window());
    let layers = forward.config().layers;
    assert!(tokens.len().is_multiple_of(length), "whole windows");
    let mut x = vec![0f32; tokens.len() * hidden];
    forward.embed(tokens, |index, row| {
        x[index * hidden..][..hidden].copy_from_slice(row);
        Ok(())
    })?;
    let mut previous = x.clone();
    let chunk = (CHUNK_TOKENS / length).max(1) * length * hidden;
    progress.begin(Phase::Evaluation, (tokens.len() * usize::from(layers)) as u64);
    for layer in 0..layers {
        let weights = match ffn {
            None => forward.layer(layer)?,
            Some(dtype) => forward.layer(layer)?.rounded(dtype)?,
        };
        for (x, previous) in x.chunks_mut(chunk).zip(previous.chunks_mut(chunk)) {
            let entered = x.to_vec();
            weights.attend(x)?;
            let h = weights.ffn_input(x);
            let (weights, h, residual) = (&weights, &h[..], &*x);
            let at = FfnAt { layer, weights, h, residual, entered: &entered, previous };
            let added = policy.ffn(&at)?;
            previous.copy_from_slice(x);
            x.iter_mut().zip(&added).for_each(|(x, y)| *x += y);
            progress.advance((x.len() / hidden) as u64);
        }
    }
    let mut all = Vec::with_capacity(tokens.len());
    for (x, tokens) in x.chunks(chunk).zip(tokens.chunks(chunk / hidden)) {
        let rows = x.chunks_exact(length * hidden);
        let rows: Vec<f32> = rows.flat_map(|x| &x[..(length - 1) * hidden]).copied().collect();
        let targets = tokens.chunks_exact(length).flat_map(|ids| &ids[1..]).copied();
        all.extend(forward.nll(&rows, &targets.collect::<Vec<u32>>())?);
    }
    Ok(all)
}

/// The perplexity that negative log-likelihoods stand for.
#[must_use]
pub fn perplexity(nll: &[f32]) -> f64 {
    (nll.iter().map(|&x| f64::from(x)).sum::<f64>() / nll.len().max(1) as f64).exp()
}
