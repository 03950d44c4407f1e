//! A stream at its source, sent as far as the destination's credit goes.

use std::sync::Arc;

use super::WINDOW;
use crate::checksum;
use crate::ids::SessionKey;
use crate::session::ReactorContext;
use crate::transfer::cursor::Cursor;
use crate::transfer::message::Message;
use crate::transfer::region::Run;
use crate::transport::{Memory, Payload};

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
pub(crate) struct OutgoingStream {
    transfer: u64,
    /// The source that it is of.
    source: u64,
    memory: Arc<Memory>,
    /// Their destinations are not used: the order counts.
    runs: Vec<Run>,
    cursor: Cursor,
    sent: u64,
    credit: u64,
    is_checksummed: bool,
}

impl OutgoingStream {
    pub(crate) fn new(
        (transfer, source): (u64, u64),
        memory: Arc<Memory>,
        runs: Vec<Run>,
        is_checksummed: bool,
    ) -> Self {
        Self {
            transfer,
            source,
            memory,
            runs,
            cursor: Cursor::default(),
            sent: 0,
            credit: WINDOW,
            is_checksummed,
        }
    }

    pub(crate) fn source(&self) -> u64 {
        self.source
    }

    /// The destination has placed so many bytes.
    pub(crate) fn grant(&mut self, credit: u64) {
        self.credit = self.credit.saturating_add(credit).min(WINDOW);
    }

    /// Sends what the credit allows; whether everything has been sent.
    pub(crate) fn send(&mut self, cx: &mut ReactorContext, session: SessionKey) -> bool {
        while let Some(rest) = self.cursor.piece(&self.runs, u64::MAX) {
            let run = Run {
                len: message_len(rest.len),
                ..rest
            };
            if self.credit < run.len {
                return false;
            }
            let before = self.cursor;
            let (payload, len, checksum) = self.next_piece(run);
            let message = Message::Data {
                transfer: self.transfer,
                offset: self.sent,
                checksum,
            };
            if !message.send_with(cx, session, payload) {
                self.cursor = before;
                return false;
            }
            self.sent += len;
            self.credit -= len;
        }
        true
    }

    /// What the next message carries: a large run as it lies in memory, small ones together in a copy, which costs less
    /// than a message each.
    fn next_piece(&mut self, run: Run) -> (Payload, u64, u64) {
        if run.len <= SMALL
            && let Some(bytes) = self.gather()
        {
            let checksum = if self.is_checksummed {
                checksum::of(&bytes)
            } else {
                0
            };
            let len = bytes.len() as u64;
            return (Payload::Bytes(bytes), len, checksum);
        }
        self.cursor.advance(&self.runs, run.len);
        let (offset, len) = (run.from as usize, run.len as usize);
        let bytes = self.memory.buffer().bytes(offset, len);
        let checksum = bytes
            .filter(|_| self.is_checksummed)
            .map_or(0, checksum::of);
        let memory = Arc::clone(&self.memory);
        let payload = Payload::Memory {
            memory,
            offset,
            len,
        };
        (payload, run.len, checksum)
    }

    /// The next small runs, as many as fit into a message and the credit; none of memory that is not the host's.
    fn gather(&mut self) -> Option<Vec<u8>> {
        let (start, room) = (self.cursor, GATHERED.min(self.credit));
        let mut gathered = Vec::with_capacity(room as usize);
        while let Some(run) = self.cursor.piece(&self.runs, PIECE)
            && run.len <= SMALL
            && gathered.len() as u64 + run.len <= room
        {
            let Some(bytes) = self
                .memory
                .buffer()
                .bytes(run.from as usize, run.len as usize)
            else {
                self.cursor = start;
                return None;
            };
            gathered.extend_from_slice(bytes);
            self.cursor.advance(&self.runs, run.len);
        }
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
