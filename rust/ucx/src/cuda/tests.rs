//! With stand-ins for the driver's functions, which write down what they are called with; and, marked `on_a_gpu`, with the
//! driver itself.

#![allow(clippy::print_stderr, reason = "says why a test is skipped")]
#![allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "buffers of a test, and the driver's functions for them"
)]

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Mutex};

use super::copies::{Chunk, Copier, DigestedChunk, DigestingCopier};
use super::digests::{DigestedBlock, Digester};
use super::*;
use crate::{Buffer, MemoryKind};

thread_local! {
    static CALLED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

const CONTEXT: usize = 0xc0;
const STREAM: usize = 0x50;
const BUSY: usize = 0x51;
const CAPTURING: usize = 0x52;
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

unsafe extern "C" fn is_capturing(stream: CUstream, status: *mut c_int) -> CUresult {
    // SAFETY: the caller's place.
    unsafe { *status = c_int::from(stream.addr() == CAPTURING) };
    CUDA_SUCCESS
}

unsafe extern "C" fn query(stream: CUstream) -> CUresult {
    match stream.addr() {
        STREAM => CUDA_SUCCESS,
        BUSY => CUDA_ERROR_NOT_READY,
        _ => REFUSED,
    }
}

unsafe extern "C" fn synchronize(stream: CUstream) -> CUresult {
    note(format!("synchronize {:#x}", stream.addr()));
    SYNCHRONIZED.get()
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

unsafe extern "C" fn copy_from(
    _: *mut c_void,
    from: CUdeviceptr,
    len: usize,
    stream: CUstream,
) -> CUresult {
    note(format!("copy {len} from {from:#x} on {:#x}", stream.addr()))
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

thread_local! {
    static LAUNCHED: Cell<CUresult> = const { Cell::new(CUDA_SUCCESS) };
    static CALLED_BACK: Cell<CUresult> = const { Cell::new(CUDA_SUCCESS) };
    static ENDED: Cell<CUresult> = const { Cell::new(CUDA_SUCCESS) };
    static SYNCHRONIZED: Cell<CUresult> = const { Cell::new(CUDA_SUCCESS) };
    /// A callback that the driver has refused, and calls nevertheless, or one that it has yet to call.
    static UNCALLED: Cell<Option<(CUstreamCallback, usize)>> = const { Cell::new(None) };
    /// True if kernels do not end.
    static IS_HELD: Cell<bool> = const { Cell::new(false) };
}

const COPYING: usize = 1;
const DIGESTING: usize = 2;
const COPYING_AND_DIGESTING: usize = 3;

unsafe extern "C" fn load(_: *mut CUmodule, _: *const c_void) -> CUresult {
    note("load")
}

unsafe extern "C" fn find(function: *mut CUfunction, _: CUmodule, name: *const c_char) -> CUresult {
    // SAFETY: the caller's string.
    let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap();
    let known = [
        ("kvpipe_copy_chunks", COPYING),
        ("kvpipe_digest_blocks", DIGESTING),
        ("kvpipe_copy_and_digest", COPYING_AND_DIGESTING),
    ];
    let (_, found) = known.into_iter().find(|(known, _)| *known == name).unwrap();
    // SAFETY: the caller's place.
    unsafe { *function = std::ptr::without_provenance_mut(found) };
    note(format!("find {name}"))
}

unsafe extern "C" fn enable_peer(_: CUcontext, _: c_uint) -> CUresult {
    note("enable peer".to_owned())
}

unsafe extern "C" fn host_alloc(memory: *mut *mut c_void, len: usize, _: c_uint) -> CUresult {
    let bytes = vec![0_u64; len / 8].leak();
    // SAFETY: the caller's place.
    unsafe { *memory = bytes.as_mut_ptr().cast() };
    note("host alloc")
}

/// Does as the kernels do, in the host's memory.
unsafe extern "C" fn launch_kernel(
    function: CUfunction,
    blocks: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: CUstream,
    parameters: *mut *mut c_void,
    _: *mut *mut c_void,
) -> CUresult {
    if LAUNCHED.get() != CUDA_SUCCESS {
        return LAUNCHED.get();
    }
    // SAFETY: the kernel's two parameters; a list has as many items as the second says.
    let (list, num) = unsafe {
        let list = *(*parameters).cast::<*mut c_void>();
        (list, **parameters.add(1).cast::<*const u32>())
    };
    if function.addr() == COPYING {
        // SAFETY: chunks, whose addresses are the test's buffers.
        unsafe {
            for chunk in std::slice::from_raw_parts(list.cast::<Chunk>(), num as usize) {
                let (from, to) = (chunk.from as *const u8, chunk.to as *mut u8);
                std::ptr::copy_nonoverlapping(from, to, chunk.num_bytes as usize);
            }
        }
        return note(format!("launch {num} chunks by {blocks} blocks"));
    }
    if function.addr() == COPYING_AND_DIGESTING {
        // SAFETY: the same.
        unsafe {
            let chunks = std::slice::from_raw_parts_mut(list.cast::<DigestedChunk>(), num as usize);
            for chunk in chunks {
                let (from, to) = (chunk.from as *mut u8, chunk.to as *mut u8);
                let len = chunk.num_bytes as usize;
                std::ptr::copy_nonoverlapping(from, to, len);
                chunk.digest = SharedBytes::new(from, len).update_crc64(0);
            }
        }
        return note(format!("launch {num} digested chunks by {blocks} blocks"));
    }
    // SAFETY: blocks, whose addresses are the test's buffers.
    unsafe {
        for block in std::slice::from_raw_parts_mut(list.cast::<DigestedBlock>(), num as usize) {
            let (from, len) = (block.from as *mut u8, block.num_bytes as usize);
            block.digest = SharedBytes::new(from, len).update_crc64(0);
        }
    }
    note(format!("launch {num} digests by {blocks} blocks"))
}

unsafe extern "C" fn add_callback(
    stream: CUstream,
    callback: CUstreamCallback,
    data: *mut c_void,
    _: c_uint,
) -> CUresult {
    if CALLED_BACK.get() == CUDA_SUCCESS && !IS_HELD.get() {
        // SAFETY: the driver calls back with the caller's data.
        unsafe { callback(stream, ENDED.get(), data) };
    } else {
        UNCALLED.set(Some((callback, data.expose_provenance())));
    }
    CALLED_BACK.get()
}

/// Calls back what was not called.
fn call_back() {
    let (callback, data) = UNCALLED.take().unwrap();
    let data = std::ptr::with_exposed_provenance_mut(data);
    // SAFETY: as the driver would.
    unsafe { callback(null_mut(), CUDA_SUCCESS, data) };
}

pub(super) fn stand_in() -> Driver {
    let calls = Calls {
        cuInit: init,
        cuGetErrorName: error_name,
        cuDeviceGetCount: count,
        cuDeviceGet: get,
        cuDevicePrimaryCtxRetain: retain,
        cuCtxPushCurrent_v2: push,
        cuCtxPopCurrent_v2: pop,
        cuStreamCreate: create_stream,
        cuStreamIsCapturing: is_capturing,
        cuStreamQuery: query,
        cuStreamSynchronize: synchronize,
        cuMemcpyHtoDAsync_v2: copy_to,
        cuMemcpyDtoHAsync_v2: copy_from,
        cuPointerGetAttribute: attribute,
        cuEventCreate: create_event,
        cuEventRecord: record,
        cuEventQuery: event,
        cuEventSynchronize: event,
        cuEventDestroy_v2: event,
        cuModuleLoadData: load,
        cuModuleGetFunction: find,
        cuCtxEnablePeerAccess: enable_peer,
        cuMemHostAlloc: host_alloc,
        cuLaunchKernel: launch_kernel,
        cuStreamAddCallback: add_callback,
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
fn bytes_are_read_on_the_same_stream_which_is_waited_for() {
    let driver = stand_in();
    // SAFETY: the stand-in touches no memory.
    assert_eq!(unsafe { driver.read(1, 0x1000, 2) }, Ok(vec![0; 2]));
    let last = &called()[6..];
    assert_eq!(
        last,
        [
            "push 0xc0",
            "copy 2 from 0x1000 on 0x50",
            "synchronize 0x50",
            "pop"
        ]
    );
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

#[test]
fn a_stream_is_idle_when_it_has_done_everything_and_is_not_asked_while_a_graph_is_captured() {
    let driver = stand_in();
    // SAFETY: the stand-in only compares them.
    let is_idle =
        |stream: usize| unsafe { driver.is_idle(std::ptr::without_provenance_mut(stream)) };
    assert_eq!(is_idle(STREAM), Ok(true));
    assert_eq!(is_idle(BUSY), Ok(false));
    let captured = is_idle(CAPTURING).unwrap_err().to_string();
    assert!(captured.contains("captured"), "{captured}");
    assert!(
        is_idle(0x99)
            .unwrap_err()
            .to_string()
            .contains("cuStreamQuery")
    );
}

/// A driver with its copier, and how its copies have ended.
struct Copies {
    driver: Driver,
    copier: &'static Copier,
    ended: Arc<Mutex<Vec<bool>>>,
}

impl Copies {
    fn new() -> Self {
        let driver = stand_in();
        let current = driver.push(null_mut()).unwrap();
        let copier = Copier::new(&driver.calls, &current).unwrap();
        drop(current);
        called();
        Self {
            driver,
            copier: Box::leak(Box::new(copier)),
            ended: Arc::default(),
        }
    }

    fn copy(&self, pieces: &[DevicePiece]) -> Result<(), CudaError> {
        let ended = Arc::clone(&self.ended);
        let on_copied = Box::new(move |is_copied| ended.lock().unwrap().push(is_copied));
        let current = self.driver.push(null_mut()).unwrap();
        let report = Arc::new(CopyReport::new(None));
        // SAFETY: the pieces are the test's buffers.
        unsafe {
            let pieces = pieces.iter().copied();
            self.copier
                .launch(&self.driver.calls, &current, pieces, report, on_copied)
        }
    }

    fn ended(&self) -> Vec<bool> {
        std::mem::take(&mut self.ended.lock().unwrap())
    }
}

#[test]
fn pieces_of_any_size_are_copied_by_one_launch() {
    let copies = Copies::new();
    let source: Vec<u8> = (0..200_000u32).map(|at| (at % 251) as u8).collect();
    let mut target = vec![0; source.len()];
    let (from, to) = (source.as_ptr() as u64, target.as_mut_ptr() as u64);
    let pieces = [(to + 70_001, from, 70_000), (to, from + 100_000, 13)];
    copies.copy(&pieces).unwrap();
    assert_eq!(copies.ended(), [true]);
    assert_eq!(target[70_001..140_001], source[..70_000]);
    assert_eq!(target[..13], source[100_000..100_013]);
    assert!(target[13..70_001].iter().all(|byte| *byte == 0));
    assert!(called().contains(&"launch 4 chunks by 4 blocks".to_owned()));
}

#[test]
fn a_copy_that_is_not_launched_is_an_error_and_ends_never() {
    let copies = Copies::new();
    LAUNCHED.set(REFUSED);
    let error = copies.copy(&[]).unwrap_err();
    LAUNCHED.set(CUDA_SUCCESS);
    assert!(error.to_string().contains("cuLaunchKernel"));
    assert!(copies.ended().is_empty());
    let called = called();
    let num = |name: &str| called.iter().filter(|call| call.starts_with(name)).count();
    assert_eq!(num("push"), num("pop"));
}

#[test]
fn a_copy_of_which_the_driver_does_not_report_the_end_is_waited_for() {
    let copies = Copies::new();
    CALLED_BACK.set(REFUSED);
    copies.copy(&[]).unwrap();
    CALLED_BACK.set(CUDA_SUCCESS);
    assert_eq!(copies.ended(), [true]);
    assert!(called().contains(&"synchronize 0x50".to_owned()));
}

#[test]
fn a_copy_ends_once_even_if_the_driver_calls_back_what_it_has_refused() {
    let copies = Copies::new();
    CALLED_BACK.set(REFUSED);
    copies.copy(&[]).unwrap();
    CALLED_BACK.set(CUDA_SUCCESS);
    call_back();
    assert_eq!(copies.ended(), [true]);
}

#[test]
fn a_copy_that_the_device_fails_has_not_gone_well() {
    let copies = Copies::new();
    ENDED.set(REFUSED);
    copies.copy(&[]).unwrap();
    ENDED.set(CUDA_SUCCESS);
    assert_eq!(copies.ended(), [false]);
}

#[test]
fn the_lists_of_copies_that_have_ended_or_were_refused_are_used_again() {
    let copies = Copies::new();
    copies.copy(&[]).unwrap();
    LAUNCHED.set(REFUSED);
    copies.copy(&[]).unwrap_err();
    LAUNCHED.set(CUDA_SUCCESS);
    copies.copy(&[]).unwrap();
    let allocated = called().into_iter().filter(|call| call == "host alloc");
    assert_eq!(allocated.count(), 0, "there are lists from the start on");
}

#[test]
fn the_list_of_a_copy_is_free_when_its_end_is_reported() {
    let copies = Copies::new();
    let num_free = copies.copier.num_free();
    let (kernel, found) = (copies.copier, Arc::new(Mutex::new(0)));
    let at_end = Arc::clone(&found);
    let on_copied = Box::new(move |_| *at_end.lock().unwrap() = kernel.num_free());
    let current = copies.driver.push(null_mut()).unwrap();
    // SAFETY: there are no pieces.
    unsafe {
        kernel.launch(
            &copies.driver.calls,
            &current,
            [].into_iter(),
            Arc::new(CopyReport::new(None)),
            on_copied,
        )
    }
    .unwrap();
    assert_eq!(*found.lock().unwrap(), num_free);
}

#[test]
fn the_list_of_a_copy_that_may_run_yet_is_not_used_again() {
    let copies = Copies::new();
    let num_free = copies.copier.num_free();
    CALLED_BACK.set(REFUSED);
    SYNCHRONIZED.set(REFUSED);
    copies.copy(&[]).unwrap();
    CALLED_BACK.set(CUDA_SUCCESS);
    SYNCHRONIZED.set(CUDA_SUCCESS);
    assert_eq!(copies.ended(), [false]);
    assert_eq!(copies.copier.num_free(), num_free - 1);
}

#[test]
fn a_copy_of_more_chunks_than_a_list_has_room_for_is_refused_and_the_list_stays_free() {
    let copies = Copies::new();
    let num_free = copies.copier.num_free();
    let error = copies.copy(&vec![(0, 0, 1); 8193]).unwrap_err();
    assert!(error.to_string().contains("at most 8192"), "{error}");
    assert!(copies.ended().is_empty());
    assert_eq!(copies.copier.num_free(), num_free);
}

#[test]
fn a_piece_has_as_much_room_as_chunks_and_bytes_are_left_and_ends_with_a_block_if_it_is_digested() {
    let (copied, digested) = (Chunks::COPIED, Chunks::digested(20_000));
    assert_eq!([copied.num_of(0), copied.num_of(1 << 20)], [0, 32]);
    assert_eq!(copied.room(2, 1 << 20), 64 << 10);
    assert_eq!(copied.room(8192, 1000), 1000);
    // Each block is a chunk and the beginning of another one.
    assert_eq!([digested.num_of(20_000), digested.num_of(60_000)], [2, 6]);
    assert_eq!(digested.room(5, 1 << 20), 40_000);
    assert_eq!(digested.room(8192, 59_999), 40_000);
    assert_eq!(digested.room(1, 1 << 20), 0);
}

#[test]
fn a_copy_has_the_digest_of_each_chunk_of_each_block() {
    let driver = stand_in();
    let current = driver.push(null_mut()).unwrap();
    let copier = DigestingCopier::new(&driver.calls, &current).unwrap();
    let copier: &'static DigestingCopier = Box::leak(Box::new(copier));
    let source: Vec<u8> = (0..70_000u32).map(|at| (at % 251) as u8).collect();
    let mut target = vec![0; source.len()];
    let (from, to) = (source.as_ptr() as u64, target.as_mut_ptr() as u64);
    let pieces = [(to + 40_000, from, 20_000), (to, from + 20_000, 40_000)];
    let report = Arc::new(CopyReport::new(Some(20_000)));
    let found = Arc::new(Mutex::new(None));
    let (at_end, shared) = (Arc::clone(&report), Arc::clone(&found));
    // They are there when the end is reported.
    let on_copied = Box::new(move |is_copied| {
        *shared.lock().unwrap() = Some((is_copied, at_end.digests().to_vec()));
    });
    // SAFETY: the pieces are the test's buffers.
    unsafe {
        copier.launch(
            &driver.calls,
            &current,
            pieces.into_iter(),
            (report, 20_000),
            on_copied,
        )
    }
    .unwrap();
    let raw = |range: std::ops::Range<usize>| SharedBytes::from(&source[range]).update_crc64(0);
    let expected = (0..3).flat_map(|block| {
        let (start, end) = (block * 20_000, (block + 1) * 20_000);
        [raw(start..start + 16_384), raw(start + 16_384..end)]
    });
    assert_eq!(
        found.lock().unwrap().take(),
        Some((true, expected.collect()))
    );
    assert_eq!(target[40_000..60_000], source[..20_000]);
    assert_eq!(target[..40_000], source[20_000..60_000]);
}

#[test]
fn a_copy_that_the_device_fails_has_no_digests() {
    let driver = stand_in();
    let current = driver.push(null_mut()).unwrap();
    let copier = DigestingCopier::new(&driver.calls, &current).unwrap();
    let copier: &'static DigestingCopier = Box::leak(Box::new(copier));
    let (source, mut target) = ([7u8; 64], [0u8; 64]);
    let piece = (target.as_mut_ptr() as u64, source.as_ptr() as u64, 64);
    let report = Arc::new(CopyReport::new(Some(64)));
    let ended = Arc::new(Mutex::new(None));
    let shared = Arc::clone(&ended);
    let on_copied = Box::new(move |is_copied| *shared.lock().unwrap() = Some(is_copied));
    ENDED.set(REFUSED);
    let pieces = [piece].into_iter();
    // SAFETY: the piece is the test's buffers.
    unsafe {
        copier.launch(
            &driver.calls,
            &current,
            pieces,
            (Arc::clone(&report), 64),
            on_copied,
        )
    }
    .unwrap();
    ENDED.set(CUDA_SUCCESS);
    assert_eq!(
        (*ended.lock().unwrap(), report.digests()),
        (Some(false), &[][..])
    );
}

/// Host memory that passes for a GPU's, and its bytes.
fn pretended(len: usize, device: u32) -> (Buffer, Vec<u8>) {
    let bytes: Vec<u8> = (0..len).map(|at| (at * 7 % 251) as u8).collect();
    let owner = bytes.clone();
    let (address, kind) = (owner.as_ptr() as usize, MemoryKind::Cuda { device });
    // SAFETY: the owner is valid for reads, and nothing writes it.
    let buffer = unsafe { Buffer::read_only(address, len, kind, Box::new(owner)) };
    (buffer, bytes)
}

fn block(buffer: &Buffer, offset: usize, len: usize) -> DeviceBlock {
    DeviceBlock {
        buffer: buffer.clone(),
        offset,
        len,
    }
}

/// Has digests computed by stand-ins of a driver, and counts the calls of the callback.
fn digest(blocks: Vec<DeviceBlock>) -> (Result<Digests, CudaError>, Arc<Mutex<usize>>) {
    let driver = stand_in();
    let current = driver.push(null_mut()).unwrap();
    let digester = Box::leak(Box::new(Digester::new(&driver.calls, &current).unwrap()));
    let num_ended = Arc::new(Mutex::new(0));
    let shared = Arc::clone(&num_ended);
    let on_digested = Box::new(move || *shared.lock().unwrap() += 1);
    let begun = digester.begin((&driver.calls, &current), 1, blocks, on_digested);
    (begun, num_ended)
}

#[test]
fn digests_of_blocks_of_several_buffers_come_in_the_order_of_the_blocks() {
    let ((first, bytes), (second, others)) = (pretended(5000, 1), pretended(300, 1));
    let blocks = vec![
        block(&second, 7, 256),
        block(&first, 0, 4096),
        block(&first, 5000, 0),
    ];
    called();
    let (digests, num_ended) = digest(blocks);
    let raw = |bytes: &[u8]| SharedBytes::from(bytes).update_crc64(0);
    let expected = vec![raw(&others[7..263]), raw(&bytes[..4096]), 0];
    assert_eq!(digests.unwrap().get(), Some(Ok(expected)));
    assert_eq!(*num_ended.lock().unwrap(), 1);
    assert!(called().contains(&"launch 3 digests by 3 blocks".to_owned()));
}

#[test]
fn blocks_beyond_their_memory_or_of_another_gpu_or_too_many_have_no_digests() {
    let (here, _) = pretended(100, 1);
    for blocks in [
        vec![block(&here, 50, 51)],
        vec![block(&here, 0, 1), block(&pretended(100, 0).0, 0, 1)],
        vec![block(&here, 0, 1), block(&Buffer::zeroed(100), 0, 1)],
        vec![block(&here, 0, 1); Digests::BLOCKS_CAP + 1],
    ] {
        let (refused, num_ended) = digest(blocks);
        refused.unwrap_err();
        assert_eq!(*num_ended.lock().unwrap(), 0);
    }
    assert!(Digests::begin(Vec::new(), Box::new(|| ())).is_err());
}

#[test]
fn digests_that_the_device_fails_are_none() {
    ENDED.set(REFUSED);
    let (digests, num_ended) = digest(vec![block(&pretended(100, 1).0, 0, 100)]);
    ENDED.set(CUDA_SUCCESS);
    assert!(matches!(digests.unwrap().get(), Some(Err(_))));
    assert_eq!(*num_ended.lock().unwrap(), 1);
}

#[test]
fn digests_keep_the_memory_until_they_are_computed() {
    struct Owner(Arc<Mutex<usize>>, Vec<u8>);
    impl Drop for Owner {
        fn drop(&mut self) {
            *self.0.lock().unwrap() += 1;
        }
    }
    let num_dropped = Arc::new(Mutex::new(0));
    let owner = Box::new(Owner(Arc::clone(&num_dropped), vec![7; 64]));
    let (address, kind) = (owner.1.as_ptr() as usize, MemoryKind::Cuda { device: 1 });
    // SAFETY: the owner is valid for reads, and nothing writes it.
    let buffer = unsafe { Buffer::read_only(address, 64, kind, owner) };
    IS_HELD.set(true);
    let (digests, _) = digest(vec![block(&buffer, 0, 64)]);
    IS_HELD.set(false);
    drop(buffer);
    let digests = digests.unwrap();
    assert_eq!((digests.get(), *num_dropped.lock().unwrap()), (None, 0));
    call_back();
    assert!(digests.get().is_some());
    drop(digests);
    assert_eq!(*num_dropped.lock().unwrap(), 1);
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

#[test]
fn on_a_gpu_bytes_are_where_they_belong_when_the_copy_returns() {
    let (_library, address) = match on_gpu(4096) {
        Ok(allocated) => allocated,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    assert_eq!(device_of(address as usize), Ok(0));
    assert!(is_exportable(address as usize));
    let bytes: Vec<u8> = (0..4096u32).map(|at| at as u8).collect();
    // SAFETY: allocated above with this length, and never freed.
    unsafe { copy(0, address, bytes[..].into()) }.unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { read(0, address, 4096) }, Ok(bytes));
}

#[test]
fn on_a_gpu_pieces_of_any_size_and_alignment_are_copied() {
    const LEN: usize = 1 << 20;
    let (_library, from) = match on_gpu(LEN) {
        Ok(allocated) => allocated,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let (_library, to) = on_gpu(LEN).unwrap();
    let bytes: Vec<u8> = (0..LEN).map(|at| (at % 251) as u8).collect();
    // SAFETY: allocated above with this length, and never freed.
    unsafe {
        copy(0, from, bytes[..].into()).unwrap();
        copy(0, to, vec![0; LEN][..].into()).unwrap();
    }
    // (offset in the destination, offset in the source, length)
    let pieces: Vec<(usize, usize, usize)> = vec![
        (0, 512 << 10, 300_000),
        (400_000, 7, 4096),
        (500_003, 16, 1),
        (600_000, 600_000, 65_536),
    ];
    let copied = Arc::new((Mutex::new(None), std::sync::Condvar::new()));
    let ended = Arc::clone(&copied);
    let on_copied = Box::new(move |is_copied| {
        *ended.0.lock().unwrap() = Some(is_copied);
        ended.1.notify_all();
    });
    let address =
        |&(into, at, len): &(usize, usize, usize)| (to + into as u64, from + at as u64, len);
    let on_device: Vec<DevicePiece> = pieces.iter().map(address).collect();
    let report = Arc::new(CopyReport::new(None));
    // SAFETY: all in what was allocated above; the destinations are apart.
    unsafe { copy_pieces(0, on_device.into_iter(), &report, on_copied) }.unwrap();
    let mut is_copied = copied.0.lock().unwrap();
    while is_copied.is_none() {
        is_copied = copied.1.wait(is_copied).unwrap();
    }
    assert_eq!(*is_copied, Some(true));
    let mut expected = vec![0; LEN];
    for (into, at, len) in pieces {
        expected[into..into + len].copy_from_slice(&bytes[at..at + len]);
    }
    // SAFETY: allocated above with this length.
    let back = unsafe { read(0, to, LEN) }.unwrap();
    assert!(back == expected);
}

#[test]
fn on_a_gpu_what_is_copied_and_digested_is_what_was_read() {
    const LEN: usize = 1 << 20;
    const BLOCK: usize = 50_003;
    let (_library, from) = match on_gpu(LEN) {
        Ok(allocated) => allocated,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let (_library, to) = on_gpu(LEN).unwrap();
    let bytes: Vec<u8> = (0..LEN).map(|at| (at * 7 % 251) as u8).collect();
    // SAFETY: allocated above with this length, and never freed.
    unsafe {
        copy(0, from, bytes[..].into()).unwrap();
        copy(0, to, vec![0; LEN][..].into()).unwrap();
    }
    // Aligned, and not.
    for (into, at) in [(0, 0), (8, 65_536), (3, 7)] {
        let report = Arc::new(CopyReport::new(Some(BLOCK)));
        let (ended, is_ended) = std::sync::mpsc::channel();
        let on_copied = Box::new(move |is_copied| ended.send(is_copied).unwrap());
        let piece = (to + into, from + at as u64, 3 * BLOCK);
        // SAFETY: both ranges are in what was allocated above.
        unsafe { copy_pieces(0, [piece].into_iter(), &report, on_copied) }.unwrap();
        assert_eq!(is_ended.recv(), Ok(true));
        let raw = |(begin, len)| SharedBytes::from(&bytes[at + begin..][..len]).update_crc64(0);
        let chunks = Chunks::digested(BLOCK).of(3 * BLOCK);
        assert_eq!(report.digests(), chunks.map(raw).collect::<Vec<_>>());
        // SAFETY: allocated above with this length.
        let back = unsafe { read(0, to + into, 3 * BLOCK) }.unwrap();
        assert!(back == bytes[at..at + 3 * BLOCK]);
    }
}

#[test]
fn on_a_gpu_digests_of_blocks_of_any_size_and_alignment_are_those_of_the_cpu() {
    const LEN: usize = 1 << 20;
    let (_library, address) = match on_gpu(LEN) {
        Ok(allocated) => allocated,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let bytes: Vec<u8> = (0..LEN).map(|at| (at * 7 % 251) as u8).collect();
    // SAFETY: allocated above with this length, and never freed.
    unsafe { copy(0, address, bytes[..].into()) }.unwrap();
    let kind = MemoryKind::Cuda { device: 0 };
    // SAFETY: the same.
    let buffer = unsafe { Buffer::from_raw_parts(address as usize, LEN, kind, Box::new(())) };
    let mut places = vec![(0, LEN), (3, 5), (8, 65_536), (16, 257), (1, 4097), (0, 0)];
    places.extend((0..1000).map(|index| (index * 1024, 1024)));
    let blocks = places.iter().map(|&(at, len)| block(&buffer, at, len));
    let (ended, is_ended) = std::sync::mpsc::channel();
    let on_digested = Box::new(move || ended.send(()).unwrap());
    let digests = Digests::begin(blocks.collect(), on_digested).unwrap();
    is_ended.recv().unwrap();
    let raw = |&(at, len): &(usize, usize)| SharedBytes::from(&bytes[at..at + len]).update_crc64(0);
    assert_eq!(digests.get(), Some(Ok(places.iter().map(raw).collect())));
}

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

thread_local! {
    /// Answers of the stand-in: network cards reach it, its order of their writes, its ways to flush.
    static RDMA: Cell<(c_int, c_int, c_int)> = const { Cell::new((1, 0, 1)) };
}

unsafe extern "C" fn device_attribute(
    value: *mut c_int,
    attribute: c_int,
    _: CUdevice,
) -> CUresult {
    let (is_reachable, ordering, options) = RDMA.get();
    let answer = match attribute {
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED => is_reachable,
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING => ordering,
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS => options,
        other => panic!("attribute {other}"),
    };
    // SAFETY: the caller's place.
    unsafe { *value = answer };
    CUDA_SUCCESS
}

unsafe extern "C" fn flush(target: c_int, scope: c_int) -> CUresult {
    note(format!("flush {target} to {scope}"))
}

/// Flushes a GPU with these answers: true if the driver was called, and the result.
fn flushed(answers: (c_int, c_int, c_int)) -> (bool, Result<(), CudaError>) {
    let calls = RdmaCalls {
        cuDeviceGetAttribute: device_attribute,
        cuFlushGPUDirectRDMAWrites: flush,
    };
    RDMA.set(answers);
    let flushed = calls.flush(&stand_in(), 0);
    let called = called();
    assert_eq!(called.last().map(String::as_str), Some("pop"));
    (called.contains(&"flush 0 to 100".to_owned()), flushed)
}

#[test]
fn remote_writes_are_flushed_where_the_gpu_does_not_order_them_and_nowhere_else() {
    assert_eq!(flushed((1, 0, 1)), (true, Ok(())));
    for ordered in [(1, 100, 1), (1, 200, 0), (0, 0, 0)] {
        assert_eq!(flushed(ordered), (false, Ok(())));
    }
}

#[test]
fn a_gpu_without_order_and_without_a_flush_is_an_error() {
    let (is_flushed, ended) = flushed((1, 0, 0));
    assert!(!is_flushed);
    assert!(ended.unwrap_err().to_string().contains("cannot flush"));
}

#[test]
fn on_a_gpu_remote_writes_can_be_flushed() {
    if let Err(error) = driver() {
        eprintln!("skipped: {error}");
        return;
    }
    flush_remote_writes(0).unwrap();
}
