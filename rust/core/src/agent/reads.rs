//! Blocks on their way into this agent's regions: which transfer is whose, and what its end means to them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::agent_core::AgentCore;
use super::messages::AgentMessage;
use super::notices::Notice;
use super::peer::{Counters, Peer};
use super::plan::{peer_gone, region_gone};
use super::regions::grant;
use crate::error::{Error, Result};
use crate::ids::{Epoch, RegionId, SessionKey};
use crate::session::ReactorContext;
use crate::transfer::region::{Layout, Pieces};
use crate::transfer::{Checksums, Completion, Cx, TransferRequest};
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
    pub(super) fn transfer_ended(
        self,
        links: &mut ReactorContext,
        session: SessionKey,
        is_ok: bool,
    ) {
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

/// Our user, who waits for a transfer.
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

/// Whose read it is.
#[derive(Debug)]
pub(crate) enum ReadOwner {
    Caller(Caller),
    /// The peer that offered the blocks, and our user if the offer has a tag.
    Offer {
        id: u64,
        notification: Option<(u64, Vec<u8>)>,
    },
    /// The service above the agent, which knows the read by a token of the reactor, and decides whether what has come
    /// counts.
    Service {
        token: u64,
        /// Whether a read of these blocks has failed before.
        is_retry: bool,
        /// Whether the service has checksums of its own. Without them the pieces of a stream have some.
        has_checksums: bool,
        /// The peer's grant of the blocks.
        epoch: Epoch,
    },
}

impl ReadOwner {
    /// Whether the caller knows that the read has failed.
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
    layout: Layout,
    pieces: Arc<Pieces>,
    owner: ReadOwner,
}

/// What a read for the service has brought.
#[derive(Debug)]
pub(crate) struct BlocksRead {
    pub(crate) memory: Arc<Memory>,
    pub(crate) layout: Layout,
    pub(crate) num_bytes: u64,
    /// Since it began.
    pub(crate) elapsed: Duration,
}

impl AgentCore {
    /// Begins a read, or ends it at once with what is wrong with it.
    pub(crate) fn read(
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
        let (transfer, (memory, layout)) = match begun {
            Ok(begun) => begun,
            Err(error) => return self.end_read(cx, session, owner, Err(error)),
        };
        let (token, tag_len) = match &owner {
            ReadOwner::Caller(caller) => (cx.links.token(), caller.tag_len()),
            ReadOwner::Offer { .. } => (cx.links.token(), None),
            ReadOwner::Service { token, .. } => (*token, None),
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
            grant: match owner {
                ReadOwner::Service { epoch, .. } => grant(epoch),
                _ => 0,
            },
            memory,
            pieces: Arc::clone(&transfer.pieces),
            checksums: match owner {
                ReadOwner::Service {
                    has_checksums: false,
                    ..
                } => Checksums::OfStream,
                _ => Checksums::all_if(transfer.is_checksummed),
            },
            is_verified_by_owner: matches!(owner, ReadOwner::Service { .. }),
            is_retry: matches!(owner, ReadOwner::Service { is_retry: true, .. }),
            deadline: transfer.deadline,
        });
        let active = ActiveRead {
            id,
            peer: transfer.peer,
            region: transfer.region,
            layout,
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
        links: &ReactorContext,
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

    /// Fails reads into a region that have not begun.
    pub(super) fn withdraw_reads(&mut self, cx: &mut Cx<'_>, region: RegionId, error: &Error) {
        let into = self.reads.values().filter(|read| read.region == region);
        for id in into.map(|read| read.id).collect::<Vec<_>>() {
            cx.transfers.withdraw(cx.links, id, error);
        }
    }

    /// Fails a read. It ends when nothing of it is under way.
    pub(crate) fn fail_read(&mut self, cx: &mut Cx<'_>, token: u64, error: &Error) {
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

    /// The next read for the service that has ended.
    pub(crate) fn next_ended_read(&mut self) -> Option<(u64, Result<BlocksRead>)> {
        self.ended_reads.pop_front()
    }

    /// The transfer of a read has ended.
    pub(crate) fn transferred(&mut self, cx: &mut Cx<'_>, completion: Completion) {
        let Some(read) = self.reads.remove(&completion.owner) else {
            return;
        };
        let pieces = &completion.pieces;
        let outcome = completion.outcome.map_err(|error| {
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
        });
        // Works end before the end of the session is reported: whoever sees one of them sees this too.
        if let Err(error @ Error::PeerLost { .. }) = &outcome {
            read.peer.lose(error);
        }
        let num_bytes = completion.pieces.num_bytes;
        let was_late = read.owner.was_late();
        self.end_transfer(read.region, &completion.pieces.to_ids, was_late);
        if !(was_late || matches!(read.owner, ReadOwner::Offer { .. })) {
            let moved = outcome.is_ok().then_some(num_bytes);
            self.count(&read.peer, |counters| counters.end_read(moved));
        }
        let outcome = outcome.map(|()| BlocksRead {
            memory: completion.memory,
            layout: read.layout,
            num_bytes,
            elapsed: completion.elapsed,
        });
        self.end_read(cx, read.peer.session(), read.owner, outcome);
    }

    fn end_read(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        owner: ReadOwner,
        outcome: Result<BlocksRead>,
    ) {
        match owner {
            ReadOwner::Caller(caller) => {
                if let Some(notify) = caller.notify {
                    notify.transfer_ended(cx.links, session, outcome.is_ok());
                }
                caller
                    .completer
                    .complete(outcome.map(|read| read.num_bytes));
            }
            ReadOwner::Offer { id, notification } => {
                self.answer(cx, session, id, notification, outcome.map(|_| ()));
            }
            ReadOwner::Service { token, .. } => self.ended_reads.push_back((token, outcome)),
        }
    }
}
