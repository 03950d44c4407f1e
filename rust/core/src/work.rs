//! Completion of an operation: its node completes it once, any thread waits for it. A thread that waits runs the node
//! meanwhile; where another does, and in asyncio, it sleeps on an eventfd that is made when somebody first needs it.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use crate::error::{Error, Result};
use crate::node::{Drive, Driven};

/// A wait is cut into slices of this length, so that a signal that arrives just before the wait is seen too.
const SIGNAL_SLICE: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct State<T> {
    result: Option<Result<T>>,
    eventfd: Option<Arc<OwnedFd>>,
}

/// An operation that is under way or done. Clones share it; dropping all of them cancels nothing.
#[derive(Debug)]
pub struct Work<T> {
    state: Arc<Mutex<State<T>>>,
    /// The node that completes it: who waits may run it.
    driver: Option<Arc<dyn Drive>>,
}

impl<T> Clone for Work<T> {
    fn clone(&self) -> Self {
        Self {
            state: Arc::clone(&self.state),
            driver: self.driver.clone(),
        }
    }
}

/// How a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// The operation is done.
    Done,
    /// The deadline passed first.
    TimedOut,
    /// A signal arrived or a slice ended: look for signals, then wait again.
    Interrupted,
}

/// What a caller does next with a work that it has just got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// Waits for it at once, and so runs the node itself: its thread need not be woken.
    Wait,
    /// Anything else.
    GoOn,
}

/// The other end of a [`Work`]: completes it once. Dropped without that, the work ends as closed.
#[derive(Debug)]
pub struct Completer<T>(Option<Arc<Mutex<State<T>>>>);

/// Makes a work and its completer.
pub fn work<T>() -> (Work<T>, Completer<T>) {
    let state = Arc::new(Mutex::new(State {
        result: None,
        eventfd: None,
    }));
    let work = Work {
        state: Arc::clone(&state),
        driver: None,
    };
    (work, Completer(Some(state)))
}

fn lock<T>(state: &Mutex<State<T>>) -> MutexGuard<'_, State<T>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Completer<T> {
    /// Whether this completes that work.
    pub fn completes(&self, work: &Work<T>) -> bool {
        let state = self.0.as_ref();
        state.is_some_and(|state| Arc::ptr_eq(state, &work.state))
    }

    /// Ends the operation.
    pub fn complete(mut self, result: Result<T>) {
        self.finish(result);
    }

    fn finish(&mut self, result: Result<T>) {
        let Some(state) = self.0.take() else { return };
        let mut state = lock(&state);
        state.result = Some(result);
        if let Some(fd) = &state.eventfd {
            // An eventfd that counts to 1 never blocks; a failure could only mean that nobody can wait on it.
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
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
    /// Whether the operation has ended, well or not.
    pub fn is_completed(&self) -> bool {
        lock(&self.state).result.is_some()
    }

    /// A file descriptor that is readable once the operation has ended. It belongs to the work.
    pub fn event_fd(&self) -> Result<RawFd> {
        self.eventfd().map(|fd| fd.as_raw_fd())
    }

    fn eventfd(&self) -> Result<Arc<OwnedFd>> {
        let mut state = lock(&self.state);
        if let Some(fd) = &state.eventfd {
            return Ok(Arc::clone(fd));
        }
        let count = u32::from(state.result.is_some());
        let fd = rustix::event::eventfd(count, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| {
                Error::Exhausted(format!("no file descriptor to wait with: {error}"))
            })?;
        let fd = Arc::new(fd);
        state.eventfd = Some(Arc::clone(&fd));
        Ok(fd)
    }

    /// Names the node that completes it.
    pub(crate) fn driven_by(mut self, driver: Arc<dyn Drive>) -> Self {
        self.driver = Some(driver);
        self
    }

    /// Waits until the operation has ended, `deadline` has passed, or a signal arrived. Runs the node meanwhile, unless
    /// another thread does.
    pub fn wait(&self, deadline: Option<Instant>) -> Result<Waited> {
        if self.is_completed() {
            return Ok(Waited::Done);
        }
        if let Some(driver) = &self.driver {
            let slice = Instant::now() + SIGNAL_SLICE;
            let until = deadline.map_or(slice, |at| at.min(slice));
            match driver.drive(until, &|| self.is_completed()) {
                Driven::Done => return Ok(Waited::Done),
                Driven::TimedOut if Some(until) == deadline => return Ok(Waited::TimedOut),
                Driven::TimedOut | Driven::Interrupted => return Ok(Waited::Interrupted),
                Driven::Taken => {}
                Driven::Forked(error) => return Err(error),
            }
        }
        wait_readable(&*self.eventfd()?, deadline, || self.is_completed())
    }
}

/// Waits on a descriptor until `is_done`, `deadline` has passed, or a signal arrived.
pub(crate) fn wait_readable(
    fd: &OwnedFd,
    deadline: Option<Instant>,
    is_done: impl Fn() -> bool,
) -> Result<Waited> {
    let left = deadline.map_or(SIGNAL_SLICE, |at| {
        at.saturating_duration_since(Instant::now())
    });
    let slice = timespec(left.min(SIGNAL_SLICE));
    let polled = rustix::event::poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&slice));
    if is_done() {
        return Ok(Waited::Done);
    }
    match polled {
        Err(rustix::io::Errno::INTR) => Ok(Waited::Interrupted),
        Err(error) => Err(Error::Exhausted(format!("cannot wait: {error}"))),
        Ok(0) if left <= SIGNAL_SLICE && deadline.is_some() => Ok(Waited::TimedOut),
        Ok(_) => Ok(Waited::Interrupted),
    }
}

impl<T: Clone> Work<T> {
    /// The outcome, once there is one.
    pub fn result(&self) -> Option<Result<T>> {
        lock(&self.state).result.clone()
    }

    /// Waits without looking for signals; for Rust callers.
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
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_when_another_thread_completes() {
        let (work, completer) = work();
        let thread = std::thread::spawn(move || completer.complete(Ok(7)));
        assert_eq!(work.wait_for(Duration::from_secs(5)), Ok(7));
        thread.join().unwrap();
    }

    #[test]
    fn a_wait_ends_at_its_deadline() {
        let (work, _completer) = work::<()>();
        let deadline = Instant::now() + Duration::from_millis(20);
        assert_eq!(work.wait(Some(deadline)), Ok(Waited::TimedOut));
    }

    #[test]
    fn a_dropped_completer_ends_the_work_as_closed() {
        let (work, completer) = work::<()>();
        drop(completer);
        assert!(matches!(work.result(), Some(Err(Error::Closed(_)))));
    }

    #[test]
    fn the_event_fd_of_a_completed_work_is_readable() {
        let (work, completer) = work();
        completer.complete(Ok(()));
        work.event_fd().unwrap();
        assert_eq!(work.wait(Some(Instant::now())), Ok(Waited::Done));
    }
}
