//! Faults on demand: the schedule in `LS_FAULTS`, such as `12:eio,40:torn`, says what happens to which operation of this
//! process on a [`File`](super::File). For tests; release builds are without.
//!
//! | name | what happens |
//! |---|---|
//! | `eio`, `eintr`, `enospc`, `einval` | the operation fails with this error |
//! | `short` | only a part is read or written |
//! | `torn` | only a part is written, and the process ends as if by a loss of power |
//! | `flip` | a bit of what is read is flipped on its way |
//! | `rot` | a bit of the file is flipped, from now on |
//! | `shrink` | the file becomes half as long, from now on |
//!
//! `flip` and `rot` befall files with checksums alone (artifacts, bundles, what becomes one of them): a model with another
//! weight is another model. If `LS_FAULTS_LOG` names a file, it gets a byte for each operation.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Codes of errors, which this crate has no other use for.
const EINTR: i32 = 4;
const EIO: i32 = 5;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;

/// What a file is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
    Other,
}

/// What happens to an operation that does not just fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Short,
    Torn,
    Flip,
}

impl Fault {
    /// How much of `len` bytes is done.
    pub(super) fn part(&self, len: usize) -> usize {
        if *self == Fault::Flip { len } else { len.div_ceil(2) }
    }

    /// What comes of bytes that were read.
    pub(super) fn spoil(&self, bytes: &mut [u8]) {
        if *self == Fault::Flip && !bytes.is_empty() {
            bytes[bytes.len() / 3] ^= 0x10;
        }
    }

    /// After a part was written.
    pub(super) fn end_if_torn(&self) {
        if *self == Fault::Torn {
            std::process::abort();
        }
    }
}

struct Schedule {
    faults: Vec<(u64, String)>,
    next: AtomicU64,
    log: Option<File>,
}

fn schedule() -> &'static Schedule {
    static SCHEDULE: OnceLock<Schedule> = OnceLock::new();
    SCHEDULE.get_or_init(|| {
        let text = std::env::var("LS_FAULTS").unwrap_or_default();
        let faults = text.split(',').filter_map(|item| {
            let (at, name) = item.split_once(':')?;
            Some((at.parse().ok()?, name.to_owned()))
        });
        let log = std::env::var_os("LS_FAULTS_LOG")
            .and_then(|path| OpenOptions::new().create(true).append(true).open(path).ok());
        Schedule { faults: faults.collect(), next: AtomicU64::new(0), log }
    })
}

/// What is to happen to the next operation, on `file`.
pub(super) fn next(file: &File, operation: Operation) -> io::Result<Option<Fault>> {
    let schedule = schedule();
    if schedule.faults.is_empty() && schedule.log.is_none() {
        return Ok(None);
    }
    // Relaxed: only the numbers count.
    let number = schedule.next.fetch_add(1, Ordering::Relaxed);
    if let Some(mut log) = schedule.log.as_ref() {
        log.write_all(b".")?;
    }
    let Some((_, name)) = schedule.faults.iter().find(|(at, _)| *at == number) else {
        return Ok(None);
    };
    let fails = |code| Err(io::Error::from_raw_os_error(code));
    match (name.as_str(), operation) {
        ("eio", _) => fails(EIO),
        ("einval", _) => fails(EINVAL),
        ("enospc", Operation::Write | Operation::Other) => fails(ENOSPC),
        // The others are called again by the standard library itself.
        ("eintr", Operation::Read | Operation::Write) => fails(EINTR),
        ("short", Operation::Read | Operation::Write) => Ok(Some(Fault::Short)),
        ("torn", Operation::Write) => Ok(Some(Fault::Torn)),
        ("torn", Operation::Other) => std::process::abort(),
        ("flip", Operation::Read) if has_checksums(file)? => Ok(Some(Fault::Flip)),
        ("rot", Operation::Read) if has_checksums(file)? => change(file, rot).map(|()| None),
        ("shrink", Operation::Read) => {
            change(file, |file, len| file.set_len(len / 2)).map(|()| None)
        }
        _ => Ok(None),
    }
}

/// Where the file is.
fn path_of(file: &File) -> io::Result<PathBuf> {
    Path::new("/proc/self/fd").join(file.as_raw_fd().to_string()).read_link()
}

fn has_checksums(file: &File) -> io::Result<bool> {
    let path = path_of(file)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Ok([".bin", ".part", ".lsb", ".tmp"].iter().any(|end| name.ends_with(end))
        || name.contains(".scratch-"))
}

/// Changes the file behind the back of its reader.
fn change(file: &File, change: fn(&File, u64) -> io::Result<()>) -> io::Result<()> {
    let writable = OpenOptions::new().read(true).write(true).open(path_of(file)?)?;
    let len = writable.metadata()?.len();
    if len == 0 { Ok(()) } else { change(&writable, len) }
}

/// Flips a bit in the middle.
fn rot(file: &File, len: u64) -> io::Result<()> {
    let mut byte = [0];
    file.read_exact_at(&mut byte, len / 2)?;
    byte[0] ^= 4;
    file.write_all_at(&byte, len / 2)
}
