//! The bootstrap of both sides against a stranger, who does not hold the token: any bytes on the socket, and any messages
//! on the data plane.

use std::net::Ipv4Addr;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use kvpipe_core::fuzzing::{Round, without_threads};
use kvpipe_core::ids::SessionKey;
use kvpipe_core::net::identity::{Identity, SessionKind};
use kvpipe_core::reactor::Reactor;
use kvpipe_core::session::SessionTimeouts;
use kvpipe_core::session::{ReactorConfig, ReactorContext, Service};
use kvpipe_core::{Error, Result};

use crate::hostile::{Hostile, transport};
use crate::script::{Victim, read, run_script};

const ENGINE_ID: &str = "engine of the side under test";

/// A service that no stranger reaches.
struct Unreached;

impl Service for Unreached {
    /// Where to connect, and the recipient of the UCX address.
    type Command = (Option<String>, Sender<Vec<u8>>);

    fn command(&mut self, cx: &mut ReactorContext, (address, recipient): Self::Command) {
        let _ = recipient.send(cx.identity().ucx_address.clone());
        if let Some(address) = address {
            cx.connect(&address);
        }
    }
    fn accept(
        &mut self,
        _session: SessionKey,
        _peer: &Identity,
    ) -> std::result::Result<(), String> {
        panic!("a stranger asks to be accepted")
    }
    fn session_up(&mut self, _cx: &mut ReactorContext, _session: SessionKey, _peer: &Identity) {
        panic!("a session with a stranger")
    }
    fn session_down(&mut self, _cx: &mut ReactorContext, _session: SessionKey, error: Error) {
        // A peer influences the text, and must not fill the log.
        assert!(error.to_string().len() < 20_000);
    }
    fn frame(
        &mut self,
        _cx: &mut ReactorContext,
        _session: SessionKey,
        _frame: &[u8],
    ) -> Result<()> {
        panic!("a frame of a stranger")
    }
}

struct Side(Reactor<<Unreached as Service>::Command>);

impl Victim for Side {
    fn round(&self) -> Round {
        self.0.round()
    }
    fn act(&mut self, _what: u8, _argument: u8) {}
    fn close(&mut self) {
        self.0.stop();
    }
    fn check(&mut self) {}
}

/// A stranger gets no session and learns nothing, whatever it sends.
///
/// # Panics
/// It does.
pub(crate) fn bootstrap(bytes: &[u8]) {
    let (flags, steps) = read(bytes);
    let transport = transport(flags);
    let config = ReactorConfig {
        listen: (!flags.is_server()).then(|| (Ipv4Addr::LOCALHOST, 0).into()),
        token: b"a token that the stranger does not hold".to_vec(),
        identity: Identity::new(SessionKind::Agent, ENGINE_ID, Vec::new()).expect("identity"),
        transport: Some(transport.clone()),
        local: Ipv4Addr::LOCALHOST.into(),
        timeouts: SessionTimeouts::default(),
        busy_poll: Duration::ZERO,
    };
    let side =
        without_threads(|| kvpipe_core::session::spawn(config, || Unreached)).expect("reactor");
    let (hostile, address) = if flags.is_server() {
        let (hostile, address) = Hostile::listen(SessionKind::Agent, Some(&transport));
        (hostile, Some(address))
    } else {
        let hostile = Hostile::connect(SessionKind::Agent, Some(&transport), side.address());
        (hostile, None)
    };
    let (recipient, answer) = channel();
    side.send((address, recipient)).expect("command");
    let side = Side(side);
    side.round();
    let hostile = hostile.skip_handshake(&answer.recv().expect("a data plane"));
    let sent = run_script(side, hostile, steps);
    let mut windows = sent.windows(ENGINE_ID.len());
    let is_disclosed = windows.any(|part| part == ENGINE_ID.as_bytes());
    assert!(!is_disclosed, "a stranger learns who this is");
}
