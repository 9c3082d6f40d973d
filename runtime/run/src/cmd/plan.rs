//! `ls-run plan`.

use crate::args::PlanArgs;
use crate::cmd::{extend, plan_json, print_json, print_line};
use crate::session::{Session, Workload};
use ls_bundle::ids::ByteCount;
use ls_bundle::model::{ModelConfig, WeightMap};
use ls_engine::Engine;
use ls_engine::memory::MemoryPlan;
use ls_engine::system::Columns;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time spent on measuring the disk, and again on memory.
const PROBE_MS: u64 = 600;
/// Time of a glance at memory.
const GLANCE_MS: u64 = 40;
/// Largest buffer of the memory probe.
const PROBE_BYTES: usize = 256 << 20;

/// What this machine can do, measured just now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    /// Direct reads of the plan's request size and depth, bytes a second.
    pub(crate) disk_bytes_s: f64,
    /// Sequential reads of memory by all computing threads, bytes a second; infinite where it is not known.
    pub(crate) memory_bytes_s: f64,
}

impl Machine {
    /// Measures. The memory probe stays within what the plan leaves for weights.
    pub(crate) fn measure(
        path: &Path,
        plan: &MemoryPlan,
        threads: usize,
    ) -> anyhow::Result<Machine> {
        let (request, depth) = match plan.request_bytes {
            0 => (1 << 20, 8),
            request => (request, plan.depth),
        };
        let disk_bytes_s = ls_io::probe::bandwidth(path, request as usize, depth, PROBE_MS)?;
        let buffer = PROBE_BYTES.min(plan.resident().0 as usize + plan.io_buffers.0 as usize);
        let memory_bytes_s = ls_io::memory::memory_bandwidth(threads, buffer, PROBE_MS)?;
        Ok(Machine { disk_bytes_s, memory_bytes_s })
    }

    /// Measures with an open engine, in the memory that it has: its own streaming reads without computation, and its
    /// resident weights.
    pub(crate) fn of(
        engine: &mut Engine,
        threads: usize,
        plan: &MemoryPlan,
    ) -> anyhow::Result<Machine> {
        let (mut passes, started) = (0u32, Instant::now());
        while plan.depth > 0
            && (passes == 0 || started.elapsed() < Duration::from_millis(PROBE_MS / 2))
        {
            engine.read_pass()?;
            passes += 1;
        }
        let streamed = f64::from(passes) * engine.program().streamed_bytes() as f64;
        let disk_bytes_s =
            if passes == 0 { f64::INFINITY } else { streamed / started.elapsed().as_secs_f64() };
        let memory_bytes_s = match engine.memory_bandwidth(threads, PROBE_MS / 2) {
            Some(rate) => rate,
            None => {
                ls_io::memory::memory_bandwidth(threads, plan.io_buffers.0 as usize, PROBE_MS / 2)?
            }
        };
        Ok(Machine { disk_bytes_s, memory_bytes_s })
    }

    /// What loading showed of the disk, and a glance at memory; infinite where neither is known.
    pub(crate) fn as_loaded(engine: &Engine, threads: usize) -> Machine {
        let stats = engine.stats();
        let disk_bytes_s = match stats.loaded_bytes {
            0 => f64::INFINITY,
            bytes => bytes as f64 / stats.load.as_secs_f64(),
        };
        let memory_bytes_s = engine.memory_bandwidth(threads, GLANCE_MS).unwrap_or(f64::INFINITY);
        Machine { disk_bytes_s, memory_bytes_s }
    }

    /// The same; if weights are computed with by a device nothing is known of its memory.
    #[must_use]
    pub(crate) fn computing_on(self, device: bool) -> Machine {
        let memory_bytes_s = if device { f64::INFINITY } else { self.memory_bytes_s };
        Machine { memory_bytes_s, ..self }
    }

    /// Between two measurements: rates whose times are the means of theirs.
    pub(crate) fn between(a: Machine, b: Machine) -> Machine {
        let mean = |a: f64, b: f64| 2.0 / (1.0 / a + 1.0 / b);
        Machine {
            disk_bytes_s: mean(a.disk_bytes_s, b.disk_bytes_s),
            memory_bytes_s: mean(a.memory_bytes_s, b.memory_bytes_s),
        }
    }

    /// The most tokens a second that can be reached: the slower of what must be read and what must be touched. Infinite if
    /// nothing is read, and nothing known of memory.
    #[must_use]
    pub(crate) fn bound_tok_s(&self, load: &Load) -> f64 {
        let disk = load.read_bytes as f64 / self.disk_bytes_s;
        let memory = load.touched_bytes as f64 / self.memory_bytes_s;
        1.0 / disk.max(memory)
    }
}

/// What decoding a token asks of the machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// From the disk.
    pub(crate) read_bytes: u64,
    /// From memory: weights and the KV cache.
    pub(crate) touched_bytes: u64,
}

impl Load {
    /// Of a system with these choices, or of the dense one; `read_bytes` are a sparse system's.
    pub(crate) fn of(
        config: &ModelConfig,
        map: &WeightMap,
        plan: &MemoryPlan,
        position: u32,
        columns: Option<&Columns>,
        read_bytes: u64,
    ) -> Load {
        match columns {
            None => Load::dense(config, map, plan, position),
            Some(columns) => Load::sparse(config, map, plan, position, columns, read_bytes),
        }
    }

    /// Every weight, behind `position` tokens.
    pub(crate) fn dense(
        config: &ModelConfig,
        map: &WeightMap,
        plan: &MemoryPlan,
        position: u32,
    ) -> Load {
        let head = map.head.as_ref().unwrap_or(&map.embedding);
        let layers: u64 = map.layers.iter().map(|l| l.ffn.extent().end() - l.q_proj.offset).sum();
        let kv = 4 * u64::from(config.kv_width()) * u64::from(config.layers) * u64::from(position);
        let touched_bytes = layers + head.extent().len + kv;
        Load { read_bytes: plan.streamed(map).0, touched_bytes }
    }

    /// A share of the neurons, beside tables of which nearly all is read; `read_bytes` as measured.
    fn sparse(
        config: &ModelConfig,
        map: &WeightMap,
        plan: &MemoryPlan,
        position: u32,
        columns: &Columns,
        read_bytes: u64,
    ) -> Load {
        let dense = Load::dense(config, map, plan, position);
        let ffn = ffn_bytes(map);
        let exact = (ffn as f64 * f64::from(columns.exact_share)) as u64;
        Load { read_bytes, touched_bytes: dense.touched_bytes - ffn + exact + plan.tables.0 }
    }
}

/// Bytes of all FFNs.
fn ffn_bytes(map: &WeightMap) -> u64 {
    map.layers.iter().map(|layer| layer.ffn.extent().len).sum()
}

/// Bytes that decoding a token reads from the disk.
#[derive(Clone, Copy, Debug)]
struct Reads {
    /// If the cache has as much of what is wanted as it can keep.
    warm: u64,
    /// If it has nothing of that.
    cold: u64,
}

impl Reads {
    fn of(map: &WeightMap, plan: &MemoryPlan, columns: Option<&Columns>) -> Reads {
        let streamed = plan.streamed(map).0;
        let Some(columns) = columns else { return Reads { warm: streamed, cold: streamed } };
        let ffn = map.layers.iter().map(|layer| layer.ffn);
        let wanted: u64 =
            ffn.map(|f| columns.count(f.blocks() as usize) as u64 * f.block_stride()).sum();
        let stride = map.layers.iter().map(|layer| layer.ffn.block_stride()).max().unwrap_or(0);
        let kept = u64::from(plan.slots - plan.passing) * stride;
        let dense = streamed - ffn_bytes(map);
        Reads { warm: dense + wanted.saturating_sub(kept), cold: dense + wanted }
    }
}

/// Runs the command.
pub(crate) fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let mut session = Session::open(&args.run)?;
    // Planned as `generate` would: with the tokenizer's load behind it.
    session.with_tokenizer(|_| Ok(()))?;
    let workload = Workload { prompt_tokens: args.prompt_tokens, scored_tokens: 0 };
    let plan = session.plan(workload)?;
    let minimum = session.minimum(workload)?;
    let expected = Expected::here(args, &session, &plan)?;
    let device = session.device_memory(workload, &plan);
    if args.json {
        let mut object = expected.json();
        let store = session.store().name();
        extend(&mut object, serde_json::json!({ "minimum_bytes": minimum.0, "store": store }));
        extend(&mut object, plan_json(&plan));
        if let Some((own, copies, all)) = device {
            let device = serde_json::json!({
                "device_buffer_bytes": own.0,
                "device_weight_bytes": copies.0,
                "device_memory_bytes": all.0,
            });
            extend(&mut object, device);
        }
        return print_json(&object);
    }
    let row = |name: &str, bytes: ByteCount| print_line(&format!("  {name:<34} {bytes:>14}"));
    print_line(&format!("budget {} (minimum {minimum})", plan.budget))?;
    row("code, tokenizer, stacks", plan.fixed)?;
    row(&format!("KV cache, {} tokens", plan.context), plan.kv_cache)?;
    row(&format!("activations, passes of {} tokens", plan.pass_tokens), plan.activations)?;
    row("I/O buffers", plan.io_buffers)?;
    row("resident dense tensors", plan.resident_dense)?;
    row("resident FFN blocks", plan.resident_ffn)?;
    row("planned", plan.planned())?;
    if let Some((own, copies, all)) = device {
        print_line(&format!("device memory {all}"))?;
        row("KV cache, activations, buffers", own)?;
        row("copies of what is resident", copies)?;
    }
    expected.lines(&session, args.prompt_tokens).iter().try_for_each(|line| print_line(line))
}

/// What may be expected of a plan on this machine.
struct Expected {
    machine: Machine,
    reads: Reads,
    /// Whether decode runs all neurons.
    is_dense: bool,
    /// Bytes that a pass over a prompt streams.
    pass: ByteCount,
    /// Share of the weights that is resident.
    weight_cache: f64,
    /// Tokens a second at most, with a full and with an empty cache.
    bound_tok_s: f64,
    cold_bound_tok_s: f64,
    first_token_s: f64,
}

impl Expected {
    fn here(args: &PlanArgs, session: &Session, plan: &MemoryPlan) -> anyhow::Result<Expected> {
        let (config, map) = (session.bundle.model(), session.bundle.weights());
        let machine = Machine::measure(&args.run.bundle, plan, session.threads)?
            .computing_on(session.is_on_device());
        let columns = session.system.columns.as_ref();
        let reads = Reads::of(map, plan, columns);
        let bound = |read_bytes| {
            let position = args.prompt_tokens;
            machine.bound_tok_s(&Load::of(config, map, plan, position, columns, read_bytes))
        };
        let pass = plan.streamed(map);
        let passes = args.prompt_tokens.div_ceil(plan.pass_tokens);
        let first_bytes = plan.resident().0 + u64::from(passes) * pass.0;
        Ok(Expected {
            machine,
            reads,
            is_dense: columns.is_none(),
            pass,
            // Slots are a little larger than their blocks.
            weight_cache: (plan.resident().0 as f64 / plan.weights.0 as f64).min(1.0),
            bound_tok_s: bound(reads.warm),
            cold_bound_tok_s: bound(reads.cold),
            first_token_s: first_bytes as f64 / machine.disk_bytes_s,
        })
    }

    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "streamed_bytes_per_token": self.reads.cold,
            "streamed_bytes_per_pass": self.pass.0,
            "weight_cache_share": self.weight_cache,
            "disk_bytes_s": self.machine.disk_bytes_s,
            "memory_bytes_s": self.machine.memory_bytes_s,
            "bound_tok_s": self.bound_tok_s,
            "cold_bound_tok_s": self.cold_bound_tok_s,
            "expected_ttft_s": self.first_token_s,
        })
    }

    fn lines(&self, session: &Session, prompt_tokens: u32) -> [String; 3] {
        let (share, pass, wanted) =
            (100.0 * self.weight_cache, self.pass, ByteCount(self.reads.cold));
        let streams = match self.is_dense {
            true => format!("{pass} streamed a token"),
            false => format!(
                "{wanted} wanted from disk or cache a token, {pass} streamed by a pass over a prompt"
            ),
        };
        let Machine { disk_bytes_s, memory_bytes_s } = self.machine;
        let (disk_mb_s, store) = (disk_bytes_s / 1e6, session.store().name());
        let memory = match memory_bytes_s.is_finite() {
            true => {
                format!(
                    ", memory {:.1} GB/s with {} threads",
                    memory_bytes_s / 1e9,
                    session.threads
                )
            }
            false => String::new(),
        };
        let expected = match self.bound_tok_s.is_finite() {
            true => format!("at most {:.2}", self.bound_tok_s),
            false => "as many as the device computes".into(),
        };
        let cold = match self.is_dense {
            true => String::new(),
            false => format!(
                " where the cache has what a token wants, {:.2} where it has nothing",
                self.cold_bound_tok_s
            ),
        };
        let first_s = self.first_token_s;
        [
            format!("{share:.1} % of the weights resident (--weight-cache {share:.1}%); {streams}"),
            format!("disk {disk_mb_s:.0} MB/s by {store}{memory}"),
            format!(
                "expected here: {expected} tokens/s{cold}; first token of a {prompt_tokens}-token prompt after at least \
                 {first_s:.1} s"
            ),
        ]
    }
}
