//! The little of the CUDA driver that kvpipe needs beside UCX: a current context for UCX's own calls, bytes copied into
//! a GPU's memory, and events by which to wait for a stream. The driver is loaded at run time; a machine without one
//! is the usual case.
//!
//! It has run with stand-ins for the driver's functions only (see the tests), never on a GPU.

#![allow(non_snake_case, reason = "names are those of cuda.h")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::OnceLock;

use libloading::Library;

use crate::shared_bytes::SharedBytes;
use crate::sys::entry_points;

const SONAME: &str = "libcuda.so.1";

const CUDA_SUCCESS: CUresult = 0;
const CU_STREAM_NON_BLOCKING: c_uint = 1;
const CU_EVENT_BLOCKING_SYNC: c_uint = 1;
const CU_EVENT_DISABLE_TIMING: c_uint = 2;
const CU_POINTER_ATTRIBUTE_IS_MANAGED: c_int = 8;
const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: c_int = 9;
const CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: c_int = 10;

type CUresult = c_int;
type CUdevice = c_int;
type CUcontext = *mut c_void;
type CUstream = *mut c_void;
type CUevent = *mut c_void;
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
        fn cuStreamSynchronize(stream: CUstream) -> CUresult;
        fn cuMemcpyHtoDAsync_v2(
            to: CUdeviceptr,
            from: *const c_void,
            len: usize,
            stream: CUstream,
        ) -> CUresult;
        fn cuPointerGetAttribute(data: *mut c_void, attribute: c_int, pointer: CUdeviceptr) -> CUresult;
        fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> CUresult;
        fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult;
        fn cuEventSynchronize(event: CUevent) -> CUresult;
        fn cuEventDestroy_v2(event: CUevent) -> CUresult;
    }
}

/// An error of the CUDA driver, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CudaError(String);

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
        Ok(Device { context, stream })
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
        let ended = unsafe { (self.calls.cuStreamSynchronize)(device.stream) };
        self.calls.check(code, "cuMemcpyHtoDAsync")?;
        self.calls.check(ended, "cuStreamSynchronize")
    }

    /// An attribute of a pointer.
    fn attribute(&self, attribute: c_int, pointer: CUdeviceptr) -> Result<c_int, CudaError> {
        let mut value: c_int = 0;
        let data = (&raw mut value).cast();
        // SAFETY: the attributes asked for here are written as int or bool, both fit; any pointer may be asked about.
        let code = unsafe { (self.calls.cuPointerGetAttribute)(data, attribute, pointer) };
        self.calls
            .check(code, "cuPointerGetAttribute")
            .map(|()| value)
    }
}

impl Calls {
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

/// Whether another process can open this memory by the IPC handles that every version of UCX and CUDA has: memory of
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
    u32::try_from(ordinal).map_err(|_| CudaError(format!("{address:#x} is on no GPU")))
}

/// The work that a stream had queued when this was recorded.
pub struct CudaEvent {
    event: CUevent,
    device: u32,
    calls: &'static Calls,
}

// SAFETY: a handle of the driver, which any thread may use; it is destroyed once, by its owner.
unsafe impl Send for CudaEvent {}
// SAFETY: as for Send.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Records the work that a stream has queued until now, without waiting for it.
    ///
    /// # Errors
    /// The driver's error, or there is no driver.
    ///
    /// # Safety
    /// `stream` must be a stream of this device's primary context that has not been destroyed, or 0 (that of the
    /// default), 1 (the legacy default) or 2 (the thread's default).
    pub unsafe fn record(device: u32, stream: usize) -> Result<Self, CudaError> {
        let driver = driver()?;
        let (_current, _) = driver.enter(device)?;
        let mut event = null_mut();
        let flags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
        // SAFETY: a context is current, and `event` is a valid place.
        let code = unsafe { (driver.calls.cuEventCreate)(&raw mut event, flags) };
        driver.calls.check(code, "cuEventCreate")?;
        let recorded = Self {
            event,
            device,
            calls: &driver.calls,
        };
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        // SAFETY: the event was just made in the current context, to which the stream belongs by the caller's promise.
        let code = unsafe { (driver.calls.cuEventRecord)(event, stream) };
        driver.calls.check(code, "cuEventRecord")?;
        Ok(recorded)
    }

    /// Sleeps until the stream has done this work.
    ///
    /// # Errors
    /// The driver's error; errors of the stream's earlier work are reported here too.
    pub fn wait(&self) -> Result<(), CudaError> {
        let _current = enter_or_log(self.device);
        // SAFETY: the event lives as long as `self`.
        let code = unsafe { (self.calls.cuEventSynchronize)(self.event) };
        self.calls.check(code, "cuEventSynchronize")
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let _current = enter_or_log(self.device);
        // SAFETY: made by `record` and destroyed once; "cuEventDestroy may be called before the event has completed".
        let code = unsafe { (self.calls.cuEventDestroy_v2)(self.event) };
        if let Err(error) = self.calls.check(code, "cuEventDestroy") {
            tracing::warn!(%error, "cuda.event_leaked");
        }
    }
}

impl std::fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaEvent")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
