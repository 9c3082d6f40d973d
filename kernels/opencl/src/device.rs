//! An OpenCL device: its driver, one queue, its kernels and its memory.
//!
//! Work of a device is one queue, in order. Memory is named by [`Place`]s, a buffer and an offset: OpenCL has no addresses
//! that could be counted with, but for shared virtual memory, which not every device has.

use crate::OpenClError;
use crate::error::{Kind, failed};
use crate::programs::{Part, Programs, SIZE};
use ls_bundle::model::DType;
use opencl3::command_queue::CommandQueue;
use opencl3::context::Context;
use opencl3::device::{
    CL_DEVICE_SVM_ATOMICS, CL_DEVICE_SVM_COARSE_GRAIN_BUFFER, CL_DEVICE_SVM_FINE_GRAIN_BUFFER,
    CL_DEVICE_TYPE_ALL, CL_DEVICE_TYPE_CPU, CL_DEVICE_TYPE_GPU, Device as ClDevice,
};
use opencl3::event::Event;
use opencl3::kernel::Kernel;
use opencl3::memory::{
    Buffer, CL_MEM_READ_WRITE, CL_MEM_SVM_ATOMICS, CL_MEM_SVM_FINE_GRAIN_BUFFER, ClMem, svm_alloc,
    svm_free,
};
use opencl3::platform::get_platforms;
use opencl3::types::{CL_FALSE, CL_TRUE, cl_mem};
use std::ffi::c_void;
use std::sync::Arc;

/// What memory host and device share while kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sharing {
    /// None: copies.
    None,
    /// Coarse-grained shared virtual memory: not while a kernel runs.
    Coarse,
    /// Fine-grained, but without atomics.
    Fine,
    /// Fine-grained with atomics: a kernel can wait for the host.
    Atomics,
}

/// What a device is like.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Its platform, with version.
    pub platform: String,
    /// Whether it is a graphics processor; PoCL's is the host's processor.
    pub is_gpu: bool,
    /// Compute units: so many work-groups run at the same time at least.
    pub compute_units: u32,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Largest single piece of it.
    pub piece_bytes: u64,
    /// Local memory that a work-group may have, bytes.
    pub local_bytes: u64,
    /// Whether device and host have the same memory.
    pub unified: bool,
    /// What they share.
    pub sharing: Sharing,
}

impl DeviceInfo {
    /// One line for people: what it is, and how the host can coordinate with it.
    #[must_use]
    pub fn describe(&self) -> String {
        let memory = if self.unified { "the host's memory" } else { "memory of its own" };
        let flags = match self.sharing {
            Sharing::Atomics => "kernels can wait for the host's flags",
            Sharing::Fine | Sharing::Coarse => {
                "a kernel a segment with events (no fine-grained shared memory with atomics)"
            }
            Sharing::None => "a kernel a segment with events (no shared virtual memory)",
        };
        let (name, platform, units) = (&self.name, &self.platform, self.compute_units);
        format!("OpenCL on {name} ({platform}): {units} compute units, {memory}, {flags}")
    }
}

/// What every device's owner shares.
struct Shared {
    programs: Programs,
    queue: CommandQueue,
    context: Context,
    device: ClDevice,
    info: DeviceInfo,
}

// SAFETY: handles of OpenCL's, whose functions may be called by any thread; all but setting kernels' arguments, and
// kernels are not in here.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// An open device.
#[derive(Clone)]
pub struct Device {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("info", self.info()).finish_non_exhaustive()
    }
}

/// Which devices will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The first graphics processor; where there is none, the first of any kind.
    Any,
    /// A graphics processor.
    Gpu,
}

impl Device {
    /// Opens the best device and compiles the kernels.
    ///
    /// # Errors
    /// [`OpenClError::is_absent`] where there is no library, no driver or no such device.
    pub fn open(wanted: Wanted) -> Result<Device, OpenClError> {
        let (device, info) = find(wanted)?;
        let context = Context::from_device(&device).map_err(failed("context"))?;
        let queue = queue(&context, &device)?;
        let programs = Programs::build(&context, device)?;
        Ok(Device { shared: Arc::new(Shared { programs, queue, context, device, info }) })
    }

    /// What it is like.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    pub(crate) fn cl(&self) -> (&Context, ClDevice) {
        (&self.shared.context, self.shared.device)
    }

    pub(crate) fn queue(&self) -> &CommandQueue {
        &self.shared.queue
    }

    /// A kernel for weights of a format.
    pub(crate) fn kernel_of(&self, dtype: DType, name: &'static str) -> Result<Kernel, Kind> {
        Kernel::create(self.shared.programs.of(dtype), name).map_err(failed(name))
    }

    /// Another kernel.
    pub(crate) fn kernel(&self, part: Part, name: &'static str) -> Result<Kernel, Kind> {
        Kernel::create(self.shared.programs.part(part), name).map_err(failed(name))
    }

    /// Starts a kernel on `groups` work-groups, behind all that is queued; the event tells of its end.
    ///
    /// # Safety
    /// `args` are the kernel's parameters, of its types; the memory that they name is there until the kernel ends, and is
    /// used as the kernel uses it by nobody else.
    pub(crate) unsafe fn launch(
        &self,
        kernel: &Kernel,
        groups: [usize; 3],
        args: &[Arg<'_>],
    ) -> Result<Event, Kind> {
        for (index, arg) in (0u32..).zip(args) {
            // SAFETY: the caller's guarantee.
            unsafe { arg.set(kernel, index) }.map_err(failed("kernel argument"))?;
        }
        let (all, local) = ([groups[0] * SIZE, groups[1], groups[2]], [SIZE, 1, 1]);
        let (all, local) = (all.as_ptr(), local.as_ptr());
        // SAFETY: three sizes each; the caller's guarantee.
        unsafe {
            let queue = self.queue();
            queue
                .enqueue_nd_range_kernel(kernel.get(), 3, std::ptr::null(), all, local, &[])
                .map_err(failed("launch"))
        }
    }

    /// Waits until the queue is done.
    pub(crate) fn wait(&self) -> Result<(), Kind> {
        self.queue().finish().map_err(failed("waiting for kernels"))
    }

    /// Lets the device begin with what is queued.
    pub(crate) fn flush(&self) -> Result<(), Kind> {
        self.queue().flush().map_err(failed("flush"))
    }

    /// Device memory, zero.
    pub(crate) fn memory(&self, bytes: usize) -> Result<Memory, Kind> {
        let bytes = bytes.max(16).next_multiple_of(256);
        // SAFETY: new memory aliases nothing.
        let buffer = unsafe {
            let (context, none) = (&self.shared.context, std::ptr::null_mut());
            Buffer::<u8>::create(context, CL_MEM_READ_WRITE, bytes, none)
                .map_err(failed("device memory"))?
        };
        let memory = Memory { buffer, bytes, device: self.clone() };
        memory.fill_zero()?;
        Ok(memory)
    }

    /// Memory that host and device write and read at the same time, zero. Only where they share memory finely.
    pub(crate) fn shared(&self, bytes: usize) -> Result<SharedMemory, Kind> {
        let bytes = bytes.max(16).next_multiple_of(256);
        let atomics = if self.info().sharing == Sharing::Atomics { CL_MEM_SVM_ATOMICS } else { 0 };
        let flags = CL_MEM_READ_WRITE | CL_MEM_SVM_FINE_GRAIN_BUFFER | atomics;
        // SAFETY: new memory aliases nothing; it is zeroed before anyone sees it.
        let host = unsafe {
            let host = svm_alloc(self.shared.context.get(), flags, bytes, 128)
                .map_err(|code| failed("shared memory")(code.into()))?;
            host.cast::<u8>().write_bytes(0, bytes);
            host
        };
        Ok(SharedMemory { host: host.cast(), bytes, device: self.clone() })
    }
}

/// A queue that works in order, by the call that every version has.
fn queue(context: &Context, device: &ClDevice) -> Result<CommandQueue, Kind> {
    #[expect(deprecated, reason = "its successor is missing in drivers of OpenCL 1.2")]
    // SAFETY: the context's own device, no properties.
    unsafe { CommandQueue::create(context, device.id(), 0) }.map_err(failed("queue"))
}

/// The device and what it says about itself: graphics processors first.
fn find(wanted: Wanted) -> Result<(ClDevice, DeviceInfo), Kind> {
    let platforms = get_platforms().map_err(failed("platforms"))?;
    if platforms.is_empty() {
        return Err(Kind::NoPlatform);
    }
    let kinds: &[_] = match wanted {
        Wanted::Gpu => &[CL_DEVICE_TYPE_GPU],
        Wanted::Any => &[CL_DEVICE_TYPE_GPU, CL_DEVICE_TYPE_ALL],
    };
    let mut refused = None;
    for &kind in kinds {
        for platform in &platforms {
            for id in platform.get_devices(kind).unwrap_or_default() {
                let device = ClDevice::new(id);
                let name = platform.version().unwrap_or_default();
                match look(&device, name.trim()).and_then(usable) {
                    Ok(info) => return Ok((device, info)),
                    Err(error) => refused = Some(error),
                }
            }
        }
    }
    let none = match wanted {
        Wanted::Gpu => "no driver has a graphics processor",
        Wanted::Any => "no driver has a device",
    };
    Err(refused.unwrap_or_else(|| Kind::NoDevice(none.into())))
}

fn look(device: &ClDevice, platform: &str) -> Result<DeviceInfo, Kind> {
    let asked = |error| failed("asking the device")(error);
    let kind = device.dev_type().map_err(asked)?;
    Ok(DeviceInfo {
        name: device.name().map_err(asked)?.trim().to_owned(),
        platform: platform.to_owned(),
        is_gpu: kind & CL_DEVICE_TYPE_GPU != 0,
        compute_units: device.max_compute_units().map_err(asked)?,
        memory_bytes: device.global_mem_size().map_err(asked)?,
        piece_bytes: device.max_mem_alloc_size().map_err(asked)?,
        local_bytes: device.local_mem_size().map_err(asked)?,
        unified: kind & CL_DEVICE_TYPE_CPU != 0 || device.host_unified_memory().unwrap_or(false),
        // Devices before OpenCL 2.0 do not know the question.
        sharing: sharing(device.svm_capabilities().unwrap_or(0)),
    })
}

fn sharing(svm: u64) -> Sharing {
    let has = |bit| svm & bit != 0;
    match has(CL_DEVICE_SVM_FINE_GRAIN_BUFFER) {
        true if has(CL_DEVICE_SVM_ATOMICS) => Sharing::Atomics,
        true => Sharing::Fine,
        false if has(CL_DEVICE_SVM_COARSE_GRAIN_BUFFER) => Sharing::Coarse,
        false => Sharing::None,
    }
}

/// An error if this device cannot run the kernels.
fn usable(info: DeviceInfo) -> Result<DeviceInfo, Kind> {
    match info.compute_units {
        0 => Err(Kind::NoDevice(format!("{} has no compute units", info.name))),
        _ => Ok(info),
    }
}

/// A kernel's parameter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg<'a> {
    /// A buffer from its start on.
    Memory(&'a Memory),
    /// A buffer or shared memory from its start on; the kernel is given the offset by another parameter.
    At(Mem),
    U32(u32),
    U64(u64),
    F32(f32),
    /// A structure of the kernel's.
    Bytes(&'a [u8]),
    /// So many bytes of local memory.
    Local(usize),
}

impl Arg<'_> {
    /// # Safety
    /// The kernel's parameter `index` is of this type.
    unsafe fn set(&self, kernel: &Kernel, index: u32) -> opencl3::Result<()> {
        // SAFETY: the caller's guarantee; each value is as long as its type says.
        unsafe {
            match *self {
                Arg::Memory(memory) => kernel.set_arg(index, &memory.buffer.get()),
                Arg::At(Mem::Buffer(buffer)) => kernel.set_arg(index, &buffer),
                Arg::At(Mem::Shared(start)) => kernel.set_arg_svm_pointer(index, start),
                Arg::U32(value) => kernel.set_arg(index, &value),
                Arg::U64(value) => kernel.set_arg(index, &value),
                Arg::F32(value) => kernel.set_arg(index, &value),
                Arg::Bytes(bytes) => {
                    let (len, start) = (bytes.len(), bytes.as_ptr().cast());
                    Ok(opencl3::kernel::set_kernel_arg(kernel.get(), index, len, start)?)
                }
                Arg::Local(bytes) => kernel.set_arg_local_buffer(index, bytes),
            }
        }
    }
}

/// Device memory, named by its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mem {
    Buffer(cl_mem),
    Shared(*const c_void),
}

// SAFETY: a name only; whoever uses it answers for what it names.
unsafe impl Send for Mem {}

/// Bytes in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) mem: Mem,
    /// Offset in bytes.
    pub(crate) at: u64,
}

/// A buffer on the device.
#[derive(Debug)]
pub(crate) struct Memory {
    buffer: Buffer<u8>,
    bytes: usize,
    device: Device,
}

impl Memory {
    /// A buffer of somebody else's making.
    pub(crate) fn over(device: &Device, buffer: Buffer<u8>, bytes: usize) -> Memory {
        Memory { buffer, bytes, device: device.clone() }
    }

    pub(crate) fn mem(&self) -> Mem {
        Mem::Buffer(self.buffer.get())
    }

    /// Queues zeros.
    pub(crate) fn fill_zero(&self) -> Result<(), Kind> {
        let zero = 0u32;
        // SAFETY: within the buffer, a multiple of four; the queue is in order.
        unsafe {
            let pattern = std::ptr::from_ref(&zero).cast_mut().cast();
            let (queue, buffer) = (self.device.queue().get(), self.buffer.get());
            opencl3::command_queue::enqueue_fill_buffer(
                queue,
                buffer,
                pattern,
                4,
                0,
                self.bytes,
                0,
                std::ptr::null(),
            )
            .map(Event::new)
            .map_err(|code| failed("filling memory")(code.into()))?;
        }
        Ok(())
    }

    /// Copies bytes from the host, behind what is queued; waits until they are read.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) -> Result<(), Kind> {
        // SAFETY: the call returns when the bytes are read.
        unsafe { self.queue_write(at, bytes, CL_TRUE) }.map(drop)
    }

    /// The same, but returns before the bytes are read; the event tells when they are.
    ///
    /// # Safety
    /// The bytes stay as they are until then.
    pub(crate) unsafe fn write_later(&self, at: usize, bytes: &[u8]) -> Result<Event, Kind> {
        // SAFETY: the caller's guarantee.
        unsafe { self.queue_write(at, bytes, CL_FALSE) }
    }

    unsafe fn queue_write(&self, at: usize, bytes: &[u8], wait: u32) -> Result<Event, Kind> {
        assert!(at + bytes.len() <= self.bytes, "write of {} bytes at {at}", bytes.len());
        // SAFETY: within the buffer; the caller's guarantee.
        unsafe {
            let (queue, buffer) = (self.device.queue().get(), self.buffer.get());
            let (len, from) = (bytes.len(), bytes.as_ptr().cast_mut().cast());
            opencl3::command_queue::enqueue_write_buffer(
                queue,
                buffer,
                wait,
                at,
                len,
                from,
                0,
                std::ptr::null(),
            )
            .map(Event::new)
            .map_err(|code| failed("copy to the device")(code.into()))
        }
    }

    /// Copies bytes to the host when all that is queued is done, and waits for it.
    pub(crate) fn read(&self, at: usize, to: &mut [u8]) -> Result<(), Kind> {
        // SAFETY: the call returns when the bytes are there.
        unsafe { self.queue_read(at, to, CL_TRUE) }.map(drop)
    }

    /// The same, but returns at once; the event tells when the bytes are there.
    ///
    /// # Safety
    /// Until then nobody looks at them, or lets them go.
    pub(crate) unsafe fn read_later(&self, at: usize, to: &mut [u8]) -> Result<Event, Kind> {
        // SAFETY: the caller's guarantee.
        unsafe { self.queue_read(at, to, CL_FALSE) }
    }

    unsafe fn queue_read(&self, at: usize, to: &mut [u8], wait: u32) -> Result<Event, Kind> {
        assert!(at + to.len() <= self.bytes, "read of {} bytes at {at}", to.len());
        // SAFETY: within the buffer; the caller's guarantee.
        unsafe {
            let queue = self.device.queue();
            queue
                .enqueue_read_buffer(&self.buffer, wait, at, to, &[])
                .map_err(failed("copy from the device"))
        }
    }
}

/// Memory that host and device use at the same time.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    host: *mut u8,
    bytes: usize,
    device: Device,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for SharedMemory {}

impl SharedMemory {
    pub(crate) fn mem(&self) -> Mem {
        Mem::Shared(self.host.cast_const().cast())
    }

    /// Where it is, for the host.
    pub(crate) fn host(&self) -> *mut u8 {
        self.host
    }

    /// The bytes, to be written.
    ///
    /// # Safety
    /// No kernel reads or writes them meanwhile.
    pub(crate) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: zeroed when it was made; the caller's guarantee, and `&mut self` is the only borrow.
        unsafe { std::slice::from_raw_parts_mut(self.host, self.bytes) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // What a kernel may still use must not go; kernels end by themselves, so this does.
        let _ = self.device.wait();
        // SAFETY: ours, freed once; nothing runs.
        let _ = unsafe { svm_free(self.device.shared.context.get(), self.host.cast()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_is_told_by_bits() {
        let (coarse, fine) = (CL_DEVICE_SVM_COARSE_GRAIN_BUFFER, CL_DEVICE_SVM_FINE_GRAIN_BUFFER);
        assert_eq!(sharing(0), Sharing::None);
        assert_eq!(sharing(coarse), Sharing::Coarse);
        assert_eq!(sharing(coarse | CL_DEVICE_SVM_ATOMICS), Sharing::Coarse);
        assert_eq!(sharing(coarse | fine), Sharing::Fine);
        assert_eq!(sharing(coarse | fine | CL_DEVICE_SVM_ATOMICS), Sharing::Atomics);
    }
}
