//! A peer in the same process that passes the handshake and then does what a script says.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use kvpipe_core::checksum;
use kvpipe_core::fuzzing::PeerPlane;
use kvpipe_core::net::encryption::{Encryption, EncryptionOffer};
use kvpipe_core::net::handshake::{Handshake, Step as HandshakeStep};
use kvpipe_core::net::identity::{Identity, SessionKind};
use kvpipe_core::net::record::Records;
use kvpipe_core::net::secret::Secrets;
use kvpipe_core::transport::{MemoryPath, Transport};
use rustix::net::sockopt;

use crate::kinds::session::GOODBYE;
use crate::script::{ADDRESS, Flags, KEY, Step, Victim};
use crate::wire;

/// The secret that both sides share.
pub(crate) const TOKEN: &[u8] = b"token";
/// The frame by which a peer reports that it reads the victim's memory, over the twin of UCX.
const DATA_PATH: &[u8] = b"\x24\x01\x06\x00\x00\x00memory";
/// Bytes of the peer's memory.
const EXPOSED_BYTES: usize = 64 << 10;
/// Most bytes of the victim's that are kept.
const RECEIVED_CAP: usize = 64 << 10;
/// Most rounds of a handshake.
const HANDSHAKE_ROUNDS: usize = 1_000_000;

pub(crate) fn transport(flags: Flags) -> Transport {
    Transport::Memory(if flags.is_remote_read() {
        MemoryPath::RemoteRead
    } else {
        MemoryPath::Stream
    })
}

pub(crate) struct Hostile {
    listener: Option<TcpListener>,
    stream: Option<TcpStream>,
    inbox: Vec<u8>,
    /// Bytes that the socket has not taken.
    outbox: Vec<u8>,
    /// The next write stops after so many bytes.
    cut: Option<usize>,
    /// The rest of a write that was cut off.
    rest: Vec<u8>,
    /// Bytes that the victim has sent on the socket since the handshake, up to [`RECEIVED_CAP`].
    received: Vec<u8>,
    /// The victim's reason, if this side broke the protocol.
    refusal: Option<String>,
    identity: Identity,
    plane: Option<PeerPlane>,
    /// The keys of its frames after the handshake, if they are sealed.
    records: Option<Records>,
}

impl Hostile {
    /// A peer that the victim connects to, at the address.
    pub(crate) fn listen(kind: SessionKind, transport: Option<&Transport>) -> (Self, String) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let address = listener.local_addr().expect("address").to_string();
        let mut hostile = Self::new(kind, transport);
        hostile.listener = Some(listener);
        (hostile, address)
    }

    /// A peer that connects to the victim.
    pub(crate) fn connect(
        kind: SessionKind,
        transport: Option<&Transport>,
        address: Option<SocketAddr>,
    ) -> Self {
        let mut hostile = Self::new(kind, transport);
        let stream = TcpStream::connect(address.expect("address")).expect("connect");
        hostile.use_stream(stream);
        hostile
    }

    fn new(kind: SessionKind, transport: Option<&Transport>) -> Self {
        Self {
            listener: None,
            stream: None,
            inbox: Vec::new(),
            outbox: Vec::new(),
            cut: None,
            rest: Vec::new(),
            received: Vec::new(),
            refusal: None,
            identity: Identity::new(kind, "hostile", Vec::new()).expect("identity"),
            plane: transport.map(|it| PeerPlane::open(it, EXPOSED_BYTES).expect("plane")),
            records: None,
        }
    }

    fn use_stream(&mut self, stream: TcpStream) {
        // A connection in TIME_WAIT occupies its port, and there are millions of conversations.
        sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).expect("linger");
        stream.set_nonblocking(true).expect("nonblocking");
        stream.set_nodelay(true).expect("nodelay");
        self.stream = Some(stream);
    }

    /// Passes the handshake, except for what the flags leave out.
    pub(crate) fn handshake(&mut self, victim: &impl Victim, flags: Flags) {
        if let Some(plane) = &self.plane
            && !flags.is_unreachable()
        {
            self.identity.ucx_address = plane.ucx_address().expect("address");
            self.identity.canary = Some(plane.canary().expect("canary"));
        }
        let secrets = Secrets::new(TOKEN);
        let ours = EncryptionOffer {
            encryption: if flags.is_sealed() {
                Encryption::On
            } else {
                Encryption::Auto
            },
            is_loopback: true,
            host: self.identity.host.clone(),
        };
        let (mut handshake, hello) = if let Some(listener) = self.listener.take() {
            victim.round();
            let stream = listener.accept().expect("accept").0;
            self.use_stream(stream);
            (Handshake::server(&secrets, ours, "victim"), None)
        } else {
            let (handshake, hello) = Handshake::client(&secrets, ours, "victim").expect("client");
            (handshake, Some(hello))
        };
        if let Some(hello) = hello {
            self.send(&hello);
        }
        for _ in 0..HANDSHAKE_ROUNDS {
            victim.round();
            self.read_socket();
            while let Some(mut frame) = self.next_frame() {
                let ours = self.identity.clone();
                let step = handshake.frame(&mut frame, &ours, |_| Ok(()));
                let is_ready = self.advance_handshake(step.expect("an honest victim"), flags);
                if let Some(is_ready) = is_ready {
                    self.records = handshake.into_records();
                    if is_ready {
                        self.establish();
                    }
                    return;
                }
            }
            std::thread::yield_now();
        }
        panic!("no handshake")
    }

    /// Sends what follows in the handshake. Returns, when it is over, whether the victim knows the session.
    fn advance_handshake(&mut self, step: HandshakeStep, flags: Flags) -> Option<bool> {
        match step {
            HandshakeStep::Continue(frame) => self.send(&frame),
            HandshakeStep::Admitted { frame, peer } => {
                if peer.is_some() && flags.is_unready() {
                    return Some(false);
                }
                self.send(&frame);
                if let Some(peer) = peer {
                    self.open_plane(&peer);
                    return Some(true);
                }
            }
            HandshakeStep::Ready(peer) => {
                self.open_plane(&peer);
                return Some(!flags.is_unready());
            }
            HandshakeStep::AskedToJoin(_) | HandshakeStep::Joined(_) => panic!("it has a session"),
            HandshakeStep::Refuse(_, error) => panic!("an honest victim was refused: {error}"),
        }
        None
    }

    /// Reports that it reads the victim's memory, where there is a data plane.
    fn establish(&mut self) {
        if self.plane.is_some() {
            self.send(DATA_PATH);
        }
    }

    fn open_plane(&mut self, victim: &Identity) {
        if let Some(plane) = &mut self.plane {
            plane.connect(&victim.ucx_address).expect("endpoint");
        }
    }

    fn read_socket(&mut self) {
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

    /// Connects socket and data plane, and passes no handshake.
    pub(crate) fn skip_handshake(mut self, ucx_address: &[u8]) -> Self {
        if let Some(listener) = self.listener.take() {
            let stream = listener.accept().expect("accept").0;
            self.use_stream(stream);
        }
        if let Some(plane) = &mut self.plane {
            plane.connect(ucx_address).expect("endpoint");
        }
        self
    }

    /// Bytes that the victim has sent on the socket, and true if it has ended the session for an error of this side.
    pub(crate) fn into_received(self) -> (Vec<u8>, Option<String>) {
        (self.received, self.refusal)
    }

    /// Receives the bytes that the victim has sent.
    pub(crate) fn receive(&mut self) {
        let before = self.inbox.len();
        self.read_socket();
        let room = RECEIVED_CAP - self.received.len();
        let come = &self.inbox[before..];
        self.received
            .extend_from_slice(&come[..come.len().min(room)]);
        while let Some(mut frame) = self.next_frame() {
            let opened = match &mut self.records {
                Some(records) => records.opener.open(&mut frame),
                None => Ok(&frame[..]),
            };
            if let Ok([GOODBYE, reason @ ..]) = opened {
                let reason = String::from_utf8_lossy(reason).into_owned();
                let is_refusal = reason.contains("protocol error");
                self.refusal = Some(reason).filter(|_| is_refusal);
            }
        }
        if let Some(plane) = &self.plane {
            plane.progress();
        }
    }

    /// Writes the bytes up to the next cut.
    fn write(&mut self, bytes: &[u8]) {
        let cut = self.cut.take().unwrap_or(bytes.len());
        let (now, later) = bytes.split_at(cut.min(bytes.len()));
        self.outbox.extend_from_slice(now);
        self.rest.extend_from_slice(later);
        self.flush();
    }

    /// Writes as much as the socket takes; true if it took anything. Bytes for a closed socket are lost.
    pub(crate) fn flush(&mut self) -> bool {
        let Some(stream) = &mut self.stream else {
            return false;
        };
        let mut num_written = 0;
        while num_written < self.outbox.len() {
            match stream.write(&self.outbox[num_written..]) {
                Ok(len) => num_written += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.outbox.clear();
                    return false;
                }
            }
        }
        self.outbox.drain(..num_written);
        num_written > 0
    }

    fn send(&mut self, frame: &[u8]) {
        let mut record = Vec::new();
        let frame = match &mut self.records {
            Some(records) if !frame.is_empty() => {
                records.sealer.seal(frame, &mut record).expect("sealed");
                &record
            }
            _ => frame,
        };
        let len = (frame.len() as u32).to_le_bytes();
        self.write(&[&len[..], frame].concat());
    }

    /// Replaces the placeholders by address and key of its memory.
    fn fill_in(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        let Some(plane) = &self.plane else {
            return bytes;
        };
        let (address, key) = plane.exposed().expect("key");
        for (placeholder, value) in [(ADDRESS, &address.to_le_bytes()[..]), (KEY, &key)] {
            let placeholder = placeholder.to_le_bytes();
            let at = |bytes: &[u8]| bytes.windows(8).position(|window| window == placeholder);
            while let Some(at) = at(&bytes) {
                bytes[at..at + 8].copy_from_slice(value);
            }
        }
        bytes
    }

    /// The same, and the checksum of the payload at the end of the header.
    fn fill_in_sealed(&self, header: Vec<u8>, payload: Vec<u8>) -> (Vec<u8>, Vec<u8>) {
        let (mut header, payload) = (self.fill_in(header), self.fill_in(payload));
        header.extend(checksum::of(&payload).to_le_bytes());
        (header, payload)
    }

    pub(crate) fn act(&mut self, step: Step) {
        if !matches!(step, Step::Cut(_)) {
            self.outbox.append(&mut self.rest);
            self.flush();
        }
        match step {
            Step::Socket(bytes) => self.write(&bytes),
            Step::Connection(frame) => self.send(&frame),
            Step::Message(header, payload) => {
                let (header, payload) = (self.fill_in(header), self.fill_in(payload));
                self.send(&wire::message(&header, &payload));
            }
            Step::Sealed(header, payload) => {
                let (header, payload) = self.fill_in_sealed(header, payload);
                self.send(&wire::message(&header, &payload));
            }
            Step::Part(header, payload, end) => {
                let (header, payload) = self.fill_in_sealed(header, payload);
                self.send(&wire::part(&header, &payload, end));
            }
            Step::Cut(at) => self.cut = Some(at.into()),
            Step::Shut => {
                self.flush();
                if let Some(stream) = &self.stream {
                    let _ = stream.shutdown(std::net::Shutdown::Write);
                }
            }
            Step::Leave => self.plane = None,
            Step::User(..) => {}
        }
    }
}
