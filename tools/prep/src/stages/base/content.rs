//! A layer's records as bytes.
//!
//! The tables, one after another, neurons in the model's order:
//!
//! ```text
//! |d - d~|, |d| s_g and |d| s_u (`low_bit::magnitude`)  3 x neurons u8
//! the layer's constant                                  hidden f16    not in a sketch
//! ```

use super::Params;
use crate::base::{Doubt, Histogram, LayerBase};
use crate::gptq::Quantised;
use half::f16;
use ls_bundle::low_bit::{Codebook, RecordLayout, Row, magnitude, pack_row};
use serde::{Deserialize, Serialize};

/// What is known of a layer besides its bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerInfo {
    /// Of gate, up and down.
    pub codebooks: [Option<Codebook>; 3],
    /// What code 255 stands for in the three tables of magnitudes.
    pub largest: [f32; 3],
    /// Squared error of gate h and up h over their squares, of held-out tokens.
    pub product_errors: [f64; 2],
    /// Expected errors (see [`crate::base`]) of held-out tokens.
    pub doubts: Histogram,
    /// What the FFN's output lacks at some shares of exact neurons, of held-out tokens.
    pub left_over: Vec<LeftOver>,
}

/// How far an output is off.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeftOver {
    /// Share of the neurons that run exactly.
    pub exact_share: f64,
    /// Squared error over the output's square.
    pub error: f64,
}

/// Bytes of a layer's tables.
pub(super) fn table_bytes(params: &Params) -> usize {
    let (neurons, hidden) = (params.neurons as usize, params.hidden as usize);
    3 * neurons + if params.bits[2] == 0 { 0 } else { 2 * hidden }
}

/// The records of all neurons; `parts` of gate, up and down where they are there.
pub(super) fn encode_records(
    layout: RecordLayout,
    parts: [Option<&Quantised>; 3],
    neurons: usize,
) -> Vec<u8> {
    let mut bytes = vec![0; neurons * layout.bytes()];
    for (neuron, record) in bytes.chunks_exact_mut(layout.bytes()).enumerate() {
        let mut rest = record;
        for (bits, part) in layout.bits().into_iter().zip(parts) {
            let (Some(bits), Some(part)) = (bits, part) else { continue };
            let (row, behind) = rest.split_at_mut(bits.row_bytes(layout.cols()));
            let (codes, scales) = part.row(neuron);
            pack_row(bits, codes, scales, row);
            rest = behind;
        }
    }
    bytes
}

/// The tables of `base` and their largest magnitudes.
pub(super) fn encode_tables(base: &LayerBase) -> (Vec<u8>, [f32; 3]) {
    let mut bytes = Vec::new();
    let largest = [&base.doubt.down, &base.doubt.gate, &base.doubt.up].map(|values| {
        let largest = values.iter().fold(0f32, |m, &x| m.max(x));
        bytes.extend(values.iter().map(|&x| magnitude_code(x, largest)));
        largest
    });
    if base.down.is_some() {
        bytes.extend(base.constant.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()));
    }
    (bytes, largest)
}

fn magnitude_code(x: f32, largest: f32) -> u8 {
    if x > 0.0 { (255.0 + 16.0 * (x / largest).log2()).round().clamp(1.0, 255.0) as u8 } else { 0 }
}

/// What the bytes of a layer stand for, if they have its shape.
pub(super) fn decode(
    params: &Params,
    layout: RecordLayout,
    info: &LayerInfo,
    records: &[u8],
    tables: &[u8],
) -> Option<LayerBase> {
    let (neurons, hidden) = (params.neurons as usize, params.hidden as usize);
    let found = info.codebooks.map(|codebook| codebook.map(|codebook| codebook.bits()));
    if records.len() != neurons * layout.bytes()
        || tables.len() != table_bytes(params)
        || found != layout.bits()
    {
        return None;
    }
    let part = |part: usize| {
        let codebook = info.codebooks[part].as_ref()?;
        let mut weights = vec![0f32; neurons * hidden];
        let rows = weights.chunks_exact_mut(hidden);
        for (record, row) in records.chunks_exact(layout.bytes()).zip(rows) {
            Row::new(codebook, layout.split(record)[part]).decode(row);
        }
        Some(weights)
    };
    let (codes, constant) = tables.split_at(3 * neurons);
    let magnitudes = |table: usize| -> Vec<f32> {
        let codes = &codes[table * neurons..][..neurons];
        codes.iter().map(|&code| magnitude(code, info.largest[table])).collect()
    };
    let mut halves: Vec<f32> =
        constant.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect();
    halves.resize(hidden, 0.0);
    Some(LayerBase {
        gate: part(0)?,
        up: part(1)?,
        down: part(2),
        doubt: Doubt { down: magnitudes(0), gate: magnitudes(1), up: magnitudes(2) },
        constant: halves,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magnitudes_keep_their_order_and_are_off_by_half_a_step() {
        for step in 0..400 {
            let x = 3.0 * (-15.8 * step as f32 / 400.0).exp2();
            let found = magnitude(magnitude_code(x, 3.0), 3.0);
            assert!((found / x - 1.0).abs() < 0.0219, "{x} {found}");
        }
        assert_eq!((magnitude_code(0.0, 3.0), magnitude_code(1e-20, 3.0)), (0, 1));
    }
}
