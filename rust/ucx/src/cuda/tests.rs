//! With stand-ins for the driver's functions, which write down what they are called with. None of it runs on a GPU.

#![allow(clippy::print_stderr, reason = "says why a test is skipped")]

use std::cell::RefCell;

use super::*;

thread_local! {
    static CALLED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

const CONTEXT: usize = 0xc0;
const STREAM: usize = 0x50;
const REFUSED: CUresult = 1;

fn note(call: impl Into<String>) -> CUresult {
    CALLED.with_borrow_mut(|called| called.push(call.into()));
    CUDA_SUCCESS
}

fn called() -> Vec<String> {
    CALLED.take()
}

unsafe extern "C" fn init(_: c_uint) -> CUresult {
    note("init")
}

unsafe extern "C" fn error_name(_: CUresult, name: *mut *const c_char) -> CUresult {
    // SAFETY: the caller's place.
    unsafe { *name = c"CUDA_ERROR_INVALID_VALUE".as_ptr() };
    CUDA_SUCCESS
}

unsafe extern "C" fn count(count: *mut c_int) -> CUresult {
    // SAFETY: the caller's place.
    unsafe { *count = 2 };
    CUDA_SUCCESS
}

unsafe extern "C" fn get(device: *mut CUdevice, ordinal: c_int) -> CUresult {
    // SAFETY: the caller's place.
    unsafe { *device = ordinal };
    note(format!("get {ordinal}"))
}

unsafe extern "C" fn retain(context: *mut CUcontext, _: CUdevice) -> CUresult {
    // SAFETY: the caller's place.
    unsafe { *context = std::ptr::without_provenance_mut(CONTEXT) };
    note("retain")
}

unsafe extern "C" fn push(context: CUcontext) -> CUresult {
    note(format!("push {:#x}", context.addr()))
}

unsafe extern "C" fn pop(_: *mut CUcontext) -> CUresult {
    note("pop")
}

unsafe extern "C" fn create_stream(stream: *mut CUstream, flags: c_uint) -> CUresult {
    // SAFETY: the caller's place.
    unsafe { *stream = std::ptr::without_provenance_mut(STREAM) };
    note(format!("stream flags={flags}"))
}

unsafe extern "C" fn synchronize(stream: CUstream) -> CUresult {
    note(format!("synchronize {:#x}", stream.addr()))
}

unsafe extern "C" fn copy_to(
    to: CUdeviceptr,
    _: *const c_void,
    len: usize,
    stream: CUstream,
) -> CUresult {
    note(format!("copy {len} to {to:#x} on {:#x}", stream.addr()));
    if to == 0 { REFUSED } else { CUDA_SUCCESS }
}

unsafe extern "C" fn attribute(_: *mut c_void, _: c_int, _: CUdeviceptr) -> CUresult {
    REFUSED
}

unsafe extern "C" fn create_event(_: *mut CUevent, _: c_uint) -> CUresult {
    REFUSED
}

unsafe extern "C" fn record(_: CUevent, _: CUstream) -> CUresult {
    REFUSED
}

unsafe extern "C" fn event(_: CUevent) -> CUresult {
    REFUSED
}

fn stand_in() -> Driver {
    let calls = Calls {
        cuInit: init,
        cuGetErrorName: error_name,
        cuDeviceGetCount: count,
        cuDeviceGet: get,
        cuDevicePrimaryCtxRetain: retain,
        cuCtxPushCurrent_v2: push,
        cuCtxPopCurrent_v2: pop,
        cuStreamCreate: create_stream,
        cuStreamSynchronize: synchronize,
        cuMemcpyHtoDAsync_v2: copy_to,
        cuPointerGetAttribute: attribute,
        cuEventCreate: create_event,
        cuEventRecord: record,
        cuEventSynchronize: event,
        cuEventDestroy_v2: event,
    };
    Driver::new(calls).unwrap()
}

fn copy_with(driver: &Driver, device: u32, to: CUdeviceptr) -> Result<(), CudaError> {
    // SAFETY: the stand-in touches no memory.
    unsafe { driver.copy(device, to, b"kv"[..].into()) }
}

#[test]
fn a_copy_runs_on_a_stream_of_its_own_and_is_waited_for() {
    let driver = stand_in();
    copy_with(&driver, 1, 0x1000).unwrap();
    let opened = [
        "init",
        "get 1",
        "retain",
        "push 0xc0",
        "stream flags=1",
        "pop",
    ];
    let copied = [
        "push 0xc0",
        "copy 2 to 0x1000 on 0x50",
        "synchronize 0x50",
        "pop",
    ];
    assert_eq!(called(), [&opened[..], &copied[..]].concat());
    copy_with(&driver, 1, 0x2000).unwrap();
    assert_eq!(called().len(), copied.len());
}

#[test]
fn a_copy_that_is_refused_names_the_call_and_leaves_no_context_current() {
    let driver = stand_in();
    let error = copy_with(&driver, 0, 0).unwrap_err();
    let text = "cuMemcpyHtoDAsync: CUDA_ERROR_INVALID_VALUE (1)";
    assert_eq!(error.to_string(), text);
    let called = called();
    let num = |name: &str| called.iter().filter(|call| call.starts_with(name)).count();
    assert_eq!(num("push"), num("pop"));
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_that_counts_those_that_are() {
    let error = copy_with(&stand_in(), 2, 0x1000).unwrap_err();
    assert!(error.to_string().contains("no cuda:2; this process sees 2"));
}

/// Memory on a GPU, for as long as the process lives.
fn on_gpu(len: usize) -> Result<(Library, CUdeviceptr), CudaError> {
    type Allocate = unsafe extern "C" fn(*mut CUdeviceptr, usize) -> CUresult;
    let (_current, _) = driver()?.enter(0)?;
    // SAFETY: the driver is loaded already.
    let library = unsafe { Library::new(SONAME) }.unwrap();
    let mut address = 0;
    // SAFETY: the prototype in cuda.h.
    let allocate = unsafe { library.get::<Allocate>(b"cuMemAlloc_v2\0") }.unwrap();
    // SAFETY: a context is current, and `address` is a valid place.
    let code = unsafe { allocate(&raw mut address, len) };
    assert_eq!(code, CUDA_SUCCESS);
    Ok((library, address))
}

/// Has not run: no machine with a GPU was there.
#[test]
fn on_a_gpu_bytes_are_where_they_belong_when_the_copy_returns() {
    type Read = unsafe extern "C" fn(*mut c_void, CUdeviceptr, usize) -> CUresult;
    let (library, address) = match on_gpu(4096) {
        Ok(allocated) => allocated,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    assert_eq!(device_of(address as usize), Ok(0));
    assert!(is_exportable(address as usize));
    let bytes: Vec<u8> = (0..4096u32).map(|at| at as u8).collect();
    // SAFETY: allocated above with this length, and never freed.
    unsafe { copy(0, address, bytes[..].into()) }.unwrap();
    let (_current, _) = driver().unwrap().enter(0).unwrap();
    let mut back = vec![0; 4096];
    let to = back.as_mut_ptr().cast();
    // SAFETY: the prototype in cuda.h.
    let read = unsafe { library.get::<Read>(b"cuMemcpyDtoH_v2\0") }.unwrap();
    // SAFETY: both ranges have this length.
    let code = unsafe { read(to, address, 4096) };
    assert_eq!((code, back), (CUDA_SUCCESS, bytes));
}

/// Has not run, as above.
#[test]
fn on_a_gpu_an_event_is_over_when_its_stream_is() {
    // SAFETY: the legacy default stream is always there.
    match unsafe { CudaEvent::record(0, 1) } {
        Ok(event) => event.wait().unwrap(),
        Err(error) => eprintln!("skipped: {error}"),
    }
}

#[test]
fn without_a_driver_its_absence_is_the_error() {
    if driver().is_ok() {
        eprintln!("skipped: this machine has a CUDA driver");
        return;
    }
    assert!(device_of(4096).unwrap_err().to_string().contains("CUDA"));
    assert!(!is_exportable(4096));
    assert!(enter_or_log(0).is_none());
}
