//! What reading leaves behind in the page cache.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;

use ls_io::{BlockRead, Prefer, StoreOptions, Wait, open, window};
use ls_sync::Slot;
use tempfile::NamedTempFile;

const FILE_BYTES: usize = 8 << 20;

/// Pages of the file that are in memory.
fn cached_pages(file: &File) -> usize {
    let page = rustix::param::page_size();
    let mut state = vec![0u8; FILE_BYTES.div_ceil(page)];
    // SAFETY: a new shared read-only mapping that is only asked about, never read; `state` has a byte for each page.
    unsafe {
        let map = libc::mmap(
            std::ptr::null_mut(),
            FILE_BYTES,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        );
        assert_ne!(map, libc::MAP_FAILED);
        assert_eq!(libc::mincore(map, FILE_BYTES, state.as_mut_ptr()), 0);
        libc::munmap(map, FILE_BYTES);
    }
    state.iter().filter(|&&s| s & 1 != 0).count()
}

/// Empties the cache of the file; `None` where that is impossible, as on tmpfs.
fn empty_cache(file: &File) -> Option<()> {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    (cached_pages(file) == 0).then_some(())
}

/// Reads the file in pieces of 100 KB that do not care about pages.
fn read_all(path: &Path, options: &StoreOptions) -> Option<()> {
    let mut store = open(path, options).ok()?.store;
    let mut offset = 0;
    while offset < FILE_BYTES as u64 || store.in_flight() > 0 {
        let len = 100_000.min(FILE_BYTES as u64 - offset);
        if len > 0 && store.in_flight() < store.depth() {
            let (start, len_aligned) = window(offset, len, store.alignment());
            let into = Slot::allocate(len_aligned).unwrap();
            store.submit(BlockRead { offset: start, len: len_aligned, into, tag: 0 }).unwrap();
            offset += len;
            continue;
        }
        store.reap(Wait::One, &mut |completion| completion.result.unwrap()).unwrap();
    }
    Some(())
}

#[test]
fn reads_leave_almost_no_page_in_the_cache() {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&vec![3; FILE_BYTES]).unwrap();
    file.as_file().sync_all().unwrap();
    if empty_cache(file.as_file()).is_none() {
        return;
    }
    for direct in [true, false] {
        for prefer in [Prefer::Uring, Prefer::Pread] {
            read_all(file.path(), &StoreOptions { depth: 4, prefer, direct });
            let pages = cached_pages(file.as_file());
            assert!(pages <= 8, "{prefer:?} direct={direct}: {pages} pages");
        }
    }
    // The instrument works: an ordinary read is seen.
    std::fs::read(file.path()).unwrap();
    assert!(cached_pages(file.as_file()) > 1000);
}

#[test]
fn opening_gives_up_what_was_cached_before() {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&vec![7; FILE_BYTES]).unwrap();
    file.as_file().sync_all().unwrap();
    if empty_cache(file.as_file()).is_none() {
        eprintln!("this file system is the page cache itself: nothing to check");
        return;
    }
    assert_eq!(std::fs::read(file.path()).unwrap().len(), FILE_BYTES);
    assert!(cached_pages(file.as_file()) > FILE_BYTES / 4096 / 2, "a plain read fills the cache");
    let opened = open(file.path(), &StoreOptions::default()).unwrap();
    assert!(cached_pages(file.as_file()) <= 8, "{} pages are left", cached_pages(file.as_file()));
    drop(opened);
}
