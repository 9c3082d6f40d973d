//! What the crate promises. Each file shows one part.

mod allocations;
mod bellman;
#[path = "../../../engine/tests/counting/mod.rs"]
mod counting;
mod files;
mod policies;
mod profiles;
