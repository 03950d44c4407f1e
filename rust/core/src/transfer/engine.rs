//! The engine: all transfers of a reactor, and in which order they go.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::message::Message;
use super::outgoing_stream::OutgoingStream;
use super::region::Pieces;
use super::remote_source::RemoteSource;
use super::source::{ChecksumJob, SourceRequest};
use super::steps::Steps;
use super::transfer::{State, Transfer, TransferError, TransferRequest, split_stream_id};
use crate::checksum::RunningChecksum;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::reactor::Timers;
use crate::session::{Links, Payload};
use crate::transport::Memory;

/// The end of a transfer.
#[derive(Debug)]
pub(crate) struct Completion {
    /// As the request named it.
    pub(crate) owner: u64,
    pub(crate) session: SessionKey,
    pub(crate) memory: Arc<Memory>,
    pub(crate) pieces: Arc<Pieces>,
    pub(crate) steps: Steps,
    /// Checksum for an owner that compares, once all has come.
    pub(crate) checksum: Option<RunningChecksum>,
    /// Digests of the [chunks](kvpipe_ucx::Chunks::digested) of all blocks, if the owner compares and kernels have copied.
    pub(crate) digests: Option<Vec<u64>>,
    pub(crate) outcome: std::result::Result<(), TransferError>,
}

impl Completion {
    pub(super) fn of(transfer: Transfer, outcome: std::result::Result<(), TransferError>) -> Self {
        let (checksum, digests) = (transfer.checksum(), transfer.digests());
        let steps = transfer.steps();
        let request = transfer.request;
        Self {
            owner: request.owner,
            session: request.session,
            memory: request.memory,
            pieces: request.pieces,
            steps,
            checksum,
            digests,
            outcome,
        }
    }
}

/// State of the engine for one peer: the sources that it exposes to us, our transfers from them, and its transfers from
/// ours.
#[derive(Debug, Default)]
pub(super) struct PeerTransfers {
    /// Its sources, by its ids.
    pub(super) sources: HashMap<u64, RemoteSource>,
    /// All transfers from it.
    pub(super) transfers: BTreeSet<u64>,
    /// Those whose turn has not come, and those that have begun and are not over, both in order.
    pub(super) waiting: VecDeque<u64>,
    pub(super) running: Vec<u64>,
    /// Streams of failed transfers, and those that were begun again, of which it may still send something; with their
    /// sources.
    pub(super) cancelling: HashMap<u64, u64>,
    /// Of reads over UCX.
    pub(super) bytes_in_flight: u64,
    pub(super) reads_in_flight: usize,
    /// Streams that it has asked for, by its ids.
    pub(super) streams: HashMap<u64, OutgoingStream>,
    /// Sources or transfers for which the peer gets checksums, one after the other.
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
    pub(super) deadlines: Timers<u64>,
    /// Transfers with work for this thread, in the order of their slices.
    pub(super) scheduled: VecDeque<u64>,
    /// Peers that get checksums, in the order of their slices.
    pub(super) checksum_queue: VecDeque<SessionKey>,
    pub(super) completions: VecDeque<Completion>,
    /// Owners of transfers that have failed while reads may still write, with the error.
    late: VecDeque<(u64, Error)>,
}

/// Calls of a service.
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
        let id = self.last_id;
        if let Some(deadline) = request.deadline {
            self.deadlines.set(id, deadline);
        }
        if let Some(peer) = self.peers.get_mut(&request.session) {
            peer.transfers.insert(id);
        }
        self.transfers.insert(id, Transfer::new(request));
        id
    }

    /// Lets a transfer begin when it is its turn among those from its peer.
    pub(crate) fn enqueue(&mut self, links: &mut Links, id: u64) {
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
                None => transfer.fail(Error::lost(&links.peer(session), "it is gone")),
            }
        }
        if transfer.is_over() {
            self.settle(links, id);
        } else {
            self.start_waiting(links, session);
        }
    }

    /// Fails a transfer: its source sends nothing more, and it completes when no read can write any more.
    pub(crate) fn fail(&mut self, links: &mut Links, id: u64, error: &Error) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        let (session, source) = (transfer.request.session, transfer.request.source);
        let (is_served, stream) = (transfer.is_served(), transfer.stream_id(id));
        transfer.fail(error.clone());
        if is_served && let Some(peer) = self.peers.get_mut(&session) {
            peer.cancelling.insert(stream, source);
            Message::Cancel.send(links, session, stream);
        }
        self.settle(links, id);
    }

    /// Fails transfers into a memory that have not begun.
    pub(crate) fn withdraw_into(&mut self, links: &mut Links, memory: &Arc<Memory>, error: &Error) {
        let transfers = self.transfers.iter();
        let into = transfers.filter(|(_, it)| Arc::ptr_eq(&it.request.memory, memory));
        for id in into.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.withdraw(links, id, error);
        }
    }

    /// Fails a transfer that has not begun; others go on.
    fn withdraw(&mut self, links: &mut Links, id: u64, error: &Error) {
        let transfer = self.transfers.get(&id);
        if transfer.is_some_and(|transfer| !transfer.has_begun()) {
            self.fail(links, id, error);
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
        links: &mut Links,
        session: SessionKey,
        source: u64,
        error: &Error,
    ) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        peer.sources.remove(&source);
        let is_of_it = |id: &u64| {
            let transfer = self.transfers.get(id);
            transfer.is_some_and(|transfer| transfer.request.source == source)
        };
        let of_it: Vec<_> = peer.transfers.iter().copied().filter(is_of_it).collect();
        for id in of_it {
            self.withdraw(links, id, error);
        }
    }

    /// True if a transfer reads from a source of a peer, or may still, or the peer may still stream from it.
    pub(crate) fn is_reading(&self, session: SessionKey, source: u64) -> bool {
        let Some(peer) = self.peers.get(&session) else {
            return false;
        };
        let is_of_it = |id: &u64| {
            let transfer = self.transfers.get(id);
            transfer.is_some_and(|transfer| transfer.request.source == source)
        };
        peer.running.iter().chain(&peer.waiting).any(is_of_it)
            || peer
                .cancelling
                .values()
                .any(|cancelled| *cancelled == source)
    }

    /// Bytes of a transfer that have not been asked for, or have not come as a stream.
    pub(crate) fn bytes_left(&self, id: u64) -> u64 {
        self.transfers.get(&id).map_or(0, Transfer::bytes_left)
    }

    /// The next transfer that has ended.
    pub(crate) fn next_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// True if a transfer has ended that was not handed over.
    pub(crate) fn has_completions(&self) -> bool {
        !self.completions.is_empty()
    }

    /// The owner of the next transfer that has failed at its deadline while reads may still write into its memory. Its
    /// completion follows when they have ended.
    pub(crate) fn next_late(&mut self) -> Option<(u64, Error)> {
        self.late.pop_front()
    }

    /// Sizes of its maps and queues.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> crate::reactor::manual::Sizes {
        let of_peers = |size: fn(&PeerTransfers) -> usize| self.peers.values().map(size).sum();
        vec![
            ("transfers", self.transfers.len()),
            ("scheduled transfers", self.scheduled.len()),
            ("checksum queue", self.checksum_queue.len()),
            ("completions", self.completions.len()),
            ("transfer peers", self.peers.len()),
            ("sources", of_peers(|peer| peer.sources.len())),
            ("waiting transfers", of_peers(|peer| peer.waiting.len())),
            ("deadlines of transfers", self.deadlines.len()),
            ("late transfers", self.late.len()),
            ("transfers of peers", of_peers(|peer| peer.transfers.len())),
            (
                "cancelled transfers",
                of_peers(|peer| peer.cancelling.len()),
            ),
            ("running transfers", of_peers(|peer| peer.running.len())),
            ("outgoing streams", of_peers(|peer| peer.streams.len())),
            ("checksum jobs", of_peers(|peer| peer.checksum_jobs.len())),
        ]
    }
}

/// Events of the reactor.
impl TransferEngine {
    pub(crate) fn session_up(&mut self, session: SessionKey) {
        self.peers.insert(session, PeerTransfers::default());
    }

    /// A session has ended: its transfers fail, and nothing is served to it.
    pub(crate) fn session_down(&mut self, links: &mut Links, session: SessionKey, error: &Error) {
        let peer = self.peers.remove(&session).unwrap_or_default();
        for id in peer.transfers {
            self.fail(links, id, error);
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

    /// A message of a transfer, of a kind that [`Message::is_kind`] knows. Returns the request of a peer that
    /// [`serve`](Self::serve) is to answer.
    ///
    /// # Errors
    /// It is not to come: the session ends.
    pub(crate) fn message(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        (kind, header): (u8, Reader<'_>),
        data: &Payload,
    ) -> Result<Option<SourceRequest>> {
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
                return Ok(Some(request));
            }
            Message::Credit(num_bytes) => self.continue_stream(links, session, id, num_bytes),
            Message::Cancel => self.cancel(links, session, id),
            Message::Cancelled => self.cancelled(links, session, id)?,
            Message::SourceChecksums { first, checksums } => {
                self.receive_source_checksums(links, session, id, first, &checksums)?;
            }
            Message::Data { .. } | Message::Refused(_) | Message::Checksums { .. } => {
                let (transfer, attempt) = split_stream_id(id);
                if !(1..=self.last_id).contains(&transfer) {
                    let text =
                        format_args!("message {kind} of transfer {transfer}, which was not begun");
                    return Err(Error::protocol(text));
                }
                self.receive(links, session, (transfer, attempt), message, data)?;
            }
        }
        Ok(None)
    }

    /// Does a slice of each kind of work; whether there was any.
    pub(crate) fn run_slice(&mut self, links: &mut Links) -> bool {
        let has_checksummed = self.run_checksum_slice(links);
        self.run_transfer_slice(links) || has_checksummed
    }

    /// True if a slice waits.
    pub(crate) fn has_work(&self) -> bool {
        !(self.scheduled.is_empty() && self.checksum_queue.is_empty())
    }

    /// Fails transfers that are late; true if there were any.
    pub(crate) fn expire(&mut self, links: &mut Links) -> bool {
        let mut is_any_late = false;
        while let Some(id) = self.deadlines.pop_expired(links.now()) {
            self.fail_late(links, id);
            is_any_late = true;
        }
        is_any_late
    }

    /// Time at which the next transfer is late.
    pub(crate) fn next_deadline(&mut self) -> Option<Instant> {
        self.deadlines.next()
    }

    fn fail_late(&mut self, links: &mut Links, id: u64) {
        let Some(transfer) = self.transfers.get(&id) else {
            return;
        };
        let text = if transfer.has_begun() {
            "the blocks were not read in time; reads that have begun may write into them until the work is settled; \
             the peer is usable"
        } else {
            "the read did not begin in time; the peer is usable"
        };
        self.fail(links, id, &Error::Timeout(text.to_owned()));
        if let Some(transfer) = self.transfers.get(&id)
            && let State::Failed(error) = &transfer.state
        {
            self.late.push_back((transfer.request.owner, error.clone()));
        }
    }
}

#[cfg(test)]
mod tests;
