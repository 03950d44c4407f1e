//! Many connections at once: those of peers, and those of silent strangers that hold places.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvpipe_core::Error;
use kvpipe_core::control::{Control, ControlQuery, ControlReply, ControlTimeouts};
use kvpipe_core::net::handshake::Handshake;
use kvpipe_core::net::secret::Secrets;
use kvpipe_core::pipe::Pipe;
use kvpipe_core::session::SessionTimeouts;
use kvpipe_core::transport::{MemoryPath, Transport};

use crate::common::sockets::{descriptors, num_connections};
use crate::common::{
    self, PROMPT, Process, TIMEOUT, TOKEN, alone, eventually, say, send_frame, undescribed,
};

/// Engines or strangers of a crowd.
const CROWD: usize = 300;
const IN_MEMORY: Transport = Transport::Memory(MemoryPath::RemoteRead);

fn control_with(listen: Option<&str>, token: &[u8], handshake: Duration) -> Control {
    let session = SessionTimeouts {
        handshake,
        ..SessionTimeouts::default()
    };
    let timeouts = ControlTimeouts {
        session,
        lease: TIMEOUT,
        open: TIMEOUT,
        handoff: TIMEOUT,
    };
    Control::new(listen, token, "engine", vec![], timeouts).expect("control")
}

fn control() -> Control {
    control_with(
        Some("127.0.0.1:0"),
        TOKEN,
        SessionTimeouts::default().handshake,
    )
}

fn client() -> Control {
    control_with(None, TOKEN, SessionTimeouts::default().handshake)
}

fn address(control: &Control) -> SocketAddr {
    control.address().expect("address")
}

fn ask(from: &Control, address: SocketAddr) -> kvpipe_core::Result<ControlReply> {
    from.query(&address.to_string(), ControlQuery::Describe, TIMEOUT)
        .expect("ask")
        .wait_for(TIMEOUT)
}

/// A control port in another process.
#[test]
fn peer_process() {
    let Some((_, _, mut parent)) = common::role() else {
        return;
    };
    let server = control();
    say(&mut parent, &address(&server).to_string());
    common::wait_for_the_end(parent);
}

/// Has a crowd of engines and some strangers connect while the other side is stopped, so that all of them wait when it goes on.
fn connect_all_at_once(num_strangers: usize) {
    allow_descriptors(8192);
    let mut server = Process::start("control", "");
    let address: SocketAddr = server.line().parse().expect("address");
    let crowd: Vec<_> = (0..CROWD).map(|_| client()).collect();
    server.stop();
    let strangers: Vec<_> = (0..num_strangers)
        .map(|nth| stranger(address, nth))
        .collect();
    let query =
        |engine: &Control| engine.query(&address.to_string(), ControlQuery::Describe, TIMEOUT);
    let asked: Vec<_> = crowd.iter().map(query).collect();
    eventually("all connections", || {
        (num_connections(address) == CROWD + num_strangers).then_some(())
    });
    server.go_on();
    for asked in asked {
        let answer = asked.expect("ask").wait_for(TIMEOUT);
        assert_eq!(answer, Ok(undescribed()));
    }
    drop(strangers);
}

#[test]
fn three_hundred_engines_that_connect_at_one_instant_all_get_in() {
    alone(|_| connect_all_at_once(0));
}

#[test]
fn three_hundred_engines_get_in_behind_as_many_strangers_without_the_token() {
    alone(|_| connect_all_at_once(CROWD));
}

/// A stranger without the token: it sends nothing, stops after the first frame, or sends nonsense.
fn stranger(address: SocketAddr, nth: usize) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("connect");
    match nth % 3 {
        0 => {}
        1 => {
            let secrets = Secrets::new(b"a guess");
            let (_, hello) = Handshake::client(&secrets, common::plain(), "hub").expect("hello");
            send_frame(&mut stream, &hello);
        }
        _ => stream.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("write"),
    }
    stream
}

#[test]
fn a_silent_connection_keeps_its_place_while_no_other_waits() {
    let server = control();
    let connect = || TcpStream::connect(address(&server)).expect("connect");
    let silent: Vec<_> = (0..256).map(|_| connect()).collect();
    std::thread::sleep(Duration::from_millis(300));
    let is_open = |stream: &TcpStream| {
        stream.set_nonblocking(true).expect("nonblocking");
        let read = Read::read(&mut &*stream, &mut [0]);
        read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    assert!(silent.iter().all(is_open));
    assert_eq!(ask(&client(), address(&server)), Ok(undescribed()));
}

#[test]
fn a_thousand_silent_connections_keep_no_peer_out_and_cost_no_time() {
    alone(|_| {
        allow_descriptors(1200);
        let (server, friend) = (control(), control());
        ask(&friend, address(&server)).expect("the first session");
        let before = descriptors();
        let silent: Vec<_> = (0..1000)
            .map(|_| TcpStream::connect(address(&server)).expect("connect"))
            .collect();
        let begun = Instant::now();
        assert_eq!(ask(&client(), address(&server)), Ok(undescribed()));
        assert_eq!(ask(&friend, address(&server)), Ok(undescribed()));
        assert!(begun.elapsed() < PROMPT);
        // The other end of each that is in its handshake is here too.
        let in_flight = descriptors() - before - silent.len();
        assert!(in_flight < 300, "{in_flight} handshakes in flight");
        let before = cpu_time();
        std::thread::sleep(Duration::from_millis(500));
        let spent = cpu_time().checked_sub(before).expect("time goes on");
        assert!(spent < Duration::from_millis(100), "{spent:?} of CPU");
        drop(silent);
    });
}

/// Raises the limit of this process, where the system allows it.
fn allow_descriptors(count: u64) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < count) {
        limit.current = Some(count);
        setrlimit(Resource::Nofile, limit).expect("a limit of descriptors");
    }
}

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), 0) + Duration::from_nanos(time.tv_nsec.unsigned_abs())
}

/// In front of a server: cuts the first connections, and passes the others on. Returns its address and how many it has seen.
fn cutting(num_cut: usize, server: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let address = listener.local_addr().expect("address");
    let count = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&count);
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.expect("accept");
            match seen.fetch_add(1, Ordering::Relaxed) {
                nth if nth >= num_cut => pass(&client, server),
                // With its HELLO unread the connection is reset, else it is closed.
                nth if nth % 2 == 1 => drop(client.read(&mut [0; 256])),
                _ => {}
            }
        }
    });
    (address, count)
}

/// Passes on what both sides send, until they end.
fn pass(client: &TcpStream, server: SocketAddr) {
    let server = TcpStream::connect(server).expect("connect");
    for (from, to) in [(client, &server), (&server, client)] {
        let ends = (from.try_clone(), to.try_clone());
        let (mut from, mut to) = (ends.0.expect("clone"), ends.1.expect("clone"));
        std::thread::spawn(move || std::io::copy(&mut from, &mut to));
    }
}

#[test]
fn a_connection_that_is_cut_in_its_handshake_is_made_again() {
    let server = control();
    let (front, count) = cutting(4, address(&server));
    assert_eq!(ask(&client(), front), Ok(undescribed()));
    assert_eq!(count.load(Ordering::Relaxed), 5);
}

#[test]
fn a_port_that_cuts_every_connection_is_a_connect_error_with_the_cause_and_the_number_of_attempts()
{
    let server = control();
    let (front, count) = cutting(usize::MAX, address(&server));
    let client = control_with(None, TOKEN, Duration::from_secs(2));
    let error = ask(&client, front).expect_err("cut");
    let is_named = |text: &str| text.contains("in the handshake") && text.contains("attempt");
    assert!(
        matches!(&error, Error::Connect(text) if is_named(text)),
        "{error}"
    );
    assert!(count.load(Ordering::Relaxed) > 2);
}

#[test]
fn a_peer_that_refuses_with_a_reason_is_not_asked_again() {
    let server = control();
    let (front, count) = cutting(0, address(&server));
    let stranger = control_with(None, b"another", SessionTimeouts::default().handshake);
    let error = ask(&stranger, front).expect_err("refused");
    assert!(matches!(error, Error::Authentication(_)), "{error}");
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

#[test]
fn a_control_port_without_a_listener_is_known_at_once() {
    let closed = control();
    let address = address(&closed);
    drop(closed);
    let begun = Instant::now();
    let error = ask(&client(), address).expect_err("no listener");
    assert!(matches!(error, Error::Connect(_)), "{error}");
    assert!(begun.elapsed() < PROMPT);
}

/// A port without a listener, and a socket that keeps others from getting it.
fn unused_port() -> (OwnedFd, String) {
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket, sockopt};
    let keeps = socket(AddressFamily::INET, SocketType::STREAM, None).expect("socket");
    sockopt::set_socket_reuseaddr(&keeps, true).expect("option");
    bind(&keeps, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("bind");
    let address = SocketAddrV4::try_from(getsockname(&keeps).expect("address")).expect("IPv4");
    (keeps, address.to_string())
}

fn connect_pipe(address: &str) -> (Pipe, kvpipe_core::work::Work<()>) {
    let connected = Pipe::connect(
        address,
        TOKEN,
        IN_MEMORY,
        kvpipe_core::Integrity::Auto,
        Duration::ZERO,
        TIMEOUT,
    );
    connected.expect("connect")
}

#[test]
fn a_pipe_waits_for_its_receiver_to_listen() {
    let (_keeps, address) = unused_port();
    let (_sender, connected) = connect_pipe(&address);
    std::thread::sleep(Duration::from_millis(200));
    assert!(!connected.is_completed());
    let _receiver = Pipe::listen(&address, TOKEN, IN_MEMORY, Duration::ZERO).expect("listen");
    connected.wait_for(TIMEOUT).expect("connected");
}

#[test]
fn a_pipe_that_waits_for_its_receiver_is_closed_at_once() {
    let (_keeps, address) = unused_port();
    let (sender, connected) = connect_pipe(&address);
    std::thread::sleep(Duration::from_millis(100));
    let begun = Instant::now();
    sender.stop();
    assert!(begun.elapsed() < PROMPT);
    let error = connected.wait_for(TIMEOUT).expect_err("closed");
    assert!(matches!(error, Error::Closed(_)), "{error}");
}
