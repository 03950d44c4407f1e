//! Messages of a pipe, besides those of transfers; see docs/reference/wire-pipe.md. The header of each carries the
//! sequence number of the tensor that it is about.

use std::borrow::Cow;

use kvpipe_ucx::SharedBytes;

use super::{EAGER_CAP, MESSAGES_IN_FLIGHT};
use crate::checksum;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::{Reader, Writer};
use crate::session::Links;
use crate::tensor::Meta;
use crate::transfer::exposed::BufferDescription;

pub(super) const EAGER: u8 = 1;
pub(super) const OFFER: u8 = 2;
const ACK: u8 = 6;
const WITHDRAW: u8 = 7;
const WITHDRAWN: u8 = 8;
const CORRUPT: u8 = 10;
const REFUSED: u8 = 11;
const VALIDATE: u8 = 12;
const VALID: u8 = 13;
const INVALID: u8 = 14;
/// With this byte alone a sender ends the pipe in order, after all tensors have been acknowledged.
pub(super) const END: u8 = 15;

/// Longest reason of a refusal.
const REASON_CAP: usize = 4096;

/// A message of the sender about one tensor.
#[derive(Debug)]
pub(super) enum SenderMessage<'a> {
    /// The next tensor is small: these are its bytes.
    Eager {
        meta: Cow<'a, Meta>,
        bytes: SharedBytes<'a>,
    },
    /// The next tensor is large: the receiver transfers it from this buffer. Each message of the receiver may answer.
    Offer {
        meta: Cow<'a, Meta>,
        buffer: BufferDescription,
    },
    /// The send of an offered tensor is late. `Withdrawn` answers, unless the tensor has been received.
    Withdraw,
    /// Answers `Validate`: the tensor is offered, so what was read of it before is what was sent.
    Valid,
    /// Answers `Validate`: the tensor is not offered any more, or it is being withdrawn.
    Invalid,
}

impl<'a> SenderMessage<'a> {
    /// Sends it; false if the session is lost. With `is_checksummed`, a tensor's message has a checksum.
    pub(super) fn send(
        &self,
        links: &mut Links,
        session: SessionKey,
        sequence: u64,
        is_checksummed: bool,
    ) -> bool {
        let (kind, payload) = match self {
            Self::Eager { meta, bytes } => (EAGER, meta.write(Writer::default()).shared(*bytes)),
            Self::Offer { meta, buffer } => (OFFER, buffer.write(meta.write(Writer::default()))),
            Self::Withdraw => return send_bare(links, session, WITHDRAW, sequence),
            Self::Valid => return send_bare(links, session, VALID, sequence),
            Self::Invalid => return send_bare(links, session, INVALID, sequence),
        };
        let payload = payload.finish();
        let checksum = is_checksummed.then(|| checksum::of(&payload));
        let header = Links::header(kind).u64(sequence);
        let header = header.u8(is_checksummed.into()).u64(checksum.unwrap_or(0));
        links.message(session, header, &payload)
    }

    /// Decodes the header after the sequence number, and the payload.
    ///
    /// # Errors
    /// `Corrupt`: the payload differs from its checksum; only this tensor is lost. `Protocol`: the session fails.
    pub(super) fn decode(kind: u8, header: Reader<'_>, payload: &'a [u8]) -> Result<Self> {
        match kind {
            EAGER => {
                check_payload(header, payload)?;
                let mut reader = Reader::new(payload);
                let meta = Cow::Owned(Meta::read(&mut reader)?);
                let bytes = reader.bytes(EAGER_CAP)?.into();
                reader.end()?;
                Ok(Self::Eager { meta, bytes })
            }
            OFFER => {
                check_payload(header, payload)?;
                let mut reader = Reader::new(payload);
                let meta = Cow::Owned(Meta::read(&mut reader)?);
                let buffer = BufferDescription::read(&mut reader)?;
                reader.end()?;
                if buffer.len <= EAGER_CAP && !buffer.is_cuda {
                    let len = buffer.len;
                    return Err(Error::protocol(format_args!("an offer of {len} bytes")));
                }
                Ok(Self::Offer { meta, buffer })
            }
            WITHDRAW => Ok(Self::Withdraw),
            VALID => Ok(Self::Valid),
            INVALID => Ok(Self::Invalid),
            other => Err(Error::protocol(format_args!(
                "message {other} to the receiver of a pipe"
            ))),
        }
    }
}

/// Sends a message that is its kind and its tensor; false if the session is lost.
fn send_bare(links: &mut Links, session: SessionKey, kind: u8, sequence: u64) -> bool {
    let header = Links::header(kind).u64(sequence);
    links.message(session, header, &[])
}

/// Compares a payload with the checksum in the rest of its header, if there is one.
fn check_payload(mut header: Reader<'_>, payload: &[u8]) -> Result<()> {
    let (is_checksummed, checksum) = (header.flag()?, header.u64()?);
    header.end()?;
    if is_checksummed && checksum::of(payload) != checksum {
        return Err(Error::Corrupt("a message of a pipe".to_owned()));
    }
    Ok(())
}

/// A message of the receiver about one tensor.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReceiverMessage<'a> {
    /// The tensor has been received, as have these others.
    Ack { others: Cow<'a, [u64]> },
    /// The receiver does not receive the tensor, as the sender wished.
    Withdrawn,
    /// The tensor differs from its checksum.
    Corrupt,
    /// The last read of the tensor has ended. `Valid` or `Invalid` answers.
    Validate,
    /// The receiver cannot hold the tensor.
    Refused { reason: Cow<'a, str> },
}

impl ReceiverMessage<'_> {
    pub(super) fn send(&self, links: &mut Links, session: SessionKey, sequence: u64) {
        let (kind, payload) = match self {
            Self::Ack { others } => {
                let list = Writer::default().list(others, |w, sequence| w.u64(*sequence));
                (ACK, list.finish())
            }
            Self::Withdrawn => (WITHDRAWN, Vec::new()),
            Self::Corrupt => (CORRUPT, Vec::new()),
            Self::Validate => (VALIDATE, Vec::new()),
            Self::Refused { reason } => {
                let reason = Writer::default().text(reason, REASON_CAP);
                (REFUSED, reason.finish())
            }
        };
        let header = Links::header(kind).u64(sequence);
        links.message(session, header, &payload);
    }

    /// Decodes what follows the sequence number.
    pub(super) fn decode(kind: u8, payload: &[u8]) -> Result<Self> {
        match kind {
            ACK => {
                let mut reader = Reader::new(payload);
                let others = reader.list(MESSAGES_IN_FLIGHT, Reader::u64)?.into();
                reader.end()?;
                Ok(Self::Ack { others })
            }
            WITHDRAWN => Ok(Self::Withdrawn),
            CORRUPT => Ok(Self::Corrupt),
            VALIDATE => Ok(Self::Validate),
            REFUSED => {
                let mut reader = Reader::new(payload);
                let reason = reader.str(REASON_CAP)?.into();
                reader.end()?;
                Ok(Self::Refused { reason })
            }
            other => Err(Error::protocol(format_args!(
                "message {other} to the sender of a pipe"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_give_a_message_or_an_error(kind: u8, header: Vec<u8>, payload: Vec<u8>) {
            let _ = SenderMessage::decode(kind, Reader::new(&header), &payload);
            let _ = ReceiverMessage::decode(kind, &payload);
        }
    }
}
