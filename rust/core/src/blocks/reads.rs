//! Reads of blocks into this agent's regions: the owner of each transfer, and the consequences of its end.

use std::sync::Arc;
use std::time::Instant;

use super::agent_core::AgentCore;
use super::messages::AgentMessage;
use super::notices::Notice;
use super::peer::{Counters, Peer};
use super::plan::{peer_gone, region_gone};
use crate::error::{Error, Result};
use crate::ids::{RegionId, SessionKey};
use crate::session::Links;
use crate::transfer::region::{Layout, Pieces};
use crate::transfer::{Checksums, Completion, Cx, TransferError, TransferRequest};
use crate::transport::Memory;
use crate::work::Completer;

/// Blocks that go from a region of one side to one of the other.
#[derive(Debug)]
pub(crate) struct BlockTransfer {
    pub(crate) peer: Peer,
    /// Our region.
    pub(crate) region: RegionId,
    /// The peer's.
    pub(crate) remote_region: RegionId,
    pub(crate) pieces: Arc<Pieces>,
    pub(crate) is_checksummed: bool,
    pub(crate) deadline: Option<Instant>,
}

/// The notification of a transfer: the peer's user gets its tag when the transfer has succeeded.
#[derive(Debug)]
pub(crate) struct Notify {
    pub(super) tag: Vec<u8>,
    /// Its place among the notifications; a transfer begins when it has one.
    pub(super) number: Option<u64>,
}

impl Notify {
    /// The transfer has ended: the peer waits for the number, if there is one.
    pub(super) fn transfer_ended(self, links: &mut Links, session: SessionKey, is_ok: bool) {
        let (Some(number), tag) = (self.number, self.tag) else {
            return;
        };
        let message = if is_ok {
            AgentMessage::Notify { number, tag }
        } else {
            AgentMessage::Void { number }
        };
        message.send(links, session);
    }
}

/// The caller of this process that waits for a transfer.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(super) completer: Completer<u64>,
    pub(super) notify: Option<Notify>,
}

impl Caller {
    pub(super) fn new(completer: Completer<u64>, tag: Option<Vec<u8>>) -> Self {
        let notify = tag.map(|tag| Notify { tag, number: None });
        Self { completer, notify }
    }

    pub(super) fn tag_len(&self) -> Option<usize> {
        self.notify.as_ref().map(|notify| notify.tag.len())
    }
}

/// The initiator of a read.
#[derive(Debug)]
pub(super) enum ReadOwner {
    Caller(Caller),
    /// The peer that offered the blocks, and our user if the offer has a tag.
    Offer {
        id: u64,
        notification: Option<(u64, Vec<u8>)>,
    },
}

impl ReadOwner {
    /// True if the caller knows that the read has failed.
    fn was_late(&self) -> bool {
        matches!(self, Self::Caller(caller) if caller.completer.is_completed())
    }
}

/// A read under way.
#[derive(Debug)]
pub(super) struct ActiveRead {
    /// Its id in the engine.
    id: u64,
    peer: Peer,
    pub(super) region: RegionId,
    pieces: Arc<Pieces>,
    owner: ReadOwner,
}

impl AgentCore {
    /// Begins a read, or ends it at once with what is wrong with it.
    pub(super) fn read(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        transfer: Result<BlockTransfer>,
        owner: ReadOwner,
    ) {
        let begun = transfer.and_then(|transfer| {
            let destination = self.begin_transfer(cx.links, &transfer, &transfer.pieces.to_ids)?;
            Ok((transfer, destination))
        });
        let (transfer, (memory, _)) = match begun {
            Ok(begun) => begun,
            Err(error) => return self.end_read(cx, session, owner, Err(error)),
        };
        let (token, tag_len) = match &owner {
            ReadOwner::Caller(caller) => (cx.links.token(), caller.tag_len()),
            ReadOwner::Offer { .. } => (cx.links.token(), None),
        };
        if let ReadOwner::Offer { id, .. } = &owner
            && let Some(peer) = self.peers.get_mut(&session)
        {
            peer.offers_here.insert(*id, Some(token));
        }
        if !matches!(owner, ReadOwner::Offer { .. }) {
            self.count(&transfer.peer, Counters::begin);
        }
        let id = cx.transfers.add(TransferRequest {
            owner: token,
            session,
            source: transfer.remote_region.into(),
            grant: 0,
            memory,
            pieces: Arc::clone(&transfer.pieces),
            checksums: Checksums::all_if(transfer.is_checksummed),
            is_verified_by_owner: false,
            is_retry: false,
            deadline: transfer.deadline,
        });
        let active = ActiveRead {
            id,
            peer: transfer.peer,
            region: transfer.region,
            pieces: transfer.pieces,
            owner,
        };
        self.reads.insert(token, active);
        match tag_len {
            Some(len) => self.notice(cx, session, Notice::Transfer(token, len), None),
            None => cx.transfers.enqueue(cx.links, id),
        }
    }

    /// Counts a transfer as one of our region's; the destination of a read, or the source of a write. `ids` are our blocks.
    ///
    /// # Errors
    /// Since the transfer was asked for, a region was closed or the peer was lost; or a block is busy.
    pub(super) fn begin_transfer(
        &mut self,
        links: &Links,
        transfer: &BlockTransfer,
        ids: &[u32],
    ) -> Result<(Arc<Memory>, Layout)> {
        let local = self.regions.get_mut(&transfer.region);
        let local = local.ok_or_else(region_gone)?;
        let session = transfer.peer.session();
        let peer = self.peers.get(&session);
        let peer = peer.ok_or_else(|| peer_gone(links, session))?;
        peer.region(transfer.remote_region)
            .ok_or_else(region_gone)?;
        local.check_free(ids)?;
        local.num_transfers += 1;
        Ok((Arc::clone(&local.memory), local.layout.clone()))
    }

    /// Something besides transfers reads a region, so that its closing waits.
    pub(crate) fn use_begins(&mut self, region: RegionId) {
        if let Some(region) = self.local_region_mut(region) {
            region.num_transfers += 1;
        }
    }

    /// The end of such a use.
    pub(crate) fn use_ends(&mut self, region: RegionId) {
        self.end_transfer(region, &[], false);
    }

    /// A transfer of a region is over, after its caller knew of its failure or not.
    pub(super) fn end_transfer(&mut self, region: RegionId, ids: &[u32], was_late: bool) {
        if let Some(region) = self.local_region_mut(region) {
            region.num_transfers -= 1;
            if was_late {
                region.set_free(ids);
            }
        }
    }

    /// A read has its number, and begins; whether there is such a read.
    pub(super) fn read_numbered(&mut self, cx: &mut Cx<'_>, token: u64, number: u64) -> bool {
        if let Some(read) = self.reads.get_mut(&token)
            && let ReadOwner::Caller(caller) = &mut read.owner
            && let Some(notify) = &mut caller.notify
        {
            notify.number = Some(number);
            cx.transfers.enqueue(cx.links, read.id);
            return true;
        }
        false
    }

    /// Fails a read. It ends when nothing of it is under way.
    pub(super) fn fail_read(&mut self, cx: &mut Cx<'_>, token: u64, error: &Error) {
        if let Some(read) = self.reads.get(&token) {
            cx.transfers.fail(cx.links, read.id, error);
        }
    }

    /// A read has failed at its deadline, and is not over: its caller knows, and its blocks are busy until it is.
    pub(crate) fn late(&mut self, cx: &mut Cx<'_>, token: u64, error: Error) {
        let Some(read) = self.reads.get_mut(&token) else {
            return;
        };
        let ReadOwner::Caller(caller) = &mut read.owner else {
            return;
        };
        if let Some(notify) = caller.notify.take() {
            notify.transfer_ended(cx.links, read.peer.session(), false);
        }
        let (region, pieces) = (read.region, Arc::clone(&read.pieces));
        for counters in [&self.shared.counters, read.peer.counters()] {
            counters.end_read(None);
        }
        caller.completer.complete_unsettled(Err(error));
        if let Some(region) = self.local_region_mut(region) {
            region.set_busy(&pieces.to_ids);
        }
    }

    /// The transfer of a read has ended.
    pub(crate) fn transferred(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        let Some(read) = self.reads.remove(&completion.owner) else {
            return;
        };
        let (pieces, outcome) = (
            &completion.pieces,
            outcome_of(completion.outcome, &completion.pieces),
        );
        let num_bytes = pieces.num_bytes;
        let was_late = read.owner.was_late();
        if let Err(error @ Error::PeerLost { .. }) = &outcome {
            read.peer.lose(error);
        }
        self.end_transfer(read.region, &pieces.to_ids, was_late);
        if !(was_late || matches!(read.owner, ReadOwner::Offer { .. })) {
            let moved = outcome.is_ok().then_some(num_bytes);
            self.count(&read.peer, |counters| counters.end_read(moved));
        }
        let outcome = outcome.map(|()| num_bytes);
        self.end_read(cx, read.peer.session(), read.owner, outcome);
    }

    fn end_read(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        owner: ReadOwner,
        outcome: Result<u64>,
    ) {
        match owner {
            ReadOwner::Caller(caller) => {
                if let Some(notify) = caller.notify {
                    notify.transfer_ended(cx.links, session, outcome.is_ok());
                }
                caller.completer.complete(outcome);
            }
            ReadOwner::Offer { id, notification } => {
                self.answer(cx, session, id, notification, outcome.map(|_| ()));
            }
        }
    }
}

/// Reads of the service above, which knows them by tokens of its own, and begins and ends their transfers.
impl AgentCore {
    /// Counts such a read as begun, and returns where its blocks go.
    ///
    /// # Errors
    /// As of [`begin_transfer`](Self::begin_transfer).
    pub(crate) fn service_read_begins(
        &mut self,
        links: &Links,
        transfer: &BlockTransfer,
    ) -> Result<(Arc<Memory>, Layout)> {
        let destination = self.begin_transfer(links, transfer, &transfer.pieces.to_ids)?;
        self.count(&transfer.peer, Counters::begin);
        Ok(destination)
    }

    /// Counts such a read as over.
    pub(crate) fn service_read_ends(
        &mut self,
        peer: &Peer,
        region: RegionId,
        outcome: &Result<u64>,
    ) {
        if let Err(error @ Error::PeerLost { .. }) = outcome {
            peer.lose(error);
        }
        self.end_transfer(region, &[], false);
        let moved = outcome.as_ref().ok().copied();
        self.count(peer, |counters| counters.end_read(moved));
    }
}

/// The outcome of a transfer of blocks, whose errors name a block that has come wrong.
pub(crate) fn outcome_of(
    outcome: std::result::Result<(), TransferError>,
    pieces: &Pieces,
) -> Result<()> {
    outcome.map_err(|error| {
        error.into_error(|corruption| {
            let index = (corruption.at / pieces.unit_bytes) as usize;
            let id = |ids: &[u32]| ids.get(index).copied().unwrap_or_default();
            let (to, from) = (id(&pieces.to_ids), id(&pieces.from_ids));
            // A piece of a stream can have many small blocks.
            let or_later = if corruption.is_exact { "" } else { " or a later one" };
            format!(
                "block {to}, from block {from},{or_later} differs from its checksum: it changed while it was moved, \
                 or on its way; move the blocks again"
            )
        })
    })
}
