//! Who may speak, who is listened to, and on which interfaces: what strangers get who do not hold the token.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use kvpipe_core::Error;
use kvpipe_core::control::{Control, ControlEvent, ControlQuery, ControlTimeouts};
use kvpipe_core::handoff::{AgentConfig, HandoffAgent};
use kvpipe_core::net::codec::{Reader, Writer};
use kvpipe_core::net::identity::SessionKind;
use kvpipe_core::pipe::Pipe;
use kvpipe_core::session::SessionTimeouts;
use kvpipe_core::transport::{MemoryPath, Transport};
use kvpipe_ucx::{Buffer, Search};

use crate::agents::{BLOCK, COUNT, agent, register};
use crate::common::relay::Relay;
use crate::common::sockets::listening;
use crate::common::{self, PATIENCE, Raw, TOKEN, alone, eventually, pattern};

/// A message of blocks: the destination asks for some.
const READ: u8 = 32;
/// The answer to one that cannot be served.
const REFUSED: u8 = 35;

const PATIENT: ControlTimeouts = ControlTimeouts {
    session: SessionTimeouts {
        handshake: PATIENCE,
        begun: None,
        waits_for_listener: false,
        heartbeat: Duration::from_secs(1),
        silence: PATIENCE,
    },
    lease: PATIENCE,
    open: PATIENCE,
    handoff: PATIENCE,
};

fn control() -> Control {
    Control::new(Some("127.0.0.1:0"), TOKEN, "engine", vec![], PATIENT).expect("control")
}

fn ask(from: &Control, address: SocketAddr) -> kvpipe_core::Result<String> {
    from.query(&address.to_string(), ControlQuery::Describe, PATIENCE)
        .expect("ask")
        .wait_for(PATIENCE)
}

#[test]
fn a_recorded_session_played_again_is_refused_and_asks_nothing() {
    let server = control();
    let address = server.address().expect("address");
    let relay = Relay::to(address);
    ask(&control(), relay.address).expect("the recorded session");
    let said = relay.client_said();
    assert!(said.len() > 100, "{} bytes", said.len());
    server.drain();

    let mut stranger = TcpStream::connect(address).expect("connect");
    stranger.set_read_timeout(Some(PATIENCE)).expect("timeout");
    // It may be cut off while it speaks.
    let _ = stranger.write_all(&said);
    let mut answers = Vec::new();
    let _ = stranger.read_to_end(&mut answers);
    let challenge = 4 + 1 + 2 + 32;
    assert!(answers.len() >= challenge, "{answers:?}");
    // Where the connection was reset under what it had not read, the refusal may be lost.
    assert!(
        [&[][..], &[2, 0, 0, 0, 7, 1]].contains(&&answers[challenge..]),
        "{answers:?}"
    );
    eventually("the refusal", || {
        let refused = |event: &ControlEvent| matches!(event, ControlEvent::Log(text) if text.contains("token"));
        server.drain().iter().any(refused).then_some(())
    });
    assert_eq!(ask(&control(), address), Ok("{}".to_owned()));
}

// --- the session in every message

fn lender(search: &Search) -> HandoffAgent {
    let source = agent(search);
    let buffer = Buffer::from_vec(pattern(COUNT * BLOCK, 1));
    register(&source, "kv", &buffer, BLOCK, BLOCK);
    source
}

/// Asks for blocks of a region that is not there, which is answered with a refusal.
fn ask_for_blocks(raw: &Raw, transfer: u64) {
    let header = Writer::new(READ).u64(transfer).u64(7).u8(0).finish();
    let ids = Writer::default().list(&[0u32], |w, id| w.u32(*id)).finish();
    raw.send(&header, &ids);
}

fn refused(raw: &Raw) -> u64 {
    let (header, _) = raw.message(REFUSED);
    Reader::new(&header).u64().expect("a transfer")
}

#[test]
fn a_message_of_another_session_or_of_none_is_dropped_without_a_word() {
    let Some(search) = common::ucx() else { return };
    let source = lender(&search);
    let address = source.address().expect("address");
    let mut raw = Raw::connect(&search, address, SessionKind::Agent);
    let session_id = raw.session_id;
    for byte in 0..session_id.len() {
        raw.session_id[byte] ^= 1;
        ask_for_blocks(&raw, 1 + byte as u64);
        raw.session_id = session_id;
    }
    raw.session_id = [0; 16];
    ask_for_blocks(&raw, 90);
    raw.session_id = session_id;
    // Messages of one endpoint come in order: an answer to one of those before would be here first.
    ask_for_blocks(&raw, 99);
    assert_eq!(refused(&raw), 99);
}

// --- interfaces

#[test]
fn nothing_listens_beyond_loopback_without_a_token() {
    for address in ["0.0.0.0:0", "[::]:0", "203.0.113.1:0"] {
        let memory = || Transport::Memory(MemoryPath::RemoteRead);
        let control = Control::new(Some(address), b"", "", vec![], PATIENT);
        let agent = HandoffAgent::new(AgentConfig::new(address, b"", memory()));
        let pipe = Pipe::listen(address, b"", memory(), Duration::ZERO);
        for error in [control.err(), agent.err(), pipe.err()] {
            let is_refused = |error: &Error| matches!(error, Error::Config(text) if text.contains("needs a token"));
            assert!(error.as_ref().is_some_and(is_refused), "{error:?}");
        }
    }
}

/// Addresses of this machine, one of each interface that is no loopback.
fn outside() -> Vec<(String, IpAddr)> {
    let interfaces = if_addrs::get_if_addrs().expect("interfaces");
    interfaces
        .iter()
        .filter(|interface| !interface.is_loopback() && interface.ip().is_ipv4())
        .map(|interface| (interface.name.clone(), interface.ip()))
        .collect()
}

fn ips_of(name: &str) -> Vec<IpAddr> {
    let interfaces = if_addrs::get_if_addrs().expect("interfaces");
    let of_it = interfaces.iter().filter(|interface| interface.name == name);
    of_it.map(if_addrs::Interface::ip).collect()
}

#[test]
fn an_agent_on_loopback_listens_on_loopback_only_with_ucx_too() {
    alone(|search| {
        let agent = agent(search);
        let found = listening();
        assert!(found.contains(&agent.address().expect("address")));
        assert!(found.len() > 1, "UCX listens somewhere: {found:?}");
        assert!(found.iter().all(|at| at.ip().is_loopback()), "{found:?}");
    });
}

#[test]
fn an_agent_on_one_interface_listens_on_no_other_with_ucx_too() {
    alone(|search| {
        // UCX leaves its sockets open to the processes that a test starts.
        let inherited = listening();
        for (name, ip) in outside() {
            let listen = format!("{ip}:0");
            let config = AgentConfig::new(&listen, TOKEN, search.clone().into());
            let agent = HandoffAgent::new(config).expect("agent");
            let (mut found, ips) = (listening(), ips_of(&name));
            found.retain(|at| !inherited.contains(at));
            assert!(found.contains(&agent.address().expect("address")));
            assert!(found.len() > 1, "UCX listens somewhere: {found:?}");
            assert!(
                found.iter().all(|at| ips.contains(&at.ip())),
                "{found:?}, {name} has {ips:?}"
            );
        }
    });
}

#[test]
fn a_sender_listens_only_where_its_receiver_reaches_it() {
    alone(|search| {
        let transport = || search.clone().into();
        let receiver = Pipe::listen("127.0.0.1:0", TOKEN, transport(), Duration::ZERO);
        let receiver = receiver.expect("listen");
        let before = listening();
        let address = receiver.address().expect("address").to_string();
        let (_sender, connected) = Pipe::connect(
            &address,
            TOKEN,
            transport(),
            kvpipe_core::Integrity::Auto,
            Duration::ZERO,
            PATIENCE,
        )
        .expect("connect");
        connected.wait_for(PATIENCE).expect("connected");
        let found = listening();
        assert!(found.len() > before.len(), "UCX listens: {found:?}");
        assert!(found.iter().all(|at| at.ip().is_loopback()), "{found:?}");
    });
}
