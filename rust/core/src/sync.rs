//! Synchronization of threads: mutexes and eventfds.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use crate::error::{Error, Result};

/// Locks a mutex, whatever happened to other threads: a panic is reported where it happens, not by poison.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A descriptor that is readable from [`signal`] to [`clear`].
pub(crate) fn eventfd() -> Result<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|error| Error::Exhausted(format!("no eventfd: {error}")))
}

pub(crate) fn signal(eventfd: &OwnedFd) {
    // Fails only when the counter is full, and then the descriptor is readable already.
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

/// Returns when it is readable, at `until`, or when a signal came.
pub(crate) fn wait(eventfd: &OwnedFd, until: Instant) {
    let left = until.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left).unwrap_or_default();
    let _ = rustix::event::poll(&mut [PollFd::new(eventfd, PollFlags::IN)], Some(&left));
}

pub(crate) fn clear(eventfd: &OwnedFd) {
    let _ = rustix::io::read(eventfd, &mut [0u8; 8]);
}
