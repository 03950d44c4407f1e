//! A stream at its destination: pieces of memory as a sequence of parts, each with its place in the sequence and a
//! checksum. They come straight into the memory where they belong, several at once where the session has several
//! connections; the message that follows says that a part is there.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::rc::Rc;
use std::sync::Arc;

use kvpipe_ucx::socket::{RANGES_CAP, Range};
use kvpipe_ucx::{Buffer, DeviceWrites, SharedBytes};

use super::gaps::Gaps;
use super::message::DATA;
use super::outgoing_stream::WINDOW;
use super::region::{Cursor, Pieces};
use super::transfer::Corruption;
use super::verifier::Checksums;
use crate::checksum::RunningChecksum;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::session::{Links, RegisteredSink, StreamSink};
use crate::transport::Memory;

/// A part that is coming.
#[derive(Debug)]
struct ComingPart {
    /// Destination of its next bytes.
    cursor: Cursor,
    /// Bytes of it that have not come.
    left: u64,
    expected: u64,
    checksum: RunningChecksum,
}

/// The bytes that a stream is to bring, and their destination.
#[derive(Debug)]
struct StreamDestination {
    /// Of memory on a GPU: what has been written may still be on its way there. Dropped before the memory.
    writes: Option<DeviceWrites>,
    memory: Arc<Memory>,
    pieces: Arc<Pieces>,
    /// Of which no part has begun.
    gaps: Gaps,
    /// By their offsets.
    coming: BTreeMap<u64, ComingPart>,
    placed_bytes: u64,
    checksums: Checksums,
    /// Bytes that the checksum for the owner covers.
    hashed: Cursor,
    /// Beginning of the first part that differs from its checksum.
    corruption: Option<Corruption>,
}

impl StreamDestination {
    /// Bytes of a part have come: goes on behind them, and ends the part if those were its last.
    fn came(&mut self, offset: u64, cursor: Cursor, len: u64) {
        self.placed_bytes += len;
        let Some(part) = self.coming.get_mut(&offset) else {
            return;
        };
        part.cursor = cursor;
        part.left -= len;
        if part.left == 0 {
            if self.checksums.compare() && part.checksum.get() != part.expected {
                let first = self.corruption.map_or(u64::MAX, |it| it.at);
                self.corruption = Some(Corruption {
                    at: first.min(offset),
                    is_exact: false,
                });
            }
            self.coming.remove(&offset);
        }
        self.hash_for_owner();
    }

    /// Hashes for the owner what has come without a gap. Its memory is the host's.
    fn hash_for_owner(&mut self) {
        let Checksums::OfOwner(running) = &mut self.checksums else {
            return;
        };
        let coming = self.coming.values().map(|part| part.cursor.bytes_behind());
        let end = coming.chain(self.gaps.first()).min();
        let end = end.unwrap_or(self.pieces.num_bytes);
        while self.hashed.bytes_behind() < end
            && let Some(run) = self
                .hashed
                .piece(&self.pieces.runs, end - self.hashed.bytes_behind())
        {
            let bytes = self
                .memory
                .buffer()
                .bytes(run.to as usize, run.len as usize);
            if let Some(bytes) = bytes {
                running.add(bytes);
            }
            self.hashed.advance(&self.pieces.runs, run.len);
        }
    }
}

fn not_written(reason: impl Display) -> Error {
    Error::Unavailable(format!("the destination cannot be written: {reason}"))
}

impl StreamSink for StreamDestination {
    /// No byte comes twice: a part of which some have come is an error of the peer.
    fn begin(&mut self, mut header: Reader<'_>, len: usize) -> Result<u64> {
        let (offset, expected) = (header.u64()?, header.u64()?);
        header.end()?;
        let (len, num_bytes) = (len as u64, self.pieces.num_bytes);
        let Some(cursor) = self.gaps.take(&self.pieces.runs, offset, len) else {
            return Err(Error::protocol(format_args!(
                "{len} bytes at {offset} of {num_bytes}, which are not expected"
            )));
        };
        let part = ComingPart {
            cursor,
            left: len,
            expected,
            checksum: RunningChecksum::default(),
        };
        self.coming.insert(offset, part);
        Ok(offset)
    }

    fn next_ranges(&self, offset: u64, cap: usize, ranges: &mut Vec<Range>) -> Option<Buffer> {
        if self.writes.is_some() {
            return None;
        }
        let part = self.coming.get(&offset)?;
        let (mut cursor, runs) = (part.cursor, &self.pieces.runs);
        let mut left = part.left.min(cap as u64);
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

    fn placed(&mut self, offset: u64, len: usize) {
        let Some(part) = self.coming.get_mut(&offset) else {
            return;
        };
        let (mut cursor, mut left, runs) = (part.cursor, len as u64, &self.pieces.runs);
        while left > 0
            && let Some(run) = cursor.piece(runs, left)
        {
            if self.checksums.compare()
                && let Some(bytes) = self
                    .memory
                    .buffer()
                    .bytes(run.to as usize, run.len as usize)
            {
                part.checksum.add(bytes);
            }
            cursor.advance(runs, run.len);
            left -= run.len;
        }
        self.came(offset, cursor, len as u64);
    }

    fn put(&mut self, offset: u64, data: SharedBytes<'_>) -> Result<()> {
        let num_bytes = data.len() as u64;
        let Some(part) = self.coming.get_mut(&offset) else {
            return Ok(());
        };
        if self.checksums.compare() {
            part.checksum.add(data);
        }
        let (mut cursor, runs, mut rest) = (part.cursor, &self.pieces.runs, data);
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
        self.came(offset, cursor, num_bytes);
        if self.placed_bytes == self.pieces.num_bytes
            && let Some(writes) = &mut self.writes
        {
            writes.finish().map_err(not_written)?;
        }
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
        links: &Links,
        session: SessionKey,
        transfer: u64,
        (memory, pieces): (Arc<Memory>, Arc<Pieces>),
        (checksums, is_sealed): (Checksums, bool),
    ) -> Self {
        let destination = Rc::new(RefCell::new(StreamDestination {
            writes: DeviceWrites::begin(memory.buffer()),
            memory,
            gaps: Gaps::new(pieces.num_bytes),
            pieces,
            coming: BTreeMap::new(),
            placed_bytes: 0,
            checksums,
            hashed: Cursor::default(),
            corruption: None,
        }));
        Self {
            _registered: links.register_sink(session, (DATA, transfer), destination.clone()),
            destination,
            received_bytes: 0,
            uncredited_bytes: 0,
            is_sealed,
        }
    }

    /// A part of so many bytes has come; bytes of credit for the source, if it is due.
    pub(super) fn receive(&mut self, len: u64) -> Result<Option<u64>> {
        let destination = self.destination.borrow();
        if self.received_bytes + len > destination.placed_bytes {
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

    /// Checksum for the owner, once all is here.
    pub(super) fn of_all(&self) -> Option<RunningChecksum> {
        self.destination.borrow().checksums.of_owner()
    }

    /// Beginning of the first part that differs from its checksum.
    pub(super) fn corruption(&self) -> Option<Corruption> {
        self.destination.borrow().corruption
    }
}

#[cfg(test)]
mod tests;
