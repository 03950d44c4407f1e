//! A stream at its source, sent as far as the destination's credit goes.

use std::sync::Arc;

use kvpipe_ucx::{MemoryKind, SharedBytes};

use super::message::Message;
use super::region::{Cursor, Pieces, Run};
use crate::checksum;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::ReactorContext;
use crate::transport::{Memory, Payload};

/// Bytes a source may stream before the destination's next credit.
pub(super) const WINDOW: u64 = 4 << 20;
/// What fits with its headers into one packet of 64 KiB, the most that Linux makes of a write: a message of a little more
/// has a second packet of a few bytes.
const PACKET: u64 = 60 << 10;
/// Most bytes of one message.
const PIECE: u64 = 2 * PACKET;
/// Most bytes of a message of several runs, which are copied together.
const GATHERED: u64 = 32 << 10;
/// Runs that are not longer go together.
const SMALL: u64 = 16 << 10;

/// What goes into one message of a run with so much left. None is of about 64 KiB.
fn message_len(left: u64) -> u64 {
    if left > PACKET && left <= PIECE {
        return left.div_ceil(2).next_multiple_of(64);
    }
    left.min(PIECE)
}

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
        cx: &mut ReactorContext,
        session: SessionKey,
        transfer: u64,
    ) -> Result<bool> {
        match self.memory.buffer().kind() {
            MemoryKind::Host => Ok(self.send_host(cx, session, transfer)),
            MemoryKind::Cuda { .. } => self.send_device(cx, session, transfer),
        }
    }

    /// Sends bytes of a GPU, which come to the host in chunks: while one is sent, the GPU copies the next ones.
    fn send_device(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        transfer: u64,
    ) -> Result<bool> {
        let ranges = self.credited_ranges();
        let memory = Arc::clone(&self.memory);
        memory
            .buffer()
            .read_staged(&ranges, &mut |mut chunk| {
                while !chunk.is_empty() {
                    let (piece, rest) = chunk.split_at(message_len(chunk.len() as u64) as usize);
                    let (offset, len) = (self.cursor.bytes_behind(), piece.len() as u64);
                    let checksum = self.checksum(piece);
                    let message = Message::Data { offset, checksum };
                    let payload = Payload::Bytes(piece.to_vec());
                    if !message.send_with(cx, session, transfer, payload) {
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

    /// Where the next bytes are, as many as the credit allows: offsets and lengths.
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

    fn send_host(&mut self, cx: &mut ReactorContext, session: SessionKey, transfer: u64) -> bool {
        while let Some(rest) = self.cursor.piece(&self.pieces.runs, u64::MAX) {
            let run = Run {
                len: message_len(rest.len),
                ..rest
            };
            if self.credit_bytes < run.len {
                return false;
            }
            let before = self.cursor;
            let (payload, checksum) = self.next_piece(run);
            let offset = before.bytes_behind();
            let message = Message::Data { offset, checksum };
            if !message.send_with(cx, session, transfer, payload) {
                self.cursor = before;
                return false;
            }
            self.credit_bytes -= self.cursor.bytes_behind() - offset;
        }
        true
    }

    /// What the next message carries, and its checksum: a large run as it lies in memory, small ones together in a copy,
    /// which costs less than a message each.
    fn next_piece(&mut self, run: Run) -> (Payload, u64) {
        if run.len <= SMALL
            && let Some(bytes) = self.gather()
        {
            let checksum = self.checksum(bytes[..].into());
            return (Payload::Bytes(bytes), checksum);
        }
        self.cursor.advance(&self.pieces.runs, run.len);
        let (offset, len) = (run.from as usize, run.len as usize);
        let bytes = self.memory.buffer().bytes(offset, len);
        let checksum = bytes.map_or(0, |bytes| self.checksum(bytes));
        let memory = Arc::clone(&self.memory);
        let payload = Payload::Memory {
            memory,
            offset,
            len,
        };
        (payload, checksum)
    }

    fn checksum(&self, bytes: SharedBytes<'_>) -> u64 {
        if self.is_checksummed {
            checksum::of_shared(bytes)
        } else {
            0
        }
    }

    /// The next small runs, as many as fit into a message and the credit.
    fn gather(&mut self) -> Option<Vec<u8>> {
        let (mut cursor, runs) = (self.cursor, &self.pieces.runs);
        let room = GATHERED.min(self.credit_bytes);
        let mut gathered = Vec::with_capacity(room as usize);
        while let Some(run) = cursor.piece(runs, PIECE)
            && run.len <= SMALL
            && gathered.len() as u64 + run.len <= room
        {
            let (offset, len) = (run.from as usize, run.len as usize);
            let bytes = self.memory.buffer().bytes(offset, len)?;
            bytes.append_to(&mut gathered);
            cursor.advance(runs, run.len);
        }
        self.cursor = cursor;
        Some(gathered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_message_is_a_packet_and_a_few_bytes() {
        for run in (1..200)
            .chain([256, 1 << 10, 16 << 10])
            .map(|kib| kib << 10)
        {
            for run in [run - 1, run, run + 1] {
                let mut left = run;
                while left > 0 {
                    let len = message_len(left);
                    assert!(len > 0 && (len <= PACKET || len == PIECE), "{len} of {run}");
                    left -= len;
                }
            }
        }
    }
}
