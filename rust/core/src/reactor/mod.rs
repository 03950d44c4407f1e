//! The event loop: descriptors, UCX, deadlines and commands of other threads, on one thread at a time.
//!
//! A [`Reactor`] drives one [`EventHandler`]. Its thread sleeps in epoll while UCX has nothing to do. A caller that waits
//! for a [`Work`] of the reactor runs it meanwhile itself (`driver.rs`). The reactor knows nothing of sessions.

mod commands;
mod connect;
mod driver;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod manual;
mod pending_reads;
mod poller;
mod reactor_core;
mod timers;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use kvpipe_ucx::{AssertSend, Buffer, Event};

use crate::error::{Error, Result};
use crate::process::{Process, Thread};
use crate::sync::lock;
use crate::transport::{Context, Memory, Worker};
use crate::work::{Completer, Then, Work, work};
use commands::{CommandSender, ReactorCommand};
use driver::{Driver, DriverHandle};

pub(crate) use commands::CommandReceiver;
pub(crate) use connect::{ConnectFailure, Connected, Connector};
pub(crate) use pending_reads::PendingReads;
pub(crate) use poller::{FIRST_TOKEN, Poller, Token};
#[cfg(test)]
pub(crate) use reactor_core::Next;
pub(crate) use reactor_core::ReactorCore;
pub(crate) use timers::Timers;

/// The error of calls on a reactor that has ended.
pub(crate) fn ended() -> Error {
    Error::Closed("already closed".to_owned())
}

/// The service side of a reactor. All calls come from the thread that runs the reactor, one at a time; it is not always
/// the same thread, so that a handler uses no thread-locals and shares nothing with other threads without atomics.
pub(crate) trait EventHandler {
    /// The UCX worker, while there is a data plane.
    fn worker(&self) -> Option<&Worker>;
    /// Sets the time of the calls that follow.
    fn set_now(&mut self, now: Instant);
    /// Handles what other threads have queued, until a command to stop. The handler calls this itself between receiving
    /// bytes and acting on them: what a thread asked for before it made a peer speak comes first.
    fn drain_commands(&mut self);
    /// True if there was a command to stop.
    fn is_stopping(&self) -> bool;
    /// A descriptor of the handler is ready.
    fn handle_readiness(&mut self, token: Token);
    /// The UCX worker reports something.
    fn handle_ucx_event(&mut self, event: Event);
    /// Runs a slice of long work; whether more of it waits.
    fn poll(&mut self) -> bool;
    /// True if [`poll`](Self::poll) has something to do that has come since.
    fn has_work(&self) -> bool;
    /// Handles the deadlines that have passed, and returns the next one.
    fn expire(&mut self) -> Option<Instant>;
    /// True if a failure waits for [`report_failures`](Self::report_failures).
    fn has_failures(&self) -> bool;
    /// Reports failures, each once.
    fn report_failures(&mut self);
    /// The reactor stops: sends the last messages, and ends the data plane, then everything that is under way.
    fn end(self);
    /// Sockets that are registered.
    #[cfg(any(test, feature = "fuzzing"))]
    fn num_sessions(&self) -> usize;
    /// Sizes of its maps and queues.
    #[cfg(test)]
    fn sizes(&self) -> manual::Sizes;
}

/// The default time that a reactor polls before it sleeps: a hop through epoll costs about 25 us, but on two cores a
/// thread that polls keeps the others from making it.
pub fn default_busy_poll() -> Duration {
    let has_more_than_two = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 2);
    Duration::from_micros(if has_more_than_two { 30 } else { 0 })
}

/// A running reactor, as other threads see it. Dropping it stops the reactor.
#[derive(Debug)]
pub(crate) struct Reactor<C> {
    commands: CommandSender<C>,
    driver: Arc<dyn DriverHandle>,
    thread: Mutex<Option<Thread>>,
    address: Option<SocketAddr>,
    registrar: Weak<Context>,
    pending_reads: PendingReads,
    process: Process,
}

impl<C: Send + 'static> Reactor<C> {
    /// Makes the handler and starts the thread, which polls for `busy_poll` before it sleeps.
    /// `address` is the one that peers connect to; `registrar` is where the data plane registers memory.
    ///
    /// # Errors
    /// Those of `make`; `Exhausted`: the system gives no descriptor or thread.
    pub(crate) fn start<H: EventHandler + 'static>(
        busy_poll: Duration,
        address: Option<SocketAddr>,
        registrar: Weak<Context>,
        make: impl FnOnce(Arc<Poller>, CommandReceiver<C>, PendingReads) -> Result<H> + Send + 'static,
    ) -> Result<Self> {
        let (commands, receiver) = commands::channel();
        let (poller, pending_reads) = (Arc::new(Poller::new()?), PendingReads::default());
        let handler = make(Arc::clone(&poller), receiver, pending_reads.clone())?;
        let core = ReactorCore::new(handler, Arc::clone(&poller), busy_poll)?;
        #[expect(unsafe_code, reason = "the one promise that the compiler cannot check")]
        // SAFETY: the worker, its keys and its placer are reachable through the core only: `make`, being Send, brings
        // nothing that shares without atomics. Handlers keep to what `EventHandler` demands.
        let core = unsafe { AssertSend::new(core) };
        let driver = Arc::new(Driver::new(core, poller, pending_reads.clone())?);
        let in_thread = Arc::clone(&driver);
        let start = || Thread::spawn("kvpipe", move || in_thread.run_thread());
        #[cfg(any(test, feature = "fuzzing"))]
        let start = || (!manual::is_on()).then(start).transpose();
        #[cfg(not(any(test, feature = "fuzzing")))]
        let start = || start().map(Some);
        let thread = start()?;
        Ok(Self {
            commands,
            driver,
            thread: Mutex::new(thread),
            address,
            registrar,
            pending_reads,
            process: Process::this(),
        })
    }

    /// The address that peers connect to.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Registers memory with the data plane on the caller's thread: a device may take long to pin it, and the reactor
    /// runs meanwhile.
    ///
    /// # Errors
    /// `Unavailable`: UCX cannot reach such memory. `Closed`: the reactor has ended, or this process is a fork.
    pub(crate) fn register(&self, buffer: Buffer) -> Result<Arc<Memory>> {
        self.process.check()?;
        self.registrar.upgrade().ok_or_else(ended)?.register(buffer)
    }

    /// Makes a work that this reactor completes: a caller that waits for it runs the reactor.
    pub(crate) fn work<T>(&self) -> (Work<T>, Completer<T>) {
        let (work, completer) = work();
        let driver = Arc::clone(&self.driver);
        (work.driven_by(driver), completer)
    }

    /// Queues a command. A reactor handles every command that it has accepted, if only to end it as closed.
    ///
    /// # Errors
    /// `Closed`: the reactor has ended, or this process is a fork of the one that made it.
    pub(crate) fn send(&self, command: C) -> Result<()> {
        self.send_and(command, Then::GoOn)
    }

    /// As [`send`](Self::send), for a caller that may wait for the outcome at once.
    pub(crate) fn send_and(&self, command: C, then: Then) -> Result<()> {
        self.process.check()?;
        self.commands.send(ReactorCommand::Command(command))?;
        if then == Then::GoOn {
            self.driver.notify();
        }
        Ok(())
    }
}

/// Sends commands to a reactor without keeping it running.
#[derive(Debug)]
pub(crate) struct CommandHandle<C> {
    commands: CommandSender<C>,
    waker: Waker,
}

impl<C> CommandHandle<C> {
    /// As [`Reactor::send`].
    pub(crate) fn send(&self, command: C) -> Result<()> {
        self.commands.send(ReactorCommand::Command(command))?;
        self.waker.wake();
        Ok(())
    }
}

/// Wakes a reactor; it then calls `Service::poll`.
#[derive(Debug, Clone)]
pub(crate) struct Waker(Arc<dyn DriverHandle>);

impl Waker {
    pub(crate) fn wake(&self) {
        self.0.notify();
    }
}

impl<C> Reactor<C> {
    pub(crate) fn command_handle(&self) -> CommandHandle<C> {
        CommandHandle {
            commands: self.commands.clone(),
            waker: self.waker(),
        }
    }

    pub(crate) fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.driver))
    }

    /// Reads that UCX has not ended although this reactor has.
    pub(crate) fn pending_reads(&self) -> &PendingReads {
        &self.pending_reads
    }

    /// Stops the reactor and waits until it has ended; what is under way ends as closed. Every caller waits for the end,
    /// but for one that the reactor itself runs: for it the reactor ends after this round.
    pub(crate) fn stop(&self) {
        if self.process.check().is_err() {
            return;
        }
        let _ = self.commands.send(ReactorCommand::Stop);
        self.driver.notify();
        if self.driver.is_run_here() {
            return;
        }
        // Locked until the thread has ended: other callers of `stop` wait here for the same.
        let mut thread = lock(&self.thread);
        if let Some(thread) = thread.take() {
            thread.join();
        }
    }
}

impl<C> Drop for Reactor<C> {
    fn drop(&mut self) {
        self.stop();
        #[cfg(any(test, feature = "fuzzing"))]
        if self.process.check().is_ok() {
            self.driver.drop_core();
        }
    }
}
