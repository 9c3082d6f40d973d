//! The largest numbers that a bundle may hold. They are far above any model meant for small devices and far below
//! what could overflow a `u64` or exhaust memory: with them every product in this crate fits, and opening a file,
//! however hostile, takes less than 64 MiB.

use crate::header::SectionKind;

/// Transformer layers.
pub const MAX_LAYERS: u16 = 1024;
/// Width of the residual stream.
pub const MAX_HIDDEN: u32 = 1 << 16;
/// Neurons of one FFN.
pub const MAX_FFN_HIDDEN: u32 = 1 << 20;
/// Rows of the embedding table.
pub const MAX_VOCAB: u32 = 1 << 20;
/// Query heads.
pub const MAX_HEADS: u32 = 1 << 10;
/// Width of one head.
pub const MAX_HEAD_DIM: u32 = 1 << 10;
/// Tokens of context.
pub const MAX_CONTEXT: u32 = 1 << 24;
/// Tokens that end generation.
pub const MAX_STOP_TOKENS: usize = 64;
/// Bytes of a name: the model's, the source's, the tool's.
pub const MAX_NAME_BYTES: usize = 256;
/// Bytes of the recipe's text.
pub const MAX_RECIPE_BYTES: usize = 32 << 10;
/// Bytes of one vocabulary entry.
pub const MAX_PIECE_BYTES: u32 = 4096;
/// Tiles and blocks together.
pub const MAX_BLOCKS: u32 = 1 << 21;
/// Tables: a few a layer.
pub const MAX_TABLES: usize = 4 * MAX_LAYERS as usize;
/// Bytes of one tile or block, padding included: what a reader must be able to hold to check it.
pub const MAX_BLOCK_BYTES: u64 = 8 << 20;
/// Entries of the section table.
pub const MAX_SECTIONS: u32 = 16;
/// All sections but Data together. Each is held once while a bundle is opened, so this bounds what opening takes.
pub const MAX_SMALL_BYTES: u64 = 48 << 20;

/// Bytes of the sections decoded by bincode, as constants because they are also its decode limits.
pub(crate) const MAX_IDENTITY_BYTES: usize = 64 << 10;
pub(crate) const MAX_MODEL_BYTES: usize = 64 << 10;
pub(crate) const MAX_WEIGHTS_BYTES: usize = 256 << 10;
pub(crate) const MAX_TABLES_BYTES: usize = 256 << 10;
pub(crate) const MAX_SETTINGS_BYTES: usize = 64;

/// The longest that a section of this kind may be, in bytes. Data is limited by the file alone.
#[must_use]
pub const fn max_section_bytes(kind: SectionKind) -> u64 {
    match kind {
        SectionKind::Identity => MAX_IDENTITY_BYTES as u64,
        SectionKind::Model => MAX_MODEL_BYTES as u64,
        SectionKind::Weights => MAX_WEIGHTS_BYTES as u64,
        SectionKind::Vectors => 24 << 20,
        SectionKind::Tokenizer => 24 << 20,
        SectionKind::Vocabulary => 12 << 20,
        SectionKind::ChatTemplate => 1 << 20,
        SectionKind::Placement => 16 << 20,
        SectionKind::Tables => MAX_TABLES_BYTES as u64,
        SectionKind::Settings => MAX_SETTINGS_BYTES as u64,
        SectionKind::BlockChecksums => 8 * MAX_BLOCKS as u64,
        SectionKind::Data => u64::MAX,
    }
}
