//! The FFN: exact neurons of one token or many, and the low-bit base.

use crate::backend::{CudaBackend, Ffn, done};
use crate::buffers::ACTIVATION_NEURONS;
use crate::dense::{RowsArgs, TILE};
use crate::device::{Grid, args};
use crate::error::check;
use crate::launch::{Loads, MlpArgs, MlpKernel};
use crate::stages::Vectors;
use crate::weights::STAGING_BYTES;
use cudarc::driver::sys;
use ls_bundle::ids::LayerId;
use ls_bundle::low_bit::Codebook;
use ls_bundle::tiles::{self, Tiles};
use ls_compute::{BaseNeurons, BaseTables, NeuronBlocks};

/// Blocks of a launch that are in several places.
pub(crate) const MAX_LIST: usize = 4096;
/// Bytes that one launch may have copied: what is copied after them must not take their place.
const LAUNCH_BYTES: usize = STAGING_BYTES / 2;

/// `Codebook` of `cu/base.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
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

impl CudaBackend {
    /// The kernel for blocks of this shape.
    fn mlp_kernel(&mut self, blocks: &NeuronBlocks<'_>) -> MlpKernel {
        let wanted = (blocks.dtype, blocks.block_neurons, blocks.block_stride as u32);
        match self.mlp {
            Some((shape, kernel)) if shape == wanted => kernel,
            _ => {
                let info = self.device.info();
                let loads = self.options.loads.unwrap_or(Loads::best(info.capability));
                let (block, hidden) = ((wanted.1, wanted.2), blocks.hidden);
                let count = info.multiprocessors;
                let kernel = MlpKernel::new(&self.device, wanted.0, hidden, block, count, loads);
                let kernel = done(kernel);
                self.mlp = Some((wanted, kernel));
                kernel
            }
        }
    }

    /// The arguments of every launch that sums in lanes; they begin at zero.
    fn mlp_args(&self, blocks: &NeuronBlocks<'_>) -> MlpArgs {
        if self.ffn.blocks == 0 {
            done(self.buffers.lanes.fill_zero(0, self.buffers.lanes.bytes()));
        }
        MlpArgs {
            h: self.buffers.h.address(),
            lanes: self.buffers.lanes.address(),
            stride: blocks.block_stride as u32,
            block_neurons: blocks.block_neurons,
            lane_shift: self.ffn.blocks,
            hidden: blocks.hidden,
            ..MlpArgs::default()
        }
    }

    /// Decode, blocks side by side.
    pub(crate) fn mlp_one(&mut self, blocks: &NeuronBlocks<'_>) {
        let kernel = self.mlp_kernel(blocks);
        let kept = self.find_blocks(blocks.bytes).is_some();
        for part in parts(blocks, if kept { usize::MAX } else { LAUNCH_BYTES }) {
            let base = match self.find_blocks(part.bytes) {
                Some(address) => address,
                None => done(self.weights.stage(part.bytes)),
            };
            let end = part.neurons.div_ceil(part.block_neurons);
            let args = MlpArgs {
                base,
                last: end - 1,
                last_neurons: part.neurons - (end - 1) * part.block_neurons,
                end,
                ..self.mlp_args(&part)
            };
            // SAFETY: `end` blocks from `base` on; lanes as many as the kernel has.
            done(unsafe { kernel.launch(&self.device, args) });
            self.ffn.blocks += end;
        }
    }

    /// Decode, blocks in several places.
    pub(crate) fn mlp_list(&mut self, blocks: &[NeuronBlocks<'_>]) {
        let Some(first) = blocks.first() else { return };
        let kernel = self.mlp_kernel(first);
        let mut copied = 0;
        for blocks in blocks {
            assert_eq!(blocks.dtype, first.dtype, "one number format");
            for block in parts(blocks, 1) {
                if self.list.len() == MAX_LIST || copied + block.bytes.len() > LAUNCH_BYTES {
                    self.launch_list(&kernel, first);
                    copied = 0;
                }
                let address = match self.find_blocks(block.bytes) {
                    Some(address) => address,
                    None => {
                        copied += block.bytes.len();
                        done(self.weights.stage(block.bytes))
                    }
                };
                self.list.push(address | u64::from(block.neurons - 1));
            }
        }
        self.launch_list(&kernel, first);
    }

    fn launch_list(&mut self, kernel: &MlpKernel, shape: &NeuronBlocks<'_>) {
        let end = self.list.len() as u32;
        if end == 0 {
            return;
        }
        let list = done(self.weights.stage(bytemuck::cast_slice(&self.list)));
        let args = MlpArgs { list, end, ..self.mlp_args(shape) };
        // SAFETY: `end` blocks at the addresses of the list; lanes as many as the kernel has.
        done(unsafe { kernel.launch(&self.device, args) });
        self.ffn.blocks += end;
        self.list.clear();
    }

    /// Decode, blocks in lent slots: a stage of the kernel that runs while they come. False: they are not in slots.
    pub(crate) fn mlp_stage(&mut self, layer: LayerId, blocks: &[NeuronBlocks<'_>]) -> bool {
        let Some(staged) = &mut self.staged else { return false };
        if !staged.list(layer, blocks) {
            return false;
        }
        if !staged.is_open() {
            // The kernel adds to the residual, which so is Eq. 2's x~ after each stage.
            let vectors = Vectors { h: self.buffers.h.address(), sum: self.buffers.x.address() };
            if self.has_sums() {
                self.add_lanes(vectors.sum);
                self.ffn = Ffn { blocks: 0, settled: self.ffn.stand_ins, ..self.ffn };
            }
            let staged = self.staged.as_mut().expect("looked at above");
            done(staged.open(vectors));
        }
        let staged = self.staged.as_mut().expect("looked at above");
        done(staged.feed());
        true
    }

    /// Lets the kernel of the stages end: what is launched from now on comes after it.
    pub(crate) fn close_stages(&mut self) {
        if let Some(staged) = self.staged.as_mut().filter(|staged| staged.is_open()) {
            done(staged.close());
        }
    }

    /// Whether something has been summed beside the residual.
    pub(crate) fn has_sums(&self) -> bool {
        self.ffn.blocks > 0 || (self.ffn.stand_ins && !self.ffn.settled)
    }

    /// The device's copy of blocks, if its address leaves room for their number.
    fn find_blocks(&self, bytes: &[u8]) -> Option<u64> {
        self.weights.find(bytes).filter(|address| address.is_multiple_of(64))
    }

    /// `to` = x + the sums of the FFN.
    pub(crate) fn add_lanes(&self, to: u64) {
        let hidden = self.shape.hidden as u32;
        let b = &self.buffers;
        let (x, lanes, stand_ins) = (b.x.address(), b.lanes.address(), b.stand_ins.address());
        let is_new = self.ffn.stand_ins && !self.ffn.settled;
        let constant = if is_new { b.constant.address() } else { 0 };
        // Without blocks lanes hold what was summed before.
        let count = match self.mlp {
            Some((_, kernel)) if self.ffn.blocks > 0 => kernel.lanes(),
            _ => 0,
        };
        let grid = Grid::new(hidden.div_ceil(32), 256);
        let args = args!(to, x, lanes, count, stand_ins, constant, hidden);
        // SAFETY: sums are `hidden` wide, and as many as are said.
        unsafe { self.launch(self.functions.add_lanes, grid, args) };
    }

    /// Prefill: SwiGLU of some neurons, then their down rows.
    pub(crate) fn mlp_many(&mut self, blocks: &NeuronBlocks<'_>) {
        let kept = self.weights.find(blocks.bytes).is_some();
        let held = ACTIVATION_NEURONS / blocks.block_neurons as usize;
        assert!(held > 0, "blocks of {} neurons", blocks.block_neurons);
        let room = if kept { usize::MAX } else { LAUNCH_BYTES };
        let row = blocks.dtype.row_bytes(blocks.hidden);
        let tokens = self.pass.tokens;
        let width = (self.buffers.activations.bytes() / 4 / self.options.pass_tokens as usize)
            .min(ACTIVATION_NEURONS) as u32;
        for part in parts(blocks, room.min(held * blocks.block_stride)) {
            let base = done(self.weights.place(part.bytes));
            let rows = |at: u64| RowsArgs {
                base: base + at * row,
                block: part.block_neurons,
                stride: 3 * row as u32,
                block_stride: part.block_stride as u64,
                count: part.neurons,
                cols: part.hidden,
            };
            let of = *self.functions.of(part.dtype);
            let b = &self.buffers;
            let (h, activations, x) = (b.h.address(), b.activations.address(), b.x.address());
            let (gates, ups, downs) = (rows(0), rows(1).base, rows(2));
            let grid = |columns: u32| Grid {
                blocks: [columns.div_ceil(TILE), tokens.div_ceil(TILE), 1],
                ..Grid::new(1, 256)
            };
            // SAFETY: activations have `width` numbers a token, at least `neurons`; h and x `hidden`.
            unsafe {
                let args = args!(gates, ups, h, tokens, activations, width);
                self.launch(of.swiglu, grid(part.neurons), args);
                let args = args!(downs, activations, width, tokens, x);
                self.launch(of.weigh, grid(part.hidden), args);
            }
        }
    }

    /// What each of some neurons would add, to the host.
    pub(crate) fn importance_one(&mut self, blocks: &NeuronBlocks<'_>) {
        let importance = self.functions.of(blocks.dtype).importance;
        let kept = self.weights.find(blocks.bytes).is_some();
        for part in parts(blocks, if kept { usize::MAX } else { LAUNCH_BYTES }) {
            let rows = RowsArgs {
                base: done(self.weights.place(part.bytes)),
                block: part.block_neurons,
                stride: 3 * part.dtype.row_bytes(part.hidden) as u32,
                block_stride: part.block_stride as u64,
                count: part.neurons,
                cols: part.hidden,
            };
            let before = u64::from(part.first_neuron - blocks.first_neuron);
            let out = self.buffers.host_importance.address() + 4 * before;
            let (h, grid) = (self.buffers.h.address(), Grid::new(part.neurons.div_ceil(8), 256));
            // SAFETY: `out` has room for all neurons of a layer.
            unsafe { self.launch(importance, grid, args!(rows, h, out)) };
        }
    }

    /// Activations and scores of all neurons; the scores are on their way to the host behind it.
    pub(crate) fn estimate_one(&mut self, base: &BaseNeurons<'_>, tables: &BaseTables<'_>) {
        let (hidden, neurons) = (self.shape.hidden as u32, base.neurons() as u32);
        let [gate, up] = base.gate_and_up();
        let books = [gate, up].map(|tiles| CodebookArgs::of(tiles.codebook()));
        self.tile_rows(base, &[*gate, *up], |this, matrices, first_row, rows| {
            let first = first_row * BASE_TILE;
            let count = (rows * BASE_TILE).min(neurons - first);
            let numbers = |table: &[f32], this: &mut CudaBackend| {
                let bytes = bytemuck::cast_slice(&table[first as usize..][..count as usize]);
                done(this.weights.place(bytes))
            };
            let down_error = numbers(tables.down_error, this);
            let gate_error = numbers(tables.gate_error, this);
            let up_error = numbers(tables.up_error, this);
            let (h, at) = (this.buffers.h.address(), 4 * u64::from(first));
            let estimates = this.buffers.estimates.address() + at;
            let scores = this.buffers.scores.address() + at;
            let grid = Grid { shared_bytes: 4 * hidden, ..Grid::new(rows, BASE_THREADS) };
            let ([gates, ups], [gate, up]) = ([matrices[0], matrices[1]], books);
            let args = args!(
                gates, ups, count, hidden, gate, up, h, down_error, gate_error, up_error,
                estimates, scores
            );
            // SAFETY: `rows` rows of tiles and `count` numbers in each table.
            unsafe { this.launch(this.functions.estimate, grid, args) };
        });
        let bytes = 4 * base.neurons();
        self.bring(&self.buffers.scores, &self.buffers.host_scores, bytes);
    }

    /// Sums of stand-ins for neurons that are not chosen.
    pub(crate) fn stand_in_one(
        &mut self,
        base: &BaseNeurons<'_>,
        tables: &BaseTables<'_>,
        chosen: &[u64],
    ) {
        let hidden = self.shape.hidden;
        let constant = done(self.weights.place(bytemuck::cast_slice(tables.constant)));
        let b = &self.buffers;
        // SAFETY: `hidden` numbers each.
        done(unsafe {
            let (to, stream) = (b.constant.address(), self.device.stream());
            check(sys::cuMemcpyDtoDAsync_v2(to, constant, 4 * hidden, stream), "copy")
        });
        let Some(down) = base.down() else {
            done(b.stand_ins.fill_zero(0, 4 * hidden));
            return;
        };
        let (book, neurons) = (CodebookArgs::of(down.codebook()), base.neurons() as u32);
        let words = base.neurons().div_ceil(64);
        self.tile_rows(base, &[*down], |this, matrices, first_row, rows| {
            let chosen = done(this.weights.stage(bytemuck::cast_slice(&chosen[..words])));
            let offset = done(this.weights.place(bytemuck::cast_slice(tables.offset)));
            let slope = done(this.weights.place(bytemuck::cast_slice(tables.slope)));
            let b = &this.buffers;
            let (estimates, sums) = (b.estimates.address(), b.stand_ins.address());
            let (grid, downs) = (Grid::new(rows, BASE_THREADS), matrices[0]);
            let args =
                args!(downs, first_row, neurons, book, offset, slope, estimates, chosen, sums);
            // SAFETY: `rows` rows of tiles; a bit and two numbers for each neuron.
            unsafe { this.launch(this.functions.stand_in, grid, args) };
        });
    }

    /// Calls `run` with rows of tiles of some of the base's matrices, equally high, that are on the device: the matrices'
    /// addresses, the number of the first row and how many there are.
    fn tile_rows(
        &mut self,
        base: &BaseNeurons<'_>,
        matrices: &[Tiles<'_>],
        mut run: impl FnMut(&mut CudaBackend, &[u64], u32, u32),
    ) {
        let kept = self.weights.find(base.bytes()).is_some();
        let row_bytes = |tiles: &Tiles<'_>| tiles.row(0).len();
        let largest = matrices.iter().map(row_bytes).max().unwrap_or(1);
        let all = matrices[0].bytes().len() / row_bytes(&matrices[0]);
        let step = if kept { all } else { (LAUNCH_BYTES / largest / matrices.len()).max(1) };
        for first in (0..all).step_by(step) {
            let rows = step.min(all - first);
            let mut addresses = [0; 2];
            for (address, tiles) in addresses.iter_mut().zip(matrices) {
                let len = row_bytes(tiles);
                let bytes = &tiles.bytes()[first * len..][..rows * len];
                *address = done(self.weights.place(bytes));
            }
            run(self, &addresses, first as u32, rows as u32);
        }
    }
}

/// Threads of a block of the base's kernels.
const BASE_THREADS: u32 = 4 * BASE_TILE;
/// Outputs of a tile of the base.
const BASE_TILE: u32 = tiles::TILE as u32;

/// Blocks in parts of at most `bytes`, but of one block at least.
fn parts<'a>(
    blocks: &NeuronBlocks<'a>,
    bytes: usize,
) -> impl Iterator<Item = NeuronBlocks<'a>> + use<'a> {
    let all = *blocks;
    let step = (bytes / all.block_stride).max(1) as u32;
    let count = all.neurons.div_ceil(all.block_neurons);
    (0..count).step_by((step.min(count.max(1))) as usize).map(move |first| {
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
