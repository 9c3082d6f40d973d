//! AVX2: 32 bytes at a time. Some functions are the definition compiled for AVX2, which the compiler vectorises.
//!
//! Safe functions of the table call functions with `target_feature`; the table is only reachable through
//! [`available`], which has asked the CPU.

use super::{Ops, Rounding, Scoring, scalar};
use crate::bits;
use crate::head::{GROUP, MAX_LEVEL};
use crate::signals::{SignalTables, Signals};
use std::arch::x86_64::*;

static OPS: Ops = Ops {
    name: "avx2",
    sum_squares,
    round,
    dot_i8,
    dot_i4,
    dot_i2,
    dot_f32,
    distances,
    score_signs,
    score_levels,
    remember,
    range,
    at_least,
};

/// The table, if this CPU has what it needs.
pub(super) fn available() -> Option<&'static Ops> {
    (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("popcnt")).then_some(&OPS)
}

/// Safe functions for the table around functions of the same name in [`wide`].
macro_rules! entries {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(fn $name($($argument: $type),*) $(-> $result)? {
            // SAFETY: the table is reachable only where the CPU has avx2 and popcnt.
            unsafe { wide::$name($($argument),*) }
        })*
    };
}

entries! {
    fn sum_squares(x: &[f32]) -> f32;
    fn round(feature: Rounding<'_>, out: &mut [i8]);
    fn dot_i8(rows: &[u8], x: &[i8], out: &mut [i32]);
    fn dot_i4(rows: &[u8], x: &[i8], out: &mut [i32]);
    fn dot_i2(rows: &[u8], x: &[i8], out: &mut [i32]);
    fn dot_f32(rows: &[f32], x: &[f32], out: &mut [f32]);
    fn distances(rows: &[u64], code: &[u64], out: &mut [u32]);
    fn score_signs(scoring: Scoring<'_>, code: &[u64], out: &mut [i32]);
    fn score_levels(scoring: Scoring<'_>, levels: &[i8], out: &mut [i32]);
    fn remember(tables: &SignalTables, fast: u16, slow: u16, biases: &[i16], signals: &mut Signals);
    fn range(x: &[i32]) -> (i32, i32);
    fn at_least(x: &[i32], least: i32, out: &mut [u64]);
}

/// Bytes of a vector.
const BYTES: usize = 32;
/// Rows of a matrix that share the loads of x.
const ROWS: usize = 4;

#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn load(bytes: &[u8; BYTES]) -> __m256i {
    // SAFETY: the reference is to 32 readable bytes, and the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn load_i8(bytes: &[i8; BYTES]) -> __m256i {
    // SAFETY: the reference is to 32 readable bytes, and the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn load_i16(numbers: &[i16; BYTES / 2]) -> __m256i {
    // SAFETY: the reference is to 32 readable bytes, and the load needs no alignment.
    unsafe { _mm256_loadu_si256(numbers.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn load_i32(numbers: &[i32; BYTES / 4]) -> __m256i {
    // SAFETY: the reference is to 32 readable bytes, and the load needs no alignment.
    unsafe { _mm256_loadu_si256(numbers.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn load_f32(numbers: &[f32; BYTES / 4]) -> __m256 {
    // SAFETY: the reference is to 32 readable bytes, and the load needs no alignment.
    unsafe { _mm256_loadu_ps(numbers.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn store(vector: __m256i, to: &mut [i32; BYTES / 4]) {
    // SAFETY: the reference is to 32 writable bytes, and the store needs no alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), vector) }
}

/// The functions themselves.
mod wide {
    use super::*;

    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn sum_squares(x: &[f32]) -> f32 {
        scalar::sum_squares(x)
    }

    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn dot_f32(rows: &[f32], x: &[f32], out: &mut [f32]) {
        scalar::dot_f32(rows, x, out);
    }

    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn distances(rows: &[u64], code: &[u64], out: &mut [u32]) {
        scalar::distances(rows, code, out);
    }

    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn remember(
        tables: &SignalTables,
        fast: u16,
        slow: u16,
        biases: &[i16],
        signals: &mut Signals,
    ) {
        scalar::remember(tables, fast, slow, biases, signals);
    }

    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn range(x: &[i32]) -> (i32, i32) {
        scalar::range(x)
    }

    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn round(feature: Rounding<'_>, out: &mut [i8]) {
        let Rounding { x, scale, center, gain } = feature;
        const LANES: usize = BYTES / 4;
        let (low, high) = (_mm256_set1_ps(-127.0), _mm256_set1_ps(127.0));
        let whole = x.len() / LANES * LANES;
        let chunks = x.as_chunks::<LANES>().0.iter();
        let chunks = chunks.zip(center.as_chunks::<LANES>().0).zip(gain.as_chunks::<LANES>().0);
        for (((x, center), gain), out) in chunks.zip(out.as_chunks_mut::<LANES>().0) {
            let z = _mm256_mul_ps(load_f32(x), _mm256_set1_ps(scale));
            let z = _mm256_mul_ps(_mm256_sub_ps(z, load_f32(center)), load_f32(gain));
            let number = _mm256_cmp_ps::<_CMP_ORD_Q>(z, z);
            let z = _mm256_and_ps(number, _mm256_max_ps(_mm256_min_ps(z, high), low));
            // To the nearest, ties to even: Rust programs do not change the rounding mode.
            let mut wide = [0; LANES];
            store(_mm256_cvtps_epi32(z), &mut wide);
            for (q, wide) in out.iter_mut().zip(wide) {
                *q = wide as i8;
            }
        }
        let (x, center, gain) = (&x[whole..], &center[whole..], &gain[whole..]);
        scalar::round(Rounding { x, scale, center, gain }, &mut out[whole..]);
    }

    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn at_least(x: &[i32], least: i32, out: &mut [u64]) {
        let (whole, rest) = x.as_chunks::<64>();
        let (bits, last) = out.split_at_mut(whole.len());
        let least_of = _mm256_set1_epi32(least);
        for (x, bits) in whole.iter().zip(bits) {
            *bits = 0;
            for (i, x) in x.as_chunks::<8>().0.iter().enumerate() {
                let below = _mm256_cmpgt_epi32(least_of, load_i32(x));
                let below = _mm256_movemask_ps(_mm256_castsi256_ps(below)) as u32;
                *bits |= u64::from(below ^ 0xff) << (8 * i);
            }
        }
        scalar::at_least(rest, least, last);
    }

    /// The sums of four vectors of i32.
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn fold(sums: [__m256i; ROWS]) -> [i32; ROWS] {
        let [a, b, c, d] = sums;
        let pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
        let halves = [_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs)];
        let folded = _mm_add_epi32(halves[0], halves[1]);
        [
            _mm_extract_epi32::<0>(folded),
            _mm_extract_epi32::<1>(folded),
            _mm_extract_epi32::<2>(folded),
            _mm_extract_epi32::<3>(folded),
        ]
    }

    /// Adds neighbouring i16 of `pairs` to i32 of `sum`.
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn widen(sum: __m256i, pairs: __m256i) -> __m256i {
        _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }

    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn sum_of(x: &[i8]) -> i32 {
        let mut sum = _mm256_setzero_si256();
        for x in x.as_chunks::<BYTES>().0 {
            sum = widen(sum, _mm256_maddubs_epi16(_mm256_set1_epi8(1), load_i8(x)));
        }
        let zero = _mm256_setzero_si256();
        fold([sum, zero, zero, zero])[0]
    }

    /// For each four rows of `stride` bytes: `$sums` of them; the last rows are taken one by one, four times the same.
    macro_rules! by_rows {
        ($rows:expr, $stride:expr, $out:expr, |$four:ident| $sums:expr) => {{
            let stride = $stride;
            let whole = $out.len() / ROWS * ROWS;
            let (out, rest) = $out.split_at_mut(whole);
            for (rows, out) in $rows.chunks_exact(ROWS * stride).zip(out.chunks_exact_mut(ROWS)) {
                let $four: [&[u8]; ROWS] = std::array::from_fn(|r| &rows[r * stride..][..stride]);
                out.copy_from_slice(&$sums);
            }
            for (row, out) in $rows[whole * stride..].chunks_exact(stride).zip(rest) {
                let $four = [row; ROWS];
                *out = $sums[0];
            }
        }};
    }

    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn dot_i8(rows: &[u8], x: &[i8], out: &mut [i32]) {
        if x.is_empty() {
            return out.fill(0);
        }
        by_rows!(rows, x.len(), out, |rows| four_i8(rows, x));
    }

    /// A product of signed bytes is that of one's size with the other under its sign; two fit an i16, as none is -128.
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn four_i8(rows: [&[u8]; ROWS], x: &[i8]) -> [i32; ROWS] {
        let x = x.as_chunks::<BYTES>().0;
        let rows = rows.map(|row| &row.as_chunks::<BYTES>().0[..x.len()]);
        let mut sums = [_mm256_setzero_si256(); ROWS];
        for (i, x) in x.iter().enumerate() {
            let x = load_i8(x);
            let size = _mm256_abs_epi8(x);
            for (sum, row) in sums.iter_mut().zip(rows) {
                let signed = _mm256_sign_epi8(load(&row[i]), x);
                *sum = widen(*sum, _mm256_maddubs_epi16(size, signed));
            }
        }
        fold(sums)
    }

    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn dot_i4(rows: &[u8], x: &[i8], out: &mut [i32]) {
        if x.is_empty() {
            return out.fill(0);
        }
        let offset = 8 * sum_of(x);
        by_rows!(rows, x.len() / 2, out, |rows| four_i4(rows, x).map(|sum| sum - offset));
    }

    /// Sums of stored weights (0 to 15) times x.
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn four_i4(rows: [&[u8]; ROWS], x: &[i8]) -> [i32; ROWS] {
        /// Vectors whose sums fit an i16: each adds at most 4 * 15 * 127.
        const FIT: usize = 4;
        let mask = _mm256_set1_epi8(15);
        let x = x.as_chunks::<BYTES>().0.as_chunks::<2>().0;
        let rows = rows.map(|row| &row.as_chunks::<BYTES>().0[..x.len()]);
        let mut sums = [_mm256_setzero_si256(); ROWS];
        for (block, x) in x.chunks(FIT).enumerate() {
            let mut pairs = [_mm256_setzero_si256(); ROWS];
            for (i, x) in x.iter().enumerate() {
                let x = [load_i8(&x[0]), load_i8(&x[1])];
                for (pairs, row) in pairs.iter_mut().zip(rows) {
                    let w = load(&row[block * FIT + i]);
                    let low = _mm256_maddubs_epi16(_mm256_and_si256(w, mask), x[0]);
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(w), mask);
                    let high = _mm256_maddubs_epi16(high, x[1]);
                    *pairs = _mm256_add_epi16(*pairs, _mm256_add_epi16(low, high));
                }
            }
            for (sum, pairs) in sums.iter_mut().zip(pairs) {
                *sum = widen(*sum, pairs);
            }
        }
        fold(sums)
    }

    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn dot_i2(rows: &[u8], x: &[i8], out: &mut [i32]) {
        if x.is_empty() {
            return out.fill(0);
        }
        let offset = 3 * sum_of(x);
        by_rows!(rows, x.len() / 4, out, |rows| four_i2(rows, x).map(|sum| 2 * sum - offset));
    }

    /// Sums of stored weights (0 to 3) times x.
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn four_i2(rows: [&[u8]; ROWS], x: &[i8]) -> [i32; ROWS] {
        /// Vectors whose sums fit an i16: each adds at most 8 * 3 * 127.
        const FIT: usize = 8;
        let mask = _mm256_set1_epi8(3);
        let x = x.as_chunks::<BYTES>().0.as_chunks::<4>().0;
        let rows = rows.map(|row| &row.as_chunks::<BYTES>().0[..x.len()]);
        let mut sums = [_mm256_setzero_si256(); ROWS];
        for (block, x) in x.chunks(FIT).enumerate() {
            let mut pairs = [_mm256_setzero_si256(); ROWS];
            for (i, x) in x.iter().enumerate() {
                let x = [load_i8(&x[0]), load_i8(&x[1]), load_i8(&x[2]), load_i8(&x[3])];
                for (pairs, row) in pairs.iter_mut().zip(rows) {
                    let w = load(&row[block * FIT + i]);
                    let parts = [
                        w,
                        _mm256_srli_epi16::<2>(w),
                        _mm256_srli_epi16::<4>(w),
                        _mm256_srli_epi16::<6>(w),
                    ];
                    for (part, x) in parts.into_iter().zip(x) {
                        let product = _mm256_maddubs_epi16(_mm256_and_si256(part, mask), x);
                        *pairs = _mm256_add_epi16(*pairs, product);
                    }
                }
            }
            for (sum, pairs) in sums.iter_mut().zip(pairs) {
                *sum = widen(*sum, pairs);
            }
        }
        fold(sums)
    }

    /// Most bytes of a code.
    const MAX_BYTES: usize = crate::limits::MAX_CODE_BITS / 8;

    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn score_signs(scoring: Scoring<'_>, code: &[u64], out: &mut [i32]) {
        let mut levels = [0i8; 8 * MAX_BYTES];
        for (i, level) in levels[..scoring.bits].iter_mut().enumerate() {
            *level = bits::sign(code, i) as i8;
        }
        // 8 bytes add up to at most 8 * 2 * 8.
        score::<1, 8>(scoring, &levels[..8 * scoring.bits.div_ceil(8)], out);
    }

    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn score_levels(scoring: Scoring<'_>, levels: &[i8], out: &mut [i32]) {
        let mut padded = [0i8; 8 * MAX_BYTES];
        padded[..scoring.bits].copy_from_slice(&levels[..scoring.bits]);
        // 2 bytes add up to at most 2 * 2 * 56.
        score::<MAX_LEVEL, 2>(scoring, &padded[..8 * scoring.bits.div_ceil(8)], out);
    }

    /// For each four levels what the sixteen patterns of four signs give: the dot product plus 4 * LARGEST.
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn tables<const LARGEST: i8>(levels: &[i8], tables: &mut [[u8; 16]]) {
        let patterns = [
            _mm_set1_epi16(0x01ff),
            _mm_set1_epi32(0x0101_ffff),
            _mm_set1_epi64x(0x0101_0101_ffff_ffff),
            _mm_set_epi64x(0x0101_0101_0101_0101, -1),
        ];
        for (levels, table) in levels.as_chunks::<4>().0.iter().zip(tables) {
            let mut sum = _mm_set1_epi8(4 * LARGEST);
            for (&level, pattern) in levels.iter().zip(patterns) {
                sum = _mm_add_epi8(sum, _mm_sign_epi8(_mm_set1_epi8(level), pattern));
            }
            // SAFETY: the reference is to 16 writable bytes, and the store needs no alignment.
            unsafe { _mm_storeu_si128(table.as_mut_ptr().cast(), sum) }
        }
    }

    /// Half a byte of signs looks up its part of the dot product in a register, for 32 blocks at once: the vector of
    /// popcounts, with the code already in the table. `FIT` bytes' parts fit a u8.
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn score<const LARGEST: i8, const FIT: usize>(
        scoring: Scoring<'_>,
        levels: &[i8],
        out: &mut [i32],
    ) {
        let bytes = levels.len() / 8;
        let mut space = [[0u8; 16]; 2 * MAX_BYTES];
        let looked_up = &mut space[..2 * bytes];
        tables::<LARGEST>(levels, looked_up);
        let looked_up = looked_up.as_chunks::<2>().0;
        let zero_dot = _mm256_set1_epi16(2 * bytes as i16 * 4 * i16::from(LARGEST));
        let signs = scoring.signs.as_chunks::<GROUP>().0;
        let mut first = 0;
        while first < out.len() {
            let groups = if out.len() - first > GROUP { 2 } else { 1 };
            let signs = &signs[first / GROUP * bytes..][..groups * bytes];
            let sums = match groups {
                2 => sums::<2, FIT>([&signs[..bytes], &signs[bytes..]], looked_up),
                _ => [sums::<1, FIT>([signs], looked_up)[0], [_mm256_setzero_si256(); 2]],
            };
            for sums in &sums[..groups] {
                let dots = sums.map(|sum| _mm256_sub_epi16(sum, zero_dot));
                finish(&scoring, first, dots, out);
                first += GROUP;
            }
        }
    }

    /// Sums of what the blocks of `G` groups look up: of blocks 0, 2, 4 … and of blocks 1, 3, 5 … of each group, u16.
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn sums<const G: usize, const FIT: usize>(
        signs: [&[[u8; GROUP]]; G],
        tables: &[[[u8; 16]; 2]],
    ) -> [[__m256i; 2]; G] {
        let (half, even) = (_mm256_set1_epi8(15), _mm256_set1_epi16(0xff));
        let signs = signs.map(|signs| &signs[..tables.len()]);
        let mut sums = [[_mm256_setzero_si256(); 2]; G];
        for (block, tables) in tables.chunks(FIT).enumerate() {
            let mut parts = [_mm256_setzero_si256(); G];
            for (i, [low, high]) in tables.iter().enumerate() {
                let table = [twice(low), twice(high)];
                for (part, signs) in parts.iter_mut().zip(signs) {
                    let w = load(&signs[block * FIT + i]);
                    let low = _mm256_shuffle_epi8(table[0], _mm256_and_si256(w, half));
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(w), half);
                    let high = _mm256_shuffle_epi8(table[1], high);
                    *part = _mm256_add_epi8(*part, _mm256_add_epi8(low, high));
                }
            }
            for (sums, part) in sums.iter_mut().zip(parts) {
                sums[0] = _mm256_add_epi16(sums[0], _mm256_and_si256(part, even));
                sums[1] = _mm256_add_epi16(sums[1], _mm256_srli_epi16::<8>(part));
            }
        }
        sums
    }

    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn twice(table: &[u8; 16]) -> __m256i {
        // SAFETY: the reference is to 16 readable bytes, and the load needs no alignment.
        _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
    }

    /// Scores of the group that begins at block `first`. `dots` of even and odd blocks.
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn finish(scoring: &Scoring<'_>, first: usize, dots: [__m256i; 2], out: &mut [i32]) {
        let count = GROUP.min(out.len() - first);
        let (mut scales, mut offsets) = ([0i16; GROUP], [0i16; GROUP]);
        let mut scores = [[0i32; 8]; GROUP / 8];
        if count == GROUP {
            scales.copy_from_slice(&scoring.scales[first..first + GROUP]);
            offsets.copy_from_slice(&scoring.offsets[first..first + GROUP]);
        } else {
            scales[..count].copy_from_slice(&scoring.scales[first..first + count]);
            offsets[..count].copy_from_slice(&scoring.offsets[first..first + count]);
        }
        // Lane by lane: blocks 0-7 and 16-23, then 8-15 and 24-31.
        let within =
            [_mm256_unpacklo_epi16(dots[0], dots[1]), _mm256_unpackhi_epi16(dots[0], dots[1])];
        let dots = [
            _mm256_permute2x128_si256::<0x20>(within[0], within[1]),
            _mm256_permute2x128_si256::<0x31>(within[0], within[1]),
        ];
        let factor = _mm256_set1_epi16(1 << scoring.shift);
        let (scales, offsets) = (scales.as_chunks::<16>().0, offsets.as_chunks::<16>().0);
        for (half, dots) in dots.into_iter().enumerate() {
            // Pairs (dot, factor) times pairs (scale, offset), added in 32 bits.
            let (scale, offset) = (load_i16(&scales[half]), load_i16(&offsets[half]));
            let low = _mm256_madd_epi16(
                _mm256_unpacklo_epi16(dots, factor),
                _mm256_unpacklo_epi16(scale, offset),
            );
            let high = _mm256_madd_epi16(
                _mm256_unpackhi_epi16(dots, factor),
                _mm256_unpackhi_epi16(scale, offset),
            );
            store(_mm256_permute2x128_si256::<0x20>(low, high), &mut scores[2 * half]);
            store(_mm256_permute2x128_si256::<0x31>(low, high), &mut scores[2 * half + 1]);
        }
        out[first..first + count].copy_from_slice(&scores.as_flattened()[..count]);
    }
}
