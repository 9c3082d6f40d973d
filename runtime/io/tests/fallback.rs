//! What happens where the system forbids: a filter refuses one system call to one thread, as a sandbox does.

mod refusal;

use refusal::{Refusal, refuse};
use std::io::Write;
use std::path::Path;

use ls_io::{BlockRead, Opened, Prefer, StoreOptions, Wait, open};
use ls_sync::Slot;
use tempfile::NamedTempFile;

const FILE_BYTES: usize = 98_381;

fn file() -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..FILE_BYTES).map(|i| (i / 7) as u8).collect();
    file.write_all(&bytes).unwrap();
    file.as_file().sync_all().unwrap();
    file
}

/// Runs `check` in a thread of its own under refusals.
fn under(refusals: &[Refusal], check: impl FnOnce(&Path) + Send) {
    let file = file();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            refusals.iter().for_each(refuse);
            check(file.path());
        });
    });
}

/// Reads the whole file through the store and compares.
fn assert_same_bytes(opened: &mut Opened, path: &Path) {
    let store = &mut opened.store;
    let len = FILE_BYTES.next_multiple_of(store.alignment().offset as usize);
    let into = Slot::allocate(len).unwrap();
    store.submit(BlockRead { offset: 0, len, into, tag: 0 }).unwrap();
    let mut seen = Vec::new();
    store
        .reap(Wait::One, &mut |completion| {
            completion.result.unwrap();
            seen.extend_from_slice(&completion.read.into.bytes()[..FILE_BYTES]);
        })
        .unwrap();
    assert!(seen == std::fs::read(path).unwrap());
}

#[test]
fn without_io_uring_threads_read_and_one_warning_says_so() {
    for errno in [libc::EPERM, libc::ENOSYS, libc::ENOMEM] {
        let refusal = Refusal { call: libc::SYS_io_uring_setup, argument_bits: 0, errno };
        under(&[refusal], |path| {
            let mut opened = open(path, &StoreOptions::default()).unwrap();
            assert_eq!(opened.store.name(), "pread");
            assert_same_bytes(&mut opened, path);
            if opened.store.is_direct() {
                assert_eq!(opened.warnings.len(), 1, "{:?}", opened.warnings);
                assert!(opened.warnings[0].contains("io_uring"), "{:?}", opened.warnings);
            }
            let asked = StoreOptions { prefer: Prefer::Uring, ..StoreOptions::default() };
            assert_eq!(open(path, &asked).unwrap_err().errno(), Some(errno));
        });
    }
}

#[test]
fn a_ring_that_cannot_be_entered_is_given_up_at_open() {
    let refusal = Refusal { call: libc::SYS_io_uring_enter, argument_bits: 0, errno: libc::EPERM };
    under(&[refusal], |path| {
        let mut opened = open(path, &StoreOptions::default()).unwrap();
        assert_eq!(opened.store.name(), "pread");
        assert_same_bytes(&mut opened, path);
    });
}

#[test]
fn direct_reads_refused_at_open_become_buffered_ones_with_one_warning() {
    for errno in [libc::EINVAL, libc::EOPNOTSUPP] {
        let argument_bits = libc::O_DIRECT as u32;
        let refusal = Refusal { call: libc::SYS_openat, argument_bits, errno };
        under(&[refusal], assert_buffered);
    }
}

#[test]
fn direct_reads_refused_at_the_first_read_become_buffered_ones_with_one_warning() {
    // The proving reads are of 512 or 4096 bytes; the whole file's length has neither bit.
    let len = FILE_BYTES as u32;
    assert_eq!(len & (512 | 4096), 0, "choose another length");
    let refusal =
        Refusal { call: libc::SYS_pread64, argument_bits: 512 | 4096, errno: libc::EINVAL };
    under(&[refusal], assert_buffered);
}

#[test]
fn where_the_kernel_does_not_tell_the_alignment_512_must_be_proven() {
    let untold = || Refusal { call: libc::SYS_statx, argument_bits: 0, errno: libc::ENOSYS };
    let not_512 = || Refusal { call: libc::SYS_pread64, argument_bits: 512, errno: libc::EINVAL };
    let alignment = |path: &Path| {
        let mut opened = open(path, &StoreOptions::default()).unwrap();
        assert_same_bytes(&mut opened, path);
        opened.store.alignment().offset
    };
    under(&[untold()], |path| {
        // Some file systems refuse direct reads altogether.
        if alignment(path) == 1 {
            return;
        }
        assert_eq!(alignment(path), 512);
        // Too short for a read at 512.
        let mut short = NamedTempFile::new_in(path.parent().unwrap()).unwrap();
        short.write_all(&[1; 1000]).unwrap();
        let opened = open(short.path(), &StoreOptions::default()).unwrap();
        assert_eq!((opened.store.alignment().offset, opened.warnings), (4096, vec![]));
        refuse(&not_512());
        assert_eq!(alignment(path), 4096);
    });
}

fn assert_buffered(path: &Path) {
    let mut opened = open(path, &StoreOptions::default()).unwrap();
    assert!(!opened.store.is_direct());
    assert_eq!(opened.store.name(), "pread", "copying is left to threads");
    assert_eq!(opened.store.alignment().offset, 1);
    assert_eq!(opened.warnings.len(), 1, "{:?}", opened.warnings);
    assert!(opened.warnings[0].contains("direct reads are refused"), "{:?}", opened.warnings);
    assert_same_bytes(&mut opened, path);
}
