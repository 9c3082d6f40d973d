//! Bundles: opened, verified, planned for, and run.

use crate::target::{Scratch, Target};
use ls_bundle::base::BaseTables;
use ls_bundle::blocks::{Block, Tensor};
use ls_bundle::ids::ByteCount;
use ls_bundle::tables::TableKind;
use ls_bundle::{Bundle, SectionKind, checksum};
use ls_cache::ReuseTable;
use ls_cpu::{CpuBackend, CpuOptions, Kernels, KvDType};
use ls_engine::memory::{BackendBytes, Budget, MemoryPlan, PlanRequest};
use ls_engine::system::{Columns, System};
use ls_engine::{Engine, EngineError, EngineOptions, SparseOptions, Verify, sparse};
use ls_hash::{MlpTables, StackTables};
use ls_io::{Alignment, SimOptions, SimStore};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

/// Verified if not longer; inputs are about this long.
const MAX_VERIFIED_BYTES: u64 = 1 << 20;
const ENTRY_BYTES: usize = 32;
const HEADER_BYTES: usize = 64;

pub(crate) const BUNDLE: Target = Target {
    rigid: true,
    parts,
    seal,
    ..Target::new("bundle", "bundles: opening, verifying, tables, plans", |folder| {
        let file = Scratch::new(folder, "bundle.lsb");
        Box::new(move |bytes| {
            file.put(bytes, 0);
            let Ok(bundle) = Bundle::open(&file.path) else { return };
            assert!(bundle.heap_bytes() <= 64 << 20);
            let _ = plan(&bundle, Budget::Total(ByteCount(1 << 20)), 0);
            let _ = plan(&bundle, Budget::WeightCache(0.5), 4096);
            if bundle.total_len() <= MAX_VERIFIED_BYTES && bundle.verify(&mut |_, _| ()).is_ok() {
                read_tables(&bundle);
            }
        })
    })
};

/// Reads every table as those do that use it.
fn read_tables(bundle: &Bundle) {
    let model = bundle.model();
    for table in &bundle.tables().tables {
        let bytes = bundle.read_table(table.layer, table.kind);
        let bytes = bytes.expect("it was verified").expect("it is listed");
        match table.kind {
            TableKind::Predictor => drop(StackTables::from_bytes(&bytes)),
            TableKind::Mlp => drop(MlpTables::from_bytes(&bytes)),
            TableKind::Reuse => drop(ReuseTable::from_bytes(&bytes)),
            TableKind::BaseScores => {
                drop(BaseTables::from_bytes(&bytes, model.ffn_hidden, model.hidden));
            }
            TableKind::Base => {}
        }
    }
}

pub(crate) const ENGINE: Target = Target {
    rigid: true,
    parts,
    seal,
    ..Target::new(
        "engine",
        "bundles with all tables, run for two tokens by each system",
        |folder| {
            let file = Scratch::new(folder, "bundle.lsb");
            Box::new(move |bytes| {
                file.put(bytes, 0);
                let Ok(bundle) = Bundle::open(&file.path) else { return };
                // What is not small is not run: it would only be slow.
                let model = bundle.model();
                let sizes = [
                    model.hidden,
                    model.ffn_hidden,
                    model.vocab_size,
                    model.layers.into(),
                    model.heads,
                ];
                if sizes.iter().any(|&size| size > 4096) {
                    return;
                }
                let bundle = Arc::new(bundle);
                let data = Arc::new(bytes.to_vec());
                for system in
                    [System::Dense, System::DejaVuPlus, System::LeanStream, System::LeanStreamBase]
                {
                    let _ = run(&bundle, &data, system);
                }
            })
        },
    )
};

/// A plan for this budget. `request_bytes` of 0: the least.
fn plan(bundle: &Bundle, budget: Budget, request_bytes: u64) -> Result<MemoryPlan, EngineError> {
    plan_for(bundle, budget, request_bytes, None)
}

fn plan_for(
    bundle: &Bundle,
    budget: Budget,
    request_bytes: u64,
    sparse: Option<ls_engine::memory::SparseNeeds>,
) -> Result<MemoryPlan, EngineError> {
    let request = PlanRequest {
        budget,
        fixed: ByteCount::ZERO,
        context: Some(8),
        prompt_tokens: 2,
        alignment: Alignment { offset: 512, memory: 512 },
        request_bytes,
        depth: 3,
        sparse,
        read_cost_bytes: 0,
    };
    let bytes = |_, _| BackendBytes::default();
    Ok(MemoryPlan::fit(&request, bundle.model(), bundle.weights(), &bytes)?)
}

fn run(bundle: &Arc<Bundle>, data: &Arc<Vec<u8>>, system: System) -> Result<(), EngineError> {
    let sparse = Columns::of(system, 0.4).map(|columns| SparseOptions { columns, recording: None });
    let needs = sparse.as_ref().map(|s| sparse::needs(bundle, &s.columns, None)).transpose()?;
    let plan = plan_for(bundle, Budget::WeightCache(0.5), 4096, needs)?;
    let options = CpuOptions {
        context: 8,
        pass_tokens: plan.pass_tokens,
        scored_tokens: 0,
        threads: 1,
        kv_cache: KvDType::F16,
        kernels: Kernels::detect(),
    };
    let Ok(backend) = CpuBackend::new(bundle.model(), bundle.vectors().clone(), &options) else {
        return Ok(());
    };
    let alignment = Alignment { offset: 512, memory: 512 };
    let disk = SimOptions { alignment, ..SimOptions::default() };
    let store = Box::new(SimStore::new(Arc::clone(data), disk));
    let options = EngineOptions { verify: Verify::First, sparse };
    let mut engine = Engine::open(bundle, &plan, options, store, Box::new(backend), &mut |_| {})?;
    let last = bundle.model().vocab_size - 1;
    engine.prefill(&[0, last], 1)?;
    engine.decode(last / 2, 0)?;
    Ok(())
}

/// Kind, offset and length of each section, as far as a table can be read and sections lie in the file.
fn sections(bytes: &[u8]) -> Vec<(u32, Range<usize>)> {
    let u32_at = |at: usize| {
        bytes.get(at..at + 4).map(|b| u32::from_le_bytes(b.try_into().expect("4 bytes")))
    };
    let u64_at = |at: usize| {
        bytes.get(at..at + 8).map(|b| u64::from_le_bytes(b.try_into().expect("8 bytes")))
    };
    let count = u32_at(12).unwrap_or(0).min(ls_bundle::limits::MAX_SECTIONS) as usize;
    let entry = |index: usize| {
        let at = HEADER_BYTES + ENTRY_BYTES * index;
        let start = usize::try_from(u64_at(at + 8)?).ok()?;
        let end = start.checked_add(usize::try_from(u64_at(at + 16)?).ok()?)?;
        (end <= bytes.len()).then_some((u32_at(at)?, start..end))
    };
    (0..count).filter_map(entry).collect()
}

fn parts(bytes: &[u8]) -> Vec<Range<usize>> {
    let sections = sections(bytes);
    let table = HEADER_BYTES..HEADER_BYTES + ENTRY_BYTES * sections.len();
    let blocks = blocks_of(bytes);
    let tables = blocks.iter().filter(|(_, table)| *table).map(|(range, _)| range.clone());
    let sections = sections.iter().map(|(_, range)| range.clone());
    let parts = [8..HEADER_BYTES, table].into_iter().chain(sections).chain(tables).collect();
    let blocks = blocks.into_iter().map(|(range, _)| range).collect();
    KNOWN.with_borrow_mut(|known| known.push((layout_of(bytes), blocks)));
    parts
}

thread_local! {
    /// Where the blocks of the corpus lie, by what says so.
    static KNOWN: RefCell<Vec<(u64, Vec<Range<usize>>)>> = const { RefCell::new(Vec::new()) };
}

/// Tells bundles apart whose blocks lie elsewhere.
fn layout_of(bytes: &[u8]) -> u64 {
    let mut layout = Vec::new();
    for (kind, range) in sections(bytes) {
        if kind == SectionKind::Weights as u32 || kind == SectionKind::Tables as u32 {
            layout.extend(checksum::of(&bytes[range]).to_le_bytes());
        } else if kind == SectionKind::BlockChecksums as u32 {
            layout.extend(range.start.to_le_bytes());
        }
    }
    checksum::of(&layout)
}

/// Where blocks lie, and whether they hold a table.
fn blocks_of(bytes: &[u8]) -> Vec<(Range<usize>, bool)> {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = Scratch::new(folder.path(), "bundle.lsb");
    file.put(bytes, 0);
    let Ok(bundle) = Bundle::open(&file.path) else { return Vec::new() };
    let range = |block: Block| {
        let start = block.extent.offset as usize;
        let table = matches!(block.name.tensor, Tensor::Table(_));
        (start..start + block.extent.len as usize, table)
    };
    bundle.blocks().map(range).collect()
}

/// Writes the checksums of all blocks, if they lie as in one of the corpus.
fn seal_blocks(bytes: &mut [u8], sections: &[(u32, Range<usize>)]) {
    let is_checksums =
        |(kind, _): &&(u32, Range<usize>)| *kind == SectionKind::BlockChecksums as u32;
    let Some((_, checksums)) = sections.iter().find(is_checksums) else { return };
    let layout = layout_of(bytes);
    KNOWN.with_borrow(|known| {
        let blocks =
            known.iter().find(|(known, _)| *known == layout).map(|(_, blocks)| &blocks[..]);
        for (at, block) in (checksums.start..checksums.end).step_by(8).zip(blocks.unwrap_or(&[])) {
            if let Some(block) = bytes.get(block.clone()) {
                let sum = checksum::of(block).to_le_bytes();
                bytes[at..at + 8].copy_from_slice(&sum);
            }
        }
    });
}

/// All checksums: of blocks, of sections, of the table and of the header.
fn seal(bytes: &mut [u8]) {
    if bytes.len() < HEADER_BYTES {
        return;
    }
    let sections = sections(bytes);
    seal_blocks(bytes, &sections);
    let count = u32::from_le_bytes(bytes[12..16].try_into().expect("4 bytes")).min(16) as usize;
    let mut of_checksums = 0;
    for index in 0..count {
        let at = HEADER_BYTES + ENTRY_BYTES * index;
        let Some(entry) = bytes.get(at..at + ENTRY_BYTES) else { break };
        let kind = u32::from_le_bytes(entry[..4].try_into().expect("4 bytes"));
        let Some((_, range)) = sections.iter().find(|(k, _)| *k == kind) else { continue };
        let sum = if kind == SectionKind::Data as u32 {
            of_checksums
        } else {
            checksum::of(&bytes[range.clone()])
        };
        if kind == SectionKind::BlockChecksums as u32 {
            of_checksums = sum;
        }
        bytes[at + 24..at + 32].copy_from_slice(&sum.to_le_bytes());
    }
    let end = (HEADER_BYTES + ENTRY_BYTES * count).min(bytes.len());
    let sum = checksum::of(&bytes[HEADER_BYTES..end]);
    bytes[32..40].copy_from_slice(&sum.to_le_bytes());
    bytes[56..64].fill(0);
    let sum = checksum::of(&bytes[..HEADER_BYTES]);
    bytes[56..64].copy_from_slice(&sum.to_le_bytes());
}
