#![doc = include_str!("../FORMAT.md")]
#![forbid(unsafe_code)]

pub mod base;
pub mod blocks;
pub mod checksum;
mod codec;
mod error;
pub mod extent;
pub mod files;
mod header;
pub mod identity;
pub mod ids;
pub mod limits;
pub mod low_bit;
pub mod model;
pub mod placement;
pub mod plan;
mod reader;
pub mod tables;
pub mod tiles;
mod validate;
mod verify;
pub mod vocabulary;
mod writer;

pub use error::{BundleError, ErrorClass};
pub use header::{FORMAT_VERSION, MAGIC, Section, SectionKind};
pub use plan::plan_weights;
pub use reader::{BlockChecksums, Bundle};
pub use verify::BlockCheck;
pub use writer::{BundleParts, BundleWriter};
