//! The destination's side of transfers: in which order they begin, what they read, and when they are over.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::Status;

use super::engine::{Completion, TransferEngine};
use super::message::{Message, Wanted};
use super::path::incoming::IncomingStream;
use super::path::process_vm::CHECKSUMMED_BYTES;
use super::path::{self, Path};
use super::remote_source::SourceChecksums;
use super::transfer::{
    ReadPath, Reading, State, Transfer, TransferError, TransferRequest, read_token, split_token,
};
use super::verifier::Verifier;
use crate::error::Error;
use crate::ids::SessionKey;
use crate::session::ReactorContext;
use crate::transport::Get;

/// Bytes of reads from one peer in flight. Of 1, 4 and 16 MiB none took less CPU than another over CMA, whose
/// reads keep the thread from its sockets meanwhile: this much takes 1 to 2 ms. RDMA has 4 MiB left when it is refilled.
const BYTES_IN_FLIGHT: u64 = 8 << 20;
/// Reads from one peer in flight where they wait in a device. A queue pair takes 256: when a dead peer leaves it
/// full, UCX (1.13) has no room for what begins a close by force, and the reads end when the device gives up, if ever.
const READS_IN_FLIGHT: usize = 128;
/// From the beginning of a transfer to its end.
impl TransferEngine {
    /// Starts transfers of a peer as far as the bound on those under way allows.
    pub(super) fn start_waiting(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        loop {
            let Some(peer) = self.peers.get(&session) else {
                return;
            };
            let is_waiting = |id: &&u64| {
                let transfer = self.transfers.get(*id);
                transfer.is_some_and(|transfer| !transfer.has_begun())
            };
            let mut first = peer.queue.iter().take(self.max_in_flight);
            let Some(&id) = first.find(is_waiting) else {
                return self.post(cx, session);
            };
            self.start(cx, session, id);
            self.complete_if_over(cx, id);
        }
    }

    fn start(&mut self, cx: &mut ReactorContext, session: SessionKey, id: u64) {
        let (Some(transfer), Some(peer)) =
            (self.transfers.get_mut(&id), self.peers.get_mut(&session))
        else {
            return;
        };
        transfer.began = Some(Instant::now());
        let request = &transfer.request;
        if request.pieces.num_bytes == 0 {
            transfer.state = State::Verifying(Verifier::default());
            return;
        }
        let Some(source) = peer.sources.get_mut(&request.source) else {
            let text = "the source of the transfer has been closed meanwhile";
            return transfer.fail(Error::Config(text.to_owned()));
        };
        // Nobody hashes what is on a GPU.
        let is_checksummed = request.is_checksummed && !source.is_cuda;
        let (is_retry, process) = (request.is_retry, peer.process.as_ref());
        let wanted = match path::choose(cx, session, (source, process), &request.memory, is_retry) {
            Err(error) => return transfer.fail(error),
            Ok(Path::Stream) => {
                let destination = (Arc::clone(&request.memory), Arc::clone(&request.pieces));
                let stream = IncomingStream::begin(cx, session, id, destination, is_checksummed);
                let wanted = if is_checksummed {
                    Wanted::ChecksummedBytes
                } else {
                    Wanted::Bytes
                };
                ask(cx, id, request, wanted);
                transfer.state = State::Streaming(stream);
                return;
            }
            Ok(Path::RemoteRead(key)) => {
                let is_in_order = !source.is_cuda && cx.reads_at_once(session);
                peer.reads_cap = if is_in_order {
                    usize::MAX
                } else {
                    READS_IN_FLIGHT
                };
                ReadPath::Remote {
                    base: source.base,
                    key,
                }
            }
            Ok(Path::ProcessVm(process)) => ReadPath::ProcessVm {
                base: source.base,
                process,
            },
        };
        let verifier = is_checksummed.then(|| {
            if let SourceChecksums::Pushed { known, .. } = &source.checksums {
                return Verifier::new(known.clone());
            }
            ask(cx, id, request, Wanted::Checksums);
            Verifier::default()
        });
        transfer.state = State::Reading(Reading::new(wanted, verifier));
        self.schedule(id);
    }

    /// Completes a transfer if it is over, and lets the next begin.
    pub(super) fn settle(&mut self, cx: &mut ReactorContext, id: u64) {
        if let Some(session) = self.complete_if_over(cx, id) {
            self.start_waiting(cx, session);
        }
    }

    /// Completes a transfer to which nothing more will happen; the session whose place is free then.
    pub(super) fn complete_if_over(
        &mut self,
        cx: &mut ReactorContext,
        id: u64,
    ) -> Option<SessionKey> {
        self.transfers
            .get(&id)
            .filter(|transfer| transfer.is_over())?;
        let transfer = self.transfers.remove(&id)?;
        let session = transfer.request.session;
        if let Some(peer) = self.peers.get_mut(&session)
            && let Some(at) = peer.queue.iter().position(|other| *other == id)
        {
            peer.queue.remove(at);
        }
        let outcome = judge(cx, &transfer);
        // With it goes where a stream lands: nothing is placed any more when the completion is seen.
        self.completions
            .push_back(Completion::of(transfer, outcome));
        Some(session)
    }
}

/// Sends what a destination wants of its source.
fn ask(cx: &mut ReactorContext, transfer: u64, request: &TransferRequest, wanted: Wanted) {
    let message = Message::Read {
        transfer,
        source: request.source,
        wanted,
        ids: Cow::Borrowed(&request.pieces.from_ids),
    };
    message.send(cx, request.session);
}

/// Whether what has come is what was exposed. Without checksums that is so if the source still exposes it; what differs from
/// them is not the source's fault if it does not.
fn judge(cx: &ReactorContext, transfer: &Transfer) -> Result<(), TransferError> {
    if let State::Failed(error, _) = &transfer.state {
        return Err(TransferError::Failed(error.clone()));
    }
    let corruption = transfer.corruption();
    if corruption.is_some() || !transfer.is_verified() {
        cx.check_still_exposed(transfer.request.session)
            .map_err(TransferError::Failed)?;
    }
    corruption.map_or(Ok(()), |corruption| Err(TransferError::Corrupt(corruption)))
}

/// Reads over UCX.
impl TransferEngine {
    /// Keeps reads from a peer in flight, those of its first transfers first.
    fn post(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        for &id in peer.queue.iter().take(self.max_in_flight) {
            let Some(transfer) = self.transfers.get_mut(&id) else {
                continue;
            };
            let State::Reading(reading) = &mut transfer.state else {
                continue;
            };
            let request = &transfer.request;
            while let Some((run, remote, key)) = reading.next_read(&request.pieces) {
                if peer.bytes_in_flight >= BYTES_IN_FLIGHT || peer.reads_in_flight >= peer.reads_cap
                {
                    return;
                }
                let get = Get {
                    local: &request.memory,
                    offset: run.to as usize,
                    len: run.len as usize,
                    remote,
                    key: &key,
                    token: read_token(id, reading.posted.next_number()),
                };
                if !cx.get(session, get) {
                    return;
                }
                reading.posted.post(run.len);
                reading.cursor.advance(&request.pieces.runs, run.len);
                peer.bytes_in_flight += run.len;
                peer.reads_in_flight += 1;
            }
        }
    }

    /// A read has ended.
    pub(crate) fn read_ended(
        &mut self,
        cx: &mut ReactorContext,
        token: u64,
        result: Result<(), Status>,
    ) {
        let (id, number) = split_token(token);
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        let session = transfer.request.session;
        let posted = match &mut transfer.state {
            State::Reading(reading) => &mut reading.posted,
            State::Failed(_, posted) => posted,
            _ => return,
        };
        let Some(len) = posted.end(number) else {
            return;
        };
        match result {
            // While it is in the cache.
            Ok(()) => transfer.hash(CHECKSUMMED_BYTES),
            Err(status) => {
                let error = Error::lost(&cx.peer(session), status);
                transfer.fail(error.clone());
                cx.fail(session, error);
            }
        }
        let mut is_low = false;
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.bytes_in_flight -= len;
            peer.reads_in_flight -= 1;
            is_low = peer.bytes_in_flight <= BYTES_IN_FLIGHT / 2;
        }
        self.schedule(id);
        if self.complete_if_over(cx, id).is_some() {
            self.start_waiting(cx, session);
        } else if is_low {
            self.post(cx, session);
        }
    }
}
/// Work of this thread, slice by slice: reads by calls of our own, and checksums.
impl TransferEngine {
    /// Queues a transfer if there is work for it.
    fn schedule(&mut self, id: u64) {
        if let Some(transfer) = self.transfers.get_mut(&id)
            && !transfer.is_scheduled
            && transfer.has_work()
        {
            transfer.is_scheduled = true;
            self.scheduled.push_back(id);
        }
    }

    pub(super) fn run_transfer_slice(&mut self, cx: &mut ReactorContext) -> bool {
        let Some(id) = self.scheduled.pop_front() else {
            return false;
        };
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return true; // over
        };
        transfer.is_scheduled = false;
        let session = transfer.request.session;
        // A session that has failed: its end, which is about to be reported, is that of its transfers.
        if cx.has_failed(session) {
            return true;
        }
        match transfer.read_process() {
            Ok(()) => transfer.hash(CHECKSUMMED_BYTES),
            Err(error) => {
                let error = Error::lost(&cx.peer(session), error);
                transfer.fail(error.clone());
                cx.fail(session, error);
            }
        }
        self.schedule(id);
        self.settle(cx, id);
        true
    }
}
