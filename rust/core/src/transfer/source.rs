//! The source's side of transfers: streams of its memory, and checksums of what destinations read.

use std::borrow::Cow;
use std::sync::Arc;

use super::engine::{Handled, TransferEngine};
use super::exposed::{ExposedBuffer, UNIT};
use super::message::{CHECKSUMS_CAP, Message, Subject, Wanted};
use super::path::outgoing::OutgoingStream;
use super::region::{Layout, Pieces, Run, sequence};
use super::verifier::{UnitHasher, Units};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::session::ReactorContext;
use crate::transport::Memory;

/// Bytes that are hashed in one go, which sockets and other transfers wait for: less than a millisecond.
const SLICE: u64 = 4 << 20;

/// A peer wants something of one of our sources. Which memory that is, the service above knows: it answers with
/// [`TransferEngine::serve`].
#[derive(Debug)]
pub(crate) struct SourceRequest {
    pub(crate) session: SessionKey,
    pub(crate) source: u64,
    transfer: u64,
    wanted: Wanted,
    pub(super) ids: Vec<u32>,
}

/// Units of a source whose checksums a peer gets.
#[derive(Debug)]
pub(super) struct ChecksumJob {
    subject: Subject,
    source: u64,
    memory: Arc<Memory>,
    runs: Vec<Run>,
    num_bytes: u64,
    unit_bytes: u64,
    num_checksummed: u64,
    hasher: UnitHasher,
}

impl ChecksumJob {
    fn new(
        (subject, source): (Subject, u64),
        memory: Arc<Memory>,
        runs: Vec<Run>,
        unit_bytes: u64,
    ) -> Self {
        Self {
            subject,
            source,
            memory,
            num_bytes: runs.iter().map(|run| run.len).sum(),
            runs,
            unit_bytes,
            num_checksummed: 0,
            hasher: UnitHasher::default(),
        }
    }

    fn is_of(&self, transfer: u64) -> bool {
        self.subject == Subject::Transfer(transfer)
    }

    /// The message with the checksums of the next slice, which may lie within one unit and then has none.
    fn next(&mut self) -> Message<'static> {
        let units = Units {
            buffer: self.memory.buffer(),
            runs: &self.runs,
            side: |run| run.from,
            num_bytes: self.num_bytes,
            unit_bytes: self.unit_bytes,
        };
        let (mut budget, mut checksums) = (SLICE, Vec::new());
        while checksums.len() < CHECKSUMS_CAP
            && let Some(checksum) = self.hasher.next(&units, self.num_bytes, &mut budget)
        {
            checksums.push(checksum);
        }
        let first = self.num_checksummed;
        self.num_checksummed += checksums.len() as u64;
        Message::Checksums {
            subject: self.subject,
            first,
            checksums,
        }
    }

    fn is_over(&self) -> bool {
        self.hasher.num_hashed() == self.num_bytes
    }
}

impl TransferEngine {
    /// A peer asks for blocks.
    pub(super) fn admit_read(
        &self,
        session: SessionKey,
        (transfer, source): (u64, u64),
        wanted: Wanted,
        ids: Cow<'_, [u32]>,
    ) -> Result<Handled> {
        let Some(peer) = self.peers.get(&session) else {
            return Ok(Handled::Done);
        };
        let jobs = peer.checksum_jobs.iter();
        let is_asked = |job: &&ChecksumJob| matches!(job.subject, Subject::Transfer(_));
        if peer.streams.contains_key(&transfer) || jobs.clone().any(|job| job.is_of(transfer)) {
            let text = format_args!("transfer {transfer} was asked for twice");
            return Err(Error::protocol(text));
        }
        if peer.streams.len() + jobs.filter(is_asked).count() >= self.max_in_flight {
            let text = format_args!("more than {} transfers at once", self.max_in_flight);
            return Err(Error::protocol(text));
        }
        Ok(Handled::Request(SourceRequest {
            session,
            source,
            transfer,
            wanted,
            ids: ids.into_owned(),
        }))
    }

    /// Serves what a peer has asked for from this memory, or says why not.
    pub(crate) fn serve(
        &mut self,
        cx: &mut ReactorContext,
        request: &SourceRequest,
        source: Result<(Arc<Memory>, Layout)>,
    ) {
        let (session, transfer) = (request.session, request.transfer);
        let begun = source.and_then(|(memory, layout)| self.begin(request, memory, &layout));
        match begun {
            Ok(()) => self.stream_on(cx, session, transfer),
            Err(error) => {
                let reason = error.to_string();
                Message::Refused { transfer, reason }.send(cx, session);
            }
        }
    }

    fn begin(
        &mut self,
        request: &SourceRequest,
        memory: Arc<Memory>,
        layout: &Layout,
    ) -> Result<()> {
        let runs = sequence(layout, &request.ids)?;
        let (session, source) = (request.session, request.source);
        let Some(peer) = self.peers.get_mut(&session) else {
            return Ok(());
        };
        if request.wanted == Wanted::Checksums {
            if memory.buffer().bytes(0, 0).is_none() {
                let text = "the blocks are not in memory that this process can read";
                return Err(Error::Unavailable(text.to_owned()));
            }
            let names = (Subject::Transfer(request.transfer), source);
            let job = ChecksumJob::new(names, memory, runs, layout.block_bytes);
            self.add_job(session, job);
            return Ok(());
        }
        // Whoever has it streamed needs no checksums of its units.
        peer.checksum_jobs
            .retain(|job| job.subject != Subject::Source(source));
        let is_checksummed = request.wanted == Wanted::ChecksummedBytes;
        let names = (request.transfer, source);
        let stream = OutgoingStream::new(names, memory, runs, is_checksummed);
        peer.streams.insert(request.transfer, stream);
        Ok(())
    }

    fn add_job(&mut self, session: SessionKey, job: ChecksumJob) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.checksum_jobs.push_back(job);
            if !self.checksum_turns.contains(&session) {
                self.checksum_turns.push_back(session);
            }
        }
    }

    /// A buffer has been described to a peer under this id; its checksums follow, if it has any.
    pub(crate) fn expose(&mut self, session: SessionKey, source: u64, exposed: &ExposedBuffer) {
        if exposed.pushes_checksums() {
            let (memory, layout) = exposed.source();
            let runs = Pieces::whole(layout.block_bytes, UNIT).runs;
            let job = ChecksumJob::new((Subject::Source(source), source), memory, runs, UNIT);
            self.add_job(session, job);
        }
    }

    /// Nothing more of a source is sent to a peer, and its memory is let go.
    pub(crate) fn withdraw_source(&mut self, session: SessionKey, source: u64) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.checksum_jobs.retain(|job| job.source != source);
            peer.streams.retain(|_, stream| stream.source() != source);
        }
    }

    /// The destination has placed so many bytes.
    pub(super) fn credited(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        transfer: u64,
        num_bytes: u64,
    ) {
        let peer = self.peers.get_mut(&session);
        if let Some(stream) = peer.and_then(|peer| peer.streams.get_mut(&transfer)) {
            stream.grant(num_bytes);
            self.stream_on(cx, session, transfer);
        }
    }

    fn stream_on(&mut self, cx: &mut ReactorContext, session: SessionKey, transfer: u64) {
        if let Some(peer) = self.peers.get_mut(&session)
            && let Some(stream) = peer.streams.get_mut(&transfer)
            && stream.send(cx, session)
        {
            peer.streams.remove(&transfer);
        }
    }

    /// Hashes a slice of what the peer whose turn it is gets checksums of; whether there was any.
    pub(super) fn run_checksum_slice(&mut self, cx: &mut ReactorContext) -> bool {
        let Some(session) = self.checksum_turns.pop_front() else {
            return false;
        };
        let Some(peer) = self.peers.get_mut(&session) else {
            return true;
        };
        if let Some(mut job) = peer.checksum_jobs.pop_front() {
            let message = job.next();
            match job.subject {
                _ if job.is_over() => {}
                // A short read does not wait for a long one.
                Subject::Transfer(_) => peer.checksum_jobs.push_back(job),
                // Buffers are read in the order in which they were described.
                Subject::Source(_) => peer.checksum_jobs.push_front(job),
            }
            if !matches!(&message, Message::Checksums { checksums, .. } if checksums.is_empty()) {
                message.send(cx, session);
            }
        }
        if !peer.checksum_jobs.is_empty() {
            self.checksum_turns.push_back(session);
        }
        true
    }
}
