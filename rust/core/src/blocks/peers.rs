//! The sessions of an agent: its connected peers, and the waits for them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use super::agent_core::AgentCore;
use super::messages::Offer;
use super::notices::{Arrivals, NoticeOutbox};
use super::offers::Write;
use super::peer::{Counters, Peer, Regions, SessionTransport};
use crate::error::Error;
use crate::ids::{Incarnation, RegionId, SessionKey};
use crate::net::identity::Identity;
use crate::session::Links;
use crate::transfer::Cx;
use crate::transfer::region::RemoteRegion;
use crate::work::Completer;

/// A peer as the agent's thread knows it.
pub(crate) struct PeerState {
    pub(crate) handle: Peer,
    /// By ascending ids, once it has described them.
    pub(crate) regions: Option<Regions>,
    /// Above the id of every region that it has described.
    pub(super) next_region: RegionId,
    /// Its answers to requests to divide its blocks, by the number of slices.
    pub(super) divisions: BTreeMap<u32, Option<Result<(), String>>>,
    /// Callers that wait for it, each with the incarnation that it wants.
    waiting: Vec<(Option<Incarnation>, Completer<Peer>)>,
    /// Our writes, by id.
    pub(super) writes: HashMap<u64, Write>,
    /// Those that it is to be offered.
    pub(super) writes_ready: VecDeque<u64>,
    /// Those that it was offered and has not answered.
    pub(super) offers_sent: Vec<u64>,
    /// Its offers that we have not answered, each with the token of its read once that has begun.
    pub(super) offers_here: HashMap<u64, Option<u64>>,
    /// Of them, those from regions that it has not described yet.
    pub(super) offers_early: Vec<Offer<'static>>,
    pub(super) outbox: NoticeOutbox,
    pub(super) arrivals: Arrivals,
}

impl PeerState {
    fn new(handle: Peer) -> Self {
        Self {
            handle,
            regions: None,
            next_region: 0,
            divisions: BTreeMap::new(),
            waiting: Vec::new(),
            writes: HashMap::new(),
            writes_ready: VecDeque::new(),
            offers_sent: Vec::new(),
            offers_here: HashMap::new(),
            offers_early: Vec::new(),
            outbox: NoticeOutbox::default(),
            arrivals: Arrivals::default(),
        }
    }

    /// Size of its queues together.
    #[cfg(test)]
    pub(super) fn num_queued(&self) -> usize {
        self.waiting.len()
            + self.writes_ready.len()
            + self.offers_sent.len()
            + self.offers_early.len()
    }

    /// A region that it has described and not closed.
    pub(crate) fn region(&self, id: RegionId) -> Option<&Arc<RemoteRegion>> {
        let regions = self.regions.as_ref()?;
        let index = regions.binary_search_by_key(&id, |region| region.id);
        regions.get(index.ok()?)
    }
}

impl AgentCore {
    pub(super) fn connect(
        &mut self,
        links: &mut Links,
        address: &str,
        incarnation: Option<Incarnation>,
        completer: Completer<Peer>,
    ) {
        let session = self.session_to(links, address);
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.waiting.push((incarnation, completer));
        }
        self.tell_waiting(session);
    }

    /// The session to an address: the one there is, or a new one. One whose loss its users know of already is
    /// not there any more, although its end is still to be reported.
    pub(crate) fn session_to(&mut self, links: &mut Links, address: &str) -> SessionKey {
        let known = self.by_address.get(address);
        if let Some(&session) = known.filter(|session| !self.is_lost(links, **session)) {
            return session;
        }
        let session = links.connect(address);
        self.by_address.insert(address.to_owned(), session);
        let handle = Peer::new(session, address, links.identity().incarnation);
        self.peers.insert(session, PeerState::new(handle));
        session
    }

    /// True if a session has ended, be its end reported or not.
    pub(crate) fn is_lost(&self, links: &Links, session: SessionKey) -> bool {
        let peer = self.peers.get(&session);
        links.has_failed(session) || peer.is_none_or(|peer| peer.handle.lost().is_some())
    }

    /// Hands out a peer whose regions are known.
    fn tell_waiting(&mut self, session: SessionKey) {
        let peer = self.peers.get_mut(&session);
        let Some(peer) = peer.filter(|peer| peer.regions.is_some()) else {
            return;
        };
        for (wanted, completer) in std::mem::take(&mut peer.waiting) {
            let is_it = wanted.is_none_or(|wanted| wanted == peer.handle.incarnation());
            completer.complete(if is_it {
                Ok(peer.handle.clone())
            } else {
                let address = peer.handle.address();
                Err(Error::Connect(format!(
                    "the agent at {address} is not the one of this metadata, it has been restarted; get its metadata again"
                )))
            });
        }
    }

    /// Resumes connects and offers that wait for a peer's regions.
    pub(super) fn regions_known(&mut self, cx: &mut Cx<'_>, session: SessionKey) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        let early = std::mem::take(&mut peer.offers_early);
        self.shared.peers().insert(session, peer.handle.clone());
        self.tell_waiting(session);
        for offer in early {
            self.read_offered(cx, session, offer);
        }
    }

    pub(crate) fn session_up(
        &mut self,
        links: &mut Links,
        session: SessionKey,
        identity: &Identity,
    ) {
        let (address, ours) = (links.peer(session), links.identity().incarnation);
        let peer = self
            .peers
            .entry(session)
            .or_insert_with(|| PeerState::new(Peer::new(session, &address, ours)));
        let transport = transport(links, session);
        peer.handle
            .set_identity(identity.incarnation, transport.clone());
        if peer.regions.is_none() {
            let by = links.now() + links.timeouts().handshake;
            self.described_by.set(session, by);
        }
        let ucx = links.ucx();
        self.logs.push(format!(
            "session.open peer={address} transport={} ucx={ucx}",
            transport.name
        ));
        if let Some(text) = links.advice(session) {
            self.logs
                .push(format!("session.slow peer={address} {text}"));
        }
        links.send(session, &self.describe_regions());
    }

    pub(crate) fn data_path_changed(&self, links: &Links, session: SessionKey) {
        if let Some(peer) = self.peers.get(&session) {
            peer.handle.set_transport(transport(links, session));
        }
    }

    /// Gives up peers that do not describe their regions in time.
    pub(super) fn expire_peers(&mut self, links: &mut Links) {
        while let Some(session) = self.described_by.pop_expired(links.now()) {
            let waited = links.timeouts().handshake;
            let text = format!("it did not describe its regions within {waited:?}");
            links.fail(session, Error::lost(&links.peer(session), text));
        }
    }

    pub(super) fn peer_down(&mut self, session: SessionKey, error: &Error) {
        self.described_by.cancel(session);
        self.undelivered.remove(&session);
        let Some(peer) = self.peers.get(&session) else {
            return;
        };
        // Before the works of the session end: a caller that sees one of them fail sees the loss too.
        peer.handle.lose(error);
        self.end_writes(session, error);
        let Some(peer) = self.peers.remove(&session) else {
            return;
        };
        let address = peer.handle.address();
        if self.by_address.get(address) == Some(&session) {
            self.by_address.remove(address);
        }
        self.shared.peers().remove(&session);
        for (_, completer) in peer.waiting {
            completer.complete(Err(error.clone()));
        }
        peer.outbox.fail(error);
    }

    /// Counts for the peer and for the agent.
    pub(super) fn count(&self, peer: &Peer, count: impl Fn(&Counters)) {
        count(&self.shared.counters);
        count(peer.counters());
    }
}

pub(crate) fn transport(links: &Links, session: SessionKey) -> SessionTransport {
    SessionTransport {
        name: links.shown_transport(session).unwrap_or_default(),
        reason: links.slow_reason(session).unwrap_or_default(),
    }
}
