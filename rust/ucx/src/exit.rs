//! The end of the process. When it exits, UCX's libraries destroy what all of UCX uses, whoever is in UCX then: threads of this
//! crate's own leave it before.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

/// How long the exit waits for them; no call of theirs takes long.
const PATIENCE: Duration = Duration::from_secs(2);

static AT_WORK: Mutex<Option<AtWork>> = Mutex::new(None);
static ONE_LEFT: Condvar = Condvar::new();
/// Whose [`AT_WORK`] it is: a child of a fork has none of its parent's threads.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// The threads that are in UCX.
struct AtWork {
    num_threads: usize,
    is_exiting: bool,
    bell: Arc<OwnedFd>,
}

fn lock() -> MutexGuard<'static, Option<AtWork>> {
    AT_WORK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread's time in UCX: it is not in UCX any more when this is dropped.
pub(crate) struct Shift {
    bell: Arc<OwnedFd>,
}

impl Shift {
    /// Begins it, unless the process exits.
    ///
    /// # Errors
    /// The process has no descriptor left, or no room for what is to be done at its exit.
    pub(crate) fn begin() -> rustix::io::Result<Option<Self>> {
        let mut at_work = lock();
        let ours = match at_work.take() {
            Some(ours) if PROCESS.load(Ordering::Relaxed) == std::process::id() => ours,
            before => AtWork::new(before.is_none())?,
        };
        let ours = at_work.insert(ours);
        if ours.is_exiting {
            return Ok(None);
        }
        ours.num_threads += 1;
        let bell = Arc::clone(&ours.bell);
        Ok(Some(Self { bell }))
    }

    /// Whether the process exits: the thread has to leave UCX.
    #[expect(clippy::unused_self, reason = "asked by who has one")]
    pub(crate) fn is_over(&self) -> bool {
        lock().as_ref().is_some_and(|at_work| at_work.is_exiting)
    }

    /// Readable from the moment in which it is over.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl Drop for Shift {
    fn drop(&mut self) {
        if let Some(at_work) = lock().as_mut() {
            at_work.num_threads -= 1;
        }
        ONE_LEFT.notify_all();
    }
}

impl AtWork {
    /// Those of this process, which is a new one or the child of one that had its own.
    fn new(is_first: bool) -> rustix::io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // SAFETY: the function can be called at any time, and this library is not unloaded.
        if is_first && unsafe { libc::atexit(leave) } != 0 {
            return Err(rustix::io::Errno::NOMEM);
        }
        PROCESS.store(std::process::id(), Ordering::Relaxed);
        Ok(Self {
            num_threads: 0,
            is_exiting: false,
            bell: Arc::new(bell),
        })
    }
}

/// Has them leave. Runs before the libraries' destructors, which are the last to run.
extern "C" fn leave() {
    // Before the lock, which in a child of a fork somebody may have who is not there.
    if PROCESS.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    let mut at_work = lock();
    if let Some(ours) = at_work.as_mut() {
        ours.is_exiting = true;
        let _ = rustix::io::write(&*ours.bell, &1u64.to_ne_bytes());
    }
    let is_busy =
        |at_work: &mut Option<AtWork>| at_work.as_ref().is_some_and(|ours| ours.num_threads > 0);
    let _ = ONE_LEFT.wait_timeout_while(at_work, PATIENCE, is_busy);
}
