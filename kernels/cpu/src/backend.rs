//! [`CpuBackend`]: what it owns, and which kernel each call goes to.

use crate::attention::Cache;
use crate::buffer::SharedMut;
use crate::error::{CpuError, Kind};
use crate::memory::{Buffers, Limits, Plan};
use crate::simd::{Kernels, Ops};
use crate::worker::Pool;
use ls_bundle::ids::{ByteCount, LayerId};
use ls_bundle::model::{ModelConfig, QUANT_GROUP, Vectors};
use ls_compute::{
    Asked, BaseNeurons, BaseTables, ComputeBackend, Current, KvDType, MatrixRows, NeuronBlocks,
    Outputs, Pass, Projection, ProjectionPart, Shape, is_chosen, rope_frequencies,
};

/// Tokens of an item of the regions that treat tokens by themselves: norms, rotation.
pub(crate) const ITEM_TOKENS: usize = 8;

/// A model's activations and KV cache, and the threads that compute them.
#[derive(Debug)]
pub struct CpuBackend {
    pub(crate) shape: Shape,
    pub(crate) limits: Limits,
    pub(crate) norm_epsilon: f32,
    pub(crate) vectors: Vectors,
    /// Of the rotation; head_dim / 2.
    frequencies: Vec<f32>,
    pub(crate) ops: &'static Ops,
    pub(crate) pool: Pool,
    pub(crate) cache: Cache,
    pub(crate) buffers: Buffers,
    /// Floats of one thread's scratch.
    pub(crate) scratch: usize,
    pub(crate) pass: Current,
    pub(crate) ffn: Ffn,
}

/// What a backend is made for.
#[derive(Clone, Copy, Debug)]
pub struct CpuOptions {
    /// Positions that the KV cache holds, at least 1.
    pub context: u32,
    /// Most tokens of a pass, at least 1.
    pub pass_tokens: u32,
    /// Most scored tokens of a pass.
    pub scored_tokens: u32,
    /// Threads that compute, the caller's included; at least 1.
    pub threads: usize,
    /// Format of the KV cache; Q8_0 wants heads of a multiple of 32.
    pub kv_cache: KvDType,
    /// Instruction set.
    pub kernels: Kernels,
}

/// What has been computed of a layer's FFN beside a base.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ffn {
    /// The layer and the number of neurons whose activations are estimated.
    estimated: Option<(LayerId, usize)>,
    /// Whether there are sums of stand-ins.
    pub(crate) stand_ins: bool,
}

impl CpuBackend {
    /// Makes a backend for one model; allocates everything and starts `threads - 1` threads.
    ///
    /// Fails if memory or threads are refused, if the vectors do not fit the model, or if the cache's format does not.
    pub fn new(
        config: &ModelConfig,
        vectors: Vectors,
        options: &CpuOptions,
    ) -> Result<CpuBackend, CpuError> {
        check_shapes(config, &vectors)?;
        let (limits, kernels) = (Limits::of(options), options.kernels);
        for (count, name) in [
            (limits.context, "position of context"),
            (limits.pass_tokens, "token a pass"),
            (limits.threads, "thread"),
        ] {
            if count == 0 {
                return Err(Kind::Zero(name).into());
            }
        }
        let head_dim = config.head_dim;
        if options.kv_cache == KvDType::Q8_0 && !head_dim.is_multiple_of(QUANT_GROUP) {
            return Err(Kind::KvHeads { head_dim }.into());
        }
        let shape = Shape::of(config);
        let plan = Plan::new(&shape, &limits);
        Ok(CpuBackend {
            shape,
            limits,
            norm_epsilon: config.norm_epsilon,
            vectors,
            frequencies: rope_frequencies(&config.rope, config.head_dim),
            ops: kernels.0,
            pool: Pool::new(limits.threads).map_err(Kind::from)?,
            cache: Cache::allocate(&shape, limits.context, options.kv_cache).map_err(Kind::from)?,
            buffers: plan.allocate().map_err(Kind::from)?,
            scratch: plan.scratch,
            pass: Current::NONE,
            ffn: Ffn::default(),
        })
    }

    /// Bytes that [`new`](Self::new) allocates with the same options, but for the KV cache
    /// ([`kv_bytes`](crate::kv_bytes)), the stacks of the threads and a few hundred bytes of bookkeeping. `vectors`
    /// are the caller's.
    #[must_use]
    pub fn memory(config: &ModelConfig, options: &CpuOptions) -> ByteCount {
        let buffers = Plan::new(&Shape::of(config), &Limits::of(options)).bytes() as u64;
        ByteCount(buffers + 2 * u64::from(config.head_dim))
    }

    /// Name of the instruction set in use.
    #[must_use]
    pub fn kernels(&self) -> &'static str {
        self.ops.name
    }

    /// h = RMSNorm(x) * gain for tokens `first .. first + count`; token `first` becomes row 0 of h.
    fn norm(&mut self, gain: Gain, first: usize, count: usize) {
        let hidden = self.shape.hidden;
        let gain = match gain {
            Gain::Attention(layer) => &self.vectors.layers[layer.index()].attn_norm,
            Gain::Ffn(layer) => &self.vectors.layers[layer.index()].mlp_norm,
            Gain::Final => &self.vectors.final_norm,
        };
        let (ops, epsilon) = (self.ops, self.norm_epsilon);
        let x = &self.buffers.x[first * hidden..][..count * hidden];
        let h = SharedMut::new(&mut self.buffers.h[..count * hidden]);
        self.pool.run(count.div_ceil(ITEM_TOKENS), &|_, item| {
            let begin = item * ITEM_TOKENS * hidden;
            let len = (ITEM_TOKENS * hidden).min(x.len() - begin);
            // SAFETY: items have disjoint tokens.
            let h = unsafe { h.slice(begin, len) };
            for (x, h) in x[begin..][..len].chunks(hidden).zip(h.chunks_mut(hidden)) {
                let scale = (ops.inverse_rms)(x, epsilon);
                for ((h, x), gain) in h.iter_mut().zip(x).zip(gain) {
                    *h = x * scale * gain;
                }
            }
        });
    }
}

/// Which RMSNorm.
enum Gain {
    Attention(LayerId),
    Ffn(LayerId),
    Final,
}

/// The vectors have the lengths that the model says.
fn check_shapes(config: &ModelConfig, vectors: &Vectors) -> Result<(), Kind> {
    let (heads, kv_heads, head_dim) = (config.heads, config.kv_heads, config.head_dim);
    if kv_heads == 0 || heads % kv_heads != 0 || heads == 0 || head_dim == 0 || head_dim % 2 != 0 {
        return Err(Kind::Heads { heads, kv_heads, head_dim });
    }
    let wanted = usize::from(config.layers);
    if vectors.layers.len() != wanted {
        return Err(Kind::Layers { found: vectors.layers.len(), wanted });
    }
    let given = |is_there: bool, len: u32| if is_there { len } else { 0 };
    let (bias, norm) = (config.qkv_bias, config.qk_norm);
    for (layer, v) in vectors.layers.iter().enumerate() {
        for (name, vector, wanted) in [
            ("attn_norm", &v.attn_norm, config.hidden),
            ("mlp_norm", &v.mlp_norm, config.hidden),
            ("q_bias", &v.q_bias, given(bias, config.query_width())),
            ("k_bias", &v.k_bias, given(bias, config.kv_width())),
            ("v_bias", &v.v_bias, given(bias, config.kv_width())),
            ("q_norm", &v.q_norm, given(norm, head_dim)),
            ("k_norm", &v.k_norm, given(norm, head_dim)),
            ("final_norm", &vectors.final_norm, config.hidden),
        ] {
            let (found, wanted) = (vector.len(), wanted as usize);
            if found != wanted {
                return Err(Kind::Vector { name, layer, found, wanted });
            }
        }
    }
    Ok(())
}

impl ComputeBackend for CpuBackend {
    fn begin(&mut self, pass: Pass<'_>) {
        self.pass = Current::of(&pass, self.limits.of_pass());
        if let Outputs::Score { targets, .. } = pass.outputs {
            self.buffers.targets[..targets.len()].copy_from_slice(targets);
        }
        self.pass.write_turns(&self.frequencies, &mut self.buffers.turns);
    }

    fn embed(&mut self, index: u32, row: MatrixRows<'_>) {
        let hidden = self.shape.hidden;
        let x = &mut self.buffers.x[index as usize * hidden..][..hidden];
        assert_eq!((row.cols as usize, row.rows), (hidden, 1), "one row of the embedding table");
        (self.ops.rows(row.dtype).unpack)(row.bytes, hidden, 0, x);
    }

    fn attn_input(&mut self, layer: LayerId) {
        self.norm(Gain::Attention(layer), 0, self.pass.tokens as usize);
    }

    fn project(&mut self, _layer: LayerId, parts: &[ProjectionPart<'_>]) {
        check_parts(parts);
        if self.pass.decode { self.project_one(parts) } else { self.project_many(parts) }
    }

    fn attend(&mut self, layer: LayerId) {
        self.rotate_and_append(layer);
        if self.pass.decode { self.attend_one(layer) } else { self.attend_many(layer) }
    }

    fn mlp_input(&mut self, layer: LayerId) {
        self.norm(Gain::Ffn(layer), 0, self.pass.tokens as usize);
        self.ffn = Ffn::default();
        if self.pass.decode {
            self.buffers.lanes.fill(0.0);
        }
    }

    fn mlp(&mut self, _layer: LayerId, blocks: &NeuronBlocks<'_>) {
        assert_eq!(blocks.hidden as usize, self.shape.hidden, "width of a neuron");
        if self.pass.decode {
            self.mlp_one(std::slice::from_ref(blocks));
        } else {
            self.mlp_many(blocks);
        }
    }

    fn mlp_blocks(&mut self, _layer: LayerId, blocks: &[NeuronBlocks<'_>]) {
        assert!(self.pass.decode, "single blocks are for decode");
        self.mlp_one(blocks);
    }

    fn feature(&self, out: &mut [f32]) {
        assert!(self.pass.decode, "a feature is one token's");
        self.feature_one(out);
    }

    fn importance(&mut self, _layer: LayerId, blocks: &NeuronBlocks<'_>, out: &mut [f32]) {
        assert!(self.pass.decode, "importance is one token's");
        self.importance_one(blocks, out);
    }

    fn estimate(&mut self, layer: LayerId, base: &BaseNeurons<'_>, tables: &BaseTables<'_>) {
        self.pass.check_base(&self.shape, base, tables);
        self.estimate_one(base, tables);
        self.ffn.estimated = Some((layer, base.neurons()));
    }

    fn scores(&self) -> &[f32] {
        let (_, neurons) = self.ffn.estimated.expect("`estimate` has been called");
        &self.buffers.scores[..neurons]
    }

    fn stand_in(
        &mut self,
        layer: LayerId,
        base: &BaseNeurons<'_>,
        tables: &BaseTables<'_>,
        chosen: &[u64],
    ) {
        self.pass.check_base(&self.shape, base, tables);
        assert_eq!(self.ffn.estimated, Some((layer, base.neurons())), "`estimate` comes before");
        assert!(!self.ffn.stand_ins, "stand-ins are added once");
        if (0..base.neurons()).any(|neuron| !is_chosen(chosen, neuron)) {
            self.stand_in_one(base, tables, chosen);
            self.ffn.stand_ins = true;
        }
    }

    fn mlp_output(&mut self, _layer: LayerId) {
        // Prefill has added to the residual itself.
        if self.pass.decode {
            self.add_lanes();
            if self.ffn.stand_ins {
                self.add_stand_ins();
            }
        }
    }

    fn head_input(&mut self) {
        match self.pass.asked {
            Asked::Nothing => {}
            Asked::LastLogits => self.norm(Gain::Final, self.pass.tokens as usize - 1, 1),
            Asked::Scores { first, count } => {
                self.norm(Gain::Final, first as usize, count as usize);
                self.begin_scores(count as usize);
            }
        }
    }

    fn head(&mut self, rows: &MatrixRows<'_>) {
        assert_eq!(rows.cols as usize, self.shape.hidden, "width of the head");
        match self.pass.asked {
            Asked::Nothing => {}
            Asked::LastLogits if self.pass.decode => self.head_one(rows),
            Asked::LastLogits => self.head_last(rows),
            Asked::Scores { count, .. } => self.head_scores(rows, count as usize),
        }
    }

    fn logits(&self) -> &[f32] {
        self.pass.check_logits();
        &self.buffers.logits
    }

    fn nll(&self) -> &[f32] {
        &self.buffers.nll[..self.pass.scored()]
    }
}

/// Threads work on all parts of a call at the same time: none may write what another reads or writes.
fn check_parts(parts: &[ProjectionPart<'_>]) {
    let mut ends = [0; 4];
    for part in parts {
        let output = |part: &ProjectionPart<'_>| part.projection == Projection::Output;
        assert_eq!(output(part), output(&parts[0]), "q, k, v and o parts do not mix");
        let end = &mut ends[part.projection as usize];
        assert!(part.rows.first_row >= *end, "parts of a matrix ascend");
        *end = part.rows.first_row + part.rows.rows;
    }
}

/// Row `index` of `rows`.
pub(crate) fn matrix_row<'a>(rows: &MatrixRows<'a>, index: usize) -> &'a [u8] {
    let len = rows.dtype.row_bytes(rows.cols) as usize;
    &rows.bytes[index * len..][..len]
}

/// Gate, up and down row of a neuron.
pub(crate) fn neuron_rows<'a>(blocks: &NeuronBlocks<'a>, index: usize) -> [&'a [u8]; 3] {
    let bytes = blocks.neuron(index as u32);
    let len = bytes.len() / 3;
    [&bytes[..len], &bytes[len..2 * len], &bytes[2 * len..]]
}
