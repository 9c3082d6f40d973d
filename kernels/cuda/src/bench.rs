//! What coordination costs on this device: flag round trips, and one FFN layer cut into stages in several ways.
//!
//! Every way computes the same neurons and is checked against a plain sum in f64 before it is timed.

use crate::CudaError;
use crate::blocks::{Blocks, Entry};
use crate::device::{Device, Grid, args};
use crate::error::{Kind, check};
use crate::launch::{Loads, dtype_name};
use crate::stages::{StagedMlp, StagedOptions};
use cudarc::driver::sys;
use ls_bundle::model::DType;
use ls_compute::conformance::Rng;
use ls_compute::{MlpShape, dequantize_row};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Largest accepted |a - b| / |b| of a layer's output: f32 sums in any order.
pub const OUTPUT_ERROR_MAX: f64 = 1e-5;

/// What is measured.
#[derive(Clone, Debug)]
pub struct SyncOptions {
    /// Width of the model.
    pub hidden: u32,
    /// Neurons of the layer.
    pub neurons: u32,
    /// Share of the neurons that do not run.
    pub sparsity: f64,
    /// Number format of the weights.
    pub dtype: DType,
    /// Neurons of a block.
    pub block_neurons: u32,
    /// Multiprocessors; the device's at most.
    pub multiprocessors: u32,
    /// How the kernel reads weights.
    pub loads: Loads,
    /// Whether launches overlap.
    pub overlapping: bool,
    /// Repetitions; medians are reported.
    pub reps: usize,
}

/// How a layer is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// A kernel a stage, each waited for with cuStreamSynchronize.
    DeviceSync,
    /// A kernel a stage, each waited for with an event.
    EventSync,
    /// A graph of kernels that wait for host words and set others.
    Graph,
    /// One kernel; the host posts all stages at once.
    Ahead,
    /// One kernel; a stage is posted when so many before it are not done yet, 1: the last one is done.
    Lag(u32),
}

impl Method {
    /// All.
    pub const ALL: [Method; 6] = [
        Method::DeviceSync,
        Method::EventSync,
        Method::Graph,
        Method::Ahead,
        Method::Lag(1),
        Method::Lag(2),
    ];

    /// For tables.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Method::DeviceSync => "device sync".into(),
            Method::EventSync => "event sync".into(),
            Method::Graph => "graph".into(),
            Method::Ahead => "ours, ahead".into(),
            Method::Lag(lag) => format!("ours, lag {lag}"),
        }
    }
}

/// One layer, its weights several times so that no cache holds them, and the kernel.
#[derive(Debug)]
pub struct SyncBench {
    options: SyncOptions,
    mlp: StagedMlp,
    /// The same weights, in different places.
    layers: Vec<Blocks>,
    host: Option<Blocks>,
    bytes: Vec<u8>,
    input: Vec<f32>,
    rng: Rng,
}

/// Copies of the layer.
const LAYERS: usize = 4;

impl SyncBench {
    /// Draws a layer and puts it on the device.
    pub fn new(device: &Device, options: SyncOptions) -> Result<SyncBench, CudaError> {
        let mut rng = Rng(7);
        let shape = options.shape();
        let blocks = options.blocks();
        let bytes = draw(&options, &mut rng);
        let staged = StagedOptions {
            multiprocessors: options.multiprocessors,
            loads: options.loads,
            patience_ms: 300,
            overlapping: options.overlapping,
        };
        let mut mlp = StagedMlp::new(device, shape, staged)?;
        let input: Vec<f32> = (0..options.hidden).map(|_| rng.unit()).collect();
        mlp.set_input(&input)?;
        let mut first = Blocks::on_device(device, &shape, blocks)?;
        first.write(&bytes)?;
        let mut layers = vec![first];
        for _ in 1..LAYERS {
            let mut layer = Blocks::on_device(device, &shape, blocks)?;
            layer.copy_from(&layers[0])?;
            layers.push(layer);
        }
        device.wait()?;
        Ok(SyncBench { options, mlp, layers, host: None, bytes, input, rng })
    }

    /// Bytes of weights that a layer reads.
    #[must_use]
    pub fn layer_bytes(&self) -> u64 {
        u64::from(self.options.active()) * u64::from(self.options.shape().block_stride)
    }

    /// Median microseconds of one layer in `stages` stages, from the launch until the host knows its end.
    pub fn layer_us(&mut self, method: Method, stages: u32) -> Result<f64, CudaError> {
        let mut times = Vec::with_capacity(self.options.reps);
        let mut graph = Graph::default();
        for rep in 0..self.options.reps + 2 {
            let list = self.draw_list(rep, 0.0)?;
            if method == Method::Graph {
                graph.record(&mut self.mlp, &list, stages)?;
            } else if matches!(method, Method::DeviceSync | Method::EventSync) {
                self.mlp.write_list(&list)?;
            }
            let time = run(&mut self.mlp, method, &list, stages, &mut graph)?;
            if rep < 2 {
                self.check(&list)?;
            } else {
                times.push(time.as_secs_f64() * 1e6);
            }
        }
        Ok(median(&mut times))
    }

    /// Microseconds of one layer of many in a row, unsplit, with a share of its blocks in pinned host memory.
    pub fn back_to_back_us(&mut self, missing: f64) -> Result<f64, CudaError> {
        const ROW: usize = 48;
        let mut times = Vec::new();
        for round in 0..5 {
            let mut lists = Vec::with_capacity(ROW);
            for i in 0..ROW {
                lists.push(self.draw_list(i, missing)?);
            }
            let started = Instant::now();
            for list in &lists {
                self.mlp.post(list)?;
                self.mlp.launch(1, true)?;
            }
            self.mlp.finish()?;
            if round > 0 {
                times.push(started.elapsed().as_secs_f64() * 1e6 / ROW as f64);
            }
            self.check(lists.last().expect("some lists"))?;
        }
        Ok(median(&mut times))
    }

    /// Median microseconds of one unsplit layer by itself, with a share of its blocks in pinned host memory.
    pub fn layer_with_misses_us(&mut self, missing: f64) -> Result<f64, CudaError> {
        let mut times = Vec::new();
        for rep in 0..self.options.reps + 1 {
            let list = self.draw_list(rep, missing)?;
            let mut graph = Graph::default();
            let time = run(&mut self.mlp, Method::Ahead, &list, 1, &mut graph)?;
            if rep == 0 {
                self.check(&list)?;
            } else {
                times.push(time.as_secs_f64() * 1e6);
            }
        }
        Ok(median(&mut times))
    }

    /// Bytes of a layer's blocks that are in host memory.
    #[must_use]
    pub fn missing_bytes(&self, missing: f64) -> u64 {
        self.options.missing(missing) as u64 * u64::from(self.options.shape().block_stride)
    }

    /// Blocks that run, in any order; those in host memory first, as they take longest.
    fn draw_list(&mut self, layer: usize, missing: f64) -> Result<Vec<Entry>, CudaError> {
        if missing > 0.0 && self.host.is_none() {
            let device = self.mlp.device().clone();
            let shape = self.options.shape();
            let mut host = Blocks::on_host(&device, &shape, self.options.blocks())?;
            host.write(&self.bytes)?;
            self.host = Some(host);
        }
        let count = self.options.active();
        let mut all: Vec<u32> = (0..self.options.blocks()).collect();
        for i in 0..count as usize {
            let other = i + self.rng.below(all.len() as u32 - i as u32) as usize;
            all.swap(i, other);
        }
        let here = &self.layers[layer % LAYERS];
        let missing = self.options.missing(missing);
        let place = |(i, &block): (usize, &u32)| match &self.host {
            Some(host) if i < missing => host.entry(block),
            _ => here.entry(block),
        };
        Ok(all[..count as usize].iter().enumerate().map(place).collect())
    }

    /// The last output is the plain sum over `list`.
    fn check(&mut self, list: &[Entry]) -> Result<(), CudaError> {
        let mut got = vec![0f32; self.input.len()];
        self.mlp.output(&mut got)?;
        let want = self.reference(list);
        let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
        let difference = norm(&mut got.iter().zip(&want).map(|(&a, &b)| f64::from(a) - b));
        let error = difference / norm(&mut want.iter().copied());
        // Written so that NaN fails.
        if error <= OUTPUT_ERROR_MAX {
            return Ok(());
        }
        let reason = format!("a layer is off by {error:e} of its length");
        Err(Kind::Call { call: "the kernel's check", reason }.into())
    }

    /// The sum over `list` in f64.
    fn reference(&self, list: &[Entry]) -> Vec<f64> {
        let (hidden, dtype) = (self.options.hidden as usize, self.options.dtype);
        let stride = self.options.shape().block_stride as usize;
        let row = dtype.row_bytes(self.options.hidden) as usize;
        let mut sum = vec![0f64; hidden];
        let mut weights = [vec![0f32; hidden], vec![0f32; hidden], vec![0f32; hidden]];
        for entry in list {
            let blocks = self.layers.iter().chain(&self.host);
            let block = blocks
                .map(|blocks| entry.address().wrapping_sub(blocks.entry(0).address()))
                .find(|&at| at < self.bytes.len() as u64)
                .expect("an entry is of one of the layers");
            let bytes = &self.bytes[block as usize..][..stride];
            let neurons = bytes.chunks_exact(3 * row).take(entry.neurons());
            for neuron in neurons {
                for (weights, row) in weights.iter_mut().zip(neuron.chunks_exact(row)) {
                    dequantize_row(dtype, row, weights);
                }
                let [gate, up, down] = &weights;
                let dot = |w: &[f32]| -> f64 {
                    w.iter().zip(&self.input).map(|(&w, &h)| f64::from(w) * f64::from(h)).sum()
                };
                let (gate, up) = (dot(gate), dot(up));
                let activation = gate / (1.0 + (-gate).exp()) * up;
                sum.iter_mut().zip(down).for_each(|(s, &d)| *s += activation * f64::from(d));
            }
        }
        sum
    }
}

impl SyncOptions {
    fn shape(&self) -> MlpShape {
        let neuron = 3 * self.dtype.row_bytes(self.hidden) as u32;
        MlpShape {
            dtype: self.dtype,
            hidden: self.hidden,
            block_neurons: self.block_neurons,
            block_stride: (self.block_neurons * neuron).next_multiple_of(64),
        }
    }

    /// Blocks of the layer.
    fn blocks(&self) -> u32 {
        self.neurons / self.block_neurons
    }

    /// Blocks that run.
    fn active(&self) -> u32 {
        (f64::from(self.blocks()) * (1.0 - self.sparsity)).round() as u32
    }

    /// Of these, blocks in host memory.
    fn missing(&self, share: f64) -> usize {
        (f64::from(self.active()) * share).round() as usize
    }
}

/// Weights of a size that keeps activations at that of the input.
fn draw(options: &SyncOptions, rng: &mut Rng) -> Vec<u8> {
    let shape = options.shape();
    let row = options.dtype.row_bytes(options.hidden) as usize;
    let len = options.blocks() as usize * shape.block_stride as usize;
    let mut bytes = vec![0u8; len];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&rng.bits().to_le_bytes());
    }
    for block in bytes.chunks_exact_mut(shape.block_stride as usize) {
        for row in block.chunks_exact_mut(row).take(3 * shape.block_neurons as usize) {
            // Halves are +- 1/64 .. 1/32, scales positive.
            let (halves, high) = match options.dtype {
                DType::F16 => (&mut row[..], [0x83, 0x24]),
                DType::Q8_0 => (&mut row[options.hidden as usize..], [0x03, 0x08]),
                DType::Q4_0 => (&mut row[options.hidden as usize / 2..], [0x03, 0x18]),
            };
            for half in halves.chunks_exact_mut(2) {
                half[1] = half[1] & high[0] | high[1];
            }
        }
    }
    bytes
}

/// Runs one layer; wall time.
fn run(
    mlp: &mut StagedMlp,
    method: Method,
    list: &[Entry],
    stages: u32,
    graph: &mut Graph,
) -> Result<Duration, CudaError> {
    let device = mlp.device().clone();
    let count = list.len() as u32;
    let end = |stage: u32| count * stage / stages;
    let before = mlp.done();
    let started = Instant::now();
    match method {
        Method::DeviceSync => {
            for stage in 0..stages {
                mlp.run_part(end(stage), end(stage + 1), stage == 0)?;
                device.wait()?;
            }
        }
        Method::EventSync => {
            let event = Event::new()?;
            let started = Instant::now();
            for stage in 0..stages {
                mlp.run_part(end(stage), end(stage + 1), stage == 0)?;
                event.record(&device)?;
                event.wait()?;
            }
            return Ok(started.elapsed());
        }
        Method::Graph => {
            graph.launch(&device)?;
            for stage in 1..=stages {
                graph.say(stage);
                graph.hear(stage)?;
            }
            device.wait()?;
        }
        Method::Ahead | Method::Lag(_) => {
            mlp.launch(stages, true)?;
            // Which blocks run is known; the flags say when they are in memory.
            let places = mlp.announce(list)?;
            let end = |stage: u32| places * stage / stages;
            for stage in 0..stages {
                if let Method::Lag(lag) = method {
                    mlp.wait_done(before.wrapping_add((stage + 1).saturating_sub(lag)))?;
                }
                mlp.post_announced(end(stage + 1) - end(stage))?;
            }
            mlp.finish()?;
        }
    }
    Ok(started.elapsed())
}

struct Event(sys::CUevent);

impl Event {
    fn new() -> Result<Event, Kind> {
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: a new event in the current context.
        check(unsafe { sys::cuEventCreate(&mut event, flags) }, "event")?;
        Ok(Event(event))
    }

    fn record(&self, device: &Device) -> Result<(), Kind> {
        // SAFETY: our event and stream.
        check(unsafe { sys::cuEventRecord(self.0, device.stream()) }, "event")
    }

    fn wait(&self) -> Result<(), Kind> {
        // SAFETY: our event.
        check(unsafe { sys::cuEventSynchronize(self.0) }, "event")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: ours, destroyed once.
        unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// A layer as a graph: for each stage a wait for a host word, a kernel, and a word for the host.
#[derive(Default)]
struct Graph {
    words: Option<crate::device::Mapped>,
    graph: Option<(sys::CUgraph, sys::CUgraphExec)>,
}

impl Graph {
    fn word(&self, at: usize) -> &AtomicU32 {
        let words = self.words.as_ref().expect("a recorded graph has its words");
        // SAFETY: two words on lines of their own, used as atomics only.
        unsafe { AtomicU32::from_ptr(words.host().add(at).cast()) }
    }

    fn record(
        &mut self,
        mlp: &mut StagedMlp,
        list: &[Entry],
        stages: u32,
    ) -> Result<(), CudaError> {
        let device = mlp.device().clone();
        if self.words.is_none() {
            self.words = Some(device.mapped(512)?);
        }
        self.drop_graph();
        mlp.write_list(list)?;
        let words = self.words.as_ref().expect("made above").address();
        let (stream, count) = (device.stream(), list.len() as u32);
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: our stream, and words that live as long as the graph.
        unsafe {
            let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            check(sys::cuStreamBeginCapture_v2(stream, mode), "capture")?;
            for stage in 0..stages {
                check(sys::cuStreamWaitValue32_v2(stream, words, stage + 1, 0), "wait node")?;
                let (first, end) = (count * stage / stages, count * (stage + 1) / stages);
                mlp.run_part(first, end, stage == 0)?;
                check(
                    sys::cuStreamWriteValue32_v2(stream, words + 256, stage + 1, 0),
                    "write node",
                )?;
            }
            check(sys::cuStreamEndCapture(stream, &mut graph), "capture")?;
            check(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0), "graph")?;
            check(sys::cuGraphUpload(exec, stream), "graph")?;
        }
        device.wait()?;
        self.graph = Some((graph, exec));
        Ok(())
    }

    fn launch(&self, device: &Device) -> Result<(), Kind> {
        self.word(0).store(0, Ordering::Release);
        self.word(256).store(0, Ordering::Release);
        let (_, exec) = self.graph.expect("the graph is recorded");
        // SAFETY: our graph and stream.
        check(unsafe { sys::cuGraphLaunch(exec, device.stream()) }, "graph")
    }

    fn say(&self, stage: u32) {
        self.word(0).store(stage, Ordering::Release);
    }

    fn hear(&self, stage: u32) -> Result<(), CudaError> {
        let started = Instant::now();
        while self.word(256).load(Ordering::Acquire) < stage {
            std::hint::spin_loop();
            if started.elapsed() > Duration::from_secs(2) {
                return Err(Kind::TimedOut { stage, waited_ms: 2000 }.into());
            }
        }
        Ok(())
    }

    fn drop_graph(&mut self) {
        if let Some((graph, exec)) = self.graph.take() {
            // SAFETY: ours, destroyed once; nothing runs.
            unsafe {
                sys::cuGraphExecDestroy(exec);
                sys::cuGraphDestroy(graph);
            }
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.drop_graph();
    }
}

/// `Echo` of `cu/sync.cu`.
#[repr(C)]
struct EchoArgs {
    ask: u64,
    answer: u64,
    forwarded: u64,
    arrived: u64,
    first: u32,
    rounds: u32,
    polling: u32,
    spin_ns: u64,
}

/// Median microseconds from the host's store to the host's sight of the answer, when all of `blocks` thread blocks have
/// heard it: by a forwarder, or each from the host itself.
pub fn round_trip_us(device: &Device, blocks: u32, forwarder: bool) -> Result<f64, CudaError> {
    const ROUNDS: u32 = 500;
    let words = device.mapped(512)?;
    let memory = device.memory(512)?;
    device.wait()?;
    let echo = device.function("sync", "echo", 0)?;
    let args = EchoArgs {
        ask: words.address(),
        answer: words.address() + 256,
        forwarded: memory.address(),
        arrived: memory.address() + 256,
        first: 0,
        rounds: ROUNDS,
        polling: u32::from(forwarder),
        spin_ns: 300_000_000,
    };
    let grid = Grid { together: true, ..Grid::new(blocks, 32) };
    // SAFETY: the kernel's only parameter; the memory outlives it, as both are waited for before they are freed.
    unsafe { device.launch(echo, grid, args!(args))? };
    // SAFETY: words on lines of their own, used as atomics only.
    let (ask, answer) = unsafe {
        let host = words.host();
        (AtomicU32::from_ptr(host.cast()), AtomicU32::from_ptr(host.add(256).cast()))
    };
    let mut times = Vec::with_capacity(ROUNDS as usize);
    for round in 1..=ROUNDS {
        let started = Instant::now();
        ask.store(round, Ordering::Release);
        while answer.load(Ordering::Acquire) != round {
            std::hint::spin_loop();
            if started.elapsed() > Duration::from_secs(2) {
                return Err(Kind::TimedOut { stage: round, waited_ms: 2000 }.into());
            }
        }
        times.push(started.elapsed().as_secs_f64() * 1e6);
    }
    device.wait()?;
    Ok(median(&mut times))
}

/// Bytes a second of large copies from pinned host memory to the device.
pub fn copy_bandwidth(device: &Device) -> Result<f64, CudaError> {
    let bytes = 256 << 20;
    let from = device.mapped(bytes)?;
    let to = device.memory(bytes)?;
    let mut best = 0f64;
    for _ in 0..4 {
        let started = Instant::now();
        // SAFETY: nothing writes it.
        to.write(0, unsafe { from.bytes() })?;
        best = best.max(bytes as f64 / started.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

impl std::fmt::Display for SyncOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (hidden, neurons, block) = (self.hidden, self.neurons, self.block_neurons);
        let (sms, dtype) = (self.multiprocessors, dtype_name(self.dtype));
        let percent = self.sparsity * 100.0;
        write!(
            f,
            "{hidden} wide, {neurons} neurons, {percent} % left out, {dtype}, blocks of {block}, {:?} loads, {sms} \
             multiprocessors",
            self.loads
        )
    }
}
