//! Where weights are for the device: [`Weights`] turns the host slices that a call borrows into device addresses.
//!
//! Bytes that stay where they are for the backend's life are announced once ([`Weights::keep`]) and recognised by address from
//! then on. They are copied to device memory; where device and host have the same memory, they are pinned and read in place.
//! All others are copied when a call brings them, through two pinned buffers by turns: the call may return as soon as its
//! bytes are in one of them.

use crate::device::{Device, Mapped, Memory};
use crate::error::{Kind, check};
use cudarc::driver::sys;
use std::ffi::c_void;

/// Bytes of one staging buffer: what a call copies at a time.
pub(crate) const STAGING_BYTES: usize = 8 << 20;
const STAGINGS: usize = 2;

/// Host bytes that the device can read.
#[derive(Debug)]
struct Kept {
    start: usize,
    len: usize,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Copied(Memory),
    Pinned(Pinned),
}

impl Place {
    fn address(&self) -> u64 {
        match self {
            Place::Copied(memory) => memory.address(),
            Place::Pinned(pinned) => pinned.address(),
        }
    }
}

/// Somebody's memory, pinned so that the device can read it.
#[derive(Debug)]
pub(crate) struct Pinned {
    host: *mut c_void,
    address: u64,
    device: Device,
}

// SAFETY: only used to let go of the memory; the driver may be called by any thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Where the device finds it.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn new(device: &Device, bytes: &[u8]) -> Result<Pinned, Kind> {
        device.enter()?;
        let host = bytes.as_ptr().cast_mut().cast();
        let mut address = 0;
        // SAFETY: the pages are mapped, as somebody has the bytes; that they stay is the caller's promise, and the driver
        // notices if they do not. The device only reads them.
        unsafe {
            let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP;
            check(sys::cuMemHostRegister_v2(host, bytes.len(), flags), "pinning")?;
            check(sys::cuMemHostGetDevicePointer_v2(&mut address, host, 0), "mapped memory")?;
        }
        Ok(Pinned { host, address, device: device.clone() })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: pinned once, above; waits for kernels that read it.
            unsafe { sys::cuMemHostUnregister(self.host) };
        }
    }
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
    /// Whether kept bytes are read in place.
    in_place: bool,
}

impl Weights {
    pub(crate) fn new(device: &Device, in_place: bool) -> Result<Weights, Kind> {
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
        Ok(Weights { device: device.clone(), kept: Vec::new(), stagings, turn: 0, in_place })
    }

    /// Takes bytes that will neither change nor move while the backend lives; they start where the bundle has a multiple of
    /// 64. An error if there is no room for them.
    pub(crate) fn keep(&mut self, bytes: &[u8]) -> Result<(), Kind> {
        let (start, len) = (bytes.as_ptr().addr(), bytes.len());
        let place = if self.in_place {
            Place::Pinned(Pinned::new(&self.device, bytes)?)
        } else {
            let copy = self.device.memory(len)?;
            copy.write(0, bytes)?;
            Place::Copied(copy)
        };
        let at = self.kept.partition_point(|kept| kept.start < start);
        self.kept.insert(at, Kept { start, len, place });
        Ok(())
    }

    /// Where the device has kept bytes.
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<u64> {
        let start = bytes.as_ptr().addr();
        let kept = self.kept[..self.kept.partition_point(|kept| kept.start <= start)].last()?;
        let at = start - kept.start;
        (at + bytes.len() <= kept.len).then(|| kept.place.address() + at as u64)
    }

    /// Bytes of device memory that hold kept weights.
    pub(crate) fn copied_bytes(&self) -> u64 {
        let copied = self.kept.iter().filter(|kept| matches!(kept.place, Place::Copied(_)));
        copied.map(|kept| kept.len as u64).sum()
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
