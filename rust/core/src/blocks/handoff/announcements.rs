//! Handoffs at their producer: ready blocks get their checksums in slices, if they have any, and are announced.

use kvpipe_ucx::MemoryKind;

use kvpipe_ucx::SharedBytes;

use super::producer::send_all;
use super::ready::{ReadyBlocks, ReadyRange};
use super::service::HandoffService;
use super::{ReadyBlock, checksum as checksum_of};
use crate::blocks::regions::{Division, grant, revoke};
use crate::ids::{Epoch, HandoffId, RegionId};
use crate::integrity::Integrity;
use crate::trace::Track;
use crate::transfer::Cx;
use crate::transfer::region::Layout;
use crate::transport::Memory;

/// Bytes of one slice of work on checksums: about a millisecond, which sockets and other handoffs wait at most.
const SLICE: u64 = 8 << 20;

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
            let hashed = known.filter(|region| has_checksums(integrity, &region.memory));
            slice_of(hashed.map(|region| region.layout.block_bytes).sum())
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
        let epoch = self.producer.epoch(&part.handoff);
        let mut blocks = Vec::with_capacity(part.block_ids.len() * regions.len());
        for id in regions {
            let Some(local) = self.agent.regions.get(id) else {
                return Err("blocks of a region that was closed cannot be leased".to_owned());
            };
            let has_checksums = has_checksums(self.integrity, &local.memory);
            let is_divided = local.divisions.iter().any(|it| it.shift.is_some());
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
                let place = (part.handoff, epoch, position);
                let bytes = bytes.filter(|_| has_checksums);
                let checksum = if is_divided {
                    self.slices_ready(place, (*id, block_id), has_checksums, &mut blocks)
                } else {
                    bytes.map(|it| checksum_of(&part.handoff, epoch, *id, position, it))
                };
                blocks.push(ReadyBlock {
                    region: *id,
                    position,
                    block_id,
                    checksum,
                });
            }
        }
        Ok(blocks)
    }

    /// Adds the slices of a block, and returns the checksum of the whole one, which follows from theirs.
    fn slices_ready(
        &self,
        (handoff, epoch, position): (HandoffId, Epoch, u32),
        (region, block_id): (RegionId, u32),
        has_checksums: bool,
        blocks: &mut Vec<ReadyBlock>,
    ) -> Option<u64> {
        let local = self.agent.regions.get(&region)?;
        let nothing = |region| checksum_of(&handoff, epoch, region, position, [][..].into());
        let mut of_whole = None;
        for Division { slices, shift } in &local.divisions {
            let Some(shift) = shift else {
                continue;
            };
            let mut whole = nothing(region);
            for &slice in slices {
                let it = self.agent.regions.get(&slice)?;
                let bytes = block_bytes(&it.memory, &it.layout, block_id).filter(|_| has_checksums);
                let checksum =
                    bytes.map(|bytes| checksum_of(&handoff, epoch, slice, position, bytes));
                if let Some(checksum) = checksum {
                    // Of the bytes alone, whatever their place is.
                    let of_bytes = shift.join(nothing(slice), checksum);
                    whole = shift.join(whole, of_bytes);
                }
                blocks.push(ReadyBlock {
                    region: slice,
                    position,
                    block_id,
                    checksum,
                });
            }
            of_whole = Some(whole);
        }
        of_whole.filter(|_| has_checksums)
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
