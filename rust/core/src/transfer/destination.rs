//! The destination's side of transfers: the order of their starts, their reads, and their ends.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::{MemoryKind, ProcessVmError, Status};

use super::engine::{Completion, PeerTransfers, TransferEngine};
use super::incoming_stream::IncomingStream;
use super::message::{Message, Wanted};
use super::posted_reads::split_token;
use super::region::Cursor;
use super::remote_source::Verification;
use super::transfer::{
    CHECKSUMMED_BYTES, ReadingState, State, Transfer, TransferError, TransferRequest,
};
use super::verifier::{Checksums, Verifier};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::{Links, Payload};

/// Smallest share of a slice that a transfer counts for, so that the slice ends.
const LEAST_WORK: u64 = 16 << 10;

/// From the beginning of a transfer to its end.
impl TransferEngine {
    /// Starts transfers of a peer as far as the bound on those under way allows.
    pub(super) fn start_waiting(&mut self, links: &mut Links, session: SessionKey) {
        let mut has_started = false;
        while let Some(peer) = self.peers.get_mut(&session)
            && peer.num_busy() < self.max_in_flight
            && let Some(id) = peer.waiting.pop_front()
        {
            let Some(transfer) = self.transfers.get_mut(&id) else {
                continue;
            };
            peer.running.push(id);
            transfer.steps.began = Some(Instant::now());
            let state = peer.start(links, id, &transfer.request);
            transfer.state = state.unwrap_or_else(State::Failed);
            schedule(&mut self.scheduled, id, transfer);
            self.complete_if_over(links, id);
            has_started = true;
        }
        if has_started {
            self.post(links, session);
        }
    }

    /// Completes a transfer if it is over, and lets the next begin.
    pub(super) fn settle(&mut self, links: &mut Links, id: u64) {
        if let Some(session) = self.complete_if_over(links, id) {
            self.start_waiting(links, session);
        }
    }

    /// Completes a transfer to which nothing more will happen; the session whose place is free then.
    pub(super) fn complete_if_over(&mut self, links: &mut Links, id: u64) -> Option<SessionKey> {
        self.transfers
            .get(&id)
            .filter(|transfer| transfer.is_over())?;
        let transfer = self.transfers.remove(&id)?;
        self.deadlines.cancel(id);
        let session = transfer.request.session;
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.transfers.remove(&id);
            if let Some(at) = peer.running.iter().position(|other| *other == id) {
                peer.running.remove(at);
            } else {
                peer.waiting.retain(|other| *other != id);
            }
        }
        let outcome = outcome_of(links, &transfer);
        // With it goes where a stream lands: nothing is placed any more when the completion is seen.
        self.completions
            .push_back(Completion::of(transfer, outcome));
        Some(session)
    }
}

impl PeerTransfers {
    /// Transfers that count against the limit of those under way. A cancelled one counts until its source has answered, so
    /// that the bytes in flight stay bounded.
    fn num_busy(&self) -> usize {
        let is_only_cancelling = |id: &&u64| !self.running.contains(id);
        self.running.len() + self.cancelling.keys().filter(is_only_cancelling).count()
    }

    /// Chooses the path of a transfer, and asks the source for what is needed of it.
    fn start(&mut self, links: &mut Links, id: u64, request: &TransferRequest) -> Result<State> {
        let Some(source) = self.sources.get_mut(&request.source) else {
            let text = "the source of the transfer has been closed meanwhile";
            return Err(Error::Config(text.to_owned()));
        };
        let session = request.session;
        let path = if request.is_retry {
            None
        } else {
            source.read_path(links, session, &request.memory)?
        };
        let Some(path) = path else {
            // No checksums are computed on a GPU.
            let stream = begin_stream(links, id, request, !source.is_cuda);
            return Ok(State::Streaming(stream));
        };
        let is_checksummed = request.checksums == Checksums::All && !source.is_cuda;
        let verifier = match request.checksums.of_owner() {
            Some(before) => Some(Verifier::of_owner(before)),
            None => is_checksummed.then(|| Verifier::new(source.known.clone())),
        };
        let has_asked = is_checksummed && source.verification != Verification::Pushed;
        if has_asked {
            send_read(links, id, request, Wanted::Checksums);
        }
        Ok(State::Reading(ReadingState {
            path,
            base: source.base,
            can_checksum: !source.is_cuda,
            cursor: Cursor::default(),
            verifier,
            copies: Vec::new(),
            has_asked,
            has_lost_reads: false,
        }))
    }
}

/// Has the source stream what a transfer wants, with checksums if those are compared and it can.
fn begin_stream(
    links: &mut Links,
    id: u64,
    request: &TransferRequest,
    can_checksum: bool,
) -> IncomingStream {
    let is_compared = can_checksum && request.checksums.compare();
    // A sealed stream needs no second checksum.
    let is_sealed = is_compared && links.is_sealed(request.session);
    let (checksums, wanted) = match request.checksums {
        _ if is_compared && !is_sealed => (Checksums::OfStream, Wanted::ChecksummedBytes),
        of_owner @ Checksums::OfOwner(_) => (of_owner, Wanted::Bytes),
        _ => (Checksums::None, Wanted::Bytes),
    };
    let destination = (Arc::clone(&request.memory), Arc::clone(&request.pieces));
    let verified_by = (checksums, is_sealed);
    let stream = IncomingStream::begin(links, request.session, id, destination, verified_by);
    links.open_bulk(request.session, request.pieces.num_bytes);
    send_read(links, id, request, wanted);
    stream
}

/// Sends what a destination wants of its source.
fn send_read(links: &mut Links, transfer: u64, request: &TransferRequest, wanted: Wanted) {
    let message = Message::Read {
        source: request.source | request.grant,
        wanted,
        ids: Cow::Borrowed(&request.pieces.from_ids),
    };
    message.send(links, request.session, transfer);
}

/// Decides whether the bytes are those that were exposed. Without checksums they are if the source still exposes them.
/// Bytes that differ from their checksums are not the source's fault if it does not.
fn outcome_of(links: &Links, transfer: &Transfer) -> std::result::Result<(), TransferError> {
    let request = &transfer.request;
    let (is_verified, corruption) = match &transfer.state {
        State::Failed(error) => return Err(TransferError::Failed(error.clone())),
        // There were no bytes.
        State::Held | State::Queued => return Ok(()),
        State::Reading(reading) => {
            flush_writes(request.memory.buffer().kind()).map_err(TransferError::Failed)?;
            let verifier = reading.verifier.as_ref();
            let corruption = verifier.and_then(|verifier| verifier.corruption(&request.pieces));
            (verifier.is_some_and(Verifier::compares), corruption)
        }
        State::Streaming(stream) => {
            let is_verified = stream.is_verified() || request.is_verified_by_owner;
            (is_verified, stream.corruption())
        }
    };
    if corruption.is_some() || !is_verified {
        links
            .check_still_exposed(request.session)
            .map_err(TransferError::Failed)?;
    }
    corruption.map_or(Ok(()), |corruption| Err(TransferError::Corrupt(corruption)))
}

/// Makes what was read visible to what its GPU runs from now on.
fn flush_writes(destination: MemoryKind) -> Result<()> {
    let MemoryKind::Cuda { device } = destination else {
        return Ok(());
    };
    kvpipe_ucx::flush_remote_writes(device).map_err(|error| {
        Error::Unavailable(format!(
            "what was read may not be visible to the GPU: {error}"
        ))
    })
}

/// Messages of a source.
impl TransferEngine {
    /// A message about a transfer. It is dropped if the transfer has ended meanwhile.
    pub(super) fn receive(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        (id, attempt): (u64, u8),
        message: Message<'_>,
        data: &Payload,
    ) -> Result<()> {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return Ok(());
        };
        let is_of_it = transfer.request.session == session && transfer.attempt == attempt;
        if !is_of_it || transfer.has_failed() {
            return Ok(());
        }
        if let Some(num_bytes) = transfer.receive(message, data)? {
            let stream = transfer.stream_id(id);
            Message::Credit(num_bytes).send(links, session, stream);
        }
        if transfer.is_over() {
            self.settle(links, id);
        }
        Ok(())
    }

    /// The source sends nothing more of a transfer that was cancelled.
    pub(super) fn cancelled(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        id: u64,
    ) -> Result<()> {
        let peer = self.peers.get_mut(&session);
        if peer.is_some_and(|peer| peer.cancelling.remove(&id).is_none()) {
            let text = format_args!("transfer {id} was cancelled, which was not asked for");
            return Err(Error::protocol(text));
        }
        self.start_waiting(links, session);
        Ok(())
    }

    /// The checksums of the next units of a source, which come unasked. Of one that is not known any more: nothing.
    pub(super) fn receive_source_checksums(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        id: u64,
        first: u64,
        checksums: &[u64],
    ) -> Result<()> {
        let Some(peer) = self.peers.get_mut(&session) else {
            return Ok(());
        };
        let Some(source) = peer.sources.get_mut(&id) else {
            return Ok(());
        };
        source.receive(first, checksums)?;
        for transfer_id in peer.running.clone() {
            if let Some(transfer) = self.transfers.get_mut(&transfer_id)
                && transfer.request.source == id
                && let State::Reading(reading) = &mut transfer.state
                && let Some(verifier) = &mut reading.verifier
            {
                verifier.add(&transfer.request.pieces, first, checksums);
                self.settle(links, transfer_id);
            }
        }
        Ok(())
    }
}

/// Streams over several connections.
impl TransferEngine {
    /// A connection of a session is lost: its peer streams what has not come whole once more, from the beginning.
    pub(crate) fn streams_lost(&mut self, links: &mut Links, session: SessionKey) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        for id in &peer.running {
            let Some(transfer) = self.transfers.get_mut(id) else {
                continue;
            };
            let State::Streaming(stream) = &transfer.state else {
                continue;
            };
            let can_checksum = stream.is_verified();
            if !transfer.is_served() {
                continue;
            }
            let source = transfer.request.source;
            let before = transfer.stream_id(*id);
            peer.cancelling.insert(before, source);
            Message::Cancel.send(links, session, before);
            transfer.attempt = transfer.attempt.wrapping_add(1);
            let again = transfer.stream_id(*id);
            let stream = begin_stream(links, again, &transfer.request, can_checksum);
            transfer.restart(stream);
        }
    }
}

/// Posted reads: over UCX, or copies between GPUs.
impl TransferEngine {
    /// Keeps reads from a peer in flight, those of its first transfers first. More are due when a transfer has started, and
    /// when few are left. Where they have failed, or none can be posted any more, the transfer begins again as a stream.
    fn post(&mut self, links: &mut Links, session: SessionKey) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        for id in &peer.running {
            let Some(transfer) = self.transfers.get_mut(id) else {
                continue;
            };
            while let Some(cap) = transfer.bytes_in_flight_cap()
                && peer.bytes_in_flight < cap
                && let Some(len) = transfer.post_next(links, *id, peer.reads_in_flight)
            {
                peer.bytes_in_flight += len;
                peer.reads_in_flight += 1;
            }
        }
        let has_devices = links.has_devices(session);
        for id in &peer.running {
            let Some(transfer) = self.transfers.get_mut(id) else {
                continue;
            };
            if transfer.is_to_restart(has_devices) {
                // Its source may have been closed meanwhile.
                let can_checksum = transfer.can_checksum();
                let stream = begin_stream(links, *id, &transfer.request, can_checksum);
                transfer.restart(stream);
            }
        }
    }

    /// A read has ended.
    pub(crate) fn read_ended(
        &mut self,
        links: &mut Links,
        token: u64,
        result: std::result::Result<(), Status>,
    ) {
        let (id, number) = split_token(token);
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        let session = transfer.request.session;
        let Some(len) = transfer.posted.end(number) else {
            return;
        };
        match result {
            // While it is in the cache.
            Ok(()) => {
                transfer.steps.moved = Some(Instant::now());
                transfer.hash(CHECKSUMMED_BYTES);
            }
            Err(status) => {
                transfer.lose_reads();
                links.lose_devices(session, &status.to_string());
            }
        }
        schedule(&mut self.scheduled, id, transfer);
        let (is_over, cap) = (transfer.is_over(), transfer.bytes_in_flight_cap());
        let mut is_low = false;
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.bytes_in_flight -= len;
            peer.reads_in_flight -= 1;
            is_low = cap.is_none_or(|cap| peer.bytes_in_flight <= cap / 2);
        }
        if is_over {
            self.settle(links, id);
        }
        if is_low {
            self.post(links, session);
        }
    }
}

/// Queues a transfer if there is work for it.
fn schedule(scheduled: &mut VecDeque<u64>, id: u64, transfer: &mut Transfer) {
    if !transfer.is_scheduled && transfer.has_work() {
        transfer.is_scheduled = true;
        scheduled.push_back(id);
    }
}

/// Work of this thread, slice by slice: reads by calls of our own, and checksums.
impl TransferEngine {
    /// Works for as many transfers as make a slice together; whether there was any.
    pub(super) fn run_transfer_slice(&mut self, links: &mut Links) -> bool {
        let (mut has_worked, mut num_bytes) = (false, 0);
        while num_bytes < CHECKSUMMED_BYTES
            && let Some(id) = self.scheduled.pop_front()
        {
            num_bytes += self.run_transfer(links, id).max(LEAST_WORK);
            has_worked = true;
        }
        has_worked
    }

    /// Reads and hashes a piece of a transfer; about how many bytes that were.
    fn run_transfer(&mut self, links: &mut Links, id: u64) -> u64 {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return 0; // over
        };
        transfer.is_scheduled = false;
        let session = transfer.request.session;
        // A session that has failed: its end, which is about to be reported, is that of its transfers.
        if links.has_failed(session) {
            return 0;
        }
        let mut num_bytes = 0;
        match transfer.read_process() {
            Ok(num_read) => {
                num_bytes = num_read.unwrap_or(CHECKSUMMED_BYTES);
                transfer.hash(CHECKSUMMED_BYTES);
            }
            Err(ProcessVmError::Refused(reason)) => {
                links.switch_to_stream(session, &reason);
                // Memory of the host, which is the only one that is read so, is verified where the service wants it.
                let stream = begin_stream(links, id, &transfer.request, true);
                transfer.restart(stream);
            }
            Err(error) => {
                let error = Error::lost(&links.peer(session), error);
                transfer.fail(error.clone());
                links.fail(session, error);
            }
        }
        schedule(&mut self.scheduled, id, transfer);
        if transfer.is_over() {
            self.settle(links, id);
        }
        num_bytes
    }
}
