//! [`StackTables`] as bytes. Little-endian, no padding, in the order of the fields; lengths that follow from others are
//! not written, so they cannot contradict them:
//!
//! | what | as |
//! |---|---|
//! | magic, version | `LSHS`, u32 |
//! | scaling (0 fixed, 1 rms), dims | u8, u32 |
//! | centers, gains | f32 \[dims\] each |
//! | stacks, tau | u32 each |
//! | plane bits (32: f32; 8, 4, 2) | u8 |
//! | planes, their biases | f32 or rows of bytes; f32 or i32 \[stacks * tau\] |
//! | hashes, tables | u8 each |
//! | for each table: width, rows | u32, bytes |
//! | for each hash: rows, biases | u64 words, i16 \[stacks * tau\] |
//! | head (0 code, 1 class, 2 value, 3 blocks) | u8 |
//! | of class: labels | u32 \[2^tau\] |
//! | of value: thresholds, values | f32 \[2^tau - 1\], f32 \[2^tau\] |
//! | of blocks: blocks, shift, unit, has levels, has signals | u32, u32, f32, u8, u8 |
//! | … gains of levels, if any; signs; scales; biases | f32 \[bits\], bytes, i16 \[blocks\] each |
//! | … signals, if any: two rates, three weights, initial means | u16, i16, u8 \[blocks\] |
//!
//! Sizes are checked against [`crate::limits`] before anything is computed from them, and memory is taken only for
//! bytes that are there. There is no checksum: the file around it has one.

use crate::error::{self, HashError};
use crate::head::{BlockCode, BlockHead, GROUP, Head};
use crate::input::{Input, Scaling};
use crate::layer::{BinaryHash, F32_STEP, PlaneBits, PlaneWeights, Planes, Table};
use crate::limits::{MAX_BLOCKS, MAX_CODE_BITS, MAX_DIMS, MAX_LAYERS, MAX_TAU};
use crate::quantiles::Quantiles;
use crate::signals::SignalTables;
use crate::stack::StackTables;

const MAGIC: &[u8; 4] = b"LSHS";
const VERSION: u32 = 1;

/// What has not been read yet.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8], HashError> {
        let (taken, rest) = self
            .0
            .split_at_checked(len)
            .ok_or_else(|| HashError::invalid("bytes left", self.0.len(), len))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], HashError> {
        Ok(self.bytes(N)?.try_into().expect("N bytes were taken"))
    }

    /// `count` numbers of `N` bytes.
    fn numbers<const N: usize, T>(
        &mut self,
        count: usize,
        from: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, HashError> {
        Ok(self.bytes(count * N)?.as_chunks::<N>().0.iter().map(|&n| from(n)).collect())
    }

    fn u8(&mut self) -> Result<u8, HashError> {
        Ok(self.array::<1>()?[0])
    }

    fn f32s(&mut self, count: usize) -> Result<Vec<f32>, HashError> {
        self.numbers(count, f32::from_le_bytes)
    }

    fn i16s(&mut self, count: usize) -> Result<Vec<i16>, HashError> {
        self.numbers(count, i16::from_le_bytes)
    }

    /// A size within `low` to `high`.
    fn size(&mut self, what: &'static str, low: usize, high: usize) -> Result<usize, HashError> {
        let size = u32::from_le_bytes(self.array()?) as usize;
        error::within(what, size, low, high)?;
        Ok(size)
    }

    fn flag(&mut self, what: &'static str) -> Result<bool, HashError> {
        let flag = self.u8()?;
        error::within(what, usize::from(flag), 0, 1)?;
        Ok(flag == 1)
    }

    fn input(&mut self) -> Result<Input, HashError> {
        let rms = self.flag("scaling")?;
        let dims = self.size("dimensions of the feature", 1, MAX_DIMS)?;
        let scaling = if rms { Scaling::Rms } else { Scaling::Fixed };
        Ok(Input { scaling, center: self.f32s(dims)?, gain: self.f32s(dims)? })
    }

    fn planes(&mut self, dims: usize, rows: usize) -> Result<Planes, HashError> {
        let bits = match self.u8()? {
            32 => {
                let weights = self.f32s(rows * dims.next_multiple_of(F32_STEP))?;
                let weights = PlaneWeights::F32 { weights, bias: self.f32s(rows)? };
                return Ok(Planes { dims, weights });
            }
            8 => PlaneBits::Eight,
            4 => PlaneBits::Four,
            2 => PlaneBits::Two,
            other => return Err(HashError::invalid("bits of planes", other, "32, 8, 4 or 2")),
        };
        let weights = self.bytes(rows * bits.row_bytes(dims))?.to_vec();
        let bias = self.numbers(rows, i32::from_le_bytes)?;
        Ok(Planes { dims, weights: PlaneWeights::Int { bits, weights, bias } })
    }

    fn layers(
        &mut self,
        stacks: usize,
        tau: usize,
    ) -> Result<(Vec<BinaryHash>, Vec<Table>), HashError> {
        let hashes = usize::from(self.u8()?);
        error::within("layers", 1 + hashes, 1, MAX_LAYERS)?;
        let count = usize::from(self.u8()?);
        error::within("tables", count, hashes, hashes + 1)?;
        let mut tables = Vec::new();
        for _ in 0..count {
            error::within("bits of an index into a table", tau, 1, MAX_TAU)?;
            let width = self.size("signs of a table's row", 8, MAX_CODE_BITS / stacks)?;
            tables.push(Table { width, rows: self.bytes((stacks << tau) * (width / 8))?.to_vec() });
        }
        let mut all = Vec::new();
        for table in &tables[..hashes] {
            let inputs = stacks * table.width;
            let words = stacks * tau * crate::bits::words(inputs);
            let rows = self.numbers(words, u64::from_le_bytes)?;
            all.push(BinaryHash { inputs, rows, bias: self.i16s(stacks * tau)? });
        }
        Ok((all, tables))
    }

    fn head(&mut self, code_bits: usize, tau: usize) -> Result<Head, HashError> {
        let kind = self.u8()?;
        if kind == 1 || kind == 2 {
            error::within("bits of a result", tau, 1, MAX_TAU)?;
        }
        Ok(match kind {
            0 => Head::Code,
            1 => Head::Class(self.numbers(1 << tau, u32::from_le_bytes)?),
            2 => Head::Value(Quantiles {
                thresholds: self.f32s((1 << tau) - 1)?,
                values: self.f32s(1 << tau)?,
            }),
            3 => Head::Blocks(self.blocks(code_bits)?),
            other => return Err(HashError::invalid("kind of head", other, "0 to 3")),
        })
    }

    fn blocks(&mut self, bits: usize) -> Result<BlockHead, HashError> {
        let blocks = self.size("blocks", 1, MAX_BLOCKS)?;
        let shift = u32::from_le_bytes(self.array()?);
        let unit = f32::from_le_bytes(self.array()?);
        let (levels, signals) = (self.flag("presence of levels")?, self.flag("of signals")?);
        let code = if levels { BlockCode::Levels(self.f32s(bits)?) } else { BlockCode::Signs };
        let signs = self.bytes(blocks.next_multiple_of(GROUP) * bits.div_ceil(8))?.to_vec();
        let (scales, biases) = (self.i16s(blocks)?, self.i16s(blocks)?);
        let signals = if signals { Some(self.signals(blocks)?) } else { None };
        Ok(BlockHead { bits, code, signs, scales, biases, shift, unit, signals })
    }

    fn signals(&mut self, blocks: usize) -> Result<SignalTables, HashError> {
        Ok(SignalTables {
            fast_rate: u16::from_le_bytes(self.array()?),
            slow_rate: u16::from_le_bytes(self.array()?),
            fast_weight: i16::from_le_bytes(self.array()?),
            slow_weight: i16::from_le_bytes(self.array()?),
            previous_weight: i16::from_le_bytes(self.array()?),
            initial: self.bytes(blocks)?.to_vec(),
        })
    }
}

/// Writes numbers one behind the other.
struct Writer(Vec<u8>);

impl Writer {
    fn numbers<const N: usize, T: Copy>(&mut self, numbers: &[T], to: fn(T) -> [u8; N]) {
        self.0.extend(numbers.iter().flat_map(|&n| to(n)));
    }

    fn f32s(&mut self, numbers: &[f32]) {
        self.numbers(numbers, f32::to_le_bytes);
    }

    fn i16s(&mut self, numbers: &[i16]) {
        self.numbers(numbers, i16::to_le_bytes);
    }

    fn size(&mut self, size: usize) {
        self.numbers(&[u32::try_from(size).expect("sizes were checked")], u32::to_le_bytes);
    }

    fn planes(&mut self, planes: &Planes) {
        match &planes.weights {
            PlaneWeights::F32 { weights, bias } => {
                self.0.push(32);
                self.f32s(weights);
                self.f32s(bias);
            }
            PlaneWeights::Int { bits, weights, bias } => {
                self.0.push(match bits {
                    PlaneBits::Eight => 8,
                    PlaneBits::Four => 4,
                    PlaneBits::Two => 2,
                });
                self.0.extend(weights);
                self.numbers(bias, i32::to_le_bytes);
            }
        }
    }

    fn head(&mut self, head: &Head) {
        match head {
            Head::Code => self.0.push(0),
            Head::Class(labels) => {
                self.0.push(1);
                self.numbers(labels, u32::to_le_bytes);
            }
            Head::Value(quantiles) => {
                self.0.push(2);
                self.f32s(&quantiles.thresholds);
                self.f32s(&quantiles.values);
            }
            Head::Blocks(head) => {
                self.0.push(3);
                self.blocks(head);
            }
        }
    }

    fn blocks(&mut self, head: &BlockHead) {
        self.size(head.blocks());
        self.numbers(&[head.shift], u32::to_le_bytes);
        self.f32s(&[head.unit]);
        self.0.push(u8::from(matches!(head.code, BlockCode::Levels(_))));
        self.0.push(u8::from(head.signals.is_some()));
        if let BlockCode::Levels(gains) = &head.code {
            self.f32s(gains);
        }
        self.0.extend(&head.signs);
        self.i16s(&head.scales);
        self.i16s(&head.biases);
        if let Some(signals) = &head.signals {
            self.numbers(&[signals.fast_rate, signals.slow_rate], u16::to_le_bytes);
            self.i16s(&[signals.fast_weight, signals.slow_weight, signals.previous_weight]);
            self.0.extend(&signals.initial);
        }
    }
}

impl StackTables {
    /// Reads and checks tables; they are the whole of `bytes`.
    ///
    /// # Errors
    /// If the bytes are not exactly valid tables.
    pub fn from_bytes(bytes: &[u8]) -> Result<StackTables, HashError> {
        let mut reader = Reader(bytes);
        let (magic, version) = (reader.array()?, u32::from_le_bytes(reader.array()?));
        if &magic != MAGIC || version != VERSION {
            let found = format!("`{}`, version {version}", magic.escape_ascii());
            return Err(HashError::unsupported(found));
        }
        let input = reader.input()?;
        let stacks = reader.size("stacks", 1, MAX_CODE_BITS)?;
        let tau = reader.size("bits of an index", 1, MAX_CODE_BITS / stacks)?;
        let planes = reader.planes(input.dims(), stacks * tau)?;
        let (hashes, tables) = reader.layers(stacks, tau)?;
        let mut stack =
            StackTables { input, stacks, tau, planes, hashes, tables, head: Head::Code };
        stack.head = reader.head(stack.code_bits(), tau)?;
        error::same("bytes behind the end", reader.0.len(), 0)?;
        stack.check()?;
        Ok(stack)
    }

    /// The bytes that [`StackTables::from_bytes`] reads.
    ///
    /// # Errors
    /// If the tables are not valid.
    pub fn to_bytes(&self) -> Result<Vec<u8>, HashError> {
        self.check()?;
        let mut to = Writer(Vec::with_capacity(self.bytes() + 128));
        to.0.extend(MAGIC);
        to.numbers(&[VERSION], u32::to_le_bytes);
        to.0.push(u8::from(self.input.scaling == Scaling::Rms));
        to.size(self.input.dims());
        to.f32s(&self.input.center);
        to.f32s(&self.input.gain);
        to.size(self.stacks);
        to.size(self.tau);
        to.planes(&self.planes);
        to.0.extend([self.hashes.len() as u8, self.tables.len() as u8]);
        for table in &self.tables {
            to.size(table.width);
            to.0.extend(&table.rows);
        }
        for hash in &self.hashes {
            to.numbers(&hash.rows, u64::to_le_bytes);
            to.i16s(&hash.bias);
        }
        to.head(&self.head);
        Ok(to.0)
    }
}
