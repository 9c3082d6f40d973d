//! [`LayerSamples`]: what is learned from, of one layer: residuals that its predictor may be asked with, the importance
//! of its blocks, and what was active before.
//!
//! A token is one sample. Its features are the residual entering the FFN before, the partial residuals of the mixture's
//! stages where the token is staged, and the layer's own input; one of them is drawn each time the token is learned
//! from, so that one set of tables serves all steps of a refinement.

use crate::error::{PrepError, Result};
use crate::predictors::{ChunkPair, Grouping, Pair, widen};
use crate::stages::activations::Activations;
use crate::train::{Features, Past, Statistics};
use ls_hash::Scaling;

/// Which residuals are learned from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Context<'a> {
    /// The layer's own input alone.
    Full,
    /// The residual entering the FFN before alone.
    Stale,
    /// The residuals of these stages (0 is the stale one) and the layer's own input.
    Mixture(&'a [u32]),
}

/// What is learned from.
#[derive(Debug)]
pub(crate) struct LayerSamples {
    pub(crate) blocks: usize,
    pub(crate) features: Features,
    /// Importance of all blocks, encoded; samples x blocks.
    pub(crate) codes: Vec<u8>,
    pub(crate) past: Past,
    /// How often each block is active.
    pub(crate) frequency: Vec<f32>,
}

/// How samples are taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sampling<'a> {
    pub(crate) context: Context<'a>,
    /// Of so many windows the last is held out.
    pub(crate) holdout_every: u32,
    /// Share of the blocks that counts as active.
    pub(crate) active_share: f64,
    /// What the fast and the slow mean keep of themselves at a token.
    pub(crate) keeps: [f64; 2],
}

/// Whether a window, counted from 0, is held out.
pub(crate) fn held_out(window: u64, holdout_every: u32) -> bool {
    (window + 1).is_multiple_of(holdout_every.into())
}

/// The features of one token, in turn.
fn each_feature(
    (own, before): &ChunkPair,
    token: usize,
    staged: Option<usize>,
    context: Context<'_>,
    mut take: impl FnMut(&[half::f16]),
) {
    let Some(before) = before else { return take(own.input(token)) };
    match (context, staged) {
        (Context::Full, _) => take(own.input(token)),
        (Context::Stale, _) => take(before.input(token)),
        (Context::Mixture(stages), staged) => {
            if stages.contains(&0) {
                take(before.input(token));
            }
            if let Some(index) = staged {
                stages.iter().filter(|&&stage| stage > 0).for_each(|&stage| {
                    take(before.staged(index, stage));
                });
            }
            take(own.input(token));
        }
    }
}

impl LayerSamples {
    /// Memory that a layer takes while it is learned from in batches of `batch` samples, about.
    pub(crate) fn bytes(activations: &Activations, grouping: &Grouping, batch: u32) -> u64 {
        let params = activations.params();
        let blocks = grouping.blocks() as u64;
        let rows = 2 + params.stages.div_ceil(params.stage_every);
        // Features; codes, two means, what came before, and the sets while those are made.
        let sample = u64::from(rows * params.hidden) + 5 * blocks;
        // Scores, their gradient, and what candle keeps of each step between.
        params.tokens * sample + 64 * u64::from(batch) * blocks
    }

    /// Reads those of `layer` that are not held out.
    pub(crate) fn read(
        activations: &Activations,
        layer: u32,
        grouping: &Grouping,
        sampling: Sampling<'_>,
    ) -> Result<LayerSamples> {
        let params = *activations.params();
        let pair = Pair::new(activations, layer);
        let every_token = |take: &mut dyn FnMut(&ChunkPair, usize, Option<usize>)| {
            for number in 0..params.chunks() {
                let chunks = pair.chunk(number)?;
                let staged: Vec<usize> = chunks.0.staged_tokens().collect();
                for token in 0..chunks.0.tokens() {
                    let window = (chunks.0.first_token + token as u64) / u64::from(params.window);
                    if !held_out(window, sampling.holdout_every) {
                        take(&chunks, token, staged.binary_search(&token).ok());
                    }
                }
            }
            Ok::<(), PrepError>(())
        };
        let mut statistics = Statistics::new(Scaling::Rms, params.hidden as usize);
        let mut residual = Vec::new();
        every_token(&mut |chunks, token, staged| {
            each_feature(chunks, token, staged, sampling.context, |feature| {
                widen(feature, &mut residual);
                statistics.add(&residual);
            });
        })?;
        let blocks = grouping.blocks();
        let mut features = Features::new(statistics.input());
        let (mut codes, mut importance) = (Vec::new(), vec![0.0; blocks]);
        let mut starts = Vec::new();
        every_token(&mut |chunks, token, staged| {
            let mut rows: Vec<Vec<f32>> = Vec::new();
            each_feature(chunks, token, staged, sampling.context, |feature| {
                let mut row = Vec::new();
                widen(feature, &mut row);
                rows.push(row);
            });
            features.push(rows.iter().map(|row| &row[..]));
            grouping.encode(chunks.0.codes(token), &mut importance, &mut codes);
            let place = chunks.0.first_token + token as u64;
            starts.push(place.is_multiple_of(u64::from(params.window)));
        })?;
        if starts.is_empty() {
            return Err(PrepError::usage("every window is held out: nothing to learn from"));
        }
        let (frequency, past) = remember(&codes, blocks, &starts, &sampling);
        Ok(LayerSamples { blocks, features, codes, past, frequency })
    }
}

/// How often blocks are active, and what was active before each sample; memory begins anew where a window `starts`.
fn remember(
    codes: &[u8],
    blocks: usize,
    starts: &[bool],
    sampling: &Sampling<'_>,
) -> (Vec<f32>, Past) {
    let active = (blocks as f64 * sampling.active_share).round().max(1.0) as usize;
    let mut sets: Vec<Vec<u32>> = Vec::with_capacity(starts.len());
    let mut counts = vec![0f32; blocks];
    for codes in codes.chunks_exact(blocks) {
        let mut order: Vec<u32> = (0..blocks as u32).collect();
        let key = |&block: &u32| (std::cmp::Reverse(codes[block as usize]), block);
        order.select_nth_unstable_by_key(active - 1, key);
        order.truncate(active);
        order.iter().for_each(|&block| counts[block as usize] += 1.0);
        sets.push(order);
    }
    let samples = starts.len() as f32;
    let frequency: Vec<f32> = counts.iter().map(|count| count / samples).collect();
    let mut past = Past::default();
    let mut means = [frequency.clone(), frequency.clone()];
    let mut previous = vec![0u8; blocks];
    let byte = |mean: &f32| (mean * 255.0).round() as u8;
    for (set, &start) in sets.iter().zip(starts) {
        if start {
            means = [frequency.clone(), frequency.clone()];
            previous.fill(0);
        }
        past.fast.extend(means[0].iter().map(byte));
        past.slow.extend(means[1].iter().map(byte));
        past.previous.extend_from_slice(&previous);
        previous.fill(0);
        set.iter().for_each(|&block| previous[block as usize] = 255);
        for (means, keep) in means.iter_mut().zip(sampling.keeps) {
            let (keep, gain) = (keep as f32, (1.0 - keep) as f32 / 255.0);
            for (mean, &active) in means.iter_mut().zip(&previous) {
                *mean = *mean * keep + f32::from(active) * gain;
            }
        }
    }
    (frequency, past)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_of_tokens_before_and_ends_with_a_text() {
        // Three blocks, one active a token: 0, 1, 1 | 2.
        let codes = [200, 1, 2, 1, 200, 2, 3, 200, 2, 1, 2, 200];
        let sampling = Sampling {
            context: Context::Full,
            holdout_every: 2,
            active_share: 0.3,
            keeps: [0.5, 0.9],
        };
        let starts = [true, false, false, true];
        let (frequency, past) = remember(&codes, 3, &starts, &sampling);
        assert_eq!(frequency, [0.25, 0.5, 0.25]);
        assert_eq!(past.previous, [0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 0]);
        let fast: Vec<u8> = [0.25, 0.5, 0.25, 0.625, 0.25, 0.125, 0.3125, 0.625, 0.0625]
            .map(|mean: f32| (mean * 255.0).round() as u8)
            .into();
        assert_eq!(past.fast[..9], fast);
        assert_eq!(past.fast[9..], past.fast[..3]);
        assert_eq!(past.slow[9..], past.slow[..3]);
        assert_eq!(past.slow[3], (255.0f32 * (0.25 * 0.9 + 0.1)).round() as u8);
    }
}
