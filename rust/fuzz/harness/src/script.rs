//! Script of a peer that breaks the protocol, decoded from any bytes; runs the victim through it.

use std::cell::RefCell;

use kvpipe_core::fuzzing::Round;
use kvpipe_core::net::codec::{Reader, Writer};
use kvpipe_core::{Integrity, Result};

use crate::hostile::Hostile;

/// A reactor is idle again within so many rounds, whatever a peer sends.
const ROUNDS: usize = 10_000;
/// Placeholders in a script for address and key of the peer's memory, which are known at run time only.
pub(crate) const ADDRESS: u64 = u64::from_le_bytes(*b"\xfaADDRESS");
pub(crate) const KEY: u64 = u64::from_le_bytes(*b"\xfaKEY_KEY");

// Kinds of steps; what is left of `KINDS` is `Step::Cut`.
const SOCKET: u8 = 0;
const CONNECTION: u8 = 1;
const BARE: u8 = 2;
const MESSAGE: u8 = 3;
const SEALED: u8 = 4;
const LARGE: u8 = 5;
const USER: u8 = 6;
const SHUT: u8 = 7;
const LEAVE: u8 = 8;
const PART: u8 = 9;
const LARGE_PART: u8 = 10;
const CUT: u8 = 11;
const KINDS: u8 = 12;

// Bits of the first byte of a script.
pub(crate) const REMOTE_READ: u8 = 1;
pub(crate) const SERVER: u8 = 2;
const UNREADY: u8 = 4;
const UNREACHABLE: u8 = 8;
pub(crate) const NO_CHECKSUMS: u8 = 16;
pub(crate) const VALIDATES: u8 = 32;
pub(crate) const ENCRYPTED: u8 = 64;

/// The first byte of a script: which data path, which side connects, and what of the handshake is missing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flags(u8);

impl Flags {
    /// The data path is remote read, else stream.
    pub(crate) fn is_remote_read(self) -> bool {
        self.0 & REMOTE_READ != 0
    }

    /// The victim connects to the peer, else the peer to the victim.
    pub(crate) fn is_server(self) -> bool {
        self.0 & SERVER != 0
    }

    /// The peer sends nothing after its proof.
    pub(crate) fn is_unready(self) -> bool {
        self.0 & UNREADY != 0
    }

    /// The peer wants its frames sealed.
    pub(crate) fn is_sealed(self) -> bool {
        self.0 & ENCRYPTED != 0
    }

    /// The peer has no UCX address.
    pub(crate) fn is_unreachable(self) -> bool {
        self.0 & UNREACHABLE != 0
    }

    /// Checksums are switched off on the victim's side.
    pub(crate) fn has_no_checksums(self) -> bool {
        self.0 & NO_CHECKSUMS != 0
    }

    /// Verification of the victim's handoffs and tensors.
    pub(crate) fn integrity(self) -> Integrity {
        if self.0 & VALIDATES != 0 {
            Integrity::Validate
        } else if self.has_no_checksums() {
            Integrity::None
        } else {
            Integrity::Auto
        }
    }
}

thread_local! {
    static REFUSAL: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The reason with which the side under test has ended the last session of this thread, if the peer broke the protocol.
pub fn drain_refusal() -> Option<String> {
    REFUSAL.take()
}

/// One action of the peer, or of the victim's user.
#[derive(Debug)]
pub(crate) enum Step {
    /// Raw bytes on the socket, sealed with no key.
    Socket(Vec<u8>),
    /// A frame of any type.
    Connection(Vec<u8>),
    /// A message: header, payload.
    Message(Vec<u8>, Vec<u8>),
    /// The same with the checksum of its payload at the end of its header.
    Sealed(Vec<u8>, Vec<u8>),
    /// A part of a stream, with the checksum of its payload at the end of its header: header, payload, last byte.
    Part(Vec<u8>, Vec<u8>, u8),
    /// The next write to the socket stops after so many bytes; the rest follows with the step after it.
    Cut(u16),
    /// The victim's user calls something.
    User(u8, u8),
    /// The peer shuts its side of the socket down.
    Shut,
    /// The peer's data plane ends.
    Leave,
}

/// A script that is being written, for a seed.
#[derive(Debug)]
pub(crate) struct Script(Writer);

fn short(writer: Writer, bytes: &[u8]) -> Writer {
    writer.u16(bytes.len() as u16).raw(bytes)
}

impl Script {
    pub(crate) fn new(flags: u8) -> Self {
        Self(Writer::new(flags))
    }

    pub(crate) fn socket(self, bytes: &[u8]) -> Self {
        Self(short(self.0.u8(SOCKET), bytes))
    }

    pub(crate) fn connection(self, bytes: &[u8]) -> Self {
        Self(short(self.0.u8(CONNECTION), bytes))
    }

    /// A message that is a header only.
    pub(crate) fn bare(self, header: &[u8]) -> Self {
        Self(short(self.0.u8(BARE), header))
    }

    pub(crate) fn message(self, header: &[u8], payload: &[u8]) -> Self {
        let writer = self.0.u8(MESSAGE).u8(header.len() as u8).raw(header);
        Self(short(writer, payload))
    }

    /// A message whose header ends with the checksum of its payload.
    pub(crate) fn sealed(self, header: &[u8], payload: &[u8]) -> Self {
        let writer = self.0.u8(SEALED).u8(header.len() as u8).raw(header);
        Self(short(writer, payload))
    }

    /// A part of a stream.
    pub(crate) fn part(self, header: &[u8], payload: &[u8]) -> Self {
        let writer = self.0.u8(PART).u8(header.len() as u8).raw(header);
        Self(short(writer, payload).u8(0))
    }

    /// A part of a stream, so many KiB of zeros, with this byte at its end.
    pub(crate) fn large_part(self, header: &[u8], kib: u8, end: u8) -> Self {
        let writer = self.0.u8(LARGE_PART).u8(header.len() as u8).raw(header);
        Self(writer.u8(kib).u8(0).u8(end))
    }

    pub(crate) fn cut(self, at: u16) -> Self {
        Self(self.0.u8(CUT).u16(at))
    }

    pub(crate) fn leave(self) -> Self {
        Self(self.0.u8(LEAVE))
    }

    pub(crate) fn user(self, what: u8, argument: u8) -> Self {
        Self(self.0.u8(USER).u8(what).u8(argument))
    }

    pub(crate) fn shut(self) -> Self {
        Self(self.0.u8(SHUT))
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.0.finish()
    }
}

fn bytes(reader: &mut Reader<'_>) -> Result<Vec<u8>> {
    let len = reader.u16()?;
    reader.raw(len.into()).map(<[u8]>::to_vec)
}

fn header(reader: &mut Reader<'_>) -> Result<Vec<u8>> {
    let len = reader.u8()?;
    reader.raw(len.into()).map(<[u8]>::to_vec)
}

/// So many KiB of one byte.
fn large(reader: &mut Reader<'_>) -> Result<Vec<u8>> {
    let (kib, fill) = (reader.u8()?, reader.u8()?);
    Ok(vec![fill; usize::from(kib) << 10])
}

fn step(reader: &mut Reader<'_>) -> Result<Step> {
    Ok(match reader.u8()? % KINDS {
        SOCKET => Step::Socket(bytes(reader)?),
        CONNECTION => Step::Connection(bytes(reader)?),
        BARE => Step::Message(bytes(reader)?, Vec::new()),
        MESSAGE => Step::Message(header(reader)?, bytes(reader)?),
        SEALED => Step::Sealed(header(reader)?, bytes(reader)?),
        LARGE => Step::Sealed(header(reader)?, large(reader)?),
        USER => Step::User(reader.u8()?, reader.u8()?),
        SHUT => Step::Shut,
        LEAVE => Step::Leave,
        PART => Step::Part(header(reader)?, bytes(reader)?, reader.u8()?),
        LARGE_PART => Step::Part(header(reader)?, large(reader)?, reader.u8()?),
        _ => Step::Cut(reader.u16()?),
    })
}

/// The flags and the complete steps of a script.
pub(crate) fn read(script: &[u8]) -> (Flags, impl Iterator<Item = Step>) {
    let (flags, rest) = script.split_first().unwrap_or((&0, &[]));
    let mut reader = Reader::new(rest);
    let steps = std::iter::from_fn(move || step(&mut reader).ok());
    (Flags(*flags), steps)
}

/// The side under test, with its user.
pub(crate) trait Victim {
    /// One round of its reactor.
    fn round(&self) -> Round;
    /// Its user calls something.
    fn act(&mut self, what: u8, argument: u8);
    /// Its user closes it.
    fn close(&mut self);
    /// Every operation that needed the peer has ended. Called when the peer is gone and the reactor still runs.
    fn check_without_peer(&self) {}
    /// Every operation has ended, and no memory of the user is kept. Called after the end of the reactor.
    fn check(&mut self);
}

/// Runs the reactor until it would sleep; returns the number of its connections.
fn settle(victim: &impl Victim) -> usize {
    for _ in 0..ROUNDS {
        match victim.round() {
            Round::Busy => {}
            Round::AtRest { num_sessions } => return num_sessions,
            Round::Over => return 0,
        }
    }
    panic!("the reactor does not become idle")
}

/// Runs the reactor until it has taken what the peer has written, as far as it takes it.
fn settle_with(victim: &impl Victim, hostile: &mut Hostile) {
    loop {
        settle(victim);
        hostile.receive();
        if !hostile.flush() {
            return;
        }
    }
}

/// Runs the reactor until it has dropped its peer. A thread may still be about to hand it the connection.
fn forget_peer(victim: &impl Victim) {
    for _ in 0..ROUNDS {
        if settle(victim) == 0 {
            return;
        }
        std::thread::yield_now();
    }
    panic!("the reactor keeps a connection without a peer")
}

/// Passes the handshake, then runs the script as [`run_script`].
pub(crate) fn run_session(
    victim: impl Victim,
    mut hostile: Hostile,
    flags: Flags,
    steps: impl Iterator<Item = Step>,
) {
    hostile.handshake(&victim, flags);
    run_script(victim, hostile, steps);
}

/// Runs the script, then drops the peer, then ends the reactor. Returns what the victim has sent on the socket.
pub(crate) fn run_script(
    mut victim: impl Victim,
    mut hostile: Hostile,
    steps: impl Iterator<Item = Step>,
) -> Vec<u8> {
    settle(&victim);
    for step in steps {
        match step {
            Step::User(what, argument) => victim.act(what, argument),
            step => hostile.act(step),
        }
        settle_with(&victim, &mut hostile);
    }
    let (received, refusal) = hostile.into_received();
    REFUSAL.set(refusal);
    forget_peer(&victim);
    victim.check_without_peer();
    victim.close();
    for _ in 0..ROUNDS {
        if victim.round() == Round::Over {
            victim.check();
            return received;
        }
    }
    panic!("the reactor does not end")
}
