//! A reactor owns a listener, its sessions and, where there is a data plane, the UCX worker. What runs on top (pipe, blocks,
//! control) is a [`Service`]: events in, calls on [`ReactorContext`] out, on one thread at a time, no locks.
//!
//! A reactor has a thread that runs it, and sleeps in epoll on {wake-up eventfd, listener, sessions, UCX worker} whenever UCX
//! has nothing to do. A caller that waits for a [`Work`] of the reactor runs it meanwhile itself (`driver.rs`).

mod commands;
mod connect;
mod driver;
mod io;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod manual;
#[cfg(test)]
mod manual_context;
mod pending_reads;
mod run;

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvpipe_ucx::{AmData, AssertSend, Buffer, Status};
use rustix::event::EventfdFlags;

use crate::error::{Error, Result};
pub use crate::ids::SessionKey;
use crate::net::identity::Identity;
use crate::process::{Process, Thread};
use crate::session::connection::SessionTimeouts;
use crate::transport::{Context, Memory, Transport};
use crate::work::{Completer, Then, Work, work};
use commands::{CommandSender, ReactorCommand};
use driver::{Driver, DriverHandle};
use run::ReactorCore;

pub use io::ReactorContext;
pub(crate) use pending_reads::PendingReads;

/// What is said to who asks for something once the reactor has ended.
pub(crate) const ENDED: &str = "already closed";

/// What runs on a reactor. All calls come from the thread that runs the reactor, one at a time; it is not always the same.
/// So a service keeps nothing in thread-locals, and gives nothing away that shares with it without atomics.
pub trait Service {
    /// What other threads ask of it.
    type Command: Send + 'static;

    /// Another thread asks. What is asked for while the reactor stops comes right before [`stop`](Self::stop).
    fn command(&mut self, cx: &mut ReactorContext, command: Self::Command);
    /// May a peer that has proved the token connect? The reason goes to the peer. `session_up` follows, or `dismissed`.
    fn accept(&mut self, _link: SessionKey, _peer: &Identity) -> std::result::Result<(), String> {
        Ok(())
    }
    /// An accepted session ended before its session was established. It may not even have got as far as `accept`.
    fn dismissed(&mut self, _link: SessionKey) {}
    /// A session is established.
    fn session_up(&mut self, cx: &mut ReactorContext, session: SessionKey, peer: &Identity);
    /// A session is gone, or could never be made; once for each session that was up or asked for. It was removed before
    /// this call.
    fn session_down(&mut self, cx: &mut ReactorContext, session: SessionKey, error: Error);
    /// An application frame came over TCP. An error closes the session.
    fn frame(&mut self, cx: &mut ReactorContext, session: SessionKey, frame: &[u8]) -> Result<()>;
    /// An active message came over UCX; `header` starts after the session id. An error closes the session.
    fn message(
        &mut self,
        _io: &mut ReactorContext,
        _link: SessionKey,
        _header: &[u8],
        _data: AmData,
    ) -> Result<()> {
        Err(Error::protocol(
            "an active message for a service without data plane",
        ))
    }
    /// A UCX operation has ended.
    fn done(
        &mut self,
        _io: &mut ReactorContext,
        _token: u64,
        _result: std::result::Result<(), Status>,
    ) {
    }
    /// Does a slice of what takes long, between two looks at sockets and UCX; whether more of it waits.
    fn work(&mut self, _io: &mut ReactorContext) -> bool {
        false
    }
    /// Whether there is work that has come since.
    fn has_work(&self) -> bool {
        false
    }
    /// Looks at deadlines; tells when to come back.
    fn timer(&mut self, _io: &mut ReactorContext) -> Option<Instant> {
        None
    }
    /// Something to log for people; at most once per lifecycle event.
    fn log(&mut self, _text: String) {}
    /// The reactor is about to stop: what is said now still leaves.
    fn closing(&mut self, _io: &mut ReactorContext) {}
    /// The reactor stops. Its data plane has ended before this call: nothing reads or writes registered memory, but for what
    /// [`ReactorContext::closed`] tells.
    fn stop(&mut self, _io: &mut ReactorContext) {}
}

/// What a reactor is made from.
#[derive(Debug, Clone)]
pub struct ReactorConfig {
    /// Where to accept peers; `None` only connects.
    pub listen: Option<SocketAddr>,
    /// The shared secret; empty: none.
    pub token: Vec<u8>,
    /// Who this side is.
    pub identity: Identity,
    /// What moves bytes; `None` for a reactor without data plane.
    pub transport: Option<Transport>,
    /// The address whose interface it uses.
    pub local: IpAddr,
    /// Deadlines of sessions.
    pub timeouts: SessionTimeouts,
    /// How long the thread looks for more before it sleeps, where there is a data plane.
    pub busy_poll: Duration,
}

/// Connections that may wait to be taken, as far as the system allows. Whoever finds no room asks again after a second, then
/// after two more.
const BACKLOG: i32 = 4096;

/// The default of [`ReactorConfig::busy_poll`]: a hop through epoll costs about 25 us, but on two cores a thread that
/// looks for more keeps the others from making it.
pub fn default_busy_poll() -> Duration {
    let has_more_than_two = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 2);
    Duration::from_micros(if has_more_than_two { 30 } else { 0 })
}

/// A running reactor, as other threads see it. Dropping it stops the thread.
#[derive(Debug)]
pub struct Reactor<C> {
    commands: CommandSender<C>,
    driver: Arc<dyn DriverHandle>,
    thread: Mutex<Option<Thread>>,
    address: Option<SocketAddr>,
    /// Where its data plane registers memory; it ends with the data plane.
    registrar: Weak<Context>,
    pending_reads: PendingReads,
    process: Process,
}

impl<C: Send + 'static> Reactor<C> {
    /// Binds, loads UCX where wanted, and starts the thread.
    ///
    /// # Errors
    /// The address cannot be bound (`Config`), UCX is missing (`Unavailable`).
    pub fn spawn<S>(
        config: ReactorConfig,
        make: impl FnOnce() -> S + Send + 'static,
    ) -> Result<Self>
    where
        S: Service<Command = C> + 'static,
    {
        let listener = config.listen.map(bind).transpose()?;
        let address = listener
            .as_ref()
            .and_then(|listener| listener.local_addr().ok());
        let context = config
            .transport
            .as_ref()
            .map(|transport| transport.open(config.local).map(Arc::new))
            .transpose()?;
        let registrar = context.as_ref().map(Arc::downgrade).unwrap_or_default();
        let (commands, taken) = commands::channel();
        let wake = Arc::new(eventfd()?);
        let cx = ReactorContext::new(config, listener, context, Arc::clone(&wake))?;
        let (epoll, pending_reads) = (Arc::clone(&cx.epoll), cx.pending_reads.clone());
        #[expect(unsafe_code, reason = "the one promise that the compiler cannot check")]
        // SAFETY: the worker, its keys, its placer and where that places are reachable through the loop only: `io` was made
        // here, and `make`, being Send, brings nothing that shares without atomics. Services keep to what `Service` demands.
        let reactor = unsafe { AssertSend::new(ReactorCore::new(cx, make(), taken)) };
        let driver = Arc::new(Driver::new(reactor, epoll, wake, eventfd()?));
        #[cfg(any(test, feature = "fuzzing"))]
        if manual::is_on() {
            return Ok(Self {
                commands,
                driver,
                thread: Mutex::default(),
                address,
                registrar,
                pending_reads,
                process: Process::this(),
            });
        }
        let in_thread = Arc::clone(&driver);
        let thread = Thread::spawn("kvpipe", move || in_thread.run())
            .map_err(|error| Error::Exhausted(format!("no thread: {error}")))?;
        Ok(Self {
            commands,
            driver,
            thread: Mutex::new(Some(thread)),
            address,
            registrar,
            pending_reads,
            process: Process::this(),
        })
    }

    /// The address that peers connect to.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Registers memory with the data plane, on the caller's thread: where a device pins it, the reactor goes on meanwhile.
    ///
    /// # Errors
    /// `Unavailable`: UCX cannot reach such memory. `Closed`: the reactor has ended, or this process is a fork.
    pub(crate) fn register(&self, buffer: Buffer) -> Result<Arc<Memory>> {
        self.process.check()?;
        let ended = || Error::Closed(ENDED.to_owned());
        self.registrar.upgrade().ok_or_else(ended)?.register(buffer)
    }

    /// A work of this reactor: who waits for it runs the reactor.
    pub(crate) fn work<T>(&self) -> (Work<T>, Completer<T>) {
        let (work, completer) = work();
        let driver = Arc::clone(&self.driver);
        (work.driven_by(driver), completer)
    }

    /// Hands a command to the reactor, which takes it, be it only to end it when the reactor ends.
    ///
    /// # Errors
    /// `Closed` when the reactor has ended or the process is a fork of the one that made it.
    pub fn send(&self, command: C) -> Result<()> {
        self.hand(command, Then::GoOn)
    }

    /// As [`send`](Self::send), by a caller of whom it is known what it does next.
    pub(crate) fn hand(&self, command: C, then: Then) -> Result<()> {
        self.process.check()?;
        self.commands.send(ReactorCommand::Command(command))?;
        if then == Then::GoOn {
            self.driver.notify();
        }
        Ok(())
    }
}

/// Wakes a reactor, which then calls [`Service::work`].
#[derive(Debug, Clone)]
pub(crate) struct Waker(Arc<dyn DriverHandle>);

impl Waker {
    pub(crate) fn wake(&self) {
        self.0.notify();
    }
}

impl<C> Reactor<C> {
    pub(crate) fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.driver))
    }

    /// Reads that UCX has not ended although this reactor has.
    pub(crate) fn pending_reads(&self) -> &PendingReads {
        &self.pending_reads
    }

    /// Stops the reactor and waits for its end, as does whoever stops it once more meanwhile; what is under way ends as closed.
    /// Called by what the reactor itself does, it returns at once: the reactor ends after this round.
    pub fn stop(&self) {
        if self.process.check().is_err() {
            return;
        }
        let _ = self.commands.send(ReactorCommand::Stop);
        self.driver.notify();
        if self.driver.is_run_here() {
            return;
        }
        // Held until the thread has ended, so that everybody else waits for that too.
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
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
            self.driver.let_go();
        }
    }
}

fn eventfd() -> Result<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|error| Error::Exhausted(format!("no eventfd: {error}")))
}

fn signal(wake: &OwnedFd) {
    // Fails only when the counter is full, and then the thread has been woken anyway.
    let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
}

fn bind(address: SocketAddr) -> Result<TcpListener> {
    let cannot = |error| Error::Config(format!("cannot listen on {address}: {error}"));
    let listener = TcpListener::bind(address).map_err(cannot)?;
    listener.set_nonblocking(true).map_err(cannot)?;
    rustix::net::listen(&listener, BACKLOG).map_err(|error| cannot(error.into()))?;
    Ok(listener)
}

#[cfg(test)]
mod tests;
