//! Blocks on their way into this agent's regions: which transfer is whose, and what its end means to them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::agent_core::AgentCore;
use super::notices::Notice;
use super::peer::{Counters, Peer};
use super::plan::{peer_gone, region_gone};
use crate::error::{Error, Result};
use crate::ids::RegionId;
use crate::ids::SessionKey;
use crate::session::ReactorContext;
use crate::transfer::region::{Layout, Pieces};
use crate::transfer::{Completion, TransferRequest};
use crate::transport::Memory;
use crate::work::Completer;

/// What the peer is told when a transfer has gone well.
#[derive(Debug)]
pub(super) struct Notify {
    pub(super) tag: Vec<u8>,
    /// Its place among the notifications; a transfer begins when it has one.
    pub(super) number: Option<u64>,
}

/// Who is told when blocks are here.
#[derive(Debug)]
pub(super) enum ReadOwner {
    /// Our user, and the peer's if there is a tag.
    Caller(Completer<u64>, Option<Notify>),
    /// The peer that offered the blocks, and our user if there is a tag.
    Offer {
        offer: u64,
        notice: Option<(u64, Vec<u8>)>,
    },
    /// The service above the agent, which knows the read by this token of the reactor.
    Service(u64),
}

/// Blocks of a peer that are wanted here.
#[derive(Debug)]
pub(super) struct BlockRead {
    pub(super) session: SessionKey,
    pub(super) region: RegionId,
    pub(super) remote_region: RegionId,
    pub(super) pieces: Arc<Pieces>,
    pub(super) is_checksummed: bool,
    pub(super) is_retry: bool,
    pub(super) deadline: Option<Instant>,
    pub(super) owner: ReadOwner,
}

/// One of them under way.
#[derive(Debug)]
pub(super) struct ActiveRead {
    /// Its number in the engine.
    pub(super) transfer: u64,
    pub(super) session: SessionKey,
    pub(super) region: RegionId,
    peer: Peer,
    layout: Layout,
    pub(super) owner: ReadOwner,
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
    /// Begins a read for the service above, whose own checksums verify what comes.
    /// [`next_ended_read`](Self::next_ended_read) returns how it ended.
    pub(crate) fn read_for_service(
        &mut self,
        cx: &mut ReactorContext,
        token: u64,
        session: SessionKey,
        (region, remote_region): (RegionId, RegionId),
        pieces: Pieces,
        is_retry: bool,
    ) {
        let read = BlockRead {
            session,
            region,
            remote_region,
            pieces: Arc::new(pieces),
            is_checksummed: false,
            is_retry,
            deadline: None,
            owner: ReadOwner::Service(token),
        };
        self.read(cx, read);
    }

    /// Ends a read that cannot begin.
    pub(crate) fn fail_read(&mut self, token: u64, error: Error) {
        self.ended_reads.push_back((token, Err(error)));
    }

    /// Begins a read, or ends it at once with what is wrong with it.
    pub(super) fn read(&mut self, cx: &mut ReactorContext, read: BlockRead) {
        let session = read.session;
        let (peer, memory, layout) = match self.check_read(cx, &read) {
            Ok(all) => all,
            Err(error) => return self.end_read(cx, session, read.owner, Err(error)),
        };
        if !matches!(read.owner, ReadOwner::Offer { .. }) {
            self.count(&peer, Counters::begin);
        }
        let tag_len = match &read.owner {
            ReadOwner::Caller(_, Some(notify)) => Some(notify.tag.len()),
            _ => None,
        };
        let token = match read.owner {
            ReadOwner::Service(token) => token,
            _ => cx.token(),
        };
        let transfer = self.engine.add(TransferRequest {
            owner: token,
            session,
            source: read.remote_region.into(),
            memory,
            pieces: read.pieces,
            is_checksummed: read.is_checksummed,
            is_verified_by_owner: matches!(read.owner, ReadOwner::Service(_)),
            is_retry: read.is_retry,
            deadline: read.deadline,
        });
        let active = ActiveRead {
            transfer,
            session,
            region: read.region,
            peer,
            layout,
            owner: read.owner,
        };
        self.reads.insert(token, active);
        if let Some(len) = tag_len {
            self.notice(cx, session, Notice::Transfer(token, len));
        } else {
            self.engine.enqueue(cx, transfer);
        }
    }

    fn check_read(
        &self,
        cx: &ReactorContext,
        read: &BlockRead,
    ) -> Result<(Peer, Arc<Memory>, Layout)> {
        let local = self.regions.get(&read.region);
        let local = local.ok_or_else(region_gone)?;
        let peer = self.peers.get(&read.session);
        let peer = peer.ok_or_else(|| peer_gone(cx, read.session))?;
        let regions = peer.regions.as_ref();
        regions
            .and_then(|regions| regions.get(&read.remote_region))
            .ok_or_else(region_gone)?;
        let (memory, layout) = (Arc::clone(&local.memory), local.layout.clone());
        Ok((peer.handle.clone(), memory, layout))
    }

    /// Fails reads into a region that have not begun.
    pub(super) fn withdraw_reads(
        &mut self,
        cx: &mut ReactorContext,
        region: RegionId,
        error: &Error,
    ) {
        let into = self.reads.values().filter(|read| read.region == region);
        for transfer in into.map(|read| read.transfer).collect::<Vec<_>>() {
            self.engine.withdraw(cx, transfer, error);
        }
    }

    /// Ends a read that the service need not wait for.
    pub(crate) fn abandon_read(&mut self, cx: &mut ReactorContext, token: u64, error: &Error) {
        if let Some(read) = self.reads.get(&token) {
            self.engine.abandon(cx, read.transfer, error);
        }
    }

    /// Tells the owners of reads what has ended.
    pub(super) fn drain(&mut self, cx: &mut ReactorContext) {
        while let Some(completion) = self.engine.next_completion() {
            self.completed(cx, completion);
        }
    }

    /// The next read for the service that has ended. Ends those of users and offers on the way.
    pub(crate) fn next_ended_read(
        &mut self,
        cx: &mut ReactorContext,
    ) -> Option<(u64, Result<BlocksRead>)> {
        self.drain(cx);
        self.ended_reads.pop_front()
    }

    fn completed(&mut self, cx: &mut ReactorContext, completion: Completion) {
        let Some(read) = self.reads.remove(&completion.owner) else {
            return;
        };
        let (pieces, block_bytes) = (&completion.pieces, read.layout.block_bytes);
        let outcome = completion.outcome.map_err(|error| {
            error.into_error(|corruption| {
                let index = (corruption.at / block_bytes) as usize;
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
        if !matches!(read.owner, ReadOwner::Offer { .. }) {
            let moved = outcome.is_ok().then_some(num_bytes);
            self.count(&read.peer, |counters| counters.end_read(moved));
        }
        let outcome = outcome.map(|()| BlocksRead {
            memory: completion.memory,
            layout: read.layout,
            num_bytes,
            elapsed: completion.elapsed,
        });
        self.end_read(cx, read.session, read.owner, outcome);
    }

    fn end_read(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        owner: ReadOwner,
        outcome: Result<BlocksRead>,
    ) {
        match owner {
            ReadOwner::Caller(completer, notify) => {
                self.tell(cx, session, notify, outcome.is_ok());
                completer.complete(outcome.map(|read| read.num_bytes));
            }
            ReadOwner::Offer { offer, notice } => {
                let outcome = outcome.map(|_| ());
                self.answer(cx, session, (offer, notice), outcome);
            }
            ReadOwner::Service(token) => self.ended_reads.push_back((token, outcome)),
        }
    }
}
