//! One transfer at its destination: its state, and how it goes from one to the next.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::{Chunks, CopyReport, Piece, ProcessVmError};

use super::incoming_stream::IncomingStream;
use super::message::Message;
use super::posted_reads::PostedReads;
use super::region::{Cursor, Pieces, Run};
use super::remote_source::ReadPath;
use super::steps::Steps;
use super::verifier::{Checksums, Verifier};
use crate::checksum::RunningChecksum;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::{Links, Payload};
use crate::transport::{self, Get, Memory};

/// Largest piece of one read, so that several are in flight.
const READ_PIECE: u64 = 1 << 20;
/// Reads from one peer in flight, which wait in a device. A queue pair takes 256: when a dead peer leaves it full, UCX
/// (1.13) has no room for what begins a close by force, and the reads end when the device gives up, if ever.
const READS_IN_FLIGHT: usize = 128;
/// Bytes in flight from one peer. Of 1, 4 and 16 MiB none took less CPU than another over CMA, whose
/// reads keep the thread from its sockets meanwhile: this much takes 1 to 2 ms. RDMA has 4 MiB left when it is refilled.
const READ_BYTES_IN_FLIGHT: u64 = 8 << 20;
/// The same of copies between GPUs, which take a tenth of a millisecond.
const COPY_BYTES_IN_FLIGHT: u64 = 256 << 20;
/// Most of them in one copy, so that the first are here early.
const COPY_BYTES: u64 = 64 << 20;
/// Of one call to the kernel, which sockets and other transfers wait for: less than a millisecond.
const CALL_PIECES: usize = 256;
const CALL_BYTES: u64 = 4 << 20;
/// The same where it is compared with checksums right after: what a core's own cache still has then.
pub(super) const CHECKSUMMED_BYTES: u64 = 1 << 20;
/// Ids of transfers are below; above is, in messages, how often the stream has begun again.
const ATTEMPT_SHIFT: u32 = 56;

/// The id of a transfer and the attempt that a message names.
pub(super) fn split_stream_id(id: u64) -> (u64, u8) {
    let attempt = id >> ATTEMPT_SHIFT;
    (id ^ attempt << ATTEMPT_SHIFT, attempt as u8)
}

/// Blocks or a buffer that a service wants here.
#[derive(Debug, Clone)]
pub(crate) struct TransferRequest {
    /// Whatever the service knows it by.
    pub(crate) owner: u64,
    pub(crate) session: SessionKey,
    /// The peer's source.
    pub(crate) source: u64,
    /// Bits that READ adds to the source, of which the peer's service makes something. None if 0.
    pub(crate) grant: u64,
    /// The destination.
    pub(crate) memory: Arc<Memory>,
    pub(crate) pieces: Arc<Pieces>,
    pub(crate) checksums: Checksums,
    /// True if the service verifies what has come, so that a stream counts even if its source has ended.
    pub(crate) is_verified_by_owner: bool,
    /// True if a read has failed before: the source streams, whatever the path of the session.
    pub(crate) is_retry: bool,
    pub(crate) deadline: Option<Instant>,
}

/// Place of the first difference from a checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Corruption {
    /// In the sequence of the bytes.
    pub(crate) at: u64,
    /// The unit begins there; else it is this one or a later one of the same piece of a stream.
    pub(crate) is_exact: bool,
}

/// Cause of the failure of a transfer.
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

/// A transfer that reads.
#[derive(Debug)]
pub(super) struct ReadingState {
    pub(super) path: ReadPath,
    /// Address of the source.
    pub(super) base: u64,
    /// The source can hash the parts of a stream.
    pub(super) can_checksum: bool,
    /// Position up to which it has been asked for.
    pub(super) cursor: Cursor,
    /// Hashes what comes, if anything does.
    pub(super) verifier: Option<Verifier>,
    /// Of each copy between GPUs, in the order of the bytes. A batch of a handoff is one copy.
    pub(super) copies: Vec<Arc<CopyReport>>,
    /// True if the source was asked for checksums.
    pub(super) has_asked: bool,
    /// A read has failed: it begins again as a stream when no other is in flight.
    pub(super) has_lost_reads: bool,
}

/// See the diagram in `transfer/mod.rs`.
#[derive(Debug)]
pub(super) enum State {
    /// Not among those that wait for their turn yet.
    Held,
    Queued,
    Reading(ReadingState),
    Streaming(IncomingStream),
    Failed(Error),
}

#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) request: TransferRequest,
    pub(super) state: State,
    /// Those in flight may still write, even if it has failed.
    pub(super) posted: PostedReads,
    /// True if it has begun again as a stream: checksums for its reads may still come.
    pub(super) is_restarted: bool,
    /// Number of times that its stream has begun again.
    pub(super) attempt: u8,
    /// True if it is in the queue of work.
    pub(super) is_scheduled: bool,
    pub(super) steps: Steps,
}

impl Transfer {
    pub(super) fn new(request: TransferRequest) -> Self {
        Self {
            request,
            state: State::Held,
            posted: PostedReads::default(),
            is_restarted: false,
            attempt: 0,
            is_scheduled: false,
            steps: Steps::begin(),
        }
    }

    /// Its id in messages.
    pub(super) fn stream_id(&self, id: u64) -> u64 {
        id | u64::from(self.attempt) << ATTEMPT_SHIFT
    }

    pub(super) fn has_begun(&self) -> bool {
        !matches!(self.state, State::Held | State::Queued)
    }

    /// Asks for nothing more; the first reason counts. A stream places nothing any more.
    pub(super) fn fail(&mut self, error: Error) {
        if !self.has_failed() {
            self.state = State::Failed(error);
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        matches!(self.state, State::Failed(_))
    }

    /// True if its source may still send something of it.
    pub(super) fn is_served(&self) -> bool {
        let pieces = &self.request.pieces;
        match &self.state {
            State::Reading(reading) => {
                let verifier = reading.verifier.as_ref();
                let is_complete = |verifier: &Verifier| verifier.is_complete(pieces);
                reading.has_asked && !verifier.is_some_and(is_complete)
            }
            State::Streaming(stream) => stream.received_bytes < pieces.num_bytes,
            State::Held | State::Queued | State::Failed(_) => false,
        }
    }

    /// True if nothing more will happen: all is here and compared, or it failed and no read can write any more.
    pub(super) fn is_over(&self) -> bool {
        let pieces = &self.request.pieces;
        match &self.state {
            State::Held => false,
            State::Queued => pieces.num_bytes == 0,
            State::Reading(reading) => {
                let verifier = reading.verifier.as_ref();
                !reading.has_lost_reads
                    && self.posted.placed_bytes == pieces.num_bytes
                    && verifier.is_none_or(|verifier| verifier.is_done(pieces))
            }
            State::Streaming(stream) => stream.received_bytes == pieces.num_bytes,
            State::Failed(_) => self.posted.is_empty(),
        }
    }

    /// Checksum for its owner, once all is here.
    pub(super) fn checksum(&self) -> Option<RunningChecksum> {
        self.request.checksums.of_owner()?;
        match &self.state {
            State::Reading(reading) => reading.verifier.as_ref()?.of_all(),
            State::Streaming(stream) => stream.of_all(),
            State::Held | State::Queued | State::Failed(_) => None,
        }
    }

    /// Its steps, now that it is over.
    pub(super) fn steps(&self) -> Steps {
        let State::Reading(reading) = &self.state else {
            return self.steps.complete(None);
        };
        let copies = reading.copies.iter().filter_map(|copy| copy.ended_at());
        self.steps.complete(copies.max())
    }

    /// Digests of the chunks of all blocks for its owner, once all is here, if copies have computed them.
    pub(super) fn digests(&self) -> Option<Vec<u64>> {
        let State::Reading(reading) = &self.state else {
            return None;
        };
        let chunks = self.chunks().filter(|_| self.is_over())?;
        let digests = reading.copies.iter().flat_map(|it| it.digests());
        let digests: Vec<u64> = digests.copied().collect();
        let num_chunks = chunks.num_of(self.request.pieces.num_bytes as usize);
        (digests.len() == num_chunks).then_some(digests)
    }

    /// The chunks of which copies compute digests; none if they are not to, or a block is more than one copy has.
    fn chunks(&self) -> Option<Chunks> {
        let unit_bytes = self.request.pieces.unit_bytes;
        let is_digested = self.request.checksums == Checksums::OfCopies && unit_bytes <= COPY_BYTES;
        is_digested.then(|| Chunks::digested(unit_bytes as usize))
    }

    /// Bytes that have not been asked for, or have not come as a stream.
    pub(super) fn bytes_left(&self) -> u64 {
        let num_bytes = self.request.pieces.num_bytes;
        match &self.state {
            State::Held | State::Queued => num_bytes,
            State::Reading(reading) => num_bytes - reading.cursor.bytes_behind(),
            State::Streaming(stream) => num_bytes - stream.received_bytes,
            State::Failed(_) => 0,
        }
    }
}

/// Messages of its source.
impl Transfer {
    /// A message of the source; bytes of credit for it, if they are due.
    pub(super) fn receive(&mut self, message: Message<'_>, data: &Payload) -> Result<Option<u64>> {
        let kind = message.kind();
        let is_expected = match (message, &mut self.state) {
            (Message::Data { .. }, State::Streaming(stream)) => match *data {
                Payload::Placed {
                    num_bytes,
                    is_aborted: false,
                } => {
                    self.steps.moved = Some(Instant::now());
                    return stream.receive(num_bytes as u64);
                }
                // Its source has withdrawn it, and reports that to the service above.
                Payload::Placed { .. } => true,
                Payload::Bytes(_) => false,
            },
            (Message::Refused(_), State::Held | State::Queued) => true,
            (Message::Refused(reason), _) => {
                self.fail(Error::Config(format!("the peer refused: {reason}")));
                true
            }
            // Sent before the source knew.
            (Message::Checksums { .. }, State::Streaming(_)) => self.is_restarted,
            (Message::Checksums { first, checksums }, State::Reading(reading)) => {
                let verifier = reading.verifier.as_mut();
                verifier.is_some_and(|it| it.add(&self.request.pieces, first, &checksums))
            }
            _ => false,
        };
        if !is_expected {
            let text = format_args!("message {kind} of a transfer, which was not to come");
            return Err(Error::protocol(text));
        }
        Ok(None)
    }
}

/// Posted reads: over UCX, or copies between GPUs.
impl Transfer {
    /// Bytes of reads in flight from one peer, up to which this transfer adds more; none if it posts no reads.
    pub(super) fn bytes_in_flight_cap(&self) -> Option<u64> {
        let State::Reading(reading) = &self.state else {
            return None;
        };
        match reading.path {
            ReadPath::DeviceCopy(_) => Some(COPY_BYTES_IN_FLIGHT),
            ReadPath::RemoteRead(_) => Some(READ_BYTES_IN_FLIGHT),
            ReadPath::ProcessVm(_) => None,
        }
    }

    /// Posts the next read or copy of this transfer; its length. None when nothing is left, or no more may be in flight, or
    /// the session is lost.
    pub(super) fn post_next(
        &mut self,
        links: &mut Links,
        id: u64,
        reads_in_flight: usize,
    ) -> Option<u64> {
        let is_lost = matches!(&self.state, State::Reading(reading) if reading.has_lost_reads);
        if is_lost || reads_in_flight >= READS_IN_FLIGHT || self.posted.is_full() {
            return None;
        }
        self.post_copy(links, id)
            .or_else(|| self.post_read(links, id))
    }

    /// Posts one copy of the next pieces. Where that cannot be done, UCX reads from now on.
    fn post_copy(&mut self, links: &mut Links, id: u64) -> Option<u64> {
        let digested = self.chunks();
        let State::Reading(reading) = &mut self.state else {
            return None;
        };
        let ReadPath::DeviceCopy(key) = &reading.path else {
            return None;
        };
        let (request, posted) = (&self.request, &mut self.posted);
        let (runs, chunks) = (&request.pieces.runs, digested.unwrap_or(Chunks::COPIED));
        let (mut cursor, mut pieces, mut len) = (reading.cursor, Vec::new(), 0);
        let mut chunks_left = Chunks::CAP;
        while let room = chunks.room(chunks_left, (COPY_BYTES - len) as usize) as u64
            && let Some(run) = cursor.piece(runs, room)
            && run.len > 0
        {
            pieces.push(piece(reading.base, run));
            cursor.advance(runs, run.len);
            chunks_left -= chunks.num_of(run.len as usize);
            len += run.len;
        }
        if pieces.is_empty() {
            return None;
        }
        let unit_bytes = request.pieces.unit_bytes as usize;
        let report = Arc::new(CopyReport::new(digested.map(|_| unit_bytes)));
        let copy = transport::DeviceCopy {
            local: &request.memory,
            pieces: &pieces,
            key,
            report: &report,
            token: posted.next_token(id),
        };
        if !links.copy(request.session, copy) {
            reading.path = ReadPath::RemoteRead(Rc::clone(key));
            return None;
        }
        reading.cursor = cursor;
        reading.copies.push(report);
        posted.post(len);
        self.steps.posted = Some(Instant::now());
        Some(len)
    }

    fn post_read(&mut self, links: &mut Links, id: u64) -> Option<u64> {
        let State::Reading(reading) = &mut self.state else {
            return None;
        };
        let ReadPath::RemoteRead(key) = &reading.path else {
            return None;
        };
        let (request, posted) = (&self.request, &mut self.posted);
        let run = reading.cursor.piece(&request.pieces.runs, READ_PIECE)?;
        let get = Get {
            local: &request.memory,
            offset: run.to as usize,
            len: run.len as usize,
            remote: reading.base + run.from,
            key,
            token: posted.next_token(id),
        };
        if !links.get(request.session, get) {
            return None;
        }
        posted.post(run.len);
        self.steps.posted = Some(Instant::now());
        reading.cursor.advance(&request.pieces.runs, run.len);
        Some(run.len)
    }
}

/// A run whose source begins at this address of the peer's.
fn piece(base: u64, run: Run) -> Piece {
    Piece {
        to: run.to as usize,
        from: base + run.from,
        len: run.len as usize,
    }
}

/// Work of this thread.
impl Transfer {
    pub(super) fn has_work(&self) -> bool {
        let State::Reading(reading) = &self.state else {
            return false;
        };
        let is_calling = matches!(reading.path, ReadPath::ProcessVm(_)) && self.bytes_left() > 0;
        let verifier = reading.verifier.as_ref();
        is_calling || verifier.is_some_and(|verifier| verifier.has_work(self.posted.placed_bytes))
    }

    /// Reads the next pieces with one call to the kernel, if that is the path and there are any; their bytes.
    pub(super) fn read_process(&mut self) -> std::result::Result<Option<u64>, ProcessVmError> {
        let State::Reading(reading) = &mut self.state else {
            return Ok(None);
        };
        let ReadPath::ProcessVm(process) = &reading.path else {
            return Ok(None);
        };
        let cap = match reading.verifier {
            Some(_) => CHECKSUMMED_BYTES,
            None => CALL_BYTES,
        };
        let runs = &self.request.pieces.runs;
        let (mut pieces, mut len) = (Vec::with_capacity(CALL_PIECES), 0);
        while pieces.len() < CALL_PIECES
            && len < cap
            && let Some(run) = reading.cursor.piece(runs, cap - len)
        {
            pieces.push(piece(reading.base, run));
            len += run.len;
            reading.cursor.advance(runs, run.len);
        }
        if pieces.is_empty() {
            return Ok(None);
        }
        process.read(self.request.memory.buffer(), &pieces)?;
        self.posted.placed_bytes += len;
        self.steps.moved = Some(Instant::now());
        Ok(Some(len))
    }

    /// A read has failed: no more are posted.
    pub(super) fn lose_reads(&mut self) {
        if let State::Reading(reading) = &mut self.state {
            reading.has_lost_reads = true;
        }
    }

    /// True if it has to begin again as a stream, and can: `has_devices` says that reads can be posted.
    pub(super) fn is_to_restart(&self, has_devices: bool) -> bool {
        let State::Reading(reading) = &self.state else {
            return false;
        };
        let needs_devices = !matches!(reading.path, ReadPath::ProcessVm(_));
        let is_lost = reading.has_lost_reads || (!has_devices && self.bytes_left() > 0);
        needs_devices && is_lost && self.posted.is_empty()
    }

    /// True if it reads, of a source that can hash the parts of a stream.
    pub(super) fn can_checksum(&self) -> bool {
        matches!(&self.state, State::Reading(reading) if reading.can_checksum)
    }

    /// Begins again as a stream: what was read before is written once more. No read of UCX is in flight.
    pub(super) fn restart(&mut self, stream: IncomingStream) {
        self.state = State::Streaming(stream);
        self.posted = PostedReads::default();
        self.is_restarted = true;
    }

    /// Hashes at most `budget` bytes of what is here.
    pub(super) fn hash(&mut self, budget: u64) {
        if let State::Reading(reading) = &mut self.state
            && let Some(verifier) = &mut reading.verifier
        {
            let (buffer, pieces) = (self.request.memory.buffer(), &self.request.pieces);
            verifier.hash(buffer, pieces, self.posted.placed_bytes, budget);
        }
    }
}
