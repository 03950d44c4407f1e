//! The messages between the two ends of a transfer, the same on every session that moves bytes; see
//! docs/reference/wire-format.md.

use std::borrow::Cow;

use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::{Reader, Writer};
use crate::session::{Links, PART_KIND};

const READ: u8 = 32;
pub(crate) const DATA: u8 = PART_KIND;
const CREDIT: u8 = 34;
const REFUSED: u8 = 35;
const CHECKSUMS: u8 = 43;
const SOURCE_CHECKSUMS: u8 = 44;
const CANCEL: u8 = 45;
const CANCELLED: u8 = 46;

/// Most ids of one transfer.
pub(crate) const BLOCKS_CAP: usize = 1 << 22;
/// Most checksums of one message.
pub(crate) const CHECKSUMS_CAP: usize = 4096;
/// Longest reason.
pub(crate) const REASON_CAP: usize = 4096;

/// Request of a destination to a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Wanted {
    /// The bytes, as a stream.
    Bytes = 0,
    /// The bytes, as a stream whose pieces have checksums.
    ChecksummedBytes = 1,
    /// The checksums of the blocks, whose bytes the destination reads.
    Checksums = 2,
}

impl Wanted {
    fn decode(byte: u8) -> Result<Self> {
        match byte {
            0 => Ok(Self::Bytes),
            1 => Ok(Self::ChecksummedBytes),
            2 => Ok(Self::Checksums),
            other => Err(Error::protocol(format_args!("{other} wanted of blocks"))),
        }
    }
}

/// A message about a transfer, or about a source. Its id is in front of the rest: that of the transfer, which the destination
/// has chosen, but of [`SourceChecksums`](Self::SourceChecksums) that of the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message<'a> {
    /// Destination: send me the bytes of the blocks with these ids, as a stream, or their checksums. Blocks that the
    /// destination reads itself are not asked for.
    Read {
        source: u64,
        wanted: Wanted,
        ids: Cow<'a, [u32]>,
    },
    /// Source: the next piece of a stream, which is the payload.
    Data {
        /// In the sequence of the blocks.
        offset: u64,
        checksum: u64,
    },
    /// Destination: so many bytes more have been placed.
    Credit(u64),
    /// Source: the transfer cannot be served, for this reason.
    Refused(String),
    /// Source: the next checksums of the blocks of a transfer, because its destination asked for them.
    Checksums {
        /// Index of the first of them.
        first: u64,
        checksums: Vec<u64>,
    },
    /// Source: the next checksums of the units of a source, without being asked.
    SourceChecksums {
        /// Index of the first of them.
        first: u64,
        checksums: Vec<u64>,
    },
    /// Destination: send nothing more of the transfer.
    Cancel,
    /// Source: nothing more of the transfer follows, be it because of [`Cancel`](Self::Cancel) or because all was sent before.
    Cancelled,
}

impl Message<'_> {
    pub(super) fn kind(&self) -> u8 {
        match self {
            Self::Read { .. } => READ,
            Self::Data { .. } => DATA,
            Self::Credit(_) => CREDIT,
            Self::Refused(_) => REFUSED,
            Self::Checksums { .. } => CHECKSUMS,
            Self::SourceChecksums { .. } => SOURCE_CHECKSUMS,
            Self::Cancel => CANCEL,
            Self::Cancelled => CANCELLED,
        }
    }

    /// Continues a header after the id, and makes the payload. That of [`Data`](Self::Data) is the piece itself.
    fn encode(&self, header: Writer) -> (Writer, Vec<u8>) {
        match self {
            Self::Read {
                source,
                wanted,
                ids,
            } => {
                let header = header.u64(*source).u8(*wanted as u8);
                (header, payload(|w| w.list(ids, |w, id| w.u32(*id))))
            }
            Self::Data { offset, checksum } => (header.u64(*offset).u64(*checksum), Vec::new()),
            Self::Credit(num_bytes) => (header.u64(*num_bytes), Vec::new()),
            Self::Refused(reason) => (header, payload(|w| w.text(reason, REASON_CAP))),
            Self::Checksums { first, checksums } | Self::SourceChecksums { first, checksums } => {
                let list = payload(|w| w.list(checksums, |w, checksum| w.u64(*checksum)));
                (header.u64(*first), list)
            }
            Self::Cancel | Self::Cancelled => (header, Vec::new()),
        }
    }

    /// True if messages of this kind are of transfers.
    pub(crate) fn is_kind(kind: u8) -> bool {
        matches!(kind, READ..=REFUSED | CHECKSUMS..=CANCELLED)
    }

    /// Reads the id and the rest of a header after its kind, and the payload.
    pub(crate) fn decode(
        kind: u8,
        mut header: Reader<'_>,
        payload: &[u8],
    ) -> Result<(u64, Message<'static>)> {
        let (id, mut payload) = (header.u64()?, Reader::new(payload));
        let message = match kind {
            READ => Message::Read {
                source: header.u64()?,
                wanted: Wanted::decode(header.u8()?)?,
                ids: payload.list(BLOCKS_CAP, Reader::u32)?.into(),
            },
            DATA => {
                payload = Reader::new(&[]);
                Message::Data {
                    offset: header.u64()?,
                    checksum: header.u64()?,
                }
            }
            CREDIT => Message::Credit(header.u64()?),
            REFUSED => Message::Refused(payload.str(REASON_CAP)?),
            CHECKSUMS => Message::Checksums {
                first: header.u64()?,
                checksums: payload.list(CHECKSUMS_CAP, Reader::u64)?,
            },
            SOURCE_CHECKSUMS => Message::SourceChecksums {
                first: header.u64()?,
                checksums: payload.list(CHECKSUMS_CAP, Reader::u64)?,
            },
            CANCEL => Message::Cancel,
            CANCELLED => Message::Cancelled,
            other => return Err(Error::protocol(format_args!("message {other}"))),
        };
        header.end()?;
        payload.end()?;
        Ok((id, message))
    }

    /// Sends it; false when the session is lost.
    pub(super) fn send(&self, links: &mut Links, session: SessionKey, id: u64) -> bool {
        let (header, payload) = self.encode(Links::header(self.kind()).u64(id));
        links.message(session, header, &payload)
    }

    /// The header of a part of a stream.
    pub(super) fn header(&self, id: u64) -> Vec<u8> {
        let (header, _) = self.encode(Links::header(self.kind()).u64(id));
        header.finish()
    }
}

fn payload(write: impl FnOnce(Writer) -> Writer) -> Vec<u8> {
    write(Writer::default()).finish()
}

#[cfg(any(test, feature = "fuzzing"))]
impl Message<'_> {
    /// Kind and header, then the payload.
    pub(crate) fn to_bytes(&self, id: u64) -> (Vec<u8>, Vec<u8>) {
        let (header, payload) = self.encode(Writer::new(self.kind()).u64(id));
        (header.finish(), payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read_back(id: u64, message: &Message<'_>) {
        let (header, payload) = message.to_bytes(id);
        let read = Message::decode(header[0], Reader::new(&header[1..]), &payload);
        assert_eq!(read, Ok((id, message.clone())));
        for longer in [
            (&[&header[..], &[0]].concat(), &payload),
            (&header, &[&payload[..], &[0]].concat()),
        ] {
            let is_data = header[0] == DATA && longer.0 == &header;
            let read = Message::decode(header[0], Reader::new(&longer.0[1..]), longer.1);
            assert_eq!(read.is_ok(), is_data);
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(id: u64, first: u64, ids: Vec<u32>, checksums: Vec<u64>, reason: String) {
            for wanted in [Wanted::Bytes, Wanted::ChecksummedBytes, Wanted::Checksums] {
                read_back(id, &Message::Read { source: first, wanted, ids: Cow::Borrowed(&ids) });
            }
            read_back(id, &Message::Data { offset: first, checksum: id });
            read_back(id, &Message::Credit(first));
            read_back(id, &Message::Refused(reason));
            read_back(id, &Message::Checksums { first, checksums: checksums.clone() });
            read_back(id, &Message::SourceChecksums { first, checksums });
            read_back(id, &Message::Cancel);
            read_back(id, &Message::Cancelled);
        }

        #[test]
        fn any_bytes_give_a_message_or_an_error(kind: u8, header: Vec<u8>, payload: Vec<u8>) {
            let read = Message::decode(kind, Reader::new(&header), &payload);
            prop_assert!(read.is_err() || Message::is_kind(kind));
        }
    }
}
