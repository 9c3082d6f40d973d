//! What the crate promises. Each file shows one part.

mod allocations;
mod bellman;
mod files;
mod policies;
mod profiles;
