//! Handoffs at their producer: ready blocks get their checksums in slices, if they have any, and are announced.

use kvpipe_ucx::MemoryKind;

use kvpipe_ucx::SharedBytes;

use super::producer::send_all;
use super::ready::{ReadyBlocks, ReadyRange};
use super::service::HandoffService;
use super::{Places, ReadyBlock, checksum_at};
use crate::blocks::regions::{Division, LocalRegion, grant, revoke};
use crate::ids::{HandoffId, RegionId};
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
        let places = Places::new(&part.handoff, self.producer.epoch(&part.handoff));
        let mut blocks = Vec::with_capacity(part.block_ids.len() * regions.len());
        for id in regions {
            let Some(local) = self.agent.regions.get(id) else {
                return Err("blocks of a region that was closed cannot be leased".to_owned());
            };
            let has_checksums = has_checksums(self.integrity, &local.memory);
            let divisions = local.divisions.iter().filter(|it| it.shift.is_some());
            let num_slices: usize = divisions.map(|it| it.slices.len()).sum();
            let mut by_slice = vec![Vec::with_capacity(part.block_ids.len()); num_slices];
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
                whole.checksum = if num_slices > 0 {
                    self.slices_ready(places, local, whole, has_checksums, &mut by_slice)
                } else {
                    bytes.map(|it| checksum_at(places.at(*id, position), it))
                };
                blocks.push(whole);
            }
            // Region by region, as they are selected.
            blocks.extend(by_slice.into_iter().flatten());
        }
        Ok(blocks)
    }

    /// Adds each slice of a block to those of its region, and returns the checksum of the whole one, which follows from
    /// theirs.
    fn slices_ready(
        &self,
        places: Places,
        local: &LocalRegion,
        whole: ReadyBlock,
        has_checksums: bool,
        by_slice: &mut [Vec<ReadyBlock>],
    ) -> Option<u64> {
        let mut of_whole = None;
        let mut by_slice = by_slice.iter_mut();
        for Division { slices, shift } in &local.divisions {
            let Some(shift) = shift else {
                continue;
            };
            let mut checksum = places.at(whole.region, whole.position).get();
            for (&region, ready) in slices.iter().zip(&mut by_slice) {
                let it = self.agent.regions.get(&region)?;
                let bytes = block_bytes(&it.memory, &it.layout, whole.block_id);
                let place = places.at(region, whole.position);
                let bytes = bytes.filter(|_| has_checksums);
                let of_slice = bytes.map(|bytes| checksum_at(place, bytes));
                if let Some(of_slice) = of_slice {
                    // Of the bytes alone, whatever their place is.
                    let of_bytes = shift.join(place.get(), of_slice);
                    checksum = shift.join(checksum, of_bytes);
                }
                ready.push(ReadyBlock {
                    region,
                    checksum: of_slice,
                    ..whole
                });
            }
            of_whole = Some(checksum);
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
