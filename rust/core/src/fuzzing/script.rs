//! What a peer that keeps to no rules does, as read from any bytes, and how the other side is driven through it.

use super::hostile::Hostile;
use crate::error::Result;
use crate::net::codec::{Reader, Writer};
use crate::reactor::manual::Round;

/// Rounds within which a reactor comes to rest after anything that a peer can say.
const ROUNDS: usize = 10_000;
/// In a script, where the peer's own memory is and its key: eight bytes each, which nobody can know before.
pub(super) const ADDRESS: u64 = u64::from_le_bytes(*b"\xfaADDRESS");
pub(super) const KEY: u64 = u64::from_le_bytes(*b"\xfaKEY_KEY");

const SOCKET: u8 = 0;
const LINK: u8 = 1;
const FRAME: u8 = 2;
const MESSAGE: u8 = 3;
const SEALED: u8 = 4;
const LARGE: u8 = 5;
const STRANGER: u8 = 6;
const USER: u8 = 7;
const SHUT: u8 = 8;
const KINDS: u8 = 10;

/// How a script begins: which data path, which side connects, and what of the handshake is missing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flags(pub(super) u8);

impl Flags {
    /// The twin's reads, else its messages.
    pub(super) fn is_get(self) -> bool {
        self.0 & 1 != 0
    }

    /// The peer is connected to, and not the one that connects.
    pub(super) fn is_server(self) -> bool {
        self.0 & 2 != 0
    }

    /// The peer says nothing after its proof.
    pub(super) fn is_unready(self) -> bool {
        self.0 & 4 != 0
    }

    /// The peer's UCX address is none.
    pub(super) fn is_unreachable(self) -> bool {
        self.0 & 8 != 0
    }

    /// Checksums are switched off at the user's side.
    pub(super) fn is_unsummed(self) -> bool {
        self.0 & 16 != 0
    }
}

/// One thing that the peer, or the user on the side under test, does.
#[derive(Debug)]
pub(super) enum Step {
    /// Bytes on the socket as they are.
    Socket(Vec<u8>),
    /// A frame of a session, of any type.
    Connection(Vec<u8>),
    /// An application frame.
    Frame(Vec<u8>),
    /// An active message of the session: header, payload.
    Message(Vec<u8>, Vec<u8>),
    /// The same with the checksum of its payload at the end of its header.
    Sealed(Vec<u8>, Vec<u8>),
    /// An active message of no session.
    Stranger(Vec<u8>),
    /// The user at the side under test asks for something.
    User(u8, u8),
    /// The peer says that nothing more follows on the socket.
    Shut,
    /// The peer's data plane ends.
    Leave,
}

/// A script that is being written; for seeds.
#[derive(Debug)]
pub(super) struct Script(Writer);

fn short(writer: Writer, bytes: &[u8]) -> Writer {
    writer.u16(bytes.len() as u16).raw(bytes)
}

impl Script {
    pub(super) fn new(flags: u8) -> Self {
        Self(Writer::new(flags))
    }

    pub(super) fn session(self, bytes: &[u8]) -> Self {
        Self(short(self.0.u8(LINK), bytes))
    }

    pub(super) fn frame(self, bytes: &[u8]) -> Self {
        Self(short(self.0.u8(FRAME), bytes))
    }

    pub(super) fn message(self, header: &[u8], payload: &[u8]) -> Self {
        let writer = self.0.u8(MESSAGE).u8(header.len() as u8).raw(header);
        Self(short(writer, payload))
    }

    /// A message whose header ends with the checksum of its payload.
    pub(super) fn sealed(self, header: &[u8], payload: &[u8]) -> Self {
        let writer = self.0.u8(SEALED).u8(header.len() as u8).raw(header);
        Self(short(writer, payload))
    }

    /// A message whose header ends with the checksum of its payload, `kib` KiB of one byte.
    pub(super) fn large(self, header: &[u8], (kib, fill): (u8, u8)) -> Self {
        let writer = self.0.u8(LARGE).u8(header.len() as u8).raw(header);
        Self(writer.u8(kib).u8(fill))
    }

    pub(super) fn user(self, what: u8, argument: u8) -> Self {
        Self(self.0.u8(USER).u8(what).u8(argument))
    }

    pub(super) fn shut(self) -> Self {
        Self(self.0.u8(SHUT))
    }

    pub(super) fn finish(self) -> Vec<u8> {
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

fn step(reader: &mut Reader<'_>) -> Result<Step> {
    Ok(match reader.u8()? % KINDS {
        SOCKET => Step::Socket(bytes(reader)?),
        LINK => Step::Connection(bytes(reader)?),
        FRAME => Step::Frame(bytes(reader)?),
        MESSAGE => Step::Message(header(reader)?, bytes(reader)?),
        SEALED => Step::Sealed(header(reader)?, bytes(reader)?),
        LARGE => {
            let header = header(reader)?;
            let (kib, fill) = (reader.u8()?, reader.u8()?);
            Step::Sealed(header, vec![fill; usize::from(kib) << 10])
        }
        STRANGER => Step::Stranger(header(reader)?),
        USER => Step::User(reader.u8()?, reader.u8()?),
        SHUT => Step::Shut,
        _ => Step::Leave,
    })
}

/// How a script begins, and what follows as far as it is whole.
pub(super) fn read(script: &[u8]) -> (Flags, impl Iterator<Item = Step>) {
    let (flags, rest) = script.split_first().unwrap_or((&0, &[]));
    let mut reader = Reader::new(rest);
    let steps = std::iter::from_fn(move || step(&mut reader).ok());
    (Flags(*flags), steps)
}

/// The side under test, and its user.
pub(super) trait Victim {
    /// One round of its reactor.
    fn round(&self) -> Round;
    /// Its user asks for something.
    fn act(&mut self, what: u8, argument: u8);
    /// Its user ends it.
    fn close(&mut self);
    /// What needed the peer has ended, one way or the other; called when that is gone and the reactor goes on, whose end
    /// would end everything.
    fn check_without_peer(&self) {}
    /// What its user has asked for has ended; called after the end of the reactor.
    fn check(&mut self);
}

/// Runs a reactor until it would sleep; its connections.
fn settle(victim: &impl Victim) -> usize {
    for _ in 0..ROUNDS {
        match victim.round() {
            Round::Busy => {}
            Round::AtRest { num_sessions } => return num_sessions,
            Round::Over => return 0,
        }
    }
    panic!("it does not come to rest")
}

/// Runs a reactor until it has seen that its peer is gone. It may only just have got the connection from the thread that
/// made it.
fn forget_peer(victim: &impl Victim) {
    for _ in 0..ROUNDS {
        if settle(victim) == 0 {
            return;
        }
        std::thread::yield_now();
    }
    panic!("a connection to nobody")
}

/// Shakes hands, then as [`confront`].
pub(super) fn perform(
    victim: impl Victim,
    mut hostile: Hostile,
    flags: Flags,
    steps: impl Iterator<Item = Step>,
) {
    hostile.meet(&victim, flags);
    confront(victim, hostile, steps);
}

/// Runs the script, then has the peer go, then ends the reactor; what that has said on the socket.
pub(super) fn confront(
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
        settle(&victim);
        hostile.listen_to();
    }
    let heard = hostile.into_heard();
    forget_peer(&victim);
    victim.check_without_peer();
    victim.close();
    for _ in 0..ROUNDS {
        if victim.round() == Round::Over {
            victim.check();
            return heard;
        }
    }
    panic!("it does not end")
}
