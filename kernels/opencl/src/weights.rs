//! Where weights are for the device: [`Weights`] turns the host slices that a call borrows into [`Place`]s.
//!
//! Bytes that stay where they are for the backend's life are announced once ([`Weights::keep`]) and recognised by address
//! from then on. They are copied to the device; where device and host have the same memory they are used in place. All others
//! are copied when a call brings them, through a ring of buffers: memory that host and device share, where they do, else the
//! host's, copied on to the device's.

use crate::device::{Device, Mem, Memory, Place, SharedMemory, Sharing};
use crate::error::{Kind, failed};
use opencl3::event::Event;
use opencl3::memory::{Buffer, CL_MEM_READ_ONLY, CL_MEM_USE_HOST_PTR};

/// Bytes of one staging buffer. A launch uses at most two of them.
pub(crate) const STAGING_BYTES: usize = 4 << 20;
/// A buffer is written again when the next but one is full: kernels that use it were started before then.
pub(crate) const STAGINGS: usize = 3;
/// Kept pieces but the last have a multiple of so many bytes.
const KEPT_ALIGNMENT: usize = 4096;
/// What pieces of a staging buffer start at multiples of.
const PIECE_ALIGNMENT: usize = 256;

/// Host bytes that the device has, or can read in place.
#[derive(Debug)]
struct Kept {
    start: usize,
    len: usize,
    memory: Memory,
}

/// Where bytes pass.
#[derive(Debug)]
enum Passage {
    /// The host writes, kernels read.
    Shared(SharedMemory),
    /// The host writes, the queue copies, kernels read.
    Copied(Box<[u8]>, Memory),
}

#[derive(Debug)]
struct Staging {
    passage: Passage,
    used: usize,
    /// When all that used it is done.
    free: Option<Event>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Weights {
    device: Device,
    /// By address.
    kept: Vec<Kept>,
    stagings: [Staging; STAGINGS],
    turn: usize,
    /// Whether kept bytes are read in place.
    in_place: bool,
}

impl Weights {
    pub(crate) fn new(device: &Device, in_place: bool) -> Result<Weights, Kind> {
        let staging = || {
            let passage = if device.info().sharing >= Sharing::Fine {
                Passage::Shared(device.shared(STAGING_BYTES)?)
            } else {
                let host = vec![0; STAGING_BYTES].into_boxed_slice();
                Passage::Copied(host, device.memory(STAGING_BYTES)?)
            };
            Ok::<_, Kind>(Staging { passage, used: 0, free: None })
        };
        let stagings = [staging()?, staging()?, staging()?];
        Ok(Weights { device: device.clone(), kept: Vec::new(), stagings, turn: 0, in_place })
    }

    /// Takes bytes that will neither change nor move while the backend lives; they start where the bundle has a multiple of
    /// 64. An error if there is no room for them.
    ///
    /// Drivers limit a single piece of memory, often to a quarter of all: more is kept as several. What lies across a
    /// border is copied when a call brings it.
    pub(crate) fn keep(&mut self, bytes: &[u8]) -> Result<(), Kind> {
        let most = usize::try_from(self.device.info().piece_bytes).unwrap_or(usize::MAX);
        let most = (most / KEPT_ALIGNMENT * KEPT_ALIGNMENT).max(KEPT_ALIGNMENT);
        bytes.chunks(most).try_for_each(|piece| self.keep_piece(piece))
    }

    fn keep_piece(&mut self, bytes: &[u8]) -> Result<(), Kind> {
        let (start, len) = (bytes.as_ptr().addr(), bytes.len());
        let memory = if self.in_place {
            let host = bytes.as_ptr().cast_mut().cast();
            let flags = CL_MEM_READ_ONLY | CL_MEM_USE_HOST_PTR;
            // SAFETY: the bytes stay as they are until the backend is dropped, which the caller promises, and are only
            // read.
            let buffer = unsafe { Buffer::create(self.device.cl().0, flags, len, host) };
            let buffer = buffer.map_err(failed("using memory in place"))?;
            Memory::over(&self.device, buffer, len)
        } else {
            let memory = self.device.memory(len)?;
            memory.write(0, bytes)?;
            memory
        };
        let at = self.kept.partition_point(|kept| kept.start < start);
        self.kept.insert(at, Kept { start, len, memory });
        Ok(())
    }

    /// Where the device has kept bytes.
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<Place> {
        let start = bytes.as_ptr().addr();
        let kept = self.kept[..self.kept.partition_point(|kept| kept.start <= start)].last()?;
        let at = start - kept.start;
        (at + bytes.len() <= kept.len).then(|| Place { mem: kept.memory.mem(), at: at as u64 })
    }

    /// Bytes of device memory that hold kept weights.
    pub(crate) fn copied_bytes(&self) -> u64 {
        if self.in_place { 0 } else { self.kept.iter().map(|kept| kept.len as u64).sum() }
    }

    /// Whether the next piece of `bytes` lies in the same buffer as the last.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        let used = self.stagings[self.turn].used.next_multiple_of(PIECE_ALIGNMENT);
        used + bytes <= STAGING_BYTES
    }

    /// Makes up to STAGING_BYTES readable for kernels that are started before the next but one buffer is begun.
    pub(crate) fn stage(&mut self, bytes: &[u8]) -> Result<Place, Kind> {
        assert!(bytes.len() <= STAGING_BYTES, "{} bytes at once", bytes.len());
        if !self.has_room(bytes.len()) {
            self.begin_next()?;
        }
        let staging = &mut self.stagings[self.turn];
        let at = staging.used.next_multiple_of(PIECE_ALIGNMENT);
        staging.used = at + bytes.len();
        let mem = match &mut staging.passage {
            Passage::Shared(shared) => {
                assert!(at + bytes.len() <= STAGING_BYTES, "behind the buffer");
                // SAFETY: within the buffer. Kernels that run read other pieces of it: those that read this one are done.
                unsafe {
                    let to = shared.host().add(at);
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
                }
                shared.mem()
            }
            Passage::Copied(host, memory) => {
                host[at..][..bytes.len()].copy_from_slice(bytes);
                // SAFETY: the piece is written again when what was queued before the next buffer but one is done.
                unsafe { memory.write_later(at, &host[at..][..bytes.len()]) }?;
                memory.mem()
            }
        };
        Ok(Place { mem, at: at as u64 })
    }

    /// Begins the next buffer, when all that used it is done.
    fn begin_next(&mut self) -> Result<(), Kind> {
        // All kernels that use the buffer before this one are queued by now.
        let before = (self.turn + STAGINGS - 1) % STAGINGS;
        // SAFETY: nothing to wait for but the queue.
        let marker = unsafe { self.device.queue().enqueue_marker_with_wait_list(&[]) };
        self.stagings[before].free = Some(marker.map_err(failed("marker"))?);
        self.device.flush()?;
        self.turn = (self.turn + 1) % STAGINGS;
        let next = &mut self.stagings[self.turn];
        next.used = 0;
        match next.free.take() {
            Some(event) => event.wait().map_err(failed("a kernel")),
            None => Ok(()),
        }
    }

    /// Where the device finds `bytes`: its copy if they are kept, else a new one.
    pub(crate) fn place(&mut self, bytes: &[u8]) -> Result<Place, Kind> {
        match self.find(bytes) {
            Some(place) => Ok(place),
            None => self.stage(bytes),
        }
    }

    /// A buffer for parameters that a launch does not use.
    pub(crate) fn any(&self) -> Mem {
        match &self.stagings[0].passage {
            Passage::Shared(shared) => shared.mem(),
            Passage::Copied(_, memory) => memory.mem(),
        }
    }
}
