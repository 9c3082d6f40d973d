//! The resident low-bit *base* of an FFN, as a backend is given it: neurons, and tables learned about them.
//!
//! The base always runs for every neuron. Its gate and up rows estimate each activation and what it would cost to go
//! on with the estimate; its down column stands in for the neurons that do not run exactly.

use ls_bundle::low_bit::Codebook;
use ls_bundle::tiles::{Over, Tiles, matrix_bytes};

/// The low-bit copies of a layer's neurons, the layer's first neuron (in file order) first.
#[derive(Clone, Copy, Debug)]
pub struct BaseNeurons<'a> {
    bytes: &'a [u8],
    hidden: u32,
    neurons: u32,
    gate: Tiles<'a>,
    up: Tiles<'a>,
    down: Option<Tiles<'a>>,
}

impl<'a> BaseNeurons<'a> {
    /// The matrices of `neurons` neurons with rows of `hidden` weights, one behind the other; without a codebook for down
    /// there is no third, and there are no stand-ins (a *sketch*).
    ///
    /// Panics if `hidden` is no multiple of 64, or if `bytes` are not these matrices.
    #[must_use]
    pub fn new(
        bytes: &'a [u8],
        (neurons, hidden): (u32, u32),
        [gate, up]: [Codebook; 2],
        down: Option<Codebook>,
    ) -> BaseNeurons<'a> {
        let mut rest = bytes;
        let mut next = |codebook: Codebook, over| {
            let len = matrix_bytes(codebook.bits(), neurons, hidden);
            let (matrix, behind) = rest.split_at(len);
            rest = behind;
            Tiles::new(codebook, over, (neurons, hidden), matrix)
        };
        let (gate, up) = (next(gate, Over::Hidden), next(up, Over::Hidden));
        let down = down.map(|codebook| next(codebook, Over::Neurons));
        assert!(rest.is_empty(), "{} bytes behind the matrices", rest.len());
        BaseNeurons { bytes, hidden, neurons, gate, up, down }
    }

    /// All matrices, one behind the other.
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
        self.neurons as usize
    }

    /// Gate and up.
    #[must_use]
    pub fn gate_and_up(&self) -> [&Tiles<'a>; 2] {
        [&self.gate, &self.up]
    }

    /// Down, unless this is a sketch.
    #[must_use]
    pub fn down(&self) -> Option<&Tiles<'a>> {
        self.down.as_ref()
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
