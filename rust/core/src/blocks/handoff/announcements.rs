//! Handoffs at their producer: ready blocks get their checksums in slices, if they have any, and are announced.

use std::time::Duration;

use kvpipe_ucx::{DeviceBlock, SharedBytes};

use super::digests::{Digested, device_block, is_on_device};
use super::producer::send_all;
use super::ready::{ReadyBlocks, ReadyRange};
use super::service::HandoffService;
use super::{Places, ReadyBlock, checksum_at};
use crate::blocks::regions::{Division, LocalRegion, grant, revoke};
use crate::checksum::{RunningChecksum, Shift};
use crate::ids::{HandoffId, RegionId};
use crate::integrity::Integrity;
use crate::trace::Track;
use crate::transfer::Cx;
use crate::transfer::region::Layout;
use crate::transport::Memory;

/// Bytes of one slice of work on checksums: about a millisecond, which sockets and other handoffs wait at most.
const SLICE: u64 = 8 << 20;
/// Cost of announcing a block, in bytes of checksums that take as long.
const ANNOUNCEMENT: u64 = 1 << 10;

/// A GPU computes about so many bytes in the time of one here, by an estimate.
const DEVICE_FACTOR: u64 = 64;

/// True if blocks in such memory are announced with checksums.
fn has_checksums(integrity: Integrity, memory: &Memory) -> bool {
    integrity.resolved(memory.buffer().kind()) == Integrity::Checksum
}

/// Blocks of a handoff that are ready in some regions, on their way to their announcement.
pub(super) struct ReadyAnnouncement {
    part: ReadyRange,
    pub(super) regions: Vec<RegionId>,
    /// Where the blocks lie of which a GPU computes the digests.
    digested: Vec<(usize, usize)>,
    /// By the trace's clock.
    began: Duration,
}

impl ReadyAnnouncement {
    pub(super) fn is_of(&self, handoff: &HandoffId) -> bool {
        self.part.handoff == *handoff
    }
}

/// The checksums of blocks that are announced, as far as a GPU has computed them.
enum Checksums<'d> {
    /// The blocks, of which a GPU has to compute the digests, are to be gathered. No checksum is computed.
    Unknown(Vec<DeviceBlock>),
    /// The digests of those blocks, in the same order.
    Known(std::slice::Iter<'d, u64>),
}

/// Address and length of a block.
fn place_of(block: &DeviceBlock) -> (usize, usize) {
    (block.buffer.address() + block.offset, block.len)
}

impl HandoffService {
    /// True if blocks wait that could be announced, or digested first.
    pub(super) fn may_announce(&self) -> bool {
        !self.ready.is_empty() && !self.digests.is_full()
    }

    /// Announces the next slice of ready blocks, in their regions, to the sessions that have selected them.
    pub(super) fn announce_ready(&mut self, cx: &mut Cx<'_>) {
        if !self.may_announce() {
            return;
        }
        let (known, integrity) = (&self.agent.regions, self.integrity);
        let num_blocks = |regions: &[RegionId]| {
            let known = regions.iter().filter_map(|region| known.get(region));
            let work = known.map(|region| {
                let block_bytes = region.layout.block_bytes;
                let hashed = match has_checksums(integrity, &region.memory) {
                    true if is_on_device(&region.memory) => block_bytes / DEVICE_FACTOR,
                    true => block_bytes,
                    false => 0,
                };
                let num_slices: usize = region.divisions.iter().map(|it| it.slices.len()).sum();
                hashed + (1 + num_slices as u64) * ANNOUNCEMENT
            });
            slice_of(work.sum())
        };
        let Some((part, regions)) = self.ready.slice(num_blocks) else {
            return;
        };
        let began = self.trace.now();
        let ready = ReadyAnnouncement {
            part,
            regions,
            digested: Vec::new(),
            began,
        };
        self.announce(cx, ready);
    }

    /// Announces blocks, once a GPU that has some of them has computed their digests.
    fn announce(&mut self, cx: &mut Cx<'_>, ready: ReadyAnnouncement) {
        match self.to_digest(&ready) {
            Ok(blocks) if blocks.is_empty() => {
                let blocks = self.ready_blocks(&ready, &mut Checksums::Known([].iter()));
                self.announce_blocks(cx, &ready, blocks);
            }
            Ok(blocks) => {
                let digested = blocks.iter().map(place_of).collect();
                let ready = ReadyAnnouncement { digested, ..ready };
                self.digest(cx, blocks, Digested::Announcement(ready));
            }
            Err(reason) => self.end(cx, ready.part.handoff, &reason),
        }
    }

    /// The digests of ready blocks are known, or will not be.
    pub(super) fn announcement_digested(
        &mut self,
        cx: &mut Cx<'_>,
        ready: ReadyAnnouncement,
        digests: Result<Vec<u64>, String>,
    ) {
        // Peers may load other slices by now, and a region may have been closed.
        let is_same = self.to_digest(&ready).map(|blocks| {
            let blocks = blocks.iter().map(place_of);
            blocks.eq(ready.digested.iter().copied())
        });
        if is_same == Ok(false) && digests.is_ok() {
            // One launch may have become too many.
            return self.ready.push_again(ready.part, ready.regions);
        }
        let blocks = is_same.and(digests).and_then(|digests| {
            let mut checksums = Checksums::Known(digests.iter());
            self.ready_blocks(&ready, &mut checksums)
        });
        self.announce_blocks(cx, &ready, blocks);
    }

    fn announce_blocks(
        &mut self,
        cx: &mut Cx<'_>,
        ready: &ReadyAnnouncement,
        blocks: Result<Vec<ReadyBlock>, String>,
    ) {
        let (part, regions) = (&ready.part, &ready.regions);
        match blocks {
            // Marked before the blocks could change: unmarked now, they did not change while they were read. Where vLLM's V2
            // runner zeroes blocks before it marks the end, ENDED follows these at once.
            Ok(_) if self.shared.has_ended(&part.handoff) => {}
            Ok(blocks) => {
                let messages = self.producer.mark_ready(part.handoff, &blocks);
                send_all(cx.links, messages);
                let before = regions
                    .first()
                    .map_or(0, |id| self.agent.regions.range(..id).count());
                let facts = [
                    ("layer", before as u64),
                    ("first", u64::from(part.first)),
                    ("blocks", part.block_ids.len() as u64),
                    ("layers", regions.len() as u64),
                ];
                self.trace.span(
                    Track::Reactor,
                    "announced",
                    &part.handoff,
                    ready.began,
                    &facts,
                );
            }
            Err(reason) => self.end(cx, part.handoff, &reason),
        }
    }

    /// The blocks of which a GPU has to compute the digests, in the order of their announcement.
    fn to_digest(&self, ready: &ReadyAnnouncement) -> Result<Vec<DeviceBlock>, String> {
        let has_digests = |id: &RegionId| {
            let region = self.agent.regions.get(id);
            region.is_some_and(|it| {
                is_on_device(&it.memory) && has_checksums(self.integrity, &it.memory)
            })
        };
        if !ready.regions.iter().any(has_digests) {
            return Ok(Vec::new());
        }
        let mut checksums = Checksums::Unknown(Vec::new());
        self.ready_blocks(ready, &mut checksums)?;
        match checksums {
            Checksums::Unknown(blocks) => Ok(blocks),
            Checksums::Known(_) => Ok(Vec::new()),
        }
    }

    fn ready_blocks(
        &self,
        ready: &ReadyAnnouncement,
        checksums: &mut Checksums<'_>,
    ) -> Result<Vec<ReadyBlock>, String> {
        let ReadyAnnouncement { part, regions, .. } = ready;
        let places = Places::new(&part.handoff, self.producer.epoch(&part.handoff));
        let mut blocks = Vec::with_capacity(part.block_ids.len() * regions.len());
        for id in regions {
            let Some(local) = self.agent.regions.get(id) else {
                return Err("blocks of a region that was closed cannot be leased".to_owned());
            };
            let mut divided = self.divided(local, part.block_ids.len());
            for (&block_id, position) in part.block_ids.iter().zip(part.first..) {
                if local.layout.offset(block_id).is_err() {
                    return Err(format!(
                        "block {block_id} cannot be leased: it is not in region {:?}",
                        local.name
                    ));
                }
                let mut whole = ReadyBlock {
                    region: *id,
                    position,
                    block_id,
                    checksum: None,
                };
                whole.checksum = if divided.is_empty() {
                    self.checksum(checksums, local, block_id, places.at(*id, position))?
                } else {
                    self.slices_ready(checksums, places, whole, &mut divided)?
                };
                blocks.push(whole);
            }
            // Region by region, as they are selected.
            let slices = divided.into_iter().flat_map(|it| it.slices);
            blocks.extend(slices.flat_map(|slice| slice.ready));
        }
        Ok(blocks)
    }

    /// The checksum of a block of a region at a place; none where blocks have none, or while it cannot be known.
    fn checksum(
        &self,
        checksums: &mut Checksums<'_>,
        region: &LocalRegion,
        block_id: u32,
        place: RunningChecksum,
    ) -> Result<Option<u64>, String> {
        let (memory, layout) = (&*region.memory, &region.layout);
        if !has_checksums(self.integrity, memory) {
            return Ok(None);
        }
        let checksum = match checksums {
            Checksums::Unknown(blocks) => {
                if is_on_device(memory) {
                    blocks.extend(device_block(memory, layout, block_id));
                }
                return Ok(None);
            }
            Checksums::Known(digests) if is_on_device(memory) => {
                let digest = digests.next();
                digest.and_then(|it| self.digests.checksum(place, layout.block_bytes, *it))
            }
            Checksums::Known(_) => {
                block_bytes(memory, layout, block_id).map(|bytes| checksum_at(place, bytes))
            }
        };
        let unknown = || {
            format!(
                "block {block_id} of region {:?} has no checksum",
                region.name
            )
        };
        checksum.ok_or_else(unknown).map(Some)
    }

    /// Adds each slice of a block to those of its region, and returns the checksum of the whole one, which follows from
    /// theirs.
    fn slices_ready(
        &self,
        checksums: &mut Checksums<'_>,
        places: Places,
        whole: ReadyBlock,
        divided: &mut [Divided<'_>],
    ) -> Result<Option<u64>, String> {
        let mut of_whole = None;
        for Divided { shift, slices } in divided {
            let mut checksum = Some(places.at(whole.region, whole.position).get());
            for slice in slices {
                let place = places.at(slice.id, whole.position);
                let of_slice = self.checksum(checksums, slice.region, whole.block_id, place)?;
                checksum = checksum.zip(of_slice).map(|(before, of_slice)| {
                    // Of the bytes alone, whatever their place is.
                    let of_bytes = shift.join(place.get(), of_slice);
                    shift.join(before, of_bytes)
                });
                slice.ready.push(ReadyBlock {
                    region: slice.id,
                    checksum: of_slice,
                    ..whole
                });
            }
            of_whole = checksum;
        }
        Ok(of_whole)
    }

    /// The divisions of a region that are announced, with room for so many blocks.
    fn divided<'r>(&'r self, local: &'r LocalRegion, num_blocks: usize) -> Vec<Divided<'r>> {
        let slice = |id: &RegionId| {
            let region = self.agent.regions.get(id)?;
            Some(DividedSlice {
                id: *id,
                region,
                ready: Vec::with_capacity(num_blocks),
            })
        };
        let announced = local
            .divisions
            .iter()
            .filter_map(|Division { slices, shift }| {
                Some(Divided {
                    shift: shift.as_deref()?,
                    slices: slices.iter().map(slice).collect::<Option<_>>()?,
                })
            });
        announced.collect()
    }

    /// Announces the slices of blocks that were ready before they were divided.
    pub(super) fn announce_slices(
        &mut self,
        cx: &mut Cx<'_>,
        divided: Vec<(RegionId, Vec<RegionId>)>,
    ) {
        let mut ready = self
            .producer
            .ready_in(divided.iter().map(|(region, _)| *region));
        for (region, slices) in divided {
            let ranges = ready.remove(&region).unwrap_or_default();
            let handoffs: Vec<HandoffId> = ranges.iter().map(|range| range.handoff).collect();
            match ReadyBlocks::new(ranges) {
                Ok(ready) => self.ready.push(ready, slices),
                Err(error) => {
                    for handoff in handoffs {
                        self.end(cx, handoff, &error.to_string());
                    }
                }
            }
        }
    }

    pub(super) fn end(&mut self, cx: &mut Cx<'_>, handoff: HandoffId, reason: &str) {
        self.trace.instant(Track::Reactor, "ended", &handoff, &[]);
        self.ready.forget(&handoff);
        self.digests.forget(&handoff);
        let epoch = self.producer.epoch(&handoff);
        send_all(cx.links, self.producer.end_handoff(handoff, reason));
        revoke(cx, grant(epoch));
    }
}

/// A division of a region whose blocks are announced.
struct Divided<'r> {
    shift: &'r Shift,
    slices: Vec<DividedSlice<'r>>,
}

/// A slice of a region, and its blocks that are announced.
struct DividedSlice<'r> {
    id: RegionId,
    region: &'r LocalRegion,
    ready: Vec<ReadyBlock>,
}

/// Number of blocks of this size in one slice of work.
pub(super) fn slice_of(block_bytes: u64) -> usize {
    (SLICE / block_bytes.max(1)).max(1) as usize
}

pub(super) fn block_bytes<'m>(
    memory: &'m Memory,
    layout: &Layout,
    id: u32,
) -> Option<SharedBytes<'m>> {
    let at = layout.offset(id).ok()?;
    memory
        .buffer()
        .bytes(at as usize, layout.block_bytes as usize)
}
