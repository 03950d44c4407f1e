//! Regions: ours, which are described to peers and are closed when the peers have released them, and theirs.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvpipe_ucx::MemoryKind;

use super::agent_core::AgentCore;
use super::messages::{REGIONS_CAP, RELEASED, write_divide, write_divided, write_regions};
use super::peer::Regions;
use super::plan::{Region, closed_region, region_gone};
use super::reads::BlockTransfer;
use crate::checksum::Shift;
use crate::error::{Error, Result};
use crate::ids::{Epoch, RegionId, SessionKey};
use crate::net::codec::Writer;
use crate::reactor::PendingReads;
use crate::transfer::Cx;
use crate::transfer::exposed::key;
use crate::transfer::region::{Layout, RemoteRegion, Slice};
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

/// Most numbers of slices into which peers have an agent divide its blocks: each costs a checksum of all bytes.
const DIVISIONS_CAP: usize = 4;

/// Memory of the host.
const HOST: &str = "cpu";

/// The name of the device that has the memory.
fn device(kind: MemoryKind) -> String {
    match kind {
        MemoryKind::Host => HOST.to_owned(),
        MemoryKind::Cuda { device } => format!("cuda:{device}"),
    }
}

/// A division of the blocks of a region.
#[derive(Debug)]
pub(crate) struct Division {
    /// The region of each slice.
    pub(crate) slices: Vec<RegionId>,
    /// Over the bytes of a slice, if peers load slices: they are announced.
    pub(crate) shift: Option<Arc<Shift>>,
}

#[derive(Debug)]
pub(crate) struct LocalRegion {
    pub(crate) name: String,
    /// The region of which it is a slice, and that slice.
    slice_of: Option<(RegionId, Slice)>,
    pub(crate) layout: Layout,
    pub(super) is_writable: bool,
    pub(crate) memory: Arc<Memory>,
    /// The packed key.
    pub(crate) rkey: Vec<u8>,
    /// Reads into it and writes from it that are not over.
    pub(super) num_transfers: usize,
    /// Into slices, one for each number of them.
    pub(crate) divisions: Vec<Division>,
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
            slice_of: None,
            layout,
            is_writable,
            memory,
            rkey,
            num_transfers: 0,
            divisions: Vec::new(),
            busy: BTreeMap::new(),
        })
    }

    /// A slice of each of its blocks, as a region over the same memory. Peers do not write into it.
    ///
    /// # Errors
    /// Its blocks cannot be divided so.
    fn sliced(&self, id: RegionId, slice: Slice) -> Result<Self> {
        let layout = self.layout.sliced(slice).map_err(|error| {
            let name = &self.name;
            Error::Config(format!("region {name:?}: {error}"))
        })?;
        Ok(Self {
            name: self.name.clone(),
            slice_of: Some((id, slice)),
            layout,
            is_writable: false,
            memory: Arc::clone(&self.memory),
            rkey: self.rkey.clone(),
            num_transfers: 0,
            divisions: Vec::new(),
            busy: BTreeMap::new(),
        })
    }

    /// True if its blocks are whole.
    pub(crate) fn is_whole(&self) -> bool {
        self.slice_of.is_none()
    }

    fn division_mut(&mut self, count: u32) -> Option<&mut Division> {
        let mut divisions = self.divisions.iter_mut();
        divisions.find(|division| division.slices.len() == count as usize)
    }

    /// The numbers of slices that peers load.
    fn announced_counts(&self) -> impl Iterator<Item = usize> {
        let announced = self.divisions.iter().filter(|it| it.shift.is_some());
        announced.map(|division| division.slices.len())
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
            slice: self.slice_of.map(|(_, slice)| slice),
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

impl Closing {
    /// True if a peer or a transfer may use it, whatever is of its slices.
    fn is_in_use(&self) -> bool {
        !self.waiting_for.is_empty() || self.region.num_transfers > 0
    }

    #[cfg(test)]
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
        self.check_num_regions(1)?;
        let (name, layout) = (name.clone(), region.layout.clone());
        let id = self.insert_region(region);
        self.send_regions(cx);
        let incarnation = cx.links.identity().incarnation;
        Ok(Region::new(id, &name, layout, incarnation))
    }

    fn check_num_regions(&self, num_more: usize) -> Result<()> {
        if self.regions.len() + num_more > REGIONS_CAP {
            return Err(Error::Config(format!(
                "an agent has at most {REGIONS_CAP} regions; close one first"
            )));
        }
        Ok(())
    }

    fn insert_region(&mut self, region: LocalRegion) -> RegionId {
        let id = self.next_region;
        self.next_region += 1;
        self.regions.insert(id, region);
        id
    }

    /// The division of a region's blocks into so many slices. The caller describes new regions to peers.
    ///
    /// # Errors
    /// Its blocks cannot be divided so, it was closed, or there are too many regions.
    pub(crate) fn division(&mut self, whole: RegionId, count: u32) -> Result<&mut Division> {
        let region = self.regions.get_mut(&whole).ok_or_else(region_gone)?;
        if region.division_mut(count).is_none() {
            let slices = (0..count).map(|index| region.sliced(whole, Slice { index, count }));
            let slices = slices.collect::<Result<Vec<_>>>()?;
            self.check_num_regions(slices.len())?;
            let slices = slices.into_iter().map(|slice| self.insert_region(slice));
            let slices = slices.collect();
            let region = self.regions.get_mut(&whole).ok_or_else(region_gone)?;
            region.divisions.push(Division {
                slices,
                shift: None,
            });
        }
        let region = self.regions.get_mut(&whole).ok_or_else(region_gone)?;
        region.division_mut(count).ok_or_else(region_gone)
    }

    /// A peer loads slices of blocks: divides those of all regions, and answers it. Returns the regions that are divided
    /// so from now on, each with its slices.
    pub(super) fn divide(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        count: u32,
    ) -> Vec<(RegionId, Vec<RegionId>)> {
        let divided = self.divide_all(count);
        if divided.as_ref().is_ok_and(|wholes| !wholes.is_empty()) {
            self.send_regions(cx);
        }
        let reason = divided.as_ref().err().map(Error::to_string);
        let answer = write_divided(count, reason.as_deref().unwrap_or_default());
        cx.links.send(session, &answer);
        divided.unwrap_or_default()
    }

    fn divide_all(&mut self, count: u32) -> Result<Vec<(RegionId, Vec<RegionId>)>> {
        let regions = self.regions.values();
        let counts: BTreeSet<usize> = regions.flat_map(LocalRegion::announced_counts).collect();
        if !counts.contains(&(count as usize)) && counts.len() >= DIVISIONS_CAP {
            return Err(Error::Config(format!(
                "blocks are divided in {DIVISIONS_CAP} ways for peers already, into {counts:?} slices"
            )));
        }
        let is_undivided = |region: &LocalRegion| {
            let mut counts = region.announced_counts();
            region.is_whole() && counts.all(|divided| divided != count as usize)
        };
        let wholes = self
            .regions
            .iter()
            .filter(|(_, region)| is_undivided(region));
        let wholes: Vec<RegionId> = wholes.map(|(id, _)| *id).collect();
        // All of them or none.
        for whole in &wholes {
            let first = Slice { index: 0, count };
            self.regions[whole].sliced(*whole, first)?;
        }
        self.check_num_regions(wholes.len() * count as usize)?;
        let mut shifts: BTreeMap<u64, Arc<Shift>> = BTreeMap::new();
        let mut divided = Vec::new();
        for whole in &wholes {
            let len = self.regions[whole].layout.block_bytes / u64::from(count);
            let shift = shifts
                .entry(len)
                .or_insert_with(|| Arc::new(Shift::over(len)));
            let division = self.division(*whole, count)?;
            division.shift = Some(Arc::clone(shift));
            divided.push((*whole, division.slices.clone()));
        }
        Ok(divided)
    }

    pub(crate) fn send_regions(&self, cx: &mut Cx<'_>) {
        let wholes = self.regions.values().filter(|region| region.is_whole());
        let count = wholes.count();
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
        for slice in region.divisions.iter().flat_map(|it| &it.slices) {
            self.close_one(cx, *slice, Vec::new());
        }
        self.regions.insert(id, region);
        self.close_one(cx, id, vec![(until, completer)]);
        self.send_regions(cx);
    }

    fn close_one(
        &mut self,
        cx: &mut Cx<'_>,
        id: RegionId,
        waiting: Vec<(Option<Instant>, Completer<()>)>,
    ) {
        let Some(region) = self.regions.remove(&id) else {
            return;
        };
        let error = closed_region(&region.name);
        cx.transfers.withdraw_into(cx.links, &region.memory, &error);
        let sessions = self.peers.keys().copied().collect::<Vec<_>>();
        for session in sessions {
            self.withdraw_writes(cx, session, |transfer| transfer.region == id, &error);
        }
        let sessions = self.peers.keys().copied();
        self.closing.push(Closing {
            id,
            region,
            waiting_for: sessions
                .filter(|session| cx.links.is_up(*session))
                .collect(),
            waiting,
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
        let in_use = self.closing.iter().filter(|closing| closing.is_in_use());
        let sliced: HashSet<RegionId> = in_use
            .filter_map(|it| Some(it.region.slice_of?.0))
            .collect();
        for mut closing in std::mem::take(&mut self.closing) {
            if !closing.is_in_use() && !sliced.contains(&closing.id) {
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
        let wholes = regions.iter().filter(|region| region.slice.is_none());
        peer.handle.set_regions(wholes.cloned().collect());
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

    /// Has a peer divide its blocks into slices, once. Returns its answer: done, or the reason why not.
    pub(crate) fn ask_to_divide(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        count: u32,
    ) -> Option<std::result::Result<(), String>> {
        let peer = self.peers.get_mut(&session)?;
        if let Some(answer) = peer.divisions.get(&count) {
            return answer.clone();
        }
        peer.divisions.insert(count, None);
        cx.links.send(session, &write_divide(count));
        None
    }

    /// A peer has answered whether it divides its blocks.
    pub(super) fn divided(
        &mut self,
        session: SessionKey,
        count: u32,
        reason: String,
    ) -> Result<()> {
        let Some(peer) = self.peers.get_mut(&session) else {
            return Ok(());
        };
        let Some(answer @ None) = peer.divisions.get_mut(&count) else {
            let text = format_args!("blocks divided into {count}, which it was not asked for");
            return Err(Error::protocol(text));
        };
        *answer = Some(if reason.is_empty() {
            Ok(())
        } else {
            Err(reason)
        });
        Ok(())
    }
}
