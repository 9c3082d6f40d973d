//! [`Bundle`]: a bundle opened for reading.
//!
//! Opening reads header, section table and small sections with positioned reads, and checks everything but the bytes
//! of the blocks; see FORMAT.md for the list. Afterwards no accessor can fail, and none allocates. Nothing of Data is
//! read: weights are fetched by their extents by whoever uses them, and checked with [`Bundle::verify_block`].

use crate::blocks::Block;
use crate::checksum;
use crate::codec::{self, Coded};
use crate::error::{BundleError, Flaw, Kind};
use crate::extent::Extent;
use crate::files::File;
use crate::header::{self, ENTRY_BYTES, HEADER_BYTES, Header, Section, SectionKind};
use crate::identity::Identity;
use crate::ids::{BlockId, LayerId};
use crate::model::{LayerVectors, ModelConfig, Vectors, WeightMap};
use crate::placement::Placement;
use crate::tables::{Settings, TableKind, TableMap};
use crate::validate::{self, WeightsEnd, vector_lens, vectors_bytes};
use crate::vocabulary::Vocabulary;
use std::fmt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Whether an open bundle holds the blocks' checksums in memory, 8 bytes each. They are checked either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockChecksums {
    /// For those who check what they read.
    Keep,
    /// For devices where those bytes matter more.
    Drop,
}

/// A bundle, checked: after opening no accessor can fail, and none allocates.
pub struct Bundle {
    pub(crate) source: Source,
    sections: Vec<Section>,
    identity: Identity,
    model: ModelConfig,
    weights: WeightMap,
    vectors: Vectors,
    tokenizer: String,
    vocabulary: Vocabulary,
    chat_template: Option<String>,
    placement: Option<Placement>,
    tables: TableMap,
    settings: Option<Settings>,
    checksums: Option<Vec<u64>>,
    block_count: u32,
    weights_end: u64,
    padding_bytes: u64,
}

impl Bundle {
    /// Opens and checks the bundle at `path`, and keeps its block checksums.
    ///
    /// # Errors
    /// See [`ErrorClass`](crate::ErrorClass): not a bundle, incomplete, corrupt, unsupported, or I/O.
    pub fn open(path: &Path) -> Result<Bundle, BundleError> {
        Bundle::open_with(path, BlockChecksums::Keep)
    }

    /// As [`Bundle::open`], with a say about the block checksums.
    pub fn open_with(path: &Path, checksums: BlockChecksums) -> Result<Bundle, BundleError> {
        Source::open(path).and_then(|source| load(source, checksums)).map_err(|kind| kind.of(path))
    }

    /// Where the bundle comes from.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The model's shape and arithmetic.
    #[must_use]
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// Where the big weights lie in the file.
    #[must_use]
    pub fn weights(&self) -> &WeightMap {
        &self.weights
    }

    /// The small vectors.
    #[must_use]
    pub fn vectors(&self) -> &Vectors {
        &self.vectors
    }

    /// The canonical tokenizer.json; empty once taken.
    #[must_use]
    pub fn tokenizer(&self) -> &str {
        &self.tokenizer
    }

    /// Takes the tokenizer's text out: whoever has built a tokenizer from it need not keep its megabytes.
    #[must_use]
    pub fn take_tokenizer(&mut self) -> String {
        std::mem::take(&mut self.tokenizer)
    }

    /// The bytes of each token.
    #[must_use]
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// The chat template, if the model has one.
    #[must_use]
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// The order of the neurons, if it is not the source model's.
    #[must_use]
    pub fn placement(&self) -> Option<&Placement> {
        self.placement.as_ref()
    }

    /// What was learned about the model; empty if nothing was.
    #[must_use]
    pub fn tables(&self) -> &TableMap {
        &self.tables
    }

    /// How it asks to be run, if it was measured.
    #[must_use]
    pub fn settings(&self) -> Option<Settings> {
        self.settings
    }

    /// Reads a table, all its blocks checked; None if the bundle has none of that kind for the layer.
    ///
    /// # Errors
    /// Names the first bad block, or says what the operating system said.
    pub fn read_table(
        &self,
        layer: LayerId,
        kind: TableKind,
    ) -> Result<Option<Vec<u8>>, BundleError> {
        let Some(table) = self.tables.find(layer, kind) else { return Ok(None) };
        let mut bytes = vec![0; table.extent().len as usize];
        for index in 0..table.blocks() {
            let (id, extent) = table.block(index);
            let start = (extent.offset - table.offset) as usize;
            let block = self.block(id).expect("a table's block is one of the bundle");
            let read = self.read_block(&block, &mut bytes[start..start + extent.len as usize]);
            read.map_err(|kind| kind.of(self.path()))?;
        }
        bytes.truncate(table.len as usize);
        Ok(Some(bytes))
    }

    /// Number of tiles and blocks; their ids are 0 up to it.
    #[must_use]
    pub fn block_count(&self) -> u32 {
        self.block_count
    }

    /// A block's checksum, over its extent with padding. None when opened with [`BlockChecksums::Drop`]. Panics if
    /// there is no such block.
    #[must_use]
    pub fn block_checksum(&self, id: BlockId) -> Option<u64> {
        self.checksums.as_ref().map(|checksums| checksums[id.index()])
    }

    pub(crate) fn checksums(&self) -> Option<&[u64]> {
        self.checksums.as_deref()
    }

    /// Every tile and block in the order of the file, with extents and names.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        self.weights.blocks().chain(self.tables.blocks())
    }

    /// The tile or block with this id. Walks weights and tables: for messages, not for the decode loop.
    #[must_use]
    pub fn block(&self, id: BlockId) -> Option<Block> {
        self.weights.block(id).or_else(|| self.tables.block(id))
    }

    /// The file, as given to [`Bundle::open`].
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.source.path
    }

    /// The file's length in bytes; a multiple of 4096.
    #[must_use]
    pub fn total_len(&self) -> u64 {
        self.source.len
    }

    /// Where Data lies. It starts and ends at multiples of 4096.
    #[must_use]
    pub fn data_extent(&self) -> Extent {
        self.section(SectionKind::Data).extent
    }

    /// First byte behind the last weight; zeros follow up to the end of the file.
    pub(crate) fn weights_end(&self) -> u64 {
        self.weights_end
    }

    /// The section table.
    #[must_use]
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// Zeros in the file that only align something: between sections, in blocks, at the end.
    #[must_use]
    pub fn padding_bytes(&self) -> u64 {
        self.padding_bytes
    }

    /// Bytes on the heap that this bundle holds now, for budgets.
    #[must_use]
    pub fn heap_bytes(&self) -> u64 {
        let vectors: usize = self.vectors.layers.iter().map(size_of_val).sum::<usize>()
            + vectors_bytes(&self.model) as usize;
        let texts = self.tokenizer.capacity()
            + self.chat_template.as_ref().map_or(0, String::capacity)
            + self.identity.recipe.capacity();
        let tables = self.vocabulary.bytes().len()
            + self.placement.as_ref().map_or(0, |placement| size_of_val(placement.neurons()))
            + self.checksums().map_or(0, size_of_val)
            + size_of_val(&self.weights.layers[..])
            + size_of_val(&self.tables.tables[..]);
        (vectors + texts + tables) as u64
    }

    pub(crate) fn section(&self, kind: SectionKind) -> Section {
        find(&self.sections, kind).expect("checked to be there when opened")
    }
}

impl fmt::Debug for Bundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bundle({}, {})", self.path().display(), self.model.name)
    }
}

fn find(sections: &[Section], kind: SectionKind) -> Option<Section> {
    sections.iter().copied().find(|section| section.kind == kind)
}

/// Reads and checks everything but the blocks.
fn load(source: Source, keep: BlockChecksums) -> Result<Bundle, Kind> {
    let (version, sections) = twice(|| read_table(&source))?;
    let section = |kind| find(&sections, kind).expect("the table holds all required kinds");
    let optional = |kind| find(&sections, kind);
    let gap_bytes = twice(|| check_gaps(&source, &sections))?;

    let identity: Identity = decode(&source, section(SectionKind::Identity))?;
    checked(section(SectionKind::Identity), validate::check_identity(&identity))?;
    let model: ModelConfig = decode(&source, section(SectionKind::Model))?;
    checked(section(SectionKind::Model), validate::check_model(&model))?;
    let data = section(SectionKind::Data);
    let weights: WeightMap = decode(&source, section(SectionKind::Weights))?;
    let end = checked(
        section(SectionKind::Weights),
        validate::check_weights(&weights, &model, data.extent.offset),
    )?;
    let (tables, end) = match optional(SectionKind::Tables) {
        Some(section) => read_tables(&source, section, version, &model, end)?,
        None => (TableMap::default(), end),
    };
    if end.offset.checked_next_multiple_of(header::DATA_ALIGNMENT) != Some(data.extent.end()) {
        let flaw = format!("the last weight ends at {}, which does not fit {data}", end.offset);
        return Err(Kind::corrupt(section(SectionKind::Weights), flaw));
    }

    let vectors = twice(|| read_vectors(&source, section(SectionKind::Vectors), &model))?;
    let tokenizer = read_text(&source, section(SectionKind::Tokenizer))?;
    let vocabulary_section = section(SectionKind::Vocabulary);
    let vocabulary =
        checked(vocabulary_section, Vocabulary::from_bytes(source.bytes(vocabulary_section)?))?;
    checked(vocabulary_section, validate::check_vocabulary(&vocabulary, &model))?;
    let chat_template =
        optional(SectionKind::ChatTemplate).map(|s| read_text(&source, s)).transpose()?;
    let placement = optional(SectionKind::Placement)
        .map(|section| twice(|| read_placement(&source, section, &model)))
        .transpose()?;
    let settings =
        optional(SectionKind::Settings).map(|s| read_settings(&source, s)).transpose()?;
    let checksums_section = section(SectionKind::BlockChecksums);
    if data.checksum != checksums_section.checksum {
        return Err(Kind::corrupt(data, "its checksum is not that of the block checksums"));
    }
    let checksums = twice(|| read_checksums(&source, checksums_section, end.blocks, keep))?;
    let padding_bytes = gap_bytes + end.padding_bytes + (data.extent.end() - end.offset);
    source.check_len()?;

    Ok(Bundle {
        source,
        sections,
        identity,
        model,
        weights,
        vectors,
        tokenizer,
        vocabulary,
        chat_template,
        placement,
        tables,
        settings,
        checksums,
        block_count: end.blocks,
        weights_end: end.offset,
        padding_bytes,
    })
}

/// Reads what fails once more: a bit may be flipped on its way from the disk, and a disk may recover by itself.
pub(crate) fn twice<T>(mut read: impl FnMut() -> Result<T, Kind>) -> Result<T, Kind> {
    read().or_else(|_| read())
}

fn checked<T>(section: Section, result: Result<T, Flaw>) -> Result<T, Kind> {
    result.map_err(|flaw| Kind::corrupt(section, flaw))
}

/// The format's version and the section table.
fn read_table(source: &Source) -> Result<(u32, Vec<Section>), Kind> {
    let mut bytes = [0; HEADER_BYTES];
    let available = source.len.min(HEADER_BYTES as u64) as usize;
    source.read_at(0, &mut bytes[..available])?;
    header::check_magic(&bytes[..available.min(header::MAGIC.len())])?;
    let incomplete = |wanted_bytes| Kind::Incomplete { found_bytes: source.len, wanted_bytes };
    if available < HEADER_BYTES {
        return Err(incomplete(HEADER_BYTES as u64));
    }
    let header = Header::parse(&bytes)?;
    if source.len < header.total_len {
        return Err(incomplete(header.total_len));
    }
    if source.len > header.total_len {
        let extra = source.len - header.total_len;
        return Err(Kind::corrupt("file", format!("{extra} bytes behind the end of the bundle")));
    }
    let mut table = vec![0; ENTRY_BYTES * header.sections as usize];
    source.read_at(HEADER_BYTES as u64, &mut table)?;
    Ok((header.version, header::parse_table(header, &table)?))
}

/// Checks that the bytes between sections, fewer than 4096 each, are zero, and counts them.
fn check_gaps(source: &Source, sections: &[Section]) -> Result<u64, Kind> {
    let mut end = (HEADER_BYTES + ENTRY_BYTES * sections.len()) as u64;
    let mut gap_bytes = 0;
    for section in sections {
        let mut gap = [0; header::DATA_ALIGNMENT as usize];
        let len = section.extent.offset - end;
        let gap = &mut gap[..len as usize];
        source.read_at(end, gap)?;
        if let Some(index) = gap.iter().position(|&byte| byte != 0) {
            let at = end + index as u64;
            return Err(Kind::corrupt(format!("padding at {at}"), "it is not zero"));
        }
        gap_bytes += len;
        end = section.extent.end();
    }
    Ok(gap_bytes)
}

fn decode<T: Coded>(source: &Source, section: Section) -> Result<T, Kind> {
    checked(section, T::decode(&source.bytes(section)?))
}

fn read_tables(
    source: &Source,
    section: Section,
    version: u32,
    model: &ModelConfig,
    weights_end: WeightsEnd,
) -> Result<(TableMap, WeightsEnd), Kind> {
    let tables: TableMap = decode(source, section)?;
    if let Some(table) = tables.tables.iter().find(|table| table.kind.since() > version) {
        let flaw = format!("a table of kind {} in a bundle of version {version}", table.kind);
        return Err(Kind::corrupt(section, flaw));
    }
    let end = checked(section, validate::check_tables(&tables, model, weights_end))?;
    Ok((tables, end))
}

fn read_settings(source: &Source, section: Section) -> Result<Settings, Kind> {
    let settings: Settings = decode(source, section)?;
    checked(section, validate::check_settings(&settings))?;
    Ok(settings)
}

fn read_text(source: &Source, section: Section) -> Result<String, Kind> {
    let text = String::from_utf8(source.bytes(section)?)
        .map_err(|error| Kind::corrupt(section, format!("it is not text: {error}")))?;
    checked(section, validate::check_text(&text))?;
    Ok(text)
}

/// Fails unless the section has the length that other sections say.
fn check_len(section: Section, wanted: u64) -> Result<(), Kind> {
    let found = section.extent.len;
    let flaw = || Err(format!("{found} bytes, {wanted} are wanted"));
    checked(section, if found == wanted { Ok(()) } else { flaw() })
}

fn read_vectors(source: &Source, section: Section, model: &ModelConfig) -> Result<Vectors, Kind> {
    check_len(section, vectors_bytes(model))?;
    let mut bytes = Pieces::new(source, section);
    let mut next = |len: u32| bytes.next(4 * len as usize).map(codec::floats);
    let mut layers = Vec::with_capacity(usize::from(model.layers));
    for _ in model.layer_ids() {
        let [attn_norm, mlp_norm, q_bias, k_bias, v_bias, q_norm, k_norm] = vector_lens(model);
        layers.push(LayerVectors {
            attn_norm: next(attn_norm)?,
            mlp_norm: next(mlp_norm)?,
            q_bias: next(q_bias)?,
            k_bias: next(k_bias)?,
            v_bias: next(v_bias)?,
            q_norm: next(q_norm)?,
            k_norm: next(k_norm)?,
        });
    }
    let vectors = Vectors { layers, final_norm: next(model.hidden)? };
    bytes.finish()?;
    checked(section, validate::check_vectors(&vectors, model))?;
    Ok(vectors)
}

fn read_placement(
    source: &Source,
    section: Section,
    model: &ModelConfig,
) -> Result<Placement, Kind> {
    let entries = u64::from(model.layers) * u64::from(model.ffn_hidden);
    check_len(section, 4 * entries)?;
    let mut neurons = Vec::with_capacity(entries as usize);
    let mut bytes = Pieces::new(source, section);
    while let Some(piece) = bytes.next_piece()? {
        neurons.extend(codec::neurons(piece));
    }
    bytes.finish()?;
    let placement = Placement::new(model.ffn_hidden, neurons);
    checked(section, validate::check_placement(&placement, model))?;
    Ok(placement)
}

fn read_checksums(
    source: &Source,
    section: Section,
    blocks: u32,
    keep: BlockChecksums,
) -> Result<Option<Vec<u64>>, Kind> {
    check_len(section, 8 * u64::from(blocks))?;
    let mut checksums = (keep == BlockChecksums::Keep).then(|| Vec::with_capacity(blocks as usize));
    let mut bytes = Pieces::new(source, section);
    while let Some(piece) = bytes.next_piece()? {
        if let Some(checksums) = &mut checksums {
            checksums.extend(codec::checksums(piece));
        }
    }
    bytes.finish()?;
    Ok(checksums)
}

/// The file.
pub(crate) struct Source {
    file: File,
    path: PathBuf,
    len: u64,
}

impl Source {
    fn open(path: &Path) -> Result<Source, Kind> {
        // Asked before opening: to open a pipe would wait for its writer.
        let metadata = path.metadata().map_err(|error| Kind::io("open", error))?;
        if !metadata.is_file() {
            return Err(Kind::Foreign { found: "it is no regular file".into() });
        }
        let file = File::open(path).map_err(|error| Kind::io("open", error))?;
        let len = file.metadata().map_err(|error| Kind::io("read the length", error))?.len();
        Ok(Source { file, path: path.to_path_buf(), len })
    }

    /// Fills `bytes` from `offset` on.
    pub(crate) fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Kind> {
        let len = bytes.len();
        self.file
            .read_exact_at(bytes, offset)
            .map_err(|error| Kind::io(format!("read {len} bytes at {offset}"), error))
    }

    /// Fails if the file has become shorter since it was opened.
    fn check_len(&self) -> Result<(), Kind> {
        let found_bytes = self.file.metadata().map_err(|e| Kind::io("read the length", e))?.len();
        if found_bytes < self.len {
            return Err(Kind::Incomplete { found_bytes, wanted_bytes: self.len });
        }
        Ok(())
    }

    /// A section's bytes, checked. The table's caps bound what this allocates.
    fn bytes(&self, section: Section) -> Result<Vec<u8>, Kind> {
        let mut bytes = vec![0; section.extent.len as usize];
        twice(|| {
            self.read_at(section.extent.offset, &mut bytes)?;
            check_sum(section, checksum::of(&bytes))
        })?;
        Ok(bytes)
    }
}

fn check_sum(section: Section, found: u64) -> Result<(), Kind> {
    checked(
        section,
        if found == section.checksum { Ok(()) } else { Err("its checksum does not match".into()) },
    )
}

/// A section's bytes piece by piece, checked at the end, so that a long array is held once only.
pub(crate) struct Pieces<'a> {
    source: &'a Source,
    section: Section,
    offset: u64,
    piece: Vec<u8>,
    checksum: checksum::Running,
}

/// Bytes of a piece; items never straddle two.
const PIECE_BYTES: u64 = 64 << 10;

impl<'a> Pieces<'a> {
    pub(crate) fn new(source: &'a Source, section: Section) -> Pieces<'a> {
        let checksum = checksum::Running::new();
        Pieces { source, section, offset: section.extent.offset, piece: Vec::new(), checksum }
    }

    /// The next `len` bytes, which must be left.
    fn next(&mut self, len: usize) -> Result<&[u8], Kind> {
        self.piece.resize(len, 0);
        self.source.read_at(self.offset, &mut self.piece)?;
        self.checksum.add(&self.piece);
        self.offset += len as u64;
        Ok(&self.piece)
    }

    /// The next bytes, as many as a piece may have; none at the end.
    pub(crate) fn next_piece(&mut self) -> Result<Option<&[u8]>, Kind> {
        match (self.section.extent.end() - self.offset).min(PIECE_BYTES) {
            0 => Ok(None),
            len => self.next(len as usize).map(Some),
        }
    }

    /// Checks the checksum of what was read, which must be all.
    pub(crate) fn finish(self) -> Result<(), Kind> {
        assert_eq!(self.offset, self.section.extent.end(), "all of the section was read");
        check_sum(self.section, self.checksum.finish())
    }
}
