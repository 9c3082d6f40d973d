//! [`Source`]: an open file, and how it must be read.
//!
//! Whether direct I/O works is found out here, with a read, before anybody plans memory by its alignment: file systems
//! refuse it at open (`EINVAL`), at the first read (`EINVAL`), or say so through `statx`. Then reads are buffered: the
//! kernel is told not to read ahead, and pages are dropped as soon as they were copied.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use ls_sync::Slot;
use rustix::fs::{Advice, AtFlags, StatxFlags, fadvise, statx};
use rustix::io::{Errno, pread};
use rustix::param::page_size;

use crate::error::{IoError, Kind};
use crate::store::Alignment;

/// Larger demands of a file system are not worth their memory.
const MAX_ALIGNMENT: usize = 64 * 1024;

/// What reads of a file must keep to.
#[derive(Debug)]
pub(crate) struct Rules {
    /// For error texts.
    pub(crate) path: Arc<Path>,
    /// Bytes in the file when it was opened.
    pub(crate) len: u64,
    pub(crate) alignment: Alignment,
}

/// A file open for reading.
#[derive(Debug)]
pub(crate) struct Source {
    file: File,
    pub(crate) rules: Rules,
    pub(crate) direct: bool,
    /// Reads may leave pages in the cache. Before the kernel could tell, some file systems accepted direct reads of
    /// compressed or encrypted files and quietly buffered them.
    caches: bool,
}

impl Source {
    /// Gives up the pages of this file that are in the cache: what was read before this source was opened, the small
    /// parts of a bundle for one, would count against a memory limit for as long as the file is used.
    pub(crate) fn drop_cached(&self) {
        advise(&self.file, 0, 0, Advice::DontNeed);
    }

    /// Opens `path`; directly if `direct` and possible, with a warning if only the latter fails.
    pub(crate) fn open(
        path: &Path,
        direct: bool,
        warnings: &mut Vec<String>,
    ) -> Result<Source, IoError> {
        let path: Arc<Path> = path.into();
        let opened = if direct { Source::open_direct(&path) } else { Source::open_buffered(&path) };
        opened
            .or_else(|e| {
                if !direct || !refuses_direct(&e) {
                    return Err(e);
                }
                warnings.push(format!(
                    "{}: direct reads are refused here ({e}): reading through the page cache and dropping it behind",
                    path.display()
                ));
                Source::open_buffered(&path)
            })
            .map_err(|source| Kind::Open { path: path.clone(), source }.into())
    }

    fn open_buffered(path: &Arc<Path>) -> io::Result<Source> {
        let file = File::open(path)?;
        let len = length(&file)?;
        advise(&file, 0, 0, Advice::Random);
        let rules = Rules { path: path.clone(), len, alignment: Alignment::NONE };
        Ok(Source { file, rules, direct: false, caches: true })
    }

    fn open_direct(path: &Arc<Path>) -> io::Result<Source> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
        let len = length(&file)?;
        let (alignment, told) = prove_alignment(&file, len)?;
        let rules = Rules { path: path.clone(), len, alignment };
        Ok(Source { file, rules, direct: true, caches: !told })
    }

    /// Buffered reads of an open file that is said to be `len` bytes long.
    #[cfg(test)]
    pub(crate) fn over(file: File, len: u64) -> Source {
        let rules = Rules { path: Path::new("test").into(), len, alignment: Alignment::NONE };
        Source { file, rules, direct: false, caches: false }
    }

    #[cfg(all(target_os = "linux", target_pointer_width = "64"))]
    pub(crate) fn fd(&self) -> std::os::fd::RawFd {
        std::os::fd::AsRawFd::as_raw_fd(&self.file)
    }

    /// Bytes read, or the error number.
    pub(crate) fn read(&self, into: &mut [u8], offset: u64) -> Result<usize, i32> {
        pread(&self.file, into, offset).map_err(Errno::raw_os_error)
    }

    /// Drops the pages that a read of this range left in the cache.
    pub(crate) fn forget(&self, (offset, len): (u64, usize)) {
        if !self.caches {
            return;
        }
        // Only whole pages are dropped, so the range is widened to them.
        let page = page_size() as u64;
        let start = offset - offset % page;
        let end = offset.saturating_add(len as u64).div_ceil(page).saturating_mul(page);
        advise(&self.file, start, end - start, Advice::DontNeed);
    }
}

fn refuses_direct(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

/// The length of a regular file or block device; a pipe or folder is an error.
fn length(file: &File) -> io::Result<u64> {
    let data = file.metadata()?;
    if data.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    if data.is_file() {
        return Ok(data.len());
    }
    io::Seek::seek(&mut &*file, io::SeekFrom::End(0))
}

/// Advice is only ever advice: a kernel that does not take it reads the same bytes.
fn advise(file: &File, offset: u64, len: u64, advice: Advice) {
    let _not_taken = fadvise(file, offset, NonZeroU64::new(len), advice);
}

/// The smallest alignment known to work, and whether it is the kernel's word. Otherwise 512 if a read at 512 succeeds,
/// then 4096, then the file system's block size. `EINVAL` where none does.
fn prove_alignment(file: &File, len: u64) -> io::Result<(Alignment, bool)> {
    let refused = || io::Error::from_raw_os_error(libc::EINVAL);
    if let Some(told) = told_alignment(file) {
        let usable = |n: u32, most: usize| n.is_power_of_two() && n as usize <= most;
        // Slots start at pages; a coarser demand on memory could not be kept.
        if !usable(told.offset, MAX_ALIGNMENT) || !usable(told.memory, page_size()) {
            return Err(refused());
        }
        // Below 512 nothing is gained.
        let told = Alignment { offset: told.offset.max(512), memory: told.memory.max(512) };
        return if works(file, told, 0)? { Ok((told, true)) } else { Err(refused()) };
    }
    let block_bytes = usize::try_from(file.metadata()?.blksize()).unwrap_or(MAX_ALIGNMENT);
    let block_bytes = block_bytes.clamp(4096, MAX_ALIGNMENT).next_power_of_two() as u32;
    for offset in [512, 4096, block_bytes] {
        let candidate = Alignment { offset, memory: offset.min(4096) };
        // At the second unit, which is a multiple of nothing larger. Where the file is too short for that, 512 stays
        // unproven.
        let second = u64::from(offset);
        let (at, proves) = if len >= 2 * second { (second, true) } else { (0, offset >= 4096) };
        if proves && works(file, candidate, at)? {
            return Ok((candidate, false));
        }
    }
    Err(refused())
}

/// `STATX_DIOALIGN` (Linux 6.1); offset 0 means that direct I/O is not supported.
fn told_alignment(file: &File) -> Option<Alignment> {
    let told = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let known = told.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    known.then_some(Alignment { offset: told.stx_dio_offset_align, memory: told.stx_dio_mem_align })
}

/// Whether one unit can be read at `offset` into memory that is aligned to nothing larger.
fn works(file: &File, alignment: Alignment, offset: u64) -> io::Result<bool> {
    let memory = Slot::allocate((alignment.memory + alignment.offset) as usize);
    let mut memory = memory.map_err(|e| e.source)?;
    match pread(file, &mut memory.bytes_mut()[alignment.memory as usize..], offset) {
        Ok(_) => Ok(true),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(false),
        Err(e) => Err(e.into()),
    }
}
