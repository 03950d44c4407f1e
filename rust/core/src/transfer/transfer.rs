//! One transfer at its destination: its state, and how it goes from one to the next.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::ProcessVmReader;

use super::cursor::Cursor;
use super::path::incoming::IncomingStream;
use super::path::process_vm::read_slice;
use super::region::{Pieces, Run};
use super::verifier::Verifier;
use crate::error::Error;
use crate::ids::SessionKey;
use crate::transport::{Memory, RemoteKey};

/// Largest piece of one read, so that several are in flight.
const READ_PIECE: u64 = 1 << 20;
/// Bits of a read's token that hold its number; the rest is the transfer.
const NUMBER_BITS: u32 = 20;
/// Most reads of a transfer that are remembered.
const READS_CAP: usize = 1 << NUMBER_BITS;

/// The token of a read: which transfer it is of, and its number.
pub(super) fn read_token(transfer: u64, number: u64) -> u64 {
    (transfer << NUMBER_BITS) | (number % READS_CAP as u64)
}

pub(super) fn split_token(token: u64) -> (u64, u64) {
    (token >> NUMBER_BITS, token % READS_CAP as u64)
}

/// What a service wants to have here.
#[derive(Debug, Clone)]
pub(crate) struct TransferRequest {
    /// Whatever the service knows it by.
    pub(crate) owner: u64,
    pub(crate) session: SessionKey,
    /// The peer's source.
    pub(crate) source: u64,
    /// The destination.
    pub(crate) memory: Arc<Memory>,
    pub(crate) pieces: Arc<Pieces>,
    /// Whether the bytes are compared with checksums, if the source has any.
    pub(crate) is_checksummed: bool,
    /// Whether the service has checksums of its own, which verify what a stream brings even if the source ends.
    pub(crate) is_verified_by_owner: bool,
    /// Whether a read has failed before: the source streams, whatever the path of the session.
    pub(crate) is_retry: bool,
    pub(crate) deadline: Option<Instant>,
}

/// Where the first difference from a checksum is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Corruption {
    /// In the sequence of the bytes.
    pub(crate) at: u64,
    /// The unit begins there; else it is this one or a later one of the same piece of a stream.
    pub(crate) is_exact: bool,
}

/// Why a transfer has not brought its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TransferError {
    /// They differ from their checksums.
    Corrupt(Corruption),
    /// They have not come.
    Failed(Error),
}

impl TransferError {
    /// As an error; the service says what differs.
    pub(crate) fn into_error(self, corrupt: impl FnOnce(Corruption) -> String) -> Error {
        match self {
            Self::Corrupt(corruption) => Error::Corrupt(corrupt(corruption)),
            Self::Failed(error) => error,
        }
    }
}

/// How a transfer reads what it reads itself.
#[derive(Debug)]
pub(super) enum ReadPath {
    Remote {
        base: u64,
        key: Rc<RemoteKey>,
    },
    ProcessVm {
        base: u64,
        process: Rc<ProcessVmReader>,
    },
}

/// Reads in the order in which they were posted.
#[derive(Debug, Default)]
pub(super) struct PostedReads {
    /// Length, and whether it has ended; the first one has not.
    reads: VecDeque<(u64, bool)>,
    /// The number of the first of them.
    first: u64,
    num_in_flight: usize,
    /// Bytes that have come before the first of them.
    num_here: u64,
}

impl PostedReads {
    /// The number of the next read.
    pub(super) fn next_number(&self) -> u64 {
        self.first + self.reads.len() as u64
    }

    /// Adds a read and returns its number.
    pub(super) fn post(&mut self, len: u64) -> u64 {
        let number = self.next_number();
        self.reads.push_back((len, false));
        self.num_in_flight += 1;
        number
    }

    /// A read has ended; its length. None when no such read is in flight.
    pub(super) fn end(&mut self, number: u64) -> Option<u64> {
        let index = number.wrapping_sub(self.first) % READS_CAP as u64;
        let read = self.reads.get_mut(index as usize);
        let (len, has_ended) = read.filter(|(_, has_ended)| !has_ended)?;
        (*has_ended, self.num_in_flight) = (true, self.num_in_flight - 1);
        let len = *len;
        while let Some(&(len, true)) = self.reads.front() {
            self.reads.pop_front();
            self.num_here += len;
            self.first += 1;
        }
        Some(len)
    }

    pub(super) fn num_in_flight(&self) -> usize {
        self.num_in_flight
    }
}

/// A transfer that reads.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) path: ReadPath,
    /// What has been asked for.
    pub(super) cursor: Cursor,
    pub(super) posted: PostedReads,
    /// Compares what comes, if anything does.
    pub(super) verifier: Option<Verifier>,
}

impl Reading {
    pub(super) fn new(path: ReadPath, verifier: Option<Verifier>) -> Self {
        Self {
            path,
            cursor: Cursor::default(),
            posted: PostedReads::default(),
            verifier,
        }
    }

    /// The next read to post over UCX.
    pub(super) fn next_read(&self, pieces: &Pieces) -> Option<(Run, u64, Rc<RemoteKey>)> {
        let ReadPath::Remote { base, key } = &self.path else {
            return None;
        };
        let has_room = self.posted.reads.len() < READS_CAP;
        let run = self.cursor.piece(&pieces.runs, READ_PIECE);
        let run = run.filter(|_| has_room)?;
        Some((run, base + run.from, Rc::clone(key)))
    }

    /// Bytes at the start of the sequence that are here.
    pub(super) fn num_here(&self) -> u64 {
        self.posted.num_here
    }

    fn has_work(&self, pieces: &Pieces) -> bool {
        let is_calling = matches!(self.path, ReadPath::ProcessVm { .. })
            && self.cursor.piece(&pieces.runs, 1).is_some();
        let verifier = self.verifier.as_ref();
        is_calling || verifier.is_some_and(|verifier| verifier.has_work(self.num_here()))
    }
}

/// See the diagram of the module.
#[derive(Debug)]
pub(super) enum State {
    /// Not in the queue of its peer yet.
    Held,
    Queued,
    Reading(Reading),
    /// All is here; it is hashed, or checksums are missing.
    Verifying(Verifier),
    Streaming(IncomingStream),
    /// Reads that are in flight may still write.
    Failed(Error, PostedReads),
}

#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) request: TransferRequest,
    pub(super) state: State,
    /// Whether it is in the queue of work.
    pub(super) is_scheduled: bool,
    pub(super) began: Option<Instant>,
}

impl Transfer {
    pub(super) fn new(request: TransferRequest) -> Self {
        Self {
            request,
            state: State::Held,
            is_scheduled: false,
            began: None,
        }
    }

    pub(super) fn has_begun(&self) -> bool {
        !matches!(self.state, State::Held | State::Queued)
    }

    /// Nothing more is asked for; the first reason counts. A stream places nothing any more.
    pub(super) fn fail(&mut self, error: Error) {
        let posted = match &mut self.state {
            State::Failed(..) => return,
            State::Reading(reading) => std::mem::take(&mut reading.posted),
            _ => PostedReads::default(),
        };
        self.state = State::Failed(error, posted);
    }

    pub(super) fn has_failed(&self) -> bool {
        matches!(self.state, State::Failed(..))
    }

    /// What compares a read with checksums.
    pub(super) fn verifier(&mut self) -> Option<&mut Verifier> {
        match &mut self.state {
            State::Reading(reading) => reading.verifier.as_mut(),
            State::Verifying(verifier) => Some(verifier),
            _ => None,
        }
    }

    pub(super) fn has_work(&self) -> bool {
        let pieces = &self.request.pieces;
        match &self.state {
            State::Reading(reading) => reading.has_work(pieces),
            State::Verifying(verifier) => verifier.has_work(pieces.num_bytes),
            _ => false,
        }
    }

    /// Hashes at most `budget` bytes of what is here.
    pub(super) fn hash(&mut self, budget: u64) {
        let (buffer, pieces) = (self.request.memory.buffer(), &self.request.pieces);
        match &mut self.state {
            State::Reading(reading) => {
                let num_here = reading.num_here();
                if let Some(verifier) = &mut reading.verifier {
                    verifier.hash(buffer, pieces, num_here, budget);
                }
                if num_here == pieces.num_bytes
                    && let Some(verifier) = reading.verifier.take()
                {
                    self.state = State::Verifying(verifier);
                }
            }
            State::Verifying(verifier) => verifier.hash(buffer, pieces, pieces.num_bytes, budget),
            _ => {}
        }
    }

    /// Whether nothing more will happen: all is here and compared, or it failed and no read can write any more.
    pub(super) fn is_over(&self) -> bool {
        let pieces = &self.request.pieces;
        match &self.state {
            State::Held | State::Queued => false,
            State::Reading(reading) => {
                reading.verifier.is_none() && reading.num_here() == pieces.num_bytes
            }
            State::Verifying(verifier) => verifier.is_done(pieces),
            State::Streaming(stream) => stream.is_here(),
            State::Failed(_, posted) => posted.num_in_flight() == 0,
        }
    }

    /// Bytes that have not been asked for, or have not come as a stream.
    pub(super) fn num_left(&self) -> u64 {
        let num_bytes = self.request.pieces.num_bytes;
        match &self.state {
            State::Held | State::Queued => num_bytes,
            State::Reading(reading) => num_bytes - reading.cursor.num_behind(),
            State::Streaming(stream) => num_bytes - stream.num_received(),
            State::Verifying(_) | State::Failed(..) => 0,
        }
    }

    /// Whether checksums verify what came.
    pub(super) fn is_verified(&self) -> bool {
        match &self.state {
            State::Verifying(_) => true,
            State::Streaming(stream) => {
                stream.is_checksummed() || self.request.is_verified_by_owner
            }
            _ => false,
        }
    }

    /// Where what came differs from its checksum.
    pub(super) fn corruption(&self) -> Option<Corruption> {
        match &self.state {
            State::Verifying(verifier) => verifier.corrupt().map(|index| Corruption {
                at: index as u64 * self.request.pieces.unit_bytes,
                is_exact: true,
            }),
            State::Streaming(stream) => stream.corrupt().map(|at| Corruption {
                at,
                is_exact: false,
            }),
            _ => None,
        }
    }
}

/// Reads by calls of our own.
impl Transfer {
    /// Reads the next pieces of a transfer whose path is `process_vm`; others read nothing.
    pub(super) fn read_process(&mut self) -> std::io::Result<()> {
        let State::Reading(reading) = &mut self.state else {
            return Ok(());
        };
        let ReadPath::ProcessVm { base, process } = &reading.path else {
            return Ok(());
        };
        let (memory, runs) = (self.request.memory.buffer(), &self.request.pieces.runs);
        let is_checksummed = reading.verifier.is_some();
        let num_bytes = read_slice(
            process,
            (memory, *base),
            runs,
            &mut reading.cursor,
            is_checksummed,
        )?;
        let number = reading.posted.post(num_bytes);
        reading.posted.end(number);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_names_its_transfer_and_its_read() {
        for (transfer, number) in [(1, 0), (7, 5), (1 << 40, READS_CAP as u64 - 1)] {
            let token = read_token(transfer, number);
            assert_eq!(split_token(token), (transfer, number));
            assert!(token < 1 << 62, "the marks of messages are free");
        }
    }

    #[test]
    fn bytes_are_here_when_all_reads_before_them_have_ended() {
        let mut posted = PostedReads::default();
        let numbers = [10, 20, 30].map(|len| posted.post(len));
        assert_eq!(posted.end(numbers[1]), Some(20));
        assert_eq!((posted.num_here, posted.num_in_flight), (0, 2));
        assert_eq!(posted.end(numbers[1]), None, "it has ended before");
        assert_eq!(posted.end(numbers[0]), Some(10));
        assert_eq!((posted.num_here, posted.num_in_flight), (30, 1));
        assert_eq!(posted.end(numbers[2]), Some(30));
        assert_eq!((posted.num_here, posted.num_in_flight), (60, 0));
        assert_eq!(posted.end(numbers[2]), None);
    }

    #[test]
    fn numbers_of_reads_may_go_round() {
        let mut posted = PostedReads::default();
        for _ in 0..READS_CAP + 3 {
            let (_, number) = split_token(read_token(1, posted.post(1)));
            assert_eq!(posted.end(number), Some(1));
        }
        assert_eq!(posted.num_here, READS_CAP as u64 + 3);
    }
}
