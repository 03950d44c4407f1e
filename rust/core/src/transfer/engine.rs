//! The engine: all transfers of a reactor, and in which order they go.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_ucx::AmData;

use super::message::Message;
use super::outgoing_stream::OutgoingStream;
use super::region::Pieces;
use super::remote_source::RemoteSource;
use super::source::{ChecksumJob, SourceRequest};
use super::transfer::{State, Transfer, TransferError, TransferRequest};
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::session::ReactorContext;
use crate::transport::Memory;

/// A stream that is abandoned has to end within this time.
const ABANDONED_WITHIN: Duration = Duration::from_secs(2);

/// How a transfer ended.
#[derive(Debug)]
pub(crate) struct Completion {
    /// As the request named it.
    pub(crate) owner: u64,
    pub(crate) session: SessionKey,
    pub(crate) memory: Arc<Memory>,
    pub(crate) pieces: Arc<Pieces>,
    /// Since it began.
    pub(crate) elapsed: Duration,
    pub(crate) outcome: std::result::Result<(), TransferError>,
}

impl Completion {
    pub(super) fn of(transfer: Transfer, outcome: std::result::Result<(), TransferError>) -> Self {
        let request = transfer.request;
        Self {
            owner: request.owner,
            session: request.session,
            memory: request.memory,
            pieces: request.pieces,
            elapsed: transfer
                .began
                .map_or(Duration::ZERO, |began| began.elapsed()),
            outcome,
        }
    }
}

/// What a message was.
#[derive(Debug)]
pub(crate) enum Handled {
    /// The engine has done what there was to do.
    Done,
    /// A peer asks for something: [`TransferEngine::serve`] answers it.
    Request(SourceRequest),
    /// It is about a transfer that this side has never begun. Services differ in what they make of it.
    UnknownTransfer,
}

/// What the engine knows of one peer: the sources that it exposes to us, what we read of them, and what it reads of ours.
#[derive(Debug, Default)]
pub(super) struct PeerTransfers {
    /// What it exposes, by its ids.
    pub(super) sources: HashMap<u64, RemoteSource>,
    /// Transfers from it that have not begun, and those that have and are not over, both in order.
    pub(super) waiting: VecDeque<u64>,
    pub(super) running: Vec<u64>,
    /// Of reads over UCX.
    pub(super) bytes_in_flight: u64,
    pub(super) reads_in_flight: usize,
    /// What it has asked for, by its ids.
    pub(super) streams: HashMap<u64, OutgoingStream>,
    /// Whose checksums it gets, one after the other.
    pub(super) checksum_jobs: VecDeque<ChecksumJob>,
}

/// Moves bytes between registered memories. See the module.
#[derive(Debug, Default)]
pub(crate) struct TransferEngine {
    /// Transfers from one peer under way at once; more wait, and a peer may not ask for more. Bounds the bytes that
    /// streams have in flight.
    pub(super) max_in_flight: usize,
    pub(super) peers: HashMap<SessionKey, PeerTransfers>,
    pub(super) transfers: HashMap<u64, Transfer>,
    pub(super) last_id: u64,
    deadlines: Earliest,
    /// Transfers with work for this thread, in the order of their slices.
    pub(super) scheduled: VecDeque<u64>,
    /// Peers that get checksums, in the order of their slices.
    pub(super) checksum_queue: VecDeque<SessionKey>,
    pub(super) completions: VecDeque<Completion>,
}

/// What a service asks for.
impl TransferEngine {
    pub(crate) fn new(max_in_flight: usize) -> Self {
        Self {
            max_in_flight,
            ..Self::default()
        }
    }

    /// Takes a transfer, which waits until it is [queued](Self::enqueue), and returns its id.
    pub(crate) fn add(&mut self, request: TransferRequest) -> u64 {
        self.last_id += 1;
        self.deadlines.add(request.deadline);
        self.transfers.insert(self.last_id, Transfer::new(request));
        self.last_id
    }

    /// Lets a transfer begin when it is its turn among those from its peer.
    pub(crate) fn enqueue(&mut self, cx: &mut ReactorContext, id: u64) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        let session = transfer.request.session;
        if let State::Held = transfer.state {
            match self.peers.get_mut(&session) {
                Some(peer) => {
                    transfer.state = State::Queued;
                    peer.waiting.push_back(id);
                }
                None => transfer.fail(Error::lost(&cx.peer(session), "it is gone")),
            }
        }
        if transfer.is_over() {
            self.settle(cx, id);
        } else {
            self.start_waiting(cx, session);
        }
    }

    /// Fails a transfer: nothing more is asked for, and it completes when no read can write any more.
    pub(crate) fn fail(&mut self, cx: &mut ReactorContext, id: u64, error: &Error) {
        if let Some(transfer) = self.transfers.get_mut(&id) {
            transfer.fail(error.clone());
            self.settle(cx, id);
        }
    }

    /// Fails a transfer that has not begun; others go on.
    pub(crate) fn withdraw(&mut self, cx: &mut ReactorContext, id: u64, error: &Error) {
        let transfer = self.transfers.get(&id);
        if transfer.is_some_and(|transfer| !transfer.has_begun()) {
            self.fail(cx, id, error);
        }
    }

    /// Fails a transfer whose owner has ended, unless it streams: a source cannot be stopped, so that a stream has
    /// [`ABANDONED_WITHIN`] to end, or its session ends.
    pub(crate) fn abandon(&mut self, cx: &mut ReactorContext, id: u64, error: &Error) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        if let State::Streaming(_) = transfer.state {
            let deadline = &mut transfer.request.deadline;
            deadline.get_or_insert(cx.now() + ABANDONED_WITHIN);
            self.deadlines.add(*deadline);
        } else {
            self.fail(cx, id, error);
        }
    }

    /// A peer exposes memory to us under this id.
    pub(crate) fn add_source(&mut self, session: SessionKey, id: u64, source: RemoteSource) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.sources.insert(id, source);
        }
    }

    /// A peer does not expose it any more: transfers that have not begun fail.
    pub(crate) fn remove_source(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        source: u64,
        error: &Error,
    ) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.sources.remove(&source);
        }
        let is_of_it = |transfer: &Transfer| {
            (transfer.request.session, transfer.request.source) == (session, source)
        };
        for id in self.ids(is_of_it) {
            self.withdraw(cx, id, error);
        }
    }

    /// Whether a transfer reads from a source of a peer, or may still.
    pub(crate) fn is_reading(&self, session: SessionKey, source: u64) -> bool {
        let Some(peer) = self.peers.get(&session) else {
            return false;
        };
        peer.running.iter().chain(&peer.waiting).any(|id| {
            let transfer = self.transfers.get(id);
            transfer.is_some_and(|transfer| transfer.request.source == source)
        })
    }

    /// Bytes of a transfer that have not been asked for, or have not come as a stream.
    pub(crate) fn bytes_left(&self, id: u64) -> u64 {
        self.transfers.get(&id).map_or(0, Transfer::bytes_left)
    }

    /// The next transfer that has ended.
    pub(crate) fn next_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    fn ids(&self, is_it: impl Fn(&Transfer) -> bool) -> Vec<u64> {
        let transfers = self.transfers.iter();
        let found = transfers.filter(|(_, transfer)| is_it(transfer));
        found.map(|(id, _)| *id).collect()
    }
}

/// What happens around it.
impl TransferEngine {
    pub(crate) fn session_up(&mut self, session: SessionKey) {
        self.peers.insert(session, PeerTransfers::default());
    }

    /// A session has ended: its transfers fail, and nothing is served to it.
    pub(crate) fn session_down(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        error: &Error,
    ) {
        self.peers.remove(&session);
        for id in self.ids(|transfer| transfer.request.session == session) {
            self.fail(cx, id, error);
        }
    }

    /// The reactor has ended, and with it all reads but those that it tells of.
    pub(crate) fn stop(&mut self, error: &Error) {
        self.peers.clear();
        for (_, transfer) in self.transfers.drain() {
            let outcome = Err(TransferError::Failed(error.clone()));
            self.completions
                .push_back(Completion::of(transfer, outcome));
        }
    }

    /// A message of a transfer, of a kind that [`Message::is_kind`] knows. What a peer asks for is handed on.
    pub(crate) fn message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        (kind, header): (u8, Reader<'_>),
        data: &AmData,
    ) -> Result<Handled> {
        let (id, message) = Message::decode(kind, header, data)?;
        match message {
            Message::Read {
                source,
                wanted,
                ids,
            } => {
                let request = SourceRequest {
                    session,
                    source,
                    transfer: id,
                    wanted,
                    ids: ids.into_owned(),
                };
                self.admit(&request)?;
                return Ok(Handled::Request(request));
            }
            Message::Credit(num_bytes) => self.continue_stream(cx, session, id, num_bytes),
            Message::SourceChecksums { first, checksums } => {
                self.receive_source_checksums(cx, session, id, first, &checksums)?;
            }
            Message::Data { .. } | Message::Refused(_) | Message::Checksums { .. } => {
                if !(1..=self.last_id).contains(&id) {
                    return Ok(Handled::UnknownTransfer);
                }
                self.receive(cx, session, id, message, data)?;
            }
        }
        Ok(Handled::Done)
    }

    /// Does a slice of each kind of work; whether there was any.
    pub(crate) fn run_slice(&mut self, cx: &mut ReactorContext) -> bool {
        let has_checksummed = self.run_checksum_slice(cx);
        self.run_transfer_slice(cx) || has_checksummed
    }

    /// Whether a slice waits.
    pub(crate) fn has_work(&self) -> bool {
        !(self.scheduled.is_empty() && self.checksum_queue.is_empty())
    }

    /// Ends transfers that are late, and tells when to come back.
    pub(crate) fn expire(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let now = cx.now();
        if self.deadlines.take_if_past(now) {
            let is_late = |transfer: &Transfer| {
                let deadline = transfer.request.deadline;
                !transfer.has_failed() && deadline.is_some_and(|at| at <= now)
            };
            for id in self.ids(is_late) {
                self.fail_late(cx, id);
            }
            for transfer in self.transfers.values() {
                if !transfer.has_failed() {
                    self.deadlines.add(transfer.request.deadline);
                }
            }
        }
        self.deadlines.at()
    }

    /// A transfer that has begun fails its session, and completes with it: its owner then sees a lost peer at once.
    fn fail_late(&mut self, cx: &mut ReactorContext, id: u64) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        if transfer.has_begun() {
            let text = "the blocks were not read in time; the peer is closed, connect again";
            let (session, error) = (transfer.request.session, Error::Timeout(text.to_owned()));
            transfer.fail(error.clone());
            cx.fail(session, error);
        } else {
            let text = "the read did not begin in time; the peer is usable";
            self.fail(cx, id, &Error::Timeout(text.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests;
