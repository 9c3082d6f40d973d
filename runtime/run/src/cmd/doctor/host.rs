//! What the operating system says of this machine.

use crate::cmd::print_line;
use ls_bundle::ids::ByteCount;
use serde_json::{Value, json};
use std::path::Path;

/// The machine, as far as it matters.
pub(super) struct Host {
    pub(super) threads: usize,
    /// The fastest kernels that the processor runs.
    pub(super) simd: &'static str,
    pub(super) total_bytes: u64,
    /// What can be had now, the group's limit included.
    pub(super) available_bytes: u64,
    /// The limit of this process's control group.
    pub(super) cgroup_bytes: Option<u64>,
    /// Memory that may be locked; None: all.
    memlock_bytes: Option<u64>,
    swap_bytes: u64,
    pub(super) gpus: Vec<String>,
}

impl Host {
    /// Looks. What cannot be read counts as absent.
    pub(super) fn look() -> Host {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let (total_bytes, free) = (kib(&meminfo, "MemTotal:"), kib(&meminfo, "MemAvailable:"));
        let cgroup = cgroup();
        let left = cgroup.map_or(u64::MAX, |(limit, used)| limit.saturating_sub(used));
        Host {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            simd: ls_cpu::Kernels::detect().name(),
            total_bytes,
            available_bytes: free.min(left),
            cgroup_bytes: cgroup.map(|(limit, _)| limit),
            memlock_bytes: memlock(&limits),
            swap_bytes: kib(&meminfo, "SwapTotal:"),
            gpus: gpus(),
        }
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "threads": self.threads,
            "simd": self.simd,
            "memory_bytes": self.total_bytes,
            "available_bytes": self.available_bytes,
            "cgroup_limit_bytes": self.cgroup_bytes,
            "memlock_bytes": self.memlock_bytes,
            "swap_bytes": self.swap_bytes,
            "gpus": self.gpus,
        })
    }

    pub(super) fn print(&self) -> anyhow::Result<()> {
        print_line(&format!("processor   {} threads, kernels {}", self.threads, self.simd))?;
        print_line(&format!(
            "memory      {} of {} available; group limit {}; may be locked {}; swap {}",
            ByteCount(self.available_bytes),
            ByteCount(self.total_bytes),
            self.cgroup_bytes.map_or("none".into(), |limit| ByteCount(limit).to_string()),
            self.memlock_bytes.map_or("all".into(), |limit| ByteCount(limit).to_string()),
            ByteCount(self.swap_bytes)
        ))?;
        let gpus = if self.gpus.is_empty() { "none seen".into() } else { self.gpus.join(", ") };
        print_line(&format!("GPU         {gpus}"))
    }
}

/// The figure behind `name`, in bytes; 0 if there is none.
fn kib(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or(0) * 1024
}

/// The soft limit of locked memory in `/proc/self/limits`.
fn memlock(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Limit and use of memory of the nearest control group that has a limit (version 2 of their interface).
fn cgroup() -> Option<(u64, u64)> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let root = Path::new("/sys/fs/cgroup");
    let mut group = root.join(path.trim_start_matches('/'));
    let figure = |group: &Path, name: &str| -> Option<u64> {
        std::fs::read_to_string(group.join(name)).ok()?.trim().parse().ok()
    };
    while group.starts_with(root) {
        if let Some(limit) = figure(&group, "memory.max") {
            return Some((limit, figure(&group, "memory.current").unwrap_or(0)));
        }
        if !group.pop() {
            break;
        }
    }
    None
}

/// Graphics processors that a driver shows.
fn gpus() -> Vec<String> {
    let mut found = Vec::new();
    let entries = |folder: &str| {
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
    };
    for gpu in entries("/proc/driver/nvidia/gpus") {
        let text = std::fs::read_to_string(gpu.join("information")).unwrap_or_default();
        let model = text.lines().find_map(|line| line.strip_prefix("Model:"));
        found.push(model.map_or("NVIDIA".into(), |model| model.trim().to_owned()));
    }
    let tegra = Path::new("/dev/nvhost-gpu").exists() || Path::new("/dev/nvgpu").exists();
    if found.is_empty() && tegra {
        found.push("NVIDIA Tegra".into());
    }
    let render = entries("/dev/dri").filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("renderD"))
    });
    if found.is_empty() {
        found.extend(render.map(|path| path.display().to_string()));
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::{kib, memlock};

    #[test]
    fn figures_are_read_as_the_kernel_writes_them() {
        assert_eq!(kib("MemTotal:  24684 kB\nSwapTotal: 0 kB\n", "MemTotal:"), 24_684 * 1024);
        assert_eq!(kib("MemTotal:  24684 kB\n", "MemAvailable:"), 0);
        let limits = |soft: &str| {
            memlock(&format!("Max processes 1 2 p\nMax locked memory         {soft}   7  bytes\n"))
        };
        assert_eq!(limits("8388608"), Some(8_388_608));
        assert_eq!(limits("unlimited"), None);
    }
}
