//! [`Journal`]: writes an artifact record by record, so that work ended at any point goes on after the last whole one.
//!
//! The file `<key>.part` has the final file's layout from its first byte. [`Journal::finish`] fills in the header,
//! syncs and renames: there is never a second copy, and an artifact has its name only when it is complete. A record
//! torn by the end of a process or of the power is found by its checksum and written again. An exclusive lock on the
//! file keeps two processes from writing it at once.

use crate::artifact::{
    Artifact, Description, HEAD_BYTES, Head, Header, RecordId, hash_heads, read_content,
};
use crate::error::{PrepError, Result};
use crate::model::weights::SourceFile;
use ls_bundle::files::{self, File};
use std::fs::TryLockError;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// An artifact in the making.
#[derive(Debug)]
pub struct Journal {
    file: File,
    part: PathBuf,
    target: PathBuf,
    header: Header,
    heads: Vec<Head>,
    /// Where the next record goes.
    end: u64,
}

impl Journal {
    /// Opens the journal of the artifact `target`: goes on with `<target without .bin>.part` if that belongs to
    /// `description`, otherwise starts it. Reads what is there once, to check it.
    pub fn open(target: &Path, description: Description) -> Result<Journal> {
        let part = target.with_extension("part");
        let io = |source| PrepError::io(&part, source);
        if let Some(folder) = part.parent() {
            std::fs::create_dir_all(folder).map_err(|source| PrepError::io(folder, source))?;
        }
        let file = File::create(&part).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let problem = format!("{} is being written by another process", part.display());
                return Err(PrepError::usage(problem));
            }
            // Some shared file systems have no locks; there, two writers are the user's to avoid.
            Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(error)) => return Err(io(error)),
        }
        let header = Header {
            start: 0,
            description,
            complete: false,
            payload_bytes: 0,
            records: 0,
            heads_hash: [0; 32],
        };
        let mut journal =
            Journal { file, part, target: target.to_owned(), header, heads: Vec::new(), end: 0 };
        journal.resume()?;
        Ok(journal)
    }

    /// Keeps the whole records of a file that belongs here; cuts off what follows them.
    fn resume(&mut self) -> Result<()> {
        let io = |source| PrepError::io(&self.part, source);
        let source = SourceFile::open(&self.part)?;
        let found = Header::read(&source).ok();
        let blank = self.header.to_bytes();
        self.header.start = blank.len() as u64;
        self.end = self.header.start;
        if found.is_none_or(|found| found.description != self.header.description) {
            self.file.set_len(0).map_err(io)?;
            return self.file.write_all_at(&blank, 0).map_err(io);
        }
        while self.end < source.len {
            let last = self.heads.last().map(|head| head.id);
            let Ok(head) = Head::read(&source, self.end, source.len, last)? else { break };
            if read_content(&source, &head).is_err() {
                break;
            }
            self.end = head.offset + head.len;
            self.heads.push(head);
        }
        self.file.set_len(self.end).map_err(io)
    }

    /// What is being made.
    #[must_use]
    pub fn description(&self) -> &Description {
        &self.header.description
    }

    /// The record written last, by this process or one before it.
    #[must_use]
    pub fn last(&self) -> Option<RecordId> {
        self.heads.last().map(|head| head.id)
    }

    /// Number of records that are there.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.heads.len() as u64
    }

    /// Whether nothing is there yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }

    /// Whether a record is there.
    #[must_use]
    pub fn contains(&self, id: RecordId) -> bool {
        self.heads.binary_search_by_key(&id, |head| head.id).is_ok()
    }

    /// The content of a record that is there.
    pub fn read(&self, id: RecordId) -> Result<Vec<u8>> {
        let index = self.heads.binary_search_by_key(&id, |head| head.id);
        let index = index.expect("only records that are there are read");
        read_content(&SourceFile::open(&self.part)?, &self.heads[index])
    }

    /// A path beside the journal for what a stage keeps between records, cleared away when the artifact is complete.
    #[must_use]
    pub fn scratch(&self, name: &str) -> PathBuf {
        self.part.with_extension(format!("scratch-{name}"))
    }

    /// Adds a record, which follows the last one. It outlives this process, and the power once the system has written
    /// it; what must not be older than the record is to be synced before.
    pub fn append(&mut self, id: RecordId, content: &[u8]) -> Result<()> {
        assert!(self.last().is_none_or(|last| last < id), "records are written in order");
        let offset = self.end + HEAD_BYTES;
        let head = Head::new(id, offset, content);
        let io = |source| PrepError::io(&self.part, source);
        self.file.write_all_at(&head.to_bytes(), self.end).map_err(io)?;
        self.file.write_all_at(content, offset).map_err(io)?;
        self.end = offset + head.len;
        self.heads.push(head);
        Ok(())
    }

    /// Gives the complete artifact its name.
    pub fn finish(mut self) -> Result<Artifact> {
        let records = self.heads.len() as u64;
        let wanted = self.header.description.records;
        assert_eq!(records, wanted, "{}: records of a complete artifact", self.part.display());
        self.header.complete = true;
        self.header.payload_bytes = self.end - self.header.start;
        self.header.records = records;
        self.header.heads_hash = hash_heads(&self.heads);
        let io = |source| PrepError::io(&self.part, source);
        self.file.write_all_at(&self.header.to_bytes(), 0).map_err(io)?;
        self.file.sync_all().map_err(io)?;
        files::rename(&self.part, &self.target).map_err(io)?;
        if let Some(folder) = self.target.parent() {
            let synced = File::open(folder).and_then(|folder| folder.sync_all());
            synced.map_err(|source| PrepError::io(folder, source))?;
        }
        clear_scratch(&self.target)?;
        Artifact::open(&self.target)
    }
}

/// Removes what stages have left beside `target` between records.
pub(crate) fn clear_scratch(target: &Path) -> Result<()> {
    let Some(folder) = target.parent() else { return Ok(()) };
    let Some(stem) = target.file_stem().map(|stem| stem.to_string_lossy().into_owned()) else {
        return Ok(());
    };
    let entries = std::fs::read_dir(folder).map_err(|source| PrepError::io(folder, source))?;
    for entry in entries {
        let path = entry.map_err(|source| PrepError::io(folder, source))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.strip_prefix(&stem).is_some_and(|rest| rest.starts_with(".scratch-")) {
            std::fs::remove_file(&path).map_err(|source| PrepError::io(&path, source))?;
        }
    }
    Ok(())
}
