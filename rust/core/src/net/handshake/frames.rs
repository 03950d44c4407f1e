//! The frames of the handshake as bytes.

use super::PROTOCOL_VERSION;
use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};

const MAGIC: [u8; 4] = *b"KVPP";
const TEXT_CAP: usize = 4096;

const HELLO: u8 = 1;
pub(super) const CHALLENGE: u8 = 2;
pub(super) const PROOF: u8 = 3;
const IDENTITY: u8 = 4;
const WELCOME: u8 = 5;
const READY: u8 = 6;
pub(super) const REFUSED: u8 = 7;

pub(super) type Nonce = [u8; 32];
pub(super) type Signature = [u8; 32];

/// A frame of the handshake.
#[derive(Debug)]
pub(super) enum HandshakeFrame<'a> {
    Hello(Greeting),
    Challenge(Greeting),
    Proof(Signature),
    Identity(Signed<'a>),
    Welcome(Signed<'a>),
    Ready,
    /// Why the peer is refused: encoded from the error of the side that refuses, decoded as that of the other side.
    Refused(Error),
}

impl<'a> HandshakeFrame<'a> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let writer = match self {
            Self::Hello(greeting) => greeting.write(Writer::new(HELLO).raw(&MAGIC)),
            Self::Challenge(greeting) => greeting.write(Writer::new(CHALLENGE)),
            Self::Proof(signature) => Writer::new(PROOF).raw(signature),
            Self::Identity(signed) => signed.write(Writer::new(IDENTITY)),
            Self::Welcome(signed) => signed.write(Writer::new(WELCOME)),
            Self::Ready => Writer::new(READY),
            Self::Refused(error) => write_refusal(Writer::new(REFUSED), error),
        };
        writer.finish()
    }

    pub(super) fn decode(frame: &'a [u8], peer: &str) -> Result<Self> {
        let mut reader = Reader::new(frame);
        let frame = match reader.u8()? {
            HELLO if reader.fixed::<4>()? != MAGIC => {
                return Err(Error::protocol("not a kvpipe peer"));
            }
            HELLO => Self::Hello(Greeting::read(&mut reader)?),
            CHALLENGE => Self::Challenge(Greeting::read(&mut reader)?),
            PROOF => Self::Proof(reader.fixed()?),
            IDENTITY => Self::Identity(Signed::read(&mut reader)?),
            WELCOME => Self::Welcome(Signed::read(&mut reader)?),
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

/// The version of a side, and what makes its session unlike any other.
#[derive(Debug)]
pub(super) struct Greeting {
    pub(super) version: u16,
    pub(super) nonce: Nonce,
}

impl Greeting {
    pub(super) fn new(nonce: Nonce) -> Self {
        let version = PROTOCOL_VERSION;
        Self { version, nonce }
    }

    fn write(&self, writer: Writer) -> Writer {
        writer.u16(self.version).raw(&self.nonce)
    }

    /// Other versions than ours may go on differently.
    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let version = reader.u16()?;
        if version == PROTOCOL_VERSION {
            return Ok(Self::new(reader.fixed()?));
        }
        reader.rest();
        let nonce = Nonce::default();
        Ok(Self { version, nonce })
    }
}

/// Bytes, and the proof that a holder of the token has sent them.
#[derive(Debug)]
pub(super) struct Signed<'a> {
    pub(super) signature: Signature,
    pub(super) body: &'a [u8],
}

impl<'a> Signed<'a> {
    fn write(&self, writer: Writer) -> Writer {
        writer.raw(&self.signature).raw(self.body)
    }

    fn read(reader: &mut Reader<'a>) -> Result<Self> {
        let (signature, body) = (reader.fixed()?, reader.rest());
        Ok(Self { signature, body })
    }
}

/// What is our value here is the peer's other one.
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
