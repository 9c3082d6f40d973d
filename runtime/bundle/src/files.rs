//! Files: [`File`], by which all that is prepared is read and written, and small files that are replaced at once.
//!
//! In debug builds a test can make any operation of a program fail, as a disk would (`LS_FAULTS`, see [`mod@faults`]).

#[cfg(debug_assertions)]
pub mod faults;

#[cfg(debug_assertions)]
use faults::Operation;
use std::fs::{self, Metadata, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// An open file.
#[derive(Debug)]
pub struct File(fs::File);

impl File {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// If the system refuses, as all operations do.
    pub fn open(path: &Path) -> io::Result<File> {
        File::open_with(OpenOptions::new().read(true), path)
    }

    /// Opens a file for reading and writing, or makes it; never through a link that somebody has put there.
    pub fn create(path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        match File::open_with(options.clone().create_new(true), path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made,
        }
        if path.symlink_metadata()?.is_symlink() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it is a symbolic link"));
        }
        File::open_with(&options, path)
    }

    /// Opens a file as `options` say.
    pub fn open_with(options: &OpenOptions, path: &Path) -> io::Result<File> {
        options.open(path).map(File)
    }

    /// Length and kind.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.0.metadata()
    }

    /// Cuts it off, or fills it up with zeros.
    pub fn set_len(&self, len: u64) -> io::Result<()> {
        self.may_fail()?;
        self.0.set_len(len)
    }

    /// Returns when all is on the disk.
    pub fn sync_all(&self) -> io::Result<()> {
        self.may_fail()?;
        self.0.sync_all()
    }

    /// Takes the exclusive lock if nobody has it.
    pub fn try_lock(&self) -> Result<(), TryLockError> {
        self.0.try_lock()
    }

    /// Another handle of the same file, with the same position.
    pub fn try_clone(&self) -> io::Result<File> {
        self.0.try_clone().map(File)
    }

    #[cfg(debug_assertions)]
    fn may_fail(&self) -> io::Result<()> {
        faults::next(&self.0, Operation::Other).map(drop)
    }

    /// Only tests make it fail.
    #[cfg(not(debug_assertions))]
    fn may_fail(&self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(not(debug_assertions))]
impl FileExt for File {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(into, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.0.write_at(bytes, offset)
    }
}

#[cfg(debug_assertions)]
impl FileExt for File {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let fault = faults::next(&self.0, Operation::Read)?;
        let len = fault.map_or(into.len(), |fault| fault.part(into.len()));
        let count = self.0.read_at(&mut into[..len], offset)?;
        fault.inspect(|fault| fault.spoil(&mut into[..count]));
        Ok(count)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let fault = faults::next(&self.0, Operation::Write)?;
        let len = fault.map_or(bytes.len(), |fault| fault.part(bytes.len()));
        let count = self.0.write_at(&bytes[..len], offset)?;
        fault.inspect(faults::Fault::end_if_torn);
        Ok(count)
    }
}

impl Read for File {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let offset = self.0.stream_position()?;
        let count = self.read_at(into, offset)?;
        self.0.seek(SeekFrom::Start(offset + count as u64))?;
        Ok(count)
    }
}

impl Write for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let offset = self.0.stream_position()?;
        let count = self.write_at(bytes, offset)?;
        self.0.seek(SeekFrom::Start(offset + count as u64))?;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for File {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.0.seek(to)
    }
}

/// Gives a file another name, at once; the folder is synced by whoever needs it to outlive the power.
///
/// # Errors
/// If the system refuses.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    #[cfg(debug_assertions)]
    faults::next(&fs::File::open(from)?, Operation::Other)?;
    fs::rename(from, to)
}

/// A whole file of at most `most` bytes; `None` if it is longer.
///
/// # Errors
/// If the system refuses.
pub fn read(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= most).then_some(bytes))
}

/// Writes a file; one with its name is replaced when all is on the disk. After an error nothing half-written stays behind.
///
/// # Errors
/// If the system refuses.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_with(path, &mut |out| out.write_all(bytes))
}

/// The same with what `write` writes.
///
/// # Errors
/// If the system or `write` refuses.
pub fn replace_with(
    path: &Path,
    write: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    let written = File::create(&temporary)
        .and_then(|file| {
            file.set_len(0)?;
            let mut out = BufWriter::new(file);
            write(&mut out)?;
            out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
        })
        .and_then(|()| rename(&temporary, path));
    if written.is_err() {
        // Nothing can be done about a failure here.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// The same for what is only kept to save time, with the folders that it lies in: where it cannot be written it is made
/// anew next time.
pub fn cache(path: &Path, bytes: &[u8]) {
    let _ = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| replace(path, bytes));
}

/// Where this user's programs keep what they can make again: `$XDG_CACHE_HOME`, or `.cache` in the home.
#[must_use]
pub fn cache_folder() -> Option<PathBuf> {
    let folder = match std::env::var_os("XDG_CACHE_HOME") {
        Some(folder) if !folder.is_empty() => PathBuf::from(folder),
        _ => std::env::home_dir()?.join(".cache"),
    };
    Some(folder.join("leanstream"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deeper/known.json");
        replace(&path, b"there is no such folder").unwrap_err();
        cache(&path, b"first");
        replace(&path, b"second").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        // A folder of that name cannot be replaced by a file.
        fs::create_dir(folder.path().join("deeper/taken")).unwrap();
        replace(&folder.path().join("deeper/taken"), b"third").unwrap_err();
        // A link in the temporary file's place leads nowhere.
        let link = folder.path().join(format!("deeper/known.json.{}.tmp", std::process::id()));
        std::os::unix::fs::symlink(folder.path().join("victim"), &link).unwrap();
        replace(&path, b"fourth").unwrap_err();
        assert!(!folder.path().join("victim").exists());
        let names = fs::read_dir(path.parent().unwrap()).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["known.json", "taken"]);
    }
}
