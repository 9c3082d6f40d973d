//! What the backend allocates: when it is made, what it says; in its calls, nothing. One test, as it counts for the
//! whole process.

use ls_bundle::ids::LayerId;
use ls_bundle::model::DType;
use ls_compute::conformance::{Cut, Driver, Setup, base_models, check_base, models};
use ls_compute::{
    BaseNeurons, BaseTables, ComputeBackend, KvDType, MatrixRows, NeuronBlocks, Outputs, Pass,
    ProjectionPart,
};
use ls_cpu::{CpuBackend, CpuOptions, Kernels, kv_bytes};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: everything is passed to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, SeqCst);
        BYTES.fetch_add(layout.size() as u64, SeqCst);
        // SAFETY: the caller's guarantee.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's guarantee.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes of the process's address space.
fn mapped() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096
}

/// A backend whose calls must not allocate.
struct Frugal(CpuBackend);

impl Frugal {
    fn call<T>(&mut self, call: impl FnOnce(&mut CpuBackend) -> T) -> T {
        let before = ALLOCATIONS.load(SeqCst);
        let result = call(&mut self.0);
        assert_eq!(ALLOCATIONS.load(SeqCst), before, "a call has allocated");
        result
    }
}

impl ComputeBackend for Frugal {
    fn begin(&mut self, pass: Pass<'_>) {
        self.call(|backend| backend.begin(pass));
    }
    fn embed(&mut self, index: u32, row: MatrixRows<'_>) {
        self.call(|backend| backend.embed(index, row));
    }
    fn attn_input(&mut self, layer: LayerId) {
        self.call(|backend| backend.attn_input(layer));
    }
    fn project(&mut self, layer: LayerId, parts: &[ProjectionPart<'_>]) {
        self.call(|backend| backend.project(layer, parts));
    }
    fn attend(&mut self, layer: LayerId) {
        self.call(|backend| backend.attend(layer));
    }
    fn mlp_input(&mut self, layer: LayerId) {
        self.call(|backend| backend.mlp_input(layer));
    }
    fn mlp(&mut self, layer: LayerId, blocks: &NeuronBlocks<'_>) {
        self.call(|backend| backend.mlp(layer, blocks));
    }
    fn mlp_blocks(&mut self, layer: LayerId, blocks: &[NeuronBlocks<'_>]) {
        self.call(|backend| backend.mlp_blocks(layer, blocks));
    }
    fn estimate(&mut self, layer: LayerId, base: &BaseNeurons<'_>, tables: &BaseTables<'_>) {
        self.call(|backend| backend.estimate(layer, base, tables));
    }
    fn feature(&self, out: &mut [f32]) {
        let before = ALLOCATIONS.load(SeqCst);
        self.0.feature(out);
        assert_eq!(ALLOCATIONS.load(SeqCst), before, "a call has allocated");
    }
    fn importance(&mut self, layer: LayerId, blocks: &NeuronBlocks<'_>, out: &mut [f32]) {
        self.call(|backend| backend.importance(layer, blocks, out));
    }
    fn scores(&self) -> &[f32] {
        self.0.scores()
    }
    fn stand_in(
        &mut self,
        layer: LayerId,
        base: &BaseNeurons<'_>,
        tables: &BaseTables<'_>,
        chosen: &[u64],
    ) {
        self.call(|backend| backend.stand_in(layer, base, tables, chosen));
    }
    fn mlp_output(&mut self, layer: LayerId) {
        self.call(|backend| backend.mlp_output(layer));
    }
    fn head_input(&mut self) {
        self.call(CpuBackend::head_input);
    }
    fn head(&mut self, rows: &MatrixRows<'_>) {
        self.call(|backend| backend.head(rows));
    }
    fn logits(&self) -> &[f32] {
        self.0.logits()
    }
    fn nll(&self) -> &[f32] {
        self.0.nll()
    }
}

#[test]
fn memory_is_what_it_says_and_calls_allocate_nothing() {
    let model = &models(DType::Q8_0, KvDType::Q8_0, 5)[0];
    let config = &model.config;

    for kv_cache in [KvDType::F16, KvDType::Q8_0] {
        let options = CpuOptions {
            context: 3000,
            pass_tokens: 700,
            scored_tokens: 300,
            // The stacks of threads are not the backend's.
            threads: 1,
            kv_cache,
            kernels: Kernels::detect(),
        };
        let vectors = model.vectors.clone();
        let before = (mapped(), BYTES.load(SeqCst));
        let backend = CpuBackend::new(config, vectors, &options).unwrap();
        let (maps, heap) = (mapped() - before.0, BYTES.load(SeqCst) - before.1);
        let said = CpuBackend::memory(config, &options);
        let cache = kv_bytes(config, options.context, kv_cache);
        let pages = (said + cache).0.next_multiple_of(4096);
        assert!((pages - 4096..=pages + 4096).contains(&maps), "{maps} mapped, {pages} said");
        assert!(heap < 2048, "{heap} bytes from the heap");
        drop(backend);
    }

    let make = |setup: Setup<'_>| {
        let Setup { config, vectors, context, pass_tokens, scored_tokens, threads, kv_cache } =
            setup;
        let kernels = Kernels::detect();
        let options =
            CpuOptions { context, pass_tokens, scored_tokens, threads, kv_cache, kernels };
        Frugal(CpuBackend::new(config, vectors, &options).unwrap())
    };
    let mut driver = Driver::new(model, &make, 2, Cut::WHOLE);
    let tokens = &model.tokens;
    let outputs = Outputs::Score { first: 0, targets: &tokens[1..21] };
    driver.pass(0, &tokens[..20], outputs, false);
    for position in 20..40 {
        driver.pass(position, &tokens[position as usize..][..1], Outputs::LastLogits, true);
    }
    check_base(&base_models(DType::Q4_0, 6)[0], [2, 3, 4], 7, &make);
}
