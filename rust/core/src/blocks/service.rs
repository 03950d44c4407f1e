//! The agent's side of its node's thread: peers, transfers, and the two handoff machines.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use kvpipe_ucx::{AmData, Buffer, Memory, Payload, RemoteKey, Status};

use super::messages::{
    BLOCKS_CAP, CREDIT, DATA, DONE, FINAL, GONE, READ, REFUSED, REGIONS, REGIONS_CAP, SELECT,
    final_blocks, read_final_blocks, reason, regions,
};
use super::serve::Serving;
use super::transfer::{GET_PIECE, GETS_IN_FLIGHT, Owner, Transfer};
use super::{Ended, Event, LoadRequest, PeerInfo, RegionInfo, unknown_region};
use crate::codec::{Reader, Writer};
use crate::data::Road;
use crate::error::{Error, Result};
use crate::events::Events;
use crate::handoff::consumer::{Batch, Consumer, Load, Outcome};
use crate::handoff::producer::{Action, OPEN_TIMEOUT, Producer, Select};
use crate::handoff::{FinalBlock, HandoffId, checksum};
use crate::identity::{Identity, Incarnation};
use crate::node::{Io, LinkId, Service};
use crate::region::{Layout, RemoteRegion, coalesce};
use crate::work::Completer;

/// Transfers from one peer under way at once; more wait. Bounds the bytes in flight.
const TRANSFERS_IN_FLIGHT: usize = 4;

#[derive(Debug)]
pub(super) enum Command {
    Register {
        name: String,
        layout: Layout,
        buffer: Buffer,
        completer: Completer<u16>,
    },
    Connect {
        address: String,
        completer: Completer<PeerInfo>,
    },
    Read {
        peer: LinkId,
        region: String,
        local_ids: Vec<u32>,
        remote_region: String,
        remote_ids: Vec<u32>,
        deadline: Option<Instant>,
        completer: Completer<u64>,
    },
    Finalize {
        handoff: HandoffId,
        generation: u32,
        first: u32,
        block_ids: Vec<u32>,
    },
    End {
        handoff: HandoffId,
        reason: String,
    },
    Load(LoadRequest),
    Commit {
        handoff: HandoffId,
    },
    Cancel {
        handoff: HandoffId,
        reason: String,
    },
}

struct LocalRegion {
    name: String,
    layout: Layout,
    memory: Arc<Memory>,
}

struct Peer {
    address: String,
    incarnation: Incarnation,
    regions: Option<Vec<RemoteRegion>>,
    keys: HashMap<u16, Arc<RemoteKey>>,
    waiting: Vec<Completer<PeerInfo>>,
    transfers: VecDeque<u64>,
}

struct Loading {
    link: LinkId,
    incarnation: Incarnation,
    started: Instant,
    has_selected: bool,
}

pub(super) struct Blocks {
    events: Events<Event>,
    num_lent: Arc<Mutex<usize>>,
    ended: Ended,
    regions: Vec<LocalRegion>,
    peers: HashMap<LinkId, Peer>,
    by_address: HashMap<String, LinkId>,
    transfers: HashMap<u64, Transfer>,
    /// Token of a get to its transfer and bytes.
    gets: HashMap<u64, (u64, u64)>,
    serving: HashMap<(LinkId, u64), Serving>,
    producer: Producer,
    consumer: Consumer,
    loading: HashMap<HandoffId, Loading>,
}

impl Blocks {
    pub(super) fn new(events: Events<Event>, num_lent: Arc<Mutex<usize>>, ended: Ended) -> Self {
        Self {
            events,
            num_lent,
            ended,
            regions: Vec::new(),
            peers: HashMap::new(),
            by_address: HashMap::new(),
            transfers: HashMap::new(),
            gets: HashMap::new(),
            serving: HashMap::new(),
            producer: Producer::default(),
            consumer: Consumer::default(),
            loading: HashMap::new(),
        }
    }

    // --- regions and peers

    fn register(
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
        self.regions.push(LocalRegion {
            name,
            layout,
            memory,
        });
        let frame = self.describe_regions()?;
        for link in self.peers.keys().copied().collect::<Vec<_>>() {
            io.send(link, &frame);
        }
        Ok(self.regions.len() as u16 - 1)
    }

    fn describe_regions(&self) -> Result<Vec<u8>> {
        let describe = |region: &LocalRegion| {
            Ok(RemoteRegion {
                name: region.name.clone(),
                layout: region.layout.clone(),
                base: region.memory.buffer().address() as u64,
                rkey: region.memory.pack_rkey()?,
            })
        };
        Ok(regions(
            &self
                .regions
                .iter()
                .map(describe)
                .collect::<Result<Vec<_>>>()?,
        ))
    }

    /// The link to an address: the one there is, or a new one.
    fn link_to(&mut self, io: &mut Io, address: &str) -> LinkId {
        if let Some(&link) = self.by_address.get(address) {
            return link;
        }
        let link = io.connect(address);
        self.by_address.insert(address.to_owned(), link);
        self.add_peer(link, address.to_owned(), [0; 16]);
        link
    }

    fn add_peer(&mut self, link: LinkId, address: String, incarnation: Incarnation) {
        let peer = Peer {
            address,
            incarnation,
            regions: None,
            keys: HashMap::new(),
            waiting: Vec::new(),
            transfers: VecDeque::new(),
        };
        self.peers.insert(link, peer);
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
            transport: io
                .road(link)
                .map_or_else(String::new, |road| road.transport().to_owned()),
            regions: peer.regions.as_ref()?.iter().map(info).collect(),
        })
    }

    fn take_regions(&mut self, io: &mut Io, link: LinkId, mut reader: Reader<'_>) -> Result<()> {
        let regions = reader.list(REGIONS_CAP, RemoteRegion::read)?;
        reader.end()?;
        let Some(peer) = self.peers.get_mut(&link) else {
            return Ok(());
        };
        peer.regions = Some(regions);
        let waiting = std::mem::take(&mut peer.waiting);
        for completer in waiting {
            if let Some(info) = self.info(io, link) {
                completer.complete(Ok(info));
            }
        }
        for handoff in self.consumer.handoffs() {
            self.select(io, handoff);
        }
        Ok(())
    }

    // --- transfers at the destination

    #[allow(clippy::too_many_arguments)]
    fn read(
        &mut self,
        io: &mut Io,
        link: LinkId,
        region: u16,
        local_ids: Vec<u32>,
        remote_region: u16,
        remote_ids: Vec<u32>,
        deadline: Option<Instant>,
        owner: Owner,
    ) -> std::result::Result<(), (Owner, Error)> {
        let Some(local) = self.regions.get(usize::from(region)) else {
            return Err((owner, unknown_region(&region.to_string())));
        };
        let Some(peer) = self.peers.get_mut(&link) else {
            return Err((owner, Error::lost("unknown", "the peer is gone")));
        };
        let Some(remote) = peer
            .regions
            .as_ref()
            .and_then(|all| all.get(usize::from(remote_region)))
        else {
            return Err((owner, unknown_region(&remote_region.to_string())));
        };
        let runs = match coalesce(
            (&local.layout, &local_ids),
            (&remote.layout, &remote_ids),
            GET_PIECE,
        ) {
            Ok(runs) => runs,
            Err(error) => return Err((owner, error)),
        };
        let (memory, layout) = (Arc::clone(&local.memory), local.layout.clone());
        let transfer = Transfer::new(
            link,
            memory,
            layout,
            local_ids,
            remote_region,
            remote_ids,
            runs,
            deadline,
            owner,
        );
        let id = io.token();
        self.transfers.insert(id, transfer);
        peer.transfers.push_back(id);
        self.start_waiting(io, link);
        Ok(())
    }

    fn start_waiting(&mut self, io: &mut Io, link: LinkId) {
        let Some(peer) = self.peers.get(&link) else {
            return;
        };
        let first: Vec<u64> = peer
            .transfers
            .iter()
            .copied()
            .take(TRANSFERS_IN_FLIGHT)
            .collect();
        for id in first {
            let Some(transfer) = self.transfers.get_mut(&id) else {
                continue;
            };
            if !std::mem::replace(&mut transfer.is_started, true) {
                self.start(io, link, id);
            }
        }
    }

    fn start(&mut self, io: &mut Io, link: LinkId, id: u64) {
        if let Some(Road::Get(_)) = io.road(link) {
            self.get_on(io, id);
        } else if let Some(transfer) = self.transfers.get_mut(&id) {
            transfer.runs.clear();
            let header = io.header(link, READ).u64(id).u16(transfer.remote_region);
            let ids = Writer::default()
                .list(&transfer.remote_ids, |w, id| w.u32(*id))
                .finish();
            io.message(link, header, Payload::Bytes(ids), 0);
        }
        self.finish_if_over(io, id);
    }

    /// Get road: keeps reads under way.
    fn get_on(&mut self, io: &mut Io, id: u64) {
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        let (base, key) = match remote(&mut self.peers, io, transfer.link, transfer.remote_region) {
            Ok(remote) => remote,
            Err(error) => {
                transfer.failure.get_or_insert(error);
                return;
            }
        };
        while transfer.failure.is_none() && transfer.in_flight < GETS_IN_FLIGHT {
            let Some(run) = transfer.runs.pop_front() else {
                return;
            };
            let (token, remote) = (io.token(), base + run.from);
            let (at, len) = (run.to as usize, run.len as usize);
            if !io.get(
                transfer.link,
                &transfer.memory,
                at,
                len,
                remote,
                &key,
                token,
            ) {
                return;
            }
            transfer.in_flight += 1;
            self.gets.insert(token, (id, run.len));
        }
    }

    fn finish_if_over(&mut self, io: &mut Io, id: u64) {
        if !self.transfers.get(&id).is_some_and(Transfer::is_over) {
            return;
        }
        let Some(transfer) = self.transfers.remove(&id) else {
            return;
        };
        if let Some(peer) = self.peers.get_mut(&transfer.link) {
            peer.transfers.retain(|other| *other != id);
        }
        let link = transfer.link;
        match transfer.owner {
            Owner::Caller(completer) => {
                completer.complete(transfer.failure.map_or(Ok(transfer.num_total), Err));
            }
            Owner::Handoff(handoff, ref batch) => {
                match &transfer.failure {
                    Some(error) => self.consumer.read_failed(&handoff, &error.to_string()),
                    None => {
                        let whole = self.verify(&handoff, batch, &transfer);
                        self.consumer
                            .read(&handoff, batch, &whole, transfer.num_total);
                    }
                }
                self.end_load_if_over(io, handoff);
            }
        }
        self.start_waiting(io, link);
    }

    fn verify(&self, handoff: &HandoffId, batch: &Batch, transfer: &Transfer) -> Vec<bool> {
        let generation = self.consumer.generation(handoff).unwrap_or_default();
        let len = transfer.layout.block_bytes as usize;
        let is_whole = |(block, &local): (&FinalBlock, &u32)| {
            let at = transfer.layout.offset(local).unwrap_or(u64::MAX) as usize;
            let bytes = transfer.memory.buffer().bytes(at, len);
            bytes.is_some_and(|bytes| {
                checksum(handoff, generation, block.region, block.position, bytes) == block.checksum
            })
        };
        batch
            .blocks
            .iter()
            .zip(&batch.local_ids)
            .map(is_whole)
            .collect()
    }

    fn placed(
        &mut self,
        io: &mut Io,
        link: LinkId,
        id: u64,
        offset: u64,
        data: &[u8],
    ) -> Result<()> {
        let is_message =
            |transfer: &&mut Transfer| transfer.link == link && transfer.runs.is_empty();
        // Of a transfer that has ended meanwhile: dropped, its memory is not ours to write any more.
        let Some(transfer) = self.transfers.get_mut(&id).filter(is_message) else {
            return Ok(());
        };
        if transfer.failure.is_some() || transfer.in_flight > 0 {
            return Ok(());
        }
        transfer.place(offset, data)?;
        if let Some(credit) = transfer.take_credit() {
            let header = io.header(link, CREDIT).u64(id).u64(credit);
            io.message(link, header, Payload::None, 0);
        }
        self.finish_if_over(io, id);
        Ok(())
    }

    // --- transfers at the source

    fn serve(
        &mut self,
        io: &mut Io,
        link: LinkId,
        id: u64,
        region: u16,
        payload: &[u8],
    ) -> Result<()> {
        let mut reader = Reader::new(payload);
        let ids = reader.list(BLOCKS_CAP, Reader::u32)?;
        reader.end()?;
        let serving = self
            .regions
            .get(usize::from(region))
            .ok_or_else(|| unknown_region(&region.to_string()))
            .and_then(|region| Serving::new(Arc::clone(&region.memory), &region.layout, &ids));
        match serving {
            Ok(serving) => {
                self.serving.insert((link, id), serving);
                self.serve_on(io, link, id);
            }
            Err(error) => {
                let header = io.header(link, REFUSED).u64(id);
                let text = Writer::default().str(&error.to_string()).finish();
                io.message(link, header, Payload::Bytes(text), 0);
            }
        }
        Ok(())
    }

    fn serve_on(&mut self, io: &mut Io, link: LinkId, id: u64) {
        let Some(serving) = self.serving.get_mut(&(link, id)) else {
            return;
        };
        if serving.send(io, link, id) {
            self.serving.remove(&(link, id));
        }
    }

    // --- handoffs: producer

    fn finalize(
        &mut self,
        io: &mut Io,
        handoff: HandoffId,
        generation: u32,
        first: u32,
        block_ids: &[u32],
    ) {
        let mut blocks = Vec::with_capacity(block_ids.len() * self.regions.len());
        for (region, local) in self.regions.iter().enumerate() {
            let region = region as u16;
            for (index, &block_id) in block_ids.iter().enumerate() {
                let position = first + index as u32;
                let bytes = local.layout.offset(block_id).ok().and_then(|at| {
                    local
                        .memory
                        .buffer()
                        .bytes(at as usize, local.layout.block_bytes as usize)
                });
                let Some(bytes) = bytes else {
                    let text = format!(
                        "block {block_id} cannot be lent: it is not in region {:?}",
                        local.name
                    );
                    return self.end(io, handoff, &text);
                };
                let checksum = checksum(&handoff, generation, region, position, bytes);
                blocks.push(FinalBlock {
                    region,
                    position,
                    block_id,
                    checksum,
                });
            }
        }
        // Marked before the blocks could change: unmarked now, they did not change while they were read.
        if self.ended.is_marked(&handoff) {
            return;
        }
        let actions = self.producer.finalize(handoff, generation, &blocks);
        self.act(io, actions);
    }

    fn end(&mut self, io: &mut Io, handoff: HandoffId, reason: &str) {
        let actions = self.producer.end(handoff, reason);
        self.act(io, actions);
    }

    fn act(&mut self, io: &mut Io, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Announce {
                    link,
                    handoff,
                    generation,
                    blocks,
                } => {
                    let header = io.header(link, FINAL).raw(&handoff).u32(generation);
                    io.message(link, header, Payload::Bytes(final_blocks(&blocks)), 0);
                }
                Action::Gone {
                    link,
                    handoff,
                    reason,
                } => {
                    let header = io.header(link, GONE).raw(&handoff);
                    io.message(
                        link,
                        header,
                        Payload::Bytes(Writer::default().str(&reason).finish()),
                        0,
                    );
                }
            }
        }
        *self.num_lent.lock().unwrap_or_else(PoisonError::into_inner) = self.producer.num_lent();
    }

    // --- handoffs: consumer

    fn load(&mut self, io: &mut Io, request: LoadRequest) {
        let LoadRequest {
            handoff,
            producer,
            incarnation,
            generation,
            first,
            block_ids,
            is_committed,
        } = request;
        let num_regions = self.regions.len() as u16;
        let load = Load {
            generation,
            first,
            block_ids,
            num_regions,
            is_committed,
        };
        if let Err(error) = self.consumer.begin(handoff, load) {
            return self
                .events
                .push(Event::Log(format!("load refused: {error}")));
        }
        let link = self.link_to(io, &producer);
        self.loading.insert(
            handoff,
            Loading {
                link,
                incarnation,
                started: io.now,
                has_selected: false,
            },
        );
        self.select(io, handoff);
    }

    /// Asks the producer for a load's blocks once its regions are known.
    fn select(&mut self, io: &mut Io, handoff: HandoffId) {
        let Some(loading) = self.loading.get_mut(&handoff) else {
            return;
        };
        let Some(peer) = self.peers.get(&loading.link) else {
            return;
        };
        let Some(theirs) = peer.regions.as_ref().filter(|_| !loading.has_selected) else {
            return;
        };
        let Some((first, end)) = self.consumer.range(&handoff) else {
            return;
        };
        loading.has_selected = true;
        if peer.incarnation != loading.incarnation {
            self.consumer
                .fail(&handoff, "the producer has been restarted");
        } else if let Some(difference) = region_difference(&self.regions, theirs) {
            self.consumer.fail(&handoff, &difference);
        } else {
            let generation = self.consumer.generation(&handoff).unwrap_or_default();
            let header = io
                .header(loading.link, SELECT)
                .raw(&handoff)
                .u32(generation)
                .u32(first)
                .u32(end);
            io.message(loading.link, header, Payload::None, 0);
        }
        self.end_load_if_over(io, handoff);
    }

    fn announced(
        &mut self,
        io: &mut Io,
        link: LinkId,
        handoff: HandoffId,
        generation: u32,
        data: &[u8],
    ) -> Result<()> {
        let blocks = read_final_blocks(data)?;
        if self
            .loading
            .get(&handoff)
            .is_none_or(|loading| loading.link != link)
        {
            return Ok(());
        }
        for batch in self.consumer.announced(&handoff, generation, &blocks)? {
            let remote_ids = batch.blocks.iter().map(|block| block.block_id).collect();
            let (region, local_ids) = (batch.region, batch.local_ids.clone());
            let owner = Owner::Handoff(handoff, batch);
            if let Err((_, error)) =
                self.read(io, link, region, local_ids, region, remote_ids, None, owner)
            {
                self.consumer.read_failed(&handoff, &error.to_string());
            }
        }
        self.end_load_if_over(io, handoff);
        Ok(())
    }

    fn fail_load(&mut self, io: &mut Io, handoff: HandoffId, reason: &str) {
        self.consumer.fail(&handoff, reason);
        self.end_load_if_over(io, handoff);
    }

    fn end_load_if_over(&mut self, io: &mut Io, handoff: HandoffId) {
        let Some(outcome) = self.consumer.take_outcome(&handoff) else {
            return;
        };
        let Some(loading) = self.loading.remove(&handoff) else {
            return;
        };
        match outcome {
            Outcome::Loaded { num_bytes } => {
                let transport = io
                    .road(loading.link)
                    .map_or_else(String::new, |road| road.transport().to_owned());
                let header = io.header(loading.link, DONE).raw(&handoff);
                io.message(loading.link, header, Payload::None, 0);
                let elapsed = Instant::now().saturating_duration_since(loading.started);
                self.events.push(Event::Loaded {
                    handoff,
                    num_bytes,
                    transport,
                    elapsed,
                });
            }
            Outcome::Failed { missing, reason } => self.events.push(Event::Failed {
                handoff,
                missing,
                reason,
            }),
        }
    }

    fn read_command(&mut self, io: &mut Io, command: ReadCommand) {
        let ReadCommand {
            peer,
            region,
            local_ids,
            remote_region,
            remote_ids,
            deadline,
            completer,
        } = command;
        let local = self
            .regions
            .iter()
            .position(|candidate| candidate.name == region);
        let Some(regions) = self.peers.get(&peer).and_then(|peer| peer.regions.as_ref()) else {
            return completer.complete(Err(Error::lost(
                "unknown",
                "the peer is gone; connect again",
            )));
        };
        let remote = regions
            .iter()
            .position(|candidate| candidate.name == remote_region);
        let (Some(local), Some(remote)) = (local, remote) else {
            let missing = if local.is_none() {
                region
            } else {
                remote_region
            };
            return completer.complete(Err(unknown_region(&missing)));
        };
        let (local, remote) = (local as u16, remote as u16);
        let owner = Owner::Caller(completer);
        let begun = self.read(
            io, peer, local, local_ids, remote, remote_ids, deadline, owner,
        );
        if let Err((Owner::Caller(completer), error)) = begun {
            completer.complete(Err(error));
        }
    }
}

struct ReadCommand {
    peer: LinkId,
    region: String,
    local_ids: Vec<u32>,
    remote_region: String,
    remote_ids: Vec<u32>,
    deadline: Option<Instant>,
    completer: Completer<u64>,
}

/// Base address and usable key of a peer's region.
fn remote(
    peers: &mut HashMap<LinkId, Peer>,
    io: &mut Io,
    link: LinkId,
    region: u16,
) -> Result<(u64, Arc<RemoteKey>)> {
    let gone = || Error::lost("unknown", "the peer is gone");
    let peer = peers.get_mut(&link).ok_or_else(gone)?;
    let described = peer
        .regions
        .as_ref()
        .and_then(|all| all.get(usize::from(region)))
        .ok_or_else(gone)?;
    if let Some(key) = peer.keys.get(&region) {
        return Ok((described.base, Arc::clone(key)));
    }
    let key = Arc::new(io.unpack_rkey(link, &described.rkey)?);
    let base = described.base;
    peer.keys.insert(region, Arc::clone(&key));
    Ok((base, key))
}

fn region_difference(ours: &[LocalRegion], theirs: &[RemoteRegion]) -> Option<String> {
    if ours.len() != theirs.len() {
        return Some(format!(
            "{} regions here, {} there",
            ours.len(),
            theirs.len()
        ));
    }
    let differs = |(ours, theirs): (&LocalRegion, &RemoteRegion)| {
        let (here, there) = (ours.layout.block_bytes, theirs.layout.block_bytes);
        (ours.name != theirs.name || here != there).then(|| {
            format!(
                "region {:?} of {here}-byte blocks here, {:?} of {there} there",
                ours.name, theirs.name
            )
        })
    };
    ours.iter().zip(theirs).find_map(differs)
}

impl Service for Blocks {
    type Command = Command;

    fn command(&mut self, io: &mut Io, command: Command) {
        match command {
            Command::Register {
                name,
                layout,
                buffer,
                completer,
            } => {
                completer.complete(self.register(io, name, layout, buffer));
            }
            Command::Connect { address, completer } => {
                let link = self.link_to(io, &address);
                if let Some(info) = self.info(io, link) {
                    completer.complete(Ok(info));
                } else if let Some(peer) = self.peers.get_mut(&link) {
                    peer.waiting.push(completer);
                }
            }
            Command::Read {
                peer,
                region,
                local_ids,
                remote_region,
                remote_ids,
                deadline,
                completer,
            } => {
                let command = ReadCommand {
                    peer,
                    region,
                    local_ids,
                    remote_region,
                    remote_ids,
                    deadline,
                    completer,
                };
                self.read_command(io, command);
            }
            Command::Finalize {
                handoff,
                generation,
                first,
                block_ids,
            } => {
                self.finalize(io, handoff, generation, first, &block_ids);
            }
            Command::End { handoff, reason } => {
                self.end(io, handoff, &reason);
                self.ended.unmark(&handoff);
            }
            Command::Load(request) => self.load(io, request),
            Command::Commit { handoff } => {
                self.consumer.commit(&handoff);
                self.end_load_if_over(io, handoff);
            }
            Command::Cancel { handoff, reason } => self.fail_load(io, handoff, &reason),
        }
    }

    fn link_up(&mut self, io: &mut Io, link: LinkId, peer: &Identity) {
        let address = io.peer(link);
        if !self.peers.contains_key(&link) {
            self.add_peer(link, address.clone(), peer.incarnation);
        }
        if let Some(known) = self.peers.get_mut(&link) {
            known.incarnation = peer.incarnation;
        }
        let transport = io
            .road(link)
            .map_or_else(String::new, |road| road.transport().to_owned());
        let ucx = io.ucx();
        self.events.push(Event::Log(format!(
            "session.open peer={address} transport={transport} ucx={ucx}"
        )));
        if transport == "tcp" && peer.host == io.identity().host {
            let text = format!(
                "session.slow peer={address} is on this host, but its blocks move over tcp"
            );
            self.events.push(Event::Log(text));
        }
        match self.describe_regions() {
            Ok(frame) => io.send(link, &frame),
            Err(error) => io.fail(link, error),
        }
    }

    fn link_down(&mut self, io: &mut Io, link: LinkId, error: Error) {
        self.events
            .push(Event::Log(format!("session.closed {error}")));
        self.by_address.retain(|_, other| *other != link);
        self.producer.link_down(link);
        self.serving.retain(|(other, _), _| *other != link);
        if let Some(peer) = self.peers.remove(&link) {
            for completer in peer.waiting {
                completer.complete(Err(error.clone()));
            }
        }
        let affected: Vec<u64> = self
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.link == link)
            .map(|(id, _)| *id)
            .collect();
        for id in affected {
            if let Some(transfer) = self.transfers.get_mut(&id) {
                transfer.failure.get_or_insert(error.clone());
            }
            self.finish_if_over(io, id);
        }
        let loads: Vec<HandoffId> = self
            .loading
            .iter()
            .filter(|(_, loading)| loading.link == link)
            .map(|(handoff, _)| *handoff)
            .collect();
        for handoff in loads {
            self.fail_load(io, handoff, &error.to_string());
        }
    }

    fn frame(&mut self, io: &mut Io, link: LinkId, frame: &[u8]) -> Result<()> {
        let mut reader = Reader::new(frame);
        match reader.u8()? {
            REGIONS => self.take_regions(io, link, reader),
            other => Err(Error::protocol(format_args!("frame {other} to an agent"))),
        }
    }

    fn message(&mut self, io: &mut Io, link: LinkId, header: &[u8], data: AmData) -> Result<()> {
        let mut reader = Reader::new(header);
        let kind = reader.u8()?;
        match kind {
            READ => {
                let (id, region) = (reader.u64()?, reader.u16()?);
                self.serve(io, link, id, region, &data)
            }
            DATA => {
                let (id, offset) = (reader.u64()?, reader.u64()?);
                self.placed(io, link, id, offset, &data)
            }
            CREDIT => {
                let (id, credit) = (reader.u64()?, reader.u64()?);
                if let Some(serving) = self.serving.get_mut(&(link, id)) {
                    serving.grant(credit);
                }
                self.serve_on(io, link, id);
                Ok(())
            }
            REFUSED => {
                let id = reader.u64()?;
                let text = reason(&data)?;
                if let Some(transfer) = self
                    .transfers
                    .get_mut(&id)
                    .filter(|transfer| transfer.link == link)
                {
                    transfer
                        .failure
                        .get_or_insert(Error::Config(format!("the peer refused: {text}")));
                }
                self.finish_if_over(io, id);
                Ok(())
            }
            SELECT => {
                let (handoff, _generation) = (reader.fixed()?, reader.u32()?);
                let select = Select {
                    link,
                    first: reader.u32()?,
                    end: reader.u32()?,
                };
                let actions = self.producer.select(select, handoff, io.now + OPEN_TIMEOUT);
                self.act(io, actions);
                Ok(())
            }
            FINAL => {
                let (handoff, generation) = (reader.fixed()?, reader.u32()?);
                self.announced(io, link, handoff, generation, &data)
            }
            GONE => {
                let handoff = reader.fixed()?;
                let text = reason(&data)?;
                if self
                    .loading
                    .get(&handoff)
                    .is_some_and(|loading| loading.link == link)
                {
                    self.fail_load(io, handoff, &text);
                }
                Ok(())
            }
            DONE => {
                let handoff = reader.fixed()?;
                if self.producer.done(link, handoff) {
                    self.events.push(Event::Taken { handoff });
                    self.act(io, Vec::new());
                }
                Ok(())
            }
            other => Err(Error::protocol(format_args!("message {other} to an agent"))),
        }
    }

    fn done(&mut self, io: &mut Io, token: u64, result: std::result::Result<(), Status>) {
        let Some((id, len)) = self.gets.remove(&token) else {
            return;
        };
        let Some(transfer) = self.transfers.get_mut(&id) else {
            return;
        };
        transfer.in_flight -= 1;
        let link = transfer.link;
        match result {
            Ok(()) => transfer.num_placed += len,
            Err(status) => {
                let error = Error::lost(&io.peer(link), status);
                transfer.failure.get_or_insert(error.clone());
                io.fail(link, error);
            }
        }
        self.get_on(io, id);
        self.finish_if_over(io, id);
    }

    fn timer(&mut self, io: &mut Io) -> Option<Instant> {
        let (actions, parked) = self.producer.expire(io.now);
        self.act(io, actions);
        let now = io.now;
        let is_late = |transfer: &&mut Transfer| {
            transfer.failure.is_none() && transfer.deadline.is_some_and(|deadline| deadline <= now)
        };
        for transfer in self.transfers.values_mut().filter(is_late) {
            let text = "the blocks were not read in time; the peer is closed, connect again";
            transfer.failure = Some(Error::Timeout(text.to_owned()));
            io.fail(transfer.link, Error::Timeout(text.to_owned()));
        }
        let pending = self
            .transfers
            .values()
            .filter(|transfer| transfer.failure.is_none());
        pending
            .filter_map(|transfer| transfer.deadline)
            .chain(parked)
            .min()
    }

    fn log(&mut self, text: String) {
        self.events
            .push(Event::Log(format!("session.refused {text}")));
    }
}
