//! A stream at its destination: pieces of memory as a sequence of parts, each with its place in the sequence and a
//! checksum. They come straight into the memory where they belong; the message that follows says that a part is there.

use std::cell::RefCell;
use std::fmt::Display;
use std::rc::Rc;
use std::sync::Arc;

use kvpipe_ucx::socket::{RANGES_CAP, Range};
use kvpipe_ucx::{Buffer, DeviceWrites, SharedBytes};

use super::message::DATA;
use super::outgoing_stream::WINDOW;
use super::region::{Cursor, Pieces};
use super::transfer::Corruption;
use super::verifier::Checksums;
use crate::checksum::RunningChecksum;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::session::{ReactorContext, RegisteredSink, StreamSink};
use crate::transport::Memory;

/// The part that is coming.
#[derive(Debug)]
struct ComingPart {
    /// Bytes of it that have not come.
    left: u64,
    offset: u64,
    expected: u64,
    checksum: RunningChecksum,
}

/// What is expected of a stream, and where it goes.
#[derive(Debug)]
struct StreamDestination {
    /// Of memory on a GPU: what has been written may still be on its way there. Dropped before the memory.
    writes: Option<DeviceWrites>,
    memory: Arc<Memory>,
    pieces: Arc<Pieces>,
    /// What has been placed.
    cursor: Cursor,
    part: Option<ComingPart>,
    checksums: Checksums,
    /// Where the first part begins that differs from its checksum.
    corruption: Option<Corruption>,
}

impl StreamDestination {
    /// Hashes bytes that have come.
    fn hash(&mut self, data: SharedBytes<'_>) {
        match (&mut self.checksums, &mut self.part) {
            (Checksums::OfOwner(running), _) => running.add(data),
            (Checksums::OfStream | Checksums::All, Some(part)) => part.checksum.add(data),
            _ => {}
        }
    }

    /// So many bytes have come, and are hashed: ends the part if those were its last.
    fn came(&mut self, len: u64) {
        let Some(part) = &mut self.part else { return };
        part.left -= len;
        if part.left > 0 {
            return;
        }
        if self.checksums.compare() && part.checksum.get() != part.expected {
            self.corruption.get_or_insert(Corruption {
                at: part.offset,
                is_exact: false,
            });
        }
        self.part = None;
    }
}

fn not_written(reason: impl Display) -> Error {
    Error::Unavailable(format!("the destination cannot be written: {reason}"))
}

impl StreamSink for StreamDestination {
    /// Parts come in order, so that any other is an error of the peer.
    fn begin(&mut self, mut header: Reader<'_>, len: usize) -> Result<()> {
        let (offset, expected) = (header.u64()?, header.u64()?);
        header.end()?;
        let (len, num_bytes) = (len as u64, self.pieces.num_bytes);
        let placed_bytes = self.cursor.bytes_behind();
        if self.part.is_some() || offset != placed_bytes || len == 0 || len > num_bytes - offset {
            return Err(Error::protocol(format_args!(
                "{len} bytes at {offset} of {num_bytes}, {placed_bytes} expected next"
            )));
        }
        self.part = Some(ComingPart {
            left: len,
            offset,
            expected,
            checksum: RunningChecksum::default(),
        });
        Ok(())
    }

    fn next_ranges(&self, cap: usize, ranges: &mut Vec<Range>) -> Option<Buffer> {
        if self.writes.is_some() {
            return None;
        }
        let (mut cursor, runs) = (self.cursor, &self.pieces.runs);
        let mut left = self.part.as_ref()?.left.min(cap as u64);
        while ranges.len() < RANGES_CAP
            && left > 0
            && let Some(run) = cursor.piece(runs, left)
        {
            ranges.push((run.to as usize, run.len as usize));
            cursor.advance(runs, run.len);
            left -= run.len;
        }
        Some(self.memory.buffer().clone())
    }

    fn placed(&mut self, len: usize) {
        let mut left = len as u64;
        let (memory, pieces) = (Arc::clone(&self.memory), Arc::clone(&self.pieces));
        while left > 0
            && let Some(run) = self.cursor.piece(&pieces.runs, left)
        {
            if let Some(bytes) = memory.buffer().bytes(run.to as usize, run.len as usize) {
                self.hash(bytes);
            }
            self.cursor.advance(&pieces.runs, run.len);
            left -= run.len;
        }
        self.came(len as u64);
    }

    fn put(&mut self, data: SharedBytes<'_>) -> Result<()> {
        let num_bytes = data.len() as u64;
        let (mut cursor, runs, mut rest) = (self.cursor, &self.pieces.runs, data);
        while !rest.is_empty()
            && let Some(run) = cursor.piece(runs, rest.len() as u64)
        {
            let (piece, after) = rest.split_at(run.len as usize);
            let offset = run.to as usize;
            match &mut self.writes {
                Some(writes) => writes.write(offset, piece).map_err(not_written)?,
                None if self.memory.buffer().copy_from(offset, piece) => {}
                None => return Err(not_written("it is not writable there")),
            }
            cursor.advance(runs, run.len);
            rest = after;
        }
        if cursor.bytes_behind() == self.pieces.num_bytes
            && let Some(writes) = &mut self.writes
        {
            writes.finish().map_err(not_written)?;
        }
        self.cursor = cursor;
        self.hash(data);
        self.came(num_bytes);
        Ok(())
    }
}

/// A stream at its destination, which receives it until this is dropped.
#[derive(Debug)]
pub(super) struct IncomingStream {
    _registered: RegisteredSink,
    destination: Rc<RefCell<StreamDestination>>,
    /// Bytes of the parts that have come, and those of them that the source has no credit for yet.
    pub(super) received_bytes: u64,
    uncredited_bytes: u64,
    is_sealed: bool,
}

impl IncomingStream {
    /// Receives the stream of a transfer into `memory`. Where checksums are compared, each part has one, or is sealed.
    pub(super) fn begin(
        cx: &ReactorContext,
        session: SessionKey,
        transfer: u64,
        (memory, pieces): (Arc<Memory>, Arc<Pieces>),
        (checksums, is_sealed): (Checksums, bool),
    ) -> Self {
        let destination = Rc::new(RefCell::new(StreamDestination {
            writes: DeviceWrites::begin(memory.buffer()),
            memory,
            pieces,
            cursor: Cursor::default(),
            part: None,
            checksums,
            corruption: None,
        }));
        Self {
            _registered: cx.register_sink(session, (DATA, transfer), destination.clone()),
            destination,
            received_bytes: 0,
            uncredited_bytes: 0,
            is_sealed,
        }
    }

    /// A part of so many bytes has come; bytes of credit for the source, if it is due.
    pub(super) fn receive(&mut self, len: u64) -> Result<Option<u64>> {
        let destination = self.destination.borrow();
        if self.received_bytes + len > destination.cursor.bytes_behind() {
            let text = "a part of a stream that ended before this one";
            return Err(Error::protocol(text));
        }
        self.received_bytes += len;
        self.uncredited_bytes += len;
        let is_here = self.received_bytes == destination.pieces.num_bytes;
        let is_due = self.uncredited_bytes >= WINDOW / 4 && !is_here;
        Ok(is_due.then(|| std::mem::take(&mut self.uncredited_bytes)))
    }

    /// True if each part has a checksum, or is sealed.
    pub(super) fn is_verified(&self) -> bool {
        self.is_sealed || self.destination.borrow().checksums.compare()
    }

    /// What the owner compares, once all is here.
    pub(super) fn of_all(&self) -> Option<RunningChecksum> {
        self.destination.borrow().checksums.of_owner()
    }

    /// Where the first part begins that differs from its checksum.
    pub(super) fn corruption(&self) -> Option<Corruption> {
        self.destination.borrow().corruption
    }
}

#[cfg(test)]
mod tests;
