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
    Hello {
        version: u16,
        nonce: Nonce,
    },
    Challenge {
        version: u16,
        nonce: Nonce,
    },
    Proof(Signature),
    Identity {
        signature: Signature,
        body: &'a [u8],
    },
    Welcome {
        signature: Signature,
        body: &'a [u8],
    },
    Ready,
    /// Why the peer is refused: encoded from the error of the side that refuses, decoded as that of the other side.
    Refused(Error),
}

impl<'a> HandshakeFrame<'a> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let writer = match self {
            Self::Hello { version, nonce } => {
                Writer::new(HELLO).raw(&MAGIC).u16(*version).raw(nonce)
            }
            Self::Challenge { version, nonce } => Writer::new(CHALLENGE).u16(*version).raw(nonce),
            Self::Proof(signature) => Writer::new(PROOF).raw(signature),
            Self::Identity { signature, body } => Writer::new(IDENTITY).raw(signature).raw(body),
            Self::Welcome { signature, body } => Writer::new(WELCOME).raw(signature).raw(body),
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
            HELLO => {
                let (version, nonce) = read_version(&mut reader)?;
                Self::Hello { version, nonce }
            }
            CHALLENGE => {
                let (version, nonce) = read_version(&mut reader)?;
                Self::Challenge { version, nonce }
            }
            PROOF => Self::Proof(reader.fixed()?),
            IDENTITY => {
                let (signature, body) = (reader.fixed()?, reader.rest());
                Self::Identity { signature, body }
            }
            WELCOME => {
                let (signature, body) = (reader.fixed()?, reader.rest());
                Self::Welcome { signature, body }
            }
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

/// A version and, if it is ours, the nonce that follows it. Other versions may go on differently.
fn read_version(reader: &mut Reader<'_>) -> Result<(u16, Nonce)> {
    let version = reader.u16()?;
    if version == PROTOCOL_VERSION {
        return Ok((version, reader.fixed()?));
    }
    reader.rest();
    Ok((version, Nonce::default()))
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
