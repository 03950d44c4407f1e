//! The frames of the handshake as bytes.

use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};
use crate::net::secret::SessionId;
use crate::net::version::PROTOCOL_VERSION;

pub(super) const MAGIC: [u8; 4] = *b"KVPP";
const TEXT_CAP: usize = 4096;

const HELLO: u8 = 1;
pub(super) const REPLY: u8 = 2;
pub(super) const IDENTITY: u8 = 4;
const WELCOME: u8 = 5;
const READY: u8 = 6;
pub(super) const REFUSED: u8 = 7;
pub(super) const JOIN: u8 = 8;

/// A frame of the handshake. All after REPLY are sealed; so is REFUSED.
#[derive(Debug)]
pub(super) enum HandshakeFrame<'a> {
    Hello(Greeting<'a>),
    /// In place of HELLO, on a further connection of a session.
    Join(SessionId, u32, Greeting<'a>),
    Reply(Greeting<'a>),
    /// The client's identity.
    Identity(&'a [u8]),
    /// The session's id and the server's identity.
    Welcome(&'a [u8]),
    Ready,
    /// Reason for the refusal: encoded from the error of the side that refuses, decoded as that of the other side.
    Refused(Error),
}

impl<'a> HandshakeFrame<'a> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let writer = match self {
            Self::Hello(greeting) => greeting.write(Writer::new(HELLO).raw(&MAGIC)),
            Self::Join(session, number, greeting) => {
                let writer = Writer::new(JOIN).raw(&MAGIC).u16(greeting.version);
                writer.raw(session).u32(*number).raw(greeting.message)
            }
            Self::Reply(greeting) => greeting.write(Writer::new(REPLY)),
            Self::Identity(body) => Writer::new(IDENTITY).raw(body),
            Self::Welcome(body) => Writer::new(WELCOME).raw(body),
            Self::Ready => Writer::new(READY),
            Self::Refused(error) => write_refusal(Writer::new(REFUSED), error),
        };
        writer.finish()
    }

    pub(super) fn decode(frame: &'a [u8], peer: &str) -> Result<Self> {
        let mut reader = Reader::new(frame);
        let frame = match reader.u8()? {
            HELLO | JOIN if reader.fixed::<4>()? != MAGIC => {
                return Err(Error::protocol("not a kvpipe peer"));
            }
            HELLO => Self::Hello(Greeting::read(&mut reader)?),
            JOIN => {
                let (version, session, number) = (reader.u16()?, reader.fixed()?, reader.u32()?);
                let message = reader.rest();
                Self::Join(session, number, Greeting { version, message })
            }
            REPLY => Self::Reply(Greeting::read(&mut reader)?),
            IDENTITY => Self::Identity(reader.rest()),
            WELCOME => Self::Welcome(reader.rest()),
            READY => Self::Ready,
            REFUSED => Self::Refused(read_refusal(&mut reader, peer)?),
            other => {
                return Err(Error::protocol(format_args!(
                    "frame {other} in a handshake"
                )));
            }
        };
        reader.end()?;
        Ok(frame)
    }
}

/// The version of a side, and its message of Noise. A side of another version may go on differently.
#[derive(Debug)]
pub(super) struct Greeting<'a> {
    pub(super) version: u16,
    pub(super) message: &'a [u8],
}

impl<'a> Greeting<'a> {
    pub(super) fn new(message: &'a [u8]) -> Self {
        let version = PROTOCOL_VERSION;
        Self { version, message }
    }

    fn write(&self, writer: Writer) -> Writer {
        writer.u16(self.version).raw(self.message)
    }

    fn read(reader: &mut Reader<'a>) -> Result<Self> {
        let (version, message) = (reader.u16()?, reader.rest());
        Ok(Self { version, message })
    }
}

/// Swaps the two values of `Incompatible`: our value is the other one for the peer.
fn write_refusal(writer: Writer, error: &Error) -> Writer {
    match error {
        Error::Authentication(_) => writer.u8(1),
        Error::Incompatible {
            field,
            ours,
            theirs,
            ..
        } => writer.u8(2).str(field).str(theirs).str(ours),
        other => writer.u8(3).text(&other.to_string(), TEXT_CAP),
    }
}

fn read_refusal(reader: &mut Reader<'_>, peer: &str) -> Result<Error> {
    Ok(match reader.u8()? {
        1 => Error::Authentication(format!(
            "{peer} refused this side's token: give both sides the same KVPIPE_TOKEN"
        )),
        2 => Error::Incompatible {
            peer: peer.to_owned(),
            field: reader.str(TEXT_CAP)?,
            ours: reader.str(TEXT_CAP)?,
            theirs: reader.str(TEXT_CAP)?,
        },
        _ => {
            let reason = reader.str(TEXT_CAP)?;
            Error::Connect(format!("{peer} refused the connection: {reason}"))
        }
    })
}
