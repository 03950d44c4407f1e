//! What comes over the sockets of a node.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;

use super::Loop;
use crate::error::{Error, Result};
use crate::link::Incoming;
use crate::node::io::{Connected, LISTENER, UCX, WAKE};
use crate::node::{LinkId, Service};
use crate::work::timespec;

/// Handshakes of peers under way at once; one more ends the oldest, so that silent connections keep nobody out.
const HANDSHAKES_CAP: usize = 64;
/// What is looked at besides links: wake, listener, UCX.
const NUM_OTHERS: usize = 3;
/// Without file descriptors, the next attempt to accept.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);

impl<S: Service> Loop<S> {
    pub(super) fn take_connected(&mut self, connected: Connected) {
        let Connected {
            link,
            peer,
            begun,
            stream,
        } = connected;
        // Given up meanwhile, and reported as such.
        if !self.io.connecting.contains_key(&link) {
            return;
        }
        let added = match stream {
            Ok(stream) => self.io.add(link, stream, peer, false, begun),
            Err(reason) => Err(Error::Connect(format!(
                "cannot reach {peer}: {reason}; is a kvpipe peer listening there?"
            ))),
        };
        match added {
            Ok(()) => {
                self.io.connecting.remove(&link);
            }
            Err(error) => self.io.fail(link, error),
        }
    }

    /// Serves the sockets, and until then sleeps at most until `until`; whether a signal ended that.
    pub(in crate::node) fn look_at_sockets(&mut self, until: Instant) -> bool {
        let mut ready = std::mem::take(&mut self.ready);
        let is_interrupted = self.wait(&mut ready, until);
        self.io.now = Instant::now();
        self.looked_at_sockets = self.io.now;
        for event in ready.drain(..) {
            match event.data.u64() {
                WAKE => {
                    let _ = rustix::io::read(&*self.io.wake, &mut [0u8; 8]);
                    self.take_commands();
                }
                LISTENER => self.accept(),
                UCX => self.rung(),
                link => self.serve(link, event.flags),
            }
        }
        self.ready = ready;
        self.report_failures();
        is_interrupted
    }

    /// All that is readable at once, because nobody is silent before it has been seen what they sent: after a SIGCONT too,
    /// which interrupts. Whether a signal did.
    fn wait(&self, ready: &mut Vec<epoll::Event>, until: Instant) -> bool {
        ready.reserve(self.io.links.len() + NUM_OTHERS);
        let mut look = |until: Instant| {
            let timeout = timespec(until.saturating_duration_since(Instant::now()));
            epoll::wait(&self.io.epoll, spare_capacity(ready), Some(&timeout))
        };
        let is_interrupted = look(until) == Err(Errno::INTR);
        if is_interrupted {
            let _ = look(Instant::now());
        }
        is_interrupted
    }

    fn accept(&mut self) {
        for _ in 0..HANDSHAKES_CAP {
            let Some(accepted) = self.io.listener.as_ref().map(std::net::TcpListener::accept)
            else {
                return;
            };
            match accepted {
                Ok((stream, peer)) => {
                    self.make_room();
                    let (link, now) = (self.io.new_link(), self.io.now);
                    if let Err(error) = self.io.add(link, stream, peer.to_string(), true, now) {
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
                    self.accept_at = Some(self.io.now + ACCEPT_AGAIN);
                    return self.io.listen(false);
                }
            }
        }
    }

    fn make_room(&mut self) {
        let is_under_way =
            |(_, link): &(&LinkId, &crate::link::Link)| link.is_accepted && !link.is_up();
        let under_way = self.io.links.iter().filter(is_under_way);
        let (count, oldest) = under_way.fold((0, None), |(count, oldest), (&id, _)| {
            (count + 1, oldest.into_iter().chain([id]).min())
        });
        if let Some(oldest) = oldest.filter(|_| count >= HANDSHAKES_CAP) {
            let text = "it had not completed its handshake when many others connected";
            self.report_failure(oldest, Error::Connect(text.to_owned()));
        }
    }

    pub(super) fn serve(&mut self, id: LinkId, flags: epoll::EventFlags) {
        let Some(link) = self.io.links.get_mut(&id) else {
            return;
        };
        if flags.contains(epoll::EventFlags::OUT) {
            link.flush();
        }
        let (incoming, ended) = link.receive(&self.io.config.identity, self.io.now, |peer| {
            self.service.accept(id, peer)
        });
        // Before the commands: one that needs the peer knows then that it has to connect again.
        if let Some(error) = ended {
            self.io.fail(id, error);
        }
        self.take_commands();
        for item in incoming {
            if let Err(error) = self.take_incoming(id, item) {
                return self.cut(id, error);
            }
        }
        self.io.watch_writes(id);
    }

    fn take_incoming(&mut self, link: LinkId, item: Incoming) -> Result<()> {
        match item {
            Incoming::Admitted(session) => {
                if let Some(data) = &mut self.io.data {
                    data.admit(link, session);
                }
                Ok(())
            }
            Incoming::Ready => self.ready(link),
            Incoming::Frame(frame) => {
                self.announce(link);
                self.service.frame(&mut self.io, link, &frame)
            }
        }
    }

    /// Both sides know the session. With a data plane, it is established when both hellos have come through that too.
    fn ready(&mut self, link: LinkId) -> Result<()> {
        let Some(data) = &mut self.io.data else {
            self.announce(link);
            return Ok(());
        };
        let known = self.io.links.get(&link);
        match known.and_then(|link| link.identity.as_ref()) {
            Some(peer) => data.open(link, &peer.ucx_address),
            None => Ok(()),
        }
    }

    /// Tells the service of an established session, once.
    pub(super) fn announce(&mut self, link: LinkId) {
        let Some(connection) = self.io.links.get_mut(&link) else {
            return;
        };
        if let Some(peer) = connection.identity.take() {
            connection.is_announced = true;
            if let Some(data) = &mut self.io.data {
                data.choose_road(link);
            }
            self.service.link_up(&mut self.io, link, &peer);
        }
    }
}
