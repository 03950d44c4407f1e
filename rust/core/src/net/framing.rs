//! Frames of a session's TCP connection: a length of four bytes, little-endian, then the content. Bytes in, frames out.

use crate::error::{Error, Result};
use crate::net::codec::{Reader, Writer};
use crate::net::record::{Sealer, TAG_LEN};

/// Largest frame of an authenticated peer.
pub(crate) const FRAME_CAP: usize = 16 << 20;
/// Most bytes that wait for a peer that does not read.
const UNSENT_CAP: usize = 64 << 20;
/// Longest reason in a goodbye.
const REASON_CAP: usize = 4096;

const HEARTBEAT: u8 = 32;
const APPLICATION: u8 = 33;
const GOODBYE: u8 = 34;
const PING: u8 = 35;
const DATA_PATH: u8 = 36;
/// Longest name of a transport.
const TRANSPORT_CAP: usize = 64;

/// A frame of an established session.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SessionFrame<'a> {
    /// The sender is alive.
    Heartbeat,
    /// A message of a service.
    Application(&'a [u8]),
    /// The sender closes the session, for this reason.
    Goodbye(String),
    /// The receiver is to send a heartbeat now.
    Ping,
    /// How the sender gets bytes of the receiver: by reading its memory, or as a stream, over this transport.
    DataPath { is_read: bool, transport: String },
}

impl<'a> SessionFrame<'a> {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Heartbeat => vec![HEARTBEAT],
            Self::Application(message) => Writer::new(APPLICATION).raw(message).finish(),
            Self::Goodbye(reason) => Writer::new(GOODBYE).text(reason, REASON_CAP).finish(),
            Self::Ping => vec![PING],
            Self::DataPath { is_read, transport } => Writer::new(DATA_PATH)
                .u8((*is_read).into())
                .text(transport, TRANSPORT_CAP)
                .finish(),
        }
    }

    /// # Errors
    /// No such frame; the text does not name the peer.
    pub(crate) fn decode(frame: &'a [u8]) -> Result<Self> {
        match frame.split_first() {
            Some((&HEARTBEAT, _)) => Ok(Self::Heartbeat),
            Some((&APPLICATION, message)) => Ok(Self::Application(message)),
            Some((&GOODBYE, reason)) => Ok(Self::Goodbye(Reader::new(reason).str(REASON_CAP)?)),
            Some((&PING, _)) => Ok(Self::Ping),
            Some((&DATA_PATH, fields)) => {
                let mut reader = Reader::new(fields);
                let is_read = reader.flag()?;
                let transport = reader.str(TRANSPORT_CAP)?;
                Ok(Self::DataPath { is_read, transport })
            }
            other => Err(Error::protocol(format_args!(
                "frame {:?} on an established session",
                other.map(|(kind, _)| kind)
            ))),
        }
    }
}

/// Splits received bytes into frames.
#[derive(Debug, Default)]
pub(crate) struct FrameReader {
    bytes: Vec<u8>,
    start: usize,
}

impl FrameReader {
    /// Where to append received bytes.
    pub(crate) fn buffer(&mut self) -> &mut Vec<u8> {
        self.bytes.drain(..std::mem::take(&mut self.start));
        &mut self.bytes
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
#[derive(Debug, Default)]
pub(crate) struct SendBuffer {
    bytes: Vec<u8>,
    start: usize,
}

impl SendBuffer {
    /// Appends a frame, sealed where there is a sealer. False when too many bytes wait already.
    ///
    /// # Errors
    /// The sealer seals no more.
    pub(crate) fn append(&mut self, frame: &[u8], sealer: Option<&mut Sealer>) -> Result<bool> {
        let fits = self.unsent().len() + frame.len() <= UNSENT_CAP;
        if fits {
            let len = frame.len() + if sealer.is_some() { TAG_LEN } else { 0 };
            self.bytes.extend_from_slice(&(len as u32).to_le_bytes());
            match sealer {
                Some(sealer) => sealer.seal(frame, &mut self.bytes)?,
                None => self.bytes.extend_from_slice(frame),
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

    /// Forgets what has not been sent.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What has been written so far, in pieces of `len` bytes.
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
            SessionFrame::Application(b"message"),
            SessionFrame::Goodbye("reason".to_owned()),
            SessionFrame::Ping,
            SessionFrame::DataPath {
                is_read: true,
                transport: "rc_mlx5".to_owned(),
            },
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
        let (mut sent, frame) = (SendBuffer::default(), vec![0; FRAME_CAP - 4]);
        assert!((0..UNSENT_CAP / FRAME_CAP).all(|_| sent.append(&frame, None).unwrap()));
        assert!(!sent.append(b"!", None).unwrap());
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
