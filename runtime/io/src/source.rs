//! [`Source`]: an open file, and how it must be read.
//!
//! Whether direct I/O works is found out here, with a read, before anybody plans memory by its alignment: file systems
//! refuse it at open (`EINVAL`), at the first read (`EINVAL`), or say so through `statx`. Then reads are buffered: the
//! kernel is told not to read ahead, and pages are dropped as soon as they were copied.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use ls_sync::Slot;

use crate::error::{IoError, Kind};
use crate::store::Alignment;

/// What every disk and file system that knows direct I/O can be expected to accept.
const SAFE_ALIGNMENT: u32 = 4096;

/// Larger demands of a file system are not worth their memory.
const MAX_ALIGNMENT: u32 = 64 * 1024;

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
}

impl Source {
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
        advise(&file, 0, 0, libc::POSIX_FADV_RANDOM);
        let rules = Rules { path: path.clone(), len, alignment: Alignment::NONE };
        Ok(Source { file, rules, direct: false })
    }

    fn open_direct(path: &Arc<Path>) -> io::Result<Source> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
        let len = length(&file)?;
        let alignment = prove_alignment(&file, len)?;
        let rules = Rules { path: path.clone(), len, alignment };
        Ok(Source { file, rules, direct: true })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Drops the pages that a buffered read of this range left in the cache.
    pub(crate) fn forget(&self, (offset, len): (u64, usize)) {
        if self.direct {
            return;
        }
        // Only whole pages are dropped, so the range is widened to them.
        let page = rustix::param::page_size() as u64;
        let start = offset - offset % page;
        let end = offset.saturating_add(len as u64).div_ceil(page).saturating_mul(page);
        advise(&self.file, start, end - start, libc::POSIX_FADV_DONTNEED);
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
fn advise(file: &File, offset: u64, len: u64, advice: i32) {
    // SAFETY: the descriptor is open; the call touches no memory of ours.
    unsafe {
        libc::posix_fadvise(file.as_raw_fd(), offset as libc::off_t, len as libc::off_t, advice)
    };
}

/// The smallest alignment known to work: the kernel's word where it gives one, otherwise 512 if a read at 512 succeeds,
/// otherwise 4096 or the file system's block size. `EINVAL` where none does.
fn prove_alignment(file: &File, len: u64) -> io::Result<Alignment> {
    let refused = || io::Error::from_raw_os_error(libc::EINVAL);
    if let Some(told) = told_alignment(file) {
        let usable = |n: u32| n.is_power_of_two() && n <= MAX_ALIGNMENT;
        if !usable(told.offset) || !usable(told.memory) {
            return Err(refused());
        }
        // Slots start at pages; a coarser demand on memory could not be kept.
        if told.memory as usize > rustix::param::page_size() {
            return Err(refused());
        }
        // Old disks behind new kernels: below 512 nothing is gained.
        let told = Alignment { offset: told.offset.max(512), memory: told.memory.max(512) };
        return proven(file, told, len).then_some(told).ok_or_else(refused);
    }
    let block_bytes = u32::try_from(file.metadata()?.blksize()).unwrap_or(SAFE_ALIGNMENT);
    let block_bytes = block_bytes.clamp(SAFE_ALIGNMENT, MAX_ALIGNMENT).next_power_of_two();
    [512, SAFE_ALIGNMENT, block_bytes]
        .into_iter()
        .map(|offset| Alignment { offset, memory: offset.min(SAFE_ALIGNMENT) })
        .find(|&candidate| proven(file, candidate, len))
        .ok_or_else(refused)
}

/// `STATX_DIOALIGN` (Linux 6.1); offset 0 means that direct I/O is not supported.
fn told_alignment(file: &File) -> Option<Alignment> {
    use rustix::fs::{AtFlags, StatxFlags, statx};
    let told = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let known = told.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    known.then_some(Alignment { offset: told.stx_dio_offset_align, memory: told.stx_dio_mem_align })
}

/// Whether a direct read with exactly this alignment succeeds: one unit, at an offset and into memory that are no
/// multiples of anything larger. A file too short for that proves only alignments of 4096 and up.
fn proven(file: &File, alignment: Alignment, len: u64) -> bool {
    let unit = alignment.offset as usize;
    let offset = if len >= 2 * unit as u64 { unit } else { 0 };
    if offset == 0 && alignment.offset < SAFE_ALIGNMENT {
        return false;
    }
    let Ok(mut slot) = Slot::allocate(unit + alignment.memory as usize) else { return false };
    let mut into = slot.split_off(alignment.memory as usize);
    pread(file.as_raw_fd(), &mut into.bytes_mut()[..unit], offset as u64).is_ok()
}

/// One `pread`: bytes read, or the error number.
pub(crate) fn pread(fd: RawFd, into: &mut [u8], offset: u64) -> Result<usize, i32> {
    let Ok(offset) = libc::off_t::try_from(offset) else { return Err(libc::EINVAL) };
    // SAFETY: the kernel writes at most `into.len()` bytes to `into`, which is borrowed for the call.
    let n = unsafe { libc::pread(fd, into.as_mut_ptr().cast(), into.len(), offset) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}
