//! The bytes of each token, so that ids become text without a tokenizer.

use crate::error::{BundleError, Flaw, Kind};
use crate::ids::TokenId;
use crate::limits::{MAX_PIECE_BYTES, MAX_VOCAB};

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TokenKind {
    /// Text.
    Normal = 0,
    /// A mark that is not text: beginning, end, roles.
    Control = 1,
    /// One byte of text, used where no other token fits.
    Byte = 2,
    /// A row of the embedding table that stands for nothing.
    Unused = 3,
}

impl TokenKind {
    fn from_code(code: u8) -> Option<TokenKind> {
        [TokenKind::Normal, TokenKind::Control, TokenKind::Byte, TokenKind::Unused]
            .into_iter()
            .find(|&kind| kind as u8 == code)
    }
}

/// The bytes and the kind of each token, kept as in the file: u32 count n, n kinds of one byte, n u32 ends of pieces,
/// then the pieces. It may be shorter than the embedding table, which some models pad: the rows behind are unused.
#[derive(Clone, PartialEq, Eq)]
pub struct Vocabulary {
    bytes: Vec<u8>,
    count: usize,
}

const COUNT_BYTES: usize = 4;

impl Vocabulary {
    /// Takes the pieces in the order of their ids.
    ///
    /// # Errors
    /// A piece or the whole is too long, a byte token has not one byte, or there is no token.
    pub fn new(
        pieces: impl IntoIterator<Item = (impl AsRef<[u8]>, TokenKind)>,
    ) -> Result<Vocabulary, BundleError> {
        let (mut kinds, mut ends, mut text) = (Vec::new(), Vec::new(), Vec::new());
        for (piece, kind) in pieces {
            kinds.push(kind as u8);
            text.extend_from_slice(piece.as_ref());
            // A length beyond u32 is beyond the section's cap too, which is checked below on the true length.
            ends.extend_from_slice(&(text.len() as u32).to_le_bytes());
        }
        let count = kinds.len();
        let mut bytes = (count as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(&kinds);
        bytes.extend_from_slice(&ends);
        bytes.extend_from_slice(&text);
        if bytes.len() > u32::MAX as usize {
            return Err(Kind::invalid("vocabulary", "more than 4 GiB").into());
        }
        Vocabulary::from_bytes(bytes).map_err(|flaw| Kind::invalid("vocabulary", flaw).into())
    }

    /// Takes the section's bytes.
    pub(crate) fn from_bytes(bytes: Vec<u8>) -> Result<Vocabulary, Flaw> {
        let count = bytes.first_chunk().map(|chunk| u32::from_le_bytes(*chunk));
        let count = count.ok_or("the count is cut off")?;
        if count == 0 || count > MAX_VOCAB {
            return Err(format!("{count} tokens, 1 to {MAX_VOCAB} may be"));
        }
        let count = count as usize;
        let vocabulary = Vocabulary { bytes, count };
        let Some(text_bytes) = vocabulary.bytes.len().checked_sub(vocabulary.text_start()) else {
            return Err(format!("{count} tokens do not fit in {} bytes", vocabulary.bytes.len()));
        };
        let mut start = 0;
        for id in 0..count {
            let end = vocabulary.end(id);
            let len = end.checked_sub(start);
            if len.is_none_or(|len| len > MAX_PIECE_BYTES as usize) || end > text_bytes {
                return Err(format!("token {id} reaches from {start} to {end} of {text_bytes}"));
            }
            let code = vocabulary.bytes[COUNT_BYTES + id];
            let kind = TokenKind::from_code(code)
                .ok_or_else(|| format!("token {id} is of unknown kind {code}"))?;
            if kind == TokenKind::Byte && len != Some(1) {
                return Err(format!("byte token {id} has not one byte"));
            }
            start = end;
        }
        if start != text_bytes {
            return Err(format!("{} bytes belong to no token", text_bytes - start));
        }
        Ok(vocabulary)
    }

    /// The section's bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Number of tokens; at most the model's `vocab_size`.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.count as u32
    }

    /// Whether there is no token. Never true.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The token's bytes, any bytes: characters may be split between tokens. None beyond [`Vocabulary::len`].
    #[must_use]
    pub fn piece(&self, id: TokenId) -> &[u8] {
        let id = id.index();
        if id >= self.count {
            return &[];
        }
        let start = if id == 0 { 0 } else { self.end(id - 1) };
        &self.bytes[self.text_start()..][start..self.end(id)]
    }

    /// The token's kind; [`TokenKind::Unused`] beyond [`Vocabulary::len`].
    #[must_use]
    pub fn kind(&self, id: TokenId) -> TokenKind {
        if id.index() >= self.count {
            return TokenKind::Unused;
        }
        TokenKind::from_code(self.bytes[COUNT_BYTES + id.index()]).expect("checked when made")
    }

    fn text_start(&self) -> usize {
        COUNT_BYTES + self.count * 5
    }

    fn end(&self, id: usize) -> usize {
        let at = COUNT_BYTES + self.count + 4 * id;
        u32::from_le_bytes(*self.bytes[at..].first_chunk().expect("checked when made")) as usize
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vocabulary({} tokens, {} bytes)", self.count, self.bytes.len())
    }
}
