//! Messages between the client and the server of a lookup buffer, besides those that move large tensors; see
//! docs/reference/wire-lookup.md.

use std::borrow::Cow;
use std::time::Duration;

use super::LookupQuery;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::{Reader, Writer};
use crate::net::fields::{
    check_seal, read_refusal, read_timeout, seal, write_refusal, write_timeout,
};
use crate::session::Links;

// Kinds besides those of `crate::transfer::Message`.
const INSERT: u8 = 16;
const INSERTED: u8 = 17;
pub(crate) const REFUSED: u8 = 18;
pub(crate) const SELECT: u8 = 19;
const OFFER: u8 = 20;
const NOTHING: u8 = 21;
const CONSUME: u8 = 22;
const CONSUMED: u8 = 23;
const SETTLE: u8 = 24;
const WITHDRAW: u8 = 25;
const CANCEL: u8 = 26;

/// Most tokens that count: of an entry, of the inserts of a client that wait together, of a query.
pub(super) const TOKENS_CAP: usize = 1 << 22;
/// The message that a checksum of a payload is of.
const ENTRY: &str = "an entry";

/// A message about one operation of a client; the header carries the operation's number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LookupMessage<'a> {
    /// Client: insert this entry. `Inserted` or `Refused` answers.
    Insert {
        timeout: Option<Duration>,
        /// At least one.
        tokens: Vec<i64>,
        /// Encoded by [`Tensors::write`](super::tensors::Tensors::write).
        tensors: Cow<'a, [u8]>,
    },
    /// Server: the entry can be selected; the client may release its memory.
    Inserted,
    /// Server: an insert or a select has failed.
    Refused(Error),
    /// Client: deliver an entry. `Offer`, `Nothing` or `Refused` answers.
    Select {
        query: LookupQuery,
        timeout: Option<Duration>,
    },
    /// Server: this entry is leased to the client. Its tensors are encoded as those of `Insert`.
    Offer { tensors: Cow<'a, [u8]> },
    /// Server: there was no entry in time.
    Nothing,
    /// Client: the whole entry is here. `Consumed` answers.
    Consume,
    /// Server: the entry belongs to the client, and is offered to no other unless the client returns it.
    Consumed,
    /// Client: its caller keeps the entry, or the entry goes back.
    Settle { is_consumed: bool },
    /// Client: cancel an operation that has not met its other side.
    Withdraw,
    /// Client: the insert is late; cancel it, also while its tensors are transferred. REFUSED or INSERTED answers.
    Cancel,
}

impl LookupMessage<'_> {
    pub(super) fn send(self, links: &mut Links, session: SessionKey, operation: u64) {
        let header = Links::header(self.kind()).u64(operation);
        let (header, payload) = self.encode(header);
        links.message(session, header, &payload);
    }

    pub(super) fn kind(&self) -> u8 {
        match self {
            Self::Insert { .. } => INSERT,
            Self::Inserted => INSERTED,
            Self::Refused(_) => REFUSED,
            Self::Select { .. } => SELECT,
            Self::Offer { .. } => OFFER,
            Self::Nothing => NOTHING,
            Self::Consume => CONSUME,
            Self::Consumed => CONSUMED,
            Self::Settle { .. } => SETTLE,
            Self::Withdraw => WITHDRAW,
            Self::Cancel => CANCEL,
        }
    }

    /// Appends to the header, and returns it with the payload.
    fn encode(self, header: Writer) -> (Writer, Vec<u8>) {
        match self {
            Self::Insert {
                timeout,
                tokens,
                tensors,
            } => {
                let len = size_of::<u64>() + size_of::<u32>() + size_of_val(&tokens[..]);
                let writer = Writer::with_capacity(len + tensors.len());
                let writer = write_tokens(write_timeout(writer, timeout), &tokens);
                with_checksum(header, writer.raw(&tensors).finish())
            }
            Self::Offer { tensors } => with_checksum(header, tensors.into_owned()),
            Self::Refused(error) => (header, write_refusal(&error)),
            Self::Select { query, timeout } => {
                let writer = write_timeout(Writer::default(), timeout);
                let writer = match &query {
                    LookupQuery::Any => writer.u8(0),
                    LookupQuery::Tokens(tokens) => write_tokens(writer.u8(1), tokens),
                };
                (header, writer.finish())
            }
            Self::Settle { is_consumed } => (header.u8(is_consumed.into()), Vec::new()),
            Self::Inserted
            | Self::Nothing
            | Self::Consume
            | Self::Consumed
            | Self::Withdraw
            | Self::Cancel => (header, Vec::new()),
        }
    }
}

impl<'a> LookupMessage<'a> {
    /// Decodes the header after the operation's number, and the payload.
    ///
    /// # Errors
    /// `Corrupt`: the payload differs from its checksum; only this operation fails. `Protocol`: the session fails.
    pub(crate) fn decode(kind: u8, mut header: Reader<'_>, payload: &'a [u8]) -> Result<Self> {
        let mut reader = Reader::new(payload);
        Ok(match kind {
            INSERT => {
                check_seal(header, payload, ENTRY)?;
                Self::Insert {
                    timeout: read_timeout(&mut reader)?,
                    tokens: read_tokens(&mut reader)?,
                    tensors: reader.rest().into(),
                }
            }
            OFFER => {
                check_seal(header, payload, ENTRY)?;
                let tensors = payload.into();
                Self::Offer { tensors }
            }
            INSERTED => Self::Inserted,
            REFUSED => Self::Refused(read_refusal(reader)?),
            SELECT => {
                let timeout = read_timeout(&mut reader)?;
                let query = match reader.u8()? {
                    0 => LookupQuery::Any,
                    1 => {
                        let mut tokens = read_tokens(&mut reader)?;
                        // A query may wait for long, and up to half of the vector is unused capacity.
                        tokens.shrink_to_fit();
                        LookupQuery::Tokens(tokens)
                    }
                    other => return Err(Error::protocol(format_args!("query {other}"))),
                };
                reader.end()?;
                Self::Select { query, timeout }
            }
            NOTHING => Self::Nothing,
            CONSUME => Self::Consume,
            CONSUMED => Self::Consumed,
            SETTLE => Self::Settle {
                is_consumed: header.flag()?,
            },
            WITHDRAW => Self::Withdraw,
            CANCEL => Self::Cancel,
            other => {
                let text = format_args!("message {other} of a lookup buffer");
                return Err(Error::protocol(text));
            }
        })
    }
}

fn with_checksum(header: Writer, payload: Vec<u8>) -> (Writer, Vec<u8>) {
    (seal(header, &payload), payload)
}

fn write_tokens(writer: Writer, tokens: &[i64]) -> Writer {
    writer.list(tokens, |w, token| w.u64(token.cast_unsigned()))
}

fn read_tokens(reader: &mut Reader<'_>) -> Result<Vec<i64>> {
    let tokens = reader.list(TOKENS_CAP, |r| r.u64().map(u64::cast_signed))?;
    if tokens.is_empty() {
        return Err(Error::protocol("no tokens"));
    }
    Ok(tokens)
}

#[cfg(any(test, feature = "fuzzing"))]
impl LookupMessage<'_> {
    /// The header after the operation's number, and the payload.
    pub(crate) fn into_bytes(self) -> (Vec<u8>, Vec<u8>) {
        let (header, payload) = self.encode(Writer::default());
        (header.finish(), payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode(message: LookupMessage<'_>) -> (u8, Vec<u8>, Vec<u8>) {
        let kind = message.kind();
        let (header, payload) = message.into_bytes();
        (kind, header, payload)
    }

    fn decode((kind, header, payload): &(u8, Vec<u8>, Vec<u8>)) -> Result<LookupMessage<'_>> {
        LookupMessage::decode(*kind, Reader::new(header), payload)
    }

    #[test]
    fn every_message_decodes_to_itself() {
        let timeout = Some(Duration::from_micros(7));
        let tensors = || Cow::from(&[1, 2, 3][..]);
        let refused =
            |error: fn(String) -> Error| LookupMessage::Refused(error("a text".to_owned()));
        for message in [
            LookupMessage::Insert {
                timeout,
                tokens: vec![-1, 5],
                tensors: tensors(),
            },
            LookupMessage::Inserted,
            refused(Error::Config),
            refused(Error::Exhausted),
            refused(Error::Corrupt),
            refused(Error::Unavailable),
            LookupMessage::Select {
                query: LookupQuery::Any,
                timeout: None,
            },
            LookupMessage::Offer { tensors: tensors() },
            LookupMessage::Nothing,
            LookupMessage::Consume,
            LookupMessage::Consumed,
            LookupMessage::Settle { is_consumed: true },
            LookupMessage::Settle { is_consumed: false },
            LookupMessage::Withdraw,
            LookupMessage::Cancel,
        ] {
            assert_eq!(decode(&encode(message.clone())), Ok(message));
        }
    }

    #[test]
    fn an_entry_that_differs_from_its_checksum_is_corrupt() {
        let tensors = Cow::from(&[1, 2, 3][..]);
        let mut encoded = encode(LookupMessage::Offer { tensors });
        encoded.2[1] ^= 1;
        assert!(matches!(decode(&encoded), Err(Error::Corrupt(_))));
    }

    #[test]
    fn a_query_without_tokens_is_refused() {
        let query = LookupQuery::Tokens(Vec::new());
        let timeout = None;
        assert!(decode(&encode(LookupMessage::Select { query, timeout })).is_err());
    }

    proptest! {
        #[test]
        fn a_select_decodes_to_itself(tokens: Vec<i64>, micros: Option<u32>) {
            let query = if tokens.is_empty() { LookupQuery::Any } else { LookupQuery::Tokens(tokens) };
            let timeout = micros.map(|micros| Duration::from_micros(micros.into()));
            let message = LookupMessage::Select { query, timeout };
            let encoded = encode(message.clone());
            prop_assert_eq!(decode(&encoded), Ok(message));
        }

        #[test]
        fn any_bytes_decode_to_a_message_or_an_error(kind in INSERT..=CANCEL, header: Vec<u8>, payload: Vec<u8>) {
            let _ = LookupMessage::decode(kind, Reader::new(&header), &payload);
        }
    }
}
