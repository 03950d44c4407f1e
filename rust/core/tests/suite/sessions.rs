//! Sessions against whatever reaches the port, and what they leave behind.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kvpipe_core::Error;
use kvpipe_core::blocks::{Agent, AgentConfig};
use kvpipe_core::control::{Control, ControlEvent, ControlQuery, ControlReply, ControlTimeouts};
use kvpipe_core::net::handshake::{Handshake, Step};
use kvpipe_core::net::identity::{Identity, SessionKind};
use kvpipe_core::net::secret::Secrets;
use kvpipe_core::pipe::Pipe;
use kvpipe_core::session::SessionTimeouts;
use kvpipe_ucx::{Buffer, Search};

use crate::common::sockets::descriptors;
use crate::common::{
    self, PROMPT, Raw, TIMEOUT, TOKEN, alone, eventually, on_both_paths, receive_frame, send_frame,
    undescribed,
};

fn control_with(token: &[u8], timeouts: SessionTimeouts) -> Control {
    let patience = ControlTimeouts {
        session: timeouts,
        lease: TIMEOUT,
        open: TIMEOUT,
        handoff: TIMEOUT,
    };
    Control::new(Some("127.0.0.1:0"), token, "engine", vec![], patience).expect("control")
}

fn control() -> Control {
    control_with(TOKEN, SessionTimeouts::default())
}

fn address(control: &Control) -> SocketAddr {
    control.address().expect("address")
}

fn ask(from: &Control, to: &Control) -> kvpipe_core::Result<ControlReply> {
    from.query(&address(to).to_string(), ControlQuery::Describe, TIMEOUT)
        .expect("ask")
        .wait_for(TIMEOUT)
}

fn agent(search: &Search) -> Agent {
    agent_with(search, SessionTimeouts::default())
}

fn agent_with(search: &Search, timeouts: SessionTimeouts) -> Agent {
    let config = AgentConfig {
        timeouts,
        ..AgentConfig::new("127.0.0.1:0", TOKEN, search.clone().into())
    };
    Agent::new(config).expect("agent")
}

#[test]
fn a_wrong_token_is_an_authentication_error_and_the_server_works_on() {
    let server = control();
    let wrong = control_with(b"another", SessionTimeouts::default());
    for _ in 0..3 {
        let error = ask(&wrong, &server).expect_err("refused");
        assert!(
            matches!(&error, Error::Authentication(text) if text.contains("KVPIPE_TOKEN")),
            "{error}"
        );
    }
    assert_eq!(ask(&control(), &server), Ok(undescribed()));
    let refused =
        |event: ControlEvent| matches!(event, ControlEvent::Log(text) if text.contains("token"));
    assert!(server.drain().into_iter().any(refused));
}

#[test]
fn another_service_is_refused_with_both_names() {
    let Some(search) = common::ucx() else { return };
    let (server, agent) = (control(), agent(&search));
    let error = agent
        .connect(&address(&server).to_string())
        .expect("connect")
        .wait_for(TIMEOUT)
        .expect_err("another service");
    assert!(
        matches!(&error, Error::Incompatible { field, .. } if field == "service"),
        "{error}"
    );
}

#[test]
fn strangers_on_the_port_disturb_no_session() {
    let (server, friend) = (control(), control());
    ask(&friend, &server).expect("the first session");
    let mut strangers = Vec::new();
    let oversized = [&u32::MAX.to_le_bytes()[..], &[0; 100]].concat();
    let large = [&60_000u32.to_le_bytes()[..], &vec![1; 60_000]].concat();
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        &common::pattern(1 << 20, 1),
        &oversized,
        &large,
        &[0, 0, 0, 0],
        &[1, 0, 0, 0, 7],
        b"",
        b"\x05",
    ] {
        let mut stranger = TcpStream::connect(address(&server)).expect("connect");
        // It may be cut off while it speaks.
        let _ = stranger.write_all(bytes);
        strangers.push(stranger);
    }
    assert_eq!(ask(&friend, &server), Ok(undescribed()));
    assert_eq!(ask(&control(), &server), Ok(undescribed()));
    for stranger in strangers.iter_mut().take(6) {
        stranger.set_read_timeout(Some(TIMEOUT)).expect("timeout");
        let ended = std::io::copy(&mut Read::by_ref(stranger).take(4096), &mut std::io::sink());
        assert!(
            ended.is_ok()
                || ended.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset),
            "cut off"
        );
    }
}

#[test]
fn a_silent_connection_is_closed_at_the_handshakes_deadline() {
    let timeouts = SessionTimeouts {
        handshake: Duration::from_millis(100),
        ..SessionTimeouts::default()
    };
    let server = control_with(TOKEN, timeouts);
    let mut silent = TcpStream::connect(address(&server)).expect("connect");
    silent.set_read_timeout(Some(TIMEOUT)).expect("timeout");
    assert_eq!(silent.read(&mut [0]).expect("closed"), 0);
}

#[test]
fn a_frame_over_the_cap_ends_only_its_own_session() {
    let Some(search) = common::ucx() else { return };
    let server = agent(&search);
    let address = server.address().expect("address");
    let mut hostile = Raw::connect(address, SessionKind::Agent);
    hostile
        .stream
        .write_all(&u32::MAX.to_le_bytes())
        .expect("write");
    assert!(hostile.is_closed());
    let friend = agent(&search);
    friend
        .connect(&address.to_string())
        .expect("connect")
        .wait_for(TIMEOUT)
        .expect("connected");
}

#[test]
fn very_many_small_frames_are_taken_in_good_time() {
    let Some(search) = common::ucx() else { return };
    let server = agent(&search);
    let address = server.address().expect("address");
    let mut busy = Raw::connect(address, SessionKind::Agent);
    // Heartbeats, and questions for some.
    let frames: Vec<u8> = std::iter::repeat_n([1, 0, 0, 0, 32, 1, 0, 0, 0, 35], 1_000_000)
        .flatten()
        .collect();
    let begun = Instant::now();
    busy.stream.write_all(&frames).expect("write");
    let friend = agent(&search);
    friend
        .connect(&address.to_string())
        .expect("connect")
        .wait_for(TIMEOUT)
        .expect("connected");
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn a_peer_that_says_nothing_any_more_is_lost_at_the_deadline() {
    let Some(search) = common::ucx() else { return };
    let timeouts = SessionTimeouts {
        heartbeat: Duration::from_millis(50),
        silence: Duration::from_secs(2),
        ..SessionTimeouts::default()
    };
    let server = agent_with(&search, timeouts);
    let address = server.address().expect("address");
    // The silence begins after this, with the last word of the handshake.
    let begun = Instant::now();
    let mut silent = Raw::connect(address, SessionKind::Agent);
    let connected = Instant::now();
    assert!(silent.is_closed());
    assert!(begun.elapsed() >= timeouts.silence, "too early");
    assert!(connected.elapsed() < timeouts.silence + PROMPT);
}

#[test]
fn heartbeats_pass_a_bulk_that_takes_longer_than_the_deadline() {
    on_both_paths(|search| {
        let timeouts = SessionTimeouts {
            heartbeat: Duration::from_millis(50),
            // For a thread that has to wait for its turn on a busy machine, no time at all.
            silence: Duration::from_secs(2),
            ..SessionTimeouts::default()
        };
        let make = || {
            let agent = agent_with(search, timeouts);
            let (bytes, block) = (256 << 20, 1 << 20);
            let region = agent
                .register("kv", Buffer::zeroed(bytes), block, block)
                .expect("register")
                .wait_for(TIMEOUT)
                .expect("registered");
            (agent, region)
        };
        let ((source, _), (destination, region)) = (make(), make());
        let address = source.address().expect("address").to_string();
        let peer = destination.connect(&address).expect("connect");
        let peer = peer.wait_for(TIMEOUT).expect("connected");
        let ids: Vec<u32> = (0..256).collect();
        let plan = destination
            .prepare(&peer, (&region, ids.clone()), ("kv", ids))
            .expect("plan");
        let read = |_| {
            let options = kvpipe_core::blocks::Options::default();
            destination.read(&plan, options).expect("read")
        };
        let begun = Instant::now();
        while begun.elapsed() < timeouts.silence.mul_f32(1.2) {
            let works: Vec<_> = (0..8).map(read).collect();
            for work in works {
                work.wait_for(TIMEOUT).expect("the peer lives");
            }
        }
    });
}

#[test]
fn an_address_that_does_not_answer_ends_at_the_deadline_and_leaves_no_thread() {
    alone(|_| {
        let Some((_full, address)) = unresponsive() else {
            return;
        };
        let timeouts = SessionTimeouts {
            handshake: Duration::from_millis(300),
            ..SessionTimeouts::default()
        };
        let here = control_with(TOKEN, timeouts);
        let begun = Instant::now();
        let asked = here.query(&address, ControlQuery::Describe, TIMEOUT);
        let error = asked
            .expect("ask")
            .wait_for(TIMEOUT)
            .expect_err("no answer");
        assert!(
            matches!(&error, Error::Connect(text) if text.contains(&address)),
            "{error}"
        );
        assert!(begun.elapsed() < PROMPT);

        let patient = control();
        patient
            .query(&address, ControlQuery::Describe, TIMEOUT)
            .expect("ask");
        eventually("the thread", || connecting().then_some(()));
        patient.close();
        let closed = Instant::now();
        eventually("its end", || (!connecting()).then_some(()));
        assert!(closed.elapsed() < PROMPT);
    });
}

/// A listener whose backlog is full, where the system makes such a one: connections to it hang.
fn unresponsive() -> Option<(Vec<TcpStream>, String)> {
    use rustix::net::{AddressFamily, SocketType, bind, listen, socket};
    let listener = socket(AddressFamily::INET, SocketType::STREAM, None).expect("socket");
    bind(&listener, &SocketAddr::from(([127, 0, 0, 1], 0))).expect("bind");
    listen(&listener, 0).expect("listen");
    let listener = TcpListener::from(listener);
    let address = listener.local_addr().expect("address");
    let mut streams = Vec::new();
    for _ in 0..8 {
        let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(100)) else {
            // Kept for the rest of the process.
            std::mem::forget(listener);
            return Some((streams, address.to_string()));
        };
        streams.push(stream);
    }
    None
}

fn connecting() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").expect("tasks");
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks
        .flatten()
        .filter_map(name)
        .any(|name| name.starts_with("kvpipe-conn"))
}

#[test]
fn two_hundred_sessions_leave_no_descriptor_and_no_memory() {
    alone(|_| {
        let server = control();
        let round = || ask(&control(), &server).expect("a session");
        let count = || {
            server.drain();
            (descriptors(), resident_kib())
        };
        (0..20).for_each(|_| drop(round()));
        let before = settled(count);
        (0..200).for_each(|_| drop(round()));
        assert_as_before(before, count, 1024);
    });
}

#[test]
fn two_hundred_data_sessions_leave_no_descriptor_and_no_memory() {
    alone(|search| {
        let (server, client) = (agent(search), agent(search));
        for agent in [&server, &client] {
            let region = agent.register("kv", Buffer::zeroed(1 << 20), 4096, 4096);
            region
                .expect("register")
                .wait_for(TIMEOUT)
                .expect("registered");
        }
        let address = server.address().expect("address");
        // The client's side ends with its process, or with an error: here by a frame that is none.
        let round = || {
            let raw = Raw::connect(address, SessionKind::Agent);
            drop(raw);
        };
        let count = || {
            server.drain();
            (descriptors(), resident_kib())
        };
        (0..30).for_each(|_| round());
        let before = settled(count);
        (0..200).for_each(|_| round());
        // UCX itself keeps some 10 KiB for each worker that it has ever known.
        assert_as_before(before, count, 8 << 10);
        let peer = client.connect(&address.to_string()).expect("connect");
        peer.wait_for(TIMEOUT).expect("connected");
    });
}

/// Ends sessions the moment they begin, too: UCX crashed when an endpoint was closed before it had connected.
#[test]
fn forty_pipes_leave_no_descriptor_and_no_memory() {
    alone(|search| {
        let round = || {
            let rx = Pipe::listen("127.0.0.1:0", TOKEN, search.clone().into(), Duration::ZERO)
                .expect("listen");
            let address = rx.address().expect("address").to_string();
            let (_tx, connected) = Pipe::connect(
                &address,
                TOKEN,
                search.clone().into(),
                kvpipe_core::Integrity::Auto,
                Duration::ZERO,
                TIMEOUT,
            )
            .expect("connect");
            connected.wait_for(TIMEOUT).expect("connected");
        };
        let count = || (descriptors(), resident_kib());
        (0..10).for_each(|_| round());
        let before = settled(count);
        (0..40).for_each(|_| round());
        assert_as_before(before, count, 4 << 10);
    });
}

fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number.expect("VmRSS").parse().expect("a number")
}

/// The figures once they rest.
fn settled(count: impl Fn() -> (usize, usize)) -> (usize, usize) {
    let mut last = count();
    let mut same = 0;
    eventually("rest", || {
        std::thread::sleep(Duration::from_millis(20));
        let now = count();
        same = if now.0 == last.0 { same + 1 } else { 0 };
        last = now;
        (same >= 10).then_some(now)
    })
}

/// The end of the last session may be noticed late.
fn assert_as_before(
    before: (usize, usize),
    count: impl Fn() -> (usize, usize),
    may_grow_kib: usize,
) {
    let after = eventually("no more descriptors than before", || {
        Some(settled(&count)).filter(|now| now.0 <= before.0)
    });
    assert!(
        after.1 <= before.1 + may_grow_kib,
        "resident KiB: {} before, {} after",
        before.1,
        after.1
    );
}

#[test]
fn a_peer_that_accepts_a_session_and_says_no_more_is_a_connect_error_in_time() {
    let Some(search) = common::ucx() else { return };
    let ours = Identity::new(SessionKind::Pipe, "", Vec::new()).expect("identity");
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let address = listener.local_addr().expect("address").to_string();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("accept");
        let mut handshake = Handshake::server(&Secrets::new(TOKEN), common::plain(), "client");
        while let Ok(mut frame) = receive_frame(&mut stream) {
            let step = handshake.frame(&mut frame, &ours, |_| Ok(()));
            if let Ok(Step::Continue(frame) | Step::Admitted { frame, .. }) = step {
                send_frame(&mut stream, &frame);
            }
        }
    });
    let connected = Pipe::connect(
        &address,
        TOKEN,
        search.into(),
        kvpipe_core::Integrity::Auto,
        Duration::ZERO,
        Duration::from_secs(3),
    );
    let (_pipe, connected) = connected.expect("connect");
    let error = connected.wait_for(TIMEOUT).expect_err("not reached");
    assert!(
        matches!(&error, Error::Connect(text) if text.contains("did not establish the session")),
        "{error}"
    );
    server.join().expect("server");
}
