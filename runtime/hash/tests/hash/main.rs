//! The public behaviour of stacks.

mod allocations;
mod corrupt;
mod plain;
mod stack;
