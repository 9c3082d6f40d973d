//! The strings in an R package's data (`Rdata.rdb`): a row of zlib streams, each behind its unpacked length, each an
//! object serialised by R, of which only character vectors are understood.

use crate::error::{PrepError, Result};
use flate2::{Decompress, FlushDecompress, Status};
use std::path::Path;

/// Bytes of an object.
const MAX_OBJECT_BYTES: u32 = 64 << 20;
/// Bytes that a byte of zlib's can become.
const MAX_RATIO: usize = 1032;
/// R's type of a string, in the low byte of an item's flags.
const CHARSXP: u32 = 9;

/// All strings, a line each, in order.
pub(super) fn strings(bytes: &[u8], path: &Path) -> Result<String> {
    let corrupt = |problem: &str| PrepError::corrupt(path.display(), problem);
    let mut text = String::new();
    let mut rest = bytes;
    while let Some((length, packed)) = rest.split_first_chunk() {
        let length = u32::from_be_bytes(*length);
        if length > MAX_OBJECT_BYTES {
            return Err(corrupt("an object is longer than any text"));
        }
        let room = packed.len().saturating_mul(MAX_RATIO).min(length as usize);
        let mut object = Vec::with_capacity(room);
        let mut zlib = Decompress::new(true);
        let done = zlib.decompress_vec(packed, &mut object, FlushDecompress::Finish);
        if !matches!(done, Ok(Status::StreamEnd)) || object.len() != length as usize {
            return Err(corrupt("an object does not unpack"));
        }
        rest = &packed[zlib.total_in() as usize..];
        push_strings(&object, &mut text);
    }
    Ok(text)
}

/// Appends the strings of one object: flags whose type is a string, a length, so many bytes.
fn push_strings(object: &[u8], text: &mut String) {
    let mut rest = object;
    while let Some((flags, behind)) = rest.split_first_chunk() {
        let flags = u32::from_be_bytes(*flags);
        let string = (|| {
            let (length, behind) = behind.split_first_chunk()?;
            let length = usize::try_from(i32::from_be_bytes(*length)).ok()?;
            // Nothing but the type and the flags of an encoding.
            let is_string = flags & 0xff == CHARSXP && flags & 0xfff0_0f00 == 0;
            let (string, behind) = behind.split_at_checked(length)?;
            if is_string { Some((std::str::from_utf8(string).ok()?, behind)) } else { None }
        })();
        match string {
            Some((string, behind)) => {
                text.push_str(string);
                text.push('\n');
                rest = behind;
            }
            None => rest = &rest[1..],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{Compress, Compression, FlushCompress};

    fn object(strings: &[&str]) -> Vec<u8> {
        let mut object = b"X\n\0\0\0\x03\0\0\0\x10".to_vec();
        object.extend((strings.len() as u32).to_be_bytes());
        for string in strings {
            object.extend(0x0004_0009u32.to_be_bytes());
            object.extend((string.len() as u32).to_be_bytes());
            object.extend(string.bytes());
        }
        let mut packed = Vec::with_capacity(1000);
        let mut zlib = Compress::new(Compression::default(), true);
        zlib.compress_vec(&object, &mut packed, FlushCompress::Finish).unwrap();
        [&(object.len() as u32).to_be_bytes()[..], &packed].concat()
    }

    #[test]
    fn strings_of_all_objects_come_in_order() {
        let bytes = [object(&["EMMA", "", "a line of text"]), object(&["PERSUASION"])].concat();
        let path = Path::new("Rdata.rdb");
        assert_eq!(strings(&bytes, path).unwrap(), "EMMA\n\na line of text\nPERSUASION\n");
        assert!(strings(&bytes[..bytes.len() - 3], path).is_err());
        assert!(strings(&[0xff; 20], path).is_err());
    }
}
