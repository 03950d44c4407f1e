//! A peer in the same process that passes the handshake and then does what a script says.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use kvpipe_ucx::{Buffer, EndpointId};
use rustix::net::sockopt;

use super::script::{ADDRESS, Flags, KEY, Step, Victim};
use crate::checksum;
use crate::net::handshake::{Handshake, SessionId, Step as Shake};
use crate::net::identity::{Identity, SessionKind};
use crate::transport::{Memory, MemoryPath, Payload, Transport, Worker};

/// What both sides share.
pub(super) const TOKEN: &[u8] = b"token";
/// Of the peer's memory.
const LEN: usize = 64 << 10;
/// Of what the other side says, so much is kept.
const HEARD: usize = 64 << 10;
/// Looks at a socket during the handshake, which takes the other side a thread.
const LOOKS: usize = 1_000_000;

pub(super) fn transport(flags: Flags) -> Transport {
    Transport::Memory(if flags.is_get() {
        MemoryPath::RemoteRead
    } else {
        MemoryPath::Stream
    })
}

/// Its data plane.
struct Plane {
    worker: Worker,
    memory: Arc<Memory>,
    endpoint: Option<EndpointId>,
}

pub(super) struct Hostile {
    listener: Option<TcpListener>,
    stream: Option<TcpStream>,
    inbox: Vec<u8>,
    /// What the other side has said on the socket since the handshake, as far as anybody looks at it.
    heard: Vec<u8>,
    identity: Identity,
    plane: Option<Plane>,
    session_id: SessionId,
}

fn plane(transport: &Transport) -> Plane {
    let context = transport.open(Ipv4Addr::LOCALHOST.into()).expect("twin");
    Plane {
        worker: context.worker().expect("worker"),
        memory: context.register(Buffer::zeroed(LEN)).expect("memory"),
        endpoint: None,
    }
}

impl Hostile {
    /// One that is connected to, at the address.
    pub(super) fn listen(kind: SessionKind, transport: Option<&Transport>) -> (Self, String) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let address = listener.local_addr().expect("address").to_string();
        let mut hostile = Self::new(kind, transport);
        hostile.listener = Some(listener);
        (hostile, address)
    }

    /// One that connects.
    pub(super) fn connect(
        kind: SessionKind,
        transport: Option<&Transport>,
        address: Option<SocketAddr>,
    ) -> Self {
        let mut hostile = Self::new(kind, transport);
        let stream = TcpStream::connect(address.expect("address")).expect("connect");
        hostile.take(stream);
        hostile
    }

    fn new(kind: SessionKind, transport: Option<&Transport>) -> Self {
        Self {
            listener: None,
            stream: None,
            inbox: Vec::new(),
            heard: Vec::new(),
            identity: Identity::new(kind, "hostile", Vec::new()).expect("identity"),
            plane: transport.map(plane),
            session_id: [0; 16],
        }
    }

    fn take(&mut self, stream: TcpStream) {
        // Millions of conversations: none may leave a port in TIME_WAIT.
        sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).expect("linger");
        stream.set_nonblocking(true).expect("nonblocking");
        stream.set_nodelay(true).expect("nodelay");
        self.stream = Some(stream);
    }

    /// Passes the handshake, but for what the flags leave out.
    pub(super) fn meet(&mut self, victim: &impl Victim, flags: Flags) {
        if let Some(plane) = &self.plane
            && !flags.is_unreachable()
        {
            self.identity.ucx_address = plane.worker.address().expect("address");
        }
        let (mut handshake, hello) = if let Some(listener) = self.listener.take() {
            victim.round();
            let stream = listener.accept().expect("accept").0;
            self.take(stream);
            (Handshake::server(TOKEN, "victim").expect("server"), None)
        } else {
            let (handshake, hello) = Handshake::client(TOKEN, "victim").expect("client");
            (handshake, Some(hello))
        };
        if let Some(hello) = hello {
            self.send(&hello);
        }
        for _ in 0..LOOKS {
            victim.round();
            self.fill();
            while let Some(frame) = self.next_frame() {
                let ours = self.identity.clone();
                let step = handshake.frame(&frame, &ours, |_| Ok(()));
                if self.shake(step.expect("an honest peer"), flags) {
                    return;
                }
            }
            std::thread::yield_now();
        }
        panic!("no handshake")
    }

    /// Goes on with the handshake; whether it is over.
    fn shake(&mut self, step: Shake, flags: Flags) -> bool {
        match step {
            Shake::Continue(frames) => frames.iter().for_each(|frame| self.send(frame)),
            Shake::Admitted {
                frames,
                peer,
                session_id,
                is_ready,
            } => {
                self.session_id = session_id;
                if is_ready && flags.is_unready() {
                    return true;
                }
                for frame in &frames {
                    self.send(frame);
                }
                if let Some(plane) = &mut self.plane {
                    let endpoint = plane.worker.connect(&peer.ucx_address);
                    plane.endpoint = Some(endpoint.expect("endpoint"));
                }
                if is_ready {
                    self.message(&[0], &[]);
                    return true;
                }
            }
            Shake::Ready => {
                if !flags.is_unready() {
                    self.message(&[0], &[]);
                }
                return true;
            }
            Shake::Refuse(_, error) => panic!("an honest peer was refused: {error}"),
        }
        false
    }

    fn fill(&mut self) {
        if let Some(stream) = &mut self.stream {
            let _ = stream.read_to_end(&mut self.inbox);
        }
    }

    fn next_frame(&mut self) -> Option<Vec<u8>> {
        let (len, rest) = self.inbox.split_first_chunk::<4>()?;
        let len = u32::from_le_bytes(*len) as usize;
        let frame = rest.get(..len)?.to_vec();
        self.inbox.drain(..4 + len);
        Some(frame)
    }

    /// Does not shake hands, but knows where the data plane is.
    pub(super) fn stand_before(mut self, ucx_address: &[u8]) -> Self {
        if let Some(listener) = self.listener.take() {
            let stream = listener.accept().expect("accept").0;
            self.take(stream);
        }
        if let Some(plane) = &mut self.plane {
            plane.endpoint = plane.worker.connect(ucx_address).ok();
        }
        self
    }

    /// What the other side has said.
    pub(super) fn into_heard(self) -> Vec<u8> {
        self.heard
    }

    /// Takes what has come.
    pub(super) fn listen_to(&mut self) {
        self.fill();
        self.heard.append(&mut self.inbox);
        self.heard.truncate(HEARD);
        if let Some(plane) = &self.plane {
            plane.worker.progress();
            while plane.worker.next_event().is_some() {}
        }
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Some(stream) = &mut self.stream {
            let _ = stream.write_all(bytes);
        }
    }

    fn send(&mut self, frame: &[u8]) {
        self.write(&(frame.len() as u32).to_le_bytes());
        self.write(frame);
    }

    fn message(&self, header: &[u8], payload: &[u8]) {
        self.post([&self.session_id[..], header].concat(), payload);
    }

    fn post(&self, header: Vec<u8>, payload: &[u8]) {
        let Some(plane) = &self.plane else { return };
        if let Some(endpoint) = plane.endpoint {
            let payload = Payload::Bytes(payload.to_vec());
            let _ = plane.worker.am_send(endpoint, header, payload, 0);
        }
    }

    /// Puts its own address and key where the script says.
    fn fill_in(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        let Some(plane) = &self.plane else {
            return bytes;
        };
        let address = (plane.memory.buffer().address() as u64).to_le_bytes();
        let key = plane.memory.pack_rkey().expect("key");
        for (placeholder, value) in [(ADDRESS, &address[..]), (KEY, &key)] {
            let placeholder = placeholder.to_le_bytes();
            let at = |bytes: &[u8]| bytes.windows(8).position(|window| window == placeholder);
            while let Some(at) = at(&bytes) {
                bytes[at..at + 8].copy_from_slice(value);
            }
        }
        bytes
    }

    pub(super) fn act(&mut self, step: Step) {
        match step {
            Step::Socket(bytes) => self.write(&bytes),
            Step::Connection(frame) => self.send(&frame),
            Step::Frame(frame) => {
                let frame = self.fill_in(frame);
                self.send(&[&[33], &frame[..]].concat());
            }
            Step::Message(header, payload) => {
                let (header, payload) = (self.fill_in(header), self.fill_in(payload));
                self.message(&header, &payload);
            }
            Step::Sealed(header, payload) => {
                let (mut header, payload) = (self.fill_in(header), self.fill_in(payload));
                header.extend(checksum::of(&payload).to_le_bytes());
                self.message(&header, &payload);
            }
            Step::Stranger(header) => self.post(header, &[]),
            Step::Shut => {
                if let Some(stream) = &self.stream {
                    let _ = stream.shutdown(std::net::Shutdown::Write);
                }
            }
            Step::Leave => self.plane = None,
            Step::User(..) => {}
        }
    }
}
