//! [`Bits`]: a yes or no for each of so many things.

#[derive(Clone, Debug, Default)]
pub(crate) struct Bits(Vec<u64>);

impl Bits {
    /// All no.
    pub(crate) fn new(len: u32) -> Bits {
        Bits(vec![0; len.div_ceil(64) as usize])
    }

    pub(crate) fn clear(&mut self) {
        self.0.fill(0);
    }

    pub(crate) fn has(&self, index: u32) -> bool {
        self.0[index as usize / 64] >> (index % 64) & 1 == 1
    }

    /// Says yes; whether it was no before.
    pub(crate) fn set(&mut self, index: u32) -> bool {
        let fresh = !self.has(index);
        self.0[index as usize / 64] |= 1 << (index % 64);
        fresh
    }

    pub(crate) fn unset(&mut self, index: u32) {
        self.0[index as usize / 64] &= !(1 << (index % 64));
    }
}
