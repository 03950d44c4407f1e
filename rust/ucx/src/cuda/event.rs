//! Events of CUDA streams.

use std::ffi::c_uint;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use super::{
    CU_EVENT_DISABLE_TIMING, CUDA_ERROR_NOT_READY, CUevent, Calls, CudaError, driver, enter_or_log,
};

const CU_EVENT_BLOCKING_SYNC: c_uint = 1;
/// 0, 1 and 2 are handles of default streams.
const LAST_DEFAULT_STREAM: usize = 2;
/// Most time that a GPU takes to reach an event on an idle stream. A thread that waited for it instead would take
/// longer.
const EVENT_LATENCY: Duration = Duration::from_micros(20);

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
    /// As [`record`](Self::record); none if the stream has done everything.
    ///
    /// # Errors
    /// As of [`record`](Self::record). A graph is being captured on the stream.
    ///
    /// # Safety
    /// As of [`record`](Self::record).
    pub unsafe fn record_pending(device: u32, stream: usize) -> Result<Option<Self>, CudaError> {
        let driver = driver()?;
        let (_current, _) = driver.enter(device)?;
        // SAFETY: the stream is of the current context by the caller's promise.
        let is_idle = unsafe { driver.is_idle(std::ptr::with_exposed_provenance_mut(stream)) }?;
        if is_idle && stream > LAST_DEFAULT_STREAM {
            return Ok(None);
        }
        // SAFETY: the caller's promise is the same.
        let event = unsafe { Self::record(device, stream) }?;
        // A default stream also waits for other streams, which an event of it does and a query of it may not.
        let is_over = is_idle && event.is_over_soon()?;
        Ok((!is_over).then_some(event))
    }

    /// True if the work is done, or is within the time that the GPU takes to reach an event on an idle stream.
    fn is_over_soon(&self) -> Result<bool, CudaError> {
        let began = Instant::now();
        loop {
            // SAFETY: the event lives as long as `self`.
            match unsafe { (self.calls.cuEventQuery)(self.event) } {
                CUDA_ERROR_NOT_READY if began.elapsed() < EVENT_LATENCY => {}
                CUDA_ERROR_NOT_READY => return Ok(false),
                code => return self.calls.check(code, "cuEventQuery").map(|()| true),
            }
        }
    }

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
        let stream = std::ptr::with_exposed_provenance_mut(stream);
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
