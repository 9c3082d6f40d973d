//! How much memory a backend takes, as arithmetic: [`Plan`] is what [`CpuBackend::new`](crate::CpuBackend::new)
//! allocates and what [`CpuBackend::memory`](crate::CpuBackend::memory) reports.

use crate::attention::{self, KEY_CHUNK};
use crate::backend::CpuOptions;
use crate::buffer::{Buffer, buffer_bytes};
use crate::prefill::{ACTIVATION_NEURONS, DOWN_COLUMNS, TOKEN_BLOCK};
use crate::score::{SCORE_ROWS, SCORE_TOKENS, SCORE_WAVE};
use crate::simd::{PANEL, QuantBlock, block_count};
use ls_bundle::ids::ByteCount;
use ls_bundle::model::ModelConfig;
use ls_bundle::tiles::TILE;
use ls_compute::{KvDType, PassLimits, Shape};
use ls_sync::{AllocateError, Slot};

/// Accumulators of decode's FFN.
pub(crate) const LANES: usize = 16;

/// What a backend is made for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Positions of the KV cache.
    pub(crate) context: usize,
    /// Tokens of a pass.
    pub(crate) pass_tokens: usize,
    /// Scored tokens of a pass.
    pub(crate) scored_tokens: usize,
    pub(crate) threads: usize,
}

impl Limits {
    pub(crate) fn of(options: &CpuOptions) -> Limits {
        Limits {
            context: options.context as usize,
            pass_tokens: options.pass_tokens as usize,
            scored_tokens: options.scored_tokens as usize,
            threads: options.threads,
        }
    }

    /// Of a pass.
    pub(crate) fn of_pass(&self) -> PassLimits {
        PassLimits {
            context: self.context as u32,
            pass_tokens: self.pass_tokens as u32,
            scored_tokens: self.scored_tokens as u32,
        }
    }
}

/// Bytes of the KV cache: a key and a value for every layer, key head and position.
#[must_use]
pub fn kv_bytes(config: &ModelConfig, context: u32, kv_cache: KvDType) -> ByteCount {
    let rows = 2 * u64::from(config.layers) * u64::from(config.kv_heads) * u64::from(context);
    ByteCount(rows * kv_cache.dtype().row_bytes(config.head_dim))
}

/// Elements of each buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    x: usize,
    q: usize,
    kv: usize,
    turns: usize,
    quants: usize,
    lanes: usize,
    estimates: usize,
    factors: usize,
    stand_ins: usize,
    activations: usize,
    partials: usize,
    logits: usize,
    scored: usize,
    chunk_sums: usize,
    /// Of one thread.
    pub(crate) scratch: usize,
    threads: usize,
}

/// The buffers.
#[derive(Debug)]
pub(crate) struct Buffers {
    /// Residual; pass_tokens x hidden.
    pub(crate) x: Buffer<f32>,
    /// Normed residual; pass_tokens x hidden.
    pub(crate) h: Buffer<f32>,
    /// Queries, then the attention's result; pass_tokens x query_width.
    pub(crate) q: Buffer<f32>,
    /// Keys; pass_tokens x kv_width.
    pub(crate) k: Buffer<f32>,
    /// Values; pass_tokens x kv_width.
    pub(crate) v: Buffer<f32>,
    /// Cosines, then sines of the rotation; pass_tokens x head_dim.
    pub(crate) turns: Buffer<f32>,
    /// What decode multiplies quantised weights with: h, or the attention's result; max(hidden, query_width).
    pub(crate) quants: Buffer<QuantBlock>,
    /// Decode's FFN sums; LANES x hidden.
    pub(crate) lanes: Buffer<f32>,
    /// The sums of its stand-ins; hidden.
    pub(crate) stand_ins: Buffer<f32>,
    /// What their neurons' down columns are multiplied with; ffn, in whole tiles.
    pub(crate) factors: Buffer<f32>,
    /// Activations that decode estimates; ffn.
    pub(crate) estimates: Buffer<f32>,
    /// What their errors are expected to be; ffn.
    pub(crate) scores: Buffer<f32>,
    /// Prefill's SwiGLU; min(pass_tokens, TOKEN_BLOCK) x ACTIVATION_NEURONS.
    pub(crate) activations: Buffer<f32>,
    /// Decode's attention over chunks of keys; kv_heads x chunks x group x (head_dim + 2).
    pub(crate) partials: Buffer<f32>,
    /// vocab_size.
    pub(crate) logits: Buffer<f32>,
    /// Negative log-likelihoods; scored_tokens.
    pub(crate) nll: Buffer<f32>,
    /// Logits of the targets; scored_tokens.
    pub(crate) target_logits: Buffer<f32>,
    /// The targets; scored_tokens.
    pub(crate) targets: Buffer<u32>,
    /// Running maximum and sum of exponentials; scored_tokens.
    pub(crate) sums: Buffer<[f64; 2]>,
    /// The same for some chunks of rows of the head; scored_tokens x SCORE_WAVE.
    pub(crate) chunk_sums: Buffer<[f32; 2]>,
    /// threads x `Plan::scratch`.
    pub(crate) scratch: Buffer<f32>,
}

impl Plan {
    pub(crate) fn new(shape: &Shape, limits: &Limits) -> Plan {
        let Limits { context, pass_tokens, scored_tokens, threads } = *limits;
        let block = TOKEN_BLOCK.min(pass_tokens);
        let scored_block = SCORE_TOKENS.min(scored_tokens);
        // What each kind of item needs for itself; see where it runs.
        let scratch = [
            PANEL * shape.hidden.max(shape.query_width),
            PANEL * shape.hidden + PANEL * block,
            DOWN_COLUMNS * ACTIVATION_NEURONS,
            PANEL * shape.hidden + SCORE_ROWS * scored_block,
            attention::scratch(shape),
            shape.group() * KEY_CHUNK,
        ];
        Plan {
            x: pass_tokens * shape.hidden,
            q: pass_tokens * shape.query_width,
            kv: pass_tokens * shape.kv_width,
            turns: pass_tokens * shape.head_dim,
            quants: block_count(shape.hidden.max(shape.query_width)),
            lanes: LANES * shape.hidden,
            estimates: shape.ffn,
            factors: shape.ffn.next_multiple_of(TILE),
            stand_ins: shape.hidden,
            activations: block * ACTIVATION_NEURONS,
            partials: shape.heads * context.div_ceil(KEY_CHUNK) * (shape.head_dim + 2),
            logits: shape.vocab,
            scored: scored_tokens,
            chunk_sums: scored_tokens * SCORE_WAVE,
            scratch: scratch.into_iter().fold(0, usize::max).next_multiple_of(PANEL),
            threads,
        }
    }

    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> usize {
        let floats = [self.x, self.x, self.q, self.kv, self.kv, self.turns, self.lanes]
            .into_iter()
            .chain([self.stand_ins, self.factors, self.estimates, self.estimates])
            .chain([self.activations, self.partials, self.logits, self.scored, self.scored])
            .chain([self.threads * self.scratch]);
        floats.map(buffer_bytes::<f32>).sum::<usize>()
            + buffer_bytes::<QuantBlock>(self.quants)
            + buffer_bytes::<u32>(self.scored)
            + buffer_bytes::<[f64; 2]>(self.scored)
            + buffer_bytes::<[f32; 2]>(self.chunk_sums)
    }

    /// Maps the buffers.
    pub(crate) fn allocate(&self) -> Result<Buffers, AllocateError> {
        let mut slot = Slot::allocate(self.bytes())?;
        let slot = &mut slot;
        Ok(Buffers {
            x: Buffer::take(slot, self.x),
            h: Buffer::take(slot, self.x),
            q: Buffer::take(slot, self.q),
            k: Buffer::take(slot, self.kv),
            v: Buffer::take(slot, self.kv),
            turns: Buffer::take(slot, self.turns),
            quants: Buffer::take(slot, self.quants),
            lanes: Buffer::take(slot, self.lanes),
            stand_ins: Buffer::take(slot, self.stand_ins),
            factors: Buffer::take(slot, self.factors),
            estimates: Buffer::take(slot, self.estimates),
            scores: Buffer::take(slot, self.estimates),
            activations: Buffer::take(slot, self.activations),
            partials: Buffer::take(slot, self.partials),
            logits: Buffer::take(slot, self.logits),
            nll: Buffer::take(slot, self.scored),
            target_logits: Buffer::take(slot, self.scored),
            targets: Buffer::take(slot, self.scored),
            sums: Buffer::take(slot, self.scored),
            chunk_sums: Buffer::take(slot, self.chunk_sums),
            scratch: Buffer::take(slot, self.threads * self.scratch),
        })
    }
}
