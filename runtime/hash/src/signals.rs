//! [`Signals`]: past activity as free evidence. A block that ran lately, or often, is likely to run again; knowing it
//! costs no look at the feature.
//!
//! Per block two running means of activity (a fast one and a slow one, the frequency) and whether it was active at the
//! last token. They are folded into one offset a block when a token is done, so that predictions, several a token,
//! pay nothing for them.

use crate::error::{self, HashError};
use crate::head::BlockHead;
use crate::simd::Kernels;

/// How past activity enters the score.
#[derive(Clone, Debug, PartialEq)]
pub struct SignalTables {
    /// A step's share of the fast mean, out of 65536.
    pub fast_rate: u16,
    /// A step's share of the slow mean, out of 65536.
    pub slow_rate: u16,
    /// Added to the bias at a fast mean of 1.
    pub fast_weight: i16,
    /// Added to the bias at a slow mean of 1.
    pub slow_weight: i16,
    /// Added to the bias if active at the last token.
    pub previous_weight: i16,
    /// Both means at the beginning, out of 255; one a block.
    pub initial: Vec<u8>,
}

impl SignalTables {
    pub(crate) fn check(&self, blocks: usize) -> Result<(), HashError> {
        error::same("initial means of activity", self.initial.len(), blocks)
    }
}

/// One layer's past activity.
#[derive(Clone, Debug)]
pub struct Signals {
    pub(crate) fast: Vec<u16>,
    pub(crate) slow: Vec<u16>,
    /// 1 if active at the last token, else 0.
    pub(crate) active: Vec<u8>,
    pub(crate) offsets: Vec<i16>,
}

impl Signals {
    /// Nothing has run yet.
    ///
    /// # Panics
    /// If the head was not checked.
    #[must_use]
    pub fn new(head: &BlockHead) -> Signals {
        let means = match &head.signals {
            Some(tables) => tables.initial.iter().map(|&i| u16::from(i) * 257).collect(),
            None => Vec::new(),
        };
        let active = vec![0; means.len()];
        let slow = means.clone();
        let mut signals = Signals { fast: means, slow, active, offsets: head.biases.clone() };
        if let Some(tables) = &head.signals {
            (Kernels::scalar().0.remember)(tables, 0, 0, &head.biases, &mut signals);
        }
        signals
    }

    /// One token later: `active` blocks ran, the others did not.
    ///
    /// # Panics
    /// If made for another head, or an active block does not exist.
    pub fn update(&mut self, kernels: Kernels, head: &BlockHead, active: &[u32]) {
        assert_eq!(self.offsets.len(), head.blocks(), "blocks of the head");
        let Some(tables) = &head.signals else { return };
        self.active.fill(0);
        for &block in active {
            self.active[block as usize] = 1;
        }
        (kernels.0.remember)(tables, tables.fast_rate, tables.slow_rate, &head.biases, self);
    }

    /// The blocks' offsets, for [`crate::HashStack::scores`].
    #[must_use]
    pub fn offsets(&self) -> &[i16] {
        &self.offsets
    }

    /// Bytes that stay in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        2 * (self.fast.len() + self.slow.len() + self.offsets.len()) + self.active.len()
    }
}
