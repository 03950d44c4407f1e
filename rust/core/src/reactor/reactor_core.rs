//! The steps of a reactor's round, and their order.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};

use super::EventHandler;
use super::poller::{Poller, UCX, WAKE};
use crate::clock;
use crate::error::Result;
use crate::transport::Worker;
use crate::work::Driven;

/// Longest sleep. UCX has lost wake-ups in the past (NIXL keeps a finite poll for the same reason).
const SLEEP_CAP: Duration = Duration::from_secs(1);
/// Longest time between two looks at the sockets while something else is busy: they bring messages and streams. A look costs
/// a microsecond.
const SOCKET_INTERVAL: Duration = Duration::from_micros(100);
/// Longest time that a caller runs a busy reactor before it looks for signals. A signal ends its sleep at once.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);
/// UCX events of one round. A CMA read completes as it is posted, so that a chain of them would never end the round.
const EVENTS_PER_ROUND: usize = 32;
/// Wakes by UCX's descriptor in a row that may lead to nothing.
const FRUITLESS_WAKES: u32 = 16;

/// Action after a round.
pub(crate) enum Next {
    /// Another round.
    Again,
    /// Another round, although there is nothing to do: polling notices events sooner than a sleep.
    Poll,
    /// A sleep, until a descriptor is ready or this time has come.
    Sleep(Instant),
    /// [`EventHandler::end`]. Works that are not completed end with it.
    End,
}

/// The state that the thread of a reactor or a waiting caller runs.
pub(crate) struct ReactorCore<H: EventHandler> {
    pub(crate) handler: H,
    poller: Arc<Poller>,
    busy_poll: Duration,
    idle_since: Instant,
    sockets_polled: Instant,
    /// Kept between calls for its capacity.
    ready: Vec<epoll::Event>,
    /// The last round left UCX events in the queue.
    has_ucx_events: bool,
    /// The last round left work of the handler undone.
    has_work: bool,
    /// Wakes by UCX's descriptor since UCX has last progressed.
    num_fruitless_wakes: u32,
    /// The last look at the descriptors found one of the handler's ready.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) was_ready: bool,
}

impl<H: EventHandler> ReactorCore<H> {
    pub(crate) fn new(handler: H, poller: Arc<Poller>, busy_poll: Duration) -> Result<Self> {
        if let Some(worker) = handler.worker() {
            poller.add(worker.event_fd(), UCX, EventFlags::IN)?;
        }
        let now = clock::now();
        Ok(Self {
            handler,
            poller,
            busy_poll,
            idle_since: now,
            sockets_polled: now,
            ready: Vec::new(),
            has_ucx_events: false,
            has_work: false,
            num_fruitless_wakes: 0,
            #[cfg(any(test, feature = "fuzzing"))]
            was_ready: false,
        })
    }

    /// One round: looks at everything once.
    pub(crate) fn run_once(&mut self) -> Next {
        let now = clock::now();
        self.handler.set_now(now);
        self.handler.drain_commands();
        let mut is_busy = self.progress();
        if now.saturating_duration_since(self.sockets_polled) >= SOCKET_INTERVAL {
            self.poll_sockets(now);
        }
        is_busy |= self.report_failures();
        self.has_work = self.handler.poll();
        is_busy |= self.has_work;
        let deadline = self.handler.expire();
        is_busy |= self.report_failures();
        is_busy |= self.handler.has_work();
        // An operation posted since may have ended already, and then no descriptor reports it.
        is_busy |= self.handle_ucx_events();
        if self.handler.is_stopping() {
            return Next::End;
        }
        if is_busy {
            self.idle_since = clock::now();
        } else if self.may_poll() {
            self.poll_sockets(now);
            std::thread::yield_now(); // another thread may need this CPU to go on
            return Next::Poll;
        } else if self.may_sleep() {
            let latest = now + SLEEP_CAP;
            return Next::Sleep(deadline.map_or(latest, |deadline| deadline.min(latest)));
        }
        Next::Again
    }

    /// Runs on a caller's thread until `is_done`, `until`, a signal, or the reactor's end.
    pub(super) fn drive(&mut self, until: Instant, is_done: &dyn Fn() -> bool) -> Driven {
        let begun = clock::now();
        self.idle_since = begun;
        self.handler.set_now(begun);
        // A small tensor leaves with the command to send it, unless a round is due.
        self.handler.drain_commands();
        if is_done() && begun - self.sockets_polled < SOCKET_INTERVAL {
            return Driven::Done;
        }
        loop {
            let next = self.run_once();
            if is_done() {
                return Driven::Done;
            }
            let is_interrupted = match next {
                Next::Again | Next::Poll => false,
                Next::Sleep(at) => self.poll_sockets(at.min(until)),
                Next::End => return Driven::Busy,
            };
            if is_done() {
                return Driven::Done;
            }
            let now = clock::now();
            if is_interrupted || now - begun >= SIGNAL_INTERVAL {
                return Driven::Interrupted;
            }
            if now >= until {
                return Driven::TimedOut;
            }
        }
    }

    /// True if nothing is under way that needs another round soon.
    pub(super) fn is_at_rest(&self) -> bool {
        let worker = self.handler.worker();
        !(worker.is_some_and(|worker| worker.outstanding() > 0)
            || self.handler.is_stopping()
            || self.has_work
            || self.handler.has_work()
            || self.has_ucx_events
            || self.handler.has_failures())
    }

    /// Handles the descriptors that are ready, and sleeps until `until` if none is; whether a signal ended the sleep.
    pub(crate) fn poll_sockets(&mut self, until: Instant) -> bool {
        let mut ready = std::mem::take(&mut self.ready);
        let is_interrupted = self.poller.wait(&mut ready, until);
        self.sockets_polled = clock::now();
        self.handler.set_now(self.sockets_polled);
        #[cfg(any(test, feature = "fuzzing"))]
        {
            self.was_ready = ready.iter().any(|event| event.data.u64() > UCX);
        }
        // UCX's own says what it has brought when it progresses.
        if ready.iter().any(|event| event.data.u64() != UCX) {
            self.idle_since = self.sockets_polled;
        }
        for event in ready.drain(..) {
            match event.data.u64() {
                WAKE => {
                    self.poller.clear_wake();
                    self.handler.drain_commands();
                }
                UCX => self.count_ucx_wake(),
                token => self.handler.handle_readiness(token),
            }
        }
        self.ready = ready;
        self.report_failures();
        is_interrupted
    }

    /// Lets UCX progress; whether anything happened.
    fn progress(&mut self) -> bool {
        let Some(worker) = self.handler.worker() else {
            return false;
        };
        let has_progressed = worker.progress() > 0;
        self.handler.drain_commands();
        let is_busy = self.handle_ucx_events() || has_progressed;
        if is_busy && std::mem::take(&mut self.num_fruitless_wakes) >= FRUITLESS_WAKES {
            self.watch_ucx(EventFlags::IN);
        }
        is_busy
    }

    /// Counts a wake by UCX's descriptor. It stays readable while an endpoint waits for its connection (1.22, TCP),
    /// although there is nothing to do. After some such wakes only a change wakes the reactor, until UCX progresses.
    fn count_ucx_wake(&mut self) {
        self.num_fruitless_wakes = self.num_fruitless_wakes.saturating_add(1);
        if self.num_fruitless_wakes == FRUITLESS_WAKES {
            self.watch_ucx(EventFlags::IN | EventFlags::ET);
        }
    }

    fn watch_ucx(&self, events: EventFlags) {
        if let Some(worker) = self.handler.worker() {
            self.poller.modify(worker.event_fd(), UCX, events);
        }
    }

    /// Handles the events of a round; whether there were any.
    fn handle_ucx_events(&mut self) -> bool {
        for num_handled in 0..EVENTS_PER_ROUND {
            let worker = self.handler.worker();
            let Some(event) = worker.and_then(Worker::next_event) else {
                self.has_ucx_events = false;
                return num_handled > 0;
            };
            self.handler.handle_ucx_event(event);
        }
        self.has_ucx_events = true;
        true
    }

    /// Has the handler report its failures; whether there were any.
    fn report_failures(&mut self) -> bool {
        if !self.handler.has_failures() {
            return false;
        }
        // Bytes that came over UCX count, although the end of the connection was seen first, on another way.
        for _ in 0..EVENTS_PER_ROUND {
            if !self.progress() {
                break;
            }
        }
        self.handler.report_failures();
        true
    }

    /// True while polling is due in place of a sleep.
    fn may_poll(&self) -> bool {
        clock::now() < self.idle_since + self.busy_poll
    }

    fn may_sleep(&self) -> bool {
        let Some(worker) = self.handler.worker() else {
            return true;
        };
        worker.arm().unwrap_or_else(|status| {
            tracing::error!("ucp_worker_arm: {status}");
            true
        })
    }
}
