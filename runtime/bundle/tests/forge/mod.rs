//! Bundles that lie: takes a valid one apart, lets a test change anything, and makes all checksums right again.

use ls_bundle::SectionKind;
use serde::Serialize;
use serde::de::DeserializeOwned;
use xxhash_rust::xxh3::xxh3_64;

pub(crate) struct Forge {
    /// The file; sections are changed in place.
    pub(crate) bytes: Vec<u8>,
    pub(crate) header: Header,
    pub(crate) table: Vec<Entry>,
}

/// The header's fields that can lie.
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) sections: u32,
    pub(crate) total_len: u64,
    pub(crate) table_offset: u64,
    pub(crate) unused: [u8; 16],
}

#[derive(Clone)]
pub(crate) struct Entry {
    pub(crate) kind: u32,
    pub(crate) unused: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) checksum: u64,
}

impl Forge {
    pub(crate) fn new(bytes: Vec<u8>) -> Forge {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let header = Header {
            version: u32_at(8),
            sections: u32_at(12),
            total_len: u64_at(16),
            table_offset: u64_at(24),
            unused: bytes[40..56].try_into().unwrap(),
        };
        let entries = (0..header.sections as usize).map(|index| 64 + 32 * index);
        let table = entries.map(|at| Entry {
            kind: u32_at(at),
            unused: u32_at(at + 4),
            offset: u64_at(at + 8),
            len: u64_at(at + 16),
            checksum: u64_at(at + 24),
        });
        Forge { table: table.collect(), header, bytes }
    }

    pub(crate) fn entry(&mut self, kind: SectionKind) -> &mut Entry {
        self.table.iter_mut().find(|entry| entry.kind == kind as u32).unwrap()
    }

    pub(crate) fn section(&mut self, kind: SectionKind) -> &mut [u8] {
        let Entry { offset, len, .. } = *self.entry(kind);
        &mut self.bytes[offset as usize..][..len as usize]
    }

    /// Overwrites bytes of a section.
    pub(crate) fn put(&mut self, kind: SectionKind, at: usize, bytes: &[u8]) {
        self.section(kind)[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Changes a coded section, which must not grow.
    pub(crate) fn recode<T: Serialize + DeserializeOwned>(
        &mut self,
        kind: SectionKind,
        change: impl FnOnce(&mut T),
    ) {
        let config = bincode::config::standard().with_fixed_int_encoding();
        let (mut value, _) = bincode::serde::decode_from_slice(self.section(kind), config).unwrap();
        change(&mut value);
        let bytes = bincode::serde::encode_to_vec(&value, config).unwrap();
        self.put(kind, 0, &bytes);
    }

    /// Makes the sections' checksums right, as far as sections lie within the file.
    pub(crate) fn reseal_sections(&mut self) {
        let mut last = 0;
        for entry in &mut self.table {
            let Ok(start) = usize::try_from(entry.offset) else { continue };
            let Some(end) = start.checked_add(entry.len as usize) else { continue };
            if let Some(bytes) = self.bytes.get(start..end) {
                let data = entry.kind == SectionKind::Data as u32;
                entry.checksum = if data { last } else { xxh3_64(bytes) };
                last = entry.checksum;
            }
        }
    }

    /// Writes table and header with right checksums.
    pub(crate) fn seal(mut self) -> Vec<u8> {
        let mut table = Vec::new();
        for entry in &self.table {
            table.extend_from_slice(&entry.kind.to_le_bytes());
            table.extend_from_slice(&entry.unused.to_le_bytes());
            table.extend_from_slice(&entry.offset.to_le_bytes());
            table.extend_from_slice(&entry.len.to_le_bytes());
            table.extend_from_slice(&entry.checksum.to_le_bytes());
        }
        let header = &self.header;
        let mut front = self.bytes[..8].to_vec();
        front.extend_from_slice(&header.version.to_le_bytes());
        front.extend_from_slice(&header.sections.to_le_bytes());
        front.extend_from_slice(&header.total_len.to_le_bytes());
        front.extend_from_slice(&header.table_offset.to_le_bytes());
        front.extend_from_slice(&xxh3_64(&table).to_le_bytes());
        front.extend_from_slice(&header.unused);
        front.extend_from_slice(&[0; 8]);
        let checksum = xxh3_64(&front);
        front[56..].copy_from_slice(&checksum.to_le_bytes());
        self.bytes[..64].copy_from_slice(&front);
        self.bytes[64..64 + table.len()].copy_from_slice(&table);
        self.bytes
    }
}
