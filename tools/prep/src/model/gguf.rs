//! Reader for GGUF files (version 2 and 3, little endian), the format of llama.cpp.
//!
//! ```text
//! "GGUF" | version u32 | tensors u64 | pairs u64 | pairs: key, type, value | tensors: name, dims, type, offset
//! | zero padding to the alignment | tensor data, each tensor starting at the alignment, none overlapping, no holes
//! ```
//!
//! The file is not trusted. Every count and length is compared with a named limit and with what is left of the file
//! before memory is taken for it, so a file can never make the reader hold more than about [`MAX_METADATA_BYTES`].
//! What breaks a rule is `corrupt` with the byte where it stands, what runs over the end of the file is `incomplete`,
//! and what is legal but not handled (big endian, version 1, nested arrays, split files) is `unsupported`.
//!
//! Tensor data is left in the file: [`crate::model::weights`] reads it by range.

use crate::error::{PrepError, Result};
use crate::model::weights::{Encoding, SourceFile, StoredTensor};
use ls_bundle::files::File;
use std::collections::BTreeMap;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

/// Tensors of a file. The largest dense models have a few thousand.
pub const MAX_TENSORS: u64 = 16_384;
/// Key-value pairs of a file. Real files have about 40.
pub const MAX_PAIRS: u64 = 4_096;
/// Bytes of a key.
pub const MAX_KEY_BYTES: u64 = 1_024;
/// Bytes of a tensor's name; llama.cpp keeps 64.
pub const MAX_NAME_BYTES: u64 = 256;
/// Bytes of a string value; the longest are chat templates.
pub const MAX_STRING_BYTES: u64 = 1 << 20;
/// Elements of an array; the longest are merges, about twice the vocabulary.
pub const MAX_ARRAY_LEN: u64 = 1 << 20;
/// All values together as held in memory. A vocabulary of 256,000 tokens with merges takes about 15 MiB.
pub const MAX_METADATA_BYTES: u64 = 32 << 20;
/// Dimensions of a tensor.
pub const MAX_DIMS: u32 = 4;
/// Alignment of tensor data, bytes.
pub const MAX_ALIGNMENT: u64 = 1 << 16;

const DEFAULT_ALIGNMENT: u64 = 32;

/// A metadata value. Integers of all widths are one variant, and so are the two float widths.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any integer type.
    Integer(i64),
    /// Any float type.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// UTF-8 text.
    String(String),
    /// Array of an integer type or of truth values.
    Integers(Vec<i64>),
    /// Array of a float type.
    Floats(Vec<f32>),
    /// Array of strings.
    Strings(Strings),
}

/// Many short strings in one allocation: a vocabulary as separate `String`s would take several times its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strings {
    text: String,
    ends: Vec<u32>,
}

impl Strings {
    /// Number of strings.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// String `index`. Panics beyond [`Strings::len`].
    #[must_use]
    pub fn get(&self, index: usize) -> &str {
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        &self.text[start..self.ends[index] as usize]
    }

    /// All strings in order.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).map(|index| self.get(index))
    }

    fn push(&mut self, string: &str) {
        self.text.push_str(string);
        self.ends.push(u32::try_from(self.text.len()).expect("bounded by MAX_METADATA_BYTES"));
    }
}

impl<'a> FromIterator<&'a str> for Strings {
    fn from_iter<I: IntoIterator<Item = &'a str>>(strings: I) -> Self {
        let mut all = Strings::default();
        for string in strings {
            all.push(string);
        }
        all
    }
}

/// The header of a GGUF file: all metadata, and where each tensor lies.
#[derive(Debug)]
pub struct Gguf {
    /// The open file.
    pub file: SourceFile,
    /// Values by key.
    pub metadata: BTreeMap<String, Value>,
    /// Tensors by name; offsets count from the start of the file.
    pub tensors: BTreeMap<String, StoredTensor>,
}

impl Gguf {
    /// Reads and checks the header of `path`.
    pub fn open(path: &Path) -> Result<Gguf> {
        let file = SourceFile::open(path)?;
        let reader = file.reader()?;
        let mut header = Header {
            path: path.to_owned(),
            reader: BufReader::with_capacity(1 << 16, reader),
            position: 0,
            file_len: file.len,
            metadata_bytes_left: MAX_METADATA_BYTES,
        };
        let (tensor_count, pair_count) = header.preamble()?;
        let metadata = header.pairs(pair_count)?;
        if let Some(Value::Integer(parts @ 2..)) = metadata.get("split.count") {
            return Err(PrepError::unsupported(format!(
                "GGUF split into {parts} files: join them with llama-gguf-split --merge first"
            )));
        }
        let alignment = header.alignment(&metadata)?;
        let infos = header.tensor_infos(tensor_count)?;
        let tensors = header.place(infos, alignment)?;
        Ok(Gguf { file, metadata, tensors })
    }
}

/// A tensor as its header entry tells it: the offset counts from the start of the data.
struct Info {
    name: String,
    shape: Vec<u64>,
    encoding: Encoding,
    bytes: u64,
    offset: u64,
    /// Where the entry stands, for messages.
    at: u64,
}

/// A cursor over the header that knows how much file is left.
struct Header {
    path: PathBuf,
    reader: BufReader<File>,
    position: u64,
    file_len: u64,
    metadata_bytes_left: u64,
}

impl Header {
    fn corrupt(&self, at: u64, problem: impl std::fmt::Display) -> PrepError {
        PrepError::corrupt(format!("{} at byte {at}", self.path.display()), problem)
    }

    /// `Err(incomplete)` unless `len` more bytes exist.
    fn need(&self, len: u64, what: &str) -> Result<()> {
        if len <= self.file_len - self.position {
            return Ok(());
        }
        Err(PrepError::incomplete(
            self.path.display(),
            format!(
                "the file ends at byte {}, inside {what} (byte {} and {len} more)",
                self.file_len, self.position
            ),
        ))
    }

    fn fill(&mut self, into: &mut [u8], what: &str) -> Result<()> {
        self.need(into.len() as u64, what)?;
        self.reader.read_exact(into).map_err(|source| PrepError::io(&self.path, source))?;
        self.position += into.len() as u64;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        self.bytes(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        self.bytes(what).map(u64::from_le_bytes)
    }

    /// A count of things that take at least `least_bytes` each.
    fn count(&mut self, limit: u64, least_bytes: u64, what: &str) -> Result<u64> {
        let at = self.position;
        let count = self.u64(what)?;
        if count > limit {
            return Err(self.corrupt(at, format!("{what} is {count}; the limit is {limit}")));
        }
        self.need(count * least_bytes, what)?;
        Ok(count)
    }

    /// Takes `bytes` from the allowance for metadata.
    fn charge(&mut self, bytes: u64) -> Result<()> {
        match self.metadata_bytes_left.checked_sub(bytes) {
            Some(left) => {
                self.metadata_bytes_left = left;
                Ok(())
            }
            None => Err(self.corrupt(
                self.position,
                format!("metadata takes more than {MAX_METADATA_BYTES} bytes"),
            )),
        }
    }

    fn string(&mut self, limit: u64, what: &str) -> Result<String> {
        let len = self.count(limit, 1, &format!("the length of {what}"))?;
        self.charge(len)?;
        let at = self.position;
        let mut bytes = vec![0; usize::try_from(len).expect("below the limit")];
        self.fill(&mut bytes, what)?;
        String::from_utf8(bytes).map_err(|_| self.corrupt(at, format!("{what} is not UTF-8")))
    }

    /// Magic and version; the counts of tensors and of pairs.
    fn preamble(&mut self) -> Result<(u64, u64)> {
        let magic: [u8; 4] = self.bytes("the magic")?;
        if &magic != b"GGUF" {
            let found = magic.escape_ascii();
            return Err(self.corrupt(0, format!("starts with \"{found}\", not with \"GGUF\"")));
        }
        match self.u32("the version")? {
            2 | 3 => {}
            other if matches!(other.swap_bytes(), 1..=16) => {
                return Err(PrepError::unsupported("big-endian GGUF"));
            }
            other @ (1 | 4..=16) => {
                return Err(PrepError::unsupported(format!("GGUF version {other} (2 and 3 are)")));
            }
            other => return Err(self.corrupt(4, format!("version {other}; wanted 2 or 3"))),
        }
        // A tensor takes at least its name's length, dims, one dim, type and offset; a pair key length, type, value.
        let tensors = self.count(MAX_TENSORS, 8 + 4 + 8 + 4 + 8, "the number of tensors")?;
        let pairs = self.count(MAX_PAIRS, 8 + 4 + 1, "the number of metadata pairs")?;
        Ok((tensors, pairs))
    }

    fn pairs(&mut self, count: u64) -> Result<BTreeMap<String, Value>> {
        let mut pairs = BTreeMap::new();
        for index in 0..count {
            let at = self.position;
            let key = self.string(MAX_KEY_BYTES, &format!("key {index}"))?;
            if key.is_empty() {
                return Err(self.corrupt(at, format!("key {index} is empty")));
            }
            let what = format!("the value of `{key}`");
            let kind = self.u32(&format!("the type of `{key}`"))?;
            let value =
                if kind == TYPE_ARRAY { self.array(&what)? } else { self.scalar(kind, &what)? };
            if pairs.insert(key.clone(), value).is_some() {
                return Err(self.corrupt(at, format!("key `{key}` stands twice")));
            }
        }
        Ok(pairs)
    }

    fn scalar(&mut self, kind: u32, what: &str) -> Result<Value> {
        let at = self.position;
        Ok(match kind {
            0 => Value::Integer(i64::from(self.bytes::<1>(what)?[0])),
            1 => Value::Integer(i64::from(i8::from_le_bytes(self.bytes(what)?))),
            2 => Value::Integer(i64::from(u16::from_le_bytes(self.bytes(what)?))),
            3 => Value::Integer(i64::from(i16::from_le_bytes(self.bytes(what)?))),
            4 => Value::Integer(i64::from(self.u32(what)?)),
            5 => Value::Integer(i64::from(i32::from_le_bytes(self.bytes(what)?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.bytes(what)?))),
            7 => match self.bytes::<1>(what)?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => {
                    return Err(self.corrupt(at, format!("{what} is {other}; a bool is 0 or 1")));
                }
            },
            TYPE_STRING => Value::String(self.string(MAX_STRING_BYTES, what)?),
            10 => Value::Integer(i64::try_from(self.u64(what)?).map_err(|_| {
                self.corrupt(at, format!("{what} does not fit a signed 64-bit integer"))
            })?),
            11 => Value::Integer(i64::from_le_bytes(self.bytes(what)?)),
            12 => Value::Float(f64::from_le_bytes(self.bytes(what)?)),
            other => return Err(self.corrupt(at, format!("{what} has the unknown type {other}"))),
        })
    }

    fn array(&mut self, what: &str) -> Result<Value> {
        let at = self.position;
        let kind = self.u32(what)?;
        let least_bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            TYPE_STRING | 10..=12 => 8,
            TYPE_ARRAY => {
                return Err(PrepError::unsupported(format!("{what}: an array of arrays")));
            }
            other => {
                return Err(
                    self.corrupt(at, format!("{what} is an array of the unknown type {other}"))
                );
            }
        };
        let len = self.count(MAX_ARRAY_LEN, least_bytes, &format!("the length of {what}"))?;
        let capacity = usize::try_from(len).expect("below the limit");
        if kind == TYPE_STRING {
            self.charge(4 * len)?;
            let mut strings = Strings { text: String::new(), ends: Vec::with_capacity(capacity) };
            for index in 0..len {
                strings.push(&self.string(MAX_STRING_BYTES, &format!("{what}[{index}]"))?);
            }
            return Ok(Value::Strings(strings));
        }
        if matches!(kind, 6 | 12) {
            self.charge(4 * len)?;
            let mut floats = Vec::with_capacity(capacity);
            for _ in 0..len {
                let Value::Float(value) = self.scalar(kind, what)? else { unreachable!("a float") };
                floats.push(value as f32);
            }
            return Ok(Value::Floats(floats));
        }
        self.charge(8 * len)?;
        let mut integers = Vec::with_capacity(capacity);
        for _ in 0..len {
            integers.push(match self.scalar(kind, what)? {
                Value::Integer(value) => value,
                Value::Bool(value) => i64::from(value),
                _ => unreachable!("floats and strings were handled above"),
            });
        }
        Ok(Value::Integers(integers))
    }

    fn alignment(&self, metadata: &BTreeMap<String, Value>) -> Result<u64> {
        match metadata.get("general.alignment") {
            None => Ok(DEFAULT_ALIGNMENT),
            Some(&Value::Integer(value)) => u64::try_from(value)
                .ok()
                .filter(|a| a.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(a))
                .ok_or_else(|| {
                    let place = format!("{}: general.alignment", self.path.display());
                    let wanted = format!("a power of two from 8 to {MAX_ALIGNMENT}");
                    PrepError::corrupt(place, format!("is {value}; wanted {wanted}"))
                }),
            Some(_) => Err(PrepError::corrupt(
                format!("{}: general.alignment", self.path.display()),
                "is not an integer",
            )),
        }
    }

    fn tensor_infos(&mut self, count: u64) -> Result<Vec<Info>> {
        let mut infos = Vec::with_capacity(usize::try_from(count).expect("below the limit"));
        for index in 0..count {
            let at = self.position;
            let name = self.string(MAX_NAME_BYTES, &format!("the name of tensor {index}"))?;
            let what = format!("tensor `{name}`");
            let dims = self.u32(&what)?;
            if !(1..=MAX_DIMS).contains(&dims) {
                return Err(self.corrupt(
                    at,
                    format!("{what} has {dims} dimensions; the limit is {MAX_DIMS}"),
                ));
            }
            // The file names the fastest-varying dimension first; everything else here names it last.
            let mut shape = Vec::with_capacity(dims as usize);
            for _ in 0..dims {
                shape.insert(0, self.u64(&what)?);
            }
            let type_id = self.u32(&what)?;
            let offset = self.u64(&what)?;
            let encoding = Encoding::from_ggml(type_id).ok_or_else(|| {
                PrepError::unsupported(format!(
                    "tensor type {} ({what})",
                    ggml_type_name(type_id).map_or_else(|| type_id.to_string(), str::to_owned)
                ))
            })?;
            let bytes = encoding
                .tensor_bytes(&shape)
                .map_err(|problem| self.corrupt(at, format!("{what} {problem}")))?;
            infos.push(Info { name, shape, encoding, bytes, offset, at });
        }
        Ok(infos)
    }

    /// Checks that the tensors tile the data without overlap or hole, and turns offsets into file positions.
    fn place(
        &self,
        mut infos: Vec<Info>,
        alignment: u64,
    ) -> Result<BTreeMap<String, StoredTensor>> {
        let data = self.position.next_multiple_of(alignment);
        infos.sort_by_key(|info| info.offset);
        let mut tensors = BTreeMap::new();
        let mut expected: u64 = 0;
        for info in infos {
            let Info { name, shape, encoding, bytes, offset, at } = info;
            let fault = |what: &str| {
                self.corrupt(
                    at,
                    format!("tensor `{name}` {what}: offset {offset}, wanted {expected}"),
                )
            };
            if !offset.is_multiple_of(alignment) {
                return Err(fault("is not aligned"));
            }
            if offset < expected {
                return Err(fault("overlaps the one before it"));
            }
            if offset > expected {
                return Err(fault("leaves a hole before it"));
            }
            let end = offset
                .checked_add(data)
                .and_then(|start| start.checked_add(bytes))
                .filter(|end| *end < u64::MAX - MAX_ALIGNMENT)
                .ok_or_else(|| fault("ends beyond 64 bits"))?;
            if end > self.file_len {
                return Err(PrepError::incomplete(
                    self.path.display(),
                    format!(
                        "tensor `{name}` ends at byte {end}, the file at byte {}",
                        self.file_len
                    ),
                ));
            }
            expected = (offset + bytes).next_multiple_of(alignment);
            let stored = StoredTensor { file: 0, offset: data + offset, encoding, shape };
            if tensors.insert(name.clone(), stored).is_some() {
                return Err(self.corrupt(at, format!("tensor `{name}` stands twice")));
            }
        }
        Ok(tensors)
    }
}

const TYPE_STRING: u32 = 8;
const TYPE_ARRAY: u32 = 9;

/// Names of ggml's types that are not read, so that a message can say more than a number.
fn ggml_type_name(id: u32) -> Option<&'static str> {
    Some(match id {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return None,
    })
}
