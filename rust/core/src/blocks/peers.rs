//! The sessions of an agent: who is connected, and what waits for whom.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::PoisonError;
use std::time::Instant;

use kvpipe_ucx::{MemoryKind, ProcessVmReader};

use super::Event;
use super::messages::Offered;
use super::notices::{Arrivals, Outbox};
use super::peer::{Counters, Peer};
use super::service::Blocks;
use super::transfer::Transfer;
use crate::error::{Error, Result};
use crate::net::identity::{Identity, Incarnation};
use crate::reactor::{ReactorContext, SessionKey};
use crate::transfer::advice::advice;
use crate::transfer::data_path::is_read;
use crate::transfer::region::{RegionId, RemoteRegion};
use crate::transport::RemoteKey;
use crate::work::Completer;

/// A peer as the agent's thread knows it.
pub(super) struct PeerState {
    pub(super) handle: Peer,
    pub(super) regions: Option<BTreeMap<RegionId, RemoteRegion>>,
    /// Above every region that it has told of.
    pub(super) next_region: RegionId,
    /// When its regions have to be here, from the moment the session is established.
    pub(super) regions_by: Option<Instant>,
    /// By region, and by what they read into.
    keys: HashMap<(RegionId, MemoryKind), Rc<RemoteKey>>,
    /// Who wants to know of it, and in which life.
    waiting: Vec<(Option<Incarnation>, Completer<Peer>)>,
    /// Transfers from it that are not over, in the order in which they may begin.
    pub(super) transfers: VecDeque<u64>,
    /// It runs on this machine and its memory can be read.
    pub(super) process_vm: Option<Rc<ProcessVmReader>>,
    /// It has said where its memory can be read.
    pub(super) has_process_vm_frame: bool,
    /// Remote read.
    pub(super) bytes_in_flight: u64,
    /// Gets under way, and how many may be.
    pub(super) gets_in_flight: usize,
    pub(super) gets_cap: usize,
    /// Our offers to it that wait.
    pub(super) offers_ready: VecDeque<u64>,
    /// Our offers that it has not answered.
    pub(super) num_offers_sent: usize,
    /// Its offers that we have not answered.
    pub(super) num_offers_here: usize,
    /// Of them, those from regions that it has not told of yet.
    pub(super) offers_early: Vec<Offered>,
    pub(super) outbox: Outbox,
    pub(super) arrivals: Arrivals,
}

impl PeerState {
    fn new(handle: Peer) -> Self {
        Self {
            handle,
            regions: None,
            next_region: 0,
            regions_by: None,
            keys: HashMap::new(),
            waiting: Vec::new(),
            transfers: VecDeque::new(),
            process_vm: None,
            has_process_vm_frame: false,
            bytes_in_flight: 0,
            gets_in_flight: 0,
            gets_cap: usize::MAX,
            offers_ready: VecDeque::new(),
            num_offers_sent: 0,
            num_offers_here: 0,
            offers_early: Vec::new(),
            outbox: Outbox::default(),
            arrivals: Arrivals::default(),
        }
    }

    /// Where to read a transfer from, and the key to it, unless it is to come as messages.
    pub(super) fn source(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        transfer: &Transfer,
    ) -> Result<Option<(u64, Rc<RemoteKey>)>> {
        if transfer.is_by_messages() {
            return Ok(None);
        }
        let (region, to) = (transfer.remote_region, transfer.memory.buffer().kind());
        let (is_cuda, data_path) = (self.is_cuda(region), cx.data_path(session));
        let mut source = None;
        if is_cuda && to != MemoryKind::Host {
            // A key that cannot be used here is no fault of the peer's: CUDA opens not all memory everywhere.
            source = self.remote(cx, session, region, to).ok();
        }
        let reaches = || {
            let source = source.as_ref();
            source.is_some_and(|(base, key)| cx.reaches(session, &transfer.memory, (*base, key)))
        };
        if !is_read(data_path.as_ref(), is_cuda, to, reaches) {
            return Ok(None);
        }
        source.map_or_else(
            || self.remote(cx, session, region, to).map(Some),
            |source| Ok(Some(source)),
        )
    }

    /// Whether a region is a GPU's.
    pub(super) fn is_cuda(&self, region: RegionId) -> bool {
        let described = self.regions.as_ref().and_then(|all| all.get(&region));
        described.is_some_and(RemoteRegion::is_cuda)
    }

    /// Base address of a region, and its key for reads into memory of kind `to`.
    fn remote(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        region: RegionId,
        to: MemoryKind,
    ) -> Result<(u64, Rc<RemoteKey>)> {
        let regions = self.regions.as_ref();
        let described = regions
            .and_then(|all| all.get(&region))
            .ok_or_else(super::plan::region_gone)?;
        if let Some(key) = self.keys.get(&(region, to)) {
            return Ok((described.base, Rc::clone(key)));
        }
        let key = Rc::new(cx.unpack_rkey(session, &described.rkey, to)?);
        self.keys.insert((region, to), Rc::clone(&key));
        Ok((described.base, key))
    }

    pub(super) fn forget_key(&mut self, region: RegionId) {
        self.keys.retain(|(of, _), _| *of != region);
    }
}

impl Blocks {
    pub(super) fn connect(
        &mut self,
        cx: &mut ReactorContext,
        address: &str,
        incarnation: Option<Incarnation>,
        completer: Completer<Peer>,
    ) {
        let session = self.session_to(cx, address);
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.waiting.push((incarnation, completer));
        }
        self.tell_waiting(session);
    }

    /// The link to an address: the one there is, or a new one. One whose loss its users have been told of already is
    /// not there any more, although its end is still to be reported.
    pub(super) fn session_to(&mut self, cx: &mut ReactorContext, address: &str) -> SessionKey {
        let known = self.by_address.get(address);
        if let Some(&session) = known.filter(|session| !self.is_lost(cx, **session)) {
            return session;
        }
        let session = cx.connect(address);
        self.by_address.insert(address.to_owned(), session);
        let handle = Peer::new(session, address, cx.identity().incarnation);
        self.peers.insert(session, PeerState::new(handle));
        session
    }

    /// Whether a session has ended, be its end reported or not.
    pub(super) fn is_lost(&self, cx: &ReactorContext, session: SessionKey) -> bool {
        let peer = self.peers.get(&session);
        cx.has_failed(session) || peer.is_none_or(|peer| peer.handle.lost().is_some())
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

    /// Everything that waits for a peer's regions goes on.
    pub(super) fn regions_known(&mut self, cx: &mut ReactorContext, session: SessionKey) {
        let Some(peer) = self.peers.get_mut(&session) else {
            return;
        };
        let early = std::mem::take(&mut peer.offers_early);
        self.shared
            .peers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(session, peer.handle.clone());
        self.tell_waiting(session);
        for offered in early {
            self.take_offer(cx, session, offered);
        }
        for handoff in self.consumer.handoffs() {
            self.go_on(cx, handoff);
        }
    }

    pub(super) fn peer_up(
        &mut self,
        cx: &mut ReactorContext,
        session: SessionKey,
        identity: &Identity,
    ) {
        let (address, ours) = (cx.peer(session), cx.identity().incarnation);
        let peer = self
            .peers
            .entry(session)
            .or_insert_with(|| PeerState::new(Peer::new(session, &address, ours)));
        let transport = transport(cx, session);
        peer.handle.met(identity.incarnation, transport.clone());
        if peer.regions.is_none() {
            peer.regions_by = Some(cx.now + cx.timeouts().handshake);
        }
        let ucx = cx.ucx();
        self.events.push_minor(Event::Log(format!(
            "session.open peer={address} transport={transport} ucx={ucx}"
        )));
        let is_same_host = identity.host == cx.identity().host;
        if let Some(text) = cx
            .data_path(session)
            .and_then(|data_path| advice(&data_path, is_same_host))
        {
            let text = format!("session.slow peer={address} {text}");
            self.events.push_minor(Event::Log(text));
        }
        self.send_process_vm_frame(cx, session);
        cx.send(session, &self.describe_regions());
    }

    /// Gives up peers that do not say what regions they have, and tells when to come back.
    pub(super) fn expire_peers(&mut self, cx: &mut ReactorContext) -> Option<Instant> {
        let mut next = None;
        for (&session, peer) in &mut self.peers {
            if peer.regions_by.take_if(|at| *at <= cx.now).is_some() {
                let waited = cx.timeouts().handshake;
                let text = format!("it did not describe its regions within {waited:?}");
                cx.fail(session, Error::lost(peer.handle.address(), text));
            }
            next = next.into_iter().chain(peer.regions_by).min();
        }
        next
    }

    pub(super) fn peer_down(&mut self, session: SessionKey, error: &Error) {
        self.by_address.retain(|_, other| *other != session);
        let Some(peer) = self.peers.remove(&session) else {
            return;
        };
        peer.handle.lose(error);
        self.shared
            .peers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&session);
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

pub(super) fn transport(cx: &ReactorContext, session: SessionKey) -> String {
    cx.data_path(session)
        .map_or_else(String::new, |data_path| data_path.transport().to_owned())
}
