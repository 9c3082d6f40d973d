//! Slots that the backend still reads are left alone.

use crate::{CASE, POLICIES, SYSTEMS, Sample, bits, said, seeded};
use ls_bundle::ids::LayerId;
use ls_bundle::model::FfnExtent;
use ls_compute::{
    BaseNeurons, BaseTables, ComputeBackend, MatrixRows, NeuronBlocks, Pass, ProjectionPart,
};
use ls_cpu::CpuBackend;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The processor, but that it claims to read the last `lag` blocks still.
struct Slow {
    cpu: CpuBackend,
    lag: usize,
    lent: Range<usize>,
    /// Addresses of blocks that it claims to read.
    running: VecDeque<usize>,
    /// Times that it was waited for with something to wait for.
    waits: Arc<AtomicUsize>,
}

impl Slow {
    fn forget(&mut self) {
        let done = self.running.len() - self.running();
        self.running.drain(..done);
    }
}

impl ComputeBackend for Slow {
    fn lend(&mut self, slots: &[u8], slot_bytes: usize, ffn: &FfnExtent) -> bool {
        let start = slots.as_ptr().addr();
        self.lent = start..start + slots.len();
        assert!(slot_bytes as u64 >= ffn.block_stride());
        true
    }
    fn running(&self) -> usize {
        self.running.len().min(self.lag)
    }
    fn wait_blocks(&mut self) {
        if !self.running.is_empty() {
            self.waits.fetch_add(1, Ordering::Relaxed);
        }
        self.running.clear();
    }
    fn mlp_blocks(&mut self, layer: LayerId, blocks: &[NeuronBlocks<'_>]) {
        self.forget();
        for block in blocks {
            let at = block.bytes.as_ptr().addr();
            assert!(self.lent.contains(&at), "blocks come in lent slots");
            assert!(!self.running.contains(&at), "a slot was filled anew while it was read");
            self.running.push_back(at);
        }
        self.cpu.mlp_blocks(layer, blocks);
    }
    fn keep(&mut self, bytes: &[u8]) -> bool {
        self.cpu.keep(bytes)
    }
    fn begin(&mut self, pass: Pass<'_>) {
        assert!(self.running.is_empty(), "a layer ends when its blocks have been read");
        self.cpu.begin(pass);
    }
    fn embed(&mut self, index: u32, row: MatrixRows<'_>) {
        self.cpu.embed(index, row);
    }
    fn attn_input(&mut self, layer: LayerId) {
        self.cpu.attn_input(layer);
    }
    fn project(&mut self, layer: LayerId, parts: &[ProjectionPart<'_>]) {
        self.cpu.project(layer, parts);
    }
    fn attend(&mut self, layer: LayerId) {
        self.cpu.attend(layer);
    }
    fn mlp_input(&mut self, layer: LayerId) {
        self.cpu.mlp_input(layer);
    }
    fn mlp(&mut self, layer: LayerId, blocks: &NeuronBlocks<'_>) {
        self.cpu.mlp(layer, blocks);
    }
    fn feature(&self, out: &mut [f32]) {
        self.cpu.feature(out);
    }
    fn importance(&mut self, layer: LayerId, blocks: &NeuronBlocks<'_>, out: &mut [f32]) {
        self.cpu.importance(layer, blocks, out);
    }
    fn estimate(&mut self, layer: LayerId, base: &BaseNeurons<'_>, tables: &BaseTables<'_>) {
        self.cpu.estimate(layer, base, tables);
    }
    fn scores(&self) -> &[f32] {
        self.cpu.scores()
    }
    fn stand_in(
        &mut self,
        layer: LayerId,
        base: &BaseNeurons<'_>,
        tables: &BaseTables<'_>,
        chosen: &[u64],
    ) {
        self.cpu.stand_in(layer, base, tables, chosen);
    }
    fn mlp_output(&mut self, layer: LayerId) {
        self.cpu.mlp_output(layer);
    }
    fn head_input(&mut self) {
        self.cpu.head_input();
    }
    fn head(&mut self, rows: &MatrixRows<'_>) {
        self.cpu.head(rows);
    }
    fn logits(&self) -> &[f32] {
        self.cpu.logits()
    }
    fn nll(&self) -> &[f32] {
        self.cpu.nll()
    }
}

#[test]
fn slots_that_are_read_are_left_alone() {
    let sample = Sample::new(2);
    let waits = Arc::new(AtomicUsize::new(0));
    for seed in 0..24 {
        let case = crate::Case {
            weight_cache: f64::from(seed as u32 % 4) / 8.0,
            policy: POLICIES[seed as usize % 6],
            system: SYSTEMS[seed as usize % 5],
            exact_share: [0.3, 1.0][seed as usize % 2],
            canonical: seed % 3 > 0,
            threads: 1,
            ..CASE
        };
        let lag = [3, 40, usize::MAX][seed as usize / 2 % 3];
        let slow = |cpu| -> Box<dyn ComputeBackend> {
            let (lent, running, waits) = (0..0, VecDeque::new(), Arc::clone(&waits));
            Box::new(Slow { cpu, lag, lent, running, waits })
        };
        let mut engine = sample.open_on(&case, seeded(seed), &slow).unwrap();
        let got = bits(&said(&mut engine).unwrap());
        if case.canonical {
            assert_eq!(got, bits(&sample.run(&case, seeded(seed), true).unwrap()), "{case:?}");
        }
    }
    assert!(waits.load(Ordering::Relaxed) > 0, "slots were scarce");
}
