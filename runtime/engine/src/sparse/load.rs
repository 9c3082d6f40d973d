//! What sparse decode keeps in memory besides blocks: the base, predictors, tables of reuse. What it needs is told
//! before any of it is loaded.

use crate::checker::Checker;
use crate::error::EngineError;
use crate::memory::{MemoryPlan, SparseNeeds};
use crate::predictor::{HashPredictor, MlpPredictor, Predictor, RecordedPredictor};
use crate::program::blocks_of;
use crate::recording::Recording;
use crate::stream::Stream;
use crate::system::{Columns, Eviction, PredictorKind, Refiner};
use ls_bundle::Bundle;
use ls_bundle::base::BaseTables;
use ls_bundle::extent::Extent;
use ls_bundle::ids::LayerId;
use ls_bundle::model::FfnExtent;
use ls_bundle::tables::TableKind;
use ls_cache::policy::{self, HazardTable};
use ls_cache::{EvictionPolicy, ReuseTable};
use ls_compute::{BaseNeurons, ComputeBackend};
use ls_hash::{HashStack, Kernels, Mlp, MlpTables, StackTables};
use ls_sync::{Slot, page_bytes};
use std::sync::Arc;

/// Heap bytes of a block's entries in the books of cache, policy and predictor, at most, and of a neuron's in those of a
/// visit.
const BLOCK_BOOKS: u64 = 96;
const NEURON_BOOKS: u64 = 48;
/// Decay a token of [`Eviction::Ema`]'s average: what measured best on recorded traces.
const EMA_DECAY: f32 = 0.99;
/// Share of the room that [`Eviction::HotPinned`] keeps for hot blocks.
const HOT_SHARE: f64 = 0.5;

/// A layer's base, resident.
#[derive(Debug)]
pub(crate) struct LayerBase {
    /// The tiles of gate, up and down.
    tiles: Slot,
    /// Where they start.
    skip: usize,
    /// What goes with them.
    tables: BaseTables,
}

impl LayerBase {
    /// Tells the backend that this stays where it is.
    pub(crate) fn keep(&self, backend: &mut dyn ComputeBackend) {
        let (neurons, tables) = self.view();
        backend.keep(neurons.bytes());
        for table in [tables.offset, tables.slope, tables.constant].into_iter().chain([
            tables.down_error,
            tables.gate_error,
            tables.up_error,
        ]) {
            backend.keep(bytemuck::cast_slice(table));
        }
    }

    /// As a backend takes them.
    pub(crate) fn view(&self) -> (BaseNeurons<'_>, ls_compute::BaseTables<'_>) {
        let BaseTables { cols, codebooks, offset, slope, .. } = &self.tables;
        let [gate, up, down] = *codebooks;
        let gate_and_up = [gate, up].map(|book| book.expect("checked when it was opened"));
        let len: usize = self.tables.tile_bytes().iter().sum();
        let tiles = &self.tiles.bytes()[self.skip..][..len];
        let shape = (self.tables.neurons(), *cols);
        let neurons = BaseNeurons::new(tiles, shape, gate_and_up, down);
        let tables = ls_compute::BaseTables {
            offset,
            slope,
            down_error: &self.tables.down_error,
            gate_error: &self.tables.gate_error,
            up_error: &self.tables.up_error,
            constant: &self.tables.constant,
        };
        (neurons, tables)
    }
}

/// A row of [`Columns`], made real.
pub(crate) struct Policies {
    /// One a layer; none without a base.
    pub(crate) base: Vec<LayerBase>,
    pub(crate) predictor: Option<Box<dyn Predictor>>,
    pub(crate) eviction: Box<dyn EvictionPolicy>,
}

/// What loading a table may take beyond its bytes: a window's two ends, and a page.
fn table_slack_bytes() -> u64 {
    3 * page_bytes() as u64
}

/// The tables that a row of choices reads.
fn tables_of(columns: &Columns) -> Vec<TableKind> {
    let mut kinds = Vec::new();
    if !columns.runs_all() {
        if columns.refiner == Refiner::Base {
            kinds.extend([TableKind::Base, TableKind::BaseScores]);
        }
        match columns.predictor {
            PredictorKind::Hash => kinds.push(TableKind::Predictor),
            PredictorKind::Mlp => kinds.push(TableKind::Mlp),
            PredictorKind::None | PredictorKind::Recorded => {}
        }
    }
    if matches!(columns.eviction, Eviction::Reuse | Eviction::HotPinned) {
        kinds.push(TableKind::Reuse);
    }
    kinds
}

/// What sparse decode of a bundle needs in memory besides slots.
///
/// # Errors
/// If the bundle lacks a table that it needs, or nobody chooses what runs.
pub fn needs(
    bundle: &Bundle,
    columns: &Columns,
    recording: Option<&Recording>,
) -> Result<SparseNeeds, EngineError> {
    if !columns.runs_all()
        && columns.predictor == PredictorKind::None
        && columns.refiner == Refiner::None
    {
        return Err(EngineError::nobody_chooses());
    }
    let config = bundle.model();
    let ffn: Vec<FfnExtent> = bundle.weights().layers.iter().map(|layer| layer.ffn).collect();
    let blocks: u64 = ffn.iter().map(|ffn| u64::from(ffn.blocks())).sum();
    let widest = ffn.iter().map(|ffn| u64::from(ffn.neurons)).max().unwrap_or(0);
    let seen_bytes = u64::from(bundle.block_count().div_ceil(64)) * 8;
    let book_bytes = blocks * BLOCK_BOOKS + widest * NEURON_BOOKS + seen_bytes;
    let mut table_bytes = 0;
    for kind in tables_of(columns) {
        for layer in config.layer_ids() {
            let table = bundle.tables().find(layer, kind);
            let table = table.ok_or_else(|| EngineError::missing_table(kind))?;
            table_bytes += match kind {
                // Read through aligned windows, into whole pages.
                TableKind::Base => table.extent().len + table_slack_bytes(),
                TableKind::BaseScores => BaseTables::bytes(config.ffn_hidden, config.hidden),
                // Rows are filled up; what a moving part is made from lives beside it for a moment.
                TableKind::Predictor | TableKind::Mlp | TableKind::Reuse => {
                    table.len + table.len / 4 + table_slack_bytes()
                }
            };
        }
    }
    // A trace of what is wanted, in two forms.
    table_bytes += recording.map_or(0, Recording::held_bytes);
    let most = ffn.iter().map(FfnExtent::blocks).max().unwrap_or(0);
    let visit_blocks = columns.count(most as usize) as u32;
    Ok(SparseNeeds { table_bytes, book_bytes, visit_blocks })
}

/// Loads what a row of choices needs, as planned.
pub(crate) fn load(
    bundle: &Bundle,
    plan: &MemoryPlan,
    columns: &Columns,
    recording: Option<&Arc<Recording>>,
    stream: &mut Stream,
    checker: &Checker,
    progress: &mut dyn FnMut(u64),
) -> Result<Policies, EngineError> {
    let based = columns.refiner == Refiner::Base && !columns.runs_all();
    Ok(Policies {
        base: if based { load_base(bundle, stream, checker, progress)? } else { Vec::new() },
        predictor: if columns.runs_all() { None } else { predictor(bundle, columns, recording)? },
        eviction: eviction(bundle, plan, columns, recording)?,
    })
}

/// Every layer's table of a kind, as `read` understands it.
fn each_table<T>(
    bundle: &Bundle,
    kind: TableKind,
    read: impl Fn(LayerId, &[u8]) -> Result<T, String>,
) -> Result<Vec<T>, EngineError> {
    let layer = |layer| {
        let bytes = bundle.read_table(layer, kind).map_err(EngineError::bundle)?;
        let bytes = bytes.ok_or_else(|| EngineError::missing_table(kind))?;
        read(layer, &bytes).map_err(|problem| EngineError::bad_table(layer, kind, problem))
    };
    bundle.model().layer_ids().map(layer).collect()
}

fn blocks_fit(bundle: &Bundle, layer: LayerId, found: usize) -> Result<(), String> {
    let wanted = bundle.weights().layers[layer.index()].ffn.blocks() as usize;
    if found == wanted { Ok(()) } else { Err(format!("of {found} blocks, the layer has {wanted}")) }
}

fn predictor(
    bundle: &Bundle,
    columns: &Columns,
    recording: Option<&Arc<Recording>>,
) -> Result<Option<Box<dyn Predictor>>, EngineError> {
    let (kernels, hidden) = (Kernels::detect(), bundle.model().hidden as usize);
    let width_fits = |dims: usize| {
        if dims == hidden {
            Ok(())
        } else {
            Err(format!("of width {dims}, the model has {hidden}"))
        }
    };
    Ok(match columns.predictor {
        PredictorKind::None => None,
        PredictorKind::Hash => {
            let stacks = each_table(bundle, TableKind::Predictor, |layer, bytes| {
                let tables = StackTables::from_bytes(bytes).map_err(|error| error.to_string())?;
                width_fits(tables.input.dims())?;
                let stack = HashStack::new(tables, kernels).map_err(|error| error.to_string())?;
                let head = stack.block_head().ok_or("scores no blocks")?;
                blocks_fit(bundle, layer, head.blocks())?;
                Ok(stack)
            })?;
            Some(Box::new(HashPredictor::new(stacks, kernels)))
        }
        PredictorKind::Mlp => {
            let networks = each_table(bundle, TableKind::Mlp, |layer, bytes| {
                let tables = MlpTables::from_bytes(bytes).map_err(|error| error.to_string())?;
                width_fits(tables.input.dims())?;
                let mlp = Mlp::new(tables, kernels).map_err(|error| error.to_string())?;
                blocks_fit(bundle, layer, mlp.blocks())?;
                Ok(mlp)
            })?;
            Some(Box::new(MlpPredictor::new(networks)))
        }
        PredictorKind::Recorded => {
            let recording = recording.ok_or_else(EngineError::no_recording)?;
            Some(Box::new(RecordedPredictor::new(Arc::clone(recording))))
        }
    })
}

fn eviction(
    bundle: &Bundle,
    plan: &MemoryPlan,
    columns: &Columns,
    recording: Option<&Arc<Recording>>,
) -> Result<Box<dyn EvictionPolicy>, EngineError> {
    let blocks = blocks_of(bundle.weights());
    let reuse = || {
        each_table(bundle, TableKind::Reuse, |layer, bytes| {
            let table = ReuseTable::from_bytes(bytes).map_err(|error| error.to_string())?;
            if let ReuseTable::Hazard(table) = &table {
                blocks_fit(bundle, layer, table.initial.len())?;
            }
            Ok(table)
        })
    };
    Ok(match columns.eviction {
        // Nothing ever has to go: the cheapest books will do.
        kind if plan.passing == 0 && kind != Eviction::None => Box::new(policy::Lru::new(&blocks)),
        Eviction::None => Box::new(policy::Nothing),
        Eviction::Lru => Box::new(policy::Lru::new(&blocks)),
        Eviction::Lfu => Box::new(policy::Lfu::new(&blocks)),
        Eviction::Ema => Box::new(policy::Ema::new(&blocks, EMA_DECAY)),
        Eviction::HotPinned => {
            let tables = hazards(reuse()?)?;
            let mut frequencies = vec![0; blocks.len()];
            for (range, table) in blocks.ranges().iter().zip(&tables) {
                for (id, &mean) in range.clone().zip(&table.initial) {
                    frequencies[blocks.index(ls_bundle::ids::BlockId(id))] = u32::from(mean);
                }
            }
            let a_layer = (f64::from(plan.slots) * HOT_SHARE / blocks.layers() as f64) as u32;
            let hot = vec![a_layer; blocks.layers()];
            Box::new(policy::HotPinned::new(&blocks, &frequencies, &hot))
        }
        Eviction::Reuse => {
            let tables = reuse()?;
            if matches!(tables[0], ReuseTable::Hazard(_)) {
                Box::new(policy::Hazard::new(&blocks, &hazards(tables)?))
            } else {
                let gaps = tables.into_iter().enumerate().map(|(layer, table)| match table {
                    ReuseTable::Gaps(table) => Ok(table),
                    ReuseTable::Hazard(_) => Err(mixed(layer)),
                });
                let gaps = gaps.collect::<Result<_, _>>()?;
                Box::new(policy::ReuseDistance::new(&blocks, gaps))
            }
        }
        Eviction::Belady => {
            let recording = recording.ok_or_else(EngineError::no_recording)?;
            Box::new(policy::Belady::new(&recording.trace()))
        }
    })
}

fn hazards(tables: Vec<ReuseTable>) -> Result<Vec<HazardTable>, EngineError> {
    let tables = tables.into_iter().enumerate().map(|(layer, table)| match table {
        ReuseTable::Hazard(table) => Ok(table),
        ReuseTable::Gaps(_) => Err(mixed(layer)),
    });
    tables.collect()
}

fn mixed(layer: usize) -> EngineError {
    let problem = "of another kind than is needed";
    EngineError::bad_table(LayerId(layer as u16), TableKind::Reuse, problem)
}

/// Loads the base of every layer.
fn load_base(
    bundle: &Bundle,
    stream: &mut Stream,
    checker: &Checker,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<LayerBase>, EngineError> {
    let config = bundle.model();
    let find = |layer| bundle.tables().find(layer, TableKind::Base).copied();
    let extents: Vec<_> = config
        .layer_ids()
        .map(|layer| find(layer).ok_or_else(|| EngineError::missing_table(TableKind::Base)))
        .collect::<Result<_, _>>()?;
    let places: Vec<Extent> = extents.iter().map(|table| table.extent()).collect();
    let loaded = checker.load(stream, &places, progress)?;
    let scores = each_table(bundle, TableKind::BaseScores, |_, bytes| {
        BaseTables::from_bytes(bytes, config.ffn_hidden, config.hidden)
            .map_err(|problem| problem.to_string())
    })?;
    let mut base = Vec::with_capacity(loaded.len());
    for (((table, (tiles, skip)), layer), tables) in
        extents.iter().zip(loaded).zip(config.layer_ids()).zip(scores)
    {
        let wanted = tables.tile_bytes().iter().sum::<usize>() as u64;
        if table.len != wanted || tables.codebooks[..2].contains(&None) {
            let problem = format!("{} bytes of tiles, {wanted} are wanted", table.len);
            return Err(EngineError::bad_table(layer, TableKind::Base, problem));
        }
        base.push(LayerBase { tiles, skip, tables });
    }
    Ok(base)
}
