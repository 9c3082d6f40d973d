//! [`AccessTrace`]: which blocks each visit requested, recorded for replay.
//!
//! A set is a bit a block: from an eighth of the blocks on, smaller than any list of them. As bytes, little-endian:
//!
//! | what | as |
//! |---|---|
//! | magic, version | `LSTR`, u32 |
//! | layers, tokens | u32 each |
//! | each layer's first block and the one behind its last | u32 each |
//! | sets: token after token, layer after layer | u64 words; bits behind the last block are 0 |
//!
//! There is no checksum: the file around it has one.

use crate::blocks::Blocks;
use crate::error::TraceError;
use ls_bundle::ids::{BlockId, LayerId};

const MAGIC: &[u8; 4] = b"LSTR";
const VERSION: u32 = 1;

/// Sets of requested blocks, by token and layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessTrace {
    blocks: Blocks,
    /// By layer: where its words are within a token's; and one more, the words of a token.
    starts: Vec<usize>,
    words: Vec<u64>,
    /// Sets recorded.
    sets: usize,
    /// Tokens that fit.
    capacity: usize,
}

impl AccessTrace {
    /// An empty trace with room for so many tokens. The last allocation.
    #[must_use]
    pub fn with_capacity(blocks: Blocks, tokens: usize) -> AccessTrace {
        let mut starts = vec![0];
        for range in blocks.ranges() {
            starts.push(starts[starts.len() - 1] + range.len().div_ceil(64));
        }
        let words = vec![0; tokens * starts[blocks.layers()]];
        AccessTrace { blocks, starts, words, sets: 0, capacity: tokens }
    }

    /// The blocks that there are.
    #[must_use]
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Tokens whose layers are all recorded.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.sets / self.blocks.layers()
    }

    /// Whether no other set fits.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.tokens() == self.capacity
    }

    /// Records the set of the next layer: layers come in order, token after token.
    ///
    /// # Panics
    /// If the trace is full, or a block is not of that layer.
    pub fn push(&mut self, set: impl IntoIterator<Item = BlockId>) {
        assert!(!self.is_full(), "room in the trace");
        let (token, layer) = (self.tokens(), self.sets % self.blocks.layers());
        let range = self.blocks.of(LayerId(layer as u16));
        let first = token * self.starts[self.blocks.layers()] + self.starts[layer];
        for block in set {
            assert!(range.contains(&block.0), "block {block} is not of layer {layer}");
            let number = (block.0 - range.start) as usize;
            self.words[first + number / 64] |= 1 << (number % 64);
        }
        self.sets += 1;
    }

    fn words(&self, token: usize, layer: LayerId) -> &[u64] {
        let start = token * self.starts[self.blocks.layers()];
        &self.words[start + self.starts[layer.index()]..start + self.starts[layer.index() + 1]]
    }

    /// The blocks that a visit requested, ascending.
    ///
    /// # Panics
    /// If the trace has no such set.
    pub fn set(&self, token: usize, layer: LayerId) -> impl Iterator<Item = BlockId> + '_ {
        assert!(token < self.tokens(), "token {token} of the trace");
        let first = self.blocks.of(layer).start;
        self.words(token, layer).iter().zip(0u32..).flat_map(move |(&word, at)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let bit = left.trailing_zeros();
                left &= left.wrapping_sub(1);
                (bit < 64).then_some(BlockId(first + 64 * at + bit))
            })
        })
    }

    /// Whether a visit requested a block of its layer.
    #[must_use]
    pub fn contains(&self, token: usize, layer: LayerId, block: BlockId) -> bool {
        let number = (block.0 - self.blocks.of(layer).start) as usize;
        self.words(token, layer)[number / 64] >> (number % 64) & 1 == 1
    }

    /// Number of blocks that a visit requested.
    #[must_use]
    pub fn set_len(&self, token: usize, layer: LayerId) -> usize {
        self.words(token, layer).iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The whole tokens as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let mut put = |number: u32| bytes.extend(number.to_le_bytes());
        put(VERSION);
        put(self.blocks.layers() as u32);
        put(u32::try_from(self.tokens()).expect("tokens of a trace fit 32 bits"));
        for range in self.blocks.ranges() {
            put(range.start);
            put(range.end);
        }
        let words = self.tokens() * self.starts[self.blocks.layers()];
        bytes.extend(self.words[..words].iter().flat_map(|word| word.to_le_bytes()));
        bytes
    }

    /// Reads what [`AccessTrace::to_bytes`] gives.
    ///
    /// # Errors
    /// If the bytes are anything else. No memory is taken for more than is there.
    pub fn from_bytes(bytes: &[u8]) -> Result<AccessTrace, TraceError> {
        let (head, rest) = bytes
            .split_at_checked(16)
            .ok_or_else(|| TraceError::new("bytes", bytes.len(), "16 or more"))?;
        let number = |at: usize| {
            u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes")) as usize
        };
        if head[..4] != *MAGIC {
            return Err(TraceError::new("magic", head[..4].escape_ascii(), "LSTR"));
        }
        if number(4) != VERSION as usize {
            return Err(TraceError::new("version", number(4), VERSION));
        }
        let (layers, tokens) = (number(8), number(12));
        if !(1..=Blocks::MAX_LAYERS).contains(&layers) {
            return Err(TraceError::new("layers", layers, format!("1 to {}", Blocks::MAX_LAYERS)));
        }
        let (ranges, sets) = rest
            .split_at_checked(8 * layers)
            .ok_or_else(|| TraceError::new("bytes behind the head", rest.len(), 8 * layers))?;
        let ranges = ranges.as_chunks::<4>().0.as_chunks::<2>().0.iter();
        let ranges = ranges.map(|[a, b]| u32::from_le_bytes(*a)..u32::from_le_bytes(*b)).collect();
        let blocks = Blocks::checked(ranges)
            .ok_or_else(|| TraceError::new("ranges of blocks", "others", "ascending ones"))?;
        let mut trace = AccessTrace::with_capacity(blocks, 0);
        let wanted = 8 * tokens as u128 * trace.starts[layers] as u128;
        if sets.len() as u128 != wanted {
            return Err(TraceError::new("bytes of sets", sets.len(), wanted));
        }
        trace.words = sets.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        (trace.sets, trace.capacity) = (tokens * layers, tokens);
        for token in 0..tokens {
            for (layer, range) in (0u16..).zip(trace.blocks.ranges()) {
                let used = range.len() % 64;
                let last = trace.words(token, LayerId(layer)).last().copied().unwrap_or(0);
                if used > 0 && last >> used != 0 {
                    let place = format!("some in token {token}, layer {layer}");
                    return Err(TraceError::new("bits behind the last block", place, "none"));
                }
            }
        }
        Ok(trace)
    }
}
