//! Small files beside bundles: what was measured or made once and is kept.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

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
            let mut out = BufWriter::new(file);
            write(&mut out)?;
            out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
        })
        .and_then(|()| fs::rename(&temporary, path));
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
        let names = fs::read_dir(path.parent().unwrap()).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["known.json", "taken"]);
    }
}
