//! Frames that a connection has not sent. Messages go first, in their order; parts of streams follow one by one, straight
//! from the memory in which they lie.

use std::collections::VecDeque;
use std::io::{ErrorKind, Result as IoResult};
use std::os::fd::BorrowedFd;
use std::sync::LazyLock;

use kvpipe_ucx::Buffer;
use kvpipe_ucx::socket::{self, Range};

use crate::error::Result;
use crate::net::framing::{STREAM_OVERHEAD, SendBuffer, stream_head};
use crate::net::record::Sealer;

/// Bytes that are sent before the thread looks at other sockets.
const SEND_CAP: usize = 1 << 20;
/// Sealed bytes up to which the next part of a stream is sealed: messages that come later wait for them.
const SEALED_CAP: usize = 256 << 10;
/// Sent in place of memory that its owner has back.
static ZEROS: LazyLock<Buffer> = LazyLock::new(|| Buffer::zeroed(64 << 10));

/// Source and transfer of a part of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamTag {
    /// The source of its bytes.
    pub(crate) source: u64,
    /// The transfer that it is for.
    pub(crate) transfer: u64,
}

/// A part of a stream that has not been sent, or not all of it.
#[derive(Debug)]
pub(crate) struct StreamPart {
    pub(crate) tag: StreamTag,
    pub(crate) header: Vec<u8>,
    /// Its bytes, in host memory.
    pub(crate) buffer: Buffer,
    pub(crate) ranges: Vec<Range>,
}

impl StreamPart {
    fn num_bytes(&self) -> usize {
        self.ranges.iter().map(|range| range.1).sum()
    }

    fn frame_len(&self) -> usize {
        STREAM_OVERHEAD + self.header.len() + self.num_bytes()
    }

    /// Appends the frame in one piece.
    fn append_to(&self, frame: &mut Vec<u8>) {
        frame.extend(stream_head(&self.header));
        let end = frame.len() + self.num_bytes();
        for &(offset, len) in &self.ranges {
            if let Some(bytes) = self.buffer.bytes(offset, len) {
                bytes.append_to(frame);
            }
        }
        let is_aborted = frame.len() != end;
        frame.resize(end, 0);
        frame.push(is_aborted.into());
    }
}

/// The part that is being sent.
#[derive(Debug)]
struct SendingPart {
    tag: StreamTag,
    /// Length, type and header, as far as they are not sent.
    head: Vec<u8>,
    buffer: Buffer,
    /// The payload, as far as it is not sent.
    ranges: VecDeque<Range>,
    /// The byte after it: 1 if the part is aborted.
    end: [u8; 1],
}

impl SendingPart {
    fn of(part: StreamPart) -> Self {
        let mut head = (part.frame_len() as u32).to_le_bytes().to_vec();
        head.extend(stream_head(&part.header));
        Self {
            tag: part.tag,
            head,
            buffer: part.buffer,
            ranges: part.ranges.into(),
            end: [0],
        }
    }

    /// Bytes that are not sent.
    fn len(&self) -> usize {
        let payload = self.ranges.iter().map(|range| range.1);
        self.head.len() + payload.sum::<usize>() + self.end.len()
    }

    /// Sends as much as the socket takes in one call; returns the number of bytes, and true if that was the end.
    fn send(&mut self, socket: BorrowedFd<'_>) -> IoResult<(usize, bool)> {
        let ranges: Vec<_> = self
            .ranges
            .iter()
            .copied()
            .take(socket::RANGES_CAP)
            .collect();
        let end = if ranges.len() == self.ranges.len() {
            &self.end[..]
        } else {
            &[]
        };
        let num_sent = socket::send(socket, &self.head, (&self.buffer, &ranges), end)?;
        let in_head = num_sent.min(self.head.len());
        self.head.drain(..in_head);
        let mut left = num_sent - in_head;
        while left > 0
            && let Some((offset, len)) = self.ranges.pop_front()
        {
            let sent = len.min(left);
            left -= sent;
            if sent < len {
                self.ranges.push_front((offset + sent, len - sent));
            }
        }
        Ok((num_sent, left > 0))
    }

    /// Reads no more of the memory: zeros follow, and the end says so.
    fn abort(&mut self) {
        let mut left: usize = self.ranges.iter().map(|range| range.1).sum();
        self.buffer = ZEROS.clone();
        self.ranges.clear();
        while left > 0 {
            let len = left.min(ZEROS.len());
            self.ranges.push_back((0, len));
            left -= len;
        }
        self.end = [1];
    }
}

/// Frames and parts that a connection has not sent.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// Whole frames: messages, and sealed parts of streams.
    frames: SendBuffer,
    sending: Option<SendingPart>,
    parts: VecDeque<StreamPart>,
}

impl Outbox {
    /// True if everything has been sent.
    pub(super) fn is_empty(&self) -> bool {
        self.frames.unsent().is_empty() && self.sending.is_none() && self.parts.is_empty()
    }

    /// Bytes of frames and parts that have not been sent.
    pub(super) fn len(&self) -> usize {
        let parts = self.parts.iter().map(StreamPart::frame_len);
        let sending = self.sending.as_ref().map_or(0, SendingPart::len);
        self.frames.unsent().len() + sending + parts.sum::<usize>()
    }

    /// Appends a frame, sealed where there is a sealer. False when too many bytes wait already.
    ///
    /// # Errors
    /// The sealer seals no more.
    pub(super) fn push(&mut self, frame: &[u8], sealer: Option<&mut Sealer>) -> Result<bool> {
        self.frames.append(frame, sealer)
    }

    /// Appends a part of a stream.
    pub(super) fn push_part(&mut self, part: StreamPart) {
        self.parts.push_back(part);
    }

    /// Sends nothing more of the parts that `is_over` names. The part that is being sent ends with zeros, as aborted.
    pub(super) fn abort(&mut self, is_over: impl Fn(StreamTag) -> bool) {
        self.parts.retain(|part| !is_over(part.tag));
        if let Some(sending) = self.sending.as_mut().filter(|it| is_over(it.tag)) {
            sending.abort();
        }
    }

    /// Drops the unsent bytes.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Sends as much as the socket takes, at most so much that other sockets do not wait for long.
    ///
    /// # Errors
    /// The connection is broken, or the sealer seals no more.
    pub(super) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        mut sealer: Option<&mut Sealer>,
    ) -> std::result::Result<(), String> {
        let mut num_sent = 0;
        while num_sent < SEND_CAP {
            match self.send_next(socket, sealer.as_deref_mut()) {
                Ok(0) => break,
                Ok(sent) => num_sent += sent,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    /// Sends the next bytes with one call; returns their number, 0 if there are none.
    fn send_next(
        &mut self,
        socket: BorrowedFd<'_>,
        sealer: Option<&mut Sealer>,
    ) -> IoResult<usize> {
        if let Some(sealer) = sealer {
            self.seal_next(sealer).map_err(std::io::Error::other)?;
        }
        if self.sending.is_none() {
            let frames = self.frames.unsent();
            if !frames.is_empty() {
                let num_sent = socket::send(socket, frames, (&ZEROS, &[]), &[])?;
                self.frames.consume(num_sent);
                return Ok(num_sent);
            }
            self.sending = self.parts.pop_front().map(SendingPart::of);
        }
        let Some(sending) = &mut self.sending else {
            return Ok(0);
        };
        let (num_sent, is_over) = sending.send(socket)?;
        if is_over {
            self.sending = None;
        }
        Ok(num_sent)
    }

    /// Seals the next part of a stream, if few sealed bytes wait.
    fn seal_next(&mut self, sealer: &mut Sealer) -> Result<()> {
        if self.frames.unsent().len() < SEALED_CAP
            && let Some(part) = self.parts.pop_front()
        {
            let write = |frame: &mut Vec<u8>| part.append_to(frame);
            self.frames
                .append_written(part.frame_len(), Some(sealer), write)?;
        }
        Ok(())
    }
}

#[cfg(test)]
impl StreamPart {
    /// The part as a test's [tap](super::wire::tap) leaves it.
    pub(super) fn tapped(self) -> Self {
        if !super::wire::is_tapped() {
            return self;
        }
        let mut payload = Vec::new();
        for &(offset, len) in &self.ranges {
            let bytes = self.buffer.bytes(offset, len).expect("host memory");
            bytes.append_to(&mut payload);
        }
        let (header, payload) = super::wire::pass(&self.header, &payload);
        let ranges = vec![(0, payload.len())];
        Self {
            header,
            ranges,
            buffer: Buffer::from_vec(payload),
            ..self
        }
    }
}

#[cfg(test)]
mod tests;
