//! Tables and profiles as files: read with a limit, replaced at once or not at all.

use crate::error::{ControlError, ErrorClass};
use crate::lut::Lut;
use crate::profile::DeviceProfile;
use ls_bundle::files;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Both are far below.
const MAX_BYTES: u64 = 64 << 20;

impl Lut {
    /// Reads a `.lut` file.
    ///
    /// # Errors
    /// If it is none, or cannot be read.
    pub fn open(path: &Path) -> Result<Lut, ControlError> {
        open(path, Lut::from_bytes)
    }

    /// Writes a `.lut` file; one with its name is replaced when all is on the disk.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn save(&self, path: &Path) -> Result<(), ControlError> {
        files::replace(path, &self.to_bytes()).map_err(|source| ControlError::io(path, source))
    }
}

impl DeviceProfile {
    /// Reads a `.lsp` file.
    ///
    /// # Errors
    /// If it is none, or cannot be read.
    pub fn open(path: &Path) -> Result<DeviceProfile, ControlError> {
        open(path, DeviceProfile::from_bytes)
    }

    /// Writes a `.lsp` file; one with its name is replaced when all is on the disk. So a long measurement may be saved again
    /// and again, and be continued from what was saved.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn save(&self, path: &Path) -> Result<(), ControlError> {
        files::replace(path, &self.to_bytes()).map_err(|source| ControlError::io(path, source))
    }
}

fn open<T>(
    path: &Path,
    read: impl FnOnce(&[u8]) -> Result<T, ControlError>,
) -> Result<T, ControlError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|source| ControlError::io(path, source))?;
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|source| ControlError::io(path, source))?;
    if bytes.len() as u64 > MAX_BYTES {
        let (class, wanted) = (ErrorClass::Unsupported, format!("at most {MAX_BYTES}"));
        let error = ControlError::new(class, "file", "bytes", "more", wanted);
        return Err(error.in_file(path));
    }
    read(&bytes).map_err(|error| error.in_file(path))
}
