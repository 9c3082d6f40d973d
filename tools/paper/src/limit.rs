//! [`Limit`]: a memory cgroup around a command, where the system lets us make one (usually as root).

use std::path::{Path, PathBuf};

/// Groups are called this and the number of the process that made them.
const PREFIX: &str = "leanstream-paper-";

/// A group of its own below the mounted hierarchy, removed in the end.
#[derive(Debug)]
pub(crate) struct Limit {
    folder: PathBuf,
}

impl Limit {
    /// A group whose members may hold `bytes` of memory together, page cache included. None where the system has none
    /// for us.
    pub(crate) fn new(bytes: u64) -> Option<Limit> {
        let (root, is_first_version) = root();
        let files: &[(&str, String)] = if is_first_version {
            &[("memory.limit_in_bytes", bytes.to_string())]
        } else {
            &[("memory.max", bytes.to_string()), ("memory.swap.max", "0".to_owned())]
        };
        sweep(root);
        let folder = root.join(format!("{PREFIX}{}", std::process::id()));
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

/// The hierarchy of memory, and whether it is of cgroups' first version.
fn root() -> (&'static Path, bool) {
    let first = Path::new("/sys/fs/cgroup/memory");
    match first.join("memory.limit_in_bytes").exists() {
        true => (first, true),
        false => (Path::new("/sys/fs/cgroup"), false),
    }
}

/// Removes what runs have left behind that were killed.
fn sweep(root: &Path) {
    for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if maker.is_some_and(|maker| !Path::new("/proc").join(maker).exists()) {
            // One that has members still cannot be removed.
            let _ = std::fs::remove_dir(entry.path());
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_killed_runs_are_removed_and_those_of_others_left() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let living = format!("{PREFIX}{}", std::process::id());
        let others = [living.as_str(), "leanstream-paper", "user.slice"];
        // No process has a number as high.
        let dead = format!("{PREFIX}4294967290");
        others
            .iter()
            .chain(&[dead.as_str()])
            .for_each(|name| std::fs::create_dir(at(name)).unwrap());
        sweep(folder.path());
        assert!(!at(&dead).exists() && others.iter().all(|name| at(name).exists()));
    }
}
