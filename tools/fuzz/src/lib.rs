//! Everything that LeanStream reads and did not write itself, fed with damage: fuzzing without a fuzzer.
//!
//! A [`target`] reads bytes as one of our programs would. [`mutation`] makes hostile ones from a small committed corpus,
//! from a seed, so that an input is known by its number; where a checksum guards them, it is made right again, or no
//! damage would get past it. [`campaign`] runs inputs by the million and holds each to its promises: no panic, no more
//! than a second, no more than 64 MiB at once.
//!
//! `make fuzz MINUTES=n` runs all targets; `cargo test -p ls-fuzz` runs each over its first seeds. The corpus is made by
//! `cargo run -p ls-fuzz --example corpus`.

mod allocations;
pub mod campaign;
pub mod mutation;
pub mod target;
mod targets;

/// All programs and tests that link this crate count.
#[global_allocator]
static ALLOCATOR: allocations::Counting = allocations::Counting;
