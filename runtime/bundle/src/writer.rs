//! [`BundleWriter`]: writes a bundle front to back, a block at a time.
//!
//! Bytes go to `<name>.<pid>.tmp` beside the final name. Only [`BundleWriter::finish`] gives them that name, after
//! they were synced and opened with the reader's checks; whatever happens before leaves the final name as it was. The
//! temporary file is removed when a writer is dropped. Same parts and same blocks give the same bytes.
//!
//! Memory: the small sections, 8 bytes a block, and one block.

use crate::blocks::{Block, Weight};
use crate::checksum;
use crate::codec::{self, Coded};
use crate::error::{BundleError, Flaw, Kind};
use crate::extent::Extent;
use crate::files::{self, File};
use crate::header::{self, Header, Section, SectionKind};
use crate::identity::Identity;
use crate::model::{ModelConfig, Vectors, WeightMap};
use crate::placement::Placement;
use crate::plan;
use crate::reader::Bundle;
use crate::tables::{Settings, TableMap};
use crate::validate::{self, WeightsEnd};
use crate::vocabulary::Vocabulary;
use std::fs::TryLockError;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Everything in a bundle but the bytes of its big weights.
#[derive(Clone, Debug)]
pub struct BundleParts {
    /// Where it comes from.
    pub identity: Identity,
    /// The model's shape and arithmetic.
    pub model: ModelConfig,
    /// Where the weights lie, from [`plan_weights`](crate::plan_weights): offsets count from the start of Data.
    pub weights: WeightMap,
    /// The small vectors.
    pub vectors: Vectors,
    /// The canonical tokenizer.json.
    pub tokenizer: String,
    /// The bytes of each token.
    pub vocabulary: Vocabulary,
    /// The chat template, if there is one.
    pub chat_template: Option<String>,
    /// The order of the neurons, if it is not the source model's.
    pub placement: Option<Placement>,
    /// What was learned, from [`TableMap::behind`]: written after the weights.
    pub tables: Option<TableMap>,
    /// How the bundle asks to be run.
    pub settings: Option<Settings>,
}

/// A bundle being written.
#[derive(Debug)]
pub struct BundleWriter {
    temporary: Temporary,
    final_path: PathBuf,
    /// Where sections lie; checksums are filled in at the end.
    sections: Vec<Section>,
    /// Bytes of the sections before BlockChecksums.
    small: Vec<Vec<u8>>,
    weights: WeightMap,
    /// The oldest version of the format that knows all of the parts.
    version: u32,
    /// All weights in the order of the file, and the next tile or block: index of its weight, its index there.
    order: Vec<Weight>,
    next: (usize, u32),
    checksums: Vec<u64>,
    padded: Vec<u8>,
}

const BUFFER_BYTES: usize = 1 << 20;

impl BundleWriter {
    /// Checks the parts, decides where everything goes, and opens the temporary file.
    ///
    /// # Errors
    /// The parts are not those of a valid bundle, another writer is at the same file, or I/O.
    pub fn create(final_path: &Path, parts: BundleParts) -> Result<BundleWriter, BundleError> {
        Self::start(final_path, parts).map_err(|kind| kind.of(final_path))
    }

    fn start(final_path: &Path, parts: BundleParts) -> Result<BundleWriter, Kind> {
        let LaidOut { weights, tables, small, sections, blocks } = lay_out(parts)?;
        let mut temporary = Temporary::create(final_path)?;
        let data = sections.last().expect("data is always there").extent;
        let of_sections = sections.iter().map(|section| section.kind.since());
        let version = of_sections.chain(tables.tables.iter().map(|table| table.kind.since())).max();
        temporary
            .file
            .seek(SeekFrom::Start(data.offset))
            .map_err(|error| Kind::io("write", error))?;
        Ok(BundleWriter {
            temporary,
            final_path: final_path.to_path_buf(),
            sections,
            small,
            order: weights.weights().chain(tables.weights()).collect(),
            weights,
            version: version.expect("there are sections"),
            next: (0, 0),
            checksums: Vec::with_capacity(blocks as usize),
            padded: Vec::new(),
        })
    }

    /// The file that is being written, under the name that it has until it is complete.
    #[must_use]
    pub fn temporary_path(&self) -> &Path {
        &self.temporary.path
    }

    /// Where the weights will lie in the file.
    #[must_use]
    pub fn weights(&self) -> &WeightMap {
        &self.weights
    }

    /// The tile or block whose turn it is; none when all are written.
    #[must_use]
    pub fn next_block(&self) -> Option<Block> {
        self.order.get(self.next.0).map(|weight| weight.block(self.next.1))
    }

    /// Writes the next tile or block: exactly its `weight_bytes`; zeros are added.
    ///
    /// # Errors
    /// The length is not the wanted one, all blocks are written already, or I/O.
    pub fn write_block(&mut self, bytes: &[u8]) -> Result<(), BundleError> {
        self.append(bytes).map_err(|kind| kind.of(&self.final_path))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), Kind> {
        let block = self
            .next_block()
            .ok_or_else(|| Kind::invalid("data", "a block more than the weights have"))?;
        if bytes.len() as u64 != block.weight_bytes {
            let flaw = format!("{} bytes, {} are wanted", bytes.len(), block.weight_bytes);
            return Err(Kind::invalid(block.name, flaw));
        }
        self.padded.clear();
        self.padded.extend_from_slice(bytes);
        self.padded.resize(block.extent.len as usize, 0);
        self.temporary
            .file
            .write_all(&self.padded)
            .map_err(|error| Kind::io(format!("write {}", block.name), error))?;
        self.checksums.push(checksum::of(&self.padded));
        self.next.1 += 1;
        if self.next.1 == self.order[self.next.0].place.blocks() {
            self.next = (self.next.0 + 1, 0);
        }
        Ok(())
    }

    /// Writes what stands before Data, syncs, opens the result with the reader's checks, and gives it its name.
    ///
    /// # Errors
    /// Blocks are missing, or I/O. The final name is as it was before, unless the very last step, syncing the folder,
    /// failed: then the whole bundle is there, but might not survive a loss of power.
    pub fn finish(mut self) -> Result<(), BundleError> {
        self.complete().map_err(|kind| kind.of(&self.final_path))?;
        Bundle::open(&self.temporary.path)?;
        self.temporary.rename(&self.final_path).map_err(|kind| kind.of(&self.final_path))
    }

    fn complete(&mut self) -> Result<(), Kind> {
        if let Some(block) = self.next_block() {
            return Err(Kind::invalid(block.name, "it was not written"));
        }
        self.small.push(codec::encode_checksums(&self.checksums));
        for (section, bytes) in self.sections.iter_mut().zip(&self.small) {
            assert_eq!(section.extent.len, bytes.len() as u64, "room was made for {section}");
            section.checksum = checksum::of(bytes);
        }
        let [.., checksums, data] = &mut self.sections[..] else {
            unreachable!("block checksums and data are always there")
        };
        data.checksum = checksums.checksum;
        let total_len = data.extent.end();
        let table = header::table_to_bytes(&self.sections);
        let header = Header {
            version: self.version,
            sections: self.sections.len() as u32,
            total_len,
            table_checksum: checksum::of(&table),
        };

        let write = |error| Kind::io("write", error);
        self.temporary.file.flush().map_err(write)?;
        let file = self.temporary.file.get_ref();
        // Longer than what was written by the zeros at the end.
        file.set_len(total_len).map_err(write)?;
        file.write_all_at(&header.to_bytes(), 0).map_err(write)?;
        file.write_all_at(&table, header::HEADER_BYTES as u64).map_err(write)?;
        for (section, bytes) in self.sections.iter().zip(&self.small) {
            file.write_all_at(bytes, section.extent.offset).map_err(write)?;
        }
        file.sync_all().map_err(|error| Kind::io("sync", error))
    }
}

/// Parts that were checked and laid out.
struct LaidOut {
    /// Where they will lie in the file.
    weights: WeightMap,
    tables: TableMap,
    /// Bytes of the sections before BlockChecksums.
    small: Vec<Vec<u8>>,
    /// Without checksums.
    sections: Vec<Section>,
    blocks: u32,
}

fn lay_out(parts: BundleParts) -> Result<LaidOut, Kind> {
    let blocks = check(&parts)?;
    let mut small = vec![
        (SectionKind::Identity, parts.identity.encode()),
        (SectionKind::Model, parts.model.encode()),
        (SectionKind::Weights, parts.weights.encode()),
        (SectionKind::Vectors, codec::encode_vectors(&parts.vectors)),
        (SectionKind::Tokenizer, parts.tokenizer.into_bytes()),
        (SectionKind::Vocabulary, parts.vocabulary.bytes().to_vec()),
    ];
    if let Some(text) = parts.chat_template {
        small.push((SectionKind::ChatTemplate, text.into_bytes()));
    }
    if let Some(placement) = &parts.placement {
        small.push((SectionKind::Placement, codec::encode_placement(placement)));
    }
    if let Some(tables) = &parts.tables {
        small.push((SectionKind::Tables, tables.encode()));
    }
    if let Some(settings) = &parts.settings {
        small.push((SectionKind::Settings, settings.encode()));
    }
    let mut lens: Vec<_> = small.iter().map(|(kind, bytes)| (*kind, bytes.len() as u64)).collect();
    lens.push((SectionKind::BlockChecksums, 8 * u64::from(blocks.blocks)));
    lens.push((SectionKind::Data, blocks.offset.next_multiple_of(header::DATA_ALIGNMENT)));
    let invalid = |flaw: Flaw| Kind::invalid("sections", flaw);
    header::check_lens(&lens).map_err(invalid)?;
    let extents = header::lay_out(&lens).map_err(invalid)?;

    let (mut weights, mut tables) = (parts.weights, parts.tables);
    let data: Extent = *extents.last().expect("data was pushed above");
    plan::move_by(&mut weights, tables.as_mut(), data.offset);
    let tables = tables.unwrap_or_default();
    for (kind, bytes) in &mut small {
        // Integers are coded at full width, so sections keep their lengths.
        match kind {
            SectionKind::Weights => *bytes = weights.encode(),
            SectionKind::Tables => *bytes = tables.encode(),
            _ => {}
        }
    }
    let sections = lens.iter().zip(extents);
    let sections = sections.map(|(&(kind, _), extent)| Section { kind, extent, checksum: 0 });
    let small = small.into_iter().map(|(_, bytes)| bytes).collect();
    let sections = sections.collect();
    Ok(LaidOut { weights, tables, small, sections, blocks: blocks.blocks })
}

/// What the reader will check, before a byte is written.
fn check(parts: &BundleParts) -> Result<WeightsEnd, Kind> {
    let invalid = |at: &'static str| move |flaw: Flaw| Kind::invalid(at, flaw);
    let model = &parts.model;
    validate::check_identity(&parts.identity).map_err(invalid("identity"))?;
    validate::check_model(model).map_err(invalid("model"))?;
    validate::check_vectors(&parts.vectors, model).map_err(invalid("vectors"))?;
    validate::check_text(&parts.tokenizer).map_err(invalid("tokenizer"))?;
    validate::check_vocabulary(&parts.vocabulary, model).map_err(invalid("vocabulary"))?;
    if let Some(text) = &parts.chat_template {
        validate::check_text(text).map_err(invalid("chat template"))?;
    }
    if let Some(placement) = &parts.placement {
        validate::check_placement(placement, model).map_err(invalid("placement"))?;
    }
    if let Some(settings) = &parts.settings {
        validate::check_settings(settings).map_err(invalid("settings"))?;
    }
    let end = validate::check_weights(&parts.weights, model, 0).map_err(invalid("weights"))?;
    match &parts.tables {
        Some(tables) => validate::check_tables(tables, model, end).map_err(invalid("tables")),
        None => Ok(end),
    }
}

/// The file under its temporary name; removed when dropped before it was renamed.
#[derive(Debug)]
struct Temporary {
    path: PathBuf,
    file: BufWriter<File>,
    renamed: bool,
}

impl Temporary {
    fn create(final_path: &Path) -> Result<Temporary, Kind> {
        let no_name = || Kind::invalid("path", "it does not end in a file name");
        let mut name = final_path.file_name().ok_or_else(no_name)?.to_os_string();
        name.push(format!(".{}.tmp", std::process::id()));
        let path = final_path.with_file_name(name);
        let create = |error| Kind::io(format!("create {}", path.display()), error);
        // A process that was killed may have left a file of this name, for process ids come again. The lock tells it
        // from a file that is being written; where a file system has no locks, the name alone has to do.
        let file = File::create(&path).map_err(create)?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(create(io::Error::new(io::ErrorKind::ResourceBusy, "it is being written")));
        }
        let file = BufWriter::with_capacity(BUFFER_BYTES, file);
        let temporary = Temporary { path, file, renamed: false };
        temporary.file.get_ref().set_len(0).map_err(|error| Kind::io("write", error))?;
        Ok(temporary)
    }

    fn rename(mut self, final_path: &Path) -> Result<(), Kind> {
        files::rename(&self.path, final_path).map_err(|error| Kind::io("rename", error))?;
        self.renamed = true;
        let folder = match final_path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let sync = File::open(folder).and_then(|folder| folder.sync_all());
        sync.map_err(|error| Kind::io("sync the folder", error))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            // Nothing can be done about a failure here, and the name says that the file is no bundle.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
