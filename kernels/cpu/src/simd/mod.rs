//! The arithmetic leaves, once per instruction set.
//!
//! [`Ops`] is a table of functions on slices; [`Kernels::detect`] picks one table when the backend is made. `scalar`
//! is the definition. An instruction set may sum in another order than `scalar`, but always in the same order for the
//! same arguments, and the result for one row, token or element never depends on the others of the same call: this
//! is what makes results independent of cuts, threads and pass lengths.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
/// Calls `$kernel`, which has the number of rows as a const parameter, with 1 to 4 rows.
macro_rules! by_row_count {
    ($kernel:path, $rows:expr, $($argument:expr),*) => {
        match $rows {
            // SAFETY: a table is reachable only where the CPU has its features; lengths are checked inside.
            [a] => unsafe { $kernel([a], $($argument),*) },
            // SAFETY: as above.
            [a, b] => unsafe { $kernel([a, b], $($argument),*) },
            // SAFETY: as above.
            [a, b, c] => unsafe { $kernel([a, b, c], $($argument),*) },
            // SAFETY: as above.
            [a, b, c, d] => unsafe { $kernel([a, b, c, d], $($argument),*) },
            rows => panic!("1 to 4 rows wanted, {} given", rows.len()),
        }
    };
}

#[macro_use]
pub(crate) mod low_bit;
mod quantise;
pub(crate) mod scalar;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

#[cfg(test)]
mod tests;

pub(crate) use low_bit::LowBitOps;
pub(crate) use quantise::{Activations, QuantBlock, block_count};

use ls_bundle::model::DType;
use ls_compute::KvDType;

/// Rows of a panel of [`RowOps::pack_rows`], and most columns of a [`Tile`].
pub(crate) const PANEL: usize = 16;

/// Weight rows, wherever each is.
type Rows<'a> = &'a [&'a [u8]];

/// Functions on weight rows of one number format. A row of n weights is `dtype.row_bytes(n)` bytes, unaligned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowOps {
    /// `out[r] = rows[r] . x` for 1 to 4 rows of `x.floats.len()` weights. What lies `ahead` bytes behind each row is
    /// needed next: a hint.
    ///
    /// Quantised rows are multiplied with the quantised activations, a group's products being added as integers. Here
    /// and in axpy, quantised rows give the same bits on every instruction set.
    pub(crate) dot: fn(rows: Rows<'_>, x: Activations<'_>, out: &mut [f32], ahead: usize),
    /// `acc += weights[r] * rows[r]` for 1 to 4 rows of `acc.len()` weights, row after row: as if they were added one
    /// by one. `ahead`: as for `dot`.
    pub(crate) axpy: fn(rows: Rows<'_>, weights: &[f32], acc: &mut [f32], ahead: usize),
    /// `panel[k * PANEL + r] = rows[r][k]` for up to [`PANEL`] rows of `cols` weights; zero for absent rows.
    pub(crate) pack_rows: fn(rows: Rows<'_>, cols: usize, panel: &mut [f32]),
    /// `out[i] = row[first + i]` of a row of `cols` weights. For quantised types `first` is a multiple of 32.
    pub(crate) unpack: fn(row: &[u8], cols: usize, first: usize, out: &mut [f32]),
}

/// A matrix product with at most [`PANEL`] columns: c\[i\]\[j\] (+)= sum over k, ascending, of a\[i\]\[k\] * b\[k\]\[j\].
#[derive(Debug)]
pub(crate) struct Tile {
    /// Rows of a and c.
    pub(crate) m: usize,
    /// Columns of c.
    pub(crate) n: usize,
    /// Columns of a, rows of b.
    pub(crate) k: usize,
    /// First element of a.
    pub(crate) a: *const f32,
    /// Distance between rows of a.
    pub(crate) a_stride: usize,
    /// First element of b, whose rows are PANEL wide.
    pub(crate) b: *const f32,
    /// Distance between rows of b, >= PANEL.
    pub(crate) b_stride: usize,
    /// First element of c.
    pub(crate) c: *mut f32,
    /// Distance between rows of c.
    pub(crate) c_stride: usize,
    /// Whether the sum goes on from what c holds, or from zero.
    pub(crate) accumulate: bool,
}

/// Functions on keys or values of one number format: rows of `head_dim` numbers, one behind the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvOps {
    /// Writes a row.
    pub(crate) store: fn(values: &[f32], row: &mut [u8]),
    /// `out[g][i] = queries[g] . keys[i]`: queries of width `head_dim`.
    pub(crate) scores: fn(keys: &[u8], queries: &[f32], head_dim: usize, out: &mut [f32]),
    /// `out[g] = sum over i, ascending, of shares[g][i] * values[i]`: out of width `head_dim`.
    pub(crate) weigh: fn(values: &[u8], shares: &[f32], head_dim: usize, out: &mut [f32]),
}

/// One instruction set's functions.
#[derive(Debug)]
pub(crate) struct Ops {
    /// For people.
    pub(crate) name: &'static str,
    pub(crate) f16: RowOps,
    pub(crate) q8_0: RowOps,
    pub(crate) q4_0: RowOps,
    pub(crate) low_bit: LowBitOps,
    /// Quantises `x`, whose length is a multiple of 32, to [`block_count`] blocks; the same on every instruction set.
    pub(crate) quantise: fn(x: &[f32], blocks: &mut [QuantBlock]),
    /// # Safety
    /// For all i < m, j < n, p < k: `a[i * a_stride + p]` and `b[p * b_stride + 0 .. PANEL]` are readable,
    /// `c[i * c_stride + j]` is readable and writable and nobody else touches it.
    pub(crate) gemm: unsafe fn(&Tile),
    pub(crate) kv_f16: KvOps,
    pub(crate) kv_q8_0: KvOps,
    /// `1 / sqrt(mean(x^2) + epsilon)`.
    pub(crate) inverse_rms: fn(x: &[f32], epsilon: f32) -> f32,
    /// `gate = SiLU(gate) * up`.
    pub(crate) swiglu: fn(gate: &mut [f32], up: &[f32]),
    /// `x = exp(x - max)`; returns the sum. Exactly zero where x is -infinity.
    pub(crate) exp_sum: fn(x: &mut [f32], max: f32) -> f32,
    /// Largest element; -infinity of nothing.
    pub(crate) max: fn(x: &[f32]) -> f32,
}

impl Ops {
    /// The functions for rows of `dtype`.
    pub(crate) fn rows(&self, dtype: DType) -> &RowOps {
        match dtype {
            DType::F16 => &self.f16,
            DType::Q8_0 => &self.q8_0,
            DType::Q4_0 => &self.q4_0,
        }
    }

    /// The functions for a cache of `dtype`.
    pub(crate) fn kv(&self, dtype: KvDType) -> &KvOps {
        match dtype {
            KvDType::F16 => &self.kv_f16,
            KvDType::Q8_0 => &self.kv_q8_0,
        }
    }
}

/// A choice of instruction set.
#[derive(Clone, Copy, Debug)]
pub struct Kernels(pub(crate) &'static Ops);

impl Kernels {
    /// The fastest that this CPU runs.
    #[must_use]
    pub fn detect() -> Kernels {
        Kernels::available().next().unwrap_or(Kernels::scalar())
    }

    /// All that this CPU runs, the fastest first.
    pub fn available() -> impl Iterator<Item = Kernels> {
        #[cfg(target_arch = "x86_64")]
        let fast = [avx512::available(), avx2::available()];
        #[cfg(target_arch = "aarch64")]
        let fast = [neon::dotprod(), neon::available()];
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let fast: [Option<&'static Ops>; 0] = [];
        fast.into_iter().flatten().map(Kernels).chain([Kernels::scalar()])
    }

    /// Plain Rust, for any CPU.
    #[must_use]
    pub fn scalar() -> Kernels {
        Kernels(&scalar::OPS)
    }

    /// Name of the instruction set.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name
    }
}
