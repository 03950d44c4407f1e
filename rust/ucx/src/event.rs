//! Events of a worker, and the queue between UCX's callbacks and `Worker::next_event`.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;

use crate::endpoint::{Endpoint, EndpointId};
use crate::request::{Op, Token};
use crate::status::Status;
use crate::sys::ucs_status_t;

/// Something that happened on a worker.
#[derive(Debug)]
pub enum Event {
    /// An operation has ended. Exactly one follows each post that returned `Ok`. Taking the event
    /// from the queue drops the operation's memory.
    Done {
        /// The poster's token.
        token: Token,
        /// Its outcome.
        result: Result<(), Status>,
    },
    /// The connection is lost. At most one follows per endpoint, and none after `close`, which
    /// the owner still has to call.
    EndpointFailed {
        /// The endpoint.
        endpoint: EndpointId,
        /// The cause.
        status: Status,
    },
    /// The endpoint is closed, and every operation on it has had its `Done` before this.
    Closed {
        /// The endpoint; its id is not used again.
        endpoint: EndpointId,
    },
}

/// An event as a callback queues it. Ended operations wait here, so that the destructors of their owners run outside
/// UCX.
pub(crate) enum Raw {
    Done {
        op: Box<Op>,
        code: ucs_status_t,
    },
    EndpointFailed {
        endpoint: EndpointId,
        code: ucs_status_t,
    },
    Closed {
        endpoint: Rc<Endpoint>,
    },
}

/// A queue that callbacks can push to without any way to panic.
#[derive(Default)]
pub(crate) struct Queue(Cell<VecDeque<Raw>>);

impl Queue {
    pub(crate) fn push(&self, event: Raw) {
        let mut events = self.0.take();
        events.push_back(event);
        self.0.set(events);
    }

    pub(crate) fn pop(&self) -> Option<Raw> {
        let mut events = self.0.take();
        let event = events.pop_front();
        self.0.set(events);
        event
    }
}
