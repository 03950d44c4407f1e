//! A reactor whose service no stranger may reach.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use super::{Round, without_threads};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::encryption::Encryption;
use crate::net::identity::{Identity, SessionKind};
use crate::net::secret::Secrets;
use crate::reactor::Reactor;
use crate::session::{Links, Payload, ReactorConfig, Service, SessionTimeouts, Streams, spawn};
use crate::transport::Transport;

struct UnreachedService;

impl Service for UnreachedService {
    /// The address to connect to, and the recipient of the UCX address.
    type Command = (Option<String>, Sender<Vec<u8>>);

    fn command(&mut self, links: &mut Links, (address, recipient): Self::Command) {
        let _ = recipient.send(links.identity().ucx_address.clone());
        if let Some(address) = address {
            links.connect(&address);
        }
    }
    fn accept(
        &mut self,
        _session: SessionKey,
        _peer: &Identity,
    ) -> std::result::Result<(), String> {
        panic!("a stranger asks to be accepted")
    }
    fn session_up(&mut self, _links: &mut Links, _session: SessionKey, _peer: &Identity) {
        panic!("a session with a stranger")
    }
    fn session_down(&mut self, _links: &mut Links, _session: SessionKey, error: Error) {
        // A peer influences the text, and must not fill the log.
        assert!(error.to_string().len() < 20_000);
    }
    fn message(
        &mut self,
        _links: &mut Links,
        _session: SessionKey,
        _header: &[u8],
        _payload: Payload,
    ) -> Result<()> {
        panic!("a message of a stranger")
    }
}

/// A reactor without a thread, with a token that no peer holds. It panics when a peer gets further than the handshake.
#[derive(Debug)]
pub struct Unreached(Reactor<<UnreachedService as Service>::Command>);

impl Unreached {
    /// Starts it; it listens on loopback, or only connects.
    pub fn start(engine_id: &str, is_listening: bool, transport: Transport) -> Result<Self> {
        let config = ReactorConfig {
            listen: is_listening.then(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()),
            secrets: Secrets::new(b"a token that the stranger does not hold"),
            encryption: Encryption::Off,
            streams: Streams::default(),
            identity: Identity::new(SessionKind::Agent, engine_id, Vec::new())?,
            transport: Some(transport),
            timeouts: SessionTimeouts::default(),
            busy_poll: Duration::ZERO,
        };
        without_threads(|| spawn(config, || UnreachedService)).map(Self)
    }

    /// Connects, if there is an address, and returns that of its data plane.
    pub fn connect(&self, address: Option<String>) -> Option<Vec<u8>> {
        let (recipient, answer) = channel();
        self.0.send((address, recipient)).ok()?;
        self.round();
        answer.try_recv().ok()
    }

    /// The address that peers connect to.
    pub fn address(&self) -> Option<SocketAddr> {
        self.0.address()
    }

    /// Runs one round.
    pub fn round(&self) -> Round {
        self.0.round()
    }

    /// Ends it.
    pub fn stop(&self) {
        self.0.stop();
    }
}
