//! The whole bootstrap of both sides against somebody who does not hold the token: any bytes on the socket, and any
//! messages at the data plane.

use std::net::Ipv4Addr;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use super::hostile::{Hostile, transport};
use super::script::{Victim, confront, read};
use crate::error::{Error, Result};
use crate::net::identity::{Identity, SessionKind};
use crate::reactor::manual::{Round, without_threads};
use crate::reactor::{Reactor, ReactorConfig, ReactorContext, Service, SessionKey};
use crate::session::connection::SessionTimeouts;

const WHO: &str = "engine of the side under test";

/// A service that nobody ever reaches.
struct Unreached;

impl Service for Unreached {
    /// Where to connect, and who wants to know of the data plane.
    type Command = (Option<String>, Sender<Vec<u8>>);

    fn command(&mut self, cx: &mut ReactorContext, (address, asks): Self::Command) {
        let _ = asks.send(cx.identity().ucx_address.clone());
        if let Some(address) = address {
            cx.connect(&address);
        }
    }
    fn accept(&mut self, _link: SessionKey, _peer: &Identity) -> std::result::Result<(), String> {
        panic!("a stranger asks to be accepted")
    }
    fn session_up(&mut self, _io: &mut ReactorContext, _link: SessionKey, _peer: &Identity) {
        panic!("a session with a stranger")
    }
    fn session_down(&mut self, _io: &mut ReactorContext, _link: SessionKey, error: Error) {
        // Also what people are told of it has bounds.
        assert!(error.to_string().len() < 20_000);
    }
    fn frame(&mut self, _io: &mut ReactorContext, _link: SessionKey, _frame: &[u8]) -> Result<()> {
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

/// A stranger gets no session and learns nothing, whatever it says.
///
/// # Panics
/// It does.
pub fn bootstrap(bytes: &[u8]) {
    let (flags, steps) = read(bytes);
    let transport = transport(flags);
    let config = ReactorConfig {
        listen: (!flags.is_server()).then(|| (Ipv4Addr::LOCALHOST, 0).into()),
        token: b"a token that the stranger does not hold".to_vec(),
        identity: Identity::new(SessionKind::Agent, WHO, Vec::new()).expect("identity"),
        transport: Some(transport.clone()),
        local: Ipv4Addr::LOCALHOST.into(),
        timeouts: SessionTimeouts::default(),
        busy_poll: Duration::ZERO,
    };
    let side = without_threads(|| Reactor::spawn(config, || Unreached)).expect("reactor");
    let (hostile, address) = if flags.is_server() {
        let (hostile, address) = Hostile::listen(SessionKind::Agent, Some(&transport));
        (hostile, Some(address))
    } else {
        let hostile = Hostile::connect(SessionKind::Agent, Some(&transport), side.address());
        (hostile, None)
    };
    let (asks, answer) = channel();
    side.send((address, asks)).expect("command");
    let side = Side(side);
    side.round();
    let hostile = hostile.stand_before(&answer.recv().expect("a data plane"));
    let said = confront(side, hostile, steps);
    let is_told = said.windows(WHO.len()).any(|part| part == WHO.as_bytes());
    assert!(!is_told, "a stranger was told who this is");
}
