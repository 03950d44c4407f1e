//! Who runs a reactor: its thread, or a caller while it waits for something of the reactor. Such a caller is spared two hops
//! from thread to thread, 20 to 30 us each. One at a time has the reactor, and puts it back for the other.
//!
//! Callers that come one after the other find the reactor where the last one put it: the thread gives them [`LINGER`] to
//! come back before it takes over again, unless something is under way.

use std::fmt;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use kvpipe_ucx::AssertSend;
use rustix::event::{PollFd, PollFlags};

use super::run::{Next, ReactorCore};
use super::{Service, signal};
use crate::process::Process;
use crate::work::{Drive, Driven, timespec};

/// How long after a caller's turn the thread leaves the reactor to the next caller, up to twice that.
const LINGER: Duration = Duration::from_millis(1);

/// A [`Driver`] without the type of what it runs.
pub(crate) trait DriverHandle: Drive {
    /// There is something to do: whoever runs the reactor takes notice.
    fn notify(&self);
    /// Whether the calling thread is the one that runs the reactor now.
    fn is_run_here(&self) -> bool;
    /// One round of a reactor that has no thread.
    #[cfg(any(test, feature = "fuzzing"))]
    fn round(&self) -> super::manual::Round;
    /// Drops a reactor that has no thread: it and who holds a [`Waker`](super::Waker) of it would keep each other.
    #[cfg(any(test, feature = "fuzzing"))]
    fn let_go(&self);
}

type Held<S> = Box<AssertSend<ReactorCore<S>>>;

/// What the reactor's thread does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Thread {
    /// It runs the reactor, or is about to see whether it may.
    Awake,
    /// It has nothing to do, but looks for more before it sleeps: a caller can have the reactor at once.
    Polling,
    /// It sleeps on the reactor's descriptors, although the reactor lies with the [`State`].
    Asleep,
    /// It waits until a caller puts the reactor back, however long that takes.
    Parked,
}

/// Where the reactor is.
enum Place<S: Service> {
    Here(Held<S>),
    WithThread(ThreadId),
    WithCaller(ThreadId),
    Ended,
}

struct State<S: Service> {
    reactor: Place<S>,
    /// Turns that callers have begun.
    num_turns: u64,
    thread: Thread,
    /// A caller waits for the thread to put the reactor down.
    is_wanted: bool,
    /// The thread is to run the reactor next, and at once: there is something to do that no caller waits for, or not yet.
    must_hurry: bool,
}

impl<S: Service> State<S> {
    /// The reactor, if it is here, for whom `instead` names.
    fn take(&mut self, instead: Place<S>) -> Option<Held<S>> {
        match std::mem::replace(&mut self.reactor, instead) {
            Place::Here(reactor) => Some(reactor),
            elsewhere => {
                self.reactor = elsewhere;
                None
            }
        }
    }
}

pub(super) struct Driver<S: Service> {
    state: Mutex<State<S>>,
    for_thread: Condvar,
    for_caller: Condvar,
    epoll: Arc<OwnedFd>,
    /// In `epoll`: wakes whoever runs the reactor.
    wake: Arc<OwnedFd>,
    /// Wakes the thread only.
    kick: OwnedFd,
    process: Process,
}

impl<S: Service> Driver<S> {
    pub(super) fn new(
        reactor: AssertSend<ReactorCore<S>>,
        epoll: Arc<OwnedFd>,
        wake: Arc<OwnedFd>,
        kick: OwnedFd,
    ) -> Self {
        let state = State {
            reactor: Place::Here(Box::new(reactor)),
            num_turns: 0,
            thread: Thread::Awake,
            is_wanted: false,
            must_hurry: false,
        };
        Self {
            state: Mutex::new(state),
            for_thread: Condvar::new(),
            for_caller: Condvar::new(),
            epoll,
            wake,
            kick,
            process: Process::this(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<S>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the reactor's thread does.
    pub(super) fn run(&self) {
        let mut seen = 0;
        while let Some(reactor) = self.wait_for_turn(&mut seen) {
            // Should it panic, the reactor is dropped, and with it all that is under way ends as closed.
            if catch_unwind(AssertUnwindSafe(|| self.run_turns(reactor))).is_err() {
                self.ended();
            }
        }
    }

    /// Waits until no caller runs the reactor, nor did a moment ago. `None`: it has ended.
    fn wait_for_turn(&self, seen: &mut u64) -> Option<Held<S>> {
        let mut state = self.lock();
        while !matches!(state.reactor, Place::Ended) {
            let is_quiet = state.num_turns == *seen;
            if (is_quiet || state.must_hurry)
                && let Some(reactor) = state.take(Place::WithThread(thread::current().id()))
            {
                *seen = state.num_turns;
                state.must_hurry = false;
                return Some(reactor);
            }
            if is_quiet {
                state.thread = Thread::Parked;
                state = self
                    .for_thread
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                state.thread = Thread::Awake;
            } else {
                *seen = state.num_turns;
                let waited = self.for_thread.wait_timeout(state, LINGER);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        None
    }

    /// Runs the reactor until it has nothing to do, or ends.
    fn run_turns(&self, mut reactor: Held<S>) {
        reactor.get_mut().look_at_sockets(Instant::now());
        loop {
            match (*reactor).get_mut().turn() {
                Next::Again => self.lock().thread = Thread::Awake,
                Next::Poll => {
                    let mut state = self.lock();
                    if state.is_wanted {
                        return self.hand_over(state, reactor);
                    }
                    state.thread = Thread::Polling;
                }
                Next::Sleep(until) => return self.sleep(reactor, until),
                Next::End => {
                    reactor.into_inner().end();
                    return self.ended();
                }
            }
        }
    }

    fn hand_over(&self, mut state: MutexGuard<'_, State<S>>, reactor: Held<S>) {
        state.reactor = Place::Here(reactor);
        state.thread = Thread::Awake;
        state.num_turns += 1; // its turn, lest the thread is there first
        drop(state);
        self.for_caller.notify_one();
    }

    /// Leaves the reactor to callers, until there is something to do.
    fn sleep(&self, reactor: Held<S>, until: Instant) {
        let mut state = self.lock();
        if state.is_wanted {
            return self.hand_over(state, reactor);
        }
        state.reactor = Place::Here(reactor);
        state.thread = Thread::Asleep;
        drop(state);
        let mut wakers = [
            PollFd::new(&*self.epoll, PollFlags::IN),
            PollFd::new(&self.kick, PollFlags::IN),
        ];
        let left = timespec(until.saturating_duration_since(Instant::now()));
        let _ = rustix::event::poll(&mut wakers, Some(&left));
        self.lock().thread = Thread::Awake;
        let _ = rustix::io::read(&self.kick, &mut [0u8; 8]);
    }

    fn ended(&self) {
        self.lock().reactor = Place::Ended;
        self.for_thread.notify_all();
    }

    /// The reactor for a caller, unless somebody else has it or is about to.
    fn take(&self) -> Option<Held<S>> {
        let mut state = self.lock();
        if matches!(state.reactor, Place::WithCaller(_)) || state.must_hurry {
            state.must_hurry = true; // what another caller does not wait for is then the thread's again
            return None;
        }
        if state.thread == Thread::Polling {
            state.is_wanted = true;
            let waited = self.for_caller.wait_timeout(state, LINGER);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.is_wanted = false;
        }
        let reactor = state.take(Place::WithCaller(thread::current().id()))?;
        state.num_turns += 1;
        if state.thread == Thread::Asleep {
            // What the caller does to the reactor, the thread's sleep is not prepared for.
            signal(&self.kick);
        }
        Some(reactor)
    }

    fn put_back(&self, mut reactor: Held<S>) {
        let is_at_rest = reactor.get_mut().is_at_rest();
        let mut state = self.lock();
        state.reactor = Place::Here(reactor);
        state.must_hurry |= !is_at_rest;
        if state.must_hurry || state.thread == Thread::Parked {
            state.must_hurry = true;
            self.for_thread.notify_one();
        }
    }
}

#[cfg(any(test, feature = "fuzzing"))]
impl<S: Service> Driver<S> {
    /// A round on a thread of the caller's, whatever is to hurry: nobody else runs the reactor.
    fn run_manual(&self) -> super::manual::Round {
        use super::manual::Round;
        let Some(mut reactor) = self.lock().take(Place::WithCaller(thread::current().id())) else {
            return Round::Over;
        };
        reactor.get_mut().look_at_sockets(Instant::now());
        let next = reactor.get_mut().turn();
        if matches!(next, Next::End) {
            reactor.into_inner().end();
            self.ended();
            return Round::Over;
        }
        let num_sessions = reactor.get_mut().num_sessions();
        self.lock().reactor = Place::Here(reactor);
        match next {
            Next::Sleep(_) => Round::AtRest { num_sessions },
            _ => Round::Busy,
        }
    }
}

impl<S: Service> Drive for Driver<S> {
    fn drive(&self, until: Instant, is_done: &dyn Fn() -> bool) -> Driven {
        if let Err(error) = self.process.check() {
            return Driven::Forked(error);
        }
        let Some(reactor) = self.take() else {
            signal(&self.wake); // for what was queued
            return Driven::Busy;
        };
        let drive = AssertUnwindSafe(|| {
            let mut reactor = reactor;
            let driven = reactor.get_mut().drive(until, is_done);
            self.put_back(reactor);
            driven
        });
        catch_unwind(drive).unwrap_or_else(|_| {
            self.ended();
            Driven::Busy
        })
    }
}

impl<S: Service> DriverHandle for Driver<S> {
    fn notify(&self) {
        if self.process.check().is_err() {
            return;
        }
        let mut state = self.lock();
        // The thread, if it has the reactor, looks at the wake before it sleeps.
        state.must_hurry |= !matches!(state.reactor, Place::WithThread(_));
        drop(state);
        signal(&self.wake);
        self.for_thread.notify_one();
    }

    fn is_run_here(&self) -> bool {
        match self.lock().reactor {
            Place::WithThread(id) | Place::WithCaller(id) => id == thread::current().id(),
            Place::Here(_) | Place::Ended => false,
        }
    }

    #[cfg(any(test, feature = "fuzzing"))]
    fn round(&self) -> super::manual::Round {
        self.run_manual()
    }

    #[cfg(any(test, feature = "fuzzing"))]
    fn let_go(&self) {
        let reactor = self.lock().take(Place::Ended);
        drop(reactor);
    }
}

impl<S: Service> fmt::Debug for Driver<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
