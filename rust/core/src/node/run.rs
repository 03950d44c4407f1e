//! What a node does in a round, and in which order.

mod sockets;
mod ucx;

use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::commands::{Control, Outlet};
use super::{Driven, Io, LinkId, Service};
use crate::error::Error;

/// Longest sleep. UCX has lost wake-ups in the past (NIXL keeps a finite poll for the same reason).
const LONGEST_SLEEP: Duration = Duration::from_secs(1);
/// How long UCX may keep the thread busy before it looks at its sockets: heartbeats have to pass any bulk.
const LOOK_AT_SOCKETS: Duration = Duration::from_millis(1);
/// How long a caller may be busy with the node before it looks for signals. One that sleeps is interrupted at once.
const LOOK_FOR_SIGNALS: Duration = Duration::from_millis(100);
/// UCX events of one round. A CMA read completes as it is posted, so that a chain of them would never end the round.
const EVENTS_PER_ROUND: usize = 32;
/// How long a node that stops waits for its last messages to leave.
const LINGER: Duration = Duration::from_millis(500);

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
    commands: Outlet<S::Command>,
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

impl<S: Service> Loop<S> {
    pub(super) fn new(io: Io, service: S, commands: Outlet<S::Command>) -> Self {
        let looked_at_sockets = io.now;
        Self {
            io,
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
        // It was not refused, so it is answered: it ends with the rest.
        for command in self.commands.close() {
            self.service.command(&mut self.io, command);
        }
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
            match self.commands.next() {
                Some(Control::Command(command)) => self.service.command(&mut self.io, command),
                Some(Control::Stop) => self.is_stopping = true,
                None => break,
            }
        }
        while let Ok(connected) = self.io.connected.1.try_recv() {
            self.take_connected(connected);
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
}

#[cfg(test)]
mod tests;
