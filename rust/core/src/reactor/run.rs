//! What a reactor does in a round, and in which order.

mod sockets;
mod ucx;

use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::commands::{CommandReceiver, ReactorCommand};
use super::{ReactorContext, Service, SessionKey};
use crate::error::Error;
use crate::work::Driven;

/// Longest sleep. UCX has lost wake-ups in the past (NIXL keeps a finite poll for the same reason).
const LONGEST_SLEEP: Duration = Duration::from_secs(1);
/// How long UCX may keep the thread busy before it looks at its sockets: heartbeats have to pass any bulk.
const LOOK_AT_SOCKETS: Duration = Duration::from_millis(1);
/// How long a caller may be busy with the reactor before it looks for signals. One that sleeps is interrupted at once.
const LOOK_FOR_SIGNALS: Duration = Duration::from_millis(100);
/// UCX events of one round. A CMA read completes as it is posted, so that a chain of them would never end the round.
const EVENTS_PER_ROUND: usize = 32;
/// How long a reactor that stops waits for its last messages to leave.
const LINGER: Duration = Duration::from_millis(500);

/// What is to be done after a round.
pub(super) enum Next {
    /// Another round.
    Again,
    /// Another round, although there is nothing to do: to see at once when there is.
    Poll,
    /// Nothing, until a descriptor tells of something or this time has come.
    Sleep(Instant),
    /// [`ReactorCore::end`].
    End,
}

pub(super) struct ReactorCore<S: Service> {
    cx: ReactorContext,
    service: S,
    commands: CommandReceiver<S::Command>,
    is_stopping: bool,
    idle_since: Instant,
    looked_at_sockets: Instant,
    /// Room for what a look at the sockets finds.
    ready: Vec<epoll::Event>,
    accept_at: Option<Instant>,
    /// The last round left events of UCX untaken.
    is_backlogged: bool,
    /// The last round left work of the service undone.
    has_work: bool,
    /// Wakes by UCX's descriptor since it has worked.
    num_fruitless: u32,
}

impl<S: Service> ReactorCore<S> {
    pub(super) fn new(
        cx: ReactorContext,
        service: S,
        commands: CommandReceiver<S::Command>,
    ) -> Self {
        let looked_at_sockets = cx.now;
        Self {
            cx,
            service,
            commands,
            is_stopping: false,
            idle_since: looked_at_sockets,
            looked_at_sockets,
            ready: Vec::new(),
            accept_at: None,
            is_backlogged: false,
            has_work: false,
            num_fruitless: 0,
        }
    }

    /// One round: looks at everything once.
    pub(super) fn turn(&mut self) -> Next {
        self.cx.now = Instant::now();
        self.take_commands();
        let mut is_busy = self.progress();
        if self
            .cx
            .now
            .saturating_duration_since(self.looked_at_sockets)
            >= LOOK_AT_SOCKETS
        {
            self.look_at_sockets(self.cx.now);
        }
        is_busy |= self.report_failures();
        self.has_work = self.service.work(&mut self.cx);
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

    /// Runs on a caller's thread until `is_done`, `until`, a signal, or the reactor's end.
    pub(super) fn drive(&mut self, until: Instant, is_done: &dyn Fn() -> bool) -> Driven {
        let begun = Instant::now();
        (self.cx.now, self.idle_since) = (begun, begun);
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
                Next::End => return Driven::Busy,
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
        let data = self.cx.data.as_ref();
        let is_waiting = data.is_some_and(|data| data.worker.outstanding() > 0);
        !(is_waiting
            || self.is_stopping
            || self.has_work
            || self.service.has_work()
            || self.is_backlogged
            || !self.cx.failed.is_empty())
    }

    /// Connections, whatever has become of them.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn num_sessions(&self) -> usize {
        self.cx.sessions.len()
    }

    /// The last round. Works that nobody has ended end with it.
    pub(super) fn end(mut self) {
        self.service.closing(&mut self.cx);
        self.linger();
        for session in self.cx.sessions.values_mut() {
            session.end("the process closed it");
        }
        // Waits for every operation: nothing may write into memory whose operation is reported as ended. Where UCX does not
        // end one in time, its memory is kept, and the report says so.
        let pending = self.cx.pending_reads.counter();
        let rest = self.cx.data.take().and_then(|data| data.end(pending));
        // It was not refused, so it is answered: it ends with the rest.
        for command in self.commands.close() {
            self.service.command(&mut self.cx, command);
        }
        self.service.stop(&mut self.cx);
        drop(self); // and with the service its keys: from then on UCX is worked on until it has ended
        drop(rest);
    }

    /// Lets the last messages leave, a pipe's acknowledgement or a handoff's, before the endpoints are closed by force.
    fn linger(&mut self) {
        let Some(data) = &self.cx.data else { return };
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
            match self.commands.next() {
                Some(ReactorCommand::Command(command)) => {
                    self.service.command(&mut self.cx, command);
                }
                Some(ReactorCommand::Stop) => self.is_stopping = true,
                None => break,
            }
        }
        while let Ok(connected) = self.cx.connected.1.try_recv() {
            self.take_connected(connected);
        }
    }

    /// Ends a session whose peer misbehaved: nothing more of it is taken.
    fn cut(&mut self, session: SessionKey, error: Error) {
        if let Some(data) = &mut self.cx.data {
            data.mute(session);
        }
        self.cx.fail(session, error);
    }

    /// Tells the service of the sessions that have ended, each once; whether there were any.
    fn report_failures(&mut self) -> bool {
        if self.cx.failed.is_empty() {
            return false;
        }
        // What has come over UCX counts, although the end of the connection, on another way, was seen first.
        for _ in 0..EVENTS_PER_ROUND {
            if !self.progress() {
                break;
            }
        }
        while let Some((session, error)) = self.cx.failed.pop_front() {
            self.report_failure(session, error);
        }
        true
    }

    fn report_failure(&mut self, session: SessionKey, error: Error) {
        let connection = self.cx.remove_session(session);
        if connection.is_none() && !self.cx.end_attempt(session) {
            return;
        }
        if let Some(data) = &mut self.cx.data {
            data.close(session);
        }
        if let Some(mut connection) = connection {
            match &error {
                Error::Closed(reason) => connection.end(reason),
                other => connection.end(&other.to_string()),
            }
            let _ = epoll::delete(&self.cx.epoll, connection.fd());
            if connection.is_accepted && !connection.is_announced {
                self.service
                    .log(format!("refused {}: {error}", connection.peer));
                self.service.dismissed(session);
                return;
            }
        }
        self.service.session_down(&mut self.cx, session, error);
    }

    fn tick(&mut self) -> Instant {
        let mut wake_at = self.cx.now + LONGEST_SLEEP;
        if let Some(at) = self.service.timer(&mut self.cx) {
            wake_at = wake_at.min(at);
        }
        for (id, session) in &mut self.cx.sessions {
            match session.tick(self.cx.now) {
                Ok(at) => wake_at = wake_at.min(at),
                Err(error) => self.cx.failed.push_back((*id, error)),
            }
        }
        if let Some(at) = self.cx.expire_connecting() {
            wake_at = wake_at.min(at);
        }
        if self.accept_at.take_if(|at| *at <= self.cx.now).is_some() {
            self.cx.listen(true);
        }
        self.accept_at.map_or(wake_at, |at| wake_at.min(at))
    }

    /// Whether to look for more instead of sleeping. Only UCX and commands are polled: sockets have their own turn.
    fn may_poll(&self) -> bool {
        self.cx.data.is_some() && self.idle_since.elapsed() < self.cx.config.busy_poll
    }

    fn may_sleep(&self) -> bool {
        let Some(data) = &self.cx.data else {
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
}

#[cfg(test)]
mod tests;
