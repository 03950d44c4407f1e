//! The source's side of transfers: streams of its memory, and checksums of what destinations read.

use std::sync::Arc;

use super::engine::{PeerTransfers, TransferEngine};
use super::exposed::{ExposedBuffer, UNIT};
use super::message::{CHECKSUMS_CAP, Message, Wanted};
use super::outgoing_stream::OutgoingStream;
use super::region::{Layout, Pieces, sequence};
use super::verifier::UnitHasher;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::Links;
use crate::transport::Memory;

/// Bytes that are hashed in one go, which sockets and other transfers wait for: less than a millisecond.
const SLICE: u64 = 4 << 20;

/// A peer wants something of one of our sources. Which memory that is, the service above knows: it answers with
/// [`TransferEngine::serve`].
#[derive(Debug)]
pub(crate) struct SourceRequest {
    pub(crate) session: SessionKey,
    pub(crate) source: u64,
    pub(super) transfer: u64,
    pub(super) wanted: Wanted,
    pub(super) ids: Vec<u32>,
}

/// Units of a source whose checksums a peer gets.
#[derive(Debug)]
pub(super) struct ChecksumJob {
    /// The transfer whose destination has asked for them; none if they are sent unasked.
    transfer: Option<u64>,
    source: u64,
    memory: Arc<Memory>,
    pieces: Pieces,
    hasher: UnitHasher,
}

impl ChecksumJob {
    fn new(transfer: Option<u64>, source: u64, memory: Arc<Memory>, pieces: Pieces) -> Self {
        Self {
            transfer,
            source,
            memory,
            pieces,
            hasher: UnitHasher::new(|run| run.from),
        }
    }

    /// Hashes a slice; the checksums of the units that end in it, and the index of the first of them.
    fn run_slice(&mut self) -> (u64, Vec<u64>) {
        let first = self.hasher.hashed_bytes() / self.pieces.unit_bytes;
        let (mut budget, mut checksums) = (SLICE, Vec::new());
        let (buffer, pieces) = (self.memory.buffer(), &self.pieces);
        while checksums.len() < CHECKSUMS_CAP
            && let Some(checksum) = self
                .hasher
                .next(buffer, pieces, pieces.num_bytes, &mut budget)
        {
            checksums.push(checksum.get());
        }
        (first, checksums)
    }

    fn is_over(&self) -> bool {
        self.hasher.hashed_bytes() == self.pieces.num_bytes
    }
}

impl PeerTransfers {
    fn withdraw(&mut self, links: &mut Links, session: SessionKey, is_over: impl Fn(u64) -> bool) {
        links.abort_stream(session, |tag| is_over(tag.source));
        self.checksum_jobs.retain(|job| !is_over(job.source));
        self.streams.retain(|_, stream| !is_over(stream.source));
    }
}

impl TransferEngine {
    /// Refuses a request whose transfer is being served already, or that is one more than are served at once.
    pub(super) fn admit(&self, request: &SourceRequest) -> Result<()> {
        let Some(peer) = self.peers.get(&request.session) else {
            return Ok(());
        };
        let id = request.transfer;
        let asked = peer.checksum_jobs.iter().filter_map(|job| job.transfer);
        // A destination that is refused to read the blocks asks for their bytes after their checksums.
        let is_restarted = request.wanted != Wanted::Checksums;
        let asked = asked.filter(|asked| !(is_restarted && *asked == id));
        if peer.streams.contains_key(&id) || asked.clone().any(|asked| asked == id) {
            let text = format_args!("transfer {id} was asked for twice");
            return Err(Error::protocol(text));
        }
        if peer.streams.len() + asked.count() >= self.max_in_flight {
            let text = format_args!("more than {} transfers at once", self.max_in_flight);
            return Err(Error::protocol(text));
        }
        Ok(())
    }

    /// Serves what a peer has asked for from this memory, or says why not.
    pub(crate) fn serve(
        &mut self,
        links: &mut Links,
        request: &SourceRequest,
        source: Result<(Arc<Memory>, Layout)>,
    ) {
        let (session, transfer) = (request.session, request.transfer);
        let begun = source.and_then(|(memory, layout)| self.begin(request, memory, &layout));
        match begun {
            Ok(()) => {
                let peer = self.peers.get(&session);
                if let Some(stream) = peer.and_then(|peer| peer.streams.get(&transfer)) {
                    links.open_bulk(session, stream.num_bytes());
                }
                self.continue_stream(links, session, transfer, 0);
            }
            Err(error) => {
                Message::Refused(error.to_string()).send(links, session, transfer);
            }
        }
    }

    fn begin(
        &mut self,
        request: &SourceRequest,
        memory: Arc<Memory>,
        layout: &Layout,
    ) -> Result<()> {
        let pieces = sequence(layout, &request.ids)?;
        let (transfer, source) = (request.transfer, request.source);
        let Some(peer) = self.peers.get_mut(&request.session) else {
            return Ok(());
        };
        if request.wanted == Wanted::Checksums {
            if memory.buffer().bytes(0, 0).is_none() {
                let text = "the blocks are not in memory that this process can read";
                return Err(Error::Unavailable(text.to_owned()));
            }
            let job = ChecksumJob::new(Some(transfer), source, memory, pieces);
            self.add_job(request.session, job);
            return Ok(());
        }
        // A destination that gets a stream needs no checksums of its units.
        peer.checksum_jobs.retain(|job| match job.transfer {
            Some(other) => other != transfer,
            None => job.source != source,
        });
        let is_checksummed = request.wanted == Wanted::ChecksummedBytes;
        let stream = OutgoingStream::new(source, memory, pieces, is_checksummed);
        peer.streams.insert(transfer, stream);
        Ok(())
    }

    fn add_job(&mut self, session: SessionKey, job: ChecksumJob) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.checksum_jobs.push_back(job);
            if !self.checksum_queue.contains(&session) {
                self.checksum_queue.push_back(session);
            }
        }
    }

    /// A buffer has been described to a peer under this id; its checksums follow, if it has any.
    pub(crate) fn expose(&mut self, session: SessionKey, source: u64, exposed: &ExposedBuffer) {
        if exposed.pushes_checksums {
            let pieces = Pieces::whole(exposed.len() as u64, UNIT);
            let memory = Arc::clone(&exposed.memory);
            let job = ChecksumJob::new(None, source, memory, pieces);
            self.add_job(session, job);
        }
    }

    /// Stops sending a source to a peer, and releases its memory.
    pub(crate) fn withdraw_source(&mut self, links: &mut Links, session: SessionKey, source: u64) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.withdraw(links, session, |it| it == source);
        }
    }

    /// Stops sending some sources to all peers.
    pub(crate) fn withdraw_sources(&mut self, links: &mut Links, is_over: impl Fn(u64) -> bool) {
        for (session, peer) in &mut self.peers {
            peer.withdraw(links, *session, &is_over);
        }
    }

    /// Sends nothing more of a transfer whose destination has cancelled it. All of it may have been sent before.
    pub(super) fn cancel(&mut self, links: &mut Links, session: SessionKey, transfer: u64) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.streams.remove(&transfer);
            peer.checksum_jobs
                .retain(|job| job.transfer != Some(transfer));
        }
        links.abort_stream(session, |tag| tag.transfer == transfer);
        Message::Cancelled.send(links, session, transfer);
    }

    /// Continues a stream as far as its credit goes, to which the destination has added so many bytes.
    pub(super) fn continue_stream(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        transfer: u64,
        credit_bytes: u64,
    ) {
        if let Some(peer) = self.peers.get_mut(&session)
            && let Some(stream) = peer.streams.get_mut(&transfer)
        {
            stream.grant(credit_bytes);
            let sent = stream.send(links, session, transfer);
            if !matches!(sent, Ok(false)) {
                peer.streams.remove(&transfer);
            }
            if let Err(error) = sent {
                links.abort_stream(session, |tag| tag.transfer == transfer);
                Message::Refused(error.to_string()).send(links, session, transfer);
            }
        }
    }

    /// Hashes a slice of the checksums for the next peer in the queue; false if the queue is empty.
    pub(super) fn run_checksum_slice(&mut self, links: &mut Links) -> bool {
        let Some(session) = self.checksum_queue.pop_front() else {
            return false;
        };
        let Some(peer) = self.peers.get_mut(&session) else {
            return true;
        };
        if let Some(mut job) = peer.checksum_jobs.pop_front() {
            let (first, checksums) = job.run_slice();
            // A slice may lie within one unit.
            if !checksums.is_empty() {
                let (id, message) = match job.transfer {
                    Some(id) => (id, Message::Checksums { first, checksums }),
                    None => (job.source, Message::SourceChecksums { first, checksums }),
                };
                message.send(links, session, id);
            }
            if !job.is_over() {
                match job.transfer {
                    // A short read does not wait for a long one.
                    Some(_) => peer.checksum_jobs.push_back(job),
                    // Buffers are read in the order in which they were described.
                    None => peer.checksum_jobs.push_front(job),
                }
            }
        }
        if !peer.checksum_jobs.is_empty() {
            self.checksum_queue.push_back(session);
        }
        true
    }
}
