//! Vectors of signs, packed: bit i of a code is bit i % 64 of word i / 64, set for +1 and clear for -1. Bits behind the
//! end are clear, so that two codes of one length differ only within it.
//!
//! The product of two signs is +1 where they are equal (XNOR), so a dot product is a count of bits.

/// Bits of a word.
pub const WORD_BITS: usize = 64;

/// Words that hold `bits` bits.
#[must_use]
pub const fn words(bits: usize) -> usize {
    bits.div_ceil(WORD_BITS)
}

/// Packs signs, true for +1. `code` is as long as they need, and overwritten.
///
/// # Panics
/// If `code` is too short.
pub fn pack(signs: impl Iterator<Item = bool>, code: &mut [u64]) {
    code.fill(0);
    for (i, sign) in signs.enumerate() {
        code[i / WORD_BITS] |= u64::from(sign) << (i % WORD_BITS);
    }
}

/// Whether sign `i` is +1.
#[must_use]
pub fn bit(code: &[u64], i: usize) -> bool {
    code[i / WORD_BITS] >> (i % WORD_BITS) & 1 == 1
}

/// Sign `i` as a number.
#[must_use]
pub fn sign(code: &[u64], i: usize) -> i32 {
    if bit(code, i) { 1 } else { -1 }
}

/// In how many places two codes differ.
#[inline]
#[must_use]
pub fn distance(a: &[u64], b: &[u64]) -> u32 {
    a.iter().zip(b).map(|(a, b)| (a ^ b).count_ones()).sum()
}

/// The dot product of two vectors of `bits` signs.
#[must_use]
pub fn dot(a: &[u64], b: &[u64], bits: usize) -> i32 {
    bits as i32 - 2 * distance(a, b) as i32
}

/// Byte `k` of a code: its signs 8k to 8k + 7.
#[inline]
#[must_use]
pub fn byte(code: &[u64], k: usize) -> u8 {
    (code[k / 8] >> (k % 8 * 8)) as u8
}

/// φ_τ of Eq. 10: the number that signs `at .. at + tau` spell, the first the most significant, as the rows of Z in
/// Eq. 12 are ordered. `tau` is 1 to 32.
#[inline]
#[must_use]
pub fn index(code: &[u64], at: usize, tau: usize) -> usize {
    let (word, shift) = (at / WORD_BITS, at % WORD_BITS);
    let mut spelled = code[word] >> shift;
    if shift + tau > WORD_BITS {
        spelled |= code[word + 1] << (WORD_BITS - shift);
    }
    (spelled as u32).reverse_bits() as usize >> (32 - tau)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_dot_product_counts_equal_signs(pairs in prop::collection::vec(any::<(bool, bool)>(), 0..300)) {
            let len = words(pairs.len());
            let (mut a, mut b) = (vec![!0; len], vec![!0; len]);
            pack(pairs.iter().map(|p| p.0), &mut a);
            pack(pairs.iter().map(|p| p.1), &mut b);
            let plain: i32 = pairs.iter().map(|&(a, b)| if a == b { 1 } else { -1 }).sum();
            prop_assert_eq!(dot(&a, &b, pairs.len()), plain);
            for (i, pair) in pairs.iter().enumerate() {
                prop_assert_eq!(bit(&a, i), pair.0);
                prop_assert_eq!(sign(&b, i), if pair.1 { 1 } else { -1 });
                prop_assert_eq!(byte(&a, i / 8) >> (i % 8) & 1 == 1, pair.0);
            }
        }

        /// Eq. 12: the index is the row of Z, all patterns in counting order, whose product with the code is largest.
        #[test]
        fn an_index_is_the_nearest_row_of_z(
            signs in prop::collection::vec(any::<bool>(), 150),
            at in 0usize..138,
            tau in 1usize..=12,
        ) {
            let mut code = vec![0; words(signs.len())];
            pack(signs.iter().copied(), &mut code);
            let row = |i: usize| (0..tau).map(move |k| if i >> (tau - 1 - k) & 1 == 1 { 1 } else { -1 });
            let product = |i: usize| row(i).enumerate().map(|(k, z)| z * sign(&code, at + k)).sum::<i32>();
            let nearest = (0..1 << tau).max_by_key(|&i| product(i)).unwrap();
            prop_assert_eq!(index(&code, at, tau), nearest);
        }
    }
}
