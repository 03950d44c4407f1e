//! Writes. Whoever owns the destination decides what is written into it: a write is an offer of blocks, which the target
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
use crate::session::ReactorContext;
use crate::transfer::region::coalesce;

/// Offers to one peer that it has not answered; more wait. One that is read and one that follows keep it busy.
const OFFERS_IN_FLIGHT: usize = 8;

/// A write, at the writer.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) transfer: BlockTransfer,
    pub(super) caller: Caller,
}

/// At the writer.
impl AgentCore {
    pub(super) fn write_command(&mut self, cx: &mut ReactorContext, write: Write) {
        if let Err(error) = self.check_regions(cx, &write.transfer) {
            return write.caller.completer.complete(Err(error));
        }
        let session = write.transfer.peer.session();
        self.count(&write.transfer.peer, Counters::begin);
        let id = cx.token();
        let tag_len = write.caller.tag_len();
        self.deadlines.add(write.transfer.deadline);
        self.writes.insert(id, write);
        match tag_len {
            Some(len) => self.notice(cx, session, Notice::Transfer(id, len), None),
            None => self.write_ready(cx, session, id),
        }
    }

    /// A write has its number if it needs one, and is offered when it is its turn.
    pub(super) fn write_ready(&mut self, cx: &mut ReactorContext, session: SessionKey, id: u64) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.writes_ready.push_back(id);
        }
        self.send_offers(cx, session);
    }

    fn send_offers(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        while peer.offers_sent.len() < OFFERS_IN_FLIGHT {
            let Some(id) = peer.writes_ready.pop_front() else {
                return;
            };
            let Some(write) = self.writes.get(&id) else {
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
            AgentMessage::Offer(offer).send(cx, session);
            peer.offers_sent.push(id);
        }
    }

    /// The target's answer.
    pub(super) fn answered(
        &mut self,
        cx: &mut ReactorContext,
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
        self.end_write(id, outcome);
        self.send_offers(cx, session);
        Ok(())
    }

    fn end_write(&mut self, id: u64, outcome: Result<()>) {
        let Some(write) = self.writes.remove(&id) else {
            return;
        };
        let num_bytes = write.transfer.pieces.num_bytes;
        let moved = outcome.is_ok().then_some(num_bytes);
        self.count(&write.transfer.peer, |counters| counters.end_write(moved));
        let outcome = outcome.map(|()| num_bytes);
        write.caller.completer.complete(outcome);
    }

    fn is_offered(&self, id: u64, write: &Write) -> bool {
        let peer = self.peers.get(&write.transfer.peer.session());
        peer.is_some_and(|peer| peer.offers_sent.contains(&id))
    }

    /// Fails writes that the target has not been offered.
    pub(super) fn withdraw_writes(
        &mut self,
        cx: &mut ReactorContext,
        is_affected: impl Fn(&BlockTransfer) -> bool,
        error: &Error,
    ) {
        let writes = self.writes.iter();
        let affected = writes
            .filter(|(id, write)| is_affected(&write.transfer) && !self.is_offered(**id, write));
        for id in affected.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.withdraw_write(cx, id, error);
        }
    }

    fn withdraw_write(&mut self, cx: &mut ReactorContext, id: u64, error: &Error) {
        if let Some(write) = self.writes.get_mut(&id)
            && let Some(notify) = write.caller.notify.take()
        {
            notify.transfer_ended(cx, write.transfer.peer.session(), false);
        }
        self.end_write(id, Err(error.clone()));
    }

    pub(super) fn writes_down(&mut self, session: SessionKey, error: &Error) {
        let writes = self.writes.iter();
        let of_session = writes.filter(|(_, write)| write.transfer.peer.session() == session);
        for id in of_session.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.end_write(id, Err(error.clone()));
        }
    }

    pub(super) fn expire_writes(&mut self, cx: &mut ReactorContext) {
        let (mut late, now) = (Vec::new(), cx.now());
        if !self.deadlines.take_if_past(now) {
            return;
        }
        for (&id, write) in &self.writes {
            let deadline = write.transfer.deadline;
            if deadline.is_some_and(|deadline| deadline <= now) {
                let peer = write.transfer.peer.clone();
                late.push((id, peer, self.is_offered(id, write)));
            } else {
                self.deadlines.add(deadline);
            }
        }
        for (id, peer, is_offered) in late {
            if is_offered {
                let text = "the peer did not read the blocks in time; it is closed, connect again";
                let error = Error::Timeout(text.to_owned());
                peer.lose(&error);
                // The peer may be reading: the write ends with the session, after it.
                if !cx.has_failed(peer.session()) {
                    cx.fail(peer.session(), error);
                }
            } else {
                let text = "the write did not begin in time; the peer is usable";
                self.withdraw_write(cx, id, &Error::Timeout(text.to_owned()));
            }
        }
    }
}

/// At the target.
impl AgentCore {
    pub(super) fn offered(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        offer: Offer<'static>,
    ) -> Result<()> {
        let Some(peer) = self.peers.get_mut(&session) else {
            return Ok(());
        };
        if peer.num_offers_here >= OFFERS_IN_FLIGHT {
            return Err(Error::protocol(format_args!(
                "more than {OFFERS_IN_FLIGHT} offers at once"
            )));
        }
        peer.num_offers_here += 1;
        self.read_offered(cx, session, offer);
        Ok(())
    }

    /// Reads the blocks of an offer, or answers why not. An offer from a region that the peer has not described yet,
    /// which goes another way, waits for it.
    pub(super) fn read_offered(
        &mut self,
        cx: &mut ReactorContext,
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
        cx: &mut ReactorContext,
        session: SessionKey,
        offer: u64,
        notification: Option<(u64, Vec<u8>)>,
        outcome: Result<()>,
    ) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        peer.num_offers_here -= 1;
        if let Some((number, tag)) = notification {
            let tag = outcome.is_ok().then_some(tag);
            if let Err(error) = self.arrive(session, number, tag) {
                return cx.fail(session, error);
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
        answer.send(cx, session);
    }
}
