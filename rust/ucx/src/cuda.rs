//! The little of the CUDA driver that kvpipe needs beside UCX: a current context for UCX's own calls, bytes copied into
//! a GPU's memory or between pieces of it, and events by which to wait for a stream. The driver is loaded at run time; a
//! machine without one is the usual case.

#![allow(non_snake_case, reason = "names are those of cuda.h")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::OnceLock;

use libloading::Library;

use crate::shared_bytes::SharedBytes;
use crate::sys::entry_points;

mod copies;
mod digests;
mod event;
mod kernel;
mod staging;

pub use copies::{Chunks, CopyReport};
pub(crate) use copies::{DevicePiece, copy_pieces, prepare_copies, reach};
pub use digests::{DeviceBlock, Digests, OnDigested};
pub use event::CudaEvent;
pub(crate) use staging::{StagedWrites, read_staged};

const SONAME: &str = "libcuda.so.1";

const CUDA_SUCCESS: CUresult = 0;
const CUDA_ERROR_NOT_READY: CUresult = 600;
const CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: CUresult = 704;
const CU_STREAM_CAPTURE_STATUS_NONE: c_int = 0;
const CU_STREAM_NON_BLOCKING: c_uint = 1;
const CU_EVENT_DISABLE_TIMING: c_uint = 2;
const CU_POINTER_ATTRIBUTE_IS_MANAGED: c_int = 8;
const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: c_int = 9;
const CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: c_int = 10;
const CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: c_int = 11;
const CU_POINTER_ATTRIBUTE_RANGE_SIZE: c_int = 12;

type CUresult = c_int;
type CUdevice = c_int;
type CUcontext = *mut c_void;
type CUstream = *mut c_void;
type CUevent = *mut c_void;
type CUmodule = *mut c_void;
type CUfunction = *mut c_void;
type CUstreamCallback = unsafe extern "C" fn(CUstream, CUresult, *mut c_void);
type CUdeviceptr = u64;

entry_points! {
    /// The driver's functions, as cuda.h of CUDA 11 to 13 names them for linkers.
    Calls {
        fn cuInit(flags: c_uint) -> CUresult;
        fn cuGetErrorName(error: CUresult, name: *mut *const c_char) -> CUresult;
        fn cuDeviceGetCount(count: *mut c_int) -> CUresult;
        fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> CUresult;
        fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> CUresult;
        fn cuCtxPushCurrent_v2(context: CUcontext) -> CUresult;
        fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> CUresult;
        fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> CUresult;
        fn cuStreamIsCapturing(stream: CUstream, status: *mut c_int) -> CUresult;
        fn cuStreamQuery(stream: CUstream) -> CUresult;
        fn cuStreamSynchronize(stream: CUstream) -> CUresult;
        fn cuMemcpyHtoDAsync_v2(
            to: CUdeviceptr,
            from: *const c_void,
            len: usize,
            stream: CUstream,
        ) -> CUresult;
        fn cuMemcpyDtoHAsync_v2(
            to: *mut c_void,
            from: CUdeviceptr,
            len: usize,
            stream: CUstream,
        ) -> CUresult;
        fn cuPointerGetAttribute(data: *mut c_void, attribute: c_int, pointer: CUdeviceptr) -> CUresult;
        fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> CUresult;
        fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult;
        fn cuEventQuery(event: CUevent) -> CUresult;
        fn cuEventSynchronize(event: CUevent) -> CUresult;
        fn cuEventDestroy_v2(event: CUevent) -> CUresult;
        fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> CUresult;
        fn cuModuleGetFunction(
            function: *mut CUfunction,
            module: CUmodule,
            name: *const c_char,
        ) -> CUresult;
        fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) -> CUresult;
        fn cuMemHostAlloc(memory: *mut *mut c_void, len: usize, flags: c_uint) -> CUresult;
        fn cuLaunchKernel(
            function: CUfunction,
            grid_x: c_uint,
            grid_y: c_uint,
            grid_z: c_uint,
            block_x: c_uint,
            block_y: c_uint,
            block_z: c_uint,
            shared_bytes: c_uint,
            stream: CUstream,
            parameters: *mut *mut c_void,
            extra: *mut *mut c_void,
        ) -> CUresult;
        fn cuStreamAddCallback(
            stream: CUstream,
            callback: CUstreamCallback,
            data: *mut c_void,
            flags: c_uint,
        ) -> CUresult;
    }
}

/// An error of the CUDA driver, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CudaError(String);

impl CudaError {
    pub(crate) fn new(text: &str) -> Self {
        Self(text.to_owned())
    }
}

/// The driver of this process.
struct Driver {
    calls: Calls,
    /// By ordinal, each opened on first use.
    devices: Vec<OnceLock<Result<Device, CudaError>>>,
}

/// A GPU's primary context, which all users of the runtime API share, torch among them, and a stream of our own in it.
/// Both live as long as the process.
struct Device {
    context: CUcontext,
    stream: CUstream,
    /// Opened on first use.
    copier: OnceLock<Result<copies::Copier, CudaError>>,
    digesting_copier: OnceLock<Option<copies::DigestingCopier>>,
    digester: OnceLock<Result<digests::Digester, CudaError>>,
    slots: staging::HostSlots,
}

// SAFETY: handles of the driver, which any thread may use: "the CUDA driver API is thread-safe", and a context may be
// current to many threads at once. Neither handle is ever destroyed.
unsafe impl Send for Device {}
// SAFETY: as for Send.
unsafe impl Sync for Device {}

fn driver() -> Result<&'static Driver, CudaError> {
    static DRIVER: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
    DRIVER
        .get_or_init(|| Driver::new(load()?))
        .as_ref()
        .map_err(Clone::clone)
}

/// True if there is a CUDA driver with a device that this process sees.
pub fn has_cuda_devices() -> bool {
    driver().is_ok_and(|driver| !driver.devices.is_empty())
}

fn load() -> Result<Calls, CudaError> {
    // SAFETY: the driver's initialisers are meant to run in any process.
    let library = unsafe { Library::new(SONAME) };
    let library =
        library.map_err(|error| CudaError(format!("there is no CUDA driver here ({error})")))?;
    // SAFETY: this is the driver, by its name; it is leaked below and so stays loaded.
    let calls = unsafe { Calls::resolve(&library) };
    std::mem::forget(library);
    calls.map_err(|name| CudaError(format!("the CUDA driver {SONAME} has no {name}; update it")))
}

impl Driver {
    fn new(calls: Calls) -> Result<Self, CudaError> {
        // SAFETY: may be called at any time, more than once too.
        let code = unsafe { (calls.cuInit)(0) };
        calls.check(code, "cuInit")?;
        let mut count = 0;
        // SAFETY: `count` is a valid place.
        let code = unsafe { (calls.cuDeviceGetCount)(&raw mut count) };
        calls.check(code, "cuDeviceGetCount")?;
        let count = usize::try_from(count).unwrap_or(0);
        let devices = std::iter::repeat_with(OnceLock::new).take(count).collect();
        Ok(Self { calls, devices })
    }

    fn device(&self, ordinal: u32) -> Result<&Device, CudaError> {
        let device = self.devices.get(ordinal as usize).ok_or_else(|| {
            let count = self.devices.len();
            CudaError(format!(
                "there is no cuda:{ordinal}; this process sees {count} GPUs"
            ))
        })?;
        device
            .get_or_init(|| self.open(ordinal))
            .as_ref()
            .map_err(Clone::clone)
    }

    fn open(&self, ordinal: u32) -> Result<Device, CudaError> {
        let (mut device, mut context, mut stream) = (0, null_mut(), null_mut());
        // SAFETY: `device` is a valid place.
        let code = unsafe { (self.calls.cuDeviceGet)(&raw mut device, ordinal.cast_signed()) };
        self.calls.check(code, "cuDeviceGet")?;
        // SAFETY: the device was just given out, and `context` is a valid place.
        let code = unsafe { (self.calls.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        self.calls.check(code, "cuDevicePrimaryCtxRetain")?;
        let _current = self.push(context)?;
        // SAFETY: a context is current, and `stream` is a valid place.
        let code = unsafe { (self.calls.cuStreamCreate)(&raw mut stream, CU_STREAM_NON_BLOCKING) };
        self.calls.check(code, "cuStreamCreate")?;
        Ok(Device {
            context,
            stream,
            copier: OnceLock::new(),
            digesting_copier: OnceLock::new(),
            digester: OnceLock::new(),
            slots: staging::HostSlots::default(),
        })
    }

    fn push(&self, context: CUcontext) -> Result<Current<'_>, CudaError> {
        // SAFETY: a primary context that was retained and is never released.
        let code = unsafe { (self.calls.cuCtxPushCurrent_v2)(context) };
        self.calls.check(code, "cuCtxPushCurrent")?;
        Ok(Current {
            calls: &self.calls,
            _of_this_thread: PhantomData,
        })
    }

    fn enter(&self, ordinal: u32) -> Result<(Current<'_>, &Device), CudaError> {
        let device = self.device(ordinal)?;
        Ok((self.push(device.context)?, device))
    }

    /// # Safety
    /// `to` must be memory of this device, valid for `data.len()` bytes.
    unsafe fn copy(
        &self,
        ordinal: u32,
        to: CUdeviceptr,
        data: SharedBytes<'_>,
    ) -> Result<(), CudaError> {
        let (_current, device) = self.enter(ordinal)?;
        let from = data.as_ptr().cast();
        // Our own stream does not wait for work that others have queued. cuMemcpyHtoD may return before the bytes are
        // in place ("API synchronization behavior", pageable memory).
        // SAFETY: the caller's promise for `to`; `data` lives until the stream is synchronized, here.
        let code =
            unsafe { (self.calls.cuMemcpyHtoDAsync_v2)(to, from, data.len(), device.stream) };
        // Also after a refused copy: the driver reads nothing of `data` once this returns.
        // SAFETY: our stream, whose context is current.
        let ended = unsafe { self.calls.synchronize(device.stream) };
        self.calls.check(code, "cuMemcpyHtoDAsync")?;
        ended
    }

    /// # Safety
    /// `from` must be memory of this device, valid for `len` bytes.
    unsafe fn read(
        &self,
        ordinal: u32,
        from: CUdeviceptr,
        len: usize,
    ) -> Result<Vec<u8>, CudaError> {
        let (_current, device) = self.enter(ordinal)?;
        let mut bytes = vec![0; len];
        let to = bytes.as_mut_ptr().cast();
        // SAFETY: the caller's promise for `from`; `bytes` lives until the stream is synchronized, here.
        let code = unsafe { (self.calls.cuMemcpyDtoHAsync_v2)(to, from, len, device.stream) };
        // SAFETY: our stream, whose context is current.
        let ended = unsafe { self.calls.synchronize(device.stream) };
        self.calls.check(code, "cuMemcpyDtoHAsync")?;
        ended.map(|()| bytes)
    }

    /// True if a stream has done all that it was given.
    ///
    /// # Safety
    /// The stream is of the current context.
    unsafe fn is_idle(&self, stream: CUstream) -> Result<bool, CudaError> {
        let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
        // A query would end a capture.
        // SAFETY: the caller's promise, and `status` is a valid place.
        let code = unsafe { (self.calls.cuStreamIsCapturing)(stream, &raw mut status) };
        self.calls.check(code, "cuStreamIsCapturing")?;
        if status != CU_STREAM_CAPTURE_STATUS_NONE {
            let text = "a CUDA graph is being captured on the tensor's stream";
            return Err(CudaError(text.to_owned()));
        }
        // SAFETY: the caller's promise.
        match unsafe { (self.calls.cuStreamQuery)(stream) } {
            CUDA_ERROR_NOT_READY => Ok(false),
            code => self.calls.check(code, "cuStreamQuery").map(|()| true),
        }
    }

    /// An attribute of a pointer, which CUDA writes as bool, int, address or size.
    fn attribute(&self, attribute: c_int, pointer: CUdeviceptr) -> Result<u64, CudaError> {
        let mut value = 0_u64;
        let data = (&raw mut value).cast();
        // SAFETY: the attributes asked for here fit into 8 bytes; any pointer may be asked about.
        let code = unsafe { (self.calls.cuPointerGetAttribute)(data, attribute, pointer) };
        self.calls
            .check(code, "cuPointerGetAttribute")
            .map(|()| value)
    }
}

impl Calls {
    /// Waits for a stream. The CUDA driver may report an error of earlier work before the stream is done: then a second call
    /// waits, and the first error is returned.
    ///
    /// # Safety
    /// The stream is of the current context.
    unsafe fn synchronize(&self, stream: CUstream) -> Result<(), CudaError> {
        let wait = || {
            // SAFETY: the caller's promise.
            let code = unsafe { (self.cuStreamSynchronize)(stream) };
            self.check(code, "cuStreamSynchronize")
        };
        wait().inspect_err(|_| {
            let _ = wait();
        })
    }

    fn check(&self, code: CUresult, call: &str) -> Result<(), CudaError> {
        if code == CUDA_SUCCESS {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: `name` is a valid place.
        let known = unsafe { (self.cuGetErrorName)(code, &raw mut name) };
        let name = if known == CUDA_SUCCESS && !name.is_null() {
            // SAFETY: the driver's own string, which ends in NUL and lives as long as the driver.
            unsafe { CStr::from_ptr(name) }.to_string_lossy()
        } else {
            "unknown error".into()
        };
        Err(CudaError(format!("{call}: {name} ({code})")))
    }
}

/// A device's primary context, current in this thread until this is dropped.
pub(crate) struct Current<'d> {
    calls: &'d Calls,
    /// It is popped on the thread that pushed it.
    _of_this_thread: PhantomData<*mut ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = null_mut();
        // SAFETY: pushed in this thread by `push`, and popped once; guards are dropped in reverse order.
        let code = unsafe { (self.calls.cuCtxPopCurrent_v2)(&raw mut popped) };
        if let Err(error) = self.calls.check(code, "cuCtxPopCurrent") {
            tracing::error!(%error, "cuda.context_kept");
        }
    }
}

/// Makes a device's context current. A failure is logged, and UCX then fails itself.
pub(crate) fn enter_or_log(ordinal: u32) -> Option<Current<'static>> {
    let entered = driver().and_then(|driver| driver.enter(ordinal));
    entered
        .map(|(current, _)| current)
        .inspect_err(|error| tracing::error!(%error, ordinal, "cuda.no_context"))
        .ok()
}

/// Copies `data` into a device's memory, synchronously. It waits for no other stream.
///
/// # Safety
/// `to` must be memory of this device, valid for `data.len()` bytes.
pub(crate) unsafe fn copy(
    ordinal: u32,
    to: CUdeviceptr,
    data: SharedBytes<'_>,
) -> Result<(), CudaError> {
    // SAFETY: the caller's promise is the same.
    unsafe { driver()?.copy(ordinal, to, data) }
}

/// Copies `len` bytes out of a device's memory, synchronously. It waits for no other stream.
///
/// # Safety
/// `from` must be memory of this device, valid for `len` bytes.
pub(crate) unsafe fn read(
    ordinal: u32,
    from: CUdeviceptr,
    len: usize,
) -> Result<Vec<u8>, CudaError> {
    // SAFETY: the caller's promise is the same.
    unsafe { driver()?.read(ordinal, from, len) }
}

/// True if another process can open this memory by the IPC handles that every version of UCX and CUDA has: memory of
/// cudaMalloc, unlike the mappings that torch makes with `expandable_segments`.
pub fn is_exportable(address: usize) -> bool {
    let attribute = CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    driver().and_then(|driver| driver.attribute(attribute, address as CUdeviceptr)) == Ok(1)
}

/// The GPU to which a CUDA address belongs.
///
/// # Errors
/// There is no driver, the address is not CUDA's, or it is managed memory, which may be anywhere.
pub fn device_of(address: usize) -> Result<u32, CudaError> {
    let (driver, pointer) = (driver()?, address as CUdeviceptr);
    if driver.attribute(CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer)? & 1 != 0 {
        return Err(CudaError(format!("{address:#x} is managed memory")));
    }
    let ordinal = driver.attribute(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer)?;
    // An int, negative for no GPU.
    let ordinal = ordinal as c_int;
    u32::try_from(ordinal).map_err(|_| CudaError(format!("{address:#x} is on no GPU")))
}

/// True if `len` bytes at this address are of one allocation, or of one mapping of another process's.
///
/// # Errors
/// There is no driver, or the address is not CUDA's.
pub(crate) fn is_of_one_range(address: u64, len: u64) -> Result<bool, CudaError> {
    let driver = driver()?;
    let start = driver.attribute(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address)?;
    let size = driver.attribute(CU_POINTER_ATTRIBUTE_RANGE_SIZE, address)?;
    Ok(address >= start && len <= size.saturating_sub(address - start))
}

const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: c_int = 116;
const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: c_int = 117;
const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: c_int = 118;
const CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST: c_int = 1;
const CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: c_int = 100;
const CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX: c_int = 0;
const CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER: c_int = 100;

entry_points! {
    /// The driver's functions for writes of network cards, from CUDA 11.3 on.
    RdmaCalls {
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice) -> CUresult;
        fn cuFlushGPUDirectRDMAWrites(target: c_int, scope: c_int) -> CUresult;
    }
}

/// Makes what network cards have written into a GPU's memory visible to kernels that are launched from now on. Most GPUs
/// need no call for that.
///
/// # Errors
/// The driver's, or the GPU has no way.
pub fn flush_remote_writes(ordinal: u32) -> Result<(), CudaError> {
    static CALLS: OnceLock<Option<RdmaCalls>> = OnceLock::new();
    let driver = driver()?;
    match CALLS.get_or_init(load_rdma) {
        Some(calls) => calls.flush(driver, ordinal),
        None => Ok(()), // before CUDA 11.3 a kernel's launch was the only order that was promised
    }
}

fn load_rdma() -> Option<RdmaCalls> {
    // SAFETY: as in `load`, where it was loaded first.
    let library = unsafe { Library::new(SONAME) }.ok()?;
    // SAFETY: as in `load`.
    let calls = unsafe { RdmaCalls::resolve(&library) }.ok();
    std::mem::forget(library);
    calls
}

impl RdmaCalls {
    fn flush(&self, driver: &Driver, ordinal: u32) -> Result<(), CudaError> {
        let (_current, _) = driver.enter(ordinal)?;
        let mut device = 0;
        // SAFETY: `device` is a valid place.
        let code = unsafe { (driver.calls.cuDeviceGet)(&raw mut device, ordinal.cast_signed()) };
        driver.calls.check(code, "cuDeviceGet")?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: `value` is a valid place, and the device was just given out.
            let code = unsafe { (self.cuDeviceGetAttribute)(&raw mut value, attribute, device) };
            let checked = driver.calls.check(code, "cuDeviceGetAttribute");
            checked.map(|()| value)
        };
        let ordering = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?;
        let is_reachable = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)? != 0;
        if !is_reachable || ordering >= CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER {
            return Ok(());
        }
        let options = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?;
        if options & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST == 0 {
            let text =
                "the GPU does not order what network cards write, and the host cannot flush it";
            return Err(CudaError(text.to_owned()));
        }
        let target = CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        // SAFETY: a context is current; the call touches no memory of ours.
        let code = unsafe { (self.cuFlushGPUDirectRDMAWrites)(target, scope) };
        driver.calls.check(code, "cuFlushGPUDirectRDMAWrites")
    }
}

#[cfg(test)]
mod tests;
