//! Sessions: the authenticated connection to a peer, its UCX endpoint, and the grace period for late peers.
//!
//! Each protocol on top (pipe, lookup, control, blocks) is a [`Service`]: events in, calls on [`Links`] out, on one
//! thread at a time, without locks.

mod attempts;
mod bulk;
mod connection;
mod data_plane;
pub(crate) mod fair_waitlist;
pub(crate) mod grace;
mod handshake_places;
mod inbox;
mod joins;
mod link;
mod links;
mod listener;
mod outbox;
mod probe;
#[expect(
    clippy::module_inception,
    reason = "one session, among what sessions need"
)]
mod session;
mod sessions;
mod stream_sinks;
mod timeouts;
#[cfg(test)]
pub(crate) mod wire;

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::address::{ListenAddress, listen_address};
use crate::net::encryption::Encryption;
use crate::net::identity::Identity;
use crate::net::secret::{Secrets, Tokens};
use crate::reactor::{Reactor, default_busy_poll};
use crate::transport::{Transport, UcxResult};
use listener::{LISTENER, Listener};
use sessions::Sessions;

pub use bulk::Streams;
#[cfg(test)]
pub(crate) use data_plane::tests::FarEnd;
pub(crate) use links::Links;
pub(crate) use outbox::{StreamPart, StreamTag};
pub(crate) use stream_sinks::{PART_KIND, RegisteredSink, StreamSink};
pub use timeouts::SessionTimeouts;

/// The body of a message.
#[derive(Debug)]
pub(crate) enum Payload {
    /// Bytes.
    Bytes(Vec<u8>),
    /// A part of a stream: its [sink](StreamSink) has so many bytes, which mean nothing if it is aborted.
    Placed { num_bytes: usize, is_aborted: bool },
}

impl Payload {
    /// The bytes, without a copy; none if they were placed.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Placed { .. } => Vec::new(),
        }
    }
}

impl Deref for Payload {
    type Target = [u8];

    /// The bytes; none if they were placed.
    fn deref(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Placed { .. } => &[],
        }
    }
}

/// A service of a reactor. All calls come from the thread that runs the reactor, one at a time; it is not always the same
/// thread. A service keeps nothing in thread-locals, and shares nothing with other threads without atomics.
pub(crate) trait Service {
    /// Requests of other threads.
    type Command: Send + 'static;

    /// Another thread asks. Commands that come while the reactor stops come right before [`stop`](Self::stop).
    fn command(&mut self, links: &mut Links, command: Self::Command);
    /// Admits a peer that has proved the token, or returns the reason for the peer. `session_up` follows, or
    /// `dismissed`.
    fn accept(
        &mut self,
        _session: SessionKey,
        _peer: &Identity,
    ) -> std::result::Result<(), String> {
        Ok(())
    }
    /// A session of a peer that had connected ended before it was established, perhaps even before `accept`.
    fn dismissed(&mut self, _session: SessionKey) {}
    /// A session is established.
    fn session_up(&mut self, links: &mut Links, session: SessionKey, peer: &Identity);
    /// A session is gone, or could never be made; once for each session that was up or asked for. It was removed before
    /// this call.
    fn session_down(&mut self, links: &mut Links, session: SessionKey, error: Error);
    /// A side of an established session gets the other's bytes by another data path from now on.
    fn data_path_changed(&mut self, _links: &mut Links, _session: SessionKey) {}
    /// A further connection of a session is lost, and with it parts of streams that were on their way.
    fn streams_lost(&mut self, _links: &mut Links, _session: SessionKey) {}
    /// A message came. An error closes the session.
    fn message(
        &mut self,
        _links: &mut Links,
        _session: SessionKey,
        _header: &[u8],
        _payload: Payload,
    ) -> Result<()> {
        Err(Error::protocol("a message for a service without messages"))
    }
    /// A UCX operation has ended.
    fn done(&mut self, _links: &mut Links, _token: u64, _result: UcxResult<()>) {}
    /// Runs a slice of long work, between two looks at sockets and UCX; whether more of it waits.
    fn poll(&mut self, _links: &mut Links) -> bool {
        false
    }
    /// True if there is work that has come since.
    fn has_work(&self) -> bool {
        false
    }
    /// Handles the deadlines that have passed, and returns the next one.
    fn timer(&mut self, _links: &mut Links) -> Option<Instant> {
        None
    }
    /// Logs a line for people; at most one for each event in the life of a session.
    fn log(&mut self, _text: String) {}
    /// The reactor is about to stop: messages that are sent now still leave.
    fn closing(&mut self, _links: &mut Links) {}
    /// The reactor stops. Its data plane has ended before this call: nothing reads or writes registered memory, but for
    /// the reads that [`Links::closed`] reports.
    fn stop(&mut self, _links: &mut Links) {}
    /// Sizes of its maps and queues.
    #[cfg(test)]
    fn sizes(&self) -> crate::reactor::manual::Sizes {
        Vec::new()
    }
}

/// Settings of a reactor with sessions.
#[derive(Debug, Clone)]
pub(crate) struct ReactorConfig {
    /// Address to accept peers at; `None` only connects.
    pub(crate) listen: Option<ListenAddress>,
    /// The secrets of its tokens; that of an empty token for none.
    pub(crate) secrets: Secrets,
    /// Selects the frames that are sealed.
    pub(crate) encryption: Encryption,
    /// Number of connections that carry the streams of a session.
    pub(crate) streams: Streams,
    /// Identity of this side.
    pub(crate) identity: Identity,
    /// Transport of bytes; `None` for a reactor without data plane.
    pub(crate) transport: Option<Transport>,
    /// Deadlines of sessions.
    pub(crate) timeouts: SessionTimeouts,
    /// The thread polls for this time before it sleeps.
    pub(crate) busy_poll: Duration,
}

impl ReactorConfig {
    /// Configuration of a side that accepts peers at `address`, encrypted and with streams as the environment says.
    ///
    /// # Errors
    /// `Config`: the address or the environment is malformed, or others could reach the address without a token.
    pub(crate) fn listening<'a>(
        address: &str,
        tokens: impl Into<Tokens<'a>>,
        identity: Identity,
        transport: Transport,
    ) -> Result<Self> {
        let tokens = tokens.into();
        let listen = Some(listen_address(address, tokens)?);
        Self::new(listen, tokens, identity, transport)
    }

    /// Configuration of a side that connects to peers, within `timeout`.
    ///
    /// # Errors
    /// `Config`: the environment is malformed.
    pub(crate) fn connecting(
        token: &[u8],
        identity: Identity,
        transport: Transport,
        timeout: Duration,
    ) -> Result<Self> {
        let mut config = Self::new(None, token.into(), identity, transport)?;
        config.timeouts = SessionTimeouts::connecting(timeout);
        Ok(config)
    }

    fn new(
        listen: Option<ListenAddress>,
        tokens: Tokens<'_>,
        identity: Identity,
        transport: Transport,
    ) -> Result<Self> {
        Ok(Self {
            listen,
            secrets: Secrets::new(tokens),
            encryption: Encryption::of_environment()?,
            streams: Streams::of_environment()?,
            identity,
            transport: Some(transport),
            timeouts: SessionTimeouts::default(),
            busy_poll: default_busy_poll(),
        })
    }
}

/// Binds, loads UCX where wanted, and starts a reactor that runs the service.
///
/// # Errors
/// The address cannot be bound (`Config`), UCX is missing (`Unavailable`).
pub(crate) fn spawn<S>(
    config: ReactorConfig,
    make: impl FnOnce() -> S + Send + 'static,
) -> Result<Reactor<S::Command>>
where
    S: Service + 'static,
{
    let socket = config.listen.map(listener::bind).transpose()?;
    let context = match &config.transport {
        Some(transport) => Some(Arc::new(transport.open()?)),
        None => None,
    };
    let address = socket.as_ref().and_then(|socket| socket.local_addr().ok());
    let registrar = context.as_ref().map(Arc::downgrade).unwrap_or_default();
    let busy_poll = config.busy_poll;
    Reactor::start(
        busy_poll,
        address,
        registrar,
        move |poller, commands, pending_reads| {
            if let Some(socket) = &socket {
                poller.add(socket, LISTENER, EventFlags::IN)?;
            }
            let links = Links::new(config, context, poller, pending_reads)?;
            Ok(Sessions {
                links,
                service: make(),
                commands,
                listener: socket.map(Listener::new),
            })
        },
    )
}

#[cfg(test)]
mod tests;
