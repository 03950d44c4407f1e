//! Drives a reactor by its own thread, or by a caller that waits for a work of the reactor. Such a caller saves two
//! hops between threads, 20 to 30 us each. One thread at a time holds the core, and puts it back for the others.
//!
//! ```text
//!                acquire_for_caller              acquire_for_thread
//! HeldByCaller ◄──────────────────────── Free ────────────────────────► HeldByThread
//!      │                                 ▲  ▲                                 │
//!      ├──────────── put_back ───────────┘  └─── sleep, yield_to_caller ──────┤
//!      │                                                                      │
//!      └──────────── panic ────────────► Ended ◄──────── stopped, panic ──────┘
//!
//! acquire_for_caller  a caller waits, the core is free, and `thread_must_run` is not set
//! put_back            its work is completed, its deadline has passed, a signal arrived, or the reactor is to stop
//! acquire_for_thread  no caller has held the core for HANDBACK_DELAY, or `thread_must_run` is set
//! sleep               nothing is to be done before a deadline
//! yield_to_caller     nothing is to be done, and `caller_waits` is set
//! ```
//! The reactor's thread is Running; or Polling, while it holds the core without anything to do; or Sleeping, while the core
//! is free; or Parked, while a caller holds the core.
//!
//! Wake-ups:
//! - [`notify`](DriverHandle::notify), after a command or by a waker, signals the poller's eventfd, which wakes the thread
//!   that waits in epoll, and `for_thread`, which wakes a parked thread. It sets `thread_must_run`, unless the thread holds
//!   the core already.
//! - A caller that takes the core from a sleeping thread signals `thread_wake`, because the thread does not know the
//!   deadlines that the caller adds. The thread finds the core held, and parks.
//! - A caller that finds the thread polling sets `caller_waits` and sleeps on `for_caller`, until the thread yields.
//! - A caller that puts the core back wakes a parked thread, and sets `thread_must_run` for it.
//! - A caller that finds the core held gets [`Driven::Busy`], and sleeps until its work is completed.

use std::fmt;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use kvpipe_ucx::AssertSend;

use super::poller::Poller;
use super::reactor_core::{Next, ReactorCore};
use super::{EventHandler, PendingReads};
use crate::clock;
use crate::error::Result;
use crate::process::Process;
use crate::sync::{clear, eventfd, lock, signal};
use crate::work::{Drive, Driven};

/// Time for which the thread leaves the core to the next caller after the last one, up to twice that.
const HANDBACK_DELAY: Duration = Duration::from_millis(1);

/// A [`Driver`] without the type of its core.
pub(crate) trait DriverHandle: Drive {
    /// There is something to do: wakes the thread that runs the reactor, or has the reactor's own thread run it.
    fn notify(&self);
    /// True if the calling thread runs the reactor now.
    fn is_run_here(&self) -> bool;
    /// One round of a reactor that has no thread.
    #[cfg(any(test, feature = "fuzzing"))]
    fn run_once(&self) -> super::manual::Round;
    /// Sizes of the maps and queues of the handler of a reactor without a thread.
    #[cfg(test)]
    fn sizes(&self) -> super::manual::Sizes;
    /// Drops the core of a reactor that has no thread: it and the holder of a [`Waker`](super::Waker) would keep each
    /// other.
    #[cfg(any(test, feature = "fuzzing"))]
    fn drop_core(&self);
}

type BoxedCore<H> = Box<AssertSend<ReactorCore<H>>>;

/// State of the reactor's thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ThreadState {
    /// It runs the reactor, or is about to see whether it may.
    Running,
    /// It holds the core and has nothing to do, but looks for more before it sleeps.
    Polling,
    /// It sleeps on the reactor's descriptors; callers may take the core.
    Sleeping,
    /// It waits until a caller puts the core back.
    Parked,
}

/// Holder of the core.
enum Holder<H: EventHandler> {
    Free(BoxedCore<H>),
    HeldByThread(ThreadId),
    HeldByCaller(ThreadId),
    Ended,
}

struct DriverState<H: EventHandler> {
    holder: Holder<H>,
    /// Number of times that callers have acquired the core.
    num_caller_runs: u64,
    thread: ThreadState,
    /// A caller waits for the thread to put the core back.
    caller_waits: bool,
    /// The thread takes the core next, and at once: there is something to do that no caller waits for.
    thread_must_run: bool,
}

impl<H: EventHandler> DriverState<H> {
    /// Acquires the core for `holder`, if it is free.
    fn acquire_core(&mut self, holder: Holder<H>) -> Option<BoxedCore<H>> {
        match std::mem::replace(&mut self.holder, holder) {
            Holder::Free(core) => Some(core),
            held => {
                self.holder = held;
                None
            }
        }
    }
}

pub(super) struct Driver<H: EventHandler> {
    state: Mutex<DriverState<H>>,
    for_thread: Condvar,
    for_caller: Condvar,
    poller: Arc<Poller>,
    /// Wakes the thread only.
    thread_wake: OwnedFd,
    process: Process,
    pending_reads: PendingReads,
}

impl<H: EventHandler> Driver<H> {
    pub(super) fn new(
        core: AssertSend<ReactorCore<H>>,
        poller: Arc<Poller>,
        pending_reads: PendingReads,
    ) -> Result<Self> {
        let state = DriverState {
            holder: Holder::Free(Box::new(core)),
            num_caller_runs: 0,
            thread: ThreadState::Running,
            caller_waits: false,
            thread_must_run: false,
        };
        Ok(Self {
            state: Mutex::new(state),
            for_thread: Condvar::new(),
            for_caller: Condvar::new(),
            poller,
            thread_wake: eventfd()?,
            process: Process::this(),
            pending_reads,
        })
    }

    fn lock(&self) -> MutexGuard<'_, DriverState<H>> {
        lock(&self.state)
    }

    /// The reactor's thread.
    pub(super) fn run_thread(&self) {
        let mut num_seen = 0;
        while let Some(core) = self.acquire_for_thread(&mut num_seen) {
            // A panic drops the core, and everything that is under way ends as closed.
            if catch_unwind(AssertUnwindSafe(|| self.run_core(core))).is_err() {
                self.set_ended();
            }
        }
    }

    /// Waits until no caller holds the core, nor did for [`HANDBACK_DELAY`]. `None`: the reactor has ended.
    fn acquire_for_thread(&self, num_seen: &mut u64) -> Option<BoxedCore<H>> {
        let mut state = self.lock();
        while !matches!(state.holder, Holder::Ended) {
            let is_quiet = state.num_caller_runs == *num_seen;
            if (is_quiet || state.thread_must_run)
                && let Some(core) = state.acquire_core(Holder::HeldByThread(thread::current().id()))
            {
                *num_seen = state.num_caller_runs;
                state.thread_must_run = false;
                return Some(core);
            }
            if is_quiet {
                state.thread = ThreadState::Parked;
                let parked = self.for_thread.wait(state);
                state = parked.unwrap_or_else(PoisonError::into_inner);
                state.thread = ThreadState::Running;
            } else {
                *num_seen = state.num_caller_runs;
                let waited = self.for_thread.wait_timeout(state, HANDBACK_DELAY);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        None
    }

    /// Runs the reactor until it has nothing to do, a caller waits for the core, or the reactor ends.
    fn run_core(&self, mut core: BoxedCore<H>) {
        core.get_mut().poll_sockets(clock::now());
        loop {
            match (*core).get_mut().run_once() {
                Next::Again => self.lock().thread = ThreadState::Running,
                Next::Poll => {
                    let mut state = self.lock();
                    if state.caller_waits {
                        return self.yield_to_caller(state, core);
                    }
                    state.thread = ThreadState::Polling;
                }
                Next::Sleep(until) => return self.sleep(core, until),
                Next::End => {
                    core.into_inner().handler.end();
                    return self.set_ended();
                }
            }
        }
    }

    fn yield_to_caller(&self, mut state: MutexGuard<'_, DriverState<H>>, core: BoxedCore<H>) {
        state.holder = Holder::Free(core);
        state.thread = ThreadState::Running;
        state.num_caller_runs += 1; // counted already: the thread must not take the core first
        drop(state);
        self.for_caller.notify_one();
    }

    /// Leaves the core to callers until there is something to do.
    fn sleep(&self, core: BoxedCore<H>, until: Instant) {
        let mut state = self.lock();
        if state.caller_waits {
            return self.yield_to_caller(state, core);
        }
        state.holder = Holder::Free(core);
        state.thread = ThreadState::Sleeping;
        drop(state);
        self.poller.sleep(&self.thread_wake, until);
        self.lock().thread = ThreadState::Running;
        clear(&self.thread_wake);
    }

    fn set_ended(&self) {
        self.lock().holder = Holder::Ended;
        self.for_thread.notify_all();
    }

    /// The core for a caller, unless another thread holds it or is about to.
    fn acquire_for_caller(&self) -> Option<BoxedCore<H>> {
        let mut state = self.lock();
        if matches!(state.holder, Holder::HeldByCaller(_)) || state.thread_must_run {
            state.thread_must_run = true; // the other caller stops when its own work is done, the thread does not
            return None;
        }
        if state.thread == ThreadState::Polling {
            state.caller_waits = true;
            let waited = self.for_caller.wait_timeout(state, HANDBACK_DELAY);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.caller_waits = false;
        }
        let core = state.acquire_core(Holder::HeldByCaller(thread::current().id()))?;
        state.num_caller_runs += 1;
        if state.thread == ThreadState::Sleeping {
            signal(&self.thread_wake);
        }
        Some(core)
    }

    fn put_back(&self, mut core: BoxedCore<H>) {
        let is_at_rest = core.get_mut().is_at_rest();
        let mut state = self.lock();
        state.holder = Holder::Free(core);
        state.thread_must_run |= !is_at_rest || state.thread == ThreadState::Parked;
        if state.thread_must_run {
            self.for_thread.notify_one();
        }
    }
}

impl<H: EventHandler> Drive for Driver<H> {
    fn check_reads_ended(&self) -> Result<()> {
        self.pending_reads.check()
    }

    fn drive(&self, until: Instant, is_done: &dyn Fn() -> bool) -> Driven {
        if let Err(error) = self.process.check() {
            return Driven::Forked(error);
        }
        let Some(core) = self.acquire_for_caller() else {
            self.poller.wake(); // for what was queued
            return Driven::Busy;
        };
        let drive = AssertUnwindSafe(|| {
            let mut core = core;
            let driven = core.get_mut().drive(until, is_done);
            self.put_back(core);
            driven
        });
        catch_unwind(drive).unwrap_or_else(|_| {
            self.set_ended();
            Driven::Busy
        })
    }
}

impl<H: EventHandler> DriverHandle for Driver<H> {
    fn notify(&self) {
        if self.process.check().is_err() {
            return;
        }
        let mut state = self.lock();
        // A thread that holds the core looks at the wake-up before it sleeps.
        state.thread_must_run |= !matches!(state.holder, Holder::HeldByThread(_));
        drop(state);
        self.poller.wake();
        self.for_thread.notify_one();
    }

    fn is_run_here(&self) -> bool {
        match self.lock().holder {
            Holder::HeldByThread(id) | Holder::HeldByCaller(id) => id == thread::current().id(),
            Holder::Free(_) | Holder::Ended => false,
        }
    }

    #[cfg(any(test, feature = "fuzzing"))]
    fn run_once(&self) -> super::manual::Round {
        use super::manual::Round;
        let holder = Holder::HeldByCaller(thread::current().id());
        let Some(mut core) = self.lock().acquire_core(holder) else {
            return Round::Over;
        };
        core.get_mut().poll_sockets(clock::now());
        let was_ready = core.get_mut().was_ready;
        let next = core.get_mut().run_once();
        if matches!(next, Next::End) {
            core.into_inner().handler.end();
            self.set_ended();
            return Round::Over;
        }
        let num_sessions = core.get_mut().handler.num_sessions();
        self.lock().holder = Holder::Free(core);
        match next {
            Next::Sleep(_) if !was_ready => Round::AtRest { num_sessions },
            _ => Round::Busy,
        }
    }

    #[cfg(test)]
    fn sizes(&self) -> super::manual::Sizes {
        let holder = Holder::HeldByCaller(thread::current().id());
        let Some(mut core) = self.lock().acquire_core(holder) else {
            return Vec::new();
        };
        let sizes = core.get_mut().handler.sizes();
        self.lock().holder = Holder::Free(core);
        sizes
    }

    #[cfg(any(test, feature = "fuzzing"))]
    fn drop_core(&self) {
        let core = self.lock().acquire_core(Holder::Ended);
        drop(core);
    }
}

impl<H: EventHandler> fmt::Debug for Driver<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
