//! Checking the bytes of Data, which opening a bundle does not read.

use crate::blocks::Block;
use crate::checksum;
use crate::codec;
use crate::error::{BundleError, Kind};
use crate::header::SectionKind;
use crate::ids::BlockId;
use crate::reader::Bundle;

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

    fn check_data(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), Kind> {
        let data = self.data_extent();
        let mut buffer = Vec::new();
        for block in self.blocks() {
            buffer.resize(block.extent.len as usize, 0);
            self.source.read_at(block.extent.offset, &mut buffer)?;
            check_block(&block, &buffer, self.stored_checksum(block.id)?)?;
            progress(block.extent.end() - data.offset, data.len);
        }
        let end = self.weights_end();
        buffer.resize((data.end() - end) as usize, 0);
        self.source.read_at(end, &mut buffer)?;
        check_zeros(&buffer).map_err(|index| {
            Kind::corrupt(format!("padding at {}", end + index as u64), "it is not zero")
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

fn check_block(block: &Block, bytes: &[u8], checksum: u64) -> Result<(), Kind> {
    let corrupt = |flaw: String| {
        let at = format!("{} ({} bytes at {})", block.name, block.extent.len, block.extent.offset);
        Err(Kind::corrupt(at, flaw))
    };
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
