//! Notifications between this agent's users and its peers'.

use super::inbox::Notification;
use super::messages::{NOTED, NOTIFY, VOID};
use super::notices::Notice;
use super::plan::peer_gone;
use super::service::Blocks;
use super::transfer::{Notify, Owner};
use crate::codec::Reader;
use crate::error::Result;
use crate::node::{Io, LinkId};
use crate::transport::Payload;
use crate::work::Completer;

/// The sender's side.
impl Blocks {
    pub(super) fn notify_command(
        &mut self,
        io: &mut Io,
        link: LinkId,
        tag: Vec<u8>,
        completer: Completer<()>,
    ) {
        if self.peers.contains_key(&link) {
            self.notice(io, link, Notice::Tag(tag, completer));
        } else {
            completer.complete(Err(peer_gone(io, link)));
        }
    }

    /// Something wants a number.
    pub(super) fn notice(&mut self, io: &mut Io, link: LinkId, notice: Notice) {
        if let Some(peer) = self.peers.get_mut(&link) {
            peer.outbox.push(notice);
        }
        self.send_notices(io, link);
    }

    /// Gives numbers as far as the window has room.
    fn send_notices(&mut self, io: &mut Io, link: LinkId) {
        loop {
            let peer = self.peers.get_mut(&link);
            match peer.and_then(|peer| peer.outbox.pop()) {
                None => return,
                Some((number, Notice::Transfer(id, _))) => self.numbered(io, link, id, number),
                Some((number, Notice::Tag(tag, completer))) => {
                    let header = io.header(link, NOTIFY).u64(number);
                    io.message(link, header, Payload::Bytes(tag));
                    if let Some(peer) = self.peers.get_mut(&link) {
                        peer.outbox.sent(number, completer);
                    }
                }
            }
        }
    }

    /// A transfer has its number, and begins.
    fn numbered(&mut self, io: &mut Io, link: LinkId, id: u64, number: u64) {
        if let Some(offer) = self.offers.get_mut(&id) {
            if let Some(notify) = &mut offer.notify {
                notify.number = Some(number);
            }
            return self.offer_ready(io, link, id);
        }
        let owner = self
            .transfers
            .get_mut(&id)
            .map(|transfer| &mut transfer.owner);
        if let Some(Owner::Caller(_, Some(notify))) = owner {
            notify.number = Some(number);
            return self.enqueue(io, link, id);
        }
        self.void(io, link, number);
    }

    /// A transfer of ours has ended, and the peer is waiting for its number if it has one.
    pub(super) fn tell(&mut self, io: &mut Io, link: LinkId, notify: Option<Notify>, is_ok: bool) {
        let Some(Notify {
            tag,
            number: Some(number),
        }) = notify
        else {
            return;
        };
        if !is_ok {
            return self.void(io, link, number);
        }
        let header = io.header(link, NOTIFY).u64(number);
        if self.peers.contains_key(&link) {
            io.message(link, header, Payload::Bytes(tag));
        }
    }

    fn void(&mut self, io: &mut Io, link: LinkId, number: u64) {
        let header = io.header(link, VOID).u64(number);
        if self.peers.contains_key(&link) {
            io.message(link, header, Payload::None);
        }
    }
}

/// The receiver's side.
impl Blocks {
    /// A number came, with a tag or as void.
    pub(super) fn arrive(&mut self, link: LinkId, number: u64, tag: Option<Vec<u8>>) -> Result<()> {
        if let Some(peer) = self.peers.get_mut(&link) {
            peer.arrivals.arrive(number, tag)?;
            self.deliver(link);
        }
        Ok(())
    }

    /// Hands over what has come from a peer, as far as there is room.
    fn deliver(&mut self, link: LinkId) {
        let Some(peer) = self.peers.get_mut(&link) else {
            return;
        };
        let inbox = &self.board.inbox;
        while inbox.has_room()
            && let Some((number, tag)) = peer.arrivals.pop()
        {
            let peer = peer.handle.clone();
            inbox.push(number, Notification { peer, tag });
        }
        self.to_note.insert(link);
    }

    /// Our user has taken notifications.
    pub(super) fn taken(&mut self, taken: Vec<(LinkId, u64)>) {
        for (link, upto) in taken {
            if let Some(peer) = self.peers.get_mut(&link) {
                peer.arrivals.take(upto);
            }
        }
        // Also of the others: what they sent may have waited for room.
        for link in self.peers.keys().copied().collect::<Vec<_>>() {
            self.deliver(link);
        }
    }

    /// Tells peers what has come and what was taken of it, once a round.
    pub(super) fn note(&mut self, io: &mut Io) {
        for link in std::mem::take(&mut self.to_note) {
            let peer = self.peers.get_mut(&link);
            if let Some((queued, taken)) = peer.and_then(|peer| peer.arrivals.note()) {
                let header = io.header(link, NOTED).u64(queued).u64(taken);
                io.message(link, header, Payload::None);
            }
        }
    }

    pub(super) fn notice_message(
        &mut self,
        io: &mut Io,
        link: LinkId,
        kind: u8,
        mut header: Reader<'_>,
        data: &[u8],
    ) -> Result<()> {
        let number = header.u64()?;
        if kind == NOTED {
            let taken = header.u64()?;
            header.end()?;
            if let Some(peer) = self.peers.get_mut(&link) {
                peer.outbox.noted(number, taken)?;
            }
            self.send_notices(io, link);
            return Ok(());
        }
        header.end()?;
        let tag = (kind == NOTIFY).then(|| data.to_vec());
        self.arrive(link, number, tag)
    }
}
