//! The store: what can be asked of it, and how one is opened.

use std::io;
use std::path::Path;
use std::sync::Arc;

use ls_sync::Slot;

use crate::error::{IoError, Kind};
use crate::pread::PreadStore;
use crate::source::Source;

/// Most reads in flight that a store accepts; larger depths are lowered to it.
pub const MAX_DEPTH: u32 = 1024;

/// What offsets, lengths and memory must be multiples of. Powers of two; 1 and 1 for buffered reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// For file offsets and lengths, in bytes.
    pub offset: u32,
    /// For the address of the memory, in bytes; at most a page, so every [`Slot`] split at multiples of it fits.
    pub memory: u32,
}

impl Alignment {
    /// No demands.
    pub const NONE: Alignment = Alignment { offset: 1, memory: 1 };
}

/// One read. The slot travels with it, so that memory in flight has no other owner.
#[derive(Debug)]
pub struct BlockRead {
    /// First byte in the file; a multiple of [`Alignment::offset`].
    pub offset: u64,
    /// Bytes to read into `into.bytes_mut()[..len]`; a multiple of [`Alignment::offset`], at most `into.len()`.
    pub len: usize,
    /// Where they go.
    pub into: Slot,
    /// The caller's own; comes back unchanged.
    pub tag: u32,
}

/// A read that is over.
#[derive(Debug)]
pub struct Completion {
    /// As it was submitted.
    pub read: BlockRead,
    /// `Ok`: all `len` bytes are there. Otherwise the slot's contents are unspecified.
    pub result: Result<(), IoError>,
}

/// Whether [`BlockStore::reap`] may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Take what is there.
    Poll,
    /// Wait for at least one completion, unless nothing is in flight.
    One,
}

/// What a store has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads completed without an error.
    pub reads: u64,
    /// Their lengths, summed.
    pub bytes: u64,
    /// Requests issued beyond one a read: after interruptions, short reads and the one re-read after `EIO`.
    pub retries: u64,
}

/// Storage that is read asynchronously, by one owner.
///
/// A read may end up to [`Alignment::offset`] - 1 bytes behind the end of the file, as [`window`] can ask for: the bytes
/// behind the end come back as zeros. A read that reaches further, or that finds the file shorter than it was at open,
/// fails.
///
/// Dropping a store waits for the reads in flight and drops their slots.
pub trait BlockStore: Send {
    /// Most reads in flight.
    fn depth(&self) -> u32;

    /// What reads must be aligned to.
    fn alignment(&self) -> Alignment;

    /// Starts a read and does not wait; the disk is busy with it when this returns. With `depth` reads in flight (a
    /// read is in flight until it is reaped) the read comes back.
    ///
    /// # Panics
    /// If the read is misaligned or longer than its slot: a mistake in the caller, not a state of the disk.
    fn submit(&mut self, read: BlockRead) -> Result<(), BlockRead>;

    /// The same, but that the disk may not hear of the read before the next `flush`, `submit` or `reap`: many small reads
    /// cost the kernel less together than one by one.
    fn queue(&mut self, read: BlockRead) -> Result<(), BlockRead> {
        self.submit(read)
    }

    /// Hands queued reads over.
    fn flush(&mut self) {}

    /// Hands completed reads to `done`, in the order in which they ended. An error is the store's own failure; that of
    /// a read comes with its completion.
    fn reap(&mut self, wait: Wait, done: &mut dyn FnMut(Completion)) -> Result<(), IoError>;

    /// Reads submitted and not yet reaped.
    fn in_flight(&self) -> u32;

    /// "io_uring", "pread" or "simulated".
    fn name(&self) -> &'static str;

    /// What was done so far.
    fn counters(&self) -> Counters;

    /// Whether reads bypass the page cache.
    fn is_direct(&self) -> bool;
}

/// The smallest aligned range that encloses `offset .. offset + len`, as (offset, length in bytes).
///
/// # Panics
/// If the range ends behind `u64::MAX - alignment`.
#[must_use]
pub fn window(offset: u64, len: u64, alignment: Alignment) -> (u64, usize) {
    let unit = u64::from(alignment.offset);
    let start = offset - offset % unit;
    let end = offset.checked_add(len).and_then(|end| end.checked_next_multiple_of(unit));
    let end = end.expect("files end before u64::MAX");
    (start, usize::try_from(end - start).expect("a window fits into memory"))
}

/// Which store to open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefer {
    /// io_uring where it is allowed and reads are direct, otherwise threads. (Buffered reads copy and drop pages;
    /// threads do that beside the caller, a ring partly inside it.)
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// Threads that call `pread`.
    Pread,
}

/// How to open a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreOptions {
    /// Most reads in flight, 1 to [`MAX_DEPTH`].
    pub depth: u32,
    /// Which store.
    pub prefer: Prefer,
    /// Bypass the page cache where the file system can.
    pub direct: bool,
}

impl Default for StoreOptions {
    fn default() -> StoreOptions {
        StoreOptions { depth: 16, prefer: Prefer::Auto, direct: true }
    }
}

/// A store, and what the user should know about how it came to be.
pub struct Opened {
    /// The store; [`BlockStore::name`] and [`BlockStore::is_direct`] tell what was chosen.
    pub store: Box<dyn BlockStore>,
    /// One sentence each; empty if all went as asked.
    pub warnings: Vec<String>,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened")
            .field("store", &self.store.name())
            .field("direct", &self.store.is_direct())
            .field("warnings", &self.warnings)
            .finish()
    }
}

/// Opens the file at `path` for reading.
///
/// Direct I/O is proven with a read before this returns, so alignment and store are final. Pages of the file that are
/// in the page cache by now are given up.
pub fn open(path: &Path, options: &StoreOptions) -> Result<Opened, IoError> {
    let depth = options.depth.clamp(1, MAX_DEPTH);
    let mut warnings = Vec::new();
    let source = Arc::new(Source::open(path, options.direct, &mut warnings)?);
    source.drop_cached();
    let ring = match options.prefer {
        Prefer::Pread => false,
        Prefer::Uring => true,
        Prefer::Auto => source.direct && !is_android(Path::new("/")),
    };
    if ring {
        match open_ring(&source, depth) {
            Ok(store) => return Ok(Opened { store, warnings }),
            Err(e) if options.prefer == Prefer::Auto => {
                warnings.push(format!("io_uring is not available ({e}): reading with threads"));
            }
            Err(e) => return Err(Kind::Ring { path: source.rules.path.clone(), source: e }.into()),
        }
    }
    let store = Box::new(PreadStore::new(&source, depth)?);
    Ok(Opened { store, warnings })
}

/// Whether the system whose files lie below `root` is Android. Asking for a ring is not safe there, not even to find out:
/// the sandbox of its programs ends the process. So a program for plain Linux that runs there must look first.
#[must_use]
pub fn is_android(root: &Path) -> bool {
    cfg!(target_os = "android") || root.join("system/build.prop").exists()
}

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn open_ring(source: &Arc<Source>, depth: u32) -> io::Result<Box<dyn BlockStore>> {
    if is_android(Path::new("/")) {
        return Err(io::Error::from_raw_os_error(libc::ENOSYS));
    }
    Ok(Box::new(crate::uring::UringStore::new(source, depth)?))
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
fn open_ring(_: &Arc<Source>, _: u32) -> io::Result<Box<dyn BlockStore>> {
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}
