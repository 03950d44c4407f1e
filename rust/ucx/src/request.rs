//! Operations in flight: each owns what it uses until its callback has run.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::Arc;

use crate::endpoint::Endpoint;
use crate::memory::Memory;
use crate::rma::{KeyUse, Write};
use crate::status::{Posted, Status};
use crate::sys::{self, ucp_request_param_t, ucs_status_ptr_t, ucs_status_t};
use crate::worker::Inner;

/// A number that identifies an operation to its poster.
pub type Token = u64;

/// An operation in flight. The callback's `user_data` points to it. It holds the worker, which cannot be destroyed
/// meanwhile.
pub(crate) struct Op {
    pub(crate) worker: Rc<Inner>,
    pub(crate) endpoint: Rc<Endpoint>,
    pub(crate) token: Token,
    pub(crate) call: &'static str,
    _keep: Keep,
}

/// Memory and key that UCX uses during an operation.
pub(crate) enum Keep {
    Nothing,
    Get {
        _memory: Arc<Memory>,
        _key: KeyUse,
        _write: Write,
    },
}

/// The parameters that differ between operations.
#[derive(Default)]
pub(crate) struct Attributes {
    pub(crate) flags: u32,
    pub(crate) memory_type: Option<i32>,
    pub(crate) memory: Option<*mut sys::ucp_mem>,
}

impl Attributes {
    /// The parameters of a call whose callback is `callback(.., user_data)`.
    pub(crate) fn with_callback(
        &self,
        callback: sys::ucp_send_nbx_callback_t,
        user_data: *mut c_void,
    ) -> ucp_request_param_t {
        let mut mask = sys::UCP_OP_ATTR_FIELD_CALLBACK | sys::UCP_OP_ATTR_FIELD_USER_DATA;
        if self.flags != 0 {
            mask |= sys::UCP_OP_ATTR_FIELD_FLAGS;
        }
        if self.memory_type.is_some() {
            mask |= sys::UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        }
        if self.memory.is_some() {
            mask |= sys::UCP_OP_ATTR_FIELD_MEMH;
        }
        ucp_request_param_t {
            op_attr_mask: mask,
            flags: self.flags,
            request: null_mut(),
            cb: Some(callback),
            datatype: 0,
            user_data,
            reply_buffer: null_mut(),
            memory_type: self.memory_type.unwrap_or(sys::UCS_MEMORY_TYPE_HOST),
            recv_info: null_mut(),
            memh: self.memory.unwrap_or(null_mut()),
            remote_datatype: 0,
            remote: null_mut(),
            remote_count: 0,
        }
    }
}

/// Posts an operation by `issue`, which must be the `call` on `endpoint` with the given
/// parameters, and must use no memory that `keep` does not own.
pub(crate) fn post(
    worker: &Rc<Inner>,
    endpoint: &Rc<Endpoint>,
    (token, call): (Token, &'static str),
    keep: Keep,
    attributes: &Attributes,
    issue: impl FnOnce(&ucp_request_param_t) -> ucs_status_ptr_t,
) -> Result<(), Status> {
    let op = Box::into_raw(Box::new(begin(worker, endpoint, (token, call), keep)));
    let posted = Posted::from_ptr(issue(&attributes.with_callback(on_done, op.cast())));
    if posted == Posted::Pending {
        return Ok(());
    }
    // SAFETY: made by into_raw above; no callback runs for what is complete or refused, so the
    // operation is ours again.
    let op = unsafe { Box::from_raw(op) };
    match posted {
        Posted::Refused(code) => {
            withdraw(&op);
            Err(Status::new(code, call))
        }
        Posted::Complete | Posted::Pending => {
            op.worker.state.settled(&op.endpoint);
            finish(op, sys::UCS_OK);
            Ok(())
        }
    }
}

fn begin(
    worker: &Rc<Inner>,
    endpoint: &Rc<Endpoint>,
    (token, call): (Token, &'static str),
    keep: Keep,
) -> Op {
    worker.state.op_begins(endpoint);
    op(worker, endpoint, (token, call), keep)
}

fn op(
    worker: &Rc<Inner>,
    endpoint: &Rc<Endpoint>,
    (token, call): (Token, &'static str),
    keep: Keep,
) -> Op {
    Op {
        worker: Rc::clone(worker),
        endpoint: Rc::clone(endpoint),
        token,
        call,
        _keep: keep,
    }
}

/// Ends an operation that was refused.
fn withdraw(op: &Op) {
    op.worker.state.op_ends(&op.endpoint);
    // Otherwise nothing might be left that marks the endpoint as closable.
    op.worker.state.settled_unless_busy(&op.endpoint);
}

/// Begins a copy, which keeps its endpoint from being closed: UCX unmaps the peer's memory with it.
pub(crate) fn begin_copy(
    worker: &Rc<Inner>,
    endpoint: &Rc<Endpoint>,
    names: (Token, &'static str),
    keep: Keep,
) -> Op {
    worker.state.copy_begins(endpoint);
    op(worker, endpoint, names, keep)
}

/// Ends a copy that was refused.
pub(crate) fn withdraw_copy(op: &Op) {
    op.worker.state.copy_ends(&op.endpoint);
}

/// As [`finish`], of a copy.
pub(crate) fn finish_copy(op: Box<Op>, code: ucs_status_t) {
    let (worker, endpoint) = queue_done(op, code);
    worker.state.copy_ends(&endpoint);
}

/// Reports success for an operation that has nothing to do.
pub(crate) fn complete_empty(
    worker: &Rc<Inner>,
    endpoint: &Rc<Endpoint>,
    (token, call): (Token, &'static str),
) {
    let op = begin(worker, endpoint, (token, call), Keep::Nothing);
    finish(Box::new(op), sys::UCS_OK);
}

/// Queues the operation's `Done`, and the `Closed` that waited for it. Drops nothing that can run foreign code.
fn finish(op: Box<Op>, code: ucs_status_t) {
    let (worker, endpoint) = queue_done(op, code);
    worker.state.op_ends(&endpoint);
}

fn queue_done(op: Box<Op>, code: ucs_status_t) -> (Rc<Inner>, Rc<Endpoint>) {
    let (worker, endpoint) = (Rc::clone(&op.worker), Rc::clone(&op.endpoint));
    let done = crate::event::Raw::Done { op, code };
    worker.state.events.push(done);
    (worker, endpoint)
}

/// UCX's completion callback for every operation.
unsafe extern "C" fn on_done(request: *mut c_void, code: ucs_status_t, user_data: *mut c_void) {
    // SAFETY: `user_data` is the Op that `post` gave to this call, and UCX calls back once.
    let op = unsafe { Box::from_raw(user_data.cast::<Op>()) };
    // SAFETY: the request is the one that completes here; it is freed once.
    unsafe { (op.worker.api().ucp_request_free)(request) };
    if code == sys::UCS_OK {
        op.worker.state.settled(&op.endpoint);
    }
    finish(op, code);
}
