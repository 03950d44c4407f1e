//! Messages between the clients and the server of entries, besides those that move large buffers; see
//! docs/reference/wire-entries.md.

mod fields;

use std::borrow::Cow;
use std::time::Duration;

use super::info::StoreInfo;
use super::state::{Access, Listed, Query, TOKEN_BYTES};
use super::{INLINE_CAP, KEY_CAP, TOKENS_CAP};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::{Reader, Writer};
use crate::net::fields::{
    check_seal, read_refusal, read_timeout, seal, write_refusal, write_timeout,
};
use crate::session::Links;
use crate::transfer::exposed::BufferDescription;
pub(super) use fields::check_tokens;
use fields::{
    read_access, read_bits, read_key, read_keys, read_lease, read_page, read_parts, read_query,
    read_record, write_access, write_bits, write_keys, write_page, write_parts, write_query,
};

// Kinds besides those of `crate::transfer::Message`.
const EXISTS: u8 = 64;
const RESERVE: u8 = 65;
const WRITE: u8 = 66;
const COMMIT: u8 = 67;
const PUT: u8 = 68;
const CHECKSUM: u8 = 69;
const SELECT: u8 = 70;
const RELEASE: u8 = 72;
const RENEW: u8 = 73;
const ACKNOWLEDGE: u8 = 74;
const CORRUPT: u8 = 75;
const DELETE: u8 = 76;
const LIST: u8 = 77;
const STATS: u8 = 78;
const CONSUME: u8 = 79;
const DONE: u8 = 80;
const REFUSED: u8 = 81;
const PRESENT: u8 = 82;
const RESERVED: u8 = 83;
const OCCUPIED: u8 = 84;
const OFFER: u8 = 85;
const NOTHING: u8 = 86;
const DELETED: u8 = 87;
const PAGE: u8 = 88;
const STATISTICS: u8 = 89;
const ENDED: u8 = 90;
const CANCEL: u8 = 91;

/// The message that the checksum of a payload is of.
const ENTRY: &str = "an entry";
const INLINE: u8 = 0;
const OFFERED: u8 = 1;

/// Bytes of an entry as a message carries them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Carried<'a> {
    Inline(Cow<'a, [u8]>),
    /// To be read from the other side.
    Offered(BufferDescription),
}

impl<'a> Carried<'a> {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::Offered(buffer) => buffer.len as u64,
        }
    }

    pub(crate) fn is_offered(&self) -> bool {
        matches!(self, Self::Offered(_))
    }

    /// Checks the bytes of a value.
    ///
    /// # Errors
    /// `Protocol`: they are to be read from the other side, although a message has place for them.
    pub(super) fn check_value(&self) -> Result<()> {
        if self.is_offered() && self.len() <= INLINE_CAP as u64 {
            return Err(Error::protocol("an offer of a small value"));
        }
        Ok(())
    }

    pub(super) fn into_owned(self) -> Carried<'static> {
        match self {
            Self::Inline(bytes) => Carried::Inline(bytes.into_owned().into()),
            Self::Offered(buffer) => Carried::Offered(buffer),
        }
    }

    fn write(&self, writer: Writer) -> Writer {
        match self {
            Self::Inline(bytes) => writer.u8(INLINE).bytes(bytes),
            Self::Offered(buffer) => buffer.write(writer.u8(OFFERED)),
        }
    }

    /// Reads bytes of which so many may be in the message.
    fn read(reader: &mut Reader<'a>, space: usize) -> Result<Self> {
        match reader.u8()? {
            INLINE => Ok(Self::Inline(reader.bytes(space)?.into())),
            OFFERED => {
                let buffer = BufferDescription::read(reader)?;
                // Entries are in host memory, and a lease says until when they may be read.
                if buffer.is_validated() || buffer.is_cuda || buffer.len == 0 {
                    return Err(Error::protocol("bytes that nothing reads"));
                }
                Ok(Self::Offered(buffer))
            }
            other => Err(Error::protocol(format_args!("bytes of kind {other}"))),
        }
    }
}

/// A page of a list: values, and after which to go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Page {
    pub(super) values: Vec<Listed>,
    pub(super) next: Option<u64>,
}

/// A message about one operation of a client; the header carries the operation's number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EntryMessage<'a> {
    /// Client: which keys can be selected? `Present` answers.
    Exists { keys: Vec<Cow<'a, [u8]>> },
    /// Client: reserve space. `Reserved`, `Occupied` or `Refused` answers.
    Reserve {
        key: Cow<'a, [u8]>,
        num_bytes: u64,
        ttl: Option<Duration>,
        timeout: Option<Duration>,
    },
    /// Client: the next bytes of a reservation. `Done` or `Refused` answers.
    Write {
        reservation: u64,
        bytes: Carried<'a>,
    },
    /// Client: make a reservation visible. `Done` or `Refused` answers.
    Commit {
        reservation: u64,
        /// Of the bytes and then the record.
        checksum: u64,
        record: Cow<'a, [u8]>,
    },
    /// Client: reserve, write and commit. `Done`, `Occupied` or `Refused` answers.
    Put {
        key: Cow<'a, [u8]>,
        ttl: Option<Duration>,
        timeout: Option<Duration>,
        /// True if `Checksum` follows.
        is_hashed: bool,
        record: Cow<'a, [u8]>,
        parts: Vec<Carried<'a>>,
    },
    /// Client: the checksum of a put.
    Checksum(u64),
    /// Client: this put is late. One without space is refused when it gets any, unless `is_withdrawn`: at once. One whose
    /// bytes are transferred is refused, unless it is withdrawn: it goes on.
    Cancel { is_withdrawn: bool },
    /// Client: offer an entry. `Offer`, `Nothing` or `Refused` answers.
    Select {
        query: Query<Cow<'a, [u8]>>,
        access: Access,
        timeout: Option<Duration>,
    },
    /// Client: all of the entry that this select leases is here. `Done` or `Refused` answers; from then on the entry does
    /// not go back if the client is lost.
    Consume,
    /// Client: an operation ends, and with it its wait, reservation, open value or lease. `Done` answers at a store.
    Release { target: u64 },
    /// Client: extend the lease of a take. `Done` or `Refused` answers.
    Renew { target: u64, lease: Duration },
    /// Client: delete the entry of a lease. `Done` or `Refused` answers; at a lookup buffer `Refused` alone.
    Acknowledge { target: u64 },
    /// Client: the value of a select or take differs from its checksum. `Refused` answers, with the reason for the caller.
    Corrupt { target: u64 },
    /// Client: delete values without holders. `Deleted` answers.
    Delete { keys: Vec<Cow<'a, [u8]>> },
    /// Client: list values. `Page` answers.
    List { prefix: Cow<'a, [u8]>, after: u64 },
    /// Client: `Statistics` answers.
    Stats,
    /// Server: done.
    Done,
    /// Server: the operation has failed.
    Refused(Error),
    /// Server: which keys can be selected, in their order.
    Present(Vec<bool>),
    /// Server: the space is reserved.
    Reserved,
    /// Server: the key has a value, or another reservation is under way.
    Occupied,
    /// Server: an entry, held by this operation until `Release`.
    Offer {
        /// Of all bytes and then the record; `None` if each part is verified on its way.
        checksum: Option<u64>,
        record: Cow<'a, [u8]>,
        parts: Vec<Carried<'a>>,
    },
    /// Server: there was no value in time.
    Nothing,
    /// Server: how many values were deleted.
    Deleted(u64),
    /// Server: values.
    Page(Page),
    /// Server: counters.
    Statistics(StoreInfo),
    /// Server: the reservation or lease of this operation has ended by time.
    Ended,
}

impl EntryMessage<'_> {
    pub(super) fn send(self, links: &mut Links, session: SessionKey, operation: u64) {
        let header = Links::header(self.kind()).u64(operation);
        let (header, payload) = self.encode(header);
        links.message(session, header, &payload);
    }

    pub(crate) fn kind(&self) -> u8 {
        match self {
            Self::Exists { .. } => EXISTS,
            Self::Reserve { .. } => RESERVE,
            Self::Write { .. } => WRITE,
            Self::Commit { .. } => COMMIT,
            Self::Put { .. } => PUT,
            Self::Checksum(_) => CHECKSUM,
            Self::Select { .. } => SELECT,
            Self::Cancel { .. } => CANCEL,
            Self::Consume => CONSUME,
            Self::Release { .. } => RELEASE,
            Self::Renew { .. } => RENEW,
            Self::Acknowledge { .. } => ACKNOWLEDGE,
            Self::Corrupt { .. } => CORRUPT,
            Self::Delete { .. } => DELETE,
            Self::List { .. } => LIST,
            Self::Stats => STATS,
            Self::Done => DONE,
            Self::Refused(_) => REFUSED,
            Self::Present(_) => PRESENT,
            Self::Reserved => RESERVED,
            Self::Occupied => OCCUPIED,
            Self::Offer { .. } => OFFER,
            Self::Nothing => NOTHING,
            Self::Deleted(_) => DELETED,
            Self::Page(_) => PAGE,
            Self::Statistics(_) => STATISTICS,
            Self::Ended => ENDED,
        }
    }

    /// Appends to the header, and returns it with the payload.
    fn encode(self, header: Writer) -> (Writer, Vec<u8>) {
        let plain = |writer: Writer| writer.finish();
        match self {
            Self::Exists { keys } | Self::Delete { keys } => (header, plain(write_keys(&keys))),
            Self::Reserve {
                key,
                num_bytes,
                ttl,
                timeout,
            } => {
                let writer = Writer::default().bytes(&key).u64(num_bytes);
                (
                    header,
                    plain(write_timeout(write_timeout(writer, ttl), timeout)),
                )
            }
            Self::Write { reservation, bytes } => {
                sealed(header, bytes.write(Writer::default().u64(reservation)))
            }
            Self::Commit {
                reservation,
                checksum,
                record,
            } => {
                let writer = Writer::default().u64(reservation).u64(checksum);
                sealed(header, writer.bytes(&record))
            }
            Self::Put {
                key,
                ttl,
                timeout,
                is_hashed,
                record,
                parts,
            } => {
                let writer = Writer::with_capacity(key.len() + record.len() + 64).bytes(&key);
                let writer = write_timeout(write_timeout(writer, ttl), timeout);
                let writer = writer.u8(is_hashed.into()).bytes(&record);
                sealed(header, write_parts(writer, &parts))
            }
            Self::Select {
                query,
                access,
                timeout,
            } => {
                let writer = write_access(write_query(&query), access);
                (header, plain(write_timeout(writer, timeout)))
            }
            Self::Cancel { is_withdrawn } => (header.u8(is_withdrawn.into()), Vec::new()),
            Self::Renew { target, lease } => {
                (write_timeout(header.u64(target), Some(lease)), Vec::new())
            }
            Self::Acknowledge { target } | Self::Corrupt { target } | Self::Release { target } => {
                (header.u64(target), Vec::new())
            }
            Self::List { prefix, after } => {
                (header, plain(Writer::default().bytes(&prefix).u64(after)))
            }
            Self::Refused(error) => (header, write_refusal(&error)),
            Self::Present(present) => (header, plain(write_bits(&present))),
            Self::Offer {
                checksum,
                record,
                parts,
            } => {
                let writer = Writer::default().u8(checksum.is_some().into());
                let writer = writer.u64(checksum.unwrap_or_default()).bytes(&record);
                sealed(header, write_parts(writer, &parts))
            }
            Self::Checksum(value) | Self::Deleted(value) => (header.u64(value), Vec::new()),
            Self::Page(page) => (header, plain(write_page(&page))),
            Self::Statistics(info) => (header, plain(info.write(Writer::default()))),
            Self::Stats
            | Self::Done
            | Self::Reserved
            | Self::Occupied
            | Self::Nothing
            | Self::Ended
            | Self::Consume => (header, Vec::new()),
        }
    }
}

impl<'a> EntryMessage<'a> {
    /// Decodes the header after the operation's number, and the payload.
    ///
    /// # Errors
    /// `Corrupt`: the payload differs from its checksum; only this operation fails. `Protocol`: the session fails.
    pub(crate) fn decode(kind: u8, mut header: Reader<'_>, payload: &'a [u8]) -> Result<Self> {
        let mut reader = Reader::new(payload);
        let message = match kind {
            WRITE | COMMIT | PUT | OFFER => {
                check_seal(header, payload, ENTRY)?;
                Self::decode_sealed(kind, &mut reader)?
            }
            REFUSED => return read_refusal(reader).map(Self::Refused),
            CANCEL => {
                let is_withdrawn = header.flag()?;
                header.end()?;
                Self::Cancel { is_withdrawn }
            }
            RELEASE | RENEW | ACKNOWLEDGE | CORRUPT | CHECKSUM | DELETED => {
                Self::decode_header(kind, header)?
            }
            _ => {
                header.end()?;
                Self::decode_plain(kind, &mut reader)?
            }
        };
        reader.end()?;
        Ok(message)
    }

    fn decode_sealed(kind: u8, reader: &mut Reader<'a>) -> Result<Self> {
        Ok(match kind {
            WRITE => Self::Write {
                reservation: reader.u64()?,
                bytes: Carried::read(reader, INLINE_CAP)?,
            },
            COMMIT => Self::Commit {
                reservation: reader.u64()?,
                checksum: reader.u64()?,
                record: read_record(reader)?,
            },
            PUT => Self::Put {
                key: read_key(reader, TOKENS_CAP * TOKEN_BYTES)?,
                ttl: read_timeout(reader)?,
                timeout: read_timeout(reader)?,
                is_hashed: reader.flag()?,
                record: read_record(reader)?,
                parts: read_parts(reader)?,
            },
            _ => {
                let (is_hashed, checksum) = (reader.flag()?, reader.u64()?);
                Self::Offer {
                    checksum: is_hashed.then_some(checksum),
                    record: read_record(reader)?,
                    parts: read_parts(reader)?,
                }
            }
        })
    }

    fn decode_header(kind: u8, mut header: Reader<'_>) -> Result<Self> {
        let value = header.u64()?;
        let message = match kind {
            RENEW => Self::Renew {
                target: value,
                lease: read_lease(&mut header)?,
            },
            RELEASE => Self::Release { target: value },
            ACKNOWLEDGE => Self::Acknowledge { target: value },
            CORRUPT => Self::Corrupt { target: value },
            CHECKSUM => Self::Checksum(value),
            _ => Self::Deleted(value),
        };
        header.end()?;
        Ok(message)
    }

    fn decode_plain(kind: u8, reader: &mut Reader<'a>) -> Result<Self> {
        Ok(match kind {
            EXISTS => Self::Exists {
                keys: read_keys(reader)?,
            },
            DELETE => Self::Delete {
                keys: read_keys(reader)?,
            },
            RESERVE => Self::Reserve {
                key: read_key(reader, KEY_CAP)?,
                num_bytes: reader.u64()?,
                ttl: read_timeout(reader)?,
                timeout: read_timeout(reader)?,
            },
            SELECT => Self::Select {
                query: read_query(reader)?,
                access: read_access(reader)?,
                timeout: read_timeout(reader)?,
            },
            CONSUME => Self::Consume,
            LIST => Self::List {
                prefix: reader.bytes(KEY_CAP)?.into(),
                after: reader.u64()?,
            },
            PRESENT => Self::Present(read_bits(reader)?),
            PAGE => Self::Page(read_page(reader)?),
            STATISTICS => Self::Statistics(StoreInfo::read(reader)?),
            STATS => Self::Stats,
            DONE => Self::Done,
            RESERVED => Self::Reserved,
            OCCUPIED => Self::Occupied,
            NOTHING => Self::Nothing,
            ENDED => Self::Ended,
            other => {
                let text = format_args!("message {other} of entries");
                return Err(Error::protocol(text));
            }
        })
    }
}

fn sealed(header: Writer, payload: Writer) -> (Writer, Vec<u8>) {
    let payload = payload.finish();
    (seal(header, &payload), payload)
}

#[cfg(any(test, feature = "fuzzing"))]
impl EntryMessage<'_> {
    /// The header after the operation's number, and the payload.
    pub(crate) fn into_bytes(self) -> (Vec<u8>, Vec<u8>) {
        let (header, payload) = self.encode(Writer::default());
        (header.finish(), payload)
    }
}

#[cfg(test)]
mod tests;
