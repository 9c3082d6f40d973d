//! [`CudaBackend`]: what it owns, and which kernel each call starts.
//!
//! Calls return when their work is queued: results are waited for where they are read, and by the next pass.

use crate::CudaError;
use crate::buffers::{Buffers, DeviceVectors, Plan};
use crate::device::{Device, Function, Grid, args};
use crate::error::Kind;
use crate::launch::{Loads, MlpKernel, dtype_name};
use crate::slots::Staged;
use crate::weights::Weights;
use ls_bundle::ids::{ByteCount, LayerId};
use ls_bundle::model::{DType, FfnExtent, ModelConfig, QUANT_GROUP, Vectors};
use ls_compute::{
    Asked, BaseNeurons, BaseTables, ComputeBackend, Current, KvDType, MatrixRows, NeuronBlocks,
    Outputs, Pass, PassLimits, Projection, ProjectionPart, Shape, is_chosen, rope_frequencies,
};

/// What a backend is made for.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Positions that the KV cache holds, at least 1.
    pub context: u32,
    /// Most tokens of a pass, at least 1.
    pub pass_tokens: u32,
    /// Most scored tokens of a pass.
    pub scored_tokens: u32,
    /// Format of the KV cache; Q8_0 wants heads of a multiple of 32.
    pub kv_cache: KvDType,
    /// How the FFN's kernel reads weights; None: the device's fastest.
    pub loads: Option<Loads>,
    /// Whether kept weights are read where they are; None: if the device has the host's memory.
    pub in_place: Option<bool>,
    /// Whether decode's FFN runs in stages on [lent](ComputeBackend::lend) slots: sums are then added with atomics, and
    /// their last bits differ from run to run.
    pub staged: bool,
}

/// The kernels of one number format.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OfDType {
    pub(crate) embed: Function,
    pub(crate) matvec: Function,
    pub(crate) multiply: Function,
    pub(crate) swiglu: Function,
    pub(crate) weigh: Function,
    pub(crate) importance: Function,
}

/// All kernels but the FFN's.
#[derive(Debug)]
pub(crate) struct Functions {
    of: [OfDType; 3],
    pub(crate) norm: Function,
    pub(crate) rotate: Function,
    pub(crate) attend: Function,
    pub(crate) merge: Function,
    pub(crate) add_lanes: Function,
    pub(crate) score: Function,
    pub(crate) estimate: Function,
    pub(crate) stand_in: Function,
}

impl Functions {
    fn load(device: &Device, shape: &Shape) -> Result<Functions, Kind> {
        let vector_bytes = 4 * shape.hidden.max(shape.query_width) as u32;
        let of = |dtype| {
            let get = |kernel: &str, shared| {
                device.function("model", &format!("{kernel}_{}", dtype_name(dtype)), shared)
            };
            Ok::<_, Kind>(OfDType {
                embed: get("embed", 0)?,
                matvec: get("matvec", vector_bytes)?,
                multiply: get("multiply", 0)?,
                swiglu: get("swiglu", 0)?,
                weigh: get("weigh", 0)?,
                importance: get("importance", 0)?,
            })
        };
        Ok(Functions {
            of: [of(DType::F16)?, of(DType::Q8_0)?, of(DType::Q4_0)?],
            norm: device.function("model", "rms_norm", 0)?,
            rotate: device.function("attention", "rotate", 0)?,
            attend: device.function(
                "attention",
                "attend",
                crate::attention::shared_bytes(shape),
            )?,
            merge: device.function("attention", "merge", 0)?,
            add_lanes: device.function("model", "add_lanes", 0)?,
            score: device.function("model", "score", 0)?,
            estimate: device.function("base", "estimate", 4 * shape.hidden as u32)?,
            stand_in: device.function("base", "stand_in", 0)?,
        })
    }

    pub(crate) fn of(&self, dtype: DType) -> &OfDType {
        match dtype {
            DType::F16 => &self.of[0],
            DType::Q8_0 => &self.of[1],
            DType::Q4_0 => &self.of[2],
        }
    }
}

/// What has been computed of a layer's FFN.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ffn {
    /// Blocks that the kernel was given: what decides which sum a block adds to.
    pub(crate) blocks: u32,
    /// The layer and the number of neurons whose activations are estimated.
    pub(crate) estimated: Option<(LayerId, usize)>,
    /// Whether there are sums of stand-ins.
    pub(crate) stand_ins: bool,
    /// Whether these, and the sums of blocks so far, are in the residual already.
    pub(crate) settled: bool,
}

/// A model's activations and KV cache on a device.
#[derive(Debug)]
pub struct CudaBackend {
    pub(crate) device: Device,
    pub(crate) shape: Shape,
    pub(crate) options: CudaOptions,
    pub(crate) norm_epsilon: f32,
    pub(crate) vectors: DeviceVectors,
    frequencies: Vec<f32>,
    pub(crate) functions: Functions,
    pub(crate) weights: Weights,
    pub(crate) buffers: Buffers,
    pub(crate) pass: Current,
    /// Rows of the embedding table that wait in host memory: their format and the bytes from one to the next.
    rows: Option<(DType, u32)>,
    pub(crate) ffn: Ffn,
    /// The FFN's kernel for the shape that it was last asked for: format, neurons and bytes of a block.
    pub(crate) mlp: Option<((DType, u32, u32), MlpKernel)>,
    /// Addresses of blocks on their way to a launch.
    pub(crate) list: Vec<u64>,
    /// Decode's FFN on the engine's slots.
    pub(crate) staged: Option<Staged>,
}

impl CudaBackend {
    /// Makes a backend for one model; allocates everything.
    ///
    /// # Errors
    /// If the device has too little memory, if the vectors do not fit the model, or if this backend cannot run it.
    pub fn new(
        device: &Device,
        config: &ModelConfig,
        vectors: &Vectors,
        options: &CudaOptions,
    ) -> Result<CudaBackend, CudaError> {
        check_model(config, options)?;
        let shape = Shape::of(config);
        let frequencies = rope_frequencies(&config.rope, config.head_dim);
        let backend = CudaBackend {
            shape,
            options: *options,
            norm_epsilon: config.norm_epsilon,
            vectors: DeviceVectors::new(device, config, vectors)?,
            frequencies,
            functions: Functions::load(device, &shape)?,
            weights: Weights::new(device, options.in_place.unwrap_or(device.info().unified))?,
            buffers: Plan::new(config, options).allocate(device, shape.hidden)?,
            pass: Current::NONE,
            rows: None,
            ffn: Ffn::default(),
            mlp: None,
            list: Vec::with_capacity(crate::ffn::MAX_LIST),
            staged: None,
            device: device.clone(),
        };
        device.wait()?;
        Ok(backend)
    }

    /// Bytes that [`new`](Self::new) allocates with the same options, on the device and pinned on the host. What is
    /// [kept](ComputeBackend::keep) comes on top, on the device.
    #[must_use]
    pub fn memory(config: &ModelConfig, options: &CudaOptions) -> (ByteCount, ByteCount) {
        Plan::new(config, options).bytes()
    }

    /// Bytes of weights that the device has a copy of, or room for.
    #[must_use]
    pub fn kept(&self) -> ByteCount {
        let lent = self.staged.as_ref().map_or(0, Staged::copied_bytes);
        ByteCount(self.weights.copied_bytes() + lent)
    }

    /// Starts a kernel.
    ///
    /// # Safety
    /// As [`Device::launch`].
    pub(crate) unsafe fn launch(
        &self,
        function: Function,
        grid: Grid,
        args: &mut [*mut std::ffi::c_void],
    ) {
        // SAFETY: the caller's guarantee.
        done(unsafe { self.device.launch(function, grid, args) });
    }

    /// h = RMSNorm(x) * gain for tokens `first .. first + count`; token `first` becomes row 0 of h.
    fn norm(&mut self, gain: u64, first: u32, count: u32) {
        let hidden = self.shape.hidden;
        let x = self.buffers.x.address() + u64::from(first) * hidden as u64 * 4;
        let (h, epsilon, hidden) = (self.buffers.h.address(), self.norm_epsilon, hidden as u32);
        let grid = Grid::new(count, 256);
        // SAFETY: x and h hold pass_tokens rows, gain one.
        unsafe { self.launch(self.functions.norm, grid, args!(x, gain, h, hidden, epsilon)) };
    }

    /// Unpacks the rows of the embedding table that the pass has been given.
    fn take_rows(&mut self) {
        let Some((dtype, stride)) = self.rows.take() else { return };
        let (rows, x) = (self.buffers.rows.address(), self.buffers.x.address());
        let hidden = self.shape.hidden as u32;
        let grid = Grid::new(self.pass.tokens, 128);
        let embed = self.functions.of(dtype).embed;
        // SAFETY: as many rows as tokens, of `stride` bytes; x has room for them.
        unsafe { self.launch(embed, grid, args!(rows, stride, hidden, x)) };
    }
}

/// The result of something that only fails when the device has failed: nothing can go on then.
pub(crate) fn done<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

fn check_model(config: &ModelConfig, options: &CudaOptions) -> Result<(), Kind> {
    for (count, name) in
        [(options.context, "position of context"), (options.pass_tokens, "token a pass")]
    {
        if count == 0 {
            return Err(Kind::Zero(name));
        }
    }
    crate::launch::check_shape(config.hidden, 1)?;
    let (heads, kv_heads, head_dim) = (config.heads, config.kv_heads, config.head_dim);
    if kv_heads == 0 || heads % kv_heads != 0 || head_dim == 0 || head_dim % 2 != 0 {
        let shape = format!("{heads} query heads of width {head_dim} on {kv_heads} key heads");
        return Err(Kind::Unsupported(shape));
    }
    if !config.query_width().is_multiple_of(8) {
        return Err(Kind::Unsupported(format!("queries {} wide", config.query_width())));
    }
    if options.kv_cache == KvDType::Q8_0 && !head_dim.is_multiple_of(QUANT_GROUP) {
        return Err(Kind::Unsupported(format!("a KV cache in q8_0 for heads {head_dim} wide")));
    }
    Ok(())
}

impl ComputeBackend for CudaBackend {
    fn keep(&mut self, bytes: &[u8]) -> bool {
        self.weights.keep(bytes).is_ok()
    }

    fn lend(&mut self, slots: &[u8], slot_bytes: usize, ffn: &FfnExtent) -> bool {
        if self.options.staged && slots.len() >= slot_bytes {
            let info = self.device.info();
            let loads = self.options.loads.unwrap_or(Loads::best(info.capability));
            let in_place = self.options.in_place.unwrap_or(info.unified);
            let slots = (slots, slot_bytes);
            self.staged = Staged::new(&self.device, slots, ffn, loads, in_place).ok();
        }
        self.staged.is_some()
    }

    fn running(&self) -> usize {
        self.staged.as_ref().map_or(0, Staged::running)
    }

    fn wait_blocks(&mut self) {
        self.staged.iter().for_each(|staged| done(staged.wait_blocks()));
    }

    fn begin(&mut self, pass: Pass<'_>) {
        done(self.device.enter());
        // It is open only if the pass before ended in an error.
        self.close_stages();
        // What the last pass reads in place is written below.
        done(self.device.wait());
        let CudaOptions { context, pass_tokens, scored_tokens, .. } = self.options;
        self.pass = Current::of(&pass, PassLimits { context, pass_tokens, scored_tokens });
        self.rows = None;
        if let Outputs::Score { targets, .. } = pass.outputs {
            let targets = bytemuck::cast_slice(targets);
            // SAFETY: the stream is idle.
            let to = unsafe { self.buffers.targets.bytes_mut() };
            to[..targets.len()].copy_from_slice(targets);
        }
        // SAFETY: the stream is idle.
        let turns = bytemuck::cast_slice_mut(unsafe { self.buffers.turns.bytes_mut() });
        self.pass.write_turns(&self.frequencies, turns);
    }

    fn embed(&mut self, index: u32, row: MatrixRows<'_>) {
        assert_eq!((row.cols as usize, row.rows), (self.shape.hidden, 1), "one row of the table");
        let len = row.dtype.row_bytes(row.cols) as usize;
        // Rows are unpacked with the alignment of weights.
        let stride = len.next_multiple_of(16);
        let at = index as usize * stride;
        // SAFETY: nothing that reads them is queued before the pass's first layer.
        let rows = unsafe { self.buffers.rows.bytes_mut() };
        rows[at..at + len].copy_from_slice(row.bytes);
        self.rows = Some((row.dtype, stride as u32));
    }

    fn attn_input(&mut self, layer: LayerId) {
        self.take_rows();
        self.norm(self.vectors.layers[layer.index()].attn_norm, 0, self.pass.tokens);
    }

    fn project(&mut self, _layer: LayerId, parts: &[ProjectionPart<'_>]) {
        for part in parts {
            let b = &self.buffers;
            let (from, to, width, add) = match part.projection {
                Projection::Query => (&b.h, &b.q, self.shape.query_width, false),
                Projection::Key => (&b.h, &b.k, self.shape.kv_width, false),
                Projection::Value => (&b.h, &b.v, self.shape.kv_width, false),
                Projection::Output => (&b.q, &b.x, self.shape.hidden, true),
            };
            let (from, to) = (from.address(), to.address());
            if self.pass.decode {
                self.matvec(&part.rows, from, to, add);
            } else {
                self.multiply(&part.rows, from, self.pass.tokens, (to, width), add);
            }
        }
    }

    fn attend(&mut self, layer: LayerId) {
        self.rotate_and_append(layer);
        self.attend_all(layer);
    }

    fn mlp_input(&mut self, layer: LayerId) {
        self.close_stages();
        self.norm(self.vectors.layers[layer.index()].mlp_norm, 0, self.pass.tokens);
        self.ffn = Ffn::default();
    }

    fn mlp(&mut self, _layer: LayerId, blocks: &NeuronBlocks<'_>) {
        assert_eq!(blocks.hidden as usize, self.shape.hidden, "width of a neuron");
        self.close_stages();
        if self.pass.decode { self.mlp_one(blocks) } else { self.mlp_many(blocks) }
    }

    fn mlp_blocks(&mut self, layer: LayerId, blocks: &[NeuronBlocks<'_>]) {
        assert!(self.pass.decode, "single blocks are for decode");
        if !self.mlp_stage(layer, blocks) {
            self.close_stages();
            self.mlp_list(blocks);
        }
    }

    fn feature(&self, out: &mut [f32]) {
        assert!(self.pass.decode, "a feature is one token's");
        if let Some(staged) = self.staged.as_ref().filter(|staged| staged.is_open()) {
            done(staged.sum(out));
            return;
        }
        self.add_lanes(self.buffers.host_feature.address());
        done(self.device.wait());
        // SAFETY: the stream is idle.
        let feature = bytemuck::cast_slice(unsafe { self.buffers.host_feature.bytes() });
        out.copy_from_slice(&feature[..self.shape.hidden]);
    }

    fn importance(&mut self, _layer: LayerId, blocks: &NeuronBlocks<'_>, out: &mut [f32]) {
        assert!(self.pass.decode, "importance is one token's");
        assert_eq!(out.len(), blocks.neurons as usize, "a number for each neuron");
        self.close_stages();
        self.importance_one(blocks);
        done(self.device.wait());
        // SAFETY: the stream is idle.
        let all = bytemuck::cast_slice(unsafe { self.buffers.host_importance.bytes() });
        out.copy_from_slice(&all[..out.len()]);
    }

    fn estimate(&mut self, layer: LayerId, base: &BaseNeurons<'_>, tables: &BaseTables<'_>) {
        self.pass.check_base(&self.shape, base, tables);
        self.close_stages();
        self.estimate_one(base, tables);
        self.ffn.estimated = Some((layer, base.neurons()));
    }

    fn scores(&self) -> &[f32] {
        let (_, neurons) = self.ffn.estimated.expect("`estimate` has been called");
        done(self.device.wait());
        // SAFETY: the stream is idle, and `estimate` takes `&mut self`.
        &bytemuck::cast_slice(unsafe { self.buffers.host_scores.bytes() })[..neurons]
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
        self.close_stages();
        if (0..base.neurons()).any(|neuron| !is_chosen(chosen, neuron)) {
            self.stand_in_one(base, tables, chosen);
            self.ffn.stand_ins = true;
        }
    }

    fn mlp_output(&mut self, _layer: LayerId) {
        self.close_stages();
        // Prefill has added to the residual itself.
        if self.pass.decode && self.has_sums() {
            self.add_lanes(self.buffers.x.address());
        }
    }

    fn head_input(&mut self) {
        match self.pass.asked {
            Asked::Nothing => {}
            Asked::LastLogits => self.norm(self.vectors.final_norm, self.pass.tokens - 1, 1),
            Asked::Scores { first, count } => self.norm(self.vectors.final_norm, first, count),
        }
    }

    fn head(&mut self, rows: &MatrixRows<'_>) {
        assert_eq!(rows.cols as usize, self.shape.hidden, "width of the head");
        match self.pass.asked {
            Asked::Nothing => {}
            Asked::LastLogits => self.head_logits(rows),
            Asked::Scores { count, .. } => self.head_scores(rows, count),
        }
    }

    fn logits(&self) -> &[f32] {
        self.pass.check_logits();
        done(self.device.wait());
        // SAFETY: the stream is idle, and passes take `&mut self`.
        &bytemuck::cast_slice(unsafe { self.buffers.host_logits.bytes() })[..self.shape.vocab]
    }

    fn nll(&self) -> &[f32] {
        let count = self.pass.scored();
        done(self.device.wait());
        // SAFETY: the stream is idle, and passes take `&mut self`.
        &bytemuck::cast_slice(unsafe { self.buffers.host_nll.bytes() })[..count]
    }
}
