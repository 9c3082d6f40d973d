//! AVX-512 with VNNI, for quantised and low-bit rows; the rest is AVX2's.

mod low_bit;

use super::avx2::{self, GroupDot, Q4_0, Q8_0, Quants, dot_groups, nibbles, weighted_scales};
use super::quantise::{BLOCK_GROUPS, GROUP};
use super::{Activations, Ops, RowOps};
use std::arch::x86_64::*;
use std::marker::PhantomData;

static OPS: Ops = Ops {
    name: "avx512",
    q8_0: RowOps {
        dot: |rows, x, out, ahead| by_row_count!(dot_rows::<Vnni<Q8_0>, _>, rows, x, out, ahead),
        axpy: |rows, weights, acc, ahead| {
            by_row_count!(axpy_rows::<Q8_0, _>, rows, weights, acc, ahead)
        },
        ..avx2::OPS.q8_0
    },
    q4_0: RowOps {
        dot: |rows, x, out, ahead| by_row_count!(dot_rows::<Vnni<Q4_0>, _>, rows, x, out, ahead),
        axpy: |rows, weights, acc, ahead| {
            by_row_count!(axpy_rows::<Q4_0, _>, rows, weights, acc, ahead)
        },
        ..avx2::OPS.q4_0
    },
    low_bit: low_bit::LOW_BIT,
    kv_q8_0: avx2::KV_Q8_0_AVX512,
    ..avx2::OPS
};

/// The table, if this CPU has what it needs.
pub(super) fn available() -> Option<&'static Ops> {
    let has = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni");
    (has && avx2::available().is_some()).then_some(&OPS)
}

/// f32 of a vector.
const LANES: usize = 16;

/// A format's products by VNNI, which multiplies unsigned with signed bytes and adds four products to a sum.
struct Vnni<Q>(PhantomData<Q>);

impl<Q: Quants> Quants for Vnni<Q> {
    const BYTES: usize = Q::BYTES;
}

/// The CPU needs AVX512-VNNI and VL.
impl GroupDot for Vnni<Q8_0> {
    #[inline(always)]
    unsafe fn dot(group: *const u8, x: __m256i, sums: __m256i) -> __m256i {
        // SAFETY: GROUP bytes, and the CPU has the features.
        unsafe {
            // Weights plus 128 are unsigned.
            let weights =
                _mm256_xor_si256(_mm256_loadu_si256(group.cast()), _mm256_set1_epi8(-128));
            let offset = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32::<7>(sums));
            _mm256_dpbusd_epi32(offset, weights, x)
        }
    }
}

/// The CPU needs AVX512-VNNI and VL.
impl GroupDot for Vnni<Q4_0> {
    #[inline(always)]
    unsafe fn dot(group: *const u8, x: __m256i, sums: __m256i) -> __m256i {
        // SAFETY: GROUP / 2 bytes, and the CPU has the features.
        unsafe {
            let offset = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32::<3>(sums));
            _mm256_dpbusd_epi32(offset, nibbles(group), x)
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn dot_rows<D: GroupDot, const R: usize>(
    rows: [&&[u8]; R],
    x: Activations<'_>,
    out: &mut [f32],
    ahead: usize,
) {
    // SAFETY: the table is reachable only where the CPU has the features.
    unsafe { dot_groups::<D, R>(rows, x, out, ahead) }
}

/// How a group becomes floats.
trait GroupFloats: Quants {
    /// The group's quants in order.
    ///
    /// # Safety
    /// `group` holds BYTES bytes, and the CPU has AVX-512 F.
    unsafe fn floats(group: *const u8) -> [__m512; GROUP / LANES];
}

impl GroupFloats for Q8_0 {
    #[inline(always)]
    unsafe fn floats(group: *const u8) -> [__m512; GROUP / LANES] {
        // SAFETY: two times LANES bytes.
        std::array::from_fn(|i| unsafe {
            let bytes = _mm_loadu_si128(group.add(i * LANES).cast());
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
        })
    }
}

impl GroupFloats for Q4_0 {
    #[inline(always)]
    unsafe fn floats(group: *const u8) -> [__m512; GROUP / LANES] {
        const QUANTS: [f32; LANES] = [
            -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
        ];
        // SAFETY: LANES bytes, LANES quants.
        unsafe {
            // The permutation looks at the low four bits of an index only.
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(group.cast()));
            let quants = _mm512_loadu_ps(QUANTS.as_ptr());
            let high = _mm512_srli_epi32::<4>(bytes);
            [_mm512_permutexvar_ps(bytes, quants), _mm512_permutexvar_ps(high, quants)]
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f")]
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
        avx2::prefetch_rows(rows, groups * F::BYTES + 2 * first + ahead);
        for g in 0..count {
            let at = (first + g) * F::BYTES;
            if at.is_multiple_of(64) {
                avx2::prefetch_rows(rows, at + ahead);
            }
            let acc = acc[(first + g) * GROUP..][..GROUP].as_mut_ptr();
            // SAFETY: group first + g is one of the rows' and of acc's.
            unsafe {
                let mut sums = [_mm512_loadu_ps(acc), _mm512_loadu_ps(acc.add(LANES))];
                for r in 0..R {
                    let quants = F::floats(rows[r].as_ptr().add(at));
                    let factor = _mm512_set1_ps(factors[r][g]);
                    sums[0] = _mm512_fmadd_ps(quants[0], factor, sums[0]);
                    sums[1] = _mm512_fmadd_ps(quants[1], factor, sums[1]);
                }
                _mm512_storeu_ps(acc, sums[0]);
                _mm512_storeu_ps(acc.add(LANES), sums[1]);
            }
        }
    }
}
