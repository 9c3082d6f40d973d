//! The FFN: exact neurons of one token or many, and the low-bit base.

use crate::backend::{OpenClBackend, done};
use crate::buffers::{ACTIVATION_NEURONS, FFN_LANES, MAX_LIST, STAND_IN_LANES};
use crate::dense::{GROUP_ROWS, LAUNCH_BYTES, RowsArgs, TILE};
use crate::device::{Arg, Mem, Memory, Place};
use crate::programs::SIZE;
use ls_bundle::low_bit::Codebook;
use ls_bundle::model::DType;
use ls_bundle::tiles::{self, Tiles};
use ls_compute::{BaseNeurons, BaseTables, NeuronBlocks};

/// An entry of the list whose neuron was copied.
const COPIED: u64 = 1 << 63;
/// Outputs of a tile of the base.
const BASE_TILE: u32 = tiles::TILE as u32;
// A work-item has an output.
const _: () = assert!(tiles::TILE == SIZE);

/// `Codebook` of `cl/base.cl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
struct CodebookArgs {
    values: [i8; 16],
    bits: u32,
}

impl CodebookArgs {
    fn of(codebook: &Codebook) -> CodebookArgs {
        let mut values = [0; 16];
        values[..codebook.values().len()].copy_from_slice(codebook.values());
        CodebookArgs { values, bits: codebook.bits().count() }
    }
}

/// Where a launch's neurons are.
#[derive(Clone, Copy, Debug)]
struct Source {
    kept: Mem,
    copied: Mem,
    /// The entries, if there are some.
    list: Option<Place>,
}

impl OpenClBackend {
    /// Decode, blocks side by side.
    pub(crate) fn mlp_one(&mut self, blocks: &NeuronBlocks<'_>) {
        let room =
            if self.weights.find(blocks.bytes).is_some() { usize::MAX } else { LAUNCH_BYTES };
        for part in parts(blocks, room) {
            let place = done(self.weights.place(part.bytes));
            let source = Source { kept: place.mem, copied: self.weights.any(), list: None };
            self.run_neurons(part.dtype, source, gates(&part, place.at));
        }
    }

    /// Decode, blocks in several places. A launch has blocks from one kept piece of memory and one of copies.
    pub(crate) fn mlp_list(&mut self, blocks: &[NeuronBlocks<'_>]) {
        let Some(first) = blocks.first() else { return };
        let (mut kept, mut copied) = (None, None);
        for blocks in blocks {
            assert_eq!(blocks.dtype, first.dtype, "one number format");
            assert_eq!(blocks.hidden as usize, self.shape.hidden, "width of a neuron");
            for block in parts(blocks, 1) {
                let found = self.weights.find(block.bytes);
                let full = self.list.len() + block.neurons as usize > MAX_LIST;
                let other = match found {
                    Some(place) => kept.is_some_and(|kept| kept != place.mem),
                    None => copied.is_some() && !self.weights.has_room(block.bytes.len()),
                };
                if full || other {
                    self.launch_list(first.dtype, kept.take(), copied.take());
                }
                let (place, mark) = match found {
                    Some(place) => (place, 0),
                    None => (done(self.weights.stage(block.bytes)), COPIED),
                };
                *(if mark == 0 { &mut kept } else { &mut copied }) = Some(place.mem);
                let len = 3 * block.dtype.row_bytes(block.hidden);
                let neurons = (0..u64::from(block.neurons)).map(|n| (place.at + n * len) | mark);
                self.list.extend(neurons);
            }
        }
        self.launch_list(first.dtype, kept, copied);
    }

    fn launch_list(&mut self, dtype: DType, kept: Option<Mem>, copied: Option<Mem>) {
        if self.list.is_empty() {
            return;
        }
        let list = done(self.weights.stage(bytemuck::cast_slice(&self.list)));
        let any = self.weights.any();
        let source =
            Source { kept: kept.unwrap_or(any), copied: copied.unwrap_or(any), list: Some(list) };
        let (count, cols) = (self.list.len() as u32, self.shape.hidden as u32);
        self.list.clear();
        self.run_neurons(dtype, source, RowsArgs { block: 1, count, cols, ..Default::default() });
    }

    /// Activations of neurons, then their down rows, each added to the sum whose turn it is.
    fn run_neurons(&mut self, dtype: DType, source: Source, rows: RowsArgs) {
        let (b, of) = (&self.buffers, self.kernels.of(dtype));
        // Entries lie at multiples of eight, as pieces of a staging buffer do.
        let (list, first_entry) = source
            .list
            .map_or((source.copied, None), |place| (place.mem, Some((place.at / 8) as u32)));
        let listed = [
            Arg::At(source.kept),
            Arg::At(source.copied),
            Arg::At(list),
            Arg::U32(u32::from(first_entry.is_some())),
            Arg::U32(first_entry.unwrap_or(0)),
            Arg::Bytes(bytemuck::bytes_of(&rows)),
        ];
        let [a, c, d, e, f, g] = listed;
        let groups = [rows.count.div_ceil(GROUP_ROWS) as usize, 1, 1];
        let args = [a, c, d, e, f, g, Arg::Memory(&b.h), Arg::Memory(&b.neurons)];
        // SAFETY: `count` neurons where rows or entries say; h is as wide as their rows.
        unsafe { self.launch(&of.activate, groups, &args) };
        let groups = [(rows.cols as usize / 8).div_ceil(SIZE), FFN_LANES, 1];
        let (activations, sums) = (Arg::Memory(&b.neurons), Arg::Memory(&b.lanes));
        let args = [a, c, d, e, f, g, activations, Arg::U32(self.ffn.neurons), sums];
        // SAFETY: as above; as many sums as there are work-groups in the second dimension.
        unsafe { self.launch(&of.combine, groups, &args) };
        self.ffn.neurons += rows.count;
    }

    /// `to` = x + the sums of the FFN.
    pub(crate) fn add_lanes(&self, to: &Memory) {
        let (b, hidden) = (&self.buffers, self.shape.hidden);
        let args = [
            Arg::Memory(to),
            Arg::Memory(&b.x),
            Arg::Memory(&b.lanes),
            Arg::U32(FFN_LANES as u32),
            Arg::Memory(&b.stand_ins),
            Arg::U32(self.ffn.stand_in_lanes),
            Arg::Memory(&b.constant),
            Arg::U32(hidden as u32),
        ];
        // SAFETY: sums are `hidden` wide, and as many as are said.
        unsafe { self.launch(&self.kernels.add_lanes, [hidden.div_ceil(SIZE), 1, 1], &args) };
    }

    /// Prefill: SwiGLU of some neurons, then their down rows.
    pub(crate) fn mlp_many(&mut self, blocks: &NeuronBlocks<'_>) {
        let kept = self.weights.find(blocks.bytes).is_some();
        let held = ACTIVATION_NEURONS / blocks.block_neurons as usize;
        assert!(held > 0, "blocks of {} neurons", blocks.block_neurons);
        let room = if kept { usize::MAX } else { LAUNCH_BYTES };
        let row = blocks.dtype.row_bytes(blocks.hidden);
        let tokens = self.pass.tokens;
        let width = ACTIVATION_NEURONS.min(self.shape.ffn.next_multiple_of(64)) as u32;
        for part in parts(blocks, room.min(held * blocks.block_stride)) {
            let place = done(self.weights.place(part.bytes));
            let rows = gates(&part, place.at);
            let downs = RowsArgs { base: rows.base + 2 * row, ..rows };
            let (b, of) = (&self.buffers, self.kernels.of(part.dtype));
            let groups =
                |columns: u32| [columns.div_ceil(TILE) as usize, tokens.div_ceil(TILE) as usize, 1];
            let args = [
                Arg::At(place.mem),
                Arg::Bytes(bytemuck::bytes_of(&rows)),
                Arg::U64(rows.base + row),
                Arg::Memory(&b.h),
                Arg::U32(tokens),
                Arg::Memory(&b.activations),
                Arg::U32(width),
            ];
            // SAFETY: activations have `width` numbers a token, at least `neurons`; h and x `hidden`.
            unsafe { self.launch(&of.swiglu, groups(part.neurons), &args) };
            let args = [
                Arg::At(place.mem),
                Arg::Bytes(bytemuck::bytes_of(&downs)),
                Arg::Memory(&b.activations),
                Arg::U32(width),
                Arg::U32(tokens),
                Arg::Memory(&b.x),
            ];
            // SAFETY: as above.
            unsafe { self.launch(&of.weigh, groups(part.hidden), &args) };
        }
    }

    /// What each of some neurons would add, to the host.
    pub(crate) fn importance_one(&mut self, blocks: &NeuronBlocks<'_>, out: &mut [f32]) {
        let room =
            if self.weights.find(blocks.bytes).is_some() { usize::MAX } else { LAUNCH_BYTES };
        let mut out = out;
        for part in parts(blocks, room) {
            let place = done(self.weights.place(part.bytes));
            let (rows, b) = (gates(&part, place.at), &self.buffers);
            let args = [
                Arg::At(place.mem),
                Arg::Bytes(bytemuck::bytes_of(&rows)),
                Arg::Memory(&b.h),
                Arg::Memory(&b.importance),
            ];
            let groups = [part.neurons.div_ceil(GROUP_ROWS) as usize, 1, 1];
            // SAFETY: a number for each neuron, of which there are no more than the layer has.
            unsafe { self.launch(&self.kernels.of(part.dtype).importance, groups, &args) };
            let (these, rest) = out.split_at_mut(part.neurons as usize);
            done(b.importance.read(0, bytemuck::cast_slice_mut(these)));
            out = rest;
        }
    }

    /// Estimates and scores of all neurons; the scores to the host.
    pub(crate) fn estimate_one(&mut self, base: &BaseNeurons<'_>, tables: &BaseTables<'_>) {
        let matrices = base.gate_and_up().map(|tiles| *tiles);
        let [gate, up] = matrices.map(|tiles| CodebookArgs::of(tiles.codebook()));
        let (neurons, hidden) = (base.neurons() as u32, base.hidden());
        self.tile_rows(base, &matrices, |this, places, first_row, rows| {
            let errors = [tables.down_error, tables.gate_error, tables.up_error];
            let errors = errors.map(|table| this.numbers(table));
            let (b, [down, of_gate, of_up]) = (&this.buffers, errors);
            let args = [
                Arg::At(places[0].mem),
                Arg::U64(places[0].at),
                Arg::At(places[1].mem),
                Arg::U64(places[1].at),
                Arg::U32(first_row * BASE_TILE),
                Arg::U32(neurons),
                Arg::U32(hidden),
                Arg::Bytes(bytemuck::bytes_of(&gate)),
                Arg::Bytes(bytemuck::bytes_of(&up)),
                Arg::Memory(&b.h),
                Arg::At(down.0),
                Arg::U32(down.1),
                Arg::At(of_gate.0),
                Arg::U32(of_gate.1),
                Arg::At(of_up.0),
                Arg::U32(of_up.1),
                Arg::Memory(&b.estimates),
                Arg::Memory(&b.scores),
            ];
            // SAFETY: `rows` rows of tiles; each table has a number a neuron.
            unsafe { this.launch(&this.kernels.estimate, [rows as usize, 1, 1], &args) };
        });
        let to = bytemuck::cast_slice_mut(&mut self.host.scores[..neurons as usize]);
        done(self.buffers.scores.read(0, to));
    }

    /// Numbers on the device, and which of its buffer's is the first.
    fn numbers(&mut self, table: &[f32]) -> (Mem, u32) {
        let place = done(self.weights.place(bytemuck::cast_slice(table)));
        (place.mem, (place.at / 4) as u32)
    }

    /// Sums of stand-ins for neurons that are not chosen.
    pub(crate) fn stand_in_one(
        &mut self,
        base: &BaseNeurons<'_>,
        tables: &BaseTables<'_>,
        chosen: &[u64],
    ) {
        done(self.buffers.constant.write(0, bytemuck::cast_slice(tables.constant)));
        let Some(down) = base.down() else {
            done(self.buffers.stand_ins.fill_zero());
            return;
        };
        let (book, neurons) = (CodebookArgs::of(down.codebook()), base.neurons() as u32);
        let (hidden, words) = (base.hidden(), base.neurons().div_ceil(64));
        self.tile_rows(base, &[*down], |this, places, first_row, rows| {
            let chosen = done(this.weights.stage(bytemuck::cast_slice(&chosen[..words])));
            let [offset, slope] = [tables.offset, tables.slope].map(|table| this.numbers(table));
            let b = &this.buffers;
            let args = [
                Arg::At(places[0].mem),
                Arg::U64(places[0].at),
                Arg::U32(first_row),
                Arg::U32(neurons),
                Arg::U32(hidden),
                Arg::Bytes(bytemuck::bytes_of(&book)),
                Arg::At(offset.0),
                Arg::U32(offset.1),
                Arg::At(slope.0),
                Arg::U32(slope.1),
                Arg::Memory(&b.estimates),
                Arg::At(chosen.mem),
                Arg::U64(chosen.at),
                Arg::Memory(&b.stand_ins),
            ];
            let groups = [rows as usize, STAND_IN_LANES, 1];
            // SAFETY: `rows` rows of tiles; a bit and two numbers for each neuron.
            unsafe { this.launch(&this.kernels.stand_in, groups, &args) };
        });
    }

    /// Calls `run` with rows of tiles of some of the base's matrices, equally high, that are on the device: the matrices'
    /// places, the number of the first row and how many there are.
    fn tile_rows(
        &mut self,
        base: &BaseNeurons<'_>,
        matrices: &[Tiles<'_>],
        mut run: impl FnMut(&mut OpenClBackend, [Place; 2], u32, u32),
    ) {
        let kept = self.weights.find(base.bytes()).is_some();
        let row_bytes = |tiles: &Tiles<'_>| tiles.row(0).len();
        let largest = matrices.iter().map(row_bytes).max().unwrap_or(1);
        let all = matrices[0].bytes().len() / row_bytes(&matrices[0]);
        let step = if kept { all } else { (LAUNCH_BYTES / largest / matrices.len()).max(1) };
        for first in (0..all).step_by(step) {
            let rows = step.min(all - first);
            let mut places = [Place { mem: self.weights.any(), at: 0 }; 2];
            for (place, tiles) in places.iter_mut().zip(matrices) {
                let len = row_bytes(tiles);
                let bytes = &tiles.bytes()[first * len..][..rows * len];
                *place = done(self.weights.place(bytes));
            }
            run(self, places, first as u32, rows as u32);
        }
    }
}

/// The gate rows of blocks that lie at `base` of a buffer.
fn gates(blocks: &NeuronBlocks<'_>, base: u64) -> RowsArgs {
    RowsArgs {
        base,
        block_stride: blocks.block_stride as u64,
        block: blocks.block_neurons,
        stride: 3 * blocks.dtype.row_bytes(blocks.hidden) as u32,
        count: blocks.neurons,
        cols: blocks.hidden,
    }
}

/// Blocks in parts of at most `bytes`, but of one block at least.
fn parts<'a>(
    blocks: &NeuronBlocks<'a>,
    bytes: usize,
) -> impl Iterator<Item = NeuronBlocks<'a>> + use<'a> {
    let all = *blocks;
    let count = all.neurons.div_ceil(all.block_neurons);
    let step = u32::try_from((bytes / all.block_stride).max(1)).unwrap_or(u32::MAX);
    (0..count).step_by(step.min(count.max(1)) as usize).map(move |first| {
        let blocks = step.min(count - first);
        let first_neuron = first * all.block_neurons;
        NeuronBlocks {
            bytes: &all.bytes[first as usize * all.block_stride..]
                [..blocks as usize * all.block_stride],
            first_neuron: all.first_neuron + first_neuron,
            neurons: (blocks * all.block_neurons).min(all.neurons - first_neuron),
            ..all
        }
    })
}
