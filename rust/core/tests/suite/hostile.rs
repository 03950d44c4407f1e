//! A stranger at the UCX port of a process: a UCX client of our own that does not hold the token and knows of its victim
//! what a scan of ports shows. UCX authenticates nobody, so some of these tests show what kvpipe does *not* protect;
//! docs/guide/security.md says the same in words. Victim and stranger are processes of their own: either may crash.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::Instant;

use kvpipe_core::agent::{Options, Peer, Region};
use kvpipe_core::handoff::HandoffAgent;
use kvpipe_core::net::codec::{Reader, Writer};
use kvpipe_core::net::identity::SessionKind;
use kvpipe_ucx::{
    Buffer, Config, Context, EndpointId, Event, Get, Library, Memory, MemoryKind, Payload,
    RemoteKey, Search, Status, Worker,
};

use crate::agents::{BLOCK, COUNT, agent, register};
use crate::common::relay::Relay;
use crate::common::sockets::listening;
use crate::common::{self, PATIENCE, Process, Raw, alone, bytes, eventually, pattern, say};

/// What the stranger reads and writes at once. UCX serves it in software.
const SMALL: usize = 64;
/// So much that UCX's TCP writes it straight from the socket to where the header says.
const LARGE: usize = 64 << 10;
/// Where no process has memory.
const UNMAPPED: u64 = 8;

#[test]
fn peer_process() {
    let Some((_, _, mut parent)) = common::role() else {
        return;
    };
    let search = common::ucx().expect("the parent found UCX");
    let before = listening();
    let agent = agent(&search);
    let memory = Buffer::from_vec(pattern(COUNT * BLOCK, 1));
    register(&agent, "kv", &memory, BLOCK, BLOCK);
    let address = agent.address().expect("address");
    let ucx = listening()
        .into_iter()
        .find(|at| *at != address && !before.contains(at));
    say(&mut parent, &address.to_string());
    say(&mut parent, &ucx.expect("UCX listens").port().to_string());
    say(&mut parent, &memory.address().to_string());
    common::wait_for_the_end(parent);
}

/// A process with an agent, and what its attacker knows.
struct Victim {
    process: Process,
    bootstrap: String,
    /// As a scan of ports finds it.
    ucx_port: u16,
    /// Where its region is: guessed, or read on the network, where regions are told in the clear.
    base: u64,
}

impl Victim {
    fn start() -> Self {
        let mut process = Process::start("victim", "");
        let bootstrap = process.line();
        let ucx_port = process.line().parse().expect("a port");
        let base = process.line().parse().expect("an address");
        Self {
            process,
            bootstrap,
            ucx_port,
            base,
        }
    }
}

/// A peer of the victim, which holds the token.
struct Friend {
    agent: HandoffAgent,
    peer: Peer,
    region: Region,
    to: Buffer,
}

impl Friend {
    fn of(search: &Search, victim: &Victim) -> Self {
        let agent = agent(search);
        let to = Buffer::zeroed(COUNT * BLOCK);
        let region = register(&agent, "kv", &to, BLOCK, BLOCK);
        let peer = agent.connect(&victim.bootstrap).expect("connect");
        Self {
            peer: peer.wait_for(PATIENCE).expect("connected"),
            agent,
            region,
            to,
        }
    }

    /// What the victim's region holds. So it lives, and serves.
    fn reads(&self) -> Vec<u8> {
        let ids: Vec<u32> = (0..COUNT as u32).collect();
        let local = (&self.region, ids.clone());
        let plan = self.agent.prepare(&self.peer, local, ("kv", ids));
        let read = self
            .agent
            .read(&plan.expect("plan"), Options::default())
            .expect("read");
        read.wait_for(PATIENCE).expect("read");
        bytes(&self.to)
    }
}

/// A UCX client that connects to whatever listens at a port.
struct Stranger {
    worker: Worker,
    endpoint: EndpointId,
    memory: Arc<Memory>,
    key: RemoteKey,
}

impl Stranger {
    /// Its way in: the address of a worker of its own, with the victim's port in place of its own. Of an address, UCX
    /// needs no more; nothing of it is secret.
    fn at(search: &Search, port: u16) -> Self {
        let before = listening();
        let mut config = Config::new();
        config.pin("NET_DEVICES", "lo").pin("TLS", "tcp");
        let library = Library::load(search).expect("UCX");
        let context = Context::new(library, &config).expect("context");
        let worker = Worker::new(&context).expect("worker");
        let address = worker.address().expect("address");
        let own = listening().into_iter().filter(|at| !before.contains(at));
        let forged = forge(&address, own.map(|at| at.port()), port);
        // SAFETY: a worker's address but for its port.
        let endpoint = unsafe { worker.connect(&forged) }.expect("endpoint");
        let memory = context.register(Buffer::zeroed(LARGE)).expect("memory");
        let key = memory.pack_rkey().expect("key");
        let key = worker
            .unpack_rkey(endpoint, &key, MemoryKind::Host)
            .expect("key");
        Self {
            worker,
            endpoint,
            memory,
            key,
        }
    }

    fn say(&self, header: &[u8]) -> Result<(), Status> {
        let payload = Payload::Bytes(vec![0; SMALL]);
        self.worker.am_send(self.endpoint, header, payload, 1)?;
        self.ended(1)
    }

    /// What stands at an address of the victim.
    fn read(&self, at: u64, len: usize) -> Result<Vec<u8>, Status> {
        let get = Get {
            local: &self.memory,
            offset: 0,
            len,
            remote: at,
            rkey: &self.key,
            token: 2,
        };
        self.worker.get(self.endpoint, get)?;
        self.ended(2)?;
        Ok(bytes(self.memory.buffer())[..len].to_vec())
    }

    fn ended(&self, wanted: u64) -> Result<(), Status> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            self.worker.progress();
            while let Some(event) = self.worker.next_event() {
                match event {
                    Event::Done { token, result } if token == wanted => return result,
                    Event::Message { .. } => panic!("the victim answered a stranger"),
                    _ => {}
                }
            }
            common::sleep_until_event(&self.worker, None);
        }
        panic!("operation {wanted} did not end")
    }
}

/// The address with another port, and another worker's id than the one it was made from.
fn forge(address: &[u8], mut own: impl Iterator<Item = u16>, port: u16) -> Vec<u8> {
    let place = |own: u16| {
        address
            .windows(2)
            .position(|pair| pair == own.to_be_bytes())
    };
    let at = own.find_map(place).expect("a port of its own");
    let mut forged = address.to_vec();
    forged[at..at + 2].copy_from_slice(&port.to_be_bytes());
    forged[1..9].iter_mut().for_each(|byte| *byte ^= 0x5a);
    forged
}

/// Messages of UCX's TCP transport itself, below its features: `u8` kind, `u32` length, then that many bytes.
const PUT_REQUEST: u8 = 33;

/// Speaks UCX's TCP by hand.
struct Bare(TcpStream);

impl Bare {
    /// Connects as UCX does, with what a worker of our own says first.
    fn at(search: &Search, port: u16) -> Self {
        let greeting = greeting(search);
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("connect");
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
        stream.write_all(&greeting).expect("greet");
        let mut bare = Self(stream);
        bare.answer();
        bare
    }

    fn answer(&mut self) -> Vec<u8> {
        let mut head = [0; 5];
        self.0.read_exact(&mut head).expect("an answer");
        let len = Reader::new(&head[1..]).u32().expect("length");
        let mut body = vec![0; len as usize];
        self.0.read_exact(&mut body).expect("an answer");
        body
    }

    /// Writes to an address of the victim, until that says that it has it.
    fn write(&mut self, at: u64, data: &[u8]) {
        let head = Writer::new(PUT_REQUEST).u32(20).u64(at);
        let head = head.u64(data.len() as u64).u32(1).finish();
        self.0.write_all(&[&head, data].concat()).expect("send");
        assert_eq!(self.answer(), 1u32.to_le_bytes());
    }
}

/// What UCX's TCP says first on a connection: a magic number of 8 bytes and a message.
fn greeting(search: &Search) -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    listener.set_nonblocking(true).expect("non-blocking");
    let stranger = Stranger::at(search, listener.local_addr().expect("address").port());
    let sent = stranger
        .worker
        .am_send(stranger.endpoint, b"", Payload::None, 1);
    sent.expect("posted");
    let mut stream = eventually("a connection", || {
        stranger.worker.progress();
        listener.accept().ok()
    })
    .0;
    stream.set_nonblocking(true).expect("non-blocking");
    let mut said = Vec::new();
    eventually("the greeting", || {
        stranger.worker.progress();
        let _ = Read::by_ref(&mut stream).take(4096).read_to_end(&mut said);
        let len = 13 + Reader::new(said.get(9..13)?).u32().ok()? as usize;
        (said.len() >= len).then(|| said.truncate(len))
    });
    said
}

#[test]
fn a_stranger_at_the_ucx_port_gets_no_message_into_a_session() {
    alone(|search| {
        let victim = Victim::start();
        let friend = Friend::of(search, &victim);
        let expected = friend.reads();
        let stranger = Stranger::at(search, victim.ucx_port);
        for seed in 0..1000 {
            // A session guessed, then each kind of message in turn.
            let header = pattern(seed as usize % 48, seed);
            stranger.say(&header).expect("sent");
        }
        assert!(friend.reads() == expected);
    });
}

/// Not protected: UCX's TCP checks no key and no bounds. It serves writes whatever UCX's features are: measured without
/// `UCP_FEATURE_RMA` and with `UCX_TCP_PUT_ENABLE=n` too.
#[test]
fn a_stranger_at_the_ucx_port_reads_and_writes_memory_without_any_token() {
    alone(|search| {
        let victim = Victim::start();
        let friend = Friend::of(search, &victim);
        let stranger = Stranger::at(search, victim.ucx_port);
        let mut expected = friend.reads();
        for len in [SMALL, LARGE] {
            assert!(stranger.read(victim.base, len).expect("read") == expected[..len]);
            let written = pattern(len, 99);
            Bare::at(search, victim.ucx_port).write(victim.base, &written);
            expected[..len].copy_from_slice(&written);
            assert!(friend.reads() == expected);
        }
    });
}

/// Not protected: where there is no memory, the read ends the process.
#[test]
fn a_stranger_at_the_ucx_port_can_end_the_process() {
    alone(|search| {
        let mut victim = Victim::start();
        let stranger = Stranger::at(search, victim.ucx_port);
        victim.process.expect_segmentation_fault();
        let _ = stranger.read(UNMAPPED, SMALL);
        let ended = eventually("its end", || victim.process.ended());
        assert_eq!(ended.signal(), Some(libc::SIGSEGV), "{ended}");
    });
}

/// UCX's messages still carry the id in the clear: nothing seals them.
#[test]
fn the_handshake_shows_neither_the_sessions_id_nor_an_identity_to_who_reads_the_network() {
    alone(|search| {
        let victim = Victim::start();
        let relay = Relay::to(victim.bootstrap.parse().expect("address"));
        let raw = Raw::begin(search, relay.address, SessionKind::Agent);
        let said = [relay.client_said(), relay.server_said()].concat();
        let shows = |part: &[u8]| said.windows(part.len()).any(|window| window == part);
        assert!(shows(b"KVPP"), "{} bytes", said.len());
        assert!(!shows(&raw.session_id));
        let boot_id = std::fs::read("/proc/sys/kernel/random/boot_id").expect("boot id");
        assert!(!shows(boot_id.trim_ascii()));
    });
}
