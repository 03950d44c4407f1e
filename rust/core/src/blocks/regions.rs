//! Regions: ours, which are described to peers and are closed when the peers have released them, and theirs.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvpipe_ucx::MemoryKind;

use super::agent_core::AgentCore;
use super::messages::{REGIONS_CAP, RELEASED, write_regions};
use super::peer::Regions;
use super::plan::{Region, closed_region, region_gone};
use super::reads::BlockTransfer;
use crate::error::{Error, Result};
use crate::ids::{Epoch, RegionId, SessionKey};
use crate::net::codec::Writer;
use crate::reactor::PendingReads;
use crate::transfer::Cx;
use crate::transfer::exposed::key;
use crate::transfer::region::{Layout, RemoteRegion};
use crate::transfer::remote_source::RemoteSource;
use crate::transport::Memory;
use crate::work::Completer;

/// The grant of an epoch, which READ names beside the region. It is never 0, which names none: users read without.
pub(crate) fn grant(epoch: Epoch) -> u64 {
    (epoch % u64::from(u32::MAX) + 1) << RegionId::BITS
}

/// The region and the grant that READ names.
fn split_source(source: u64) -> (RegionId, u64) {
    let region = source as RegionId;
    (region, source - u64::from(region))
}

/// Streams nothing more under a grant.
pub(crate) fn revoke(cx: &mut Cx<'_>, grant: u64) {
    let is_under = |source| split_source(source).1 == grant;
    cx.transfers.withdraw_sources(cx.links, is_under);
}

/// Memory of the host.
const HOST: &str = "cpu";

/// The name of the device that has the memory.
fn device(kind: MemoryKind) -> String {
    match kind {
        MemoryKind::Host => HOST.to_owned(),
        MemoryKind::Cuda { device } => format!("cuda:{device}"),
    }
}

#[derive(Debug)]
pub(crate) struct LocalRegion {
    pub(crate) name: String,
    pub(crate) layout: Layout,
    pub(super) is_writable: bool,
    pub(crate) memory: Arc<Memory>,
    /// The packed key.
    pub(crate) rkey: Vec<u8>,
    /// Reads into it and writes from it that are not over.
    pub(super) num_transfers: usize,
    /// Blocks of transfers that have failed and are not over, each with the number of these transfers.
    busy: BTreeMap<u32, usize>,
}

impl LocalRegion {
    /// # Errors
    /// Peers could not reach such memory.
    pub(crate) fn new(
        name: &str,
        layout: Layout,
        is_writable: bool,
        memory: Arc<Memory>,
    ) -> Result<Self> {
        let rkey = key(&memory)?;
        Ok(Self {
            name: name.to_owned(),
            layout,
            is_writable,
            memory,
            rkey,
            num_transfers: 0,
            busy: BTreeMap::new(),
        })
    }

    /// # Errors
    /// A failed transfer may still write into one of these blocks, or read it.
    pub(super) fn check_free(&self, ids: &[u32]) -> Result<()> {
        if self.busy.is_empty() {
            return Ok(());
        }
        let Some(id) = ids.iter().find(|id| self.busy.contains_key(id)) else {
            return Ok(());
        };
        let name = &self.name;
        Err(Error::Exhausted(format!(
            "block {id} of region {name:?} is busy: a transfer that failed at its deadline is not over there; wait for it \
             with Work.settled(), or use other blocks"
        )))
    }

    pub(super) fn set_busy(&mut self, ids: &[u32]) {
        for id in ids {
            *self.busy.entry(*id).or_default() += 1;
        }
    }

    pub(super) fn set_free(&mut self, ids: &[u32]) {
        for id in ids {
            if let Some(num_transfers) = self.busy.get_mut(id) {
                *num_transfers -= 1;
                if *num_transfers == 0 {
                    self.busy.remove(id);
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn num_busy(&self) -> usize {
        self.busy.len()
    }

    fn describe(&self, id: RegionId) -> RemoteRegion {
        let buffer = self.memory.buffer();
        RemoteRegion {
            id,
            name: self.name.clone(),
            layout: self.layout.clone(),
            device: device(buffer.kind()),
            is_writable: self.is_writable,
            base: buffer.address() as u64,
            rkey: self.rkey.clone(),
        }
    }
}

/// A closed region that peers may still be reading.
pub(super) struct Closing {
    id: RegionId,
    /// Keeps the memory registered.
    region: LocalRegion,
    /// Peers that have not said that they read nothing of it any more.
    waiting_for: HashSet<SessionKey>,
    /// Callers that wait for its end, each with its deadline.
    waiting: Vec<(Option<Instant>, Completer<()>)>,
}

#[cfg(test)]
impl Closing {
    pub(super) fn region(&self) -> &LocalRegion {
        &self.region
    }
}

/// Ours.
impl AgentCore {
    pub(super) fn register(&mut self, cx: &mut Cx<'_>, region: LocalRegion) -> Result<Region> {
        let name = &region.name;
        if self.regions.values().any(|other| other.name == *name) {
            return Err(Error::Config(format!(
                "there is a region {name:?} already; close it first or give another name"
            )));
        }
        if self.regions.len() >= REGIONS_CAP {
            return Err(Error::Config(format!(
                "an agent has at most {REGIONS_CAP} regions; close one first"
            )));
        }
        let id = self.next_region;
        self.next_region += 1;
        let layout = region.layout.clone();
        let registered = Region::new(id, name, layout, cx.links.identity().incarnation);
        self.regions.insert(id, region);
        self.send_regions(cx);
        Ok(registered)
    }

    fn send_regions(&self, cx: &mut Cx<'_>) {
        let count = self.regions.len();
        self.shared.num_regions.store(count, Ordering::Relaxed);
        let frame = self.describe_regions();
        for session in self.peers.keys() {
            cx.links.send(*session, &frame);
        }
    }

    pub(super) fn describe_regions(&self) -> Vec<u8> {
        let regions = self.regions.iter();
        let described = regions.map(|(id, region)| region.describe(*id));
        write_regions(&described.collect::<Vec<_>>())
    }

    /// Takes a region back: nothing of it begins any more, and what has begun is waited for, here and at the peers.
    pub(super) fn close_region(
        &mut self,
        cx: &mut Cx<'_>,
        id: RegionId,
        until: Option<Instant>,
        completer: Completer<()>,
    ) {
        let Some(region) = self.regions.remove(&id) else {
            return match self.closing.iter_mut().find(|closing| closing.id == id) {
                Some(closing) => closing.waiting.push((until, completer)),
                None => completer.complete(Ok(())),
            };
        };
        let error = closed_region(&region.name);
        cx.transfers.withdraw_into(cx.links, &region.memory, &error);
        let sessions = self.peers.keys().copied().collect::<Vec<_>>();
        for session in sessions {
            self.withdraw_writes(cx, session, |transfer| transfer.region == id, &error);
        }
        self.send_regions(cx);
        let sessions = self.peers.keys().copied();
        self.closing.push(Closing {
            id,
            region,
            waiting_for: sessions
                .filter(|session| cx.links.is_up(*session))
                .collect(),
            waiting: vec![(until, completer)],
        });
    }

    /// Memory and layout of a region that a peer may read, or of a closed one that it has not released.
    ///
    /// # Errors
    /// There is none, or the grant does not hold.
    pub(crate) fn exposed_to(
        &self,
        session: SessionKey,
        source: u64,
        holds: impl Fn(u64) -> bool,
    ) -> Result<(Arc<Memory>, Layout)> {
        let (id, grant) = split_source(source);
        if grant != 0 && !holds(grant) {
            let text = "the handoff of the blocks has ended";
            return Err(Error::Config(text.to_owned()));
        }
        let is_it = |closing: &&Closing| closing.id == id && closing.waiting_for.contains(&session);
        let closing = || Some(&self.closing.iter().find(is_it)?.region);
        let region = self.regions.get(&id).or_else(closing);
        let region = region.ok_or_else(region_gone)?;
        Ok((Arc::clone(&region.memory), region.layout.clone()))
    }

    /// A peer reads nothing of a closed region any more.
    pub(super) fn released(&mut self, session: SessionKey, id: RegionId) -> Result<()> {
        let closing = self.closing.iter_mut().find(|closing| closing.id == id);
        if closing.is_some_and(|closing| closing.waiting_for.remove(&session)) {
            return Ok(());
        }
        let text = format_args!("region {id} released, which it was not asked for");
        Err(Error::protocol(text))
    }

    /// A region of ours that is registered, or closed and in use.
    pub(super) fn local_region_mut(&mut self, id: RegionId) -> Option<&mut LocalRegion> {
        let closing = self.closing.iter_mut();
        let mut closing = closing.filter(|closing| closing.id == id);
        let region = self.regions.get_mut(&id);
        region.or_else(|| Some(&mut closing.next()?.region))
    }

    /// Ends the closing of regions that are not used any more.
    pub(super) fn end_closing(&mut self, now: Instant) {
        for mut closing in std::mem::take(&mut self.closing) {
            if closing.waiting_for.is_empty() && closing.region.num_transfers == 0 {
                drop(closing.region);
                for (_, completer) in closing.waiting {
                    completer.complete(Ok(()));
                }
                continue;
            }
            self.give_up(&mut closing, now);
            self.closing.push(closing);
        }
    }

    /// The earliest deadline of the callers that wait for the end of a region.
    pub(super) fn closing_deadline(&self) -> Option<Instant> {
        let waiting = self.closing.iter().flat_map(|closing| &closing.waiting);
        waiting.filter_map(|(until, _)| *until).min()
    }

    /// Completes the works of all callers: the agent has ended, and with it all uses of its regions but those reads.
    pub(super) fn end_all_closing(&mut self, pending: &PendingReads) {
        for closing in std::mem::take(&mut self.closing) {
            for (_, completer) in closing.waiting {
                completer.complete(pending.check());
            }
        }
    }

    /// Ends the waits of the callers whose deadline has passed.
    fn give_up(&self, closing: &mut Closing, now: Instant) {
        let is_late = |(until, _): &mut (Option<Instant>, _)| until.is_some_and(|at| at <= now);
        let late: Vec<_> = closing.waiting.extract_if(.., is_late).collect();
        if late.is_empty() {
            return;
        }
        let peers = closing.waiting_for.iter();
        let peers: Vec<&str> = peers
            .filter_map(|session| Some(self.peers.get(session)?.handle.address()))
            .collect();
        let text = format!(
            "region {:?} may still be read by {peers:?} or by a transfer of this side; it is closed for others, and its \
             memory is kept until they are done",
            closing.region.name
        );
        for (_, completer) in late {
            completer.complete(Err(Error::Timeout(text.clone())));
        }
    }
}

/// Theirs.
impl AgentCore {
    pub(super) fn receive_regions(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        regions: Vec<RemoteRegion>,
    ) -> Result<()> {
        let Some(peer) = self.peers.get_mut(&session) else {
            return Ok(());
        };
        // Its key is in use, and plans are made for it.
        let is_wrong = |region: &&RemoteRegion| match peer.region(region.id) {
            Some(known) => **known != **region,
            None => region.id < peer.next_region,
        };
        if let Some(region) = regions.iter().find(is_wrong) {
            let text = format_args!("region {} changed or came back", region.id);
            return Err(Error::protocol(text));
        }
        let regions: Regions = regions.into_iter().map(Arc::new).collect();
        for region in regions
            .iter()
            .filter(|region| region.id >= peer.next_region)
        {
            let source = RemoteSource::new(region.base, region.rkey.clone(), region.is_cuda());
            cx.transfers.add_source(session, region.id.into(), source);
        }
        let next_region = regions.last().map_or(0, |region| region.id + 1);
        peer.next_region = peer.next_region.max(next_region);
        peer.handle.set_regions(Arc::clone(&regions));
        self.described_by.cancel(session);
        let known = peer.regions.replace(regions).unwrap_or_default();
        let is_closed = |region: &&Arc<RemoteRegion>| peer.region(region.id).is_none();
        let closed: Vec<_> = known.iter().filter(is_closed).collect();
        for region in closed {
            self.release_remote_region(cx, session, region);
        }
        self.regions_known(cx, session);
        Ok(())
    }

    /// The peer has closed a region: what has not begun fails, and RELEASED follows when the rest is over.
    fn release_remote_region(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        region: &RemoteRegion,
    ) {
        let (id, name) = (region.id, &region.name);
        let text = format!("region {name:?} of the peer was closed by its owner");
        let error = Error::Config(text);
        cx.transfers
            .remove_source(cx.links, session, id.into(), &error);
        let to_region = |transfer: &BlockTransfer| transfer.remote_region == id;
        self.withdraw_writes(cx, session, to_region, &error);
        self.releasing_regions.push((session, id));
    }

    /// Tells peers which of their closed regions are not being read any more.
    pub(super) fn release(&mut self, cx: &mut Cx<'_>) {
        self.releasing_regions.retain(|&(session, id)| {
            let is_read = cx.transfers.is_reading(session, id.into());
            if !is_read {
                cx.links
                    .send(session, &Writer::new(RELEASED).u32(id).finish());
            }
            is_read
        });
    }

    pub(super) fn regions_down(&mut self, session: SessionKey) {
        self.releasing_regions
            .retain(|(other, _)| *other != session);
        for closing in &mut self.closing {
            closing.waiting_for.remove(&session);
        }
    }
}
