//! Rows of Q8_0 and Q4_0, a group of 32 weights at a time; with or without the dot-product extension.

use super::{
    LANES, half_at, load, load_halves, prefetch_rows, put_columns, store, sum_lanes, transpose,
};
use crate::simd::quantise::{BLOCK_GROUPS, GROUP, block_count, group_scale};
use crate::simd::{Activations, PANEL, QuantBlock, RowOps, scalar};
use std::arch::aarch64::*;
use std::arch::asm;

pub(super) const fn q8_0<M: Multiply>() -> RowOps {
    rows::<Q8_0, M>()
}

pub(super) const fn q4_0<M: Multiply>() -> RowOps {
    rows::<Q4_0, M>()
}

const fn rows<Q: Quants, M: Multiply>() -> RowOps {
    RowOps {
        dot: M::dot::<Q>,
        axpy: |rows, weights, acc, ahead| {
            by_row_count!(axpy_rows::<Q, _>, rows, weights, acc, ahead)
        },
        pack_rows: pack_rows::<Q>,
        unpack: unpack::<Q>,
    }
}

/// A format of groups that share a scale.
pub(super) trait Quants {
    /// Bytes of a group's quants.
    const BYTES: usize;
    /// For fewer rows than a panel's.
    const SCALAR: &RowOps;

    /// The group's quants in order.
    ///
    /// # Safety
    /// `group` holds BYTES bytes, and the CPU has NEON.
    unsafe fn quants(group: *const u8) -> [int8x16_t; 2];
}

enum Q8_0 {}
enum Q4_0 {}

impl Quants for Q8_0 {
    const BYTES: usize = GROUP;
    const SCALAR: &RowOps = &scalar::OPS.q8_0;

    #[inline(always)]
    unsafe fn quants(group: *const u8) -> [int8x16_t; 2] {
        // SAFETY: two times 16 bytes.
        unsafe { [vld1q_s8(group.cast()), vld1q_s8(group.add(16).cast())] }
    }
}

impl Quants for Q4_0 {
    const BYTES: usize = GROUP / 2;
    const SCALAR: &RowOps = &scalar::OPS.q4_0;

    /// The low halves of the bytes, then the high halves; stored 8 too large.
    #[inline(always)]
    unsafe fn quants(group: *const u8) -> [int8x16_t; 2] {
        // SAFETY: 16 bytes, and the CPU has NEON.
        unsafe {
            let bytes = vld1q_u8(group);
            let nibbles = [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)];
            nibbles.map(|nibbles| vsubq_s8(vreinterpretq_s8_u8(nibbles), vdupq_n_s8(8)))
        }
    }
}

/// How quants are multiplied with those of activations.
pub(super) trait Multiply {
    /// Part j is the sum of products 4 j .. 4 j + 4.
    ///
    /// # Safety
    /// The CPU has NEON, and what the implementation says.
    unsafe fn parts(weights: int8x16_t, x: int8x16_t) -> int32x4_t;

    /// See [`RowOps::dot`]; the table is reachable only where the CPU has what `parts` needs.
    fn dot<Q: Quants>(rows: &[&[u8]], x: Activations<'_>, out: &mut [f32], ahead: usize);
}

/// By NEON's products of 16 bits.
pub(super) enum Widening {}
/// By the dot-product extension, which the CPU needs.
pub(super) enum Dotprod {}

impl Multiply for Widening {
    #[inline(always)]
    unsafe fn parts(weights: int8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: the CPU has NEON.
        unsafe {
            // 128 * 127 fits 16 bits, two of them do not.
            let low = vmull_s8(vget_low_s8(weights), vget_low_s8(x));
            let high = vmull_high_s8(weights, x);
            vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high))
        }
    }

    fn dot<Q: Quants>(rows: &[&[u8]], x: Activations<'_>, out: &mut [f32], ahead: usize) {
        by_row_count!(dot_widening::<Q, _>, rows, x, out, ahead);
    }
}

impl Multiply for Dotprod {
    #[inline(always)]
    unsafe fn parts(weights: int8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: the CPU has the extension.
        unsafe { sdot(weights, x) }
    }

    fn dot<Q: Quants>(rows: &[&[u8]], x: Activations<'_>, out: &mut [f32], ahead: usize) {
        by_row_count!(dot_dotprod::<Q, _>, rows, x, out, ahead);
    }
}

/// What the intrinsic `vdotq_s32`, not stable yet, would do with zeros.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = vdupq_n_s32(0);
    // SAFETY: the instruction reads and writes these three registers only.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

#[target_feature(enable = "neon")]
fn dot_widening<Q: Quants, const R: usize>(
    rows: [&&[u8]; R],
    x: Activations<'_>,
    out: &mut [f32],
    ahead: usize,
) {
    // SAFETY: the CPU has NEON, see `available`.
    unsafe { dot_groups::<Q, Widening, R>(rows, x, out, ahead) }
}

#[target_feature(enable = "neon,dotprod")]
fn dot_dotprod<Q: Quants, const R: usize>(
    rows: [&&[u8]; R],
    x: Activations<'_>,
    out: &mut [f32],
    ahead: usize,
) {
    // SAFETY: the CPU has the extension, see `dotprod`.
    unsafe { dot_groups::<Q, Dotprod, R>(rows, x, out, ahead) }
}

/// The order is [`scalar`]'s.
///
/// # Safety
/// The CPU has NEON and what M needs. For speed the caller has these features enabled.
#[inline(always)]
unsafe fn dot_groups<Q: Quants, M: Multiply, const R: usize>(
    rows: [&&[u8]; R],
    x: Activations<'_>,
    out: &mut [f32],
    ahead: usize,
) {
    let groups = x.floats.len() / GROUP;
    let rows = rows.map(|row| &row[..groups * (Q::BYTES + 2)]);
    let (blocks, out) = (&x.quants[..block_count(x.floats.len())], &mut out[..R]);
    // SAFETY: the CPU has the features. Group first + g is below `groups`: rows hold that many.
    unsafe {
        let mut sums = [[vdupq_n_f32(0.0); 2]; R];
        for (block, first) in blocks.iter().zip((0..groups).step_by(BLOCK_GROUPS)) {
            let count = BLOCK_GROUPS.min(groups - first);
            prefetch_rows(rows, groups * Q::BYTES + 2 * first + ahead);
            let factors =
                rows.map(|row| scales(&row[groups * Q::BYTES + 2 * first..], block.scales));
            for (g, x) in block.quants.iter().enumerate().take(count) {
                let at = (first + g) * Q::BYTES;
                if at.is_multiple_of(64) {
                    prefetch_rows(rows, at + ahead);
                }
                let x = Q8_0::quants(x.as_ptr().cast());
                for r in 0..R {
                    let weights = Q::quants(rows[r].as_ptr().add(at));
                    for half in 0..2 {
                        let parts = vcvtq_f32_s32(M::parts(weights[half], x[half]));
                        sums[r][half] = vfmaq_n_f32(sums[r][half], parts, factors[r][g]);
                    }
                }
            }
        }
        for (out, [low, high]) in out.iter_mut().zip(sums) {
            *out = sum_lanes(vaddq_f32(low, high));
        }
    }
}

/// Up to BLOCK_GROUPS scales from the start of `halves`, each times its factor; zeros behind the last one.
#[inline]
#[target_feature(enable = "neon")]
fn scales(halves: &[u8], factors: [f32; BLOCK_GROUPS]) -> [f32; BLOCK_GROUPS] {
    let mut few = [0; 2 * BLOCK_GROUPS];
    let halves = halves.first_chunk().unwrap_or_else(|| {
        few[..halves.len()].copy_from_slice(halves);
        &few
    });
    // SAFETY: 16 bytes.
    let [low, high] = unsafe { load_halves(halves.as_ptr()) };
    let (factors, _) = factors.as_chunks::<LANES>();
    let mut out = [0.0; BLOCK_GROUPS];
    let (vectors, _) = out.as_chunks_mut::<LANES>();
    vectors[0] = store(vmulq_f32(low, load(&factors[0])));
    vectors[1] = store(vmulq_f32(high, load(&factors[1])));
    out
}

/// Quants as numbers.
#[inline]
#[target_feature(enable = "neon")]
fn floats(quants: int8x16_t) -> [float32x4_t; 4] {
    let (low, high) = (vmovl_s8(vget_low_s8(quants)), vmovl_high_s8(quants));
    [
        vmovl_s16(vget_low_s16(low)),
        vmovl_high_s16(low),
        vmovl_s16(vget_low_s16(high)),
        vmovl_high_s16(high),
    ]
    .map(|quants| vcvtq_f32_s32(quants))
}

#[target_feature(enable = "neon")]
fn axpy_rows<Q: Quants, const R: usize>(
    rows: [&&[u8]; R],
    weights: &[f32],
    acc: &mut [f32],
    ahead: usize,
) {
    let groups = acc.len() / GROUP;
    let rows = rows.map(|row| &row[..groups * (Q::BYTES + 2)]);
    let weights = weights.first_chunk::<R>().expect("a weight for each row");
    for first in (0..groups).step_by(BLOCK_GROUPS) {
        prefetch_rows(rows, groups * Q::BYTES + 2 * first + ahead);
        let mut factors = [[0.0; BLOCK_GROUPS]; R];
        for r in 0..R {
            let halves = &rows[r][groups * Q::BYTES + 2 * first..];
            factors[r] = scales(halves, [weights[r]; BLOCK_GROUPS]);
        }
        for g in 0..BLOCK_GROUPS.min(groups - first) {
            let at = (first + g) * Q::BYTES;
            if at.is_multiple_of(64) {
                prefetch_rows(rows, at + ahead);
            }
            let (sums, _) = acc[(first + g) * GROUP..][..GROUP].as_chunks_mut::<LANES>();
            let mut vectors: [float32x4_t; GROUP / LANES] = std::array::from_fn(|i| load(&sums[i]));
            for r in 0..R {
                // SAFETY: group first + g is one of the row's; the CPU has NEON.
                let [low, high] = unsafe { Q::quants(rows[r].as_ptr().add(at)) };
                let quants = floats(low).into_iter().chain(floats(high));
                for (sum, quants) in vectors.iter_mut().zip(quants) {
                    *sum = vfmaq_n_f32(*sum, quants, factors[r][g]);
                }
            }
            for (sums, vector) in sums.iter_mut().zip(vectors) {
                *sums = store(vector);
            }
        }
    }
}

fn unpack<Q: Quants>(row: &[u8], cols: usize, first: usize, out: &mut [f32]) {
    // SAFETY: the CPU has NEON, see `available`; lengths are checked inside.
    unsafe { unpack_groups::<Q>(row, cols, first, out) }
}

#[target_feature(enable = "neon")]
fn unpack_groups<Q: Quants>(row: &[u8], cols: usize, first: usize, out: &mut [f32]) {
    let (quants, scales) = row.split_at(cols / GROUP * Q::BYTES);
    let first = first / GROUP;
    let groups = quants.chunks_exact(Q::BYTES).zip(scales.as_chunks::<2>().0).skip(first);
    for (out, (group, scale)) in out.as_chunks_mut::<GROUP>().0.iter_mut().zip(groups) {
        unpack_group::<Q>(group, half_at(scale, 0), out);
    }
}

/// `group` is one.
#[inline]
#[target_feature(enable = "neon")]
fn unpack_group<Q: Quants>(group: &[u8], scale: f32, out: &mut [f32; GROUP]) {
    // SAFETY: BYTES bytes; the CPU has NEON.
    let [low, high] = unsafe { Q::quants(group[..Q::BYTES].as_ptr()) };
    let quants = floats(low).into_iter().chain(floats(high));
    for (out, quants) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(quants) {
        *out = store(vmulq_n_f32(quants, scale));
    }
}

fn pack_rows<Q: Quants>(rows: &[&[u8]], cols: usize, panel: &mut [f32]) {
    match rows.try_into() {
        // SAFETY: the CPU has NEON, see `available`; lengths are checked inside.
        Ok(rows) => unsafe { pack_panel::<Q>(rows, cols, panel) },
        Err(_) => (Q::SCALAR.pack_rows)(rows, cols, panel),
    }
}

/// A group of each row is unpacked, then transposed.
#[target_feature(enable = "neon")]
fn pack_panel<Q: Quants>(rows: &[&[u8]; PANEL], cols: usize, panel: &mut [f32]) {
    let groups = cols / GROUP;
    let rows = rows.map(|row| row[..groups * (Q::BYTES + 2)].split_at(groups * Q::BYTES));
    let mut group = [[0f32; GROUP]; PANEL];
    let panels = panel[..cols * PANEL].chunks_exact_mut(GROUP * PANEL);
    for (g, panel) in panels.enumerate() {
        for ((quants, scales), group) in rows.iter().zip(&mut group) {
            unpack_group::<Q>(&quants[g * Q::BYTES..], half_at(scales, g), group);
        }
        for (quarter, rows) in group.as_chunks::<LANES>().0.iter().enumerate() {
            for i in 0..GROUP / LANES {
                let block = rows.each_ref().map(|row| load(&row.as_chunks::<LANES>().0[i]));
                put_columns(transpose(block), panel, i * LANES, quarter);
            }
        }
    }
}

pub(super) fn quantise(x: &[f32], blocks: &mut [QuantBlock]) {
    assert!(x.len().is_multiple_of(GROUP), "{} activations are not whole groups", x.len());
    for (x, block) in x.chunks(GROUP * BLOCK_GROUPS).zip(blocks) {
        *block = bytemuck::Zeroable::zeroed();
        for (g, x) in x.as_chunks::<GROUP>().0.iter().enumerate() {
            // SAFETY: the CPU has NEON, see `available`.
            unsafe { quantise_group(x, block, g) };
        }
    }
}

#[target_feature(enable = "neon")]
fn quantise_group(x: &[f32; GROUP], block: &mut QuantBlock, g: usize) {
    let x = x.as_chunks::<LANES>().0;
    let x: [float32x4_t; GROUP / LANES] = std::array::from_fn(|i| load(&x[i]));
    // As integers absolute values compare as they do as numbers, with NaN above all.
    let mut largest = vdupq_n_u32(0);
    for x in x {
        largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(x)));
    }
    let (scale, inverse) = group_scale(vmaxvq_u32(largest));
    block.scales[g] = scale;
    // Rounds ties to even and saturates, as scalar does.
    let quants = x.map(|x| vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(x, inverse))));
    for half in 0..2 {
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| quants[4 * half + i]);
        let low = vqmovn_s16(vcombine_s16(a, b));
        let quants = vcombine_s8(low, vqmovn_s16(vcombine_s16(c, d)));
        let sums = vpaddlq_s16(vpaddlq_s8(quants));
        // SAFETY: 16 bytes each, inside the group's 32.
        unsafe {
            vst1q_s8(block.quants[g].as_mut_ptr().add(16 * half), quants);
            vst1q_s32(block.sums[g].as_mut_ptr().add(LANES * half), sums);
        }
    }
}
