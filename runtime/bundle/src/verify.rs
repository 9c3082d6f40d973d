//! Checking the bytes of Data, which opening a bundle does not read.

use crate::blocks::Block;
use crate::checksum::{self, Running};
use crate::codec;
use crate::error::{BundleError, Kind};
use crate::header::SectionKind;
use crate::ids::BlockId;
use crate::reader::{self, Bundle};

impl Bundle {
    /// Reads all of Data in the order of the file and checks every block's checksum and padding, and the zeros at the
    /// end. Holds one block at a time. `progress` is told the bytes done and their total, once a block.
    ///
    /// # Errors
    /// Names the first bad block, or says what the operating system said.
    pub fn verify(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), BundleError> {
        self.check_data(progress).map_err(|kind| kind.of(self.path()))
    }

    /// Checks the bytes of one block, read from its extent, padding included. Reads its checksum from the file if
    /// the bundle was opened without. Panics if there is no such block.
    ///
    /// # Errors
    /// The bytes are not those that were written.
    pub fn verify_block(&self, id: BlockId, bytes: &[u8]) -> Result<(), BundleError> {
        let check = || {
            let block = self.block(id).expect("the id is one of this bundle");
            check_block(&block, bytes, self.stored_checksum(id)?)
        };
        check().map_err(|kind: Kind| kind.of(self.path()))
    }

    /// Begins to check a block whose bytes come in pieces. Panics if there is no such block.
    ///
    /// # Errors
    /// Its checksum cannot be read: the bundle was opened without.
    pub fn check_in_pieces(&self, id: BlockId) -> Result<BlockCheck<'_>, BundleError> {
        let checksum = self.stored_checksum(id).map_err(|kind| kind.of(self.path()))?;
        let block = self.block(id).expect("the id is one of this bundle");
        let (found, len, is_padded) = (Running::new(), 0, true);
        Ok(BlockCheck { bundle: self, block, checksum, found, len, is_padded })
    }

    /// Reads a block and checks it. A bit may be flipped on its way from the disk, so one that fails is read once more.
    pub(crate) fn read_block(&self, block: &Block, bytes: &mut [u8]) -> Result<(), Kind> {
        let checksum = self.stored_checksum(block.id)?;
        reader::twice(|| {
            self.source.read_at(block.extent.offset, bytes)?;
            check_block(block, bytes, checksum)
        })
    }

    fn check_data(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), Kind> {
        let data = self.data_extent();
        let mut buffer = Vec::new();
        for block in self.blocks() {
            buffer.resize(block.extent.len as usize, 0);
            self.read_block(&block, &mut buffer)?;
            progress(block.extent.end() - data.offset, data.len);
        }
        let end = self.weights_end();
        buffer.resize((data.end() - end) as usize, 0);
        reader::twice(|| {
            self.source.read_at(end, &mut buffer)?;
            check_zeros(&buffer).map_err(|index| {
                Kind::corrupt(format!("padding at {}", end + index as u64), "it is not zero")
            })
        })?;
        progress(data.len, data.len);
        Ok(())
    }

    fn stored_checksum(&self, id: BlockId) -> Result<u64, Kind> {
        if let Some(checksum) = self.block_checksum(id) {
            return Ok(checksum);
        }
        let section = self.section(SectionKind::BlockChecksums);
        let mut bytes = [0; 8];
        self.source.read_at(section.extent.offset + 8 * u64::from(id.0), &mut bytes)?;
        Ok(codec::checksums(&bytes).next().expect("eight bytes are one checksum"))
    }
}

/// See [`Bundle::check_in_pieces`].
pub struct BlockCheck<'a> {
    bundle: &'a Bundle,
    block: Block,
    /// As stored.
    checksum: u64,
    found: Running,
    len: u64,
    /// All bytes behind the weights were zero so far.
    is_padded: bool,
}

impl std::fmt::Debug for BlockCheck<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BlockCheck({}, {} bytes)", self.block.name, self.len)
    }
}

impl BlockCheck<'_> {
    /// Takes the next bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        let weights_left = self.block.weight_bytes.saturating_sub(self.len).min(bytes.len() as u64);
        self.is_padded &= check_zeros(&bytes[weights_left as usize..]).is_ok();
        self.found.add(bytes);
        self.len += bytes.len() as u64;
    }

    /// All bytes were given.
    ///
    /// # Errors
    /// They are not those that were written.
    pub fn finish(self) -> Result<(), BundleError> {
        let flaw = if self.len != self.block.extent.len {
            format!("{} bytes were given", self.len)
        } else if self.found.finish() != self.checksum {
            "its checksum does not match".to_owned()
        } else if !self.is_padded {
            "its padding is not zero".to_owned()
        } else {
            return Ok(());
        };
        Err(corrupt(&self.block, flaw).of(self.bundle.path()))
    }
}

fn corrupt(block: &Block, flaw: String) -> Kind {
    let Block { name, extent, .. } = block;
    Kind::corrupt(format!("{name} ({} bytes at {})", extent.len, extent.offset), flaw)
}

fn check_block(block: &Block, bytes: &[u8], checksum: u64) -> Result<(), Kind> {
    let corrupt = |flaw: String| Err(corrupt(block, flaw));
    if bytes.len() as u64 != block.extent.len {
        return corrupt(format!("{} bytes were given", bytes.len()));
    }
    if checksum::of(bytes) != checksum {
        return corrupt("its checksum does not match".into());
    }
    // A checksum may cover padding that was never zero.
    match check_zeros(&bytes[block.weight_bytes as usize..]) {
        Ok(()) => Ok(()),
        Err(index) => {
            corrupt(format!("padding byte {} is not zero", block.weight_bytes + index as u64))
        }
    }
}

/// Where the first byte other than zero is.
fn check_zeros(bytes: &[u8]) -> Result<(), usize> {
    bytes.iter().position(|&byte| byte != 0).map_or(Ok(()), Err)
}
