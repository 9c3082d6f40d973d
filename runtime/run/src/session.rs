//! [`Session`]: from flags to an open engine, with every byte planned on the way.

use crate::accelerator::Accelerator;
use crate::args::{IoChoice, KvChoice, RunArgs, VerifyChoice};
use crate::disk::{self, Shape};
use crate::exit::UsageError;
use crate::host::{DefaultBudget, Root};
use crate::system::{PolicyArgs, System};
use crate::tuning;
use anyhow::Context;
use ls_bundle::ids::ByteCount;
use ls_bundle::{BlockChecksums, Bundle};
use ls_compute::ComputeBackend;
use ls_control::Lut;
use ls_cpu::{CpuBackend, CpuOptions, Kernels, KvDType};
use ls_engine::memory::{BackendBytes, Budget, BudgetTooSmall, MemoryPlan, Need, PlanRequest};
use ls_engine::sparse;
use ls_engine::system::{Columns, ControllerKind, System as Row};
use ls_engine::tokenizer::{LOAD_PEAK_FACTOR, Tokenizer};
use ls_engine::{Engine, EngineError, EngineOptions, Recording, SparseOptions, Verify};
use ls_io::{BlockStore, Prefer, StoreOptions};
use std::sync::Arc;

/// Most reads of blocks in flight: what a disk does while attention runs and nobody gives it more.
const MAX_BLOCK_READS: u32 = 256;
/// Code that is not touched yet when the plan is made, allocator slack, the runtime's own small buffers.
const CODE_ALLOWANCE: u64 = 3 << 20;
/// Stack that a computing thread touches.
const THREAD_ALLOWANCE: u64 = 128 << 10;

/// A bundle being opened: the plan may still be asked for.
pub struct Session {
    /// The bundle.
    pub bundle: Bundle,
    /// Computing threads.
    pub threads: usize,
    /// Policies.
    pub(crate) system: System,
    /// The controllers' table, if one was made for all this.
    pub(crate) table: Option<Lut>,
    /// What tokens will want, for policies that know the future or are held against it.
    pub(crate) recording: Option<Arc<Recording>>,
    args: RunArgs,
    store: Box<dyn BlockStore>,
    /// Kept free beside the plan.
    reserved: ByteCount,
    /// The budget, where the flags name none.
    default_budget: Option<DefaultBudget>,
    /// What computes, if not the processor. Opened before a plan is made: what its driver takes is resident by then.
    device: Option<Accelerator>,
}

/// Sizes that a plan depends on.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Longest prompt to come, in tokens.
    pub prompt_tokens: u32,
    /// Most tokens scored in a pass.
    pub scored_tokens: u32,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("args", &self.args).finish_non_exhaustive()
    }
}

impl Session {
    /// Opens the bundle and its store.
    pub fn open(args: &RunArgs) -> anyhow::Result<Session> {
        let checksums = match args.verify {
            VerifyChoice::Never => BlockChecksums::Drop,
            VerifyChoice::First | VerifyChoice::Always => BlockChecksums::Keep,
        };
        let host = Root::here();
        let bundle = Bundle::open_with(&args.bundle, checksums)?;
        let options = StoreOptions {
            depth: disk::MAX_DEPTH + MAX_BLOCK_READS + ls_engine::memory::ROW_BUFFERS,
            prefer: match args.io {
                IoChoice::Auto => Prefer::Auto,
                IoChoice::Uring => Prefer::Uring,
                IoChoice::Pread => Prefer::Pread,
            },
            direct: true,
        };
        let opened = ls_io::open(&args.bundle, &options)?;
        for warning in &opened.warnings {
            eprintln!("warning: {warning}");
        }
        let threads = match args.threads {
            Some(threads) => usize::from(threads),
            None => host.threads().count,
        };
        let default_budget = match (args.memory, args.weight_cache) {
            (None, None) => Some(default_budget(&host)?),
            _ => None,
        };
        let system = System::of(&args.policies, &bundle);
        let device = Accelerator::open(args.backend)?;
        let (args, store, reserved) = (args.clone(), opened.store, ByteCount(0));
        let (table, recording) = (None, None);
        let mut session = Session {
            bundle,
            threads,
            system,
            table,
            recording,
            args,
            store,
            reserved,
            default_budget,
            device,
        };
        session.find_table()?;
        Ok(session)
    }

    /// The table that the controller wants; without one it is fixed.
    fn find_table(&mut self) -> anyhow::Result<()> {
        let chosen = self.args.policies.controller;
        if chosen == Some(ControllerKind::Hindsight) {
            let text =
                "hindsight needs a run of the same tokens before: bench --text --controllers";
            return Err(UsageError(text.into()).into());
        }
        let Some(columns) = self.system.columns else { return Ok(()) };
        if !tuning::wants_table(columns.controller) {
            return Ok(());
        }
        let (here, layers) = (tuning::target(self), usize::from(self.bundle.model().layers));
        self.table = tuning::table(&self.args.bundle, layers, &here, chosen.is_some())?;
        if self.table.is_none() {
            let controller = ControllerKind::Fixed;
            self.system.columns = Some(Columns { controller, ..columns });
        }
        Ok(())
    }

    /// What decides which bytes are wanted and which are there, the bundle and the device apart.
    pub(crate) fn settings(&self) -> String {
        let RunArgs { memory, weight_cache, backend, kv_cache, .. } = &self.args;
        let budget = match (weight_cache, memory) {
            (Some(share), _) => format!("weight cache {share}"),
            (None, Some(memory)) => format!("memory {}", memory.0),
            (None, None) => "what is available".into(),
        };
        let threads = self.threads;
        let on = format!("{budget}, {threads} threads, {backend:?}, {kv_cache:?}");
        let Some(columns) = &self.system.columns else { return tuning::short(on) };
        let names = columns.names().into_iter().filter(|(column, _)| *column != "controller");
        let names: Vec<&str> = names.map(|(_, name)| name).collect();
        let Columns { exact_share, cache_bias, .. } = columns;
        tuning::short(format!("{}, {exact_share} exact, bias {cache_bias}, {on}", names.join(" ")))
    }

    /// Loads the tokenizer if its load fits the budget, calls `encode`, and gives all of its memory back.
    pub fn with_tokenizer<R>(
        &mut self,
        encode: impl FnOnce(&Tokenizer) -> Result<R, EngineError>,
    ) -> anyhow::Result<R> {
        let tokenizer = self.load_tokenizer()?;
        let result = encode(&tokenizer)?;
        drop(tokenizer);
        ls_sync::release_free_memory();
        Ok(result)
    }

    /// The tokenizer, if its load fits the budget: for those who encode more than one text. What it keeps is part of
    /// every plan that is made while it lives.
    pub fn load_tokenizer(&mut self) -> anyhow::Result<Tokenizer> {
        if let Some(budget) = self.args.memory {
            let load = LOAD_PEAK_FACTOR * self.bundle.tokenizer().len() as u64;
            let minimum = ByteCount(resident()?) + ByteCount(load + CODE_ALLOWANCE);
            if minimum > budget {
                let too_small = BudgetTooSmall { budget, minimum, need: Need::Tokenizer };
                return Err(EngineError::from(too_small).into());
            }
        }
        let tokenizer = Tokenizer::load(&mut self.bundle)?;
        // What only the load needed.
        ls_sync::release_free_memory();
        Ok(tokenizer)
    }

    /// Plans are to leave `bytes` more free: for what runs beside the engine.
    pub fn reserve(&mut self, bytes: ByteCount) {
        self.reserved += bytes;
    }

    /// If the policies know the future, or are to be held against it, finds it out: `script` decodes `tokens` tokens on
    /// a dense engine, which is gone when this returns.
    pub(crate) fn look_ahead(
        &mut self,
        workload: Workload,
        tokens: usize,
        audit: bool,
        script: impl FnOnce(&mut Engine) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        match self.recorded_for(audit) {
            Some(_) => self.run_dense(workload, tokens, audit, script),
            None => Ok(()),
        }
    }

    /// Choices that want a recording of a dense run, or are to be held against it.
    fn recorded_for(&self, audit: bool) -> Option<Columns> {
        self.system.columns.filter(|columns| audit || columns.knows_the_future())
    }

    /// The same whether the policies need it or not.
    pub(crate) fn run_dense(
        &mut self,
        workload: Workload,
        tokens: usize,
        audit: bool,
        script: impl FnOnce(&mut Engine) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut args = self.args.clone();
        args.policies = PolicyArgs::default();
        args.policies.system = Some(Row::Dense);
        let mut dense = Session::open(&args)?;
        dense.reserve(self.reserved);
        let recording = self.recorded_for(audit).map(|columns| {
            Recording::with_capacity(self.bundle.weights(), tokens, |b| columns.count(b))
        });
        let plan = dense.plan(workload)?;
        let (_bundle, mut engine) = dense.start(&plan, workload)?;
        if let Some(recording) = recording {
            engine.record(recording);
        }
        script(&mut engine)?;
        self.recording = engine.take_recording().map(Arc::new);
        drop(engine);
        ls_sync::release_free_memory();
        Ok(())
    }

    /// What will be resident and what streamed.
    pub fn plan(&self, workload: Workload) -> anyhow::Result<MemoryPlan> {
        let (config, map) = (self.bundle.model(), self.bundle.weights());
        let backend_bytes = self.backend_bytes(workload);
        let mut request = self.request(workload, disk::DEFAULT)?;
        let mut plan =
            MemoryPlan::fit(&request, config, map, &backend_bytes).map_err(EngineError::from)?;
        if plan.depth > 0 {
            // Before weights are loaded there is room to measure in.
            let room = plan.budget.saturating_sub(request.fixed);
            let shape = disk::shape(self.bundle.path(), room.0).deepened(plan.budget.0);
            request = PlanRequest {
                request_bytes: shape.request_bytes,
                depth: shape.depth,
                read_cost_bytes: self.read_cost(shape),
                ..request
            };
            plan = MemoryPlan::fit(&request, config, map, &backend_bytes)
                .map_err(EngineError::from)?;
        }
        // The plan holds from here on; what was resident before (the tokenizer's load) must have fitted as well.
        let peak = ByteCount(peak_resident()?);
        if peak > plan.budget && matches!(request.budget, Budget::Total(_)) {
            let too_small =
                BudgetTooSmall { budget: plan.budget, minimum: peak, need: Need::Tokenizer };
            return Err(EngineError::from(too_small).into());
        }
        if let Some(wanted) = plan.context_lowered_from {
            eprintln!(
                "context lowered from {wanted} to {} tokens to fit {}",
                plan.context, plan.budget
            );
        }
        Ok(plan)
    }

    /// The smallest budget that works for the workload.
    pub fn minimum(&self, workload: Workload) -> anyhow::Result<ByteCount> {
        let (config, map) = (self.bundle.model(), self.bundle.weights());
        let request = self.request(workload, disk::DEFAULT)?;
        let peak = ByteCount(peak_resident()?);
        Ok(MemoryPlan::minimum(&request, config, map, &self.backend_bytes(workload)).max(peak))
    }

    fn request(&self, workload: Workload, shape: Shape) -> anyhow::Result<PlanRequest> {
        let stacks = THREAD_ALLOWANCE * self.threads as u64;
        Ok(PlanRequest {
            budget: self.args.budget(self.default_budget.map_or(ByteCount::ZERO, |it| it.bytes)),
            fixed: ByteCount(resident()? + CODE_ALLOWANCE + stacks) + self.reserved,
            context: self.args.context,
            prompt_tokens: workload.prompt_tokens,
            alignment: self.store.alignment(),
            request_bytes: shape.request_bytes,
            depth: shape.depth,
            sparse: match &self.system.columns {
                None => None,
                Some(columns) => {
                    Some(sparse::needs(&self.bundle, columns, self.recording.as_deref())?)
                }
            },
            read_cost_bytes: self.read_cost(shape),
        })
    }

    fn read_cost(&self, shape: Shape) -> u64 {
        self.args.read_cost.map_or(shape.read_cost_bytes, |cost| cost.0)
    }

    fn backend_bytes(&self, workload: Workload) -> impl Fn(u32, u32) -> BackendBytes {
        let (config, options) = (self.bundle.model(), self.cpu_options(workload));
        move |context, pass_tokens| {
            let options = CpuOptions { context, pass_tokens, ..options };
            if let Some(device) = &self.device {
                return device.host_bytes(config, &options, self.may_stage());
            }
            BackendBytes {
                kv_cache: ls_cpu::kv_bytes(config, context, options.kv_cache),
                activations: CpuBackend::memory(config, &options),
            }
        }
    }

    /// Memory of a card with its own: what the backend takes of it, what copies of the plan's weights and tables do at most,
    /// and all of it. The copies that do not fit are left out, and cross the bus for each token.
    pub(crate) fn device_memory(
        &self,
        workload: Workload,
        plan: &MemoryPlan,
    ) -> Option<(ByteCount, ByteCount, ByteCount)> {
        let (context, pass_tokens) = (plan.context, plan.pass_tokens);
        let options = CpuOptions { context, pass_tokens, ..self.cpu_options(workload) };
        let (config, device) = (self.bundle.model(), self.device.as_ref()?);
        let (own, all) = device.device_bytes(config, &options, self.may_stage())?;
        Some((own, plan.resident() + plan.tables, all))
    }

    /// Whether a device other than the processor computes.
    pub(crate) fn is_on_device(&self) -> bool {
        self.device.is_some()
    }

    /// Whether a card may add up an FFN in the order in which blocks arrive.
    fn may_stage(&self) -> bool {
        self.system.columns.is_some() && !self.args.policies.canonical
    }

    /// What the backend is made for, but for the sizes that a plan decides.
    fn cpu_options(&self, workload: Workload) -> CpuOptions {
        CpuOptions {
            context: 0,
            pass_tokens: 0,
            scored_tokens: workload.scored_tokens,
            threads: self.threads,
            kv_cache: match self.args.kv_cache {
                KvChoice::F16 => KvDType::F16,
                KvChoice::Q8_0 => KvDType::Q8_0,
            },
            kernels: Kernels::detect(),
        }
    }

    /// Loads what the plan keeps resident; the last allocation.
    pub fn start(
        self,
        plan: &MemoryPlan,
        workload: Workload,
    ) -> anyhow::Result<(Arc<Bundle>, Engine)> {
        let vectors = self.bundle.vectors().clone();
        let (context, pass_tokens) = (plan.context, plan.pass_tokens);
        let options = CpuOptions { context, pass_tokens, ..self.cpu_options(workload) };
        let config = self.bundle.model();
        let backend: Box<dyn ComputeBackend> = match &self.device {
            None => Box::new(CpuBackend::new(config, vectors, &options)?),
            Some(device) => device.backend(config, &vectors, &options, self.may_stage())?,
        };
        let mut progress = crate::progress::Progress::new("loading", plan.resident().0);
        let verify = match self.args.verify {
            VerifyChoice::Never => Verify::Never,
            VerifyChoice::First => Verify::First,
            VerifyChoice::Always => Verify::Always,
        };
        let recording = self.recording;
        let kind = self.system.columns.map(|columns| columns.controller);
        let sparse = self.system.columns.map(|columns| SparseOptions { columns, recording });
        let options = EngineOptions { verify, sparse };
        let bundle = Arc::new(self.bundle);
        let progress_of = &mut |bytes| progress.add(bytes);
        let mut engine = Engine::open(&bundle, plan, options, self.store, backend, progress_of)?;
        progress.finish();
        if let Some(kind) = kind {
            engine.control(tuning::controller(kind, self.table.as_ref()));
        }
        Ok((bundle, engine))
    }

    /// The policies, for reports.
    #[must_use]
    pub fn system(&self) -> serde_json::Value {
        self.system.describe()
    }

    /// How the bundle is read, for reports.
    #[must_use]
    pub fn store(&self) -> &dyn BlockStore {
        self.store.as_ref()
    }
}

fn resident() -> anyhow::Result<u64> {
    ls_io::memory::resident_bytes().context("reading this process's memory")
}

/// The budget of who names none, said on stderr.
fn default_budget(host: &Root) -> anyhow::Result<DefaultBudget> {
    let Some(budget) = host.memory().default_budget() else {
        let text = "this system does not say how much memory is available: --memory SIZE does";
        return Err(UsageError(text.into()).into());
    };
    eprintln!("{budget}");
    Ok(budget)
}

/// The most that this process ever held, bytes.
pub(crate) fn peak_resident() -> anyhow::Result<u64> {
    ls_io::memory::peak_resident_bytes().context("reading this process's peak memory")
}
