//! The exit gate: no thread is in UCX while the process exits, or in the child of a fork. At exit, UCX's libraries destroy
//! their shared state even while threads use it. So every thread leaves UCX before, and none enters any more. The child of a
//! fork has UCX's state without UCX's threads.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

/// Longest wait at exit for the threads in UCX. Only pinning several GiB for RDMA takes longer.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Threads in UCX.
static NUM_INSIDE: AtomicUsize = AtomicUsize::new(0);
static IS_EXITING: AtomicBool = AtomicBool::new(false);
static NUM_IN_USE: AtomicUsize = AtomicUsize::new(0);
static IS_FORKED: AtomicBool = AtomicBool::new(false);
static LEAVING: Mutex<()> = Mutex::new(());
static THREAD_LEFT: Condvar = Condvar::new();

thread_local! {
    /// Nested calls of this thread in UCX: callbacks call UCX again.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// True in the thread that runs the exit.
    static IS_EXITING_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// A thread's stay in UCX. Once the process exits, only the exiting thread gets one; others sleep until the end.
pub(crate) struct Inside(PhantomData<*const ()>);

impl Inside {
    pub(crate) fn enter() -> Self {
        let depth = DEPTH.get();
        DEPTH.set(depth + 1);
        if depth == 0 {
            enter_gate();
        }
        Self(PhantomData)
    }

    /// For a thread that must not sleep; none once the process exits.
    pub(crate) fn try_enter() -> Option<Self> {
        let depth = DEPTH.get();
        if depth == 0 && !try_enter_gate() {
            return None;
        }
        DEPTH.set(depth + 1);
        Some(Self(PhantomData))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let depth = DEPTH.get() - 1;
        DEPTH.set(depth);
        if depth == 0 {
            leave_gate();
        }
    }
}

fn enter_gate() {
    if !try_enter_gate() {
        loop {
            std::thread::park();
        }
    }
}

/// Counts this thread in, unless the process exits.
fn try_enter_gate() -> bool {
    NUM_INSIDE.fetch_add(1, Ordering::SeqCst);
    let is_open = !IS_EXITING.load(Ordering::SeqCst) || IS_EXITING_THREAD.get();
    if !is_open {
        leave_gate();
    }
    is_open
}

fn leave_gate() {
    NUM_INSIDE.fetch_sub(1, Ordering::SeqCst);
    if IS_EXITING.load(Ordering::SeqCst) {
        drop(lock());
        THREAD_LEFT.notify_all();
    }
}

fn lock() -> MutexGuard<'static, ()> {
    LEAVING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The life of a context: until this is dropped, UCX has threads, and descriptors that it polls.
#[derive(Debug)]
pub(crate) struct InUse(());

impl InUse {
    pub(crate) fn begin() -> Self {
        NUM_IN_USE.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        NUM_IN_USE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// True if UCX was in use when this process was forked. The child has none of UCX's threads and shares the descriptors
/// that they poll; UCX does not know.
pub(crate) fn is_forked() -> bool {
    IS_FORKED.load(Ordering::SeqCst)
}

/// Installs the handlers for exit and fork, once.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the function can be called at any time, and this library is never unloaded.
        let at_exit = unsafe { libc::atexit(wait_at_exit) };
        // SAFETY: as above.
        let at_fork = unsafe { libc::pthread_atfork(None, None, Some(reset_in_child)) };
        if (at_exit, at_fork) != (0, 0) {
            tracing::warn!(at_exit, at_fork, "exit.unguarded");
        }
    });
}

/// Runs before the libraries' destructors, which are the last to run.
extern "C" fn wait_at_exit() {
    IS_EXITING_THREAD.set(true);
    IS_EXITING.store(true, Ordering::SeqCst);
    let is_occupied = |(): &mut ()| NUM_INSIDE.load(Ordering::SeqCst) > own();
    let _ = THREAD_LEFT.wait_timeout_while(lock(), EXIT_TIMEOUT, is_occupied);
}

/// The child of a fork has none of its parent's other threads.
unsafe extern "C" fn reset_in_child() {
    NUM_INSIDE.store(own(), Ordering::SeqCst);
    IS_FORKED.fetch_or(NUM_IN_USE.load(Ordering::SeqCst) > 0, Ordering::SeqCst);
}

/// The share of this thread in [`NUM_INSIDE`].
fn own() -> usize {
    usize::from(DEPTH.get() > 0)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, ExitStatus};
    use std::time::Instant;

    use super::*;

    const ROLE: &str = "KVPIPE_TEST_EXIT_ROLE";
    const STAY: Duration = Duration::from_millis(300);
    /// Exit code of a process with another thread in UCX while UCX's libraries are destroyed.
    const NOT_ALONE: i32 = 71;

    static IS_IN: AtomicBool = AtomicBool::new(false);
    static HAS_ENTERED: AtomicBool = AtomicBool::new(false);

    /// Stands for the libraries' destructors: it is registered before the exit gate, so that it runs after it.
    extern "C" fn end_libraries() {
        let begun = Instant::now();
        while begun.elapsed() < STAY {
            if IS_IN.load(Ordering::SeqCst) {
                // SAFETY: it only ends the process.
                unsafe { libc::_exit(NOT_ALONE) };
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(Inside::enter()); // the exiting thread may
    }

    /// A call into UCX, and a nested one.
    fn call(time: Duration) {
        let inside = Inside::enter();
        IS_IN.store(true, Ordering::SeqCst);
        HAS_ENTERED.store(true, Ordering::SeqCst);
        std::thread::sleep(time);
        drop(Inside::enter());
        IS_IN.store(false, Ordering::SeqCst);
        drop(inside);
    }

    fn wait_for_call() {
        while !HAS_ENTERED.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn exiting_process() {
        let Ok(role) = std::env::var(ROLE) else {
            return;
        };
        // SAFETY: the function can be called at any time.
        assert_eq!(unsafe { libc::atexit(end_libraries) }, 0);
        install();
        match role.as_str() {
            "call" => drop(std::thread::spawn(|| call(STAY))),
            "calls" => drop(std::thread::spawn(|| {
                loop {
                    call(Duration::from_millis(20));
                }
            })),
            "fork" => {
                drop(std::thread::spawn(|| call(Duration::from_secs(60))));
                wait_for_call();
                fork();
                IS_IN.store(false, Ordering::SeqCst);
            }
            other => panic!("no role {other}"),
        }
        if role != "fork" {
            wait_for_call();
        }
        std::process::exit(0);
    }

    /// Continues as the child; the parent exits as the child does.
    fn fork() {
        // SAFETY: the child has this thread only, and calls nothing that needs another.
        let child = unsafe { libc::fork() };
        if child != 0 {
            let mut status = 0;
            // SAFETY: a valid place for the answer.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            // SAFETY: it only ends the process.
            unsafe { libc::_exit(libc::WEXITSTATUS(status)) };
        }
    }

    fn exit_as(role: &str) -> (ExitStatus, Duration) {
        let (begun, program) = (Instant::now(), std::env::current_exe().expect("this one"));
        let status = Command::new(program)
            .args([
                "--exact",
                "exit_gate::tests::exiting_process",
                "--nocapture",
            ])
            .env(ROLE, role)
            // LeakSanitizer would find memory of the parent's threads, which a forked child does not have.
            .envs((role == "fork").then_some(("LSAN_OPTIONS", "detect_leaks=0")))
            .status();
        (status.expect("its end"), begun.elapsed())
    }

    #[test]
    fn an_exit_waits_for_a_thread_that_is_in_ucx() {
        let (status, _) = exit_as("call");
        assert_eq!(status.code(), Some(0), "{status}");
    }

    #[test]
    fn no_thread_enters_once_the_process_exits() {
        let (status, _) = exit_as("calls");
        assert_eq!(status.code(), Some(0), "{status}");
    }

    #[test]
    fn the_child_of_a_fork_does_not_wait_for_threads_of_its_parent() {
        let (status, taken) = exit_as("fork");
        assert_eq!(status.code(), Some(0), "{status}");
        assert!(taken < STAY + EXIT_TIMEOUT, "{taken:?}");
    }
}
