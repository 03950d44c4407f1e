//! The worker: posts operations and reports events, for one thread at a time.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{NonNull, null, null_mut};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::buffer::MemoryKind;
use crate::context::Context;
use crate::cuda::{self, Current};
use crate::device_copy::{EndedCopies, may_unmap};
use crate::endpoint::{Endpoint, EndpointId};
use crate::event::{Event, Queue, Raw};
use crate::library::Api;
use crate::memory::Memory;
use crate::reaper::Reaper;
use crate::request::Attributes;
use crate::status::{Status, check};
use crate::sys;

/// Time that a dropped worker waits for its operations before a reaper gets it.
const DROP_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that it waits for endpoints that cannot be closed yet: the network may take minutes to give up.
const LEAVE_TIMEOUT: Duration = Duration::from_millis(100);

/// A UCX worker. It is neither `Send` nor `Sync`: one thread at a time uses it, and it moves to another only with all that
/// was made from it (see [`AssertSend`](crate::AssertSend)).
///
/// Dropping it closes its endpoints by force and waits for every operation, at most 5 s. If one does not end, a [`Reaper`]
/// keeps worker and memory until it has: UCX may still write to that memory.
pub struct Worker {
    pub(crate) inner: ManuallyDrop<Rc<Inner>>,
}

/// The UCX worker. It is destroyed with the last of the `Worker`, its operations and closes in
/// flight, and its keys.
pub(crate) struct Inner {
    handle: NonNull<sys::ucp_worker>,
    event_fd: RawFd,
    context: Arc<Context>,
    /// The GPU whose memory was used last, if any was.
    gpu: Cell<Option<u32>>,
    /// Queue of the copies that have ended, once there was one.
    pub(crate) copies: OnceCell<Arc<EndedCopies>>,
    /// The argument of callbacks. It outlives the handle: fields are dropped after `Drop::drop`,
    /// which destroys the worker.
    pub(crate) state: Rc<State>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) events: Queue,
    pub(crate) endpoints: RefCell<BTreeMap<EndpointId, Rc<Endpoint>>>,
    pub(crate) outstanding: Cell<usize>,
    /// Endpoints that wait to be closed; their operations are not outstanding meanwhile.
    pub(crate) leaving: Cell<usize>,
    /// One of these can be closed now.
    pub(crate) may_leave: Cell<bool>,
    /// Reads that have not ended.
    pub(crate) writes: Cell<usize>,
    /// Keys that exist.
    pub(crate) keys: Cell<usize>,
    /// The `Worker` is gone: events are dropped.
    pub(crate) stopped: Cell<bool>,
}

impl Worker {
    /// Creates a worker.
    ///
    /// # Errors
    /// The status of UCX.
    pub fn new(context: &Arc<Context>) -> Result<Self, Status> {
        let mut inner = Inner {
            handle: create(context)?,
            event_fd: -1,
            context: Arc::clone(context),
            gpu: Cell::new(None),
            copies: OnceCell::new(),
            state: Rc::default(),
        };
        inner.event_fd = inner.query_event_fd()?;
        Ok(Self {
            inner: ManuallyDrop::new(Rc::new(inner)),
        })
    }

    /// The address by which peers connect to this worker.
    ///
    /// # Errors
    /// The status of UCX.
    pub fn address(&self) -> Result<Vec<u8>, Status> {
        let attr = self.inner.query(sys::UCP_WORKER_ATTR_FIELD_ADDRESS)?;
        let start = attr.address.cast::<u8>();
        // SAFETY: on success UCX hands out that many initialised bytes, ours until released.
        let address = unsafe { std::slice::from_raw_parts(start, attr.address_length) }.to_vec();
        // SAFETY: the address came from this worker and is released once.
        unsafe { (self.inner.api().ucp_worker_release_address)(self.inner.as_ptr(), attr.address) };
        Ok(address)
    }

    /// Becomes readable when there is something to progress, once [`arm`](Self::arm) has returned true.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: UCX keeps the descriptor open as long as the worker, which outlives `&self`.
        unsafe { BorrowedFd::borrow_raw(self.inner.event_fd) }
    }

    /// Prepares to sleep on [`event_fd`](Self::event_fd): true when that is safe, false when
    /// there is more to progress first.
    ///
    /// # Errors
    /// The status of UCX.
    pub fn arm(&self) -> Result<bool, Status> {
        let _current = self.inner.enter();
        // SAFETY: the worker is live and on its thread, being neither Send nor Sync.
        match unsafe { (self.inner.api().ucp_worker_arm)(self.inner.as_ptr()) } {
            sys::UCS_ERR_BUSY => Ok(false),
            code => check(code, "ucp_worker_arm").map(|()| true),
        }
    }

    /// Progresses UCX; 0 when there was nothing to do. Take the events afterwards.
    pub fn progress(&self) -> u32 {
        let _current = self.inner.enter();
        let progress = || {
            // SAFETY: the worker is live and on its thread; callbacks touch only its State, of which
            // nothing is borrowed here.
            unsafe { (self.inner.api().ucp_worker_progress)(self.inner.as_ptr()) }
        };
        let progressed = may_unmap(self.inner.uses_gpu(), progress);
        // No descriptor reports that an endpoint can be closed.
        progressed + self.finish_copies() + self.close_leaving()
    }

    /// The oldest event not yet taken. Posting an operation can leave one too.
    pub fn next_event(&self) -> Option<Event> {
        Some(match self.inner.state.events.pop()? {
            Raw::Done { op, code } => Event::Done {
                token: op.token,
                result: check(code, op.call),
            },
            Raw::EndpointFailed { endpoint, code } => Event::EndpointFailed {
                endpoint,
                status: Status::new(code, "ucp_err_handler"),
            },
            Raw::Closed { endpoint } => {
                self.inner.state.endpoints.borrow_mut().remove(&endpoint.id);
                Event::Closed {
                    endpoint: endpoint.id,
                }
            }
        })
    }

    /// Operations whose `Done` and closes whose `Closed` is not yet queued, without those of endpoints
    /// that wait to be closed.
    pub fn outstanding(&self) -> usize {
        self.inner.state.outstanding.get()
    }

    /// Drops the worker. From now on `num_reads` counts the reads that UCX has not ended even so: it may still write to their
    /// memory, which is kept.
    pub fn end(self, num_reads: Arc<AtomicUsize>) -> Reaper {
        let mut worker = ManuallyDrop::new(self);
        // SAFETY: called once: the worker is never dropped.
        unsafe { worker.finish(num_reads) }
    }

    /// True if UCX has ended all operations and closes.
    pub(crate) fn is_settled(&self) -> bool {
        self.outstanding() == 0 && self.inner.state.leaving.get() == 0
    }

    pub(crate) fn discard_events(&self) {
        while self.next_event().is_some() {}
    }

    fn drain(&self) {
        let begun = Instant::now();
        let is_over = || match self.outstanding() {
            _ if self.is_settled() => true,
            0 if self.inner.state.writes.get() == 0 => begun.elapsed() > LEAVE_TIMEOUT,
            _ => begun.elapsed() > DROP_TIMEOUT,
        };
        while !is_over() {
            if self.progress() == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
            self.discard_events();
        }
        self.discard_events();
    }

    /// Ends it.
    ///
    /// # Safety
    /// Called once; the worker is not used afterwards.
    unsafe fn finish(&mut self, num_reads: Arc<AtomicUsize>) -> Reaper {
        let endpoints: Vec<_> = self
            .inner
            .state
            .endpoints
            .borrow()
            .keys()
            .copied()
            .collect();
        for endpoint in endpoints {
            self.close(endpoint);
        }
        self.drain();
        self.inner.state.stopped.set(true);
        num_reads.store(self.inner.state.writes.get(), Ordering::Release);
        let is_settled = self.is_settled();
        // SAFETY: called once, and neither what is below nor the caller uses the field.
        let inner = unsafe { ManuallyDrop::take(&mut self.inner) };
        Reaper::new((!is_settled).then_some(inner), num_reads)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: it is being dropped.
        drop(unsafe { self.finish(Arc::default()) });
    }
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker")
            .field("outstanding", &self.outstanding())
            .finish_non_exhaustive()
    }
}

impl Inner {
    pub(crate) fn api(&self) -> Api<'_> {
        self.context.library().api()
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::ucp_worker {
        self.handle.as_ptr()
    }

    /// The argument of the worker's callbacks.
    pub(crate) fn state_ptr(&self) -> *mut c_void {
        Rc::as_ptr(&self.state).cast_mut().cast()
    }

    pub(crate) fn endpoint(
        &self,
        id: EndpointId,
        call: &'static str,
    ) -> Result<Rc<Endpoint>, Status> {
        let endpoints = self.state.endpoints.borrow();
        let endpoint = endpoints.get(&id).map(Rc::clone);
        endpoint.ok_or(Status::new(sys::UCS_ERR_NOT_CONNECTED, call))
    }

    /// A piece of local memory as an operand of `call`.
    pub(crate) fn local(
        &self,
        memory: &Arc<Memory>,
        offset: usize,
        len: usize,
        call: &'static str,
    ) -> Result<(*mut c_void, Attributes), Status> {
        if !self.is_of_context(memory) {
            return Err(Status::new(sys::UCS_ERR_INVALID_PARAM, call));
        }
        let buffer = memory.buffer();
        self.note_use(buffer.kind());
        let start = buffer
            .range(offset, len)
            .ok_or(Status::new(sys::UCS_ERR_OUT_OF_RANGE, call))?;
        let attributes = Attributes {
            flags: 0,
            memory_type: Some(buffer.kind().as_ucs()),
            memory: Some(memory.as_ptr()),
        };
        Ok((start, attributes))
    }

    /// Notes that such memory is about to be used.
    pub(crate) fn note_use(&self, kind: MemoryKind) {
        if let MemoryKind::Cuda { device } = kind {
            self.gpu.set(Some(device));
        }
    }

    /// True if it has met memory of a GPU, its own or a peer's.
    pub(crate) fn uses_gpu(&self) -> bool {
        self.gpu.get().is_some()
    }

    /// True if this memory is registered with the worker's context.
    pub(crate) fn is_of_context(&self, memory: &Memory) -> bool {
        Arc::ptr_eq(memory.context(), &self.context)
    }

    /// The CUDA context that UCX needs in the calling thread, once the worker has used CUDA memory.
    pub(crate) fn enter(&self) -> Option<Current<'static>> {
        self.gpu.get().and_then(cuda::enter_or_log)
    }

    fn query(&self, field_mask: u64) -> Result<sys::ucp_worker_attr_t, Status> {
        let mut attr = sys::ucp_worker_attr_t {
            field_mask,
            thread_mode: 0,
            address_flags: 0,
            address: null_mut(),
            address_length: 0,
            max_am_header: 0,
            name: [0; 32],
            max_debug_string: 0,
        };
        // SAFETY: the worker is live; `attr` holds every field a mask can ask for.
        let code = unsafe { (self.api().ucp_worker_query)(self.as_ptr(), &raw mut attr) };
        check(code, "ucp_worker_query")?;
        Ok(attr)
    }

    fn query_event_fd(&self) -> Result<RawFd, Status> {
        let mut fd = -1;
        // SAFETY: the worker is live, and `fd` is a valid place for the answer.
        let code = unsafe { (self.api().ucp_worker_get_efd)(self.as_ptr(), &raw mut fd) };
        check(code, "ucp_worker_get_efd")?;
        Ok(fd)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _current = self.enter();
        let destroy = || {
            // SAFETY: operations, closes and keys each hold an Rc of self, so none is
            // left; called once, on the thread that has the worker, because the Rc is its own.
            unsafe { (self.api().ucp_worker_destroy)(self.as_ptr()) };
        };
        may_unmap(self.uses_gpu(), destroy);
    }
}

fn create(context: &Context) -> Result<NonNull<sys::ucp_worker>, Status> {
    const CALL: &str = "ucp_worker_create";
    let params = sys::ucp_worker_params_t {
        field_mask: sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        thread_mode: sys::UCS_THREAD_MODE_SERIALIZED,
        cpu_mask: [0; 16],
        events: 0,
        user_data: null_mut(),
        event_fd: -1,
        flags: 0,
        name: null(),
        am_alignment: 0,
        client_id: 0,
    };
    let mut handle = null_mut();
    let api = context.library().api();
    // SAFETY: the context is live, and the parameters outlive the call.
    let code =
        unsafe { (api.ucp_worker_create)(context.as_ptr(), &raw const params, &raw mut handle) };
    check(code, CALL)?;
    NonNull::new(handle).ok_or(Status::new(sys::UCS_ERR_NO_MEMORY, CALL))
}
