//! Who runs a node: its thread, or a caller while it waits for something of the node. Such a caller is spared two hops
//! from thread to thread, 20 to 30 us each. One at a time has the node, and puts it back for the other.
//!
//! Callers that come one after the other find the node where the last one put it: the thread gives them [`LINGER`] to
//! come back before it takes over again, unless something is under way.

use std::fmt;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use kvpipe_ucx::Together;
use rustix::event::{PollFd, PollFlags};

use super::run::{Loop, Next};
use super::{Service, signal};
use crate::error::Error;
use crate::process::Process;
use crate::work::timespec;

/// How long after a caller's turn the thread leaves the node to the next caller, up to twice that.
const LINGER: Duration = Duration::from_millis(1);

/// How a caller's turn ended.
#[derive(Debug)]
pub(crate) enum Driven {
    /// What it waited for is there.
    Done,
    /// It is not there in time.
    TimedOut,
    /// A signal came.
    Interrupted,
    /// The thread or another caller runs the node, or it ends; wait for them.
    Taken,
    /// The node is of the process that this one was forked from, and nobody runs it here.
    Forked(Error),
}

/// A node as those see it who run it for a while.
pub(crate) trait Drive: Send + Sync + fmt::Debug {
    /// Runs the node until `is_done`, `until` or a signal.
    fn drive(&self, until: Instant, is_done: &dyn Fn() -> bool) -> Driven;
    /// There is something to do: whoever runs the node takes notice.
    fn nudge(&self);
    /// Whether the calling thread is the one that runs the node now.
    fn is_run_here(&self) -> bool;
    /// One round of a node that has no thread.
    #[cfg(feature = "fuzzing")]
    fn round(&self) -> super::by_hand::Round;
    /// Drops a node that has no thread: it and who holds a [`Waker`](super::Waker) of it would keep each other.
    #[cfg(feature = "fuzzing")]
    fn let_go(&self);
}

type Held<S> = Box<Together<Loop<S>>>;

/// What the node's thread does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Thread {
    /// It runs the node, or is about to see whether it may.
    Awake,
    /// It has nothing to do, but looks for more before it sleeps: a caller can have the node at once.
    Polling,
    /// It sleeps on the node's descriptors, although the node lies with the [`State`].
    Asleep,
    /// It waits until a caller puts the node back, however long that takes.
    Parked,
}

/// Where the node is.
enum Place<S: Service> {
    Here(Held<S>),
    WithThread(ThreadId),
    WithCaller(ThreadId),
    Ended,
}

struct State<S: Service> {
    node: Place<S>,
    /// Turns that callers have begun.
    num_turns: u64,
    thread: Thread,
    /// A caller waits for the thread to put the node down.
    is_wanted: bool,
    /// The thread is to run the node next, and at once: there is something to do that no caller waits for, or not yet.
    must_hurry: bool,
}

impl<S: Service> State<S> {
    /// The node, if it is here, for whom `instead` names.
    fn take(&mut self, instead: Place<S>) -> Option<Held<S>> {
        match std::mem::replace(&mut self.node, instead) {
            Place::Here(node) => Some(node),
            elsewhere => {
                self.node = elsewhere;
                None
            }
        }
    }
}

pub(super) struct Wheel<S: Service> {
    state: Mutex<State<S>>,
    for_thread: Condvar,
    for_caller: Condvar,
    epoll: Arc<OwnedFd>,
    /// In `epoll`: wakes whoever runs the node.
    wake: Arc<OwnedFd>,
    /// Wakes the thread only.
    kick: OwnedFd,
    process: Process,
}

impl<S: Service> Wheel<S> {
    pub(super) fn new(
        node: Together<Loop<S>>,
        epoll: Arc<OwnedFd>,
        wake: Arc<OwnedFd>,
        kick: OwnedFd,
    ) -> Self {
        let state = State {
            node: Place::Here(Box::new(node)),
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

    /// What the node's thread does.
    pub(super) fn run(&self) {
        let mut seen = 0;
        while let Some(node) = self.wait_for_turn(&mut seen) {
            // Should it panic, the node is dropped, and with it all that is under way ends as closed.
            if catch_unwind(AssertUnwindSafe(|| self.run_turns(node))).is_err() {
                self.ended();
            }
        }
    }

    /// Waits until no caller runs the node, nor did a moment ago. `None`: it has ended.
    fn wait_for_turn(&self, seen: &mut u64) -> Option<Held<S>> {
        let mut state = self.lock();
        while !matches!(state.node, Place::Ended) {
            let is_quiet = state.num_turns == *seen;
            if (is_quiet || state.must_hurry)
                && let Some(node) = state.take(Place::WithThread(thread::current().id()))
            {
                *seen = state.num_turns;
                state.must_hurry = false;
                return Some(node);
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

    /// Runs the node until it has nothing to do, or ends.
    fn run_turns(&self, mut node: Held<S>) {
        node.get_mut().look_at_sockets(Instant::now());
        loop {
            match (*node).get_mut().turn() {
                Next::Again => self.lock().thread = Thread::Awake,
                Next::Poll => {
                    let mut state = self.lock();
                    if state.is_wanted {
                        return self.hand_over(state, node);
                    }
                    state.thread = Thread::Polling;
                }
                Next::Sleep(until) => return self.sleep(node, until),
                Next::End => {
                    node.into_inner().end();
                    return self.ended();
                }
            }
        }
    }

    fn hand_over(&self, mut state: MutexGuard<'_, State<S>>, node: Held<S>) {
        state.node = Place::Here(node);
        state.thread = Thread::Awake;
        state.num_turns += 1; // its turn, lest the thread is there first
        drop(state);
        self.for_caller.notify_one();
    }

    /// Leaves the node to callers, until there is something to do.
    fn sleep(&self, node: Held<S>, until: Instant) {
        let mut state = self.lock();
        if state.is_wanted {
            return self.hand_over(state, node);
        }
        state.node = Place::Here(node);
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
        self.lock().node = Place::Ended;
        self.for_thread.notify_all();
    }

    /// The node for a caller, unless somebody else has it or is about to.
    fn take(&self) -> Option<Held<S>> {
        let mut state = self.lock();
        if matches!(state.node, Place::WithCaller(_)) || state.must_hurry {
            state.must_hurry = true; // what another caller does not wait for is then the thread's again
            return None;
        }
        if state.thread == Thread::Polling {
            state.is_wanted = true;
            let waited = self.for_caller.wait_timeout(state, LINGER);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.is_wanted = false;
        }
        let node = state.take(Place::WithCaller(thread::current().id()))?;
        state.num_turns += 1;
        if state.thread == Thread::Asleep {
            // What the caller does to the node, the thread's sleep is not prepared for.
            signal(&self.kick);
        }
        Some(node)
    }

    fn put_back(&self, mut node: Held<S>) {
        let is_at_rest = node.get_mut().is_at_rest();
        let mut state = self.lock();
        state.node = Place::Here(node);
        state.must_hurry |= !is_at_rest;
        if state.must_hurry || state.thread == Thread::Parked {
            state.must_hurry = true;
            self.for_thread.notify_one();
        }
    }
}

#[cfg(feature = "fuzzing")]
impl<S: Service> Wheel<S> {
    /// A round on a thread of the caller's, whatever is to hurry: nobody else runs the node.
    fn run_by_hand(&self) -> super::by_hand::Round {
        use super::by_hand::Round;
        let Some(mut node) = self.lock().take(Place::WithCaller(thread::current().id())) else {
            return Round::Over;
        };
        node.get_mut().look_at_sockets(Instant::now());
        let next = node.get_mut().turn();
        if matches!(next, Next::End) {
            node.into_inner().end();
            self.ended();
            return Round::Over;
        }
        let num_links = node.get_mut().num_links();
        self.lock().node = Place::Here(node);
        match next {
            Next::Sleep(_) => Round::AtRest { num_links },
            _ => Round::Busy,
        }
    }
}

impl<S: Service> Drive for Wheel<S> {
    fn drive(&self, until: Instant, is_done: &dyn Fn() -> bool) -> Driven {
        if let Err(error) = self.process.check() {
            return Driven::Forked(error);
        }
        let Some(node) = self.take() else {
            signal(&self.wake); // for what was queued
            return Driven::Taken;
        };
        let drive = AssertUnwindSafe(|| {
            let mut node = node;
            let driven = node.get_mut().drive(until, is_done);
            self.put_back(node);
            driven
        });
        catch_unwind(drive).unwrap_or_else(|_| {
            self.ended();
            Driven::Taken
        })
    }

    fn nudge(&self) {
        if self.process.check().is_err() {
            return;
        }
        let mut state = self.lock();
        // The thread, if it has the node, looks at the wake before it sleeps.
        state.must_hurry |= !matches!(state.node, Place::WithThread(_));
        drop(state);
        signal(&self.wake);
        self.for_thread.notify_one();
    }

    fn is_run_here(&self) -> bool {
        match self.lock().node {
            Place::WithThread(id) | Place::WithCaller(id) => id == thread::current().id(),
            Place::Here(_) | Place::Ended => false,
        }
    }

    #[cfg(feature = "fuzzing")]
    fn round(&self) -> super::by_hand::Round {
        self.run_by_hand()
    }

    #[cfg(feature = "fuzzing")]
    fn let_go(&self) {
        let node = self.lock().take(Place::Ended);
        drop(node);
    }
}

impl<S: Service> fmt::Debug for Wheel<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wheel").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
