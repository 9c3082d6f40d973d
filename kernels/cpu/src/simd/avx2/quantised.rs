//! Rows of Q8_0 and Q4_0, a group of 32 weights at a time. [`dot_groups`] serves other instruction sets too.

use super::{LANES, half_at, load, prefetch_rows, store, sum_lanes, transpose};
use crate::simd::quantise::{BLOCK_GROUPS, GROUP, block_count, group_scale};
use crate::simd::{Activations, PANEL, QuantBlock, RowOps, scalar};
use std::arch::x86_64::*;

pub(in crate::simd) const Q8_0_ROWS: RowOps = RowOps {
    dot: |rows, x, out, ahead| by_row_count!(dot_rows::<Q8_0, _>, rows, x, out, ahead),
    axpy: |rows, weights, acc, ahead| {
        by_row_count!(axpy_rows::<Q8_0, _>, rows, weights, acc, ahead)
    },
    pack_rows: pack_rows::<Q8_0>,
    unpack: unpack::<Q8_0>,
};

pub(in crate::simd) const Q4_0_ROWS: RowOps = RowOps {
    dot: |rows, x, out, ahead| by_row_count!(dot_rows::<Q4_0, _>, rows, x, out, ahead),
    axpy: |rows, weights, acc, ahead| {
        by_row_count!(axpy_rows::<Q4_0, _>, rows, weights, acc, ahead)
    },
    pack_rows: pack_rows::<Q4_0>,
    unpack: unpack::<Q4_0>,
};

/// A format of groups that share a scale.
pub(in crate::simd) trait Quants {
    /// Bytes of a group's quants.
    const BYTES: usize;
}

/// How a group is multiplied with one of activations.
pub(in crate::simd) trait GroupDot: Quants {
    /// Part j is the sum over elements 4 j .. 4 j + 4 of quants[i] * x[i]; `sums`: of x alone, in the same parts.
    ///
    /// # Safety
    /// `group` holds BYTES bytes, and the CPU has what the implementation says.
    unsafe fn dot(group: *const u8, x: __m256i, sums: __m256i) -> __m256i;
}

/// How a group becomes floats.
trait GroupFloats: Quants {
    /// The group's quants in order.
    ///
    /// # Safety
    /// `group` holds BYTES bytes, and the CPU has AVX2.
    unsafe fn floats(group: *const u8) -> [__m256; GROUP / LANES];

    /// See [`RowOps::pack_rows`].
    const SCALAR: &RowOps;
}

pub(in crate::simd) enum Q8_0 {}
pub(in crate::simd) enum Q4_0 {}

impl Quants for Q8_0 {
    const BYTES: usize = GROUP;
}

impl Quants for Q4_0 {
    const BYTES: usize = GROUP / 2;
}

/// The CPU needs AVX2.
impl GroupDot for Q8_0 {
    #[inline(always)]
    unsafe fn dot(group: *const u8, x: __m256i, _sums: __m256i) -> __m256i {
        // SAFETY: GROUP bytes, and the CPU has AVX2.
        unsafe {
            let weights = _mm256_loadu_si256(group.cast());
            // Of the two factors one must be unsigned: |w| * (x with w's sign). 2 * 128 * 127 fits 16 bits.
            let pairs =
                _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        }
    }
}

/// The CPU needs AVX2.
impl GroupDot for Q4_0 {
    #[inline(always)]
    unsafe fn dot(group: *const u8, x: __m256i, sums: __m256i) -> __m256i {
        // SAFETY: GROUP / 2 bytes, and the CPU has AVX2.
        unsafe {
            // As they are stored, 8 too large.
            let pairs = _mm256_maddubs_epi16(nibbles(group), x);
            let parts = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            _mm256_sub_epi32(parts, _mm256_slli_epi32::<3>(sums))
        }
    }
}

/// The low halves of 16 bytes, then the high halves.
///
/// # Safety
/// `bytes` are 16, and the CPU has AVX2.
#[inline(always)]
pub(in crate::simd) unsafe fn nibbles(bytes: *const u8) -> __m256i {
    // SAFETY: the caller's guarantee.
    unsafe {
        let bytes = _mm_loadu_si128(bytes.cast());
        let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
        _mm256_and_si256(both, _mm256_set1_epi8(15))
    }
}

impl GroupFloats for Q8_0 {
    #[inline(always)]
    unsafe fn floats(group: *const u8) -> [__m256; GROUP / LANES] {
        // SAFETY: four times LANES bytes.
        std::array::from_fn(|i| unsafe {
            let bytes = _mm_loadl_epi64(group.add(i * LANES).cast());
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
        })
    }

    const SCALAR: &RowOps = &scalar::OPS.q8_0;
}

impl GroupFloats for Q4_0 {
    #[inline(always)]
    unsafe fn floats(group: *const u8) -> [__m256; GROUP / LANES] {
        // SAFETY: the caller's guarantee.
        unsafe {
            let quants = _mm256_sub_epi8(nibbles(group), _mm256_set1_epi8(8));
            let (low, high) =
                (_mm256_castsi256_si128(quants), _mm256_extracti128_si256::<1>(quants));
            [low, _mm_unpackhi_epi64(low, low), high, _mm_unpackhi_epi64(high, high)]
                .map(|bytes| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)))
        }
    }

    const SCALAR: &RowOps = &scalar::OPS.q4_0;
}

/// Scales `first .. first + count` of a row of `groups` groups, zeros behind them; count is 1 to BLOCK_GROUPS.
///
/// # Safety
/// The row is whole, and the CPU has AVX2 and F16C.
#[inline(always)]
unsafe fn scales<Q: Quants>(row: &[u8], groups: usize, first: usize, count: usize) -> __m256 {
    const BYTES: usize = 2 * BLOCK_GROUPS;
    /// From byte n on: the permutation that drops n bytes in front and appends zeros.
    const DROP: [u8; 2 * BYTES] = {
        let mut drop = [0x80; 2 * BYTES];
        let mut i = 0;
        while i < BYTES {
            drop[i] = i as u8;
            i += 1;
        }
        drop
    };
    debug_assert!((1..=BLOCK_GROUPS).contains(&count) && first + count <= groups);
    debug_assert_eq!(row.len(), groups * (Q::BYTES + 2));
    // Few scales are the row's last ones: what is before them is loaded along, and dropped.
    let before = BYTES - 2 * count;
    // SAFETY: first + count <= groups; a row has at least 16 bytes before its scales, and DROP 16 from `before` on.
    unsafe {
        let scales = row.as_ptr().add(groups * Q::BYTES + 2 * first).sub(before);
        let drop = _mm_loadu_si128(DROP.as_ptr().add(before).cast());
        _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_loadu_si128(scales.cast()), drop))
    }
}

/// The dot product of every instruction set; the order is [`scalar`]'s.
///
/// # Safety
/// The CPU has AVX2, FMA, F16C and what D needs. For speed the caller has these features enabled.
#[inline(always)]
pub(in crate::simd) unsafe fn dot_groups<D: GroupDot, const R: usize>(
    rows: [&&[u8]; R],
    x: Activations<'_>,
    out: &mut [f32],
    ahead: usize,
) {
    let groups = x.floats.len() / GROUP;
    let rows = rows.map(|row| &row[..groups * (D::BYTES + 2)]);
    let (blocks, out) = (&x.quants[..block_count(x.floats.len())], &mut out[..R]);
    // SAFETY: the CPU has the features. Group first + g is below `groups`: rows hold that many, blocks at least.
    unsafe {
        let mut sums = [_mm256_setzero_ps(); R];
        for (block, first) in blocks.iter().zip((0..groups).step_by(BLOCK_GROUPS)) {
            let count = BLOCK_GROUPS.min(groups - first);
            let mut factors = [[0f32; BLOCK_GROUPS]; R];
            prefetch_rows(rows, groups * D::BYTES + 2 * first + ahead);
            for (row, factors) in rows.into_iter().zip(&mut factors) {
                let scales = scales::<D>(row, groups, first, count);
                *factors = store(_mm256_mul_ps(scales, load(&block.scales)));
            }
            let groups = block.quants.iter().zip(&block.sums).enumerate().take(count);
            for (g, (quants, quant_sums)) in groups {
                let at = (first + g) * D::BYTES;
                if at.is_multiple_of(64) {
                    prefetch_rows(rows, at + ahead);
                }
                let quants = _mm256_loadu_si256(quants.as_ptr().cast());
                let quant_sums = _mm256_loadu_si256(quant_sums.as_ptr().cast());
                for r in 0..R {
                    let parts = D::dot(rows[r].as_ptr().add(at), quants, quant_sums);
                    let factor = _mm256_set1_ps(factors[r][g]);
                    sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(parts), factor, sums[r]);
                }
            }
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            *out = sum_lanes(sums);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn dot_rows<D: GroupDot, const R: usize>(
    rows: [&&[u8]; R],
    x: Activations<'_>,
    out: &mut [f32],
    ahead: usize,
) {
    // SAFETY: the table is reachable only where the CPU has the features.
    unsafe { dot_groups::<D, R>(rows, x, out, ahead) }
}

/// The scales of R rows' groups `first .. first + count`, each times the row's weight.
///
/// # Safety
/// The rows are whole, and the CPU has AVX2 and F16C.
#[inline(always)]
pub(in crate::simd) unsafe fn weighted_scales<Q: Quants, const R: usize>(
    rows: [&[u8]; R],
    weights: &[f32; R],
    (groups, first, count): (usize, usize, usize),
) -> [[f32; BLOCK_GROUPS]; R] {
    let mut factors = [[0f32; BLOCK_GROUPS]; R];
    for ((row, weight), factors) in rows.into_iter().zip(weights).zip(&mut factors) {
        // SAFETY: the caller's guarantee.
        unsafe {
            let scales = scales::<Q>(row, groups, first, count);
            *factors = store(_mm256_mul_ps(scales, _mm256_set1_ps(*weight)));
        }
    }
    factors
}

#[target_feature(enable = "avx2,fma,f16c")]
fn axpy_rows<F: GroupFloats, const R: usize>(
    rows: [&&[u8]; R],
    weights: &[f32],
    acc: &mut [f32],
    ahead: usize,
) {
    let groups = acc.len() / GROUP;
    let rows = rows.map(|row| &row[..groups * (F::BYTES + 2)]);
    let weights = weights.first_chunk::<R>().expect("a weight for each row");
    for first in (0..groups).step_by(BLOCK_GROUPS) {
        let count = BLOCK_GROUPS.min(groups - first);
        // SAFETY: rows have just been cut to `groups`.
        let factors = unsafe { weighted_scales::<F, R>(rows, weights, (groups, first, count)) };
        prefetch_rows(rows, groups * F::BYTES + 2 * first + ahead);
        for g in 0..count {
            let at = (first + g) * F::BYTES;
            if at.is_multiple_of(64) {
                prefetch_rows(rows, at + ahead);
            }
            let (sums, _) = acc[(first + g) * GROUP..][..GROUP].as_chunks_mut::<LANES>();
            let mut vectors: [__m256; GROUP / LANES] = std::array::from_fn(|i| load(&sums[i]));
            for r in 0..R {
                // SAFETY: group first + g is one of the row's.
                let quants = unsafe { F::floats(rows[r].as_ptr().add(at)) };
                let factor = _mm256_set1_ps(factors[r][g]);
                for (sum, quants) in vectors.iter_mut().zip(quants) {
                    *sum = _mm256_fmadd_ps(quants, factor, *sum);
                }
            }
            for (sums, vector) in sums.iter_mut().zip(vectors) {
                *sums = store(vector);
            }
        }
    }
}

fn unpack<F: GroupFloats>(row: &[u8], cols: usize, first: usize, out: &mut [f32]) {
    // SAFETY: the CPU has the features, see `available`; lengths are checked inside.
    unsafe { unpack_groups::<F>(row, cols, first, out) }
}

#[target_feature(enable = "avx2,f16c")]
fn unpack_groups<F: GroupFloats>(row: &[u8], cols: usize, first: usize, out: &mut [f32]) {
    let (quants, scales) = row.split_at(cols / GROUP * F::BYTES);
    let first = first / GROUP;
    let groups = quants.chunks_exact(F::BYTES).zip(scales.as_chunks::<2>().0).skip(first);
    for (out, (group, scale)) in out.chunks_exact_mut(GROUP).zip(groups) {
        let scale = _mm256_set1_ps(half_at(scale, 0));
        // SAFETY: a chunk is a group.
        let quants = unsafe { F::floats(group.as_ptr()) };
        for (out, quants) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(quants) {
            *out = store(_mm256_mul_ps(scale, quants));
        }
    }
}

fn pack_rows<F: GroupFloats>(rows: &[&[u8]], cols: usize, panel: &mut [f32]) {
    match rows.try_into() {
        // SAFETY: the CPU has the features, see `available`; lengths are checked inside.
        Ok(rows) => unsafe { pack_panel::<F>(rows, cols, panel) },
        Err(_) => (F::SCALAR.pack_rows)(rows, cols, panel),
    }
}

/// A group of each row is unpacked, then transposed.
#[target_feature(enable = "avx2,f16c")]
fn pack_panel<F: GroupFloats>(rows: &[&[u8]; PANEL], cols: usize, panel: &mut [f32]) {
    let groups = cols / GROUP;
    let rows = rows.map(|row| row[..groups * (F::BYTES + 2)].split_at(groups * F::BYTES));
    let mut group = [[[0f32; LANES]; GROUP / LANES]; PANEL];
    let panels = panel[..cols * PANEL].chunks_exact_mut(GROUP * PANEL);
    for (g, panel) in panels.enumerate() {
        for ((quants, scales), group) in rows.iter().zip(&mut group) {
            let scale = _mm256_set1_ps(half_at(scales, g));
            // SAFETY: the row's quants are `groups` groups.
            let quants = unsafe { F::floats(quants[g * F::BYTES..].as_ptr()) };
            *group = quants.map(|quants| store(_mm256_mul_ps(scale, quants)));
        }
        for (half, group) in group.as_chunks::<LANES>().0.iter().enumerate() {
            for i in 0..GROUP / LANES {
                let block = group.each_ref().map(|row| load(&row[i]));
                for (k, column) in transpose(block).into_iter().enumerate() {
                    let out = &mut panel[(i * LANES + k) * PANEL + half * LANES..][..LANES];
                    out.copy_from_slice(&store(column));
                }
            }
        }
    }
}

pub(in crate::simd) fn quantise(x: &[f32], blocks: &mut [QuantBlock]) {
    assert!(x.len().is_multiple_of(GROUP), "{} activations are not whole groups", x.len());
    for (x, block) in x.chunks(GROUP * BLOCK_GROUPS).zip(blocks) {
        *block = bytemuck::Zeroable::zeroed();
        for (g, x) in x.as_chunks::<GROUP>().0.iter().enumerate() {
            // SAFETY: the CPU has the features, see `available`.
            unsafe { quantise_group(x, block, g) };
        }
    }
}

#[target_feature(enable = "avx2")]
fn quantise_group(x: &[f32; GROUP], block: &mut QuantBlock, g: usize) {
    let x = x.as_chunks::<LANES>().0;
    let x: [__m256; GROUP / LANES] = std::array::from_fn(|i| load(&x[i]));
    // As integers absolute values compare as they do as numbers, with NaN above all.
    let [a, b, c, d] = x.map(|x| _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0), x)));
    let largest = _mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, d));
    let largest =
        _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256::<1>(largest));
    let largest = _mm_max_epu32(largest, _mm_shuffle_epi32::<0b01_00_11_10>(largest));
    let largest = _mm_max_epu32(largest, _mm_shuffle_epi32::<0b10_11_00_01>(largest));
    let (scale, inverse) = group_scale(_mm_cvtsi128_si32(largest).cast_unsigned());
    let inverse = _mm256_set1_ps(inverse);
    let [a, b, c, d] = x.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, inverse)));
    // Packing goes by 128 bits: the fours of a, b, c, d come out as a0 b0 c0 d0 a1 b1 c1 d1.
    let quants = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let quants = _mm256_permutevar8x32_epi32(quants, order);
    let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), quants);
    let sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    block.scales[g] = scale;
    // SAFETY: both are 32 bytes.
    unsafe {
        _mm256_storeu_si256(block.quants[g].as_mut_ptr().cast(), quants);
        _mm256_storeu_si256(block.sums[g].as_mut_ptr().cast(), sums);
    }
}
