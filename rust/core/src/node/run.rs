//! What a node does in a round, and in which order.

use std::io::ErrorKind;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use kvpipe_ucx::{AmData, Event, Status};
use rustix::event::epoll;
use rustix::io::Errno;

use super::io::{Connected, LISTENER, UCX, WAKE};
use super::{Driven, Io, LinkId, Service};
use crate::data::{DataPlane, HELLO};
use crate::error::{Error, Result};
use crate::link::Incoming;
use crate::work::timespec;

/// Longest sleep. UCX has lost wake-ups in the past (NIXL keeps a finite poll for the same reason).
const LONGEST_SLEEP: Duration = Duration::from_secs(1);
/// How long UCX may keep the thread busy before it looks at its sockets: heartbeats have to pass any bulk.
const LOOK_AT_SOCKETS: Duration = Duration::from_millis(1);
/// How long a caller may be busy with the node before it looks for signals. One that sleeps is interrupted at once.
const LOOK_FOR_SIGNALS: Duration = Duration::from_millis(100);
/// UCX events of one round. A CMA read completes as it is posted, so that a chain of them would never end the round.
const EVENTS_PER_ROUND: usize = 32;
/// Handshakes of peers under way at once; one more ends the oldest, so that silent connections keep nobody out.
const HANDSHAKES_CAP: usize = 64;
/// Without file descriptors, the next attempt to accept.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);
/// How long a node that stops waits for its last messages to leave.
const LINGER: Duration = Duration::from_millis(500);

pub(super) enum Control<C> {
    Command(C),
    Stop,
}

/// What is to be done after a round.
pub(super) enum Next {
    /// Another round.
    Again,
    /// Another round, although there is nothing to do: to see at once when there is.
    Poll,
    /// Nothing, until a descriptor tells of something or this time has come.
    Sleep(Instant),
    /// [`Loop::end`].
    End,
}

pub(super) struct Loop<S: Service> {
    io: Io,
    service: S,
    commands: Receiver<Control<S::Command>>,
    is_stopping: bool,
    idle_since: Instant,
    looked_at_sockets: Instant,
    accept_at: Option<Instant>,
    /// The last round left events of UCX untaken.
    is_backlogged: bool,
    /// The last round left work of the service undone.
    has_work: bool,
}

impl<S: Service> Loop<S> {
    pub(super) fn new(io: Io, service: S, commands: Receiver<Control<S::Command>>) -> Self {
        let looked_at_sockets = io.now;
        Self {
            io,
            service,
            commands,
            is_stopping: false,
            idle_since: looked_at_sockets,
            looked_at_sockets,
            accept_at: None,
            is_backlogged: false,
            has_work: false,
        }
    }

    /// One round: looks at everything once.
    pub(super) fn turn(&mut self) -> Next {
        self.io.now = Instant::now();
        self.take_commands();
        let mut is_busy = self.progress();
        if self
            .io
            .now
            .saturating_duration_since(self.looked_at_sockets)
            >= LOOK_AT_SOCKETS
        {
            self.look_at_sockets(self.io.now);
        }
        is_busy |= self.report_failures();
        self.has_work = self.service.work(&mut self.io);
        is_busy |= self.has_work;
        let wake_at = self.tick();
        is_busy |= self.report_failures();
        // What was posted since may be done already, and then no descriptor tells of it.
        is_busy |= self.take_events();
        if self.is_stopping {
            return Next::End;
        }
        if is_busy {
            self.idle_since = Instant::now();
        } else if self.may_poll() {
            std::thread::yield_now(); // another thread may need this CPU to go on
            return Next::Poll;
        } else if self.may_sleep() {
            return Next::Sleep(wake_at);
        }
        Next::Again
    }

    /// Runs on a caller's thread until `is_done`, `until`, a signal, or the node's end.
    pub(super) fn drive(&mut self, until: Instant, is_done: &dyn Fn() -> bool) -> Driven {
        let begun = Instant::now();
        (self.io.now, self.idle_since) = (begun, begun);
        // A small tensor leaves with the command to send it, unless a round is due.
        self.take_commands();
        if is_done() && begun - self.looked_at_sockets < LOOK_AT_SOCKETS {
            return Driven::Done;
        }
        loop {
            let next = self.turn();
            if is_done() {
                return Driven::Done;
            }
            let is_interrupted = match next {
                Next::Again | Next::Poll => false,
                Next::Sleep(at) => self.look_at_sockets(at.min(until)),
                Next::End => return Driven::Taken,
            };
            if is_done() {
                return Driven::Done;
            }
            let now = Instant::now();
            if is_interrupted || now - begun >= LOOK_FOR_SIGNALS {
                return Driven::Interrupted;
            }
            if now >= until {
                return Driven::TimedOut;
            }
        }
    }

    /// Whether nothing is under way that needs another round soon.
    pub(super) fn is_at_rest(&self) -> bool {
        let data = self.io.data.as_ref();
        let is_waiting = data.is_some_and(|data| data.worker.outstanding() > 0);
        !(is_waiting
            || self.is_stopping
            || self.has_work
            || self.service.has_work()
            || self.is_backlogged
            || !self.io.failed.is_empty())
    }

    /// Connections, whatever has become of them.
    #[cfg(feature = "fuzzing")]
    pub(super) fn num_links(&self) -> usize {
        self.io.links.len()
    }

    /// The last round. Works that nobody has ended end with it.
    pub(super) fn end(mut self) {
        self.service.closing(&mut self.io);
        self.linger();
        for link in self.io.links.values_mut() {
            link.end("the process closed it");
        }
        // Waits for every operation: nothing may write into memory whose operation is reported as ended. Where UCX does not
        // end one in time, its memory is kept, and the report says so.
        let unended = self.io.unended_reads.counter();
        let rest = self.io.data.take().and_then(|data| data.end(unended));
        self.service.stop(&mut self.io);
        drop(self); // and with the service its keys: from then on UCX is worked on until it has ended
        drop(rest);
    }

    /// Lets the last messages leave, a pipe's acknowledgement or a handoff's, before the endpoints are closed by force.
    fn linger(&mut self) {
        let Some(data) = &self.io.data else { return };
        let deadline = Instant::now() + LINGER;
        while data.worker.outstanding() > 0 && Instant::now() < deadline {
            if data.worker.progress() == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
            while data.worker.next_event().is_some() {}
        }
    }

    /// Also called between receiving anything and acting on it: what a thread asked for before it made a peer speak
    /// comes first.
    fn take_commands(&mut self) {
        while !self.is_stopping {
            match self.commands.try_recv() {
                Ok(Control::Command(command)) => self.service.command(&mut self.io, command),
                Ok(Control::Stop) | Err(TryRecvError::Disconnected) => self.is_stopping = true,
                Err(TryRecvError::Empty) => break,
            }
        }
        while let Ok(connected) = self.io.connected.1.try_recv() {
            self.take_connected(connected);
        }
    }

    fn take_connected(&mut self, connected: Connected) {
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

    /// Lets UCX work; whether anything happened.
    fn progress(&mut self) -> bool {
        let Some(data) = &self.io.data else {
            return false;
        };
        let progressed = data.worker.progress() > 0;
        self.take_commands();
        self.take_events() || progressed
    }

    fn take_events(&mut self) -> bool {
        for taken in 0..EVENTS_PER_ROUND {
            let Some(event) = self
                .io
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
                let data = self.io.data.as_ref();
                if let Some(link) = data.and_then(|data| data.link_of(endpoint)) {
                    self.endpoint_failed(link, status);
                }
            }
            Event::Closed { endpoint } => {
                if let Some(data) = &mut self.io.data {
                    data.forget(endpoint);
                }
            }
        }
    }

    fn take_done(&mut self, token: u64, result: std::result::Result<(), Status>) {
        let data = self.io.data.as_ref();
        if let Some(link) = DataPlane::hello_of(token) {
            self.hello_ended(link, result);
        } else if !data.is_some_and(|data| data.end_message(token)) {
            self.service.done(&mut self.io, token, result);
        }
    }

    fn endpoint_failed(&mut self, link: LinkId, status: Status) {
        // A peer that leaves in order says so before its endpoint ends, but over another connection: seen first, that
        // end would hide what it said.
        self.serve(link, epoll::EventFlags::empty());
        let peer = self.io.peer(link);
        self.io.fail(link, Error::lost(&peer, status));
    }

    fn hello_ended(&mut self, link: LinkId, result: std::result::Result<(), Status>) {
        if let Err(status) = result {
            let peer = self.io.peer(link);
            return self.io.fail(link, Error::lost(&peer, status));
        }
        let data = self.io.data.as_mut();
        if data.is_some_and(|data| data.hello_left(link)) {
            self.announce(link);
        }
    }

    fn take_message(&mut self, header: &[u8], data: AmData) {
        let Some((session, header)) = header.split_first_chunk::<16>() else {
            return;
        };
        // Without a live session nothing is said about the message, not even that it was wrong.
        let Some(plane) = &mut self.io.data else {
            return;
        };
        let Some(link) = plane.link_of_session(session) else {
            return;
        };
        if header == [HELLO] {
            if plane.hello_came(link) {
                self.announce(link);
            }
            return;
        }
        if !plane.is_open(link) {
            return self.cut(
                link,
                Error::protocol("a message before the session was ready"),
            );
        }
        // Who says more has got our hello.
        self.announce(link);
        if let Err(error) = self.service.message(&mut self.io, link, header, data) {
            self.cut(link, error);
        }
    }

    /// Ends a link whose peer misbehaved: nothing more of it is taken.
    fn cut(&mut self, link: LinkId, error: Error) {
        if let Some(data) = &mut self.io.data {
            data.mute(link);
        }
        self.io.fail(link, error);
    }

    /// Tells the service of the links that have ended, each once; whether there were any.
    fn report_failures(&mut self) -> bool {
        if self.io.failed.is_empty() {
            return false;
        }
        // What has come over UCX counts, although the end of the connection, on another way, was seen first.
        for _ in 0..EVENTS_PER_ROUND {
            if !self.progress() {
                break;
            }
        }
        while let Some((link, error)) = self.io.failed.pop_front() {
            self.report_failure(link, error);
        }
        true
    }

    fn report_failure(&mut self, link: LinkId, error: Error) {
        let connection = self.io.take_link(link);
        if connection.is_none() && !self.io.end_attempt(link) {
            return;
        }
        if let Some(data) = &mut self.io.data {
            data.close(link);
        }
        if let Some(mut connection) = connection {
            match &error {
                Error::Closed(reason) => connection.end(reason),
                other => connection.end(&other.to_string()),
            }
            let _ = epoll::delete(&self.io.epoll, connection.fd());
            if connection.is_accepted && !connection.is_announced {
                self.service
                    .log(format!("refused {}: {error}", connection.peer));
                self.service.dismissed(link);
                return;
            }
        }
        self.service.link_down(&mut self.io, link, error);
    }

    fn tick(&mut self) -> Instant {
        let mut wake_at = self.io.now + LONGEST_SLEEP;
        if let Some(at) = self.service.timer(&mut self.io) {
            wake_at = wake_at.min(at);
        }
        for (id, link) in &mut self.io.links {
            match link.tick(self.io.now) {
                Ok(at) => wake_at = wake_at.min(at),
                Err(error) => self.io.failed.push_back((*id, error)),
            }
        }
        if let Some(at) = self.io.expire_connecting() {
            wake_at = wake_at.min(at);
        }
        if self.accept_at.take_if(|at| *at <= self.io.now).is_some() {
            self.io.listen(true);
        }
        self.accept_at.map_or(wake_at, |at| wake_at.min(at))
    }

    /// Whether to look for more instead of sleeping. Only UCX and commands are polled: sockets have their own turn.
    fn may_poll(&self) -> bool {
        self.io.data.is_some() && self.idle_since.elapsed() < self.io.config.busy_poll
    }

    fn may_sleep(&self) -> bool {
        let Some(data) = &self.io.data else {
            return true;
        };
        match data.worker.arm() {
            Ok(armed) => armed,
            Err(status) => {
                tracing::error!("ucp_worker_arm: {status}");
                true
            }
        }
    }

    /// Serves the sockets, and until then sleeps at most until `until`; whether a signal ended that.
    pub(super) fn look_at_sockets(&mut self, until: Instant) -> bool {
        let mut ready = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 64];
        let timeout = timespec(until.saturating_duration_since(Instant::now()));
        let mut waited = epoll::wait(&self.io.epoll, &mut ready[..], Some(&timeout));
        let is_interrupted = waited == Err(Errno::INTR);
        if is_interrupted {
            // As after a SIGCONT: nobody was silent before it has been seen what they sent meanwhile.
            waited = epoll::wait(
                &self.io.epoll,
                &mut ready[..],
                Some(&timespec(Duration::ZERO)),
            );
        }
        self.io.now = Instant::now();
        self.looked_at_sockets = self.io.now;
        for event in &ready[..waited.unwrap_or(0)] {
            match event.data.u64() {
                WAKE => {
                    let _ = rustix::io::read(&*self.io.wake, &mut [0u8; 8]);
                    self.take_commands();
                }
                LISTENER => self.accept(),
                UCX => {}
                link => self.serve(link, event.flags),
            }
        }
        self.report_failures();
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

    fn serve(&mut self, id: LinkId, flags: epoll::EventFlags) {
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
    fn announce(&mut self, link: LinkId) {
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

#[cfg(test)]
mod tests;
