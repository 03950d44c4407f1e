//! Frames of a session's TCP connection: a length of four bytes, little-endian, then the content. Bytes in, frames out.

use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};
use crate::net::record::{Sealer, TAG_LEN};

/// Largest frame of an authenticated peer. An offer of 4 Mi blocks has 32 MiB.
pub(crate) const FRAME_CAP: usize = 33 << 20;
/// Most bytes of messages that wait for a peer that does not read. The requests and offers that a peer may have under
/// way take 448 MiB: 4 reads and 8 writes of 4 Mi blocks, and the checksums of 4 more.
const UNSENT_CAP: usize = 512 << 20;
/// Longest reason in a goodbye.
const REASON_CAP: usize = 4096;

const HEARTBEAT: u8 = 32;
const MESSAGE: u8 = 33;
const GOODBYE: u8 = 34;
const PING: u8 = 35;
const DATA_PATH: u8 = 36;
const STREAM: u8 = 37;
const STREAM_LOST: u8 = 38;
/// Bytes that a buffer without content keeps for the next frames.
const KEPT_BYTES: usize = 1 << 20;
/// Longest name of a transport.
const TRANSPORT_CAP: usize = 64;

/// A frame of an established session.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SessionFrame<'a> {
    /// The sender is alive.
    Heartbeat,
    /// A message of a service.
    Message { header: &'a [u8], payload: &'a [u8] },
    /// A part of a stream, whose sender has its memory back if `is_aborted`: then the bytes mean nothing.
    Stream {
        header: &'a [u8],
        payload: &'a [u8],
        is_aborted: bool,
    },
    /// The sender closes the session, for this reason.
    Goodbye(String),
    /// The receiver is to send a heartbeat now.
    Ping,
    /// The sender's data path for bytes of the receiver: it reads its memory, or gets a stream, over this transport.
    DataPath { is_read: bool, transport: String },
    /// The sender has closed the further connection of this number. Parts of streams on it may not have come.
    StreamLost(u32),
}

impl<'a> SessionFrame<'a> {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Heartbeat => vec![HEARTBEAT],
            Self::Message { header, payload } => {
                let writer = Writer::with_capacity(1 + 4 + header.len() + payload.len());
                writer.u8(MESSAGE).bytes(header).raw(payload).finish()
            }
            Self::Stream {
                header,
                payload,
                is_aborted,
            } => {
                let writer = Writer::with_capacity(STREAM_OVERHEAD + header.len() + payload.len());
                let writer = writer.raw(&stream_head(header)).raw(payload);
                writer.u8((*is_aborted).into()).finish()
            }
            Self::Goodbye(reason) => Writer::new(GOODBYE).text(reason, REASON_CAP).finish(),
            Self::Ping => vec![PING],
            Self::DataPath { is_read, transport } => Writer::new(DATA_PATH)
                .u8((*is_read).into())
                .text(transport, TRANSPORT_CAP)
                .finish(),
            Self::StreamLost(number) => Writer::new(STREAM_LOST).u32(*number).finish(),
        }
    }

    /// # Errors
    /// No such frame; the text does not name the peer.
    pub(crate) fn decode(frame: &'a [u8]) -> Result<Self> {
        match frame.split_first() {
            Some((&HEARTBEAT, _)) => Ok(Self::Heartbeat),
            Some((&MESSAGE, fields)) => {
                let mut reader = Reader::new(fields);
                let header = reader.bytes(FRAME_CAP)?;
                let payload = reader.rest();
                Ok(Self::Message { header, payload })
            }
            Some((&STREAM, fields)) => {
                let mut reader = Reader::new(fields);
                let len = reader.u8()?.into();
                let header = reader.raw(len)?;
                let (is_aborted, payload) = match reader.rest().split_last() {
                    Some((&last, payload)) => (Reader::new(&[last]).flag()?, payload),
                    None => return Err(Error::protocol("a part of a stream without an end")),
                };
                Ok(Self::Stream {
                    header,
                    payload,
                    is_aborted,
                })
            }
            Some((&GOODBYE, reason)) => Ok(Self::Goodbye(Reader::new(reason).str(REASON_CAP)?)),
            Some((&PING, _)) => Ok(Self::Ping),
            Some((&DATA_PATH, fields)) => {
                let mut reader = Reader::new(fields);
                let is_read = reader.flag()?;
                let transport = reader.str(TRANSPORT_CAP)?;
                Ok(Self::DataPath { is_read, transport })
            }
            Some((&STREAM_LOST, number)) => {
                let mut reader = Reader::new(number);
                let number = reader.u32()?;
                reader.end()?;
                Ok(Self::StreamLost(number))
            }
            other => Err(Error::protocol(format_args!(
                "frame {:?} on an established session",
                other.map(|(kind, _)| kind)
            ))),
        }
    }
}

/// Bytes of a stream's frame besides header and payload: type, length of the header, end.
pub(crate) const STREAM_OVERHEAD: usize = 3;

/// The beginning of a stream's frame, after its length. The payload follows, and a byte that is 1 if the part is aborted.
pub(crate) fn stream_head(header: &[u8]) -> Vec<u8> {
    let len = u8::try_from(header.len()).unwrap_or(u8::MAX);
    Writer::new(STREAM).u8(len).raw(header).finish()
}

/// The beginning of a stream's frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StreamHead {
    pub(crate) header: Vec<u8>,
    pub(crate) payload_len: usize,
}

/// Splits received bytes into frames.
#[derive(Debug, Default)]
pub(crate) struct FrameReader {
    bytes: Vec<u8>,
    start: usize,
}

impl FrameReader {
    /// Buffer to which received bytes are appended.
    pub(crate) fn buffer(&mut self) -> &mut Vec<u8> {
        self.bytes.drain(..std::mem::take(&mut self.start));
        if self.bytes.is_empty() {
            // After a large frame.
            self.bytes.shrink_to(KEPT_BYTES);
        }
        &mut self.bytes
    }

    /// Bytes that have come and are not taken.
    pub(crate) fn unread(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// Takes the next `len` bytes, which have come.
    pub(crate) fn take(&mut self, len: usize) {
        self.start += len;
    }

    /// Bytes of the next frame that have not come, as far as its length is known.
    pub(crate) fn num_missing(&self) -> usize {
        let unread = self.unread();
        let length = unread
            .first_chunk::<4>()
            .map_or(0, |length| u32::from_le_bytes(*length));
        (4 + length as usize).saturating_sub(unread.len())
    }

    /// Takes the beginning of the next frame if that is one of a stream and its header has come. The payload and its end
    /// follow in [`unread`](Self::unread), and on the connection.
    ///
    /// # Errors
    /// It is too short or longer than the cap; the text does not name the peer.
    pub(crate) fn next_stream(&mut self) -> Result<Option<StreamHead>> {
        let Some((length, rest)) = self.unread().split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        let (Some(&STREAM), Some(&header_len)) = (rest.first(), rest.get(1)) else {
            return Ok(None);
        };
        let header_len = usize::from(header_len);
        if length > FRAME_CAP || length < STREAM_OVERHEAD + header_len {
            return Err(Error::protocol(format_args!(
                "a part of a stream in a frame of {length} bytes"
            )));
        }
        let Some(header) = rest[2..].get(..header_len) else {
            return Ok(None);
        };
        let head = StreamHead {
            header: header.to_vec(),
            payload_len: length - STREAM_OVERHEAD - header_len,
        };
        self.take(4 + 2 + header_len);
        Ok(Some(head))
    }

    /// The next frame, once it is complete.
    ///
    /// # Errors
    /// It is longer than `cap`; the text does not name the peer.
    pub(crate) fn next(&mut self, cap: usize) -> Result<Option<&mut [u8]>> {
        let Some((length, rest)) = self.bytes[self.start..].split_first_chunk_mut::<4>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > cap {
            return Err(Error::protocol(format_args!(
                "a frame of {length} bytes is announced, at most {cap} are allowed"
            )));
        }
        let frame = rest.get_mut(..length);
        self.start += frame.as_ref().map_or(0, |frame| 4 + frame.len());
        Ok(frame)
    }
}

/// Frames that have not been sent.
#[derive(Debug)]
pub(crate) struct SendBuffer {
    bytes: Vec<u8>,
    start: usize,
    cap: usize,
}

impl Default for SendBuffer {
    fn default() -> Self {
        Self {
            bytes: Vec::new(),
            start: 0,
            cap: UNSENT_CAP,
        }
    }
}

impl SendBuffer {
    /// Appends a frame, sealed where there is a sealer. False when too many bytes wait already.
    ///
    /// # Errors
    /// The sealer seals no more.
    pub(crate) fn append(&mut self, frame: &[u8], sealer: Option<&mut Sealer>) -> Result<bool> {
        let write = |unsent: &mut Vec<u8>| unsent.extend_from_slice(frame);
        self.append_written(frame.len(), sealer, write)
    }

    /// As [`append`](Self::append), for a frame of `len` bytes that `write` appends to those that are not sent.
    ///
    /// # Errors
    /// As of [`append`](Self::append).
    pub(crate) fn append_written(
        &mut self,
        len: usize,
        sealer: Option<&mut Sealer>,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Result<bool> {
        let fits = self.unsent().len() + len <= self.cap;
        if fits {
            let sent_len = len + if sealer.is_some() { TAG_LEN } else { 0 };
            self.bytes.reserve(4 + sent_len);
            self.bytes
                .extend_from_slice(&(sent_len as u32).to_le_bytes());
            let start = self.bytes.len();
            write(&mut self.bytes);
            if let Some(sealer) = sealer {
                sealer.seal_from(start, &mut self.bytes)?;
            }
        }
        Ok(fits)
    }

    /// The bytes to send.
    pub(crate) fn unsent(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// So many bytes have been sent.
    pub(crate) fn consume(&mut self, len: usize) {
        self.start += len;
        // Moves no more bytes than were sent since the last move.
        if 2 * self.start >= self.bytes.len() {
            self.bytes.drain(..std::mem::take(&mut self.start));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Moves at most `len` bytes of those that are unsent to the reader, and returns their number.
    fn receive(sent: &mut SendBuffer, reader: &mut FrameReader, len: usize) -> usize {
        let len = len.min(sent.unsent().len());
        reader.buffer().extend(&sent.unsent()[..len]);
        sent.consume(len);
        len
    }

    #[test]
    fn every_frame_is_decoded_as_encoded() {
        for frame in [
            SessionFrame::Heartbeat,
            SessionFrame::Message {
                header: b"header",
                payload: b"payload",
            },
            SessionFrame::Stream {
                header: b"header",
                payload: b"payload",
                is_aborted: true,
            },
            SessionFrame::Goodbye("reason".to_owned()),
            SessionFrame::Ping,
            SessionFrame::DataPath {
                is_read: true,
                transport: "rc_mlx5".to_owned(),
            },
            SessionFrame::StreamLost(7),
        ] {
            assert_eq!(SessionFrame::decode(&frame.encode()), Ok(frame));
        }
        assert!(SessionFrame::decode(b"").is_err());
        assert!(SessionFrame::decode(&[7]).is_err());
        assert!(SessionFrame::decode(&[DATA_PATH, 2, 0, 0, 0, 0]).is_err());
    }

    #[test]
    fn a_frame_is_refused_as_soon_as_its_length_is_known() {
        let mut reader = FrameReader::default();
        reader.buffer().extend([9, 0, 0]);
        assert_eq!(reader.next(8), Ok(None));
        reader.buffer().push(0);
        assert!(matches!(reader.next(8), Err(Error::Protocol(_))));
        assert_eq!(reader.next(9), Ok(None));
    }

    #[test]
    fn a_peer_that_does_not_read_is_sent_no_more_than_the_cap() {
        let cap = 64 << 10;
        let mut sent = SendBuffer {
            cap,
            ..SendBuffer::default()
        };
        assert!((0..64).all(|_| sent.append(&[0; 1020], None).unwrap()));
        assert!(!sent.append(b"!", None).unwrap());
        sent.consume(cap / 2);
        assert!(sent.append(b"!", None).unwrap());
    }

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in_however_they_are_cut(frames: Vec<Vec<u8>>, len in 1..9usize) {
            let (mut sent, mut reader) = (SendBuffer::default(), FrameReader::default());
            assert!(frames.iter().all(|frame| sent.append(frame, None).unwrap()));
            let mut received = Vec::new();
            while receive(&mut sent, &mut reader, len) > 0 {
                while let Some(frame) = reader.next(FRAME_CAP).unwrap() {
                    received.push(frame.to_vec());
                }
            }
            prop_assert_eq!(received, frames);
            prop_assert!(sent.unsent().is_empty());
        }
    }
}
