//! The public behaviour of stacks.

mod allocations;
mod corrupt;
#[path = "../../../engine/tests/counting/mod.rs"]
mod counting;
mod plain;
mod stack;
