//! The resident low-bit *base* of an FFN, as a backend is given it: neurons, and tables learned about them.
//!
//! The base always runs for every neuron. Its gate and up rows estimate each activation and what it would cost to go
//! on with the estimate; its down column stands in for the neurons that do not run exactly.

use ls_bundle::low_bit::{Codebook, RecordLayout};

/// The low-bit copies of a layer's neurons, side by side.
#[derive(Clone, Copy, Debug)]
pub struct BaseNeurons<'a> {
    bytes: &'a [u8],
    hidden: u32,
    codebooks: [Option<Codebook>; 3],
    /// Bytes of gate row, up row and down column.
    parts: [usize; 3],
}

impl<'a> BaseNeurons<'a> {
    /// Records of neurons with rows of `hidden` weights, the layer's first neuron (in file order) first; without a
    /// codebook for down there are no down columns, and no stand-ins (a *sketch*).
    ///
    /// Panics if `hidden` is no multiple of 64, or if `bytes` are not whole records.
    #[must_use]
    pub fn new(
        bytes: &'a [u8],
        hidden: u32,
        [gate, up]: [Codebook; 2],
        down: Option<Codebook>,
    ) -> BaseNeurons<'a> {
        let codebooks = [Some(gate), Some(up), down];
        let bits = codebooks.map(|codebook| codebook.map(|codebook| codebook.bits()));
        let layout = RecordLayout::new(hidden, bits).expect("rows of whole groups");
        assert!(bytes.len().is_multiple_of(layout.bytes()), "records of {} bytes", layout.bytes());
        let parts = bits.map(|bits| bits.map_or(0, |bits| bits.row_bytes(hidden)));
        BaseNeurons { bytes, hidden, codebooks, parts }
    }

    /// All records, one behind the other.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Weights of a row.
    #[must_use]
    pub fn hidden(&self) -> u32 {
        self.hidden
    }

    /// Number of neurons.
    #[must_use]
    pub fn neurons(&self) -> usize {
        self.bytes.len() / self.record_bytes()
    }

    /// Bytes of a neuron.
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        self.parts.iter().sum()
    }

    /// What the codes of gate and up rows stand for.
    #[must_use]
    pub fn gate_and_up(&self) -> [Codebook; 2] {
        let [gate, up, _] = self.codebooks;
        [gate, up].map(|codebook| codebook.expect("gate and up are always there"))
    }

    /// What the codes of down columns stand for, if there are any.
    #[must_use]
    pub fn down(&self) -> Option<Codebook> {
        self.codebooks[2]
    }

    /// Gate row, up row and down column of neuron `index`; the last is empty where there are none.
    #[must_use]
    #[inline]
    pub fn neuron(&self, index: usize) -> [&'a [u8]; 3] {
        let record = &self.bytes[index * self.record_bytes()..][..self.record_bytes()];
        let (gate, rest) = record.split_at(self.parts[0]);
        let (up, down) = rest.split_at(self.parts[1]);
        [gate, up, down]
    }
}

/// What was learned about a layer's neurons and their low-bit copies; but for `constant` one number a neuron.
#[derive(Clone, Copy, Debug)]
pub struct BaseTables<'a> {
    /// a: what a stand-in starts from.
    pub offset: &'a [f32],
    /// b: what it adds of the estimated activation.
    pub slope: &'a [f32],
    /// Length of d - d~, the error of the down column.
    pub down_error: &'a [f32],
    /// Length of d times the standard deviation of g - g~ . h.
    pub gate_error: &'a [f32],
    /// Length of d times the standard deviation of u - u~ . h.
    pub up_error: &'a [f32],
    /// M: added once wherever neurons are left out; hidden.
    pub constant: &'a [f32],
}

impl BaseTables<'_> {
    /// Panics unless there are tables for all of `base`'s neurons.
    pub fn check(&self, base: &BaseNeurons<'_>) {
        let tables = [self.offset, self.slope, self.down_error, self.gate_error, self.up_error];
        assert!(tables.iter().all(|table| table.len() == base.neurons()), "a number a neuron");
        assert_eq!(self.constant.len(), base.hidden() as usize, "width of the constant");
    }
}

/// Which neurons run exactly: neuron i is bit i % 64 of word i / 64.
#[must_use]
#[inline]
pub fn is_chosen(chosen: &[u64], neuron: usize) -> bool {
    chosen[neuron / 64] >> (neuron % 64) & 1 == 1
}
