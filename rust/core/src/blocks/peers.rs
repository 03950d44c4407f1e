//! Regions of this agent, and the peers that have been told of them.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::Instant;

use kvpipe_ucx::Buffer;

use super::messages::{REGIONS_CAP, RemoteRegions, regions};
use super::service::{Blocks, LocalRegion};
use super::{Event, PeerInfo, RegionInfo};
use crate::error::{Error, Result};
use crate::identity::{Identity, Incarnation};
use crate::node::{Io, LinkId};
use crate::region::{Layout, RemoteRegion};
use crate::transport::RemoteKey;
use crate::work::Completer;

pub(super) struct Peer {
    pub(super) address: String,
    pub(super) incarnation: Incarnation,
    pub(super) regions: Option<Vec<RemoteRegion>>,
    /// When they have to be here, from the moment the session is established.
    regions_by: Option<Instant>,
    keys: HashMap<u16, Rc<RemoteKey>>,
    waiting: Vec<Completer<PeerInfo>>,
    /// Reads from it that are not over, in the order in which they were asked for.
    pub(super) transfers: VecDeque<u64>,
}

impl Peer {
    fn new(address: String, incarnation: Incarnation) -> Self {
        Self {
            address,
            incarnation,
            regions: None,
            regions_by: None,
            keys: HashMap::new(),
            waiting: Vec::new(),
            transfers: VecDeque::new(),
        }
    }

    /// Base address and usable key of a region.
    pub(super) fn remote(
        &mut self,
        io: &mut Io,
        link: LinkId,
        region: u16,
    ) -> Result<(u64, Rc<RemoteKey>)> {
        let regions = self.regions.as_ref();
        let described = regions
            .and_then(|all| all.get(usize::from(region)))
            .ok_or_else(|| Error::protocol("the peer took a region back"))?;
        if let Some(key) = self.keys.get(&region) {
            return Ok((described.base, Rc::clone(key)));
        }
        let key = Rc::new(io.unpack_rkey(link, &described.rkey)?);
        self.keys.insert(region, Rc::clone(&key));
        Ok((described.base, key))
    }
}

impl Blocks {
    pub(super) fn register(
        &mut self,
        io: &mut Io,
        name: String,
        layout: Layout,
        buffer: Buffer,
    ) -> Result<u16> {
        if self.regions.iter().any(|region| region.name == name) {
            return Err(Error::Config(format!("there is a region {name:?} already")));
        }
        if self.regions.len() >= REGIONS_CAP {
            return Err(Error::Config(format!(
                "an agent has at most {REGIONS_CAP} regions"
            )));
        }
        let memory = io.register(buffer)?;
        let rkey = memory.pack_rkey()?;
        self.regions.push(LocalRegion {
            name,
            layout,
            memory,
            rkey,
        });
        let frame = self.describe_regions();
        for link in self.peers.keys() {
            io.send(*link, &frame);
        }
        Ok(self.regions.len() as u16 - 1)
    }

    fn describe_regions(&self) -> Vec<u8> {
        let describe = |region: &LocalRegion| RemoteRegion {
            name: region.name.clone(),
            layout: region.layout.clone(),
            base: region.memory.buffer().address() as u64,
            rkey: region.rkey.clone(),
        };
        regions(&self.regions.iter().map(describe).collect::<Vec<_>>())
    }

    pub(super) fn connect(&mut self, io: &mut Io, address: &str, completer: Completer<PeerInfo>) {
        let link = self.link_to(io, address);
        if let Some(info) = self.info(io, link) {
            completer.complete(Ok(info));
        } else if let Some(peer) = self.peers.get_mut(&link) {
            peer.waiting.push(completer);
        }
    }

    /// The link to an address: the one there is, or a new one.
    pub(super) fn link_to(&mut self, io: &mut Io, address: &str) -> LinkId {
        if let Some(&link) = self.by_address.get(address) {
            return link;
        }
        let link = io.connect(address);
        self.by_address.insert(address.to_owned(), link);
        self.peers
            .insert(link, Peer::new(address.to_owned(), [0; 16]));
        link
    }

    fn info(&self, io: &Io, link: LinkId) -> Option<PeerInfo> {
        let peer = self.peers.get(&link)?;
        let info = |region: &RemoteRegion| RegionInfo {
            name: region.name.clone(),
            layout: region.layout.clone(),
        };
        Some(PeerInfo {
            link,
            address: peer.address.clone(),
            incarnation: peer.incarnation,
            transport: transport(io, link),
            regions: peer.regions.as_ref()?.iter().map(info).collect(),
        })
    }

    pub(super) fn take_regions(&mut self, io: &mut Io, link: LinkId, regions: RemoteRegions) {
        let Some(peer) = self.peers.get_mut(&link) else {
            return;
        };
        peer.regions = Some(regions.0);
        peer.regions_by = None;
        let waiting = std::mem::take(&mut peer.waiting);
        for completer in waiting {
            if let Some(info) = self.info(io, link) {
                completer.complete(Ok(info));
            }
        }
        for handoff in self.consumer.handoffs() {
            self.select(io, handoff);
        }
    }

    pub(super) fn peer_up(&mut self, io: &mut Io, link: LinkId, identity: &Identity) {
        let address = io.peer(link);
        let peer = self
            .peers
            .entry(link)
            .or_insert_with(|| Peer::new(address.clone(), identity.incarnation));
        peer.incarnation = identity.incarnation;
        if peer.regions.is_none() {
            peer.regions_by = Some(io.now + io.timing().handshake);
        }
        let (transport, ucx) = (transport(io, link), io.ucx());
        self.events.push_minor(Event::Log(format!(
            "session.open peer={address} transport={transport} ucx={ucx}"
        )));
        if transport == "tcp" && identity.host == io.identity().host {
            self.events.push_minor(Event::Log(format!(
                "session.slow peer={address} is on this host, but its blocks move over tcp"
            )));
        }
        io.send(link, &self.describe_regions());
    }

    /// Gives up peers that do not say what regions they have, and tells when to come back.
    pub(super) fn expire_peers(&mut self, io: &mut Io) -> Option<Instant> {
        let mut next = None;
        for (&link, peer) in &mut self.peers {
            if peer.regions_by.take_if(|at| *at <= io.now).is_some() {
                let waited = io.timing().handshake;
                let text = format!("it did not describe its regions within {waited:?}");
                io.fail(link, Error::lost(&peer.address, text));
            }
            next = next.into_iter().chain(peer.regions_by).min();
        }
        next
    }

    pub(super) fn peer_down(&mut self, link: LinkId, error: &Error) {
        self.by_address.retain(|_, other| *other != link);
        let Some(peer) = self.peers.remove(&link) else {
            return;
        };
        for completer in peer.waiting {
            completer.complete(Err(error.clone()));
        }
    }
}

pub(super) fn transport(io: &Io, link: LinkId) -> String {
    io.road(link)
        .map_or_else(String::new, |road| road.transport().to_owned())
}
