//! Handoffs at their producer: ready blocks get their checksums in slices, if they have any, and are announced.

use kvpipe_ucx::MemoryKind;

use kvpipe_ucx::SharedBytes;

use super::producer::send_all;
use super::ready::{ReadyBlocks, ReadyRange};
use super::service::HandoffService;
use super::{Places, ReadyBlock, checksum_at};
use crate::blocks::regions::{Division, LocalRegion, grant, revoke};
use crate::checksum::Shift;
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

/// True if blocks in such memory are announced with checksums.
fn has_checksums(integrity: Integrity, memory: &Memory) -> bool {
    integrity.resolved(kind(memory)) == Integrity::Checksum
}

impl HandoffService {
    /// Announces the next slice of ready blocks, in their regions, to the sessions that have selected them.
    pub(super) fn announce_ready(&mut self, cx: &mut Cx<'_>) {
        let (known, integrity) = (&self.agent.regions, self.integrity);
        let num_blocks = |regions: &[RegionId]| {
            let known = regions.iter().filter_map(|region| known.get(region));
            let work = known.map(|region| {
                let is_hashed = has_checksums(integrity, &region.memory);
                let hashed = if is_hashed {
                    region.layout.block_bytes
                } else {
                    0
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
        match self.ready_blocks(&part, &regions) {
            // Marked before the blocks could change: unmarked now, they did not change while they were read.
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
                self.trace
                    .span(Track::Reactor, "announced", &part.handoff, began, &facts);
            }
            Err(reason) => self.end(cx, part.handoff, &reason),
        }
    }

    fn ready_blocks(
        &self,
        part: &ReadyRange,
        regions: &[RegionId],
    ) -> Result<Vec<ReadyBlock>, String> {
        let places = Places::new(&part.handoff, self.producer.epoch(&part.handoff));
        let mut blocks = Vec::with_capacity(part.block_ids.len() * regions.len());
        for id in regions {
            let Some(local) = self.agent.regions.get(id) else {
                return Err("blocks of a region that was closed cannot be leased".to_owned());
            };
            let has_checksums = has_checksums(self.integrity, &local.memory);
            let mut divided = self.divided(local, part.block_ids.len());
            for (&block_id, position) in part.block_ids.iter().zip(part.first..) {
                if local.layout.offset(block_id).is_err() {
                    return Err(format!(
                        "block {block_id} cannot be leased: it is not in region {:?}",
                        local.name
                    ));
                }
                let bytes = block_bytes(&local.memory, &local.layout, block_id);
                if has_checksums && bytes.is_none() {
                    return Err(format!(
                        "region {:?} is not in host memory, and has no checksums: set integrity to auto or validate",
                        local.name
                    ));
                }
                let mut whole = ReadyBlock {
                    region: *id,
                    position,
                    block_id,
                    checksum: None,
                };
                let bytes = bytes.filter(|_| has_checksums);
                whole.checksum = if divided.is_empty() {
                    bytes.map(|it| checksum_at(places.at(*id, position), it))
                } else {
                    slices_ready(places, whole, has_checksums, &mut divided)
                };
                blocks.push(whole);
            }
            // Region by region, as they are selected.
            let slices = divided.into_iter().flat_map(|it| it.slices);
            blocks.extend(slices.flat_map(|slice| slice.ready));
        }
        Ok(blocks)
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

/// Adds each slice of a block to those of its region, and returns the checksum of the whole one, which follows from
/// theirs.
fn slices_ready(
    places: Places,
    whole: ReadyBlock,
    has_checksums: bool,
    divided: &mut [Divided<'_>],
) -> Option<u64> {
    let mut of_whole = None;
    for Divided { shift, slices } in divided {
        let mut checksum = places.at(whole.region, whole.position).get();
        for slice in slices {
            let local = slice.region;
            let bytes = block_bytes(&local.memory, &local.layout, whole.block_id);
            let place = places.at(slice.id, whole.position);
            let bytes = bytes.filter(|_| has_checksums);
            let of_slice = bytes.map(|bytes| checksum_at(place, bytes));
            if let Some(of_slice) = of_slice {
                // Of the bytes alone, whatever their place is.
                let of_bytes = shift.join(place.get(), of_slice);
                checksum = shift.join(checksum, of_bytes);
            }
            slice.ready.push(ReadyBlock {
                region: slice.id,
                checksum: of_slice,
                ..whole
            });
        }
        of_whole = Some(checksum);
    }
    of_whole.filter(|_| has_checksums)
}

fn kind(memory: &Memory) -> MemoryKind {
    memory.buffer().kind()
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
