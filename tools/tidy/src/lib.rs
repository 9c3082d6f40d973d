//! Rules of this repository that no compiler checks, as tests: `cargo test -p ls-tidy`.
//!
//! Each rule prints every place that breaks it, and why the rule is there. Rules that clippy or rustc can check are
//! theirs (see `[workspace.lints]`).
#![forbid(unsafe_code)]
