//! Endpoints: the worker's connections, each closed by force and never reused.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ptr::{NonNull, null, null_mut};
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device_copy::may_unmap;
use crate::event::Raw;
use crate::request::{self, Attributes, Keep, Token};
use crate::rma::Key;
use crate::status::{Posted, Status, check};
use crate::sys::{self, ucs_status_t};
use crate::worker::{Inner, State, Worker};

/// One connection of one worker. An id is not used again within the process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EndpointId(u64);

impl EndpointId {
    /// An id that no other endpoint of this process has.
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Operations of an endpoint so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointProgress {
    /// Operations that have not ended, without copies by a GPU.
    pub in_flight: usize,
    /// Those that have, since it was made.
    pub ended: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// The error handler ran, with this status.
    Failed(ucs_status_t),
    /// It waits to be closed until that is safe, and is not used any more.
    Leaving,
    /// `ucp_ep_close_nbx` was called; only UCX uses the handle from here on.
    Closing,
    /// UCX has finished the close; operations may still be in flight.
    Freed,
    /// The close is reported.
    Closed,
}

/// An endpoint as the worker and its operations share it.
pub(crate) struct Endpoint {
    pub(crate) id: EndpointId,
    handle: NonNull<sys::ucp_ep>,
    phase: Cell<Phase>,
    /// True if an operation has ended well, or the error handler ran: closing by force before that can crash UCX (1.22,
    /// seen over TCP, in a third of 40 tries): `ucp_ep_discard_lanes` finds an endpoint of the transport that is freed
    /// already.
    is_settled: Cell<bool>,
    ops: Cell<usize>,
    /// Those that have ended, since it was made.
    ended: Cell<u64>,
    /// Of those in flight, copies out of memory that the endpoint has mapped.
    copies: Cell<usize>,
    keys: RefCell<Vec<Weak<Key>>>,
}

impl Endpoint {
    /// The handle, for `call`, while the endpoint can be used.
    pub(crate) fn usable(&self, call: &'static str) -> Result<*mut sys::ucp_ep, Status> {
        match self.phase.get() {
            Phase::Open => Ok(self.handle.as_ptr()),
            Phase::Failed(code) => Err(Status::new(code, call)),
            Phase::Leaving | Phase::Closing | Phase::Freed | Phase::Closed => {
                Err(Status::new(sys::UCS_ERR_NOT_CONNECTED, call))
            }
        }
    }

    /// True if it can be closed by force.
    fn can_leave(&self) -> bool {
        self.is_settled.get() && self.copies.get() == 0
    }

    pub(crate) fn adopt_key(&self, key: &Rc<Key>) {
        let mut keys = self.keys.borrow_mut();
        keys.retain(|key| key.strong_count() > 0);
        keys.push(Rc::downgrade(key));
    }

    /// Destroys the endpoint's keys; one in use when its operations have ended.
    fn revoke_keys(&self) {
        let keys = self.keys.take();
        for key in keys.iter().filter_map(Weak::upgrade) {
            key.revoke();
        }
    }
}

fn add(count: &Cell<usize>, more: usize) {
    count.set(count.get() + more);
}

fn subtract(count: &Cell<usize>, less: usize) {
    count.set(count.get().saturating_sub(less));
}

impl State {
    pub(crate) fn op_begins(&self, endpoint: &Endpoint) {
        add(&endpoint.ops, 1);
        add(&self.outstanding, 1);
    }

    pub(crate) fn copy_begins(&self, endpoint: &Endpoint) {
        add(&endpoint.copies, 1);
        self.op_begins(endpoint);
    }

    pub(crate) fn copy_ends(&self, endpoint: &Rc<Endpoint>) {
        subtract(&endpoint.copies, 1);
        if endpoint.phase.get() == Phase::Leaving {
            self.may_leave.set(true);
        }
        self.op_ends(endpoint);
    }

    pub(crate) fn op_ends(&self, endpoint: &Rc<Endpoint>) {
        subtract(&endpoint.ops, 1);
        endpoint.ended.set(endpoint.ended.get() + 1);
        if endpoint.phase.get() != Phase::Leaving {
            subtract(&self.outstanding, 1);
        }
        self.report_if_closed(endpoint);
    }

    /// Marks an endpoint as closable.
    pub(crate) fn settled(&self, endpoint: &Endpoint) {
        endpoint.is_settled.set(true);
        if endpoint.phase.get() == Phase::Leaving {
            self.may_leave.set(true);
        }
    }

    /// Marks an endpoint as closable after a refused operation, if no other is in flight.
    pub(crate) fn settled_unless_busy(&self, endpoint: &Endpoint) {
        if endpoint.ops.get() == 0 {
            self.settled(endpoint);
        }
    }

    fn close_ends(&self, endpoint: &Rc<Endpoint>) {
        endpoint.phase.set(Phase::Freed);
        self.report_if_closed(endpoint);
    }

    fn report_if_closed(&self, endpoint: &Rc<Endpoint>) {
        if endpoint.phase.get() == Phase::Freed && endpoint.ops.get() == 0 {
            endpoint.phase.set(Phase::Closed);
            subtract(&self.outstanding, 1);
            self.events.push(Raw::Closed {
                endpoint: Rc::clone(endpoint),
            });
        }
    }

    /// Marks the endpoint with this handle as failed. UCX may reuse the handle of an endpoint that
    /// is being closed: such an endpoint does not count.
    fn endpoint_failed(&self, handle: *mut sys::ucp_ep, code: ucs_status_t) {
        let Ok(endpoints) = self.endpoints.try_borrow() else {
            return;
        };
        let is_it = |endpoint: &&Rc<Endpoint>| {
            let is_ours = matches!(endpoint.phase.get(), Phase::Open | Phase::Leaving);
            endpoint.handle.as_ptr() == handle && is_ours
        };
        let Some(endpoint) = endpoints.values().find(is_it) else {
            return;
        };
        self.settled(endpoint);
        if endpoint.phase.get() == Phase::Open {
            endpoint.phase.set(Phase::Failed(code));
            self.events.push(Raw::EndpointFailed {
                endpoint: endpoint.id,
                code,
            });
        }
    }
}

const CLOSE: &str = "ucp_ep_close_nbx";
const FLUSH: &str = "ucp_ep_flush_nbx";
/// Shortest worker address: a flag byte, the worker's 8-byte id, one byte for "no device".
const MIN_ADDRESS_BYTES: usize = 10;
const MAX_ADDRESS_BYTES: usize = 64 * 1024;
/// UCX parses addresses without knowing their length. All ones read as "last device", "last
/// address", so a truncated one ends here instead of running off the allocation.
const ADDRESS_TAIL: [u8; 1024] = [0xff; 1024];

/// True if the bytes can be a worker address: a length in bounds, and in the low half of the first byte one of the two
/// format versions, as UCX 1.22 aborts the process at any other.
fn is_plausible(address: &[u8]) -> bool {
    let length_fits = (MIN_ADDRESS_BYTES..=MAX_ADDRESS_BYTES).contains(&address.len());
    length_fits && address.first().is_some_and(|head| head & 0x0f <= 1)
}

impl Worker {
    /// Starts a connection to the worker with this address. UCX connects when operations need it,
    /// and reports its loss by [`Event::EndpointFailed`](crate::Event::EndpointFailed).
    ///
    /// # Safety
    /// `address` must be what [`address`](Self::address) of a worker returned, or the beginning of that: UCX parses it with
    /// few checks, and other bytes can crash it. Take it from authenticated peers only.
    ///
    /// # Errors
    /// `UCS_ERR_INVALID_ADDR` for bytes that cannot be an address, else the status of UCX, such as
    /// `UCS_ERR_UNREACHABLE` when no transport is in common.
    pub unsafe fn connect(&self, address: &[u8]) -> Result<EndpointId, Status> {
        const CALL: &str = "ucp_ep_create";
        if !is_plausible(address) {
            return Err(Status::new(sys::UCS_ERR_INVALID_ADDR, CALL));
        }
        let address = [address, &ADDRESS_TAIL].concat();
        let params = self.endpoint_params(&address);
        let mut handle = null_mut();
        let api = self.inner.api();
        // SAFETY: the worker is live and on its thread; the address, which is a worker's by the caller's promise, with a
        // tail that ends any truncated list, outlives the call, which copies what it needs.
        let code =
            unsafe { (api.ucp_ep_create)(self.inner.as_ptr(), &raw const params, &raw mut handle) };
        check(code, CALL)?;
        let handle = NonNull::new(handle).ok_or(Status::new(sys::UCS_ERR_NO_MEMORY, CALL))?;
        let endpoint = Rc::new(Endpoint {
            id: EndpointId::unique(),
            handle,
            phase: Cell::new(Phase::Open),
            is_settled: Cell::new(false),
            ops: Cell::new(0),
            ended: Cell::new(0),
            copies: Cell::new(0),
            keys: RefCell::default(),
        });
        let id = endpoint.id;
        self.inner.state.endpoints.borrow_mut().insert(id, endpoint);
        Ok(id)
    }

    /// Progress of the operations of an endpoint. None once it is closed.
    pub fn progress_of(&self, endpoint: EndpointId) -> Option<EndpointProgress> {
        let endpoints = self.inner.state.endpoints.borrow();
        let endpoint = endpoints.get(&endpoint)?;
        Some(EndpointProgress {
            in_flight: endpoint.ops.get() - endpoint.copies.get(),
            ended: endpoint.ended.get(),
        })
    }

    fn endpoint_params(&self, address: &[u8]) -> sys::ucp_ep_params_t {
        let no_address = || sys::ucs_sock_addr_t {
            addr: null(),
            addrlen: 0,
        };
        sys::ucp_ep_params_t {
            field_mask: sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLER,
            address: address.as_ptr().cast(),
            err_mode: sys::UCP_ERR_HANDLING_MODE_PEER,
            err_handler: sys::ucp_err_handler_t {
                cb: Some(on_error),
                arg: self.inner.state_ptr(),
            },
            user_data: null_mut(),
            flags: 0,
            sockaddr: no_address(),
            conn_request: null_mut(),
            name: null(),
            local_sockaddr: no_address(),
        }
    }

    /// Has UCX connect the endpoint, and ends when all that was posted before has reached the peer.
    ///
    /// # Errors
    /// `UCS_ERR_NOT_CONNECTED` or the endpoint's failure, else the status of UCX. No `Done` follows an error.
    pub fn flush(&self, endpoint: EndpointId, token: Token) -> Result<(), Status> {
        let endpoint = self.inner.endpoint(endpoint, FLUSH)?;
        let handle = endpoint.usable(FLUSH)?;
        let _current = self.inner.enter();
        let (api, attributes) = (self.inner.api(), Attributes::default());
        request::post(
            &self.inner,
            &endpoint,
            (token, FLUSH),
            Keep::Nothing,
            &attributes,
            |param| {
                // SAFETY: the endpoint is open.
                unsafe { (api.ucp_ep_flush_nbx)(handle, param) }
            },
        )
    }

    /// Closes by force: operations in flight end, mostly with an error, each with its `Done`, then
    /// `Closed` follows. This is no fence for the peer: what it has posted may still arrive.
    /// Calling it again, or for an endpoint that is gone, does nothing.
    ///
    /// An endpoint that has neither finished an operation nor failed is closed once it has:
    /// connect with an operation that will end one way or the other.
    pub fn close(&self, endpoint: EndpointId) {
        let Ok(endpoint) = self.inner.endpoint(endpoint, CLOSE) else {
            return;
        };
        if !matches!(endpoint.phase.get(), Phase::Open | Phase::Failed(_)) {
            return;
        }
        if endpoint.can_leave() {
            return self.close_now(endpoint);
        }
        endpoint.phase.set(Phase::Leaving);
        add(&self.inner.state.leaving, 1);
        subtract(&self.inner.state.outstanding, endpoint.ops.get());
    }

    /// Closes the endpoints that can be closed now, and returns how many. UCX's callbacks must not call this.
    pub(crate) fn close_leaving(&self) -> u32 {
        let state = &self.inner.state;
        if !state.may_leave.take() {
            return 0;
        }
        let endpoints = state.endpoints.borrow();
        let may_leave = |endpoint: &&Rc<Endpoint>| {
            endpoint.phase.get() == Phase::Leaving && endpoint.can_leave()
        };
        let leaving: Vec<_> = endpoints.values().filter(may_leave).cloned().collect();
        drop(endpoints);
        let mut num_closed = 0;
        for endpoint in leaving {
            subtract(&state.leaving, 1);
            add(&state.outstanding, endpoint.ops.get());
            self.close_now(endpoint);
            num_closed += 1;
        }
        num_closed
    }

    fn close_now(&self, endpoint: Rc<Endpoint>) {
        endpoint.phase.set(Phase::Closing);
        add(&self.inner.state.outstanding, 1);
        endpoint.revoke_keys();
        let attributes = Attributes {
            flags: sys::UCP_EP_CLOSE_FLAG_FORCE,
            ..Attributes::default()
        };
        let (worker, handle) = (Rc::clone(&self.inner), endpoint.handle.as_ptr());
        let close = Box::into_raw(Box::new(InFlight { worker, endpoint }));
        let param = attributes.with_callback(on_closed, close.cast());
        let close_endpoint = || {
            // SAFETY: the phase was Open, Failed or Leaving, so the handle is live; it is not used afterwards.
            unsafe { (self.inner.api().ucp_ep_close_nbx)(handle, &raw const param) }
        };
        let ptr = may_unmap(self.inner.uses_gpu(), close_endpoint);
        let posted = Posted::from_ptr(ptr);
        if posted == Posted::Pending {
            return;
        }
        if let Posted::Refused(code) = posted {
            tracing::warn!(status = %Status::new(code, CLOSE), "endpoint.close_refused");
        }
        // SAFETY: made by into_raw above; no callback runs for what is complete or refused.
        let close = unsafe { Box::from_raw(close) };
        close.worker.state.close_ends(&close.endpoint);
    }
}

/// Kept alive by a close in flight.
struct InFlight {
    worker: Rc<Inner>,
    endpoint: Rc<Endpoint>,
}

/// UCX's callback for the end of a close.
unsafe extern "C" fn on_closed(request: *mut c_void, code: ucs_status_t, user_data: *mut c_void) {
    // SAFETY: `user_data` is the InFlight that `close_now` gave to this call, and UCX calls back once.
    let close = unsafe { Box::from_raw(user_data.cast::<InFlight>()) };
    // SAFETY: the request is the one that completes here; it is freed once.
    unsafe { (close.worker.api().ucp_request_free)(request) };
    if code != sys::UCS_OK {
        tracing::debug!(code, "endpoint.closed_with_error");
    }
    close.worker.state.close_ends(&close.endpoint);
}

/// UCX's callback for the loss of a connection.
unsafe extern "C" fn on_error(arg: *mut c_void, ep: *mut sys::ucp_ep, code: ucs_status_t) {
    // SAFETY: `arg` is the worker's State, which outlives the UCX worker (see Inner).
    let state = unsafe { &*arg.cast::<State>() };
    state.endpoint_failed(ep, code);
}

#[cfg(test)]
mod tests;
