//! Blocks on their way into this process, by either data path: those that were asked for, and those that were offered.

use std::sync::Arc;
use std::time::Instant;

use kvpipe_ucx::{AmData, Status};

use super::messages::{CREDIT, DATA, READ, Wanted, ids};
use super::notices::Notice;
use super::peer::{Counters, Peer};
use super::plan::{peer_gone, region_gone};
use super::service::Blocks;
use super::transfer::{Arrived, Notify, Owner, Take, Transfer, get_token, split_token};
use super::verifier::Verifier;
use crate::error::{Error, Result};
use crate::net::codec::Reader;
use crate::reactor::{ReactorContext, SessionKey};
use crate::transfer::region::{Layout, Pieces, RegionId};
use crate::transfer::stream::Incoming;
use crate::transport::{Memory, Payload};
use crate::work::Completer;

/// Transfers from one peer under way at once; more wait. Bounds the bytes in flight on the stream path.
pub(super) const TRANSFERS_IN_FLIGHT: usize = 4;

/// Remote read: bytes from one peer under way at once. Of 1, 4 and 16 MiB none took less CPU than another over CMA, whose
/// reads keep the thread from its sockets meanwhile: this much takes 1 to 2 ms. RDMA has 4 MiB left when it is refilled.
const BYTES_IN_FLIGHT: u64 = 8 << 20;
/// Gets from one peer under way at once where they wait in a device. A queue pair takes 256: when a dead peer leaves it
/// full, UCX (1.13) has no room for what begins a close by force, and the gets end when the device gives up, if ever.
const GETS_IN_FLIGHT: usize = 128;

/// What a user asks to be read.
#[derive(Debug)]
pub(super) struct ReadCommand {
    pub(super) session: SessionKey,
    pub(super) region: RegionId,
    pub(super) remote_region: RegionId,
    pub(super) pieces: Arc<Pieces>,
    pub(super) notify: Option<Vec<u8>>,
    pub(super) is_checksummed: bool,
    pub(super) deadline: Option<Instant>,
    pub(super) completer: Completer<u64>,
}

/// From the beginning to the end.
impl Blocks {
    pub(super) fn read_command(&mut self, cx: &mut ReactorContext, command: ReadCommand) {
        let notify = command.notify.map(|tag| Notify { tag, number: None });
        let take = Take {
            session: command.session,
            region: command.region,
            remote_region: command.remote_region,
            pieces: command.pieces,
            is_checksummed: command.is_checksummed,
            deadline: command.deadline,
            owner: Owner::Caller(command.completer, notify),
        };
        self.take(cx, take);
    }

    /// Begins a transfer, or ends it at once with what is wrong with it.
    pub(super) fn take(&mut self, cx: &mut ReactorContext, take: Take) {
        let session = take.session;
        let (peer, memory, layout) = match self.check_take(cx, &take) {
            Ok(both) => both,
            Err(error) => return self.end_owner(cx, session, take.owner, Err(error)),
        };
        if take.owner.is_ours() {
            self.count(&peer, Counters::begin);
        }
        let id = cx.token();
        let tag_len = match &take.owner {
            Owner::Caller(_, Some(notify)) => Some(notify.tag.len()),
            _ => None,
        };
        self.deadlines.add(take.deadline);
        self.transfers
            .insert(id, Transfer::new(take, peer, memory, layout));
        if let Some(len) = tag_len {
            self.notice(cx, session, Notice::Transfer(id, len));
        } else {
            self.enqueue(cx, session, id);
        }
    }

    fn check_take(&self, cx: &ReactorContext, take: &Take) -> Result<(Peer, Arc<Memory>, Layout)> {
        let local = self.regions.get(&take.region);
        let local = local.ok_or_else(region_gone)?;
        let peer = self.peers.get(&take.session);
        let peer = peer.ok_or_else(|| peer_gone(cx, take.session))?;
        let regions = peer.regions.as_ref();
        regions
            .and_then(|regions| regions.get(&take.remote_region))
            .ok_or_else(region_gone)?;
        let (memory, layout) = (Arc::clone(&local.memory), local.layout.clone());
        Ok((peer.handle.clone(), memory, layout))
    }

    /// Nothing but its turn is to be waited for.
    pub(super) fn enqueue(&mut self, cx: &mut ReactorContext, session: SessionKey, id: u64) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.transfers.push_back(id);
        }
        self.start_waiting(cx, session);
    }

    /// Starts transfers of a peer as far as the bound on those under way allows.
    pub(super) fn start_waiting(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        loop {
            let Some(peer) = self.peers.get(&session) else {
                return;
            };
            let is_waiting = |id: &&u64| {
                self.transfers
                    .get(*id)
                    .is_some_and(|transfer| !transfer.is_started)
            };
            let mut first = peer.transfers.iter().take(TRANSFERS_IN_FLIGHT);
            let Some(&id) = first.find(is_waiting) else {
                return self.post(cx, session);
            };
            self.start(cx, session, id);
            self.finish_if_over(cx, id);
        }
    }

    fn start(&mut self, cx: &mut ReactorContext, session: SessionKey, id: u64) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        transfer.is_started = true;
        transfer.began = self.trace.now();
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        let is_cuda = peer.is_cuda(transfer.remote_region);
        // Nobody sums what is on a GPU.
        transfer.is_checksummed &= !is_cuda;
        let mut wanted = if transfer.is_checksummed {
            Wanted::ChecksummedBytes
        } else {
            Wanted::Bytes
        };
        match peer.source(cx, session, transfer) {
            Ok(remote) => transfer.remote = remote,
            Err(error) => transfer.failure = Some(error),
        }
        if transfer.remote.is_some() || transfer.failure.is_some() {
            let is_in_order = !is_cuda && cx.reads_at_once(session);
            peer.gets_cap = if is_in_order {
                usize::MAX
            } else {
                GETS_IN_FLIGHT
            };
            transfer.process_vm = peer.process_vm.clone().filter(|_| !is_cuda);
            if transfer.is_checksummed && !transfer.is_over() {
                let is_in_order = is_in_order || transfer.process_vm.is_some();
                transfer.verifier = Some(Verifier::new(is_in_order));
                wanted = Wanted::Checksums;
            }
        } else {
            let (memory, pieces) = (Arc::clone(&transfer.memory), Arc::clone(&transfer.pieces));
            let is_checksummed = transfer.is_checksummed;
            let incoming = Incoming::begin(cx, session, (DATA, id), memory, pieces, is_checksummed);
            transfer.incoming = Some(incoming);
        }
        if transfer.incoming.is_some() || transfer.verifier.is_some() {
            let header = cx.header(session, READ).u64(id).u32(transfer.remote_region);
            let from_ids = ids(&transfer.pieces.from_ids);
            cx.message(session, header.u8(wanted as u8), Payload::Bytes(from_ids));
        }
        self.give_turn(id);
    }

    /// Ends a transfer if nothing more will happen to it, and lets the next begin.
    pub(super) fn settle(&mut self, cx: &mut ReactorContext, session: SessionKey, id: u64) {
        if self.finish_if_over(cx, id) {
            self.start_waiting(cx, session);
        }
    }

    pub(super) fn finish_if_over(&mut self, cx: &mut ReactorContext, id: u64) -> bool {
        if !self.transfers.get(&id).is_some_and(Transfer::is_over) {
            return false;
        }
        let Some(mut transfer) = self.transfers.remove(&id) else {
            return false;
        };
        if transfer.failure.is_none() {
            transfer.failure = judge(cx, &transfer).err();
        }
        // Nothing is placed any more when the work ends.
        transfer.incoming = None;
        if let Some(peer) = self.peers.get_mut(&transfer.session)
            && let Some(at) = peer.transfers.iter().position(|other| *other == id)
        {
            peer.transfers.remove(at);
        }
        // Works end before the end of the session is reported: whoever sees one of them sees this too.
        if let Some(error @ Error::PeerLost { .. }) = &transfer.failure {
            transfer.peer.lose(error);
        }
        let is_whole = transfer.failure.is_none();
        let num_bytes = is_whole.then_some(transfer.pieces.num_bytes);
        if transfer.owner.is_ours() {
            self.count(&transfer.peer, |counters| counters.end_read(num_bytes));
        }
        let outcome = match transfer.failure {
            Some(error) => Err(error),
            None => Ok(Arrived {
                num_bytes: transfer.pieces.num_bytes,
                memory: transfer.memory,
                layout: transfer.layout,
                began: transfer.began,
            }),
        };
        self.end_owner(cx, transfer.session, transfer.owner, outcome);
        true
    }

    pub(super) fn end_owner(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        owner: Owner,
        outcome: Result<Arrived>,
    ) {
        match owner {
            Owner::Caller(completer, notify) => {
                self.tell(cx, session, notify, outcome.is_ok());
                completer.complete(outcome.map(|arrived| arrived.num_bytes));
            }
            Owner::Offer { offer, notice } => {
                let outcome = outcome.map(|_| ());
                self.answer(cx, session, (offer, notice), outcome);
            }
            Owner::Handoff(handoff, batch) => self.batch_ended(cx, handoff, &batch, outcome),
        }
    }
}

/// Whether what has come is what was exposed. Without checksums that is so if the source still exposes it; what differs from
/// them is not the source's fault if it does not.
fn judge(cx: &ReactorContext, transfer: &Transfer) -> Result<()> {
    let corruption = transfer.corruption();
    if corruption.is_some() || !transfer.is_verified() {
        cx.check_still_exposed(transfer.session)?;
    }
    corruption.map_or(Ok(()), Err)
}

/// By gets.
impl Blocks {
    /// Keeps gets from a peer under way, those of its first transfers first.
    fn post(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        for &id in peer.transfers.iter().take(TRANSFERS_IN_FLIGHT) {
            let Some(transfer) = self.transfers.get_mut(&id) else {
                continue;
            };
            let Some((base, key)) = transfer.remote.clone() else {
                continue;
            };
            while let Some(run) = transfer.next_get() {
                if peer.bytes_in_flight >= BYTES_IN_FLIGHT || peer.gets_in_flight >= peer.gets_cap {
                    return;
                }
                let (memory, token) = (&transfer.memory, get_token(id, run.len));
                let (at, len) = (run.to as usize, run.len as usize);
                if !cx.get(session, memory, at, len, base + run.from, &key, token) {
                    return;
                }
                transfer.cursor.advance(&transfer.pieces.runs, run.len);
                transfer.in_flight += 1;
                peer.bytes_in_flight += run.len;
                peer.gets_in_flight += 1;
            }
        }
    }

    /// A get has ended.
    pub(super) fn got(
        &mut self,
        cx: &mut ReactorContext,
        token: u64,
        result: std::result::Result<(), Status>,
    ) {
        let (id, len) = split_token(token);
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        let session = transfer.session;
        transfer.in_flight -= 1;
        match result {
            Ok(()) => transfer.num_read += len,
            Err(status) => {
                let error = Error::lost(&cx.peer(session), status);
                transfer.failure.get_or_insert(error.clone());
                cx.fail(session, error);
            }
        }
        let is_over = transfer.is_over();
        let mut is_low = false;
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.bytes_in_flight -= len;
            peer.gets_in_flight -= 1;
            is_low = peer.bytes_in_flight <= BYTES_IN_FLIGHT / 2;
        }
        self.give_turn(id);
        if is_over {
            self.settle(cx, session, id);
        } else if is_low {
            self.post(cx, session);
        }
    }
}

/// By messages.
impl Blocks {
    pub(super) fn arrived(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        id: u64,
        header: Reader<'_>,
        data: &AmData,
    ) -> Result<()> {
        // Of a transfer that has ended meanwhile: dropped, its memory is not ours to write any more.
        let is_open =
            |transfer: &&mut Transfer| transfer.session == session && transfer.failure.is_none();
        let transfer = self.transfers.get_mut(&id).filter(is_open);
        let Some(incoming) = transfer.and_then(|transfer| transfer.incoming.as_mut()) else {
            return Ok(());
        };
        incoming.take(header, data)?;
        incoming.credit(cx, session, (CREDIT, id));
        self.settle(cx, session, id);
        Ok(())
    }

    pub(super) fn refused(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        id: u64,
        text: &str,
    ) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        if transfer.session != session || !transfer.is_started {
            return;
        }
        let error = Error::Config(format!("the peer refused: {text}"));
        transfer.failure.get_or_insert(error);
        self.settle(cx, session, id);
    }
}
