//! Both roles of handoffs: what the two state machines say becomes messages and reads, and the other way round.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::finals::Final;
use super::messages::{
    DONE, FINAL, GONE, REASON_CAP, SELECT, final_blocks, read_final_blocks, reason,
};
use super::peers::transport;
use super::plan::region_gone;
use super::regions::LocalRegion;
use super::service::{Blocks, Loading};
use super::transfer::{Owner, Take};
use super::{Event, LoadRequest};
use crate::codec::{Reader, Writer};
use crate::error::{Error, Result};
use crate::handoff::consumer::{Batch, Load, Outcome};
use crate::handoff::producer::{Action, OPEN_TIMEOUT, Select};
use crate::handoff::{FinalBlock, HandoffId, checksum};
use crate::node::{Io, LinkId};
use crate::region::{Layout, Pieces, RegionId, RemoteRegion, coalesce};
use crate::trace::Track;
use crate::transport::{Memory, Payload};

/// Bytes of one slice of work on checksums: about a millisecond, which sockets and other handoffs wait at most.
const SLICE: u64 = 8 << 20;

/// The producer.
impl Blocks {
    /// Takes the next slice of blocks that are final, in the regions in which they are, and tells who has selected
    /// them; whether more are left.
    pub(super) fn finalize_on(&mut self, io: &mut Io) -> bool {
        let known = &self.regions;
        let num_blocks = |regions: &[RegionId]| {
            let known = regions.iter().filter_map(|region| known.get(region));
            slice_of(known.map(|region| region.layout.block_bytes).sum())
        };
        let Some((part, regions)) = self.finals.slice(num_blocks) else {
            return false;
        };
        let began = self.trace.now();
        match self.checksums(&part, &regions) {
            // Marked before the blocks could change: unmarked now, they did not change while they were read.
            Ok(_) if self.ended.is_marked(&part.handoff) => {}
            Ok(blocks) => {
                let actions = self
                    .producer
                    .finalize(part.handoff, part.generation, &blocks);
                self.act(io, actions);
                let before = regions
                    .first()
                    .map_or(0, |id| self.regions.range(..id).count());
                let facts = [
                    ("layer", before as u64),
                    ("first", u64::from(part.first)),
                    ("blocks", part.block_ids.len() as u64),
                    ("layers", regions.len() as u64),
                ];
                self.trace
                    .span(Track::Node, "announced", &part.handoff, began, &facts);
            }
            Err(reason) => self.end(io, part.handoff, &reason),
        }
        !self.finals.is_empty()
    }

    fn checksums(
        &self,
        part: &Final,
        regions: &[RegionId],
    ) -> std::result::Result<Vec<FinalBlock>, String> {
        let mut blocks = Vec::with_capacity(part.block_ids.len() * regions.len());
        for id in regions {
            let Some(local) = self.regions.get(id) else {
                return Err("blocks of a region that was closed cannot be lent".to_owned());
            };
            let region = self.regions.range(..id).count() as u16;
            for (&block_id, position) in part.block_ids.iter().zip(part.first..) {
                let Some(bytes) = block_bytes(&local.memory, &local.layout, block_id) else {
                    return Err(format!(
                        "block {block_id} cannot be lent: it is not in region {:?}",
                        local.name
                    ));
                };
                blocks.push(FinalBlock {
                    region,
                    position,
                    block_id,
                    checksum: checksum(&part.handoff, part.generation, region, position, bytes),
                });
            }
        }
        Ok(blocks)
    }

    pub(super) fn end(&mut self, io: &mut Io, handoff: HandoffId, reason: &str) {
        self.trace.instant(Track::Node, "ended", &handoff, &[]);
        self.finals.forget(&handoff);
        let actions = self.producer.end(handoff, reason);
        self.act(io, actions);
    }

    pub(super) fn act(&mut self, io: &mut Io, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Announce {
                    link,
                    handoff,
                    generation,
                    blocks,
                } => {
                    let header = io.header(link, FINAL).raw(&handoff).u32(generation);
                    io.message(link, header, Payload::Bytes(final_blocks(&blocks)));
                }
                Action::Gone {
                    link,
                    handoff,
                    reason,
                } => {
                    let header = io.header(link, GONE).raw(&handoff);
                    let text = Writer::default().text(&reason, REASON_CAP).finish();
                    io.message(link, header, Payload::Bytes(text));
                }
            }
        }
        let num_lent = self.producer.num_lent();
        self.board.num_lent.store(num_lent, Ordering::Relaxed);
    }
}

/// The consumer.
impl Blocks {
    pub(super) fn load(&mut self, io: &mut Io, request: LoadRequest) {
        let handoff = request.handoff;
        self.trace.instant(Track::Node, "load", &handoff, &[]);
        let block_bytes = self
            .regions
            .values()
            .map(|region| region.layout.block_bytes);
        let load = Load {
            generation: request.generation,
            max_batch: slice_of(block_bytes.max().unwrap_or_default()),
            first: request.first,
            block_ids: request.block_ids,
            num_regions: self.regions.len() as u16,
            is_committed: request.is_committed,
        };
        if let Err(error) = self.consumer.begin(handoff, load) {
            let text = format!("load refused: {error}");
            return self.events.push_minor(Event::Log(text));
        }
        let link = self.link_to(io, &request.producer);
        let loading = Loading {
            link,
            incarnation: request.incarnation,
            started: io.now,
            has_selected: false,
        };
        self.loading.insert(handoff, loading);
        if self.regions.is_empty() {
            return self.fail_load(io, handoff, "no region is registered here");
        }
        self.select(io, handoff);
    }

    /// Asks the producer for a load's blocks once its regions are known.
    pub(super) fn select(&mut self, io: &mut Io, handoff: HandoffId) {
        let Some(loading) = self.loading.get_mut(&handoff) else {
            return;
        };
        let Some(peer) = self.peers.get(&loading.link) else {
            return;
        };
        let Some(theirs) = peer.regions.as_ref().filter(|_| !loading.has_selected) else {
            return;
        };
        loading.has_selected = true;
        if peer.handle.incarnation() != loading.incarnation {
            let reason = "the producer has been restarted";
            self.consumer.fail(&handoff, reason);
        } else if let Some(difference) = region_difference(&self.regions, theirs) {
            self.consumer.fail(&handoff, &difference);
        } else if let Some((first, end)) = self.consumer.select(&handoff) {
            let generation = self.consumer.generation(&handoff).unwrap_or_default();
            let header = io
                .header(loading.link, SELECT)
                .raw(&handoff)
                .u32(generation)
                .u32(first)
                .u32(end);
            io.message(loading.link, header, Payload::None);
            let facts = [("first", u64::from(first)), ("end", u64::from(end))];
            self.trace
                .instant(Track::Node, "selected", &handoff, &facts);
        }
        self.end_load_if_over(io, handoff);
    }

    fn is_loading_from(&self, link: LinkId, handoff: &HandoffId) -> bool {
        self.loading
            .get(handoff)
            .is_some_and(|loading| loading.link == link)
    }

    fn announced(
        &mut self,
        io: &mut Io,
        link: LinkId,
        handoff: HandoffId,
        generation: u32,
        blocks: &[FinalBlock],
    ) -> Result<()> {
        if !self.is_loading_from(link, &handoff) {
            return Ok(());
        }
        for batch in self.consumer.announced(&handoff, generation, blocks)? {
            match self.plan_batch(link, &batch) {
                Ok((region, remote_region, pieces)) => {
                    let take = Take {
                        link,
                        region,
                        remote_region,
                        pieces: Arc::new(pieces),
                        // Their checksums have come with the announcement, and cover more.
                        is_summed: false,
                        deadline: None,
                        owner: Owner::Handoff(handoff, batch),
                    };
                    self.take(io, take);
                }
                Err(error) => {
                    self.consumer.read_failed(&handoff, &error.to_string());
                    self.end_load_if_over(io, handoff);
                }
            }
        }
        Ok(())
    }

    /// Handoffs name regions by their place among all of an agent.
    fn plan_batch(&self, link: LinkId, batch: &Batch) -> Result<(RegionId, RegionId, Pieces)> {
        let place = usize::from(batch.region);
        let peer = self.peers.get(&link);
        let theirs = peer.and_then(|peer| peer.regions.as_ref()?.values().nth(place));
        let (Some((&id, ours)), Some(theirs)) = (self.regions.iter().nth(place), theirs) else {
            return Err(region_gone());
        };
        let from_ids: Vec<u32> = batch.blocks.iter().map(|block| block.block_id).collect();
        let pieces = coalesce(
            (&ours.layout, &batch.local_ids),
            (&theirs.layout, &from_ids),
        )?;
        Ok((id, theirs.id, pieces))
    }

    /// For each block of a batch, whether it is here with the checksum that the producer computed.
    pub(super) fn verify(
        &self,
        handoff: &HandoffId,
        batch: &Batch,
        memory: &Memory,
        layout: &Layout,
    ) -> Vec<bool> {
        let generation = self.consumer.generation(handoff).unwrap_or_default();
        let is_whole = |(block, &local): (&FinalBlock, &u32)| {
            block_bytes(memory, layout, local).is_some_and(|bytes| {
                checksum(handoff, generation, block.region, block.position, bytes) == block.checksum
            })
        };
        let blocks = batch.blocks.iter().zip(&batch.local_ids);
        blocks.map(is_whole).collect()
    }

    pub(super) fn fail_load(&mut self, io: &mut Io, handoff: HandoffId, reason: &str) {
        self.consumer.fail(&handoff, reason);
        self.abandon_reads(io, &handoff, reason);
        self.end_load_if_over(io, handoff);
    }

    pub(super) fn end_load_if_over(&mut self, io: &mut Io, handoff: HandoffId) {
        let Some(outcome) = self.consumer.take_outcome(&handoff) else {
            return;
        };
        let Some(loading) = self.loading.remove(&handoff) else {
            return;
        };
        let how = match &outcome {
            Outcome::Loaded { .. } => "loaded",
            Outcome::Failed { .. } => "failed",
        };
        self.trace.instant(Track::Node, how, &handoff, &[]);
        self.events.push(match outcome {
            Outcome::Loaded { num_bytes } => {
                let header = io.header(loading.link, DONE).raw(&handoff);
                io.message(loading.link, header, Payload::None);
                Event::Loaded {
                    handoff,
                    num_bytes,
                    transport: transport(io, loading.link),
                    elapsed: Instant::now().saturating_duration_since(loading.started),
                }
            }
            Outcome::Failed { missing, reason } => Event::Failed {
                handoff,
                missing,
                reason,
            },
        });
    }

    pub(super) fn loads_down(&mut self, io: &mut Io, link: LinkId, error: &Error) {
        let lost = self
            .loading
            .iter()
            .filter(|(_, loading)| loading.link == link);
        let lost: Vec<HandoffId> = lost.map(|(handoff, _)| *handoff).collect();
        for handoff in lost {
            self.fail_load(io, handoff, &error.to_string());
        }
    }
}

/// What the other side says.
impl Blocks {
    pub(super) fn handoff_message(
        &mut self,
        io: &mut Io,
        link: LinkId,
        kind: u8,
        mut header: Reader<'_>,
        data: &[u8],
    ) -> Result<()> {
        let handoff = header.fixed()?;
        match kind {
            SELECT => {
                let _generation = header.u32()?;
                let (first, end) = (header.u32()?, header.u32()?);
                header.end()?;
                let select = Select { link, first, end };
                let actions = self.producer.select(select, handoff, io.now + OPEN_TIMEOUT);
                self.act(io, actions);
            }
            FINAL => {
                let generation = header.u32()?;
                header.end()?;
                self.announced(io, link, handoff, generation, &read_final_blocks(data)?)?;
            }
            GONE => {
                header.end()?;
                let text = reason(data)?;
                if self.is_loading_from(link, &handoff) {
                    self.fail_load(io, handoff, &text);
                }
            }
            _ => {
                header.end()?;
                if self.producer.done(link, handoff) {
                    self.trace.instant(Track::Node, "taken", &handoff, &[]);
                    self.events.push(Event::Taken { handoff });
                    self.act(io, Vec::new());
                }
            }
        }
        Ok(())
    }
}

/// How many blocks of this size make a slice of work.
fn slice_of(block_bytes: u64) -> usize {
    (SLICE / block_bytes.max(1)).max(1) as usize
}

pub(super) fn block_bytes<'m>(memory: &'m Memory, layout: &Layout, id: u32) -> Option<&'m [u8]> {
    let at = layout.offset(id).ok()?;
    memory
        .buffer()
        .bytes(at as usize, layout.block_bytes as usize)
}

fn region_difference(
    ours: &BTreeMap<RegionId, LocalRegion>,
    theirs: &BTreeMap<RegionId, RemoteRegion>,
) -> Option<String> {
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
    ours.values().zip(theirs.values()).find_map(differs)
}
