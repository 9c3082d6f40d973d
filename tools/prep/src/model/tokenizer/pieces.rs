//! What bytes a token stands for.

use crate::error::Result;
use ls_bundle::vocabulary::{TokenKind, Vocabulary};
use serde_json::Value;
use tokenizers::Tokenizer;

/// How a token's text in the vocabulary becomes bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceRule {
    /// Each character stands for one byte, GPT-2's way.
    ByteLevel,
    /// SentencePiece: U+2581 stands for a space, `<0x0A>` for one byte.
    Metaspace,
}

/// SentencePiece's mark for a space.
pub(super) const SPACE_MARK: &str = "\u{2581}";

impl PieceRule {
    /// The rule that a decoder of `tokenizer.json` follows.
    pub(super) fn of_decoder(decoder: &Value) -> Option<PieceRule> {
        let components = super::components(decoder);
        let has = |kind: &str| components.iter().any(|component| component["type"] == kind);
        let marks_spaces = components.iter().any(|component| {
            component["type"] == "Replace"
                && component["pattern"]["String"] == SPACE_MARK
                && component["content"] == " "
        });
        if components.len() == 1 && has("ByteLevel") {
            Some(PieceRule::ByteLevel)
        } else if (marks_spaces || has("Metaspace")) && !has("ByteLevel") {
            Some(PieceRule::Metaspace)
        } else {
            None
        }
    }

    fn piece(self, token: &str) -> (Vec<u8>, TokenKind) {
        match self {
            PieceRule::ByteLevel => {
                let bytes: Option<Vec<u8>> = token.chars().map(byte_of).collect();
                (bytes.unwrap_or_else(|| token.as_bytes().to_vec()), TokenKind::Normal)
            }
            PieceRule::Metaspace => match fallback_byte(token) {
                Some(byte) => (vec![byte], TokenKind::Byte),
                None => (token.replace(SPACE_MARK, " ").into_bytes(), TokenKind::Normal),
            },
        }
    }
}

/// The byte that GPT-2 writes as `c`: printable Latin-1 stands for itself, and the other 68 bytes are numbered from
/// U+0100 in order.
fn byte_of(c: char) -> Option<u8> {
    let code = u32::from(c);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// The byte of a token like `<0x0A>`.
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let plain = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    plain.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// The bytes of all tokens. Ids that no token has are unused.
pub(super) fn vocabulary(tokenizer: &Tokenizer, rule: PieceRule) -> Result<Vocabulary> {
    let added = tokenizer.get_added_tokens_decoder();
    let highest = tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
    let pieces = (0..=highest).map(|id| match (added.get(&id), tokenizer.id_to_token(id)) {
        (Some(token), _) => {
            let kind = if token.special { TokenKind::Control } else { TokenKind::Normal };
            (token.content.clone().into_bytes(), kind)
        }
        (None, Some(token)) => rule.piece(&token),
        (None, None) => (Vec::new(), TokenKind::Unused),
    });
    Ok(Vocabulary::new(pieces)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_byte_has_one_character() {
        let bytes: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        assert_eq!(bytes.len(), 256);
        assert_eq!(bytes.into_iter().collect::<BTreeSet<u8>>().len(), 256);
        assert_eq!(
            (byte_of('Ġ'), byte_of('Ċ'), byte_of('é'), byte_of('€')),
            (Some(b' '), Some(b'\n'), Some(0xe9), None)
        );
    }

    #[test]
    fn fallback_bytes_are_two_hex_digits() {
        assert_eq!((fallback_byte("<0x0A>"), fallback_byte("<0xff>")), (Some(10), Some(255)));
        for other in ["<0x0>", "<0x+1>", "<0x00A>", "0x0A", "<0xGG>"] {
            assert_eq!(fallback_byte(other), None);
        }
    }
}
