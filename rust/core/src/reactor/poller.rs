//! The descriptors that a reactor waits for: those that its handler registers, UCX's, and one by which other threads wake it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use crate::clock;
use crate::error::{Error, Result};
use crate::sync::{clear, eventfd, signal};
use crate::work::timespec;

/// Names a descriptor of a reactor.
pub(crate) type Token = u64;

/// The eventfd by which other threads wake the reactor.
pub(super) const WAKE: Token = 0;
/// The descriptor of the UCX worker.
pub(super) const UCX: Token = 1;
/// The first token of the handler; all above are its own, too.
pub(crate) const FIRST_TOKEN: Token = 2;

/// An epoll instance and its wake-up eventfd. The reactor, its handler and the threads that connect share it.
#[derive(Debug)]
pub(crate) struct Poller {
    epoll: OwnedFd,
    wake: OwnedFd,
    num_descriptors: AtomicUsize,
}

impl Poller {
    pub(crate) fn new() -> Result<Self> {
        let poller = Self {
            epoll: epoll::create(CreateFlags::CLOEXEC).map_err(no_epoll)?,
            wake: eventfd()?,
            num_descriptors: AtomicUsize::new(0),
        };
        poller.add(&poller.wake, WAKE, EventFlags::IN)?;
        Ok(poller)
    }

    /// Reports these events of a descriptor from now on.
    pub(crate) fn add(&self, fd: impl AsFd, token: Token, events: EventFlags) -> Result<()> {
        epoll::add(&self.epoll, fd, EventData::new_u64(token), events).map_err(no_epoll)?;
        self.num_descriptors.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Reports other events of a registered descriptor.
    pub(crate) fn modify(&self, fd: impl AsFd, token: Token, events: EventFlags) {
        // Fails only for a descriptor that is not registered.
        let _ = epoll::modify(&self.epoll, fd, EventData::new_u64(token), events);
    }

    /// Reports nothing of a descriptor any more.
    pub(crate) fn remove(&self, fd: impl AsFd) {
        if epoll::delete(&self.epoll, fd).is_ok() {
            self.num_descriptors.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Wakes the thread that runs the reactor.
    pub(crate) fn wake(&self) {
        signal(&self.wake);
    }

    pub(super) fn clear_wake(&self) {
        clear(&self.wake);
    }

    /// Collects everything that is ready, and sleeps until `until` if nothing is; whether a signal ended the sleep. A
    /// signal does not hide what is ready: after a SIGCONT a peer would seem silent whose bytes have come.
    pub(super) fn wait(&self, ready: &mut Vec<Event>, until: Instant) -> bool {
        ready.reserve(self.num_descriptors.load(Ordering::Relaxed));
        let mut wait = |until: Instant| {
            let timeout = timespec(until.saturating_duration_since(clock::now()));
            epoll::wait(&self.epoll, spare_capacity(ready), Some(&timeout))
        };
        let is_interrupted = wait(until) == Err(Errno::INTR);
        if is_interrupted {
            let _ = wait(clock::now());
        }
        is_interrupted
    }

    /// Sleeps until something is ready, `other` is readable, or `until`. Collects nothing.
    pub(super) fn sleep(&self, other: &OwnedFd, until: Instant) {
        let mut polled = [
            PollFd::new(&self.epoll, PollFlags::IN),
            PollFd::new(other, PollFlags::IN),
        ];
        let timeout = timespec(until.saturating_duration_since(clock::now()));
        let _ = rustix::event::poll(&mut polled, Some(&timeout));
    }
}

fn no_epoll(error: Errno) -> Error {
    Error::Exhausted(format!("epoll: {error}"))
}
