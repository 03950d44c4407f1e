//! The sessions of a reactor and their service: dispatches the events of sockets, UCX, commands and deadlines.

use std::time::{Duration, Instant};

use kvpipe_ucx::{Event, Status};

use super::data_plane::{SessionEndpoint, connected_by};
use super::listener::{LISTENER, Listener};
use super::probe::canary_of;
use super::session::{SessionEnd, SessionEvent, SessionState};
use super::stream_sinks::PART_KIND;
use super::{Links, Payload, Service};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::reactor::{CommandReceiver, ConnectFailure, Connected, EventHandler, Token};
use crate::transport::{DataPath, UcxResult, Worker};

/// The status of devices that do not connect in time.
const DEVICES_LATE: Status = Status {
    code: -20,
    call: "connecting",
};

/// The status of devices whose reads do not end.
const READS_LATE: Status = Status {
    code: -20,
    call: "reading",
};

/// Longest wait of a reactor that stops for its last messages to leave.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

pub(super) struct Sessions<S: Service> {
    pub(super) links: Links,
    pub(super) service: S,
    pub(super) commands: CommandReceiver<S::Command>,
    pub(super) listener: Option<Listener>,
}

impl<S: Service> EventHandler for Sessions<S> {
    fn worker(&self) -> Option<&Worker> {
        self.links.data.as_ref()?.worker.as_ref()
    }

    fn set_now(&mut self, now: Instant) {
        self.links.now = now;
    }

    fn drain_commands(&mut self) {
        while let Some(command) = self.commands.next() {
            self.service.command(&mut self.links, command);
        }
        while let Some(connected) = self.links.connector.next() {
            self.finish_connect(connected);
        }
        self.links.flush();
    }

    fn is_stopping(&self) -> bool {
        self.commands.is_stopping()
    }

    fn handle_readiness(&mut self, token: Token) {
        match token {
            LISTENER => self.accept(),
            other => match self.links.bulk.get(&other) {
                Some(session) => self.receive_bulk(other, *session),
                None => self.receive(other),
            },
        }
        self.links.flush();
    }

    fn handle_ucx_event(&mut self, event: Event) {
        match event {
            Event::Done { token, result } => self.finish_operation(token, result),
            Event::EndpointFailed { endpoint, status } => {
                let data = self.links.data.as_ref();
                if let Some(session) = data.and_then(|data| data.endpoints.get(&endpoint)) {
                    self.fail_endpoint(*session, status);
                }
            }
            Event::Closed { endpoint } => {
                if let Some(data) = &mut self.links.data {
                    data.endpoints.remove(&endpoint);
                }
            }
        }
        self.links.flush();
    }

    fn poll(&mut self) -> bool {
        let has_work = self.service.poll(&mut self.links);
        self.links.flush();
        has_work
    }

    fn has_work(&self) -> bool {
        self.service.has_work()
    }

    fn expire(&mut self) -> Option<Instant> {
        let now = self.links.now();
        while let Some(key) = self.links.timers.pop_expired(now) {
            if key == LISTENER {
                self.resume_accepting();
            }
            let Some(session) = self.links.sessions.get_mut(&key) else {
                continue;
            };
            if let Err(error) = session.expire(now) {
                self.links.fail(key, error);
                continue;
            }
            let begins_attempt = session.begins_attempt(now);
            let gives_devices_up = session.gives_devices_up(now);
            self.links.timers.set(key, session.next_deadline());
            if begins_attempt {
                self.links.attempt(key);
            }
            self.expire_bulk(key);
            if gives_devices_up && self.links.data_path(key).is_none() {
                self.fail_endpoint(key, DEVICES_LATE);
            } else if self.links.stands_still(key) {
                self.fail_endpoint(key, READS_LATE);
            }
        }
        self.resume_where_free();
        // Last: a message that was received above may have set a deadline.
        let service = self.service.timer(&mut self.links);
        self.links.flush();
        service.into_iter().chain(self.links.timers.next()).min()
    }

    fn has_failures(&self) -> bool {
        let links = &self.links;
        !(links.failed.is_empty()
            && links.changed_paths.is_empty()
            && links.lost_streams.is_empty())
    }

    fn report_failures(&mut self) {
        while let Some(key) = self.links.changed_paths.pop_front() {
            if self.links.is_up(key) {
                self.service.data_path_changed(&mut self.links, key);
            }
        }
        while let Some(key) = self.links.lost_streams.pop_front() {
            if self.links.is_up(key) {
                self.service.streams_lost(&mut self.links, key);
            }
        }
        while let Some(key) = self.links.failed.pop_front() {
            self.report_failure(key);
        }
        self.links.flush();
    }

    fn end(mut self) {
        self.service.closing(&mut self.links);
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        for session in self.links.sessions.values_mut() {
            session.flush_until(deadline);
            session.say_goodbye("the process closed it");
        }
        // Waits for every operation: nothing may write into memory whose operation is reported as ended. Where UCX does not
        // end one in time, its memory is kept, and the report says so.
        let num_reads = self.links.pending_reads().counter();
        let data = self.links.data.take();
        let worker = data.and_then(|data| data.worker);
        let reaper = worker.and_then(|worker| worker.end(num_reads));
        // It was accepted, so it is answered: it ends with the rest.
        for command in self.commands.close() {
            self.service.command(&mut self.links, command);
        }
        self.service.stop(&mut self.links);
        drop(self); // and with the service its keys: from then on the reaper progresses UCX until it has ended
        drop(reaper);
    }

    #[cfg(any(test, feature = "fuzzing"))]
    fn num_sessions(&self) -> usize {
        let sessions = self.links.sessions.values();
        sessions.filter(|it| it.link.is_some()).count()
    }

    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        let mut sizes = self.links.sizes();
        sizes.push(("commands", self.commands.len()));
        sizes.extend(self.service.sizes());
        sizes
    }
}

/// Connections.
impl<S: Service> Sessions<S> {
    fn finish_connect(&mut self, Connected { token, stream }: Connected) {
        if self.links.bulk.contains_key(&token) {
            return self.links.finish_bulk_connect(token, stream);
        }
        // An attempt that took too long was reported already.
        if !self.links.sessions.contains_key(&token) {
            return;
        }
        match stream {
            Ok(stream) => {
                if let Err(error) = self.links.start_handshake(token, stream) {
                    self.links.fail(token, error);
                }
            }
            Err(failure) => self.links.attempt_failed(token, &failure),
        }
    }

    /// Receives what has come on a session's connection.
    pub(super) fn receive(&mut self, key: SessionKey) {
        let now = self.links.now();
        let Some(session) = self.links.sessions.get_mut(&key) else {
            return;
        };
        let (ours, sinks) = (&self.links.config.identity, &self.links.sinks);
        let (received, ended) = session.receive((key, sinks), ours, now, |peer| {
            self.service.accept(key, peer)
        });
        if session.is_accepted && !session.is_up() {
            self.links.places.update(key, session.handshake_progress());
        }
        // Before the commands: one that needs the peer knows then that it has to connect again.
        match ended {
            None => {}
            Some(SessionEnd::Failed(error)) => self.links.fail(key, error),
            Some(SessionEnd::Cut(reason)) => {
                let cause = format!("{reason} in the handshake");
                self.links.attempt_failed(key, &ConnectFailure::Cut(cause));
            }
        }
        self.drain_commands();
        for event in received {
            if let Err(error) = self.handle_session_event(key, event) {
                return self.cut(key, error);
            }
        }
    }

    pub(super) fn handle_session_event(
        &mut self,
        key: SessionKey,
        event: SessionEvent,
    ) -> Result<()> {
        match event {
            SessionEvent::Ready => self.establish(key),
            SessionEvent::DataPath(data_path) => {
                let is_stream = matches!(data_path, DataPath::Stream(_));
                self.links.receive_data_path(key, data_path)?;
                let now = self.links.now();
                if let Some(session) = self.links.sessions.get_mut(&key).filter(|_| is_stream) {
                    session.hurry_devices(now);
                    self.links.timers.set(key, session.next_deadline());
                }
                self.report_up_if_probed(key);
            }
            SessionEvent::Message { header, payload } => {
                self.check_up(key)?;
                let payload = Payload::Bytes(payload);
                self.service
                    .message(&mut self.links, key, &header, payload)?;
            }
            SessionEvent::AskedToJoin(request) => self.answer_join(key, &request)?,
            SessionEvent::Joined => self.finish_join(key),
            SessionEvent::StreamLost(number) => self.links.receive_stream_lost(key, number),
            SessionEvent::Part(part) => {
                self.check_up(key)?;
                if part.header.first() != Some(&PART_KIND) {
                    return Err(Error::protocol("a part of a message that is no stream"));
                }
                let placed = Payload::Placed {
                    num_bytes: part.num_bytes,
                    is_aborted: part.is_aborted,
                };
                self.service
                    .message(&mut self.links, key, &part.header, placed)?;
            }
        }
        Ok(())
    }

    /// Both sides know the session. With a data plane, it is up when both sides know how they get each other's bytes; where
    /// both have UCX, that connects first.
    fn establish(&mut self, key: SessionKey) {
        let now = self.links.now();
        let Some(session) = self.links.sessions.get_mut(&key) else {
            return;
        };
        session.endpoint = self.links.data.is_some().then(SessionEndpoint::default);
        session.wait_for_devices(now);
        self.links.timers.set(key, session.next_deadline());
        if let SessionState::Establishing(peer) = &session.state {
            let address = peer.ucx_address.clone();
            let host = &self.links.config.identity.host;
            let is_on_host = !host.is_empty() && peer.host == *host;
            if self.links.data.is_none() {
                return self.report_up(key);
            }
            // Before the peer can dial one: it is up once it knows the data path of this side.
            self.links.allow_bulk(key, is_on_host);
            if !self.links.open_endpoint(key, &address) {
                self.probe(key);
            }
        }
    }

    fn probe(&mut self, key: SessionKey) {
        self.links.probe(key);
        self.report_up_if_probed(key);
    }

    /// Tells the service of a session that is established, once.
    fn report_up(&mut self, key: SessionKey) {
        let Some(session) = self.links.sessions.get_mut(&key) else {
            return;
        };
        if let Some(peer) = session.finish() {
            self.service.session_up(&mut self.links, key, &peer);
        }
    }

    /// Refuses messages before the session is up: a peer that sends one knows both data paths.
    fn check_up(&self, key: SessionKey) -> Result<()> {
        if self.links.is_up(key) {
            return Ok(());
        }
        Err(Error::protocol("a message before the session was ready"))
    }

    /// Ends a session whose peer broke the protocol: no more of its messages are handled.
    pub(super) fn cut(&mut self, key: SessionKey, error: Error) {
        self.links.mute(key);
        self.links.fail(key, error);
    }

    /// Ends a session that has failed, if it has.
    pub(super) fn report_failure(&mut self, key: SessionKey) {
        let session = self.links.sessions.get_mut(&key);
        if let Some(error) = session.and_then(|session| session.failure.take()) {
            self.end_session(key, error);
        }
    }

    pub(super) fn end_session(&mut self, key: SessionKey, error: Error) {
        let Some(mut session) = self.links.remove(key) else {
            return;
        };
        if let (Some(data), Some(endpoint)) = (&mut self.links.data, &session.endpoint) {
            data.close(endpoint);
        }
        match &error {
            Error::Closed(reason) => session.say_goodbye(reason),
            other => session.say_goodbye(&other.to_string()),
        }
        if session.is_accepted && !session.is_up() {
            self.service
                .log(format!("refused {}: {error}", session.peer));
            return self.service.dismissed(key);
        }
        self.service.session_down(&mut self.links, key, error);
    }
}

/// UCX.
impl<S: Service> Sessions<S> {
    fn finish_operation(&mut self, token: u64, result: UcxResult<()>) {
        if let Some(session) = canary_of(token) {
            self.links.finish_probe(session, result);
            return self.report_up_if_probed(session);
        }
        match connected_by(token) {
            Some(session) => match result {
                Ok(()) if self.links.has_devices(session) => self.probe(session),
                // They were given up.
                Ok(()) => {}
                Err(status) => self.fail_endpoint(session, status),
            },
            None => self.service.done(&mut self.links, token, result),
        }
    }

    fn report_up_if_probed(&mut self, session: SessionKey) {
        if self.links.is_probed(session) {
            self.report_up(session);
        }
    }

    fn fail_endpoint(&mut self, session: SessionKey, status: Status) {
        // A peer that leaves in order says so before its endpoint ends, but over another connection: seen first, that
        // end would hide the reason that it gave.
        self.receive(session);
        if !self.links.has_failed(session) {
            self.links.lose_devices(session, &status.to_string());
            self.report_up_if_probed(session);
        }
    }
}

#[cfg(test)]
mod tests;
