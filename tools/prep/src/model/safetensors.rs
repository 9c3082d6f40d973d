//! Reader for the header of a safetensors file.
//!
//! ```text
//! header length u64 | header: JSON of name -> dtype, shape, byte range | data
//! ```
//!
//! The length is compared with a limit and with the file before memory is taken; the `safetensors` crate then checks
//! that the ranges follow each other without overlap or hole and fit their shapes; that the data ends where the file
//! does is checked here.

use crate::error::{PrepError, Result};
use crate::model::weights::{Encoding, SourceFile, StoredTensor};
use safetensors::Dtype;
use safetensors::tensor::Metadata;

/// Bytes of a header. A tensor takes about 120, a large model has a few thousand. JSON grows when parsed, by up to
/// 50 times for arrays of one-digit numbers.
pub const MAX_HEADER_BYTES: u64 = 1 << 20;

const LENGTH_BYTES: u64 = 8;

/// The tensors of `file`, which is number `index` of its model's files.
pub fn read_header(file: &SourceFile, index: usize) -> Result<Vec<(String, StoredTensor)>> {
    let place = file.path.display().to_string();
    let corrupt = |problem: String| PrepError::corrupt(&place, problem);
    let incomplete = |wanted: u64| {
        let problem = format!("the file has {} bytes; its header asks for {wanted}", file.len);
        PrepError::incomplete(&place, problem)
    };
    if file.len < LENGTH_BYTES {
        return Err(incomplete(LENGTH_BYTES));
    }
    let mut len = [0; LENGTH_BYTES as usize];
    file.read_at(0, &mut len)?;
    let len = u64::from_le_bytes(len);
    if len > MAX_HEADER_BYTES {
        return Err(corrupt(format!(
            "header length at byte 0 is {len}; the limit is {MAX_HEADER_BYTES} (is this safetensors?)"
        )));
    }
    if file.len < LENGTH_BYTES + len {
        return Err(incomplete(LENGTH_BYTES + len));
    }
    let mut header = vec![0; usize::try_from(len).expect("below the limit")];
    file.read_at(LENGTH_BYTES, &mut header)?;
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|error| corrupt(format!("header: {error}")))?;
    let data = LENGTH_BYTES + len;
    let end = (metadata.data_len() as u64)
        .checked_add(data)
        .ok_or_else(|| corrupt("the byte ranges in the header overflow".into()))?;
    if file.len < end {
        return Err(incomplete(end));
    }
    if file.len > end {
        return Err(corrupt(format!("{} bytes behind the last tensor", file.len - end)));
    }
    let mut tensors = Vec::new();
    for (name, info) in metadata.tensors() {
        let encoding = match info.dtype {
            Dtype::F32 => Encoding::F32,
            Dtype::F16 => Encoding::F16,
            Dtype::BF16 => Encoding::Bf16,
            other => {
                return Err(PrepError::unsupported(format!(
                    "tensor type {other:?} (tensor `{name}` of {place})"
                )));
            }
        };
        let shape: Vec<u64> = info.shape.iter().map(|&dim| dim as u64).collect();
        encoding
            .tensor_bytes(&shape)
            .map_err(|problem| corrupt(format!("tensor `{name}` {problem}")))?;
        let offset = data + info.data_offsets.0 as u64;
        tensors.push((name, StoredTensor { file: index, offset, encoding, shape }));
    }
    Ok(tensors)
}
