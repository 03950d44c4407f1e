//! Writes. Whoever owns the destination decides what is written into it: a write is an offer, which the target checks
//! and takes by its own data path, and answers.

use std::sync::Arc;
use std::time::Instant;

use super::agent_core::AgentCore;
use super::messages::{ACCEPTED, CORRUPT, DECLINED, OFFER, Offered, reason};
use super::notices::Notice;
use super::peer::{Counters, Peer};
use super::plan::{not_writable, peer_gone, region_gone};
use super::reads::{BlockRead, Notify, ReadOwner};
use crate::error::{Error, Result};
use crate::ids::RegionId;
use crate::ids::SessionKey;
use crate::net::codec::{Reader, Writer};
use crate::session::ReactorContext;
use crate::transfer::message::REASON_CAP;
use crate::transfer::region::{Pieces, coalesce};
use crate::transport::Payload;
use crate::work::Completer;

/// Offers to one peer that it has not answered; more wait. One that is taken and one that follows keep it busy.
const OFFERS_IN_FLIGHT: usize = 8;

/// A write, at the writer.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) session: SessionKey,
    pub(super) peer: Peer,
    /// Our region, the source.
    pub(super) region: RegionId,
    /// The peer's, the destination.
    pub(super) remote_region: RegionId,
    pub(super) pieces: Arc<Pieces>,
    pub(super) is_checksummed: bool,
    pub(super) notify: Option<Notify>,
    pub(super) deadline: Option<Instant>,
    pub(super) completer: Completer<u64>,
    pub(super) is_sent: bool,
}

/// At the writer.
impl AgentCore {
    pub(super) fn write_command(&mut self, cx: &mut ReactorContext, offer: Offer) {
        let session = offer.session;
        let peer = self.peers.get(&session);
        let target = peer.and_then(|peer| peer.regions.as_ref()?.get(&offer.remote_region));
        if target.is_none() || !self.regions.contains_key(&offer.region) {
            let gone = match peer {
                Some(_) => region_gone(),
                None => peer_gone(cx, session),
            };
            return offer.completer.complete(Err(gone));
        }
        self.count(&offer.peer, Counters::begin);
        let id = cx.token();
        let tag_len = offer.notify.as_ref().map(|notify| notify.tag.len());
        self.deadlines.add(offer.deadline);
        self.offers.insert(id, offer);
        if let Some(len) = tag_len {
            self.notice(cx, session, Notice::Transfer(id, len));
        } else {
            self.offer_ready(cx, session, id);
        }
    }

    /// Nothing but its turn is to be waited for.
    pub(super) fn offer_ready(&mut self, cx: &mut ReactorContext, session: SessionKey, id: u64) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.offers_ready.push_back(id);
        }
        self.send_offers(cx, session);
    }

    fn send_offers(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        while peer.num_offers_sent < OFFERS_IN_FLIGHT {
            let Some(id) = peer.offers_ready.pop_front() else {
                return;
            };
            let Some(offer) = self.offers.get_mut(&id) else {
                continue;
            };
            let names = (id, offer.remote_region, offer.region);
            let notice = offer.notify.as_ref();
            let notice = notice.and_then(|notify| Some((notify.number?, &notify.tag[..])));
            let header = cx.header(session, OFFER);
            let (header, payload) =
                Offered::write(header, names, &offer.pieces, offer.is_checksummed, notice);
            offer.is_sent = true;
            peer.num_offers_sent += 1;
            cx.message(session, header, Payload::Bytes(payload));
        }
    }

    /// The target's answer.
    fn answered(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        id: u64,
        outcome: Result<()>,
    ) -> Result<()> {
        let is_theirs = |offer: &Offer| offer.session == session && offer.is_sent;
        if !self.offers.get(&id).is_some_and(is_theirs) {
            let text = format_args!("an answer to offer {id}, which was not made");
            return Err(Error::protocol(text));
        }
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.num_offers_sent -= 1;
        }
        self.end_offer(id, outcome);
        self.send_offers(cx, session);
        Ok(())
    }

    fn end_offer(&mut self, id: u64, outcome: Result<()>) {
        let Some(offer) = self.offers.remove(&id) else {
            return;
        };
        let num_bytes = offer.pieces.num_bytes;
        let moved = outcome.is_ok().then_some(num_bytes);
        self.count(&offer.peer, |counters| counters.end_write(moved));
        offer.completer.complete(outcome.map(|()| num_bytes));
    }

    /// Fails offers that the target has not heard of.
    pub(super) fn withdraw_offers(
        &mut self,
        cx: &mut ReactorContext,
        is_affected: impl Fn(&Offer) -> bool,
        error: &Error,
    ) {
        let affected = self.offers.iter();
        let affected = affected.filter(|(_, offer)| !offer.is_sent && is_affected(offer));
        let affected: Vec<u64> = affected.map(|(id, _)| *id).collect();
        for id in affected {
            self.withdraw_offer(cx, id, error);
        }
    }

    fn withdraw_offer(&mut self, cx: &mut ReactorContext, id: u64, error: &Error) {
        if let Some(offer) = self.offers.get_mut(&id) {
            let (session, notify) = (offer.session, offer.notify.take());
            self.tell(cx, session, notify, false);
        }
        self.end_offer(id, Err(error.clone()));
    }

    pub(super) fn offers_down(&mut self, session: SessionKey, error: &Error) {
        let of_session = self
            .offers
            .iter()
            .filter(|(_, offer)| offer.session == session);
        let of_session: Vec<u64> = of_session.map(|(id, _)| *id).collect();
        for id in of_session {
            self.end_offer(id, Err(error.clone()));
        }
    }

    pub(super) fn expire_offers(&mut self, cx: &mut ReactorContext) {
        let (mut late, now) = (Vec::new(), cx.now());
        if !self.deadlines.take_if_past(now) {
            return;
        }
        for (&id, offer) in &self.offers {
            if offer.deadline.is_some_and(|deadline| deadline <= now) {
                late.push((id, offer.session, offer.is_sent));
            } else {
                self.deadlines.add(offer.deadline);
            }
        }
        for (id, session, is_sent) in late {
            if is_sent {
                let text = "the blocks were not taken in time; the peer is closed, connect again";
                let error = Error::Timeout(text.to_owned());
                if let Some(peer) = self.peers.get(&session) {
                    peer.handle.lose(&error);
                }
                // The peer may be reading: the offer ends with the session, after it.
                if !cx.has_failed(session) {
                    cx.fail(session, error);
                }
            } else {
                let text = "the write did not begin in time; the peer is usable";
                self.withdraw_offer(cx, id, &Error::Timeout(text.to_owned()));
            }
        }
    }
}

/// At the target.
impl AgentCore {
    fn offered(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        offered: Offered,
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
        self.accept_offer(cx, session, offered);
        Ok(())
    }

    /// Takes the blocks of an offer, or answers why not. An offer from a region that the peer has not told us of yet,
    /// which goes another way, waits for it.
    pub(super) fn accept_offer(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        offered: Offered,
    ) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        if offered.from >= peer.next_region {
            return peer.offers_early.push(offered);
        }
        match self.check_offer(session, &offered) {
            Ok(pieces) => {
                let read = BlockRead {
                    session,
                    region: offered.to,
                    remote_region: offered.from,
                    pieces: Arc::new(pieces),
                    is_checksummed: offered.is_checksummed,
                    is_retry: false,
                    deadline: None,
                    owner: ReadOwner::Offer {
                        offer: offered.offer,
                        notice: offered.notice,
                    },
                };
                self.read(cx, read);
            }
            Err(error) => self.answer(cx, session, (offered.offer, offered.notice), Err(error)),
        }
    }

    fn check_offer(&self, session: SessionKey, offered: &Offered) -> Result<Pieces> {
        let local = self.regions.get(&offered.to).ok_or_else(region_gone)?;
        if !local.is_writable {
            return Err(not_writable(&local.name));
        }
        let peer = self.peers.get(&session);
        let remote = peer.and_then(|peer| peer.regions.as_ref()?.get(&offered.from));
        let remote = remote.ok_or_else(region_gone)?;
        coalesce(
            (&local.layout, &offered.to_ids),
            (&remote.layout, &offered.from_ids),
        )
    }

    /// Tells the writer how it went, and our user if it went well.
    pub(super) fn answer(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        (offer, notice): (u64, Option<(u64, Vec<u8>)>),
        outcome: Result<()>,
    ) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        peer.num_offers_here -= 1;
        if let Some((number, tag)) = notice {
            let tag = outcome.is_ok().then_some(tag);
            if let Err(error) = self.arrive(session, number, tag) {
                return cx.fail(session, error);
            }
        }
        let (kind, payload) = match outcome {
            Ok(()) => (ACCEPTED, Payload::None),
            Err(error) => {
                let text = Writer::default().text(&error.to_string(), REASON_CAP);
                let is_corrupt = matches!(error, Error::Corrupt(_));
                let kind = if is_corrupt { CORRUPT } else { DECLINED };
                (kind, Payload::Bytes(text.finish()))
            }
        };
        let header = cx.header(session, kind).u64(offer);
        cx.message(session, header, payload);
    }
}

impl AgentCore {
    pub(super) fn offer_message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        kind: u8,
        mut header: Reader<'_>,
        data: &[u8],
    ) -> Result<()> {
        if kind == OFFER {
            return self.offered(cx, session, Offered::read(header, data)?);
        }
        let id = header.u64()?;
        header.end()?;
        let outcome = match kind {
            ACCEPTED => Ok(()),
            CORRUPT => Err(Error::Corrupt(reason(data)?)),
            _ => {
                let text = reason(data)?;
                let text = format!("the peer did not take the blocks: {text}");
                Err(Error::Config(text))
            }
        };
        self.answered(cx, session, id, outcome)
    }
}
