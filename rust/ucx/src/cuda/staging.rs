//! Copies between a GPU and the host through page-locked memory: while the GPU copies one chunk, the CPU fills or empties
//! another. Out of pageable memory the CUDA driver copies through a buffer of its own, and waits for each copy.

use std::collections::VecDeque;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use super::{
    CU_EVENT_DISABLE_TIMING, CU_STREAM_NON_BLOCKING, CUdeviceptr, CUevent, CUstream, Calls,
    CudaError, Current, Device, driver,
};
use crate::shared_bytes::SharedBytes;

/// A slot has one chunk, which the GPU copies while the CPU uses another slot. A link of 25 GB/s takes 10 us for it.
const SLOT_BYTES: usize = 256 << 10;
const NUM_SLOTS: usize = 4;
/// Alignment of a copy's bytes in a slot: a cache line.
const ALIGNMENT: usize = 64;
const CU_MEMHOSTALLOC_PORTABLE: u32 = 1;

/// The slots of one direction of a device, which all threads share. They live as long as the process.
pub(super) struct Staging {
    /// Page-locked, [`NUM_SLOTS`] times [`SLOT_BYTES`]. Null until it is opened, as are the others.
    memory: *mut u8,
    stream: CUstream,
    /// Of each slot: reached when the GPU uses it no more.
    events: [CUevent; NUM_SLOTS],
    /// The slot in use, and how many of its bytes are.
    at: usize,
    used_bytes: usize,
    /// Number of failed writes. A writer that had begun before may be the one whose bytes are missing.
    num_failures: u64,
}

// SAFETY: handles of the driver and memory that one thread at a time uses; none is ever destroyed.
unsafe impl Send for Staging {}

impl Default for Staging {
    fn default() -> Self {
        Self {
            memory: null_mut(),
            stream: null_mut(),
            events: [null_mut(); NUM_SLOTS],
            at: 0,
            used_bytes: 0,
            num_failures: 0,
        }
    }
}

/// Slots for copies into a device, and for those out of it.
#[derive(Default)]
pub(super) struct HostSlots {
    to_device: Mutex<Staging>,
    from_device: Mutex<Staging>,
}

impl Staging {
    /// Makes what is missing, so that a failure costs nothing that the next call would make again.
    fn open(&mut self, calls: &Calls, _current: &Current<'_>) -> Result<(), CudaError> {
        if self.memory.is_null() {
            let memory = (&raw mut self.memory).cast();
            let (len, flags) = (NUM_SLOTS * SLOT_BYTES, CU_MEMHOSTALLOC_PORTABLE);
            // SAFETY: a context is current, and `memory` is a valid place.
            let code = unsafe { (calls.cuMemHostAlloc)(memory, len, flags) };
            calls.check(code, "cuMemHostAlloc")?;
        }
        if self.stream.is_null() {
            // SAFETY: a context is current, and `stream` is a valid place.
            let code =
                unsafe { (calls.cuStreamCreate)(&raw mut self.stream, CU_STREAM_NON_BLOCKING) };
            calls.check(code, "cuStreamCreate")?;
        }
        for event in self.events.iter_mut().filter(|event| event.is_null()) {
            // SAFETY: a context is current, and `event` is a valid place.
            let code = unsafe { (calls.cuEventCreate)(event, CU_EVENT_DISABLE_TIMING) };
            calls.check(code, "cuEventCreate")?;
        }
        Ok(())
    }

    /// The memory of a slot.
    fn slot(&self, slot: usize) -> *mut u8 {
        self.memory.wrapping_add(slot * SLOT_BYTES)
    }

    /// Has the GPU copy `data` to an address of its memory. `data` may change when this returns.
    ///
    /// # Safety
    /// A context of the device is current, and the address is memory of the device for so many bytes until
    /// [`finish`](Self::finish) has returned.
    unsafe fn write(
        &mut self,
        calls: &Calls,
        mut to: CUdeviceptr,
        mut data: SharedBytes<'_>,
    ) -> Result<(), CudaError> {
        while !data.is_empty() {
            if self.used_bytes >= SLOT_BYTES {
                self.record(calls)?;
                self.wait(calls, self.at)?;
            }
            let (piece, rest) = data.split_at(SLOT_BYTES - self.used_bytes);
            let len = piece.len();
            // SAFETY: within the slot, which the GPU does not use from here on.
            let place = unsafe { self.slot(self.at).add(self.used_bytes) };
            // SAFETY: the same, and the bytes are elsewhere.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), place, len) };
            // SAFETY: the caller's promise; the slot is used again only after the copy.
            let code = unsafe {
                (calls.cuMemcpyHtoDAsync_v2)(to, place.cast_const().cast(), len, self.stream)
            };
            calls.check(code, "cuMemcpyHtoDAsync")?;
            self.used_bytes = (self.used_bytes + len).next_multiple_of(ALIGNMENT);
            to += len as u64;
            data = rest;
        }
        Ok(())
    }

    /// Runs `work` of a writer, unless a write has failed since its first one. `since` is the writer's.
    fn run_of(
        &mut self,
        since: &mut Option<u64>,
        work: impl FnOnce(&mut Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if self.num_failures != *since.get_or_insert(self.num_failures) {
            return Err(CudaError::new("an earlier copy into this GPU has failed"));
        }
        work(self).inspect_err(|_| self.num_failures += 1)
    }

    /// Waits until all of it is in place.
    ///
    /// # Safety
    /// A context of the device is current.
    unsafe fn finish(&self, calls: &Calls) -> Result<(), CudaError> {
        // SAFETY: our stream, and the caller's promise.
        unsafe { calls.synchronize(self.stream) }
    }

    /// Calls `take` with the bytes of these ranges, in their order and a chunk at a time, until it returns false. The GPU
    /// copies the chunks that follow meanwhile.
    ///
    /// # Safety
    /// A context of the device is current, and the ranges are memory of the device.
    unsafe fn read(
        &mut self,
        calls: &Calls,
        ranges: &[(CUdeviceptr, usize)],
        take: &mut dyn FnMut(SharedBytes<'_>) -> bool,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let read = unsafe { self.read_chunks(calls, ranges, take) };
        // The rest is not wanted, and the memory of the ranges may end.
        // SAFETY: the caller's promise.
        let ended = unsafe { self.finish(calls) };
        read.and(ended)
    }

    /// As [`read`](Self::read); copies may be under way when this returns.
    ///
    /// # Safety
    /// As of [`read`](Self::read).
    unsafe fn read_chunks(
        &mut self,
        calls: &Calls,
        mut ranges: &[(CUdeviceptr, usize)],
        take: &mut dyn FnMut(SharedBytes<'_>) -> bool,
    ) -> Result<(), CudaError> {
        let (mut behind, mut filled) = (0, VecDeque::with_capacity(NUM_SLOTS));
        loop {
            while filled.len() < NUM_SLOTS && !ranges.is_empty() {
                let slot = self.at;
                self.used_bytes = 0;
                while let Some(&(from, len)) = ranges.first()
                    && self.used_bytes < SLOT_BYTES
                {
                    let num_bytes = (len - behind).min(SLOT_BYTES - self.used_bytes);
                    // SAFETY: within the slot, whose bytes were taken.
                    let place = unsafe { self.slot(slot).add(self.used_bytes) };
                    // SAFETY: the caller's promise; the slot is not read before the copy's end.
                    let code = unsafe {
                        let from = from + behind as u64;
                        (calls.cuMemcpyDtoHAsync_v2)(place.cast(), from, num_bytes, self.stream)
                    };
                    calls.check(code, "cuMemcpyDtoHAsync")?;
                    self.used_bytes += num_bytes;
                    behind += num_bytes;
                    if behind == len {
                        (ranges, behind) = (&ranges[1..], 0);
                    }
                }
                filled.push_back((slot, self.used_bytes));
                self.record(calls)?;
            }
            let Some((slot, len)) = filled.pop_front() else {
                return Ok(());
            };
            self.wait(calls, slot)?;
            // SAFETY: the slot has so many bytes, which the GPU has written.
            let bytes = unsafe { SharedBytes::new(self.slot(slot), len) };
            if !take(bytes) {
                return Ok(());
            }
        }
    }

    /// Marks the end of the copies of the slot in use, and turns to the next one.
    fn record(&mut self, calls: &Calls) -> Result<(), CudaError> {
        // SAFETY: an event and a stream of ours, of one context.
        let code = unsafe { (calls.cuEventRecord)(self.events[self.at], self.stream) };
        calls.check(code, "cuEventRecord")?;
        (self.at, self.used_bytes) = ((self.at + 1) % NUM_SLOTS, 0);
        Ok(())
    }

    /// Waits until the GPU uses a slot no more.
    fn wait(&self, calls: &Calls, slot: usize) -> Result<(), CudaError> {
        // SAFETY: an event of ours. One that was never recorded is over.
        let code = unsafe { (calls.cuEventSynchronize)(self.events[slot]) };
        calls.check(code, "cuEventSynchronize")
    }
}

/// Runs `work` with the slots of one direction of a device, opened if they are not.
fn with_slots<T>(
    ordinal: u32,
    direction: impl FnOnce(&HostSlots) -> &Mutex<Staging>,
    work: impl FnOnce(&Calls, &mut Staging) -> Result<T, CudaError>,
) -> Result<T, CudaError> {
    let driver = driver()?;
    let (current, device) = driver.enter(ordinal)?;
    with_slots_of(&driver.calls, &current, direction(&device.slots), work)
}

fn with_slots_of<T>(
    calls: &Calls,
    current: &Current<'_>,
    slots: &Mutex<Staging>,
    work: impl FnOnce(&Calls, &mut Staging) -> Result<T, CudaError>,
) -> Result<T, CudaError> {
    let mut staging = slots.lock().unwrap_or_else(PoisonError::into_inner);
    staging.open(calls, current)?;
    work(calls, &mut staging)
}

/// Bytes that one writer has written into a device's memory; see [`StagedWrites::write`].
#[derive(Debug)]
pub(crate) struct StagedWrites {
    ordinal: u32,
    /// Number of failed writes when this one began.
    num_failures: Option<u64>,
    is_finished: bool,
}

impl StagedWrites {
    pub(crate) fn new(ordinal: u32) -> Self {
        Self {
            ordinal,
            num_failures: None,
            is_finished: true,
        }
    }

    /// Has the GPU copy `data` to an address of its memory. `data` may change when this returns.
    ///
    /// # Errors
    /// The driver's error, also after an earlier one of this writer's.
    ///
    /// # Safety
    /// The address is memory of the device for so many bytes until [`finish`](Self::finish) or
    /// [`settle`](Self::settle) has returned without an error.
    pub(crate) unsafe fn write(
        &mut self,
        to: CUdeviceptr,
        data: SharedBytes<'_>,
    ) -> Result<(), CudaError> {
        self.is_finished = false;
        // SAFETY: the caller's promise; a context is current.
        self.run(|calls, staging| unsafe { staging.write(calls, to, data) })
    }

    /// Waits until all that was written is in place.
    ///
    /// # Errors
    /// The driver's error, also that of an earlier write.
    pub(crate) fn finish(&mut self) -> Result<(), CudaError> {
        if self.is_finished {
            return Ok(());
        }
        // SAFETY: a context is current.
        self.run(|calls, staging| unsafe { staging.finish(calls) })?;
        self.is_finished = true;
        Ok(())
    }

    /// Waits until the GPU copies nothing more of this writer's, wherever that got to.
    ///
    /// # Errors
    /// The driver's error: it may copy yet.
    pub(crate) fn settle(&self) -> Result<(), CudaError> {
        if self.is_finished || self.num_failures.is_none() {
            return Ok(());
        }
        with_slots(
            self.ordinal,
            |slots| &slots.to_device,
            |calls, staging| {
                // SAFETY: a context is current.
                let ended = unsafe { staging.finish(calls) };
                // It may be of another writer's copy.
                ended.inspect_err(|_| staging.num_failures += 1)
            },
        )
    }

    fn run(
        &mut self,
        work: impl FnOnce(&Calls, &mut Staging) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let ordinal = self.ordinal;
        let done = with_slots(
            ordinal,
            |slots| &slots.to_device,
            |calls, staging| staging.run_of(&mut self.num_failures, |it| work(calls, it)),
        );
        done.inspect_err(|error| tracing::error!(%error, device = ordinal, "cuda.copy_failed"))
    }
}

/// Calls `take` with the bytes of these ranges of a device's memory, in their order and a chunk at a time, until it returns
/// false. It waits for no other stream.
///
/// # Errors
/// The driver's error; `take` may have had the first bytes.
///
/// # Safety
/// The ranges are memory of this device.
pub(crate) unsafe fn read_staged(
    ordinal: u32,
    ranges: &[(CUdeviceptr, usize)],
    take: &mut dyn FnMut(SharedBytes<'_>) -> bool,
) -> Result<(), CudaError> {
    let read = with_slots(
        ordinal,
        |slots| &slots.from_device,
        // SAFETY: the caller's promise; a context is current.
        |calls, staging| unsafe { staging.read(calls, ranges, take) },
    );
    read.inspect_err(|error| tracing::error!(%error, device = ordinal, "cuda.copy_failed"))
}

impl Device {
    /// Opens the slots of both directions, unless they are in use: it takes milliseconds, for which no transfer should
    /// wait. It is tried again where it fails.
    pub(super) fn prepare_slots(&self, calls: &Calls, current: &Current<'_>) {
        for slots in [&self.slots.to_device, &self.slots.from_device] {
            if let Ok(mut staging) = slots.try_lock()
                && let Err(error) = staging.open(calls, current)
            {
                tracing::warn!(%error, "cuda.no_host_memory");
            }
        }
    }
}

#[cfg(test)]
mod tests;
