//! Text for calibration and evaluation, described by manifests and unpacked on demand.
//!
//! `datasets/manifests/<name>.toml` says where a text comes from, under which licence it stands, what it is for and
//! what its bytes hash to; `datasets/text/<name>.txt` is the text, which git ignores. Texts of Debian packages are
//! fetched with `apt-get download` and `dpkg`, so from whatever archive the machine uses; texts of other sources are
//! put in place by hand and checked.

mod markup;
mod rdata;

use crate::error::{PrepError, Result};
use crate::key::Key;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of a manifest.
const MAX_MANIFEST_BYTES: u64 = 64 << 10;
/// Bytes of one file of a package, unpacked.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// What is known about a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Name of the text's file, without `.txt`.
    pub name: String,
    /// What it is.
    pub title: String,
    /// Licence.
    pub licence: String,
    /// What it is used for: `calibration` or `evaluation`.
    pub split: String,
    /// Where it comes from.
    pub source: Origin,
    /// Bytes of the text; absent where it has not been seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// BLAKE3 of the text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<Key>,
}

/// Where a text comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Origin {
    /// Files of a Debian package.
    Debian {
        /// Name of the package.
        package: String,
        /// The version whose text the manifest's hash is of.
        version: String,
        /// Files inside the package; `*` in the last part stands for anything.
        files: String,
        /// How text is made of the files.
        format: Format,
    },
    /// A file that people put in place.
    Local {
        /// What to look for.
        note: String,
    },
}

/// How text is made of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Plain text, compressed by gzip where the name ends so.
    Text,
    /// The paragraphs of HTML pages.
    Html,
    /// The strings of an R package's data.
    Rdata,
}

/// What became of a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fetched {
    /// Name of the manifest.
    pub name: String,
    /// The text.
    pub path: PathBuf,
    /// Bytes of the text; 0 if it is not there.
    pub bytes: u64,
    /// BLAKE3 of the text, if it is there.
    pub blake3: Option<Key>,
    /// `kept`, `unpacked`, `absent`, or `other version`: unpacked, but not the text whose hash is known.
    pub outcome: &'static str,
    /// What is to be known about it.
    pub note: String,
}

/// The manifests of the folder `datasets`, by name.
pub fn manifests(datasets: &Path) -> Result<Vec<Manifest>> {
    let folder = datasets.join("manifests");
    let io = |source| PrepError::io(&folder, source);
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(&folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            paths.push(path);
        }
    }
    paths.sort();
    paths.iter().map(|path| manifest(path)).collect()
}

fn manifest(path: &Path) -> Result<Manifest> {
    let io = |source| PrepError::io(path, source);
    if std::fs::metadata(path).map_err(io)?.len() > MAX_MANIFEST_BYTES {
        return Err(PrepError::corrupt(path.display(), "is no manifest: too long"));
    }
    let text = std::fs::read_to_string(path).map_err(io)?;
    let corrupt =
        |problem: String| PrepError::corrupt(path.display(), problem.trim().replace('\n', " "));
    let manifest: Manifest = toml::from_str(&text).map_err(|error| corrupt(error.to_string()))?;
    if path.file_stem().is_none_or(|stem| stem != manifest.name.as_str()) {
        return Err(corrupt(format!("is called {:?} inside", manifest.name)));
    }
    if !["calibration", "evaluation"].contains(&manifest.split.as_str()) {
        let split = &manifest.split;
        return Err(corrupt(format!("split {split:?}; wanted calibration or evaluation")));
    }
    Ok(manifest)
}

/// Puts the text of `manifest` into `datasets/text`. Packages that lie in `packages` are taken from there.
pub fn fetch(datasets: &Path, manifest: &Manifest, packages: Option<&Path>) -> Result<Fetched> {
    let folder = datasets.join("text");
    let path = folder.join(format!("{}.txt", manifest.name));
    let io = |path: &Path, source| PrepError::io(path, source);
    let fetched = |text: &[u8], outcome, note: &str| {
        let bytes = text.len() as u64;
        let blake3 = (bytes > 0).then(|| Key::of(text));
        let (name, note) = (manifest.name.clone(), note.to_owned());
        Ok(Fetched { name, path: path.clone(), bytes, blake3, outcome, note })
    };
    if let Ok(text) = std::fs::read(&path) {
        let known = manifest.blake3.is_none_or(|key| key == Key::of(&text));
        return match &manifest.source {
            _ if known => fetched(&text, "kept", ""),
            Origin::Local { note } => {
                Err(PrepError::corrupt(path.display(), format!("is not the known text ({note})")))
            }
            Origin::Debian { .. } => fetched(&text, "kept", "not the text whose hash is known"),
        };
    }
    let Origin::Debian { package, version, files, format } = &manifest.source else {
        let Origin::Local { note } = &manifest.source else { unreachable!("there are two kinds") };
        return fetched(b"", "absent", note);
    };
    let room = folder.join(format!(".{}-{}", manifest.name, std::process::id()));
    std::fs::create_dir_all(&room).map_err(|source| io(&room, source))?;
    let unpacked = unpack(&room, package, packages)
        .and_then(|found| Ok((found, text_of(&room.join("files"), files, *format)?)));
    std::fs::remove_dir_all(&room).map_err(|source| io(&room, source))?;
    let (found, text) = unpacked?;
    let known = manifest.blake3.is_none_or(|key| key == Key::of(text.as_bytes()));
    if !known && found == *version {
        let problem = format!("package {package} {version} does not give the known text");
        return Err(PrepError::corrupt(path.display(), problem));
    }
    let new = folder.join(format!(".{}.new", manifest.name));
    std::fs::write(&new, &text).map_err(|source| io(&new, source))?;
    std::fs::rename(&new, &path).map_err(|source| io(&path, source))?;
    let note = format!("{package} {found}, not {version}");
    match known {
        true => fetched(text.as_bytes(), "unpacked", ""),
        false => fetched(text.as_bytes(), "other version", &note),
    }
}

/// Unpacks a package into `room/files` and returns its version.
fn unpack(room: &Path, package: &str, packages: Option<&Path>) -> Result<String> {
    let is_archive = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(&format!("{package}_")) && name.ends_with(".deb")
    };
    let archive_in = |folder: &Path| {
        let entries = std::fs::read_dir(folder).ok()?;
        entries.flatten().map(|entry| entry.path()).find(is_archive)
    };
    let archive = match packages.and_then(archive_in) {
        Some(archive) => archive,
        None => {
            run(Command::new("apt-get").args(["download", package]).current_dir(room))?;
            archive_in(room).ok_or_else(|| {
                PrepError::incomplete(package, "apt-get has downloaded no archive")
            })?
        }
    };
    run(Command::new("dpkg").arg("-x").arg(&archive).arg(room.join("files")))?;
    run(Command::new("dpkg-deb").arg("-f").arg(&archive).arg("Version"))
        .map(|v| v.trim().to_owned())
}

/// What a program prints; its complaints are the error.
fn run(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|source| PrepError::io(Path::new(&name), source))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    let complaint: Vec<&str> = complaint.lines().filter(|line| line.starts_with("E:")).collect();
    Err(PrepError::incomplete(name, format!("{} ({})", complaint.join(" "), output.status)))
}

/// The text of all files that `pattern` names below `root`, in the order of their names.
fn text_of(root: &Path, pattern: &str, format: Format) -> Result<String> {
    let (folder, last) = pattern.rsplit_once('/').unwrap_or(("", pattern));
    let (before, behind) = last.split_once('*').unwrap_or((last, ""));
    let folder = root.join(folder);
    let io = |source| PrepError::io(&folder, source);
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(&folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let fits = if last.contains('*') {
            name.len() >= before.len() + behind.len()
                && name.starts_with(before)
                && name.ends_with(behind)
        } else {
            name == last
        };
        if fits && path.is_file() {
            paths.push(path);
        }
    }
    if paths.is_empty() {
        return Err(PrepError::incomplete(pattern, "the package has no such file"));
    }
    paths.sort();
    let mut seen = std::collections::HashSet::new();
    let mut text = String::new();
    for path in paths {
        let bytes = content(&path)?;
        match format {
            Format::Text => text += &String::from_utf8_lossy(&bytes),
            Format::Rdata => text += &rdata::strings(&bytes, &path)?,
            // Pages repeat their frame: each paragraph is taken once.
            Format::Html => {
                for paragraph in markup::paragraphs(&String::from_utf8_lossy(&bytes)) {
                    if seen.insert(paragraph.clone()) {
                        text += &paragraph;
                        text += "\n\n";
                    }
                }
            }
        }
    }
    Ok(text)
}

/// A file's bytes, unpacked if its name ends in `.gz`.
fn content(path: &Path) -> Result<Vec<u8>> {
    let io = |source| PrepError::io(path, source);
    let file = std::fs::File::open(path).map_err(io)?;
    let mut bytes = Vec::new();
    let packed = path.extension().is_some_and(|extension| extension == "gz");
    let read = if packed {
        flate2::read::GzDecoder::new(file).take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)
    } else {
        file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)
    };
    if read.map_err(io)? as u64 > MAX_FILE_BYTES {
        return Err(PrepError::corrupt(path.display(), "is longer than any text"));
    }
    Ok(bytes)
}
