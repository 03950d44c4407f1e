//! Bytes that a connection has received, until they are frames, or lie where their stream belongs.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use kvpipe_ucx::socket::{self, Range};

use super::stream_sinks::{PartSink, StreamSinks};
use crate::error::Result;
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::net::framing::{FrameReader, StreamHead};

/// Bytes that are read into the buffer where little is known of what comes: a few frames.
const READ_AHEAD: usize = 16 << 10;
/// Most bytes of one call, so that one busy peer cannot keep the thread: epoll is level-triggered and reports the rest.
pub(super) const READ_CAP: usize = 1 << 20;
/// Bytes of a part that are read into the buffer at once where its sink does not give its memory.
const COPIED_CAP: usize = 256 << 10;

/// Bytes by which a frame that is coming has advanced. Fewer prove nothing: if its length was changed on the way, the
/// heartbeats behind it are taken for its content.
const ADVANCE_BYTES: usize = 1 << 20;

/// The part of a stream that is coming.
struct ReceivingPart {
    head: StreamHead,
    /// The bytes are dropped where there is none, or it has ended.
    sink: Option<PartSink>,
    /// Bytes of the payload that have not come.
    left: usize,
}

/// A part of a stream that has come. Its sink has the bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ReceivedPart {
    pub(super) header: Vec<u8>,
    pub(super) num_bytes: usize,
    pub(super) is_aborted: bool,
}

/// Received bytes of a connection.
#[derive(Default)]
pub(super) struct Inbox {
    frames: FrameReader,
    part: Option<ReceivingPart>,
    /// Bytes since a frame came whole, or advanced.
    num_bytes: usize,
    /// True if a frame came whole since `note_advance`.
    has_whole: bool,
    /// Since when the frame that is coming has not advanced; none if there is none.
    stuck_since: Option<Instant>,
    /// Kept between calls for its capacity.
    ranges: Vec<Range>,
}

impl Inbox {
    /// Reads once from the socket; the number of bytes, 0 at the end of the stream.
    ///
    /// # Errors
    /// That of the kernel, `WouldBlock` included.
    pub(super) fn read(&mut self, socket: BorrowedFd<'_>) -> std::io::Result<usize> {
        let len = self.read_once(socket)?;
        self.num_bytes += len;
        Ok(len)
    }

    fn read_once(&mut self, socket: BorrowedFd<'_>) -> std::io::Result<usize> {
        let buffer = self.frames.buffer();
        let Some(part) = &mut self.part else {
            let cap = (self.frames.num_missing() + READ_AHEAD).min(READ_CAP);
            return socket::receive(socket, None, self.frames.buffer(), cap);
        };
        self.ranges.clear();
        // Bytes in the buffer come first.
        let sink = part.sink.as_ref().filter(|_| buffer.is_empty());
        let cap = part.left.min(READ_CAP);
        let memory = sink.and_then(|sink| sink.next_ranges(cap, &mut self.ranges));
        let (Some(memory), Some(sink)) = (memory, sink) else {
            let cap = (part.left + 1).min(COPIED_CAP);
            return socket::receive(socket, None, buffer, cap);
        };
        let in_ranges: usize = self.ranges.iter().map(|range| range.1).sum();
        let rest_cap = if in_ranges == part.left {
            READ_AHEAD
        } else {
            0
        };
        let into = Some((&memory, &self.ranges[..]));
        let received = socket::receive(socket, into, buffer, rest_cap)?;
        let placed = received.min(in_ranges);
        sink.placed(placed);
        part.left -= placed;
        Ok(received)
    }

    /// The next frame that has come whole; also those of streams, if they are `sealed`.
    ///
    /// # Errors
    /// It is longer than `cap`.
    pub(super) fn next_frame(&mut self, cap: usize) -> Result<Option<&mut [u8]>> {
        if self.part.is_some() {
            return Ok(None);
        }
        let frame = self.frames.next(cap)?;
        self.has_whole |= frame.is_some();
        Ok(frame)
    }

    /// Notes whether the frame that is coming has advanced, after all whole ones were taken.
    pub(super) fn note_advance(&mut self, now: Instant) {
        let is_coming = self.part.is_some() || !self.frames.unread().is_empty();
        let has_advanced = std::mem::take(&mut self.has_whole) || self.num_bytes >= ADVANCE_BYTES;
        if has_advanced || !is_coming || self.stuck_since.is_none() {
            self.num_bytes = 0;
            self.stuck_since = is_coming.then_some(now);
        }
    }

    /// The time of the last bytes; if the frame that is coming has stopped, of the last that advanced it.
    pub(super) fn alive_since(&self, last_bytes: Instant) -> Instant {
        self.stuck_since.map_or(last_bytes, |at| at.min(last_bytes))
    }

    /// Begins and continues the next part of a stream, if that comes next; returns it once it is complete.
    ///
    /// # Errors
    /// The peer broke the protocol, or the destination cannot be written.
    pub(super) fn next_part(
        &mut self,
        session: SessionKey,
        sinks: &StreamSinks,
    ) -> Result<Option<ReceivedPart>> {
        if self.part.is_none() {
            let Some(head) = self.frames.next_stream()? else {
                return Ok(None);
            };
            let (sink, left) = (
                sinks.begin(session, &head.header, head.payload_len)?,
                head.payload_len,
            );
            self.part = Some(ReceivingPart { head, sink, left });
        }
        let Some(part) = &mut self.part else {
            return Ok(None);
        };
        let unread = self.frames.unread();
        let here = unread.len().min(part.left);
        if here > 0 {
            if let Some(sink) = &part.sink {
                sink.put(unread[..here].into())?;
            }
            part.left -= here;
        }
        let end = unread.get(here..=here).filter(|_| part.left == 0);
        let is_aborted = end.map(|end| Reader::new(end).flag()).transpose()?;
        self.frames.take(here + usize::from(is_aborted.is_some()));
        let Some(is_aborted) = is_aborted else {
            return Ok(None);
        };
        self.has_whole = true;
        Ok(self.part.take().map(|part| ReceivedPart {
            header: part.head.header,
            num_bytes: part.head.payload_len,
            is_aborted,
        }))
    }
}

/// Places a part that has come in one piece.
///
/// # Errors
/// As of [`Inbox::next_part`].
pub(super) fn place(
    sinks: &StreamSinks,
    session: SessionKey,
    header: &[u8],
    payload: &[u8],
) -> Result<()> {
    let sink = sinks.begin(session, header, payload.len())?;
    sink.map_or(Ok(()), |sink| sink.put(payload.into()))
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbox")
            .field("frames", &self.frames)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
