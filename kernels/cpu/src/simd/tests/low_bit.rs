//! Low-bit rows: against arithmetic on what the format's definition reads in them, and the bits of scalar kernels.

use super::{Draw, assert_sum, bits, meaning, product, quantised};
use crate::simd::low_bit::{GROUP, spread};
use crate::simd::{Activations, Ops, scalar};
use half::f16;
use ls_bundle::low_bit::{Codebook, Row, pack_row};

/// Numbers of groups around those that kernels take together.
const GROUPS: [usize; 9] = [1, 2, 3, 7, 8, 9, 16, 17, 36];

/// Rows at odd addresses, and what they mean.
struct Rows {
    codebook: Codebook,
    bytes: Vec<u8>,
    meant: Vec<Vec<f32>>,
}

impl Rows {
    fn draw(draw: &mut Draw, bits: u32, count: usize, groups: usize) -> Rows {
        let mut values: Vec<i8> = (0..1 << bits).map(|_| draw.0.bits() as i8).collect();
        (values[0], values[1]) = (-128, 127);
        let codebook = Codebook::new(&values).unwrap();
        let (mut bytes, mut meant) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let codes: Vec<u8> =
                (0..groups * GROUP).map(|_| draw.0.below(1 << bits) as u8).collect();
            // A scale that is nothing, a subnormal one, the largest one; else ordinary ones.
            let mut scale = || match draw.0.below(20) {
                0 => f16::ZERO,
                1 => f16::MIN_POSITIVE_SUBNORMAL,
                2 => f16::MAX,
                _ => f16::from_f32(draw.0.unit()),
            };
            let scales: Vec<f16> = (0..groups).map(|_| scale()).collect();
            bytes.push(0xff);
            let start = bytes.len();
            bytes.resize(start + codebook.bits().row_bytes(codes.len() as u32), 0);
            pack_row(codebook.bits(), &codes, &scales, &mut bytes[start..]);
            let mut row = vec![f32::NAN; codes.len()];
            Row::new(&codebook, &bytes[start..]).decode(&mut row);
            meant.push(row);
        }
        // Exactly as long as needed: what reads further is seen by a checking allocator.
        bytes.shrink_to_fit();
        Rows { codebook, bytes, meant }
    }

    fn slices(&self) -> Vec<&[u8]> {
        let len = self.bytes.len() / self.meant.len();
        self.bytes.chunks_exact(len).map(|row| &row[1..]).collect()
    }
}

/// Bits, number of rows, groups of a row.
fn cases() -> impl Iterator<Item = (u32, usize, usize)> {
    let counts = |groups| [1, 3, 8, 17].map(|count| (count, groups));
    let sizes = GROUPS.into_iter().flat_map(counts);
    sizes.flat_map(|(count, groups)| [1, 2, 3, 4].map(|bits| (bits, count, groups)))
}

pub(super) fn low_bit_dot_sums_products(ops: &Ops, draw: &mut Draw) {
    for (width, count, groups) in cases() {
        let drawn = Rows::draw(draw, width, count, groups);
        let (rows, codebook) = (drawn.slices(), &drawn.codebook);
        let floats = draw.floats(groups * GROUP);
        let quants = quantised(ops, &floats);
        let x = Activations { floats: &floats, quants: &quants };
        let mut out = vec![f32::NAN; count];
        (ops.low_bit.dot)(&rows, codebook, x, &mut out, 64);
        let factors = meaning(&quants, floats.len());
        for (i, row) in drawn.meant.iter().enumerate() {
            assert_sum(out[i], row.iter().zip(&factors).map(|(w, x)| product(w, x)));
            let mut alone = [f32::NAN];
            (ops.low_bit.dot)(&rows[i..=i], codebook, x, &mut alone, 0);
            assert_eq!(alone[0].to_bits(), out[i].to_bits(), "a row depends on its neighbours");
        }
        let mut plain = vec![f32::NAN; count];
        (scalar::OPS.low_bit.dot)(&rows, codebook, x, &mut plain, 0);
        assert_eq!(bits(&plain), bits(&out), "not what scalar kernels give, {width} bits");
    }
}

pub(super) fn low_bit_axpy_adds_row_after_row(ops: &Ops, draw: &mut Draw) {
    for (width, count, groups) in cases() {
        let drawn = Rows::draw(draw, width, count, groups);
        let (rows, codebook) = (drawn.slices(), &drawn.codebook);
        let (weights, start) = (draw.floats(count), draw.floats(groups * GROUP));
        let (mut together, mut one_by_one) = (start.clone(), start.clone());
        (ops.low_bit.axpy)(&rows, codebook, &weights, &mut together, 64);
        for (i, row) in rows.iter().enumerate() {
            (ops.low_bit.axpy)(&[row], codebook, &weights[i..=i], &mut one_by_one, 0);
        }
        assert_eq!(bits(&together), bits(&one_by_one), "rows are not added one by one");
        let mut plain = start.clone();
        (scalar::OPS.low_bit.axpy)(&rows, codebook, &weights, &mut plain, 0);
        assert_eq!(bits(&plain), bits(&together), "not what scalar kernels give, {width} bits");
        for k in 0..start.len() {
            let terms = drawn.meant.iter().zip(&weights).map(|(row, w)| product(&row[k], w));
            let place = spread(k);
            assert_sum(together[place], terms.chain([f64::from(start[place])]));
        }
    }
}
