//! `20-activations`: what a dense forward over the calibration windows shows, recorded for every token and layer.
//!
//! One layer's weights are in memory at a time; all windows go through it, a chunk of tokens after another. The
//! residual stream lies in two scratch files that take turns as a layer's input and output, so memory does not grow
//! with the number of tokens. A record is one layer's chunk (unit: layer, part: chunk):
//!
//! ```text
//! BLAKE3 of the chunk's residuals behind the layer (f32)       32 bytes
//! residual entering the FFN, before its norm                   tokens x hidden f16, clipped to what f16 holds
//! largest |activation| of each token                           tokens f32
//! |activation| of every neuron, see `encode_magnitude`         tokens x neurons u8
//! residuals after 1 ..= stages stages, of the staged tokens    staged tokens x stages x hidden f16
//! ```
//!
//! An activation is SiLU(gate h) * (up h). Neurons run in stages of equal size, the token's largest magnitudes first
//! (an oracle's order); of every `stage_every` tokens the last is staged. The last layer has one part more: the
//! negative log-likelihoods (f32) of the first `check_tokens` tokens, all but each window's first.
//!
//! The hash lets work go on only from residuals that belong to the records. Layers before a share (`--layers A..B`)
//! are computed without being recorded.

mod run;
mod shape;

pub use shape::{Cost, Params};

use crate::artifact::{Artifact, Input, RecordId};
use crate::error::Result;
use crate::journal::Journal;
use crate::key::Key;
use crate::progress::Progress;
use crate::recipe::Recipe;
use crate::stage::Stage;
use crate::stages::prompts::Windows;
use crate::stages::source::Source;
use half::f16;
use std::ops::Range;

/// Octaves below a token's largest magnitude that codes reach.
const OCTAVES: f32 = 16.0;
const STEPS: f32 = 254.0;

/// The code of a magnitude that is `ratio` (0 to 1) of its token's largest: 255 for the largest, less by one for every
/// 16/254 of an octave below it, 0 for zero and for what is more than 16 octaves below. Decoding is off by at most
/// 2.2 % ([`MAX_MAGNITUDE_ERROR`]) of the magnitude.
#[must_use]
pub fn encode_magnitude(ratio: f32) -> u8 {
    // Zero gives minus infinity, which the cast saturates to 0.
    (255.5 + ratio.log2() * (STEPS / OCTAVES)) as u8
}

/// What a code stands for, as a ratio to the token's largest magnitude.
#[must_use]
pub fn decode_magnitude(code: u8) -> f32 {
    if code == 0 { 0.0 } else { ((f32::from(code) - 255.0) * (OCTAVES / STEPS)).exp2() }
}

/// Most that decoding a code is off, relative to the magnitude: half a step, 2^(16/254/2) - 1.
pub const MAX_MAGNITUDE_ERROR: f32 = 0.0221;

/// The stage.
#[derive(Debug)]
pub struct ActivationsStage<'a> {
    source: &'a Source,
    windows: &'a Windows,
    prompts: Key,
    params: Params,
}

impl<'a> ActivationsStage<'a> {
    /// The forward of `windows`, which the artifact `prompts` holds, as `recipe` says.
    #[must_use]
    pub fn new(source: &'a Source, windows: &'a Windows, prompts: Key, recipe: &Recipe) -> Self {
        let params = Params::new(&source.model.config, windows, &recipe.activations);
        ActivationsStage { source, windows, prompts, params }
    }

    /// What it will take.
    #[must_use]
    pub fn cost(&self, layers: &Range<u32>) -> Cost {
        Cost::of(&self.params, &self.source.model.config, layers)
    }
}

impl Stage for ActivationsStage<'_> {
    const NAME: &'static str = "20-activations";
    const SCHEMA: u32 = 1;
    const IN_TENSORS: bool = true;
    type Params = Params;

    fn params(&self) -> Params {
        self.params
    }

    fn inputs(&self) -> Vec<Input> {
        vec![self.source.input(), Input { name: "15-prompts".to_owned(), key: self.prompts }]
    }

    fn units(&self) -> u32 {
        self.params.layers
    }

    fn records(&self, layers: Range<u32>) -> u64 {
        let checks = u64::from(layers.end == self.params.layers);
        layers.len() as u64 * u64::from(self.params.chunks()) + checks
    }

    fn run(&self, journal: &mut Journal, progress: &mut dyn Progress) -> Result<()> {
        run::run(&self.source.model, self.windows, &self.params, journal, progress)
    }
}

/// The recorded activations of a model.
#[derive(Debug)]
pub struct Activations {
    artifact: Artifact,
    params: Params,
}

impl Activations {
    /// Takes an artifact of [`ActivationsStage`], whole or a share of layers.
    pub fn new(artifact: Artifact) -> Result<Activations> {
        if artifact.description().stage != ActivationsStage::NAME {
            let found = &artifact.description().stage;
            return Err(artifact.fault(format!("is {found}; wanted {}", ActivationsStage::NAME)));
        }
        let params: Params = artifact.params()?;
        params.check().map_err(|problem| artifact.fault(problem))?;
        Ok(Activations { artifact, params })
    }

    /// Shape of what is recorded.
    #[must_use]
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// The file.
    #[must_use]
    pub fn artifact(&self) -> &Artifact {
        &self.artifact
    }

    /// Reads a chunk of a layer.
    pub fn chunk(&self, layer: u32, chunk: u32) -> Result<Chunk> {
        let content = self.artifact.read(RecordId::new(layer, chunk))?;
        Chunk::parse(&self.params, chunk, &content).ok_or_else(|| {
            let bytes = content.len();
            self.artifact.fault(format!("record {layer}.{chunk} has {bytes} bytes: not its shape"))
        })
    }

    /// Reads the chunks of a layer one after another.
    pub fn layer(&self, layer: u32) -> impl Iterator<Item = Result<Chunk>> {
        (0..self.params.chunks()).map(move |chunk| self.chunk(layer, chunk))
    }

    /// The negative log-likelihoods of the tokens that were checked.
    pub fn nll(&self) -> Result<Vec<f32>> {
        let id = RecordId::new(self.params.layers - 1, self.params.chunks());
        let content = self.artifact.read(id)?;
        Ok(content.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    /// The perplexity of the tokens that were checked.
    pub fn perplexity(&self) -> Result<f64> {
        let nll = self.nll()?;
        Ok((nll.iter().map(|&x| f64::from(x)).sum::<f64>() / nll.len().max(1) as f64).exp())
    }
}

/// One layer's records of a chunk of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// Index of the first token among all.
    pub first_token: u64,
    /// Largest magnitude of each token.
    pub scales: Vec<f32>,
    params: Params,
    state: [u8; 32],
    inputs: Vec<f16>,
    codes: Vec<u8>,
    staged: Vec<f16>,
}

impl Chunk {
    fn parse(params: &Params, chunk: u32, content: &[u8]) -> Option<Chunk> {
        let tokens = params.tokens_of(chunk);
        if content.len() as u64 != params.record_bytes(tokens) {
            return None;
        }
        let (hidden, neurons) = (params.hidden as usize, params.neurons as usize);
        let count = tokens as usize;
        let (state, rest) = content.split_at(32);
        let (inputs, rest) = rest.split_at(2 * count * hidden);
        let (scales, rest) = rest.split_at(4 * count);
        let (codes, staged) = rest.split_at(count * neurons);
        let halves =
            |bytes: &[u8]| bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b)).collect();
        Some(Chunk {
            first_token: u64::from(chunk) * u64::from(params.chunk_tokens),
            scales: scales.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            params: *params,
            state: state.try_into().expect("32 bytes"),
            inputs: halves(inputs),
            codes: codes.to_vec(),
            staged: halves(staged),
        })
    }

    /// Number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.scales.len()
    }

    /// BLAKE3 of the chunk's residuals behind the layer.
    #[must_use]
    pub fn state(&self) -> &[u8; 32] {
        &self.state
    }

    /// The residual that enters the FFN, before its norm; hidden.
    #[must_use]
    pub fn input(&self, token: usize) -> &[f16] {
        let hidden = self.params.hidden as usize;
        &self.inputs[token * hidden..][..hidden]
    }

    /// Codes of the neurons' magnitudes. Their order is the magnitudes' order, up to steps of 4.5 %.
    #[must_use]
    pub fn codes(&self, token: usize) -> &[u8] {
        let neurons = self.params.neurons as usize;
        &self.codes[token * neurons..][..neurons]
    }

    /// Magnitudes of the neurons, written into `into`.
    pub fn magnitudes(&self, token: usize, into: &mut [f32]) {
        let scale = self.scales[token];
        for (into, &code) in into.iter_mut().zip(self.codes(token)) {
            *into = scale * decode_magnitude(code);
        }
    }

    /// The tokens of this chunk that have partial residuals.
    pub fn staged_tokens(&self) -> impl ExactSizeIterator<Item = usize> + use<> {
        let every = self.params.stage_every as usize;
        (0..self.tokens() / every).map(move |index| (index + 1) * every - 1)
    }

    /// The residual of the staged token number `index` after `stage` stages, 1 ..= stages; hidden. Before the first
    /// it is [`Chunk::input`].
    #[must_use]
    pub fn staged(&self, index: usize, stage: u32) -> &[f16] {
        assert!((1..=self.params.stages).contains(&stage), "stage {stage}");
        let hidden = self.params.hidden as usize;
        let row = index * self.params.stages as usize + stage as usize - 1;
        &self.staged[row * hidden..][..hidden]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magnitudes_decode_within_the_stated_error() {
        let mut worst = 0f32;
        for step in 0..20_000 {
            let ratio = (-15.9 * step as f32 / 20_000.0).exp2();
            worst = worst.max((decode_magnitude(encode_magnitude(ratio)) / ratio - 1.0).abs());
        }
        assert!(worst <= MAX_MAGNITUDE_ERROR && worst > 0.9 * MAX_MAGNITUDE_ERROR, "{worst}");
        assert_eq!(encode_magnitude(1.0), 255);
        assert_eq!(decode_magnitude(255), 1.0);
        for nothing in [0.0, 1e-6, f32::MIN_POSITIVE] {
            assert_eq!(encode_magnitude(nothing), 0);
        }
        assert!((0..255u8).all(|code| decode_magnitude(code) < decode_magnitude(code + 1)));
        assert!((0..=255u8).all(|code| encode_magnitude(decode_magnitude(code)) == code));
    }
}
