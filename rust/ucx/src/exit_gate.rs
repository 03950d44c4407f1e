//! The end of the process, and its forks. When it exits, UCX's libraries destroy what all of UCX uses, whoever is in UCX then:
//! every thread leaves UCX before, and none comes in any more. The child of a fork has UCX's state without its threads.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

/// How long the exit waits for those that are in UCX. What takes longer is to pin several GiB for RDMA.
const PATIENCE: Duration = Duration::from_secs(2);

/// Threads that are in UCX.
static NUM_INSIDE: AtomicUsize = AtomicUsize::new(0);
static IS_EXITING: AtomicBool = AtomicBool::new(false);
static NUM_IN_USE: AtomicUsize = AtomicUsize::new(0);
static IS_FORKED: AtomicBool = AtomicBool::new(false);
static LEAVING: Mutex<()> = Mutex::new(());
static ONE_LEFT: Condvar = Condvar::new();

thread_local! {
    /// Calls of this thread that are in UCX: callbacks call it again.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// This is the thread that ends the process.
    static EXITS: Cell<bool> = const { Cell::new(false) };
}

/// A thread's time in UCX. Where the process exits, no other thread than the one that ends it gets any: it sleeps until then.
pub(crate) struct Inside(PhantomData<*const ()>);

impl Inside {
    pub(crate) fn enter() -> Self {
        let depth = DEPTH.get();
        DEPTH.set(depth + 1);
        if depth == 0 {
            come_in();
        }
        Self(PhantomData)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let depth = DEPTH.get() - 1;
        DEPTH.set(depth);
        if depth == 0 {
            go_out();
        }
    }
}

fn come_in() {
    NUM_INSIDE.fetch_add(1, Ordering::SeqCst);
    if IS_EXITING.load(Ordering::SeqCst) && !EXITS.get() {
        go_out();
        loop {
            std::thread::park();
        }
    }
}

fn go_out() {
    NUM_INSIDE.fetch_sub(1, Ordering::SeqCst);
    if IS_EXITING.load(Ordering::SeqCst) {
        drop(lock());
        ONE_LEFT.notify_all();
    }
}

fn lock() -> MutexGuard<'static, ()> {
    LEAVING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A context's time: until this is dropped, UCX has threads, and descriptors that it polls.
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

/// Whether UCX was in use when this process was forked. Its threads are not here, what it polls is shared, and it knows of
/// neither.
pub(crate) fn is_forked() -> bool {
    IS_FORKED.load(Ordering::SeqCst)
}

/// From now on the exit of the process waits for those that are in UCX.
pub(crate) fn guard() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the function can be called at any time, and this library is not unloaded.
        let at_exit = unsafe { libc::atexit(wait_for_all) };
        // SAFETY: as above.
        let at_fork = unsafe { libc::pthread_atfork(None, None, Some(begin_as_child)) };
        if (at_exit, at_fork) != (0, 0) {
            tracing::warn!(at_exit, at_fork, "exit.unguarded");
        }
    });
}

/// Runs before the libraries' destructors, which are the last to run.
extern "C" fn wait_for_all() {
    EXITS.set(true);
    IS_EXITING.store(true, Ordering::SeqCst);
    let is_somebody_in = |(): &mut ()| NUM_INSIDE.load(Ordering::SeqCst) > own();
    let _ = ONE_LEFT.wait_timeout_while(lock(), PATIENCE, is_somebody_in);
}

/// The child of a fork has none of its parent's other threads.
unsafe extern "C" fn begin_as_child() {
    NUM_INSIDE.store(own(), Ordering::SeqCst);
    IS_FORKED.fetch_or(NUM_IN_USE.load(Ordering::SeqCst) > 0, Ordering::SeqCst);
}

/// What this thread counts in [`NUM_INSIDE`].
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
    /// How a process ends in whose UCX another thread is when UCX's libraries end.
    const NOT_ALONE: i32 = 71;

    static IS_IN: AtomicBool = AtomicBool::new(false);

    /// Stands for the libraries' destructors: having been asked for before, it runs after what is tested.
    extern "C" fn end_libraries() {
        let begun = Instant::now();
        while begun.elapsed() < STAY {
            if IS_IN.load(Ordering::SeqCst) {
                // SAFETY: it only ends the process.
                unsafe { libc::_exit(NOT_ALONE) };
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(Inside::enter()); // of the thread that exits
    }

    /// A thread's call, and one within it.
    fn call(time: Duration) {
        let inside = Inside::enter();
        IS_IN.store(true, Ordering::SeqCst);
        std::thread::sleep(time);
        drop(Inside::enter());
        IS_IN.store(false, Ordering::SeqCst);
        drop(inside);
    }

    fn wait_for(is_in: bool) {
        while IS_IN.load(Ordering::SeqCst) != is_in {
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
        guard();
        match role.as_str() {
            "call" => drop(std::thread::spawn(|| call(STAY))),
            "calls" => drop(std::thread::spawn(|| {
                loop {
                    call(Duration::from_millis(20));
                }
            })),
            "fork" => {
                drop(std::thread::spawn(|| call(Duration::from_secs(60))));
                wait_for(true);
                fork();
                IS_IN.store(false, Ordering::SeqCst);
            }
            other => panic!("no role {other}"),
        }
        if role != "fork" {
            wait_for(true);
        }
        std::process::exit(0);
    }

    /// Goes on as the child; the parent ends as it does.
    fn fork() {
        // SAFETY: the child goes on with this thread only, and calls nothing that needs another.
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
            // LeakSanitizer finds what the parent's threads hold, whom a forked child does not have.
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
    fn no_thread_comes_in_once_the_process_exits() {
        let (status, _) = exit_as("calls");
        assert_eq!(status.code(), Some(0), "{status}");
    }

    #[test]
    fn the_child_of_a_fork_does_not_wait_for_threads_of_its_parent() {
        let (status, taken) = exit_as("fork");
        assert_eq!(status.code(), Some(0), "{status}");
        assert!(taken < STAY + PATIENCE, "{taken:?}");
    }
}
