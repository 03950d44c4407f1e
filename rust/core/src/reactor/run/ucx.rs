//! What comes over the UCX worker of a reactor.

use kvpipe_ucx::{AmData, Event, Status};
use rustix::event::epoll;

use super::{EVENTS_PER_ROUND, ReactorCore};
use crate::error::Error;
use crate::ids::SessionKey;
use crate::reactor::Service;
use crate::session::data_plane::{DataPlane, HELLO};

/// Wakes by UCX's descriptor, one after the other, that may lead to nothing.
const FRUITLESS_WAKES: u32 = 16;

impl<S: Service> ReactorCore<S> {
    /// Lets UCX work; whether anything happened.
    pub(super) fn progress(&mut self) -> bool {
        let Some(data) = &self.cx.data else {
            return false;
        };
        let progressed = data.worker.progress() > 0;
        self.take_commands();
        let has_worked = self.take_events() || progressed;
        if has_worked && std::mem::take(&mut self.num_fruitless) >= FRUITLESS_WAKES {
            self.cx.watch_worker(false);
        }
        has_worked
    }

    /// UCX's descriptor is readable. It stays so while an endpoint waits for its connection (1.22, TCP), although there is
    /// nothing to do: after some such wakes only what is new wakes, until UCX has worked again.
    pub(super) fn rung(&mut self) {
        self.num_fruitless = self.num_fruitless.saturating_add(1);
        if self.num_fruitless == FRUITLESS_WAKES {
            self.cx.watch_worker(true);
        }
    }

    pub(super) fn take_events(&mut self) -> bool {
        for taken in 0..EVENTS_PER_ROUND {
            let Some(event) = self
                .cx
                .data
                .as_ref()
                .and_then(|data| data.worker.next_event())
            else {
                self.is_backlogged = false;
                return taken > 0;
            };
            self.take_event(event);
        }
        self.is_backlogged = true;
        true
    }

    fn take_event(&mut self, event: Event) {
        match event {
            Event::Message { header, data } => self.take_message(&header, data),
            Event::Done { token, result } => self.take_done(token, result),
            Event::EndpointFailed { endpoint, status } => {
                let data = self.cx.data.as_ref();
                if let Some(session) = data.and_then(|data| data.session_of(endpoint)) {
                    self.endpoint_failed(session, status);
                }
            }
            Event::Closed { endpoint } => {
                if let Some(data) = &mut self.cx.data {
                    data.forget(endpoint);
                }
            }
        }
    }

    fn take_done(&mut self, token: u64, result: Result<(), Status>) {
        let data = self.cx.data.as_ref();
        if let Some(session) = DataPlane::hello_of(token) {
            self.hello_ended(session, result);
        } else if !data.is_some_and(|data| data.end_message(token)) {
            self.service.done(&mut self.cx, token, result);
        }
    }

    fn endpoint_failed(&mut self, session: SessionKey, status: Status) {
        // A peer that leaves in order says so before its endpoint ends, but over another connection: seen first, that
        // end would hide what it said.
        self.serve(session, epoll::EventFlags::empty());
        let peer = self.cx.peer(session);
        self.cx.fail(session, Error::lost(&peer, status));
    }

    fn hello_ended(&mut self, session: SessionKey, result: Result<(), Status>) {
        if let Err(status) = result {
            let peer = self.cx.peer(session);
            return self.cx.fail(session, Error::lost(&peer, status));
        }
        let data = self.cx.data.as_mut();
        if data.is_some_and(|data| data.hello_left(session)) {
            self.announce(session);
        }
    }

    fn take_message(&mut self, header: &[u8], data: AmData) {
        let Some((session_id, header)) = header.split_first_chunk::<16>() else {
            return;
        };
        // Without a live session nothing is said about the message, not even that it was wrong.
        let Some(plane) = &mut self.cx.data else {
            return;
        };
        let Some(session) = plane.key_of_session_id(session_id) else {
            return;
        };
        if header == [HELLO] {
            if plane.hello_came(session) {
                self.announce(session);
            }
            return;
        }
        if !plane.is_open(session) {
            return self.cut(
                session,
                Error::protocol("a message before the session_id was ready"),
            );
        }
        // Who says more has got our hello.
        self.announce(session);
        if let Err(error) = self.service.message(&mut self.cx, session, header, data) {
            self.cut(session, error);
        }
    }
}
