//! Access control of listening ports: the interfaces they listen on, and the replies to strangers without the token.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use kvpipe_core::Error;
use kvpipe_core::blocks::{Agent, AgentConfig};
use kvpipe_core::control::{Control, ControlEvent, ControlQuery, ControlReply, ControlTimeouts};
use kvpipe_core::net::secret::Tokens;
use kvpipe_core::pipe::Pipe;
use kvpipe_core::session::SessionTimeouts;
use kvpipe_core::transport::{MemoryPath, Transport};

use crate::agents::agent;
use crate::common::relay::Relay;
use crate::common::sockets::listening;
use crate::common::{TIMEOUT, TOKEN, alone, eventually, undescribed};

const PATIENT: ControlTimeouts = ControlTimeouts {
    session: SessionTimeouts {
        handshake: TIMEOUT,
        waits_for_listener: false,
        heartbeat: Duration::from_secs(1),
        silence: TIMEOUT,
    },
    lease: TIMEOUT,
    open: TIMEOUT,
    handoff: TIMEOUT,
};

fn control() -> Control {
    Control::new(Some("127.0.0.1:0"), TOKEN, "engine", vec![], PATIENT).expect("control")
}

fn ask(from: &Control, address: SocketAddr) -> kvpipe_core::Result<ControlReply> {
    from.query(&address.to_string(), ControlQuery::Describe, TIMEOUT)
        .expect("ask")
        .wait_for(TIMEOUT)
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
    stranger.set_read_timeout(Some(TIMEOUT)).expect("timeout");
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
    assert_eq!(ask(&control(), address), Ok(undescribed()));
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
        assert_eq!(
            ask(&client(), relay.address),
            Ok(ControlReply::Description(SECRET.to_owned()))
        );
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
        assert_eq!(ask(&client, relay.address), Ok(undescribed()));
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
            assert_eq!(asked(token, &server), Ok(undescribed()));
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

// --- interfaces

#[test]
fn nothing_listens_beyond_loopback_without_a_token() {
    for address in ["0.0.0.0:0", "[::]:0", "203.0.113.1:0"] {
        let memory = || Transport::Memory(MemoryPath::RemoteRead);
        let control = Control::new(Some(address), b"", "", vec![], PATIENT);
        let agent = Agent::new(AgentConfig::new(address, b"", memory()));
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

#[test]
fn an_agent_listens_on_one_port_of_its_address() {
    alone(|search| {
        let agent = agent(search);
        let address = agent.address().expect("address");
        assert_eq!(listening(), HashSet::from([address]));
    });
}

#[test]
fn a_sender_listens_nowhere() {
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
            TIMEOUT,
        )
        .expect("connect");
        connected.wait_for(TIMEOUT).expect("connected");
        assert_eq!(listening(), before);
    });
}
