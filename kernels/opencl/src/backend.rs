//! [`OpenClBackend`]: what it owns, and which kernel each call starts.
//!
//! Calls return when their work is queued, but for those that bring results to the host.

use crate::OpenClError;
use crate::buffers::{Buffers, DeviceVectors, HostBuffers, Plan};
use crate::device::{Arg, Device};
use crate::error::Kind;
use crate::programs::Part;
use crate::weights::Weights;
use ls_bundle::ids::{ByteCount, LayerId};
use ls_bundle::model::{DType, ModelConfig, QUANT_GROUP, Vectors};
use ls_compute::{
    Asked, BaseNeurons, BaseTables, ComputeBackend, Current, KvDType, MatrixRows, NeuronBlocks,
    Outputs, Pass, PassLimits, Projection, ProjectionPart, Shape, is_chosen, rope_frequencies,
};
use opencl3::kernel::Kernel;

/// What a backend is made for.
#[derive(Clone, Copy, Debug)]
pub struct OpenClOptions {
    /// Positions that the KV cache holds, at least 1.
    pub context: u32,
    /// Most tokens of a pass, at least 1.
    pub pass_tokens: u32,
    /// Most scored tokens of a pass.
    pub scored_tokens: u32,
    /// Format of the KV cache; Q8_0 wants heads of a multiple of 32.
    pub kv_cache: KvDType,
    /// Whether kept weights are read where they are; None: if the device has the host's memory.
    pub in_place: Option<bool>,
}

/// The kernels of one number format.
#[derive(Debug)]
pub(crate) struct OfDType {
    pub(crate) embed: Kernel,
    pub(crate) matvec: Kernel,
    pub(crate) multiply: Kernel,
    pub(crate) swiglu: Kernel,
    pub(crate) weigh: Kernel,
    pub(crate) activate: Kernel,
    pub(crate) combine: Kernel,
    pub(crate) importance: Kernel,
}

/// All kernels; a backend has its own, as setting their arguments is nothing that two may do.
#[derive(Debug)]
pub(crate) struct Kernels {
    of: [OfDType; 3],
    pub(crate) norm: Kernel,
    pub(crate) rotate: Kernel,
    pub(crate) attend: Kernel,
    pub(crate) merge: Kernel,
    pub(crate) add_lanes: Kernel,
    pub(crate) score: Kernel,
    pub(crate) estimate: Kernel,
    pub(crate) stand_in: Kernel,
}

impl Kernels {
    fn new(device: &Device) -> Result<Kernels, Kind> {
        let of = |dtype| {
            let get = |name| device.kernel_of(dtype, name);
            Ok::<_, Kind>(OfDType {
                embed: get("embed")?,
                matvec: get("matvec")?,
                multiply: get("multiply")?,
                swiglu: get("swiglu")?,
                weigh: get("weigh")?,
                activate: get("activate")?,
                combine: get("combine")?,
                importance: get("importance")?,
            })
        };
        Ok(Kernels {
            of: [of(DType::F16)?, of(DType::Q8_0)?, of(DType::Q4_0)?],
            norm: device.kernel(Part::Vectors, "rms_norm")?,
            rotate: device.kernel(Part::Attention, "rotate_heads")?,
            attend: device.kernel(Part::Attention, "attend")?,
            merge: device.kernel(Part::Attention, "merge")?,
            add_lanes: device.kernel(Part::Vectors, "add_lanes")?,
            score: device.kernel(Part::Vectors, "score")?,
            estimate: device.kernel(Part::Base, "estimate")?,
            stand_in: device.kernel(Part::Base, "stand_in")?,
        })
    }

    pub(crate) fn of(&self, dtype: DType) -> &OfDType {
        &self.of[crate::programs::number(dtype)]
    }
}

/// What has been computed of a layer's FFN.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ffn {
    /// Neurons so far: what decides which sum a neuron adds to.
    pub(crate) neurons: u32,
    /// The layer and the number of neurons whose activations are estimated.
    pub(crate) estimated: Option<(LayerId, usize)>,
    /// Sums of stand-ins that there are.
    pub(crate) stand_in_lanes: u32,
}

/// A model's activations and KV cache on a device.
#[derive(Debug)]
pub struct OpenClBackend {
    pub(crate) device: Device,
    pub(crate) shape: Shape,
    pub(crate) options: OpenClOptions,
    pub(crate) norm_epsilon: f32,
    pub(crate) vectors: DeviceVectors,
    frequencies: Vec<f32>,
    pub(crate) kernels: Kernels,
    pub(crate) weights: Weights,
    pub(crate) buffers: Buffers,
    pub(crate) host: HostBuffers,
    pub(crate) pass: Current,
    /// Rows of the embedding table that wait in host memory: their format and the bytes from one to the next.
    rows: Option<(DType, usize)>,
    pub(crate) ffn: Ffn,
    /// Neurons on their way to a launch.
    pub(crate) list: Vec<u64>,
}

impl Drop for OpenClBackend {
    fn drop(&mut self) {
        // The queue may still copy from what goes now.
        let _ = self.device.wait();
    }
}

impl OpenClBackend {
    /// Makes a backend for one model; allocates everything.
    ///
    /// # Errors
    /// If the device has too little memory, if the vectors do not fit the model, or if this backend cannot run it.
    pub fn new(
        device: &Device,
        config: &ModelConfig,
        vectors: &Vectors,
        options: &OpenClOptions,
    ) -> Result<OpenClBackend, OpenClError> {
        check_model(device, config, options)?;
        let (buffers, host) = Plan::new(config, options).allocate(device)?;
        let backend = OpenClBackend {
            shape: Shape::of(config),
            options: *options,
            norm_epsilon: config.norm_epsilon,
            vectors: DeviceVectors::new(device, config, vectors)?,
            frequencies: rope_frequencies(&config.rope, config.head_dim),
            kernels: Kernels::new(device)?,
            weights: Weights::new(device, options.in_place.unwrap_or(device.info().unified))?,
            buffers,
            host,
            pass: Current::NONE,
            rows: None,
            ffn: Ffn::default(),
            list: Vec::with_capacity(crate::buffers::MAX_LIST),
            device: device.clone(),
        };
        device.wait()?;
        Ok(backend)
    }

    /// Bytes that [`new`](Self::new) allocates with the same options, on the device and of the host. What is
    /// [kept](ComputeBackend::keep) comes on top, on the device, unless it is used in place.
    #[must_use]
    pub fn memory(config: &ModelConfig, options: &OpenClOptions) -> (ByteCount, ByteCount) {
        Plan::new(config, options).bytes()
    }

    /// Bytes of weights that the device has a copy of.
    #[must_use]
    pub fn kept(&self) -> ByteCount {
        ByteCount(self.weights.copied_bytes())
    }

    /// Starts a kernel.
    ///
    /// # Safety
    /// As [`Device::launch`].
    pub(crate) unsafe fn launch(&self, kernel: &Kernel, groups: [usize; 3], args: &[Arg<'_>]) {
        // SAFETY: the caller's guarantee.
        done(unsafe { self.device.launch(kernel, groups, args) });
    }

    /// h = RMSNorm(x) * gain for tokens `first .. first + count`; token `first` becomes row 0 of h.
    fn norm(&mut self, gain: u32, first: u32, count: u32) {
        let (b, hidden) = (&self.buffers, self.shape.hidden as u32);
        let args = [
            Arg::Memory(&b.x),
            Arg::U32(first),
            Arg::Memory(&self.vectors.memory),
            Arg::U32(gain),
            Arg::Memory(&b.h),
            Arg::U32(hidden),
            Arg::F32(self.norm_epsilon),
        ];
        // SAFETY: x and h hold pass_tokens rows, the gain one.
        unsafe { self.launch(&self.kernels.norm, [count as usize, 1, 1], &args) };
    }

    /// Unpacks the rows of the embedding table that the pass has been given.
    fn take_rows(&mut self) {
        let Some((dtype, stride)) = self.rows.take() else { return };
        let tokens = self.pass.tokens as usize;
        let (b, hidden) = (&self.buffers, self.shape.hidden as u32);
        // SAFETY: the host's rows stay as they are until the next pass, which waits for all that is queued.
        done(unsafe { b.rows.write_later(0, &self.host.rows[..tokens * stride]) });
        let args =
            [Arg::Memory(&b.rows), Arg::U32(stride as u32), Arg::U32(hidden), Arg::Memory(&b.x)];
        // SAFETY: as many rows as tokens, of `stride` bytes; x has room for them.
        unsafe { self.launch(&self.kernels.of(dtype).embed, [tokens, 1, 1], &args) };
    }
}

/// The result of something that only fails when the device has failed: nothing can go on then.
pub(crate) fn done<T>(result: Result<T, Kind>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

fn check_model(device: &Device, config: &ModelConfig, options: &OpenClOptions) -> Result<(), Kind> {
    for (count, name) in
        [(options.context, "position of context"), (options.pass_tokens, "token a pass")]
    {
        if count == 0 {
            return Err(Kind::Zero(name));
        }
    }
    let (hidden, queries) = (config.hidden, config.query_width());
    if !hidden.is_multiple_of(8) || !queries.is_multiple_of(8) {
        let widths = format!("widths of {hidden} and {queries}; multiples of 8 are wanted");
        return Err(Kind::Unsupported(widths));
    }
    let (heads, kv_heads, head_dim) = (config.heads, config.kv_heads, config.head_dim);
    if kv_heads == 0 || heads % kv_heads != 0 || head_dim == 0 || head_dim % 2 != 0 {
        let shape = format!("{heads} query heads of width {head_dim} on {kv_heads} key heads");
        return Err(Kind::Unsupported(shape));
    }
    if options.kv_cache == KvDType::Q8_0 && !head_dim.is_multiple_of(QUANT_GROUP) {
        return Err(Kind::Unsupported(format!("a KV cache in q8_0 for heads {head_dim} wide")));
    }
    let (wanted, found) =
        (crate::attention::local_bytes(&Shape::of(config)) as u64, device.info().local_bytes);
    if wanted > found {
        let shape = format!("attention that takes {wanted} bytes of local memory, of {found}");
        return Err(Kind::Unsupported(shape));
    }
    Ok(())
}

impl ComputeBackend for OpenClBackend {
    fn keep(&mut self, bytes: &[u8]) -> bool {
        !bytes.is_empty() && self.weights.keep(bytes).is_ok()
    }

    fn begin(&mut self, pass: Pass<'_>) {
        // What the queue may still copy from is written below.
        done(self.device.wait());
        let OpenClOptions { context, pass_tokens, scored_tokens, .. } = self.options;
        self.pass = Current::of(&pass, PassLimits { context, pass_tokens, scored_tokens });
        self.rows = None;
        if let Outputs::Score { targets, .. } = pass.outputs {
            let host = &mut self.host.targets[..targets.len()];
            host.copy_from_slice(targets);
            done(self.buffers.targets.write(0, bytemuck::cast_slice(host)));
        }
        self.pass.write_turns(&self.frequencies, &mut self.host.turns);
        let len = pass.tokens as usize * self.shape.head_dim;
        let turns = bytemuck::cast_slice(&self.host.turns[..len]);
        // SAFETY: they stay as they are until the next pass, which waits for all that is queued.
        done(unsafe { self.buffers.turns.write_later(0, turns) });
    }

    fn embed(&mut self, index: u32, row: MatrixRows<'_>) {
        assert_eq!((row.cols as usize, row.rows), (self.shape.hidden, 1), "one row of the table");
        let len = row.dtype.row_bytes(row.cols) as usize;
        let at = index as usize * len;
        self.host.rows[at..at + len].copy_from_slice(row.bytes);
        self.rows = Some((row.dtype, len));
    }

    fn attn_input(&mut self, layer: LayerId) {
        self.take_rows();
        self.norm(self.vectors.layers[layer.index()].attn_norm, 0, self.pass.tokens);
    }

    fn project(&mut self, _layer: LayerId, parts: &[ProjectionPart<'_>]) {
        for part in parts {
            self.project_part(part);
        }
        done(self.device.flush());
    }

    fn attend(&mut self, layer: LayerId) {
        self.rotate_and_append(layer);
        self.attend_all(layer);
    }

    fn mlp_input(&mut self, layer: LayerId) {
        self.norm(self.vectors.layers[layer.index()].mlp_norm, 0, self.pass.tokens);
        self.ffn = Ffn::default();
        if self.pass.decode {
            done(self.buffers.lanes.fill_zero());
        }
    }

    fn mlp(&mut self, _layer: LayerId, blocks: &NeuronBlocks<'_>) {
        assert_eq!(blocks.hidden as usize, self.shape.hidden, "width of a neuron");
        if self.pass.decode {
            self.mlp_one(blocks)
        } else {
            self.mlp_many(blocks)
        }
        done(self.device.flush());
    }

    fn mlp_blocks(&mut self, _layer: LayerId, blocks: &[NeuronBlocks<'_>]) {
        assert!(self.pass.decode, "single blocks are for decode");
        self.mlp_list(blocks);
        done(self.device.flush());
    }

    fn feature(&self, out: &mut [f32]) {
        assert!(self.pass.decode, "a feature is one token's");
        self.add_lanes(&self.buffers.feature);
        done(self.buffers.feature.read(0, bytemuck::cast_slice_mut(out)));
    }

    fn importance(&mut self, _layer: LayerId, blocks: &NeuronBlocks<'_>, out: &mut [f32]) {
        assert!(self.pass.decode, "importance is one token's");
        assert_eq!(out.len(), blocks.neurons as usize, "a number for each neuron");
        self.importance_one(blocks, out);
    }

    fn estimate(&mut self, layer: LayerId, base: &BaseNeurons<'_>, tables: &BaseTables<'_>) {
        self.pass.check_base(&self.shape, base, tables);
        self.estimate_one(base, tables);
        self.ffn.estimated = Some((layer, base.neurons()));
    }

    fn scores(&self) -> &[f32] {
        let (_, neurons) = self.ffn.estimated.expect("`estimate` has been called");
        &self.host.scores[..neurons]
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
        assert_eq!(self.ffn.stand_in_lanes, 0, "stand-ins are added once");
        if (0..base.neurons()).any(|neuron| !is_chosen(chosen, neuron)) {
            self.stand_in_one(base, tables, chosen);
            self.ffn.stand_in_lanes = crate::buffers::STAND_IN_LANES as u32;
        }
    }

    fn mlp_output(&mut self, _layer: LayerId) {
        // Prefill has added to the residual itself.
        if self.pass.decode {
            self.add_lanes(&self.buffers.x);
        }
        done(self.device.flush());
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
        &self.host.logits
    }

    fn nll(&self) -> &[f32] {
        &self.host.nll[..self.pass.scored()]
    }
}

impl OpenClBackend {
    fn project_part(&mut self, part: &ProjectionPart<'_>) {
        let shape = self.shape;
        let (to, width, add) = match part.projection {
            Projection::Query => (To::Q, shape.query_width, false),
            Projection::Key => (To::K, shape.kv_width, false),
            Projection::Value => (To::V, shape.kv_width, false),
            Projection::Output => (To::X, shape.hidden, true),
        };
        if self.pass.decode {
            self.matvec(&part.rows, to, add);
        } else {
            self.multiply(&part.rows, to, width, add);
        }
    }
}

/// Where a product goes; what it is of follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    Q,
    K,
    V,
    X,
    Logits,
}
