//! A Hugging Face folder: `config.json`, the tokenizer's files, and weights in one or many safetensors files.

use crate::error::{PrepError, Result};
use crate::model::safetensors::read_header;
use crate::model::weights::{SourceFile, StoredTensor};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};

/// Bytes of config.json, generation_config.json and tokenizer_config.json. The last holds the chat template, and
/// each added token once more.
pub const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Bytes of model.safetensors.index.json. A tensor takes about 90.
pub const MAX_INDEX_BYTES: u64 = 2 << 20;
/// Files that the weights may be spread over.
pub const MAX_SHARDS: usize = 512;

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// A folder whose small files are read on demand, all of which are remembered for the model's identity.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    read: Vec<PathBuf>,
}

impl Folder {
    /// The folder at `path`.
    #[must_use]
    pub fn new(path: &Path) -> Folder {
        Folder { path: path.to_owned(), read: Vec::new() }
    }

    /// Files read so far.
    #[must_use]
    pub fn files_read(&self) -> &[PathBuf] {
        &self.read
    }

    /// The place of a file of this folder, for messages.
    #[must_use]
    pub fn place(&self, name: &str) -> String {
        self.path.join(name).display().to_string()
    }

    /// A file of at most `limit` bytes, if it exists.
    pub fn optional(&mut self, name: &str, limit: u64) -> Result<Option<Vec<u8>>> {
        let path = self.path.join(name);
        match std::fs::metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(PrepError::io(&path, error)),
            Ok(_) => {}
        }
        let file = SourceFile::open(&path)?;
        if file.len > limit {
            let problem = format!("has {} bytes; the limit is {limit}", file.len);
            return Err(PrepError::corrupt(path.display(), problem));
        }
        let mut bytes = vec![0; usize::try_from(file.len).expect("below the limit")];
        file.read_at(0, &mut bytes)?;
        self.read.push(path);
        Ok(Some(bytes))
    }

    /// A file of at most `limit` bytes without which there is no model.
    pub fn required(&mut self, name: &str, limit: u64) -> Result<Vec<u8>> {
        self.optional(name, limit)?
            .ok_or_else(|| PrepError::incomplete(self.path.display(), format!("no {name}")))
    }

    /// The weight files and their tensors.
    pub fn weights(&mut self) -> Result<(Vec<SourceFile>, BTreeMap<String, StoredTensor>)> {
        let index = self.index()?;
        let mut shards: BTreeSet<&str> =
            index.iter().flatten().map(|(_, shard)| shard.as_str()).collect();
        if index.is_none() {
            shards.insert(SINGLE_FILE);
        }
        self.refuse_missing(&shards)?;
        let mut files = Vec::new();
        let mut tensors = BTreeMap::new();
        for (number, shard) in shards.into_iter().enumerate() {
            let file = SourceFile::open(&self.path.join(shard))?;
            for (name, tensor) in read_header(&file, number)? {
                if tensors.insert(name.clone(), tensor).is_some() {
                    let problem = format!("tensor `{name}` stands in an earlier file too");
                    return Err(PrepError::corrupt(self.place(shard), problem));
                }
            }
            files.push(file);
        }
        for (name, shard) in index.iter().flatten() {
            let found = tensors.get(name).map(|tensor| &files[tensor.file].path);
            if found.is_none_or(|path| !path.ends_with(shard)) {
                let problem = format!("tensor `{name}` is not in {shard}");
                return Err(PrepError::corrupt(self.place(INDEX_FILE), problem));
            }
        }
        Ok((files, tensors))
    }

    /// Which file holds each tensor, if there is an index.
    fn index(&mut self) -> Result<Option<BTreeMap<String, String>>> {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let Some(text) = self.optional(INDEX_FILE, MAX_INDEX_BYTES)? else { return Ok(None) };
        let place = self.place(INDEX_FILE);
        let index: Index =
            serde_json::from_slice(&text).map_err(|error| PrepError::corrupt(&place, error))?;
        let shards: BTreeSet<&String> = index.weight_map.values().collect();
        if shards.is_empty() || shards.len() > MAX_SHARDS {
            let problem = format!("names {} files; wanted 1 to {MAX_SHARDS}", shards.len());
            return Err(PrepError::corrupt(place, problem));
        }
        for shard in shards {
            if !is_plain_name(shard) || !shard.ends_with(".safetensors") {
                let problem =
                    format!("names the file {shard:?}; wanted a .safetensors file of the folder");
                return Err(PrepError::corrupt(place, problem));
            }
        }
        Ok(Some(index.weight_map))
    }

    fn refuse_missing(&self, shards: &BTreeSet<&str>) -> Result<()> {
        let missing: Vec<&str> =
            shards.iter().copied().filter(|shard| !self.path.join(shard).exists()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let problem = format!(
            "{} of {} weight files missing: {}",
            missing.len(),
            shards.len(),
            missing.join(", ")
        );
        Err(PrepError::incomplete(self.path.display(), problem))
    }
}

/// Whether `name` names a file inside a folder and nothing else: no separators, no `..`.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let plain = matches!(parts.next(), Some(Component::Normal(part)) if part == name);
    plain && parts.next().is_none() && !name.contains(['\\', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_shards() {
        assert!(is_plain_name("model-00001-of-00002.safetensors"));
        for name in ["", ".", "..", "../a", "a/b", "/a", "a/", "a\\b", "./a", "a\0b"] {
            assert!(!is_plain_name(name), "{name:?}");
        }
    }
}
