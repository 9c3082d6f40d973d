//! A CUDA device: its driver, one stream, its kernels and its memory.
//!
//! Everything is allocated before the first kernel waits for anything: to free or to allocate beside a kernel that spins
//! would wait for its end. Work of a device is one stream, in order.

use crate::CudaError;
use crate::error::{Kind, check, reason};
use crate::kernels::{self, KernelSource};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use std::ffi::{CString, c_void};
use std::sync::Arc;

/// What a device is like.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Version of the driver: 12040 for 12.4.
    pub driver: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Shared memory that one thread block may have, bytes.
    pub shared_bytes: u32,
    /// Whether device and host have the same memory.
    pub unified: bool,
}

/// What every device's owner shares; the last one lets go of the context.
struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    modules: Vec<sys::CUmodule>,
}

/// An open device.
#[derive(Clone)]
pub struct Device {
    shared: Arc<Context>,
    info: DeviceInfo,
}

/// A kernel, ready to be launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(sys::CUfunction);

// SAFETY: a handle of the driver's, which may be used by any thread whose context is current.
unsafe impl Send for Function {}
// SAFETY: as above; the driver locks what it has to.
unsafe impl Sync for Function {}
// SAFETY: handles of the driver's; the driver's functions may be called by any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("info", &self.info).finish_non_exhaustive()
    }
}

/// The size of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    /// All blocks run at the same time, or the launch fails.
    pub(crate) together: bool,
    /// Blocks may begin when all of the kernel before have begun, if that says so; from 9.0 on.
    pub(crate) overlaps: bool,
}

impl Grid {
    pub(crate) fn new(blocks: u32, threads: u32) -> Grid {
        Grid { blocks: [blocks, 1, 1], threads, shared_bytes: 0, together: false, overlaps: false }
    }
}

/// Pointers to a kernel's parameters; to be made in the call of [`Device::launch`], so that temporaries live.
macro_rules! args {
    ($($arg:expr),* $(,)?) => {
        &mut [$(std::ptr::from_ref(&$arg).cast_mut().cast::<std::ffi::c_void>()),*]
    };
}
pub(crate) use args;

impl Device {
    /// Opens device `index` and loads its kernels.
    ///
    /// # Errors
    /// [`CudaError::is_absent`] where there is no driver or no such device.
    pub fn open(index: u32, source: &KernelSource) -> Result<Device, CudaError> {
        let (device, info) = find(index)?;
        let code = kernels::load(info.capability, info.driver, source)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: a device that the driver has named.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) }, "context")?;
        let mut shared =
            Context { device, context, stream: std::ptr::null_mut(), modules: Vec::new() };
        // SAFETY: the context is retained until `shared` is dropped.
        unsafe {
            check(sys::cuCtxSetCurrent(context), "context")?;
            let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
            check(sys::cuStreamCreate(&mut shared.stream, flags), "stream")?;
            for code in &code {
                let mut module = std::ptr::null_mut();
                check(sys::cuModuleLoadData(&mut module, code.as_ptr().cast()), "load kernels")?;
                shared.modules.push(module);
            }
        }
        Ok(Device { shared: Arc::new(shared), info })
    }

    /// What it is like.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Makes this thread one that may work with the device.
    pub(crate) fn enter(&self) -> Result<(), Kind> {
        // SAFETY: the context is retained.
        check(unsafe { sys::cuCtxSetCurrent(self.shared.context) }, "context")
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.shared.stream
    }

    /// A kernel of a module by name, loaded now (the first launch of one that is not would wait for a running kernel), that
    /// may use `shared_bytes` of dynamic shared memory.
    pub(crate) fn function(
        &self,
        module: &str,
        name: &str,
        shared_bytes: u32,
    ) -> Result<Function, Kind> {
        let index = kernels::module_names().position(|known| known == module);
        let module = self.shared.modules[index.expect("a module of ours")];
        let name = CString::new(name).expect("names have no zeros");
        let mut function = std::ptr::null_mut();
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let local = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES;
        let mut bytes = 0;
        // SAFETY: a loaded module and a string ended by zero. Asking for an attribute loads the function.
        unsafe {
            check(sys::cuModuleGetFunction(&mut function, module, name.as_ptr()), "kernel")?;
            if shared_bytes > 0 {
                let bytes = shared_bytes as i32;
                check(sys::cuFuncSetAttribute(function, attribute, bytes), "shared memory")?;
            }
            check(sys::cuFuncGetAttribute(&mut bytes, local, function), "kernel")?;
        }
        Ok(Function(function))
    }

    /// Starts a kernel on the stream.
    ///
    /// # Safety
    /// `args` are the kernel's parameters, of its types; the memory that they point to is there until the kernel ends,
    /// and is used as the kernel uses it by nobody else.
    pub(crate) unsafe fn launch(
        &self,
        function: Function,
        grid: Grid,
        args: &mut [*mut c_void],
    ) -> Result<(), Kind> {
        let ([x, y, z], args) = (grid.blocks, args.as_mut_ptr());
        let (threads, shared, stream) = (grid.threads, grid.shared_bytes, self.shared.stream);
        // SAFETY: the caller's guarantee.
        let result = unsafe {
            if grid.together {
                sys::cuLaunchCooperativeKernel(
                    function.0, x, y, z, threads, 1, 1, shared, stream, args,
                )
            } else if grid.overlaps {
                let mut attribute = sys::CUlaunchAttribute {
                    id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                    pad: [0; 4],
                    value: sys::CUlaunchAttributeValue {
                        programmaticStreamSerializationAllowed: 1,
                    },
                };
                let config = sys::CUlaunchConfig {
                    gridDimX: x,
                    gridDimY: y,
                    gridDimZ: z,
                    blockDimX: threads,
                    blockDimY: 1,
                    blockDimZ: 1,
                    sharedMemBytes: shared,
                    hStream: stream,
                    attrs: &mut attribute,
                    numAttrs: 1,
                };
                sys::cuLaunchKernelEx(&config, function.0, args, std::ptr::null_mut())
            } else {
                let none = std::ptr::null_mut();
                sys::cuLaunchKernel(function.0, x, y, z, threads, 1, 1, shared, stream, args, none)
            }
        };
        check(result, "launch")
    }

    /// Waits until the stream is done.
    pub(crate) fn wait(&self) -> Result<(), Kind> {
        // SAFETY: our stream.
        check(unsafe { sys::cuStreamSynchronize(self.shared.stream) }, "a kernel")
    }

    /// Device memory, zero.
    pub(crate) fn memory(&self, bytes: usize) -> Result<Memory, Kind> {
        self.enter()?;
        let (mut address, bytes) = (0, bytes.max(16).next_multiple_of(256));
        // SAFETY: new memory aliases nothing.
        unsafe {
            check(sys::cuMemAlloc_v2(&mut address, bytes), "device memory")?;
            let memory = Memory { address, bytes, device: self.clone() };
            memory.fill_zero(0, bytes)?;
            Ok(memory)
        }
    }

    /// Host memory, zero, that the device can address too.
    pub(crate) fn mapped(&self, bytes: usize) -> Result<Mapped, Kind> {
        self.enter()?;
        let bytes = bytes.max(16).next_multiple_of(256);
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        let (mut host, mut address) = (std::ptr::null_mut(), 0);
        // SAFETY: new memory aliases nothing; it is zeroed before anyone sees it.
        unsafe {
            check(sys::cuMemHostAlloc(&mut host, bytes, flags), "pinned memory")?;
            host.cast::<u8>().write_bytes(0, bytes);
            check(sys::cuMemHostGetDevicePointer_v2(&mut address, host, 0), "mapped memory")?;
        }
        Ok(Mapped { host: host.cast(), address, bytes, device: self.clone() })
    }
}

/// The device and what it says about itself.
fn find(index: u32) -> Result<(sys::CUdevice, DeviceInfo), Kind> {
    // SAFETY: loads the driver's library, as every CUDA program does.
    if !unsafe { sys::is_culib_present() } {
        return Err(Kind::NoDriver);
    }
    let mut device = 0;
    // SAFETY: calls that fill what they are given; the device is one that the driver has named.
    unsafe {
        let started = sys::cuInit(0);
        if started != CUresult::CUDA_SUCCESS {
            return Err(Kind::NoDevice(reason(started)));
        }
        let found = sys::cuDeviceGet(&mut device, index as i32);
        if found != CUresult::CUDA_SUCCESS {
            return Err(Kind::NoDevice(format!("number {index}: {}", reason(found))));
        }
        let attribute = |attribute| {
            let mut value = 0;
            check(sys::cuDeviceGetAttribute(&mut value, attribute, device), "device attribute")?;
            Ok::<u32, Kind>(value.max(0) as u32)
        };
        let (mut name, mut memory, mut driver) = ([0; 128], 0, 0);
        check(sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device), "device name")?;
        check(sys::cuDeviceTotalMem_v2(&mut memory, device), "device memory")?;
        check(sys::cuDriverGetVersion(&mut driver), "driver version")?;
        let name = std::ffi::CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
        let info = DeviceInfo {
            name,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            driver: driver as u32,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory_bytes: memory as u64,
            shared_bytes: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            unified: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
        };
        if info.capability < (7, 0) {
            let (major, minor) = info.capability;
            return Err(Kind::Unsupported(format!(
                "compute capability {major}.{minor} of {}; 7.0 is needed",
                info.name
            )));
        }
        Ok((device, info))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: nobody else is left; the driver waits for what still runs.
        unsafe {
            sys::cuCtxSetCurrent(self.context);
            if !self.stream.is_null() {
                sys::cuStreamSynchronize(self.stream);
                sys::cuStreamDestroy_v2(self.stream);
            }
            for &module in &self.modules {
                sys::cuModuleUnload(module);
            }
            sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

/// Memory of the device.
#[derive(Debug)]
pub(crate) struct Memory {
    address: u64,
    bytes: usize,
    device: Device,
}

impl Memory {
    /// Where it is, for the device.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Zeroes `len` bytes (a multiple of 4) from `at`, in the order of the stream.
    pub(crate) fn fill_zero(&self, at: usize, len: usize) -> Result<(), Kind> {
        assert!(at + len <= self.bytes && len.is_multiple_of(4), "zero {len} bytes from {at}");
        let (to, words) = (self.address + at as u64, len / 4);
        // SAFETY: within the memory.
        check(unsafe { sys::cuMemsetD32Async(to, 0, words, self.device.stream()) }, "memset")
    }

    /// Copies from the host, in the order of the stream; has read `from` when it returns.
    pub(crate) fn write(&self, at: usize, from: &[u8]) -> Result<(), Kind> {
        assert!(at + from.len() <= self.bytes, "write {} bytes at {at}", from.len());
        let to = self.address + at as u64;
        // SAFETY: within both; waits for the copy, as pinned memory is not copied before.
        unsafe {
            let (stream, len) = (self.device.stream(), from.len());
            check(sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), len, stream), "copy")?;
        }
        self.device.wait()
    }

    /// Copies to the host what the stream has written so far.
    pub(crate) fn read(&self, at: usize, to: &mut [u8]) -> Result<(), Kind> {
        assert!(at + to.len() <= self.bytes, "read {} bytes at {at}", to.len());
        let (from, stream) = (self.address + at as u64, self.device.stream());
        // SAFETY: within both; waits for the copy.
        unsafe {
            let result = sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), stream);
            check(result, "copy")?;
        }
        self.device.wait()
    }

    /// Copies within the device, in the order of the stream.
    pub(crate) fn copy_from(&self, at: usize, from: &Memory, len: usize) -> Result<(), Kind> {
        assert!(at + len <= self.bytes && len <= from.bytes, "copy {len} bytes to {at}");
        let (to, stream) = (self.address + at as u64, self.device.stream());
        // SAFETY: within both.
        check(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from.address, len, stream) }, "copy")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: ours, freed once; the driver waits for kernels that may use it.
        unsafe {
            sys::cuCtxSetCurrent(self.device.shared.context);
            sys::cuMemFree_v2(self.address);
        }
    }
}

/// Pinned host memory that the device can address.
#[derive(Debug)]
pub(crate) struct Mapped {
    host: *mut u8,
    address: u64,
    bytes: usize,
    device: Device,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Mapped {}

impl Mapped {
    /// Where it is, for the device.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Where it is, for the host.
    pub(crate) fn host(&self) -> *mut u8 {
        self.host
    }

    /// The bytes.
    ///
    /// # Safety
    /// No kernel writes them meanwhile.
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: zeroed when it was made; the caller's guarantee.
        unsafe { std::slice::from_raw_parts(self.host, self.bytes) }
    }

    /// The bytes, to be written.
    ///
    /// # Safety
    /// No kernel or copy reads or writes them meanwhile.
    pub(crate) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is the only borrow.
        unsafe { std::slice::from_raw_parts_mut(self.host, self.bytes) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: ours, freed once; the driver waits for kernels that may use it.
        unsafe {
            sys::cuCtxSetCurrent(self.device.shared.context);
            sys::cuMemFreeHost(self.host.cast());
        }
    }
}
