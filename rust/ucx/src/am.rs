//! Active messages: a small header and a payload for the peer. All use one id.

use std::ffi::{c_uint, c_void};
use std::ops::Deref;
use std::ptr::null;
use std::sync::Arc;

use crate::buffer::MemoryKind;
use crate::endpoint::EndpointId;
use crate::event::Raw;
use crate::memory::Memory;
use crate::request::{self, Attributes, Keep, Token};
use crate::shared_bytes::SharedBytes;
use crate::status::{Status, check};
use crate::sys::{self, ucs_status_t};
use crate::worker::{Inner, State, Worker};

const AM_ID: c_uint = 1;
const CALL: &str = "ucp_am_send_nbx";

/// The bytes of a message, kept alive until its `Done`.
#[derive(Debug)]
pub enum Payload {
    /// Only the header.
    None,
    /// Bytes that it owns.
    Bytes(Vec<u8>),
    /// A piece of registered memory, not to be changed until `Done`.
    Memory {
        /// The memory.
        memory: Arc<Memory>,
        /// Where the piece begins.
        offset: usize,
        /// Its length in bytes.
        len: usize,
    },
}

impl Payload {
    /// Address, length, and the attributes of the memory.
    fn describe(&self, worker: &Inner) -> Result<(*const c_void, usize, Attributes), Status> {
        let host = Attributes {
            flags: sys::UCP_AM_SEND_FLAG_EAGER,
            memory_type: Some(MemoryKind::Host.as_ucs()),
            memory: None,
        };
        match self {
            Self::Bytes(bytes) if !bytes.is_empty() => {
                Ok((bytes.as_ptr().cast(), bytes.len(), host))
            }
            Self::Memory {
                memory,
                offset,
                len,
            } => {
                let (start, attributes) = worker.local(memory, *offset, *len, CALL)?;
                let flags = host.flags;
                Ok((
                    start.cast_const(),
                    *len,
                    Attributes {
                        flags,
                        ..attributes
                    },
                ))
            }
            Self::None | Self::Bytes(_) => Ok((null(), 0, host)),
        }
    }
}

/// The payload of a received message.
#[derive(Debug)]
pub enum AmData {
    /// The bytes.
    Bytes(Vec<u8>),
    /// The worker's [`Placer`] has stored that many bytes.
    Placed(usize),
}

impl AmData {
    /// Its length in bytes, wherever they are.
    pub fn num_bytes(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Placed(len) => *len,
        }
    }

    /// The bytes, without a copy; none if they were placed.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Placed(_) => Vec::new(),
        }
    }
}

impl Deref for AmData {
    type Target = [u8];

    /// The bytes; none if they were placed.
    fn deref(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Placed(_) => &[],
        }
    }
}

/// Stores the payload of a message, given a copy of its header, out of UCX's receive buffer, which saves a copy: over shared
/// memory a peer may write into that. If it returns false, the payload is copied into the event.
pub type Placer = Box<dyn Fn(&[u8], SharedBytes<'_>) -> bool>;

impl Worker {
    /// Sends a message. Messages of one endpoint arrive in order over one lane, but UCX does not
    /// promise it: number them.
    ///
    /// # Errors
    /// `UCS_ERR_EXCEEDS_LIMIT` for a header over [`max_header_bytes`](Self::max_header_bytes),
    /// `UCS_ERR_OUT_OF_RANGE` for a piece outside its memory, `UCS_ERR_NOT_CONNECTED` or the
    /// endpoint's failure, else the status of UCX. No `Done` follows an error.
    pub fn am_send(
        &self,
        endpoint: EndpointId,
        header: impl Into<Vec<u8>>,
        payload: Payload,
        token: Token,
    ) -> Result<(), Status> {
        let header = header.into();
        let endpoint = self.inner.endpoint(endpoint, CALL)?;
        let handle = endpoint.usable(CALL)?;
        if header.len() > self.max_header_bytes() {
            return Err(Status::new(sys::UCS_ERR_EXCEEDS_LIMIT, CALL));
        }
        let (start, len, attributes) = payload.describe(&self.inner)?;
        let _current = self.inner.enter();
        let (header_start, header_len) = (header.as_ptr(), header.len());
        let keep = Keep::Message {
            _header: header,
            _payload: payload,
        };
        let api = self.inner.api();
        request::post(
            &self.inner,
            &endpoint,
            (token, CALL),
            keep,
            &attributes,
            |param| {
                // SAFETY: the endpoint is open; header and payload are owned by the operation, whose
                // heap allocations did not move with it, until the callback.
                unsafe {
                    (api.ucp_am_send_nbx)(
                        handle,
                        AM_ID,
                        header_start.cast(),
                        header_len,
                        start,
                        len,
                        param,
                    )
                }
            },
        )
    }

    /// Offers the payloads of messages to `placer`, in place of an earlier one.
    ///
    /// # Safety
    /// UCX calls `placer` while the worker progresses: it must not use the worker, nor anything that was made from it.
    pub unsafe fn place_with(&self, placer: Placer) {
        self.inner.state.placer.replace(Some(placer));
    }

    /// The longest header a message can have on this worker's transports.
    pub fn max_header_bytes(&self) -> usize {
        self.inner.max_header_bytes
    }
}

/// Delivers messages to the worker's queue.
pub(crate) fn install_handler(worker: &Inner) -> Result<(), Status> {
    set_handler(worker, Some(on_message))
}

/// Stops delivery: UCX drops later messages.
pub(crate) fn remove_handler(worker: &Inner) -> Result<(), Status> {
    set_handler(worker, None)
}

fn set_handler(worker: &Inner, cb: Option<sys::ucp_am_recv_callback_t>) -> Result<(), Status> {
    let param = sys::ucp_am_handler_param_t {
        field_mask: sys::UCP_AM_HANDLER_PARAM_FIELD_ID
            | sys::UCP_AM_HANDLER_PARAM_FIELD_FLAGS
            | sys::UCP_AM_HANDLER_PARAM_FIELD_CB
            | sys::UCP_AM_HANDLER_PARAM_FIELD_ARG,
        id: AM_ID,
        flags: sys::UCP_AM_FLAG_WHOLE_MSG,
        cb,
        arg: worker.state_ptr(),
    };
    let api = worker.api();
    // SAFETY: the worker is live and on its thread; `arg` outlives it (see Inner).
    check(
        unsafe { (api.ucp_worker_set_am_recv_handler)(worker.as_ptr(), &raw const param) },
        "ucp_worker_set_am_recv_handler",
    )
}

/// UCX's callback for a message. All its arguments come from the peer.
unsafe extern "C" fn on_message(
    arg: *mut c_void,
    header: *const c_void,
    header_len: usize,
    data: *mut c_void,
    len: usize,
    param: *const sys::ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: `arg` is the worker's State, which outlives the UCX worker (see Inner).
    let state = unsafe { &*arg.cast::<State>() };
    // SAFETY: UCX passes its own parameters, valid during the callback.
    let recv_attr = unsafe { (*param).recv_attr };
    if recv_attr & sys::UCP_AM_RECV_ATTR_FLAG_RNDV != 0 {
        // Our peers send eagerly. An error drops the descriptor and fails the sender's operation.
        return sys::UCS_ERR_REJECTED;
    }
    if state.stopped.get() {
        return sys::UCS_OK;
    }
    // SAFETY: UCX passes `header_len` readable bytes, valid during the callback.
    let header = unsafe { bytes(header, header_len) }.to_vec();
    // SAFETY: UCX passes `len` readable bytes, valid during the callback.
    let data = unsafe { bytes(data, len) };
    let data = if !data.is_empty() && state.place(&header, data) {
        AmData::Placed(len)
    } else {
        AmData::Bytes(data.to_vec())
    };
    state.events.push(Raw::Message { header, data });
    sys::UCS_OK
}

/// # Safety
/// `start` must be valid for reading `len` bytes as long as the result is used, or be null, or `len` zero.
unsafe fn bytes<'a>(start: *const c_void, len: usize) -> SharedBytes<'a> {
    if start.is_null() || len == 0 {
        return SharedBytes::from(&[][..]);
    }
    // SAFETY: the caller's promise; null and empty were excluded above.
    unsafe { SharedBytes::new(start.cast(), len) }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    fn deliver(state: &State, recv_attr: u64, data: &mut [u8]) -> ucs_status_t {
        let param = sys::ucp_am_recv_param_t {
            recv_attr,
            reply_ep: std::ptr::null_mut(),
        };
        let (arg, len) = ((&raw const *state).cast_mut().cast(), data.len());
        let data = data.as_mut_ptr().cast();
        // SAFETY: the arguments are what UCX would pass: valid pointers, with their lengths.
        unsafe { on_message(arg, b"h".as_ptr().cast(), 1, data, len, &raw const param) }
    }

    #[test]
    fn a_rendezvous_is_refused_without_an_event() {
        let state = State::default();
        let answer = deliver(&state, sys::UCP_AM_RECV_ATTR_FLAG_RNDV, &mut [0; 8]);
        assert_eq!(answer, sys::UCS_ERR_REJECTED);
        assert!(state.events.pop().is_none());
    }

    fn taken(state: &State) -> Vec<AmData> {
        let events = std::iter::from_fn(|| state.events.pop());
        let data = |event| match event {
            Raw::Message { header, data } if header == b"h" => data,
            _ => panic!("a message"),
        };
        events.map(data).collect()
    }

    #[test]
    fn data_is_copied_as_ucx_has_it_back_after_the_callback() {
        let state = State::default();
        assert_eq!(deliver(&state, 0, &mut [7; 8]), sys::UCS_OK);
        assert_eq!(deliver(&state, 0, &mut []), sys::UCS_OK);
        let taken = taken(&state);
        assert!(
            matches!(&taken[..], [AmData::Bytes(data), AmData::Bytes(none)] if data == &[7; 8] && none.is_empty())
        );
    }

    #[test]
    fn data_that_is_placed_is_not_copied() {
        let state = State::default();
        let placed = Rc::new(RefCell::default());
        let place = Rc::clone(&placed);
        state.placer.replace(Some(Box::new(
            move |header: &[u8], data: SharedBytes<'_>| {
                assert_eq!(header, b"h");
                place.replace(data.to_vec());
                data.len() == 8
            },
        )));
        deliver(&state, 0, &mut [7; 8]);
        assert_eq!(placed.take(), [7; 8]);
        deliver(&state, 0, &mut [8; 9]);
        let taken = taken(&state);
        assert!(matches!(&taken[..], [AmData::Placed(8), AmData::Bytes(data)] if data == &[8; 9]));
    }

    #[test]
    fn stopped_worker_keeps_nothing() {
        let state = State::default();
        state.stopped.set(true);
        assert_eq!(deliver(&state, 0, &mut [7; 8]), sys::UCS_OK);
        assert!(state.events.pop().is_none());
    }
}
