//! Who may speak, who is listened to, and on which interfaces: what strangers get who do not hold the token.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use kvpipe_core::Error;
use kvpipe_core::control::{Control, ControlEvent, ControlQuery, ControlTimeouts};
use kvpipe_core::handoff::{AgentConfig, HandoffAgent};
use kvpipe_core::net::codec::{Reader, Writer};
use kvpipe_core::net::identity::SessionKind;
use kvpipe_core::net::secret::Tokens;
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
    // Only the first message can be played again: its answer comes, and then the end.
    let (len, reply) = answers.split_first_chunk::<4>().expect("an answer");
    assert_eq!(
        u32::from_le_bytes(*len) as usize,
        reply.len(),
        "{answers:?}"
    );
    assert_eq!(reply[0], 2, "{answers:?}");
    eventually("the refusal", || {
        let refused = |event: &ControlEvent| matches!(event, ControlEvent::Log(text) if text.contains("played again"));
        server.drain().iter().any(refused).then_some(())
    });
    assert_eq!(ask(&control(), address), Ok("{}".to_owned()));
}

// --- encryption

/// A server at an address of this machine counts as one of another host: only loopback is known not to leave it.
#[test]
fn a_question_between_hosts_is_on_the_wire_in_no_readable_form() {
    const SECRET: &str = "{\"what\":\"only peers may read\"}";
    let described = |listen: &str| {
        let server = Control::new(Some(listen), TOKEN, "engine", vec![], PATIENT).expect("control");
        server.describe_as(SECRET.to_owned()).expect("described");
        let relay = Relay::to(server.address().expect("address"));
        assert_eq!(ask(&client(), relay.address), Ok(SECRET.to_owned()));
        let said = relay.server_said();
        let mut windows = said.windows(SECRET.len());
        windows.any(|window| window == SECRET.as_bytes())
    };
    assert!(described("127.0.0.1:0"), "auto is plain on one host");
    for (_, ip) in outside() {
        assert!(!described(&format!("{ip}:0")));
    }
}

#[test]
fn a_changed_byte_of_a_sealed_session_ends_it_with_one_error() {
    for (_, ip) in outside() {
        let listen = format!("{ip}:0");
        let server = Control::new(Some(&listen), TOKEN, "engine", vec![], PATIENT);
        let server = server.expect("control");
        server.describe_as("{}".to_owned()).expect("described");
        let relay = Relay::to(server.address().expect("address"));
        let client = client();
        assert_eq!(ask(&client, relay.address), Ok("{}".to_owned()));
        relay.change_next();
        let error = ask(&client, relay.address).expect_err("changed");
        assert!(error.to_string().contains("changed on the way"), "{error}");
    }
}

// --- tokens

fn client() -> Control {
    Control::new(None, TOKEN, "client", vec![], PATIENT).expect("client")
}

#[test]
fn a_listener_accepts_its_next_token_too_so_that_a_token_can_be_replaced_without_a_gap() {
    let (old, new) = (&b"the token of before"[..], &b"the token of today"[..]);
    let listening = |current, next| {
        let tokens = Tokens { current, next };
        Control::new(Some("127.0.0.1:0"), tokens, "", vec![], PATIENT).expect("control")
    };
    let asked = |token: &[u8], server: &Control| {
        let client = Control::new(None, token, "", vec![], PATIENT).expect("client");
        ask(&client, server.address().expect("address"))
    };
    for server in [listening(old, Some(new)), listening(new, Some(old))] {
        for token in [old, new] {
            assert_eq!(asked(token, &server), Ok("{}".to_owned()));
        }
        let refused = asked(b"another token", &server);
        assert!(
            matches!(refused, Err(Error::Authentication(_))),
            "{refused:?}"
        );
    }
    let refused = asked(old, &listening(new, None));
    assert!(
        matches!(refused, Err(Error::Authentication(_))),
        "{refused:?}"
    );
}

#[test]
fn a_short_token_is_refused_off_loopback_by_both_sides_with_the_remedy() {
    let is_refused = |error: Option<Error>| {
        let text = error.expect("refused").to_string();
        assert!(text.contains("openssl rand -hex 16"), "{text}");
    };
    for (_, ip) in outside() {
        let address = format!("{ip}:0");
        let listening = Control::new(Some(&address), b"short", "", vec![], PATIENT);
        is_refused(listening.err());
        let server = Control::new(Some(&address), TOKEN, "", vec![], PATIENT).expect("control");
        let client = Control::new(None, b"short", "", vec![], PATIENT).expect("client");
        is_refused(ask(&client, server.address().expect("address")).err());
    }
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
