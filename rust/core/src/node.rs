//! The one thread that owns a listener, its links and, where there is a data plane, the UCX worker. What runs on
//! top (pipe, blocks, control) is a [`Service`]: events in, calls on [`Io`] out, all on this thread, no locks.
//!
//! The thread sleeps in epoll on {wake-up eventfd, listener, links, UCX worker} whenever UCX has nothing to do.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvpipe_ucx::{AmData, Context, Event, Status};
use rustix::event::{EventfdFlags, epoll};

use crate::data::DataPlane;
use crate::error::{Error, Result};
use crate::handshake::SessionId;
use crate::identity::Identity;
use crate::link::{Incoming, Link, Timing};
use crate::work::timespec;

/// Longest sleep. UCX has lost wake-ups in the past (NIXL keeps a finite poll for the same reason).
const LONGEST_SLEEP: Duration = Duration::from_secs(1);
/// How long the thread looks for more before it sleeps: a hop through epoll costs about 25 us.
const SPIN: Duration = Duration::from_micros(30);
/// Handshakes under way at once; more connections wait in the listener's backlog.
const HANDSHAKES_CAP: usize = 64;

const WAKE: u64 = 0;
const LISTENER: u64 = 1;
const UCX: u64 = 2;
const FIRST_LINK: u64 = 16;

/// Names a link of a node; never reused.
pub type LinkId = u64;

/// What runs on a node. All calls come from the node's thread.
pub trait Service {
    /// What other threads ask of it.
    type Command: Send + 'static;

    /// Another thread asks.
    fn command(&mut self, io: &mut Io, command: Self::Command);
    /// May a peer that has proved the token connect? The reason goes to the peer.
    fn accept(&mut self, _peer: &Identity) -> std::result::Result<(), String> {
        Ok(())
    }
    /// A session is established.
    fn link_up(&mut self, io: &mut Io, link: LinkId, peer: &Identity);
    /// A link is gone, or could never be made. It was removed before this call.
    fn link_down(&mut self, io: &mut Io, link: LinkId, error: Error);
    /// An application frame came over TCP. An error closes the link.
    fn frame(&mut self, io: &mut Io, link: LinkId, frame: &[u8]) -> Result<()>;
    /// An active message came over UCX; `header` starts after the session id. An error closes the link.
    fn message(
        &mut self,
        _io: &mut Io,
        _link: LinkId,
        _header: &[u8],
        _data: AmData,
    ) -> Result<()> {
        Err(Error::protocol(
            "an active message for a service without data plane",
        ))
    }
    /// A UCX operation has ended.
    fn done(&mut self, _io: &mut Io, _token: u64, _result: std::result::Result<(), Status>) {}
    /// Looks at deadlines; tells when to come back.
    fn timer(&mut self, _io: &mut Io) -> Option<Instant> {
        None
    }
    /// Something to log for people; at most once per lifecycle event.
    fn log(&mut self, _text: String) {}
    /// The node stops.
    fn stop(&mut self, _io: &mut Io) {}
}

/// What a node is made from.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Where to accept peers; `None` only connects.
    pub listen: Option<SocketAddr>,
    /// The shared secret; empty: none.
    pub token: Vec<u8>,
    /// Who this side is.
    pub identity: Identity,
    /// How to load UCX; `None` for a node without data plane.
    pub ucx: Option<kvpipe_ucx::Search>,
    /// The address whose interface UCX uses.
    pub local: IpAddr,
    /// Deadlines of links.
    pub timing: Timing,
}

enum Control<C> {
    Command(C),
    Stop,
}

/// A running node, as other threads see it. Dropping it stops the thread.
#[derive(Debug)]
pub struct Node<C> {
    commands: Mutex<Sender<Control<C>>>,
    wake: Arc<OwnedFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
    address: Option<SocketAddr>,
    process: u32,
}

impl<C: Send + 'static> Node<C> {
    /// Binds, loads UCX where wanted, and starts the thread.
    ///
    /// # Errors
    /// The address cannot be bound (`Config`), UCX is missing (`Unavailable`).
    pub fn spawn<S>(config: NodeConfig, make: impl FnOnce() -> S + Send + 'static) -> Result<Self>
    where
        S: Service<Command = C> + 'static,
    {
        let listener = config.listen.map(bind).transpose()?;
        let address = listener
            .as_ref()
            .and_then(|listener| listener.local_addr().ok());
        let context = config
            .ucx
            .as_ref()
            .map(|search| DataPlane::context(search, config.local))
            .transpose()?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::Exhausted(format!("no eventfd: {error}")))?;
        let wake = Arc::new(wake);
        let (commands, receiver) = channel();
        let (started, has_started) = channel();
        let wake_in_thread = Arc::clone(&wake);
        let thread = std::thread::Builder::new()
            .name("kvpipe".to_owned())
            .spawn(
                move || match Io::new(config, listener, context, wake_in_thread) {
                    Ok(io) => {
                        let _ = started.send(Ok(()));
                        Loop {
                            io,
                            service: make(),
                            commands: receiver,
                        }
                        .run();
                    }
                    Err(error) => {
                        let _ = started.send(Err(error));
                    }
                },
            )
            .map_err(|error| Error::Exhausted(format!("no thread: {error}")))?;
        has_started
            .recv()
            .map_err(|_| Error::Closed("the node's thread ended at its start".to_owned()))??;
        Ok(Self {
            commands: Mutex::new(commands),
            wake,
            thread: Mutex::new(Some(thread)),
            address,
            process: std::process::id(),
        })
    }

    /// The address that peers connect to.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Hands a command to the thread.
    ///
    /// # Errors
    /// `Closed` when the node has stopped or the process is a fork of the one that made it.
    pub fn send(&self, command: C) -> Result<()> {
        if std::process::id() != self.process {
            return Err(Error::Closed(
                "this object was made before fork(); make a new one in the child process"
                    .to_owned(),
            ));
        }
        let commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        commands
            .send(Control::Command(command))
            .map_err(|_| Error::Closed("already closed".to_owned()))?;
        signal(&self.wake);
        Ok(())
    }

    /// Stops the thread and waits for its end; what is under way ends as closed. Idempotent.
    pub fn stop(&self) {
        if std::process::id() != self.process {
            return;
        }
        let _ = self
            .commands
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .send(Control::Stop);
        signal(&self.wake);
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl<C> Drop for Node<C> {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            return;
        }
        let _ = self
            .commands
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .send(Control::Stop);
        signal(&self.wake);
        if let Some(thread) = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            let _ = thread.join();
        }
    }
}

fn signal(wake: &OwnedFd) {
    // Fails only when the counter is full, and then the thread has been woken anyway.
    let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
}

fn bind(address: SocketAddr) -> Result<TcpListener> {
    let cannot = |error| Error::Config(format!("cannot listen on {address}: {error}"));
    let listener = TcpListener::bind(address).map_err(cannot)?;
    listener.set_nonblocking(true).map_err(cannot)?;
    Ok(listener)
}

/// What a service may do.
pub struct Io {
    /// The time of this round.
    pub now: Instant,
    config: NodeConfig,
    epoll: OwnedFd,
    wake: Arc<OwnedFd>,
    listener: Option<TcpListener>,
    links: HashMap<LinkId, Link>,
    next_link: LinkId,
    connected: (Sender<Connected>, Receiver<Connected>),
    pub(crate) data: Option<DataPlane>,
    failed: Vec<(LinkId, Error)>,
    next_token: u64,
}

struct Connected {
    link: LinkId,
    peer: String,
    stream: std::result::Result<TcpStream, String>,
}

impl Io {
    fn new(
        mut config: NodeConfig,
        listener: Option<TcpListener>,
        context: Option<Arc<Context>>,
        wake: Arc<OwnedFd>,
    ) -> Result<Self> {
        let no_epoll = |error| Error::Exhausted(format!("no epoll: {error}"));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(no_epoll)?;
        watch(&epoll, wake.as_fd(), WAKE, false).map_err(no_epoll)?;
        if let Some(listener) = &listener {
            watch(&epoll, listener.as_fd(), LISTENER, false).map_err(no_epoll)?;
        }
        let data = context.map(|context| DataPlane::new(context)).transpose()?;
        if let Some(data) = &data {
            watch(&epoll, data.worker.event_fd(), UCX, false).map_err(no_epoll)?;
            config.identity.ucx_address = data.worker.address()?;
        }
        Ok(Self {
            now: Instant::now(),
            config,
            epoll,
            wake,
            listener,
            links: HashMap::new(),
            next_link: FIRST_LINK,
            connected: channel(),
            data,
            failed: Vec::new(),
            next_token: 0,
        })
    }

    /// Who this side is.
    pub fn identity(&self) -> &Identity {
        &self.config.identity
    }

    /// A number that has not been used on this node, for an operation or a transfer.
    pub fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    /// Begins to connect; `link_up` or `link_down` follows. Resolving and connecting happen on a thread of
    /// their own, because both may block.
    pub fn connect(&mut self, address: &str) -> LinkId {
        let link = self.next_link;
        self.next_link += 1;
        let (peer, timeout) = (address.to_owned(), self.config.timing.handshake);
        let (sender, wake) = (self.connected.0.clone(), Arc::clone(&self.wake));
        let spawned = std::thread::Builder::new()
            .name("kvpipe-connect".to_owned())
            .spawn(move || {
                let stream = open(&peer, timeout);
                let _ = sender.send(Connected { link, peer, stream });
                signal(&wake);
            });
        if let Err(error) = spawned {
            self.failed
                .push((link, Error::Exhausted(format!("no thread: {error}"))));
        }
        link
    }

    /// Sends an application frame. A link that cannot take it is lost, which `link_down` tells.
    pub fn send(&mut self, link: LinkId, frame: &[u8]) {
        let Some(connection) = self.links.get_mut(&link) else {
            return;
        };
        match connection.send(frame) {
            Ok(()) => self.watch_writes(link),
            Err(error) => self.fail(link, error),
        }
    }

    /// Closes a link on purpose; `link_down` follows with this reason on both sides.
    pub fn close(&mut self, link: LinkId, reason: &str) {
        if let Some(connection) = self.links.get_mut(&link) {
            connection.say_goodbye(reason);
        }
        self.fail(link, Error::Closed(reason.to_owned()));
    }

    /// Ends a link with an error; `link_down` follows.
    pub fn fail(&mut self, link: LinkId, error: Error) {
        self.failed.push((link, error));
    }

    /// The address of a link's peer.
    pub fn peer(&self, link: LinkId) -> String {
        self.links
            .get(&link)
            .map_or_else(|| "unknown".to_owned(), |link| link.peer.clone())
    }

    /// Whether a session is established on this link.
    pub fn is_up(&self, link: LinkId) -> bool {
        self.links.get(&link).is_some_and(Link::is_up)
    }

    fn watch_writes(&mut self, link: LinkId) {
        let Some(connection) = self.links.get(&link) else {
            return;
        };
        let flags = flags(connection.wants_write());
        let _ = epoll::modify(
            &self.epoll,
            connection.fd(),
            epoll::EventData::new_u64(link),
            flags,
        );
    }

    fn add(
        &mut self,
        link: LinkId,
        stream: TcpStream,
        peer: String,
        is_accepted: bool,
    ) -> Result<()> {
        let token = &self.config.token;
        let connection = Link::new(
            stream,
            peer,
            is_accepted,
            token,
            self.config.timing,
            self.now,
        )?;
        watch(&self.epoll, connection.fd(), link, connection.wants_write())
            .map_err(|error| Error::Exhausted(format!("epoll: {error}")))?;
        self.links.insert(link, connection);
        Ok(())
    }
}

fn flags(wants_write: bool) -> epoll::EventFlags {
    if wants_write {
        epoll::EventFlags::IN | epoll::EventFlags::OUT
    } else {
        epoll::EventFlags::IN
    }
}

fn watch(
    epoll: &OwnedFd,
    fd: BorrowedFd<'_>,
    key: u64,
    wants_write: bool,
) -> rustix::io::Result<()> {
    epoll::add(
        epoll,
        fd,
        epoll::EventData::new_u64(key),
        flags(wants_write),
    )
}

fn open(address: &str, timeout: Duration) -> std::result::Result<TcpStream, String> {
    let candidates = address
        .to_socket_addrs()
        .map_err(|error| error.to_string())?;
    let mut last = "the name has no address".to_owned();
    for candidate in candidates {
        match TcpStream::connect_timeout(&candidate, timeout) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error.to_string(),
        }
    }
    Err(last)
}

struct Loop<S: Service> {
    io: Io,
    service: S,
    commands: Receiver<Control<S::Command>>,
}

impl<S: Service> Loop<S> {
    fn run(mut self) {
        let may_spin = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 2);
        let mut idle_since = Instant::now();
        loop {
            self.io.now = Instant::now();
            if !self.take_commands() {
                break;
            }
            let progressed = self.progress();
            self.report_failures();
            let wake_at = self.tick();
            self.report_failures();
            if progressed {
                idle_since = Instant::now();
            }
            let spin = may_spin && self.io.data.is_some() && idle_since.elapsed() < SPIN;
            if !progressed && self.may_sleep() {
                self.sleep(if spin { self.io.now } else { wake_at });
            }
        }
        self.service.stop(&mut self.io);
        for link in self.io.links.values_mut() {
            link.say_goodbye("the process closed it");
        }
    }

    fn take_commands(&mut self) -> bool {
        loop {
            match self.commands.try_recv() {
                Ok(Control::Command(command)) => self.service.command(&mut self.io, command),
                Ok(Control::Stop) | Err(std::sync::mpsc::TryRecvError::Disconnected) => {
                    return false;
                }
                Err(std::sync::mpsc::TryRecvError::Empty) => break,
            }
        }
        while let Ok(connected) = self.io.connected.1.try_recv() {
            self.take_connected(connected);
        }
        true
    }

    fn take_connected(&mut self, Connected { link, peer, stream }: Connected) {
        let added = match stream {
            Ok(stream) => self.io.add(link, stream, peer, false),
            Err(reason) => Err(Error::Connect(format!(
                "cannot reach {peer}: {reason}; is a kvpipe peer listening there?"
            ))),
        };
        if let Err(error) = added {
            self.io.fail(link, error);
        }
    }

    /// Lets UCX work; whether anything happened.
    fn progress(&mut self) -> bool {
        let Some(data) = &self.io.data else {
            return false;
        };
        let mut progressed = data.worker.progress() > 0;
        while let Some(event) = self
            .io
            .data
            .as_ref()
            .and_then(|data| data.worker.next_event())
        {
            progressed = true;
            self.take_event(event);
        }
        progressed
    }

    fn take_event(&mut self, event: Event) {
        match event {
            Event::Message { header, data } => self.take_message(&header, data),
            Event::Done { token: 0, .. } => {}
            Event::Done { token, result } => self.service.done(&mut self.io, token, result),
            Event::EndpointFailed { endpoint, status } => {
                if let Some(link) = self
                    .io
                    .data
                    .as_ref()
                    .and_then(|data| data.link_of(endpoint))
                {
                    let peer = self.io.peer(link);
                    self.io.fail(link, Error::lost(&peer, status));
                }
            }
            Event::Closed { endpoint } => {
                if let Some(data) = &mut self.io.data {
                    data.forget(endpoint);
                }
            }
        }
    }

    fn take_message(&mut self, header: &[u8], data: AmData) {
        let Some((session, header)) = header.split_first_chunk::<16>() else {
            return;
        };
        // Without a live session nothing is said about the message, not even that it was wrong.
        let Some(link) = self
            .io
            .data
            .as_ref()
            .and_then(|plane| plane.link_of_session(session))
        else {
            return;
        };
        if let Err(error) = self.service.message(&mut self.io, link, header, data) {
            self.io.fail(link, error);
        }
    }

    fn report_failures(&mut self) {
        while let Some((link, error)) = self.io.failed.pop() {
            let connection = self.io.links.remove(&link);
            if let Some(data) = &mut self.io.data {
                data.close(link);
            }
            if let Some(connection) = &connection {
                let _ = epoll::delete(&self.io.epoll, connection.fd());
                if connection.is_accepted && !connection.is_up() {
                    self.service
                        .log(format!("refused {}: {error}", connection.peer));
                    continue;
                }
            }
            self.service.link_down(&mut self.io, link, error);
        }
    }

    fn tick(&mut self) -> Instant {
        let mut wake_at = self.io.now + LONGEST_SLEEP;
        if let Some(at) = self.service.timer(&mut self.io) {
            wake_at = wake_at.min(at);
        }
        let mut failed = Vec::new();
        for (id, link) in &mut self.io.links {
            match link.tick(self.io.now) {
                Ok(at) => wake_at = wake_at.min(at),
                Err(error) => failed.push((*id, error)),
            }
        }
        self.io.failed.extend(failed);
        wake_at
    }

    fn may_sleep(&self) -> bool {
        let Some(data) = &self.io.data else {
            return true;
        };
        match data.worker.arm() {
            Ok(armed) => armed,
            Err(status) => {
                tracing::error!("ucp_worker_arm: {status}");
                true
            }
        }
    }

    fn sleep(&mut self, until: Instant) {
        let mut ready = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 64];
        let timeout = timespec(until.saturating_duration_since(Instant::now()));
        let count = epoll::wait(&self.io.epoll, &mut ready[..], Some(&timeout)).unwrap_or(0);
        self.io.now = Instant::now();
        for event in &ready[..count] {
            match event.data.u64() {
                WAKE => {
                    let _ = rustix::io::read(&*self.io.wake, &mut [0u8; 8]);
                }
                LISTENER => self.accept(),
                UCX => {}
                link => self.serve(link, event.flags),
            }
        }
        self.report_failures();
    }

    fn accept(&mut self) {
        let under_way = self.io.links.values().filter(|link| !link.is_up()).count();
        for _ in under_way..HANDSHAKES_CAP {
            let Some(Ok((stream, peer))) = self.io.listener.as_ref().map(TcpListener::accept)
            else {
                return;
            };
            let link = self.io.next_link;
            self.io.next_link += 1;
            if let Err(error) = self.io.add(link, stream, peer.to_string(), true) {
                self.service.log(format!("refused {peer}: {error}"));
            }
        }
    }

    fn serve(&mut self, id: LinkId, flags: epoll::EventFlags) {
        let Some(link) = self.io.links.get_mut(&id) else {
            return;
        };
        if flags.contains(epoll::EventFlags::OUT)
            && let Err(error) = link.flush()
        {
            self.io.fail(id, error);
            return;
        }
        let (incoming, ended) = link.receive(&self.io.config.identity, self.io.now, |peer| {
            self.service.accept(peer)
        });
        for item in incoming {
            self.take_incoming(id, item);
        }
        if let Some(error) = ended {
            self.io.fail(id, error);
        }
        self.io.watch_writes(id);
    }

    fn take_incoming(&mut self, link: LinkId, item: Incoming) {
        let taken = match item {
            Incoming::Admitted(session) => self.admit(link, session),
            Incoming::Ready => {
                self.ready(link);
                Ok(())
            }
            Incoming::Frame(frame) => self.service.frame(&mut self.io, link, &frame),
        };
        if let Err(error) = taken {
            self.io.fail(link, error);
        }
    }

    fn admit(&mut self, link: LinkId, session: SessionId) -> Result<()> {
        let Some(peer) = self
            .io
            .links
            .get(&link)
            .and_then(|link| link.identity.as_ref())
        else {
            return Ok(());
        };
        let Some(data) = &mut self.io.data else {
            return Ok(());
        };
        data.open(link, session, &peer.ucx_address)
    }

    fn ready(&mut self, link: LinkId) {
        let peer = self
            .io
            .links
            .get_mut(&link)
            .and_then(|link| link.identity.take());
        if let Some(peer) = peer {
            self.service.link_up(&mut self.io, link, &peer);
        }
    }
}

impl std::fmt::Debug for Io {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Io")
            .field("links", &self.links.len())
            .finish_non_exhaustive()
    }
}
