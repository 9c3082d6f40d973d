//! [`Limit`]: a memory cgroup around a command, where the system lets us make one (usually as root).

use std::path::{Path, PathBuf};

/// A group of its own below the mounted hierarchy, removed in the end.
#[derive(Debug)]
pub(crate) struct Limit {
    folder: PathBuf,
}

impl Limit {
    /// A group whose members may hold `bytes` of memory together, page cache included. None where the system has none
    /// for us.
    pub(crate) fn new(bytes: u64) -> Option<Limit> {
        let (root, files): (&str, &[(&str, String)]) =
            if Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists() {
                ("/sys/fs/cgroup/memory", &[("memory.limit_in_bytes", bytes.to_string())])
            } else {
                let no_swap = ("memory.swap.max", "0".to_owned());
                ("/sys/fs/cgroup", &[("memory.max", bytes.to_string()), no_swap])
            };
        let folder = Path::new(root).join(format!("leanstream-paper-{}", std::process::id()));
        std::fs::create_dir(&folder).ok()?;
        let limit = Limit { folder };
        let set = |(name, value): &(&str, String)| std::fs::write(limit.folder.join(name), value);
        // A system without swap has no file for it.
        let main_is_set = set(&files[0]).is_ok();
        files[1..].iter().for_each(|file| drop(set(file)));
        main_is_set.then_some(limit)
    }

    /// Where a process writes its number to become a member.
    pub(crate) fn members(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        // What pages the group still holds are dropped first; a group that stays is empty and harmless.
        let _ = std::fs::write(self.folder.join("memory.force_empty"), "0");
        for _ in 0..50 {
            if std::fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}
