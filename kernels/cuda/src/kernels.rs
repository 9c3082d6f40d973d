//! The kernels as text and as machine code.
//!
//! Machine code for the devices of Jetson boards (7.2, 8.7) and for data centres (9.0) is built in, made by `make kernels`
//! with the toolkit that each device's usual driver accepts; so these start at once, without NVRTC. For any other device the
//! text is compiled when the device is opened, and kept in the user's cache folder (`$XDG_CACHE_HOME/leanstream/cuda`, else
//! below `~/.cache`) under the hash of text, architecture, compiler and driver.

use crate::error::Kind;
use crate::nvrtc::Nvrtc;
use ls_bundle::files;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// What the kernels include.
pub(crate) const HEADERS: [(&str, &str); 2] = [
    ("common.cuh", include_str!("../cu/common.cuh")),
    ("load.cuh", include_str!("../cu/load.cuh")),
];

/// The modules, by name and text.
pub(crate) const MODULES: [(&str, &str); 5] = [
    ("mlp", include_str!("../cu/mlp.cu")),
    ("model", include_str!("../cu/model.cu")),
    ("attention", include_str!("../cu/attention.cu")),
    ("base", include_str!("../cu/base.cu")),
    ("sync", include_str!("../cu/sync.cu")),
];

/// Where a device's kernels come from.
#[derive(Clone, Debug, Default)]
pub struct KernelSource {
    /// Compile, even where machine code is built in.
    pub compile: bool,
    /// Folders where NVRTC is looked for first.
    pub nvrtc: Vec<PathBuf>,
}

/// Compiles a module for sm_`arch`; for tools and tests.
pub fn compile(nvrtc: &Nvrtc, module: &str, arch: u32) -> Result<Vec<u8>, crate::CudaError> {
    let found = MODULES.iter().find(|(name, _)| *name == module);
    let &(name, text) = found.expect("one of module_names()");
    Ok(nvrtc.compile(name, text, &HEADERS, arch)?)
}

/// Names of all modules.
pub fn module_names() -> impl Iterator<Item = &'static str> {
    MODULES.iter().map(|(name, _)| *name)
}

/// What the machine code is made of: changes with every byte of the kernels' text.
#[must_use]
pub fn text_hash() -> u64 {
    let texts = HEADERS.iter().chain(&MODULES);
    xxh3_64(texts.map(|(name, text)| format!("{name}\0{text}\0")).collect::<String>().as_bytes())
}

/// The machine code of all modules for a device, in the order of [`MODULES`].
pub(crate) fn load(
    (major, minor): (u32, u32),
    driver: u32,
    source: &KernelSource,
) -> Result<Vec<Vec<u8>>, Kind> {
    let arch = major * 10 + minor;
    if let Some(built) = crate::built::find(arch).filter(|_| !source.compile) {
        return Ok(built.iter().map(|code| code.to_vec()).collect());
    }
    let none = |reason: &str| Kind::NoKernels { major, minor, reason: reason.into() };
    let nvrtc = Nvrtc::find(driver / 1000, &source.nvrtc)
        .ok_or_else(|| none("no NVRTC is installed (Python package nvidia-cuda-nvrtc-cu12)"))?;
    MODULES.iter().map(|&(name, text)| cached(&nvrtc, name, text, arch, driver)).collect()
}

fn cached(
    nvrtc: &Nvrtc,
    name: &'static str,
    text: &str,
    arch: u32,
    driver: u32,
) -> Result<Vec<u8>, Kind> {
    let mut key = format!("{text}\0sm_{arch}\0{:?}\0{driver}", nvrtc.version());
    HEADERS.iter().for_each(|(_, header)| key.push_str(header));
    let folder = files::cache_folder().map(|folder| folder.join("cuda"));
    let file = folder.map(|f| f.join(format!("{name}-{:032x}", xxh3_128(key.as_bytes()))));
    if let Some(code) = file.as_deref().and_then(read) {
        return Ok(code);
    }
    let code = nvrtc.compile(name, text, &HEADERS, arch)?;
    if let Some(file) = file {
        write(&file, &code);
    }
    Ok(code)
}

/// Machine code with its hash behind it; None if it is not there or damaged.
fn read(file: &Path) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(file).ok()?;
    let code = bytes.len().checked_sub(8)?;
    let hash = bytes.split_off(code);
    (hash == xxh3_64(&bytes).to_le_bytes()).then_some(bytes)
}

/// A cache that cannot be written costs time, no more.
fn write(file: &Path, code: &[u8]) {
    files::cache(file, &[code, &xxh3_64(code).to_le_bytes()].concat());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_machine_code_is_not_used() {
        let folder = std::env::temp_dir().join(format!("ls-cuda-cache-{}", std::process::id()));
        let file = folder.join("deeper/mlp-1");
        write(&file, b"machine code");
        assert_eq!(read(&file).as_deref(), Some(&b"machine code"[..]));
        let mut bytes = std::fs::read(&file).unwrap();
        bytes[3] ^= 1;
        std::fs::write(&file, bytes).unwrap();
        assert_eq!(read(&file), None);
        std::fs::write(&file, b"short").unwrap();
        assert_eq!(read(&file), None);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
