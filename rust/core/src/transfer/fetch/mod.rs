//! One buffer of a peer, brought into memory of ours. Its owner offers it ([`ExposedBuffer`]); the other side fetches it
//! ([`Fetch`]) by the data path of the session: with reads of its own, or as messages that it places itself. Either way
//! every piece is compared with the checksum that the owner computed, if it offers any.
//!
//! A service that fetches passes the messages of the four kinds here on, and the ends of its reads.

mod exposed;
mod fetching;

pub(crate) use exposed::{ExposedBuffer, key};
pub(crate) use fetching::Fetch;

use std::ops::Range;

use kvpipe_ucx::MemoryKind;

use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};

/// Destination to source: send it, I place it. Stream path only.
pub(crate) const ACCEPT: u8 = 3;
/// Source to destination: a piece. Stream path only.
pub(crate) const DATA: u8 = 4;
/// Destination to source: so much has been placed. Stream path only.
pub(crate) const CREDIT: u8 = 5;
/// Source to destination: checksums of pieces. Remote read only.
pub(crate) const CHECKSUMS: u8 = 9;

/// One read of the remote-read path, and what one of its checksums covers: it is computed while the piece is in the cache.
const GET_PIECE: usize = 1 << 20;
/// Reads of the remote-read path under way at once.
const GETS_IN_FLIGHT: usize = 4;
/// Most checksums of one message.
const CHECKSUMS_CAP: usize = 1 << 10;
/// Most pieces of a buffer that has checksums: a TiB.
const PIECES_CAP: usize = 1 << 20;
/// Largest packed remote key.
const RKEY_CAP: usize = 4096;

/// How the pieces of a buffer are verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ChecksumMode {
    /// Not at all: its owner has switched checksums off.
    None = 0,
    /// Read pieces by [`CHECKSUMS`], pieces that come as messages by the checksum that each carries.
    Any = 1,
    /// By the checksums of messages only: the owner does not see that it could be read.
    Messages = 2,
}

/// Which memory a buffer is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Held {
    Host = 0,
    Cuda = 1,
}

impl From<MemoryKind> for Held {
    fn from(kind: MemoryKind) -> Self {
        match kind {
            MemoryKind::Host => Self::Host,
            MemoryKind::Cuda { .. } => Self::Cuda,
        }
    }
}

/// What a peer has to know to fetch a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Its length, over 0.
    pub(crate) len: usize,
    address: u64,
    pub(crate) held: Held,
    checksum_mode: ChecksumMode,
    key: Vec<u8>,
    /// Checksums of its first pieces, as far as they are known.
    checksums: Vec<u64>,
}

impl Offer {
    fn new(
        (len, address): (usize, u64),
        held: Held,
        checksum_mode: ChecksumMode,
        key: Vec<u8>,
    ) -> Self {
        Self {
            len,
            address,
            held,
            checksum_mode,
            key,
            checksums: Vec::new(),
        }
    }

    pub(crate) fn write(&self, writer: Writer) -> Writer {
        writer
            .u64(self.len as u64)
            .u64(self.address)
            .u8(self.held as u8)
            .u8(self.checksum_mode as u8)
            .bytes(&self.key)
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let (len, address) = (reader.u64()?, reader.u64()?);
        let held = match reader.u8()? {
            0 => Held::Host,
            1 => Held::Cuda,
            other => return Err(Error::protocol(format_args!("memory {other} of an offer"))),
        };
        let checksum_mode = match reader.u8()? {
            0 => ChecksumMode::None,
            1 => ChecksumMode::Any,
            2 => ChecksumMode::Messages,
            other => {
                return Err(Error::protocol(format_args!(
                    "checksum_mode {other} of an offer"
                )));
            }
        };
        let key = reader.bytes(RKEY_CAP)?.to_vec();
        let is_possible =
            isize::try_from(len).is_ok_and(|len| len > 0) && address.checked_add(len).is_some();
        if !is_possible {
            return Err(Error::protocol(format_args!(
                "an offer of {len} bytes at {address:#x}"
            )));
        }
        // Nobody checksums what is on a GPU.
        if held == Held::Cuda && checksum_mode != ChecksumMode::None {
            return Err(Error::protocol("checksums of CUDA memory in an offer"));
        }
        Ok(Self::new((len as usize, address), held, checksum_mode, key))
    }

    /// The owner's checksums of the next pieces; which.
    pub(crate) fn receive_checksums(&mut self, data: &[u8]) -> Result<Range<usize>> {
        let mut reader = Reader::new(data);
        let checksums = reader.list(CHECKSUMS_CAP, Reader::u64)?;
        reader.end()?;
        let known = self.checksums.len()..self.checksums.len() + checksums.len();
        if self.checksum_mode != ChecksumMode::Any
            || known.end > num_pieces(self.len)
            || known.end > PIECES_CAP
        {
            return Err(Error::protocol(format_args!(
                "{} checksums after {} of a buffer of {} bytes",
                checksums.len(),
                known.start,
                self.len
            )));
        }
        self.checksums.extend(checksums);
        Ok(known)
    }
}

/// Number of pieces of the remote-read path.
fn num_pieces(len: usize) -> usize {
    len.div_ceil(GET_PIECE)
}

/// Where a piece of the remote-read path begins, and its length.
fn piece(len: usize, index: usize) -> (usize, usize) {
    let at = index * GET_PIECE;
    (at, GET_PIECE.min(len - at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offer(len: u64, address: u64, checksum_mode: u8) -> Result<Offer> {
        offer_of(0, len, address, checksum_mode)
    }

    fn offer_of(held: u8, len: u64, address: u64, checksum_mode: u8) -> Result<Offer> {
        let message = Writer::default()
            .u64(len)
            .u64(address)
            .u8(held)
            .u8(checksum_mode)
            .bytes(&[1])
            .finish();
        Offer::read(&mut Reader::new(&message))
    }

    #[test]
    fn an_offer_is_read_as_written() {
        let read = offer(1 << 20, 4096, 1).unwrap();
        let message = read.write(Writer::default()).finish();
        assert_eq!(Offer::read(&mut Reader::new(&message)).unwrap(), read);
    }

    #[test]
    fn an_offer_of_cuda_memory_has_no_checksums() {
        let read = offer_of(1, 1 << 20, 4096, 0).unwrap();
        assert_eq!(read.held, Held::Cuda);
        let message = read.write(Writer::default()).finish();
        assert_eq!(Offer::read(&mut Reader::new(&message)).unwrap(), read);
        assert!(offer_of(1, 1 << 20, 4096, 1).is_err());
        assert!(offer_of(1, 1 << 20, 4096, 2).is_err());
        assert!(offer_of(2, 1 << 20, 4096, 0).is_err());
    }

    #[test]
    fn an_offer_that_cannot_exist_is_refused() {
        assert!(offer(0, 4096, 1).is_err());
        assert!(offer(u64::MAX, 0, 1).is_err());
        assert!(offer(4096, u64::MAX - 4000, 1).is_err());
        assert!(offer(4096, 4096, 3).is_err());
    }

    #[test]
    fn more_checksums_than_pieces_are_refused() {
        let mut offer = offer(2 * GET_PIECE as u64, 4096, 1).unwrap();
        let checksums = |count| {
            Writer::default()
                .list(&vec![7; count], |w, checksum| w.u64(*checksum))
                .finish()
        };
        assert_eq!(offer.receive_checksums(&checksums(1)).unwrap(), 0..1);
        assert!(offer.receive_checksums(&checksums(2)).is_err());
        assert_eq!(offer.receive_checksums(&checksums(1)).unwrap(), 1..2);
    }

    #[test]
    fn pieces_cover_a_buffer_without_gaps() {
        for len in [1, GET_PIECE, GET_PIECE + 1, 5 * GET_PIECE - 1] {
            let pieces: Vec<_> = (0..num_pieces(len)).map(|i| piece(len, i)).collect();
            let end = pieces.iter().fold(0, |end, &(at, size)| {
                assert_eq!((at, size > 0), (end, true));
                end + size
            });
            assert_eq!(end, len);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_give_an_offer_or_an_error(message: Vec<u8>) {
            let _ = Offer::read(&mut Reader::new(&message));
        }
    }
}
