//! What the operating system says of this machine.

use crate::cmd::print_line;
use crate::host::{Memory, Root, Threads};
use ls_bundle::ids::ByteCount;
use serde_json::{Value, json};
use std::path::Path;

/// The machine, as far as it matters.
pub(super) struct Host {
    pub(super) threads: Threads,
    /// The fastest kernels that the processor runs.
    pub(super) simd: &'static str,
    pub(super) memory: Memory,
    /// Memory that may be locked; None: all.
    memlock_bytes: Option<u64>,
    pub(super) gpus: Vec<String>,
}

impl Host {
    /// Looks. What cannot be read counts as absent.
    pub(super) fn look() -> Host {
        let root = Root::here();
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
        Host {
            threads: root.threads(),
            simd: ls_cpu::Kernels::detect().name(),
            memory: root.memory(),
            memlock_bytes: memlock(&limits),
            gpus: gpus(),
        }
    }

    /// What can be had now, the group's limit included; 0 where the system does not say.
    pub(super) fn available_bytes(&self) -> u64 {
        self.memory.available().unwrap_or(0)
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "threads": self.threads.count,
            "allowed_cores": self.threads.allowed,
            "big_cores": self.threads.big,
            "cpu_quota": self.threads.quota,
            "simd": self.simd,
            "memory_bytes": self.memory.total,
            "available_bytes": self.available_bytes(),
            "cgroup_limit_bytes": self.memory.limit,
            "default_budget_bytes": self.memory.default_budget().map(|budget| budget.bytes.0),
            "memlock_bytes": self.memlock_bytes,
            "swap_bytes": self.memory.swap,
            "gpus": self.gpus,
        })
    }

    pub(super) fn print(&self) -> anyhow::Result<()> {
        print_line(&format!("processor   {}, kernels {}", self.threads, self.simd))?;
        print_line(&format!(
            "memory      {} of {} available; group limit {}; may be locked {}; swap {}",
            ByteCount(self.available_bytes()),
            or(self.memory.total, "an unknown amount"),
            or(self.memory.limit, "none"),
            or(self.memlock_bytes, "all"),
            or(self.memory.swap, "none"),
        ))?;
        let gpus = if self.gpus.is_empty() { "none seen".into() } else { self.gpus.join(", ") };
        print_line(&format!("GPU         {gpus}"))
    }
}

/// A size, or another word for none.
fn or(bytes: Option<u64>, word: &str) -> String {
    bytes.map_or(word.into(), |bytes| ByteCount(bytes).to_string())
}

/// The soft limit of locked memory in `/proc/self/limits`.
fn memlock(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
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
    use super::memlock;

    #[test]
    fn figures_are_read_as_the_kernel_writes_them() {
        let limits = |soft: &str| {
            memlock(&format!("Max processes 1 2 p\nMax locked memory         {soft}   7  bytes\n"))
        };
        assert_eq!(limits("8388608"), Some(8_388_608));
        assert_eq!(limits("unlimited"), None);
    }
}
