//! Notifications between this agent's users and its peers'.

use super::agent_core::AgentCore;
use super::inbox::{Drained, Notification};
use super::messages::AgentMessage;
use super::notices::Notice;
use super::plan::peer_gone;
use crate::error::Result;
use crate::ids::SessionKey;
use crate::session::Links;
use crate::transfer::Cx;
use crate::work::Completer;

/// The sender's side.
impl AgentCore {
    /// Gives a number to a notice when the window has room. The completer is of a tag of its own.
    pub(super) fn notice(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        notice: Notice,
        completer: Option<Completer<()>>,
    ) {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.outbox.push(notice, completer);
        } else if let Some(completer) = completer {
            completer.complete(Err(peer_gone(cx.links, session)));
        }
        self.send_notices(cx, session);
    }

    /// Gives numbers as far as the window has room.
    fn send_notices(&mut self, cx: &mut Cx<'_>, session: SessionKey) {
        while let Some(peer) = self.peers.get_mut(&session)
            && let Some((number, notice)) = peer.outbox.pop()
        {
            match notice {
                Notice::Transfer(id, _) => self.numbered(cx, session, id, number),
                Notice::Tag(tag) => AgentMessage::Notify { number, tag }.send(cx.links, session),
            }
        }
    }

    /// A transfer has its number, and begins.
    fn numbered(&mut self, cx: &mut Cx<'_>, session: SessionKey, id: u64, number: u64) {
        if self.write_numbered(cx, session, id, number) {
            return;
        }
        if !self.read_numbered(cx, id, number) {
            AgentMessage::Void { number }.send(cx.links, session);
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
        while inbox.has_room() {
            let Some((number, tag)) = peer.arrivals.pop() else {
                self.to_note.insert(session);
                return;
            };
            let peer = peer.handle.clone();
            inbox.push(number, Notification { peer, tag });
        }
        self.to_note.insert(session);
        self.undelivered.insert(session);
    }

    /// Our user has drained notifications.
    pub(super) fn drained(&mut self, drained: Vec<Drained>) {
        for (session, upto) in drained {
            if let Some(peer) = self.peers.get_mut(&session) {
                peer.arrivals.drain(upto);
                self.to_note.insert(session);
            }
        }
        for session in std::mem::take(&mut self.undelivered) {
            self.deliver(session);
        }
    }

    /// Tells peers what has come and what was drained of it, once a round.
    pub(super) fn note(&mut self, links: &mut Links) {
        for session in std::mem::take(&mut self.to_note) {
            let peer = self.peers.get_mut(&session);
            if let Some((received, drained)) = peer.and_then(|peer| peer.arrivals.note()) {
                AgentMessage::Noted { received, drained }.send(links, session);
            }
        }
    }

    /// The peer tells what has come and what was drained of it.
    pub(super) fn noted(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        received: u64,
        drained: u64,
    ) -> Result<()> {
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.outbox.noted(received, drained)?;
        }
        self.send_notices(cx, session);
        Ok(())
    }
}
