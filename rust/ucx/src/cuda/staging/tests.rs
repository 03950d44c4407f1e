//! With stand-ins for the driver's functions. Their GPU is as late as it may be: it copies when it is waited for.

#![allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "buffers of a test, and the driver's functions for them"
)]

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::{c_uint, c_void};

use super::*;
use crate::cuda::tests::stand_in;
use crate::cuda::{CUDA_SUCCESS, CUresult, Driver};

#[derive(Clone, Copy)]
enum Work {
    Copy(usize, usize, usize),
    Event(usize),
}

thread_local! {
    static WORK: RefCell<VecDeque<Work>> = const { RefCell::new(VecDeque::new()) };
    static NUM_EVENTS: Cell<usize> = const { Cell::new(0) };
    /// Copies that are refused after so many.
    static COPIES_LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
    static WAITED: Cell<usize> = const { Cell::new(0) };
}

fn queue(work: Work) -> CUresult {
    WORK.with_borrow_mut(|queued| queued.push_back(work));
    CUDA_SUCCESS
}

fn queue_copy(to: usize, from: usize, len: usize) -> CUresult {
    let left = COPIES_LEFT.get();
    COPIES_LEFT.set(left.saturating_sub(1));
    if left == 0 {
        return 1;
    }
    queue(Work::Copy(to, from, len))
}

/// Does what is queued, until `event` was reached for the last time; all of it without one.
fn run_until(event: Option<usize>) {
    let is_it =
        |work: &Work| matches!((work, event), (Work::Event(it), Some(event)) if *it == event);
    let mut queued = WORK.take();
    let num = match event {
        Some(_) => queued.iter().rposition(is_it).map_or(0, |at| at + 1),
        None => queued.len(),
    };
    for work in queued.drain(..num) {
        if let Work::Copy(to, from, len) = work {
            // SAFETY: buffers of the test.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
        }
    }
    WORK.set(queued);
}

unsafe extern "C" fn to_device(
    to: CUdeviceptr,
    from: *const c_void,
    len: usize,
    _: CUstream,
) -> CUresult {
    queue_copy(to as usize, from.expose_provenance(), len)
}

unsafe extern "C" fn to_host(
    to: *mut c_void,
    from: CUdeviceptr,
    len: usize,
    _: CUstream,
) -> CUresult {
    queue_copy(to.expose_provenance(), from as usize, len)
}

unsafe extern "C" fn create_event(event: *mut CUevent, _: c_uint) -> CUresult {
    let number = NUM_EVENTS.get() + 1;
    NUM_EVENTS.set(number);
    // SAFETY: the caller's place.
    unsafe { *event = std::ptr::without_provenance_mut(number) };
    CUDA_SUCCESS
}

unsafe extern "C" fn record(event: CUevent, _: CUstream) -> CUresult {
    queue(Work::Event(event.addr()))
}

unsafe extern "C" fn wait_for_event(event: CUevent) -> CUresult {
    WAITED.set(WAITED.get() + 1);
    run_until(Some(event.addr()));
    CUDA_SUCCESS
}

unsafe extern "C" fn wait_for_stream(_: CUstream) -> CUresult {
    run_until(None);
    CUDA_SUCCESS
}

/// A driver whose GPU is late, and slots of it.
struct Late {
    driver: Driver,
    slots: Mutex<Staging>,
}

impl Late {
    fn new() -> Self {
        let mut driver = stand_in();
        driver.calls.cuMemcpyHtoDAsync_v2 = to_device;
        driver.calls.cuMemcpyDtoHAsync_v2 = to_host;
        driver.calls.cuEventCreate = create_event;
        driver.calls.cuEventRecord = record;
        driver.calls.cuEventSynchronize = wait_for_event;
        driver.calls.cuStreamSynchronize = wait_for_stream;
        Self {
            driver,
            slots: Mutex::default(),
        }
    }

    fn run(
        &self,
        work: impl FnOnce(&Calls, &mut Staging) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let current = self.driver.push(null_mut()).unwrap();
        with_slots_of(&self.driver.calls, &current, &self.slots, work)
    }

    fn write(&self, to: *mut u8, data: &[u8]) -> Result<(), CudaError> {
        // SAFETY: the test's buffers.
        self.run(|calls, staging| unsafe {
            staging.write(calls, to.expose_provenance() as u64, data.into())
        })
    }

    fn finish(&self) -> Result<(), CudaError> {
        // SAFETY: the stand-in needs no context.
        self.run(|calls, staging| unsafe { staging.finish(calls) })
    }

    fn read(
        &self,
        ranges: &[&[u8]],
        take: &mut dyn FnMut(SharedBytes<'_>) -> bool,
    ) -> Result<(), CudaError> {
        let range = |bytes: &&[u8]| (bytes.as_ptr().expose_provenance() as u64, bytes.len());
        let ranges: Vec<_> = ranges.iter().map(range).collect();
        // SAFETY: the test's buffers.
        self.run(|calls, staging| unsafe { staging.read(calls, &ranges, take) })
    }
}

fn content(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

#[test]
fn more_than_all_slots_hold_is_written_right_by_a_gpu_that_is_late() {
    let (late, source) = (Late::new(), content(3 * NUM_SLOTS * SLOT_BYTES + 7));
    let mut target = vec![0; source.len()];
    for (place, piece) in target.chunks_mut(120 << 10).zip(source.chunks(120 << 10)) {
        late.write(place.as_mut_ptr(), piece).unwrap();
    }
    assert!(
        target != source && WAITED.get() > 0,
        "some copies are to come, and slots were waited for"
    );
    late.finish().unwrap();
    assert!(target == source);
}

#[test]
fn ranges_are_read_in_their_order_while_the_next_ones_are_on_their_way() {
    let (late, source) = (Late::new(), content(3 * NUM_SLOTS * SLOT_BYTES + 7));
    let (first, second) = source.split_at(SLOT_BYTES / 3);
    let (mut read, mut num_queued) = (Vec::new(), Vec::new());
    late.read(&[second, &[], first], &mut |bytes| {
        num_queued.push(WORK.with_borrow(VecDeque::len));
        bytes.append_to(&mut read);
        true
    })
    .unwrap();
    assert!(read == [second, first].concat());
    assert!(num_queued[0] >= 2 * (NUM_SLOTS - 1), "{num_queued:?}");
    assert!(WORK.with_borrow(VecDeque::is_empty));
}

#[test]
fn a_reader_that_has_enough_or_that_the_driver_refuses_leaves_no_copy_under_way() {
    let (late, source) = (Late::new(), content(2 * NUM_SLOTS * SLOT_BYTES));
    let mut num_taken = 0;
    late.read(&[&source], &mut |_| {
        num_taken += 1;
        false
    })
    .unwrap();
    assert_eq!(num_taken, 1);
    assert!(WORK.with_borrow(VecDeque::is_empty));
    COPIES_LEFT.set(2);
    let refused = late.read(&[&source], &mut |_| true).unwrap_err();
    COPIES_LEFT.set(usize::MAX);
    assert!(refused.to_string().contains("cuMemcpyDtoHAsync"));
    assert!(WORK.with_borrow(VecDeque::is_empty));
    let mut read = Vec::new();
    late.read(&[&source], &mut |bytes| {
        bytes.append_to(&mut read);
        true
    })
    .unwrap();
    assert!(read == source, "what comes next is right");
}

#[test]
fn after_a_write_that_failed_nothing_more_of_its_writer_counts_and_others_go_on() {
    let late = Late::new();
    let (mut first, mut second) = (None, None);
    let write = |writer: &mut Option<u64>| {
        let mut target = [0; 2];
        let to = target.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the test's buffers.
        let write =
            |calls: &Calls, it: &mut Staging| unsafe { it.write(calls, to, b"kv"[..].into()) };
        let written = late.run(|calls, staging| staging.run_of(writer, |it| write(calls, it)));
        late.finish().unwrap();
        written.map(|()| target)
    };
    write(&mut first).unwrap();
    COPIES_LEFT.set(0);
    write(&mut first).unwrap_err();
    COPIES_LEFT.set(usize::MAX);
    let error = write(&mut first).unwrap_err().to_string();
    assert!(error.contains("an earlier copy"), "{error}");
    assert_eq!(write(&mut second), Ok(*b"kv"));
}
