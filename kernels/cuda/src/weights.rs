//! Where weights are for the device: [`Weights`] turns the host slices that a call borrows into device addresses.
//!
//! Bytes that stay where they are for the backend's life are announced once ([`Weights::keep`]), copied to device memory, and
//! recognised by address from then on. All others are copied when a call brings them, through two pinned buffers by turns:
//! the call may return as soon as its bytes are in one of them.

use crate::device::{Device, Mapped, Memory};
use crate::error::{Kind, check};
use cudarc::driver::sys;

/// Bytes of one staging buffer: what a call copies at a time.
pub(crate) const STAGING_BYTES: usize = 8 << 20;
const STAGINGS: usize = 2;

/// Host bytes that have a copy on the device.
#[derive(Debug)]
struct Kept {
    start: usize,
    len: usize,
    copy: Memory,
}

/// A pinned buffer, its device counterpart, and when they may be written again.
#[derive(Debug)]
struct Staging {
    host: Mapped,
    device: Memory,
    used: usize,
    /// When what was copied from here has arrived.
    copied: Event,
}

#[derive(Debug)]
struct Event(sys::CUevent);

// SAFETY: a handle of the driver's, used by its owner only.
unsafe impl Send for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: ours, destroyed once.
        unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Weights {
    device: Device,
    /// By address.
    kept: Vec<Kept>,
    stagings: [Staging; STAGINGS],
    turn: usize,
}

impl Weights {
    pub(crate) fn new(device: &Device) -> Result<Weights, Kind> {
        let staging = || {
            let mut event = std::ptr::null_mut();
            let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
            // SAFETY: a new event in the current context.
            check(unsafe { sys::cuEventCreate(&mut event, flags) }, "event")?;
            Ok::<_, Kind>(Staging {
                host: device.mapped(STAGING_BYTES)?,
                device: device.memory(STAGING_BYTES)?,
                used: 0,
                copied: Event(event),
            })
        };
        let stagings = [staging()?, staging()?];
        Ok(Weights { device: device.clone(), kept: Vec::new(), stagings, turn: 0 })
    }

    /// Copies bytes to the device that will not change; they start where the bundle has a multiple of 64. An error if it has no room for them.
    pub(crate) fn keep(&mut self, bytes: &[u8]) -> Result<(), Kind> {
        let (start, len) = (bytes.as_ptr().addr(), bytes.len());
        let copy = self.device.memory(len)?;
        copy.write(0, bytes)?;
        let at = self.kept.partition_point(|kept| kept.start < start);
        self.kept.insert(at, Kept { start, len, copy });
        Ok(())
    }

    /// The device's copy of kept bytes.
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<u64> {
        let start = bytes.as_ptr().addr();
        let kept = self.kept[..self.kept.partition_point(|kept| kept.start <= start)].last()?;
        let at = start - kept.start;
        (at + bytes.len() <= kept.len).then(|| kept.copy.address() + at as u64)
    }

    /// Bytes of device memory that hold kept weights.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept.iter().map(|kept| kept.len as u64).sum()
    }

    /// Copies up to STAGING_BYTES to the device, behind what the stream does and before what it does next. The copy is
    /// there for kernels that are launched before the next call but one; aligned to 256.
    pub(crate) fn stage(&mut self, bytes: &[u8]) -> Result<u64, Kind> {
        assert!(bytes.len() <= STAGING_BYTES, "{} bytes at once", bytes.len());
        let room = |staging: &Staging| STAGING_BYTES - staging.used.next_multiple_of(256);
        if room(&self.stagings[self.turn]) < bytes.len() {
            self.turn = (self.turn + 1) % STAGINGS;
            let staging = &mut self.stagings[self.turn];
            staging.used = 0;
            // SAFETY: our event; never recorded, it is over.
            check(unsafe { sys::cuEventSynchronize(staging.copied.0) }, "a copy")?;
        }
        let staging = &mut self.stagings[self.turn];
        let at = staging.used.next_multiple_of(256);
        staging.used = at + bytes.len();
        // SAFETY: copies from here have arrived, or are of other bytes.
        let host = unsafe { staging.host.bytes_mut() };
        host[at..][..bytes.len()].copy_from_slice(bytes);
        let (to, stream) = (staging.device.address() + at as u64, self.device.stream());
        // SAFETY: within both. The stream has done what used the device's bytes before it copies.
        unsafe {
            let from = staging.host.host().add(at).cast();
            check(sys::cuMemcpyHtoDAsync_v2(to, from, bytes.len(), stream), "copy")?;
            check(sys::cuEventRecord(staging.copied.0, stream), "event")?;
        }
        Ok(to)
    }

    /// Where the device finds `bytes`: its copy if they are kept, else a new one.
    pub(crate) fn place(&mut self, bytes: &[u8]) -> Result<u64, Kind> {
        match self.find(bytes) {
            Some(address) => Ok(address),
            None => self.stage(bytes),
        }
    }
}
