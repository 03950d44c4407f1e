//! A stream at its source, sent as far as the destination's credit goes.

use std::sync::Arc;

use kvpipe_ucx::socket::{RANGES_CAP, Range};
use kvpipe_ucx::{Buffer, MemoryKind};

use super::message::Message;
use super::region::{Cursor, Pieces};
use crate::checksum::RunningChecksum;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::{Links, StreamPart, StreamTag};
use crate::transport::Memory;

/// Bytes a source may stream before the destination's next credit.
pub(super) const WINDOW: u64 = 4 << 20;
/// Most bytes of one part: messages wait until the part that is being sent is over.
const PART: u64 = 512 << 10;

/// A stream at its source.
#[derive(Debug)]
pub(super) struct OutgoingStream {
    /// The source that it is of.
    pub(super) source: u64,
    memory: Arc<Memory>,
    pieces: Pieces,
    cursor: Cursor,
    credit_bytes: u64,
    is_checksummed: bool,
}

impl OutgoingStream {
    pub(super) fn new(
        source: u64,
        memory: Arc<Memory>,
        pieces: Pieces,
        is_checksummed: bool,
    ) -> Self {
        Self {
            source,
            memory,
            pieces,
            cursor: Cursor::default(),
            credit_bytes: WINDOW,
            is_checksummed,
        }
    }

    /// Its length.
    pub(super) fn num_bytes(&self) -> u64 {
        self.pieces.num_bytes
    }

    /// The destination has placed so many bytes.
    pub(super) fn grant(&mut self, credit_bytes: u64) {
        self.credit_bytes = self.credit_bytes.saturating_add(credit_bytes).min(WINDOW);
    }

    /// Sends what the credit allows; whether everything has been sent.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub(super) fn send(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        transfer: u64,
    ) -> Result<bool> {
        match self.memory.buffer().kind() {
            MemoryKind::Host => Ok(self.send_host(links, session, transfer)),
            MemoryKind::Cuda { .. } => self.send_device(links, session, transfer),
        }
    }

    /// Sends bytes of a GPU, which come to the host in chunks: while one is sent, the GPU copies the next ones.
    fn send_device(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        transfer: u64,
    ) -> Result<bool> {
        let ranges = self.credited_ranges();
        let memory = Arc::clone(&self.memory);
        memory
            .buffer()
            .read_staged(&ranges, &mut |mut chunk| {
                while !chunk.is_empty() {
                    let (piece, rest) = chunk.split_at(PART as usize);
                    let (offset, len) = (self.cursor.bytes_behind(), piece.len() as u64);
                    let mut checksum = RunningChecksum::default();
                    if self.is_checksummed {
                        checksum.add(piece);
                    }
                    let copied = (Buffer::from_vec(piece.to_vec()), vec![(0, piece.len())]);
                    let part = self.part(transfer, offset, self.compared(checksum), copied);
                    if !links.stream(session, part) {
                        return false;
                    }
                    self.cursor.advance_over(&self.pieces.runs, len);
                    self.credit_bytes -= len;
                    chunk = rest;
                }
                true
            })
            .map_err(|error| Error::Unavailable(format!("the blocks cannot be read: {error}")))?;
        Ok(self.cursor.piece(&self.pieces.runs, u64::MAX).is_none())
    }

    /// Offsets and lengths of the next bytes, as many as the credit allows.
    fn credited_ranges(&self) -> Vec<(usize, usize)> {
        let (mut cursor, mut left, runs) = (self.cursor, self.credit_bytes, &self.pieces.runs);
        let mut ranges = Vec::new();
        while left > 0
            && let Some(run) = cursor.piece(runs, left)
        {
            ranges.push((run.from as usize, run.len as usize));
            cursor.advance(runs, run.len);
            left -= run.len;
        }
        ranges
    }

    fn send_host(&mut self, links: &mut Links, session: SessionKey, transfer: u64) -> bool {
        while self.cursor.bytes_behind() < self.pieces.num_bytes {
            let before = self.cursor;
            let Some((ranges, checksum)) = self.next_part() else {
                return false;
            };
            let offset = before.bytes_behind();
            let part = self.part(
                transfer,
                offset,
                checksum,
                (self.memory.buffer().clone(), ranges),
            );
            if !links.stream(session, part) {
                self.cursor = before;
                return false;
            }
            self.credit_bytes -= self.cursor.bytes_behind() - offset;
        }
        true
    }

    /// Place and checksum of the next part; none without credit.
    fn next_part(&mut self) -> Option<(Vec<Range>, u64)> {
        let mut ranges = Vec::new();
        let mut room = PART.min(self.credit_bytes);
        while ranges.len() < RANGES_CAP
            && room > 0
            && let Some(run) = self.cursor.piece(&self.pieces.runs, room)
        {
            ranges.push((run.from as usize, run.len as usize));
            self.cursor.advance(&self.pieces.runs, run.len);
            room -= run.len;
        }
        let checksum = self.hash(&ranges);
        (!ranges.is_empty()).then_some((ranges, checksum))
    }

    /// The checksum of these bytes, if they have one. The next block is fetched from memory meanwhile: with small ones the
    /// processor would wait for each.
    fn hash(&self, ranges: &[Range]) -> u64 {
        let mut checksum = RunningChecksum::default();
        if self.is_checksummed {
            let bytes = |range: &Range| self.memory.buffer().bytes(range.0, range.1);
            for (at, range) in ranges.iter().enumerate() {
                if let Some(next) = ranges.get(at + 1).and_then(bytes) {
                    next.prefetch();
                }
                if let Some(bytes) = bytes(range) {
                    checksum.add(bytes);
                }
            }
        }
        self.compared(checksum)
    }

    fn compared(&self, checksum: RunningChecksum) -> u64 {
        if self.is_checksummed {
            checksum.get()
        } else {
            0
        }
    }

    fn part(
        &self,
        transfer: u64,
        offset: u64,
        checksum: u64,
        (buffer, ranges): (Buffer, Vec<Range>),
    ) -> StreamPart {
        let source = self.source;
        StreamPart {
            tag: StreamTag { source, transfer },
            header: Message::Data { offset, checksum }.header(transfer),
            buffer,
            ranges,
        }
    }
}
