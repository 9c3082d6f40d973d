//! The 64 bytes at the front of a bundle, the section table behind them, and where sections lie.
//!
//! Positions follow from kinds and lengths alone: [`lay_out`] is the only place that computes them. The writer takes
//! its result, the reader compares with it, so that overlaps, holes and wrong orders are one check.

use crate::checksum;
use crate::error::{Flaw, Kind};
use crate::extent::Extent;
use crate::limits::{MAX_SECTIONS, MAX_SMALL_BYTES, max_section_bytes};

/// First bytes of a bundle. Like PNG's, they do not survive a transfer as text: a byte with its high bit set, both
/// kinds of line end, and the end-of-file character of DOS.
pub const MAGIC: [u8; 8] = *b"\x8DLSB\r\n\x1A\n";

/// The newest version that this crate reads. It writes the oldest that knows all of a bundle's sections.
pub const FORMAT_VERSION: u32 = 3;

/// Bytes of the header.
pub(crate) const HEADER_BYTES: usize = 64;
/// Bytes of one entry of the section table.
pub(crate) const ENTRY_BYTES: usize = 32;
/// Alignment of Data, and of the file's length: no direct-I/O window passes the end.
pub(crate) const DATA_ALIGNMENT: u64 = 4096;
/// Alignment of the other sections.
const SECTION_ALIGNMENT: u64 = 64;

/// Offsets of the header's fields.
mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 8;
    pub(super) const SECTIONS: usize = 12;
    pub(super) const TOTAL_LEN: usize = 16;
    pub(super) const TABLE_OFFSET: usize = 24;
    pub(super) const TABLE_CHECKSUM: usize = 32;
    pub(super) const UNUSED: usize = 40;
    pub(super) const CHECKSUM: usize = 56;
}

const _: () = {
    assert!(at::VERSION == at::MAGIC + MAGIC.len());
    assert!(at::SECTIONS == at::VERSION + 4);
    assert!(at::TOTAL_LEN == at::SECTIONS + 4);
    assert!(at::TABLE_OFFSET == at::TOTAL_LEN + 8);
    assert!(at::TABLE_CHECKSUM == at::TABLE_OFFSET + 8);
    assert!(at::UNUSED == at::TABLE_CHECKSUM + 8);
    assert!(at::CHECKSUM == at::UNUSED + 16);
    assert!(HEADER_BYTES == at::CHECKSUM + 8);
    assert!((HEADER_BYTES as u64).is_multiple_of(SECTION_ALIGNMENT));
    assert!(DATA_ALIGNMENT.is_multiple_of(crate::extent::BLOCK_ALIGNMENT));
};

/// Offsets of the fields of one entry of the section table.
mod entry {
    pub(super) const KIND: usize = 0;
    pub(super) const UNUSED: usize = 4;
    pub(super) const OFFSET: usize = 8;
    pub(super) const LEN: usize = 16;
    pub(super) const CHECKSUM: usize = 24;
}

const _: () = assert!(entry::CHECKSUM + 8 == ENTRY_BYTES && entry::UNUSED + 4 == entry::OFFSET);

/// What a section holds. The number is the one in the file; sections stand in ascending order of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum SectionKind {
    /// Where the bundle comes from.
    Identity = 1,
    /// [`ModelConfig`](crate::model::ModelConfig).
    Model = 2,
    /// [`WeightMap`](crate::model::WeightMap).
    Weights = 3,
    /// [`Vectors`](crate::model::Vectors).
    Vectors = 4,
    /// The canonical tokenizer.json.
    Tokenizer = 5,
    /// The bytes of each token.
    Vocabulary = 6,
    /// The chat template's text. Optional.
    ChatTemplate = 7,
    /// The order of the neurons. Optional.
    Placement = 8,
    /// [`TableMap`](crate::tables::TableMap). Optional; since version 2.
    Tables = 9,
    /// [`Settings`](crate::tables::Settings). Optional; since version 2.
    Settings = 10,
    /// One checksum a tile or block.
    BlockChecksums = 254,
    /// All big weights.
    Data = 255,
}

impl SectionKind {
    /// Every kind, in the order of the file.
    pub const ALL: [SectionKind; 12] = [
        SectionKind::Identity,
        SectionKind::Model,
        SectionKind::Weights,
        SectionKind::Vectors,
        SectionKind::Tokenizer,
        SectionKind::Vocabulary,
        SectionKind::ChatTemplate,
        SectionKind::Placement,
        SectionKind::Tables,
        SectionKind::Settings,
        SectionKind::BlockChecksums,
        SectionKind::Data,
    ];

    fn from_code(code: u32) -> Option<SectionKind> {
        SectionKind::ALL.into_iter().find(|&kind| kind as u32 == code)
    }

    fn required(self) -> bool {
        !matches!(
            self,
            SectionKind::ChatTemplate
                | SectionKind::Placement
                | SectionKind::Tables
                | SectionKind::Settings
        )
    }

    /// The first version of the format that knows this kind.
    pub(crate) fn since(self) -> u32 {
        if matches!(self, SectionKind::Tables | SectionKind::Settings) { 2 } else { 1 }
    }

    fn alignment(self) -> u64 {
        if self == SectionKind::Data { DATA_ALIGNMENT } else { SECTION_ALIGNMENT }
    }

    /// Name for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            SectionKind::Identity => "identity",
            SectionKind::Model => "model",
            SectionKind::Weights => "weights",
            SectionKind::Vectors => "vectors",
            SectionKind::Tokenizer => "tokenizer",
            SectionKind::Vocabulary => "vocabulary",
            SectionKind::ChatTemplate => "chat template",
            SectionKind::Placement => "placement",
            SectionKind::Tables => "tables",
            SectionKind::Settings => "settings",
            SectionKind::BlockChecksums => "block checksums",
            SectionKind::Data => "data",
        }
    }
}

/// One entry of the section table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// What it holds.
    pub kind: SectionKind,
    /// Where it lies, without the zeros before it.
    pub extent: Extent,
    /// XXH3-64 of its bytes; for Data, of the bytes of BlockChecksums.
    pub checksum: u64,
}

impl std::fmt::Display for Section {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Extent { offset, len } = self.extent;
        write!(f, "section {} ({len} bytes at {offset})", self.kind.name())
    }
}

/// What the header says, the constants left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) sections: u32,
    pub(crate) total_len: u64,
    pub(crate) table_checksum: u64,
}

impl Header {
    pub(crate) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        put(&mut bytes, at::MAGIC, &MAGIC);
        put(&mut bytes, at::VERSION, &self.version.to_le_bytes());
        put(&mut bytes, at::SECTIONS, &self.sections.to_le_bytes());
        put(&mut bytes, at::TOTAL_LEN, &self.total_len.to_le_bytes());
        put(&mut bytes, at::TABLE_OFFSET, &(HEADER_BYTES as u64).to_le_bytes());
        put(&mut bytes, at::TABLE_CHECKSUM, &self.table_checksum.to_le_bytes());
        let checksum = checksum::of(&bytes);
        put(&mut bytes, at::CHECKSUM, &checksum.to_le_bytes());
        bytes
    }

    /// Checks all that can be said without the rest of the file.
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Kind> {
        check_magic(&bytes[..MAGIC.len()])?;
        let mut unsealed = *bytes;
        put(&mut unsealed, at::CHECKSUM, &[0; 8]);
        // Before the version: a damaged version number is no newer version.
        if checksum::of(&unsealed) != u64_at(bytes, at::CHECKSUM) {
            return Err(Kind::corrupt("header", "its checksum does not match"));
        }
        let version = u32_at(bytes, at::VERSION);
        if !(1..=FORMAT_VERSION).contains(&version) {
            return Err(Kind::Unsupported {
                at: "header".into(),
                found: format!(
                    "format version {version}, where versions 1 to {FORMAT_VERSION} are understood"
                ),
            });
        }
        let header = Header {
            version,
            sections: u32_at(bytes, at::SECTIONS),
            total_len: u64_at(bytes, at::TOTAL_LEN),
            table_checksum: u64_at(bytes, at::TABLE_CHECKSUM),
        };
        let flaw = |flaw: String| Err(Kind::corrupt("header", flaw));
        if bytes[at::UNUSED..at::CHECKSUM].iter().any(|&byte| byte != 0) {
            return flaw(format!("unused bytes at {} are not zero", at::UNUSED));
        }
        let table_offset = u64_at(bytes, at::TABLE_OFFSET);
        if table_offset != HEADER_BYTES as u64 {
            return flaw(format!(
                "section table offset is {table_offset}, {HEADER_BYTES} is wanted"
            ));
        }
        if header.sections > MAX_SECTIONS {
            return flaw(format!("{} sections, at most {MAX_SECTIONS} may be", header.sections));
        }
        if !header.total_len.is_multiple_of(DATA_ALIGNMENT) {
            return flaw(format!(
                "total length {} is not a multiple of {DATA_ALIGNMENT}",
                header.total_len
            ));
        }
        Ok(header)
    }
}

/// Tells other files from bundles. `start` is the file's beginning, up to eight bytes.
pub(crate) fn check_magic(start: &[u8]) -> Result<(), Kind> {
    if MAGIC.starts_with(start) {
        return Ok(());
    }
    if start.len() > 4 && MAGIC[1..4] == start[1..4] {
        let flaw = "the magic number is damaged as by a transfer in text mode";
        return Err(Kind::corrupt("header at 0", flaw));
    }
    let found = match start {
        b"" => "an empty file".into(),
        _ if start.starts_with(b"GGUF") => "a GGUF file".into(),
        _ => format!("it starts with {start:02x?}, not {MAGIC:02x?}"),
    };
    Err(Kind::Foreign { found })
}

/// Where sections of these kinds and lengths lie, one behind the other, each at the first aligned offset. The last
/// one's end is the file's length. Fails where a `u64` does not hold it.
pub(crate) fn lay_out(lens: &[(SectionKind, u64)]) -> Result<Vec<Extent>, Flaw> {
    let mut end = (HEADER_BYTES + ENTRY_BYTES * lens.len()) as u64;
    lens.iter()
        .map(|&(kind, len)| {
            let too_long = || format!("section {} of {len} bytes is too long", kind.name());
            let offset = end.checked_next_multiple_of(kind.alignment()).ok_or_else(too_long)?;
            end = offset.checked_add(len).ok_or_else(too_long)?;
            Ok(Extent { offset, len })
        })
        .collect()
}

/// Checks kinds and lengths: order, presence, caps.
pub(crate) fn check_lens(lens: &[(SectionKind, u64)]) -> Result<(), Flaw> {
    if let Some(pair) = lens.windows(2).find(|pair| pair[0].0 >= pair[1].0) {
        let [first, second] = [pair[0].0.name(), pair[1].0.name()];
        return Err(format!("section {second} stands behind section {first}"));
    }
    for kind in SectionKind::ALL {
        if kind.required() && !lens.iter().any(|&(other, _)| other == kind) {
            return Err(format!("section {} is missing", kind.name()));
        }
    }
    let mut small_bytes = 0;
    for &(kind, len) in lens {
        let max = max_section_bytes(kind);
        if len == 0 || len > max {
            return Err(format!("section {} has {len} bytes, 1 to {max} may be", kind.name()));
        }
        if kind == SectionKind::Data {
            if !len.is_multiple_of(DATA_ALIGNMENT) {
                return Err(format!("section data has {len} bytes, no multiple of 4096"));
            }
        } else {
            small_bytes += len;
        }
    }
    if small_bytes > MAX_SMALL_BYTES {
        return Err(format!(
            "sections but data have {small_bytes} bytes, at most {MAX_SMALL_BYTES} may be"
        ));
    }
    Ok(())
}

/// The section table's bytes.
pub(crate) fn table_to_bytes(sections: &[Section]) -> Vec<u8> {
    let mut bytes = vec![0; ENTRY_BYTES * sections.len()];
    for (entry, section) in bytes.chunks_exact_mut(ENTRY_BYTES).zip(sections) {
        put(entry, entry::KIND, &(section.kind as u32).to_le_bytes());
        put(entry, entry::OFFSET, &section.extent.offset.to_le_bytes());
        put(entry, entry::LEN, &section.extent.len.to_le_bytes());
        put(entry, entry::CHECKSUM, &section.checksum.to_le_bytes());
    }
    bytes
}

/// Reads the section table, and checks everything about it: checksum, kinds, caps, positions.
pub(crate) fn parse_table(header: Header, bytes: &[u8]) -> Result<Vec<Section>, Kind> {
    let corrupt = |flaw: Flaw| Kind::corrupt("section table", flaw);
    if checksum::of(bytes) != header.table_checksum {
        return Err(corrupt("its checksum does not match".into()));
    }
    let mut sections = Vec::with_capacity(MAX_SECTIONS as usize);
    for (index, entry) in bytes.chunks_exact(ENTRY_BYTES).enumerate() {
        let code = u32_at(entry, entry::KIND);
        let kind = SectionKind::from_code(code).ok_or_else(|| Kind::Unsupported {
            at: format!("section table, entry {index}"),
            found: format!("section of unknown kind {code}"),
        })?;
        if kind.since() > header.version {
            let (name, version) = (kind.name(), header.version);
            return Err(corrupt(format!("section {name} in a bundle of version {version}")));
        }
        if u32_at(entry, entry::UNUSED) != 0 {
            return Err(corrupt(format!("unused bytes of entry {index} are not zero")));
        }
        let extent =
            Extent { offset: u64_at(entry, entry::OFFSET), len: u64_at(entry, entry::LEN) };
        sections.push(Section { kind, extent, checksum: u64_at(entry, entry::CHECKSUM) });
    }
    let lens: Vec<_> = sections.iter().map(|s| (s.kind, s.extent.len)).collect();
    check_lens(&lens).map_err(corrupt)?;
    let wanted = lay_out(&lens).map_err(corrupt)?;
    for (section, wanted) in sections.iter().zip(&wanted) {
        if section.extent.offset != wanted.offset {
            return Err(corrupt(format!("{section} should be at {}", wanted.offset)));
        }
    }
    let end = wanted.last().map_or(0, |last| last.end());
    if end != header.total_len {
        return Err(corrupt(format!(
            "the last section ends at {end}, the file at {}",
            header.total_len
        )));
    }
    Ok(sections)
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*bytes[at..].first_chunk().expect("the field lies within the record"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("the field lies within the record"))
}
