//! The engine: all transfers of a reactor, and in which order they go.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpipe_ucx::{AmData, ProcessVmReader, Status};

use super::message::{Message, Subject, Wanted};
use super::path::incoming::IncomingStream;
use super::path::process_vm::{CHECKSUMMED_BYTES, ProcessAddress, Secret, is_cma};
use super::path::{self, Path};
use super::peer::{PeerTransfers, RemoteSource, SourceChecksums};
use super::region::Pieces;
use super::source::SourceRequest;
use super::transfer::{
    ReadPath, Reading, State, Transfer, TransferError, TransferRequest, read_token, split_token,
};
use super::verifier::Verifier;
use crate::earliest::Earliest;
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::net::codec::{Reader, Writer};
use crate::session::ReactorContext;
use crate::transport::Memory;

/// Bytes of reads from one peer in flight. Of 1, 4 and 16 MiB none took less CPU than another over CMA, whose
/// reads keep the thread from its sockets meanwhile: this much takes 1 to 2 ms. RDMA has 4 MiB left when it is refilled.
const BYTES_IN_FLIGHT: u64 = 8 << 20;
/// Reads from one peer in flight where they wait in a device. A queue pair takes 256: when a dead peer leaves it
/// full, UCX (1.13) has no room for what begins a close by force, and the reads end when the device gives up, if ever.
const READS_IN_FLIGHT: usize = 128;
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

/// What a message was.
#[derive(Debug)]
pub(crate) enum Handled {
    /// The engine has done what there was to do.
    Done,
    /// A peer asks for something: [`TransferEngine::serve`] answers it.
    Request(SourceRequest),
    /// It is about a transfer that this side has never begun. Rooms differ in what they make of it.
    Unasked,
}

/// Moves bytes between registered memories. See the module.
#[derive(Debug)]
pub(crate) struct TransferEngine {
    /// Transfers from one peer under way at once; more wait, and a peer may not ask for more. Bounds the bytes that
    /// streams have in flight.
    pub(super) max_in_flight: usize,
    pub(super) peers: HashMap<SessionKey, PeerTransfers>,
    transfers: HashMap<u64, Transfer>,
    last_id: u64,
    deadlines: Earliest,
    /// Transfers with work for this thread, in the order of their slices.
    scheduled: VecDeque<u64>,
    /// Peers that get checksums, in the order of their slices.
    pub(super) checksum_turns: VecDeque<SessionKey>,
    secret: Secret,
    completions: VecDeque<Completion>,
}

/// What a room asks for.
impl TransferEngine {
    pub(crate) fn new(max_in_flight: usize) -> Self {
        Self {
            max_in_flight,
            peers: HashMap::new(),
            transfers: HashMap::new(),
            last_id: 0,
            deadlines: Earliest::default(),
            scheduled: VecDeque::new(),
            checksum_turns: VecDeque::new(),
            secret: Secret::new(),
            completions: VecDeque::new(),
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
                    peer.queue.push_back(id);
                }
                None => transfer.fail(Error::lost(&cx.peer(session), "it is gone")),
            }
        }
        self.settle(cx, id);
        self.start_waiting(cx, session);
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

    /// Ends what need not be waited for. A source cannot be stopped once it streams; one that does not stream is waited
    /// for a while only.
    pub(crate) fn abandon(&mut self, cx: &mut ReactorContext, id: u64, error: &Error) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        if let State::Streaming(_) = transfer.state {
            let deadline = &mut transfer.request.deadline;
            deadline.get_or_insert(cx.now + ABANDONED_WITHIN);
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
        let queue = self.peers.get(&session).into_iter();
        let mut transfers = queue.flat_map(|peer| peer.queue.iter());
        transfers.any(|id| {
            let transfer = self.transfers.get(id);
            transfer.is_some_and(|transfer| transfer.request.source == source)
        })
    }

    /// Bytes of a transfer that have not been asked for, or have not come as a stream.
    pub(crate) fn num_left(&self, id: u64) -> u64 {
        self.transfers.get(&id).map_or(0, Transfer::num_left)
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
        for (_, mut transfer) in std::mem::take(&mut self.transfers) {
            transfer.fail(error.clone());
            let outcome = Err(TransferError::Failed(error.clone()));
            self.completions.push_back(completion(transfer, outcome));
        }
    }

    /// What to tell a peer on this machine, so that it can read our memory itself: continues `frame`.
    pub(crate) fn process_address(
        &self,
        cx: &ReactorContext,
        session: SessionKey,
        frame: Writer,
    ) -> Option<Writer> {
        is_cma(cx, session)
            .then(|| self.secret.write(frame))
            .flatten()
    }

    /// A peer on this machine says where its memory can be read.
    pub(crate) fn receive_process_address(
        &mut self,
        cx: &ReactorContext,
        session: SessionKey,
        frame: Reader<'_>,
    ) -> Result<()> {
        let there = ProcessAddress::read(frame)?;
        let Some(peer) = self.peers.get_mut(&session) else {
            return Ok(());
        };
        if std::mem::replace(&mut peer.has_process_address, true) {
            return Err(Error::protocol("a second PROCESS_VM"));
        }
        if is_cma(cx, session) {
            let found = ProcessVmReader::find(there.pid, there.address, &there.secret);
            peer.process = found.map(Rc::new);
        }
        Ok(())
    }

    /// A message of a transfer, of a kind that [`Message::is_kind`] knows. What a peer asks for is handed on.
    pub(crate) fn message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        (kind, header): (u8, Reader<'_>),
        data: &AmData,
    ) -> Result<Handled> {
        let message = Message::decode(kind, header, data)?;
        if let Some(transfer) = message.at_destination()
            && !self.was_begun(transfer)
        {
            return Ok(Handled::Unasked);
        }
        match message {
            Message::Read {
                transfer,
                source,
                wanted,
                ids,
            } => return self.asked(session, (transfer, source), wanted, ids),
            Message::Data {
                transfer,
                offset,
                checksum,
            } => {
                let Some(found) = self.transfer(session, transfer) else {
                    return Ok(Handled::Done);
                };
                match &mut found.state {
                    State::Streaming(stream) => {
                        stream.receive(offset, checksum, data)?;
                        stream.send_credit(cx, session);
                    }
                    State::Failed(..) => return Ok(Handled::Done),
                    _ => {
                        let text = format_args!("data of transfer {transfer}, which is no stream");
                        return Err(Error::protocol(text));
                    }
                }
                self.settle(cx, transfer);
            }
            Message::Credit {
                transfer,
                num_bytes,
            } => self.credited(cx, session, transfer, num_bytes),
            Message::Refused { transfer, reason } => {
                if let Some(found) = self.transfer(session, transfer)
                    && found.has_begun()
                {
                    let error = Error::Config(format!("the peer refused: {reason}"));
                    self.fail(cx, transfer, &error);
                }
            }
            Message::Checksums {
                subject: Subject::Transfer(transfer),
                first,
                checksums,
            } => self.checksums(cx, session, transfer, first, &checksums)?,
            Message::Checksums {
                subject: Subject::Source(source),
                first,
                checksums,
            } => self.source_checksums(cx, session, source, first, &checksums)?,
        }
        Ok(Handled::Done)
    }

    /// A transfer from a peer; none when it has ended: what was on its way then is dropped.
    fn transfer(&mut self, session: SessionKey, id: u64) -> Option<&mut Transfer> {
        let transfer = self.transfers.get_mut(&id);
        transfer.filter(|transfer| transfer.request.session == session)
    }

    const fn was_begun(&self, id: u64) -> bool {
        id > 0 && id <= self.last_id
    }

    /// The checksums of the next blocks of a transfer.
    fn checksums(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        id: u64,
        first: u64,
        checksums: &[u64],
    ) -> Result<()> {
        let Some(transfer) = self.transfer(session, id) else {
            return Ok(());
        };
        if transfer.has_failed() {
            return Ok(());
        }
        let num_units = transfer.request.pieces.num_units();
        let num = checksums.len() as u64;
        let verifier = transfer.verifier();
        let verifier =
            verifier.filter(|verifier| first == verifier.num_known() && first + num <= num_units);
        let Some(verifier) = verifier else {
            return Err(Error::protocol(format_args!(
                "{num} checksums from block {first} on of a transfer of {num_units} blocks, which were not to come"
            )));
        };
        verifier.receive(checksums);
        self.settle(cx, id);
        Ok(())
    }

    /// The checksums of the next units of a source, which come unasked. Of one that is not known any more: nothing.
    fn source_checksums(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        source: u64,
        first: u64,
        checksums: &[u64],
    ) -> Result<()> {
        let Some(peer) = self.peers.get_mut(&session) else {
            return Ok(());
        };
        let Some(known) = peer.sources.get_mut(&source) else {
            return Ok(());
        };
        known.receive(first, checksums)?;
        let queue = peer.queue.iter().take(self.max_in_flight);
        for id in queue.copied().collect::<Vec<_>>() {
            let transfer = self.transfers.get_mut(&id);
            let transfer = transfer.filter(|transfer| transfer.request.source == source);
            if let Some(verifier) = transfer.and_then(Transfer::verifier) {
                verifier.receive(checksums);
                self.settle(cx, id);
            }
        }
        Ok(())
    }

    /// Ends transfers that are late, and tells when to come back.
    pub(crate) fn expire(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let now = cx.now;
        if self.deadlines.take_if_past(now) {
            let is_late = |transfer: &Transfer| {
                let deadline = transfer.request.deadline;
                !transfer.has_failed() && deadline.is_some_and(|at| at <= now)
            };
            for id in self.ids(is_late) {
                self.fail_late(cx, id);
            }
            let open = self
                .transfers
                .values()
                .filter(|transfer| !transfer.has_failed());
            for transfer in open {
                self.deadlines.add(transfer.request.deadline);
            }
        }
        self.deadlines.at()
    }

    fn fail_late(&mut self, cx: &mut ReactorContext, id: u64) {
        let Some(transfer) = self.transfers.get(&id) else {
            return;
        };
        let text = if transfer.has_begun() {
            "the blocks were not read in time; the peer is closed, connect again"
        } else {
            "the read did not begin in time; the peer is usable"
        };
        let (session, error) = (transfer.request.session, Error::Timeout(text.to_owned()));
        if transfer.has_begun() {
            cx.fail(session, error.clone());
        }
        self.fail(cx, id, &error);
    }
}

/// From the beginning of a transfer to its end.
impl TransferEngine {
    /// Starts transfers of a peer as far as the bound on those under way allows.
    fn start_waiting(&mut self, cx: &mut ReactorContext, session: SessionKey) {
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
    fn settle(&mut self, cx: &mut ReactorContext, id: u64) {
        if let Some(session) = self.complete_if_over(cx, id) {
            self.start_waiting(cx, session);
        }
    }

    /// Completes a transfer to which nothing more will happen; the session whose place is free then.
    fn complete_if_over(&mut self, cx: &mut ReactorContext, id: u64) -> Option<SessionKey> {
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
        self.completions.push_back(completion(transfer, outcome));
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
fn judge(cx: &ReactorContext, transfer: &Transfer) -> std::result::Result<(), TransferError> {
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

fn completion(transfer: Transfer, outcome: std::result::Result<(), TransferError>) -> Completion {
    let request = transfer.request;
    Completion {
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
                let token = read_token(id, reading.posted.next_number());
                let (at, len) = (run.to as usize, run.len as usize);
                if !cx.get(session, &request.memory, at, len, remote, &key, token) {
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
        result: std::result::Result<(), Status>,
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

    /// Does a slice of each kind of work; whether there was any.
    pub(crate) fn run_slice(&mut self, cx: &mut ReactorContext) -> bool {
        let has_checksummed = self.run_checksum_slice(cx);
        self.run_transfer_slice(cx) || has_checksummed
    }

    /// Whether a slice waits.
    pub(crate) fn has_work(&self) -> bool {
        !(self.scheduled.is_empty() && self.checksum_turns.is_empty())
    }

    fn run_transfer_slice(&mut self, cx: &mut ReactorContext) -> bool {
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
