//! Control groups, both versions: the limits that a container or a service manager sets.
//!
//! A limit of any group above this process's holds as well. Inside a container the folders of those above are often not to
//! be seen; the topmost that is has the container's own limits then.

use super::{Root, figure};
use std::path::{Component, Path, PathBuf};

/// A limit of memory and what is left of it, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupMemory {
    pub(super) limit: u64,
    /// Pages that would be given up first do not count as used.
    pub(super) left: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// The tightest limit of memory.
pub(super) fn memory(root: &Root) -> Option<GroupMemory> {
    let (version, folders) = folders(root, "memory")?;
    let limits = folders.iter().filter_map(|folder| match version {
        Version::One => memory_one(root, folder),
        Version::Two => memory_two(root, folder),
    });
    limits.min_by_key(|group| group.left)
}

fn memory_two(root: &Root, folder: &Path) -> Option<GroupMemory> {
    let limit = |name: &str| root.count(folder.join(name));
    // Above `high` processes are slowed down until they hold less.
    let limit = [limit("memory.max"), limit("memory.high")].into_iter().flatten().min()?;
    let stat = root.read(folder.join("memory.stat")).unwrap_or_default();
    let names = ["active_file ", "inactive_file ", "slab_reclaimable "];
    Some(left(limit, root.count(folder.join("memory.current")), &stat, &names))
}

fn memory_one(root: &Root, folder: &Path) -> Option<GroupMemory> {
    let limit = root.count(folder.join("memory.limit_in_bytes"))?;
    // No limit is a number near the largest.
    if limit >= 1 << 60 {
        return None;
    }
    let stat = root.read(folder.join("memory.stat")).unwrap_or_default();
    let names = ["total_active_file ", "total_inactive_file "];
    Some(left(limit, root.count(folder.join("memory.usage_in_bytes")), &stat, &names))
}

fn left(limit: u64, used: Option<u64>, stat: &str, reclaimable: &[&str]) -> GroupMemory {
    let reclaimable = reclaimable.iter().filter_map(|name| figure(stat, name));
    let reclaimable = reclaimable.fold(0u64, u64::saturating_add);
    let used = used.unwrap_or(0).saturating_sub(reclaimable);
    GroupMemory { limit, left: limit.saturating_sub(used) }
}

/// The tightest quota of processor time, in processors.
pub(super) fn quota(root: &Root) -> Option<f64> {
    let (version, folders) = folders(root, "cpu")?;
    let quotas = folders.iter().filter_map(|folder| {
        let (quota, period) = match version {
            Version::One => {
                let count = |name: &str| root.count(folder.join(name));
                (count("cpu.cfs_quota_us")?, count("cpu.cfs_period_us")?)
            }
            Version::Two => {
                let text = root.read(folder.join("cpu.max"))?;
                let mut words = text.split_whitespace().map(|word| word.parse::<u64>().ok());
                (words.next()??, words.next()??)
            }
        };
        (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
    });
    quotas.min_by(f64::total_cmp)
}

/// Folders of this process's group for a controller and of all above it that can be seen, the own first.
fn folders(root: &Root, controller: &str) -> Option<(Version, Vec<PathBuf>)> {
    let own = root.read("proc/self/cgroup")?;
    let (version, path) = group(&own, controller)?;
    let mounts = root.read("proc/self/mountinfo").unwrap_or_default();
    let (top, mount) = mount(&mounts, version, controller).unwrap_or_else(|| {
        let usual = Path::new("/sys/fs/cgroup");
        match version {
            Version::One => ("/".into(), usual.join(controller)),
            Version::Two => ("/".into(), usual.to_owned()),
        }
    });
    let below = Path::new(path).strip_prefix(&top).unwrap_or(Path::new(""));
    // A group outside of what can be seen is told with dots.
    let is_plain = below.components().all(|part| matches!(part, Component::Normal(_)));
    let below = if is_plain { below } else { Path::new("") };
    let folders = below.ancestors().map(|below| mount.join(below)).collect();
    Some((version, folders))
}

/// Version and path of the group that `/proc/self/cgroup` names for a controller.
fn group<'a>(own: &'a str, controller: &str) -> Option<(Version, &'a str)> {
    let lines = || own.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let one = lines().find(|(names, _)| names.split(',').any(|name| name == controller));
    let two = || lines().find(|(names, _)| names.is_empty());
    match (one, two()) {
        (Some((_, path)), _) => Some((Version::One, path)),
        (None, Some((_, path))) => Some((Version::Two, path)),
        (None, None) => None,
    }
}

/// Which group is mounted for a controller, and where, as `/proc/self/mountinfo` tells.
fn mount(mounts: &str, version: Version, controller: &str) -> Option<(PathBuf, PathBuf)> {
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (top, at) = (left.next()?, left.next()?);
        let mut right = right.split(' ');
        let (kind, options) = (right.next()?, right.nth(1).unwrap_or_default());
        let fits = match version {
            Version::One => kind == "cgroup" && options.split(',').any(|name| name == controller),
            Version::Two => kind == "cgroup2",
        };
        fits.then(|| (PathBuf::from(top), PathBuf::from(at)))
    })
}
