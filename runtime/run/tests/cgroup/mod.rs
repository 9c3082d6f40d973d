//! Limits on memory, set by the kernel.

use std::path::{Path, PathBuf};

/// A memory cgroup of our own, where this process may make one (cgroup v1 or v2, as root).
pub(crate) struct Cgroup(pub(crate) PathBuf);

impl Cgroup {
    pub(crate) fn make(limit_bytes: u64) -> std::io::Result<Cgroup> {
        let name = format!("ls-run-test-{}-{limit_bytes}", std::process::id());
        let (folder, limit) = if Path::new("/sys/fs/cgroup/memory").is_dir() {
            (Path::new("/sys/fs/cgroup/memory").join(name), "memory.limit_in_bytes")
        } else {
            (Path::new("/sys/fs/cgroup").join(name), "memory.max")
        };
        std::fs::create_dir(&folder)?;
        let group = Cgroup(folder);
        std::fs::write(group.0.join(limit), limit_bytes.to_string())?;
        Ok(group)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}
