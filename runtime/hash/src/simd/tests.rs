//! Every function of every instruction set against plain arithmetic: nothing, one, tails, extremes, random numbers. All
//! of integers must be equal; of f32 the definition is near exact arithmetic, and the others equal the definition.

use super::{Ops, Rounding, Scoring, scalar};
use crate::bits;
use crate::head::{BlockHead, MAX_LEVEL};
use crate::layer::F32_SIGN_MARGIN;
use crate::signals::{SignalTables, Signals};

/// Reproducible numbers (splitmix64).
struct Draw(u64);

impl Draw {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: u64) -> u64 {
        self.bits() % n
    }

    /// Of very different sizes, some zero.
    fn float(&mut self) -> f32 {
        let unit = self.bits() as i32 as f32 / 2f32.powi(31);
        unit * [0.0, 1.0, 1.0, 1.0, 300.0, 1e-6][self.below(6) as usize]
    }

    fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float()).collect()
    }

    /// Bytes; or extremes only, one of them or all.
    fn bytes(&mut self, len: usize, extremes: &[u8]) -> Vec<u8> {
        let count = extremes.len() as u64;
        let same = extremes[self.below(count) as usize];
        let way = self.below(4);
        let mut one = || match way {
            0 => same,
            1 => extremes[self.below(count) as usize],
            _ => self.bits() as u8,
        };
        (0..len).map(|_| one()).collect()
    }

    /// A rounded feature.
    fn rounded(&mut self, len: usize) -> Vec<i8> {
        let bytes = self.bytes(len, &[127, 0x81]);
        bytes.into_iter().map(|b| (b as i8).max(-127)).collect()
    }

    fn words(&mut self, len: usize) -> Vec<u64> {
        (0..len).map(|_| self.bits()).collect()
    }

    fn i16s(&mut self, len: usize) -> Vec<i16> {
        let bits = self.bytes(2 * len, &[0, 0x7f, 0xff, 0x80]);
        bits.as_chunks::<2>().0.iter().map(|&b| i16::from_le_bytes(b)).collect()
    }
}

const ROW_COUNTS: [usize; 7] = [0, 1, 2, 3, 4, 5, 13];

fn check_round(ops: &Ops) {
    let mut draw = Draw(1);
    for len in [0, 1, 2, 7, 8, 9, 31, 33, 100] {
        let mut x = draw.floats(len);
        let (center, gain) = (draw.floats(len), draw.floats(len));
        let special = [f32::NAN, f32::INFINITY, f32::MIN, 1e-40, -0.0];
        for (x, special) in x.iter_mut().step_by(3).zip(special) {
            *x = special;
        }
        for scale in [1.0, 0.37, f32::NAN] {
            let (mut plain, mut found) = (vec![9; len], vec![7; len]);
            let rounding = Rounding { x: &x, scale, center: &center, gain: &gain };
            scalar::round(rounding, &mut plain);
            (ops.round)(rounding, &mut found);
            assert_eq!(found, plain, "{x:?} {center:?} {gain:?}");
        }
    }
    // Ties go to even, sizes are limited, NaN is nothing.
    let x = [0.5, 1.5, -2.5, 126.6, 128.0, -1e9, f32::NAN, f32::INFINITY, 3.5];
    let mut found = [1; 9];
    let rounding = Rounding { x: &x, scale: 1.0, center: &[0.0; 9], gain: &[1.0; 9] };
    (ops.round)(rounding, &mut found);
    assert_eq!(found, [0, 2, -2, 127, 127, -127, 0, 127, 4]);
}

fn check_sum_squares(ops: &Ops) {
    let mut draw = Draw(2);
    for len in [0, 1, 7, 8, 9, 15, 16, 17, 576] {
        let x = draw.floats(len);
        let (found, defined) = ((ops.sum_squares)(&x), scalar::sum_squares(&x));
        assert_eq!(found.to_bits(), defined.to_bits());
        let mut sums = [0.0f32; 8];
        x.iter().enumerate().for_each(|(i, x)| sums[i % 8] += x * x);
        let halves: Vec<f32> = (0..4).map(|j| sums[j] + sums[j + 4]).collect();
        assert_eq!(found, (halves[0] + halves[2]) + (halves[1] + halves[3]), "the order of sums");
        let exact: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        assert!((f64::from(found) - exact).abs() <= 1e-6 * exact, "{found} {exact}");
    }
}

type DotInt = fn(&[u8], &[i8], &mut [i32]);

/// `weight(row, dim)`: what the stored weight means, written again from the layout's description.
fn check_dot(dot: DotInt, step: usize, extremes: &[u8], weight: fn(&[u8], usize) -> i32) {
    let mut draw = Draw(3);
    for steps in [0, 1, 2, 3, 4, 7, 8, 9, 17] {
        for count in ROW_COUNTS.repeat(8) {
            let mut rows = draw.bytes(count * steps * 32, extremes);
            if step == 32 {
                rows.iter_mut().filter(|w| **w == 0x80).for_each(|w| *w = 0x81);
            }
            let x = draw.rounded(steps * step);
            let mut found = vec![-1; count];
            dot(&rows, &x, &mut found);
            for (r, &found) in found.iter().enumerate() {
                let row = &rows[r * steps * 32..];
                let one = |(dim, &x): (usize, &i8)| weight(row, dim) * i32::from(x);
                assert_eq!(found, x.iter().enumerate().map(one).sum(), "row {r} of {count}");
            }
        }
    }
}

fn check_dot_i8(ops: &Ops) {
    check_dot(ops.dot_i8, 32, &[127, 0x81], |row, dim| i32::from(row[dim] as i8));
}

fn check_dot_i4(ops: &Ops) {
    check_dot(ops.dot_i4, 64, &[0xff, 0x00, 0xf0], |row, dim| {
        i32::from(row[dim / 64 * 32 + dim % 32] >> (dim % 64 / 32 * 4) & 15) - 8
    });
}

fn check_dot_i2(ops: &Ops) {
    check_dot(ops.dot_i2, 128, &[0xff, 0x00, 0xcc], |row, dim| {
        2 * i32::from(row[dim / 128 * 32 + dim % 32] >> (dim % 128 / 32 * 2) & 3) - 3
    });
}

fn check_dot_f32(ops: &Ops) {
    let mut draw = Draw(4);
    for len in [0, 8, 16, 24, 576, 4096] {
        for count in ROW_COUNTS {
            let (rows, x) = (draw.floats(count * len), draw.floats(len));
            let (mut found, mut defined) = (vec![-1.0; count], vec![-2.0; count]);
            (ops.dot_f32)(&rows, &x, &mut found);
            scalar::dot_f32(&rows, &x, &mut defined);
            for (r, (found, defined)) in found.iter().zip(defined).enumerate() {
                assert_eq!(found.to_bits(), defined.to_bits());
                let terms =
                    rows[r * len..].iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x));
                let (exact, size) = terms.fold((0.0, 0.0), |(e, s), t| (e + t, s + t.abs()));
                assert!((f64::from(*found) - exact).abs() <= F32_SIGN_MARGIN * size);
            }
        }
    }
}

fn check_distances(ops: &Ops) {
    let mut draw = Draw(5);
    for len in [0, 1, 2, 3, 4, 5, 8, 9, 16, 64] {
        for count in ROW_COUNTS {
            let (rows, code) = (draw.words(count * len), draw.words(len));
            let mut found = vec![99; count];
            (ops.distances)(&rows, &code, &mut found);
            for (r, &found) in found.iter().enumerate() {
                let row = &rows[r * len..][..len];
                let plain =
                    (0..64 * len).filter(|&i| bits::bit(row, i) != bits::bit(&code, i)).count();
                assert_eq!(found as usize, plain);
            }
        }
    }
}

/// Scores of random blocks by `score`, against sign times number, block by block.
fn check_score(
    score: impl Fn(Scoring<'_>, &[u64], &[i8], &mut [i32]),
    level: impl Fn(&[u64], &[i8], usize) -> i32,
) {
    let mut draw = Draw(6);
    for bits in [1, 7, 8, 9, 64, 65, 96, 128, 200, 256, 1024, 4096] {
        for blocks in [1, 2, 31, 32, 33, 63, 64, 65, 97] {
            let mut codes = draw.words(blocks * bits::words(bits));
            let mut code = draw.words(bits::words(bits));
            if draw.below(3) == 0 {
                // The largest distance, and the smallest.
                codes.fill(0);
                code.fill(if draw.below(2) == 0 { !0 } else { 0 });
            }
            if bits % 64 != 0 {
                *code.last_mut().unwrap() &= !(!0 << (bits % 64));
            }
            let levels: Vec<i8> = match draw.below(3) {
                0 => vec![-MAX_LEVEL; bits],
                _ => (0..bits).map(|_| draw.below(15) as i8 - 7).collect(),
            };
            let (scales, offsets) = (draw.i16s(blocks), draw.i16s(blocks));
            let (shift, signs) = (draw.below(9) as u32, BlockHead::interleave(&codes, bits));
            let scoring =
                Scoring { bits, signs: &signs, scales: &scales, offsets: &offsets, shift };
            let mut found = vec![-1; blocks];
            score(scoring, &code, &levels, &mut found);
            for (b, &found) in found.iter().enumerate() {
                let own = &codes[b * bits::words(bits)..];
                let dot: i32 =
                    (0..bits).map(|i| bits::sign(own, i) * level(&code, &levels, i)).sum();
                let plain = i32::from(scales[b]) * dot + i32::from(offsets[b]) * (1 << shift);
                assert_eq!(found, plain, "block {b} of {blocks}, {bits} bits");
            }
        }
    }
}

fn check_score_signs(ops: &Ops) {
    check_score(
        |scoring, code, _, out| (ops.score_signs)(scoring, code, out),
        |code, _, i| bits::sign(code, i),
    );
}

fn check_score_levels(ops: &Ops) {
    check_score(
        |scoring, _, levels, out| (ops.score_levels)(scoring, levels, out),
        |_, levels, i| i32::from(levels[i]),
    );
}

fn check_remember(ops: &Ops) {
    let mut draw = Draw(7);
    for blocks in [0, 1, 7, 8, 31, 33, 100] {
        let w = draw.i16s(3);
        let tables = SignalTables {
            fast_rate: draw.bits() as u16,
            slow_rate: draw.bits() as u16,
            fast_weight: w[0],
            slow_weight: w[1],
            previous_weight: w[2],
            initial: Vec::new(),
        };
        let biases = draw.i16s(blocks);
        let mean = |draw: &mut Draw| draw.i16s(blocks).iter().map(|&m| m as u16).collect();
        let mut found = Signals {
            fast: mean(&mut draw),
            slow: mean(&mut draw),
            active: (0..blocks).map(|_| draw.below(2) as u8).collect(),
            offsets: vec![0; blocks],
        };
        let mut plain = found.clone();
        (ops.remember)(&tables, tables.fast_rate, tables.slow_rate, &biases, &mut found);
        for (b, &bias) in biases.iter().enumerate() {
            let active = u64::from(plain.active[b]);
            for (mean, rate) in
                [(&mut plain.fast[b], tables.fast_rate), (&mut plain.slow[b], tables.slow_rate)]
            {
                let (m, r) = (u64::from(*mean), u64::from(rate));
                *mean = (m - m * r / 65536 + active * r).min(65535) as u16;
            }
            let part = |weight: i16, mean: u16| {
                (f64::from(weight) * f64::from(mean) / 65536.0).floor() as i64
            };
            let sum = i64::from(bias)
                + part(w[0], plain.fast[b])
                + part(w[1], plain.slow[b])
                + active as i64 * i64::from(w[2]);
            plain.offsets[b] = sum.clamp(-32768, 32767) as i16;
        }
        assert_eq!(found.fast, plain.fast);
        assert_eq!(found.slow, plain.slow);
        assert_eq!(found.offsets, plain.offsets);
    }
}

fn check_range(ops: &Ops) {
    let mut draw = Draw(8);
    assert_eq!((ops.range)(&[]), (0, 0));
    for len in [1, 2, 7, 8, 9, 33, 100] {
        let x: Vec<i32> = (0..len).map(|_| draw.bits() as i32 >> draw.below(32)).collect();
        assert_eq!((ops.range)(&x), (*x.iter().min().unwrap(), *x.iter().max().unwrap()));
    }
}

fn check_at_least(ops: &Ops) {
    let mut draw = Draw(9);
    for len in [0, 1, 7, 63, 64, 65, 128, 200] {
        let x: Vec<i32> = (0..len).map(|_| draw.bits() as i32 >> draw.below(32)).collect();
        for least in [i32::MIN, -1, 0, 1, i32::MAX] {
            let mut found = vec![0x55; bits::words(len)];
            (ops.at_least)(&x, least, &mut found);
            let mut plain = vec![0; bits::words(len)];
            bits::pack(x.iter().map(|&x| x >= least), &mut plain);
            assert_eq!(found, plain, "{len} numbers, at least {least}");
        }
    }
}

/// One instruction set's suite; nothing where the CPU lacks it.
macro_rules! suite {
    ($name:ident, $ops:expr, $($test:ident: $check:ident),*) => {
        mod $name {
            use super::*;

            $(#[test]
            fn $test() {
                let available: Option<&Ops> = $ops;
                if let Some(ops) = available {
                    $check(ops);
                }
            })*
        }
    };
}

macro_rules! suites {
    ($($test:ident: $check:ident),* $(,)?) => {
        suite!(plain, Some(&scalar::OPS), $($test: $check),*);
        #[cfg(target_arch = "x86_64")]
        suite!(avx2, super::super::avx2::available(), $($test: $check),*);
    };
}

suites! {
    rounds: check_round,
    sums_squares: check_sum_squares,
    multiplies_i8: check_dot_i8,
    multiplies_i4: check_dot_i4,
    multiplies_i2: check_dot_i2,
    multiplies_f32: check_dot_f32,
    counts_differences: check_distances,
    scores_signs: check_score_signs,
    scores_levels: check_score_levels,
    remembers: check_remember,
    finds_the_range: check_range,
    compares: check_at_least,
}
