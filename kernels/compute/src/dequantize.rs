//! What the bytes of a weight row mean. The definition; kernels are tested against it.

use half::f16;
use ls_bundle::model::{DType, QUANT_GROUP};

const GROUP: usize = QUANT_GROUP as usize;

/// Writes the weights of one row to `out`; `bytes` holds `dtype.row_bytes(out.len())` bytes.
///
/// Panics if `bytes` has another length, or if a quantised row is not made of whole groups.
pub fn dequantize_row(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    let cols = u32::try_from(out.len()).expect("a row has fewer than 2^32 weights");
    assert_eq!(bytes.len() as u64, dtype.row_bytes(cols), "bytes of a row of {cols} weights");
    match dtype {
        DType::F16 => {
            for (weight, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *weight = half_at(pair);
            }
        }
        DType::Q8_0 => {
            let (quants, scales) = bytes.split_at(out.len());
            let groups = quants.chunks_exact(GROUP).zip(scales.chunks_exact(2));
            for (weights, (group, scale)) in whole_groups(out).zip(groups) {
                let scale = half_at(scale);
                for (weight, &quant) in weights.iter_mut().zip(group) {
                    *weight = scale * f32::from(quant.cast_signed());
                }
            }
        }
        DType::Q4_0 => {
            let (quants, scales) = bytes.split_at(out.len() / 2);
            let groups = quants.chunks_exact(GROUP / 2).zip(scales.chunks_exact(2));
            for (weights, (group, scale)) in whole_groups(out).zip(groups) {
                let scale = half_at(scale);
                let (low, high) = weights.split_at_mut(GROUP / 2);
                for ((low, high), &byte) in low.iter_mut().zip(high).zip(group) {
                    *low = scale * (f32::from(byte & 15) - 8.0);
                    *high = scale * (f32::from(byte >> 4) - 8.0);
                }
            }
        }
    }
}

/// Length of a row of `cols` weights as a vector. Allocates nothing.
#[must_use]
pub fn row_norm(dtype: DType, cols: usize, bytes: &[u8]) -> f32 {
    let mut squares = 0f64;
    let mut add = |weight: f32| squares += f64::from(weight) * f64::from(weight);
    let quant_bytes = dtype.row_bytes(cols as u32) as usize
        - if dtype == DType::F16 { 0 } else { cols / GROUP * 2 };
    let (quants, scales) = bytes.split_at(quant_bytes);
    match dtype {
        DType::F16 => quants.chunks_exact(2).for_each(|pair| add(half_at(pair))),
        DType::Q8_0 => {
            for (group, scale) in quants.chunks_exact(GROUP).zip(scales.chunks_exact(2)) {
                let scale = half_at(scale);
                group.iter().for_each(|quant| add(scale * f32::from(quant.cast_signed())));
            }
        }
        DType::Q4_0 => {
            for (group, scale) in quants.chunks_exact(GROUP / 2).zip(scales.chunks_exact(2)) {
                let scale = half_at(scale);
                for byte in group {
                    add(scale * (f32::from(byte & 15) - 8.0));
                    add(scale * (f32::from(byte >> 4) - 8.0));
                }
            }
        }
    }
    squares.sqrt() as f32
}

fn half_at(pair: &[u8]) -> f32 {
    f16::from_le_bytes([pair[0], pair[1]]).to_f32()
}

fn whole_groups(out: &mut [f32]) -> std::slice::ChunksExactMut<'_, f32> {
    assert!(out.len().is_multiple_of(GROUP), "{} weights are not whole groups of 32", out.len());
    out.chunks_exact_mut(GROUP)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn half(value: f32) -> [u8; 2] {
        f16::from_f32(value).to_le_bytes()
    }

    #[test]
    fn f16_rows_are_little_endian_halves() {
        let bytes = [half(1.5), half(-0.25)].concat();
        let mut out = [f32::NAN; 2];
        dequantize_row(DType::F16, &bytes, &mut out);
        assert_eq!(out, [1.5, -0.25]);
    }

    #[test]
    fn q8_0_scales_follow_all_quants() {
        let mut bytes: Vec<u8> = (0..64).map(|i| if i < 32 { 0xff } else { 3 }).collect();
        bytes.extend([half(0.5), half(2.0)].concat());
        let mut out = [f32::NAN; 64];
        dequantize_row(DType::Q8_0, &bytes, &mut out);
        assert!(out[..32].iter().all(|&w| w == -0.5) && out[32..].iter().all(|&w| w == 6.0));
    }

    #[test]
    fn q4_0_low_nibbles_are_the_first_half_of_a_group() {
        let mut bytes = vec![0xc1; 16];
        bytes.extend(half(2.0));
        let mut out = [f32::NAN; 32];
        dequantize_row(DType::Q4_0, &bytes, &mut out);
        assert!(out[..16].iter().all(|&w| w == -14.0) && out[16..].iter().all(|&w| w == 8.0));
    }
}
