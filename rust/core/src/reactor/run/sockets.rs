//! What comes over the sockets of a reactor.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;

use super::ReactorCore;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::reactor::Service;
use crate::reactor::io::{Connected, LISTENER, UCX, WAKE};
use crate::session::connection::ConnectionEvent;
use crate::work::timespec;

/// Handshakes of peers under way at once; one more ends the oldest, so that silent connections keep nobody out.
const HANDSHAKES_CAP: usize = 64;
/// What is looked at besides sessions: wake, listener, UCX.
const NUM_OTHERS: usize = 3;
/// Without file descriptors, the next attempt to accept.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);

impl<S: Service> ReactorCore<S> {
    pub(super) fn take_connected(&mut self, connected: Connected) {
        let Connected {
            session,
            peer,
            begun,
            stream,
        } = connected;
        // Given up meanwhile, and reported as such.
        if !self.cx.connecting.contains_key(&session) {
            return;
        }
        let added = match stream {
            Ok(stream) => self.cx.add(session, stream, peer, false, begun),
            Err(reason) => Err(Error::Connect(format!(
                "cannot reach {peer}: {reason}; is a kvpipe peer listening there?"
            ))),
        };
        match added {
            Ok(()) => {
                self.cx.connecting.remove(&session);
            }
            Err(error) => self.cx.fail(session, error),
        }
    }

    /// Serves the sockets, and until then sleeps at most until `until`; whether a signal ended that.
    pub(in crate::reactor) fn look_at_sockets(&mut self, until: Instant) -> bool {
        let mut ready = std::mem::take(&mut self.ready);
        let is_interrupted = self.wait(&mut ready, until);
        self.cx.now = Instant::now();
        self.looked_at_sockets = self.cx.now;
        for event in ready.drain(..) {
            match event.data.u64() {
                WAKE => {
                    let _ = rustix::io::read(&*self.cx.wake, &mut [0u8; 8]);
                    self.take_commands();
                }
                LISTENER => self.accept(),
                UCX => self.rung(),
                session => self.serve(session, event.flags),
            }
        }
        self.ready = ready;
        self.report_failures();
        is_interrupted
    }

    /// All that is readable at once, because nobody is silent before it has been seen what they sent: after a SIGCONT too,
    /// which interrupts. Whether a signal did.
    fn wait(&self, ready: &mut Vec<epoll::Event>, until: Instant) -> bool {
        ready.reserve(self.cx.sessions.len() + NUM_OTHERS);
        let mut look = |until: Instant| {
            let timeout = timespec(until.saturating_duration_since(Instant::now()));
            epoll::wait(&self.cx.epoll, spare_capacity(ready), Some(&timeout))
        };
        let is_interrupted = look(until) == Err(Errno::INTR);
        if is_interrupted {
            let _ = look(Instant::now());
        }
        is_interrupted
    }

    fn accept(&mut self) {
        for _ in 0..HANDSHAKES_CAP {
            let Some(accepted) = self.cx.listener.as_ref().map(std::net::TcpListener::accept)
            else {
                return;
            };
            match accepted {
                Ok((stream, peer)) => {
                    self.make_room();
                    let (session, now) = (self.cx.new_session(), self.cx.now);
                    if let Err(error) = self.cx.add(session, stream, peer.to_string(), true, now) {
                        self.service.log(format!("refused {peer}: {error}"));
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    self.service
                        .log(format!("cannot accept connections: {error}"));
                    self.accept_at = Some(self.cx.now + ACCEPT_AGAIN);
                    return self.cx.listen(false);
                }
            }
        }
    }

    fn make_room(&mut self) {
        let is_under_way =
            |(_, session): &(&SessionKey, &crate::session::connection::Connection)| {
                session.is_accepted && !session.is_up()
            };
        let under_way = self.cx.sessions.iter().filter(is_under_way);
        let (count, oldest) = under_way.fold((0, None), |(count, oldest), (&id, _)| {
            (count + 1, oldest.into_iter().chain([id]).min())
        });
        if let Some(oldest) = oldest.filter(|_| count >= HANDSHAKES_CAP) {
            let text = "it had not completed its handshake when many others connected";
            self.report_failure(oldest, Error::Connect(text.to_owned()));
        }
    }

    pub(super) fn serve(&mut self, id: SessionKey, flags: epoll::EventFlags) {
        let Some(session) = self.cx.sessions.get_mut(&id) else {
            return;
        };
        if flags.contains(epoll::EventFlags::OUT) {
            session.flush();
        }
        let (incoming, ended) = session.receive(&self.cx.config.identity, self.cx.now, |peer| {
            self.service.accept(id, peer)
        });
        // Before the commands: one that needs the peer knows then that it has to connect again.
        if let Some(error) = ended {
            self.cx.fail(id, error);
        }
        self.take_commands();
        for item in incoming {
            if let Err(error) = self.take_incoming(id, item) {
                return self.cut(id, error);
            }
        }
        self.cx.watch_writes(id);
    }

    fn take_incoming(&mut self, session: SessionKey, item: ConnectionEvent) -> Result<()> {
        match item {
            ConnectionEvent::Admitted(session_id) => {
                if let Some(data) = &mut self.cx.data {
                    data.admit(session, session_id);
                }
                Ok(())
            }
            ConnectionEvent::Ready => self.ready(session),
            ConnectionEvent::Frame(frame) => {
                self.announce(session);
                self.service.frame(&mut self.cx, session, &frame)
            }
        }
    }

    /// Both sides know the session. With a data plane, it is established when both hellos have come through that too.
    fn ready(&mut self, session: SessionKey) -> Result<()> {
        let Some(data) = &mut self.cx.data else {
            self.announce(session);
            return Ok(());
        };
        let known = self.cx.sessions.get(&session);
        match known.and_then(|session| session.identity.as_ref()) {
            Some(peer) => data.open(session, &peer.ucx_address),
            None => Ok(()),
        }
    }

    /// Tells the service of an established session, once.
    pub(super) fn announce(&mut self, session: SessionKey) {
        let Some(connection) = self.cx.sessions.get_mut(&session) else {
            return;
        };
        if let Some(peer) = connection.identity.take() {
            connection.is_announced = true;
            if let Some(data) = &mut self.cx.data {
                data.choose_data_path(session);
            }
            self.service.session_up(&mut self.cx, session, &peer);
        }
    }
}
