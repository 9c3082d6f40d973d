//! Whether a disk has room, asked before long work begins.

use crate::error::{PrepError, Result};
use ls_bundle::ids::ByteCount;
use std::path::Path;

/// Refuses to begin what the disk of `folder` cannot hold. Makes the folder.
pub fn need_room(folder: &Path, wanted_bytes: u64) -> Result<()> {
    let io = |source: std::io::Error| PrepError::io(folder, source);
    std::fs::create_dir_all(folder).map_err(io)?;
    let disk = rustix::fs::statvfs(folder).map_err(|error| io(error.into()))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free < wanted_bytes {
        let (free, wanted) = (ByteCount(free), ByteCount(wanted_bytes));
        let problem = format!("{free} are free, {wanted} are needed");
        return Err(io(std::io::Error::new(std::io::ErrorKind::StorageFull, problem)));
    }
    Ok(())
}
