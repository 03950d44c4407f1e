//! Writes. The owner of the destination decides about its content: a write is an offer of blocks, which the target
//! checks, reads by its own data path, and answers.

use std::sync::Arc;

use super::agent_core::AgentCore;
use super::messages::{AgentMessage, Offer};
use super::notices::Notice;
use super::peer::Counters;
use super::plan::{not_writable, region_gone};
use super::reads::{BlockTransfer, Caller, ReadOwner};
use crate::error::{Error, Result};
use crate::ids::SessionKey;
use crate::transfer::Cx;
use crate::transfer::region::coalesce;

/// Offers to one peer that it has not answered; more wait. One that is read and one that follows keep it busy.
const OFFERS_IN_FLIGHT: usize = 8;

/// A write, at the writer.
#[derive(Debug)]
pub(crate) struct Write {
    pub(super) transfer: BlockTransfer,
    pub(super) caller: Caller,
}

/// At the writer.
impl AgentCore {
    pub(super) fn write_command(&mut self, cx: &mut Cx<'_>, write: Write) {
        let Write { transfer, caller } = write;
        let source_ids = &transfer.pieces.from_ids;
        if let Err(error) = self.begin_transfer(cx.links, &transfer, source_ids) {
            return caller.completer.complete(Err(error));
        }
        let session = transfer.peer.session();
        self.count(&transfer.peer, Counters::begin);
        let (id, tag_len) = (cx.links.token(), caller.tag_len());
        if let Some(deadline) = transfer.deadline {
            self.write_deadlines.set((session, id), deadline);
        }
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.writes.insert(id, Write { transfer, caller });
        }
        match tag_len {
            Some(len) => self.notice(cx, session, Notice::Transfer(id, len), None),
            None => self.write_ready(cx, session, id),
        }
    }

    /// A write has its number, and may be offered; whether there is such a write.
    pub(super) fn write_numbered(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        id: u64,
        number: u64,
    ) -> bool {
        let peer = self.peers.get_mut(&session);
        let Some(write) = peer.and_then(|peer| peer.writes.get_mut(&id)) else {
            return false;
        };
        if let Some(notify) = &mut write.caller.notify {
            notify.number = Some(number);
        }
        self.write_ready(cx, session, id);
        true
    }

    /// Offers a write when it is its turn.
    fn write_ready(&mut self, cx: &mut Cx<'_>, session: SessionKey, id: u64) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.writes_ready.push_back(id);
        }
        self.send_offers(cx, session);
    }

    fn send_offers(&mut self, cx: &mut Cx<'_>, session: SessionKey) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        while peer.offers_sent.len() < OFFERS_IN_FLIGHT {
            let Some(id) = peer.writes_ready.pop_front() else {
                return;
            };
            let Some(write) = peer.writes.get(&id) else {
                continue;
            };
            let (transfer, notify) = (&write.transfer, write.caller.notify.as_ref());
            let offer = Offer {
                id,
                to: transfer.remote_region,
                from: transfer.region,
                to_ids: (&transfer.pieces.to_ids).into(),
                from_ids: (&transfer.pieces.from_ids).into(),
                is_checksummed: transfer.is_checksummed,
                notification: notify
                    .and_then(|notify| Some((notify.number?, (&notify.tag).into()))),
            };
            AgentMessage::Offer(offer).send(cx.links, session);
            peer.offers_sent.push(id);
        }
    }

    /// The target's answer.
    pub(super) fn answered(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        id: u64,
        outcome: Result<()>,
    ) -> Result<()> {
        let Some(peer) = self.peers.get_mut(&session) else {
            return Ok(());
        };
        let Some(index) = peer.offers_sent.iter().position(|sent| *sent == id) else {
            let text = format_args!("an answer to offer {id}, which was not made");
            return Err(Error::protocol(text));
        };
        peer.offers_sent.swap_remove(index);
        self.end_write(session, id, outcome);
        self.send_offers(cx, session);
        Ok(())
    }

    /// Ends a write. Its target reads nothing of it any more.
    fn end_write(&mut self, session: SessionKey, id: u64, outcome: Result<()>) {
        let peer = self.peers.get_mut(&session);
        let Some(Write { transfer, caller }) = peer.and_then(|peer| peer.writes.remove(&id)) else {
            return;
        };
        self.write_deadlines.cancel((session, id));
        let (num_bytes, was_late) = (transfer.pieces.num_bytes, caller.completer.is_completed());
        self.end_transfer(transfer.region, &transfer.pieces.from_ids, was_late);
        if !was_late {
            let moved = outcome.is_ok().then_some(num_bytes);
            self.count(&transfer.peer, |counters| counters.end_write(moved));
        }
        caller.completer.complete(outcome.map(|()| num_bytes));
    }

    /// Fails writes to a peer that it has not been offered.
    pub(super) fn withdraw_writes(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        is_affected: impl Fn(&BlockTransfer) -> bool,
        error: &Error,
    ) {
        let Some(peer) = self.peers.get(&session) else {
            return;
        };
        let writes = peer.writes.iter();
        let affected = writes
            .filter(|(id, write)| is_affected(&write.transfer) && !peer.offers_sent.contains(id));
        for id in affected.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.withdraw_write(cx, session, id, error);
        }
    }

    fn withdraw_write(&mut self, cx: &mut Cx<'_>, session: SessionKey, id: u64, error: &Error) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        peer.writes_ready.retain(|ready| *ready != id);
        let write = peer.writes.get_mut(&id);
        if let Some(notify) = write.and_then(|write| write.caller.notify.take()) {
            notify.transfer_ended(cx.links, session, false);
        }
        self.end_write(session, id, Err(error.clone()));
    }

    /// The peer is lost: ends all writes to it.
    pub(super) fn end_writes(&mut self, session: SessionKey, error: &Error) {
        let peer = self.peers.get(&session);
        let writes = peer.map(|peer| peer.writes.keys().copied().collect::<Vec<_>>());
        for id in writes.unwrap_or_default() {
            self.end_write(session, id, Err(error.clone()));
        }
    }

    /// Fails writes that are late.
    pub(super) fn expire_writes(&mut self, cx: &mut Cx<'_>) {
        while let Some((session, id)) = self.write_deadlines.pop_expired(cx.links.now()) {
            self.fail_late_write(cx, session, id);
        }
    }

    /// A write that was offered fails at once, and is over when the target has answered: it may be reading until then.
    fn fail_late_write(&mut self, cx: &mut Cx<'_>, session: SessionKey, id: u64) {
        let Some(peer) = self.peers.get(&session) else {
            return;
        };
        if !peer.offers_sent.contains(&id) {
            let text = "the write did not begin in time; the peer is usable";
            return self.withdraw_write(cx, session, id, &Error::Timeout(text.to_owned()));
        }
        let Some(write) = peer.writes.get(&id) else {
            return;
        };
        let text = "the peer did not read the blocks in time; it may read them until the work is settled; the peer is \
                    usable";
        self.count(&write.transfer.peer, |counters| counters.end_write(None));
        let error = Error::Timeout(text.to_owned());
        write.caller.completer.complete_unsettled(Err(error));
        let (region, pieces) = (write.transfer.region, Arc::clone(&write.transfer.pieces));
        if let Some(region) = self.local_region_mut(region) {
            region.set_busy(&pieces.from_ids);
        }
        AgentMessage::Withdraw { offer: id }.send(cx.links, session);
    }
}

/// At the target.
impl AgentCore {
    pub(super) fn offered(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        offer: Offer<'static>,
    ) -> Result<()> {
        let Some(peer) = self.peers.get_mut(&session) else {
            return Ok(());
        };
        if peer.offers_here.len() >= OFFERS_IN_FLIGHT {
            return Err(Error::protocol(format_args!(
                "more than {OFFERS_IN_FLIGHT} offers at once"
            )));
        }
        if peer.offers_here.insert(offer.id, None).is_some() {
            let text = format_args!("offer {} was made twice", offer.id);
            return Err(Error::protocol(text));
        }
        self.read_offered(cx, session, offer);
        Ok(())
    }

    /// Reads the blocks of an offer, or answers why not. An offer from a region that the peer has not described yet,
    /// which goes another way, waits for it.
    pub(super) fn read_offered(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        offer: Offer<'static>,
    ) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        if offer.from >= peer.next_region {
            return peer.offers_early.push(offer);
        }
        let transfer = self.plan_offered(session, &offer);
        let notification = offer.notification;
        let owner = ReadOwner::Offer {
            id: offer.id,
            notification: notification.map(|(number, tag)| (number, tag.into_owned())),
        };
        self.read(cx, session, transfer, owner);
    }

    /// The writer has withdrawn an offer. It may have been answered before.
    pub(super) fn withdraw_offered(&mut self, cx: &mut Cx<'_>, session: SessionKey, id: u64) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        let error = Error::Timeout("the writer withdrew it".to_owned());
        let early = peer.offers_early.iter().position(|offer| offer.id == id);
        if let Some(at) = early {
            let notification = peer.offers_early.remove(at).notification;
            let notification = notification.map(|(number, tag)| (number, tag.into_owned()));
            self.answer(cx, session, id, notification, Err(error));
        } else if let Some(Some(token)) = peer.offers_here.get(&id).copied() {
            self.fail_read(cx, token, &error);
        }
    }

    fn plan_offered(&self, session: SessionKey, offer: &Offer<'_>) -> Result<BlockTransfer> {
        let local = self.regions.get(&offer.to).ok_or_else(region_gone)?;
        if !local.is_writable {
            return Err(not_writable(&local.name));
        }
        let peer = self.peers.get(&session).ok_or_else(region_gone)?;
        let remote = peer.region(offer.from).ok_or_else(region_gone)?;
        let pieces = coalesce(
            (&local.layout, &offer.to_ids),
            (&remote.layout, &offer.from_ids),
        )?;
        Ok(BlockTransfer {
            peer: peer.handle.clone(),
            region: offer.to,
            remote_region: offer.from,
            pieces: Arc::new(pieces),
            is_checksummed: offer.is_checksummed,
            deadline: None,
        })
    }

    /// Tells the writer how it went, and our user if it went well.
    pub(super) fn answer(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        offer: u64,
        notification: Option<(u64, Vec<u8>)>,
        outcome: Result<()>,
    ) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        peer.offers_here.remove(&offer);
        if let Some((number, tag)) = notification {
            let tag = outcome.is_ok().then_some(tag);
            if let Err(error) = self.arrive(session, number, tag) {
                return cx.links.fail(session, error);
            }
        }
        let answer = match outcome {
            Ok(()) => AgentMessage::Accepted { offer },
            Err(Error::Corrupt(reason)) => AgentMessage::Corrupt { offer, reason },
            Err(error) => AgentMessage::Declined {
                offer,
                reason: error.to_string(),
            },
        };
        answer.send(cx.links, session);
    }
}
