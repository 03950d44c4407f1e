//! The bootstrap of both sides against a stranger, who does not hold the token: any bytes on the socket, and any messages
//! on the data plane.

use kvpipe_core::fuzzing::{Round, Unreached};
use kvpipe_core::net::identity::SessionKind;

use crate::hostile::{Hostile, transport};
use crate::script::{Victim, read, run_script};

const ENGINE_ID: &str = "engine of the side under test";

struct Side(Unreached);

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
    let side = Unreached::start(ENGINE_ID, !flags.is_server(), transport.clone()).expect("reactor");
    let (hostile, address) = if flags.is_server() {
        let (hostile, address) = Hostile::listen(SessionKind::Agent, Some(&transport));
        (hostile, Some(address))
    } else {
        let hostile = Hostile::connect(SessionKind::Agent, Some(&transport), side.address());
        (hostile, None)
    };
    let ucx_address = side.connect(address).expect("a data plane");
    let hostile = hostile.skip_handshake(&ucx_address);
    let sent = run_script(Side(side), hostile, steps);
    let mut windows = sent.windows(ENGINE_ID.len());
    let is_disclosed = windows.any(|part| part == ENGINE_ID.as_bytes());
    assert!(!is_disclosed, "a stranger learns who this is");
}
