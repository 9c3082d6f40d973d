//! `10-import`: the model on disk as the first link of every chain. Its key is the hash of its files.
//!
//! Hashing reads every byte, so the hash is remembered beside the artifacts with the lengths and times of the files;
//! it is made anew when any of them differs.

use crate::artifact::Input;
use crate::error::{PrepError, Result};
use crate::import::hash;
use crate::key::Key;
use crate::model::Model;
use crate::progress::Progress;
use crate::stage::Store;
use ls_bundle::files;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Number and name of the stage.
pub const NAME: &str = "10-import";
const SCHEMA: u32 = 1;
/// Bytes of what is remembered, at most: two hashes.
const MAX_MEMORY_BYTES: u64 = 4096;

/// A model and its name in the chain.
#[derive(Debug)]
pub struct Source {
    /// The open model.
    pub model: Model,
    /// Its artifacts.
    pub store: Store,
    /// Its key.
    pub key: Key,
    /// Where it was opened.
    pub path: PathBuf,
    /// The hash of its files.
    pub hash: Key,
}

#[derive(Serialize, Deserialize)]
struct Remembered {
    files: Key,
    hash: Key,
}

impl Source {
    /// Opens the model at `path`; its artifacts lie inside `artifacts`.
    pub fn open(path: &Path, artifacts: &Path, progress: &mut dyn Progress) -> Result<Source> {
        let model = Model::open(path)?;
        let store = Store::of_model(artifacts, &model.config.name);
        let hash = remembered_hash(&model.files, store.folder(), progress)?;
        let key = Key::derive(NAME, SCHEMA, &serde_json::Value::Null, &[hash]);
        Ok(Source { model, store, key, path: path.to_owned(), hash })
    }

    /// The model as an input of another stage.
    #[must_use]
    pub fn input(&self) -> Input {
        Input { name: NAME.to_owned(), key: self.key }
    }
}

fn remembered_hash(files: &[PathBuf], folder: &Path, progress: &mut dyn Progress) -> Result<Key> {
    let mut listed = String::new();
    for path in files {
        let io = |source| PrepError::io(path, source);
        let metadata = std::fs::metadata(path).map_err(io)?;
        let changed = metadata.modified().map_err(io)?;
        let changed = changed.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let path = path.canonicalize().map_err(io)?;
        listed += &format!("{} {} {changed}\n", path.display(), metadata.len());
    }
    let files_key = Key::of(listed.as_bytes());
    let memory = folder.join("source.json");
    if let Ok(Some(text)) = files::read(&memory, MAX_MEMORY_BYTES)
        && let Ok(found) = serde_json::from_slice::<Remembered>(&text)
        && found.files == files_key
    {
        return Ok(found.hash);
    }
    let hash = Key::parse(&hash(files, progress)?)?;
    let io = |source| PrepError::io(&memory, source);
    std::fs::create_dir_all(folder).map_err(io)?;
    let text = serde_json::to_vec(&Remembered { files: files_key, hash }).expect("plain data");
    files::replace(&memory, &text).map_err(io)?;
    Ok(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_hashed_anew() {
        let dir = tempfile::TempDir::new().unwrap();
        let file = dir.path().join("weights");
        let store = dir.path().join("store");
        let files = [file.clone()];
        std::fs::write(&file, "abc").unwrap();
        let first = remembered_hash(&files, &store, &mut ()).unwrap();
        assert_eq!(first, Key::of(b"abc"));
        assert_eq!(remembered_hash(&files, &store, &mut ()).unwrap(), first);
        std::fs::write(&file, "abcd").unwrap();
        assert_eq!(remembered_hash(&files, &store, &mut ()).unwrap(), Key::of(b"abcd"));
        std::fs::write(store.join("source.json"), "nonsense").unwrap();
        assert_eq!(remembered_hash(&files, &store, &mut ()).unwrap(), Key::of(b"abcd"));
    }
}
