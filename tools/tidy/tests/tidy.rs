//! The rules. See the crate's documentation.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

const MAX_FILE_LINES: usize = 600;
const MAX_FUNCTION_LINES: usize = 70;

/// Which of our crates a crate may use (besides those of others). What is not listed may use none of ours.
const MAY_USE: &[(&str, &[&str])] = &[
    ("ls-chat", &["ls-bundle"]),
    ("ls-compute", &["ls-bundle"]),
    ("ls-cpu", &["ls-bundle", "ls-compute", "ls-sync"]),
    ("ls-cuda", &["ls-bundle", "ls-compute"]),
    ("ls-opencl", &["ls-bundle", "ls-compute"]),
    ("ls-io", &["ls-sync"]),
    ("ls-cache", &["ls-bundle", "ls-hash"]),
    ("ls-control", &["ls-bundle"]),
    (
        "ls-engine",
        &["ls-bundle", "ls-cache", "ls-compute", "ls-control", "ls-hash", "ls-io", "ls-sync"],
    ),
    (
        "ls-run",
        &[
            "ls-bundle",
            "ls-cache",
            "ls-chat",
            "ls-compute",
            "ls-control",
            "ls-cpu",
            "ls-cuda",
            "ls-engine",
            "ls-io",
            "ls-opencl",
            "ls-sync",
        ],
    ),
    ("ls-serve", &["ls-bundle", "ls-cache", "ls-chat", "ls-engine", "ls-io", "ls-run"]),
    (
        "ls-fuzz",
        &[
            "ls-bundle",
            "ls-cache",
            "ls-chat",
            "ls-control",
            "ls-cpu",
            "ls-engine",
            "ls-hash",
            "ls-io",
            "ls-paper",
            "ls-prep",
            "ls-run",
            "ls-serve",
        ],
    ),
    (
        "ls-prep",
        &[
            "ls-bundle",
            "ls-cache",
            "ls-compute",
            "ls-control",
            "ls-cpu",
            "ls-engine",
            "ls-hash",
            "ls-io",
            "ls-paper",
        ],
    ),
];

/// Crates that must stay out of what runs on a device.
const NOT_ON_DEVICE: &[&str] = &[
    "candle-core",
    "candle-nn",
    "linfa",
    "ndarray",
    "ndarray-linalg",
    "openblas-src",
    "axum",
    "plotters",
    "tokio",
];

/// Crates that may hold unsafe code; all others forbid it. That of ls-fuzz is the allocator that counts for it.
const MAY_BE_UNSAFE: &[&str] =
    &["ls-sync", "ls-io", "ls-cpu", "ls-cuda", "ls-opencl", "ls-hash", "ls-fuzz"];

fn root() -> PathBuf {
    // Of this run, not of the build: checkouts may share a folder of builds.
    let own = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where the test is from");
    Path::new(&own).ancestors().nth(2).expect("tools/tidy is two below").to_owned()
}

/// Files that git tracks or would track.
fn files() -> Vec<PathBuf> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git runs");
    let names = String::from_utf8(listed.stdout).expect("file names are UTF-8");
    names.lines().map(|name| root().join(name)).filter(|path| path.is_file()).collect()
}

fn rust_files() -> Vec<(PathBuf, String)> {
    files()
        .into_iter()
        .filter(|path| path.extension().is_some_and(|e| e == "rs"))
        .map(|path| {
            let text = std::fs::read_to_string(&path).expect("sources are UTF-8");
            (path, text)
        })
        .collect()
}

fn report(rule: &str, broken: &[String]) {
    assert!(broken.is_empty(), "{rule}:\n  {}", broken.join("\n  "));
}

fn metadata() -> serde_json::Value {
    let out = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("cargo prints JSON")
}

/// Every crate's direct normal dependencies, by name.
fn dependencies(metadata: &serde_json::Value) -> BTreeMap<String, BTreeSet<String>> {
    let packages = metadata["packages"].as_array().expect("packages are listed");
    let name_of: BTreeMap<&str, &str> = packages
        .iter()
        .map(|p| (p["id"].as_str().expect("an id"), p["name"].as_str().expect("a name")))
        .collect();
    let nodes = metadata["resolve"]["nodes"].as_array().expect("the graph is resolved");
    let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for node in nodes {
        let name = name_of[node["id"].as_str().expect("an id")];
        let used = node["deps"].as_array().expect("deps are listed").iter().filter(|dep| {
            dep["dep_kinds"]
                .as_array()
                .is_some_and(|kinds| kinds.iter().any(|k| k["kind"].is_null()))
        });
        let names = used.map(|dep| name_of[dep["pkg"].as_str().expect("an id")].to_owned());
        all.entry(name.to_owned()).or_default().extend(names);
    }
    all
}

#[test]
fn our_crates_depend_on_each_other_in_one_direction() {
    let all = dependencies(&metadata());
    let mut broken = Vec::new();
    for (name, used) in all.iter().filter(|(name, _)| name.starts_with("ls-")) {
        let allowed = MAY_USE.iter().find(|(n, _)| n == name).map_or(&[][..], |(_, list)| list);
        for used in used.iter().filter(|u| u.starts_with("ls-") && !allowed.contains(&u.as_str())) {
            broken.push(format!("{name} uses {used}"));
        }
    }
    report("the map of who may use whom is in MAY_USE", &broken);
}

#[test]
fn what_runs_on_a_device_stays_thin() {
    let all = dependencies(&metadata());
    let mut seen = BTreeSet::new();
    let mut open = vec!["ls-run".to_owned()];
    while let Some(name) = open.pop() {
        if seen.insert(name.clone()) {
            open.extend(all.get(&name).into_iter().flatten().cloned());
        }
    }
    let broken: Vec<_> =
        NOT_ON_DEVICE.iter().filter(|n| seen.contains(**n)).map(|n| (*n).to_owned()).collect();
    report("ls-run must not link training or server crates", &broken);
    let list: String =
        seen.iter().filter(|n| !n.starts_with("ls-")).map(|n| format!("{n}\n")).collect();
    let allowed_path = root().join("tools/tidy/ls-run-tree.txt");
    let allowed = std::fs::read_to_string(&allowed_path).unwrap_or_default();
    if list != allowed {
        std::fs::write(&allowed_path, &list).expect("the list can be written");
        panic!(
            "ls-run's dependency tree changed; the new list is in {}: review the diff",
            allowed_path.display()
        );
    }
}

#[test]
fn unsafe_code_is_where_it_is_expected() {
    let mut broken = Vec::new();
    for package in metadata()["packages"].as_array().expect("packages are listed") {
        let name = package["name"].as_str().expect("a name");
        if !name.starts_with("ls-") || MAY_BE_UNSAFE.contains(&name) {
            continue;
        }
        for target in package["targets"].as_array().expect("targets are listed") {
            let kinds = target["kind"].as_array().expect("kinds are listed");
            if kinds.iter().any(|k| k == "lib" || k == "bin") {
                let path = target["src_path"].as_str().expect("a path");
                let text = std::fs::read_to_string(path).expect("sources are UTF-8");
                if !text.contains("#![forbid(unsafe_code)]") {
                    broken.push(format!("{name}: {path}"));
                }
            }
        }
    }
    report("crates outside MAY_BE_UNSAFE start with #![forbid(unsafe_code)]", &broken);
}

/// The licences that `deny.toml` allows.
fn allowed_licences() -> Vec<String> {
    let text = std::fs::read_to_string(root().join("deny.toml")).expect("it is there");
    let list = text.split("[licenses]").nth(1).and_then(|rest| rest.split(']').next());
    let list = list.expect("a list of licences").split('"').skip(1).step_by(2);
    list.map(str::to_owned).collect()
}

/// Whether an expression is met by what is allowed: one of several by OR, all by AND.
fn is_allowed(licence: &str, allowed: &[String]) -> bool {
    let licence = licence.replace(['(', ')'], "").replace('/', " OR ");
    let part = |part: &str| part.split(" OR ").any(|name| allowed.iter().any(|a| a == name.trim()));
    licence.split(" AND ").all(part)
}

#[test]
fn what_others_wrote_may_be_used_and_comes_from_the_registry() {
    let metadata = metadata();
    let allowed = allowed_licences();
    let mut broken = Vec::new();
    for package in metadata["packages"].as_array().expect("packages are listed") {
        let name = package["name"].as_str().expect("a name");
        let licence = package["license"].as_str().unwrap_or("none");
        if !is_allowed(licence, &allowed) {
            broken.push(format!("{name}: {licence}"));
        }
        let source = package["source"].as_str();
        if source.is_some_and(|source| !source.starts_with("registry+")) {
            broken.push(format!("{name} comes from {source:?}"));
        }
    }
    report("licences and sources are those that deny.toml allows", &broken);
    assert!(!is_allowed("GPL-3.0", &allowed) && !is_allowed("MIT AND GPL-3.0", &allowed));
}

#[test]
fn the_codec_that_nobody_maintains_is_in_one_place() {
    let mut broken = Vec::new();
    for (name, used) in dependencies(&metadata()) {
        if used.contains("bincode") && name != "ls-bundle" {
            broken.push(name);
        }
    }
    for (path, text) in rust_files() {
        let of_bundle =
            path.ends_with("runtime/bundle/src/codec.rs") || path.ends_with("tests/forge/mod.rs");
        if text.contains("bincode::") && !of_bundle && !path.ends_with("tidy/tests/tidy.rs") {
            broken.push(path.display().to_string());
        }
    }
    report(
        "bincode has no maintainer: only the bundle's codec, and what forges bundles, may use it",
        &broken,
    );
}

#[test]
fn files_and_functions_can_be_read_at_once() {
    let mut broken = Vec::new();
    for (path, text) in rust_files() {
        let lines: Vec<&str> = text.lines().collect();
        if lines.len() > MAX_FILE_LINES {
            broken.push(format!(
                "{}: {} lines (at most {MAX_FILE_LINES})",
                path.display(),
                lines.len()
            ));
        }
        for (start, line) in lines.iter().enumerate() {
            let body = line.trim_start();
            let is_function = [
                "fn ",
                "pub fn ",
                "pub(crate) fn ",
                "pub(super) fn ",
                "unsafe fn ",
                "pub unsafe fn ",
            ]
            .iter()
            .any(|prefix| body.starts_with(prefix));
            if !is_function {
                continue;
            }
            // rustfmt closes a function at the indentation it was opened with.
            let indent = &line[..line.len() - body.len()];
            let closing = format!("{indent}}}");
            let ends_here = |l: &&str| {
                **l == closing
                    || (l.trim_end().ends_with(';')
                        && l.starts_with(indent)
                        && !l[indent.len()..].starts_with(' '))
            };
            let length = lines[start..].iter().position(ends_here).map_or(0, |n| n + 1);
            if length > MAX_FUNCTION_LINES {
                broken.push(format!(
                    "{}:{}: a function of {length} lines",
                    path.display(),
                    start + 1
                ));
            }
        }
    }
    report("a file or function that is too long hides its story", &broken);
}

#[test]
fn lints_are_expected_with_a_reason_not_allowed() {
    let mut broken = Vec::new();
    for (path, text) in rust_files() {
        for (number, line) in text.lines().enumerate() {
            let found = line.trim_start().starts_with("#[allow(")
                || line.trim_start().starts_with("#![allow(");
            if found {
                broken.push(format!("{}:{}", path.display(), number + 1));
            }
        }
    }
    report(
        "use #[expect(lint, reason = \"…\")], which says why and tells when it is no longer needed",
        &broken,
    );
}

#[test]
fn links_in_documents_lead_somewhere() {
    let mut broken = Vec::new();
    for path in files().into_iter().filter(|p| p.extension().is_some_and(|e| e == "md")) {
        let text = std::fs::read_to_string(&path).expect("documents are UTF-8");
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = target.split('#').next().unwrap_or_default();
            let outside = target.is_empty() || target.contains("://") || target.contains(' ');
            let folder = path.parent().expect("a file has a folder");
            if !outside && !folder.join(target).exists() {
                broken.push(format!("{}: {target}", path.display()));
            }
        }
    }
    report("a link to a file must lead to one", &broken);
}
