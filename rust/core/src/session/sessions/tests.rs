use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use kvpipe_ucx::{Buffer, Config, Library, MemoryKind, Search};

use super::*;
use crate::net::identity::{Identity, SessionKind};
use crate::reactor::{Next, ReactorCore};
use crate::session::FarEnd;
use crate::transport::{Context, DataPath, Get, Memory, MemoryPath, RemoteKey, Transport};

/// Notes at each command whether the session had failed.
#[derive(Default)]
struct FailureNotes(Vec<bool>);

impl Service for FailureNotes {
    type Command = SessionKey;

    fn command(&mut self, links: &mut Links, session: SessionKey) {
        self.0.push(links.has_failed(session));
    }
    fn session_up(&mut self, _links: &mut Links, _session: SessionKey, _peer: &Identity) {}
    fn session_down(&mut self, _links: &mut Links, _session: SessionKey, _error: Error) {}
}

fn sessions<S: Service>(
    links: Links,
    service: S,
    commands: CommandReceiver<S::Command>,
) -> Sessions<S> {
    Sessions {
        links,
        service,
        commands,
        listener: None,
    }
}

#[test]
fn a_command_that_comes_while_the_end_of_a_session_is_seen_knows_of_it() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut links = Links::manual(None);
    let session = links.add_accepted(stream, "peer".to_owned()).unwrap();
    let (send, receiver) = CommandReceiver::manual();
    let mut sessions = sessions(links, FailureNotes::default(), receiver);
    drop(listener.accept().unwrap());
    while sessions.service.0.last() != Some(&true) {
        // The end is on its way, and a command is there whenever it is seen.
        send(session);
        sessions.receive(session);
        let has_failed = sessions.links.has_failed(session);
        assert_eq!(sessions.service.0.last(), Some(&has_failed));
    }
}

#[test]
fn one_poll_receives_from_all_peers_that_have_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut links = Links::manual(None);
    let (begun, poller) = (links.now(), Arc::clone(&links.poller));
    let mut peer = |_| {
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = listener.accept().unwrap().0;
        peer.write_all(&[0]).unwrap();
        stream.peek(&mut [0]).unwrap();
        (links.add_accepted(stream, "peer".to_owned()).unwrap(), peer)
    };
    let peers: Vec<_> = (0..200).map(&mut peer).collect();
    let (_send, receiver) = CommandReceiver::manual();
    let sessions = sessions(links, FailureNotes::default(), receiver);
    let mut core = ReactorCore::new(sessions, poller, Duration::ZERO).unwrap();
    core.poll_sockets(Instant::now());
    let has_received =
        |(session, _): &(SessionKey, TcpStream)| core.handler.links.last_rx(*session) > Some(begun);
    assert_eq!(peers.iter().filter(|peer| has_received(peer)).count(), 200);
}

const SESSION: SessionKey = 20;

/// A session with a peer of this UCX address, whose data path is probed next; the other end of its connection.
fn establishing(address: Vec<u8>) -> (Sessions<FailureNotes>, FarEnd) {
    let context = Transport::Memory(MemoryPath::RemoteRead).open().unwrap();
    let mut links = Links::manual(Some(context));
    let far = links.add_manual(SESSION, None);
    let mut identity = Identity::new(SessionKind::Pipe, "", Vec::new()).unwrap();
    identity.ucx_address = address;
    let session = links.sessions.get_mut(&SESSION).unwrap();
    session.state = SessionState::Establishing(Box::new(identity));
    let (_send, receiver) = CommandReceiver::manual();
    (sessions(links, FailureNotes::default(), receiver), far)
}

fn peer() -> Worker {
    let context = Transport::Memory(MemoryPath::RemoteRead).open().unwrap();
    context.worker().unwrap().unwrap()
}

fn stream() -> DataPath {
    DataPath::Stream("tcp".to_owned())
}

#[test]
fn a_session_whose_devices_do_not_connect_in_half_of_the_time_that_is_left_goes_on_without() {
    let peer = peer();
    let (mut it, _far) = establishing(peer.address().unwrap());
    let (begun, handshake) = (
        it.links.sessions[&SESSION].begun,
        it.links.timeouts().handshake,
    );
    // The peer began to listen late.
    it.set_now(begun + handshake * 8 / 10);
    it.establish(SESSION);
    for (percent, data_path) in [(89, None), (90, Some(stream()))] {
        it.set_now(begun + handshake * percent / 100);
        it.expire();
        assert_eq!(it.links.data_path(SESSION), data_path);
    }
    assert!(!it.links.has_devices(SESSION));
}

#[test]
fn devices_have_a_second_left_once_the_peer_goes_without_and_all_their_time_if_it_reads() {
    let read = DataPath::RemoteRead("rc_mlx5".to_owned());
    for (theirs, after, is_up) in [
        (stream(), 999, false),
        (stream(), 1000, true),
        (read, 1000, false),
    ] {
        let peer = peer();
        let (mut it, _far) = establishing(peer.address().unwrap());
        let begun = it.links.sessions[&SESSION].begun;
        it.set_now(begun);
        it.establish(SESSION);
        it.handle_session_event(SESSION, SessionEvent::DataPath(theirs))
            .unwrap();
        it.set_now(begun + Duration::from_millis(after));
        it.expire();
        assert_eq!(it.links.is_up(SESSION), is_up);
    }
}

#[test]
fn a_session_whose_devices_have_no_way_to_the_peers_goes_on_without() {
    let unknown = vec![0; 8];
    let ended = peer().address().unwrap();
    for address in [unknown, ended] {
        let (mut it, _far) = establishing(address);
        it.establish(SESSION);
        assert!(!it.links.has_devices(SESSION));
        assert_eq!(it.links.data_path(SESSION), Some(stream()));
    }
}

#[test]
fn a_reactor_that_polls_receives_before_it_sleeps() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut links = Links::manual(None);
    let (begun, poller) = (links.now(), Arc::clone(&links.poller));
    let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let session = links.add_accepted(listener.accept().unwrap().0, "peer".to_owned());
    let (_send, receiver) = CommandReceiver::manual();
    let sessions = sessions(links, FailureNotes::default(), receiver);
    let mut core = ReactorCore::new(sessions, poller, Duration::from_secs(60)).unwrap();
    peer.write_all(&[0]).unwrap();
    let session = session.unwrap();
    while core.handler.links.last_rx(session) == Some(begun) {
        assert!(matches!(core.run_once(), Next::Poll), "it sleeps");
    }
}

/// Over TCP, where a read waits for the peer. `None` after saying why there is no UCX.
#[allow(clippy::print_stderr, reason = "a skipped test says why")]
fn ucx_over_tcp() -> Option<Context> {
    let search = Search {
        explicit: std::env::var_os("KVPIPE_UCX_LIB").map(PathBuf::from),
        wheel_dir: None,
    };
    let library = Library::load(&search).map_err(|error| eprintln!("skipped: {error}"));
    let mut config = Config::new();
    config.pin("TLS", "tcp");
    config.pin("NET_DEVICES", "lo");
    let context = kvpipe_ucx::Context::new(library.ok()?, &config);
    Some(Context::Ucx {
        context: context.expect("context"),
        reads_processes: true,
    })
}

/// A peer that does nothing, as if it was stopped, until it is progressed.
struct StoppedPeer {
    worker: Worker,
    memory: Arc<Memory>,
}

/// Reads from a peer, and reports the error with which it ends.
struct Reading {
    peer: (Vec<u8>, u64, Vec<u8>),
    into: Arc<Memory>,
    key: Option<RemoteKey>,
    ended: Sender<String>,
}

impl Service for Reading {
    type Command = ();

    #[expect(unsafe_code, reason = "as the data plane connects")]
    fn command(&mut self, links: &mut Links, _command: ()) {
        let (address, remote, packed) = &self.peer;
        let worker = links
            .data
            .as_ref()
            .expect("data plane")
            .worker
            .as_ref()
            .expect("UCX");
        // SAFETY: the peer's worker has written it.
        let endpoint = unsafe { worker.connect(address) }.expect("connect");
        let key = worker.unpack_rkey(endpoint, packed, MemoryKind::Host);
        let key = self.key.insert(key.expect("unpack"));
        let get = Get {
            local: &self.into,
            offset: 0,
            len: 64,
            remote: *remote,
            key,
            token: 1,
        };
        worker.get(endpoint, get).expect("get");
    }
    fn session_up(&mut self, _links: &mut Links, _session: SessionKey, _peer: &Identity) {}
    fn session_down(&mut self, _links: &mut Links, _session: SessionKey, _error: Error) {}
    fn stop(&mut self, links: &mut Links) {
        let _ = self.ended.send(links.closed("closed").to_string());
    }
}

#[test]
fn a_read_of_a_stopped_peer_outlives_its_reactor_with_its_memory_until_the_peer_goes_on() {
    let (Some(context), Some(theirs)) = (ucx_over_tcp(), ucx_over_tcp()) else {
        return;
    };
    let register = |context: &Context| context.register(Buffer::zeroed(64)).expect("register");
    let peer = StoppedPeer {
        worker: theirs.worker().expect("worker").expect("UCX"),
        memory: register(&theirs),
    };
    let into = register(&context);
    let (ended, end) = channel();
    let card = (
        peer.worker.address().expect("address"),
        peer.memory.buffer().address() as u64,
        peer.memory.pack_rkey().expect("key"),
    );
    let reading = Reading {
        peer: card,
        into: Arc::clone(&into),
        key: None,
        ended,
    };
    let (send, receiver) = CommandReceiver::manual();
    let links = Links::manual(Some(context));
    let (pending, poller) = (links.pending_reads().clone(), Arc::clone(&links.poller));
    let sessions = sessions(links, reading, receiver);
    let mut core = ReactorCore::new(sessions, poller, Duration::ZERO).unwrap();
    send(());
    core.run_once();
    assert_eq!(pending.check(), Ok(()), "it has not been closed");
    core.handler.end();
    let error = end.recv().expect("it has ended");
    assert!(error.contains("1 reads have not ended"), "{error}");
    assert!(matches!(pending.check(), Err(Error::Timeout(_))));
    let kept = ucx(&into);
    drop(into);
    assert_eq!(Arc::strong_count(&kept), 2, "ours and the read's");
    let give_up = Instant::now() + Duration::from_secs(20);
    while pending.check().is_err() && Instant::now() < give_up {
        if peer.worker.progress() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        while peer.worker.next_event().is_some() {}
    }
    assert_eq!(pending.check(), Ok(()));
    assert_eq!(Arc::strong_count(&kept), 1);
}

/// UCX's own, which its operations hold.
fn ucx(memory: &Memory) -> Arc<kvpipe_ucx::Memory> {
    match memory {
        Memory::Ucx(memory) => Arc::clone(memory),
        Memory::Host(_) | Memory::Twin(_) => panic!("of UCX"),
    }
}

const HEARTBEAT: [u8; 5] = [1, 0, 0, 0, 32];
const FURTHER: SessionKey = SESSION + 1;

/// Sends these bytes each second on a session's own connection or on a further one, whose session is alive. Returns the second
/// in which that connection is given up; none if it is not.
fn lost_after(is_further: bool, first: &[u8], each_s: &[u8], num_s: u64) -> Option<u64> {
    let mut links = Links::manual(None);
    let (mut further, now) = (links.add_manual(FURTHER, None), links.now());
    let link = links.sessions.remove(&FURTHER).unwrap().link.unwrap();
    let mut own = links.add_manual(SESSION, None);
    let session = links.sessions.get_mut(&SESSION).unwrap();
    session.bulk.add(FURTHER, 0, link, now);
    links.bulk.insert(FURTHER, SESSION);
    let (_send, receiver) = CommandReceiver::manual();
    let mut it = sessions(links, FailureNotes::default(), receiver);
    let begun = it.links.now();
    it.links.timers.set(SESSION, begun);
    let (tried, other) = if is_further {
        (&mut further, &mut own)
    } else {
        (&mut own, &mut further)
    };
    tried.send(first);
    (0..=num_s).find(|second| {
        it.set_now(begun + Duration::from_secs(*second));
        tried.send(each_s);
        other.send(&HEARTBEAT);
        it.handle_readiness(SESSION);
        it.handle_readiness(FURTHER);
        it.expire();
        let has_failed = it.links.has_failed(SESSION);
        let is_lost = !it.links.bulk.contains_key(&FURTHER);
        let (of_tried, of_other) = if is_further {
            (is_lost, has_failed)
        } else {
            (has_failed, is_lost)
        };
        assert!(!of_other, "the other connection is alive");
        of_tried
    })
}

#[test]
fn a_connection_whose_frame_never_comes_whole_is_lost_although_bytes_come() {
    let mut changed = HEARTBEAT;
    changed[1] = 1;
    for is_further in [false, true] {
        assert_eq!(lost_after(is_further, &HEARTBEAT, &HEARTBEAT, 30), None);
        assert_eq!(lost_after(is_further, &changed, &HEARTBEAT, 30), Some(10));
    }
}

#[test]
fn a_connection_whose_large_frame_comes_slowly_is_not_lost() {
    let len = 30_u32 << 20;
    let (fast, slow) = (vec![33; 128 << 10], [33; 1 << 10]);
    for is_further in [false, true] {
        assert_eq!(lost_after(is_further, &len.to_le_bytes(), &fast, 60), None);
        assert_eq!(
            lost_after(is_further, &len.to_le_bytes(), &slow, 60),
            Some(10)
        );
    }
}
