//! [`Artifact`]: the file that a stage leaves, checked when it is opened and whenever it is read.
//!
//! ```text
//! 0   "LSPREP\0\1"
//! 8   bytes of the description    u32
//! 12  1 if complete, 0 if partial u32
//! 16  bytes of all records        u64    0 while partial
//! 24  number of records           u64    0 while partial
//! 32  BLAKE3 of all record heads         0 while partial
//! 64  BLAKE3 of bytes 0 .. 64 and the description
//! 96  description: JSON, see [`Description`]
//!     records: head (unit u32, part u32, bytes u64, BLAKE3 of these 16 bytes and the content), content
//! ```
//!
//! Integers are little endian. Records are in ascending order of [`RecordId`]. As heads hold the hashes of contents,
//! the header vouches for every byte, and yet a file of any length is opened by reading its heads alone. A file is
//! partial while its name ends in `.part`; only [`Journal`](crate::journal::Journal) writes.

use crate::error::{PrepError, Result};
use crate::key::Key;
use crate::model::weights::SourceFile;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ops::Range;
use std::path::Path;

/// Bytes of a description; parameters and a few keys take about a thousand.
pub const MAX_DESCRIPTION_BYTES: u64 = 1 << 20;
/// Records of a file; the longest stages write a few thousand.
pub const MAX_RECORDS: u64 = 1 << 20;

pub(crate) const MAGIC: [u8; 8] = *b"LSPREP\0\x01";
pub(crate) const HEADER_BYTES: u64 = 96;
pub(crate) const HEAD_BYTES: u64 = 48;

/// What an artifact is and what it was made from. Repeated in the file, so that a chain can be followed without the
/// recipe that made it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The stage's number and name, such as `20-activations`.
    pub stage: String,
    /// Number of the content's layout.
    pub schema: u32,
    /// The artifact's name.
    pub key: Key,
    /// Parameters of the stage.
    pub params: Value,
    /// What it was made from.
    pub inputs: Vec<Input>,
    /// Units (layers, mostly) of the whole; 1 for a stage that is not divided.
    pub units: u32,
    /// The units that this file holds; all of them unless it is one machine's share.
    pub range: (u32, u32),
    /// Records that this file holds when it is complete.
    pub records: u64,
}

/// An input of a stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// What it is, for people.
    pub name: String,
    /// Its key, or the hash of its content.
    pub key: Key,
}

impl Description {
    /// The units of [`Description::range`].
    #[must_use]
    pub fn units_held(&self) -> Range<u32> {
        self.range.0..self.range.1
    }

    /// Whether every unit is here.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.units_held() == (0..self.units)
    }
}

/// Which record: a unit (a layer, mostly) and a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecordId {
    /// The unit.
    pub unit: u32,
    /// The part.
    pub part: u32,
}

impl RecordId {
    /// Part `part` of unit `unit`.
    #[must_use]
    pub fn new(unit: u32, part: u32) -> Self {
        RecordId { unit, part }
    }
}

/// The head of a record and where its content lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) id: RecordId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) hash: [u8; 32],
}

impl Head {
    /// The head of the record with `content` that lies at `offset`, behind its head.
    pub(crate) fn new(id: RecordId, offset: u64, content: &[u8]) -> Head {
        let mut head = Head { id, offset, len: content.len() as u64, hash: [0; 32] };
        head.hash = head.hash_with(content);
        head
    }

    /// The hash that this head must hold if it and `content` belong together.
    fn hash_with(&self, content: &[u8]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.to_bytes()[..16]).update(content);
        *hasher.finalize().as_bytes()
    }

    pub(crate) fn to_bytes(self) -> [u8; HEAD_BYTES as usize] {
        let mut bytes = [0; HEAD_BYTES as usize];
        bytes[0..4].copy_from_slice(&self.id.unit.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.id.part.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..].copy_from_slice(&self.hash);
        bytes
    }

    /// The head at `offset`, if the record that it announces follows `last` and ends before `end`.
    pub(crate) fn read(
        file: &SourceFile,
        offset: u64,
        end: u64,
        last: Option<RecordId>,
    ) -> Result<std::result::Result<Head, String>> {
        if end - offset < HEAD_BYTES {
            return Ok(Err(format!("{} bytes are no record", end - offset)));
        }
        let mut bytes = [0; HEAD_BYTES as usize];
        file.read_at(offset, &mut bytes)?;
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let id = RecordId::new(word(0), word(4));
        let len = u64::from_le_bytes(bytes[8..16].try_into().expect("8 bytes"));
        if last.is_some_and(|last| last >= id) {
            return Ok(Err(format!("record {}.{} is out of order", id.unit, id.part)));
        }
        let rest = end - offset - HEAD_BYTES;
        if len > rest {
            let RecordId { unit, part } = id;
            return Ok(Err(format!("record {unit}.{part} wants {len} bytes; {rest} are left")));
        }
        let hash = bytes[16..].try_into().expect("32 bytes");
        Ok(Ok(Head { id, offset: offset + HEAD_BYTES, len, hash }))
    }
}

/// The header of a file, parsed and checked against its own hash.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    pub(crate) description: Description,
    pub(crate) complete: bool,
    pub(crate) payload_bytes: u64,
    pub(crate) records: u64,
    pub(crate) heads_hash: [u8; 32],
    /// Where the first record starts.
    pub(crate) start: u64,
}

impl Header {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let text = serde_json::to_vec(&self.description).expect("a description is plain data");
        let mut bytes = MAGIC.to_vec();
        let len = u32::try_from(text.len()).expect("a description is below its limit");
        bytes.extend(len.to_le_bytes());
        bytes.extend(u32::from(self.complete).to_le_bytes());
        bytes.extend(self.payload_bytes.to_le_bytes());
        bytes.extend(self.records.to_le_bytes());
        bytes.extend(self.heads_hash);
        let hash = blake3::Hasher::new().update(&bytes).update(&text).finalize();
        bytes.extend(hash.as_bytes());
        bytes.extend(text);
        bytes
    }

    pub(crate) fn read(file: &SourceFile) -> Result<Header> {
        let place = file.path.display();
        let short = || PrepError::incomplete(&place, format!("{} bytes: no header", file.len));
        if file.len < HEADER_BYTES {
            return Err(short());
        }
        let mut bytes = [0; HEADER_BYTES as usize];
        file.read_at(0, &mut bytes)?;
        if bytes[..8] != MAGIC {
            return Err(PrepError::corrupt(
                &place,
                "not an artifact of ls-prep, or of another version",
            ));
        }
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let text_bytes = u64::from(word(8));
        if text_bytes > MAX_DESCRIPTION_BYTES {
            let limit = MAX_DESCRIPTION_BYTES;
            let problem = format!("a description of {text_bytes} bytes; the limit is {limit}");
            return Err(PrepError::corrupt(&place, problem));
        }
        if file.len < HEADER_BYTES + text_bytes {
            return Err(short());
        }
        let mut text = vec![0; text_bytes as usize];
        file.read_at(HEADER_BYTES, &mut text)?;
        let hash = blake3::Hasher::new().update(&bytes[..64]).update(&text).finalize();
        if hash.as_bytes()[..] != bytes[64..] {
            return Err(PrepError::corrupt(&place, "the header does not match its checksum"));
        }
        let description: Description =
            serde_json::from_slice(&text).map_err(|error| PrepError::corrupt(&place, error))?;
        Ok(Header {
            description,
            complete: word(12) == 1,
            payload_bytes: long(16),
            records: long(24),
            heads_hash: bytes[32..64].try_into().expect("32 bytes"),
            start: HEADER_BYTES + text_bytes,
        })
    }
}

/// The hash that the header keeps of all heads.
pub(crate) fn hash_heads(heads: &[Head]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for head in heads {
        hasher.update(&head.to_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// A complete artifact. Its frame is checked; contents are checked as they are read.
#[derive(Debug)]
pub struct Artifact {
    file: SourceFile,
    description: Description,
    heads: Vec<Head>,
}

impl Artifact {
    /// Opens a file and checks its header, its length and its record heads.
    pub fn open(path: &Path) -> Result<Artifact> {
        let file = SourceFile::open(path)?;
        // A bit may be flipped on its way: what seems damaged is read once more.
        Artifact::read_frame(&file)
            .or_else(|_| Artifact::read_frame(&file))
            .map(|(header, heads)| Artifact { description: header.description, heads, file })
    }

    /// The header and the heads of all records.
    fn read_frame(file: &SourceFile) -> Result<(Header, Vec<Head>)> {
        let header = Header::read(file)?;
        let place = file.path.display();
        if !header.complete {
            return Err(PrepError::incomplete(&place, "the stage that writes it has not finished"));
        }
        let end = header.start.saturating_add(header.payload_bytes);
        if file.len < end {
            let problem = format!("has {} bytes; its header says {end}", file.len);
            return Err(PrepError::incomplete(&place, problem));
        }
        if file.len > end {
            let problem = format!("{} bytes behind the last record", file.len - end);
            return Err(PrepError::corrupt(&place, problem));
        }
        if header.records > MAX_RECORDS || header.records != header.description.records {
            let (found, wanted) = (header.records, header.description.records);
            return Err(PrepError::corrupt(&place, format!("{found} records; wanted {wanted}")));
        }
        let mut heads: Vec<Head> = Vec::new();
        let mut offset = header.start;
        while offset < end {
            let last = heads.last().map(|head| head.id);
            let head = Head::read(file, offset, end, last)?
                .map_err(|problem| PrepError::corrupt(&place, problem))?;
            offset = head.offset + head.len;
            heads.push(head);
        }
        if heads.len() as u64 != header.records || hash_heads(&heads) != header.heads_hash {
            return Err(PrepError::corrupt(&place, "the record heads do not match their checksum"));
        }
        Ok((header, heads))
    }

    /// What it is.
    #[must_use]
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Its name.
    #[must_use]
    pub fn key(&self) -> Key {
        self.description.key
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Bytes of the file.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.file.len
    }

    /// Ids of the records, ascending.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = RecordId> {
        self.heads.iter().map(|head| head.id)
    }

    /// The content of a record.
    pub fn read(&self, id: RecordId) -> Result<Vec<u8>> {
        let index = self.heads.binary_search_by_key(&id, |head| head.id).map_err(|_| {
            let problem = format!("no record {}.{}", id.unit, id.part);
            PrepError::incomplete(self.file.path.display(), problem)
        })?;
        read_content(&self.file, &self.heads[index])
    }

    /// Reads everything once.
    pub fn verify(&self) -> Result<()> {
        self.heads.iter().try_for_each(|head| read_content(&self.file, head).map(drop))
    }

    /// It as an input of another stage.
    #[must_use]
    pub fn input(&self) -> Input {
        Input { name: self.description().stage.clone(), key: self.description().key }
    }

    /// Fails unless it is an artifact of the stage `wanted`.
    pub fn check_stage(&self, wanted: &str) -> Result<()> {
        match &self.description().stage {
            found if found == wanted => Ok(()),
            found => Err(self.fault(format!("is {found}; wanted {wanted}"))),
        }
    }

    /// The parameters of its stage.
    pub fn params<P: DeserializeOwned>(&self) -> Result<P> {
        let params = self.description().params.clone();
        serde_json::from_value(params).map_err(|problem| self.fault(problem))
    }

    /// What was wanted of this artifact's content and is not so.
    #[must_use]
    pub fn fault(&self, problem: impl std::fmt::Display) -> PrepError {
        PrepError::corrupt(self.file.path.display(), problem)
    }
}

/// The content behind `head`, which lies inside the file. A bit may be flipped on its way from the disk, so a content that
/// does not match its checksum is read once more.
pub(crate) fn read_content(file: &SourceFile, head: &Head) -> Result<Vec<u8>> {
    let mut content = vec![0; usize::try_from(head.len).expect("a record fits in memory")];
    file.read_at(head.offset, &mut content)?;
    if head.hash_with(&content) != head.hash {
        file.read_at(head.offset, &mut content)?;
    }
    if head.hash_with(&content) != head.hash {
        let RecordId { unit, part } = head.id;
        let problem = format!("record {unit}.{part} does not match its checksum");
        return Err(PrepError::corrupt(file.path.display(), problem));
    }
    Ok(content)
}

/// How far a stage has come, read from its files' heads without reading contents.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Glance {
    pub(crate) description: Description,
    pub(crate) records: u64,
    pub(crate) bytes: u64,
}

impl Glance {
    /// Looks at a complete or partial file.
    pub(crate) fn at(path: &Path) -> Result<Glance> {
        let file = SourceFile::open(path)?;
        let header = Header::read(&file)?;
        let (mut offset, mut records, mut last) = (header.start, 0, None);
        while let Ok(head) = Head::read(&file, offset, file.len, last)? {
            offset = head.offset + head.len;
            last = Some(head.id);
            records += 1;
        }
        Ok(Glance { description: header.description, records, bytes: file.len })
    }
}
