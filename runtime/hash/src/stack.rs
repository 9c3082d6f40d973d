//! [`HashStack`]: the layers behind each other, and a head.
//!
//! Layer k hashes what layer k - 1 gave (the first: the feature) and looks a row up in its table. The paper's stack is
//! one index of τ bits a layer, so nothing behind the first layer can tell apart more than 2^τ features. Here P stacks
//! run side by side: P indices a layer, whose rows stand one behind the other in one code, which every hash of the next
//! layer sees whole. P = 1 is the paper's. The last layer may lack a table; its code is then its P * τ signs.

use crate::bits::{self, words};
use crate::error::{self, HashError};
use crate::head::{BlockCode, BlockHead, Head, MAX_LEVEL};
use crate::input::Input;
use crate::layer::{BinaryHash, IntPlanes, PlaneWeights, Planes, Table};
use crate::limits::{MAX_CODE_BITS, MAX_DIMS, MAX_LAYERS};
use crate::simd::{Kernels, Scoring};

/// A stack as training makes it and a file holds it. [`HashStack::new`] checks it.
#[derive(Clone, Debug, PartialEq)]
pub struct StackTables {
    /// From feature to hyperplane input.
    pub input: Input,
    /// Stacks side by side (P).
    pub stacks: usize,
    /// Bits of an index (τ).
    pub tau: usize,
    /// The first layer's hash: P * τ rows, stack after stack.
    pub planes: Planes,
    /// The other layers' hashes, each of P * τ rows reading the whole code of the table before.
    pub hashes: Vec<BinaryHash>,
    /// Table k turns layer k's indices into its code. As many as there are layers, or one fewer.
    pub tables: Vec<Table>,
    /// What the last layer's code means.
    pub head: Head,
}

impl StackTables {
    /// Hashing layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        1 + self.hashes.len()
    }

    /// Bits of the code that the head sees.
    #[must_use]
    pub fn code_bits(&self) -> usize {
        match self.tables.last() {
            Some(table) if self.tables.len() == self.layers() => self.stacks * table.width,
            _ => self.stacks * self.tau,
        }
    }

    /// Bytes that stay in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let head = match &self.head {
            Head::Code => 0,
            Head::Class(labels) => 4 * labels.len(),
            Head::Value(quantiles) => 4 * (quantiles.thresholds.len() + quantiles.values.len()),
            Head::Blocks(head) => head.bytes(),
        };
        let hashes: usize = self.hashes.iter().map(|h| 8 * h.rows.len() + 2 * h.count()).sum();
        let tables: usize = self.tables.iter().map(|t| t.rows.len()).sum();
        8 * self.input.dims() + self.planes.bytes() + hashes + tables + head
    }

    pub(crate) fn check(&self) -> Result<(), HashError> {
        self.input.check()?;
        error::within("stacks", self.stacks, 1, MAX_CODE_BITS)?;
        error::within("bits of an index", self.tau, 1, MAX_CODE_BITS / self.stacks)?;
        error::within("layers", self.layers(), 1, MAX_LAYERS)?;
        error::within("tables", self.tables.len(), self.layers() - 1, self.layers())?;
        let rows = self.stacks * self.tau;
        error::within("dimensions of the planes", self.planes.dims, 1, MAX_DIMS)?;
        error::same("dimensions of the planes", self.planes.dims, self.input.dims())?;
        error::same("planes", self.planes.count(), rows)?;
        self.planes.check()?;
        for table in &self.tables {
            table.check(self.stacks, self.tau)?;
        }
        for (hash, table) in self.hashes.iter().zip(&self.tables) {
            error::same("rows of a binary hash", hash.count(), rows)?;
            error::same("signs of a binary row", hash.inputs, self.stacks * table.width)?;
            hash.check()?;
        }
        let index = (self.stacks == 1 && self.tables.len() < self.layers()).then_some(self.tau);
        if matches!(self.head, Head::Class(_) | Head::Value(_)) {
            error::within("bits of a result", self.tau, 1, crate::limits::MAX_TAU)?;
        }
        self.head.check(self.code_bits(), index)?;
        let levels =
            matches!(&self.head, Head::Blocks(BlockHead { code: BlockCode::Levels(_), .. }));
        if levels && matches!(self.planes.weights, PlaneWeights::F32 { .. }) {
            return Err(HashError::invalid("planes under levels", "f32", "integers"));
        }
        if levels { error::same("tables under levels", self.tables.len(), 0) } else { Ok(()) }?;
        if levels { error::same("layers under levels", self.layers(), 1) } else { Ok(()) }
    }
}

/// Where a prediction works. One serves all stacks it was made or grown for, one after another.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    /// The rounded feature, and zeros.
    rounded: Vec<i8>,
    /// The feature before rounding, and zeros.
    centered: Vec<f32>,
    /// The first layer's sums with their biases; those of f32 planes.
    sums: Vec<i32>,
    sums_f32: Vec<f32>,
    levels: Vec<i8>,
    distances: Vec<u32>,
    hash: Vec<u64>,
    code: Vec<u64>,
}

impl Scratch {
    /// Grows to what `stack` needs. The only place that allocates.
    pub fn grow_for(&mut self, stack: &HashStack) {
        fn grow<T: Clone + Default>(room: &mut Vec<T>, len: usize) {
            room.resize(room.len().max(len), T::default());
        }
        let tables = &stack.tables;
        let rows = tables.stacks * tables.tau;
        match &tables.planes.weights {
            PlaneWeights::F32 { .. } => {
                grow(&mut self.centered, tables.planes.input_len());
                grow(&mut self.sums_f32, rows);
            }
            PlaneWeights::Int { .. } => {
                grow(&mut self.rounded, tables.planes.input_len());
                grow(&mut self.sums, rows);
            }
        }
        grow(&mut self.levels, rows);
        grow(&mut self.distances, rows);
        grow(&mut self.hash, words(rows));
        let widest = tables.tables.iter().map(|t| t.width * tables.stacks).max();
        grow(&mut self.code, words(widest.unwrap_or(0)));
    }

    /// The integer planes' sums of the last [`HashStack::project`], biases included. They may be changed before
    /// [`HashStack::encode`], as more of the feature becomes known.
    pub fn sums_mut(&mut self) -> &mut [i32] {
        &mut self.sums
    }

    /// The same of f32 planes.
    pub fn sums_f32_mut(&mut self) -> &mut [f32] {
        &mut self.sums_f32
    }
}

/// Checked tables and the instruction set they run on.
#[derive(Clone, Debug)]
pub struct HashStack {
    tables: StackTables,
    kernels: Kernels,
}

impl HashStack {
    /// Checks everything that later accesses rely on.
    ///
    /// # Errors
    /// If the tables contradict each other or [`crate::limits`].
    pub fn new(tables: StackTables, kernels: Kernels) -> Result<HashStack, HashError> {
        tables.check()?;
        Ok(HashStack { tables, kernels })
    }

    /// The tables.
    #[must_use]
    pub fn tables(&self) -> &StackTables {
        &self.tables
    }

    /// x W of the first layer: the feature's sums, in `scratch`.
    ///
    /// # Panics
    /// If the feature has not as many numbers as the input, or `scratch` did not grow for this stack.
    pub fn project(&self, feature: &[f32], scratch: &mut Scratch) {
        let StackTables { input, planes, .. } = &self.tables;
        assert_eq!(feature.len(), input.dims(), "numbers of the feature");
        let (ops, len, rows) = (self.kernels.0, planes.input_len(), planes.count());
        match &planes.weights {
            PlaneWeights::Int { .. } => {
                input.round(ops, feature, &mut scratch.rounded);
                self.project_rounded(scratch);
            }
            PlaneWeights::F32 { weights, bias } => {
                let z = &mut scratch.centered[..len];
                input.center(ops, feature, z);
                z[feature.len()..].fill(0.0);
                let sums = &mut scratch.sums_f32[..rows];
                (ops.dot_f32)(weights, z, sums);
                sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
            }
        }
    }

    /// The integer planes' sums of the rounded feature in `scratch`.
    fn project_rounded(&self, scratch: &mut Scratch) {
        let planes = &self.tables.planes;
        let PlaneWeights::Int { bits, weights, bias } = &planes.weights else {
            panic!("integer planes")
        };
        let q = &mut scratch.rounded[..planes.input_len()];
        q[planes.dims..].fill(0);
        let int = IntPlanes { bits: *bits, weights, bias };
        Planes::project(self.kernels.0, int, q, &mut scratch.sums[..planes.count()]);
    }

    /// The code of a feature that [`crate::Input::rounded`] has rounded: for training and measuring.
    ///
    /// # Panics
    /// As [`HashStack::project`], and if the planes are not of integers.
    pub fn code_of_rounded<'s>(&self, rounded: &[i8], scratch: &'s mut Scratch) -> &'s [u64] {
        assert_eq!(rounded.len(), self.tables.input.dims(), "numbers of the feature");
        scratch.rounded[..rounded.len()].copy_from_slice(rounded);
        self.project_rounded(scratch);
        self.encode(scratch)
    }

    /// The code of the sums in `scratch`: [`StackTables::code_bits`] signs.
    pub fn encode<'s>(&self, scratch: &'s mut Scratch) -> &'s [u64] {
        let StackTables { stacks, tau, planes, hashes, tables, .. } = &self.tables;
        let rows = planes.count();
        let hash = &mut scratch.hash[..words(rows)];
        match &planes.weights {
            PlaneWeights::Int { .. } => {
                bits::pack(scratch.sums[..rows].iter().map(|&sum| sum >= 0), hash);
            }
            PlaneWeights::F32 { .. } => {
                bits::pack(scratch.sums_f32[..rows].iter().map(|&sum| sum >= 0.0), hash);
            }
        }
        for (layer, table) in tables.iter().enumerate() {
            let code = &mut scratch.code[..words(stacks * table.width)];
            table.look_up(*stacks, *tau, hash, code);
            match hashes.get(layer) {
                Some(next) => next.apply(self.kernels.0, code, &mut scratch.distances, hash),
                None => return &scratch.code[..words(stacks * table.width)],
            }
        }
        &scratch.hash[..words(rows)]
    }

    /// The code of a feature.
    ///
    /// # Panics
    /// As [`HashStack::project`].
    pub fn code<'s>(&self, feature: &[f32], scratch: &'s mut Scratch) -> &'s [u64] {
        self.project(feature, scratch);
        self.encode(scratch)
    }

    /// The class of a feature.
    ///
    /// # Panics
    /// As [`HashStack::project`], and if the head does not classify.
    pub fn class(&self, feature: &[f32], scratch: &mut Scratch) -> u32 {
        let Head::Class(labels) = &self.tables.head else { panic!("a head that classifies") };
        labels[bits::index(self.code(feature, scratch), 0, self.tables.tau)]
    }

    /// The bin of a feature, and what it means.
    ///
    /// # Panics
    /// As [`HashStack::project`], and if the head does not regress.
    pub fn value(&self, feature: &[f32], scratch: &mut Scratch) -> (usize, f32) {
        let Head::Value(quantiles) = &self.tables.head else { panic!("a head that regresses") };
        let bin = bits::index(self.code(feature, scratch), 0, self.tables.tau);
        (bin, quantiles.values[bin])
    }

    /// The head that scores blocks, if it does.
    #[must_use]
    pub fn block_head(&self) -> Option<&BlockHead> {
        match &self.tables.head {
            Head::Blocks(head) => Some(head),
            _ => None,
        }
    }

    /// Scores of all blocks for a feature. `offsets` are [`crate::Signals::offsets`], or nothing for the biases alone.
    ///
    /// # Panics
    /// As [`HashStack::project`], and if the head scores another number of blocks.
    pub fn scores(
        &self,
        feature: &[f32],
        offsets: Option<&[i16]>,
        scratch: &mut Scratch,
        out: &mut [i32],
    ) {
        self.project(feature, scratch);
        self.scores_of_sums(offsets, scratch, out);
    }

    /// Scores of all blocks for the sums in `scratch`.
    ///
    /// # Panics
    /// If `scratch` did not grow for this stack, or the head scores another number of blocks.
    pub fn scores_of_sums(&self, offsets: Option<&[i16]>, scratch: &mut Scratch, out: &mut [i32]) {
        let head = self.block_head().expect("a head that scores blocks");
        let offsets = offsets.unwrap_or(&head.biases);
        assert_eq!(out.len(), head.blocks(), "scores of all blocks");
        assert_eq!(offsets.len(), head.blocks(), "offsets of all blocks");
        let (signs, scales, shift) = (&head.signs, &head.scales, head.shift);
        let scoring = Scoring { bits: head.bits, signs, scales, offsets, shift };
        match &head.code {
            BlockCode::Signs => {
                (self.kernels.0.score_signs)(scoring, self.encode(scratch), out);
            }
            BlockCode::Levels(gains) => {
                let levels = &mut scratch.levels[..head.bits];
                for ((level, &sum), gain) in levels.iter_mut().zip(&scratch.sums).zip(gains) {
                    let limit = f32::from(MAX_LEVEL);
                    *level = (sum as f32 * gain).clamp(-limit, limit).round_ties_even() as i8;
                }
                (self.kernels.0.score_levels)(scoring, levels, out);
            }
        }
    }
}
