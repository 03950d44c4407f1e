//! The result of an asynchronous call. Its reactor completes it once, and any thread waits for it. A thread that waits runs
//! the reactor meanwhile. Where another thread does that, it sleeps on a futex; an asyncio loop watches its works by one
//! descriptor (`completions.rs`).

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::thread::futex;

use crate::completions::{Completions, Watcher};
use crate::error::{Error, Result};
use crate::sync::lock;

/// Longest sleep of a wait, so that a signal that arrives just before it is noticed too.
const SIGNAL_SLICE: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct WorkState<T> {
    result: Option<Result<T>>,
    watchers: Vec<Watcher>,
}

/// State that a [`Work`] and its [`Completer`] share.
#[derive(Debug)]
struct SharedWork<T> {
    state: Mutex<WorkState<T>>,
    /// [`PENDING`], [`COMPLETED`] or [`SETTLED`], and the mark [`WAITED_FOR`].
    progress: AtomicU32,
}

const PENDING: u32 = 0;
/// There is a result, and what was under way may not have ended.
const COMPLETED: u32 = 1;
/// There is a result, and nothing is under way.
const SETTLED: u32 = 2;
/// Threads sleep until there is progress.
const WAITED_FOR: u32 = 1 << 31;

/// A reactor as a waiting caller sees it: the caller runs the reactor while it waits.
pub(crate) trait Drive: Send + Sync + fmt::Debug {
    /// Runs the reactor on the calling thread until `is_done`, `until` or a signal.
    fn drive(&self, until: Instant, is_done: &dyn Fn() -> bool) -> Driven;
    /// Checks that no read has outlived the reactor.
    ///
    /// # Errors
    /// `Timeout` says how many have.
    fn check_reads_ended(&self) -> Result<()>;
}

/// Outcome of [`Drive::drive`].
#[derive(Debug)]
pub(crate) enum Driven {
    /// `is_done` holds.
    Done,
    /// `until` has passed.
    TimedOut,
    /// A signal arrived, or it is time to look for one.
    Interrupted,
    /// Another thread runs the reactor, or the reactor has ended: the caller sleeps until its work is completed.
    Busy,
    /// This process was forked from the one that made the reactor.
    Forked(Error),
}

/// An operation that is pending or completed. Clones share it; dropping all of them cancels nothing.
#[derive(Debug)]
pub struct Work<T> {
    shared: Arc<SharedWork<T>>,
    /// The reactor that completes it.
    driver: Option<Arc<dyn Drive>>,
}

impl<T> Clone for Work<T> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            driver: self.driver.clone(),
        }
    }
}

/// Outcome of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// The operation is completed.
    Done,
    /// The deadline passed first.
    TimedOut,
    /// A signal may have arrived: check for signals, then wait again.
    Interrupted,
}

/// The caller's next step with a new work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// Waits for it at once, and so runs the reactor itself: the reactor's thread need not be woken.
    Wait,
    /// Anything else.
    GoOn,
}

/// The other end of a [`Work`]: completes it once. Dropping it completes the work as closed.
#[derive(Debug)]
pub struct Completer<T>(Option<Arc<SharedWork<T>>>);

/// Makes a work and its completer.
pub fn work<T>() -> (Work<T>, Completer<T>) {
    let state = WorkState {
        result: None,
        watchers: Vec::new(),
    };
    let shared = Arc::new(SharedWork {
        state: Mutex::new(state),
        progress: AtomicU32::new(PENDING),
    });
    let work = Work {
        shared: Arc::clone(&shared),
        driver: None,
    };
    (work, Completer(Some(shared)))
}

impl<T> SharedWork<T> {
    /// Progress: [`PENDING`], [`COMPLETED`] or [`SETTLED`].
    fn progress(&self) -> u32 {
        self.progress.load(Ordering::Acquire) & !WAITED_FOR
    }

    /// Sets the result, unless there is one.
    fn complete(&self, result: Result<T>, progress: u32) {
        let mut state = lock(&self.state);
        state.result.get_or_insert(result);
        let before = self.progress.swap(progress, Ordering::AcqRel);
        let watchers = std::mem::take(&mut state.watchers);
        drop(state);
        if before & WAITED_FOR != 0 {
            // Fails only for an invalid address.
            let _ = futex::wake(&self.progress, futex::Flags::PRIVATE, i32::MAX as u32);
        }
        for watcher in watchers {
            watcher.notify();
        }
    }

    /// Sleeps until it has progressed to `until`, `deadline` or a signal, for [`SIGNAL_SLICE`] at most.
    fn sleep(&self, until: u32, deadline: Option<Instant>) -> Result<Waited> {
        let is_done = || self.progress() >= until;
        let seen = self.progress.load(Ordering::Acquire);
        let marked = seen | WAITED_FOR;
        let (relaxed, acquire) = (Ordering::Relaxed, Ordering::Acquire);
        // If it has progressed meanwhile, the sleep ends at once: the value differs.
        let _ = self
            .progress
            .compare_exchange(seen, marked, relaxed, acquire);
        if is_done() {
            return Ok(Waited::Done);
        }
        let sleep = |slice: &Timespec| match futex::wait(
            &self.progress,
            futex::Flags::PRIVATE,
            marked,
            Some(slice),
        ) {
            Ok(()) | Err(Errno::AGAIN) => Ok(true),
            Err(Errno::TIMEDOUT) => Ok(false),
            Err(error) => Err(error),
        };
        wait(deadline, is_done, sleep)
    }
}

impl<T> Completer<T> {
    /// True if this completes that work.
    pub fn completes(&self, work: &Work<T>) -> bool {
        let shared = self.0.as_ref();
        shared.is_some_and(|shared| Arc::ptr_eq(shared, &work.shared))
    }

    /// Completes the work, and settles it. A work that was [completed before](Self::complete_unsettled) keeps its result.
    pub fn complete(mut self, result: Result<T>) {
        self.finish(result);
    }

    /// Completes the work while something of its operation is still under way; [`complete`](Self::complete) settles it.
    pub(crate) fn complete_unsettled(&self, result: Result<T>) {
        if let Some(shared) = &self.0 {
            shared.complete(result, COMPLETED);
        }
    }

    /// True if the work has its result.
    pub(crate) fn is_completed(&self) -> bool {
        let shared = self.0.as_ref();
        shared.is_some_and(|shared| shared.progress() >= COMPLETED)
    }

    fn finish(&mut self, result: Result<T>) {
        if let Some(shared) = self.0.take() {
            shared.complete(result, SETTLED);
        }
    }
}

impl<T> Drop for Completer<T> {
    fn drop(&mut self) {
        self.finish(Err(Error::Closed(
            "closed before the operation was done".to_owned(),
        )));
    }
}

impl<T> Work<T> {
    /// True if the operation is completed, with a value or an error.
    pub fn is_completed(&self) -> bool {
        self.shared.progress() >= COMPLETED
    }

    /// True if nothing of the operation is under way. A late read may be completed before, see
    /// [`wait_settled`](Self::wait_settled).
    pub fn is_settled(&self) -> bool {
        self.shared.progress() == SETTLED
    }

    /// Has completion queue `key` in `completions`; false if the work is completed already. Keys of a loop differ.
    pub fn watch(&self, completions: &Arc<Completions>, key: u64) -> bool {
        let mut state = lock(&self.shared.state);
        if state.result.is_some() {
            return false;
        }
        let completions = Arc::downgrade(completions);
        state.watchers.push(Watcher { completions, key });
        true
    }

    /// Ends a [`watch`](Self::watch). The key may have been queued already.
    pub fn unwatch(&self, completions: &Arc<Completions>, key: u64) {
        let is_other = |watcher: &Watcher| {
            watcher.key != key || watcher.completions.as_ptr() != Arc::as_ptr(completions)
        };
        lock(&self.shared.state).watchers.retain(is_other);
    }

    /// Sets the reactor that completes it.
    pub(crate) fn driven_by(mut self, driver: Arc<dyn Drive>) -> Self {
        self.driver = Some(driver);
        self
    }

    /// Waits for completion, `deadline` or a signal. Runs the reactor meanwhile, unless another thread does.
    pub fn wait(&self, deadline: Option<Instant>) -> Result<Waited> {
        self.wait_until(COMPLETED, deadline)
    }

    /// Waits until nothing of the operation is under way, as [`wait`](Self::wait) does for its result. The two differ where
    /// the operation failed at its deadline while reads that cannot be taken back were under way.
    ///
    /// # Errors
    /// `Timeout`: the reactor was closed, and UCX has not ended its reads.
    pub fn wait_settled(&self, deadline: Option<Instant>) -> Result<Waited> {
        let waited = self.wait_until(SETTLED, deadline)?;
        if waited == Waited::Done
            && let Some(driver) = &self.driver
        {
            driver.check_reads_ended()?;
        }
        Ok(waited)
    }

    fn wait_until(&self, progress: u32, deadline: Option<Instant>) -> Result<Waited> {
        let is_done = || self.shared.progress() >= progress;
        if is_done() {
            return Ok(Waited::Done);
        }
        if let Some(driver) = &self.driver {
            let slice = Instant::now() + SIGNAL_SLICE;
            let until = deadline.map_or(slice, |at| at.min(slice));
            match driver.drive(until, &is_done) {
                Driven::Done => return Ok(Waited::Done),
                Driven::TimedOut if Some(until) == deadline => return Ok(Waited::TimedOut),
                Driven::TimedOut | Driven::Interrupted => return Ok(Waited::Interrupted),
                Driven::Busy => {}
                Driven::Forked(error) => return Err(error),
            }
        }
        self.shared.sleep(progress, deadline)
    }
}

/// Waits on a descriptor until `is_done`, `deadline` or a signal.
pub(crate) fn wait_readable(
    fd: &OwnedFd,
    deadline: Option<Instant>,
    is_done: impl Fn() -> bool,
) -> Result<Waited> {
    let poll = |slice: &Timespec| {
        let polled = rustix::event::poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(slice));
        polled.map(|ready| ready > 0)
    };
    wait(deadline, is_done, poll)
}

/// Sleeps once, for a slice at most. `sleep` returns whether it was woken.
fn wait(
    deadline: Option<Instant>,
    is_done: impl Fn() -> bool,
    sleep: impl FnOnce(&Timespec) -> rustix::io::Result<bool>,
) -> Result<Waited> {
    let left = deadline.map_or(SIGNAL_SLICE, |at| {
        at.saturating_duration_since(Instant::now())
    });
    let slept = sleep(&timespec(left.min(SIGNAL_SLICE)));
    if is_done() {
        return Ok(Waited::Done);
    }
    match slept {
        Ok(false) if left <= SIGNAL_SLICE && deadline.is_some() => Ok(Waited::TimedOut),
        Ok(_) | Err(Errno::INTR) => Ok(Waited::Interrupted),
        Err(error) => Err(Error::Exhausted(format!("cannot wait: {error}"))),
    }
}

impl<T: Clone> Work<T> {
    /// The outcome, once there is one.
    pub fn result(&self) -> Option<Result<T>> {
        lock(&self.shared.state).result.clone()
    }

    /// Waits without checking for signals, for Rust callers.
    pub fn wait_for(&self, timeout: Duration) -> Result<T> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(result) = self.result() {
                return result;
            }
            if self.wait(Some(deadline))? == Waited::TimedOut {
                return Err(Error::Timeout(format!("not done within {timeout:?}")));
            }
        }
    }
}

pub(crate) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests;
