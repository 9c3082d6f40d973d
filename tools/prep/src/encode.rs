//! Rows of f32 written in the bundle's number formats; the layouts are told at [`DType`].
//!
//! Q8_0 scales the largest magnitude to 127. Q4_0 tries scales around the one that keeps the value of largest
//! magnitude, with either sign, and takes the one with the least squared error.

use half::f16;
use half::slice::HalfFloatSliceExt;
use ls_bundle::model::{DType, QUANT_GROUP};

/// A value, or the scale of a group holding it, is beyond what half precision can hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OutOfRange {
    /// The value.
    pub value: f32,
}

/// Writes `row` in the format `dtype` into `into`, which has exactly `dtype.row_bytes(row.len())` bytes.
///
/// All values are finite. A row of a quantised type is a multiple of [`QUANT_GROUP`] long.
pub fn encode_row(dtype: DType, row: &[f32], into: &mut [u8]) -> Result<(), OutOfRange> {
    let cols = u32::try_from(row.len()).expect("a row has less than 2^32 weights");
    assert_eq!(into.len() as u64, dtype.row_bytes(cols));
    match dtype {
        DType::F16 => encode_f16(row, into),
        DType::Q8_0 => {
            let (codes, scales) = into.split_at_mut(row.len());
            encode_groups(row, codes, scales, quantise_q8_0)
        }
        DType::Q4_0 => {
            let (codes, scales) = into.split_at_mut(row.len() / 2);
            encode_groups(row, codes, scales, quantise_q4_0)
        }
    }
}

/// Writes a row of Q4_0 of which code c stands for c - 8 times its group's scale.
pub fn write_q4_0(codes: &[u8], scales: &[f16], into: &mut [u8]) {
    assert_eq!(codes.len(), scales.len() * GROUP);
    let (packed, halves) = into.split_at_mut(codes.len() / 2);
    let groups = codes.as_chunks::<GROUP>().0.iter().zip(packed.chunks_exact_mut(GROUP / 2));
    groups.for_each(|(codes, packed)| pack_q4_0(codes, packed));
    for (scale, bytes) in scales.iter().zip(halves.as_chunks_mut().0) {
        *bytes = scale.to_le_bytes();
    }
}

/// Puts the first half of a group's codes into low nibbles, the second into high ones.
fn pack_q4_0(codes: &[u8; GROUP], packed: &mut [u8]) {
    let (low, high) = codes.split_at(GROUP / 2);
    for ((byte, low), high) in packed.iter_mut().zip(low).zip(high) {
        *byte = low | high << 4;
    }
}

fn encode_f16(row: &[f32], into: &mut [u8]) -> Result<(), OutOfRange> {
    let mut halves = [f16::ZERO; 256];
    for (values, into) in row.chunks(halves.len()).zip(into.chunks_mut(2 * halves.len())) {
        let halves = &mut halves[..values.len()];
        halves.convert_from_f32_slice(values);
        for ((half, &value), bytes) in halves.iter().zip(values).zip(into.as_chunks_mut().0) {
            if !half.is_finite() {
                return Err(OutOfRange { value });
            }
            *bytes = half.to_le_bytes();
        }
    }
    Ok(())
}

const GROUP: usize = QUANT_GROUP as usize;

/// Encodes group by group; `quantise` fills a group's codes and returns its scale.
fn encode_groups(
    row: &[f32],
    codes: &mut [u8],
    scales: &mut [u8],
    quantise: fn(&[f32; GROUP], &mut [u8]) -> f32,
) -> Result<(), OutOfRange> {
    let (groups, rest) = row.as_chunks::<GROUP>();
    assert!(rest.is_empty(), "a quantised row is a whole number of groups");
    let codes = codes.chunks_exact_mut(codes.len() / groups.len().max(1));
    for ((group, codes), bytes) in groups.iter().zip(codes).zip(scales.as_chunks_mut().0) {
        let scale = f16::from_f32(quantise(group, codes));
        if !scale.is_finite() {
            return Err(OutOfRange { value: largest(group) });
        }
        *bytes = scale.to_le_bytes();
    }
    Ok(())
}

/// The value of largest magnitude, the first of equals.
fn largest(group: &[f32; GROUP]) -> f32 {
    group.iter().fold(0.0, |largest: f32, &x| if x.abs() > largest.abs() { x } else { largest })
}

fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

fn quantise_q8_0(group: &[f32; GROUP], codes: &mut [u8]) -> f32 {
    let scale = largest(group).abs() / 127.0;
    let inverse = inverse(scale);
    for (code, x) in codes.iter_mut().zip(group) {
        // The cast saturates, so a denormal scale, whose inverse is infinite, cannot wrap around.
        *code = ((x * inverse).round() as i8).cast_unsigned();
    }
    scale
}

/// Scales tried for a group of Q4_0: the largest magnitude falls on code 8 * (1 + step * STEP) from zero.
const Q4_STEPS: std::ops::RangeInclusive<i8> = -8..=4;
const Q4_STEP: f32 = 1.0 / 32.0;

fn quantise_q4_0(group: &[f32; GROUP], codes: &mut [u8]) -> f32 {
    let exact = largest(group) / -8.0;
    let mut best = (exact, squared_error_q4_0(group, exact));
    for sign in [1.0, -1.0] {
        for step in Q4_STEPS {
            let scale = sign * exact / (1.0 + f32::from(step) * Q4_STEP);
            let error = squared_error_q4_0(group, scale);
            if error < best.1 {
                best = (scale, error);
            }
        }
    }
    let inverse = inverse(best.0);
    pack_q4_0(&group.map(|x| code_q4_0(x * inverse)), codes);
    best.0
}

fn code_q4_0(steps: f32) -> u8 {
    ((steps + 8.5) as u8).min(15)
}

/// What `scale`, rounded to half precision as it will be stored, leaves of the group.
fn squared_error_q4_0(group: &[f32; GROUP], scale: f32) -> f32 {
    let (inverse, stored) = (inverse(scale), f16::from_f32(scale).to_f32());
    let error = |x: &f32| (f32::from(code_q4_0(x * inverse)) - 8.0) * stored - x;
    group.iter().map(error).map(|e| e * e).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encoded(dtype: DType, row: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0xAA; dtype.row_bytes(row.len() as u32) as usize];
        encode_row(dtype, row, &mut bytes).unwrap();
        bytes
    }

    /// The definition in [`DType`]'s documentation, read back.
    fn decoded(dtype: DType, bytes: &[u8], cols: usize) -> Vec<f32> {
        let half =
            |bytes: &[u8], i: usize| f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32();
        (0..cols)
            .map(|i| match dtype {
                DType::F16 => half(bytes, i),
                DType::Q8_0 => half(&bytes[cols..], i / 32) * f32::from(bytes[i].cast_signed()),
                DType::Q4_0 => {
                    let byte = bytes[i / 32 * 16 + i % 16];
                    let code = if i % 32 < 16 { byte & 15 } else { byte >> 4 };
                    half(&bytes[cols / 2..], i / 32) * (f32::from(code) - 8.0)
                }
            })
            .collect()
    }

    proptest! {
        #[test]
        fn q8_0_stays_within_half_a_step(row in prop::collection::vec(-100f32..100.0, 96)) {
            let back = decoded(DType::Q8_0, &encoded(DType::Q8_0, &row), row.len());
            for (group, (values, back)) in row.chunks(32).zip(back.chunks(32)).enumerate() {
                let largest = values.iter().fold(0f32, |m, x| m.max(x.abs()));
                // Half precision of the scale adds 2^-11 of the value.
                let bound = largest / 127.0 / 2.0 + largest / 1024.0;
                for (x, y) in values.iter().zip(back) {
                    prop_assert!((x - y).abs() <= bound, "group {group}: {x} became {y}");
                }
            }
        }

        #[test]
        fn q4_0_is_at_least_as_good_as_keeping_the_largest(row in prop::collection::vec(-100f32..100.0, 32)) {
            let back = decoded(DType::Q4_0, &encoded(DType::Q4_0, &row), row.len());
            let error: f32 = row.iter().zip(&back).map(|(x, y)| (x - y) * (x - y)).sum();
            let group: &[f32; GROUP] = row[..].try_into().unwrap();
            let plain = squared_error_q4_0(group, largest(group) / -8.0);
            prop_assert!(error <= plain * 1.0001, "{error} is above {plain}");
        }

        #[test]
        fn f16_rounds_to_nearest(row in prop::collection::vec(-60000f32..60000.0, 0..600)) {
            let back = decoded(DType::F16, &encoded(DType::F16, &row), row.len());
            for (x, y) in row.iter().zip(back) {
                prop_assert_eq!(f16::from_f32(*x).to_f32(), y);
            }
        }
    }

    #[test]
    fn codes_and_scales_lie_where_the_format_says() {
        let mut row = [0.0; 64];
        row[0] = 127.0;
        row[1] = -3.0;
        row[17] = 2.0;
        row[32] = -254.0;
        let q8 = encoded(DType::Q8_0, &row);
        assert_eq!((q8[0], q8[1].cast_signed(), q8[17], q8[32].cast_signed()), (127, -3, 2, -127));
        assert_eq!(q8[64..], [0x00, 0x3c, 0x00, 0x40]); // scales 1 and 2
        let mut row = [0.0; 32];
        row[0] = -8.0;
        row[16] = 3.0;
        row[15] = 7.0;
        row[1] = 3.0;
        row[17] = -3.0;
        let q4 = encoded(DType::Q4_0, &row);
        assert_eq!((q4[0], q4[1], q4[15]), (11 << 4, 11 | 5 << 4, 15 | 8 << 4));
        assert_eq!(q4[16..], [0x00, 0x3c]);
        // Codes follow the sign of the largest value: 8 is kept as code 0 with scale -1.
        assert_eq!(encoded(DType::Q4_0, &row.map(|x| -x))[16..], [0x00, 0xbc]);
    }

    #[test]
    fn codes_chosen_elsewhere_lie_as_those_chosen_here() {
        let row: Vec<f32> = (0..64).map(|i| ((i * 37 % 64) as f32 - 30.0) / 8.0).collect();
        let mut codes = vec![0; 64];
        let mut scales = Vec::new();
        for (group, codes) in row.as_chunks::<GROUP>().0.iter().zip(codes.chunks_mut(GROUP)) {
            let mut packed = [0; GROUP / 2];
            let scale = quantise_q4_0(group, &mut packed);
            scales.push(f16::from_f32(scale));
            for (i, code) in codes.iter_mut().enumerate() {
                *code = packed[i % 16] >> (4 * (i / 16)) & 15;
            }
        }
        let mut bytes = vec![0xAA; 36];
        write_q4_0(&codes, &scales, &mut bytes);
        assert_eq!(bytes, encoded(DType::Q4_0, &row));
    }

    #[test]
    fn zeros_encode_to_zero_in_every_type() {
        for dtype in [DType::F16, DType::Q8_0, DType::Q4_0] {
            assert!(decoded(dtype, &encoded(dtype, &[0.0; 32]), 32).iter().all(|&x| x == 0.0));
        }
    }

    #[test]
    fn what_half_precision_cannot_hold_is_an_error() {
        let mut row = [0.0; 32];
        row[5] = 70000.0;
        let mut bytes = [0; 64];
        assert_eq!(encode_row(DType::F16, &row, &mut bytes), Err(OutOfRange { value: 70000.0 }));
        assert!(encode_row(DType::Q8_0, &row, &mut bytes[..34]).is_ok());
        row[5] = -1e9;
        assert_eq!(
            encode_row(DType::Q8_0, &row, &mut bytes[..34]),
            Err(OutOfRange { value: -1e9 })
        );
        assert_eq!(
            encode_row(DType::Q4_0, &row, &mut bytes[..18]),
            Err(OutOfRange { value: -1e9 })
        );
    }
}
