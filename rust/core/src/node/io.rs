//! What a service may do with its node: connect, send, close. The data plane's part is in `data.rs`.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use rustix::event::{EventfdFlags, epoll};

use super::unended::UnendedReads;
use super::{LinkId, NodeConfig, connect, signal};
use crate::codec::Writer;
use crate::data::DataPlane;
use crate::error::{Error, Result};
use crate::handshake::HANDSHAKE_FRAME_CAP;
use crate::identity::Identity;
use crate::link::{Link, Timing};
use crate::transport::Context;

pub(super) const WAKE: u64 = 0;
pub(super) const LISTENER: u64 = 1;
pub(super) const UCX: u64 = 2;
const FIRST_LINK: u64 = 16;
/// Links that are gone whose peers are remembered.
const GONE_CAP: usize = 256;

/// What the welcome adds to an identity: type, HMAC, session id.
const WELCOME_OVERHEAD: usize = 1 + 32 + 16;

/// What a service may do.
pub struct Io {
    /// The time of this round.
    pub now: Instant,
    pub(super) config: NodeConfig,
    pub(super) epoll: Arc<OwnedFd>,
    pub(super) wake: Arc<OwnedFd>,
    /// Readable when the node has stopped: threads that connect end then.
    stopped: Arc<OwnedFd>,
    pub(super) listener: Option<TcpListener>,
    pub(super) links: HashMap<LinkId, Link>,
    /// Asked for, without a stream yet: to whom, and until when.
    pub(super) connecting: HashMap<LinkId, (String, Instant)>,
    /// To whom the latest links were that are gone: what was under way may end after its link.
    gone: BTreeMap<LinkId, String>,
    next_link: LinkId,
    pub(super) connected: (Sender<Connected>, Receiver<Connected>),
    pub(crate) data: Option<DataPlane>,
    pub(super) failed: VecDeque<(LinkId, Error)>,
    /// Reads that UCX has not ended although the data plane has.
    pub(crate) unended_reads: UnendedReads,
    next_token: u64,
}

/// The outcome of an attempt to connect.
pub(super) struct Connected {
    pub(super) link: LinkId,
    pub(super) peer: String,
    pub(super) begun: Instant,
    pub(super) stream: std::result::Result<TcpStream, String>,
}

impl Io {
    pub(super) fn new(
        mut config: NodeConfig,
        listener: Option<TcpListener>,
        context: Option<Arc<Context>>,
        wake: Arc<OwnedFd>,
    ) -> Result<Self> {
        let no_epoll = |error| Error::Exhausted(format!("no epoll: {error}"));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(no_epoll)?;
        let stopped = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(no_epoll)?;
        watch(&epoll, wake.as_fd(), WAKE, false).map_err(no_epoll)?;
        if let Some(listener) = &listener {
            watch(&epoll, listener.as_fd(), LISTENER, false).map_err(no_epoll)?;
        }
        let data = context.map(DataPlane::new).transpose()?;
        if let Some(data) = &data {
            watch(&epoll, data.worker.event_fd(), UCX, false).map_err(no_epoll)?;
            config.identity.ucx_address = data.worker.address()?;
        }
        let said = config.identity.write(Writer::default()).finish().len();
        if said + WELCOME_OVERHEAD > HANDSHAKE_FRAME_CAP {
            return Err(Error::Config(format!(
                "engine id and fingerprint have {said} bytes together, at most {} are possible",
                HANDSHAKE_FRAME_CAP - WELCOME_OVERHEAD
            )));
        }
        Ok(Self {
            now: Instant::now(),
            config,
            epoll: Arc::new(epoll),
            wake,
            stopped: Arc::new(stopped),
            listener,
            links: HashMap::new(),
            connecting: HashMap::new(),
            gone: BTreeMap::new(),
            next_link: FIRST_LINK,
            connected: channel(),
            data,
            failed: VecDeque::new(),
            unended_reads: UnendedReads::default(),
            next_token: 0,
        })
    }

    /// Who this side is.
    pub fn identity(&self) -> &Identity {
        &self.config.identity
    }

    /// Deadlines of links.
    pub fn timing(&self) -> Timing {
        self.config.timing
    }

    /// A number that has not been used on this node, for an operation or a transfer.
    pub fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    /// Begins to connect; `link_up` or `link_down` follows.
    pub fn connect(&mut self, address: &str) -> LinkId {
        let link = self.new_link();
        let Timing {
            handshake, begun, ..
        } = self.config.timing;
        let (peer, begun) = (address.to_owned(), begun.unwrap_or(self.now));
        self.connecting
            .insert(link, (peer.clone(), begun + handshake));
        let (sender, wake) = (self.connected.0.clone(), Arc::clone(&self.wake));
        let stopped = Arc::clone(&self.stopped);
        let attempt = move || {
            let stream = connect::open(&peer, begun, handshake, &stopped);
            let _ = sender.send(Connected {
                link,
                peer,
                begun,
                stream,
            });
            signal(&wake);
        };
        #[cfg(feature = "fuzzing")]
        if super::by_hand::is_on() {
            attempt();
            return link;
        }
        let spawned = std::thread::Builder::new()
            .name("kvpipe-connect".to_owned())
            .spawn(attempt);
        if let Err(error) = spawned {
            self.fail(link, Error::Exhausted(format!("no thread: {error}")));
        }
        link
    }

    /// Ends attempts whose thread has not come back in time, as when the resolver hangs; tells when to come back.
    pub(super) fn expire_connecting(&mut self) -> Option<Instant> {
        for (link, (peer, until)) in &self.connecting {
            if *until <= self.now {
                let waited = self.config.timing.handshake;
                let text = format!("cannot reach {peer}: no answer within {waited:?}");
                self.failed.push_back((*link, Error::Connect(text)));
            }
        }
        self.connecting.values().map(|(_, until)| *until).min()
    }

    /// Sends an application frame over an established session; over another it goes nowhere. A link that cannot take
    /// it is lost, which `link_down` tells.
    pub fn send(&mut self, link: LinkId, frame: &[u8]) {
        let Some(connection) = self.links.get_mut(&link) else {
            return;
        };
        if !connection.is_announced {
            return;
        }
        match connection.send(frame) {
            Ok(()) => self.watch_writes(link),
            Err(error) => self.fail(link, error),
        }
    }

    /// Asks the peer of an established session for a sign of life.
    pub(crate) fn ask(&mut self, link: LinkId) {
        let Some(connection) = self.links.get_mut(&link) else {
            return;
        };
        match connection.ask() {
            Ok(()) => self.watch_writes(link),
            Err(error) => self.fail(link, error),
        }
    }

    /// When something of the peer came last over its connection.
    pub(crate) fn heard(&self, link: LinkId) -> Option<Instant> {
        self.links.get(&link).map(|link| link.heard)
    }

    /// Closes a link on purpose; `link_down` follows with this reason on both sides.
    pub fn close(&mut self, link: LinkId, reason: &str) {
        self.fail(link, Error::Closed(reason.to_owned()));
    }

    /// Ends a link with an error; `link_down` follows. Of several errors of a link the first counts.
    pub fn fail(&mut self, link: LinkId, error: Error) {
        self.failed.push_back((link, error));
    }

    /// Whether a link's end is about to be reported.
    pub(crate) fn has_failed(&self, link: LinkId) -> bool {
        self.failed.iter().any(|(failed, _)| *failed == link)
    }

    /// Whether the peer still lends its memory: asked when what is in it has come, which else proves nothing.
    pub(crate) fn check_lender(&self, link: LinkId) -> Result<()> {
        if self.links.get(&link).is_some_and(Link::is_held) {
            return Ok(());
        }
        let reason = "it closed before what it lent had come";
        Err(Error::lost(&self.peer(link), reason))
    }

    /// The error of what the node's end has ended: `reason`, and what is to be known of memory that was read into.
    pub(crate) fn closed(&self, reason: &str) -> Error {
        self.unended_reads.closed(reason)
    }

    /// The address of a link's peer, also before the link is made, and when it is gone.
    pub fn peer(&self, link: LinkId) -> String {
        let linked = self.links.get(&link).map(|link| &link.peer);
        let connecting = || self.connecting.get(&link).map(|(peer, _)| peer);
        let peer = linked.or_else(connecting).or_else(|| self.gone.get(&link));
        peer.map_or_else(|| "unknown".to_owned(), Clone::clone)
    }

    /// The connection of a link, which is gone with it.
    pub(super) fn take_link(&mut self, link: LinkId) -> Option<Link> {
        let connection = self.links.remove(&link)?;
        if connection.is_announced || !connection.is_accepted {
            self.remember(link, connection.peer.clone());
        }
        Some(connection)
    }

    /// Ends the attempt to make a link; whether there was one.
    pub(super) fn end_attempt(&mut self, link: LinkId) -> bool {
        let attempt = self.connecting.remove(&link);
        attempt.map(|(peer, _)| self.remember(link, peer)).is_some()
    }

    fn remember(&mut self, link: LinkId, peer: String) {
        self.gone.insert(link, peer);
        if self.gone.len() > GONE_CAP {
            self.gone.pop_first();
        }
    }

    /// Whether a session is established on this link.
    pub fn is_up(&self, link: LinkId) -> bool {
        self.links.get(&link).is_some_and(|link| link.is_announced)
    }

    pub(super) fn new_link(&mut self) -> LinkId {
        self.next_link += 1;
        self.next_link - 1
    }

    pub(super) fn watch_writes(&mut self, link: LinkId) {
        let Some(connection) = self.links.get(&link) else {
            return;
        };
        let (data, flags) = (
            epoll::EventData::new_u64(link),
            flags(connection.wants_write()),
        );
        let _ = epoll::modify(&self.epoll, connection.fd(), data, flags);
    }

    /// Wakes while UCX's descriptor is readable, or only when it becomes so.
    pub(super) fn watch_worker(&self, only_changes: bool) {
        let Some(data) = &self.data else {
            return;
        };
        let flags = if only_changes {
            epoll::EventFlags::IN | epoll::EventFlags::ET
        } else {
            epoll::EventFlags::IN
        };
        let key = epoll::EventData::new_u64(UCX);
        let _ = epoll::modify(&self.epoll, data.worker.event_fd(), key, flags);
    }

    /// Takes connections, or leaves them in the backlog: the listener would otherwise be reported as readable again
    /// and again.
    pub(super) fn listen(&self, is_listening: bool) {
        let Some(listener) = &self.listener else {
            return;
        };
        let flags = if is_listening {
            epoll::EventFlags::IN
        } else {
            epoll::EventFlags::empty()
        };
        let data = epoll::EventData::new_u64(LISTENER);
        let _ = epoll::modify(&self.epoll, listener, data, flags);
    }

    pub(super) fn add(
        &mut self,
        link: LinkId,
        stream: TcpStream,
        peer: String,
        is_accepted: bool,
        begun: Instant,
    ) -> Result<()> {
        let (token, timing) = (&self.config.token, self.config.timing);
        let connection = Link::new(stream, peer, is_accepted, token, timing, begun)?;
        watch(&self.epoll, connection.fd(), link, connection.wants_write())
            .map_err(|error| Error::Exhausted(format!("epoll: {error}")))?;
        self.links.insert(link, connection);
        Ok(())
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        signal(&self.stopped);
    }
}

impl std::fmt::Debug for Io {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Io")
            .field("links", &self.links.len())
            .finish_non_exhaustive()
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

#[cfg(test)]
mod tests;
