//! Notifications between this agent's users and its peers'.

use super::agent_core::AgentCore;
use super::inbox::Notification;
use super::messages::{NOTED, NOTIFY, VOID};
use super::notices::Notice;
use super::plan::peer_gone;
use super::reads::{Notify, Reader as BlockReader};
use crate::error::Result;
use crate::ids::SessionKey;
use crate::net::codec::Reader;
use crate::session::ReactorContext;
use crate::transport::Payload;
use crate::work::Completer;

/// The sender's side.
impl AgentCore {
    pub(super) fn notify_command(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        tag: Vec<u8>,
        completer: Completer<()>,
    ) {
        if self.peers.contains_key(&session) {
            self.notice(cx, session, Notice::Tag(tag, completer));
        } else {
            completer.complete(Err(peer_gone(cx, session)));
        }
    }

    /// Something wants a number.
    pub(super) fn notice(&mut self, cx: &mut ReactorContext, session: SessionKey, notice: Notice) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.outbox.push(notice);
        }
        self.send_notices(cx, session);
    }

    /// Gives numbers as far as the window has room.
    fn send_notices(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        loop {
            let peer = self.peers.get_mut(&session);
            match peer.and_then(|peer| peer.outbox.pop()) {
                None => return,
                Some((number, Notice::Transfer(id, _))) => self.numbered(cx, session, id, number),
                Some((number, Notice::Tag(tag, completer))) => {
                    let header = cx.header(session, NOTIFY).u64(number);
                    cx.message(session, header, Payload::Bytes(tag));
                    if let Some(peer) = self.peers.get_mut(&session) {
                        peer.outbox.sent(number, completer);
                    }
                }
            }
        }
    }

    /// A transfer has its number, and begins.
    fn numbered(&mut self, cx: &mut ReactorContext, session: SessionKey, id: u64, number: u64) {
        if let Some(offer) = self.offers.get_mut(&id) {
            if let Some(notify) = &mut offer.notify {
                notify.number = Some(number);
            }
            return self.offer_ready(cx, session, id);
        }
        if let Some(read) = self.reads.get_mut(&id)
            && let BlockReader::Caller(_, Some(notify)) = &mut read.reader
        {
            notify.number = Some(number);
            return self.engine.enqueue(cx, read.transfer);
        }
        self.void(cx, session, number);
    }

    /// A transfer of ours has ended, and the peer is waiting for its number if it has one.
    pub(super) fn tell(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        notify: Option<Notify>,
        is_ok: bool,
    ) {
        let Some(Notify {
            tag,
            number: Some(number),
        }) = notify
        else {
            return;
        };
        if !is_ok {
            return self.void(cx, session, number);
        }
        let header = cx.header(session, NOTIFY).u64(number);
        if self.peers.contains_key(&session) {
            cx.message(session, header, Payload::Bytes(tag));
        }
    }

    fn void(&mut self, cx: &mut ReactorContext, session: SessionKey, number: u64) {
        let header = cx.header(session, VOID).u64(number);
        if self.peers.contains_key(&session) {
            cx.message(session, header, Payload::None);
        }
    }
}

/// The receiver's side.
impl AgentCore {
    /// A number came, with a tag or as void.
    pub(super) fn arrive(
        &mut self,
        session: SessionKey,
        number: u64,
        tag: Option<Vec<u8>>,
    ) -> Result<()> {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.arrivals.arrive(number, tag)?;
            self.deliver(session);
        }
        Ok(())
    }

    /// Hands over what has come from a peer, as far as there is room.
    fn deliver(&mut self, session: SessionKey) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        let inbox = &self.shared.inbox;
        while inbox.has_room()
            && let Some((number, tag)) = peer.arrivals.pop()
        {
            let peer = peer.handle.clone();
            inbox.push(number, Notification { peer, tag });
        }
        self.to_note.insert(session);
    }

    /// Our user has drained notifications.
    pub(super) fn drained(&mut self, drained: Vec<(SessionKey, u64)>) {
        for (session, upto) in drained {
            if let Some(peer) = self.peers.get_mut(&session) {
                peer.arrivals.take(upto);
            }
        }
        // Also of the others: what they sent may have waited for room.
        for session in self.peers.keys().copied().collect::<Vec<_>>() {
            self.deliver(session);
        }
    }

    /// Tells peers what has come and what was taken of it, once a round.
    pub(super) fn note(&mut self, cx: &mut ReactorContext) {
        for session in std::mem::take(&mut self.to_note) {
            let peer = self.peers.get_mut(&session);
            if let Some((queued, taken)) = peer.and_then(|peer| peer.arrivals.note()) {
                let header = cx.header(session, NOTED).u64(queued).u64(taken);
                cx.message(session, header, Payload::None);
            }
        }
    }

    pub(super) fn notice_message(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        kind: u8,
        mut header: Reader<'_>,
        data: &[u8],
    ) -> Result<()> {
        let number = header.u64()?;
        if kind == NOTED {
            let taken = header.u64()?;
            header.end()?;
            if let Some(peer) = self.peers.get_mut(&session) {
                peer.outbox.noted(number, taken)?;
            }
            self.send_notices(cx, session);
            return Ok(());
        }
        header.end()?;
        let tag = (kind == NOTIFY).then(|| data.to_vec());
        self.arrive(session, number, tag)
    }
}
