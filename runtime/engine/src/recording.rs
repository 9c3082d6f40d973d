//! [`Recording`]: which blocks each token wanted most in a dense run: for a system that knows the future, and to hold
//! the choices of those that do not against.

use crate::predictor::float_key;
use crate::program::blocks_of;
use ls_bundle::ids::{BlockId, LayerId};
use ls_bundle::model::{FfnExtent, WeightMap};
use ls_cache::{AccessTrace, Blocks};
use ls_compute::{ComputeBackend, NeuronBlocks};
use ls_hash::{Kernels, Selection};

/// The most important blocks of every layer and token, best first.
#[derive(Clone, Debug)]
pub struct Recording {
    blocks: Blocks,
    /// By layer: blocks that are recorded of a token, and where they start among the token's.
    counts: Vec<usize>,
    starts: Vec<usize>,
    /// Token after token.
    wanted: Vec<u32>,
    /// How much each of these matters: the length of what it adds to the residual, roughly.
    importance: Vec<f32>,
    tokens: usize,
}

impl Recording {
    /// Room for `tokens` tokens, `count_of(blocks)` blocks of each layer. The last allocation.
    #[must_use]
    pub fn with_capacity(
        map: &WeightMap,
        tokens: usize,
        count_of: impl Fn(usize) -> usize,
    ) -> Recording {
        let blocks = blocks_of(map);
        let counts: Vec<usize> = blocks.ranges().iter().map(|r| count_of(r.len())).collect();
        let mut starts = Vec::with_capacity(counts.len());
        let mut total = 0;
        for count in &counts {
            starts.push(total);
            total += count;
        }
        let (wanted, importance) = (vec![0; tokens * total], vec![0.0; tokens * total]);
        Recording { blocks, counts, starts, wanted, importance, tokens: 0 }
    }

    /// Bytes that it takes, and that a policy which knows the future makes of it: twice at most.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        4 * 4 * self.wanted.len() as u64
    }

    fn token_len(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Whether no other token fits.
    #[must_use]
    pub fn is_full(&self) -> bool {
        (self.tokens + 1) * self.token_len() > self.wanted.len()
    }

    /// Where a token's blocks of a layer are.
    fn place(&self, token: usize, layer: LayerId) -> std::ops::Range<usize> {
        let start = token * self.token_len() + self.starts[layer.index()];
        start..start + self.counts[layer.index()]
    }

    /// What the token that is being recorded wants of a layer: to be filled, best first; and how much each matters.
    pub(crate) fn next(&mut self, layer: LayerId) -> (&mut [u32], &mut [f32]) {
        let place = self.place(self.tokens, layer);
        (&mut self.wanted[place.clone()], &mut self.importance[place])
    }

    /// The token is recorded.
    pub(crate) fn end_token(&mut self) {
        self.tokens += 1;
    }

    /// What a token wanted of a layer, best first; nothing behind the end.
    #[must_use]
    pub fn wanted(&self, token: usize, layer: LayerId) -> &[u32] {
        if token < self.tokens { &self.wanted[self.place(token, layer)] } else { &[] }
    }

    /// How much each of these matters.
    #[must_use]
    pub fn importance(&self, token: usize, layer: LayerId) -> &[f32] {
        if token < self.tokens { &self.importance[self.place(token, layer)] } else { &[] }
    }

    /// The same as sets, for policies that know the future.
    #[must_use]
    pub fn trace(&self) -> AccessTrace {
        let mut trace = AccessTrace::with_capacity(self.blocks.clone(), self.tokens);
        for token in 0..self.tokens {
            for (layer, range) in self.blocks.ranges().iter().enumerate() {
                let wanted = self.wanted(token, LayerId(layer as u16));
                trace.push(wanted.iter().map(|&b| BlockId(range.start + b)));
            }
        }
        trace
    }
}

/// Fills a recording while a dense engine decodes. Nothing is allocated after `new`.
#[derive(Debug)]
pub(crate) struct Recorder {
    recording: Recording,
    /// Whether this pass is recorded.
    active: bool,
    /// Of the layer's neurons.
    importance: Vec<f32>,
    keys: Vec<i32>,
    selection: Selection,
}

impl Recorder {
    pub(crate) fn new(map: &WeightMap, recording: Recording) -> Recorder {
        let neurons = map.layers.iter().map(|layer| layer.ffn.neurons).max().unwrap_or(0) as usize;
        let blocks = map.layers.iter().map(|layer| layer.ffn.blocks()).max().unwrap_or(0) as usize;
        Recorder {
            recording,
            active: false,
            importance: vec![0.0; neurons],
            keys: vec![0; blocks],
            selection: Selection::with_capacity(Kernels::detect(), blocks),
        }
    }

    /// A pass begins.
    pub(crate) fn begin(&mut self, decode: bool) {
        self.active = decode && !self.recording.is_full();
    }

    /// Some of a layer's neurons are about to run.
    pub(crate) fn blocks(
        &mut self,
        backend: &mut dyn ComputeBackend,
        layer: LayerId,
        blocks: &NeuronBlocks<'_>,
    ) {
        if !self.active {
            return;
        }
        let first = blocks.first_neuron as usize;
        let importance = &mut self.importance[first..][..blocks.neurons as usize];
        backend.importance(layer, blocks, importance);
    }

    /// All of them have run.
    pub(crate) fn layer(&mut self, layer: LayerId, ffn: &FfnExtent) {
        if !self.active {
            return;
        }
        let keys = &mut self.keys[..ffn.blocks() as usize];
        let of_block = self.importance[..ffn.neurons as usize].chunks(ffn.block_neurons as usize);
        for (key, of_block) in keys.iter_mut().zip(of_block.clone()) {
            *key = float_key(squares(of_block));
        }
        let (wanted, importance) = self.recording.next(layer);
        wanted.copy_from_slice(self.selection.best(keys, wanted.len()));
        for (importance, &block) in importance.iter_mut().zip(&*wanted) {
            let neurons = block as usize * ffn.block_neurons as usize;
            let of_block = self.importance[..ffn.neurons as usize][neurons..].iter();
            *importance = squares(of_block.take(ffn.block_neurons as usize)).sqrt();
        }
    }

    /// The token is done.
    pub(crate) fn token(&mut self) {
        if self.active {
            self.recording.end_token();
        }
    }

    pub(crate) fn finish(self) -> Recording {
        self.recording
    }
}

fn squares<'a>(importance: impl IntoIterator<Item = &'a f32>) -> f32 {
    importance.into_iter().map(|x| x * x).sum()
}
